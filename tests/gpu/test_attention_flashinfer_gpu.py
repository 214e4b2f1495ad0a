"""Test flashinfer on CUDA with the kernels that flashinfer-jit-cache has built: bfloat16 and head_dim 128, without
window or soft cap. Other kernels are compiled when first used, which takes minutes: set FLASHINFER_COMPILE=1 to test
them, too.

Run on a GPU machine: python -m pytest tests/gpu/test_attention_flashinfer_gpu.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.config.checkpoint import EMBEDDED
from dovetail.testing.attention import AttentionSuite
from dovetail.testing.attention_cases import STEPS
from dovetail.testing.attention_graphs import CapturedDecodeForward
from dovetail.testing.attention_reference import AttentionCase, AttentionStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer-python"),
]
COMPILE = bool(os.environ.get("FLASHINFER_COMPILE"))


def has_built(dtypes: str) -> bool:
    """Return whether kernels for these dtypes, head_dim 128 and no window or soft cap need not be compiled."""
    from flashinfer.jit.env import FLASHINFER_AOT_DIR

    kinds = ("batch_prefill", "batch_decode")
    shape = "head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False*"
    return all(any(FLASHINFER_AOT_DIR.glob(f"{kind}_with_kv_cache_{dtypes}*{shape}")) for kind in kinds)


@pytest.mark.skipif(not COMPILE, reason="kernels over latents are compiled for minutes: set FLASHINFER_COMPILE=1")
class TestFlashInferLatents(AttentionSuite):
    name = "flashinfer_mla"
    device = "cuda"
    dtypes = (torch.bfloat16,)


class TestFlashInfer(AttentionSuite):
    name = "flashinfer"
    not_invariant = ("kv_dtype",)
    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16) if COMPILE else (torch.bfloat16,)

    def fit(self, case: AttentionCase) -> AttentionCase:
        if COMPILE:
            return super().fit(case)
        if case.window is not None or case.soft_cap is not None:
            pytest.skip("kernels for windows and soft caps are compiled for minutes: set FLASHINFER_COMPILE=1")
        if case.kv_dtype is not None and not has_built("dtype_q_bf16_dtype_kv_e4m3"):
            pytest.skip("kernels for fp8 pools are compiled for minutes: set FLASHINFER_COMPILE=1")
        return replace(super().fit(case), head_dim=128)

    def test_layers_of_one_step_may_differ(self):
        if not COMPILE:
            pytest.skip("kernels for windows are compiled for minutes: set FLASHINFER_COMPILE=1")
        super().test_layers_of_one_step_may_differ()

    @pytest.mark.parametrize("batch_invariant", [False, True])
    @pytest.mark.parametrize("step", [name for name in STEPS if "tree" not in name])
    @torch.inference_mode()
    def test_nothing_waits_for_the_device(self, step, batch_invariant):
        case = replace(self.fit(STEPS[step][0]), batch_invariant=batch_invariant)
        prepared = AttentionStep(case, torch.device("cuda"))
        backend = self.make(prepared.context())
        for mode in ("default", "error"):  # the first time loads kernels
            torch.cuda.set_sync_debug_mode(mode)
            try:
                backend.plan(prepared.batch)
                out = backend.forward(prepared.q, prepared.layer, prepared.batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        self.compare_output(prepared, out)

    @pytest.mark.parametrize("batch_invariant", [False, True])
    @pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (4, 2), (8, 1)])
    @pytest.mark.parametrize("page_size", [1, 16])
    @torch.inference_mode()
    def test_one_graph_for_all_lengths(self, heads, kv_heads, page_size, batch_invariant):
        """The rows include some whose keys are divided among several blocks, as they are not at the capture.
        Batch-invariant attention divides none, and has the bits of a step without a graph."""
        shape = {"heads": heads, "kv_heads": kv_heads, "page_size": page_size, "batch_invariant": batch_invariant}
        longest = AttentionStep(
            self.fit(AttentionCase([1500, 900, 20, 0], [1] * 4, padding=1, **shape)), torch.device("cuda")
        )
        backend = self.make(longest.context())
        backend.plan_capture(longest.batch)
        q, table = torch.empty_like(longest.q), longest.batch.page_table
        source = table.clone()
        backend.forward(q, longest.layer, longest.batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            table.copy_(source)
            out = backend.forward(q, longest.layer, longest.batch)
        for prefix in ([1500, 900, 20, 0], [0, 899, 3, 0], [1499, 0, 19, 0], [3, 4, 5, 0]):
            step = AttentionStep(replace(longest.case, prefix=prefix), longest.device)
            step.pool, step.table, step.num_pages = longest.pool, longest.table, longest.num_pages
            step.batch.page_table = table.fill_(0)
            torch.cuda.set_sync_debug_mode("error")
            try:
                backend.plan_replay(step.batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            q.copy_(step.q)
            out.zero_()
            graph.replay()
            self.compare_output(step, out)
            if batch_invariant:
                backend.plan(step.batch)
                eager = backend.forward(q, step.layer, step.batch)
                assert torch.equal(out[:3], eager[:3])

    @torch.inference_mode()
    def test_an_invariant_graph_holds_the_plan_of_many_rows(self):
        """The plan names every query head of every row."""
        rows = 320
        case = AttentionCase([0] * rows, [1] * rows, heads=64, kv_heads=8, page_size=16, batch_invariant=True)
        whole = AttentionStep(self.fit(case), torch.device("cuda"))
        graph = CapturedDecodeForward(self.make(whole.context()), whole, rows, shared=False)
        step = graph.step(whole.case, [0] * rows, None)
        self.compare_output(step, graph.replay(step))


CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}


PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 40, 9, 64, 150)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Save random weights of two layers."""
    folder = tmp_path_factory.mktemp("model")
    for file in EMBEDDED["tiny"].iterdir():
        if "token" in file.name:
            shutil.copy(file, folder)
    vocab_size = json.loads((EMBEDDED["tiny"] / "config.json").read_text())["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab_size}))
    return str(folder)


def make_llm(checkpoint, attention, graphs, overlap):
    return LLM(
        checkpoint,
        device="cuda",
        model={"load_format": "dummy", "dtype": "bfloat16"},
        grammar="none",
        attention=attention,
        memory={"kv_gib": 0.25},
        graphs={"decode": graphs, "max_rows": 8, "capture": "start", "piecewise_tokens": 64 if graphs else 0},
        scheduler={"overlap": overlap, "max_running": 8, "chunk_size": 32},
    )


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_every_token_is_the_best_as_torch_native_sees_it(checkpoint, graphs, overlap):
    """Random weights make near ties, which rounding decides. So the tokens need not be equal, but each must be within
    0.1 of the best, whereas random tokens are worse by 1."""
    llm = make_llm(checkpoint, "flashinfer", graphs, overlap)
    assert (llm.loop.executor.rank.engine.graphs is not None) == graphs
    outputs = [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]
    outputs += [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]
    llm.loop.scheduler.check_integrity()
    assert llm.loop.stats().pages_used == 0
    judge = make_llm(checkpoint, "torch_native", graphs=False, overlap=False)
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS * 2, outputs, strict=True)]
    params = SamplingParams(temperature=0, max_new_tokens=1, prompt_logprobs=1)
    behind = []
    for prompt, judged in zip(PROMPTS * 2, judge.generate(texts, params), strict=True):
        behind += [entry.top[0][1] - entry.logprob for entry in judged.prompt_logprobs[len(prompt) :]]
    assert len(behind) == 2 * len(PROMPTS) * 24
    assert max(behind) < 0.1
    assert sum(gap == 0 for gap in behind) > 0.8 * len(behind)
