"""Measure how the time of a decode step is spent: host parts by the loop's counters, GPU parts by torch's profiler."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from dovetail import SamplingParams
from dovetail.loop import Loop
from dovetail.messages import AbortAllMsg, GenerateMsg
from gpubench.plan import Job
from gpubench.subject import TEMPERATURE, Subject

WARM_STEPS = 24
SPARE_TOKENS = 200
"""Output tokens beyond the measured ones: requests admitted early decode while the last prompts enter."""

TOP = 15

FAMILIES = (
    (
        "attention",
        r"flash|fmha|attention|attn|batch(de|pre)code|batchprefill|paged_?kv|split_?kv|merge_|combine|cascade",
    ),
    ("matmul", r"gemm|nvjet|cutlass|cublas|splitk|matmul|matvec|skinny|gemv|linear"),
    ("rope, store", r"rope|rotary|store|qkv"),
    ("norm", r"norm"),
    ("act", r"silu|swiglu|gelu|_act|act_"),
    (
        "sample",
        r"sampl|top_?k|top_?p|min_?p|argmax|softmax|sort|scan|cumsum|uniform|philox|gumbel|random|bitmask|penal",
    ),
    ("copy", r"memcpy|memset|copy|fill|index|gather|scatter|cat|embed|arange|elementwise"),
)
"""Families of kernels. A kernel belongs to the first family whose pattern is found in its name."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Describe one kernel or copy on the device; times are in microseconds."""

    name: str
    start: float
    length: float

    @property
    def end(self) -> float:
        """Return when the kernel ended."""
        return self.start + self.length


def family(name: str) -> str:
    """Return the family of a kernel."""
    low = name.lower()
    return next((title for title, pattern in FAMILIES if re.search(pattern, low)), "other")


def breakdown(subject: Subject, job: Job, batch: int) -> dict[str, Any]:
    """Decode ``batch`` requests together: some steps are timed alone, then the same number under the profiler."""
    loop, sizes = subject.llm.loop, job.sizes
    steps = sizes.breakdown_steps
    admit(loop, sizes.prompts(f"breakdown {batch}", [sizes.decode_prompt] * batch), WARM_STEPS + 2 * steps)
    advance(loop, WARM_STEPS)
    before, start = loop.stats(), time.perf_counter()
    advance(loop, steps)
    wall, after = (time.perf_counter() - start) / steps, loop.stats()
    found: dict[str, Any] = {"batch": batch, "step_ms": wall * 1e3, "host_ms": host_parts(before, after, steps)}
    if loop.executor.rank.engine.device.type == "cuda":
        found |= device_parts(*profiled(loop, steps), steps, wall * 1e6)
    loop.handle(AbortAllMsg())
    while loop.has_work:
        loop.step()
    subject.flush()
    return found


def admit(loop: Loop, prompts: list[list[int]], steps: int) -> None:
    """Submit the prompts and step until all of them decode."""
    params = SamplingParams(temperature=TEMPERATURE, max_new_tokens=steps + SPARE_TOKENS, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        loop.handle(GenerateMsg(f"breakdown-{i}", prompt, params, seed=i))
    while loop.scheduler.waiting or loop.scheduler.prefilling:
        loop.step()


def advance(loop: Loop, steps: int) -> None:
    """Make steps, and wait for the device."""
    for _ in range(steps):
        loop.step()
    if loop.executor.rank.engine.device.type == "cuda":
        torch.cuda.synchronize()


def host_parts(before: Any, after: Any, steps: int) -> dict[str, float]:
    """Return the milliseconds per step of every counter of seconds that the loop keeps."""
    old, new = msgspec.structs.asdict(before), msgspec.structs.asdict(after)
    names = [name for name in new if name.endswith("_seconds")]
    return {name.removesuffix("_seconds"): (new[name] - old[name]) / steps * 1e3 for name in names}


def profiled(loop: Loop, steps: int) -> tuple[list[Kernel], dict[str, float]]:
    """Return the kernels of some steps, and the microseconds of all calls of each CUDA function."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        advance(loop, steps)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return read_trace(json.loads(file.read_text())["traceEvents"])


def read_trace(events: Iterable[dict[str, Any]]) -> tuple[list[Kernel], dict[str, float]]:
    """Return kernels and copies in order of time, and the CUDA functions that the host called."""
    kernels: list[Kernel] = []
    calls: dict[str, float] = defaultdict(float)
    for event in events:
        kind = event.get("cat")
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(Kernel(event["name"], event["ts"], event["dur"]))
        elif kind in ("cuda_runtime", "cuda_driver"):
            calls[event["name"]] += event.get("dur", 0.0)
    return sorted(kernels, key=lambda k: k.start), dict(calls)


def device_parts(kernels: list[Kernel], calls: dict[str, float], steps: int, step_us: float) -> dict[str, Any]:
    """Return, per step, the device's work by family and by kernel, its idle time, and the cost of launches."""
    busy, gaps = busy_and_gaps(kernels)
    families: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        families[family(kernel.name)] += kernel.length / steps / 1e3
        names[kernel.name].append(kernel.length)
    top = sorted(names.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "gpu_busy_ms": busy / steps / 1e3,
        "gpu_idle_ms": (step_us - busy / steps) / 1e3,
        "gaps_ms": {title: total / steps / 1e3 for title, total in sized(gaps).items()},
        "kernels": len(kernels) / steps,
        "families_ms": dict(families),
        "cuda_calls_ms": {name: us / steps / 1e3 for name, us in sorted(calls.items(), key=lambda c: -c[1])[:6]},
        "top": [
            {"name": name, "family": family(name), "ms": sum(us) / steps / 1e3, "calls": len(us) / steps}
            for name, us in top
        ],
    }


def busy_and_gaps(kernels: list[Kernel]) -> tuple[float, list[float]]:
    """Return the microseconds in which at least one kernel ran, and the gaps between; kernels may overlap."""
    busy, gaps, end = 0.0, list[float](), kernels[0].start if kernels else 0.0
    for kernel in kernels:
        if kernel.start > end:
            gaps.append(kernel.start - end)
        busy += max(kernel.end - max(kernel.start, end), 0.0)
        end = max(end, kernel.end)
    return busy, gaps


def sized(gaps: list[float]) -> dict[str, float]:
    """Return the sum of gaps by their length."""
    found = {"under 5 us": 0.0, "5 to 50 us": 0.0, "over 50 us": 0.0}
    for gap in gaps:
        found["under 5 us" if gap < 5 else "5 to 50 us" if gap <= 50 else "over 50 us"] += gap
    return found
