"""Compute feed-forward layers of which each token uses a few experts (mixture of experts)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from dovetail.errors import ConfigError
from dovetail.interfaces.expert_shapes import ExpertWeights
from dovetail.interfaces.experts import ExpertsProduct
from dovetail.layers.base import Layer, deferrable_parameter, parameter
from dovetail.layers.linear import Float32Linear, Linear
from dovetail.layers.mlp import GatedMLP
from dovetail.ops.parts import Parts, RankAddend
from dovetail.ops.routing import route

if TYPE_CHECKING:
    from dovetail.interfaces.expert_shapes import ExpertsShape, Routing, RoutingRule
    from dovetail.interfaces.experts import ExpertsBackend
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.quantization import ExpertsMethod
    from dovetail.layers.adapters import ExpertsAdapters
    from dovetail.ops.parts import Addend


class Router(Layer):
    """Choose the experts of each token by a ``RoutingRule``. Every rank holds the whole layer, and all ranks choose
    alike. ``gate`` computes the logits. ``correction`` is the bias for the choice, float32 ``[experts]``, or None; it
    is ``e_score_correction_bias`` in checkpoints. With ``keeps``, ``chosen`` (int32 ``[tokens, top_k]``) are the experts of
    the tokens of the last call, which ``engine.expert_load`` counts."""

    keeps = False
    chosen: torch.Tensor | None = None

    def __init__(self, hidden_size: int, rule: RoutingRule, *, bias: bool = False) -> None:
        super().__init__()
        self.rule = rule
        kind = Float32Linear if rule.float32 else Linear
        self.gate = kind(hidden_size, rule.num_experts, bias=bias)
        self.gate.precise = True
        self.correction = (
            nn.Parameter(torch.empty(rule.num_experts, dtype=torch.float32), requires_grad=False)
            if rule.corrected
            else None
        )

    def forward(self, x: torch.Tensor) -> Routing:
        """Return the experts of each of the tokens ``x [tokens, hidden_size]``. Mutates nothing."""
        return self.choose(self.gate.forward(x))

    def choose(self, logits: torch.Tensor) -> Routing:
        """Return the experts of each token by its ``logits [tokens, experts]``. Mutates nothing."""
        routing = route(logits, self.rule, self.correction)
        if self.keeps:
            self.chosen = routing.ids
        return routing


class Experts(Layer):
    """Compute the sum of the weighted results of each token's experts, which ``router`` chooses. The result of an
    expert is ``down(activation(gate(x), up(x)))``.

    The ranks of ``mesh.tp`` all have the same tokens, and add up what they compute. By ``mesh.experts`` every rank holds
    a share of the intermediate values of each expert (``tp``), or some of the experts, whole (``ep``). The parameters
    are ``gate_up [experts * 2 * size, hidden]``, in which the rows of gate of an expert precede its rows of up (``experts * size``
    rows of up if ``shape.ungated``), and
    ``down [experts * hidden, size]``, with this rank's experts and share; and ``gate_up_bias`` and ``down_bias``, their
    rows' biases. If a quantization gives the layer a ``method``, the method's parameters take the place of ``gate_up``
    and ``down``. ``shared`` is the shared expert, which the ranks divide like every ``GatedMLP``, or None.
    ``dovetail.layers.expert_targets`` names their tensors in checkpoints. ``backend`` makes what multiplies; without one, the
    products of ``ops.experts`` do. ``adapters`` are added to the products of each expert. Raises ``ConfigError`` if the ranks cannot divide the experts.
    """

    def __init__(self, shape: ExpertsShape, mesh: Mesh) -> None:
        super().__init__()
        self.shape, self.mesh, self._tp = shape, mesh, mesh.tp
        self.held, self.share = divided(shape, mesh)
        count, size, hidden = len(self.held), len(self.share), shape.hidden_size
        self.router = Router(hidden, shape.routing, bias=shape.router_bias)
        self.gate_up = deferrable_parameter(count * shape.rows * size, hidden)
        self.down = deferrable_parameter(count * hidden, size)
        self.gate_up_bias = parameter(count * 2 * size) if shape.bias else None
        self.down_bias = parameter(count * hidden) if shape.bias else None
        self.shared = GatedMLP(hidden, shape.shared_size, mesh) if shape.shared_size else None
        self.shared_gate = Linear(hidden, 1) if shape.shared_gate else None
        if self.shared_gate is not None:
            self.shared_gate.precise = True  # one row: nothing to gain
        self.method: ExpertsMethod | None = None
        self._dtype = torch.get_default_dtype()
        self._weights: ExpertWeights
        self.backend: ExpertsBackend | None = None
        self.adapters: ExpertsAdapters | None = None
        self._product: ExpertsProduct

    def allocate(self, method: ExpertsMethod | None, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate the parameters that were deferred: those of ``method``, or ``gate_up`` and ``down`` in ``dtype``."""
        if method is not None and self.shape.ungated:
            raise ConfigError(
                "experts without a gate are quantized; implemented: experts with a gate. Set quantization: none"
            )
        self.method, self._dtype = method, dtype
        if method is None:
            for name in ("gate_up", "down"):
                weight: nn.Parameter = getattr(self, name)
                if weight.is_meta:
                    setattr(self, name, nn.Parameter(torch.empty(weight.shape, dtype=dtype, device=device), False))
            return
        del self.gate_up, self.down
        for name, (shape, own_dtype) in method.parameters().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=own_dtype, device=device), False))

    def _stored(self) -> ExpertWeights:
        """Return the weights as the parameters hold them."""
        if self.method is None:
            count, hidden = len(self.held), self.shape.hidden_size
            return ExpertWeights(self.gate_up.view(count, -1, hidden), self.down.view(count, hidden, -1))
        return self.method.prepare({name: getattr(self, name).detach() for name in self.method.parameters()})

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        shape, count = self.shape, len(self.held)
        # ranks that share an expert all compute its result, and only one of them may add the bias
        adds_bias = self.down_bias is not None and (len(self.share) == shape.size or self._tp.rank == 0)
        self._weights = replace(
            self._stored(),
            activation=shape.activation,
            gate_up_bias=None if self.gate_up_bias is None else self.gate_up_bias.view(count, -1),
            down_bias=self.down_bias.view(count, -1) if adds_bias and self.down_bias is not None else None,
            first=self.held.start,
            whole=shape.routing.num_experts,
            scaled_input=shape.scaled_input,
            ungated=shape.ungated,
        )
        weights, backend = self._weights, self.backend
        if backend is None:
            from dovetail.ops.experts import GroupedProduct

            self._product = GroupedProduct(weights, self._dtype)
        else:
            self._product = backend.product(weights)
        if self.adapters is not None:
            self._product = self.adapters.around(self._product, weights)
        super().prepare()

    @property
    def used_share(self) -> float:
        """Return the part of the experts' weights that is multiplied for a token. On a rank that has some of the
        experts, it is the part on average."""
        rule = self.shape.routing
        return rule.top_k / rule.num_experts

    @property
    def weights(self) -> ExpertWeights:
        """Return the weights as they are stored."""
        if not self.prepared:
            self.prepare()
        return self._weights

    @property
    def product(self) -> ExpertsProduct:
        """Return what computes the experts."""
        if not self.prepared:
            self.prepare()
        return self._product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map contiguous ``x [tokens, hidden_size]`` to the same shape. Mutates nothing."""
        added = self._added(x, self._route(x))
        return added if self._tp.size == 1 else self._tp.all_reduce(added)

    def parts_forward(self, x: torch.Tensor) -> Addend:
        """Compute ``forward``, but leave it to ``RMSNorm.add_forward`` to add up the results of a token's experts, if the
        kernel does not, and the addends of the ranks."""
        routing = self._route(x)
        one_rank = self._tp.size == 1
        if self.shared is None and (one_rank or self._tp.adds_parts):
            parts = self._product.parts(x, routing)
            if parts is not None:
                return Parts(parts) if one_rank else RankAddend(parts, self._tp)
        added = self._added(x, routing)
        return added if one_rank else RankAddend(added, self._tp)

    def _route(self, x: torch.Tensor) -> Routing:
        if not self.prepared:
            self.prepare()
        return self.router.forward(x)

    def _added(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return what this rank adds to the result."""
        shared = None
        if self.shared is not None:
            shared = self.shared.addend_forward(x)
            if self.shared_gate is not None:
                shared = self.shared_gate.gate_rows_forward(x, shared)
        return self._product.forward(x, routing, shared)


