"""Test ``batch_invariant``: products, and whole engines whose outputs and log-probabilities are the same to the bit
however a request is computed. The conformance suites of the backends test attention alone.

.venv/bin/python -m pytest -q tests/gpu/test_batch_invariance_gpu.py
"""

import importlib.util
import os
from dataclasses import replace

import pytest
import torch
import transformers
from torch.nn import functional

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError
from dovetail.layers.linear import Linear, make_batch_invariant
from dovetail.ops.linear import invariant_rows
from dovetail.ops.triton.tuning import MEASURED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]

SHAPES = [*MEASURED, (768, 256), (1408, 256), (256, 704), (1000, 768), (97, 256), (3072, 80)]


def randn(*shape, dtype):
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_of_a_product_is_the_same_among_any_number_of_rows(n, k, dtype):
    torch.manual_seed(n + k)
    weight, bias, x = 0.05 * randn(n, k, dtype=dtype), randn(n, dtype=dtype), randn(700, k, dtype=dtype)
    product = invariant_rows(weight)
    expected = x.float() @ weight.float().t() + bias.float()
    ways = [(lambda rows: product(rows, bias), expected)]
    if n % 2 == 0:
        opens, up = expected.chunk(2, -1)
        ways.append((lambda rows: product.gated(rows, bias), functional.silu(opens) * up))
    for compute, exact in ways:
        whole = compute(x)
        assert (whole.float() - exact).norm() < 1e-2 * exact.norm()
        for rows in (1, 2, 3, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 300):
            assert compute(x[5 : 5 + rows].contiguous()).equal(whole[5 : 5 + rows]), f"{rows} rows"


def test_without_bias_and_without_rows():
    weight, x = randn(640, 512, dtype=torch.bfloat16), randn(20, 512, dtype=torch.bfloat16)
    product = invariant_rows(weight)
    assert product(x, None)[3:4].equal(product(x[3:4], None))
    assert product(x[:0], None).shape == (0, 640)
    assert product.gated(x[:0], None).shape == (0, 320)


@pytest.mark.parametrize(("dtype", "k"), [(torch.float32, 512), (torch.bfloat16, 500)])
def test_weights_that_it_has_no_products_for_are_refused(dtype, k):
    with torch.device("cuda"):
        layer = Linear(k, 64)
    layer.weight = torch.nn.Parameter(layer.weight.to(dtype), requires_grad=False)
    with pytest.raises(ConfigError, match=r"batch_invariant is true.* allowed: bfloat16 or float16"):
        make_batch_invariant(layer)


PROMPTS = [
    "Copy this: nine plums, two kites, a red door, nine plums, two kites, a red door, and so on.",
    "Extract the name and the age as JSON: Ada is 36 years old and lives in London.",
    "What is the capital of France?",
    "Sort these numbers: 9, 3, 7, 1, 12, 5, 8, 2, 2, 40",
    "Which day comes after Monday?",
    "Copy this: " + "the cat and the dog and the bird and " * 70,
]
PARAMS = SamplingParams(temperature=0, max_new_tokens=72, ignore_eos=True, logprobs=2)
BACKENDS = ("triton", "flash_attn", "flashinfer")
DRAFTERS = ("ngram", "eagle3", "mtp", "dflash", "draft_model")


def needs(backend):
    if backend == "flash_attn":
        from dovetail_attention.flash_attn.providers import open_first

        if open_first(torch.cuda.get_device_capability(), page_size=16)[0] is None:
            pytest.skip("no FlashAttention here")
    if backend == "flashinfer":
        if importlib.util.find_spec("flashinfer") is None:
            pytest.skip("needs flashinfer-python")
        if not os.environ.get("FLASHINFER_COMPILE"):
            pytest.skip("its kernels for head_dim 64 are compiled in minutes; set FLASHINFER_COMPILE=1")


def make(backend, dtype, speculative="none", page_size=16, **sections):
    scheduler = {"draft": "always"} | sections.pop("scheduler", {})
    return LLM(
        "tiny",
        device="cuda",
        model={"dtype": dtype},
        attention=backend,
        batch_invariant=True,
        speculative=speculative,
        scheduler=scheduler,
        memory={"kv_gib": 0.5, "page_size": page_size},
        grammar="none",
        **sections,
    )


def encoded(llm):
    return [llm.tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]


