"""Pretend to be the engine of a rank: tokens are hashes of everything that the rank was called with.

``PretendedRank`` needs no model. It can run in any process, and keeps a journal, which a test compares with the journal
of another one that got the same calls directly. Faults that it is built with let it raise, end or hang at a call.
"""

from __future__ import annotations

import builtins
import dataclasses
import os
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dovetail import errors
from dovetail.interfaces.executor import ExecutorInfo, RankEngine, WarmUpProgress
from dovetail.types import (
    AdmittedRequest,
    Committed,
    DepartedRequest,
    DraftTree,
    HostLogprobs,
    IntArray,
    LogitRows,
    Masks,
    PageUpdates,
    SharedPrefixes,
    StepPlan,
    StepResult,
)

TARGET = "dovetail.testing.executor_ranks:build"
NUM_GROUPS, NUM_SLOTS, MAX_PAGES, VOCAB = 2, 24, 64, 50_000
_NO_MASK = b""


class RankFault(msgspec.Struct):
    """Let rank ``rank`` (-1: all) fail in the verb ``at``, in the plan ``number`` (0: the first call).

    ``what`` is the name of an exception class to raise, ``exit``, ``kill``, ``stop`` (the process gets SIGSTOP) or
    ``hang``. For ``exit`` and ``kill`` an ``at`` of ``idle_between`` acts a moment after the plan was launched and
    sampled.
    """

    at: str
    what: str
    rank: int = -1
    number: int = 0
    text: str = "out of luck\nand more lines"


class RankScript(msgspec.Struct):
    """Describe how a ``PretendedRank`` behaves. A step's result is ready ``step_seconds`` after it was sampled. ``trees``:
    the drafts are trees, otherwise chains. Those of the plan with the number ``broken_drafts`` are no numbers."""

    draft_width: int = 0
    trees: bool = False
    broken_drafts: int = 0
    step_seconds: float = 0.0
    captures: int = 0
    faults: list[RankFault] = []


class Entry(NamedTuple):
    """Hold one call of the journal: its verb, the number of its plan, and a text for each of its arguments."""

    verb: str
    number: int
    parts: dict[str, str]


def build(description: bytes, rank: int, size: int, rendezvous: str) -> PretendedRank:
    """Build a rank from the bytes of a ``RankScript``. This is a target of ``ExecutorContext``."""
    return PretendedRank(msgspec.json.decode(description, type=RankScript), rank, size)


