"""Find FlashAttention's kernels. Several distributions ship them, under different names and with different signatures.

A provider's ``attend`` takes the tensors of one call and returns ``out [tokens, heads, head_dim]`` and its
log-sum-exps, float32 ``[heads, tokens]``. Queries without a key get an infinite log-sum-exp, and their output is
undefined.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dovetail.errors import ConfigError

LIBRARY = "_vllm_fa3_C.abi3.so"


class AttentionCall(NamedTuple):
    """Describe one attention call over a paged pool, ``keys`` and ``values [pages, page_size, kv_heads, head_dim]``.

    Row r has the queries ``[cu_q[r], cu_q[r + 1])`` (None: one query per row, and ``max_q`` is 1) and the first
    ``used_k[r]`` keys of its pages ``table[r]``. No row has more than ``max_q`` queries or ``max_k`` keys. ``window``
    has the same meaning as in ``AttentionLayer``. ``splits`` is the largest number of parts in which the keys of a row
    are read at the same time; 0 lets the kernel decide. ``qv`` is the part of queries that meets the values, if these
    are latents (see ``flash_attn.latent``). ``schedule`` says how the kernel divides the keys, if that was computed before
    (see ``open_schedule``).
    """

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    cu_q: torch.Tensor | None
    used_k: torch.Tensor
    table: torch.Tensor
    max_q: int
    max_k: int
    scale: float
    causal: bool
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    splits: int = 0
    qv: torch.Tensor | None = None
    schedule: torch.Tensor | None = None

    @property
    def queries(self) -> torch.Tensor:
        """Return ``q`` in the kernels' shape: ``[rows, 1, heads, head_dim]`` if each row has one query."""
        return self.q[:, None] if self.cu_q is None else self.q

    @property
    def value_queries(self) -> torch.Tensor | None:
        """Return ``qv`` in the kernels' shape."""
        return self.qv[:, None] if self.cu_q is None and self.qv is not None else self.qv

    @property
    def window_size(self) -> tuple[int, int]:
        """Return how many keys to the left and to the right a query sees; -1 means all."""
        return (-1, -1) if self.window is None else (self.window - 1, 0)


