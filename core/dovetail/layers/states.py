"""Define what layers with a state for each request share: the shapes of their states, and the rows of a step."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from dovetail.interfaces.features import Feature
from dovetail.interfaces.mixer import ConvActivation, MixerBackend, MixerStep
from dovetail.interfaces.mixer_shapes import StateShape
from dovetail.interfaces.model import WeightTarget
from dovetail.interfaces.state_rows import StateRows
from dovetail.layers.base import Layer

if TYPE_CHECKING:
    from dovetail.layers.linear import ColumnLinear, Linear
    from dovetail.layers.own_rows import OwnRows
    from dovetail.ops.parts import Addend, RankAddend
    from dovetail.types import Batch


class StateLayer(Layer):
    """Compute a layer that keeps states. ``state_id`` is the layer's index among the model's layers with states, and ``needs``
    are the features of a ``MixerBackend`` that it calls, which ``ModelInfo.needs`` names too."""

    state_id: int
    needs: ClassVar[frozenset[Feature]] = frozenset()

    @property
    @abstractmethod
    def state_shapes(self) -> tuple[StateShape, ...]:
        """Return the shapes of this rank's states of one request."""


StateTargets = Iterator[tuple[str, WeightTarget | list[WeightTarget]]]
"""Yield names in a checkpoint and the targets of their tensors."""

