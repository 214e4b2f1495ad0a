"""Cut, normalise and compare embeddings on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dovetail.errors import RequestError
from dovetail.sampling_params import PoolingKind
from dovetail.types import FloatArray


def unit(vector: FloatArray) -> FloatArray:
    """Return ``vector`` scaled to length 1; a vector of length 0 is returned as it is."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype(np.float32) if length else vector


def embedding(hidden: FloatArray, dimensions: int | None = None, *, normalize: bool = True) -> FloatArray:
    """Return the first ``dimensions`` numbers of a hidden state (Matryoshka representations, arXiv 2205.13147; None:
    all of them), scaled to length 1 if ``normalize`` is set. Raises ``RequestError`` for more dimensions than the state
    has."""
    check_dimensions(dimensions, len(hidden))
    vector = hidden[:dimensions]
    return unit(vector) if normalize else vector


def check_dimensions(dimensions: int | None, size: int) -> None:
    """Raise ``RequestError`` if vectors of ``size`` numbers cannot be cut to ``dimensions``; None stands for no cut."""
    if dimensions is not None and not 1 <= dimensions <= size:
        raise RequestError(f"dimensions is {dimensions}; allowed: 1 to {size}", param="dimensions")


def cosine(a: FloatArray, b: FloatArray) -> float:
    """Return the cosine of the angle between two vectors, or 0 if one of them has length 0."""
    return float(unit(a).astype(np.float64) @ unit(b).astype(np.float64))


def label_probabilities(logprobs: FloatArray, *, among_labels: bool, temperature: float = 1.0) -> list[float]:
    """Convert log-probabilities to probabilities: relative to the whole vocabulary, or, with ``among_labels``, relative
    to the labels only, with a ``temperature``."""
    values = logprobs.astype(np.float64)
    if among_labels:
        values = (values - values.max()) / temperature
        values = values - np.logaddexp.reduce(values)
    return np.exp(values).tolist()


def pooling_kind(given: str | None, info: Mapping[str, Any] | None) -> PoolingKind:
    """Return the pooling of a request: ``given``, or the model's own if that is None. ``info`` is the entry
    ``embedding`` of the engine's info. Raises ``RequestError`` if the model has no embeddings or the pooling is not
    implemented."""
    if info is None:
        raise RequestError(
            "this model does not offer model.embed and has no embeddings; serve a model that offers it", param="model"
        )
    if given is None and info["pooling"] is None:
        raise RequestError(
            "the model's own pooling (1_Pooling/config.json) is not implemented; give pooling: last or mean",
            param="pooling",
        )
    kind = info["pooling"] if given is None else given
    if kind not in (PoolingKind.LAST, PoolingKind.MEAN):
        raise RequestError(f"pooling is {kind!r}; allowed: last, mean", param="pooling")
    return PoolingKind(kind)
