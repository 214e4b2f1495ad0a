"""Make layers of experts for tests, and compute them one expert at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, Routing, SwiGLU

TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Map the dtype of activations to the difference from float64 that is allowed, relative to the root mean square."""


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """Describe a layer of experts, and the tokens of a step.

    This rank has the experts ``[first, first + held)`` of ``experts``. ``choice`` is how experts are chosen:
    ``random``, ``one`` (all tokens have the same experts), or ``last`` (those with the highest indices).
    """

    tokens: int = 9
    experts: int = 8
    top_k: int = 3
    hidden: int = 64
    size: int = 48
    dtype: torch.dtype = torch.float32
    activation: SwiGLU = SILU
    bias: bool = False
    scaled_input: bool = False
    shared: bool = False
    first: int = 0
    held: int = 8
    choice: str = "random"
    seed: int = 0


class ExpertsStep:
    """Hold the tensors of a case on a device: ``weights``, ``x``, ``routing`` and ``shared``, which are random."""

    def __init__(self, case: ExpertsCase, device: torch.device) -> None:
        self.case, self.device = case, device
        self._generator = torch.Generator().manual_seed(case.seed)
        count, hidden, size = case.held, case.hidden, case.size
        biases = (self._random(count, 2 * size), self._random(count, hidden)) if case.bias else (None, None)
        self.weights = ExpertWeights(
            self._random(count, 2 * size, hidden) * hidden**-0.5,
            self._random(count, hidden, size) * size**-0.5,
            case.activation,
            *biases,
            first=case.first,
            whole=case.experts,
            scaled_input=case.scaled_input,
        )
        self.x = self._random(case.tokens, hidden)
        self.shared = self._random(case.tokens, hidden) if case.shared else None
        self.routing = self._routing()

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.case.dtype)

    def _routing(self) -> Routing:
        case = self.case
        scores = torch.rand(case.tokens, case.experts, generator=self._generator)
        if case.choice == "one":
            scores[:] = scores[:1].clone()
        elif case.choice == "last":
            scores = torch.arange(case.experts).expand(case.tokens, -1)
        ids = scores.topk(case.top_k, 1).indices.int()
        weights = torch.rand(case.tokens, case.top_k, generator=self._generator) + 0.1
        return Routing(ids.to(self.device), weights.to(self.device))

    def reference(self) -> torch.Tensor:
        """Return the result in float64 on the host, computed for one token and one of its experts at a time."""
        case, weights = self.case, self.weights
        x, ids, factors = self.x.cpu().double(), self.routing.ids.cpu(), self.routing.weights.cpu().double()
        total = torch.zeros_like(x) if self.shared is None else self.shared.cpu().double()
        for token in range(case.tokens):
            for expert, factor in zip((ids[token] - case.first).tolist(), factors[token], strict=True):
                if 0 <= expert < case.held:
                    given = x[token] * factor if case.scaled_input else x[token]
                    result = _expert(given, weights, expert)
                    total[token] += result if case.scaled_input else result * factor
        return total


def _expert(x: torch.Tensor, weights: ExpertWeights, expert: int) -> torch.Tensor:
    """Return the result of one expert for ``x [hidden]``, in float64."""
    activation = weights.activation
    gate_up = weights.gate_up[expert].cpu().double() @ x
    if weights.gate_up_bias is not None:
        gate_up += weights.gate_up_bias[expert].cpu().double()
    gate, up = gate_up.chunk(2)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    inner = gate / (1 + torch.exp(-activation.alpha * gate)) * (up + activation.offset)
    result = weights.down[expert].cpu().double() @ inner
    return result if weights.down_bias is None else result + weights.down_bias[expert].cpu().double()
