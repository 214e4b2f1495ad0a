"""Conformance suite of drafters: what the core relies on. How good the drafts are is for benchmarks to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch

from dovetail.interfaces.features import Feature
from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.registry.specs import ComponentKind
from dovetail.sampling_params import SamplingParams
from dovetail.testing.component import ComponentSuite
from dovetail.testing.draft_engine import DrafterEngineTests
from dovetail.testing.policy import snapshot
from dovetail.types import Batch, DraftTree, FloatArray, IntArray, PageUpdates, Req

VOCAB_SIZE = 64
MAX_CONTEXT = 256

each_seed = pytest.mark.parametrize("seed", range(8))


def make_running(uid: int, text: Sequence[int], *, prompt_len: int | None = None) -> Req:
    """A request that decodes: all of ``text`` is known, and all but its last token has its KV in the pool."""
    token_ids = np.full(
        MAX_CONTEXT, VOCAB_SIZE - 1, dtype=np.int32
    )  # the unused rest holds anything: the drafter may not read it
    token_ids[: len(text)] = text
    return Req(
        rid=f"req-{uid}",
        token_ids=token_ids,
        prompt_len=len(text) if prompt_len is None else prompt_len,
        params=SamplingParams(),
        uid=uid,
        slot=uid,
        cached_len=len(text) - 1,
        device_len=len(text),
        known_len=len(text),
    )


def go_on(req: Req, tokens: Sequence[int]) -> None:
    """Let a running request say more: as if each of ``tokens`` had been sampled in a step of its own."""
    req.token_ids[req.known_len : req.known_len + len(tokens)] = tokens
    req.known_len += len(tokens)
    req.cached_len += len(tokens)
    req.device_len += len(tokens)


def make_decode_batch(reqs: Sequence[Req], draft_limits: Sequence[int], num_extend: int = 0) -> Batch:
    """A batch as ``Scheduler.schedule`` hands it to the drafter; the first ``num_extend`` rows extend."""
    none = np.zeros(0, dtype=np.int32)
    return Batch(
        reqs=list(reqs),
        num_extend=num_extend,
        slots=np.array([req.slot for req in reqs], dtype=np.int32),
        prefix_lens=np.array([req.cached_len for req in reqs], dtype=np.int32),
        extend_lens=np.array([req.extend_len for req in reqs], dtype=np.int32),
        samples=np.ones(len(reqs), dtype=np.bool_),
        page_updates=PageUpdates(none, none, none[None]),
        draft_limits=np.array(draft_limits, dtype=np.int32),
    )


def draft_of(tree: DraftTree | None, row: int) -> list[tuple[int, int]]:
    """The (token, parent) nodes of one row."""
    if tree is None:
        return []
    count = int(tree.lens[row])
    return list(zip(tree.token_ids[row, :count].tolist(), tree.parents[row, :count].tolist(), strict=True))


class DrafterSuite(DrafterEngineTests, ComponentSuite):
    """``class TestMine(DrafterSuite): name = "mine"`` is a whole test file."""

    kind: ClassVar[ComponentKind] = ComponentKind.DRAFTER
    learns: ClassVar[bool] = False
    """True for a drafter that drafts for one request what it has learnt from others of the namespace."""

    def make(self) -> Drafter:
        """A new drafter for texts below ``MAX_CONTEXT`` over ``VOCAB_SIZE`` tokens. Override it to test a class that no
        plugin registers."""
        return self.build(
            DrafterContext(torch.device("cpu"), vocab_size=VOCAB_SIZE, max_rows=16, max_context=MAX_CONTEXT)
        )

    def make_requests(self, seed: int, count: int = 8) -> list[Req]:
        """Random texts, most of each said by the model: every other one repeats itself. Override it where a drafter needs more of its requests."""
        rng = np.random.default_rng(seed)
        reqs = []
        for uid in range(count):
            phrase = rng.integers(0, VOCAB_SIZE, rng.integers(1, 12))
            text = np.tile(phrase, 6) if uid % 2 else rng.integers(0, VOCAB_SIZE, rng.integers(1, 80))
            reqs.append(make_running(uid, text.tolist(), prompt_len=1 + len(text) // 4))
        return reqs

    def test_max_draft_tokens_is_positive(self) -> None:
        """The scheduler reserves pages for this many."""
        assert self.make().max_draft_tokens >= 1

    @each_seed
    def test_drafts_are_valid_trees_within_their_limits(self, seed: int) -> None:
        """Arrays cover all rows; extend rows and rows whose limit is 0 get nothing; parents come before their children."""
        drafter, rng = self.make(), np.random.default_rng(seed)
        reqs = self.make_requests(seed)
        num_extend = int(rng.integers(0, 4))
        limit = rng.integers(0, drafter.max_draft_tokens + 3, len(reqs)).astype(np.int32)
        tree = drafter.propose(make_decode_batch(reqs, limit.tolist(), num_extend))
        if tree is not None:
            assert tree.lens.any(), "where no row has a draft, propose returns None"
            allowed = np.minimum(limit, drafter.max_draft_tokens)
            allowed[:num_extend] = 0
            self.proves(Feature.DRAFT_CHAIN if tree.is_chain else Feature.DRAFT_TREE)
            self.check_tree(tree, allowed)

    def check_tree(self, tree: DraftTree, allowed: IntArray) -> None:
        """``tree`` is well formed, with at most ``allowed [rows]`` nodes per row."""
        rows, width = tree.token_ids.shape
        assert rows == len(allowed)
        assert tree.parents.shape == (rows, width)
        assert tree.lens.shape == (rows,)
        assert {array.dtype for array in (tree.token_ids, tree.parents, tree.lens)} == {np.dtype(np.int32)}
        assert (tree.lens >= 0).all()
        assert (tree.lens <= allowed).all(), "more was drafted than pages were reserved for"
        assert (tree.lens <= width).all()
        for row in range(rows):
            for place, (token, parent) in enumerate(draft_of(tree, row)):
                assert 0 <= token < VOCAB_SIZE
                assert -1 <= parent < place, "parents come before their children"
        assert tree.is_chain or self.offers(Feature.DRAFT_TREE), "a tree was drafted, but only chains are declared"
        stated, offered = tree.probs is not None, self.offers(Feature.DRAFT_PROBS)
        assert offered or not stated, "probs are stated, but draft.probs is not declared"
        assert stated or not offered, "draft.probs is declared, but no probs are stated"
        if tree.probs is not None:
            self.proves(Feature.DRAFT_PROBS)
            self.check_probs(tree, tree.probs)

    def check_probs(self, tree: DraftTree, probs: FloatArray) -> None:
        """Between 0 and 1, and of no draft more than of its parent."""
        assert (probs.shape, probs.dtype) == (tree.token_ids.shape, np.dtype(np.float32))
        for row, count in enumerate(tree.lens.tolist()):
            for place in range(count):
                p, parent = probs[row, place], int(tree.parents[row, place])
                assert 0 <= p <= 1, f"draft {place} of row {row} has probability {p}"
                most = probs[row, parent] if parent >= 0 else 1
                assert p <= most, "a draft is likelier than its parent: probs include the drafts above"

    def test_without_reserved_pages_there_are_no_drafts(self) -> None:
        """None, rather than a tree of nothing."""
        reqs = self.make_requests(0)
        assert self.make().propose(make_decode_batch(reqs, [0] * len(reqs))) is None

    def test_extend_rows_alone_get_no_drafts(self) -> None:
        """Only decode rows are verified."""
        reqs = self.make_requests(0)
        assert self.make().propose(make_decode_batch(reqs, [9] * len(reqs), num_extend=len(reqs))) is None

    @each_seed
    def test_proposing_changes_no_request(self, seed: int) -> None:
        """Drafts are proposals: only commit writes to a request."""
        reqs = self.make_requests(seed)
        before = [snapshot(req) for req in reqs]
        self.make().propose(make_decode_batch(reqs, [9] * len(reqs)))
        assert [snapshot(req) for req in reqs] == before

    @each_seed
    def test_the_same_texts_get_the_same_drafts(self, seed: int) -> None:
        """Two drafters agree, so that a run can be repeated."""
        reqs = self.make_requests(seed)
        batch = make_decode_batch(reqs, [9] * len(reqs))
        first, second = self.make().propose(batch), self.make().propose(batch)
        for row in range(len(reqs)):
            assert draft_of(first, row) == draft_of(second, row)

    @each_seed
    def test_rows_are_independent(self, seed: int) -> None:
        """A row's draft does not depend on its neighbours or its place."""
        reqs = self.make_requests(seed)
        together = self.make().propose(make_decode_batch(reqs, [9] * len(reqs)))
        backwards = self.make().propose(make_decode_batch(reqs[::-1], [9] * len(reqs)))
        for row, req in enumerate(reqs):
            alone = draft_of(self.make().propose(make_decode_batch([req], [9])), 0)
            assert draft_of(together, row) == alone
            assert draft_of(backwards, len(reqs) - 1 - row) == alone

    @each_seed
    def test_what_is_forgotten_leaves_no_trace(self, seed: int) -> None:
        """After ``forget``, other text under the same name is drafted as by a new drafter."""
        if self.learns:
            pytest.skip(f"{self.name} says that it learns")
        self.check_no_trace(self.make_requests(seed), self.make_requests(seed + 100))

    @each_seed
    def test_namespaces_share_nothing(self, seed: int) -> None:
        """Requests of another namespace, with other texts or the same, are drafted as by a new drafter, also where the
        others' texts were known to go on."""
        for other in (seed, seed + 100):
            old, new = self.make_requests(seed), self.make_requests(other)
            for req in old:
                go_on(req, range(10, 22))
                req.namespace = "theirs"
            self.check_no_trace(old, new)

    def check_no_trace(self, old: Sequence[Req], new: Sequence[Req]) -> None:
        """``new`` is drafted alike by a new drafter and by one that has seen and forgotten ``old``."""
        drafter = self.make()
        batch = make_decode_batch(old, [9] * len(old))
        drafter.propose(batch)
        for req in old:
            drafter.forget(req)
        batch = make_decode_batch(new, [9] * len(new))
        remembered, fresh = drafter.propose(batch), self.make().propose(batch)
        for row in range(len(new)):
            assert draft_of(remembered, row) == draft_of(fresh, row)

    def test_forgetting_the_unknown_is_nothing(self) -> None:
        """A request may end before it was ever drafted for."""
        self.make().forget(self.make_requests(0)[0])
