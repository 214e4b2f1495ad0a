"""Test the measurement of benchmarks/load_checkpoint.py: the loader needs little host memory, and more would be seen.

Run: python -m pytest tests/core/test_load_checkpoint.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dovetail.engine.shards import ShardReader

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import load_checkpoint

sys.path.pop(0)

MIB = 1 << 20
SMALL = dict(load_checkpoint.QWEN3_30B_A3B) | {
    "vocab_size": 512,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 64,
    "num_attention_heads": 4,
}


def test_sixty_one_gigabytes_are_the_whole_model() -> None:
    config = load_checkpoint.config_of(61e9)
    assert config["num_hidden_layers"] == 48
    assert load_checkpoint.checkpoint_bytes(config) == pytest.approx(61.06e9, rel=1e-3)


@pytest.mark.parametrize("keeps", [False, True], ids=["as it is", "with a loader that keeps tensors"])
def test_a_checkpoint_is_streamed(keeps: bool, tmp_path: Path, monkeypatch) -> None:
    config, kept, copy = load_checkpoint.config_of(160e6, SMALL), [], ShardReader.copy

    def keep(self, tensor, fills, advance):
        copy(self, tensor, fills, advance)
        kept.append(fills[0].place.clone())

    if keeps:
        monkeypatch.setattr(ShardReader, "copy", keep)
    load_checkpoint.write_checkpoint(tmp_path, config, real=False)
    found = load_checkpoint.measure(tmp_path, config, torch.device("cpu"))
    assert found.checkpoint_bytes == pytest.approx(160e6, rel=0.2)
    if keeps:
        assert found.streaming > found.checkpoint_bytes / 2
    else:
        assert found.streaming < 64 * MIB, "two buffers of 16 MiB, and the names of tensors"


def test_real_files_have_the_bytes_that_are_loaded(tmp_path: Path) -> None:
    config = load_checkpoint.config_of(1e6, SMALL | {"num_experts": 8})
    files = load_checkpoint.write_checkpoint(tmp_path, config, real=True)
    assert sum(file.stat().st_blocks * 512 for file in files) >= load_checkpoint.checkpoint_bytes(config)
    assert load_checkpoint.measure(tmp_path, config, torch.device("cpu")).seconds > 0
