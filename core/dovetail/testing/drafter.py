"""Test the properties of drafters that the core relies on. How good the drafts are is measured by benchmarks."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.registry.specs import ComponentKind
from dovetail.sampling_params import SamplingParams
from dovetail.testing.component import ComponentSuite
from dovetail.testing.draft_engine import DrafterEngineTests
from dovetail.testing.ranks import run_ranks, thread_meshes
from dovetail.types import (
    AdmittedRequest,
    Batch,
    Committed,
    DepartedRequest,
    DraftTree,
    FloatArray,
    IntArray,
    PageUpdates,
    StepPlan,
)

VOCAB_SIZE = 64
MAX_CONTEXT = 256

each_seed = pytest.mark.parametrize("seed", range(8))


@dataclass(slots=True, eq=False)
class RunningRequest:
    """Hold a request that decodes: the host knows its first ``known_len`` tokens, and the KV of all but the last of them
    is in the pool."""

    admitted: AdmittedRequest
    known_len: int
    ended: bool = False

    @property
    def departed(self) -> DepartedRequest:
        """Return what the drafter gets when the request has given its slot back."""
        return DepartedRequest(self.admitted.uid, self.known_len)

    def append(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` to the text, as if each had been sampled in a separate step."""
        self.admitted.token_ids[self.known_len : self.known_len + len(tokens)] = tokens
        self.known_len += len(tokens)


def make_running(
    uid: int,
    text: Sequence[int],
    *,
    prompt_len: int | None = None,
    params: SamplingParams | None = None,
    namespace: str = "",
    retracted: bool = False,
) -> RunningRequest:
    """Return a request whose text is ``text``. The host knew its prompt when it was admitted, and the whole text if it
    was ``retracted`` before."""
    token_ids = np.full(MAX_CONTEXT, VOCAB_SIZE - 1, dtype=np.int32)  # beyond the text: the drafter may not read it
    token_ids[: len(text)] = text
    prompt_len = len(text) if prompt_len is None else prompt_len
    admitted = AdmittedRequest(
        slot=uid,
        uid=uid,
        params=params or SamplingParams(),
        seed=uid,
        prompt_len=prompt_len,
        token_ids=token_ids,
        known_len=len(text) if retracted else prompt_len,
        namespace=namespace,
        retracted=retracted,
    )
    return RunningRequest(admitted, len(text))


def make_decode_batch(reqs: Sequence[RunningRequest], draft_limits: Sequence[int], num_extend: int = 0) -> Batch:
    """Return a batch as the drafter gets it from the engine. The first ``num_extend`` rows extend."""
    none = np.zeros(0, dtype=np.int32)
    known_lens, limits = np.array([req.known_len for req in reqs], np.int32), np.array(draft_limits, np.int32)
    limits.flags.writeable = False
    admitted = [req.admitted for req in reqs]
    plan = StepPlan(
        number=1,
        num_extend=num_extend,
        slots=np.array([req.slot for req in admitted], np.int32),
        prefix_lens=known_lens - np.int32(1),
        extend_lens=np.ones(len(reqs), np.int32),
        samples=np.ones(len(reqs), np.bool_),
        page_updates=PageUpdates(none, none, none[None]),
        known_lens=known_lens[:num_extend],
        admitted=tuple(admitted),
        draft_limits=limits,
    )
    return Batch.of(plan, admitted)


def make_committed(reqs: Sequence[RunningRequest]) -> Committed:
    """Return what the drafter gets when a step of ``reqs`` has been committed."""
    ended = np.array([req.ended for req in reqs], np.bool_)
    return Committed(np.array([req.known_len for req in reqs], np.int32), ended)


def text_of(batch: Batch, row: int) -> list[int]:
    """Return the tokens of a row that the host knew before the step."""
    known_lens = batch.prefix_lens + 1
    if batch.num_extend and batch.known_lens is not None:
        known_lens[: batch.num_extend] = batch.known_lens[: batch.num_extend]
    return batch.reqs[row].token_ids[: known_lens[row]].tolist()


def draft_of(tree: DraftTree | None, row: int) -> list[tuple[int, int]]:
    """Return the (token, parent) nodes of one row."""
    if tree is None:
        return []
    count = int(tree.lens[row])
    return list(zip(tree.token_ids[row, :count].tolist(), tree.parents[row, :count].tolist(), strict=True))