Advance = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Write the states of a layer, given tensors of draft rows, and ``slots``, ``starts`` and ``counts`` of the operations whose
names end in ``_advance``."""


def _torch_mixer() -> MixerBackend:
    from dovetail.ops.mixers import TorchMixer

    return TorchMixer()


@dataclass(frozen=True, slots=True, eq=False)
class StepStates:
    """Hold the states of all requests and the rows of a step. It is the entry of ``Batch.attn`` of a cache group of states.

    The tokens of a step are those of prompts first, described by ``prompts`` (None: there are none), and then one of
    each decode row, whose states are in the slots ``decodes`` (int32). ``memory[state_id]`` are the states of a layer,
    ``[slots, *shape]`` for each of its ``state_shapes``; slot 0 belongs to padding. ``backend`` computes the operations.

    If rows have drafts, all rows after the prompts are ``drafts`` (rows that do not write), and there are no decode rows.
    Layers then keep what ``advance`` needs. Drafts of a row are a chain, because the state of a token is that after the token before.
    """

    memory: Sequence[tuple[torch.Tensor, ...]]
    prompts: StateRows | None
    decodes: torch.Tensor
    drafts: StateRows | None = None
    backend: MixerBackend = field(default_factory=_torch_mixer)
    kept: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]] = field(default_factory=list)

    @property
    def rows(self) -> MixerStep:
        """Return the rows of the step, as backends plan them."""
        return MixerStep(self.prompts, self.decodes, self.drafts)

    def run(
        self,
        prompt: Callable[[Sequence[torch.Tensor], StateRows], torch.Tensor],
        step: Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Return the results of ``prompt`` for the tokens of prompts and of ``step`` for those of decode rows, in the order
        of the tokens. ``tensors`` are ``[tokens, ...]``; both get their parts of them."""
        if self.drafts is not None:
            return self._run_drafts(prompt, self.drafts, tensors)
        if self.prompts is None:
            return step(tensors, self.decodes)
        count = len(self.decodes)
        if not count:
            return prompt(tensors, self.prompts)
        before = prompt([each[:-count] for each in tensors], self.prompts)
        return torch.cat((before, step([each[-count:] for each in tensors], self.decodes)))

    def short_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        activation: ConvActivation = "silu",
    ) -> torch.Tensor:
        """Compute ``MixerBackend.short_conv`` of ``x [tokens, channels]``, all tokens of the step. Writes the slots of prompts and of
        decode rows in ``state [slots, channels, width - 1]``, but not those of draft rows (see ``keep``)."""
        ops = self.backend
        return self.run(
            lambda part, rows: ops.short_conv(part[0], weight, bias, state, rows, activation),
            lambda part, slots: ops.short_conv_step(part[0], weight, bias, state, slots, activation),
            x,
        )

    def keep(self, advance: Advance, *tensors: torch.Tensor) -> None:
        """Let ``advance`` of this object call ``advance`` with the parts of ``tensors [tokens, ...]`` that belong to draft
        rows. Every layer calls this once in a step; without drafts nothing is kept."""
        if self.drafts is not None:
            count = int(self.drafts.lens.sum())
            self.kept.append(functools.partial(advance, [each[len(each) - count :] for each in tensors]))

    def advance(self, counts: torch.Tensor) -> None:
        """Write the states of draft row r after its first ``counts[r]`` tokens (int32 ``[draft rows]``): the token before
        the drafts, and those that were accepted. The engine calls this once after a step with drafts, before the next
        step."""
        rows = self.drafts
        assert rows is not None
        assert len(self.kept) == len(self.memory), "a layer with states does not implement drafts"
        for advance in self.kept:
            advance(rows.slots, rows.indptr[:-1], counts)

    def _run_drafts(
        self,
        prompt: Callable[[Sequence[torch.Tensor], StateRows], torch.Tensor],
        drafts: StateRows,
        tensors: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        if self.prompts is None:
            return prompt(tensors, drafts)
        before = len(tensors[0]) - int(drafts.lens.sum())
        results = (
            prompt([each[:before] for each in tensors], self.prompts),
            prompt([each[before:] for each in tensors], drafts),
        )
        return torch.cat(results)


class StateMixer(StateLayer):
    """Compute a layer with states between two projections, ``project`` and ``out``, in place of attention. Without
    ``reads_once``, further products read the layer's input. With ``divides_rows``, it computes the tokens of ``Batch.own``
    only, and has all heads."""

    reads_once = True
    divides_rows: bool
    project: ColumnLinear
    out: Linear

    @abstractmethod
    def mix(self, x: torch.Tensor, states: StepStates, rows: torch.Tensor | None) -> torch.Tensor:
        """Return the input of the last projection from ``x [tokens, hidden_size]``, the layer's input. Writes the states of
        the step. With ``rows`` (int64), only these tokens are returned."""

    @abstractmethod
    def targets(self, checkpoint_prefix: str, parameter_prefix: str) -> StateTargets:
        """Yield the targets of the layer's tensors. Names in the checkpoint begin with ``checkpoint_prefix``, parameters of
        the model with ``parameter_prefix``."""

    def parts_forward(self, x: torch.Tensor, batch: Batch, group: int, rows: torch.Tensor | None = None) -> Addend:
        """Map ``x [tokens, hidden_size]`` to ``[tokens, hidden_size]``, but leave it to ``RMSNorm.add_forward`` to add up
        parts (see ``Linear.parts_forward``). ``group`` is the cache group of states. For ``rows`` see ``mix``. With
        ``batch.own``, which excludes ``rows``, this rank computes its own rows only."""
        if batch.own is not None:
            return self._addend(x, batch.own, group)
        return self.out.parts_forward(self.mix(x, step_states(batch, group), rows))

    def forward(self, x: torch.Tensor, batch: Batch, group: int, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Compute ``parts_forward``, added up."""
        if batch.own is not None:
            return batch.own.tp.all_reduce(self._addend(x, batch.own, group).x)
        return self.out.forward(self.mix(x, step_states(batch, group), rows))

    def _addend(self, x: torch.Tensor, own: OwnRows, group: int) -> RankAddend:
        """Return what this rank adds to the result for ``x``: the results of its own rows."""
        return own.addend_of(x, self.out, lambda part, batch: self.mix(part, step_states(batch, group), None))


def step_states(batch: Batch, group: int) -> StepStates:
    """Return the states of cache group ``group`` and the rows of ``batch``."""
    return batch.attn[group]
