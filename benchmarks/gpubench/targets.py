"""Define the targets of the rows on one H200: the best of two peers, the goal, and the hardware's floor."""

from __future__ import annotations

from typing import NamedTuple

from gpubench.models import multiplications, variant
from gpubench.plan import SIZES, short

FLOPS = 790e12
"""The measured ceiling of bf16 matrix products, per second."""


class Target(NamedTuple):
    """Hold the targets of a number.

    ``must`` is the best of SGLang 0.5.17 and vLLM 0.26.0 on the same workload (on two GPUs, vLLM alone); ``floor`` is the time of the bytes or
    products at the measured ceilings.
    """

    must: float | None = None
    goal: float | None = None
    floor: float | None = None


TARGETS: dict[tuple[str, str, str], Target] = {
    ("8b", "decode", "bs 1"): Target(4.09, 3.7, 3.4),
    ("8b", "decode", "bs 16"): Target(5.35, 4.4, 3.6),
    ("8b", "decode", "bs 64"): Target(6.77, 5.6, 4.5),
    ("8b", "decode", "bs 256"): Target(14.04, 11.5, 9.6),
    ("8b", "prefill", "1k"): Target(26.0, 23),
    ("8b", "prefill", "8k"): Target(208.2, 200),
    ("8b", "prefill", "32k"): Target(1155, 1110),
    ("8b", "mixed", ""): Target(10271, 12000),
    ("8b", "indep", ""): Target(6174, 7000),
    ("8b", "gsp", ""): Target(9220, 16000),
    ("8b", "gsp", "hit"): Target(0.882, 0.882),
    ("8b", "chat", ""): Target(4386, 5200),
    ("8b", "chat", "hit"): Target(0.944, 0.944),
    ("8b", "startup", ""): Target(56, 15),
    ("8b", "json", "bs 1"): Target(1.03, 1.0, 1.0),
    ("8b", "json", "bs 64"): Target(1.03, 1.0, 1.0),
    ("8b", "compile", "bs 64"): Target(1.1, 1.0, 1.0),
    ("8b", "http", "native / in-process"): Target(1.08, 1.0, 1.0),
    ("8b", "http", "completions / in-process"): Target(1.08, 1.0, 1.0),
    ("0.6b", "decode", "bs 1"): Target(0.98, 0.55, 0.27),
    ("0.6b", "decode", "bs 64"): Target(2.91, 1.8, 1.2),
    ("0.6b", "decode", "bs 256"): Target(7.03, 5.2, 4.1),
    ("0.6b", "mixed", ""): Target(24570, 36000),
    ("0.6b", "gsp", ""): Target(14589, 26000),
    ("0.6b", "gsp", "hit"): Target(0.882, 0.882),
    ("8b-tp2", "decode", "bs 1"): Target(3.47, 2.4, 1.75),
    ("8b-tp2", "decode", "bs 16"): Target(3.75, 2.8),
    ("8b-tp2", "decode", "bs 64"): Target(4.47, 3.6),
    ("8b-tp2", "decode", "bs 256"): Target(8.80, 7.0),
    ("8b-tp2", "prefill", "1k"): Target(49.1, 20),
    ("8b-tp2", "prefill", "8k"): Target(128.9, 120),
    ("8b-tp2", "prefill", "32k"): Target(659, 620),
    ("8b-tp2", "mixed", ""): Target(16942, 19000),
    ("8b-tp2", "gsp", ""): Target(15850, 26000),
    ("32b-tp2", "decode", "bs 1"): Target(11.15, 8.6),
    ("32b-tp2", "decode", "bs 64"): Target(13.63, 10.5),
    ("32b-tp2", "prefill", "8k"): Target(516),
    ("qwen3-30b-a3b", "decode", "bs 1"): Target(4.15, 1.9, 1.41),
    ("qwen3-30b-a3b", "decode", "bs 16"): Target(12.63, 9.5),
    ("qwen3-30b-a3b", "decode", "bs 64"): Target(18.44, 15.5),
    ("qwen3-30b-a3b", "decode", "bs 256"): Target(23.35, 19.5),
    ("qwen3-30b-a3b", "prefill", "1k"): Target(53.2, 25),
    ("qwen3-30b-a3b", "prefill", "8k"): Target(156, 120),
    ("qwen3-30b-a3b", "prefill", "32k"): Target(1082, 850),
    ("qwen3-30b-a3b", "mixed", ""): Target(6357, 8500),
    ("qwen3-30b-a3b", "gsp", ""): Target(9233, 15000),
    ("qwen3-30b-a3b-uniform", "decode", "bs 1"): Target(floor=1.41),
    ("qwen3-30b-a3b-uniform", "decode", "bs 64"): Target(floor=13.7),
    ("qwen3-30b-a3b-tp2", "indep", ""): Target(50 * 128),
    ("qwen3-30b-a3b-ep2", "indep", ""): Target(50 * 128),
    ("gpt-oss-20b", "decode", "bs 1"): Target(3.04, 1.2, 0.6),
    ("gpt-oss-20b", "decode", "bs 16"): Target(3.51, 2.4),
    ("gpt-oss-20b", "decode", "bs 64"): Target(5.39, 4.0),
    ("8b-gguf-q4-k-m", "decode", "bs 1"): Target(goal=2.2, floor=1.2),
    ("8b-fp8", "decode", "bs 1"): Target(3.51, 2.3, 1.8),
    ("8b-fp8", "decode", "bs 16"): Target(3.80, 2.6),
    ("8b-fp8", "decode", "bs 64"): Target(5.11, 3.6),
    ("8b-fp8", "decode", "bs 256"): Target(11.59, 9.0),
    ("8b-fp8", "prefill", "1k"): Target(37.6, 16),
    ("8b-fp8", "prefill", "8k"): Target(145, 125),
    ("8b-fp8", "prefill", "32k"): Target(908, 820),
    ("8b-fp8", "mixed", ""): Target(12462, 15000),
    ("gemma-3-4b", "decode", "bs 1"): Target(3.51, 2.2, 1.75),
    ("gemma-3-4b", "decode", "bs 64"): Target(5.21, 4.2),
    ("gemma-3-4b", "prefill", "8k"): Target(94, 85),
    ("gemma-3-4b", "prefill", "32k"): Target(408, 360),
    ("gemma-3-4b", "mixed", ""): Target(12806, 17000),
    ("deepseek-v2-lite", "decode", "bs 1"): Target(3.39, 1.7),
    ("deepseek-v2-lite", "decode", "bs 16"): Target(4.03, 2.6),
    ("deepseek-v2-lite", "decode", "bs 128"): Target(5.54, 4.2),
    ("deepseek-v2-lite", "decode", "bs 256"): Target(7.77, 6.0),
    ("deepseek-v2-lite", "prefill", "1k"): Target(54.2, 25),
    ("deepseek-v2-lite", "prefill", "8k"): Target(99.7, 80),
    ("deepseek-v2-lite", "prefill", "32k"): Target(542, 430),
    ("deepseek-v2-lite", "mixed", ""): Target(16919, 22000),
    ("deepseek-v2-lite", "gsp", ""): Target(19324, 40000),
    ("qwen3-next-12", "decode", "bs 1"): Target(1.69, 0.9),
    ("qwen3-next-12", "decode", "bs 64"): Target(8.28, 6.5),
    ("qwen3-next-12", "decode", "bs 256"): Target(12.04, 9.5),
    ("qwen3-next-12", "prefill", "1k"): Target(33.3, 18),
    ("qwen3-next-12", "prefill", "8k"): Target(53.1, 42),
    ("qwen3-next-12", "prefill", "32k"): Target(204, 160),
    ("qwen3-next-12", "mixed", ""): Target(13262, 17000),
    ("8b-int4", "decode", "bs 1"): Target(1.75),
    ("8b-int4", "decode", "bs 16"): Target(2.2),
    ("8b-int4", "decode", "bs 64"): Target(5.74),
    ("8b-int4", "prefill", "8k"): Target(210),
}
SAME_TARGETS = {"deepseek-v2-lite-same": "deepseek-v2-lite", "qwen3-next-12-bf16-states": "qwen3-next-12"}
"""Map models to others with the same targets. The peer keeps the states of Qwen3-Next in bfloat16."""
TARGETS |= {
    (name, row, case): found
    for name, other in SAME_TARGETS.items()
    for (model, row, case), found in TARGETS.items()
    if model == other
}

DIGITS = {"ms": 2, "s": 1, "tok/s": 0, "hit": 3, "ratio": 3}
"""The digits that are shown for a unit; hit rates are also compared with this number of digits."""

MORE_IS_BETTER = ("tok/s", "hit")


def target(model: str, row: str, case: str) -> Target:
    """Return the target of a number. The floor of prompts is computed from their products in bfloat16."""
    found = TARGETS.get((model, row, case), Target())
    if row == "prefill" and model != "tiny" and "quantization" not in variant(model).settings:
        tokens = next(n for n in SIZES[model].prefill if short(n) == case)
        ranks = variant(model).ranks
        return found._replace(floor=1e3 * multiplications(model, tokens) / FLOPS / ranks)
    return found


def reached(value: float, wanted: float | None, unit: str) -> bool | None:
    """Return whether ``value`` is as good as ``wanted``; None if there is no ``wanted``."""
    if wanted is None:
        return None
    return round(value, DIGITS[unit]) >= wanted if unit in MORE_IS_BETTER else value <= wanted


def gain(value: float, wanted: float, unit: str) -> float:
    """Return how many times better ``value`` is."""
    return value / wanted if unit in MORE_IS_BETTER else wanted / value
