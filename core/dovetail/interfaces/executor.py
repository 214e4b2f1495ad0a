"""Define how the plans of a scheduler reach the engine: an executor runs them on one or several ranks.

A rank is one device with a model, or with its share of a model. All ranks get the same plans in the same order and take
the same decisions; the result of a step is that of rank 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class ExecutorInfo(NamedTuple):
    """Describe what a scheduler must know of an engine.

    ``num_pages`` counts page 0, which belongs to no request. ``shares_prefixes`` means that rows should be ordered by the
    prefixes that they share. The last three fields describe the drafter (see ``interfaces.speculative.Drafter``);
    ``draft_width`` is 0 without one.
    """

    context_len: int
    page_size: int
    num_pages: int
    shares_prefixes: bool
    draft_width: int = 0
    tokens_ahead: int = 0
    must_see_all: bool = False


class WarmUpProgress(NamedTuple):
    """Count the Triton kernels that were found to be needed and those of them that are compiled, and the graphs that
    are captured, missing or refused because their capture failed. Graphs of kinds of steps that have not occurred are
    not missing."""

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

    The order of calls for plan N is ``launch``, ``sample``, ``wait``. Under overlap ``launch`` of plan N + 1 comes before
    ``wait`` of plan N. Each method may raise what the engine raises; the step has failed then, and no further method
    is called for its plan.
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
        """Return the page table that the scheduler writes, int32 ``[slots, max_pages]``, in host memory. Slot 0 belongs
        to rows that pad a step."""

    @abstractmethod
    def launch(self, plan: StepPlan) -> None:
        """Launch the forward pass of a step. Does not wait for the device."""

    @abstractmethod
    def sample(self, plan: StepPlan, masks: Masks | None) -> None:
        """Sample the step that was launched last, among the tokens that ``masks`` allows. The step before it was waited
        for. The memory of ``masks`` comes from ``mask_buffer``."""

    @abstractmethod
    def wait(self, plan: StepPlan) -> StepResult:
        """Return the result of a step that was sampled, and wait for it. The host waits for a step only here."""

    @abstractmethod
    def mask_buffer(self, rows: int, width: int) -> IntArray:
        """Return uninitialised memory for the bitmasks of one step, int32 ``[rows, width]``."""

    @abstractmethod
    def propose(self, plan: StepPlan) -> DraftTree | None:
        """Return the drafts of the drafter for a plan that was scheduled and is not launched yet; None if there are
        none. All steps before it were waited for."""

    @abstractmethod
    def observe(self, plan: StepPlan, committed: Committed) -> None:
        """Show the drafter what a step accepted. The step is the one that was waited for last, and was committed."""

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
        none."""

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
    """Run plans on one rank, in the process of that rank."""

    @abstractmethod
    def ready(self, plan: StepPlan) -> bool:
        """Return True if ``wait`` for a step that was sampled would not wait."""
