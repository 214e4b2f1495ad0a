"""Test adapters (LoRA) of experts, also of quantized ones, of embeddings and of heads on a GPU: the kernels against float32 mathematics, and
an engine, with and without graphs, against checkpoints into which adapters are merged.

Run: python -m pytest tests/gpu/test_adapters_modules_gpu.py
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.interfaces.expert_shapes import ExpertFormat, ExpertWeights, Routing, SwiGLU
from dovetail.ops.adapter_weights import EmbeddingLowRank, ExpertLowRank, ExpertPairLowRank, TokenSlots
from dovetail.ops.experts import adapted_experts
from dovetail.ops.low_rank import LARGE_TILE, SMALL_STEP, SMALL_TILE, add_embedding, packed_tiles, unpacked_tiles
from dovetail.ops.mxfp4 import dequantize, quantize
from dovetail.testing.experts_cases import ExpertsCase, ExpertsStep
from lora_adapters import random_pair, stacked_tensors, table_tensors, write_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
DEVICE = torch.device("cuda")
SLOTS = 4


def tiles_of(slots: np.ndarray) -> TokenSlots:
    count, size = len(slots), SMALL_TILE if len(slots) <= SMALL_STEP else LARGE_TILE
    packed = torch.from_numpy(packed_tiles(slots, size, count, count)).to(DEVICE)
    return TokenSlots(count, (), unpacked_tiles(packed, size, count, count))


def matrices(parts, inputs, experts, rank, random) -> ExpertLowRank:
    from dovetail.ops.triton.low_rank import row_blocks

    outputs, kind = sum(size for _, size in parts), {"device": DEVICE, "dtype": torch.bfloat16}
    ranks = random.integers(0, rank + 1, (SLOTS, experts * len(parts))).astype(np.int32)
    a = torch.randn(SLOTS, experts, len(parts), rank, inputs, **kind) / inputs**0.5
    b = torch.randn(SLOTS, experts, outputs, rank, **kind) / 4
    return ExpertLowRank(a, b, parts, ranks, torch.from_numpy(ranks).to(DEVICE), row_blocks(parts, DEVICE))


def delta(weights: ExpertLowRank, slot: int, expert: int) -> torch.Tensor:
    found = torch.zeros(weights.b.shape[2], weights.a.shape[4], device=DEVICE)
    for part, (start, size) in enumerate(weights.parts):
        rank = int(weights.ranks[slot, expert * len(weights.parts) + part])
        rows = slice(start, start + size)
        found[rows] = weights.b[slot, expert, rows, :rank].float() @ weights.a[slot, expert, part, :rank].float()
    return found


@pytest.mark.parametrize(("hidden", "size", "experts", "top_k"), [(2048, 768, 16, 8), (2880, 2880, 8, 4)])
@pytest.mark.parametrize("tokens", [1, 7, 64, 700])
@pytest.mark.parametrize("rank", [16, 64])
def test_experts_get_what_adapters_add(
    hidden: int, size: int, experts: int, top_k: int, tokens: int, rank: int
) -> None:
    torch.manual_seed(0)
    random, kind = np.random.default_rng(0), {"device": DEVICE, "dtype": torch.bfloat16}
    weights = ExpertWeights(
        torch.randn(experts, 2 * size, hidden, **kind) / hidden**0.5, torch.randn(experts, hidden, size, **kind) / size**0.5, whole=experts
    )  # fmt: skip
    up = matrices(((0, size), (size, size)), hidden, experts, rank, random)
    low_rank = ExpertPairLowRank(up, matrices(((0, hidden),), size, experts, rank, random))
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int().to(DEVICE)
    routing = Routing(ids, torch.rand(tokens, top_k, device=DEVICE))
    slots = random.integers(-1, SLOTS, tokens).astype(np.int32)
    x = torch.randn(tokens, hidden, **kind)
    exact = torch.zeros(tokens, hidden, device=DEVICE)
    for slot in range(-1, SLOTS):
        for expert in range(experts):
            pairs = ((ids == expert) & torch.from_numpy(slots == slot).to(DEVICE)[:, None]).nonzero()
            if len(pairs):
                gate_up, down = weights.gate_up[expert].float(), weights.down[expert].float()
                if slot >= 0:
                    gate_up, down = gate_up + delta(up, slot, expert), down + delta(low_rank.down, slot, expert)
                gate, linear = (x[pairs[:, 0]].float() @ gate_up.T).chunk(2, 1)
                result = (torch.nn.functional.silu(gate) * linear) @ down.T
                exact.index_add_(0, pairs[:, 0], result * routing.weights[pairs[:, 0], pairs[:, 1], None])
    got = adapted_experts(x, routing, weights, None, low_rank, tiles_of(slots))
    assert ((got.float() - exact).square().mean() / exact.square().mean()).sqrt() < 1.5e-2


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return what ``x [rows, columns]`` stands for once each ``group`` columns of a row are quantized to FP8 (E4M3)."""
    groups = x.bfloat16().float().unflatten(1, (-1, group))
    scale = (groups.abs().amax(2, keepdim=True) / 448).clamp(min=1e-30)
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)


