"""Test a KV pool of 8 bits in the engine against a pool in float32 whose numbers are rounded as they are stored.

pytest tests/e2e/test_engine_fp8.py
"""

import importlib.util
from pathlib import Path

import pytest
import torch

import dovetail_attention.torch_native as torch_native
from dovetail import SamplingParams
from dovetail.memory.pool import PagedKVPool, pool_dtype
from dovetail.ops.kv_dtypes import narrowed

_spec = importlib.util.spec_from_file_location("engine_runs", Path(__file__).parent / "engine_runs.py")
runs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(runs)

KV_DTYPES = ["fp8_e4m3", "fp8_e5m2"]
PARAMS = SamplingParams(max_new_tokens=40, temperature=0, logprobs=2, ignore_eos=True)
PROMPTS = [*runs.prompts_of([5, 90, 33], shared=40), *runs.prompts_of([1, 17, 64, 2], seed=1)]


def make_llm(kv_dtype, **sections):
    return runs.make_llm(
        "tiny", memory={"kv_dtype": kv_dtype}, scheduler={"chunk_size": 48, "draft": "always"}, **sections
    )


@pytest.fixture
def rounding(monkeypatch):
    """Let pools in float32 hold what a pool of that dtype would hold. The kernels of torch_native for pools in the
    model's dtype add in another order, so they are switched off: then the two engines compute the same to the last
    bit."""
    monkeypatch.setattr(torch_native, "kernels", lambda dtype: None)
    store = PagedKVPool.store

    def use(dtype):
        def rounded(self, layer_id, k, v, out_loc):
            if self.dtype is torch.float32:
                k, v = (narrowed(x, dtype).float() for x in (k, v))
            store(self, layer_id, k, v, out_loc)

        monkeypatch.setattr(PagedKVPool, "store", rounded)

    return use


def said(outputs):
    return [(output.token_ids, [entry.logprob for entry in output.logprobs]) for output in outputs]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "trees of drafts"])
def test_it_is_the_rounding_and_nothing_else(rounding, kv_dtype, drafts):
    """The requests have chunks, cached prefixes, and locations that move when drafts are accepted."""
    exact = said(make_llm("float32").generate(PROMPTS, PARAMS))
    rounding(pool_dtype(kv_dtype))
    answers = []
    for dtype in (kv_dtype, "float32"):
        llm = make_llm(dtype, **({"speculative": "ngram"} if drafts else {}))
        assert llm.loop.executor.rank.engine.pool.keys(0).dtype is pool_dtype(dtype)
        first = llm.generate(PROMPTS, PARAMS)
        drafter = runs.TreeDrafter(right=0.8, vocab=llm.loop.executor.rank.engine.info.vocab_size) if drafts else None
        if drafter is not None:
            drafter.learn(first)
        with runs.drafting(llm, drafter):
            second = llm.generate(PROMPTS, PARAMS)
        answers.append(said(first) + said(second))
        runs.check_idle(llm)
    assert [tokens for tokens, _ in answers[0]] == [tokens for tokens, _ in answers[1]]
    for (_, ours), (_, theirs) in zip(*answers, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert answers[0][: len(exact)] != exact, "rounding must have made a difference"


def test_the_same_memory_holds_more_tokens():
    sections = {"grammar": "none", "device": "cpu"}
    pages = {}
    for kv_dtype in ("float32", "bfloat16", "fp8_e4m3"):
        memory = {"kv_dtype": kv_dtype, "kv_gib": 2**-10}
        llm = runs.LLM("tiny", memory=memory, **sections)
        pages[kv_dtype] = llm.loop.executor.rank.engine.num_pages
        assert llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))[0].token_ids
    assert pages["fp8_e4m3"] == pytest.approx(2 * pages["bfloat16"], abs=1)
    assert pages["fp8_e4m3"] == pytest.approx(4 * pages["float32"], abs=3)