class PretendedRank(RankEngine):
    """Run steps whose results depend on every plan so far. See the module's docstring."""

    def __init__(self, script: RankScript, rank: int = 0, size: int = 1) -> None:
        self.journal: list[Entry] = []
        self.samples: list[Entry] = []
        self.waits: list[int] = []
        self.late_looks = 0  # calls of ``ready`` in the second half of a step
        self.table = np.zeros((NUM_GROUPS, NUM_SLOTS + 1, MAX_PAGES), np.int32)
        self._script, self._rank = script, rank
        self._captures = script.captures
        self._state = 0
        self._requests: dict[int, AdmittedRequest] = {}  # by slot
        self._by_uid: dict[int, AdmittedRequest] = {}
        self._rows: dict[int, list[AdmittedRequest]] = {}
        self._results: dict[int, tuple[StepResult, float]] = {}
        self._states: dict[int, int] = {}
        self._registered: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
        self._buffers: deque[IntArray] = deque(maxlen=4)
        self._fail("build", 0)

    @property
    def info(self) -> ExecutorInfo:
        """See ``RankEngine``."""
        width = self._script.draft_width
        return ExecutorInfo(120_000, 4, 1000, False, width, observes=width > 0)

    @property
    def progress(self) -> WarmUpProgress:
        """See ``RankEngine``."""
        missing = max(0, self._captures)
        return WarmUpProgress(7, 7, self._script.captures - missing, missing)

    @property
    def page_table(self) -> IntArray:
        """See ``RankEngine``."""
        return self.table

    # -- faults ------------------------------------------------------------------------------------------------------

    def _fail(self, at: str, number: int) -> None:
        for fault in self._script.faults:
            if (fault.at, fault.number) == (at, number) and fault.rank in (-1, self._rank):
                _act(fault.what, fault.text)

    # -- steps -------------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> None:
        """See ``RankEngine.launch``."""
        self._fail("launch", plan.number)
        self._take(plan)
        self._note("launch", plan)
        self._states[plan.number] = self._state
        self._fail("launched", plan.number)

    def sample(self, plan: StepPlan, masks: Masks | None) -> None:
        """See ``RankEngine.sample``."""
        self._fail("sample", plan.number)
        memories = (*self._registered, *self._buffers)
        if masks is not None and not any(np.may_share_memory(masks.bits, memory) for memory in memories):
            raise AssertionError("the device does not know the memory of the masks; call register_masks first")
        seen = {"masks": show(masks), "texts": show(self._processed_texts(plan))}
        self.samples.append(Entry("sample", plan.number, seen))
        result = self._result(plan, masks)
        self._results[plan.number] = result, time.monotonic() + self._script.step_seconds
        self._fail("sampled", plan.number)
        for fault in self._script.faults:
            if (fault.at, fault.number) == ("idle_between", plan.number) and fault.rank in (-1, self._rank):
                threading.Timer(0.2, _act, (fault.what, fault.text)).start()

    def _processed_texts(self, plan: StepPlan) -> list[IntArray]:
        """Return the texts before the sampled tokens of requests with logits processors, which an engine reads now."""
        lens = plan.prefix_lens + plan.extend_lens - (0 if plan.drafts is None else plan.drafts.lens)
        rows = [(self._requests[plan.slots[row]], int(lens[row])) for row in np.flatnonzero(plan.samples)]
        return [request.token_ids[:end].copy() for request, end in rows if request.params.logits_processors]

    def ready(self, plan: StepPlan) -> bool:
        """See ``RankEngine.ready``."""
        left = self._results[plan.number][1] - time.monotonic()
        self.late_looks += 2 * left < self._script.step_seconds
        return left <= 0

    def wait(self, plan: StepPlan) -> StepResult:
        """See ``RankEngine.wait``."""
        self._fail("wait", plan.number)
        result, at = self._results.pop(plan.number)
        time.sleep(max(0.0, at - time.monotonic()))
        self.waits.append(len(self.journal))
        return result

    def propose(self, plan: StepPlan) -> DraftTree | None:
        """See ``RankEngine.propose``."""
        self._fail("propose", plan.number)
        self._take(plan)
        self._note("propose", plan)
        width = self._script.draft_width
        rows = len(plan.slots)
        assert plan.draft_limits is not None
        rng = np.random.default_rng(self._state)
        if plan.number == self._script.broken_drafts:
            return DraftTree.chains(np.full((rows, width), None), np.ones(rows, np.int32))
        lens = rng.integers(0, width + 1, rows).astype(np.int32)
        lens[: plan.num_extend] = 0
        lens = np.minimum(lens, plan.draft_limits)
        if not lens.any():
            return None
        tokens = rng.integers(0, VOCAB, (rows, width)).astype(np.int32)
        if not self._script.trees:
            return DraftTree.chains(tokens, lens)
        parents = np.stack([rng.integers(-1, np.arange(width)) for _ in range(rows)]).astype(np.int32)
        return DraftTree(tokens, parents, lens, rng.random((rows, width)).astype(np.float32))

    def observe(self, plan: StepPlan, committed: Committed) -> None:
        """See ``RankEngine.observe``."""
        self._fail("observe", plan.number)
        texts = [r.token_ids[:n] for r, n in zip(self._rows[plan.number], committed.known_lens.tolist(), strict=True)]
        self._enter(Entry("observe", plan.number, {"committed": show(committed), "texts": show(texts)}))

    def forget(self, departed: Sequence[DepartedRequest]) -> None:
        """See ``RankEngine.forget``."""
        self._fail("forget", 0)
        texts = [self._by_uid[uid].token_ids[:count] for uid, count in departed]
        self._enter(Entry("forget", 0, {"departed": show(departed), "texts": show(texts)}))

    def close(self) -> None:
        """See ``RankEngine.close``."""

    def locate_updates(self, updates: PageUpdates) -> None:
        """See ``RankEngine.locate_updates``."""
        assert self.table.shape[1] > (updates.slots.max() if len(updates.slots) else 0)

    def mask_buffer(self, rows: int, width: int) -> IntArray:
        """See ``RankEngine.mask_buffer``."""
        self._buffers.append(np.empty((rows, width), np.int32))
        return self._buffers[-1]

    def register_masks(self, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """See ``RankEngine.register_masks``."""
        self._registered.append(memory)

    # -- other calls -------------------------------------------------------------------------------------------------

    def idle(self) -> bool:
        """See ``RankEngine.idle``."""
        self._fail("idle", 0)
        self._captures -= 1
        return self._captures >= 0

    def lost(self, error: BaseException) -> str | None:
        """See ``RankEngine.lost``."""
        return "the pretended device is gone" if "device gone" in str(error) else None

    def describe(self) -> dict[str, Any]:
        """See ``RankEngine.describe``."""
        return {"pretended": True, "rank": self._rank, "captures": self._captures}

    def call(self, name: str, args: Any) -> Any:
        """Return the journal, the samples, the number of calls before each result, that of late looks, the page
        table, or the arguments."""
        self._fail(name, 0)
        match name:
            case "journal" | "samples":
                return [list(entry) for entry in getattr(self, name)]
            case "waits" | "late_looks":
                return getattr(self, name)
            case "table":
                return self.table.tolist()
            case "echo":
                return [self._rank, args]
        return super().call(name, args)

    # -- what a step depends on --------------------------------------------------------------------------------------

    def _take(self, plan: StepPlan) -> None:
        """Apply the page updates of a plan, and keep its requests."""
        slots, columns, pages, _ = plan.page_updates
        self.table[:, slots, columns] = pages
        for request in plan.admitted:
            self._requests[request.slot] = self._by_uid[request.uid] = request
        self._rows[plan.number] = [self._requests[slot] for slot in plan.slots.tolist()]

    def _note(self, verb: str, plan: StepPlan) -> None:
        parts = {field.name: show(getattr(plan, field.name)) for field in dataclasses.fields(plan)}
        parts["texts"] = show(list(self._texts(plan)))
        self._enter(Entry(verb, plan.number, parts))

    def _enter(self, entry: Entry) -> None:
        self.journal.append(entry)
        self._state = zlib.crc32(repr(entry).encode(), self._state)

    def _texts(self, plan: StepPlan) -> Any:
        """Return the texts that a step may read: of prompts, and of rows that may get drafts."""
        requests = self._rows[plan.number]
        for row, known in enumerate(plan.known_lens.tolist()):
            yield requests[row].token_ids[:known]
        if plan.draft_limits is not None:
            for row in range(plan.num_extend, len(requests)):
                yield requests[row].token_ids[: plan.prefix_lens[row] + 1]

    def _result(self, plan: StepPlan, masks: Masks | None) -> StepResult:
        """Return hashes as tokens, and log-probabilities, prompt log-probabilities and vectors where requested."""
        requests, layout = self._rows[plan.number], LogitRows.of(plan)
        masked: dict[int, bytes] = {}
        if masks is not None:
            masked = dict(zip(masks.logit_rows.tolist(), [bits.tobytes() for bits in masks.bits], strict=True))
        state = self._states[plan.number]
        hashes = []
        for row, start, span in zip(layout.rows.tolist(), layout.starts.tolist(), layout.spans.tolist(), strict=True):
            r = requests[row]
            seed = zlib.crc32(f"{state} {row} {r.uid} {r.seed} {r.params}".encode() + self.table[:, r.slot].tobytes())
            hashes.append([zlib.crc32(masked.get(start + i, _NO_MASK), seed + i) % VOCAB for i in range(span)])
        width = int(layout.spans.max()) if len(layout.spans) else 1
        tokens = np.array([row + [0] * (width - len(row)) for row in hashes], np.int64).reshape(-1, width)
        scored = [i for i, row in enumerate(layout.rows.tolist()) if requests[row].params.logprobs is not None]
        return StepResult(
            tokens,
            None if plan.drafts is None else 1 + (tokens[:, 0] % layout.spans),
            None if plan.drafts is None else np.tile(np.arange(width), (len(tokens), 1)),
            _logprobs(state, len(scored), 3) if scored else None,
            {row: i for i, row in enumerate(scored)},
            [
                (row, requests[row].token_ids[:2].copy(), _logprobs(state + row, 2, 2))
                for row in range(plan.num_extend)
                if requests[row].params.prompt_logprobs is not None
            ],
            [
                (row, np.random.default_rng(state + row).random(8).astype(np.float32))
                for row in range(plan.num_extend)
                if requests[row].params.pooling is not None
            ],
        )


def _logprobs(seed: int, n: int, top: int) -> HostLogprobs:
    rng = np.random.default_rng(seed)
    chosen, best = (-rng.random(shape).astype(np.float32) for shape in ((n,), (n, top)))
    return HostLogprobs(chosen, best, rng.integers(0, VOCAB, (n, top)))


def _act(what: str, text: str) -> None:
    match what:
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(600)
        case _:
            cls = getattr(errors, what, None) or getattr(builtins, what)
            raise cls(text)


def show(value: Any) -> str:
    """Return a text that differs for values that differ in type, shape or any bit. Of a request's text only the tokens
    that are known count, of a draft tree only its nodes."""
    match value:
        case np.ndarray():
            data = np.ascontiguousarray(value).tobytes()
            return f"{value.dtype}{list(value.shape)}:{zlib.crc32(data):08x}{value.ravel()[:4].tolist()}"
        case DraftTree():
            nodes = [value.row(row) for row in range(len(value.lens))]
            return f"tree {nodes} {value.is_chain} {show(value.lens)} {show(value.token_ids)} {show(value.probs)}"
        case SharedPrefixes():
            return f"shared {show(value.starts)} {show(value.lens)}"
        case AdmittedRequest():
            fields = [f.name for f in dataclasses.fields(value) if f.name != "token_ids"]
            text = f"{show(value.token_ids[: value.known_len])} of {len(value.token_ids)}"
            return f"{[(name, getattr(value, name)) for name in fields]} {text}"
        case Mapping():
            return f"{ {key: show(value[key]) for key in value} }"
        case tuple() | list():
            return f"[{', '.join(map(show, value))}]"
    return repr(value)
