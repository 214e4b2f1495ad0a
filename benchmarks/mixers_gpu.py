"""Time the operations of layers with a state on one GPU, with the sizes of Qwen3-Next (gated delta net) and of Mamba-2, in
bfloat16.

    python benchmarks/mixers_gpu.py            # results compared with float32 on shorter rows, then tables of times
    python benchmarks/mixers_gpu.py --tune     # the gated delta rule with each of CANDIDATES

The first table has the microseconds of every kernel for prompts, the others those of operations for decode rows, of which each has
a state of its own, in float32 and in bfloat16. *Floor* is the time of reading the inputs and writing the outputs once (for decode rows: the states) at
4.2 TB/s, about what an H200 reaches. States and inputs exceed the caches, except for one row.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dovetail.interfaces.mixer_shapes import DeltaGates, DeltaShape
from dovetail.interfaces.state_rows import StateRows
from dovetail.interfaces.state_space import SSDHeads
from dovetail.ops.gated_delta import gated_delta as reference
from dovetail.ops.gated_norm import gated_rms_norm
from dovetail.ops.triton import gated_delta as kernels
from dovetail.ops.triton.short_conv import short_conv, short_conv_step
from dovetail.ops.triton.ssd import ssd, ssd_step

DELTA = DeltaShape(16, 32, 128, 128)
GATE = DELTA.value_heads * DELTA.value_dim
HEADS, HEAD_DIM, STATE, GROUPS = 128, 64, 128, 8
DTYPE, BYTES_PER_SECOND, TOLERANCE = torch.bfloat16, 4.2e12, 1e-2
PROMPTS = {"1 x 1k": [1024], "1 x 8k": [8192], "1 x 32k": [32_768], "8 x 1k": [1024] * 8}
DECODES = (1, 64, 256)
CANDIDATES = [
    kernels.TILES,
    *(kernels.TILES._replace(solve_warps=8, output_warps=warps, output_columns=columns) for warps, columns in ((8, 128), (4, 64), (8, 64))),
    *(kernels.TILES._replace(pass_columns=columns, pass_stages=stages) for columns, stages in ((16, 3), (16, 2), (32, 2), (32, 4), (64, 3), (64, 2))),
    kernels.TILES._replace(pass_warps=8),
]  # fmt: skip


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """Return random numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


class Layer:
    """Hold inputs and states of ``tokens`` tokens and ``slots`` slots. The states of recurrences have the dtype ``states``."""

    def __init__(self, tokens: int, slots: int, states: torch.dtype = torch.float32) -> None:
        self.projected = random(tokens, DELTA.width + GATE)
        self.gates = DeltaGates(
            random(tokens, DELTA.value_heads),
            random(tokens, DELTA.value_heads),
            torch.rand(DELTA.value_heads, device="cuda"),
            random(DELTA.value_heads, dtype=torch.float32),
        )
        self.conv_weight, self.norm_weight = random(DELTA.width, 4), random(GATE)
        self.conv_state = random(slots, DELTA.width, 3)
        self.delta_state = random(slots, *DELTA.state, dtype=states)
        self.x, self.dt = random(tokens, HEADS, HEAD_DIM), random(tokens, HEADS)
        self.b, self.c = random(2, tokens, GROUPS, STATE)
        a, d, bias = (random(HEADS, dtype=torch.float32) for _ in range(3))
        self.heads = SSDHeads(-a.exp(), d, bias, (0.0, float("inf")))
        self.ssd_state = random(slots, HEADS, HEAD_DIM, STATE, dtype=states)
        self.mixed = self.projected[:, : DELTA.width]
        self.outputs = random(tokens, GATE)

    @property
    def gate(self) -> torch.Tensor:
        """Return the gates of the outputs, a view."""
        return self.projected[:, DELTA.width :]

    def prompt(self, rows: StateRows) -> dict[str, Callable[[], object]]:
        """Return the operations of prompts by name."""
        return {
            "short_conv": lambda: short_conv(self.mixed, self.conv_weight, None, self.conv_state, rows),
            "gated_delta": lambda: kernels.gated_delta(self.mixed, self.gates, self.delta_state, rows, DELTA),
            "gated_norm": self.norm,
            "ssd": lambda: ssd(self.x, self.dt, self.b, self.c, self.heads, self.ssd_state, rows),
        }

    def decode(self, slots: torch.Tensor) -> dict[str, Callable[[], object]]:
        """Return the operations of decode rows by name."""
        return {
            "short_conv": lambda: short_conv_step(self.mixed, self.conv_weight, None, self.conv_state, slots),
            "gated_delta": lambda: kernels.gated_delta_step(self.mixed, self.gates, self.delta_state, slots, DELTA),
            "gated_norm": self.norm,
            "ssd": lambda: ssd_step(self.x, self.dt, self.b, self.c, self.heads, self.ssd_state, slots),
        }

    def norm(self) -> torch.Tensor:
        """Normalise and gate the outputs of the rule."""
        return gated_rms_norm(self.outputs, self.gate, self.norm_weight, 1e-6, DELTA.value_dim, norm_first=True)


