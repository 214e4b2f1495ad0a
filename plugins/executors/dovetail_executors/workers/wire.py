"""Define the messages between an executor and its ranks, and turn plans, masks and results into them and back."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dovetail.interfaces.executor import ExecutorInfo, WarmUpProgress
from dovetail.sampling_params import SamplingParams
from dovetail.types import (
    AdmittedRequest,
    BoolArray,
    Committed,
    DepartedRequest,
    DraftTree,
    FloatArray,
    Int64Array,
    IntArray,
    Masks,
    PageUpdates,
    SharedPrefixes,
    StateCopies,
    StateSaves,
    StepPlan,
    StepResult,
)
from dovetail_executors.workers.packing import Packer, Unpacker
from dovetail_executors.workers.texts import TextReceiver, TextSender, TextUpdates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail_executors.workers.memory import AnonymousMemory


class Verb(enum.IntEnum):
    """Name the messages to ranks. Of these, PROPOSE, IDLE, CALL and DESCRIBE are answered."""

    LAUNCH = 1
    SAMPLE = 2
    PROPOSE = 3
    OBSERVE = 4
    LOCATE = 5
    IDLE = 6
    CALL = 7
    CLOSE = 8
    FORGET = 9
    DESCRIBE = 10


class RankReply(enum.IntEnum):
    """Name the messages from a rank."""

    READY = 1
    RESULT = 2
    ANSWER = 3
    FAILURE = 4
    PROGRESS = 5


class _Admitted(msgspec.Struct, array_like=True, gc=False):
    slot: int
    uid: int
    params: SamplingParams
    seed: int
    prompt_len: int
    max_len: int
    known_len: int
    namespace: str
    retracted: bool
    constrained: bool
    state_slots: tuple[int, ...]
    adapter: int


class _Drafts(msgspec.Struct, array_like=True, gc=False):
    token_ids: IntArray
    lens: IntArray
    parents: IntArray | None  # None: every tree is a chain
    probs: FloatArray | None


class _Shared(msgspec.Struct, array_like=True, gc=False):
    starts: IntArray
    lens: IntArray


class _Plan(msgspec.Struct, array_like=True, gc=False):
    number: int
    again: bool  # the plan was sent before, for its drafts: the requests that it admits are those of that message
    num_extend: int
    slots: IntArray
    prefix_lens: IntArray
    extend_lens: IntArray
    samples: BoolArray
    page_updates: PageUpdates
    known_lens: IntArray
    admitted: list[_Admitted]
    texts: TextUpdates | None
    rows_version: int
    constrained: bool
    draft_limits: IntArray | None
    shared: _Shared | None
    drafts: _Drafts | None
    state_copies: StateCopies | None
    state_saves: StateSaves | None


class _Sample(msgspec.Struct, array_like=True, gc=False):
    number: int
    memory: int  # size of the memory of masks; 0 without masks
    offset: int
    shape: tuple[int, int]
    logit_rows: Int64Array | None
    texts: TextUpdates | None


class _Observe(msgspec.Struct, array_like=True, gc=False):
    number: int
    known_lens: IntArray
    ended: BoolArray
    texts: TextUpdates | None


class _Forget(msgspec.Struct, array_like=True, gc=False):
    departed: list[DepartedRequest]
    texts: TextUpdates | None


class _Result(msgspec.Struct, array_like=True, gc=False):
    number: int
    result: StepResult


class ControlCall(msgspec.Struct, array_like=True, gc=False):
    """Hold the name and the arguments of a control call."""

    name: str
    args: Any


class CallResult(msgspec.Struct, array_like=True, gc=False):
    """Hold what a rank returns for a call: ``number`` is that of the message."""

    number: int
    value: Any


class _DraftAnswer(msgspec.Struct, array_like=True, gc=False):
    number: int
    drafts: _Drafts | None


class Ready(msgspec.Struct, array_like=True, gc=False):
    """State that the engine of a rank is built. ``page_table`` is the shape of its page table."""

    info: ExecutorInfo
    page_table: tuple[int, int, int]


class RankFailure(msgspec.Struct, array_like=True, gc=False):
    """Hold what a rank has raised: in the step of a plan, if ``plan`` is not 0, or else in message ``message``.

    ``kind`` is the name of the exception's class, ``text`` the first line of its text, ``lost`` the reason why the device
    is lost, if it is.
    """

    plan: int
    message: int
    kind: str
    text: str
    lost: str | None


def _drafts_out(tree: DraftTree | None) -> _Drafts | None:
    if tree is None:
        return None
    return _Drafts(tree.token_ids, tree.lens, None if tree.is_chain else tree.parents, tree.probs)


def _drafts_in(drafts: _Drafts | None) -> DraftTree | None:
    if drafts is None:
        return None
    if drafts.parents is not None:
        return DraftTree(drafts.token_ids, drafts.parents, drafts.lens, drafts.probs)
    tree = DraftTree.chains(drafts.token_ids, drafts.lens)
    tree.probs = drafts.probs
    return tree


class PlanSender:
    """Turn what an executor is called with into messages to all ranks. Every message to the ranks is made here, and
    sent before the next one is made.

    A message contains what the ranks have not got yet. An exception or an interrupt (Ctrl-C) can come before the message
    is sent, or after that. When the next message is made, the number of messages that were sent tells which: only then
    the content of the last one counts as sent.
    """

    def __init__(self, num_sent: Callable[[], int], *, drafts: bool) -> None:
        """``num_sent`` returns the number of messages that were sent to the ranks."""
        self._num_sent = num_sent
        self._before = num_sent()  # the number of messages that were sent when the last one was made
        self._texts = TextSender(drafts=drafts)
        self._packer = Packer()
        self._proposed = 0  # the number of the last plan that was sent for its drafts
        self._proposing = 0  # the same, if the last message is sent

    def _begin(self) -> None:
        """Note whether the last message was sent. If this is interrupted, the next call does it again."""
        sent = self._num_sent()
        if sent > self._before:
            self._texts.sent()
            self._proposed = self._proposing
        else:
            self._texts.discard()
            self._proposing = self._proposed
        self._before = sent

    def plan(self, plan: StepPlan, *, propose: bool = False) -> bytes:
        """Return the message with a plan, which is launched or, with ``propose``, gets drafts."""
        self._begin()
        again = plan.number == self._proposed
        if propose:
            self._proposing = plan.number
        shared = plan.shared
        wire = _Plan(
            plan.number,
            again,
            plan.num_extend,
            plan.slots,
            plan.prefix_lens,
            plan.extend_lens,
            plan.samples,
            plan.page_updates,
            plan.known_lens,
            [] if again else [_admitted_out(request) for request in plan.admitted],
            None if again else self._texts.of_plan(plan),
            plan.rows_version,
            plan.constrained,
            plan.draft_limits,
            None if shared is None else _Shared(shared.starts, shared.lens),
            _drafts_out(plan.drafts),
            plan.state_copies,
            plan.state_saves,
        )
        return self._packer.pack(wire)

    def sample(self, plan: StepPlan, masks: Masks | None, memory: int, offset: int) -> bytes:
        """Return the message that samples a step. The bits of ``masks`` are at ``offset`` of a memory of ``memory``
        bytes."""
        self._begin()
        texts = self._texts.of_sample(plan)
        if masks is None:
            return self._packer.pack(_Sample(plan.number, 0, 0, (0, 0), None, texts))
        rows, width = masks.bits.shape
        return self._packer.pack(_Sample(plan.number, memory, offset, (rows, width), masks.logit_rows, texts))

    def observe(self, plan: StepPlan, committed: Committed) -> bytes:
        """Return the message that shows what a step accepted."""
        self._begin()
        texts = self._texts.of_committed(plan, committed)
        return self._packer.pack(_Observe(plan.number, committed.known_lens, committed.ended, texts))

    def forget(self, departed: Sequence[DepartedRequest]) -> bytes:
        """Return the message that makes the drafter forget requests."""
        self._begin()
        texts = self._texts.of_departed(departed)
        return self._packer.pack(_Forget(list(departed), texts))

    def value(self, value: Any) -> bytes:
        """Return another message."""
        self._begin()
        return self._packer.pack(value)

    def empty(self) -> bytes:
        """Return a message that consists of its verb."""
        self._begin()
        return b""


def _admitted_out(request: AdmittedRequest) -> _Admitted:
    return _Admitted(
        request.slot,
        request.uid,
        request.params,
        request.seed,
        request.prompt_len,
        len(request.token_ids),
        request.known_len,
        request.namespace,
        request.retracted,
        request.constrained,
        request.state_slots,
        request.adapter,
    )


class PlanReceiver:
    """Turn the messages to a rank into the arguments of ``RankEngine``. ``masks`` is the memory of bitmasks."""

    def __init__(self, masks: AnonymousMemory, *, drafts: bool) -> None:
        """With ``drafts``, the rank has a drafter."""
        self._texts = TextReceiver(drafts=drafts)
        self._masks = masks
        self._plan = Unpacker[_Plan](_Plan)
        self._sample = Unpacker[_Sample](_Sample)
        self._observe = Unpacker[_Observe](_Observe)
        self._forget = Unpacker[_Forget](_Forget)
        self._locate = Unpacker[PageUpdates](PageUpdates)
        self._call = Unpacker[ControlCall](ControlCall)
        self._proposed: StepPlan | None = None

    def plan(self, data: bytearray) -> StepPlan:
        """Return the plan of a message."""
        wire = self._plan.unpack(data)
        if wire.again:
            proposed = self._proposed
            assert proposed is not None
            assert proposed.number == wire.number, f"plan {wire.number} was not sent for its drafts"
            admitted = proposed.admitted
        else:
            admitted = tuple([self._admit(entry) for entry in wire.admitted])
            self._texts.apply(wire.texts)
        shared = wire.shared
        plan = StepPlan(
            wire.number,
            wire.num_extend,
            wire.slots,
            wire.prefix_lens,
            wire.extend_lens,
            wire.samples,
            wire.page_updates,
            wire.known_lens,
            admitted,
            wire.rows_version,
            wire.constrained,
            wire.draft_limits,
            None if shared is None else SharedPrefixes(shared.starts, shared.lens),
            _drafts_in(wire.drafts),
            wire.state_copies,
            wire.state_saves,
        )
        self._proposed = plan
        return plan

    def _admit(self, entry: _Admitted) -> AdmittedRequest:
        return AdmittedRequest(
            entry.slot,
            entry.uid,
            entry.params,
            entry.seed,
            entry.prompt_len,
            self._texts.admit(entry.uid, entry.slot, entry.max_len),
            entry.known_len,
            entry.namespace,
            entry.retracted,
            entry.constrained,
            entry.state_slots,
            entry.adapter,
        )

    def sample(self, data: bytearray) -> tuple[int, Masks | None]:
        """Return the number of the plan that is sampled, and its masks."""
        wire = self._sample.unpack(data)
        self._texts.apply(wire.texts)
        if wire.logit_rows is None:
            return wire.number, None
        self._masks.map(wire.memory)
        rows, width = wire.shape
        bits = np.frombuffer(self._masks.view, np.int32, rows * width, wire.offset).reshape(rows, width)
        return wire.number, Masks(bits, wire.logit_rows)

    def observe(self, data: bytearray) -> tuple[int, Committed]:
        """Return the number of the plan that was committed, and what it accepted."""
        wire = self._observe.unpack(data)
        self._texts.apply(wire.texts)
        return wire.number, Committed(wire.known_lens, wire.ended)

    def forget(self, data: bytearray) -> list[DepartedRequest]:
        """Return requests that have departed."""
        wire = self._forget.unpack(data)
        self._texts.apply(wire.texts)
        self._texts.forget(wire.departed)
        return wire.departed

    def updates(self, data: bytearray) -> PageUpdates:
        """Return page updates."""
        return self._locate.unpack(data)

    def call(self, data: bytearray) -> ControlCall:
        """Return a control call."""
        return self._call.unpack(data)


class ReplySender:
    """Turn what a rank replies into messages."""

    def __init__(self) -> None:
        self._packer = Packer()

    def result(self, number: int, result: StepResult) -> bytes:
        """Return the message with the result of plan ``number``."""
        return self._packer.pack(_Result(number, result))

    def drafts(self, number: int, tree: DraftTree | None) -> bytes:
        """Return the answer to message ``number``, which asked for drafts."""
        return self._packer.pack(_DraftAnswer(number, _drafts_out(tree)))

    def value(self, value: Any) -> bytes:
        """Return another message."""
        return self._packer.pack(value)


class ReplyReceiver:
    """Read the messages of ranks."""

    def __init__(self) -> None:
        self._result = Unpacker[_Result](_Result)
        self._drafts = Unpacker[_DraftAnswer](_DraftAnswer)
        self._call_result = Unpacker[CallResult](CallResult)
        self._failure = Unpacker[RankFailure](RankFailure)
        self._ready = Unpacker[Ready](Ready)
        self._progress = Unpacker[WarmUpProgress](WarmUpProgress)

    def result(self, data: bytearray) -> tuple[int, StepResult]:
        """Return the number of a plan, and its result."""
        wire = self._result.unpack(data)
        return wire.number, wire.result

    def drafts(self, data: bytearray) -> DraftTree | None:
        """Return drafts."""
        return _drafts_in(self._drafts.unpack(data).drafts)

    def call_result(self, data: bytearray) -> Any:
        """Return what a call has returned."""
        return self._call_result.unpack(data).value

    def failure(self, data: bytearray) -> RankFailure:
        """Return what a rank has raised."""
        return self._failure.unpack(data)

    def progress(self, data: bytearray) -> WarmUpProgress:
        """Return how far the preparation of an engine is."""
        return self._progress.unpack(data)

    def ready(self, data: bytearray) -> Ready:
        """Return what the engine of a rank is like."""
        return self._ready.unpack(data)
