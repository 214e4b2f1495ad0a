"""Full load for minutes: random lengths, shared prefixes, aborts, a pool too small for all. Ends with 1 if a page leaks, a
request is lost, or memory grows.

    python benchmarks/soak.py --minutes 5 --device cuda
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from dataclasses import dataclass, field

import torch
from rich.console import Console

from dovetail import LLM, GrammarKind, GrammarSpec, SamplingParams
from dovetail.messages import AbortMsg, GenerateMsg, RequestFailed, TokenOutput

console = Console(stderr=True)
FULL_LOAD = 96
MIB = 1 << 20


@dataclass
class Tally:
    """What became of the requests."""

    sent: int = 0
    aborted: int = 0
    failed: int = 0
    finished: int = 0
    tokens: int = 0
    running: set[str] = field(default_factory=set)


def make_params(source: random.Random) -> SamplingParams:
    """Settings of all kinds."""
    kind = source.random()
    grammar = GrammarSpec(GrammarKind.REGEX, "[a-z ]{5,60}") if kind < 0.1 else None
    return SamplingParams(
        max_new_tokens=source.randint(1, 400),
        temperature=source.choice([0.0, 0.7, 1.0]),
        top_p=source.choice([1.0, 0.9]),
        top_k=source.choice([0, 40]),
        seed=source.randint(0, 1 << 30),
        ignore_eos=grammar is None,
        grammar=grammar,
        logprobs=2 if 0.1 < kind < 0.2 else None,
        frequency_penalty=0.3 if 0.2 < kind < 0.3 else 0.0,
    )


def make_prompt(source: random.Random, heads: list[list[int]], vocab: int) -> list[int]:
    """Half of the prompts begin like others."""
    head = source.choice(heads) if source.random() < 0.5 else []
    return head + [source.randrange(8, vocab) for _ in range(source.randint(1, 400))]


def soak(llm: LLM, seconds: float, source: random.Random) -> Tally:
    """Keep ``FULL_LOAD`` requests in the engine, abort some, then let the rest finish."""
    loop, tally = llm.loop, Tally()
    heads = [[source.randrange(8, 4000) for _ in range(source.choice([64, 200, 300]))] for _ in range(6)]
    end = time.monotonic() + seconds
    while time.monotonic() < end or tally.running:
        while len(tally.running) < FULL_LOAD and time.monotonic() < end:
            rid = str(tally.sent)
            prompt = make_prompt(source, heads, llm.resolved.model_info.vocab_size)
            loop.handle(GenerateMsg(rid, prompt, make_params(source), tally.sent))
            tally.sent += 1
            tally.running.add(rid)
        if tally.running and source.random() < 0.05:
            loop.handle(AbortMsg(source.choice(sorted(tally.running))))
        for answer in loop.step():
            take(tally, answer)
    return tally


def take(tally: Tally, answer: object) -> None:
    """Count an answer."""
    if isinstance(answer, RequestFailed):
        tally.failed += 1
        tally.running.discard(answer.rid)
    elif isinstance(answer, TokenOutput):
        tally.tokens += len(answer.token_ids)
        if answer.finish is not None:
            tally.running.discard(answer.rid)
            tally.finished += 1
            tally.aborted += answer.finish.kind == "abort"


def memory(llm: LLM) -> tuple[float, float]:
    """MiB of the process at its peak, and of the device now."""
    device = torch.cuda.memory_allocated() / MIB if llm.loop.engine.device.type == "cuda" else 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, device


def main() -> None:
    """Warm up, soak, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    llm = LLM(
        "tiny",
        device=args.device,
        memory={"page_size": 16, "num_pages": 400},  # 80 running requests would take three times as many
        scheduler={"max_running": 80, "chunk_size": 512},
        graphs={"max_rows": 64, "piecewise_tokens": 256},
    )
    source = random.Random(args.seed)
    soak(llm, min(30.0, 12 * args.minutes), source)  # graphs, kernels and caches are made
    before = memory(llm)
    tally = soak(llm, 60 * args.minutes, source)
    llm.loop.scheduler.check_integrity()
    after, stats = memory(llm), llm.loop.stats()
    console.print(
        f"{tally.sent} requests: {tally.finished} finished, of which {tally.aborted} aborted, {tally.failed} failed; "
        f"{tally.tokens} tokens, {stats.retractions} retractions, {stats.pages_used} pages in use; host {before[0]:.0f} -> "
        f"{after[0]:.0f} MiB, device {before[1]:.1f} -> {after[1]:.1f} MiB"
    )
    grown = after[0] > before[0] * 1.1 + 64 or after[1] > before[1] * 1.02 + 32
    if stats.pages_used or tally.failed or tally.finished != tally.sent or grown or not stats.retractions:
        sys.exit("pages leaked, requests were lost or failed, memory grew, or nothing was ever retracted")


if __name__ == "__main__":
    main()
