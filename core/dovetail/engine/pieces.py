"""Capture the parts of a forward pass between its attention calls as CUDA graphs, for steps with prompt tokens.

Attention over prompts of different lengths is not captured, because its work depends on the lengths. The work of the
other parts depends on the number of tokens only. To capture them, the model runs once with a recorder in place of the
attention backend: at every attention call the recorder ends one graph and begins the next. K and V of padding tokens
are written to page 0. Operations of layers with states are not captured either, for the same reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dovetail.engine.build import as_module
from dovetail.engine.captures import NO_UPDATES, GraphRecorder, larger_sizes
from dovetail.engine.grouped import pools_of, set_views
from dovetail.engine.states import padding
from dovetail.layers.experts import layers_of_experts
from dovetail.layers.linear import Linear
from dovetail.layers.states import StepStates, step_states
from dovetail.types import Attends, Batch

if TYPE_CHECKING:
    from dovetail.engine.expert_load import ExpertLoad
    from dovetail.engine.grouped import Pools
    from dovetail.interfaces.attention import AttentionLayer
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelArchitecture
    from dovetail.interfaces.state_rows import StateRows


LAUNCH_SECONDS = 3.5e-4
"""The seconds that the host needs to launch one layer kernel by kernel, including its attention (measured on the host
of an H200)."""
MORE_LAUNCH_SECONDS = 6e-4
"""The same for a layer with experts, and for the layers of a model whose linear layers are quantized: 28.5 ms for a step of the 48
layers of Qwen3-30B-A3B, and 21.3 ms for the 32 layers of Llama-8B in FP8, measured on the same host."""
OPERATIONS_PER_SECOND = 6e14
MOST_TOKENS = 2048
PIECES_NEEDED = 4
"""The number of times that a number of tokens must be needed before it is captured. A pass in pieces consists of one
graph per layer, whose captures take longer than that of a decode step, and saves only the time of launches."""


class StepSeconds(NamedTuple):
    """Estimate what steps with prompts take: ``token`` is the time in which the device computes one token, ``launch`` that in
    which the host launches a step kernel by kernel."""

    token: float
    launch: float


def step_seconds(model: ModelArchitecture, mesh: Mesh) -> StepSeconds:
    """Return the estimate for this rank's share of ``model``."""
    rows = mesh.tp.ragged_share(model.info.vocab_size)[1]
    module = as_module(model)
    layers = layers_of_experts(module)
    used = {id(p): layer.used_share for layer in layers for p in layer.parameters(recurse=False)}
    weights = sum(_weights_of(p) * used.get(id(p), 1) for p in module.parameters() if p.shape[:1] != (rows,))
    dense = max(model.info.num_layers - len(layers), 0)
    quantized = any(isinstance(layer, Linear) and layer.method is not None for layer in module.modules())
    seconds = dense * (MORE_LAUNCH_SECONDS if quantized else LAUNCH_SECONDS) + len(layers) * MORE_LAUNCH_SECONDS
    return StepSeconds(2 * max(weights, 1) / OPERATIONS_PER_SECOND, seconds * model.info.launch_factor)


