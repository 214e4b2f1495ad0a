"""Test that drafters draft behind a cached prefix what they would draft had they read it.

.venv/bin/python -m pytest -q tests/e2e/test_draft_prefixes.py
"""

import drafter_checkpoints
import engine_models
import mtp_dflash_checkpoints
import numpy as np
import pytest
from engine_runs import VOCAB, check_idle, make_llm, paged

from dovetail import SamplingParams
from dovetail.testing.drafter import text_of

STEM = 32
DRAFTERS = {
    "draft_model": {"kind": "draft_model"},
    "eagle, chains": {"kind": "eagle", "topk": 1, "depth": 3},
    "eagle": {"kind": "eagle", "topk": 2, "depth": 3, "num_draft_tokens": 5},
    "eagle3": {"kind": "eagle3"},
    "mtp": {"kind": "mtp", "num_draft_tokens": 4},
    "mtp, three layers": {"kind": "mtp"},
    "dflash": {"kind": "dflash"},
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Return, by drafter, a model that has one of random weights."""
    work = tmp_path_factory.mktemp("targets")
    heads = drafter_checkpoints.save_target(work / "heads")
    drafter_checkpoints.save_eagle(heads / "eagle")
    drafter_checkpoints.save_eagle3(heads / "eagle3")
    drafter_checkpoints.save_target(heads / "draft_model", num_hidden_layers=6)
    found = dict.fromkeys(DRAFTERS, heads)
    for name, layers in (("mtp", 1), ("mtp, three layers", 3), ("dflash", 1)):
        found[name] = engine_models.save_llama(work / name, head_dim=16)
        mtp_dflash_checkpoints.add_mtp(work / name, layers)
        mtp_dflash_checkpoints.save_dflash(work / name / "dflash", hidden=64, head_dim=16, mask=VOCAB - 1)
        found[name] = work / name
    return found


def prompts():
    """Return prompts that differ behind the stem, and one, two and three tokens later."""
    rng = np.random.default_rng(5)
    stem = rng.integers(0, VOCAB, STEM + 3).tolist()
    return [[*stem[: STEM + shared], 7 + shared, *rng.integers(0, VOCAB, 4).tolist()] for shared in (3, 2, 1, 0, 3)]


def drafted(llm):
    """Return all drafts, by the text behind which they were made."""
    found, propose = {}, llm.loop.executor.rank.drafter.propose

    def noted(batch):
        tree = propose(batch)
        if tree is None:
            return None
        for row, (ids, parents, count) in enumerate(zip(tree.token_ids, tree.parents, tree.lens, strict=True)):
            nodes = list(zip(ids[:count].tolist(), parents[:count].tolist(), strict=True))
            found[tuple(text_of(batch, row))] = nodes
        return tree

    llm.loop.executor.rank.drafter.propose = noted
    for prompt in prompts():
        llm.generate([prompt], SamplingParams(max_new_tokens=9, temperature=0, ignore_eos=True))
    assert llm.loop.drafter_errors == 0
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("page_size", [1, 16, STEM])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_behind_a_cached_prefix_are_those_behind_one_that_was_read(targets, name, page_size):
    made = []
    for cache in ("radix", "none"):
        parts = {"speculative": DRAFTERS[name], "cache": cache, "scheduler": {"draft": "always"}}
        llm = make_llm(targets[name], **paged(page_size, **parts))
        made.append(drafted(llm))
        assert (llm.loop.stats().cached_tokens > 0) == (cache == "radix")
        check_idle(llm)
        llm.close()
    assert made[0] == made[1]
