"""Run the one rank of an engine in this process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError
from dovetail.interfaces.executor import Executor, ExecutorContext, ExecutorInfo, RankEngine, WarmUpProgress

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
    from dovetail_executors.config import LocalConfig


class Local(Executor):
    """Call the engine of rank 0 directly."""

    def __init__(self, config: LocalConfig, context: ExecutorContext) -> None:
        """See ``Executor``. Raises ``ConfigError`` if there are several ranks."""
        if context.size != 1:
            raise ConfigError(
                f"executor is local and parallel.tp is {context.size}; allowed with local: 1. Set executor: workers"
            )
        self._engine: RankEngine = context.build_rank(0, 1, "")
        self._closed = False

    @property
    def rank(self) -> RankEngine:
        """Return the engine of the one rank."""
        return self._engine

    @property
    def info(self) -> ExecutorInfo:
        """See ``Executor``."""
        return self._engine.info

    @property
    def progress(self) -> WarmUpProgress:
        """See ``Executor``."""
        return self._engine.progress

    @property
    def page_table(self) -> IntArray:
        """See ``Executor``. It is the table that the engine reads."""
        return self._engine.page_table

    def launch(self, plan: StepPlan) -> None:
        """See ``Executor.launch``."""
        self._engine.launch(plan)

    def mask_buffer(self, rows: int, width: int) -> IntArray:
        """See ``Executor.mask_buffer``."""
        return self._engine.mask_buffer(rows, width)

    def sample(self, plan: StepPlan, masks: Masks | None) -> None:
        """See ``Executor.sample``."""
        self._engine.sample(plan, masks)

    def wait(self, plan: StepPlan) -> StepResult:
        """See ``Executor.wait``."""
        return self._engine.wait(plan)

    def propose(self, plan: StepPlan) -> DraftTree | None:
        """See ``Executor.propose``."""
        return self._engine.propose(plan)

    def observe(self, plan: StepPlan, committed: Committed) -> None:
        """See ``Executor.observe``."""
        self._engine.observe(plan, committed)

    def forget(self, departed: Sequence[DepartedRequest]) -> None:
        """See ``Executor.forget``."""
        self._engine.forget(departed)

    def locate_updates(self, updates: PageUpdates) -> None:
        """See ``Executor.locate_updates``."""
        self._engine.locate_updates(updates)

    def idle(self) -> bool:
        """See ``Executor.idle``."""
        return self._engine.idle()

    def lost(self, error: BaseException) -> str | None:
        """See ``Executor.lost``."""
        return self._engine.lost(error)

    def describe(self) -> dict[str, Any]:
        """See ``Executor.describe``."""
        return {**self._engine.describe(), "ranks": [{"rank": 0, "pid": os.getpid()}]}

    def call(self, name: str, args: Any = None) -> list[Any]:
        """See ``Executor.call``."""
        return [self._engine.call(name, args)]

    def close(self) -> None:
        """See ``Executor.close``."""
        if not self._closed:
            self._closed = True
            self._engine.close()