GPT_OSS: dict[str, Any] = {"activation": SwiGLU(1.702, 7.0, 1.0), "bias": True}
QUANTIZED: dict[ExpertFormat, dict[str, Any]] = {
    "int4": {"scaled_input": True}, "int8": {}, "mxfp4": GPT_OSS, "gguf": {}, "fp8_rows": GPT_OSS, "fp8_blocks": {},
}  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 7, 64, 700])
@pytest.mark.parametrize("format", QUANTIZED)
def test_quantized_experts_get_what_adapters_add(format: ExpertFormat, tokens: int) -> None:
    """Products in FP8 quantize the inputs of both products with weights, but not what adapters read."""
    torch.manual_seed(0)
    hidden, size, experts, rank, random, fp8 = 2048, 768, 8, 32, np.random.default_rng(0), format.startswith("fp8")
    case = ExpertsCase(
        tokens, experts, 4, hidden, size, torch.bfloat16, format=format, held=experts, **QUANTIZED[format]
    )
    step = ExpertsStep(case, DEVICE)
    up = matrices(((0, size), (size, size)), hidden, experts, rank, random)
    low_rank = ExpertPairLowRank(up, matrices(((0, hidden),), size, experts, rank, random))
    slots = random.integers(-1, SLOTS, tokens).astype(np.int32)
    slots[0] = 2
    weights, routing, activation = step.weights, step.routing, step.weights.activation
    gate_up, down = (one.to(DEVICE, torch.float32) for one in step.exact)
    exact = torch.zeros(tokens, hidden, device=DEVICE)
    for slot in range(-1, SLOTS):
        for expert in range(experts):
            pairs = ((routing.ids == expert) & torch.from_numpy(slots == slot).to(DEVICE)[:, None]).nonzero()
            if not len(pairs):
                continue
            x, factors = step.x[pairs[:, 0]].float(), routing.weights[pairs[:, 0], pairs[:, 1], None]
            given = rounded(x, hidden if format == "fp8_rows" else 128) if fp8 else x
            both = given @ gate_up[expert].T
            if slot >= 0:
                both += x @ delta(up, slot, expert).T
            if case.scaled_input:
                both *= factors
            if weights.gate_up_bias is not None:
                both += weights.gate_up_bias[expert]
            gate, linear = both.chunk(2, 1)
            if activation.limit is not None:
                gate, linear = gate.clamp(max=activation.limit), linear.clamp(-activation.limit, activation.limit)
            inner = gate * torch.sigmoid(activation.alpha * gate) * (linear + activation.offset)
            result = (rounded(inner, 128) if fp8 else inner) @ down[expert].T
            if slot >= 0:
                result += inner @ delta(low_rank.down, slot, expert).T
            if weights.down_bias is not None:
                result += weights.down_bias[expert]
            exact.index_add_(0, pairs[:, 0], result if case.scaled_input else result * factors)
    got = adapted_experts(step.x, routing, weights, None, low_rank, tiles_of(slots))
    # an activation whose last bit differs may be rounded to the next FP8 number
    assert ((got.float() - exact).square().mean() / exact.square().mean()).sqrt() < (3e-2 if fp8 else 1.5e-2)


