"""Find tensors of a checkpoint that a model ties although their values differ."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from dovetail.engine.shards import CHUNK_BYTES, StoredTensor
from dovetail.interfaces.model import ModelArchitecture

log = logging.getLogger(__name__)


def untie_different(model: ModelArchitecture, tensors: Iterable[StoredTensor]) -> None:
    """Untie the tensors of ``model`` that the checkpoint stores with other values than those that they are tied to, and
    log a warning that names both, as transformers does. ``tensors`` are those of the checkpoint; only tied ones are
    read."""
    tied = model.tied_weights()
    names = {*tied, *tied.values()}
    stored = {tensor.name: tensor for tensor in tensors if tensor.name in names}
    for name, source in tied.items():
        if name in stored and source in stored and not _equal(stored[name], stored[source]):
            log.warning(
                "config.json ties %s to %s, and the checkpoint has both with different values: each is used as it is "
                "stored; set tie_word_embeddings to false in config.json",
                name,
                source,
            )
            model.untie(name)


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bytes."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        for start in range(0, one.nbytes, CHUNK_BYTES):
            count = min(CHUNK_BYTES, one.nbytes - start)
            if first.read(count) != second.read(count):
                return False
    return True
