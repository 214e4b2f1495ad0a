"""Which attention backends may be chosen with ``batch_invariant``, on a machine that is assumed.

.venv/bin/python -m pytest -q tests/plugins/test_attention_invariant_choice.py
"""

import json

import pytest

from dovetail.errors import ResolutionError
from dovetail.plugins import stages
from dovetail.plugins.machine import Machine
from dovetail.plugins.resolver import resolve
from dovetail.plugins.setup import setup

MISTRAL = {
    "architectures": ["MistralForCausalLM"], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 512,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch):
    monkeypatch.setattr(stages, "unmet", lambda requirement: iter(()))


def chosen(*sets):
    config, registry = setup((), ["batch_invariant=true", *sets])
    resolved = resolve(config, registry, Machine.assume("sm90"))
    assert resolved.attention_prefill.name == resolved.attention_decode.name
    return resolved.attention_decode.name


def refusal(*sets):
    with pytest.raises(ResolutionError) as error:
        chosen(*sets)
    return str(error.value)


def test_windows_leave_flash_attn_out(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    model = f"model.path={tmp_path}"
    assert chosen() == "flash_attn"
    assert chosen(model) != "flash_attn"
    assert "with a sliding window its kernels divide the keys" in refusal(model, "attention=flash_attn")


def test_pools_of_8_bits_leave_flashinfer_out():
    assert chosen("memory.kv_dtype=fp8_e4m3") == "triton"
    assert "memory.kv_dtype is fp8_e4m3" in refusal("memory.kv_dtype=fp8_e4m3", "attention=flashinfer")
    assert chosen("attention=flashinfer") == "flashinfer"


def test_flashinfer_takes_its_kernels_for_hopper_alone():
    assert "allowed: auto, fa3" in refusal("attention={kind: flashinfer, variant: fa2}")
    assert chosen("attention={kind: flashinfer, variant: fa3}") == "flashinfer"
