"""Test mtp and dflash on a CUDA device: their drafts are those on the CPU, and they change no token.

.venv/bin/python -m pytest -q tests/gpu/test_mtp_dflash_gpu.py
"""

import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import mtp_dflash_checkpoints as checkpoints

from dovetail import LLM, SamplingParams
from dovetail.config.checkpoint import EMBEDDED
from dovetail.testing.drafter import text_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [list(range(3, 3 + n)) for n in (1, 7, 40, 90, 12)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
DRAFTERS = {
    "mtp": (1, {"kind": "mtp", "num_draft_tokens": 4}),
    "mtp, three layers": (3, {"kind": "mtp"}),
    "mtp, experts": (0, {"kind": "mtp", "num_draft_tokens": 4}),
    "mtp, latent attention": (0, {"kind": "mtp", "num_draft_tokens": 3}),
    "dflash": (1, {"kind": "dflash"}),
}


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(request, tmp_path_factory):
    """Return the embedded model with random drafters, or a model whose layer for further tokens has experts, and the drafter
    that is to be used."""
    layers, speculative = DRAFTERS[request.param]
    directory = tmp_path_factory.mktemp("models") / "tiny"
    if not layers:
        pytest.importorskip("transformers")
        save = checkpoints.save_deepseek if "latent" in request.param else checkpoints.save_glm
        save(directory)
        return str(directory), speculative
    leave = shutil.ignore_patterns("dflash", "eagle3", "draft_model")
    shutil.copytree(EMBEDDED["tiny"], directory, ignore=leave)
    checkpoints.add_mtp(directory, layers)
    checkpoints.save_dflash(directory / "dflash", hidden=256, head_dim=64, mask=9)
    return str(directory), speculative


def make(device, drafter, dtype="float32", **sections):
    scheduler = {"draft": "always", "chunk_size": 32} | sections.pop("scheduler", {})
    return LLM(
        drafter[0],
        model={"dtype": dtype},
        device=device,
        grammar="none",
        speculative=drafter[1],
        scheduler=scheduler,
        memory={"page_size": 16, "kv_gib": 0.25},
        **sections,
    )


def spied(llm):
    """Return the drafts of the drafter, by text."""
    drafts, propose = {}, llm.loop.executor.rank.drafter.propose

    def wrapped(batch):
        tree = propose(batch)
        for row in range(len(batch.slots)):
            if tree is not None and tree.lens[row]:
                drafts[tuple(text_of(batch, row))] = tree.token_ids[row, : tree.lens[row]].tolist()
        return tree

    llm.loop.executor.rank.drafter.propose = wrapped
    return drafts


@pytest.mark.parametrize("attention", ["triton", "torch_native"])
def test_drafts_are_those_of_the_cpu(drafter, attention):
    """Near ties are exceptions, which rounding decides."""
    here, there = make("cpu", drafter), make("cuda", drafter, attention=attention)
    expected, got = spied(here), spied(there)
    texts = [llm.generate(PROMPTS, GREEDY) for llm in (here, there)]
    assert [output.token_ids for output in texts[0]] == [output.token_ids for output in texts[1]]
    assert here.loop.drafter_errors == there.loop.drafter_errors == 0
    both = expected.keys() & got.keys()
    assert len(both) > 20
    same = sum(expected[text] == got[text] for text in both)
    assert same >= 0.95 * len(both)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_are_those_without_drafts(drafter, dtype, overlap):
    """In bfloat16, steps of several tokens round differently, and texts may differ; there, nothing may fail."""
    llm = make("cuda", drafter, dtype, scheduler={"overlap": overlap})
    for _ in range(2):  # the second time from the prefix cache, and from graphs
        drafted = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        plain = [output.token_ids for output in make("cuda", (drafter[0], "none"), dtype).generate(PROMPTS, GREEDY)]
        assert [len(ids) for ids in drafted] == [len(ids) for ids in plain]
        assert dtype == "bfloat16" or drafted == plain
    assert llm.loop.drafter_errors == 0
    assert llm.loop.stats().drafted_tokens > 0