def said(outputs):
    """Return the tokens and the exact log-probabilities of each and of the likeliest."""
    return [(o.token_ids, [(t.logprob, t.top) for t in o.logprobs]) for o in outputs]


@pytest.fixture(scope="module")
def alone():
    """Run each prompt, by backend and dtype, in an engine without other requests and with an empty cache."""
    kept = {}

    def get(backend, dtype):
        needs(backend)
        if (backend, dtype) not in kept:
            llm = make(backend, dtype, cache="none")
            kept[backend, dtype] = [said(llm.generate([prompt], PARAMS))[0] for prompt in encoded(llm)]
            llm.close()
        return kept[backend, dtype]

    return get


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_beside_each_other(alone, backend, dtype):
    expected = alone(backend, dtype)
    llm = make(backend, dtype)
    for _ in range(2):  # the second time prompts come from the cache, and steps from graphs
        assert said(llm.generate(encoded(llm) * 12, PARAMS)) == expected * 12
    llm.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompts_in_chunks(alone, backend):
    expected = alone(backend, "bfloat16")
    llm = make(backend, "bfloat16", scheduler={"chunk_size": 24})
    assert said(llm.generate(encoded(llm) * 3, PARAMS)) == expected * 3
    llm.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_without_graphs(alone, backend):
    expected = alone(backend, "bfloat16")
    llm = make(backend, "bfloat16", graphs={"decode": False, "piecewise_tokens": 0})
    assert said(llm.generate(encoded(llm), PARAMS)) == expected
    llm.close()


@pytest.mark.parametrize("shared", [False, True])
def test_models_with_experts(tmp_path, shared):
    """Requests of a model with experts have the same bits alone, beside each other, in graphs, and in chunks."""
    kind = transformers.Qwen2MoeConfig if shared else transformers.Qwen3MoeConfig
    more = {"shared_expert_intermediate_size": 128} if shared else {"head_dim": 64}
    shape = kind(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(shape).bfloat16().save_pretrained(tmp_path)
    prompts = [torch.randint(5, 4000, (length,)).tolist() for length in (3, 40, 700, 21, 64, 130)]
    sections = {"model": {"dtype": "bfloat16", "tokenizer": "tiny"}, "memory": {"kv_gib": 0.5}, "grammar": "none"}

    def run(repeats, **scheduler):
        llm = LLM(
            str(tmp_path), device="cuda", attention="triton", batch_invariant=True, scheduler=scheduler, **sections
        )
        assert llm.resolved.experts.name == "triton"
        outputs = [said(llm.generate(prompts * repeats, PARAMS)) for _ in range(2)]
        alone = [said(llm.generate([prompt], PARAMS))[0] for prompt in prompts]
        llm.close()
        return outputs, alone

    outputs, alone = run(12)
    assert outputs == [alone * 12] * 2
    assert run(1, chunk_size=24)[0] == [alone] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_change_no_bit(alone, backend, drafter, dtype):
    expected = alone(backend, dtype)
    if (backend, drafter) == ("flash_attn", "dflash"):
        pytest.skip("dflash needs attention.tree_mask, which flash_attn does not offer")
    llm = make(backend, dtype, drafter)
    for repeats in (1, 5):
        assert said(llm.generate(encoded(llm) * repeats, PARAMS)) == expected * repeats
    assert llm.loop.stats().accepted_tokens > 0
    llm.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_of_a_seed(backend):
    needs(backend)
    params = [replace(PARAMS, temperature=1.5, top_p=0.97, top_k=200, seed=seed) for seed in range(len(PROMPTS))]
    llm = make(backend, "bfloat16", cache="none")
    expected = [said(llm.generate([prompt], each))[0] for prompt, each in zip(encoded(llm), params, strict=True)]
    llm.close()
    for drafter in ("none", "ngram", "eagle3"):
        llm = make(backend, "bfloat16", drafter)
        assert said(llm.generate(encoded(llm) * 4, params * 4)) == expected * 4
        llm.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_trees_of_drafts_change_no_bit(alone, backend, dtype):
    """Pages of another size change no bit either."""
    expected = alone(backend, dtype)
    llm = make(backend, dtype, "eagle3_tree", page_size=1)
    for repeats in (1, 5):
        assert said(llm.generate(encoded(llm) * repeats, PARAMS)) == expected * repeats
    assert llm.loop.stats().accepted_tokens > 0
    llm.close()
