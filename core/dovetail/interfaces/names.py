"""Provide open sets of names. Any text is a name, and the built-in names are attributes of the class."""

from __future__ import annotations

from typing import Any


class BuiltIn:
    """Stand for a built-in name in the body of a class of names. When Python creates the class, the attribute becomes
    ``owner(text)``, an instance of that class."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __set_name__(self, owner: type[Any], name: str) -> None:
        setattr(owner, name, owner(self._text))
