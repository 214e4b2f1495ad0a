"""Test a drafter inside an engine. This is the part of ``DrafterSuite`` that generates text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams

if TYPE_CHECKING:
    from dovetail.llm import LLM, Output

_QUESTIONS = (
    "What is the capital of {}?",
    "Sort these words: {0}, pear, apple, {0}, fig, apple.",
    'Extract as JSON: name is {0}, city is {0}, age is 31. {{"name": "',
    "Repeat after me: {0} {0} {0} and {0} again. {0} {0}",
    "{}",
)
_SUBJECTS = ("France", "Ada")
_SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}}}'
_CASES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, to the end": {"temperature": 0, "ignore_eos": True},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2},
    "biases": {"temperature": 0, "logit_bias": {300: 4.0, 29: -100.0}, "min_new_tokens": 6},
    "grammar": {"temperature": 0, "grammar": GrammarSpec(GrammarKind.JSON_SCHEMA, _SCHEMA)},
    "regex": {"temperature": 0, "grammar": GrammarSpec(GrammarKind.REGEX, r"[a-f]{3,8}(-[0-9]{2}){1,4}")},
    "stop strings": {"temperature": 0, "stop": ("a", ". "), "ignore_eos": True, "min_new_tokens": 3},
    "logprobs": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 0},
    "several": {"temperature": 0.9, "n": 3},
    "sampled": {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
}


def _requests() -> tuple[list[str], list[SamplingParams]]:
    prompts = [q.format(s) for q in _QUESTIONS for s in _SUBJECTS]
    cases = [SamplingParams(max_new_tokens=24, seed=i, **case) for i, case in enumerate(_CASES.values())]
    pairs = [(p, cases[(i + j) % len(cases)]) for i, p in enumerate(prompts) for j in range(0, len(cases), 2)]
    return [p for p, _ in pairs], [c for _, c in pairs]


def _results(outputs: list[Output]) -> list[object]:
    """Return what drafts must not change. Log-probabilities are rounded, because they differ slightly in batches of
    another size."""
    return [
        (o.token_ids, o.text, o.finish, [(e.token_id, round(e.logprob or 0, 2)) for e in o.logprobs]) for o in outputs
    ]


def _engine(speculative: Any, page_size: int, chunk_size: int) -> LLM:
    """Build an engine of the embedded model that requests drafts in every step."""
    from dovetail.llm import LLM

    return LLM(
        "tiny",
        device="cpu",
        threads=1,
        speculative=speculative,
        grammar={"isolation": "thread"},  # a process for each of these engines would take longer than the generation
        scheduler={"draft": "always", "chunk_size": chunk_size, "max_running": 24},
        memory={"page_size": page_size, "num_pages": 4096 // page_size},
    )


@functools.cache
def _expected() -> list[object]:
    """Return the outputs of the embedded model without drafts."""
    llm = _engine("none", 16, 2048)
    try:
        return _results(llm.generate(*_requests()))
    finally:
        llm.close()


class DrafterEngineTests:
    """Add tests of whole engines to ``DrafterSuite``.

    ``engine_settings`` are the settings of the component's section for the embedded model, if they differ from
    ``settings``. None is for a drafter that cannot draft for the embedded model.
    """

    name: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]]
    engine_settings: ClassVar[Mapping[str, Any] | None] = {}

    @contextmanager
    def engine(self, page_size: int = 16, chunk_size: int = 2048) -> Iterator[LLM]:
        """Yield an engine of the embedded model with this drafter. In the end every page must have been returned."""
        if self.engine_settings is None:
            pytest.skip(f"{self.name} does not draft for the embedded model here")
        llm = _engine({"kind": self.name, **self.settings, **self.engine_settings}, page_size, chunk_size)
        try:
            yield llm
            stats = llm.loop.stats()
            assert (stats.pages_used, stats.running, stats.waiting) == (0, 0, 0)
            llm.loop.scheduler.check_integrity()
        finally:
            llm.close()

    @pytest.mark.parametrize(("page_size", "chunk_size"), [(1, 2048), (16, 50)])
    def test_outputs_are_those_of_decoding_without_drafts(self, page_size: int, chunk_size: int) -> None:
        """Outputs are equal token for token, in batches of many kinds of requests, also a second time from the prefix
        cache.

        The requests are greedy and seeded, with penalties, grammars, stop strings, log-probabilities and several
        outputs. Prompts are read in chunks in the same steps as drafts of other requests.
        """
        with self.engine(page_size, chunk_size) as llm:
            for _ in range(2):
                assert _results(llm.generate(*_requests())) == _expected()
            assert llm.loop.drafter_errors == 0

    @pytest.mark.parametrize("part", ["propose", "observe", "forget"])
    def test_a_drafter_that_raises_costs_drafts_only(self, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """If every other call of one of the drafter's methods raises, the requests continue, and the errors are
        counted."""
        with self.engine() as llm:
            executor: Any = llm.loop.executor
            drafter = executor.rank.drafter
            assert drafter is not None
            if part == "observe" and not executor.info.observes:
                pytest.skip(f"{self.name} has no method observe, which therefore cannot fail")
            monkeypatch.setattr(drafter, part, _every_other_raises(getattr(drafter, part)))
            assert _results(llm.generate(*_requests())) == _expected()
            assert llm.loop.stats().drafter_errors == llm.loop.drafter_errors > 0


def _every_other_raises(method: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def odd(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise LookupError("made to fail by the suite")
        return method(*args)

    return odd
