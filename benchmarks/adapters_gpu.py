"""Measure on one GPU what adapters (LoRA) cost: milliseconds per output token with none, one and many of them active, and the
time between tokens of running requests while other adapters are loaded.

    python benchmarks/adapters_gpu.py [--model 8b] [--batch 64] [--rank 16] [--known 1000] [--json FILE]
    python benchmarks/adapters_gpu.py --kernels  # the kernels of one layer, in microseconds, in half a minute
    python benchmarks/adapters_gpu.py --traffic  # the time between tokens while adapters are loaded, in a minute

Two engines with random weights are in one process: one without adapters, and one that knows ``--known`` adapters and has slots for
``--batch`` of them. They are measured in turns, so that ratios do not depend on the state of the device. All adapters have matrices for every
linear layer. Their files are links to one file, because what they contain does not matter. ``--tiny-shapes`` only checks that
everything runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import dovetail
from dovetail.generation.expansion import expand
from dovetail.messages import Answer, CommandReply, GenerateMsg, LoadAdapterMsg, RequestFailed, TokenOutput
from gpubench.adapter_kernels import measure
from gpubench.models import shape, write
from gpubench.plan import SIZES, Sizes
from gpubench.subject import TEMPERATURE

Names = Sequence[str | None]
Arrival = tuple[LoadAdapterMsg | None, GenerateMsg | None]
"""An adapter to load and a request. The request has that adapter and is sent once it is loaded, or has none."""

LOADS = 8
"""Adapters that are loaded while the requests of one run are decoded."""


def shapes(model: str) -> dict[str, tuple[int, int]]:
    """Return the shapes ``[out, in]`` of the linear layers of a Llama, by the names of their modules."""
    c = shape(model)
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    one = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"model.layers.{i}.{name}": size for i in range(c["num_hidden_layers"]) for name, size in one.items()}


def write_adapters(folder: Path, model: str, rank: int, names: Iterable[str]) -> dict[str, str]:
    """Write an adapter for each name, and return the directories."""
    first = folder / "adapter_model.safetensors"
    tensors, modules = {}, shapes(model)
    for name, (outputs, inputs) in modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs).bfloat16() / inputs**0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank).bfloat16() * 0.01
    save_file(tensors, first)
    targets = sorted({name.rpartition(".")[2] for name in modules})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    found: dict[str, str] = {}
    for name in names:
        directory = folder / name
        directory.mkdir()
        os.link(first, directory / first.name)
        (directory / "adapter_config.json").write_text(json.dumps(config))
        found[name] = str(directory)
    return found


class Engine:
    """Hold an engine, and drive its loop."""

    def __init__(self, config: dict[str, Any], sizes: Sizes) -> None:
        self.llm, self.sizes = dovetail.LLM(**config), sizes

    def seconds(self, prompts: list[list[int]], names: Names, tokens: int) -> float:
        """Return the time in which ``tokens`` tokens are generated for each prompt, all submitted at once."""
        params = [
            dovetail.SamplingParams(temperature=TEMPERATURE, max_new_tokens=tokens, ignore_eos=True, seed=i)
            for i in range(len(prompts))
        ]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, adapter=names)
        seconds = time.perf_counter() - start
        assert all(len(o.token_ids) == tokens for o in outputs)
        return seconds

    def warm(self, prompts: list[list[int]], names: Names) -> None:
        """Run long enough that everything is captured that a frequent size gets."""
        for _ in range(2):
            self.seconds(prompts, names, self.sizes.decode_long)
            self.llm.loop.finish_idle_work()

    def tpot(self, prompts: list[list[int]], names: Names) -> float:
        """Return milliseconds per output token. The prompts are cached first."""
        few, many = self.sizes.decode_short, self.sizes.decode_long
        self.seconds(prompts, names, 1)
        short, long = self.seconds(prompts, names, few), self.seconds(prompts, names, many)
        return (long - short) * 1e3 / (many - few)

    def intervals(
        self, prompts: list[list[int]], names: Names, tokens: int, arrivals: dict[int, Arrival]
    ) -> list[float]:
        """Return the milliseconds between the tokens of each request. ``arrivals`` has what is sent, by the number of tokens that
        the first request has then."""
        loop = self.llm.loop
        last: dict[str, float] = {}
        found: list[float] = []
        for i, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
            loop.handle(request(f"stream {i}", prompt, tokens, name))
        left, count, due, waiting = len(prompts), 0, dict(arrivals), dict[str, GenerateMsg]()
        while left or loop.has_work:
            answers = loop.step()
            now = time.perf_counter()
            for answer in mine(answers):
                if answer.rid in last:
                    found += [(now - last[answer.rid]) * 1e3 / len(answer.token_ids)] * len(answer.token_ids)
                last[answer.rid] = now
                left -= answer.finish is not None
                count += len(answer.token_ids) if answer.rid == "stream 0" else 0
            for answer in answers:  # a request for an adapter is sent once the adapter is loaded
                if isinstance(answer, CommandReply) and answer.call_id in waiting:
                    loop.handle(waiting.pop(answer.call_id))
            for load, later in [due.pop(at) for at in [at for at in due if at <= count]]:
                if load is not None:
                    loop.handle(load)
                if load is not None and later is not None:
                    waiting[load.call_id] = later
                elif later is not None:
                    loop.handle(later)
        return found


def mine(answers: list[Answer]) -> Iterator[TokenOutput]:
    """Yield the outputs of the requests that are measured."""
    for answer in answers:
        if isinstance(answer, RequestFailed):
            raise RuntimeError(f"a request failed: {answer}")
        if isinstance(answer, CommandReply) and not answer.ok:
            raise RuntimeError(f"an adapter was not loaded: {answer.message}")
        if isinstance(answer, TokenOutput) and answer.rid.startswith("stream") and answer.token_ids:
            yield answer


def request(rid: str, prompt: list[int], tokens: int, name: str | None) -> GenerateMsg:
    """Return the message of a request."""
    params = dovetail.SamplingParams(temperature=TEMPERATURE, max_new_tokens=tokens, ignore_eos=True, seed=0)
    return expand(prompt, params, [rid], adapter=name or "")[0]


def traffic(engine: Engine, batch: int, known: dict[str, str], fresh: dict[str, str]) -> dict[str, dict[str, float]]:
    """Measure the median, the 99th percentile and the maximum of the time between tokens of running requests of half as many adapters as there are slots while others are loaded: alone; while adapters are loaded; while
    requests without an adapter arrive; while adapters are loaded and requests for them arrive."""
    sizes = engine.sizes
    prompts = sizes.prompts("traffic", [sizes.decode_prompt] * batch)
    names: Names = [list(known)[i % max(1, batch // 2)] for i in range(batch)]
    tokens = 2 * sizes.decode_long
    at = [(i + 1) * tokens // (LOADS + 2) for i in range(LOADS)]
    short = sizes.prompts("arrivals", [16] * LOADS)
    found: dict[str, dict[str, float]] = {}
    cases = ("alone", "loads", "requests without an adapter", "loads and requests")
    for turn, case in enumerate(("alone", *cases, *cases)):  # the first run warms up
        arrivals: dict[int, Arrival] = {}
        for i, (name, directory) in enumerate(fresh.items()):
            own = f"{name} {turn}"
            load = LoadAdapterMsg(own, own, directory) if "loads" in case else None
            later = request(own, short[i], 4, own if load else None) if "requests" in case else None
            arrivals[at[i]] = load, later
        times = engine.intervals(prompts, names, tokens, arrivals)
        if turn:
            numbers = statistics.median(times), sorted(times)[int(len(times) * 0.99)], max(times)
            found[f"{case} ({1 + (turn > len(cases))})"] = dict(zip(("median", "p99", "max"), numbers, strict=True))
            print(f"time between tokens, {case:26} " + "  ".join(f"{number:8.3f} ms" for number in numbers), flush=True)
    return found


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--model", default="8b")
    add("--batch", type=int, default=64)
    add("--rank", type=int, default=16)
    add("--known", type=int, default=1000, help="adapters that the second engine knows")
    add("--rounds", type=int, default=4)
    add("--kv-gib", type=float, default=12.0, help="memory of each engine's KV pool")
    add("--device", default="auto")
    add("--json", type=Path)
    add("--kernels", action="store_true", help="measure the kernels of one layer only")
    add("--traffic", action="store_true", help="measure the time between tokens while adapters are loaded only")
    add("--tiny-shapes", action="store_true", help="a tiny model, only to check that everything runs")
    args = parser.parse_args()
    if args.tiny_shapes:
        args.model, args.batch, args.known, args.rounds, args.kv_gib = "tiny", 4, 6, 1, 0.1
    return args


def write_json(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write what was measured to the file ``--json``, if it is given."""
    if args.json:
        args.json.write_text(json.dumps({**result, "arguments": {k: str(v) for k, v in vars(args).items()}}, indent=1))


