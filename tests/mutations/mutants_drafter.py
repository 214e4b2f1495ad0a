"""Define broken drafters: prompt lookup with one fault each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from mutant import Mutant, Suite

from dovetail.engine.own_rows import kept
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import Mesh
from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.llm import LLM
from dovetail.testing.drafter import DrafterSuite
from dovetail.types import Batch, DepartedRequest, DraftTree
from dovetail_speculative.config import NgramConfig
from dovetail_speculative.ngram import NgramDrafter

CONTEXT = DrafterContext(torch.device("cpu"), vocab_size=64, max_rows=16, max_context=256)


class BeyondItsLimit(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        assert batch.draft_limits is not None
        return super().propose(dataclasses.replace(batch, draft_limits=batch.draft_limits + 1))


class ForPromptRows(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        return super().propose(dataclasses.replace(batch, num_extend=0))


class NeverNone(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        tree, rows = super().propose(batch), len(batch.slots)
        none = np.zeros((rows, 1), dtype=np.int32)
        return tree or DraftTree(none, none - 1, np.zeros(rows, dtype=np.int32))


class OutsideTheVocabulary(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        return tree and dataclasses.replace(tree, token_ids=tree.token_ids + 64)


class ChildrenFirst(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        return tree and dataclasses.replace(tree, parents=tree.parents + 1)


class UndeclaredTree(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        return tree and dataclasses.replace(tree, parents=np.full_like(tree.parents, -1))


class StatesProbabilities(NgramDrafter):
    def probs(self, places: np.ndarray) -> np.ndarray:
        return 0.9 ** (places + 1)

    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        if tree is None:
            return None
        rows, width = tree.token_ids.shape
        stated = np.tile(self.probs(np.arange(width)).astype(np.float32), (rows, 1))
        return dataclasses.replace(tree, probs=stated)


class StatesConditionalProbabilities(StatesProbabilities):
    def probs(self, places: np.ndarray) -> np.ndarray:
        return 0.5 + 0.01 * places


class StatesLogarithms(StatesProbabilities):
    def probs(self, places: np.ndarray) -> np.ndarray:
        return -0.1 * (places + 1)


class ForgetsNothing(NgramDrafter):
    def forget(self, request: DepartedRequest) -> None:
        return


class MixesRowsUp(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        return tree and dataclasses.replace(tree, token_ids=np.ascontiguousarray(tree.token_ids[::-1]))


class BiasedByAnotherRow(NgramDrafter):
    """Begin every draft with the first row's first token."""

    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        if tree is not None and tree.lens[0]:
            tree.token_ids[:, 0] = tree.token_ids[0, 0]
        return tree


