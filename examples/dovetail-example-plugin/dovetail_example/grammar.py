"""Constrain the output to one of several plain texts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, GrammarContext, Matcher
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.types import IntArray
from dovetail_example.config import ChoicesConfig

_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]()]")


class ChoicesMatcher(Matcher):
    """Hold the text so far. It may be continued by the rest of every choice that begins with it."""

    def __init__(self, choices: Sequence[bytes], backend: ChoicesBackend) -> None:
        self._choices = choices
        self._backend = backend
        self._texts = [b""]
        self._ended = False

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """See ``Matcher``."""
        bitmask[row] = 0
        for token in self._allowed():
            bitmask[row].view("uint32")[token // 32] |= 1 << token % 32

    def _allowed(self) -> set[int]:
        if self._ended:
            return set()
        rests = self._rests()
        starts = {rest[:end] for rest in rests for end in range(1, len(rest) + 1)}
        tokens = {token for start in starts for token in self._backend.tokens.get(start, ())}
        return tokens | (self._backend.eos if b"" in rests else set())

    def _rests(self) -> list[bytes]:
        text = self._texts[-1]
        return [choice[len(text) :] for choice in self._choices if choice.startswith(text)]

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``."""
        if token_id not in self._allowed():
            return False
        self._ended = token_id in self._backend.eos
        self._texts.append(self._texts[-1] + (b"" if self._ended else self._backend.token_bytes[token_id] or b""))
        return True

    def rollback(self, num_tokens: int) -> None:
        """See ``Matcher``."""
        if num_tokens:
            assert num_tokens < len(self._texts), "more to take back than was accepted"
            del self._texts[-num_tokens:]
            self._ended = False

    @property
    def is_terminated(self) -> bool:
        """See ``Matcher``."""
        return self._ended or self._rests() == [b""]


class Choices(CompiledGrammar):
    """Hold the texts to choose from."""

    def __init__(self, choices: Sequence[bytes], backend: ChoicesBackend) -> None:
        self._choices = choices
        self._backend = backend

    def matcher(self) -> ChoicesMatcher:
        """See ``CompiledGrammar``."""
        return ChoicesMatcher(self._choices, self._backend)

    @property
    def num_bytes(self) -> int:
        """See ``CompiledGrammar``."""
        return sum(map(len, self._choices))


class ChoicesBackend(GrammarBackend):
    """Compile regexes such as ``yes|no``, and refuse every other constraint."""

    def __init__(self, config: ChoicesConfig, context: GrammarContext) -> None:
        self._max_choices = config.max_choices
        self.token_bytes = context.token_bytes
        self.eos = set(context.eos_token_ids)
        self.tokens: Mapping[bytes, list[int]] = defaultdict(list)
        for token, data in enumerate(context.token_bytes[: context.vocab_size]):
            if data and token not in self.eos:
                self.tokens[data].append(token)

    def compile(self, spec: GrammarSpec) -> Choices:
        """See ``GrammarBackend``."""
        choices = sorted({choice.encode() for choice in spec.text.split("|")})
        if spec.kind is not GrammarKind.REGEX or _SPECIAL.search(spec.text) or b"" in choices:
            raise GrammarError(
                f"grammar backend example_choices supports only regexes that are a choice of plain texts, like 'yes|no'; given: "
                f"the {spec.kind} {spec.text[:60]!r}. Select another backend, as with `grammar: xgrammar`",
                param=spec.kind,
            )
        if len(choices) > self._max_choices:
            raise GrammarError(f"the regex has {len(choices)} choices; allowed: {self._max_choices}", param=spec.kind)
        return Choices(choices, self)
