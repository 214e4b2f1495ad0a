"""Test drafters that run a model on a CUDA device: they draft what they draft on the CPU, and change no token.

.venv/bin/python -m pytest -q tests/gpu/test_drafters_gpu.py
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import drafter_checkpoints as checkpoints

from dovetail import LLM, SamplingParams
from dovetail.testing.drafter import text_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [list(range(3, 3 + n)) for n in (1, 7, 40, 90, 12)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
SHAPE = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    """Save random heads for the embedded model, and that model itself."""
    work = tmp_path_factory.mktemp("heads")
    eagle = str(checkpoints.save_eagle(work / "eagle", **SHAPE))
    eagle3 = str(checkpoints.save_eagle3(work / "eagle3", **SHAPE, **LAYERS, draft_vocab_size=512))
    return {
        "draft_model": {"kind": "draft_model", "path": "tiny"},
        "eagle": {"kind": "eagle", "path": eagle, "topk": 3, "depth": 4, "num_draft_tokens": 8},
        "eagle3": {"kind": "eagle3", "path": eagle3},
        "eagle3_tree": {"kind": "eagle3_tree", "path": eagle3, "topk": 2, "depth": 3, "num_draft_tokens": 5},
    }


NAMES = ("draft_model", "eagle", "eagle3", "eagle3_tree")


def make(device, speculative, dtype="float32", **sections):
    scheduler = {"draft": "always", "chunk_size": 64} | sections.pop("scheduler", {})
    memory = {"page_size": 16, "kv_gib": 0.25}
    model = {"path": "tiny", "dtype": dtype}
    return LLM(
        device=device,
        model=model,
        grammar="none",
        speculative=speculative,
        scheduler=scheduler,
        memory=memory,
        **sections,
    )


def drafts_of(llm):
    """Return texts, and the trees drafted for them."""
    seen = {}
    drafter = llm.loop.executor.rank.drafter
    propose = drafter.propose

    def recorded(batch):
        tree = propose(batch)
        for row in range(batch.num_extend, len(batch.slots)):
            count = 0 if tree is None else int(tree.lens[row])
            nodes = [] if tree is None else [tree.token_ids[row, :count].tolist(), tree.parents[row, :count].tolist()]
            seen[tuple(text_of(batch, row))] = nodes
        return tree

    drafter.propose = recorded
    outputs = [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]
    assert llm.loop.drafter_errors == 0
    llm.loop.scheduler.check_integrity()
    return outputs, seen


@pytest.mark.parametrize("graphs", ["none", "start"])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_the_cpu(drafters, name, graphs):
    expected, theirs = drafts_of(make("cpu", drafters[name]))
    section = {"decode": False} if graphs == "none" else {"capture": "start"}
    outputs, ours = drafts_of(make("cuda", drafters[name], graphs=section))
    assert outputs == expected
    both = ours.keys() & theirs.keys()
    assert len(both) > 20
    assert sum(ours[text] == theirs[text] for text in both) > 0.9 * len(both)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_requests_of_every_length_at_once(drafters, name, overlap):
    """bfloat16, with more rows than a kernel's tile, in two turns, the second one from the prefix cache."""
    llm = make("cuda", drafters[name], "bfloat16", scheduler={"overlap": overlap})
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_new_tokens=5 + i) for i in range(60)]
    for _ in range(2):
        llm.generate(PROMPTS * 12, params)
    stats = llm.loop.stats()
    assert llm.loop.drafter_errors == 0
    assert stats.drafted_tokens > 1000
    assert (stats.pages_used, stats.running) == (0, 0)
    if name == "draft_model":
        assert stats.accepted_tokens > 0.5 * stats.drafted_tokens, "half of the requests are greedy"
