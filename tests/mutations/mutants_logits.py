"""Define broken logits processors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from mutant import Mutant, Suite
from pydantic import BaseModel

from dovetail.interfaces.features import Feature
from dovetail.interfaces.logits import LogitsProcessor, ProcessedRow, ProcessorContext
from dovetail.testing.logits import EOS, VOCAB, LogitsProcessorSuite
from dovetail_logits.config import NoRepeatNgramConfig, NoRepeatNgramParams
from dovetail_logits.no_repeat_ngram import Ngrams, NoRepeatNgram


class DoesNothing(NoRepeatNgram):
    def process(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> None:
        pass


class ReturnsOthers(NoRepeatNgram):
    def process(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> torch.Tensor:  # type: ignore[override]
        super().process(changed := logits.clone(), rows)
        return changed


class LeavesNan(NoRepeatNgram):
    def process(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> None:
        super().process(logits, rows)
        logits -= torch.where(logits.isinf(), logits, 0.0)


class FirstParameters(NoRepeatNgram):
    def process(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> None:
        for row in rows:
            row.state.size = rows[0].params.no_repeat_ngram_size
        super().process(logits, rows)


class OnceNgrams(Ngrams):
    def read(self, tokens: list[int], start: int) -> None:
        if not self._followers:
            super().read(tokens, start)


class ReadsOnce(NoRepeatNgram):
    def begin(self, params: NoRepeatNgramParams) -> Ngrams:
        return OnceNgrams(params.no_repeat_ngram_size)


class RemembersByRow(NoRepeatNgram):
    """Keep the state of a row of the call, whichever request is in it."""

    def __init__(self, config: NoRepeatNgramConfig, context: ProcessorContext) -> None:
        super().__init__(config, context)
        self._rows: dict[tuple[int, int], Ngrams] = {}

    def process(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> None:
        for i, row in enumerate(rows):
            row.state = self._rows.setdefault((i, row.params.no_repeat_ngram_size), row.state)
        super().process(logits, rows)


class KeepsDrafts(NoRepeatNgram):
    def process(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> None:
        for row in rows:
            row.known_len = len(row.token_ids)
        super().process(logits, rows)


class IgnoresDrafts(NoRepeatNgram):
    def _banned(self, row: ProcessedRow) -> set[int]:
        certain = dataclasses.replace(row, token_ids=row.token_ids[: row.known_len])
        return super()._banned(certain)


class BitsOfTheBatch(NoRepeatNgram):
    def process(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> None:
        super().process(logits, rows)
        logits *= 1 + 1e-7 * len(rows)


class AnyParameters(BaseModel):
    no_repeat_ngram_size: int = 2


def suite(processor_class: type[NoRepeatNgram], params: type[BaseModel] = NoRepeatNgramParams) -> Suite:
    class Suite(LogitsProcessorSuite):
        name = "no_repeat_ngram"
        requests: Any = tuple({"no_repeat_ngram_size": size} for size in (2, 1, 3))

        def make(self) -> LogitsProcessor:
            context = ProcessorContext(torch.device("cpu"), VOCAB, frozenset({EOS}))
            return processor_class(NoRepeatNgramConfig(), context)

        def params_class(self) -> type[BaseModel]:
            return params

        def offers(self, feature: Feature) -> bool:
            return True

    return Suite


SOUND = suite(NoRepeatNgram)
SEEDS = tuple((seed,) for seed in range(6))


def _of(
    fault: str, processor_class: type[NoRepeatNgram], case: str, runs: Sequence[tuple[int, ...]] = SEEDS, says: str = ""
) -> Mutant:
    return Mutant(fault, case, suite(processor_class), SOUND, runs, says)


MUTANTS = [
    Mutant("accepts unknown parameters", "test_parameters_are_checked", suite(NoRepeatNgram, AnyParameters), SOUND),
    _of("does nothing", DoesNothing, "test_it_changes_logits", [()], "no logit"),
    _of("returns other logits", ReturnsOthers, "test_it_changes_logits", [()], "in place"),
    _of("leaves nan", LeavesNan, "test_it_changes_logits", [()], "nan"),
    _of("takes the parameters of the first row for all", FirstParameters, "test_rows_do_not_affect_each_other"),
    _of("reads a text only once", ReadsOnce, "test_texts_grow"),
    _of("keeps what it knows of a row for the next request", RemembersByRow, "test_departed_requests_are_forgotten"),
    _of("takes drafts for text", KeepsDrafts, "test_drafts"),
    _of("ignores drafts", IgnoresDrafts, "test_drafts"),
    _of("gives other bits in larger calls", BitsOfTheBatch, "test_batch_invariance"),
]
