"""Pause the steps of a loop, profile its ranks, and read the load of its experts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from dovetail.messages import (
    CommandReply,
    ContinueMsg,
    Control,
    ExpertLoadMsg,
    PauseMsg,
    StartProfileMsg,
    StopProfileMsg,
)

if TYPE_CHECKING:
    from dovetail.interfaces.executor import Executor
    from dovetail.loop.verbs import Verbs

NOT_COUNTED = "the load of experts is not counted; set metrics.expert_load to layers or experts"


class LoopControl:
    """Carry out the commands of an operator on one loop. ``is_profiling`` is True while a profile is recorded."""

    def __init__(self, verbs: Verbs, executor: Executor) -> None:
        self.is_profiling = False
        self._verbs, self._executor = verbs, executor
        self._until = (0, 0.0)  # the number of steps and the time at which the profile ends
        self._prefix = ""
        # the answer about the profile that ended last
        self._last = CommandReply("", False, "there is no profile; POST /start_profile starts one")

    def handle(self, msg: Control) -> CommandReply:
        """Carry out a command and return its answer. Raises ``EngineDeadError`` if a rank is lost."""
        match msg:
            case PauseMsg() | ContinueMsg():
                self._verbs.paused = isinstance(msg, PauseMsg)
                return CommandReply(msg.call_id, True)
            case StartProfileMsg():
                return self._start(msg)
            case StopProfileMsg():
                if self.is_profiling and msg.prefix in ("", self._prefix):
                    self._stop()
                return msgspec.structs.replace(self._last, call_id=msg.call_id)
            case ExpertLoadMsg():
                counted = self._executor.call("expert_load")[0]
                if counted is None:
                    return CommandReply(msg.call_id, False, NOT_COUNTED)
                return CommandReply(msg.call_id, True, expert_tokens=dict(counted))

    def after_step(self) -> None:
        """End the profile if it has all its steps or its time is over."""
        steps, end = self._until
        if self._verbs.times.steps >= steps > 0 or time.monotonic() >= end:
            self._stop()

    def _start(self, msg: StartProfileMsg) -> CommandReply:
        if self.is_profiling:
            return CommandReply(msg.call_id, False, "a profile is running; POST /stop_profile ends it")
        settings = [msg.prefix, list(msg.activities), msg.with_stack, msg.record_shapes]
        errors = [error for error in self._executor.call("start_profile", settings) if error]
        if errors:
            self._executor.call("stop_profile")
            return CommandReply(msg.call_id, False, f"the profiler did not start: {errors[0]}")
        steps = self._verbs.times.steps + msg.num_steps if msg.num_steps else 0
        self.is_profiling, self._prefix, self._until = True, msg.prefix, (steps, time.monotonic() + msg.seconds)
        return CommandReply(msg.call_id, True)

    def _stop(self) -> None:
        self.is_profiling = False
        written = self._executor.call("stop_profile")
        errors = [entry["error"] for entry in written if "error" in entry]
        message = f"the profile was not written: {errors[0]}" if errors else ""
        self._last = CommandReply("", not errors, message, tuple(entry["file"] for entry in written if "file" in entry))
