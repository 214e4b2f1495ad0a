"""Define how ``select`` chooses: rules over the log-probabilities of the choices' tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Scored:
    """Hold the log-probability (natural log) of each token of one choice after the prompt.

    ``unconditional`` holds the log-probabilities without the prompt, if the rule requires them; the first is None if
    the model has no start token.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float | None, ...] = ()

    @property
    def mean(self) -> float:
        """Return the mean log-probability of a token.

        A choice that is only a part of the text's first token, for which there is no log-probability, comes last.
        """
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf


@dataclass(frozen=True, slots=True)
class Decision:
    """Hold the index of the chosen choice, and what the rule computed in addition to the log-probabilities of
    tokens."""

    index: int
    scores: tuple[float, ...]
    details: Mapping[str, Any]


class ChoicesMethod(ABC):
    """Choose among scored choices. ``unconditional`` requires the log-probabilities of the choices without the
    prompt."""

    name: ClassVar[str]
    unconditional: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, scored: Sequence[Scored]) -> Decision:
        """Choose among at least one choice. The first of equal choices is taken."""

    def __repr__(self) -> str:
        return self.name


class TokenLengthNormalized(ChoicesMethod):
    """Choose the highest log-probability per token, so that longer choices have no disadvantage."""

    name = "token_length_normalized"

    def __call__(self, scored: Sequence[Scored]) -> Decision:
        """Choose by ``Scored.mean``."""
        return _best([each.mean for each in scored], {})


class GreedyTokenSelection(ChoicesMethod):
    """Choose what greedy decoding among the choices would choose: token by token, all but the most likely choices are
    removed.

    For the positions after its end, a choice is represented by its mean.
    """

    name = "greedy_token_selection"

    def __call__(self, scored: Sequence[Scored]) -> Decision:
        """Choose position by position."""
        width = max(len(each.logprobs) for each in scored)
        rows = [[*each.logprobs, *[each.mean] * (width - len(each.logprobs))] for each in scored]
        left = list(range(len(rows)))
        for at in range(width):
            best = max(left, key=lambda i: rows[i][at])
            left = [i for i in left if rows[i][at] == rows[best][at] or _same_token(scored[i], scored[best], at)]
        return Decision(left[0], tuple(map(_mean, rows)), {"greedy_logprob_matrix": rows})


class UnconditionalLikelihoodNormalized(ChoicesMethod):
    """Choose by how much the prompt raises the likelihood per token, so that a choice that is likely after any prompt
    has no advantage."""

    name = "unconditional_likelihood_normalized"
    unconditional = True

    def __call__(self, scored: Sequence[Scored]) -> Decision:
        """Choose by the mean difference of the log-probabilities with and without the prompt."""
        without = [_mean([value or 0.0 for value in each.unconditional]) for each in scored]
        scores = [each.mean - base for each, base in zip(scored, without, strict=True)]
        return _best(scores, {"normalized_unconditional_prompt_logprobs": without})


def _same_token(a: Scored, b: Scored, at: int) -> bool:
    """Return whether both choices continue with the same token, whose log-probability may have been rounded
    differently. -1 is an unknown token."""
    token = a.tokens[at] if at < len(a.tokens) else -1
    return token >= 0 and b.tokens[at : at + 1] == (token,)


def _best(scores: list[float], details: Mapping[str, Any]) -> Decision:
    return Decision(max(range(len(scores)), key=scores.__getitem__), tuple(scores), details)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()
