"""Define what is measured: requests as token ids with forced output lengths, the same for every arm."""

from __future__ import annotations

import random
from dataclasses import dataclass

SHARED_PREFIX_TOKENS = 512
FIRST_TOKEN_ID = 16
"""The ids below this one are reserved for special tokens."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Describe requests that arrive together. ``shared`` is the length of the prompts' common prefix."""

    name: str
    title: str
    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    shared: int = 0

    @property
    def useful_tokens(self) -> int:
        """Return the number of required output tokens; an arm that computes more gets no credit for them."""
        return sum(self.output_lens)

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Return random token ids. Another seed shares no prefix with this one, so a new seed means a cold cache."""
        source = random.Random(f"{self.name}:{seed}")
        draw = range(FIRST_TOKEN_ID, vocab_size)
        head = source.choices(draw, k=self.shared)
        return [head + source.choices(draw, k=n - self.shared) for n in self.prompt_lens]

    def smoke(self) -> Workload:
        """Return a few requests and tokens of the same shape, to check that everything runs."""
        prompts = tuple(min(n, self.shared + 16) for n in self.prompt_lens[:4])
        outputs = tuple(min(n, 4) for n in self.output_lens[:4])
        return Workload(self.name, f"SMOKE of {self.name}", prompts, outputs, self.shared)


@dataclass(frozen=True, slots=True)
class Size:
    """Describe the lengths of a model's workloads, chosen so that the slowest arm ends in acceptable time."""

    single_output: int
    batch_output: int
    mixed_output: int
    prefix_requests: int


SIZES = {
    "tiny": Size(single_output=128, batch_output=64, mixed_output=128, prefix_requests=64),
    "46m": Size(single_output=48, batch_output=32, mixed_output=64, prefix_requests=16),
}


def spread(low: int, high: int, count: int, seed: int) -> tuple[int, ...]:
    """Return ``count`` lengths evenly spaced over [low, high], in an order that depends on ``seed`` only."""
    lens = [low + round(i * (high - low) / (count - 1)) for i in range(count)]
    random.Random(seed).shuffle(lens)
    return tuple(lens)


def workloads(size: Size) -> list[Workload]:
    """Return the rows of a model."""
    top, n, tail = size.mixed_output, size.prefix_requests, SHARED_PREFIX_TOKENS // 9
    return [
        Workload("first", "time to first token, prompt 512", (512,), (1,)),
        Workload("one", f"batch 1, 64 in, {size.single_output} out", (64,), (size.single_output,)),
        Workload("equal", f"batch 16, 64 in, {size.batch_output} out", (64,) * 16, (size.batch_output,) * 16),
        Workload(
            "mixed",
            f"batch 16, 16-256 in, {top // 16}-{top} out",
            spread(16, 256, 16, seed=1),
            spread(top // 16, top, 16, seed=2),
        ),
        Workload(
            "prefix",
            f"{n} requests, {SHARED_PREFIX_TOKENS} shared + {tail} own in, 16 out",
            (SHARED_PREFIX_TOKENS + tail,) * n,
            (16,) * n,
            shared=SHARED_PREFIX_TOKENS,
        ),
    ]