def launch_bound(seconds: StepSeconds) -> int:
    """Return the number of tokens up to which the device would wait for the host if steps were launched kernel by
    kernel. It is rounded down to a multiple of 128 and is at most ``MOST_TOKENS``, because every captured size takes
    memory."""
    return min(int(seconds.launch / seconds.token) // 128 * 128, MOST_TOKENS)


def _weights_of(parameter: torch.Tensor) -> float:
    """Return the number of weights in bfloat16 whose products take as long as those of ``parameter``. Numbers of one byte
    (FP8) are multiplied at about twice the rate. Integers are codes of four bits, which are multiplied in bfloat16."""
    size = parameter.numel() * parameter.element_size()
    return size / 2 if parameter.is_floating_point() else size * 2


def token_ladder(max_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture, up to and including ``max_tokens``."""
    sizes = [8, 16, 32, 48, 64, 96, 128, *range(192, 512, 64), *range(512, 1024, 128), *range(1024, 1 << 14, 256)]
    return [size for size in sizes if size < max_tokens] + [max_tokens] if max_tokens else []


class CapturedPiece(NamedTuple):
    """Hold a graph (None: nothing is launched before the call) and the call of ``call`` that follows it, which computes
    ``result`` (of a fixed address) for a number of tokens of a batch, from what the graph has computed."""

    graph: torch.cuda.CUDAGraph | None
    call: PieceCall
    result: torch.Tensor


PieceCall = Callable[["Batch", int], "torch.Tensor"]


class _AttentionCall(NamedTuple):
    """Attend in a layer of cache group ``group``, with the queries ``q``."""

    q: torch.Tensor
    layer: AttentionLayer
    group: int

    def __call__(self, batch: Batch, tokens: int) -> torch.Tensor:
        return batch.attn[self.group].forward(self.q[:tokens], self.layer, batch.view(self.group))


class _StatesCall(NamedTuple):
    """Compute an operation of a layer with states, of cache group ``group`` (see ``StepStates.run``)."""

    prompt: Callable[[Sequence[torch.Tensor], StateRows], torch.Tensor]
    step: Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]
    tensors: tuple[torch.Tensor, ...]
    group: int

    def __call__(self, batch: Batch, tokens: int) -> torch.Tensor:
        return step_states(batch, self.group).run(self.prompt, self.step, *[each[:tokens] for each in self.tensors])


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Hold a captured forward pass of a fixed number of tokens. ``last`` computes ``hidden`` from the result of the
    last call. ``watched`` is ``Batch.hidden``."""

    pieces: list[CapturedPiece]
    last: torch.cuda.CUDAGraph | None
    hidden: torch.Tensor
    watched: torch.Tensor | None


class PiecewiseGraphs:
    """Capture and replay forward passes of up to ``max_tokens`` tokens. Not thread-safe."""

    def __init__(
        self,
        model: ModelArchitecture,
        num_heads: int,
        pool: Pools,
        max_tokens: int,
        dtype: torch.dtype,
        watch: tuple[int, ...] = (),
        load: ExpertLoad | None = None,
    ) -> None:
        """``num_heads`` is the number of query heads of this rank. ``watch`` is ``Batch.watch``. ``load`` counts the
        tokens of experts."""
        self.sizes = token_ladder(max_tokens)
        self.seconds = 0.0  # spent on captures
        self._model, self._pools, self._watch, self._load = model, pools_of(pool), watch, load
        self._pool = pool
        device, rows = pool.device, 2 + max(len(self._pools), 1)
        self._ids, self._positions, *self._places = torch.zeros(rows, max_tokens, dtype=torch.int64, device=device)
        size = self._pools[0].values(0).shape[-1] if self._pools else 0
        self._attended = torch.zeros(max_tokens, num_heads, size, dtype=dtype, device=device)
        self._results: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}  # of operations of layers with states
        self.refused: set[int] = set()
        self._captured: dict[int, Pieces] = {}
        self._recorder = GraphRecorder(device)

    @property
    def num_captured(self) -> int:
        """Return the number of sizes that are captured now."""
        return len(self._captured)

    def missing(self) -> Iterator[int]:
        """Return the sizes that are not captured yet."""
        return (size for size in self.sizes if size not in self._captured and size not in self.refused)

    def size_for(self, tokens: int) -> int | None:
        """Return the smallest size that holds ``tokens``, or None if no size does."""
        return next((size for size in self.sizes if size >= tokens), None)

    def larger(self, size: int) -> Iterator[int]:
        """See ``Captures``."""
        return larger_sizes(self.sizes, size)

    def is_captured(self, size: int) -> bool:
        """Return True if a step of this size can be replayed."""
        return size in self._captured

    def forward(self, size: int, batch: Batch) -> torch.Tensor:
        """Return the hidden states ``[tokens, hidden_size]`` of a batch that is prepared and planned and has ``attn``,
        and set ``batch.hidden``. Both tensors are valid until the next call."""
        tokens = len(batch.input_ids)
        places = [batch.out_loc, *(view.out_loc for view in batch.views)]
        for static, given in (
            (self._ids, batch.input_ids),
            (self._positions, batch.positions),
            *zip(self._places, places, strict=True),
        ):
            static[:tokens].copy_(given)
            static[tokens:size].zero_()
        captured = self._captured[size]
        for graph, call, result in captured.pieces:
            if graph is not None:
                graph.replay()
            result[:tokens].copy_(call(batch, tokens))
        if captured.last is not None:
            captured.last.replay()
        batch.hidden = None if captured.watched is None else captured.watched[:tokens]
        return captured.hidden[:tokens]

    @torch.inference_mode()
    def capture(self, size: int) -> None:
        """Capture the forward pass of ``size`` tokens."""
        start = time.perf_counter()
        for static in (self._ids, self._positions, *self._places):
            static.zero_()
        batch = self._static_batch(size)
        states, count = padding(self._pool, [size]), len(self._pools)
        batch.attn = (*(_WarmUpAttention(self._attended[:size]),) * count, *states)
        self._recorder.warm_up(lambda: self._forward(batch))
        with self._recorder.beside():
            recorder = _PieceRecorder(self._attended[:size], self._recorder)
            batch.attn = (
                *(_GroupRecorder(recorder, group) for group in range(count)),
                *(self._recorded(own, recorder, count + index) for index, own in enumerate(states)),
            )
            recorder.begin()
            try:
                hidden = self._forward(batch)
            except BaseException:
                recorder.abandon()
                raise
            last = recorder.end()
        self._captured[size] = Pieces(recorder.pieces, last, hidden, batch.hidden)
        self.seconds += time.perf_counter() - start

    def _recorded(self, states: StepStates, recorder: _PieceRecorder, group: int) -> RecordedStates:
        """Return what records the operations of the layers of state group ``group``."""
        given = {each.name: getattr(states, each.name) for each in fields(StepStates)}
        return RecordedStates(**given, recorder=recorder, group=group, result_like=self._result_like)

    def _result_like(self, result: torch.Tensor) -> torch.Tensor:
        """Return memory of a fixed address for a result of the shape and dtype of ``result``. Operations whose results have
        the same size for each token share it."""
        kind = result.shape[1:], result.dtype
        if kind not in self._results:
            self._results[kind] = result.new_zeros(self.sizes[-1], *kind[0])
        return self._results[kind][: len(result)]

    def _forward(self, batch: Batch) -> torch.Tensor:
        hidden = self._model.forward(batch)
        if self._load is not None:
            self._load.add(batch)
        return hidden

    def _static_batch(self, size: int) -> Batch:
        zero = np.zeros(1, np.int32)
        batch = Batch([], 1, zero, zero, np.array([size], np.int32), np.ones(1, np.bool_), NO_UPDATES)
        out_loc, *others = (places[:size] for places in self._places)
        batch.input_ids, batch.positions, batch.out_loc = self._ids[:size], self._positions[:size], out_loc
        batch.kv, batch.watch = self._pools, self._watch
        set_views(batch, [(other, other) for other in others])  # nothing reads the page table
        return batch


class _WarmUpAttention(Attends):
    """Replace attention while the model warms up: return the buffer of attention results as it is."""

    def __init__(self, attended: torch.Tensor) -> None:
        self._attended = attended

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        return self._attended


class _PieceRecorder:
    """End the current graph at every attention call, and begin the next one."""

    def __init__(self, attended: torch.Tensor, recorder: GraphRecorder) -> None:
        self._attended = attended
        self.pieces: list[CapturedPiece] = []
        self._recorder = recorder
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        self._graph = self._recorder.begin()

    def end(self) -> torch.cuda.CUDAGraph | None:
        graph, self._graph = self._graph, None
        assert graph is not None, "a graph is begun before it ends"
        return self._recorder.end(graph)

    def abandon(self) -> None:
        if self._graph is not None:  # begin and end abandon their graph themselves
            self._recorder.abandon(self._graph)

    def attend(self, q: torch.Tensor, layer: AttentionLayer, group: int) -> torch.Tensor:
        self.pieces.append(CapturedPiece(self.end(), _AttentionCall(q, layer, group), self._attended))
        self.begin()
        return self._attended

    def run(self, call: _StatesCall, example: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record ``call``. ``example`` returns a place for its results, and may launch kernels, which are not captured."""
        graph = self.end()
        result = example()
        self.pieces.append(CapturedPiece(graph, call, result))
        self.begin()
        return result


class _GroupRecorder(Attends):
    """Record the attention calls of one cache group."""

    def __init__(self, recorder: _PieceRecorder, group: int) -> None:
        self._recorder, self._group = recorder, group

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        return self._recorder.attend(q, layer, self._group)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RecordedStates(StepStates):
    """Record the operations of the layers of a state group. ``result_like`` returns memory for results."""

    recorder: _PieceRecorder
    group: int
    result_like: Callable[[torch.Tensor], torch.Tensor]

    def run(
        self,
        prompt: Callable[[Sequence[torch.Tensor], StateRows], torch.Tensor],
        step: Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """See ``StepStates``. An operation runs once over padding rows, so that the shape of its results is known."""
        rows = self.prompts
        assert rows is not None
        call = _StatesCall(prompt, step, tensors, self.group)
        return self.recorder.run(call, lambda: self.result_like(prompt(tensors, rows)))
