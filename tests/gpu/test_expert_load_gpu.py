"""Test that captured steps compute experts and count their tokens as steps that are launched kernel by kernel.

.venv/bin/python -m pytest -q tests/gpu/test_expert_load_gpu.py
"""

from __future__ import annotations

import json

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.messages import ExpertLoadMsg

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOP_K, NEW, LENGTHS = 4, 24, (3, 40, 129, 7, 300)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("moe")
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 512,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 64,
        "max_position_embeddings": 2048,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def counts_of(checkpoint, graphs, **sections):
    """Return the sums of each layer, after two rounds. All but the last token of an output enter a step."""
    llm = LLM(
        str(checkpoint),
        device="cuda",
        model={"load_format": "dummy"},
        grammar="none",
        memory={"kv_gib": 0.5},
        cache="none",
        metrics={"expert_load": "experts"},
        scheduler={"overlap": False},
        graphs=graphs,
        **sections,
    )
    prompts = [[(7 * i + j) % 512 for j in range(length)] for i, length in enumerate(LENGTHS)]
    for _ in range(2):
        llm.generate(prompts, SamplingParams(temperature=0, max_new_tokens=NEW))
    llm.loop.finish_idle_work()
    llm.loop.handle(ExpertLoadMsg("call"))
    (reply,) = llm.loop.step()
    stats = llm.loop.stats()
    llm.close()
    assert reply.ok
    return [sum(tokens) for tokens in reply.expert_tokens.values()], stats


@pytest.mark.parametrize("piecewise", [0, 512])
def test_padding_captures_and_rehearsals_count_nothing(checkpoint, piecewise):
    """All layers but the last, which may compute fewer tokens, count every token that entered."""
    entered = 2 * TOP_K * sum(length + NEW - 1 for length in LENGTHS)
    for graphs in ({"decode": False, "piecewise_tokens": 0}, {"capture": "start", "piecewise_tokens": piecewise}):
        sums, stats = counts_of(checkpoint, graphs)
        assert sums[:-1] == [entered] * 3
        assert 0 < sums[-1] <= entered
        assert (stats.graphs_captured > 0) == ("capture" in graphs)


def test_captured_verify_steps_count_drafts(checkpoint):
    graphs = {"capture": "start", "piecewise_tokens": 0}
    sums, stats = counts_of(checkpoint, graphs, speculative="ngram")
    entered = 2 * sum(length + NEW - 1 for length in LENGTHS) - stats.accepted_tokens + stats.drafted_tokens
    assert sums[:-1] == [TOP_K * entered] * 3


def test_prompts_in_pieces_have_the_outputs_of_prompts_launched_kernel_by_kernel(checkpoint):
    """The pieces of a size are captured once and replayed with other tokens, which have other experts."""
    rounds = [[[(k * i + j * j) % 512 for j in range(length)] for i, length in enumerate(LENGTHS)] for k in (3, 11)]
    params = SamplingParams(temperature=0, max_new_tokens=1, logprobs=5)
    found = []
    for graphs in ({"decode": False, "piecewise_tokens": 0}, {"capture": "start", "piecewise_tokens": 512}):
        model = {"load_format": "dummy", "dtype": "float32"}
        llm = LLM(str(checkpoint), device="cuda", model=model, grammar="none", memory={"kv_gib": 0.5}, graphs=graphs)
        outputs = [llm.generate([prompt], params)[0] for prompts in rounds for prompt in prompts]
        pieces = llm.loop.executor.rank.engine.pieces
        assert (pieces is None) == (not graphs["piecewise_tokens"])
        assert pieces is None or not list(pieces.missing())
        found.append([entry.logprob for output in outputs for entry in output.logprobs])
        llm.close()
    assert found[0] == pytest.approx(found[1], abs=1e-3)
