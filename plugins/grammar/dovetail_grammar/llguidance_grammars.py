"""Write constraints as Lark grammars for llguidance.

Each grammar begins with ``no_forcing``, because without it llguidance allows a forced text in one tokenization only.
"""

from __future__ import annotations

import json
import re
from typing import Any

from dovetail.errors import GrammarError
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail_grammar.constraints import Structure, read_choice, read_json, read_regex, read_tags
from dovetail_grammar.gbnf import GbnfError, to_lark
from dovetail_grammar.llguidance_schemas import prepare
from dovetail_grammar.patterns import emit, literal

_HEAD = '%llguidance {"no_forcing": true}\n'
_SPACE = r"[ \n\r\t]"
_JSON_BLOCK = re.compile(r"%json\s*(?=\{)")
_DIRECTIVE = re.compile(r"^\s*%llguidance\b|%lark\b|@\w", re.MULTILINE)
MAX_TEXT = 4_000_000
"""Maximum number of characters of a constraint."""


class GrammarWriter:
    """Write grammars with one convention for whitespace in JSON."""

    def __init__(self, max_whitespace: int | None) -> None:
        most = "+" if max_whitespace is None else f"{{1,{max_whitespace}}}"
        self._options = {"whitespace_pattern": _SPACE + most}

    def write(self, spec: GrammarSpec) -> str:
        """Return the Lark grammar of a constraint. Raises ``GrammarError``."""
        if len(spec.text) > MAX_TEXT:
            raise GrammarError(
                f"the {spec.kind} has {len(spec.text)} characters; allowed: {MAX_TEXT}", param=spec.kind, keyword="size"
            )
        return _HEAD + self._body(spec)

    def _body(self, spec: GrammarSpec) -> str:
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                return f"start: {self._json(read_json(spec))}\n"
            case GrammarKind.JSON_OBJECT:
                return f"start: {self._json({'type': 'object'})}\n"
            case GrammarKind.REGEX:
                return f"start: /{emit(read_regex(spec))}/\n"
            case GrammarKind.CHOICE:
                return f"start: /{'|'.join(emit(literal(text)) for text in read_choice(spec))}/\n"
            case GrammarKind.EBNF:
                return _gbnf(spec)
            case GrammarKind.LARK:
                return self._lark(spec)
            case GrammarKind.STRUCTURAL_TAG:
                return self._tags(spec)

    def _json(self, schema: Any) -> str:
        return f"%json {json.dumps(prepare(schema, self._options), ensure_ascii=False)}"

    def _lark(self, spec: GrammarSpec) -> str:
        """Return the grammar with its ``%json`` schemas rewritten in the same way as constraints that are schemas."""
        if found := _DIRECTIVE.search(spec.text):
            raise GrammarError(f"{found[0].strip()!r} is not allowed in a Lark grammar", param=spec.kind)
        parts: list[str] = []
        at = 0
        while found := _JSON_BLOCK.search(spec.text, at):
            try:
                schema, end = json.JSONDecoder().raw_decode(spec.text, found.end())
            except (ValueError, RecursionError) as error:
                raise GrammarError(
                    f"a %json block of the grammar is not valid JSON: {error}", param=spec.kind
                ) from error
            parts += [spec.text[at : found.start()], self._json(schema)]
            at = end
        rest = spec.text[at:]
        if "%json" in rest:
            raise GrammarError("%json must be followed by a schema in braces", param=spec.kind)
        return "".join([*parts, rest, "\n"])

    def _tags(self, spec: GrammarSpec) -> str:
        """Return the grammar of a structural tag. Free text up to a trigger is one lazy terminal, so that no trigger
        can be part of free text."""
        structures, triggers = read_tags(spec)
        lines = [f"start: ({' | '.join(f'tag{i}' for i in range(len(triggers)))})* TAIL"]
        for i, trigger in enumerate(triggers):
            bodies = [self._structure(structure, trigger) for structure in structures if structure.trigger == trigger]
            lines += [f"tag{i}: trigger{i} ({' | '.join(bodies)})", f"trigger{i}[lazy]: TEXT /{_escaped(trigger)}/"]
        found = "|".join(f"(?:{_escaped(trigger)})" for trigger in triggers)
        lines += ["TEXT: /(?s:.*)/", f"TAIL: TEXT & ~/(?s:.*)(?:{found})(?s:.*)/", ""]
        return "\n".join(lines)

    def _structure(self, structure: Structure, trigger: str) -> str:
        begin, end = structure.begin[len(trigger) :], structure.end
        parts = [
            f"/{_escaped(begin)}/" if begin else "",
            self._json(structure.schema),
            f"/{_escaped(end)}/" if end else "",
        ]
        return " ".join(part for part in parts if part)


def _escaped(text: str) -> str:
    return emit(literal(text))


def _gbnf(spec: GrammarSpec) -> str:
    try:
        return to_lark(spec.text)
    except (GbnfError, RecursionError) as error:
        raise GrammarError(f"the GBNF grammar cannot be read: {error}", param=spec.kind) from error
