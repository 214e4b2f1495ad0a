"""Check every attention backend in bfloat16 against ``torch_native`` in float32, through the public API.

A small random model answers prompts of many lengths, some with a common prefix, greedily. The backend's
log-probabilities of its prompts (extend) and of its own tokens (decode) must agree with those of the float32 model for
the same tokens. Then the embedded model's greedy tokens are compared in float32, if the backend supports float32.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import dovetail
from dovetail.errors import DovetailError
from gpubench.models import CONFIGS, write
from gpubench.plan import Ids, Job

PAGE_SIZES = (16, 1, 64)
POOL_TOKENS = 16384
OUTPUT = 24
SHARED, SHARERS = 256, 4
ALONE = (1, 2, 15, 16, 17, 63, 130, 517)
TINY_OUTPUT = 48
TEXTS = (
    "The capital of France is",
    "Once upon a time there was",
    "1, 2, 3, 4,",
    "A list of things to buy at the market:\n-",
)

Scores = list[list[float]]


def names() -> list[str]:
    """Return every installed attention backend, the reference first."""
    from dovetail.config import PluginsSection
    from dovetail.registry.loader import load_plugins

    found = load_plugins(PluginsSection()).names("attention")
    return sorted(found, key=lambda name: (name != "torch_native", name))


def check_tasks(backends: Sequence[str], *, quick: bool) -> list[str]:
    """Return the tasks: a backend at a page size, and a backend's greedy tokens."""
    sizes = PAGE_SIZES[:1] if quick else PAGE_SIZES
    return [f"{name}:{size}" for name in backends for size in sizes] + [f"{name}:tokens" for name in backends]


class Checker:
    """Hold the results of the float32 model. Engines are built one after another, each with a small pool."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = write_weights(Path(job.work))
        vocab, source = CONFIGS["check"]["vocab_size"], random.Random("check")
        head = source.choices(range(vocab), k=SHARED)
        self.prompts: Ids = [source.choices(range(vocab), k=n) for n in ALONE]
        self.prompts += [head + source.choices(range(vocab), k=3 + 7 * i) for i in range(SHARERS)]
        self.reference = self.build("torch_native", 16, "float32")
        self.expected = prompt_scores(self.reference, self.prompts)
        self.expected_tokens: Ids | None = None

    def build(self, backend: str, page_size: int, dtype: str, path: str | None = None) -> dovetail.LLM:
        """Build an engine. Raises ``DovetailError`` if the backend cannot be used with these settings."""
        given = self.job.config
        sections = {k: v for k, v in given.items() if k not in ("model", "attention", "memory")}
        return dovetail.LLM(
            path or str(self.model),
            **sections,
            model={"dtype": dtype},
            attention=backend,
            memory={"page_size": page_size, "num_pages": POOL_TOKENS // page_size + 1},
        )

    def check(self, task: str) -> dict[str, Any]:
        """Run one task; an unusable backend is not a failure and returns the reason."""
        backend, _, case = task.rpartition(":")
        try:
            return self._tokens(backend) if case == "tokens" else self._logprobs(backend, int(case))
        except DovetailError as error:
            return {"unusable": str(error)}
        finally:
            gc.collect()

    def _logprobs(self, backend: str, page_size: int) -> dict[str, Any]:
        llm = self.build(backend, page_size, "bfloat16")
        extend = differences(prompt_scores(llm, self.prompts), self.expected)
        decode, cached = list[float](), 0
        for _ in range(2):  # the second time the prompts are cached, and decode rows share their pages
            outputs = llm.generate(self.prompts, params(OUTPUT, logprobs=0))
            given = [[lp.logprob or 0.0 for lp in o.logprobs] for o in outputs]
            whole = prompt_scores(self.reference, [o.prompt_ids + o.token_ids for o in outputs])
            decode += differences(given, [scores[-OUTPUT:] for scores in whole])
            cached = sum(o.cached_tokens for o in outputs)
        llm.close()
        return {
            "extend_max": max(extend),
            "extend_mean": statistics.mean(extend),
            "decode_max": max(decode),
            "decode_mean": statistics.mean(decode),
            "cached_tokens": cached,
        }

    def _tokens(self, backend: str) -> dict[str, Any]:
        if self.expected_tokens is None:
            self.expected_tokens = self._greedy("torch_native")
        mine = self._greedy(backend)
        pairs = list(zip(mine, self.expected_tokens, strict=True))
        same = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in pairs]
        return {"same": sum(same), "of": TINY_OUTPUT * len(TEXTS)}

    def _greedy(self, backend: str) -> Ids:
        llm = self.build(backend, 16, "float32", "tiny")
        outputs = llm.generate(list(TEXTS), params(TINY_OUTPUT))
        llm.close()
        return [o.token_ids for o in outputs]


def params(count: int, logprobs: int | None = None, prompt_logprobs: int | None = None) -> dovetail.SamplingParams:
    """Return greedy sampling with a forced length."""
    return dovetail.SamplingParams(
        temperature=0, max_new_tokens=count, ignore_eos=True, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )


def prompt_scores(llm: dovetail.LLM, prompts: Ids) -> Scores:
    """Return the log-probability of every prompt token except the first."""
    outputs = llm.generate(prompts, params(1, prompt_logprobs=0))
    return [[lp.logprob for lp in o.prompt_logprobs or [] if lp.logprob is not None] for o in outputs]


def differences(given: Scores, expected: Scores) -> list[float]:
    """Return absolute differences; one that is not a number counts as infinite."""
    pairs = [(x, y) for a, b in zip(given, expected, strict=True) for x, y in zip(a, b, strict=True)]
    return [abs(x - y) if x == x else float("inf") for x, y in pairs]


def write_weights(work: Path) -> Path:
    """Write the model ``check`` with weights from N(0, 1 / inputs), so that activations stay near 1 and attention
    matters."""
    path, c = write("check", work), CONFIGS["check"]
    hidden, ffn, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    ones = ["model.norm.weight"]
    for layer in range(c["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        ones += [f"{start}{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
        widths = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        shapes |= {f"{start}self_attn.{name}.weight": shape for name, shape in widths.items()}
        widths = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
        shapes |= {f"{start}mlp.{name}.weight": shape for name, shape in widths.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        n: torch.randn(s, generator=generator) * (1 if "embed" in n else s[1] ** -0.5) for n, s in shapes.items()
    }
    tensors["lm_head.weight"] *= 3
    tensors |= {name: torch.ones(hidden) for name in ones}
    save_file({name: t.bfloat16() for name, t in tensors.items()}, path / "model.safetensors")
    return path
