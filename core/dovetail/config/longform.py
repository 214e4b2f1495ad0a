"""Bring a config tree to its long form, in which the settings of several sources can be merged.

    written                                   long form
    model: tiny                               model: {path: tiny}
    cache: radix                              cache: {kind: radix}
    speculative: [a, {kind: b, depth: 3}]     speculative: [{kind: a}, {kind: b, depth: 3}]
    attention: {prefill: a, decode: b}        attention: {prefill: {kind: a}, decode: {kind: b}}
    grammar: a                                grammar: {backend: {kind: a}}

``auto`` and ``none`` are kinds too at this stage. Two mappings merge key by key. A section that names another ``kind``
replaces the section of the earlier source, because components do not share their fields. Settings of an earlier source
that names no kind are kept: they are those of the component that a later source names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.config.kinds import BACKEND, BUILT_IN, KindSection, Sections

Tree = dict[str, Any]


def long_form(tree: Mapping[str, Any], sections: Sections = BUILT_IN) -> Tree:
    """Return ``tree`` with every shorthand written out. ``sections`` are the sections that select components. Wrong
    values are kept, and refused later."""
    by_key = {section.key: section for section in sections}
    return {key: _expand(key, value, by_key.get(key)) for key, value in tree.items()}


def _expand(key: str, value: Any, section: KindSection | None) -> Any:
    if section is None:
        return {"path": value} if key == "model" and isinstance(value, str) else value
    if section.settings is not None:
        return _with_settings(value, section.settings.model_fields)
    if section.is_phased(value):
        return {phase: _selection(choice) for phase, choice in value.items()}
    return _selection(value)


def _selection(value: Any) -> Any:
    if isinstance(value, list):
        return [_selection(item) for item in value]
    return {"kind": value} if isinstance(value, str) else value


def _with_settings(value: Any, settings: Mapping[str, Any]) -> Tree:
    """Separate ``backend`` from the settings next to it. Keys that are not settings of the section belong to the
    backend."""
    if not isinstance(value, dict) or "kind" in value:
        return {BACKEND: _selection(value)}
    if BACKEND in value:
        return {**value, BACKEND: _selection(value[BACKEND])}
    own = {key: inner for key, inner in value.items() if key in settings}
    rest = {key: inner for key, inner in value.items() if key not in own}
    return {**own, BACKEND: rest} if rest else own


def combine(base: Tree, over: Tree, sections: Sections = BUILT_IN) -> Tree:
    """Return both trees (long form) merged; ``over`` wins. Change neither of them."""
    by_key = {section.key: section for section in sections}
    merged = dict(base)
    for key, value in over.items():
        merged[key] = _combine_section(base[key], value, by_key.get(key)) if key in base else value
    return merged


def _combine_section(base: Any, over: Any, section: KindSection | None) -> Any:
    if section is None:
        return _combine_any(base, over)
    if section.settings is not None:
        return _combine_with_settings(base, over)
    if section.is_phased(base) or section.is_phased(over):
        return _combine_phases(base, over, section)
    return _combine_selection(base, over)


def _combine_with_settings(base: Tree, over: Tree) -> Tree:
    merged = {**base, **over}
    if BACKEND in base and BACKEND in over:
        merged[BACKEND] = _combine_selection(base[BACKEND], over[BACKEND])
    return merged


def _combine_phases(base: Any, over: Any, section: KindSection) -> Any:
    below: Tree = base if section.is_phased(base) else dict.fromkeys(section.phases, base)
    above: Tree = over if section.is_phased(over) else dict.fromkeys(section.phases, over)
    return {
        phase: _combine_selection(below[phase], above[phase]) if phase in below and phase in above else choice
        for phase, choice in {**below, **above}.items()
    }


def _combine_selection(base: Any, over: Any) -> Any:
    both = isinstance(over, dict) and isinstance(base, dict)
    replaced = both and "kind" in base and over.get("kind", base["kind"]) != base["kind"]
    return over if replaced else _combine_any(base, over)


def _combine_any(base: Any, over: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: _combine_any(base[key], value) if key in base else value for key, value in over.items()}}
