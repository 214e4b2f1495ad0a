"""Define what is measured: the workloads' sizes, their tasks, and the job description of a worker."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Ids = list[list[int]]

ROWS = ("decode", "prefill", "mixed", "indep", "gsp", "chat", "startup", "http", "json", "compile")
ENGINE_ROWS = ROWS[:6]
"""The rows that one engine in a worker process measures, one after another."""

USUAL_ROWS = {
    "8b": ROWS,
    "0.6b": ("decode", "mixed", "gsp"),
    "8b-tp2": ("decode", "prefill", "mixed", "gsp"),
    "32b-tp2": ("decode", "prefill"),
    "8b-fp8": ("decode", "prefill", "mixed"),
    "8b-gguf-q4-k-m": ("decode", "prefill"),
    "qwen3-30b-a3b": ("decode", "prefill", "mixed", "gsp"),
    "qwen3-30b-a3b-uniform": ("decode",),
    "qwen3-30b-a3b-tp2": ("decode", "prefill", "indep"),
    "qwen3-30b-a3b-ep2": ("decode", "prefill", "indep"),
    "gpt-oss-20b": ("decode",),
    "gemma-3-4b": ("decode", "prefill", "mixed"),
    "deepseek-v2-lite": ("decode", "prefill", "mixed", "gsp"),
    "deepseek-v2-lite-same": ("decode", "prefill", "mixed", "gsp"),
    "deepseek-v2-lite-tp2": ("decode", "prefill", "mixed", "gsp"),
    "deepseek-v2-lite-dp2": ("decode", "prefill", "mixed", "gsp"),
    "qwen3-next-12": ("decode", "prefill", "mixed"),
    "qwen3-next-12-bf16-states": ("decode", "prefill", "mixed"),
    "8b-int4": ("decode", "prefill"),
    "8b-half-32k": ("decode",),
    "8b-half-32k-fp8-kv": ("decode",),
    "tiny": ROWS,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Hold lengths in tokens, and counts of requests. The defaults are those with which the peers were measured."""

    ids: tuple[int, int] = (1000, 30000)
    decode_batches: tuple[int, ...] = (1, 16, 64, 256)
    decode_prompt: int = 512
    decode_short: int = 9
    decode_long: int = 137
    prefill: tuple[int, ...] = (1024, 8192, 32768)
    mixed_count: int = 256
    mixed_range: tuple[int, int] = (100, 1024)
    indep: tuple[int, int, int] = (512, 1024, 256)  # requests, in, out
    gsp: tuple[int, int, int, int, int] = (32, 16, 2048, 128, 256)  # groups, of each, prefix, question, out
    chat: tuple[int, int, int, int, int] = (32, 6, 1024, 64, 96)  # conversations, turns, system, user, out
    http: tuple[int, int, int] = (64, 512, 128)  # streams, in, out
    json_batches: tuple[int, ...] = (1, 64)
    compile: tuple[int, float] = (100, 5.0)  # members of the schema, the minimum seconds of a window
    breakdown_batches: tuple[int, ...] = (1, 64, 256)
    breakdown_steps: int = 20

    def prompts(self, label: str, lens: list[int]) -> Ids:
        """Return random ids, the same for a label in every run."""
        source = random.Random(label)
        return [source.choices(range(*self.ids), k=n) for n in lens]


FULL = Sizes()
SIZES = {
    "8b": FULL,
    "0.6b": Sizes(decode_batches=(1, 64, 256)),
    "8b-tp2": FULL,
    "32b-tp2": Sizes(decode_batches=(1, 64)),
    "8b-fp8": FULL,
    "8b-gguf-q4-k-m": Sizes(decode_batches=(1, 16, 64), prefill=(1024, 8192)),
    "qwen3-30b-a3b": FULL,
    "qwen3-30b-a3b-uniform": Sizes(decode_batches=(1, 64)),
    "qwen3-30b-a3b-tp2": Sizes(indep=(512, 1024, 128)),
    "qwen3-30b-a3b-ep2": Sizes(indep=(512, 1024, 128)),
    "gpt-oss-20b": Sizes(decode_batches=(1, 16, 64)),
    "gemma-3-4b": Sizes(decode_batches=(1, 64)),
    "deepseek-v2-lite": Sizes(decode_batches=(1, 16, 128, 256)),
    "deepseek-v2-lite-same": Sizes(decode_batches=(1, 16, 128, 256)),
    "qwen3-next-12": Sizes(decode_batches=(1, 64, 256)),
    "qwen3-next-12-bf16-states": Sizes(decode_batches=(1, 64, 256)),
    "8b-int4": Sizes(decode_batches=(1, 8, 16, 64, 128), breakdown_batches=(1, 16, 64)),
    "8b-half-32k": Sizes(decode_batches=(32,), decode_prompt=32768),
    "8b-half-32k-fp8-kv": Sizes(decode_batches=(32,), decode_prompt=32768),
    "tiny": Sizes(
        ids=(16, 500),
        decode_batches=(1, 4),
        decode_prompt=40,
        decode_short=3,
        decode_long=7,
        prefill=(64,),
        mixed_count=6,
        mixed_range=(8, 24),
        indep=(6, 24, 4),
        gsp=(2, 3, 48, 8, 4),
        chat=(2, 2, 32, 8, 4),
        http=(4, 40, 8),
        json_batches=(1, 4),
        compile=(4, 0.2),
        breakdown_batches=(1, 4),
        breakdown_steps=4,
    ),
}


@dataclass(frozen=True, slots=True)
class Job:
    """Describe the work of a worker: its kind, the model, Dovetail's config as in a file, and the number of
    repetitions. It is sent as JSON."""

    kind: str
    model: str
    config: dict[str, Any]
    work: str
    repeats: int = 2

    @property
    def sizes(self) -> Sizes:
        """Return the sizes of the model's workloads."""
        return SIZES[self.model]


@dataclass(frozen=True, slots=True)
class Measure:
    """Hold one number. ``unit`` is ms or s (less is better), tok/s, hit or ratio."""

    row: str
    case: str
    value: float
    unit: str
    samples: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def short(tokens: int) -> str:
    """Return ``8k`` for ``8192``."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def engine_tasks(model: str, rows: tuple[str, ...], *, quick: bool, breakdown: bool) -> list[str]:
    """Return the tasks of one engine, ``row:case``, in the order in which a time limit loses the least."""
    sizes, tasks = SIZES[model], list[str]()
    batches, prompts = sizes.decode_batches, sizes.prefill
    if quick:
        batches, prompts = tuple(b for b in batches if b in (1, 4, 64)), prompts[:2]
    if "decode" in rows:
        tasks += [f"decode:{batch}" for batch in batches]
    elif "http" in rows:
        tasks.append(f"decode:{sizes.http[0]}")
    if breakdown:
        tasks += [f"breakdown:{batch}" for batch in sizes.breakdown_batches]
    if "prefill" in rows:
        tasks += [f"prefill:{tokens}" for tokens in prompts]
    return tasks + [f"{row}:" for row in ("gsp", "chat", "mixed", "indep") if row in rows]
