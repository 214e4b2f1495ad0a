"""Check collectives against sums that every rank computes for itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from dovetail.interfaces.mesh import Collectives

EPS = 1e-5


class RankTensors(NamedTuple):
    """Hold what all ranks add up: ``addends[r] [tokens, size]``, or ``[parts, tokens, size]``, is that of rank r."""

    addends: list[torch.Tensor]
    residual: torch.Tensor
    weight: torch.Tensor


def rank_tensors(
    ranks: int, rows: int, size: int, dtype: torch.dtype, device: torch.device, seed: int, parts: int = 0
) -> RankTensors:
    """Return random tensors, the same on every rank. Some addends are zeros of negative sign on one rank or on all."""

    def random(offset: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(97 * seed + offset)
        return torch.randn(shape, generator=generator, device=device)

    addends = [random(rank, *((parts,) if parts else ()), rows, size) for rank in range(ranks)]
    for rank, addend in enumerate(addends):
        addend[..., : size // 8] = -0.0
        if rank:
            addend[..., size // 4 : size // 2] = -0.0
    addends = [addend if parts else addend.to(dtype) for addend in addends]
    return RankTensors(addends, random(ranks, rows, size).to(dtype), random(ranks + 1, size).to(dtype))


def sum_of(addends: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the sum in float32, in the order of the ranks, rounded once. Parts are added up and rounded first."""
    total = None
    for addend in addends:
        if addend.ndim == 3:
            whole = addend[0].clone()
            for part in addend[1:]:
                whole += part
            addend = whole
        addend = addend.to(dtype).float()
        total = addend if total is None else total + addend
    assert total is not None
    return total.to(dtype)


def check_sums(collectives: Collectives, tensors: RankTensors, tolerance: float) -> None:
    """Assert that ``all_reduce_norm``, and ``all_reduce`` of tensors that are not in parts, return the right sums on
    every rank. ``tolerance`` is the allowed error of the norm, relative to the norm of its values."""
    mine, residual, weight = tensors.addends[collectives.rank], tensors.residual, tensors.weight
    total = sum_of(tensors.addends, residual.dtype)
    if mine.ndim == 2:
        got = collectives.all_reduce(mine.clone())
        assert torch.equal(got, total), f"all_reduce of {tuple(mine.shape)} is wrong"
        assert same_bits(collectives, got), f"all_reduce of {tuple(mine.shape)} differs between ranks"
    total = total + residual
    kept = residual.clone()
    norm, added = collectives.all_reduce_norm(mine.clone(), residual, weight, EPS)
    exact = total.double() * (total.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    assert torch.equal(residual, kept), "all_reduce_norm changed the residual"
    assert torch.equal(added, total), f"the sum of all_reduce_norm of {tuple(mine.shape)} is wrong"
    assert (norm.double() - exact).norm() <= tolerance * exact.norm(), f"the norm of {tuple(mine.shape)} is wrong"
    assert same_bits(collectives, norm), f"the norm of {tuple(mine.shape)} differs between ranks"


def check_gather(
    collectives: Collectives, rows: int, size: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Assert that ``all_gather`` of ``[rows, size]`` to ``width`` columns puts the tensors of all ranks side by side."""
    tensors = rank_tensors(collectives.size, rows, size, dtype, device, rows + size)
    got = collectives.all_gather(tensors.addends[collectives.rank], width)
    assert torch.equal(got, torch.cat(tensors.addends, 1)[:, :width]), f"all_gather of {rows} x {size} is wrong"
    assert got.is_contiguous()


def same_bits(collectives: Collectives, x: torch.Tensor) -> bool:
    """Return True if all ranks call this with tensors of the same bits. Waits for them."""
    words = x.contiguous().view(torch.int16).long()
    places = torch.arange(1, words.numel() + 1, device=x.device).reshape(words.shape)
    digest = int((words * (places * 2654435761 % 1048573)).sum())
    return collectives.min(digest) == -collectives.min(-digest)
