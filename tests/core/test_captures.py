"""Test what is captured when, what follows a failed capture, and the largest step on a CPU.

.venv/bin/python -m pytest -q tests/core/test_captures.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail import LLM
from dovetail.engine.build import build_model
from dovetail.engine.captures import NEEDED_BEFORE_CAPTURE, CaptureOnDemand, capture_next, ladder, try_capture
from dovetail.engine.dry_run import dry_run
from dovetail.engine.pieces import launch_bound
from dovetail_models.dense import DenseModel
from dovetail_models.describe import describe_llama


class Fake:
    """Capture sizes, and raise for the ``impossible`` ones."""

    def __init__(self, sizes, impossible=(), error=RuntimeError):
        self.sizes, self.impossible, self.error = sizes, impossible, error
        self.captured, self.refused = [], set()

    def missing(self):
        return (size for size in self.sizes if size not in self.captured and size not in self.refused)

    def is_captured(self, size):
        return size in self.captured

    def capture(self, size):
        if size in self.impossible:
            raise self.error("no memory")
        self.captured.append(size)


def test_what_cannot_be_captured_is_tried_once():
    graphs = Fake([1, 2, 4], impossible=[2])
    while capture_next(graphs):
        pass
    assert graphs.captured == [1, 4]
    assert graphs.refused == {2}


def test_a_lost_device_is_no_matter_of_captures():
    lost = getattr(torch, "AcceleratorError", None)
    if lost is None:
        pytest.skip("this torch has no error of its own for it")
    graphs = Fake([1], impossible=[1], error=lost)
    with pytest.raises(lost):
        try_capture(graphs, 1)
    assert not graphs.refused


def test_sizes_met_in_passing_are_not_captured():
    graphs = Fake([1, 2], impossible=[2])
    captures = CaptureOnDemand(graphs)
    ready = [captures.is_ready(1) for _ in range(NEEDED_BEFORE_CAPTURE + 2)]
    assert ready == [False] * (NEEDED_BEFORE_CAPTURE - 1) + [True] * 3
    assert not any(captures.is_ready(2) for _ in range(NEEDED_BEFORE_CAPTURE + 2))
    assert graphs.captured == [1]


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 100, 256, 512, 1000])
def test_ladders_waste_little(rows):
    sizes = ladder(rows)
    assert sizes[-1] == rows
    assert sizes == sorted(set(sizes))
    for real in range(9, rows + 1):
        assert next(size for size in sizes if size >= real) <= real * 1.9


def test_the_largest_step_runs_over_a_single_page():
    engine = LLM("tiny", device="cpu", grammar="none", memory={"num_pages": 8}).loop.engine
    before = engine.pool.k[:, 1:].clone()
    dry_run(engine.model, engine.eager_runner.prefill, engine.pool, [40, 40, 9, 1, 1], 6)
    assert torch.equal(engine.pool.k[:, 1:].nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("hidden", "inner", "layers", "tokens"), [(4096, 14336, 32, 384), (1024, 3072, 28, 2048), (8192, 28672, 80, 0)]
)
def test_prompts_are_captured_where_launching_takes_longer_than_computing(hidden, inner, layers, tokens):
    """The shapes are those of 8B, of 0.6B, and of 70B, where no step of a hundred tokens is that quick."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "tie_word_embeddings": False,
    }  # fmt: skip
    model = build_model(DenseModel, describe_llama(config), torch.device("meta"), torch.bfloat16)
    assert launch_bound(model) == tokens