def main() -> None:
    """Measure, print, write."""
    args = arguments()
    if args.kernels:
        found = measure(args.model, args.batch, args.rank)
        write_json(args, {"microseconds": found})
        return
    sizes, result = (
        SIZES[args.model],
        dict[str, Any](date=datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")),
    )
    with tempfile.TemporaryDirectory(prefix="dovetail-adapters-") as name:
        folder = Path(name)
        known = write_adapters(folder, args.model, args.rank, [f"adapter-{i}" for i in range(args.known)])
        (folder / "fresh").mkdir()
        fresh = write_adapters(folder / "fresh", args.model, args.rank, [f"fresh-{i}" for i in range(LOADS)])
        model = {"path": str(write(args.model, folder)), "load_format": "dummy", "dtype": "bfloat16"}
        config: dict[str, Any] = {"model": model, "device": args.device, "memory": {"kv_gib": args.kv_gib}}
        section = {"enabled": True, "load": known, "max_resident": args.batch, "max_host": args.batch + LOADS}
        if args.traffic:
            adapted = Engine({**config, "adapters": section}, sizes)
            result["traffic"] = traffic(adapted, args.batch, known, fresh)
            write_json(args, result)
            return
        plain, adapted = Engine(config, sizes), Engine({**config, "adapters": section}, sizes)
        prompts = sizes.prompts("adapters", [sizes.decode_prompt] * args.batch)
        none: Names = [None] * args.batch
        cases: dict[str, tuple[Engine, Names]] = {
            "without adapters": (plain, none),
            f"{args.known} known, none active": (adapted, none),
            "1 active": (adapted, list(known)[:1] * args.batch),
            f"{args.batch} active": (adapted, list(known)[: args.batch]),
            "half of the rows, 8 active": (adapted, [list(known)[i % 8] if i % 2 else None for i in range(args.batch)]),
        }
        if args.known < args.batch:
            raise SystemExit(f"--known {args.known}; allowed: at least --batch, {args.batch}")
        for engine, names in cases.values():
            engine.warm(prompts, names)
        times: dict[str, list[float]] = {case: [] for case in cases}
        for _ in range(args.rounds):
            for case, (engine, names) in cases.items():
                times[case].append(engine.tpot(prompts, names))
                print(f"{case:32} {times[case][-1]:8.3f} ms", flush=True)
        base = min(times["without adapters"])
        for case, found in times.items():
            print(
                f"{case:32} {min(found):8.3f} ms  {min(found) / base:6.3f}  {[round(t, 3) for t in found]}", flush=True
            )
        result |= {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "tpot": times}
        result["traffic"] = traffic(adapted, args.batch, known, fresh)
    write_json(args, result)


if __name__ == "__main__":
    main()
