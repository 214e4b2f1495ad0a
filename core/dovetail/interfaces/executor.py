"""Define how the plans of a scheduler reach the engine: an executor runs them on one or several ranks.

A rank is one device with a model, or with its share of a model. ``RankEngine`` runs plans on one rank. An ``Executor``
brings every plan to all ranks, in order, and returns the result of rank 0. All ranks get the same plans in the same
order and take the same decisions, and sampling is deterministic, so their results are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from pydantic import BaseModel

    from dovetail.types import (
        Committed,
        DepartedRequest,
        DraftTree,
        IntArray,
        Masks,
        PageUpdates,
        StepPlan,
        StepResult,
    )


class ArenaLayout(NamedTuple):
    """Describe how one memory is divided among several cache groups (see ``memory.arena``).

    ``num_slabs`` counts slab 0, which holds page 0 of every group. ``pages`` has the number of pages of each group in a
    slab, and ``blocks`` the number of blocks of each group in a slab: page i of slab s has the number s * blocks + i.
    ``states`` are the numbers of the state groups, whose units are slots: a slot is one block, ``slab_bytes // blocks``
    bytes long.
    """

    num_slabs: int
    slab_bytes: int
    pages: tuple[int, ...]
    blocks: tuple[int, ...]
    states: tuple[int, ...] = ()

    @property
    def paged(self) -> tuple[int, ...]:
        """Return the numbers of the groups that keep pages."""
        return tuple(group for group in range(len(self.pages)) if group not in self.states)

    @property
    def columns(self) -> int:
        """Return the number of pages of each paged group that all slabs but slab 0 hold together, next to one slot of each
        state group. Without paged groups, return the number of slots of each group."""
        paged = self.paged
        slabs = self.num_slabs - 1 - (len(self.states) if paged else 0)
        counts = [self.pages[group] for group in paged or self.states]
        low, high = 0, max(0, slabs * min(counts))
        while low < high:
            middle = (low + high + 1) // 2
            if sum(-(-middle // pages) for pages in counts) <= slabs:
                low = middle
            else:
                high = middle - 1
        return low


class ExecutorInfo(NamedTuple):
    """Describe what a scheduler must know of an engine.

    ``num_pages`` counts page 0, which belongs to no request. ``shares_prefixes`` means that rows should be ordered by
    the prefixes that they share. ``draft_width``, ``tokens_ahead`` and ``must_see_all`` describe the drafter (see
    ``interfaces.speculative.Drafter``); ``draft_width`` is 0 without one. ``observes`` means that the drafter has a
    method ``observe``; otherwise the verb ``observe`` need not be called. ``fails_late`` means that an error of
    ``launch`` can surface in ``wait``, when later plans were made: until a step was waited for, the KV that it computes
    must not be given to other requests. ``arena`` divides the memory of models with several cache groups; None means that
    every group has ``num_pages`` pages. ``keeps_all`` means that no page of a request may be given to others while it
    runs, also where no layer sees its tokens any more: a drafter's cache has the same pages. ``num_pools`` is the number of
    ranks with data-parallel attention, of which each has ``num_pages`` pages (or an ``arena``) for the requests in its own
    slots, and 1 if all ranks have the same pages.
    """

    context_len: int
    page_size: int
    num_pages: int
    shares_prefixes: bool
    draft_width: int = 0
    tokens_ahead: int = 0
    must_see_all: bool = False
    observes: bool = False
    fails_late: bool = False
    arena: ArenaLayout | None = None
    keeps_all: bool = False
    num_pools: int = 1


class WarmUpProgress(NamedTuple):
    """Count the Triton kernels that were found to be needed and those of them that are compiled or could not be
    compiled ahead, and the graphs that are captured, missing or refused because their capture failed. Graphs of kinds
    of steps that have not occurred are not missing."""

    kernels: int = 0
    kernels_compiled: int = 0
    graphs_captured: int = 0
    graphs_missing: int = 0
    graphs_refused: int = 0

    @property
    def done(self) -> bool:
        """Return True if nothing is missing."""
        return self.kernels_compiled == self.kernels and not self.graphs_missing


class StepVerbs(ABC):
    """Run plans, in the order of their numbers. Not thread-safe.

    The order of calls for plan N is ``propose`` (if the step can have drafts), ``launch``, ``sample``, ``wait``, and
    ``observe`` (if the step can have drafts). Under overlap ``launch`` of plan N + 1 comes before ``wait`` of plan N.
    Each method may raise what the engine raises; the step has failed then, and no further method is called for its
    plan. The next plan runs as usual: if ``launch`` has raised, it brings the page updates of the failed step again.

    No method changes a plan. The arrays of a plan do not change until the step was waited for, and
    ``AdmittedRequest.token_ids`` only grows.
    """

    @property
    @abstractmethod
    def info(self) -> ExecutorInfo:
        """Return the description of the engine."""

    @property
    @abstractmethod
    def progress(self) -> WarmUpProgress:
        """Return what is compiled and captured so far."""

    @property
    @abstractmethod
    def page_table(self) -> IntArray:
        """Return the page table that the scheduler writes, int32 ``[groups, slots, max_pages]``, in host memory. Each cache
        group of the model has its own pages. Slot 0 belongs to rows that pad a step. Every entry that the scheduler writes is also in the page updates of a plan."""

    @abstractmethod
    def launch(self, plan: StepPlan) -> None:
        """Launch the forward pass of a step. Does not wait for the device."""

    @abstractmethod
    def sample(self, plan: StepPlan, masks: Masks | None) -> None:
        """Sample the step that was launched last, among the tokens that ``masks`` allows. The step before it was waited
        for. The memory of ``masks`` comes from ``mask_buffer``. Without ``plan.constrained``, ``masks`` is None.

        The engine may read all tokens before the sampled ones of requests with logits processors: the first
        ``prefix_lens + extend_lens``, without drafts."""

    @abstractmethod
    def wait(self, plan: StepPlan) -> StepResult:
        """Return the result of a step that was sampled, and wait for it. The host waits for a step only here."""

    @abstractmethod
    def mask_buffer(self, rows: int, width: int) -> IntArray:
        """Return uninitialised memory for the bitmasks of one step, int32 ``[rows, width]``. The next call returns other
        memory."""

    @abstractmethod
    def propose(self, plan: StepPlan) -> DraftTree | None:
        """Return the drafts of the drafter for a plan that was scheduled and is not launched yet; None if there are
        none. All steps before it were waited for."""

    @abstractmethod
    def observe(self, plan: StepPlan, committed: Committed) -> None:
        """Show the drafter what a step accepted. The step is the one that was waited for last, and was committed. Need
        not be called unless ``info.observes``."""

    @abstractmethod
    def forget(self, departed: Sequence[DepartedRequest]) -> None:
        """Make the drafter forget requests."""

    @abstractmethod
    def locate_updates(self, updates: PageUpdates) -> None:
        """Prepare page updates of the next plan while the device computes a step. If the next plan has other updates,
        this has no effect."""

    @abstractmethod
    def idle(self) -> bool:
        """Do one piece of work that would delay a later step, such as capturing a graph. Return False if there is
        none now; there may be later, once kernels are compiled. Raises if the ranks are lost, so that a caller that has no requests should call this every second or so:
        otherwise only the next step would notice that a rank has ended."""

    @abstractmethod
    def lost(self, error: BaseException) -> str | None:
        """Return why no further step can run after ``error``, which one of these methods raised; None if steps can
        run."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what /server_info reports of the engine, as JSON."""

    @abstractmethod
    def close(self) -> None:
        """Release what the object holds. It must not be used again; further calls of ``close`` have no effect."""


