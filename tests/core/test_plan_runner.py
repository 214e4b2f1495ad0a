"""Test that the engine of a rank runs the plan with which it was called last.

.venv/bin/python -m pytest -q tests/core/test_plan_runner.py
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from dovetail.engine.plans import PlanRunner
from dovetail.types import PageUpdates

sys.path.insert(0, str(Path(__file__).parent))
from pretended import Run, build


def test_a_launch_brings_the_page_updates_of_its_own_plan_also_after_drafts_were_proposed():
    """The executor adds the updates of a step that failed to the plan when it is launched."""
    launched = []
    engine = SimpleNamespace(
        page_table=np.zeros((1, 6, 30), np.int32),
        device=torch.device("cpu"),
        drafter=SimpleNamespace(propose=lambda batch: None),
        adapters=None,
        inputs=SimpleNamespace(states=None),
        launch=launched.append,
        check_captures=lambda: None,
    )
    scheduler, _ = build(draft_width=3)
    Run(scheduler, None).add("a", [1, 2, 3], max_new_tokens=4)
    runner, plan = PlanRunner(engine), scheduler.schedule()
    assert runner.propose(plan) is None
    repeated = PageUpdates(*(np.concatenate([part, part], axis=-1) for part in plan.page_updates[:3]))
    runner.launch(replace(plan, page_updates=repeated))
    assert launched[0].page_updates is repeated
