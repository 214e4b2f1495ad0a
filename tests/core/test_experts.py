"""Test layers of experts: routing, products, ranks and the layouts of checkpoints.

.venv/bin/python -m pytest -q tests/core/test_experts.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.engine.build import WeightFiller, build_model
from dovetail.engine.warmup import EXPERT_TOKENS, PROMPT_TOKENS
from dovetail.errors import ConfigError, PluginLoadError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.expert_shapes import ExpertsShape, ExpertWeights, Routing, RoutingRule, SwiGLU
from dovetail.interfaces.experts import ExpertsBackend, ExpertsContext, ExpertsProduct
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.layers import linear
from dovetail.layers.base import prepare_layers
from dovetail.layers.decoder import mlp_targets
from dovetail.layers.expert_targets import FusedLayout, expert_targets, fused_expert_targets
from dovetail.layers.experts import Experts, Router, experts_left_out, use_backend
from dovetail.layers.norm import RMSNorm
from dovetail.ops.experts import GroupedProduct
from dovetail.ops.routing import route
from dovetail.ops.triton.expert_tiles import tiles_of
from dovetail.testing.ranks import run_ranks, thread_meshes

CPU = torch.device("cpu")
HIDDEN, SIZE, EXPERTS, TOP = 16, 12, 8, 3
RULES = {
    "qwen3": RoutingRule(EXPERTS, TOP, renormalize=True),
    "olmoe": RoutingRule(EXPERTS, TOP),
    "granite": RoutingRule(EXPERTS, TOP, after_choice=True),
    "llama4": RoutingRule(EXPERTS, 1, "sigmoid", after_choice=True),
    "minimax": RoutingRule(EXPERTS, TOP, "sigmoid", renormalize=True, corrected=True, float32=True),
    "glm4": RoutingRule(
        EXPERTS, TOP, "sigmoid", renormalize=True, corrected=True, groups=4, groups_kept=2, scale=2.5, float32=True
    ),
    "deepseek2": RoutingRule(EXPERTS, TOP, groups=4, groups_kept=2, group_top=1, scale=16.0),
    "phimoe": RoutingRule(EXPERTS, 2, "sparsemixer"),
}
SHAPES = {name: ExpertsShape(HIDDEN, SIZE, rule) for name, rule in RULES.items()} | {
    "gpt-oss": ExpertsShape(HIDDEN, SIZE, RULES["granite"], SwiGLU(1.702, 0.5, 1.0), bias=True, router_bias=True),
    "llama4": ExpertsShape(HIDDEN, SIZE, RULES["llama4"], scaled_input=True, shared_size=20),
    "qwen2": ExpertsShape(HIDDEN, SIZE, RULES["olmoe"], shared_size=20, shared_gate=True),
}


def reference_route(logits: list[float], rule: RoutingRule, correction: list[float] | None) -> dict[int, float]:
    """Choose the experts of one token in double precision and plain Python; return their weights."""
    import math

    number = rule.num_experts
    exps = [math.exp(one - max(logits)) for one in logits]
    scores = (
        [one / sum(exps) for one in exps] if rule.scoring == "softmax" else [1 / (1 + math.exp(-one)) for one in logits]
    )
    if rule.scoring == "sparsemixer":
        weights: dict[int, float] = {}
        for _ in range(rule.top_k):
            left = [index for index in range(number) if index not in weights]
            best = max(left, key=lambda index: (logits[index], -index))
            near = [
                i for i in left if (logits[best] - logits[i]) / max(abs(logits[i]), logits[best]) <= 2 * rule.jitter
            ]
            weights[best] = 1 / sum(math.exp(logits[i] - logits[best]) for i in near)
        return weights
    choice = [a + b for a, b in zip(scores, correction or [0.0] * number, strict=True)]
    if rule.after_choice:
        choice = logits
    width = number // rule.groups
    groups = [sorted(choice[i * width : (i + 1) * width])[-rule.group_top :] for i in range(rule.groups)]
    kept = sorted(range(rule.groups), key=lambda i: (-sum(groups[i]), i))[: rule.groups_kept]
    allowed = [i for i in range(number) if i // width in kept]
    chosen = sorted(allowed, key=lambda i: (-choice[i], i))[: rule.top_k]
    weights = {i: scores[i] for i in chosen}
    if rule.after_choice and rule.scoring == "softmax":
        weights = {i: exps[i] / sum(exps[j] for j in chosen) for i in chosen}
    total = sum(weights.values()) if rule.renormalize else 1.0
    return {i: one / total * rule.scale for i, one in weights.items()}


@pytest.mark.parametrize("name", RULES)
def test_routing_equals_a_reference_in_double_precision(name: str) -> None:
    rule = RULES[name]
    torch.manual_seed(0)
    logits = torch.randn(40, EXPERTS) * 2
    logits[5:10] = (logits[5:10] * 2).round() / 2 + 0.25  # ties
    logits[10] = 0.5
    correction = torch.randn(EXPERTS) * 0.2 if rule.corrected else None
    ids, weights = route(logits, rule, correction)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    for token in range(40):
        expected = reference_route(logits[token].tolist(), rule, None if correction is None else correction.tolist())
        assert sorted(ids[token].tolist()) == sorted(expected), token
        torch.testing.assert_close(weights[token], torch.tensor([expected[i] for i in ids[token].tolist()]))


def test_of_equal_experts_the_first_are_chosen() -> None:
    for name, rule in RULES.items():
        ids, _ = route(torch.full((1, EXPERTS), 0.5), rule, torch.zeros(EXPERTS) if rule.corrected else None)
        assert ids.tolist() == [list(range(rule.top_k))], name


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"top_k": 9}, "9 of 8 experts"),
        ({"groups": 3}, "divides"),
        ({"groups": 4, "groups_kept": 1}, "enough"),
        ({"corrected": True, "after_choice": True}, "scores of all"),
    ],
)
def test_rules_that_contradict_themselves_are_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        replace(RULES["olmoe"], **changes)


SIZES = (("num_experts", 8), ("size", 12))
INFO = ModelInfo("OneLayer", 8, HIDDEN, 1, 1, 1, HIDDEN, 16, (CacheGroup(1, 1, HIDDEN),), expert_sizes=SIZES)
GPT_OSS = FusedLayout(transposed=True, interleaved=True)
LAYOUTS = {
    "mixtral": None,
    "granite": FusedLayout(),
    "llama4": FusedLayout(transposed=True),
    "gpt-oss": GPT_OSS,
    "up first": FusedLayout(up_first=True),
    "up first, transposed": FusedLayout(transposed=True, up_first=True),
    "up first, interleaved": FusedLayout(interleaved=True, up_first=True),
}


class OneLayer(nn.Module, ModelArchitecture):
    """Have one layer of experts, and name its tensors in a layout."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        shape, self._layout = info.config
        self.info, self.experts = info, Experts(shape, mesh)

    def forward(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        layer, shape = self.experts, self.experts.shape
        targets = {"router.weight": WeightTarget("experts.router.gate.weight")}
        if shape.router_bias:
            targets["router.bias"] = WeightTarget("experts.router.gate.bias")
        if shape.routing.corrected:
            targets["router.e_score_correction_bias"] = WeightTarget("experts.router.correction")
        if layer.shared is not None:
            targets.update(mlp_targets(layer.shared, "shared", "experts.shared"))
        if layer.shared_gate is not None:
            targets["shared_gate.weight"] = layer.shared_gate.target("experts.shared_gate.weight")
        if self._layout is None:
            return targets | dict(expert_targets(layer, "experts", "experts", ("w1", "w3", "w2")))
        return targets | dict(fused_expert_targets(layer, "experts", "experts", self._layout))


def whole_tensors(shape: ExpertsShape) -> dict[str, torch.Tensor]:
    """Return random weights of all experts: gate, up, down and their biases, and those of the router and the shared
    expert by their names in the checkpoint."""
    torch.manual_seed(1)
    found = {
        "gate": torch.randn(EXPERTS, SIZE, HIDDEN),
        "up": torch.randn(EXPERTS, SIZE, HIDDEN),
        "down": torch.randn(EXPERTS, HIDDEN, SIZE),
        "gate_bias": torch.randn(EXPERTS, SIZE),
        "up_bias": torch.randn(EXPERTS, SIZE),
        "down_bias": torch.randn(EXPERTS, HIDDEN),
        "router.weight": torch.randn(EXPERTS, HIDDEN) / 4,
        "router.bias": torch.randn(EXPERTS),
        "router.e_score_correction_bias": torch.randn(EXPERTS) / 4,
        "shared.gate_proj.weight": torch.randn(20, HIDDEN),
        "shared.up_proj.weight": torch.randn(20, HIDDEN),
        "shared.down_proj.weight": torch.randn(HIDDEN, 20),
        "shared_gate.weight": torch.randn(1, HIDDEN),
    }
    return {name: tensor / 4 if "." not in name else tensor for name, tensor in found.items()}


def in_layout(whole: Mapping[str, torch.Tensor], layout: FusedLayout | None) -> dict[str, torch.Tensor]:
    """Return the tensors of the experts as a checkpoint has them."""
    if layout is None:
        parts = {"w1": "gate", "w3": "up", "w2": "down"}
        return {
            f"experts.{e}.{theirs}.{field}": whole[ours + ("_bias" if field == "bias" else "")][e]
            for e in range(EXPERTS)
            for theirs, ours in parts.items()
            for field in ("weight", "bias")
        }
    found = {}
    for suffix in ("", "_bias"):
        pair = [whole["gate" + suffix], whole["up" + suffix]]
        if layout.up_first:
            pair.reverse()
        gate_up = torch.stack(pair, 2).flatten(1, 2) if layout.interleaved else torch.cat(pair, 1)
        down = whole["down" + suffix]
        if layout.transposed and not suffix:
            gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
        found |= {f"experts.gate_up_proj{suffix}": gate_up, f"experts.down_proj{suffix}": down}
    return found


def loaded(
    shape: ExpertsShape, mesh: Mesh = SINGLE, layout: str = "mixtral", dtype: torch.dtype = torch.float32
) -> Experts:
    model = build_model(OneLayer, replace(INFO, config=(shape, LAYOUTS[layout]), needs=shape.needs), CPU, dtype, mesh)
    assert isinstance(model, OneLayer)
    filler, whole = WeightFiller(model), whole_tensors(shape)
    tensors = whole | in_layout(whole, LAYOUTS[layout])
    for name in filler.targets:
        filler.fill(name, lambda name=name: tensors[name])
    filler.finish()
    return model.experts


def reference(x: torch.Tensor, shape: ExpertsShape) -> torch.Tensor:
    """Compute the layer token by token in float64, with the layer's own choice of experts."""
    whole = {name: tensor.double() for name, tensor in whole_tensors(shape).items()}
    activation, layer = shape.activation, loaded(shape)
    ids, weights = layer.router.forward(x)
    x = x.double()
    rows = []
    for token in range(len(x)):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            given = x[token] * weight if shape.scaled_input else x[token]
            gate, up = whole["gate"][expert] @ given, whole["up"][expert] @ given
            if shape.bias:
                gate, up = gate + whole["gate_bias"][expert], up + whole["up_bias"][expert]
            if activation.limit is not None:
                gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
            result = whole["down"][expert] @ (
                gate / (1 + torch.exp(-activation.alpha * gate)) * (up + activation.offset)
            )
            result += whole["down_bias"][expert] if shape.bias else 0
            total += result if shape.scaled_input else weight * result
        if shape.shared_size:
            gate, up = (whole[f"shared.{name}_proj.weight"] @ x[token] for name in ("gate", "up"))
            shared = whole["shared.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
            factor = torch.sigmoid(whole["shared_gate.weight"] @ x[token]) if shape.shared_gate else 1
            total += shared * factor
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_equals_its_experts_one_by_one(name: str) -> None:
    torch.manual_seed(2)
    layer = loaded(SHAPES[name])
    for tokens in (1, 3, 40):
        x = torch.randn(tokens, HIDDEN)
        before = x.clone()
        torch.testing.assert_close(layer.forward(x).double(), reference(x, SHAPES[name]), atol=1e-5, rtol=1e-5)
        assert torch.equal(x, before)
    assert layer.forward(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("divided", ["tp", "ep"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_reads_its_part_of_every_layout(size: int, divided: Any, layout: str) -> None:
    shape = SHAPES["gpt-oss"]
    whole = whole_tensors(shape)
    for rank, mesh in enumerate(thread_meshes(size, divided) if size > 1 else [SINGLE]):
        layer = loaded(shape, mesh, layout)
        own = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size) if divided == "ep" else slice(None)
        part = slice(rank * SIZE // size, (rank + 1) * SIZE // size) if divided == "tp" else slice(None)
        gate_up = torch.cat([whole["gate"][own, part], whole["up"][own, part]], 1)
        assert torch.equal(layer.gate_up, gate_up.flatten(0, 1))
        assert torch.equal(layer.down, whole["down"][own, :, part].flatten(0, 1))
        assert layer.gate_up_bias is not None
        assert layer.down_bias is not None
        assert torch.equal(
            layer.gate_up_bias, torch.cat([whole["gate_bias"][own, part], whole["up_bias"][own, part]], 1).flatten()
        )
        assert torch.equal(layer.down_bias, whole["down_bias"][own].flatten())


@pytest.mark.parametrize("name", ["gpt-oss", "llama4", "qwen2", "glm4"])
@pytest.mark.parametrize("divided", ["tp", "ep"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_compute_what_one_computes(size: int, divided: Any, name: str) -> None:
    shape = SHAPES[name]
    torch.manual_seed(3)
    x, residual, norm = torch.randn(9, HIDDEN), torch.randn(9, HIDDEN), RMSNorm(HIDDEN, 1e-5)
    nn.init.ones_(norm.weight)
    expected = loaded(shape).forward(x)
    expected_norm = norm.add_forward(expected.clone(), residual)[0]
    meshes = thread_meshes(size, divided)

    def work(layer: Experts) -> tuple[torch.Tensor, torch.Tensor]:
        return layer.forward(x), norm.add_forward(layer.parts_forward(x), residual)[0]

    for whole, normed in run_ranks(meshes, work, [loaded(shape, mesh) for mesh in meshes]):
        torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(normed, expected_norm, atol=1e-5, rtol=1e-5)


def test_ranks_that_cannot_divide_experts_are_refused() -> None:
    shape = replace(SHAPES["qwen3"], size=13)
    with pytest.raises(ConfigError, match=r"13 intermediate values.*parallel.experts: ep"):
        Experts(shape, thread_meshes(2)[0])
    Experts(shape, thread_meshes(2, "ep")[0])
    with pytest.raises(ConfigError, match=r"8 experts.*parallel.experts: tp"):
        Experts(SHAPES["qwen3"], thread_meshes(3, "ep")[0])


def test_weights_in_16_bits_are_near_the_reference() -> None:
    torch.manual_seed(4)
    for dtype in (torch.bfloat16, torch.float16):
        layer = loaded(SHAPES["qwen3"], dtype=dtype)
        assert layer.gate_up.dtype is dtype
        x = torch.randn(20, HIDDEN).to(dtype)
        routing = layer.router.forward(x)
        exact = loaded(SHAPES["qwen3"])
        exact.router.forward = lambda x, routing=routing: routing
        torch.testing.assert_close(layer.forward(x).float(), exact.forward(x.float()), atol=0.06, rtol=0.06)


@pytest.mark.parametrize("sizes", [(128, 8, 2048, 768), (32, 4, 2880, 2880), (8, 2, 4096, 14336), (64, 8, 2048, 1024)])
def test_every_tile_is_compiled_before_prompts_need_it(sizes: tuple[int, int, int, int]) -> None:
    experts, top_k, hidden, size = sizes

    def tiles(tokens: int) -> object:
        return tiles_of(tokens, experts, top_k, hidden, size, 1.0, 2)

    noted = {tiles(tokens) for tokens in (*PROMPT_TOKENS, *EXPERT_TOKENS)}
    assert {tiles(tokens) for tokens in range(1, 9000, 7)} <= noted


def test_new_values_are_used_after_prepare() -> None:
    layer, x = loaded(SHAPES["glm4"]), torch.randn(4, HIDDEN)
    before = layer.forward(x)
    for held in layer.parameters():
        held.mul_(0.5)
    prepare_layers(layer)
    assert not torch.allclose(layer.forward(x), before)


def test_a_float32_router_keeps_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are float32 in a model of another dtype, and it makes no product in the model's dtype."""
    made = list[torch.dtype]()

    class Recorded(linear.DenseProduct):
        def __init__(self, weight: torch.Tensor, *, batch_invariant: bool = False) -> None:
            made.append(weight.dtype)
            super().__init__(weight, batch_invariant=batch_invariant)

    monkeypatch.setattr(linear, "DenseProduct", Recorded)
    torch.manual_seed(0)
    router = Router(64, RULES["minimax"]).to(torch.bfloat16)
    nn.init.normal_(router.gate.weight)
    assert router.correction is not None
    router.correction.data = torch.zeros(EXPERTS)
    prepare_layers(router)
    assert made == [torch.float32]
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    logits = router.gate.forward(x)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, nn.functional.linear(x.float(), router.gate.weight.float()))
    expected = route(logits, RULES["minimax"], router.correction)
    assert router.forward(x).ids.equal(expected.ids)


class Doubles(ExpertsBackend):
    """Make products whose results are twice as large, and keep the weights that they were made of."""

    def __init__(self, config: object, context: ExpertsContext) -> None:
        self.made = list[ExpertWeights]()

    def product(self, weights: ExpertWeights) -> ExpertsProduct:
        self.made.append(weights)

        class Double(GroupedProduct):
            def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
                return super().forward(x, routing, shared) * 2

        return Double(weights, torch.float32)


def test_a_backend_makes_the_products_of_all_layers() -> None:
    layer, x = loaded(SHAPES["qwen3"]), torch.randn(4, HIDDEN)
    expected, backend = layer.forward(x), Doubles(None, ExpertsContext(CPU, torch.float32))
    use_backend(layer, backend)
    assert torch.equal(layer.forward(x), 2 * expected)
    assert torch.equal(layer.parts_forward(x), 2 * expected)
    with experts_left_out(layer):
        assert layer.product.describe == "left out"
        assert layer.forward(x).shape == x.shape
    assert torch.equal(layer.forward(x), 2 * expected)
    assert len(backend.made) == 1
    layer.down.mul_(0.5)
    prepare_layers(layer)
    torch.testing.assert_close(layer.forward(x), expected)
    assert len(backend.made) == 2


def test_models_declare_what_their_experts_need() -> None:
    shape = SHAPES["gpt-oss"]
    assert shape.needs == {Feature.EXPERTS_BIAS, Feature.EXPERTS_SWIGLU}
    assert SHAPES["llama4"].needs == {Feature.EXPERTS_SCALED_INPUT}
    assert SHAPES["qwen2"].needs == frozenset()
    info = replace(INFO, config=(shape, None), needs=frozenset({Feature.EXPERTS_BIAS}))
    with pytest.raises(
        PluginLoadError, match=r"does not declare experts\.swiglu, which its layer of experts experts needs"
    ):
        build_model(OneLayer, info, CPU, torch.float32)
    info = replace(INFO, config=(shape, None), needs=shape.needs, expert_sizes=None)
    with pytest.raises(PluginLoadError, match=r"layer of experts experts, and its ModelInfo has no expert_sizes"):
        build_model(OneLayer, info, CPU, torch.float32)
