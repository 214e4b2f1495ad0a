"""Test triton attention on CUDA: the conformance suite in every dtype, graphs included.

Run on a GPU machine: python -m pytest tests/gpu/test_attention_triton_gpu.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.testing.attention import AttentionSuite
from dovetail.testing.attention_cases import GRAPH_ROWS, SHARED_STEPS, STEPS
from dovetail.testing.attention_reference import AttentionCase, AttentionStep
from dovetail_attention.triton import backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LATENT: Any = {"head_dim": 576, "value_dim": 512, "kv_heads": 1}


class TestTritonOnCuda(AttentionSuite):
    name = "triton"
    device = "cuda"

    @pytest.mark.parametrize("few", [False, True], ids=["many", "few"])
    @pytest.mark.parametrize("variant", [backend.EVEN, backend.UNEVEN], ids=["even", "uneven"])
    @pytest.mark.parametrize("window", [None, 20], ids=["whole", "window"])
    @pytest.mark.parametrize("step", ["decode", "many rows", *SHARED_STEPS])
    @torch.inference_mode()
    def test_either_variant_serves_any_decode_step(
        self, monkeypatch: pytest.MonkeyPatch, step: str, window: int | None, variant: int, few: bool
    ):
        monkeypatch.setattr(backend.TritonAttention, "_few", lambda *_: few)
        case = replace(SHARED_STEPS.get(step) or STEPS[step][0], window=window, sinks=window is not None)
        made = AttentionStep(case, torch.device(self.device))
        built = self.make(made.context())
        made.batch.variant = variant
        built.plan(made.batch)
        self.compare_output(made, built.forward(made.q, made.layer, made.batch))

    @pytest.mark.parametrize("head_dim", [24, 80, 192, 256])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("step", ["mixed", "decode", "extend after a prefix", "trees"])
    def test_more_head_dims(self, head_dim: int, dtype: torch.dtype, step: str):
        self.compare(replace(STEPS[step][0], head_dim=head_dim, dtype=dtype, page_size=16))

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_trees_of_several_tiles(self, dtype: torch.dtype, window: int | None, head_dim: int):
        trees = [[node // 3 - 1 for node in range(63)], [(node * 7) % (node + 1) - 1 for node in range(39)], []]
        case = AttentionCase([300, 0, 40], [64, 40, 1], trees=trees, heads=8, head_dim=head_dim, page_size=16)
        self.compare(replace(case, dtype=dtype, window=window))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("groups", [None, [(100, 512), (12, 1024), (1, 0), (2, 16)]], ids=["alone", "shared"])
    def test_many_rows(self, dtype: torch.dtype, groups: list[tuple[int, int]] | None):
        prefix = [512 + 11 * row % 300 for row in range(100)] + [1024 + row for row in range(12)] + [2, 16, 17, 1900]
        case = AttentionCase(prefix, [1] * len(prefix), page_size=16, groups=groups, dtype=dtype, heads=8, head_dim=128)
        self.compare(case)

    @pytest.mark.parametrize("step", [*STEPS, *SHARED_STEPS])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=str)
    def test_latent_attention(self, step: str, dtype: torch.dtype, kv_dtype: torch.dtype | None):
        """The values are the first 512 of the keys' 576 elements, with one key head for all query heads."""
        case = SHARED_STEPS[step] if step in SHARED_STEPS else STEPS[step][0]
        self.compare(replace(case, **LATENT, heads=128, page_size=16, dtype=dtype, kv_dtype=kv_dtype))

    @pytest.mark.parametrize("prefix", [[1900, 3, 700, 0, 64, 1100, 255, 30], [5000], [33] * 200])
    @pytest.mark.parametrize("heads", [16, 128])
    def test_latent_attention_of_many_lengths(self, prefix: list[int], heads: int):
        case = AttentionCase(prefix, [1] * len(prefix), **LATENT, heads=heads, page_size=16, dtype=torch.bfloat16)
        self.compare(case)

    @pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
    def test_graphs_of_latent_attention(self, shared: bool):
        case = AttentionCase(
            [300] * GRAPH_ROWS, [1] * GRAPH_ROWS, **LATENT, heads=16, page_size=16, dtype=torch.bfloat16
        )
        self.replay(case, shared)

    @pytest.mark.parametrize("step", [*STEPS, *SHARED_STEPS])
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode")
    @torch.inference_mode()
    def test_nothing_waits_for_the_device(self, step: str):
        case = SHARED_STEPS[step] if step in SHARED_STEPS else STEPS[step][0]
        prepared = AttentionStep(replace(case, window=50), torch.device("cuda"))
        backend = self.make(prepared.context())
        for mode in ("default", "error"):  # kernels are compiled in the first turn
            torch.cuda.set_sync_debug_mode(mode)
            try:
                backend.plan(prepared.batch)
                out = backend.forward(prepared.q, prepared.layer, prepared.batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        self.compare_output(prepared, out)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("attention", ["triton", "torch_native"])
@pytest.mark.parametrize("graphs", ["auto", False])
def test_tokens_over_fp8_pools_are_the_best_as_the_cpu_sees_it(kv_dtype: str, attention: str, graphs: object):
    """The order of additions moves some keys to another rounded value. The tokens are therefore not equal, but nearly
    as likely as the best.

    A pool that is not rounded differs more: by 1 at worst, and in 8 of 100 tokens.
    """
    prompts = [list(range(5, 5 + n)) for n in (3, 17, 40, 9, 64, 150)]
    memory = {"kv_dtype": kv_dtype, "num_pages": 300}
    config: dict[str, Any] = {"model": {"dtype": "float32"}, "memory": memory, "grammar": "none"}
    llm = LLM("tiny", device="cuda", attention=attention, graphs={"decode": graphs}, **config)
    params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    texts = [prompt + output.token_ids for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True)]
    judge = LLM("tiny", device="cpu", **config)
    params = SamplingParams(temperature=0, max_new_tokens=1, prompt_logprobs=1)
    behind = []
    for prompt, judged in zip(prompts, judge.generate(texts, params), strict=True):
        behind += [entry.top[0][1] - entry.logprob for entry in judged.prompt_logprobs[len(prompt) :]]
    assert len(behind) == 24 * len(prompts)
    assert max(behind) < 0.3
    assert sum(gap == 0 for gap in behind) > 0.96 * len(behind)
