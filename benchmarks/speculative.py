"""Measure what drafts gain on a GPU: the cost of verifying, the speed-up at a given acceptance, and full batches.

    python benchmarks/speculative.py [--device cuda] [--json FILE] [--parts verify,methods] [--batch-invariant]

The target has the shape of Llama 3.2 3B with random weights; prompts are random, lengths are forced, sampling is
greedy. ``verify``: an oracle replays the target's own output with a given error rate. ``methods``: a batch of 64 with
each drafter, compared with decoding without drafts. It samples from nearly uniform distributions, so that no draft is
useful.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import dovetail
from dovetail import SamplingParams
from dovetail.engine.graphs import GraphKey
from dovetail.engine.verify_graphs import VerifyKey
from dovetail.messages import GenerateMsg, TokenOutput
from gpubench.models import CONFIGS
from specbench.oracle import Oracle, attach, use

WIDTH = 8
ERRORS = (0.0, 0.1, 0.3, 0.6)
METHODS = ("eagle3", "dflash", "mtp", "ngram", "draft_model", "eagle")
PROMPT, OUTPUT, SHORT_OUTPUT = 256, 513, 257
ROUNDS = 25
COUNTED = ("steps", "drafted_tokens", "accepted_tokens")
PARTS = ("step", "schedule", "draft", "launch", "wait", "commit")
_runs = itertools.count()
console = Console(width=None if sys.stdout.isatty() else 140)

LLAMA_3B = {
    **CONFIGS["8b"],
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "tie_word_embeddings": True,
    "num_nextn_predict_layers": 1,  # read by mtp only
}
SMALL = {**CONFIGS["tiny"], "hidden_size": 128, "head_dim": 64, "num_hidden_layers": 10, "num_nextn_predict_layers": 1}


def write(directory: Path, config: dict[str, Any]) -> Path:
    """Make the directory of a checkpoint that has only a config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def checkpoints(work: Path, target: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the ``speculative`` section of each method for a target."""
    vocab, hidden = target["vocab_size"], target["hidden_size"]
    head = {**target, "num_hidden_layers": 1, "tie_word_embeddings": False}
    layers = target["num_hidden_layers"]
    configs = {
        "draft_model": {**target, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
                        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": target["head_dim"]},
        "eagle": {**head},
        "eagle3": {**head, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": min(32000, vocab)},
        "dflash": {**head, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 3, "block_size": 8,
                   "num_target_layers": layers, "hidden_size": hidden,
                   "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": [1, layers // 2, layers - 2]}},
    }  # fmt: skip
    sections: dict[str, dict[str, Any]] = {"ngram": {"kind": "ngram"}, "mtp": {"kind": "mtp", "load_format": "dummy"}}
    for name, config in configs.items():
        sections[name] = {"kind": name, "path": str(write(work / name, config)), "load_format": "dummy"}
    return sections


def replay_ms(graph: torch.cuda.CUDAGraph, count: int = 50) -> float:
    """Return the milliseconds of a replay: the median over several series of ``count`` replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for _ in range(9):
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / count)
    return statistics.median(times)


def totals(llm: dovetail.LLM) -> Counter[str]:
    """Return the engine's counters so far: numbers of tokens and steps, and seconds by part of its steps."""
    stats = llm.loop.stats()
    return Counter({name: getattr(stats, name) for name in (*COUNTED, *(f"{part}_seconds" for part in PARTS))})


def of_ideal(length: float, plain_ms: float, drafted_ms: float, draft_ms: float) -> float:
    """Return the speed-up as a share of the ideal speed-up.

    The ideal is what drafts accepted at that length would gain if verifying cost as much as decoding.
    """
    return plain_ms / drafted_ms / (length / (1 + draft_ms / plain_ms))


@dataclass
class Row:
    """Collect the runs of one error rate.

    ``drafted`` holds milliseconds per token, ``drafting`` the milliseconds of a step spent in the drafter, and
    ``spent`` the totals over all steps.
    """

    oracle: Oracle
    errors: float
    drafted: list[float] = field(default_factory=list)
    drafting: list[float] = field(default_factory=list)
    spent: Counter[str] = field(default_factory=Counter)
    same: bool = True

    def found(self, plains: Sequence[float]) -> dict[str, Any]:
        """Return the numbers of the best runs, and ``median_of_ideal`` of the median runs, compared with ``plains``
        without drafts."""
        decode_steps = self.spent["drafted_tokens"] / WIDTH  # all steps except those of prompts and of a text's end
        length = 1 + self.spent["accepted_tokens"] / decode_steps
        drafted, draft_ms = min(zip(self.drafted, self.drafting, strict=True))
        plain = min(plains)
        middle = statistics.median(plains), statistics.median(self.drafted), statistics.median(self.drafting)
        return {
            "errors": self.errors, "plain_ms": plain, "drafted_ms": drafted, "length": length, "draft_ms": draft_ms,
            "verify_over_decode": (drafted * length - draft_ms) / plain, "speedup": plain / drafted, "same": self.same,
            "of_ideal": of_ideal(length, plain, drafted, draft_ms), "median_of_ideal": of_ideal(length, *middle),
            "host_ms": {part: self.spent[f"{part}_seconds"] / self.spent["steps"] * 1e3 for part in PARTS},
        }  # fmt: skip