class DrafterSuite(DrafterEngineTests, ComponentSuite):
    """Test a drafter. ``class TestMine(DrafterSuite): name = "mine"`` is a complete test file."""

    kind: ClassVar[ComponentKind] = ComponentKind.DRAFTER
    learns: ClassVar[bool] = False
    """True if the drafter uses, for one request, what it has learnt from other requests of the namespace."""

    def make(self) -> Drafter:
        """Return a new drafter for texts below ``MAX_CONTEXT`` over ``VOCAB_SIZE`` tokens.

        Override it to test a class that no plugin registers.
        """
        return self.build(
            DrafterContext(torch.device("cpu"), vocab_size=VOCAB_SIZE, max_rows=16, max_context=MAX_CONTEXT)
        )

    def make_rank(self, mesh: Mesh) -> Drafter:
        """Return a new drafter for a rank of ``mesh``, whose ranks attend for requests of their own, or for one rank. This is called in a
        thread of the rank. All of these drafters must have the same weights.

        Override it to test a drafter that offers draft.data_attention.
        """
        pytest.skip(f"{self.name} makes no drafters of several ranks here")

    def make_requests(self, seed: int, count: int = 8) -> list[RunningRequest]:
        """Return requests with random texts, most of each generated by the model. Every other text repeats itself.

        Override it if a drafter needs other requests.
        """
        rng = np.random.default_rng(seed)
        reqs = []
        for uid in range(count):
            phrase = rng.integers(0, VOCAB_SIZE, rng.integers(1, 12))
            text = np.tile(phrase, 6) if uid % 2 else rng.integers(0, VOCAB_SIZE, rng.integers(1, 80))
            reqs.append(make_running(uid, text.tolist(), prompt_len=1 + len(text) // 4))
        return reqs

    def test_max_draft_tokens_is_positive(self) -> None:
        """The scheduler reserves pages for this number of drafts."""
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
            assert tree.lens.any(), "propose must return None if no row has a draft"
            allowed = np.minimum(limit, drafter.max_draft_tokens)
            allowed[:num_extend] = 0
            self.proves(Feature.DRAFT_CHAIN if tree.is_chain else Feature.DRAFT_TREE)
            self.check_tree(tree, allowed)

    def check_tree(self, tree: DraftTree, allowed: IntArray) -> None:
        """Check that ``tree`` is well formed, with at most ``allowed [rows]`` nodes per row."""
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
        """Check that probabilities are between 0 and 1, and that no draft has a higher one than its parent."""
        assert (probs.shape, probs.dtype) == (tree.token_ids.shape, np.dtype(np.float32))
        for row, count in enumerate(tree.lens.tolist()):
            for place in range(count):
                p, parent = probs[row, place], int(tree.parents[row, place])
                assert 0 <= p <= 1, f"draft {place} of row {row} has probability {p}"
                most = probs[row, parent] if parent >= 0 else 1
                assert p <= most, "a draft is likelier than its parent; its probability must include that of its parent"

    def test_without_reserved_pages_there_are_no_drafts(self) -> None:
        """``propose`` returns None, not a tree without nodes."""
        reqs = self.make_requests(0)
        assert self.make().propose(make_decode_batch(reqs, [0] * len(reqs))) is None

    def test_extend_rows_alone_get_no_drafts(self) -> None:
        """Only decode rows are verified."""
        reqs = self.make_requests(0)
        assert self.make().propose(make_decode_batch(reqs, [9] * len(reqs), num_extend=len(reqs))) is None

    @each_seed
    def test_proposing_changes_no_request(self, seed: int) -> None:
        """Drafts are proposals: only commit writes to a request. The arrays of the batch belong to the scheduler."""
        reqs = self.make_requests(seed)
        batch = make_decode_batch(reqs, [9] * len(reqs))
        before = _snapshot(batch)
        self.make().propose(batch)
        assert _snapshot(batch) == before

    @each_seed
    def test_the_same_texts_get_the_same_drafts(self, seed: int) -> None:
        """Two drafters make the same drafts, so that a run can be repeated."""
        reqs = self.make_requests(seed)
        batch = make_decode_batch(reqs, [9] * len(reqs))
        first, second = self.make().propose(batch), self.make().propose(batch)
        for row in range(len(reqs)):
            assert draft_of(first, row) == draft_of(second, row)

    @each_seed
    def test_rows_are_independent(self, seed: int) -> None:
        """A row's draft does not depend on the other rows or on its index."""
        reqs = self.make_requests(seed)
        together = self.make().propose(make_decode_batch(reqs, [9] * len(reqs)))
        backwards = self.make().propose(make_decode_batch(reqs[::-1], [9] * len(reqs)))
        for row, req in enumerate(reqs):
            alone = draft_of(self.make().propose(make_decode_batch([req], [9])), 0)
            assert draft_of(together, row) == alone
            assert draft_of(backwards, len(reqs) - 1 - row) == alone

    def test_ranks_draft_what_one_does(self) -> None:
        """With data-parallel attention, every rank makes the drafts that one rank makes, also for requests of other ranks, and in
        steps in which a rank has no rows."""
        self.require(Feature.DRAFT_DATA_ATTENTION)
        expected = self._drafts_of(SINGLE)
        assert any(any(step) for step in expected), "nothing is drafted, so that nothing is compared"
        meshes = thread_meshes(2, attention="data")
        for rank, drafts in enumerate(run_ranks(meshes, self._drafts_of, meshes)):
            assert drafts == expected, f"rank {rank} of 2 drafts something else than one rank"

    def _drafts_of(self, mesh: Mesh) -> list[list[list[tuple[int, int]]]]:
        """Return the drafts of a rank's drafter for each row of each step. Between steps, a text gets the first of its drafts and a
        token that was not drafted."""
        drafter, reqs, rng = self.make_rank(mesh), self.make_requests(0), np.random.default_rng(0)
        found = []
        for chosen in (reqs, reqs[::2], reqs[1::2], reqs[:1], reqs):
            tree = drafter.propose(make_decode_batch(chosen, [9] * len(chosen)))
            found.append([draft_of(tree, row) for row in range(len(chosen))])
            for req, draft in zip(chosen, found[-1], strict=True):
                drafted = [token for token, _ in draft]
                others = np.setdiff1d(np.arange(VOCAB_SIZE), drafted)
                req.append([*drafted[:1], int(rng.choice(others))])
        return found

    @each_seed
    def test_what_is_forgotten_leaves_no_trace(self, seed: int) -> None:
        """After ``forget``, another text with the same uid gets the drafts of a new drafter."""
        if self.learns:
            pytest.skip(f"{self.name} declares that it learns")
        self.check_no_trace(self.make_requests(seed), self.make_requests(seed + 100))

    @each_seed
    def test_namespaces_share_nothing(self, seed: int) -> None:
        """Requests of another namespace get the drafts of a new drafter, even for texts that earlier requests are known
        to have continued."""
        for other in (seed, seed + 100):
            old, new = self.make_requests(seed), self.make_requests(other)
            for req in old:
                req.append(range(10, 22))
                req.admitted = dataclasses.replace(req.admitted, namespace="theirs")
            self.check_no_trace(old, new)

    def check_no_trace(self, old: Sequence[RunningRequest], new: Sequence[RunningRequest]) -> None:
        """Check that a drafter that has seen and forgotten ``old`` drafts for ``new`` like a new drafter."""
        drafter = self.make()
        batch = make_decode_batch(old, [9] * len(old))
        drafter.propose(batch)
        for req in old:
            drafter.forget(req.departed)
        batch = make_decode_batch(new, [9] * len(new))
        remembered, fresh = drafter.propose(batch), self.make().propose(batch)
        for row in range(len(new)):
            assert draft_of(remembered, row) == draft_of(fresh, row)

    def test_forgetting_the_unknown_is_nothing(self) -> None:
        """A request may end before the drafter has seen it."""
        self.make().forget(self.make_requests(0)[0].departed)


def _snapshot(batch: Batch) -> object:
    """Return copies of the fields of a batch that the drafter gets, and of its requests, for a later comparison."""
    reqs = [{field.name: _copied(getattr(req, field.name)) for field in dataclasses.fields(req)} for req in batch.reqs]
    fields = [field.name for field in dataclasses.fields(batch) if field.init and field.name != "reqs"]
    return reqs, {name: _copied(getattr(batch, name)) for name in fields}


def _copied(value: object) -> object:
    if isinstance(value, tuple):
        return [_copied(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray) else copy.deepcopy(value)
