"""Write the config.json of a GGUF file from its metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dovetail.errors import ConfigError
from dovetail.gguf.families import BASE, FAMILIES, REQUIRED, VARIANTS, Family, Key, Present
from dovetail.gguf.reader import GgufFile
from dovetail.gguf.token_ids import token_id

HALF_SCALED = {"gemma2": 46, "gemma3": 62}
"""The numbers of layers of the models that scale queries by hidden size / heads in place of the size of a head (27B)."""
STOPS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "<|end_of_text|>", "<|return|>",
    "<|call|>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
"""Control tokens that end an output, whatever the metadata says, as in llama.cpp."""


def family_of(checkpoint: GgufFile) -> Family:
    """Return the family of a file. Raises ``ConfigError`` for an architecture that is not in ``FAMILIES``."""
    name = checkpoint.architecture
    if name not in FAMILIES:
        raise ConfigError(
            f"{checkpoint.files[0]} has architecture {name!r}; implemented for GGUF: {', '.join(sorted(FAMILIES))}. Take a checkpoint of "
            "this model in safetensors if it is another one that is implemented"
        )
    for key, expected, family in VARIANTS.get(name, ()):
        value = checkpoint.find(f"{name}.{key}", int)
        if value and expected in (None, value):
            return family
    return FAMILIES[name]


def config_json(checkpoint: GgufFile) -> dict[str, Any]:
    """Return the config.json of a file. Raises ``ConfigError`` for a file that lacks a setting."""
    family = family_of(checkpoint)
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for key, source in family.settings.items():
        value = _value(checkpoint, source)
        if value is not None:
            config[key] = value
    config["num_hidden_layers"] = num_layers(checkpoint)
    config["vocab_size"] = _rows(checkpoint, "token_embd.weight")
    config["tie_word_embeddings"] = "output.weight" not in checkpoint.tensors
    config |= _rope(checkpoint, family, config) | _further(checkpoint, family, config)
    config["dtype"] = "float16" if _types(checkpoint) <= {"F32", "F16"} and "F16" in _types(checkpoint) else "bfloat16"
    stops = end_ids(checkpoint)
    if stops:
        config["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    bos = token_id(checkpoint, "bos")
    return config | ({} if bos is None else {"bos_token_id": bos})


def num_layers(checkpoint: GgufFile) -> int:
    """Return the number of layers, without those that predict further tokens. Raises ``ConfigError`` if the file has no
    tensor of the last one."""
    name = checkpoint.architecture
    layers = checkpoint.get(f"{name}.block_count", int) - predicting_layers(checkpoint)
    if not any(tensor.startswith(f"blk.{layers - 1}.") for tensor in checkpoint.tensors):
        raise ConfigError(
            f"{checkpoint.files[0]}: {name}.block_count makes {layers} layers (less {name}.nextn_predict_layers), and there is no tensor "
            f"blk.{layers - 1}; convert the checkpoint again"
        )
    return layers


def predicting_layers(checkpoint: GgufFile) -> int:
    """Return the number of layers that predict further tokens, which are the last ones. Raises ``ConfigError``."""
    key = f"{checkpoint.architecture}.nextn_predict_layers"
    count = checkpoint.get(key, int, 0)
    if count < 0:
        raise ConfigError(f"{checkpoint.files[0]}: {key} is {count}; expected 0 or more")
    return count


def end_ids(checkpoint: GgufFile) -> list[int]:
    """Return the ids of the tokens that end an output: those that the metadata names, and control tokens whose text says
    so."""
    named = [token_id(checkpoint, name) for name in ("eos", "eot", "eom")]
    tokens, kinds = checkpoint.strings("tokenizer.ggml.tokens") or (), checkpoint.numbers("tokenizer.ggml.token_type")
    texts = {text: index for index, text in enumerate(tokens) if text in STOPS}
    kinds = () if kinds is None else kinds
    known = [index for index in texts.values() if index < len(kinds) and kinds[index] == 3]
    return list(dict.fromkeys(value for value in (*named, *known) if value is not None))


def _value(checkpoint: GgufFile, source: Any) -> Any:
    """Return a setting."""
    if isinstance(source, Present):
        return any(name in checkpoint.tensors for name in (f"blk.0.{source.tensor}", source.tensor))
    if not isinstance(source, Key):
        return source
    key = f"{checkpoint.architecture}.{source.name}"
    value = checkpoint.metadata.get(key)
    if value is None and source.default is REQUIRED:
        raise ConfigError(f"{checkpoint.files[0]} has no {key} in its metadata; convert the checkpoint again")
    if value is None:
        return source.default
    if isinstance(value, np.ndarray):  # one number for each layer
        values = sorted({*value.tolist()})
        if len(values) != 1:
            raise ConfigError(
                f"{checkpoint.files[0]}: {key} differs between layers ({values!s:.60}); implemented: one value for all"
            )
        value = values[0]
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{checkpoint.files[0]}: {key} is {value!s:.60}; expected a finite number")
    return value


def _rows(checkpoint: GgufFile, name: str) -> int:
    if name not in checkpoint.tensors:
        raise ConfigError(f"{checkpoint.files[0]} has no tensor {name}; a checkpoint of a language model is expected")
    return checkpoint.tensors[name].shape[0]


def _types(checkpoint: GgufFile) -> set[str]:
    return {tensor.type.name for tensor in checkpoint.tensors.values()}


def _rope(checkpoint: GgufFile, family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions that are no plain keys."""
    name = checkpoint.architecture
    found: dict[str, Any] = {}
    rotated = checkpoint.find(f"{name}.rope.dimension_count", int)
    hidden, heads = (_positive(checkpoint, config, setting) for setting in ("hidden_size", "num_attention_heads"))
    head = config.get("head_dim") or hidden // heads
    if family.partial and rotated:
        found["partial_rotary_factor"] = rotated / head
    elif rotated and "head_dim" not in config and family.model_type in ("llama", "mixtral", "granite"):
        found["head_dim"] = rotated
    kind = checkpoint.find(f"{name}.rope.scaling.type", str)
    factor = checkpoint.find(f"{name}.rope.scaling.factor", float)
    original = checkpoint.find(f"{name}.rope.scaling.original_context_length", int)
    if "rope_freqs.weight" in checkpoint.tensors:
        factors = _floats(checkpoint, "rope_freqs.weight")
        whole = config["max_position_embeddings"]
        found["rope_scaling"] = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors} | {
            "original_max_position_embeddings": whole,
            "attention_factor": 1.0,
        }
    elif "rope_factors_short.weight" in checkpoint.tensors:
        found["original_max_position_embeddings"] = original or config["max_position_embeddings"]
        scaling = {
            "rope_type": "longrope",
            "short_factor": _floats(checkpoint, "rope_factors_short.weight"),
            "long_factor": _floats(checkpoint, "rope_factors_long.weight"),
        }
        attention = checkpoint.find(f"{name}.rope.scaling.attn_factor", float)
        found["rope_scaling"] = scaling | ({"attention_factor": attention} if attention else {})
    elif kind == "linear" and factor and factor != 1:
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and factor:
        found["rope_scaling"] = {"rope_type": "yarn", "factor": factor} | _yarn(checkpoint, original)
    elif kind not in (None, "none", "linear", "yarn"):
        raise ConfigError(
            f"{checkpoint.files[0]}: {name}.rope.scaling.type is {kind!r:.40}; implemented: none, linear, yarn, longrope"
        )
    return found