class RaggedCall(NamedTuple):
    """Describe one causal call over keys and values that are not in pages: ``q [tokens, heads, d]``, ``k [keys, heads, d]``,
    ``v [keys, heads, size of values]``. Row r has the queries ``[cu_q[r], cu_q[r + 1])``, the last of its keys
    ``[cu_k[r], cu_k[r + 1])``. No row has more than ``max_q`` queries or ``max_k`` keys."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    scale: float


Attend = Callable[[AttentionCall], tuple[torch.Tensor, torch.Tensor]]
AttendRagged = Callable[[RaggedCall], torch.Tensor]
MakeSchedule = Callable[[AttentionCall], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Provider:
    """Describe a distribution that may be installed. ``open`` returns its ``attend``; ``missing`` returns why it cannot
    be used here."""

    name: str
    install: str
    missing: Callable[[Path | None], str | None]
    open: Callable[[Path | None], Attend]
    min_capability: tuple[int, int] = (9, 0)
    max_capability: tuple[int, int] = (9, 0)
    page_multiple: int = 1
    can_be_invariant: bool = True
    reads_latents: bool = True

    def refusal(
        self, capability: tuple[int, int], page_size: int, library: Path | None, batch_invariant: bool, latents: bool
    ) -> str | None:
        """Return why the provider cannot be used on a device of this compute capability with pages of this size, or
        None if it can."""
        if not self.min_capability <= capability <= self.max_capability:
            low, high = (".".join(map(str, c)) for c in (self.min_capability, self.max_capability))
            return f"{self.name} needs compute capability {low} to {high}"
        if latents and not self.reads_latents:
            return f"{self.name} has no kernels over latents"
        if page_size % self.page_multiple:
            return f"{self.name} allows multiples of {self.page_multiple} for memory.page_size, which is {page_size}"
        if batch_invariant and not self.can_be_invariant:
            return f"{self.name} sums in another order for decode rows than for prompts, but batch_invariant is true"
        missing = self.missing(library)
        return missing and f"{self.name}: {missing} ({self.install})"


class OpenedProvider(NamedTuple):
    """Hold the name and the ``attend`` function of a provider that was opened."""

    name: str
    attend: Attend


def providers() -> Iterator[Provider]:
    """Yield all known providers, best first."""
    yield Provider(
        "flash_attn_interface",
        "build FlashAttention-3 from the `hopper` folder of the flash-attention repository",
        lambda _: _no_module("flash_attn_interface"),
        lambda _: _kvcache_function("flash_attn_interface"),
    )
    yield Provider("vllm", "pip install vllm", _no_library, _open_library)
    yield Provider(
        "sgl_kernel",
        "pip install sglang-kernel",
        lambda _: _no_module("sgl_kernel"),
        lambda _: _kvcache_function("sgl_kernel.flash_attn"),
    )
    yield Provider(
        "flash_attn",
        "pip install flash-attn --no-build-isolation",
        lambda _: _no_module("flash_attn"),
        lambda _: _flash_attn_2(),
        min_capability=(8, 0),
        max_capability=(9, 0),
        page_multiple=256,
        can_be_invariant=False,
        reads_latents=False,
    )


def open_first(
    capability: tuple[int, int],
    page_size: int,
    name: str = "auto",
    library: Path | None = None,
    *,
    batch_invariant: bool = False,
    latents: bool = False,
) -> tuple[OpenedProvider | None, list[str]]:
    """Open the first provider that can be used, with ``latents`` also over latents, and return it with the reasons why
    those before it cannot be used.

    ``name`` restricts the search to one provider. With ``auto`` all are tried, or, if a ``library`` is given, vLLM's.
    The reasons include errors of providers that cannot be imported or loaded.
    """
    if library is not None and name == "auto":
        name = "vllm"
    reasons: list[str] = []
    for provider in providers():
        if name not in ("auto", provider.name):
            continue
        reason = provider.refusal(capability, page_size, library, batch_invariant, latents)
        if reason is None:
            try:
                return OpenedProvider(provider.name, provider.open(library)), reasons
            except (ImportError, OSError, AttributeError) as error:  # built for another torch, or another package
                reason = f"{provider.name} cannot be loaded: {error}"
        reasons.append(reason)
    return None, reasons


def _no_module(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"module {name} is not installed"


def _library_file(library: Path | None) -> Path | None:
    if library is not None:
        return library if library.is_file() else None
    folders = [Path(folder or ".") for folder in sys.path]
    candidates = [*(f / LIBRARY for f in folders), *(f / "vllm" / "vllm_flash_attn" / LIBRARY for f in folders)]
    return next((file for file in candidates if file.is_file()), None)


def _no_library(library: Path | None) -> str | None:
    if _library_file(library) is not None:
        return None
    return f"there is no {library}" if library else f"no folder of the Python path holds {LIBRARY}"


def _library_function(library: Path | None) -> Any:
    """Return the one function of vLLM's library."""
    file = _library_file(library)
    assert file is not None, "`missing` was called first"
    torch.ops.load_library(str(file))
    return torch.ops._vllm_fa3_C.fwd


def open_schedule(name: str, library: Path | None = None) -> MakeSchedule | None:
    """Return the function of an opened provider that computes on the device how a call divides the keys of its rows, or
    None if the provider computes that in every call. All calls with the same lengths may use what it returns; they must
    follow each other, because the kernels count in it.
    """
    if name != "vllm":
        return None
    _library_function(library)
    compute = getattr(torch.ops._vllm_fa3_C, "get_scheduler_metadata", None)
    if compute is None:
        return None

    def schedule(call: AttentionCall) -> torch.Tensor:
        left, right = call.window_size
        values = call.keys if call.qv is None else call.values
        one_each = call.cu_q is None  # then the library takes the width of the table for the longest row
        longest = call.table.shape[1] * call.keys.shape[1] if one_each else call.max_k
        return compute(
            len(call.used_k), call.max_q, longest, call.q.shape[1], call.keys.shape[2], call.q.shape[2], values.shape[3],
            call.q.dtype, call.used_k, call.cu_q, None, None, None, None, call.keys.shape[1], 0, call.causal, left, right,
            bool(call.soft_cap), call.splits, None, 0,
        )  # fmt: skip

    return schedule


