"""Test the backend of experts ``triton`` on CUDA with its conformance suite, graphs and rehearsal included, and that these cases
fail for backends that are wrong.

Run on a GPU machine: python -m pytest tests/gpu/test_experts_backends_gpu.py
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from dovetail import LLM, SamplingParams
from dovetail.config import PluginsSection
from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.interfaces.experts import ExpertsBackend, ExpertsContext, ExpertsProduct
from dovetail.ops.experts import GroupedProduct
from dovetail.registry import load_plugins
from dovetail.scaffold import named, render, write
from dovetail.testing.experts import ExpertsSuite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"


class TestTritonOnCuda(ExpertsSuite):
    name = "triton"
    device = "cuda"


class TestLargerLayers(ExpertsSuite):
    name = "triton"
    device = "cuda"
    hidden, size = 2048, 768


class KeepsTheFirstChoice(GroupedProduct):
    """Compute the experts of the first call in all calls with as many tokens."""

    first: Routing | None = None

    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        if self.first is None or len(self.first.ids) != len(routing.ids):
            self.first = Routing(routing.ids.clone(), routing.weights.clone())
        return super().forward(x, self.first, shared)


class ReadsItsChoice(GroupedProduct):
    """Read on the host which experts were chosen, which must exist."""

    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        assert int(routing.ids.max()) < self._weights.whole, "there is no such expert"
        return super().forward(x, routing, shared)


def broken(product: type[GroupedProduct]) -> ExpertsSuite:
    class Made(ExpertsBackend):
        def __init__(self, config: object, context: ExpertsContext) -> None:
            self._dtype = context.dtype

        def product(self, weights: ExpertWeights) -> ExpertsProduct:
            return product(weights, self._dtype)

    class Suite(TestTritonOnCuda):
        def make(self, context: ExpertsContext) -> ExpertsBackend:
            return Made(None, context)

    return Suite()


def test_the_suite_finds_graphs_that_keep_a_choice() -> None:
    TestTritonOnCuda().test_graphs(torch.bfloat16)
    with pytest.raises(AssertionError, match="difference of"):
        broken(KeepsTheFirstChoice).test_graphs(torch.bfloat16)


def test_the_suite_finds_products_that_read_what_was_not_computed() -> None:
    with pytest.raises(AssertionError, match="no such expert"):
        broken(ReadsItsChoice).test_rehearsal()


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install what ``dovetail plugins new experts`` writes, and return the name of the component."""
    write(render(named(load_plugins(PluginsSection()), "experts", "gpu_mine")), tmp_path / "source")
    about = tmp_path / "site" / "dovetail_gpu_mine-0.1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: dovetail-gpu-mine\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[dovetail.plugins]\ngpu_mine = dovetail_gpu_mine.plugin\n")
    (about / "direct_url.json").write_text(json.dumps({"url": (tmp_path / "source").as_uri(), "dir_info": {}}))
    shutil.copytree(tmp_path / "source" / "dovetail_gpu_mine", tmp_path / "site" / "dovetail_gpu_mine")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield "gpu_mine"
    for name in [name for name in sys.modules if name.startswith("dovetail_gpu_mine")]:
        del sys.modules[name]


def test_a_backend_that_cannot_be_captured_serves(generated: str, tmp_path: Path) -> None:
    """The component in plain torch waits for the device in each layer, so that nothing is captured. It says what the built-in one
    says."""
    shape = transformers.Qwen3MoeConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "model")
    prompts = [torch.randint(5, 4000, (length,)).tolist() for length in (3, 40, 300)]
    params = SamplingParams(max_new_tokens=24, temperature=0, ignore_eos=True)
    tokens = {}
    for name in ("auto", generated):
        model = {"dtype": "float32", "tokenizer": "tiny"}
        llm = LLM(
            tmp_path / "model", device=DEVICE, experts=name, model=model, grammar="none", memory={"num_pages": 300}
        )
        assert llm.resolved.config.graphs.decode is (name == "auto" and DEVICE == "cuda")
        tokens[name] = [[output.token_ids for output in llm.generate(prompts, params)] for _ in range(2)]
        described = llm.loop.executor.describe()["products"]["8 experts of 96 x 256"]
        assert ("one expert after the other" in described) == (name == generated)
        llm.close()
    assert tokens["auto"] == tokens[generated]
