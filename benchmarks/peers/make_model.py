"""Write a Llama with random weights: ``python -m peers.make_model DIRECTORY SHAPE``; SHAPE is JSON, see
``peers.models``."""

from __future__ import annotations

import json
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    """Save one model."""
    directory, shape = sys.argv[1], json.loads(sys.argv[2])
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.08,
    )
    model: torch.nn.Module = LlamaForCausalLM(config)
    model.bfloat16()
    model.save_pretrained(directory)


if __name__ == "__main__":
    main()
