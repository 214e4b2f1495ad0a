"""Compare the speed of Dovetail, llama.cpp and transformers with the weights of one GGUF file on this machine's CPU, in one run.

    python benchmarks/gguf_cpu.py MODEL.gguf --llama-source DIR [--llama-build DIR/build] [--threads 2] [--rounds 5] [--json FILE]

Every arm is a separate process that is stopped while another one runs. Rounds interleave the arms in rotating order with fresh random
prompts, and ratios are medians of the ratios of the rounds. transformers has the dequantized weights, in float32 and in bfloat16.
Output lengths are forced. The rates count output tokens, or prompt tokens where the output is one token. On a machine that other work uses, the processor times of the
arms (user and system, column ``cpu``) are more reliable than the times of a clock if ``--threads`` is 1: with more, threads that wait count too.

llama.cpp is driven through its C interface (``peers/llama_shim.cpp``): all prompts are sequences of one context, batches of up to 2,048 tokens.
Build it with ``cmake -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DGGML_NATIVE=ON`` and ``ninja -C build llama``. With GCC before
14 on processors with AMX, its configuration of tiles must be kept: add ``__asm__ volatile("" :: "r"(&tc) : "memory");`` before
``_tile_loadconfig(&tc)`` in ``ggml-cpu/amx/mmq.cpp``, otherwise it ends with an illegal instruction.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peers.arms import Arm, Process
from peers.worker import Setup
from peers.workloads import Workload, spread

CONTEXT = 1536
SEQUENCES = 16
ROWS = (
    Workload("prompt", "prompt 512, 1 out", (512,), (1,)),
    Workload("one", "batch 1, 512 in, 64 out", (512,), (64,)),
    Workload("prompts", "batch 16, 512 in, 1 out", (512,) * 16, (1,) * 16),
    Workload("equal", "batch 16, 512 in, 64 out", (512,) * 16, (64,) * 16),
    Workload("mixed", "batch 16, 32-992 in, 8-128 out", spread(32, 992, 16, seed=1), spread(8, 128, 16, seed=2)),
)
ARMS = ("dovetail", "llama.cpp", "hf float32", "hf bfloat16")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("model", type=Path)
    add("--llama-source", type=Path, required=True)
    add("--llama-build", type=Path)
    add("--threads", type=int, default=2)
    add("--rounds", type=int, default=5)
    add("--rows", nargs="+", choices=[row.name for row in ROWS], default=[row.name for row in ROWS])
    add("--arms", nargs="+", choices=ARMS, default=ARMS)
    add("--sections", type=json.loads, default={}, metavar="JSON", help="config sections of Dovetail")
    add("--json", type=Path)
    args = parser.parse_args()
    args.llama_build = args.llama_build or args.llama_source / "build"
    return args


def arms(args: argparse.Namespace, dequantized: Path) -> dict[str, tuple[Arm, Setup]]:
    """Return each arm with its setup."""
    limits = {"sequences": SEQUENCES, "context": CONTEXT}
    llama = {"source": str(args.llama_source.resolve()), "build": str(args.llama_build.resolve()), **limits}
    model, python = str(args.model.resolve()), sys.executable
    found = {
        "dovetail": (Arm("dovetail", "dovetail_arm", python), Setup(model, "auto", args.threads, args.sections)),
        "llama.cpp": (Arm("llama.cpp", "llama_arm", python), Setup(model, "file", args.threads, llama)),
    }
    for dtype in ("float32", "bfloat16"):
        setup = Setup(str(dequantized), dtype, args.threads)
        found[f"hf {dtype}"] = Arm(f"hf-{dtype}", "hf_arm", python), setup
    return {name: found[name] for name in args.arms}


def dequantize(model: Path, folder: Path) -> Path:
    """Write the checkpoint that transformers reads from a GGUF file, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    plain = GgufConfig(dequantize=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32, quantization_config=plain
    )
    loaded.save_pretrained(folder)
    return folder


def vocabulary(model: Path) -> int:
    """Return the number of tokens that prompts are drawn from."""
    from dovetail.gguf.reader import read_gguf

    return len(read_gguf(model).metadata["tokenizer.ggml.tokens"])


def measure(
    processes: dict[str, Process], row: Workload, rounds: int, size: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds and the processor seconds of each arm, by round. One more round comes first and is dropped."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in processes}
    names = list(processes)
    for turn in range(rounds + 1):
        prompts = row.prompts(size, turn)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before = processes[name].cpu_seconds()
            seconds = processes[name].run(row, prompts).seconds
            if turn:
                found[name].append((seconds, processes[name].cpu_seconds() - before))
    return found


def show(row: Workload, found: dict[str, list[tuple[float, float]]]) -> None:
    """Print the rates, and the ratio of the first arm to each arm by both clocks."""
    tokens = row.useful_tokens if max(row.output_lens) > 1 else sum(row.prompt_lens)
    first = next(iter(found.values()))
    for name, times in found.items():
        rates = [tokens / statistics.median(column) for column in zip(*times, strict=True)]
        ratios = [
            statistics.median(other[i] / own[i] for own, other in zip(first, times, strict=True)) for i in range(2)
        ]
        print(
            f"{row.title:32} {name:12} {rates[0]:8.0f} tok/s {rates[1]:8.0f} tok/s cpu"
            f"   first arm {ratios[0]:6.2f} times as fast, cpu {ratios[1]:6.2f}",
            flush=True,
        )


def main() -> None:
    """Measure, print, write."""
    args = arguments()
    print(f"load {os.getloadavg()[0]:.1f}, {args.threads} threads")
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"),
        "command": sys.argv,
    }
    with tempfile.TemporaryDirectory(prefix="dovetail-gguf-") as name, ExitStack() as stack:
        folder = Path(name)
        wants: Sequence[str] = args.arms
        dequantized = dequantize(args.model, folder / "model") if any("hf" in arm for arm in wants) else folder
        processes: dict[str, Process] = {}
        for arm_name, (arm, setup) in arms(args, dequantized).items():
            processes[arm_name] = Process(arm, setup, folder)
            stack.callback(processes[arm_name].close)
        size = vocabulary(args.model)
        for row in (row for row in ROWS if row.name in args.rows):
            found = measure(processes, row, args.rounds, size)
            results[row.name] = found
            show(row, found)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
