"""Read the ids of special tokens from the metadata of a GGUF file."""

from __future__ import annotations

from dovetail.errors import ConfigError
from dovetail.gguf.reader import GgufFile

NO_TOKEN = (-1, 2**32 - 1)
"""What files store, signed or unsigned, for a token that does not exist."""


def token_id(checkpoint: GgufFile, name: str) -> int | None:
    """Return the id of a special token (``eos``, ``bos``, ...), or None if the file has none. Raises ``ConfigError`` if it is
    no integer, or not the id of a token."""
    key = f"tokenizer.ggml.{name}_token_id"
    found = checkpoint.find(key, int)
    if found is None or found in NO_TOKEN:
        return None
    tokens = checkpoint.strings("tokenizer.ggml.tokens")
    count = len(tokens) if tokens is not None else checkpoint.tensors["token_embd.weight"].shape[0]
    if not 0 <= found < count:
        raise ConfigError(
            f"{checkpoint.files[0]}: {key} is {found}; allowed: 0 to {count - 1}; convert the checkpoint again"
        )
    return found
