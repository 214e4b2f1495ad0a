"""Embeddings on the host: cut, normalised, compared. numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dovetail.errors import RequestError
from dovetail.sampling_params import PoolingKind
from dovetail.types import FloatArray


def from_bytes(data: bytes) -> FloatArray:
    """The float32 vector that ``TokenOutput.pooled`` holds."""
    return np.frombuffer(data, "<f4").astype(np.float32)


def unit(vector: FloatArray) -> FloatArray:
    """``vector`` at length 1; one of length 0 stays as it is."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype(np.float32) if length else vector


def embedding(hidden: FloatArray, dimensions: int | None = None, *, normalize: bool = True) -> FloatArray:
    """The first ``dimensions`` numbers of a hidden state (Matryoshka representations, arXiv 2205.13147; None: all), then
    brought to length 1. Raises ``RequestError`` for dimensions that it does not have."""
    check_dimensions(dimensions, len(hidden))
    vector = hidden[:dimensions]
    return unit(vector) if normalize else vector


def check_dimensions(dimensions: int | None, size: int) -> None:
    """Raises ``RequestError`` where vectors of ``size`` numbers cannot be cut to ``dimensions``; None is as they are."""
    if dimensions is not None and not 1 <= dimensions <= size:
        raise RequestError(f"dimensions is {dimensions}; allowed: 1 to {size}", param="dimensions")


def cosine(a: FloatArray, b: FloatArray) -> float:
    """The cosine of the angle between two vectors; 0 where one has no length."""
    return float(unit(a).astype(np.float64) @ unit(b).astype(np.float64))


def pooling_kind(asked: str | None, info: Mapping[str, Any] | None) -> PoolingKind:
    """How to pool: as asked, else as the model says. ``info`` is what the engine's info has of embeddings. Raises
    ``RequestError``."""
    if info is None:
        raise RequestError(
            "this model does not offer model.embed, so that it has no embeddings; serve one that does", param="model"
        )
    if asked is None and info["pooling"] is None:
        raise RequestError(
            "the model's own pooling (1_Pooling/config.json) is not implemented; give pooling: last or mean",
            param="pooling",
        )
    kind = info["pooling"] if asked is None else asked
    if kind not in (PoolingKind.LAST, PoolingKind.MEAN):
        raise RequestError(f"pooling is {kind!r}; allowed: last, mean", param="pooling")
    return PoolingKind(kind)