def rows_of(lens: Sequence[int]) -> StateRows:
    """Return rows of prompts that continue states."""
    count = len(lens)
    slots = np.arange(1, count + 1, dtype=np.int32)
    return StateRows.of(slots, np.array(lens, np.int32), np.zeros(count, np.bool_), "cuda")


def check() -> None:
    """Compare the gated delta rule with torch in float32 on the CPU."""
    layer, lens = Layer(331, 4), [200, 64, 67]
    before = layer.delta_state.clone()
    out = kernels.gated_delta(layer.mixed, layer.gates, layer.delta_state, rows_of(lens), DELTA)
    slots, fresh = np.arange(1, 4, dtype=np.int32), np.zeros(3, np.bool_)
    rows, state = StateRows.of(slots, np.array(lens, np.int32), fresh), before.cpu()
    gates = DeltaGates(*(each.float().cpu() for each in layer.gates))
    expected = reference(layer.mixed.float().cpu().contiguous(), gates, state, rows, DELTA)
    for name, found, true in (("outputs", out, expected), ("states", layer.delta_state, state)):
        error = ((found.float().cpu() - true).norm() / true.norm()).item()
        print(f"gated delta rule, {name}: error {error:.1e}")
        assert error < TOLERANCE, f"{name} of the gated delta rule are wrong: {error} is more than {TOLERANCE}"


def times(operation: Callable[[], object], repeats: int = 12) -> dict[str, float]:
    """Return the microseconds of each kernel of ``operation``, the median of ``repeats``. Other memory is written between
    calls, so that caches are cold."""
    cold = torch.empty(200_000_000, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        operation()
    torch.cuda.synchronize()
    profiler = profile(activities=[ProfilerActivity.CUDA])
    with profiler:
        for _ in range(repeats):
            cold.fill_(1)
            operation()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA and "FillFunctor" not in event.name and "Memset" not in event.name:
            found[event.name].append(event.device_time)
    return {name: float(np.median(each)) for name, each in found.items()}


def floor(name: str, layer: Layer, lens: Sequence[int] | None) -> float:
    """Return the microseconds of moving what ``name`` reads and writes once."""
    numbers = {
        "short_conv": 2 * layer.mixed.numel(),
        "gated_delta": layer.mixed.numel() + layer.outputs.numel(),
        "gated_norm": 3 * layer.outputs.numel(),
        "ssd": 2 * layer.x.numel() + 2 * layer.b.numel(),
    }[name] * DTYPE.itemsize
    if lens is None and name in ("gated_delta", "ssd"):
        state = layer.delta_state if name == "gated_delta" else layer.ssd_state
        numbers += 2 * state[1:].numel() * state.element_size()
    return numbers / BYTES_PER_SECOND * 1e6


def show(title: str, operations: dict[str, Callable[[], object]], layer: Layer, lens: Sequence[int] | None) -> None:
    """Print the times of ``operations``."""
    for name, operation in operations.items():
        found = times(operation)
        parts = ", ".join(f"{kernel} {each:.1f}" for kernel, each in found.items()) if len(found) > 1 else ""
        print(f"{title:>12} {name:<12} {sum(found.values()):8.1f} us, floor {floor(name, layer, lens):7.1f}   {parts}")


def tune() -> None:
    """Print the times of the gated delta rule with each candidate."""
    chosen = kernels.TILES
    for title in ("1 x 8k", "8 x 1k"):
        lens = PROMPTS[title]
        layer, rows = Layer(sum(lens), len(lens) + 1), rows_of(lens)
        for tiles in CANDIDATES:
            kernels.TILES = tiles
            try:
                found = times(layer.prompt(rows)["gated_delta"], 6)
            except Exception as error:  # it does not fit
                print(title, *tiles, type(error).__name__)
                continue
            print(title, *tiles, ", ".join(f"{kernel} {each:.1f}" for kernel, each in found.items()))
    kernels.TILES = chosen


def main() -> None:
    """Run what the command line selects."""
    parser = argparse.ArgumentParser(description="Time operations of layers with a state.")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    check()
    if args.tune:
        tune()
        return
    for title, lens in PROMPTS.items():
        layer = Layer(sum(lens), len(lens) + 1)
        show(title, layer.prompt(rows_of(lens)), layer, lens)
        del layer
    for states in (torch.float32, torch.bfloat16):
        print(f"states in {states}")
        for rows in DECODES:
            layer = Layer(rows, rows + 1, states)
            slots = torch.arange(1, rows + 1, dtype=torch.int32, device="cuda")
            show(f"decode {rows}", layer.decode(slots), layer, None)


if __name__ == "__main__":
    main()