@pytest.mark.parametrize("tokens", [1, 100, 2000])
def test_embeddings_get_what_adapters_add(tokens: int) -> None:
    from dovetail.ops.triton.low_rank import row_blocks

    torch.manual_seed(0)
    random, parts, kind = np.random.default_rng(0), ((0, 4096),), {"device": DEVICE, "dtype": torch.bfloat16}
    ranks = np.array([[16], [3], [0], [32]], np.int32)
    a, b = torch.randn(SLOTS, 1000, 32, **kind), torch.randn(SLOTS, 4096, 32, **kind)
    weights = EmbeddingLowRank(a, b, parts, ranks, torch.from_numpy(ranks).to(DEVICE), row_blocks(parts, DEVICE))
    slots, ids = random.integers(-1, SLOTS, tokens).astype(np.int32), torch.randint(1000, (tokens,), device=DEVICE)
    out = torch.randn(tokens, 4096, **kind)
    exact = out.float()
    for token, slot in enumerate(slots.tolist()):
        rank = int(ranks[slot, 0]) if slot >= 0 else 0
        exact[token] += b[slot, :, :rank].float() @ a[slot, ids[token], :rank].float()
    got = add_embedding(out, ids, weights, tiles_of(slots))
    assert ((got.float() - exact).square().mean() / exact.square().mean()).sqrt() < 6e-3


EXPERTS, HIDDEN, SIZE, VOCABULARY, LAYERS = 8, 256, 64, 512, 2
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": EXPERTS,
    "num_experts_per_tok": 2, "moe_intermediate_size": SIZE, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
PARAMS = SamplingParams(max_new_tokens=24, temperature=0, logprobs=0, ignore_eos=True)
PROMPTS = [[(7 * i + j * j) % VOCABULARY for j in range(length)] for i, length in enumerate((3, 40, 129, 7, 20))]
NAMES = ["stacked", "tables", None, "stacked", "tables"]


def base_weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        own = {f"self_attn.{name}_proj": (rows, HIDDEN) for name, rows in (("q", 256), ("k", 128), ("v", 128))}
        own |= {"self_attn.o_proj": (HIDDEN, 256), "self_attn.q_norm": (64,), "self_attn.k_norm": (64,)}
        own |= {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,), "mlp.gate": (EXPERTS, HIDDEN)}
        for e in range(EXPERTS):
            own |= {f"mlp.experts.{e}.{name}_proj": (SIZE, HIDDEN) for name in ("gate", "up")}
            own[f"mlp.experts.{e}.down_proj"] = (HIDDEN, SIZE)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    made = {name: torch.randn(shape, generator=random) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return {f"{name}.weight": one.abs() + 0.5 if one.ndim == 1 else one * 2 for name, one in made.items()}


def save(directory, weights) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: one.contiguous() for name, one in weights.items()}, directory / "model.safetensors")
    return str(directory)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, str]:
    """Return the model, and checkpoints into which each adapter is merged, whose names end with "-merged"."""
    directory, weights = tmp_path_factory.mktemp("adapters"), base_weights()
    found: dict[str | None, str] = {None: save(directory / "model", weights)}
    random, tensors, merged = torch.Generator().manual_seed(1), {}, dict(weights)
    for i in range(LAYERS):
        prefix = f"model.layers.{i}.mlp.experts"
        own, up = stacked_tensors(f"{prefix}.base_layer", (EXPERTS, 2 * SIZE, HIDDEN), 4, 1.0, random)
        other, down = stacked_tensors(prefix, (EXPERTS, HIDDEN, SIZE), 4, 1.0, random)
        tensors |= own | other
        for e in range(EXPERTS):
            parts = {"gate": up[e, :SIZE], "up": up[e, SIZE:], "down": down[e]}
            merged |= {
                n: merged[n] + d.float() for part, d in parts.items() for n in [f"{prefix}.{e}.{part}_proj.weight"]
            }
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    write_tensors(directory / "stacked", tensors, r=4, lora_alpha=4, target_modules=[], target_parameters=parameters)
    found["stacked"] = save(directory / "stacked-merged", merged)
    tensors, table = table_tensors("model.embed_tokens", (VOCABULARY, HIDDEN), 4, 1.0, random)
    a, b = random_pair((VOCABULARY, HIDDEN), 4, random)
    write_tensors(
        directory / "tables", tensors | {"lm_head.lora_A.weight": a, "lm_head.lora_B.weight": b},
        r=4, lora_alpha=4, target_modules=["embed_tokens", "lm_head"],
    )  # fmt: skip
    added = {"model.embed_tokens.weight": table.float(), "lm_head.weight": b @ a}
    found["tables"] = save(
        directory / "tables-merged", weights | {name: weights[name] + one for name, one in added.items()}
    )
    return found