def _yarn(checkpoint: GgufFile, original: int | None) -> dict[str, Any]:
    name = checkpoint.architecture
    found: dict[str, Any] = {"original_max_position_embeddings": original} if original else {}
    for key in ("beta_fast", "beta_slow"):
        value = checkpoint.find(f"{name}.rope.scaling.yarn_{key}", float)
        found |= {} if value is None else {key: value}
    if name == "gpt-oss":
        found["truncate"] = False
    multiplier = checkpoint.find(f"{name}.rope.scaling.yarn_log_multiplier", float)
    if multiplier:  # 0.1 * mscale_all_dim; published checkpoints have the same number in mscale
        found |= {"mscale": multiplier * 10, "mscale_all_dim": multiplier * 10}
    return found


def _positive(checkpoint: GgufFile, config: Mapping[str, Any], setting: str) -> int:
    """Return a setting that others are computed from. Raises ``ConfigError`` if it is no positive integer."""
    value = config[setting]
    if type(value) is not int or value < 1:
        key = f"{checkpoint.architecture}.{BASE[setting].name}"
        raise ConfigError(f"{checkpoint.files[0]}: {key} is {value!s:.60}; expected a positive integer")
    return value


def _floats(checkpoint: GgufFile, name: str) -> list[float]:
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        raise ConfigError(f"{checkpoint.files[0]} has no tensor {name}; convert the checkpoint again")
    if tensor.type.name != "F32":
        raise ConfigError(f"{checkpoint.files[0]}: tensor {name} has type {tensor.type.name}; expected F32")
    return tensor.data.view("<f4").reshape(-1).tolist()


def _further(checkpoint: GgufFile, family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that follow from others."""
    name = checkpoint.architecture
    if name in HALF_SCALED:
        by_hidden = config["num_hidden_layers"] == HALF_SCALED[name]
        scale = (
            config["hidden_size"] / _positive(checkpoint, config, "num_attention_heads")
            if by_hidden
            else config["head_dim"]
        )
        return {"query_pre_attn_scalar": scale} | ({"rope_local_base_freq": 10000.0} if name == "gemma3" else {})
    if name != "deepseek2":
        return {}
    rotated = config["qk_rope_head_dim"]
    key, value = (
        checkpoint.find(f"{name}.attention.{part}_length_mla", int)
        or checkpoint.get(f"{name}.attention.{part}_length", int)
        for part in ("key", "value")
    )
    found = {"qk_nope_head_dim": key - rotated, "v_head_dim": value, "head_dim": rotated}
    found["num_key_value_heads"] = config["num_attention_heads"]
    found["q_lora_rank"] = config.get("q_lora_rank") or None
    if family.model_type == "deepseek_v2":
        found["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
        found["norm_topk_prob"] = False
    return found
