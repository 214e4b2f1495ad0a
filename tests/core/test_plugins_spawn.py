"""Test that a config crosses process boundaries, and is resolved to the same components there.

Run: pytest tests/core/test_plugins_spawn.py
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

from dovetail.registry import Machine, resolve, setup

CHILD = """
import json, pickle, sys
from dovetail.registry import Machine, load_plugins, resolve
config = pickle.load(sys.stdin.buffer)
resolved = resolve(config, load_plugins(config.plugins), Machine.assume("cpu"))
print(json.dumps(resolved.to_json()))
"""

CHECKPOINT = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def resolved_elsewhere(config):
    done = subprocess.run([sys.executable, "-c", CHILD], input=pickle.dumps(config), capture_output=True, check=True)
    return json.loads(done.stdout)


def test_another_process_resolves_the_same_config_to_the_same_parts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CHECKPOINT))
    config, registry = setup([], [f"model={tmp_path}", "speculative=ngram", "plugins.allow=dovetail"], {})
    here = resolve(config, registry, Machine.assume("cpu"))
    assert here.model.name == "llama"
    assert here.drafter is not None
    assert resolved_elsewhere(config) == json.loads(json.dumps(here.to_json()))
    assert resolved_elsewhere(here.config)["config"] == here.to_json()["config"]
