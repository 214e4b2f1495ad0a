"""Test that models which transformers' modules would compute wrongly in an engine are refused with the reason.

Run: python -m pytest tests/plugins/test_transformers_refusals.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP

from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature
from dovetail_models.fallback.describe import describe_transformers
from dovetail_models.fallback.trace import AttentionTrace
from dovetail_models.fallback.tree import TRACED_ATTENTION, new_tree

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
    "a mask of its own": ("doge", "DogeForCausalLM", {}, "DogeForCausalLM: .*self_attn computes expand over the tokens"),
    "frequencies by length": ("llama", "LlamaForCausalLM", DYNAMIC, "rope_type is 'dynamic', whose frequencies depend"),
    "a head that reads the body's parts": ("opt", "OPTForCausalLM", {}, "code for logits needs more of its body.*'decoder'"),
    "experts": ("mixtral", "MixtralForCausalLM", {}, "gate_up_proj is a tensor of 3 dimensions"),
    "images": ("gemma3", "Gemma3ForConditionalGeneration", {}, r"is multimodal \(vision_config\)"),
    "an unknown class": ("llama", "MyForCausalLM", {"auto_map": {}}, r"\['MyForCausalLM'\], which transformers .* does not"),
}  # fmt: skip

OfTokens = Callable[[torch.Tensor], torch.Tensor]
MIXED: dict[str, tuple[OfTokens, str]] = {
    "a mean": (lambda x: x + x.mean(1, keepdim=True), "mean"),
    "a mean of everything": (lambda x: x + x.mean(), "mean"),
    "a shift": (lambda x: x + functional.pad(x[:, :-1], (0, 0, 1, 0)), "slice"),
    "a shift in one operation": (lambda x: x + functional.pad(x, (0, 0, 1, -1)), "constant_pad_nd"),
    "softmax": (lambda x: x.softmax(1), "_softmax"),
    "attention": (lambda x: torch.bmm(torch.bmm(x, x.transpose(1, 2)), x), "bmm"),
    "an outer product": (lambda x: (x[:, :, None] * x[:, None]).sum(2), "mul"),
    "the last token": (lambda x: x + x[:, -1:], "slice"),
    "one token": (lambda x: x + x[:, 0], "select"),
    "a sum up to each token": (lambda x: x.cumsum(1), "cumsum"),
    "another order": (lambda x: x + x.flip(1), "flip"),
    "a rotation": (lambda x: x + x.roll(1, 1), "roll"),
    "a sorted column": (lambda x: x.sort(1).values, "sort"),
    "a norm of columns": (lambda x: functional.layer_norm(x.mT, x.shape[1:2]).mT, "native_layer_norm"),
    "other borders": (lambda x: x.mT.reshape(x.shape), "_unsafe_view|view"),
    "a lookup": (lambda x: x.gather(1, x.argsort(2)), "gather"),
    "a choice": (lambda x: x[:, x.argmax(2)[0]], "index"),
    "a matrix of tokens": (lambda x: x.new_ones(x.shape[1], x.shape[1]).tril() @ x, "tril|bmm|expand"),
    "an assignment": (lambda x: _assigned(x), "slice"),
    "an unknown operation": (lambda x: x.as_strided(x.shape, (0, 0, 1)), "as_strided"),
}
BY_TOKEN: dict[str, OfTokens] = {
    "softmax": lambda x: x.softmax(-1),
    "sums": lambda x: x - x.mean(-1, keepdim=True) + x.cumsum(-1) + x.amax(2)[..., None],
    "heads": lambda x: x.view(1, -1, 4, 12).transpose(1, 2).mul(2).transpose(1, 2).reshape(x.shape),
    "rows of heads": lambda x: functional.layer_norm(x.view(-1, 12), (12,)).view(x.shape),
    "the best channels": lambda x: torch.zeros_like(x).scatter(-1, x.topk(3, -1).indices, x.topk(3, -1).values),
    "rolled channels": lambda x: torch.cat((x[..., 24:], x[..., :24]), -1).roll(1, -1).flip(-1),
    "products of a token": lambda x: torch.einsum("bth,btk->bthk", x, x).sum(-1),
    "padded channels": lambda x: functional.pad(x, (2, -2)),
}


def _assigned(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[:, 1:] = x[:, :-1]
    return out


def trace_llama(monkeypatch: pytest.MonkeyPatch, change: OfTokens) -> None:
    """Trace a Llama whose MLPs compute ``change`` first."""
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, change(x)))
    AttentionTrace(new_tree(config_of("llama", "LlamaForCausalLM", {}), TRACED_ATTENTION)).run()


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


@pytest.mark.parametrize("case", MIXED)
def test_modules_that_mix_tokens_are_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, operation = MIXED[case]
    with pytest.raises(ConfigError, match=rf"model\.layers\.0\.mlp computes ({operation}) over the tokens of a step"):
        trace_llama(monkeypatch, change)


@pytest.mark.parametrize("case", BY_TOKEN)
def test_modules_that_compute_token_by_token_are_accepted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace_llama(monkeypatch, BY_TOKEN[case])


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
