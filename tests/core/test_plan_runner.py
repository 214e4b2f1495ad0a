"""Test that the engine of a rank runs the plan with which it was called last.

.venv/bin/python -m pytest -q tests/core/test_plan_runner.py
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from dovetail.engine.device import EngineStream
from dovetail.engine.plans import PlanRunner
from dovetail.types import Committed, PageUpdates

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


def test_captures_of_ranks_are_compared_after_everything_that_may_capture_passes_of_a_drafter():
    """Otherwise the passes of the next call would add up tensors of different numbers of rows."""
    calls = []
    engine = SimpleNamespace(
        page_table=np.zeros((1, 6, 30), np.int32),
        device=torch.device("cpu"),
        drafter=SimpleNamespace(
            propose=lambda batch: calls.append("propose"), observe=lambda *given: calls.append("observe")
        ),
        adapters=None,
        inputs=SimpleNamespace(states=None),
        launch=lambda batch: calls.append("launch"),
        sample=lambda *given: calls.append("sample"),
        wait=lambda *given: calls.append("wait"),
        check_captures=lambda: calls.append("compare"),
    )
    scheduler, _ = build(draft_width=3)
    Run(scheduler, None).add("a", [1, 2, 3], max_new_tokens=4)
    runner, plan = PlanRunner(engine), scheduler.schedule()
    runner.propose(plan)
    runner.launch(plan)
    runner.sample(plan, None)
    runner.wait(plan)
    runner.observe(plan, Committed(np.array([4], np.int32), np.array([False])))
    assert calls == ["propose", "compare", "launch", "sample", "wait", "observe", "compare"]


def test_everything_that_reaches_the_device_runs_on_the_stream_of_the_engine(monkeypatch):
    """On the stream that is current otherwise, the default one, the device does not wait for the engine's stream."""
    current, seen, device = ["default"], {}, [0]

    def set_stream(stream):
        current[-1], device[0] = stream, 1  # as torch does: the device of the stream becomes the current one

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: device.__setitem__(0, index))
    stream = EngineStream(torch.device("cuda", 1))

    def see(name):
        return lambda *given: seen.__setitem__(name, current[-1])

    drafter = SimpleNamespace(**{name: see(name) for name in ("propose", "observe", "forget")})
    engine = SimpleNamespace(
        page_table=np.zeros((1, 6, 30), np.int32),
        device=torch.device("cpu"),
        drafter=drafter,
        adapters=None,
        inputs=SimpleNamespace(states=SimpleNamespace(admit=see("admit"), copy=see("copy"))),
        check_captures=lambda: None,
        mesh=SimpleNamespace(tp=SimpleNamespace(rank=0)),
        expert_load=SimpleNamespace(read=lambda: see("call")() or {}),
        **{name: see(name) for name in ("launch", "sample", "idle")},
    )
    engine.wait = lambda *given: None
    scheduler, _ = build(draft_width=3)
    Run(scheduler, None).add("a", [1, 2, 3], max_new_tokens=4)
    runner, plan = PlanRunner(engine, stream), replace(scheduler.schedule(), state_copies=object())
    runner.propose(plan)
    runner.launch(plan)
    runner.sample(plan, None)
    runner.wait(plan)
    runner.observe(plan, Committed(np.array([4], np.int32), np.array([False])))
    runner.forget([object()])
    runner.idle()
    runner.call("expert_load", None)
    with stream, stream:
        pass
    assert current == ["default"], "the stream of the caller is current again"
    assert device == [0], "the device of the caller is current again"
    own = {id(one) for one in seen.values()}
    assert set(seen) == {"admit", "propose", "copy", "launch", "sample", "observe", "forget", "idle", "call"}
    assert len(own) == 1
    assert "default" not in seen.values()
