"""Test that a step takes as much memory in the layers that are measured as in all of them.

Run on a GPU machine: python -m pytest tests/gpu/test_representative_layers_gpu.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM
from dovetail.engine.dry_run import dry_run, representative_layers
from dovetail.engine.memory import measure_peak

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DENSE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 1024,
    "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 512,
    "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0],
}  # fmt: skip


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_first_layers_take_the_memory_of_all(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(str(tmp_path), model={"load_format": "dummy"}, grammar="none", memory={"num_pages": 700}) as llm:
        engine: Any = llm.loop.executor.rank.engine  # type: ignore[attr-defined]
        layers = representative_layers(engine.model)
        assert layers is not None
        given = engine.model, engine.eager_runner.prefill, engine.pool, [5000, 3000, 1, 1], 64
        peaks = [measure_peak(lambda n=n: dry_run(*given, n), engine.device) for n in (layers, None, layers)]
        assert peaks[0] == peaks[1] == peaks[2] > 100e6
