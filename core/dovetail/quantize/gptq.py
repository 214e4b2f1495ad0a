"""Round weights so that the outputs of their layers change least, by GPTQ (arXiv 2210.17323)."""

from __future__ import annotations

import torch

from dovetail.ops.integers import Integers, held, quantize

_BLOCK = 128
"""The number of columns after which the error is added to all following columns."""
_DAMPING = 0.01
"""What is added to the diagonal of a Hessian matrix, as a part of its mean."""


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Integers:
    """Round ``weight [out, in]`` column by column. What a column loses is made up for by the columns after it, as far as inputs
    are correlated: ``hessian`` is the sum of ``x.T @ x`` over inputs ``x [tokens, in]``, float32. Scales of a group are those of
    its columns as they are when their turn comes. Mutates nothing."""
    columns, wide = weight.shape[1], weight.float().clone()
    factors = _factors(hessian)
    wide[:, hessian.diagonal() == 0] = 0  # inputs that are always 0
    middle, most = 1 << bits - 1, (1 << bits) - 1
    numbers = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales, zeros = list[torch.Tensor](), list[torch.Tensor]()
    step = min(group, _BLOCK) if group % _BLOCK == 0 or group < _BLOCK else 32 if group % 32 == 0 else group
    for start in range(0, columns, step):
        end = min(start + step, columns)
        if start % group == 0:
            own = quantize(wide[:, start : start + group], bits, group, symmetric=symmetric, dtype=dtype)
            scales.append(own.scales[0])
            zeros.append(torch.full_like(scales[-1], middle) if own.zeros is None else own.zeros[0].float())
        errors = torch.empty(len(weight), end - start, device=weight.device)
        for column in range(start, end):
            current = wide[:, column]
            rounded = ((current / scales[-1]).round() + zeros[-1]).clamp(0, most)
            numbers[:, column] = rounded.to(torch.uint8)
            error = (current - (rounded - zeros[-1]) * scales[-1]) / factors[column, column]
            wide[:, column + 1 : end] -= error[:, None] * factors[column, column + 1 : end]
            errors[:, column - start] = error
        wide[:, end:] -= errors @ factors[start:end, end:]
    stored = None if symmetric else torch.stack(zeros).to(torch.uint8)
    return Integers(held(numbers, bits), torch.stack(scales), stored)


def _factors(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of a Hessian matrix, damped as much as it needs."""
    whole = hessian.double()
    diagonal = whole.diagonal()
    whole = whole + torch.diag((diagonal == 0).double())
    damping = _DAMPING * float(diagonal.mean()) or 1.0
    eye = torch.eye(len(whole), dtype=whole.dtype, device=whole.device)
    while True:
        lower, failed = torch.linalg.cholesky_ex(whole + damping * eye)
        if not failed:
            break
        damping *= 10
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()