class RankEngine(StepVerbs):
    """Run plans on one rank, in the process of that rank.

    The ranks compute together. Every decision about a step (which graph runs it, what is captured) must therefore
    follow from the plans alone, and not from the time or the memory of one rank.
    """

    @abstractmethod
    def ready(self, plan: StepPlan) -> bool:
        """Return True if ``wait`` for a step that was sampled would not wait."""

    def register_masks(self, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Prepare the device to read masks from ``memory`` (uint8 ``[bytes]``, whole pages), which another process writes.

        An executor whose masks are not in memory of ``mask_buffer`` calls this before the first of them is sampled, and
        again with each further mapping of the memory. Mappings that were registered before stay in use until ``close``.
        The masks of a step are overwritten in the third step with masks after it, or later. Raises ``EngineError`` if
        the device cannot read the memory.
        """
        return

    def call(self, name: str, args: Any) -> Any:
        """Run the control call ``name``. ``args`` and the answer consist of what JSON can hold, and bytes. Raises
        ``ValueError`` if there is no such call."""
        raise ValueError(f"there is no control call {name!r}")


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """Describe the ranks that an executor starts.

    There are ``size`` ranks. ``build_rank(rank, size, rendezvous)`` builds the engine of a rank in this process;
    ``rendezvous`` is an address at which the ranks find each other (a URL for torch.distributed), and is empty for one
    rank. The engines of all ranks must be built at the same time.

    Another process builds a rank with ``target``, the "module:attribute" of a function that takes ``(description, rank,
    size, rendezvous)``. ``description`` is all that it needs to load the same plugins and resolve the same config.
    ``log_level`` is that of this process.
    """

    size: int
    build_rank: Callable[[int, int, str], RankEngine]
    target: str
    description: bytes
    log_level: str = "info"


class Executor(StepVerbs):
    """Run plans on all ranks.

    An executor may return before the ranks have done the work of a call. What they raise then surfaces in a later call:
    an error of ``launch`` or ``sample`` at the latest in ``wait`` for the same plan (``info.fails_late``), and an error
    of ``observe`` or ``forget`` in a later call of ``propose``, ``observe`` or ``forget``. If an error of ``launch``
    surfaces later, the executor itself repeats the page updates of the failed step before those of the next one.

    - If all ranks raise in a step, the executor raises this error, or one whose text names its class and its first line.
      The step has failed, and later steps run.
    - If the ranks are not in the same state any more (one has died, hangs, cannot be reached, or has raised an error
      that the others have not), the group is lost. The executor ends all ranks, raises ``RankLostError`` from this call
      and from all later ones, and ``lost`` returns the reason, which names the rank and what can be done.
    - No call waits for ever: each has a deadline, after which the group is lost.
    """

    def __init__(self, config: BaseModel, context: ExecutorContext) -> None:
        """Build the engines of all ranks, and wait for them. ``config`` is the executor's own section.

        Raises what ``build_rank`` raises, and ``EngineError`` if a rank cannot be started.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what /server_info reports of the engine of rank 0, as JSON. ``ranks`` in it has an entry for each rank,
        with its ``rank`` and ``pid``."""

    @abstractmethod
    def call(self, name: str, args: Any = None) -> list[Any]:
        """Run the control call ``name`` on every rank, and return their answers in the order of the ranks. See
        ``RankEngine.call``."""

    @abstractmethod
    def close(self) -> None:
        """End all ranks and release what they have. Further calls of ``close`` have no effect."""
