"""Separate the reasoning that a model writes before its answer, using the marks around it."""

from __future__ import annotations

_MARKS = {
    "think": ("<think>", "</think>"),
    "deepseek-r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "qwen3-thinking": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "kimi": ("◁think▷", "◁/think▷"),
}


def marks_of(model_type: str | None) -> tuple[str, str]:
    """Return the marks around the reasoning of a kind of model; None stands for ``<think>``. Raises ``ValueError``."""
    if model_type is None:
        return _MARKS["think"]
    if model_type not in _MARKS:
        raise ValueError(f"separate_reasoning has model_type {model_type!r}; allowed: {', '.join(_MARKS)}, or None")
    return _MARKS[model_type]


def split_reasoning(text: str, begin: str, end: str, opened: bool) -> tuple[str, str]:
    """Return reasoning and answer. ``opened`` is True if the prompt ended with ``begin``.

    If the reasoning does not end, the whole text is reasoning. Without ``begin``, there is reasoning only if ``end``
    occurs.
    """
    before, mark, after = text.partition(end)
    starts = before.lstrip().startswith(begin)
    if not (mark or opened or starts):
        return "", text
    reasoning = before.lstrip().removeprefix(begin) if starts else before
    return reasoning.strip(), after.lstrip() if mark else ""
