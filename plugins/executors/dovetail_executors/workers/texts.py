"""Send what is new of the texts of requests, and keep the texts on the other side.

``AdmittedRequest.token_ids`` is an append-only array of the scheduler. A rank has an array of its own for each request,
which is filled as far as the engine may read it. It is dropped when another request gets the slot; with a drafter, also
when the drafter has forgotten the request, whichever comes later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dovetail.types import DepartedRequest, IntArray

if TYPE_CHECKING:
    from dovetail.types import AdmittedRequest, Committed, StepPlan


class TextUpdates(msgspec.Struct, array_like=True, gc=False):
    """Hold tokens that are new: ``counts[i]`` of the request ``uids[i]``, from index ``starts[i]`` on. ``tokens`` has
    them one after the other, int32."""

    uids: list[int]
    starts: list[int]
    counts: list[int]
    tokens: IntArray


class _Text:
    """Hold the array of a request, and the number of its tokens that both sides have."""

    __slots__ = ("forgotten", "processed", "sent", "slot", "tokens", "uid")

    def __init__(self, uid: int, slot: int, tokens: IntArray) -> None:
        self.uid, self.slot, self.tokens, self.sent = uid, slot, tokens, 0
        self.processed = False  # its logits processors read it when a step is sampled
        self.forgotten = False


class _Texts:
    """Keep the texts of requests. Both sides make the same calls in the same order."""

    def __init__(self, *, drafts: bool) -> None:
        self._drafts = drafts
        self.by_uid: dict[int, _Text] = {}
        self.by_slot: dict[int, _Text] = {}

    def keep(self, text: _Text) -> None:
        """Keep the text of a request that has got a slot."""
        before = self.by_slot.get(text.slot)
        if before is not None and before is not text and (before.forgotten or not self._drafts):
            self._drop(before)
        self.by_uid[text.uid] = self.by_slot[text.slot] = text

    def forget(self, departed: Iterable[DepartedRequest]) -> None:
        """Drop the texts of requests that the drafter has forgotten, unless no other request has got the slot."""
        for uid, _ in departed:
            text = self.by_uid.get(uid)
            if text is None:
                continue
            if self.by_slot[text.slot] is text:
                text.forgotten = True
            else:
                self._drop(text)

    def _drop(self, text: _Text) -> None:
        if self.by_uid.get(text.uid) is text:
            del self.by_uid[text.uid]


class TextSender:
    """Know which tokens the ranks have. With ``drafts``, the ranks have a drafter.

    Each of the methods ``of_...`` returns what a message must contain. The caller calls ``sent`` once the message is
    sent, and before the next one. Without that call the ranks count as not having got the message.
    """

    def __init__(self, *, drafts: bool) -> None:
        self._texts = _Texts(drafts=drafts)
        # what the last message contains: texts that are new, the ends of those that grow, and requests to forget
        self._new: dict[int, _Text] = {}  # by slot
        self._due: list[tuple[_Text, int]] = []
        self._departed: Sequence[DepartedRequest] = ()

    def sent(self) -> None:
        """Note that the last message is sent. If this is interrupted, it can be called again."""
        for text in self._new.values():
            self._texts.keep(text)
        for text, end in self._due:
            text.sent = end
        if self._departed:
            self._texts.forget(self._departed)
        self.discard()

    def discard(self) -> None:
        """Note that the last message was not sent."""
        self._new, self._due, self._departed = {}, [], ()

    def of_plan(self, plan: StepPlan) -> TextUpdates | None:
        """Return the tokens that the engine may read in the step of ``plan`` and that were not sent before, or None."""
        due: list[tuple[_Text, int]] = []
        if plan.admitted:
            self._new = {request.slot: _text_of(request) for request in plan.admitted}
            due = [(self._new[request.slot], request.known_len) for request in plan.admitted]
        count = plan.num_extend
        if count:
            due += self._rows(plan.slots[:count].tolist(), plan.known_lens.tolist())
        if plan.draft_limits is not None and count < len(plan.slots):
            due += self._rows(plan.slots[count:].tolist(), (plan.prefix_lens[count:] + 1).tolist())
        return self._updates(due)

    def of_sample(self, plan: StepPlan) -> TextUpdates | None:
        """Return the tokens that logits processors may read in the step of ``plan`` and that were not sent before, or
        None. The step before is committed."""
        lens = plan.prefix_lens + plan.extend_lens
        if plan.drafts is not None:
            lens = lens - plan.drafts.lens
        by_slot = self._texts.by_slot
        rows = [(by_slot[slot], end) for slot, end in zip(plan.slots.tolist(), lens.tolist(), strict=True)]
        return self._updates([(text, end) for text, end in rows if text.processed and text.sent < end])

    def of_committed(self, plan: StepPlan, committed: Committed) -> TextUpdates | None:
        """Return the tokens that the host has learned from the step of ``plan`` and that were not sent before, or
        None."""
        return self._updates(self._rows(plan.slots.tolist(), committed.known_lens.tolist()))

    def of_departed(self, departed: Sequence[DepartedRequest]) -> TextUpdates | None:
        """Return the tokens of requests that have departed that were not sent before, or None."""
        by_uid = self._texts.by_uid
        self._departed = departed
        return self._updates([(by_uid[uid], end) for uid, end in departed if uid in by_uid])

    def _rows(self, slots: list[int], ends: list[int]) -> list[tuple[_Text, int]]:
        new, by_slot = self._new, self._texts.by_slot
        texts = [new.get(slot) or by_slot[slot] for slot in slots]
        return [(text, end) for text, end in zip(texts, ends, strict=True) if text.sent < end]

    def _updates(self, due: list[tuple[_Text, int]]) -> TextUpdates | None:
        """Return the tokens up to the end of each text in ``due``, in which a text may be twice."""
        if not due:
            return None
        ends: dict[int, tuple[_Text, int]] = {}
        for text, end in due:
            if end > ends.get(text.uid, (text, text.sent))[1]:
                ends[text.uid] = text, end
        self._due = list(ends.values())
        if not self._due:
            return None
        parts = [text.tokens[text.sent : end] for text, end in self._due]
        starts, counts = [text.sent for text, _ in self._due], [len(part) for part in parts]
        return TextUpdates(list(ends), starts, counts, np.concatenate(parts) if len(parts) > 1 else parts[0])


def _text_of(request: AdmittedRequest) -> _Text:
    text = _Text(request.uid, request.slot, request.token_ids)
    text.processed = bool(request.params.logits_processors)
    return text


class TextReceiver:
    """Keep the texts of requests in a rank's process. With ``drafts``, the rank has a drafter."""

    def __init__(self, *, drafts: bool) -> None:
        self._texts = _Texts(drafts=drafts)

    def admit(self, uid: int, slot: int, length: int) -> IntArray:
        """Return a new array for a text of at most ``length`` tokens."""
        text = _Text(uid, slot, np.zeros(length, np.int32))
        self._texts.keep(text)
        return text.tokens

    def apply(self, updates: TextUpdates | None) -> None:
        """Append tokens to texts."""
        if updates is None:
            return
        first, by_uid = 0, self._texts.by_uid
        for uid, start, count in zip(updates.uids, updates.starts, updates.counts, strict=True):
            text = by_uid[uid]
            assert text.sent == start, f"tokens {text.sent} to {start} of request {uid} were lost"
            text.tokens[start : start + count] = updates.tokens[first : first + count]
            text.sent = start + count
            first += count

    def forget(self, departed: Iterable[DepartedRequest]) -> None:
        """See ``_Texts.forget``. The engine may still hold the arrays."""
        self._texts.forget(departed)
