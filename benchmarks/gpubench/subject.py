"""Run Dovetail in the same way as its users: ``dovetail.LLM``, with ids as input and forced lengths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dovetail
from dovetail import GrammarSpec
from dovetail.messages import CommandReply, FlushCacheMsg

TEMPERATURE = 0.6


@dataclass(frozen=True, slots=True)
class Run:
    """Describe requests that were generated together."""

    seconds: float
    outputs: list[dovetail.Output]

    @property
    def generated(self) -> int:
        """Return the number of output tokens."""
        return sum(len(o.token_ids) for o in self.outputs)

    @property
    def prompt_tokens(self) -> int:
        """Return the number of prompt tokens, cached or not."""
        return sum(len(o.prompt_ids) for o in self.outputs)

    @property
    def cached_tokens(self) -> int:
        """Return the number of prompt tokens that the prefix cache had."""
        return sum(o.cached_tokens for o in self.outputs)


class Subject:
    """Hold one engine in this process."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.llm = dovetail.LLM(**config)

    def run(self, prompts: Sequence[Sequence[int]], lens: Sequence[int], grammar: GrammarSpec | None = None) -> Run:
        """Generate ``lens[i]`` tokens for each prompt, all submitted at once, with ``grammar`` for all if it is
        given."""
        params = [
            dovetail.SamplingParams(
                temperature=TEMPERATURE, max_new_tokens=n, ignore_eos=grammar is None, seed=i, grammar=grammar
            )
            for i, n in enumerate(lens)
        ]
        start = time.perf_counter()
        outputs = self.llm.generate(list(prompts), params)
        run = Run(time.perf_counter() - start, outputs)
        assert [len(o.token_ids) for o in outputs] == list(lens), "outputs are not as long as they must be"
        return run

    def rest(self) -> float:
        """Let the engine do its idle work, which is capturing graphs, and return the seconds that it took."""
        start = time.perf_counter()
        self.llm.loop.finish_idle_work()
        return time.perf_counter() - start

    def flush(self) -> None:
        """Empty the prefix cache."""
        loop = self.llm.loop
        while loop.has_work:
            loop.step()
        loop.handle(FlushCacheMsg("flush"))
        replies = [answer for answer in loop.step() if isinstance(answer, CommandReply)]
        if [reply.ok for reply in replies] != [True]:
            raise RuntimeError(f"the prefix cache was not flushed: {replies}")
