"""Write random texts under the constraint of a tool parser, as an engine would, and follow given texts through it."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from dovetail.errors import GrammarError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import GrammarBackend, Matcher
from dovetail.interfaces.parsers import Tool, ToolConstraint, ToolRequest
from dovetail.registry.installed import RegisteredComponent
from dovetail.registry.specs import ComponentKind
from dovetail.registry.stages import unmet
from dovetail.registry.targets import load_attribute
from dovetail.testing.grammar_cases import EOS, VOCAB_SIZE, context
from dovetail.testing.installed import installed

FIRST_BYTE = 2
"""The token of byte 0 in the vocabulary of the grammar suite, which has a token for every byte."""
MOST_BYTES = 1500


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


VALUES: dict[str, dict[str, list[Any]]] = {
    "get_weather": {"flag": [True, False], "unit": ["C", "F"]},
    "add": {"count": [1, 2, 3]},
}
"""The arguments of each function, and all values that its schema allows."""
STRICT = tuple(
    Tool(name, _object({key: {"enum": allowed} for key, allowed in values.items()}), strict=True)
    for name, values in VALUES.items()
)
LOOSE = tuple(Tool(tool.name, tool.parameters) for tool in STRICT)
REQUESTS = {
    "required": ToolRequest(STRICT, required=True),
    "one": ToolRequest(STRICT, required=True, parallel=False),
    "named": ToolRequest(STRICT[:1], required=True, parallel=False),
    "required, not strict": ToolRequest(LOOSE, required=True),
    "strict": ToolRequest(STRICT),
}
"""The requests for which something must be enforced."""


def is_valid(name: str, arguments: object) -> bool:
    """Return True if the function exists and its schema allows the arguments."""
    values = VALUES.get(name)
    if values is None or not isinstance(arguments, dict) or arguments.keys() != values.keys():
        return False
    return all(
        any(type(value) is type(one) and value == one for one in values[key]) for key, value in arguments.items()
    )


@functools.cache
def grammar_backends() -> tuple[tuple[frozenset[Feature], GrammarBackend], ...]:
    """Return up to two installed grammar backends that compile JSON schemas, each with the features that it offers."""
    usable = [c for c in installed().components(ComponentKind.GRAMMAR) if _is_usable(c)]
    usable.sort(key=lambda component: -component.spec.priority)
    return tuple((component.spec.offers, _build(component)) for component in usable[:2])


def _is_usable(component: RegisteredComponent) -> bool:
    missing = [reason for requirement in component.spec.requires for reason in unmet(requirement)]
    return Feature.GRAMMAR_JSON_SCHEMA in component.spec.offers and not missing and not component.incompatible


def _build(component: RegisteredComponent) -> GrammarBackend:
    spec = component.spec
    config = installed().config_class(spec.kind, spec.name)(kind=spec.name)
    return load_attribute(spec.target, component.label)(config, context())


class ConstrainedOutput:
    """Hold an output under ``constraint``: its text so far, and the matcher of its grammar."""

    def __init__(self, constraint: ToolConstraint, backend: GrammarBackend, marks: Sequence[str]) -> None:
        """Compile the grammar. ``marks`` are texts to try within free parts of the output. Raises ``GrammarError``."""
        self.constraint = constraint
        self._marks = [self._stand_in(mark) for mark in marks]
        self._matcher: Matcher = backend.compile(constraint.grammar).matcher()

    def write(self, rng: random.Random) -> str | None:
        """Return a random text that the constraint allows; None if it does not end within ``MOST_BYTES``."""
        gate = self.constraint.gate
        free = f"hm{gate.until}" if gate.until else ""
        if gate.prefix_in_grammar and not self._accept(self._stand_in(gate.prefix)):
            raise GrammarError(f"the grammar does not begin with the prefix {gate.prefix!r}, which it covers")
        written = bytearray()
        ahead: list[int] = []  # the bytes of a mark that is being written
        while len(written) < MOST_BYTES:
            allowed = self._allowed()
            if not ahead and allowed & set(EOS) and (rng.random() < 0.6 or len(allowed) <= len(EOS)):
                return gate.lead + free + gate.prefix + self._with_marks(written.decode("utf-8", "replace"))
            tokens = sorted(token - FIRST_BYTE for token in allowed if 0 <= token - FIRST_BYTE < 256)
            if rng.random() < 0.6:
                tokens = [byte for byte in tokens if byte not in b" \n\r\t"] or tokens
            if not tokens:
                raise GrammarError(f"no token is allowed after {bytes(written)!r}")
            if not ahead and self._marks and len(tokens) > 64 and rng.random() < 0.7:  # within a free text
                ahead = list(rng.choice(self._marks).encode())
            ahead = ahead if ahead and ahead[0] in tokens else []
            written.append(ahead.pop(0) if ahead else rng.choice(tokens))
            assert self._matcher.accept(written[-1] + FIRST_BYTE)
        return None

    def _allowed(self) -> set[int]:
        mask = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
        self._matcher.fill_bitmask(mask, 0)
        return set(map(int, np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))

    def _accept(self, text: str) -> bool:
        return all(self._matcher.accept(byte + FIRST_BYTE) for byte in text.encode())

    def _stand_in(self, text: str) -> str:
        for mark, character in self.constraint.gate.marks:
            text = text.replace(mark, character)
        return text

    def _with_marks(self, text: str) -> str:
        for mark, character in self.constraint.gate.marks:
            text = text.replace(character, mark)
        return text


def written_outputs(
    constraint: ToolConstraint, backend: GrammarBackend, marks: Sequence[str], count: int, seed: int
) -> Sequence[str]:
    """Return random outputs that ``constraint`` allows and that have ended. Raises ``GrammarError``."""
    rng = random.Random(seed)
    texts = [ConstrainedOutput(constraint, backend, marks).write(rng) for _ in range(count)]
    return [text for text in texts if text is not None]
