"""Watch drafters that run a model inside an engine, and hold what plain implementations of them share: torch alone,
one text at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, silu

from dovetail import LLM, SamplingParams
from dovetail.testing.drafter import text_of

EPS = 1e-5


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor | None = None, theta: float = 10000.0) -> torch.Tensor:
    """Rotate ``x [tokens, heads, d]`` at ``positions [tokens]``, which are 0, 1, 2 ... unless given."""
    positions = torch.arange(len(x)) if positions is None else positions
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** -(torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Attend ``q [queries, heads, d]`` over ``k``, ``v [keys, kv_heads, d]``: ``[queries, heads * d]``."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


class PlainTensors:
    """Hold a checkpoint's tensors, and compute the parts of a layer that need nothing else."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return norm(x, self.tensors[f"{name}.weight"])

    def heads(self, x: torch.Tensor, name: str, size: int) -> torch.Tensor:
        """Return ``[tokens, heads, size]``."""
        return self.project(x, name).unflatten(-1, (-1, size))

    def after_attention(self, residual: torch.Tensor, attended: torch.Tensor, name: str) -> torch.Tensor:
        """Compute the rest of the layer ``name``."""
        x = residual + self.project(attended, f"{name}.self_attn.o_proj")
        normed = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up = self.project(normed, f"{name}.mlp.gate_proj"), self.project(normed, f"{name}.mlp.up_proj")
        return x + self.project(silu(gate) * up, f"{name}.mlp.down_proj")


class Spy:
    """Record what a drafter has drafted, and for which texts."""

    def __init__(self, drafter: Any) -> None:
        self.drafts: list[tuple[list[int], list[int]]] = []
        self.asked = 0
        propose = drafter.propose

        def spied(batch: Any) -> Any:
            tree = propose(batch)
            self.asked += int((batch.draft_limits[batch.num_extend :] > 0).sum())
            for row in range(len(batch.slots) if tree is not None else 0):
                if tree.lens[row]:
                    self.drafts.append((text_of(batch, row), tree.token_ids[row, : tree.lens[row]].tolist()))
            return tree

        drafter.propose = spied


def make_llm(target: Path, speculative: Any, page_size: int = 4, **scheduler: Any) -> LLM:
    return LLM(
        str(target),
        model={"dtype": "float32"},
        device="cpu",
        grammar="none",
        memory={"page_size": page_size, "num_pages": 1 + 2048 // page_size},
        speculative=speculative,
        scheduler={"draft": "always", **scheduler},
    )


def drafts_of(llm: LLM, vocab_size: int, longest: int, shared: int) -> Spy:
    """Return the drafts for sampled texts after prompts of 1 to ``longest`` tokens, the last of which begins with
    ``shared`` cached tokens. Every row with a positive limit must have a draft."""
    spy = Spy(llm.loop.executor.rank.drafter)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in (1, 7, longest)]
    prompts.append(prompts[2][:shared] + rng.integers(0, vocab_size, 4).tolist())
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=1)
    for prompt in (prompts[:3], prompts[3:]):
        llm.generate(prompt, params)
    assert llm.loop.drafter_errors == 0
    assert len(spy.drafts) == spy.asked
    return spy


def check_best(spy: Spy, logits: Callable[[list[int], list[int]], torch.Tensor]) -> None:
    """Check that each draft is the best by ``logits(text, drafts) [drafts, vocabulary]``."""
    for text, drafts in spy.drafts:
        said = logits(text, drafts)
        best, got = said.max(-1).values, said.gather(-1, torch.tensor(drafts)[:, None])[:, 0]
        assert (best - got).abs().max() < 1e-4, f"{drafts} after {text}"
