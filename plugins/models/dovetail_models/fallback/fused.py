"""Take the place of norms and gated MLPs in modules of transformers, where these compute the same.

Whether they do is tried out: the code of a module runs with small random weights, and its results are compared. What differs, for
whatever reason, is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dovetail.interfaces.mesh import Mesh
from dovetail.layers.decoder import mlp_targets
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.ops.activation import Activation
from dovetail_models.fallback.layers import Replacement, Targets
from dovetail_models.fallback.plan import COLUMN, ROW

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_GATED = {"gate_proj", "up_proj", "down_proj"}
_ACTIVATIONS: Mapping[Activation, nn.Module] = {"silu": nn.SiLU(), "gelu_tanh": nn.GELU(approximate="tanh")}
_TOLERANCE = 1e-5


class RootMeanSquareNorm(Replacement):
    """Compute RMSNorm of the last dimension of any input."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [..., size]`` to the same shape."""
        return self.norm.forward(x.reshape(-1, x.shape[-1])).view(x.shape)

    def targets(self, path: str) -> Targets:
        """See ``Replacement``."""
        for _, target in self.norm.targets("", f"{path}.norm"):
            yield "weight", target


class FusedMLP(Replacement):
    """Compute a gated MLP of any input, with one product for its gate and its other projection."""

    def __init__(self, mlp: GatedMLP) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [..., hidden_size]`` to the same shape."""
        return self.mlp.forward(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)

    def targets(self, path: str) -> Targets:
        """See ``Replacement``."""
        for name, target in mlp_targets(self.mlp, "", f"{path}.mlp"):
            yield name.removeprefix("."), target


def fused_norm(module: nn.Module) -> RootMeanSquareNorm | None:
    """Return what computes the same as ``module``, whose weight has no memory, if it is an RMSNorm."""
    weight = getattr(module, "weight", None)
    eps = next((value for name in _EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    alone = len(module._parameters) == 1 and not module._buffers and not module._modules
    if eps is None or not alone or not isinstance(weight, nn.Parameter) or weight.ndim != 1:
        return None
    size, generator = len(weight), torch.Generator("cpu").manual_seed(0)
    given = torch.randn(size, generator=generator, device="cpu", dtype=torch.float32)
    x = torch.randn(3, size, generator=generator, device="cpu", dtype=torch.float32)
    plain = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    theirs = _tried(module, {"weight": nn.Parameter(given, requires_grad=False)}, x)
    for plus_one in (False, True):
        if _equal(theirs, plain * (given + plus_one)):
            return RootMeanSquareNorm(RMSNorm(size, eps, plus_one=plus_one))
    return None


def fused_mlp(name: str, module: nn.Module, plan: Mapping[str, str], mesh: Mesh) -> FusedMLP | None:
    """Return what computes the same as the module ``name``, if it is a gated MLP that the ranks divide as usual."""
    linear = {key: child for key, child in module.named_children() if type(child) is nn.Linear}
    styles = [plan.get(f"{name}.{key}") for key in ("gate_proj", "up_proj", "down_proj")]
    if set(linear) != _GATED or (mesh.tp.size > 1 and styles != [COLUMN, COLUMN, ROW]):
        return None
    if len(list(module.parameters())) != sum(len(list(child.parameters())) for child in linear.values()):
        return None
    biases = {child.bias is not None for child in linear.values()}
    gate, down = linear["gate_proj"], linear["down_proj"]
    if len(biases) > 1 or gate.in_features != down.out_features or gate.out_features != down.in_features:
        return None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        small = {key: nn.Linear(6, 5) if key != "down_proj" else nn.Linear(5, 6) for key in _GATED}
        x = torch.randn(1, 3, 6) * 3
    small = {key: child.float() for key, child in small.items()}
    theirs = _tried(module, small, x.float())
    for activation, function in _ACTIVATIONS.items():
        with torch.no_grad():
            ours = small["down_proj"](function(small["gate_proj"](x.float())) * small["up_proj"](x.float()))
        if _equal(theirs, ours):
            bias = gate.bias is not None
            return FusedMLP(GatedMLP(gate.in_features, gate.out_features, mesh, bias=bias, activation=activation))
    return None


def _tried(module: nn.Module, given: Mapping[str, nn.Module | nn.Parameter], x: torch.Tensor) -> torch.Tensor | None:
    """Return what ``module`` computes of ``x`` with the parameters or modules ``given`` in the place of its own, or None if
    it cannot compute with them."""
    own = {name: getattr(module, name) for name in given}
    for name, value in given.items():
        setattr(module, name, value)
    try:
        with torch.no_grad():
            return module(x)
    except Exception:  # of code that was not written to be tried: it stays as it is
        return None
    finally:
        for name, value in own.items():
            setattr(module, name, value)


def _equal(theirs: torch.Tensor | None, ours: torch.Tensor) -> bool:
    return (
        isinstance(theirs, torch.Tensor)
        and theirs.shape == ours.shape
        and bool((theirs - ours).abs().max() < _TOLERANCE)
    )