SETTINGS = {
    "device": "cuda",
    "model": {"dtype": "float32"},
    "grammar": "none",
    "memory": {"kv_gib": 0.5},
    "cache": "none",
}


def answers(checkpoints) -> dict[str | None, list]:
    """Return what each checkpoint answers without adapters."""
    expected = {}
    for name, path in checkpoints.items():
        with LLM(path, **SETTINGS) as llm:
            expected[name] = llm.generate(PROMPTS, PARAMS)
    return expected


def logprobs(outputs) -> list[list[float]]:
    return [[entry.logprob for entry in output.logprobs] for output in outputs]


@pytest.fixture(scope="module")
def expected(models) -> dict[str | None, list]:
    """Return what ``models`` answer."""
    return answers(models)


@pytest.mark.parametrize("decode", [True, False], ids=["graphs", "kernel by kernel"])
def test_mixed_batches_equal_merged_checkpoints(models, expected, decode: bool) -> None:
    directory = models[None].removesuffix("model")
    section = {"enabled": True, "load": {name: f"{directory}{name}" for name in ("stacked", "tables")}}
    with LLM(models[None], **SETTINGS, graphs={"decode": decode}, adapters=section) as llm:
        outputs = []
        for _ in range(3):  # graphs are captured on demand
            outputs = llm.generate(PROMPTS, PARAMS, adapter=NAMES)
        if decode:
            assert any(key.adapters for key in llm.loop.executor.rank.engine.graphs._graphs)
        plain = llm.generate(PROMPTS, PARAMS)
    references = [expected[name][i] for i, name in enumerate(NAMES)]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in references]
    np.testing.assert_allclose(logprobs(outputs), logprobs(references), atol=1e-2)
    np.testing.assert_allclose(logprobs(plain), logprobs(expected[None]), atol=1e-2)


def test_adapters_of_quantized_experts_equal_merged_checkpoints(models, tmp_path) -> None:
    """The reference is a model whose experts are not quantized, but have the numbers for which codes stand."""
    base, merged = (load_file(f"{path}/model.safetensors") for path in (models[None], models["stacked"]))
    stored = {name: dequantize(*quantize(one), torch.float32) for name, one in base.items() if ".experts." in name}
    checkpoints = {
        None: save(tmp_path / "plain", base | stored),
        "stacked": save(tmp_path / "merged", base | {n: one + merged[n] - base[n] for n, one in stored.items()}),
    }
    expected = answers(checkpoints)
    names = [None if name == "tables" else name for name in NAMES]
    section = {"enabled": True, "load": {"stacked": f"{models[None].removesuffix('model')}stacked"}}
    references = [expected[name][i] for i, name in enumerate(names)]
    with LLM(models[None], **SETTINGS, quantization="mxfp4", adapters=section) as llm:
        for _ in range(3):  # graphs are captured on demand
            outputs = llm.generate(PROMPTS, PARAMS, adapter=names)
            assert [output.token_ids for output in outputs] == [output.token_ids for output in references]
            np.testing.assert_allclose(logprobs(outputs), logprobs(references), atol=1e-2)
