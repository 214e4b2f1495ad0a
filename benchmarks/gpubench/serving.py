"""Run ``dovetail serve`` as a process, and a client that streams many answers at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpubench.models import write_tokenizer
from gpubench.plan import Ids, Job, Measure
from gpubench.supervise import Deadline, started, tail

POLL_SECONDS = 0.1
TEMPERATURE = 0.6


class ServingError(Exception):
    """Raised when the server did not start or answered incorrectly; the message contains its last output."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Describe one streamed answer: seconds from its request to its first and its last event, and its number of
    tokens."""

    first: float
    last: float
    tokens: int

    @property
    def tpot(self) -> float:
        """Return the milliseconds per output token after the first event."""
        return (self.last - self.first) / (self.tokens - 1) * 1e3


def measure(job: Job, in_process: float | None, deadline: Deadline) -> list[Measure]:
    """Measure the time per output token of concurrent streams, through both APIs.

    It is also divided by ``in_process``, the time of ``LLM.generate`` at the same batch size. Raises ``ServingError``.
    """
    count, prompt, output = job.sizes.http
    prompts = job.sizes.prompts("http", [prompt] * count)
    found: list[Measure] = []
    with server(job, deadline) as url:
        for api in ("native", "completions"):
            asyncio.run(streams(url, api, prompts, 2, deadline))  # the prompts are cached, as for the decode rows
            asyncio.run(streams(url, api, prompts, output, deadline))
            runs = [asyncio.run(streams(url, api, prompts, output, deadline)) for _ in range(job.repeats)]
            tpots = [statistics.mean(s.tpot for s in run) for run in runs]
            facts = {"median_ttft_ms": statistics.median(s.first for s in runs[-1]) * 1e3}
            found.append(Measure("http", f"{api}, {count} streams", min(tpots), "ms", tpots, facts))
            if in_process is not None:
                ratios = [t / in_process for t in tpots]
                found.append(Measure("http", f"{api} / in-process", min(ratios), "ratio", ratios))
    return found


@contextlib.contextmanager
def server(job: Job, deadline: Deadline) -> Iterator[str]:
    """Yield the base URL of a server with the job's config."""
    work = Path(job.work)
    tokenizer = write_tokenizer(job.model, work)
    config = {**job.config, "server": {"port": 0, **job.config.get("server", {})}}
    config["model"] = {"tokenizer": str(tokenizer), "served_name": "bench", **config["model"]}
    file, log = work / f"serve-{job.model}.json", work / "logs" / f"serve-{job.model}.log"
    file.write_text(json.dumps(config))
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", "from dovetail.cli import main; main()", "serve", str(file)]
    with started(command, log) as process:
        yield ready(process, log, deadline)


def ready(process: subprocess.Popen[bytes], log: Path, deadline: Deadline) -> str:
    """Wait for the line that contains the address of the server. Raises ``ServingError``."""
    while not deadline.passed:
        if found := re.search(r"serving .* on (http://\S+), ready in", log.read_text(errors="replace")):
            return found[1]
        if process.poll() is not None:
            raise ServingError(f"the server ended:\n{tail(log)}")
        time.sleep(POLL_SECONDS)
    raise ServingError(f"no time was left for the server to start:\n{tail(log)}")


async def streams(url: str, api: str, prompts: Ids, tokens: int, deadline: Deadline) -> list[Stream]:
    """Request all prompts at once."""
    async with asyncio.timeout(deadline.left):
        return await asyncio.gather(*(stream(url, api, i, p, tokens) for i, p in enumerate(prompts)))


def body(api: str, seed: int, prompt: list[int], tokens: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of one request."""
    if api == "native":
        params = {"max_new_tokens": tokens, "temperature": TEMPERATURE, "ignore_eos": True, "seed": seed}
        return "/generate", {"input_ids": prompt, "sampling_params": params, "stream": True}
    settings = {"max_tokens": tokens, "temperature": TEMPERATURE, "ignore_eos": True, "seed": seed}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return "/v1/completions", {"model": "bench", "prompt": prompt, **settings, **usage}


async def stream(url: str, api: str, seed: int, prompt: list[int], tokens: int) -> Stream:
    """Send one request as bytes on a socket, because a client library would take more time than the server.

    Raises ``ServingError`` if the answer has another length.
    """
    path, content = body(api, seed, prompt, tokens)
    data, place = json.dumps(content).encode(), urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 24)
    head = f"POST {path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    start = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    chunks: list[tuple[float, bytes]] = []
    while chunk := await reader.read(1 << 16):
        chunks.append((time.perf_counter() - start, chunk))
    writer.close()
    return measured(chunks, tokens)


def measured(chunks: list[tuple[float, bytes]], tokens: int) -> Stream:
    """Return when the first and the last token arrived. Raises ``ServingError``."""
    whole = b"".join(chunk for _, chunk in chunks)
    if not whole.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in whole:
        raise ServingError(f"the server answered {whole[:400]!r}")
    got = answered(whole)
    if got != tokens:
        raise ServingError(f"the server answered with {got} tokens, asked for {tokens}")
    times = [at for at, chunk in chunks if b"data: {" in chunk]
    return Stream(times[0], times[-1], tokens)


def answered(whole: bytes) -> int:
    """Return the number of tokens in the last event that contains it."""
    counts = re.findall(rb'"completion_tokens":\s*(\d+)', whole)
    return int(counts[-1]) if counts else 0
