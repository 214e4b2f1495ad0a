"""Test which attention backends can be chosen with ``batch_invariant``, on a simulated machine.

.venv/bin/python -m pytest -q tests/plugins/test_attention_invariant_choice.py
"""

import json

import pytest

from dovetail.errors import ResolutionError
from dovetail.registry import stages
from dovetail.registry.machine import Machine
from dovetail.registry.resolver import resolve
from dovetail.registry.setup import setup
from dovetail_attention.flashinfer.probe import probe

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
    assert chosen(model) == "flashinfer"
    assert "batch_invariant needs attention.batch_invariant_window" in refusal(model, "attention=flash_attn")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("memory.kv_dtype=fp8_e4m3", "memory.kv_dtype is fp8_e4m3"),
        ("attention={kind: flashinfer, variant: fa2}", "fa2"),
    ],
)
def test_flashinfer_says_what_its_kernels_for_hopper_cannot_do(setting, reason):
    for invariant in (True, False):
        config, _ = setup((), [f"batch_invariant={str(invariant).lower()}", "attention=flashinfer", setting])
        (section,) = config.attention.decode.candidates
        assert (reason in (probe(section, config) or "")) == invariant
    config, _ = setup((), ["batch_invariant=true", "attention={kind: flashinfer, variant: fa3}"])
    assert probe(config.attention.decode.candidates[0], config) is None
