"""Test that models which transformers' modules would compute wrongly in an engine are refused with the reason.

Run: python -m pytest tests/plugins/test_transformers_refusals.py
"""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature
from dovetail_models.fallback.describe import describe_transformers

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "ALiBi": ("bloom", "BloomForCausalLM", {}, "BloomForCausalLM.*does not support transformers' attention interface"),
    "a state": ("mamba", "MambaForCausalLM", {}, "keeps a recurrent state|attention interface"),
    "two calls in a layer": ("diffllama", "DiffLlamaForCausalLM", {}, "self_attn attends several times"),
    "an encoder's attention": ("bert", "BertLMHeadModel", {}, "does not attend causally"),
    "an encoder": ("t5", "T5ForConditionalGeneration", {}, "attention interface|has an encoder"),
    "a mask of its own": ("doge", "DogeForCausalLM", {}, "DogeForCausalLM: its code cannot run"),
    "frequencies by length": ("llama", "LlamaForCausalLM", DYNAMIC, "rope_type is 'dynamic', whose frequencies depend"),
    "a head that reads the body's parts": ("opt", "OPTForCausalLM", {}, "code for logits needs more of its body.*'decoder'"),
    "experts": ("mixtral", "MixtralForCausalLM", {}, "gate_up_proj is a tensor of 3 dimensions"),
    "images": ("gemma3", "Gemma3ForConditionalGeneration", {}, r"is multimodal \(vision_config\)"),
    "an unknown class": ("llama", "MyForCausalLM", {"auto_map": {}}, r"\['MyForCausalLM'\], which transformers .* does not"),
}  # fmt: skip


def config_of(kind: str, architecture: str, settings: dict[str, Any]) -> dict[str, Any]:
    built = transformers.AutoConfig.for_model(
        kind, **({**SMALL, **settings} if kind in ("llama", "doge", "diffllama", "mixtral") else settings)
    )
    return {**built.to_dict(), "architectures": [architecture]}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_the_reason(case: str) -> None:
    kind, architecture, settings, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason):
        describe_transformers(config_of(kind, architecture, settings))


def test_the_description_is_what_the_code_gives_to_attention() -> None:
    given = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 12}
    config = transformers.VaultGemmaConfig(**SMALL, **given, query_pre_attn_scalar=9, attn_logit_softcapping=3.0)
    info = describe_transformers({**config.to_dict(), "architectures": ["VaultGemmaForCausalLM"]})
    first, second = info.config.attention
    assert (first.scale, first.window, first.soft_cap) == (pytest.approx(1 / 3), 7, 3.0)
    assert second.window is None
    assert [group.window for group in info.cache_groups] == [None, 7]
    assert info.needs == {Feature.ATTN_SLIDING_WINDOW, Feature.ATTN_SOFT_CAP}
    assert (info.num_heads, info.num_kv_heads, info.head_dim, info.context_len) == (4, 2, 12, 256)


def test_longrope_has_the_factors_of_the_context() -> None:
    """Without that, modules would choose factors by the positions of a step, which is refused."""
    own = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    config = transformers.Phi3Config(
        **SMALL, pad_token_id=0, rope_parameters={**own, "original_max_position_embeddings": 64}
    )
    info = describe_transformers({**config.to_dict(), "architectures": ["Phi3ForCausalLM"]})
    assert info.context_len == 256


def test_modules_that_need_all_heads_have_one_rank_and_say_why() -> None:
    config = transformers.CohereConfig(**SMALL, use_qk_norm=True)
    info = describe_transformers({**config.to_dict(), "architectures": ["CohereForCausalLM"]})
    assert Feature.MODEL_TENSOR_PARALLEL not in info.offers
    assert "do not compute with a rank's share" in info.notes[1]
