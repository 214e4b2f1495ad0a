"""Convert constraints to one regex in the syntax of Rust's regex crate."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.errors import GrammarError
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail_grammar.config import OutlinesConfig
from dovetail_grammar.constraints import read_choice, read_json, read_regex
from dovetail_grammar.json_terms import JsonTermWriter, productive
from dovetail_grammar.patterns import literal
from dovetail_grammar.regex_parser import Alt, Node, PatternError, RegexSeq, Repeat, RuleCall
from dovetail_grammar.schema_rules import SchemaRefusal
from dovetail_grammar.schemas import rewrite


def read(spec: GrammarSpec, config: OutlinesConfig) -> Node:
    """Return the constraint as a pattern without rules. Raises ``GrammarError``."""
    match spec.kind:
        case GrammarKind.REGEX:
            return read_regex(spec, config.max_size)
        case GrammarKind.CHOICE:
            return Alt(tuple(map(literal, read_choice(spec))))
        case GrammarKind.JSON_SCHEMA:
            return _schema(spec, config)
        case _:
            raise GrammarError(
                f"grammar backend outlines does not support {spec.kind}; it supports json_schema, regex and choice",
                param=spec.kind,
                keyword=spec.kind,
            )


def _schema(spec: GrammarSpec, config: OutlinesConfig) -> Node:
    try:
        schema = rewrite(read_json(spec), strict=config.strict)
        terms = JsonTermWriter(schema, config.max_whitespace, config.open_depth)
        node, rules = productive(terms.value(schema), terms.rules)
        return inlined(node, rules, config.max_size)
    except RecursionError as error:
        raise SchemaRefusal("#", "the schema is nested too deeply for grammar backend outlines", "size") from error
    except PatternError as error:
        raise SchemaRefusal("#", str(error), "pattern") from error


def inlined(node: Node, rules: Mapping[str, Node], most: int) -> Node:
    """Return the pattern with every call replaced by its rule. Raises ``SchemaRefusal`` if the result would be too
    large."""
    sizes: dict[str, int] = {}
    if (size := _size(node, rules, sizes)) > most:
        raise SchemaRefusal("#", f"the schema is a regex of {size} characters; allowed: {most} (`max_size`)", "size")
    return _put(node, rules)


def _size(node: Node, rules: Mapping[str, Node], sizes: dict[str, int]) -> int:
    match node:
        case RuleCall(name):
            if name not in sizes:
                sizes[name] = _size(rules[name], rules, sizes)
            return sizes[name]
        case Repeat(inner, low, high):
            return _size(inner, rules, sizes) * max(high if high is not None else low + 1, 1)
        case RegexSeq(items) | Alt(items):
            return 1 + sum(_size(item, rules, sizes) for item in items)
        case _:
            return 1


def _put(node: Node, rules: Mapping[str, Node]) -> Node:
    match node:
        case RuleCall(name):
            return _put(rules[name], rules)
        case Repeat(inner, low, high):
            return Repeat(_put(inner, rules), low, high)
        case RegexSeq(items):
            return RegexSeq(tuple(_put(item, rules) for item in items))
        case Alt(options):
            return Alt(tuple(_put(option, rules) for option in options))
        case _:
            return node
