"""Run steps that answer no request: the largest possible step, in order to measure the memory that a step allocates,
and the first layers of a step, in order to find the kernels that it launches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.engine.build import as_module
from dovetail.engine.captures import NO_UPDATES
from dovetail.engine.grouped import backends_of, pools_of
from dovetail.engine.states import padding
from dovetail.interfaces.attention import AttentionLayer
from dovetail.layers.states import StepStates
from dovetail.ops.sampling import Filters, sample
from dovetail.types import Attends, Batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.engine.grouped import Pools
    from dovetail.interfaces.attention import AttentionBackend, ProjectedRows
    from dovetail.interfaces.model import ModelArchitecture


SIMILAR_LAYERS = 4
"""If each layer of a model is like one of the first layers, of which there are this many, twice this number of attention operations
represents all of them: a layer has one or two."""


@torch.inference_mode()
def dry_run(
    model: ModelArchitecture,
    backend: AttentionBackend,
    pool: Pools,
    lens: list[int],
    rows: int,
    layers: int | None = None,
) -> None:
    """Run prompts of ``lens`` tokens in one step, and sample ``rows`` rows with every filter. The step reads and writes
    only page 0 of ``pool``. ``backend`` must have been built for ``pool``. With ``layers``, run the first layers only
    (see ``first_layers``)."""
    batch = prompts(backend, pool, lens)
    hidden = model.forward(batch) if layers is None else first_layers(model, batch, layers)
    logits = model.logits(hidden.new_zeros(rows, hidden.shape[1]))
    sample(logits, every_filter(rows, pool.device), torch.full((rows,), 0.5, dtype=torch.float64, device=pool.device))


def prompts(backend: AttentionBackend, pool: Pools, lens: list[int], *, plan: bool = True) -> Batch:
    """Return a batch of prompts of ``lens`` tokens in page 0 of ``pool``. With ``plan``, ``backend`` has planned it."""
    device, count, tokens = pool.device, len(lens), sum(lens)
    nothing = np.zeros(count, np.int32)
    batch = Batch([], count, nothing, nothing, np.array(lens, np.int32), nothing == 0, NO_UPDATES)
    batch.input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch.positions = torch.cat([torch.arange(n, device=device) for n in lens])
    batch.out_loc = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch.qo_indptr = torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32, device=device)
    batch.kv_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    batch.page_table = torch.zeros(count, -(-max(lens) // pool.page_size), dtype=torch.int32, device=device)
    batch.attn, batch.kv = (*backends_of(backend), *padding(pool, lens)), pools_of(pool)
    batch.views = (batch,) * max(len(batch.kv) - 1, 0)  # page 0 is the same in all cache groups
    if plan:
        backend.plan(batch)
    return batch


def every_filter(rows: int, device: torch.device) -> Filters:
    """Return filters of ``rows`` rows, each of which has all of them."""
    ones = torch.ones(rows, 1, device=device)
    return Filters(ones, ones.long() * 50, ones.double() * 0.9, ones.double() * 0.1)


def first_layers(model: ModelArchitecture, batch: Batch, layers: int, *, attend: bool = True) -> torch.Tensor:
    """Run the first ``layers`` layers of a batch, up to the attention, or the states, of the next one. Return hidden states ``[tokens,
    hidden_size]``: those of the whole model if it has no more layers, and zeros otherwise. The batch must be planned,
    unless ``attend`` is False: attention is then left out, and its results are undefined."""
    own = batch if batch.own is None else batch.own.batch
    attn, left = own.attn, itertools.count(layers, -1)
    own.attn = tuple(
        replace(attends, memory=_FirstStates(attends.memory, left))
        if isinstance(attends, StepStates)
        else _FirstLayers(attends if attend else _LeftOut(), left)
        for attends in attn
    )
    try:
        return model.forward(batch)
    except _EnoughLayers as end:
        return end.like.new_zeros(len(batch.input_ids), model.info.hidden_size)
    finally:
        own.attn = attn


def representative_layers(model: ModelArchitecture) -> int | None:
    """Return the number of attention operations (see ``first_layers``) in which a step of a model launches the kernels of all
    layers and allocates as much memory as in all layers. Return None if that is not known: some layer has modules, parameters or a
    kind of attention that the first ``SIMILAR_LAYERS`` do not have, the model has no list of its layers or several, or its layers
    keep states."""
    if any(group.states for group in model.info.cache_groups):
        return None
    lists = (list(one) for one in as_module(model).modules() if isinstance(one, nn.ModuleList))
    stacks = [one for one in lists if len(one) == model.info.num_layers]
    if len(stacks) != 1 or len(stacks[0]) <= 2 * SIMILAR_LAYERS:
        return None
    kinds = [_kind(layer) for layer in stacks[0]]
    return 2 * SIMILAR_LAYERS if all(kind in kinds[:SIMILAR_LAYERS] for kind in kinds) else None


def _kind(layer: nn.Module) -> list[tuple[Any, ...]]:
    """Return what two layers have in common if their forward passes launch the same kernels and take the same memory."""
    return [
        (
            name,
            type(module),
            [(own, value.shape, value.dtype) for own, value in module.named_parameters(recurse=False)],
            [(own, value.shape, value.dtype) for own, value in module.named_buffers(recurse=False)],
            type(getattr(module, "method", None)),
            getattr(module, "counts", None),
            getattr(module, "adapters", None) is None,
            [
                (value.window, value.soft_cap, value.scale)
                for value in vars(module).values()
                if isinstance(value, AttentionLayer)
            ],
        )
        for name, module in layer.named_modules()
    ]


class ZeroedMemory(TorchDispatchMode):
    """Fill tensors that torch allocates with zeros. Kernels of Triton that are only noted write nothing: without this,
    torch's kernels would read whatever was in their results, for example as the ids of tokens."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _ALLOCATING else result


_aten = torch.ops.aten
_ALLOCATING = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class _EnoughLayers(Exception):
    """Raised to end a forward pass. ``like`` is a tensor of its device and dtype."""

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()
        self.like = like


class _LeftOut(Attends):
    """Stand in for attention, and launch nothing."""

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        return q.new_empty(*q.shape[:2], batch.kv[0].tensors(layer.layer_id).values.shape[-1])


class _FirstLayers(Attends):
    """Attend in the first layers, and then end the forward pass. ``left`` counts the layers that may still attend, those
    of all cache groups."""

    def __init__(self, attends: Attends, left: Iterator[int]) -> None:
        self._attends, self._left = attends, left

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        if next(self._left) <= 0:
            raise _EnoughLayers(q)
        return self._attends.forward(q, layer, batch)

    def forward_projected(self, rows: ProjectedRows, layer: AttentionLayer, batch: Batch) -> torch.Tensor | None:
        attended = self._attends.forward_projected(rows, layer, batch)
        if attended is not None and next(self._left) <= 0:
            raise _EnoughLayers(rows.qkv)
        return attended


class _FirstStates(Sequence[tuple["torch.Tensor", ...]]):
    """Give states to the first layers, and then end the forward pass. For ``left`` see ``_FirstLayers``."""

    def __init__(self, memory: Sequence[tuple[torch.Tensor, ...]], left: Iterator[int]) -> None:
        self._memory, self._left = memory, left

    def __len__(self) -> int:
        return len(self._memory)

    def __getitem__(self, index: Any) -> Any:
        if next(self._left) <= 0:
            raise _EnoughLayers(self._memory[index][0])
        return self._memory[index]
