"""Measure the host work between two steps that verify drafts, at batch 1: from the tokens of one step to the launch of
the next.

    python benchmarks/verify_overhead.py [--rounds 25]

All of it delays the device, because the next step needs what this step accepts. A real ``Loop`` and a real ``Engine``
run the embedded model on a CPU. Graphs of verify steps are stand-ins that accept every draft of the oracle at once, so
that all measured time is the host's. The launch itself, and the transfers between device and host, are not included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console

from dovetail import LLM, SamplingParams
from dovetail.engine.engine import Engine
from dovetail.engine.sampler_graphs import SampleMode
from dovetail.engine.verify_graphs import CapturedVerify, VerifyGraphs, VerifyKey, VerifySizes, VerifyStep
from dovetail.engine.verify_inputs import VerifyShape
from dovetail.messages import GenerateMsg
from dovetail.types import Batch, ForwardOutput, StepResult
from specbench.oracle import Oracle, attach

WIDTH, ROWS, OUTPUT = 8, 8, 400
PROMPT = list(range(16, 80))


class StandIn:
    """Stand in for a graph, or for the recorder of graphs: call back instead of launching anything."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay

    def wait(self) -> None:
        """Do nothing, because nothing is running."""


class Planner:
    """Stand in for an attention backend that plans nothing."""

    def plan_replay(self, batch: Batch) -> None:
        """Do nothing."""


class Bench:
    """Run an engine whose verify steps end at once, and a clock between them."""

    def __init__(self) -> None:
        self.seen, self.gaps = 0.0, list[float]()
        scheduler = {"max_running": ROWS, "draft": "always", "overlap": True}
        self.llm = LLM("tiny", device="cpu", grammar="none", scheduler=scheduler, memory={"num_pages": 400})
        engine = self.llm.loop.executor.rank.engine
        futures = {tuple(PROMPT): np.ones(OUTPUT + WIDTH + 1, np.int32)}
        attach(self.llm, Oracle(futures, WIDTH, 0.0, engine.info.vocab_size))
        sizes = VerifySizes(ROWS * (1 + WIDTH), 1 + WIDTH, trees=False, context_len=engine.context_len)
        with patch("dovetail.engine.verify_graphs.GraphRecorder", lambda *_: StandIn(lambda: None)):
            graphs = VerifyGraphs(engine.model, engine.inputs, engine.pool, Planner(), sizes)  # pyright: ignore[reportArgumentType]
        for tokens in sizes.counts:
            self.stand_in(graphs, engine, tokens, sizes)
        engine.use_verify_graphs(graphs)

    def stand_in(self, graphs: VerifyGraphs, engine: Engine, tokens: int, sizes: VerifySizes) -> None:
        """Replace steps of ``tokens`` tokens: the launch stops the clock, and the sampler accepts all drafts of the
        single row."""
        shape = VerifyShape(tokens, sizes.width, tree=False)
        step = VerifyStep(shape, engine.inputs, graphs._memory, sizes.context_len)
        step.batch.attn, step.batch.kv = (engine.eager_runner.decode,), (engine.pool,)

        def launched() -> None:
            if self.seen:
                self.gaps.append(time.perf_counter() - self.seen)
            self.seen = 0.0

        def accept() -> None:
            for result in (step.tensors.result, step.tensors.result_on_host):
                result[0] = 1  # every token is 1
                result[0, -1] = int(step.batch.extend_lens[0])

        key, graph = VerifyKey(tokens, False), StandIn(launched)
        graphs._graphs[key] = CapturedVerify(step, graph, torch.zeros(tokens, 1))  # pyright: ignore[reportArgumentType]
        sampler = StandIn(accept), step.tensors.result
        graphs._samplers._graphs[key, SampleMode(False)] = sampler  # pyright: ignore[reportArgumentType]

    def run(self, round: int) -> tuple[float, float, float]:
        """Decode one request. Return the seconds per step: until the next launch, of these in the drafter, and in
        total."""
        loop = self.llm.loop
        self.seen, self.gaps = 0.0, []
        drafting, steps = loop.times.draft, loop.times.steps
        params = SamplingParams(temperature=0, max_new_tokens=OUTPUT, ignore_eos=True)
        loop.handle(GenerateMsg(str(round), PROMPT, params, seed=0))
        took: list[float] = []
        while loop.has_work:
            start = time.perf_counter()
            loop.step()
            took.append(time.perf_counter() - start)
        drafting = (loop.times.draft - drafting) / (loop.times.steps - steps)
        return statistics.median(self.gaps), drafting, statistics.median(took)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=25, help="requests, of which the median counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench, wait = Bench(), Engine.wait

    def seen(engine: Engine, batch: Batch, output: ForwardOutput) -> StepResult:
        bench.seen = time.perf_counter()
        return wait(engine, batch, output)

    with patch.object(Engine, "wait", seen):
        runs = [bench.run(i) for i in range(args.rounds + 3)][3:]
    gap, drafting, step = (statistics.median(column) * 1e6 for column in zip(*runs, strict=True))
    Console().print(
        f"from the tokens of a step to the launch of the next: {gap:.1f} us, of these drafting {drafting:.1f}; "
        f"the whole step: {step:.1f} us"
    )


if __name__ == "__main__":
    main()
