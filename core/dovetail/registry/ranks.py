"""Check whether the ranks of tensor parallelism can divide a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature

if TYPE_CHECKING:
    from dovetail.interfaces.model import ModelInfo


def check_ranks(info: ModelInfo, tp: int, what: str) -> None:
    """Raise ``ConfigError`` if ``tp`` ranks cannot divide the model ``info``, which messages call ``what``."""
    reasons = [] if tp == 1 else list(obstacles(info, tp))
    if reasons:
        allowed = ", ".join(map(str, divisions(info)))
        raise ConfigError(
            f"parallel.tp is {tp}; {what} ({info.architecture}) {'; '.join(reasons)}; allowed: parallel.tp {allowed}"
        )


def obstacles(info: ModelInfo, tp: int) -> Iterator[str]:
    """Yield the reasons for which ``tp`` ranks cannot divide the model ``info``."""
    if Feature.MODEL_TENSOR_PARALLEL not in info.offers:
        yield f"does not offer {Feature.MODEL_TENSOR_PARALLEL}"
    for name, size in (("num_attention_heads", info.num_heads), *info.split_sizes):
        if size % tp:
            yield f"has {name} {size}, which is not a multiple of {tp}"
    if info.num_kv_heads % tp and tp % info.num_kv_heads:
        yield f"has num_key_value_heads {info.num_kv_heads}, which is neither a multiple nor a divisor of {tp}"
    if -(-info.vocab_size // tp) * (tp - 1) >= info.vocab_size:
        yield f"has vocab_size {info.vocab_size}, too few tokens for {tp} ranks"


def divisions(info: ModelInfo) -> list[int]:
    """Return the numbers of ranks that can divide the model ``info``."""
    return [tp for tp in range(1, info.num_heads + 1) if tp == 1 or not any(obstacles(info, tp))]