def open_ragged(name: str, library: Path | None = None) -> AttendRagged:
    """Return the function of an opened provider of FlashAttention-3 that attends over keys which are not in pages."""
    if name == "vllm":
        return _ragged_of_library(library)
    module = "sgl_kernel.flash_attn" if name == "sgl_kernel" else name
    function: Any = importlib.import_module(module).flash_attn_varlen_func

    def attend(call: RaggedCall) -> torch.Tensor:
        found = function(
            call.q,
            call.k,
            call.v,
            cu_seqlens_q=call.cu_q,
            cu_seqlens_k=call.cu_k,
            max_seqlen_q=call.max_q,
            max_seqlen_k=call.max_k,
            softmax_scale=call.scale,
            causal=True,
        )
        return found[0] if isinstance(found, tuple) else found  # some versions return log-sum-exps too

    return attend


def _ragged_of_library(library: Path | None) -> AttendRagged:
    fwd = _library_function(library)

    def attend(call: RaggedCall) -> torch.Tensor:
        return fwd(
            call.q, call.k, call.v, None, None, None, None, call.cu_q, call.cu_k, None, None, None,
            call.max_q, call.max_k, None, None, None, None, None, None, None, None, None, call.scale, True, -1, -1,
            0.0, False, None, 1, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip

    return attend


def _open_library(library: Path | None) -> Attend:
    fwd = _library_function(library)

    def attend(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = call.window_size
        rotary = (None, None, None)
        scales = (None, None, None)
        ragged = call.cu_q is not None
        bounds = (call.max_q, call.max_k) if ragged else (None, None)
        out, lse, *_ = fwd(
            call.queries, call.keys, call.values, None, None, call.value_queries, None, call.cu_q, None, None, None, call.used_k,
            *bounds, call.table, None, None, *rotary, *scales, call.scale, call.causal, left, right,
            call.soft_cap or 0.0, False, call.schedule, call.splits, None, 0, call.sinks, 1, 0, None,
        )  # fmt: skip
        return _by_token(call, out, lse)

    return attend


def _by_token(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[tokens, heads, d]`` and ``[heads, tokens]``, also where each row has one query."""
    return (out[:, 0], lse[:, :, 0].t()) if call.cu_q is None else (out, lse)


def _kvcache_function(module: str) -> Attend:
    """Return ``flash_attn_with_kvcache`` of ``module`` as ``attend``. The official package and sglang-kernel define it
    with the same keywords."""
    function: Any = importlib.import_module(module).flash_attn_with_kvcache

    def attend(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        extra: dict[str, Any] = {} if call.sinks is None else {"sinks": call.sinks}
        if call.qv is not None:
            extra["qv"] = call.value_queries
        out, lse, *_ = function(
            call.queries,
            call.keys,
            call.values,
            cache_seqlens=call.used_k,
            page_table=call.table,
            cu_seqlens_q=call.cu_q,
            max_seqlen_q=None if call.cu_q is None else call.max_q,
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=call.window_size,
            softcap=call.soft_cap or 0.0,
            num_splits=call.splits,
            return_softmax_lse=True,
            **extra,
        )
        return _by_token(call, out, lse)

    return attend


def _flash_attn_2() -> Attend:
    """Return FlashAttention-2 as ``attend``: one query per row, or ragged queries with the cumulative lengths of all
    keys."""
    package: Any = importlib.import_module("flash_attn")
    with_kvcache, varlen = package.flash_attn_with_kvcache, package.flash_attn_varlen_func

    def attend(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        if call.sinks is not None:
            raise ConfigError("FlashAttention-2 does not support sinks; set attention to triton or torch_native")
        options = {
            "softmax_scale": call.scale,
            "causal": call.causal,
            "window_size": call.window_size,
            "softcap": call.soft_cap or 0.0,
            "block_table": call.table,
        }
        if call.cu_q is None:
            out, lse = with_kvcache(
                call.queries,
                call.keys,
                call.values,
                cache_seqlens=call.used_k,
                num_splits=call.splits,
                return_softmax_lse=True,
                **options,
            )
            return _by_token(call, out, lse)
        cu_k = torch.nn.functional.pad(call.used_k.cumsum(0, dtype=torch.int32), (1, 0))
        out, lse, _ = varlen(
            call.q,
            call.keys,
            call.values,
            cu_seqlens_q=call.cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=call.max_q,
            max_seqlen_k=call.max_k,
            return_attn_probs=True,
            **options,
        )
        return out, lse

    return attend
