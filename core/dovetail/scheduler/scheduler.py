"""The scheduler: add, schedule, commit, abort. Pure CPU Python; it knows nothing of tensors or devices.

A request waits, then prefills (its prompt enters in chunks), then decodes, then is finished:

    add -> waiting -> prefilling -> decoding -> finished
              ^___________|____________|   retract: its pages are needed elsewhere; nothing is lost

Cursors advance in ``schedule``, when work is handed out; ``commit`` brings the tokens, one step later under overlap.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dovetail.errors import QueueFullError, RequestError
from dovetail.messages import Answer, GenerateMsg, RequestFailed, TokenOutput
from dovetail.scheduler.admission import Admission
from dovetail.scheduler.drafts import checked
from dovetail.scheduler.intake import make_req
from dovetail.scheduler.limits import Limits, Totals
from dovetail.scheduler.stopping import finish_reason
from dovetail.types import Batch, FinishKind, FinishReason, HostOutput, Req, TokenLogprob

if TYPE_CHECKING:
    from dovetail.interfaces.policy import SchedulePolicy
    from dovetail.memory.ledger import PageLedger
    from dovetail.scheduler.grammar import GrammarService
    from dovetail.tokenizer import Tokenizer
    from dovetail.types import DraftTree


log = logging.getLogger(__name__)


class Scheduler:
    """Decides which requests run in each step, and what their tokens mean. Not thread-safe."""

    def __init__(
        self,
        limits: Limits,
        ledger: PageLedger,
        policy: SchedulePolicy,
        grammars: GrammarService,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.limits = limits
        self.ledger = ledger
        self.grammars = grammars
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.totals = Totals()
        self.waiting: list[Req] = []
        self.prefilling: list[Req] = []
        self.decoding: list[Req] = []
        self._admission = Admission(limits, ledger, policy, self.totals)
        self._compiling: list[Req] = []
        self._departed: list[Req] = []
        self._by_rid: dict[str, Req] = {}
        self._next_uid = 0

    # -- add ---------------------------------------------------------------------------------------------------------

    def add(self, msg: GenerateMsg) -> Req:
        """Put a request in the waiting queue. Raises ``RequestError`` or ``QueueFullError``; then nothing was kept."""
        if msg.rid in self._by_rid:
            raise RequestError(f"rid {msg.rid!r} is already in use; request ids must be unique", param="rid")
        if len(self.waiting) >= self.limits.max_waiting:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting, the bound of scheduler.max_waiting; retry later"
            )
        req = make_req(msg, self.limits, self.tokenizer)
        if msg.params.grammar is not None:
            req.ticket = self.grammars.submit(msg.params.grammar)
            self._compiling.append(req)
        req.uid, self._next_uid = self._next_uid, self._next_uid + 1
        self.waiting.append(req)
        self._by_rid[req.rid] = req
        self.totals.prompt_tokens += req.prompt_len
        return req

    # -- schedule ----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Req]:
        """Requests that hold pages."""
        return self.prefilling + self.decoding

    @property
    def has_work(self) -> bool:
        """True while any request is unfinished."""
        return bool(self._by_rid)

    def poll(self) -> list[Answer]:
        """Collect grammars that have been compiled; the answers are of requests whose grammar was refused."""
        answers: list[Answer] = []
        for req in [r for r in self._compiling if r.ticket.ready]:
            self._compiling.remove(req)
            ticket, req.ticket = req.ticket, None
            try:
                req.matcher = ticket.matcher()
            except RequestError as error:
                answers.append(RequestFailed(req.rid, 400, str(error), error.code, error.param))
            except Exception as error:
                log.exception("the grammar backend gave request %s no matcher", req.rid)
                text = f"the grammar backend gave no matcher: {type(error).__name__}: {error}"
                answers.append(RequestFailed(req.rid, 500, text, "engine_error"))
            if req.matcher is None:
                self.waiting.remove(req)
                self._forget(req)
        return answers

    def take_departed(self) -> list[Req]:
        """Requests that have ended or were retracted since the last call, where there is a drafter that keeps state."""
        departed, self._departed = self._departed, []
        return departed

    def schedule(self) -> Batch | None:
        """The next step's work, with pages reserved and cursors advanced; None if nothing can run now."""
        decode = self._reserve_decodes()
        extend = self._admission.fill(self.waiting, self.prefilling, self.decoding)
        if extend and not self.limits.mixed:
            decode = []
        if not extend and not decode:
            return None
        return self._batch(extend, decode)

    def _reserve_decodes(self) -> list[tuple[Req, int]]:
        """Decode rows that have pages for their next tokens, with their room for drafts; retracts until they fit."""
        width = self.limits.draft_width
        rows: list[tuple[Req, int]] = []
        for req in list(self.decoding):
            if req.slot < 0 or req.remain_len < 1:
                continue
            room = min(width, req.remain_len - 1)
            while req.slot >= 0 and not self.ledger.reserve(req, req.device_len + room):
                self._retract_one()
            if req.slot >= 0:
                rows.append((req, room))
        return [row for row in rows if row[0].slot >= 0]

    def _retract_one(self) -> None:
        """Take back the youngest running request; its tokens stay, its pages are freed (or cached)."""
        victim = max(self.running, key=lambda r: r.uid)
        (self.prefilling if victim in self.prefilling else self.decoding).remove(victim)
        self._release(victim)
        victim.cached_len = 0
        victim.num_retractions += 1
        self.totals.retractions += 1
        self.waiting.insert(0, victim)

    def _batch(self, extend: list[tuple[Req, int]], decode: list[tuple[Req, int]]) -> Batch:
        reqs = [req for req, _ in extend] + [req for req, _ in decode]
        rows, split = len(reqs), len(extend)
        prefix = np.fromiter((r.cached_len for r in reqs), np.int32, rows)
        lens = np.ones(rows, np.int32)
        lens[:split] = [n for _, n in extend]
        samples = np.ones(rows, np.bool_)
        for i, req in enumerate(reqs):
            req.cached_len += int(lens[i]) if i < split else 1
            req.in_flight += 1
            if req.cached_len < req.device_len:
                samples[i] = False
                continue
            req.device_len += 1
            if i < split:
                self.prefilling.remove(req)
                self.decoding.append(req)
        room = np.array([0] * split + [r for _, r in decode], np.int32) if self.limits.draft_width else None
        slots = np.fromiter((r.slot for r in reqs), np.int32, rows)
        return Batch(reqs, split, slots, prefix, lens, samples, self.ledger.table.take_updates(), room)

    def attach(self, batch: Batch, drafts: DraftTree) -> None:
        """Turn the decode rows of a batch into verify rows. Cursors advance as if every draft were accepted. Raises
        ``ValueError``, with nothing changed, for drafts that break the contract of ``Drafter.propose``."""
        tree = checked(batch, drafts, self.limits.vocab_size)
        if tree is None:
            return
        batch.drafts = drafts = tree
        batch.extend_lens = batch.extend_lens + drafts.lens
        for req, count in zip(batch.reqs, drafts.lens.tolist(), strict=True):
            req.cached_len += count
            req.device_len += count

    def take_back(self, batch: Batch) -> None:
        """A batch failed: its tokens may have no KV in the pool, and the device may not have seen its page updates, among
        which those of other requests can be. Follow with ``fail``, once the step before it is committed."""
        self.ledger.table.put_back(batch.page_updates)
        for req, count in zip(batch.reqs, batch.extend_lens.tolist(), strict=True):
            req.cached_len -= count

    # -- commit ------------------------------------------------------------------------------------------------------

    def commit(self, batch: Batch, output: HostOutput) -> list[Answer]:
        """Give the step's tokens to their requests, in place; finished ones return their pages."""
        answers: list[Answer] = []
        sampled = 0
        drafted = batch.drafts.lens.tolist() if batch.drafts is not None else None
        for row, req in enumerate(batch.reqs):
            req.in_flight -= 1
            if row in output.prompt_logprobs:
                self._add_prompt_logprobs(req, int(batch.prefix_lens[row]), output.prompt_logprobs[row])
            if not batch.samples[row]:
                if req.finish is None and req.slot >= 0:
                    self.ledger.share(req)
                continue
            index, sampled = sampled, sampled + 1
            if req.finish is not None:
                continue
            tokens = output.token_ids[index]
            if drafted is not None and drafted[row]:
                self._settle_drafts(req, drafted[row], len(tokens))
            logprobs = (
                output.logprobs[index] if output.logprobs is not None and req.params.logprobs is not None else None
            )
            answers.append(self._commit_row(req, tokens, logprobs))
            if row < batch.num_extend and req.slot >= 0:
                self.ledger.share(req)
        return answers

    def _settle_drafts(self, req: Req, drafted: int, accept_len: int) -> None:
        rejected = drafted + 1 - accept_len
        req.cached_len -= rejected
        req.device_len -= rejected
        req.drafted += drafted
        req.accepted += accept_len - 1
        self.totals.drafted_tokens += drafted
        self.totals.accepted_tokens += accept_len - 1

    def _commit_row(self, req: Req, tokens: list[int], logprobs: list[TokenLogprob] | None) -> TokenOutput:
        new: list[int] = []
        for token in tokens:
            req.token_ids[req.known_len] = token
            req.known_len += 1
            new.append(token)
            req.finish = self._finish_reason(req, token)
            if req.finish is not None:
                break
        self.totals.generated_tokens += len(new)
        first = req.known_len - len(new) == req.prompt_len
        if req.finish is not None:
            self._leave(req)
        return TokenOutput(
            rid=req.rid,
            token_ids=new,
            finish=req.finish,
            prompt_tokens=req.prompt_len,
            completion_tokens=req.known_len - req.prompt_len,
            cached_tokens=req.prefix_hit_len,
            logprobs=logprobs[: len(new)] if logprobs is not None else None,
            prompt_logprobs=req.prompt_logprobs if first and req.params.prompt_logprobs is not None else None,
            drafted=req.drafted,
            accepted=req.accepted,
        )

    def _finish_reason(self, req: Req, token: int) -> FinishReason | None:
        """Why the request ends with ``token``. What its matcher or detokenizer raises ends this request alone."""
        if req.error is not None:
            return FinishReason(FinishKind.ERROR, message=req.error)
        try:
            return finish_reason(req, token, self.eos_token_ids)
        except Exception as error:
            log.exception("request %s could not take token %d", req.rid, token)
            return FinishReason(FinishKind.ERROR, message=f"token {token}: {type(error).__name__}: {error}")

    @staticmethod
    def _add_prompt_logprobs(req: Req, start: int, entries: list[TokenLogprob]) -> None:
        """``entries[i]`` belongs to prompt token ``start + i + 1``; a retracted request computes some of them again."""
        fresh = entries[len(req.prompt_logprobs) - start - 1 :]
        req.prompt_logprobs.extend(fresh[: req.prompt_len - len(req.prompt_logprobs)])

    # -- leave -------------------------------------------------------------------------------------------------------

    def abort(self, rid: str, message: str) -> list[Answer]:
        """End a request now. Unknown ids are ignored: it may just have finished."""
        req = self._by_rid.get(rid)
        if req is None:
            return []
        return [self._end(req, FinishReason(FinishKind.ABORT, message=message))]

    def abort_all(self, message: str) -> list[Answer]:
        """End every request now."""
        return [answer for rid in list(self._by_rid) for answer in self.abort(rid, message)]

    def fail(self, reqs: Sequence[Req], message: str) -> list[Answer]:
        """End the requests of a step that failed. Their pages are freed, not cached: what they hold is unknown."""
        answers: list[Answer] = []
        for req in reqs:
            if req.finish is None:
                req.finish = FinishReason(FinishKind.ERROR, message=message)
                self._leave(req, keep=False)
                answers.append(RequestFailed(req.rid, 500, message, "engine_error"))
        return answers

    def _end(self, req: Req, reason: FinishReason) -> TokenOutput:
        req.finish = reason
        if req.ticket is not None:
            req.ticket.cancel()
            self._compiling.remove(req)
        self._leave(req)
        produced = req.known_len - req.prompt_len
        return TokenOutput(req.rid, [], reason, req.prompt_len, produced, req.prefix_hit_len)

    def _leave(self, req: Req, *, keep: bool = True) -> None:
        for queue in (self.decoding, self.prefilling, self.waiting):
            if req in queue:
                queue.remove(req)
                break
        if req.slot >= 0:
            self._release(req, keep=keep)
        self._forget(req)

    def _release(self, req: Req, *, keep: bool = True) -> None:
        self.ledger.release(req, keep=keep)
        if self.limits.draft_width:
            self._departed.append(req)

    def _forget(self, req: Req) -> None:
        del self._by_rid[req.rid]

    def check_integrity(self) -> None:
        """Assert that queues, slots and pages agree; for idle times and tests."""
        self.ledger.check_integrity(self.running)
        for req in self.running:
            assert 0 <= req.cached_len <= req.device_len <= req.max_device_len + 1, req.rid
            assert req.num_pages * self.ledger.page_size >= req.cached_len, req.rid
