"""The long form of a config tree, in which layers can be merged.

    written                                   long form
    model: tiny                               model: {path: tiny}
    cache: radix                              cache: {kind: radix}
    speculative: [a, {kind: b, depth: 3}]     speculative: [{kind: a}, {kind: b, depth: 3}]
    attention: {prefill: a, decode: b}        attention: {prefill: {kind: a}, decode: {kind: b}}
    grammar: a                                grammar: {backend: {kind: a}}

``auto`` and ``none`` are kinds too at this stage. Two mappings merge key by key; a section that names another ``kind``
replaces the one below it, as the fields of one component mean nothing to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.config.plugin import GrammarSettings

PLUGIN_SECTIONS = ("attention", "cache", "grammar", "speculative", "policy", "tool_parser", "reasoning_parser", "api")
OPTIONAL_SECTIONS = ("grammar", "speculative", "tool_parser", "reasoning_parser", "api")
PHASES = ("prefill", "decode")
Tree = dict[str, Any]


def reserved_words(section: str) -> tuple[str, ...]:
    """Words that a section takes instead of a component's name, so that no component may be called so."""
    return ("auto", "none") if section in OPTIONAL_SECTIONS else ("auto",)


def long_form(tree: Mapping[str, Any]) -> Tree:
    """``tree`` with every shorthand written out. Values that are wrong pass through and are refused later."""
    return {key: _expand(key, value) for key, value in tree.items()}


def _expand(section: str, value: Any) -> Any:
    if section == "model" and isinstance(value, str):
        return {"path": value}
    if section == "attention" and is_phased(value):
        return {phase: _selection(choice) for phase, choice in value.items()}
    if section == "grammar":
        return _grammar(value)
    return _selection(value) if section in PLUGIN_SECTIONS else value


def _selection(value: Any) -> Any:
    if isinstance(value, list):
        return [_selection(item) for item in value]
    return {"kind": value} if isinstance(value, str) else value


def _grammar(value: Any) -> Tree:
    """``backend`` and the settings beside it. Keys that are none of the section's own are the backend's."""
    if not isinstance(value, dict) or "kind" in value:
        return {"backend": _selection(value)}
    if "backend" in value:
        return {**value, "backend": _selection(value["backend"])}
    own = {key: inner for key, inner in value.items() if key in GrammarSettings.model_fields}
    rest = {key: inner for key, inner in value.items() if key not in own}
    return {**own, "backend": rest} if rest else own


def is_phased(value: Any) -> bool:
    """True for ``{prefill: ..., decode: ...}``: an attention section that chooses per phase."""
    return isinstance(value, dict) and "kind" not in value and any(phase in value for phase in PHASES)


def combine(base: Tree, over: Tree) -> Tree:
    """Both trees (long form) merged; ``over`` wins. Neither is changed."""
    merged = dict(base)
    for key, value in over.items():
        merged[key] = _combine_section(key, base[key], value) if key in base else value
    return merged


def _combine_section(section: str, base: Any, over: Any) -> Any:
    if section == "attention" and (is_phased(base) or is_phased(over)):
        return _combine_phases(base, over)
    if section == "grammar":
        return _combine_grammar(base, over)
    return _combine_selection(base, over) if section in PLUGIN_SECTIONS else _combine_any(base, over)


def _combine_grammar(base: Tree, over: Tree) -> Tree:
    merged = {**base, **over}
    if "backend" in base and "backend" in over:
        merged["backend"] = _combine_selection(base["backend"], over["backend"])
    return merged


def _combine_phases(base: Any, over: Any) -> Any:
    below: Tree = base if is_phased(base) else dict.fromkeys(PHASES, base)
    above: Tree = over if is_phased(over) else dict.fromkeys(PHASES, over)
    return {
        phase: _combine_selection(below[phase], above[phase]) if phase in below and phase in above else choice
        for phase, choice in {**below, **above}.items()
    }


def _combine_selection(base: Any, over: Any) -> Any:
    replaced = (
        isinstance(over, dict) and isinstance(base, dict) and over.get("kind", base.get("kind")) != base.get("kind")
    )
    return over if replaced else _combine_any(base, over)


def _combine_any(base: Any, over: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: _combine_any(base[key], value) if key in base else value for key, value in over.items()}}
