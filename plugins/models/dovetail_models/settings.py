"""Read typed values from config.json, and check the settings that change a model's mathematics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dovetail.errors import ConfigError

_LARGEST = (1 << 31) - 1
_MOST = {"num_hidden_layers": 10_000}
"""The largest value of a key, where it is not ``_LARGEST``: descriptions have entries for each layer."""

MATHS: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "bias": (False,),
    "clip_qkv": (),
    "decoder_sparse_step": (1,),
    "embedding_multiplier": (1,),
    "first_k_dense_replace": (0,),
    "final_logit_softcapping": (),
    "layer_types": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "mlp_only_layers": ([],),
    "moe_num_experts": (0,),
    "n_group": (1,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "no_rope_layers": ([],),
    "norm_topk_prob": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "position_embedding_type": ("rope",),
    "qk_layernorm": (False,),
    "qkv_bias": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "routed_scaling_factor": (1,),
    "scoring_func": (),
    "shared_expert_intermediate_size": (0,),
    "shared_intermediate_size": (0,),
    "sliding_window": (),
    "swiglu_alpha": (),
    "swiglu_limit": (),
    "topk_group": (1,),
    "use_bias": (False,),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
"""Map the settings seen in the families of models to the values (besides null) that leave the plain architecture
unchanged."""


def refuse_unread(config: Mapping[str, Any], read: Collection[str], architecture: str) -> None:
    """Raise ``ConfigError`` for a setting of ``MATHS`` that ``architecture`` does not read and that is not neutral."""
    for key, neutral in MATHS.items():
        value = config.get(key)
        if key not in read and value is not None and value not in neutral:
            allowed = ", ".join(["null or absent", *map(repr, neutral)])
            raise ConfigError(
                f"config.json: {key} is {_short(value)}, which {architecture} does not implement here; allowed: {allowed}"
            )


def refuse_other(config: Mapping[str, Any], implemented: Mapping[str, Any], architecture: str) -> None:
    """Raise ``ConfigError`` for a setting that is neither null nor absent nor the only value that ``architecture``
    implements."""
    for key, value in implemented.items():
        if config.get(key) not in (None, value):
            raise ConfigError(
                f"config.json: {key} is {_short(config[key])}, which {architecture} does not implement here; allowed: null or "
                f"absent, {value!r}"
            )


def read_int(config: Mapping[str, Any], key: str, default: int | None = None, minimum: int = 1) -> int:
    """Return an integer; null counts as absent. Raises ``ConfigError``."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json has no {key}; an integer of at least {minimum} is needed")
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"config.json: {key} is {_short(value)}; allowed: an integer of at least {minimum}")
    most = _MOST.get(key, _LARGEST)
    if value > most:
        raise ConfigError(f"config.json: {key} is {_short(value)}; allowed: an integer of at most {most}")
    return value


def read_predict_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers after the model's own that predict further tokens, by DeepSeek-V3's and MiMo's key or
    by Qwen3.5's; 0 by default. Raises ``ConfigError``."""
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    return max(read_int(config, key, 0, minimum=0) for key in keys)


def read_flag(config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """Return a boolean; null counts as absent. Raises ``ConfigError``."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} is {_short(value)}; allowed: true, false")
    return value


def read_float(config: Mapping[str, Any], key: str, default: float) -> float:
    """Return a positive, finite number. Raises ``ConfigError``."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
        raise ConfigError(f"config.json: {key} is {_short(value)}; allowed: a number above 0")
    return float(value)


def read_dtype(config: Mapping[str, Any]) -> str:
    """Return the checkpoint's dtype: ``dtype`` in transformers 5, ``torch_dtype`` before. Raises ``ConfigError``."""
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    allowed = ("float32", "bfloat16", "float16")
    if value not in allowed:
        raise ConfigError(f"config.json: dtype is {_short(value)}; allowed: {', '.join(allowed)}")
    return value


def read_eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return ``eos_token_id`` as a tuple; the config has null, one id or several. Raises ``ConfigError``."""
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"config.json: eos_token_id is {_short(value)}; allowed: null, a token id or a list of them")
    return tuple(ids)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
