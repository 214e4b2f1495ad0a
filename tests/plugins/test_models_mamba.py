"""Compare models of the Mamba family with transformers.

Run: python -m pytest tests/plugins/test_models_mamba.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from dovetail.errors import ConfigError
from dovetail.llm import LLM
from hf_suite import HuggingFaceSuite

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class StateSuite(HuggingFaceSuite):
    """Compare a model with states, whose long recurrences add up more rounding."""

    tolerance = 2e-4

    def test_the_engine_refuses_it(self, tmp_path):
        """Engines have no memory for states yet."""
        self.write_checkpoint(next(iter(self.configs.values())), tmp_path)
        with pytest.raises(ConfigError, match="state"):
            LLM(str(tmp_path), device="cpu", grammar="none", attention="torch_native", memory={"num_pages": 20})


class TestMamba2(StateSuite):
    name = "mamba2"
    model_type = "mamba2"
    small: ClassVar[Mapping[str, Any]] = COMMON | {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 24,
        "n_groups": 2,
        "chunk_size": 16,
    }
    configs: ClassVar[Mapping[str, Any]] = {
        "two groups": {},
        "one group, biases": {"n_groups": 1, "use_bias": True, "tie_word_embeddings": True},
        "limited, no bias": {"n_groups": 4, "use_conv_bias": False, "time_step_limit": [0.002, 0.05]},
    }
