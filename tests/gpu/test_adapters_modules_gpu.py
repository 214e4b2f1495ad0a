"""Test adapters (LoRA) of experts, embeddings and heads on a GPU: the kernels against float32 mathematics, and an engine, with and without
graphs, against checkpoints into which adapters are merged.

Run: python -m pytest tests/gpu/test_adapters_modules_gpu.py
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError
from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.adapter_weights import EmbeddingLowRank, ExpertLowRank, ExpertPairLowRank, TokenSlots
from dovetail.ops.experts import adapted_experts
from dovetail.ops.low_rank import LARGE_TILE, SMALL_STEP, SMALL_TILE, add_embedding, packed_tiles, unpacked_tiles
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


def logprobs(outputs) -> list[list[float]]:
    return [[entry.logprob for entry in output.logprobs] for output in outputs]


@pytest.mark.parametrize("decode", [True, False], ids=["graphs", "kernel by kernel"])
def test_mixed_batches_equal_merged_checkpoints(models, decode: bool) -> None:
    settings = {
        "device": "cuda",
        "model": {"dtype": "float32"},
        "grammar": "none",
        "memory": {"kv_gib": 0.5},
        "cache": "none",
    }
    expected = {}
    for name, path in models.items():
        with LLM(path, **settings) as llm:
            expected[name] = llm.generate(PROMPTS, PARAMS)
    directory = models[None].removesuffix("model")
    section = {"enabled": True, "load": {name: f"{directory}{name}" for name in ("stacked", "tables")}}
    with LLM(models[None], **settings, graphs={"decode": decode}, adapters=section) as llm:
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


def test_quantized_experts_are_refused_with_adapters(models) -> None:
    settings = {"device": "cuda", "quantization": "fp8", "grammar": "none", "memory": {"kv_gib": 0.5}}
    with pytest.raises(
        ConfigError,
        match=r"adapters.modules has experts, and quantization fp8 stores those of Qwen3MoeForCausalLM as fp8_rows",
    ):
        LLM(models[None], **settings, adapters={"enabled": True, "modules": ["linear", "experts"]})
