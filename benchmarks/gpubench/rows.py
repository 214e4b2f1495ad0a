"""Define the workloads: each function runs one of them on a warm engine and returns its numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import TypeVar

from dovetail.engine.pieces import MOST_TOKENS, PIECES_NEEDED
from gpubench.plan import Job, Measure, short
from gpubench.subject import Run, Subject

T = TypeVar("T")


def decode(subject: Subject, job: Job, batch: int) -> list[Measure]:
    """Measure milliseconds per output token: prompts are cached, and the time before the first tokens is subtracted."""
    sizes = job.sizes
    prompts = sizes.prompts(f"decode {batch}", [sizes.decode_prompt] * batch)
    few, many = sizes.decode_short, sizes.decode_long
    subject.run(prompts, [1] * batch)
    subject.run(
        prompts, [many] * batch
    )  # long enough for everything that is compiled or captured once a size is frequent
    pairs = [
        (subject.run(prompts, [few] * batch).seconds, subject.run(prompts, [many] * batch).seconds)
        for _ in range(job.repeats)
    ]
    best_few, best_many = map(min, zip(*pairs, strict=True))
    scale = 1e3 / (many - few)
    samples = [(b - a) * scale for a, b in pairs]
    return [Measure("decode", f"bs {batch}", (best_many - best_few) * scale, "ms", samples)]


def prefill(subject: Subject, job: Job, tokens: int) -> list[Measure]:
    """Measure the milliseconds to the single token of one request with an empty cache, once the engine has captured what
    it captures for prompts of this size."""
    prompts = job.sizes.prompts(f"prefill {tokens}", [tokens])
    if tokens <= MOST_TOKENS:
        cold(subject, PIECES_NEEDED, lambda: subject.run(prompts, [1]))
        subject.rest()
    times = [run.seconds * 1e3 for run in cold(subject, job.repeats + 1, lambda: subject.run(prompts, [1]))]
    return [Measure("prefill", short(tokens), min(times), "ms", times)]


def mixed(subject: Subject, job: Job) -> list[Measure]:
    """Measure prompts and outputs of many lengths, all at once."""
    count, (low, high) = job.sizes.mixed_count, job.sizes.mixed_range
    source = random.Random("mixed lengths")
    lens = [(source.randint(low, high), source.randint(low, high)) for _ in range(count)]
    return throughput("mixed", subject, job, job.sizes.prompts("mixed", [a for a, _ in lens]), [b for _, b in lens])


def indep(subject: Subject, job: Job) -> list[Measure]:
    """Measure equal requests that share nothing."""
    count, prompt, output = job.sizes.indep
    return throughput("indep", subject, job, job.sizes.prompts("indep", [prompt] * count), [output] * count)


def gsp(subject: Subject, job: Job) -> list[Measure]:
    """Measure shuffled groups that share a prefix."""
    groups, each, prefix, question, output = job.sizes.gsp
    heads = job.sizes.prompts("gsp prefixes", [prefix] * groups)
    tails = job.sizes.prompts("gsp questions", [question] * groups * each)
    prompts = [heads[i % groups] + tail for i, tail in enumerate(tails)]
    random.Random("gsp order").shuffle(prompts)
    return throughput("gsp", subject, job, prompts, [output] * len(prompts), hit=True)


def chat(subject: Subject, job: Job) -> list[Measure]:
    """Measure conversations over one system prompt, in turns that wait for each other."""
    runs = [combined(turns) for turns in cold(subject, job.repeats, lambda: conversation(subject, job))]
    return rate("chat", runs, hit=True)


def conversation(subject: Subject, job: Job) -> list[Run]:
    """Run all turns once."""
    count, turns, system, user, output = job.sizes.chat
    texts = job.sizes.prompts("chat system", [system]) * count
    runs: list[Run] = []
    for turn in range(turns):
        news = job.sizes.prompts(f"chat turn {turn}", [user] * count)
        texts = [text + new for text, new in zip(texts, news, strict=True)]
        runs.append(subject.run(texts, [output] * count))
        texts = [text + o.token_ids for text, o in zip(texts, runs[-1].outputs, strict=True)]
    return runs


def combined(runs: Iterable[Run]) -> Run:
    """Combine runs that follow one another into one."""
    runs = list(runs)
    return Run(sum(run.seconds for run in runs), [o for run in runs for o in run.outputs])


def throughput(
    row: str, subject: Subject, job: Job, prompts: list[list[int]], lens: list[int], *, hit: bool = False
) -> list[Measure]:
    """Measure requests submitted at once with an empty cache."""
    return rate(row, cold(subject, job.repeats, lambda: subject.run(prompts, lens)), hit=hit)


def rate(row: str, runs: list[Run], *, hit: bool) -> list[Measure]:
    """Return the output tokens per second of the fastest run, and its prefix hit rate."""
    rates = [run.generated / run.seconds for run in runs]
    best = runs[rates.index(max(rates))]
    facts = {"seconds": best.seconds, "output_tokens": best.generated, "prompt_tokens": best.prompt_tokens}
    measures = [Measure(row, "", max(rates), "tok/s", rates, facts)]
    if hit:
        hits = [run.cached_tokens / run.prompt_tokens for run in runs]
        measures.append(Measure(row, "hit", best.cached_tokens / best.prompt_tokens, "hit", hits))
    return measures


def cold(subject: Subject, times: int, run: Callable[[], T]) -> list[T]:
    """Run several times, each with an empty prefix cache."""
    found: list[T] = []
    for _ in range(times):
        subject.flush()
        found.append(run())
    return found


WORKLOADS: dict[str, Callable[[Subject, Job], list[Measure]]] = {
    "mixed": mixed,
    "indep": indep,
    "gsp": gsp,
    "chat": chat,
}
CASES: dict[str, Callable[[Subject, Job, int], list[Measure]]] = {"decode": decode, "prefill": prefill}
