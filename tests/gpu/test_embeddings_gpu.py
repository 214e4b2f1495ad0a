"""Test embeddings and label log-probabilities on a CUDA device against the same engine on the CPU.

.venv/bin/python -m pytest -q tests/gpu/test_embeddings_gpu.py
"""

import numpy as np
import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.sampling_params import Pooling, PoolingKind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LABELS = (5, 17, 300, 5)


def prompts(vocab):
    rng = np.random.default_rng(0)
    shared = rng.integers(0, vocab, 48).tolist()
    return [shared + rng.integers(0, vocab, n).tolist() for n in (1, 15, 16, 33, 90)]


def params():
    kinds = (PoolingKind.LAST, PoolingKind.MEAN, PoolingKind.LABELS)
    asked = [Pooling(kind, LABELS if kind is PoolingKind.LABELS else ()) for kind in kinds]
    return [SamplingParams(max_new_tokens=0, pooling=pooling) for pooling in asked]


def answers(llm):
    """Return the results of five prompts in three ways, in steps with prompts that are continued."""
    texts = prompts(llm.tokenizer.vocab_size)
    written = SamplingParams(temperature=0, max_new_tokens=16)
    given = [(text, one) for text in texts for one in (*params(), written)]
    outputs = llm.generate([text for text, _ in given], [one for _, one in given])
    llm.loop.scheduler.check_integrity()
    assert llm.loop.stats().pages_used == 0
    return [o.token_ids if o.pooled is None else o.pooled for o in outputs]


@pytest.fixture(scope="module")
def expected():
    return answers(LLM("tiny", device="cpu", model={"dtype": "float32"}, grammar="none"))


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("graphs", ["none", "start"])
def test_vectors_are_those_of_the_cpu(expected, graphs, overlap):
    llm = LLM(
        "tiny",
        device="cuda",
        model={"dtype": "float32"},
        grammar="none",
        memory={"page_size": 4, "kv_gib": 0.5},
        scheduler={"overlap": overlap, "max_running": 24, "chunk_size": 64},
        graphs={"decode": graphs != "none", "piecewise_tokens": 0 if graphs == "none" else 64, "max_rows": 16}
        | ({} if graphs == "none" else {"capture": graphs}),
    )
    for _ in range(2):  # the second time from the prefix cache
        for found, wanted in zip(answers(llm), expected, strict=True):
            if isinstance(wanted, list):
                assert found == wanted
            else:
                np.testing.assert_allclose(found, wanted, atol=2e-3, rtol=2e-3)


def test_bfloat16_is_near(expected):
    llm = LLM("tiny", device="cuda", model={"dtype": "bfloat16"}, grammar="none", memory={"kv_gib": 0.5})
    for found, wanted in zip(answers(llm), expected, strict=True):
        if not isinstance(wanted, list) and len(wanted) > len(LABELS):
            cosine = found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted)
            assert cosine > 0.99
