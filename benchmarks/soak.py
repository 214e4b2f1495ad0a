"""Run a full load for minutes: random lengths, shared prefixes, aborts, grammars, penalties, logprobs, and a pool that
is too small.

    python benchmarks/soak.py --seconds 300 --device cuda --json soak.json
    python benchmarks/soak.py --seconds 300 --device cuda --model latent

The model is the embedded one, or one with random weights for each kind of cache group (``soak_models.py``): ``sliding``,
``windows``, ``latent``, ``state`` and ``states``. Before the run, all memory of keys, values and states is filled with NaN.

After a warm-up (a fifth of the time) the load runs in rounds. After each round all requests have finished and the
prefix cache is flushed.

The run fails in these cases:

- a page or a slot of the request table is not returned;
- a request is lost, answered after its end or answered wrongly;
- a kind of request or event never occurred;
- one of the requests that are repeated through all rounds changes its tokens. This is judged in float32, where more than 2 % of them
  is too much, because two logits may be practically equal;
- memory grows: from the middle rounds to the last by more than 16 MiB of the host's or 16 MiB of the device's memory, medians of three
  rounds each. Torch and its libraries fill caches for some minutes, so on a slow CPU a shorter run fails for this reason alone.

The verdict is printed as the last line; the exit status is 1 if it is FAIL.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from dovetail import LLM, GrammarKind, GrammarSpec, SamplingParams
from dovetail.engine.grouped import pools_of, states_of
from dovetail.messages import AbortMsg, CommandReply, FlushCacheMsg, GenerateMsg, RequestFailed, TokenOutput
from soak_checks import REGEX, Memory, Sent, Tally, broken, faults, growth, judge, memory
from soak_models import SHAPES, write

console = Console(stderr=True)
FULL_LOAD = 96
ROUNDS = 12
LEAST_ROUNDS = 9
STALLED_SECONDS = 60.0
WORDS = GrammarSpec(GrammarKind.REGEX, REGEX)


def kinds(source: random.Random, longest: int) -> dict[str, SamplingParams]:
    """Return the settings of every kind of request, with random lengths and seeds."""
    length, seed = source.randint(1, longest), source.randint(0, 1 << 30)
    usual = {"max_new_tokens": length, "seed": seed, "ignore_eos": True}
    return {
        "greedy": SamplingParams(**usual, temperature=0),
        "sampled": SamplingParams(**usual, temperature=source.choice([0.7, 1.0])),
        "filtered": SamplingParams(**usual, temperature=0.8, top_p=0.9, top_k=source.choice([0, 40]), min_p=0.01),
        "penalties": SamplingParams(**usual, temperature=0, frequency_penalty=0.3, repetition_penalty=1.1),
        "presence and bias": SamplingParams(
            **usual, temperature=1, presence_penalty=0.4, logit_bias={30: 2.0, 40: -100.0}
        ),
        "logprobs": SamplingParams(**usual, temperature=0.7, logprobs=2, prompt_logprobs=source.choice([None, 1])),
        "grammar": SamplingParams(max_new_tokens=length, seed=seed, temperature=0.9, grammar=WORDS),
        "stops": SamplingParams(
            max_new_tokens=length, seed=seed, temperature=0.8, stop=(" the", "."), min_new_tokens=1
        ),
    }


class Soak:
    """Send requests to a loop and check every answer."""

    def __init__(self, llm: LLM, source: random.Random, longest: int) -> None:
        self.llm, self.loop, self.source, self.longest = llm, llm.loop, source, longest
        self.vocab = llm.resolved.model_info.vocab_size
        self.tally = Tally()
        self.running: dict[str, Sent] = {}
        self.heads = [self.random_ids(length) for length in (64, 64, 200, 200, 300, 300)]
        self.repeated = [
            (kind, self.heads[i % 6] + self.random_ids(9), p)
            for i, (kind, p) in enumerate(kinds(source, longest).items())
        ]
        self.expected: dict[int, list[int]] = {}
        self._replies: list[CommandReply] = []
        self._serial = 0

    def random_ids(self, count: int) -> list[int]:
        """Return a prompt, or a part of one."""
        return [self.source.randrange(8, self.vocab) for _ in range(count)]

    def round(self, seconds: float) -> None:
        """Keep ``FULL_LOAD`` requests in the engine, abort some, then let the rest finish."""
        end = time.monotonic() + seconds
        progress = time.monotonic()
        while time.monotonic() < end or self.running:
            while len(self.running) < FULL_LOAD and time.monotonic() < end:
                self.send()
            if self.running and self.source.random() < 0.03:
                self.abort(self.source.choice(list(self.running)))
            answers = self.loop.step()
            for answer in answers:
                self.take(answer)
            progress = time.monotonic() if answers else progress
            if time.monotonic() - progress > STALLED_SECONDS:
                self.tally.wrong.append(f"{len(self.running)} requests stall")
                break
        self.settle()

    def send(self) -> None:
        """Send one more request; every tenth is one of the repeated requests."""
        self._serial += 1
        if self._serial % 10 == 0:
            index = self._serial // 10 % len(self.repeated)
            kind, prompt, params = self.repeated[index]
            rid = f"{self._serial} repeats {index}"
        else:
            kind, params = self.source.choice(list(kinds(self.source, self.longest).items()))
            head = self.source.choice(self.heads) if self.source.random() < 0.5 else []
            prompt, rid = head + self.random_ids(self.source.randint(1, 400)), str(self._serial)
        msg = GenerateMsg(rid, prompt, params, params.seed or 0)
        self.running[rid] = Sent(kind, msg)
        self.tally.sent[kind] += 1
        self.loop.handle(msg)

    def abort(self, rid: str) -> None:
        """End a request in any state."""
        self.running[rid].aborted = True
        self.loop.handle(AbortMsg(rid))

    def take(self, answer: object) -> None:
        """Check an answer."""
        if isinstance(answer, CommandReply):
            self._replies.append(answer)
            return
        assert isinstance(answer, TokenOutput | RequestFailed)
        sent = self.running.get(answer.rid)
        if sent is None:
            self.tally.wrong.append(f"{answer.rid} is answered after its end")
        elif isinstance(answer, RequestFailed):
            self.tally.wrong.append(f"{sent.kind}: {answer.message}")
            del self.running[answer.rid]
        else:
            self.add(sent, answer)

    def add(self, sent: Sent, answer: TokenOutput) -> None:
        """Add the new tokens of a request."""
        sent.tokens += answer.token_ids
        self.tally.tokens += len(answer.token_ids)
        for entry in answer.logprobs or ():
            sent.logprobs += 1
            if broken(entry, sent.msg.params.logprobs or 0):
                self.tally.wrong.append(f"logprobs: {entry}")
        if answer.finish is not None:
            del self.running[answer.rid]
            self.tally.ended[answer.finish.kind] += 1
            self.tally.wrong += [f"{sent.kind}: {text}" for text in faults(self.llm, sent, answer)]
            if "repeats" in answer.rid and not sent.aborted:
                self.compare(int(answer.rid.split()[-1]), sent.tokens)

    def compare(self, index: int, tokens: list[int]) -> None:
        """Compare the tokens of a finished repeated request with those of its first run."""
        self.tally.repeats += 1
        self.tally.changed += self.expected.setdefault(index, tokens) != tokens

    def settle(self) -> None:
        """Check, while nothing runs, that all pages and slots are returned, and that after a flush every page is
        free."""
        loop, ledger = self.loop, self.loop.scheduler.ledger
        try:
            loop.scheduler.check_integrity()
        except AssertionError as error:
            self.tally.wrong.append(f"the page ledger is inconsistent: {error}")
        stats = loop.stats()
        if stats.pages_used or stats.running or stats.waiting:
            self.tally.wrong.append(
                f"{stats.pages_used} pages in use, {stats.running} running, {stats.waiting} waiting"
            )
        loop.handle(FlushCacheMsg("flush"))
        for answer in loop.step():
            self.take(answer)
        if not self._replies or not self._replies.pop().ok:
            self.tally.wrong.append("the cache could not be flushed")
        held = ledger.allocator.num_held
        if any(held) or ledger.allocator.num_free < ledger.allocator.num_total:
            self.tally.wrong.append(f"{' and '.join(map(str, held))} pages are lost")
        if ledger.table.num_free != loop.scheduler.limits.max_running:
            self.tally.wrong.append("slots of the request table are lost")


def run(llm: LLM, seconds: float, soak: Soak) -> list[Memory]:
    """Warm up, then run the rounds."""
    pool = llm.loop.executor.rank.engine.pool
    with llm.loop.executor.rank.context:
        for states in states_of(pool):  # unwritten memory must not be read, and a host allocates it when it is written
            states.fill(math.nan, slice(1, None))
        for store in pools_of(pool):
            store.poison(range(1, store.num_pages))
    llm.loop.finish_idle_work()
    end = time.monotonic() + seconds
    soak.round(0.2 * seconds)
    rounds: list[Memory] = []
    while len(rounds) < LEAST_ROUNDS or time.monotonic() < end:
        soak.round(0.8 * seconds / ROUNDS)
        rounds.append(memory(llm))
        found = rounds[-1]
        console.print(
            f"round {len(rounds)}: {soak.tally.sent.total()} requests, host {found.host:.1f} MiB, device "
            f"{found.device:.1f} MiB, {found.objects} objects",
            highlight=False,
        )
    return rounds


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=300.0)
    length.add_argument("--minutes", type=lambda text: 60 * float(text), dest="seconds", help="the same in minutes")
    parser.add_argument("--model", choices=["tiny", *SHAPES], default="tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--overlap", choices=["auto", "true", "false"], default="auto")
    parser.add_argument("--longest", type=int, default=400, help="output tokens of a request at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    return parser.parse_args()


def open_engine(args: argparse.Namespace, work: Path) -> LLM:
    """Return an engine with too little memory for the load. The checkpoint of a model with random weights is written to
    ``work``."""
    path = "tiny" if args.model == "tiny" else str(write(args.model, work / args.model))
    num_pages = (
        SHAPES[args.model].num_pages if args.model in SHAPES else 400
    )  # 80 requests would take three times as many
    return LLM(
        path,
        device=args.device,
        model={"dtype": args.dtype},
        memory={"page_size": 16, "num_pages": num_pages},
        scheduler={
            "max_running": 80,
            "chunk_size": 512,
            "overlap": {"true": True, "false": False}.get(args.overlap, "auto"),
        },
        graphs={"max_rows": 64, "piecewise_tokens": 256 if args.device.startswith("cuda") else None},
    )


def main() -> None:
    """Run the load, judge it, and report."""
    args = arguments()
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # kernels by shape; read when torch first needs one
    with tempfile.TemporaryDirectory() as work:
        llm = open_engine(args, Path(work))
    soak = Soak(llm, random.Random(args.seed), args.longest)
    rounds = run(llm, args.seconds, soak)
    tally, retractions = soak.tally, llm.loop.stats().retractions
    grows = args.model not in SHAPES or SHAPES[args.model].grows
    problems = judge(tally, rounds, retractions, llm.resolved.config.model.dtype == "float32", grows)
    grown = {name: growth([getattr(found, name) for found in rounds]) for name in ("host", "device", "objects")}
    report = {
        "verdict": "FAIL" if problems else "PASS",
        "problems": problems,
        "seconds": args.seconds,
        "device": str(llm.loop.executor.rank.engine.device),
        "sent": tally.sent,
        "ended": tally.ended,
        "tokens": tally.tokens,
        "repeated": {"sent": tally.repeats, "changed": tally.changed},
        "retractions": retractions,
        "growth": grown,
        "rounds": [asdict(found) for found in rounds],
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    console.print(
        f"{tally.sent.total()} requests {dict(tally.sent)}; ended {dict(tally.ended)}; {tally.tokens} tokens, {retractions} "
        f"retractions; {tally.changed} of {tally.repeats} repeated requests changed; growth: host {grown['host']:+.1f} MiB, "
        f"device {grown['device']:+.1f} MiB, {grown['objects']:+.0f} objects",
        highlight=False,
        soft_wrap=True,
    )
    print("verdict: " + ("FAIL: " + "; ".join(problems) if problems else "PASS"))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
