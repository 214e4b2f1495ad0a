"""Measure the host memory and the speed with which a large checkpoint of a mixture of experts is loaded.

Run: python benchmarks/load_checkpoint.py --gb 61 --device cuda [--real] [--json FILE]

The script writes a checkpoint with the config, the names and the shapes of Qwen3-30B-A3B in bfloat16, with the number
of layers that is nearest to ``--gb`` (10^9 bytes); 61 are all 48. It then loads the checkpoint as the engine does, and removes it.
Without ``--real`` the files are sparse: they have the size of real ones and no blocks on the disk, and reading them
gives zeros. They go through the page cache like others, but the time of the disk is missing. With ``--real`` they have
random bytes, which may still be in the page cache when they are loaded.

Reported is the anonymous and shared memory of the process (RssAnon + RssShmem of /proc/self/status, sampled every few
milliseconds): before the weights are loaded, the peak, and how much the peak is above that. Memory that is mapped from
files and the page cache are not in it. On CUDA the pinned buffers, which the kernel may not count, are added. On a CPU
the parameters themselves are written before the first sample, so that they count as memory before the weights are
loaded. The copies of weights in oneDNN's order, which linear layers make on a CPU after all tensors have arrived, are
reported apart. The exit status is 1 if more than ``--limit-gib`` are needed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dovetail.engine.build import WeightFiller, as_module, build_model
from dovetail.engine.weights import INDEX, load_weights
from dovetail_models.moe import MoeModel
from dovetail_models.moe_describe import describe_qwen3_moe
from gpubench.models import CONFIGS

GIB, SHARD_BYTES, SAMPLE_SECONDS = 1 << 30, 4 * 10**9, 0.003
BLOCK_BYTES = 1 << 26
QWEN3_30B_A3B: Mapping[str, Any] = CONFIGS["qwen3-30b-a3b"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Hold what was measured. Memory is in bytes; ``pinned`` is part of ``streaming``, and ``packed`` is not."""

    tensors: int
    files: int
    checkpoint_bytes: int
    seconds: float
    before: int
    streaming: int
    packed: int
    pinned: int

    @property
    def text(self) -> str:
        """Return the lines of the report."""
        speed = self.checkpoint_bytes / 1e9 / self.seconds
        lines = (
            f"checkpoint: {self.tensors} tensors in {self.files} files, {self.checkpoint_bytes / 1e9:.2f} GB",
            f"loaded in {self.seconds:.1f} s ({speed:.2f} GB/s)",
            f"memory before: {self.before / GIB:.2f} GiB",
            f"above that while tensors were read: {self.streaming / GIB:.3f} GiB (pinned buffers: {self.pinned / GIB:.3f})",
            f"copies of weights afterwards: {self.packed / GIB:.3f} GiB",
        )
        return "\n".join(lines)


class AnonymousMemory:
    """Sample the memory of this process that no file backs, in a thread."""

    def __init__(self) -> None:
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> AnonymousMemory:
        self.peak = resident()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak = max(self.peak, resident())

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, resident())


def resident() -> int:
    """Return the bytes of this process's memory that no file backs."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def config_of(size: float, base: Mapping[str, Any] = QWEN3_30B_A3B) -> dict[str, Any]:
    """Return ``base`` with the number of layers whose checkpoint is nearest to ``size`` bytes."""
    one, two = (checkpoint_bytes(dict(base) | {"num_hidden_layers": count}) for count in (1, 2))
    layers = 1 + round((size - one) / (two - one))
    return dict(base) | {"num_hidden_layers": min(max(layers, 1), base["num_hidden_layers"])}


def checkpoint_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of the tensors of a checkpoint."""
    return sum(2 * _count(shape) for shape in shapes_of(config).values())


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a checkpoint."""
    filler = WeightFiller(build_model(MoeModel, describe_qwen3_moe(dict(config)), torch.device("meta"), torch.bfloat16))
    return {name: filler.whole_shape(name) for name, targets in filler.targets.items() if targets}


def write_checkpoint(directory: Path, config: Mapping[str, Any], *, real: bool) -> list[Path]:
    """Write the files of a checkpoint, and return those with tensors. Unless it is ``real``, they are sparse."""
    (directory / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in shapes_of(config).items():
        if held >= SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][name] = shape
        held += 2 * _count(shape)
    files = [directory / f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, shapes in zip(files, shards, strict=True):
        _write_shard(file, shapes, real=real)
    weight_map = {name: file.name for file, shapes in zip(files, shards, strict=True) for name in shapes}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


def _write_shard(file: Path, shapes: Mapping[str, tuple[int, ...]], *, real: bool) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * _count(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        if real:
            block = torch.randn(BLOCK_BYTES // 2, dtype=torch.bfloat16).view(torch.uint8).numpy()
            for start in range(0, end, BLOCK_BYTES):
                opened.write(memoryview(block)[: min(BLOCK_BYTES, end - start)])
        opened.truncate(8 + len(text) + end)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def measure(directory: Path, config: Mapping[str, Any], device: torch.device) -> Measurement:
    """Load the checkpoint in ``directory`` into a new model on ``device``."""
    shapes = shapes_of(config)
    model = build_model(MoeModel, describe_qwen3_moe(dict(config)), device, torch.bfloat16)
    for parameter in as_module(model).parameters():
        parameter.zero_()  # on a CPU, memory is there only when it was written
    torch.empty(1, device=device).add_(1)
    ctypes.CDLL(None).malloc_trim(0)  # what is free must not hide what is taken from now on
    streamed = 0
    with AnonymousMemory() as memory:
        before, start = memory.peak, time.perf_counter()

        def arrived(count: int, whole: int) -> None:
            nonlocal streamed
            if count == whole:
                streamed = max(memory.peak, resident())

        load_weights(model, directory, progress=arrived, shown=False)
        seconds = time.perf_counter() - start
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) if device.type == "cuda" else 0
    total = sum(2 * _count(shape) for shape in shapes.values())
    files = len(list(directory.glob("*.safetensors")))
    packed = memory.peak - streamed
    return Measurement(len(shapes), files, total, seconds, before, streamed - before + pinned, packed, pinned)


@contextmanager
def work_directory(given: Path | None) -> Iterator[Path]:
    """Return a new directory, within ``given`` if that is set, and remove it afterwards."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="dovetail-load-", dir=given))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    """Write, load and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gb", type=float, default=6.0, help="size of the checkpoint in 10^9 bytes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--real", action="store_true", help="write random bytes instead of sparse files")
    parser.add_argument("--limit-gib", type=float, default=4.0, help="memory that loading may need")
    parser.add_argument("--work", type=Path, help="directory for the checkpoint; by default that of temporary files")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args()
    with work_directory(options.work) as directory:
        config = config_of(options.gb * 1e9)
        print(f"writing {config['num_hidden_layers']} layers, {'real' if options.real else 'sparse'} files", flush=True)
        write_checkpoint(directory, config, real=options.real)
        with torch.no_grad():
            found = measure(directory, config, torch.device(options.device))
    print(found.text)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(found) | {"device": options.device, "real": options.real}))
    if found.streaming > options.limit_gib * GIB:
        print(f"more than the limit of {options.limit_gib:g} GiB")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
