"""Save small random models in Hugging Face layout, and generate with them in transformers. The engine tests share this
module."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig

VOCAB = 199


def save_llama(directory: Path, **overrides) -> Path:
    """Save a two-layer Llama whose greedy continuations vary: weights are large enough for distinct logits."""
    torch.manual_seed(7)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    LlamaForCausalLM(LlamaConfig(**(settings | overrides))).save_pretrained(directory)
    return directory


def save(directory: Path, config: type[PretrainedConfig], vectors: float = 0.0, **overrides: object) -> Path:
    """Save a two-layer model of another architecture, tied, with head_dim != hidden / heads where that can be set. Random
    numbers as large as ``vectors`` are added to parameters with one dimension, such as norms and biases."""
    torch.manual_seed(8)
    settings: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(config(**(settings | overrides)))
    with torch.no_grad():
        for parameter in model.parameters():
            if vectors and parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * vectors)
    model.save_pretrained(directory)
    return directory


class Reference:
    """Run transformers in float32, one prompt at a time."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.greedy = lru_cache(None)(self._greedy)

    @torch.inference_mode()
    def _greedy(self, prompt: tuple[int, ...], count: int) -> list[int]:
        ids, cache, out = torch.tensor([prompt]), None, []
        for _ in range(count):
            result = self.model(ids, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            out.append(int(result.logits[0, -1].argmax()))
            ids = torch.tensor([[out[-1]]])
        return out

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Return log-probabilities [len(tokens), V] after each token."""
        return self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