class WritesItsDrafts(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        if tree is not None:
            for req, start, draft, count in zip(
                batch.reqs, batch.prefix_lens + 1, tree.token_ids, tree.lens, strict=True
            ):
                req.token_ids[start : start + count] = draft[:count]
        return tree


class MovesTokens(NgramDrafter):
    """Let the tokens of decode rows enter the step one position too early."""

    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        batch.prefix_lens[batch.num_extend :] -= 1
        return tree


class Rolls(NgramDrafter):
    """Draw tokens from a generator that all drafters of the process share."""

    draws = itertools.count(1)

    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        return tree and dataclasses.replace(tree, token_ids=(tree.token_ids + next(self.draws)) % 64)


class HasNoWidth(NgramDrafter):
    @property
    def max_draft_tokens(self) -> int:
        return 0


class LearnsFromEveryTenant(NgramDrafter):
    def propose(self, batch: Batch) -> DraftTree | None:
        reqs = [dataclasses.replace(req, namespace="") for req in batch.reqs]
        return super().propose(dataclasses.replace(batch, reqs=reqs))


class MustKnowWhatItForgets(NgramDrafter):
    def __init__(self, config: NgramConfig, context: DrafterContext) -> None:
        super().__init__(config, context)
        self._known: set[int] = set()

    def forget(self, request: DepartedRequest) -> None:
        self._known.remove(request.uid)


class OfRanks(NgramDrafter):
    """Draft for the requests of a rank, and get the drafts for the others from the ranks that keep them."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(NgramConfig(shared=0), CONTEXT)
        self._mesh = mesh

    def propose(self, batch: Batch) -> DraftTree | None:
        tree = super().propose(batch)
        if tree is None:
            return None
        own = np.zeros_like(tree.token_ids)
        rows = kept(batch.slots, self._mesh.tp)
        own[rows] = tree.token_ids[rows]
        return dataclasses.replace(tree, token_ids=self.add_up(torch.from_numpy(own)).numpy())

    def add_up(self, own: torch.Tensor) -> torch.Tensor:
        return self._mesh.tp.all_reduce(own)


class DraftsForItsRows(OfRanks):
    def add_up(self, own: torch.Tensor) -> torch.Tensor:
        return own


class Ranks(DrafterSuite):
    name = "ngram"
    drafter_class: type[OfRanks] = OfRanks

    def offers(self, feature: Feature) -> bool:
        return feature is Feature.DRAFT_DATA_ATTENTION or super().offers(feature)

    def make_rank(self, mesh: Mesh) -> Drafter:
        return self.drafter_class(mesh)


class DraftsInRanks(Ranks):
    drafter_class = DraftsForItsRows


def suite(drafter_class: type[NgramDrafter], *more: Feature, **settings: int) -> Suite:
    class Suite(DrafterSuite):
        name = "ngram"

        def offers(self, feature: Feature) -> bool:
            return feature in more or super().offers(feature)

        def make(self) -> Drafter:
            return drafter_class(NgramConfig.model_validate(settings), CONTEXT)

    return Suite


class Engines(DrafterSuite):
    """Run in an engine the drafter that the config names, or one of another class in its place."""

    name = "ngram"
    settings: ClassVar = {"shared": 0}
    drafter_class: type[NgramDrafter] = NgramDrafter

    @contextmanager
    def engine(self, page_size: int = 16, chunk_size: int = 2048) -> Iterator[LLM]:
        with super().engine(page_size, chunk_size) as llm:
            assert isinstance(llm.loop.executor.rank.drafter, NgramDrafter)
            llm.loop.executor.rank.drafter.__class__ = self.drafter_class
            yield llm


class MovesInEngines(Engines):
    drafter_class = MovesTokens


STATING = suite(StatesProbabilities, Feature.DRAFT_PROBS, shared=0)
ALONE, SHARED = suite(NgramDrafter, shared=0), suite(NgramDrafter)
SEEDS = tuple((seed,) for seed in range(8))
TREES = "test_drafts_are_valid_trees_within_their_limits"


def _of(
    fault: str,
    drafter_class: type[NgramDrafter],
    case: str,
    says: str = "",
    runs: Sequence[tuple[int, ...]] = SEEDS,
) -> Mutant:
    return Mutant(fault, case, suite(drafter_class, shared=0), ALONE, runs, says)


def _stating(fault: str, drafter_class: type[NgramDrafter], says: str) -> Mutant:
    return Mutant(fault, TREES, suite(drafter_class, Feature.DRAFT_PROBS, shared=0), STATING, SEEDS, says)


MUTANTS = [
    _of("drafts beyond its limit", BeyondItsLimit, TREES, "more was drafted than pages were reserved for"),
    _of("drafts for prompt rows", ForPromptRows, TREES, "more was drafted than pages were reserved for"),
    _of("drafts tokens that do not exist", OutsideTheVocabulary, TREES),
    _of("puts children before their parents", ChildrenFirst, TREES, "parents come before their children"),
    _of("drafts a tree and declares chains", UndeclaredTree, TREES, "only chains are declared"),
    _of("states probabilities and does not declare them", StatesProbabilities, TREES, "draft.probs is not declared"),
    _stating("declares probabilities and states none", NgramDrafter, "no probs are stated"),
    _stating("states probabilities given the parent", StatesConditionalProbabilities, "likelier than its parent"),
    _stating("states logarithms of probabilities", StatesLogarithms, "has probability -0.1"),
    _of(
        "returns an empty tree instead of None",
        NeverNone,
        "test_without_reserved_pages_there_are_no_drafts",
        runs=[()],
    ),
    _of("drafts for extend rows alone", ForPromptRows, "test_extend_rows_alone_get_no_drafts", runs=[()]),
    _of("has max_draft_tokens 0", HasNoWidth, "test_max_draft_tokens_is_positive", runs=[()]),
    _of("writes its drafts into the request", WritesItsDrafts, "test_proposing_changes_no_request"),
    _of("moves the tokens of the batch", MovesTokens, "test_proposing_changes_no_request"),
    _of("drafts at random", Rolls, "test_the_same_texts_get_the_same_drafts"),
    _of("mixes rows up", MixesRowsUp, "test_rows_are_independent"),
    _of("is biased by another row", BiasedByAnotherRow, "test_rows_are_independent"),
    Mutant("drafts for the rows of its rank only", "test_ranks_draft_what_one_does", DraftsInRanks, Ranks),
    _of("forgets nothing", ForgetsNothing, "test_what_is_forgotten_leaves_no_trace"),
    _of(
        "raises for a request it never saw", MustKnowWhatItForgets, "test_forgetting_the_unknown_is_nothing", "0", [()]
    ),
    Mutant(
        "changes the output of the model",
        "test_outputs_are_those_of_decoding_without_drafts",
        MovesInEngines,
        Engines,
        [(16, 50)],
    ),
    Mutant(
        "learns from every namespace",
        "test_namespaces_share_nothing",
        suite(LearnsFromEveryTenant),
        SHARED,
        SEEDS,
    ),
]