class Bench:
    """Run the benchmark once."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args = args
        self.target = SMALL if args.tiny_shapes else LLAMA_3B
        self.prompt, self.output = (24, 33) if args.tiny_shapes else (PROMPT, OUTPUT)
        self.many = 4 if args.tiny_shapes else 64
        self.model = {"path": str(write(work / "target", self.target)), "load_format": "dummy"}
        self.sections = checkpoints(work, self.target)
        self.temperature = 0.0
        self.found: dict[str, Any] = {"verify": [], "methods": []}

    def engine(self, speculative: Any = "none", **scheduler: Any) -> dovetail.LLM:
        """Build an engine of the target and capture all its graphs."""
        more: dict[str, Any] = {} if self.args.device == "cpu" else {"memory": {"kv_gib": 8}}
        more["batch_invariant"] = self.args.batch_invariant
        llm = dovetail.LLM(device=self.args.device, model=self.model, speculative=speculative, scheduler=scheduler, grammar="none", **more)  # fmt: skip
        llm.loop.finish_idle_work()
        return llm

    def prompts(self, count: int) -> list[list[int]]:
        """Return random ids."""
        rng = np.random.default_rng(count)
        return rng.integers(10, self.target["vocab_size"] - 10, (count, self.prompt)).tolist()

    def run(self, llm: dovetail.LLM, prompts: Sequence[list[int]], length: int) -> tuple[float, list[list[int]]]:
        """Return the milliseconds per output token, from each request's first token to its last, and the outputs."""
        loop, run = llm.loop, next(_runs)
        params = SamplingParams(temperature=self.temperature, max_new_tokens=length, ignore_eos=True)
        outputs: dict[str, list[int]] = {f"{run}-{i}": [] for i in range(len(prompts))}
        times: dict[str, list[tuple[float, int]]] = {rid: [] for rid in outputs}
        for i, (rid, prompt) in enumerate(zip(outputs, prompts, strict=True)):
            loop.handle(GenerateMsg(rid, prompt, params, i))
        while loop.has_work:
            answers, now = loop.step(), time.perf_counter()
            for answer in answers:
                assert isinstance(answer, TokenOutput), answer
                outputs[answer.rid] += answer.token_ids
                times[answer.rid].append((now, len(answer.token_ids)))
        tpots = [(each[-1][0] - each[0][0]) / sum(count for _, count in each[1:]) for each in times.values()]
        return statistics.mean(tpots) * 1e3, list(outputs.values())

    def tpots(self, llm: dovetail.LLM, prompts: Sequence[list[int]], length: int, rounds: int) -> list[float]:
        """Call ``run`` several times with cached prompts, and return the times in ascending order."""
        self.run(llm, prompts, length)
        return sorted(self.run(llm, prompts, length)[0] for _ in range(rounds))

    # -- verify ------------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Measure the oracle at batch 1 and decoding without drafts, in turns, so that a host that is slow for some
        seconds slows all rows."""
        llm = self.engine(draft="always")
        prompts = self.prompts(1)
        _, outputs = self.run(llm, prompts, self.output + WIDTH + 1)
        futures = {tuple(prompts[0]): np.array(outputs[0], np.int32)}
        plain: list[float] = []
        rows = [Row(Oracle(futures, WIDTH, errors, self.target["vocab_size"]), errors) for errors in ERRORS]
        attach(llm, rows[0].oracle)
        for row in rows:
            for drafter in (None, row.oracle):
                use(llm, drafter)
                self.run(llm, prompts, self.output)
        for _ in range(2 if self.args.tiny_shapes else ROUNDS):
            use(llm, None)
            plain.append(self.run(llm, prompts, self.output)[0])
            for row in rows:
                use(llm, row.oracle)
                before = totals(llm)
                ms, (output,) = self.run(llm, prompts, self.output)
                run = totals(llm)
                run.subtract(before)
                row.drafted.append(ms)
                row.drafting.append(
                    run["draft_seconds"] / (run["steps"] - 1) * 1e3
                )  # the step of the prompt has no drafts
                row.spent.update(run)
                row.same &= output == outputs[0][: self.output]
        assert llm.loop.drafter_errors == 0
        use(llm, None)
        self.found["verify"] = [row.found(plain) for row in rows]
        self.found["graphs"] = self.graphs(llm)
        llm.close()

    def graphs(self, llm: dovetail.LLM) -> dict[str, float]:
        """Return the milliseconds of the captured forward passes alone, of a decode step and of a verify step.

        They are replayed repeatedly at the end of the text.
        """
        engine = llm.loop.executor.rank.engine
        if engine.graphs is None or engine.verify_graphs is None:
            return {}
        decode, verify = (
            engine.graphs._graphs.get(GraphKey(1, False)),
            engine.verify_graphs._graphs.get(VerifyKey(1 + WIDTH, False)),
        )
        if decode is None or verify is None:
            console.print("a decode step or a verify step was not captured")
            return {}
        with llm.loop.executor.rank.context:
            return {"decode": replay_ms(decode.forward), "verify": replay_ms(verify.graph)}

    # -- methods -----------------------------------------------------------------------------------------------------

    def methods(self) -> None:
        """Measure every drafter at a full batch, in turns with an engine without drafts."""
        prompts = self.prompts(self.many)
        self.temperature = 1.0  # nearly all tokens are equally likely, so no drafter can predict them
        length = min(self.output, SHORT_OUTPUT)
        plain = self.engine()
        for name in self.args.methods:
            with_drafts = self.engine(self.sections[name])
            for _ in range(6):
                self.run(
                    with_drafts, prompts, length
                )  # the engine tries drafts and finds that they do not increase the speed
            ratios, times = [], []
            for _ in range(3):
                (a,), (b,) = (self.tpots(llm, prompts, length, 1) for llm in (plain, with_drafts))
                ratios.append(a / b)
                times.append((a, b))
            stats = with_drafts.loop.stats()
            self.found["methods"].append(
                {"method": name, "plain_ms": min(a for a, _ in times), "drafted_ms": min(b for _, b in times),
                 "ratio": statistics.median(ratios), "ratios": ratios, "drafted": stats.drafted_tokens,
                 "accepted": stats.accepted_tokens, "errors": with_drafts.loop.drafter_errors}
            )  # fmt: skip
            with_drafts.close()
            del with_drafts
            console.print(self.found["methods"][-1])
        plain.close()
        self.temperature = 0.0

    def show(self) -> None:
        """Print the tables."""
        table = Table(title="an oracle of 8 drafts at batch 1")
        for name in ("errors", "tokens a step", "plain ms/token", "with drafts", "speed-up", "draft ms", "verify / decode", "of the ideal", "median", "same"):  # fmt: skip
            table.add_column(name, justify="right")
        for r in self.found["verify"]:
            cells = (r["length"], r["plain_ms"], r["drafted_ms"], r["speedup"], r["draft_ms"], r["verify_over_decode"], r["of_ideal"], r["median_of_ideal"])  # fmt: skip
            table.add_row(f"{r['errors']:.0%}", *(f"{cell:.3f}" for cell in cells), str(r["same"]))
        console.print(table)
        if graphs := self.found.get("graphs"):
            ratio = graphs["verify"] / graphs["decode"]
            console.print(
                f"forward pass alone: decode {graphs['decode']:.3f} ms, verify {graphs['verify']:.3f} ms, {ratio:.3f}x"
            )
        table = Table(title=f"batch {self.many}, drafters with random weights")
        for name in ("method", "plain ms/token", "with it", "ratio", "drafted", "accepted", "errors"):
            table.add_column(name, justify="right")
        for r in self.found["methods"]:
            table.add_row(r["method"], f"{r['plain_ms']:.3f}", f"{r['drafted_ms']:.3f}", f"{r['ratio']:.3f}", str(r["drafted"]), str(r["accepted"]), str(r["errors"]))  # fmt: skip
        console.print(table)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["verify", "methods"])
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument(
        "--batch-invariant", action="store_true", help="set the config's batch_invariant; eagle's trees are left out"
    )
    parser.add_argument(
        "--tiny-shapes", action="store_true", help="only check that everything runs; the numbers mean nothing"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.batch_invariant:
        args.methods = [method for method in args.methods if method != "eagle"]
    with tempfile.TemporaryDirectory(prefix="dovetail-spec-") as folder:
        bench = Bench(args, Path(folder))
        try:
            for part in args.parts:
                getattr(bench, part)()
        finally:
            bench.show()
            if args.json:
                args.json.write_text(json.dumps(bench.found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
