"""Check whether the ranks of tensor parallelism can divide a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from dovetail.config.parallel import MOST_TP
from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature

if TYPE_CHECKING:
    from dovetail.interfaces.model import ModelInfo


def check_ranks(info: ModelInfo, tp: int, what: str) -> None:
    """Raise ``ConfigError`` if ``tp`` ranks cannot divide the model ``info``, which messages call ``what``."""
    if tp in divisions(info):
        return
    reasons = [f"{needed}, and it has {got}" for needed, got in indivisible(info, tp)]
    if Feature.MODEL_TENSOR_PARALLEL not in info.offers:
        reasons.append(f"{Feature.MODEL_TENSOR_PARALLEL}, which it does not offer")
    raise ConfigError(
        f"parallel.tp is {tp}, which needs of {what} ({info.architecture}): {'; '.join(reasons)}. "
        f"Allowed: parallel.tp {', '.join(map(str, divisions(info)))}"
    )


def indivisible(info: ModelInfo, tp: int) -> Iterator[tuple[str, str]]:
    """Yield what ``tp`` ranks need of the numbers in the model's config.json, and what these are, for each number that
    they cannot divide."""
    for name, size in (("num_attention_heads", info.num_heads), *info.split_sizes):
        if size % tp:
            yield f"a multiple of {tp} as {name}", str(size)
    if info.expert_sizes is not None and all(size % tp for _, size in info.expert_sizes):
        (experts, number), (name, size) = info.expert_sizes
        yield f"a multiple of {tp} as {experts} or as {name}", f"{number} and {size}"
    if info.num_kv_heads % tp and tp % info.num_kv_heads:
        yield f"a multiple or a divisor of {tp} as num_key_value_heads", str(info.num_kv_heads)
    if -(-info.vocab_size // tp) * (tp - 1) >= info.vocab_size:
        yield f"tokens for each of {tp} ranks in vocab_size", str(info.vocab_size)


def expert_division(
    setting: Literal["auto", "tp", "ep"], info: ModelInfo, tp: int, best_first: Sequence[str] = ()
) -> Literal["tp", "ep"]:
    """Return how ``tp`` ranks divide the experts of the model ``info`` by the setting ``parallel.experts``: ``auto`` is
    the first of ``best_first``, which were measured, and then of ``tp`` and ``ep``, that is possible. Raises ``ConfigError``
    if the ranks cannot divide the experts as the setting says."""
    if info.expert_sizes is None:
        if setting == "ep":
            raise ConfigError(
                f"parallel.experts is ep, and {info.architecture} has no experts; allowed for it: auto and tp"
            )
        return "tp"
    (experts, number), (name, size) = info.expert_sizes
    ways: dict[Literal["tp", "ep"], bool] = {"tp": size % tp == 0, "ep": number % tp == 0}
    if setting == "auto":
        order = [*best_first, *ways]
        possible: list[Literal["tp", "ep"]] = [way for way, fits in ways.items() if fits]
        return min(possible, key=lambda way: order.index(way)) if possible else "tp"
    if not ways[setting]:
        needed, got, other = (name, size, "ep") if setting == "tp" else (experts, number, "tp")
        raise ConfigError(
            f"parallel.experts is {setting} and parallel.tp is {tp}, which needs a multiple of {tp} as {needed}; "
            f"{info.architecture} has {got}. Set {'parallel.experts: auto' if ways[other] else f'parallel.tp to a divisor of {got}'}"
        )
    return setting


def divisions(info: ModelInfo) -> list[int]:
    """Return the numbers of ranks that can compute the model ``info`` and that ``parallel.tp`` allows; 1 is always among
    them."""
    if Feature.MODEL_TENSOR_PARALLEL not in info.offers:
        return [1]
    return [tp for tp in range(1, min(info.num_heads, MOST_TP) + 1) if tp == 1 or not any(indivisible(info, tp))]
