"""Write the files of a checkpoint in Hugging Face layout for a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.gguf.config import config_json
from dovetail.gguf.mapping import block_types, mapped_tensors
from dovetail.gguf.reader import read_gguf
from dovetail.gguf.tokenizer import tokenizer_files


def presentation(file: Path) -> Mapping[str, str]:
    """Return the files that present a checkpoint, by their names."""
    checkpoint = read_gguf(file)
    config: dict[str, Any] = config_json(checkpoint)
    blocks = block_types(mapped_tensors(checkpoint))
    if blocks is not None:
        config["quantization_config"] = blocks
    return {"config.json": json.dumps(config, indent=1), **tokenizer_files(checkpoint)}
