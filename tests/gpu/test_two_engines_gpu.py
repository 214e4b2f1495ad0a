"""Test two engines of one process on one device, each in a thread: they answer what each answers alone.

.venv/bin/python -m pytest -q tests/gpu/test_two_engines_gpu.py
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dovetail import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]

ROUNDS = 4


def generate(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Return the tokens of each prompt and their log-probabilities."""
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True, logprobs=0)
    outputs = llm.generate(prompts, params)
    return [(o.token_ids, [one.logprob for one in o.logprobs]) for o in outputs]


def test_engines_in_threads_do_not_share_what_a_step_writes():
    """``batch_invariant``, so that outputs are the same to the bit: any of the memory that kernels use between them (workspaces and
    counters of divided products, buffers of graphs) that both engines used at the same time would show."""
    prompts = [
        [[3 + (5 * i + j) % 400 for j in range(20 + 9 * i)] for i in range(11)],
        [[7 + (3 * i + 2 * j) % 400 for j in range(33 + 5 * i)] for i in range(5)],
    ]
    engines = [
        LLM("tiny", device="cuda", model={"dtype": "bfloat16"}, batch_invariant=True, memory={"kv_gib": 0.25})
        for _ in prompts
    ]
    alone = [generate(llm, texts) for llm, texts in zip(engines, prompts, strict=True)]
    assert [generate(llm, texts) for llm, texts in zip(engines, prompts, strict=True)] == alone
    with ThreadPoolExecutor(len(engines)) as pool:
        for _ in range(ROUNDS):
            assert list(pool.map(generate, engines, prompts)) == alone
