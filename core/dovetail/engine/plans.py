"""Run the plans of a scheduler on an engine, with the engine's drafter."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from dovetail.engine.adapter_images import AdapterImages, adapter_slots
from dovetail.engine.device import lost_device
from dovetail.engine.masks import PinnedMappings
from dovetail.engine.pooling import default_pooling
from dovetail.engine.profiling import RankProfiler
from dovetail.interfaces.executor import ExecutorInfo, RankEngine
from dovetail.interfaces.features import Feature
from dovetail.interfaces.speculative import Drafter
from dovetail.ops.cpu.library import library
from dovetail.types import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from dovetail.engine.engine import Engine
    from dovetail.engine.runners import Launched
    from dovetail.interfaces.executor import WarmUpProgress
    from dovetail.types import (
        AdmittedRequest,
        Committed,
        DepartedRequest,
        DraftTree,
        ForwardOutput,
        IntArray,
        Masks,
        PageUpdates,
        StepPlan,
        StepResult,
    )


class PlanRunner(RankEngine):
    """Turn plans into batches, and run them on ``engine``. Not thread-safe.

    Keeps the requests that have a slot, and the steps that are in flight. ``drafter`` can be replaced between two
    steps. Kernels that others launch on the engine's memory must be launched within ``with context:``, because nothing else orders
    them with steps.
    """

    def __init__(
        self,
        engine: Engine,
        context: AbstractContextManager[None] | None = None,
        *,
        threads: str | None = None,
        mirrors_pages: bool = False,
    ) -> None:
        """All work runs within ``context``, which is entered again and again, and may be nested: on CUDA it makes the stream
        current on which ``engine`` was built, and on a CPU it may change the number of threads. By default, work runs on the
        stream that is current when a method is called. ``threads`` is what ``describe`` returns as the number of threads of an
        engine on a CPU, by default torch's own number. ``mirrors_pages`` means that the scheduler writes to another page table
        than ``page_table``, because it is in another process: the page updates of each plan are then copied to ``page_table``
        first."""
        self.engine = engine
        self.drafter: Drafter | None = engine.drafter
        self.context: AbstractContextManager[None] = nullcontext() if context is None else context
        self._threads = threads
        self._mirrors_pages = mirrors_pages
        self._pinned = PinnedMappings(engine.device)
        self._slots: list[AdmittedRequest | None] = [None] * engine.page_table.shape[1]
        self._opened = 0  # the number of the plan whose requests were admitted last
        # requests of the rows with a ``rows_version``, and the slots of their adapters
        self._rows: tuple[int, Sequence[AdmittedRequest], IntArray | None] = 0, (), None
        self._proposed: Batch | None = None  # of the plan with the number ``_opened``, if drafts were proposed for it
        self._launched: tuple[int, Batch, Launched[Any]] | None = None
        self._sampled: dict[int, tuple[Batch, ForwardOutput]] = {}  # by the number of the plan
        self._profiler: RankProfiler | None = None
        self._waited: tuple[Batch, ForwardOutput] | None = None  # the step that ``observe`` shows to the drafter
        self._closed = self._is_lost = False
        self.adapters = None if engine.adapters is None else AdapterImages(engine.adapters)

    @property
    def info(self) -> ExecutorInfo:
        """See ``RankEngine``."""
        engine, drafter = self.engine, self.drafter
        return ExecutorInfo(
            context_len=engine.context_len,
            page_size=engine.page_size,
            num_pages=engine.num_pages,
            shares_prefixes=engine.shares_prefixes,
            draft_width=drafter.max_draft_tokens if drafter is not None else 0,
            tokens_ahead=drafter.tokens_ahead if drafter is not None else 0,
            must_see_all=drafter is not None and drafter.must_see_all,
            observes=drafter is not None and getattr(drafter.observe, "__func__", None) is not Drafter.observe,
            arena=engine.budget.arena,
            keeps_all=engine.keeps_all,
            num_pools=_num_pools(engine),
        )

    @property
    def progress(self) -> WarmUpProgress:
        """See ``RankEngine``."""
        return self.engine.progress

    @property
    def page_table(self) -> IntArray:
        """See ``RankEngine``."""
        return self.engine.page_table

    # -- steps -------------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> None:
        """See ``RankEngine``."""
        with self.context:
            self._launch(plan)

    def _launch(self, plan: StepPlan) -> None:
        self._launched = None
        batch, self._proposed = self._proposed, None
        if batch is None or plan.number != self._opened:
            batch = self._batch(plan)
        else:
            batch.drafts, batch.extend_lens, batch.page_updates = plan.drafts, plan.extend_lens, plan.page_updates
        if plan.state_copies is not None and self.engine.inputs.states is not None:
            self.engine.inputs.states.copy(plan.state_copies)
        self._launched = plan.number, batch, self.engine.launch(batch)

    def sample(self, plan: StepPlan, masks: Masks | None) -> None:
        """See ``RankEngine``."""
        launched, self._launched = self._launched, None
        assert launched is not None, "launch is called before sample"
        number, batch, forward = launched
        assert number == plan.number, f"plan {plan.number} is sampled, but plan {number} was launched last"
        if len(self._sampled) > 1:  # a step that failed is never waited for
            self._sampled = {n: step for n, step in self._sampled.items() if n >= number - 1}
        with self.context:
            self._sampled[number] = batch, self.engine.sample(batch, forward, masks)

    def ready(self, plan: StepPlan) -> bool:
        """See ``RankEngine``."""
        event = self._sampled[plan.number][1].event
        return event is None or event.query()

    def wait(self, plan: StepPlan) -> StepResult:
        """See ``RankEngine``."""
        step = self._sampled.pop(plan.number)
        if self.drafter is not None:
            self._waited = step
        return self.engine.wait(*step)

    def mask_buffer(self, rows: int, width: int) -> IntArray:
        """See ``RankEngine``."""
        return self.engine.mask_buffer(rows, width)

    def register_masks(self, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """See ``RankEngine``. On CUDA the memory is pinned, so that the device copies masks from it directly."""
        self._pinned.add(memory)

    def locate_updates(self, updates: PageUpdates) -> None:
        """See ``RankEngine``."""
        if self._mirrors_pages:
            self._mirror(updates)
        self.engine.locate_updates(updates)

    def idle(self) -> bool:
        """See ``RankEngine``."""
        with self.context:
            return self.engine.idle()

    def _batch(self, plan: StepPlan) -> Batch:
        """Return the batch of ``plan``, after admitting its new requests."""
        if plan.number != self._opened:
            for request in plan.admitted:
                self._slots[request.slot] = request
            if self.engine.inputs.states is not None:
                self.engine.inputs.states.admit(plan.admitted)
            if self._mirrors_pages:
                self._mirror(plan.page_updates)
            self._opened = plan.number
        version, reqs, adapters = self._rows
        if not plan.rows_version or version != plan.rows_version:
            slots = self._slots
            reqs = [request for slot in plan.slots.tolist() if (request := slots[slot]) is not None]
            assert len(reqs) == len(plan.slots), "every row belongs to a request that was admitted"
            adapters = None if self.adapters is None else adapter_slots(reqs)
            self._rows = plan.rows_version, reqs, adapters
        batch = Batch.of(plan, reqs)
        batch.state_saves = plan.state_saves
        if adapters is not None:
            batch.adapters = adapters
        return batch

    def _mirror(self, updates: PageUpdates) -> None:
        if len(updates.slots):
            self.engine.page_table[:, updates.slots, updates.columns] = updates.pages

    # -- drafts ------------------------------------------------------------------------------------------------------

    def propose(self, plan: StepPlan) -> DraftTree | None:
        """See ``RankEngine``."""
        if self.drafter is None:
            return None
        with self.context:
            self._proposed = self._batch(plan)
            tree = self.drafter.propose(self._proposed)
        self.engine.check_captures()  # the drafter may have captured its passes
        return tree

    def observe(self, plan: StepPlan, committed: Committed) -> None:
        """See ``RankEngine``."""
        if self.drafter is not None and self._waited is not None:
            with self.context:
                self.drafter.observe(*self._waited, committed)
            self.engine.check_captures()  # the drafter may have captured its passes

    def forget(self, departed: Sequence[DepartedRequest]) -> None:
        """See ``RankEngine``."""
        if self.drafter is not None:
            with self.context:
                for request in departed:
                    self.drafter.forget(request)

    # -- the engine --------------------------------------------------------------------------------------------------

    def lost(self, error: BaseException) -> str | None:
        """See ``RankEngine``."""
        reason = lost_device(error)
        self._is_lost = self._is_lost or reason is not None
        return reason

    def describe(self) -> dict[str, Any]:
        """See ``RankEngine``."""
        engine = self.engine
        on_cpu = engine.device.type == "cpu"
        return {
            "architecture": engine.info.architecture,
            "device": str(engine.device),
            "cpu_kernels": library().text if on_cpu else None,
            "threads": (self._threads or str(torch.get_num_threads())) if on_cpu else None,
            "products": engine.products,
            "context_len": engine.context_len,
            "page_size": engine.page_size,
            "num_pages": engine.num_pages - 1,
            "num_pools": _num_pools(engine),
            "memory": engine.budget.to_json(),
            "cache_groups": engine.cache_groups,
            "graphs": engine.graphs is not None and engine.graphs.sizes,
            "verify_graphs": engine.verify_graphs is not None and engine.verify_graphs.sizes,
            "kernel_cache": engine.warm_up.kernel_cache,
            "warm_up": engine.progress._asdict(),
            "embedding": self._embedding(),
        }

    def call(self, name: str, args: Any) -> Any:
        """See ``RankEngine``. ``start_profile`` and ``stop_profile`` are those of ``RankProfiler``;
        ``adapters`` runs a command of ``AdapterImages``, and ``expert_load`` returns what ``ExpertLoad.read`` returns, as pairs, on rank 0, because all ranks choose alike."""
        with self.context:
            return self._call(name, args)

    def _call(self, name: str, args: Any) -> Any:
        rank = self.engine.mesh.tp.rank
        if self._profiler is None:
            self._profiler = RankProfiler(rank)
        match name:
            case "expert_load":
                load = self.engine.expert_load
                return None if load is None or rank else list(load.read().items())
            case "start_profile":
                return self._profiler.start(*args)
            case "stop_profile":
                return self._profiler.stop()
            case "adapters" if self.adapters is not None:
                return self.adapters.run(*args)
            case _:
                return super().call(name, args)

    def _embedding(self) -> dict[str, Any] | None:
        """Return the size of embeddings and the kind of pooling that applies unless a request sets another, or None if
        the model has no embeddings."""
        info = self.engine.info
        if Feature.MODEL_EMBED not in info.offers:
            return None
        return {"size": info.hidden_size, "pooling": default_pooling(self.engine.directory)}

    def close(self) -> None:
        """See ``RankEngine``. Drops the engine, so that its memory is freed unless others hold it. The engine of a lost
        device is kept, because freeing its memory would abort the process. So is that of a rank in a process of its own:
        other ranks may still access its memory, and the process ends now."""
        if self._closed:
            return
        self._closed = True
        if self.adapters is not None:
            self.adapters.close()
        try:
            if not self._is_lost:
                self._pinned.close()
        finally:
            self.engine.close()
        if not self._is_lost and not self._mirrors_pages:
            self._slots.clear()
            self._rows, self._proposed, self._launched, self._waited = (0, (), None), None, None, None
            self._sampled.clear()
            self.drafter = self.adapters = None
            del self.engine


def _num_pools(engine: Engine) -> int:
    """Return the number of pools of ``engine.num_pages`` pages: with data-parallel attention each rank has one of its own."""
    return engine.mesh.tp.size if engine.mesh.attention == "data" else 1
