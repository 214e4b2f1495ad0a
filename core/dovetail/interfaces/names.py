"""Provide open sets of names: any text is a name, and the built-in ones are attributes of the class."""

from __future__ import annotations

from typing import Any


class BuiltIn:
    """Become, as an attribute of a class of names, the name with this text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __set_name__(self, owner: type[Any], name: str) -> None:
        setattr(owner, name, owner(self._text))
