"""Compare an architecture that runs through transformers' modules with plain transformers, through the whole engine.

Run: python -m pytest tests/e2e/test_transformers_models.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_runs import VOCAB, check_idle, make_llm, prompts_of

from dovetail import LLM, SamplingParams
from dovetail.llm import Output

PAGE = 4
GREEDY = SamplingParams(max_new_tokens=16, temperature=0, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of EXAONE 4: norms over heads, and one layer with a window, which has a cache group of its own."""
    directory = tmp_path_factory.mktemp("exaone4")
    config = transformers.Exaone4Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.2,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    transformers.Exaone4ForCausalLM(config).save_pretrained(directory)
    return directory


def engine(checkpoint: Path, **sections: Any) -> LLM:
    scheduler = {"max_running": 8, "chunk_size": 13}
    memory = {"page_size": PAGE, "num_pages": 400}
    return make_llm(checkpoint, scheduler=scheduler, memory=memory, attention="torch_native", threads=1, **sections)


def check(checkpoint: Path, outputs: list[Output], tolerance: float = 1e-4) -> None:
    """Assert that each token has the log-probability of transformers, and that no other is more likely."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    for output in outputs:
        text = [*output.prompt_ids, *output.token_ids]
        with torch.no_grad():
            rows = model(torch.tensor([text])).logits[0].log_softmax(-1)[len(output.prompt_ids) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert (rows.amax(1) - chosen).max() < tolerance
        assert (chosen - torch.tensor([entry.logprob for entry in output.logprobs])).abs().max() < tolerance


@pytest.mark.parametrize("ranks", [1, 2])
def test_chunks_mixed_steps_and_prefix_hits(checkpoint: Path, ranks: int) -> None:
    """Prompts enter in chunks of odd sizes beside decode rows; the second round resumes from the prefix cache."""
    llm = engine(checkpoint, parallel={"tp": ranks})
    prompts = prompts_of([3, 40, 21, 1, 33], shared=20)
    for cached in (0, PAGE):
        outputs = llm.generate(prompts, GREEDY)
        check(checkpoint, outputs)
        assert min(output.cached_tokens for output in outputs) >= cached
        check_idle(llm) if ranks == 1 else None
    llm.close()


@pytest.mark.full
def test_its_linear_layers_are_quantized(checkpoint: Path) -> None:
    llm = engine(checkpoint, quantization="fp8")
    check(checkpoint, llm.generate(prompts_of([7, 18]), GREEDY), tolerance=0.5)
    llm.close()