def layers_of_experts(model: nn.Module) -> list[Experts]:
    """Return the layers of experts of a model."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def use_backend(model: nn.Module, backend: ExpertsBackend) -> None:
    """Let ``backend`` make the products of all layers of experts of ``model``, from their next ``prepare`` on."""
    for layer in layers_of_experts(model):
        layer.backend, layer.prepared = backend, False


@contextmanager
def experts_left_out(model: nn.Module) -> Iterator[None]:
    """Let the layers of experts of ``model`` compute nothing within the block, as far as a backend makes their products.
    Their results are undefined."""
    replaced = [(layer, layer.product) for layer in layers_of_experts(model) if layer.backend is not None]
    for layer, _ in replaced:
        layer._product = _LeftOut()
    try:
        yield
    finally:
        for layer, product in replaced:
            layer._product = product


class _LeftOut(ExpertsProduct):
    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        return torch.empty_like(x)

    @property
    def describe(self) -> str:
        return "left out"


def divided(shape: ExpertsShape, mesh: Mesh) -> tuple[range, range]:
    """Return the experts of this rank, and the intermediate values of each that it computes. Raises ``ConfigError`` if
    the ranks cannot divide them evenly."""
    ranks, number = mesh.tp.size, shape.routing.num_experts
    what, whole = ("experts", number) if mesh.experts == "ep" else ("intermediate values of an expert", shape.size)
    if whole % ranks:
        raise ConfigError(
            f"{whole} {what} cannot be divided among {ranks} ranks; set parallel.experts: "
            f"{'tp' if mesh.experts == 'ep' else 'ep'}, or parallel.tp to a divisor of {whole}"
        )
    own = range(mesh.tp.rank * whole // ranks, (mesh.tp.rank + 1) * whole // ranks)
    return (own, range(shape.size)) if mesh.experts == "ep" else (range(number), own)
