"""Test drafters' passes in CUDA graphs: each run is done twice from the same state, launched kernel by kernel and
replayed.

    .venv/bin/python -m pytest -q tests/gpu/test_draft_graphs_gpu.py

In float32 both must draft the same. In bfloat16 a graph holds more rows than there are, so keys are split differently
and sums round differently: most drafts must be the same. A failure names the steps, the rows and the drafts of both
runs.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import drafter_checkpoints as checkpoints
import mtp_dflash_checkpoints

from dovetail import LLM, SamplingParams
from dovetail.config.checkpoint import EMBEDDED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [list(range(3, 3 + n)) for n in (1, 7, 40, 90, 12, 33)]
SHAPE = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
CHAINS = {
    "draft_model": {"kind": "draft_model", "chunk_size": 64},
    "eagle3": {"kind": "eagle3", "num_draft_tokens": 5},
    "mtp": {"kind": "mtp", "num_draft_tokens": 4},
}
WIDE = {
    "eagle": {"kind": "eagle", "topk": 3, "depth": 4, "num_draft_tokens": 8},
    "eagle3_tree": {"kind": "eagle3_tree", "topk": 4, "depth": 5, "num_draft_tokens": 16},
    "dflash": {"kind": "dflash"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Save the embedded model with a random drafter of each kind."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(EMBEDDED["tiny"], directory, ignore=shutil.ignore_patterns("dflash", "eagle3"))
    mtp_dflash_checkpoints.add_mtp(directory, 1)
    mtp_dflash_checkpoints.save_dflash(directory / "dflash", hidden=256, head_dim=64, mask=9)
    checkpoints.save_eagle(directory / "eagle", **SHAPE)
    checkpoints.save_eagle3(directory / "eagle3", **SHAPE, **LAYERS, draft_vocab_size=512)
    return directory


def available(attention):
    if attention == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        pytest.skip("needs flashinfer-python")
    if attention == "flash_attn":
        from dovetail_attention.flash_attn.providers import open_first

        opened, reasons = open_first(torch.cuda.get_device_capability(), page_size=16)
        if opened is None:
            pytest.skip(f"no FlashAttention here: {'; '.join(reasons)}")


def make(model, speculative, attention, dtype, **sections):
    return LLM(
        str(model),
        device="cuda",
        model={"dtype": dtype},
        attention=attention,
        grammar="none",
        speculative=speculative,
        scheduler={"draft": "always", "chunk_size": 64} | sections.pop("scheduler", {}),
        memory={"page_size": 16, "kv_gib": 0.25},
        **sections,
    )


def cache_of(llm):
    drafter = llm.loop.executor.rank.drafter
    return getattr(drafter, "cache", None) or drafter._cache


class Twice:
    """Do every run of a draft cache without graphs, then with them, and keep the results of both where there were
    graphs."""

    def __init__(self, llm):
        self.cache = cache_of(llm)
        self.found = []  # name of the steps, row, launched, replayed
        self.floats = []  # largest difference of outputs, and their size
        self.uncaptured = 0
        self.run, self.cache.run = self.cache.run, self.both

    def both(self, steps, slots, passes, state):
        graphs, self.cache.graphs = self.cache.graphs, None
        launched = self.run(steps, slots, passes, tuple(tensor.clone() for tensor in state))
        self.cache.graphs = graphs
        replayed = graphs.run(steps, slots, passes, state)
        if replayed is None:
            self.uncaptured += 1
            return launched
        self.compare(steps, slots, passes, launched, replayed)
        return replayed

    def compare(self, steps, slots, passes, launched, replayed):
        name = type(steps).__name__
        if name == "TextSteps":
            if launched[2].numel():
                size = float(launched[2].float().abs().max())
                self.floats.append((float((launched[2].float() - replayed[2].float()).abs().max()), size))
            return
        for row in range(len(slots)):
            count = 1 + sum(int(one.counts[row] > 0) for one in passes)
            both = [self.drafted(name, state, row, count, passes) for state in (launched, replayed)]
            self.found.append((name, row, *both))

    def drafted(self, name, state, row, count, passes):
        if name == "ChainSteps":
            return state[2][row, :count].tolist()
        if name == "BlockSteps":
            return state[1][row, 1 : int(passes[0].counts[row])].tolist()
        assert name == "TreeSteps", name
        there = state[5][row].isfinite()
        best = state[5][row].masked_fill(~there, -1e9).topk(min(8, int(there.sum()))).indices.sort().values
        return list(zip(state[4][row][best].tolist(), state[6][row][best].tolist(), strict=True))

    def check(self, share):
        different = [one for one in self.found if one[2] != one[3]]
        shown = "\n".join(f"{name}, row {row}: launched {a}, replayed {b}" for name, row, a, b in different[:8])
        assert len(self.found) > 20, f"{len(self.found)} rows replayed, {self.uncaptured} runs without a graph"
        assert len(different) <= (1 - share) * len(self.found), (
            f"{len(different)} of {len(self.found)} rows differ:\n{shown}"
        )
        for difference, size in self.floats:
            assert difference <= (1e-3 if share > 0.99 else 0.1) * (1 + size), (
                f"outputs differ by {difference} of {size}"
            )


def generate(llm):
    params = [SamplingParams(temperature=0, max_new_tokens=12 + 6 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    outputs = [output.token_ids for output in llm.generate(PROMPTS, params)]
    assert llm.loop.drafter_errors == 0, "the log has the traceback"
    llm.loop.scheduler.check_integrity()
    return outputs


@pytest.mark.parametrize("attention", ["triton", "flash_attn", "flashinfer"])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_replayed_are_those_launched(model, name, attention):
    available(attention)
    dtype = "float32" if attention == "triton" else "bfloat16"
    llm = make(model, CHAINS[name], attention, dtype, graphs={"capture": "start"})
    twice = Twice(llm)
    generate(llm)
    assert twice.uncaptured == 0 or attention == "flashinfer", "flashinfer has no graphs of rows with several tokens"
    twice.check(0.995 if dtype == "float32" else 0.8)


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees_and_blocks_replayed_are_those_launched(model, name, dtype):
    llm = make(model, WIDE[name], "triton", dtype, graphs={"capture": "start"})
    twice = Twice(llm)
    generate(llm)
    assert twice.uncaptured == 0
    twice.check(0.995 if dtype == "float32" else 0.8)


@pytest.mark.parametrize("attention", ["flashinfer", "torch_native"])
def test_trees_where_they_cannot_be_captured(model, attention):
    available(attention)
    llm = make(model, WIDE["eagle"], attention, "bfloat16")
    generate(llm)
    graphs = cache_of(llm).graphs
    assert graphs is None or graphs.num_captured == 0


@pytest.mark.parametrize("capture", ["idle", "start"])
@pytest.mark.parametrize("name", [*CHAINS, *WIDE])
def test_texts_are_those_without_graphs_and_drafts(model, name, capture):
    """Sizes are captured as they are needed, or before."""
    speculative = (CHAINS | WIDE)[name]
    expected = generate(make(model, "none", "triton", "float32", graphs={"decode": False}))
    llm = make(model, speculative, "triton", "float32", graphs={"capture": capture, "max_rows": 64})
    for _ in range(4):
        assert generate(llm) == expected
    graphs = cache_of(llm).graphs
    assert graphs.num_captured > 2
    assert not graphs.refused


@pytest.mark.parametrize("name", ["eagle3", "eagle3_tree", "draft_model", "dflash"])
def test_replays_write_to_no_page_but_their_rows_own(model, name):
    """Pages that no request has had keep their contents, including NaN, which reaches no draft."""
    llm = make(model, (CHAINS | WIDE)[name], "triton", "float32", graphs={"capture": "start"}, cache="none")
    expected = generate(make(model, "none", "triton", "float32", graphs={"decode": False}))
    pool = cache_of(llm)._pool
    with llm.loop.executor.rank.context:
        for memory in (pool.k, pool.v):
            memory[:, 1:] = torch.nan
    assert generate(llm) == expected
    assert pool.k[:, 0].isfinite().all()
    touched = ~pool.k[:, 1:].isnan().flatten(2).all(2).all(0)
    width = llm.loop.executor.rank.drafter.max_draft_tokens
    most = 2 * sum(-(-(len(prompt) + 12 + 6 * i + width) // 16) for i, prompt in enumerate(PROMPTS))
    assert 0 < int(touched.sum()) <= most
