"""Test logits processors: the conformance suite of their interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ValidationError

from dovetail.interfaces.features import Feature
from dovetail.interfaces.logits import LogitsProcessor, ProcessedRow, ProcessorContext
from dovetail.registry.specs import ComponentKind
from dovetail.testing.component import ComponentSuite

VOCAB = 61
EOS = 2

each_seed = pytest.mark.parametrize("seed", range(6))


class PretendedRequest:
    """Hold a request as the engine does: its text, its parameters, and the state that the processor returned."""

    def __init__(self, processor: LogitsProcessor, params: BaseModel, tokens: Sequence[int], prompt_len: int) -> None:
        self.tokens, self.prompt_len = list(tokens), prompt_len
        self._params, self._state = params, processor.begin(params)

    def row(self, drafts: Sequence[int] = ()) -> ProcessedRow:
        """Return the row of logits after the text and ``drafts``."""
        ids = np.array([*self.tokens, *drafts], np.int32)
        ids.flags.writeable = False
        return ProcessedRow(self._params, self.prompt_len, len(self.tokens), ids, self._state)


class LogitsProcessorSuite(ComponentSuite):
    """Test a logits processor. ``class TestMine(LogitsProcessorSuite): name = "mine"`` is a complete test file if each
    parameter has a default. Otherwise the class sets ``requests``, which are parameters of requests; with several, rows of
    different parameters are tested together."""

    kind: ClassVar[ComponentKind] = ComponentKind.LOGITS_PROCESSOR
    requests: ClassVar[Sequence[Mapping[str, Any]]] = ({},)

    def make(self) -> LogitsProcessor:
        """Return a new processor. Override this method to test a class that no plugin registers."""
        return self.build(ProcessorContext(torch.device("cpu"), VOCAB, frozenset({EOS})))

    def params_class(self) -> type[BaseModel]:
        """Return the class of the parameters of requests."""
        return type(self.config()).params  # pyright: ignore[reportAttributeAccessIssue]

    def request(self, processor: LogitsProcessor, seed: int, length: int | None = None) -> PretendedRequest:
        """Return a request with a random text of few different tokens, with the parameters whose turn it is."""
        rng = np.random.default_rng(seed)
        tokens = rng.integers(3, 8, length or int(rng.integers(1, 40))).tolist()
        given = self.requests[seed % len(self.requests)]
        params = self.params_class().model_validate(given)
        return PretendedRequest(processor, params, tokens, 1 + int(rng.integers(len(tokens))))

    def processed(self, processor: LogitsProcessor, rows: Sequence[ProcessedRow], seeds: Sequence[int]) -> torch.Tensor:
        """Return what the processor makes of random logits; those of row i depend on ``seeds[i]``."""
        logits = torch.stack([_logits(seed) for seed in seeds])
        before = [(row.token_ids.copy(), row.params) for row in rows]
        address = logits.data_ptr()
        assert processor.process(logits, list(rows)) is None, "process returns nothing: it changes the logits in place"
        assert (logits.data_ptr(), logits.shape, logits.dtype) == (address, (len(rows), VOCAB), torch.float32)
        for (ids, params), row in zip(before, rows, strict=True):
            assert (row.token_ids == ids).all(), "the text of a request was changed"
            assert row.params == params, "the parameters of a request were changed"
        return logits

    def alone(self, request: PretendedRequest, seed: int, drafts: Sequence[int] = ()) -> torch.Tensor:
        """Return what a new processor makes of one row whose request begins with the text that it has now."""
        processor = self.make()
        text = [*request.tokens, *drafts]
        fresh = PretendedRequest(processor, request.row().params, text, request.prompt_len)
        return self.processed(processor, [fresh.row()], [seed])[0]

    def test_parameters_are_checked(self) -> None:
        """The parameters of ``requests`` are valid and unchanged after JSON, and an unknown one is refused."""
        cls = self.params_class()
        for given in self.requests:
            params = cls.model_validate(given)
            assert cls.model_validate_json(params.model_dump_json()) == params
            with pytest.raises(ValidationError):
                cls.model_validate({**given, "no_parameter_of_this_name": 1})

    def test_it_changes_logits(self) -> None:
        """Some logits of some texts are changed, in place, and none becomes nan."""
        processor, changed = self.make(), 0
        for seed in range(24):
            logits = self.processed(processor, [self.request(processor, seed).row()], [seed])[0]
            assert not logits.isnan().any(), "a logit is nan"
            changed += not torch.equal(logits, _logits(seed))
        assert changed, "no logit of 24 random texts was changed"

    @each_seed
    def test_rows_do_not_affect_each_other(self, seed: int) -> None:
        """Each row of a call is changed as it is alone, whatever the parameters of the other rows."""
        processor, seeds = self.make(), range(100 * seed, 100 * seed + 9)
        requests = [self.request(processor, one) for one in seeds]
        together = self.processed(processor, [request.row() for request in requests], seeds)
        for request, one, logits in zip(requests, seeds, together, strict=True):
            torch.testing.assert_close(logits, self.alone(request, one))

    @each_seed
    def test_texts_grow(self, seed: int) -> None:
        """While texts grow, by one token or by several, each row is changed as that of a request which begins with the
        whole text, as retracted requests do."""
        processor, rng = self.make(), np.random.default_rng(seed)
        requests = [self.request(processor, 100 * seed + i) for i in range(4)]
        for step in range(12):
            chosen = [request for request in requests if rng.integers(3)] or requests
            logits = self.processed(processor, [request.row() for request in chosen], range(step, step + len(chosen)))
            for i, request in enumerate(chosen):
                torch.testing.assert_close(logits[i], self.alone(request, step + i))
                request.tokens += rng.integers(3, 8, rng.integers(1, 4)).tolist()

    @each_seed
    def test_departed_requests_are_forgotten(self, seed: int) -> None:
        """A request is processed as by a new processor, after many other requests have been in its row and have left."""
        processor = self.make()
        for earlier in range(8):
            request = self.request(processor, 100 * seed + earlier, 30)
            for _ in range(4):
                self.processed(processor, [request.row()], [earlier])
                request.tokens.append(3 + earlier % 5)
        last = self.request(processor, 100 * seed + 50, 30)
        torch.testing.assert_close(self.processed(processor, [last.row()], [seed])[0], self.alone(last, seed))

    @each_seed
    def test_drafts(self, seed: int) -> None:
        """The row of a draft is changed as if the drafts before it were text. Drafts that are rejected leave no trace."""
        self.require(Feature.LOGITS_DRAFTS)
        processor, rng = self.make(), np.random.default_rng(seed)
        request = self.request(processor, seed)
        for step in range(8):
            chain, branch = (rng.integers(3, 8, 3).tolist() for _ in range(2))
            paths = [chain[:0], chain[:1], chain[:2], chain, branch[:1], branch]
            seeds = range(step, step + len(paths))
            logits = self.processed(processor, [request.row(path) for path in paths], seeds)
            for row, path, one in zip(logits, paths, seeds, strict=True):
                torch.testing.assert_close(row, self.alone(request, one, path))
            request.tokens += [chain[:1], [*chain[:2], 9], [9], chain][int(rng.integers(4))]

    @each_seed
    def test_batch_invariance(self, seed: int) -> None:
        """The bits of a row are the same in calls of any number of rows, and in any place of them."""
        self.require(Feature.LOGITS_BATCH_INVARIANT)
        expected: dict[int, torch.Tensor] = {}
        for count in (1, 2, 17, 64):
            processor = self.make()
            seeds = [int(one) for one in np.random.default_rng(count).permutation(64)[:count] + 100 * seed]
            rows = [self.request(processor, one).row() for one in seeds]
            for one, logits in zip(seeds, self.processed(processor, rows, seeds), strict=True):
                assert torch.equal(logits, expected.setdefault(one, logits)), f"other bits in a call of {count} rows"


def _logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
