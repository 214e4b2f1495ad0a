"""Decide by the shapes of an operation whether each token of its results depends on that token only.

The number of tokens is a prime that no other size of the model has. A tensor that holds tokens has one dimension whose size is
that number or a multiple of it: of a multiple, tokens are the outer part, as in ``[tokens * heads, head_dim]``. An
operation that is not known here is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

TOKEN_COUNTS = (251, 241, 239, 233, 229, 227, 223, 211)
"""Primes, of which a pass takes the first that divides no size of its model."""

_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias"})
_SAME_SIZE = frozenset(
    {"permute", "transpose", "t", "slice", "select", "expand", "unsqueeze", "squeeze", "split", "split_with_sizes"}
    | {"unbind", "chunk", "detach", "alias", "view_as_real", "view_as_complex", "real", "imag", "_conj", "_neg_view"}
    | {"clone", "_to_copy", "copy", "copy_", "contiguous", "lift_fresh", "cat", "stack", "repeat"}
    | {"masked_fill", "masked_fill_", "fill", "fill_", "zero_", "where", "polar", "complex", "glu"}
    | {"add_", "sub_", "mul_", "div_", "clamp_", "relu_", "silu_", "tanh_", "sigmoid_", "pow_"}
    | {"mm", "addmm", "bmm", "baddbmm", "mv"}
)
"""Operations that do not mix tokens if their results have as many as their inputs."""
_BY_DIMENSION = frozenset(
    {"sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "std", "std_mean", "prod", "any", "all", "norm"}
    | {"linalg_vector_norm", "logsumexp", "argmax", "argmin", "_softmax", "_log_softmax", "cumsum", "cumprod"}
    | {"cummax", "cummin", "logcumsumexp", "sort", "topk", "kthvalue", "median", "flip", "roll", "index_select"}
)
"""Operations along the dimensions that they are given."""
_LOOKUPS = frozenset({"gather", "scatter", "scatter_"})
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
_NEW = frozenset(
    {
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
    }
)
"""Operations that read the shape of their input, and no values."""


def token_count(sizes: Iterable[int]) -> int | None:
    """Return a number of tokens that divides none of ``sizes``, or None if there is none."""
    known = {size for size in sizes if size}
    return next((count for count in TOKEN_COUNTS if all(size % count for size in known)), None)


def mixes_tokens(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, tokens: int
) -> bool:
    """Return True unless the shapes of an operation and of its ``result`` prove that it computes every token by itself."""
    name = func.overloadpacket.__name__
    inputs = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, torch.Tensor) and _holds(x, tokens)]
    if not inputs or name in _NEW:
        return False
    results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    tensors = [*inputs, *results]
    if not results or any(len(_token_dims(x, tokens)) != 1 for x in tensors):
        return True
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    if name in _RESHAPES:
        return len({_outside(x, tokens) for x in tensors}) > 1
    if len({x.shape[_token_dims(x, tokens)[0]] for x in tensors}) > 1:
        return True
    if name == "constant_pad_nd":
        return _pads_tokens(given["self"], given["pad"], tokens)
    if name == "embedding":
        return _holds(given["weight"], tokens)
    if name in ("index", "_unsafe_index"):
        return _indexes_tokens(given["self"], given["indices"], tokens)
    if name in _NORMS:
        return _token_dims(given["input"], tokens)[0] >= given["input"].ndim - len(given["normalized_shape"])
    if name in _LOOKUPS and len({_token_dims(x, tokens)[0] for x in tensors}) > 1:
        return True
    if name in _BY_DIMENSION | _LOOKUPS:
        return _is_along_tokens(func, given, tokens)
    return name not in _SAME_SIZE and torch.Tag.pointwise not in func.tags


def _token_dims(x: torch.Tensor, tokens: int) -> list[int]:
    return [index for index, size in enumerate(x.shape) if size and size % tokens == 0]


def _holds(x: torch.Tensor, tokens: int) -> bool:
    return bool(_token_dims(x, tokens))


def _outside(x: torch.Tensor, tokens: int) -> int:
    """Return over how many rows the tokens of ``x`` repeat: a view that changes it takes parts of other tokens."""
    return math.prod(x.shape[: _token_dims(x, tokens)[0]])


def _pads_tokens(x: torch.Tensor, pad: list[int], tokens: int) -> bool:
    """Return True if ``pad``, of which the last dimension comes first, shifts tokens: it may be negative at one end."""
    first = 2 * (x.ndim - 1 - _token_dims(x, tokens)[0])
    return any(pad[first : first + 2])


def _indexes_tokens(x: torch.Tensor, indices: list[torch.Tensor | None], tokens: int) -> bool:
    """Return True if ``x[indices]`` chooses among the tokens of ``x``. Tables, which hold none, may be indexed by tokens."""
    dims = _token_dims(x, tokens)
    return bool(dims) and dims[0] < len(indices) and indices[dims[0]] is not None


def _is_along_tokens(func: torch._ops.OpOverload, given: Mapping[str, Any], tokens: int) -> bool:
    """Return True if an operation goes along the dimension of its first tensor's tokens, or along all dimensions."""
    x = given.get("self")
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    dims = next(({**defaults, **given}[key] for key in ("dim", "dims") if key in defaults), None)
    if not isinstance(x, torch.Tensor) or dims is None or dims == []:
        return True
    along = {dim % x.ndim for dim in ([dims] if isinstance(dims, int) else dims)}
    return bool(along & {*_token_dims(x, tokens)})
