"""Test on a CUDA device that transformers' modules run in captured steps, with the answers of the CPU.

.venv/bin/python -m pytest -q tests/gpu/test_transformers_models_gpu.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dovetail import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "seed_oss": SMALL,
    "exaone4": {**SMALL, **WINDOWS},
    "vaultgemma": {**SMALL, **WINDOWS},
    "helium": SMALL,
    "ernie4_5": SMALL,
    "olmo": SMALL,
    "nemotron": SMALL,
    "granite_swa": {**SMALL, **WINDOWS},
    "ministral3": SMALL,
    "apertus": SMALL,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_captured_steps_answer_as_the_cpu(tmp_path: Path, name: str) -> None:
    """Two rounds, the second of which finds prefixes in the cache; prompts and decode steps are captured at the start."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **CONFIGS[name])
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    prefix = rng.integers(16, 4000, 50).tolist()
    prompts = [prefix[: 10 * n] + rng.integers(16, 4000, 20 + 9 * n).tolist() for n in range(6)]
    params = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
    model = {"path": str(tmp_path), "dtype": "float32", "implementation": "transformers"}
    settings = {"grammar": "none", "model": model, "memory": {"page_size": 4, "num_pages": 600}}
    wanted = LLM(device="cpu", **settings)
    expected = [output.token_ids for output in wanted.generate(prompts, params)]
    llm = LLM(device="cuda", graphs={"capture": "start"}, **settings)
    for _ in range(2):
        found = [output.token_ids for output in llm.generate(prompts, params)]
        assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1, "a near tie may be decided otherwise"
        llm.loop.scheduler.check_integrity()
    llm.close()
