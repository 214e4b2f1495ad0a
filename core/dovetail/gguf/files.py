"""Find all files of a GGUF checkpoint that is divided. Imports nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path

from dovetail.errors import ConfigError

MAX_SHARDS = 1000
SHARD = re.compile(r"(?P<start>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""The names of the parts of a checkpoint that was split, each a file of its own."""
PIECE = re.compile(r"(?P<start>.+\.gguf)\.(?P<kind>part|split-?|)(?P<number>[0-9]{1,4}|[a-z]{2})")
"""The names of pieces of a file that was cut, as ``split`` writes them: ``model.gguf.part00`` or ``model.gguf.aa``."""


def shard_files(file: Path) -> list[Path]:
    """Return all files of the checkpoint that ``file`` is a part of, in order. Raises ``ConfigError`` if one is missing."""
    split = SHARD.fullmatch(file.name)
    files = [file]
    if split is not None and 1 < int(split["count"]) <= MAX_SHARDS:
        count = int(split["count"])
        files = [file.with_name(f"{split['start']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [one.name for one in files if not one.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(f"{file.parent} has no {', '.join(missing[:3])}{more}; download all parts of the checkpoint")
    return files


def piece_files(file: Path) -> list[Path]:
    """Return all pieces of the file that ``file`` is a piece of, in order; empty if it is no piece. Raises ``ConfigError``."""
    own = PIECE.fullmatch(file.name)
    if own is None or not file.is_file():
        return []
    pieces = sorted(
        (other["number"].rjust(4, "0"), one)
        for one in file.parent.iterdir()
        if (other := PIECE.fullmatch(one.name)) and (other["start"], other["kind"]) == (own["start"], own["kind"])
    )
    numbers = [number for number, _ in pieces]
    if numbers[0].isdigit() and [int(number) for number in numbers] not in (
        list(range(len(numbers))),
        list(range(1, len(numbers) + 1)),
    ):
        raise ConfigError(
            f"{file.parent} has the pieces {', '.join(numbers)} of {own['start']}; download those that are missing"
        )
    return [one for _, one in pieces]
