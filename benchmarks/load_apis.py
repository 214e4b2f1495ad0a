"""Run many streaming clients of every API at once; some of them disconnect, and some send nonsense.

    python benchmarks/load_apis.py --clients 256 --seconds 60 --json load.json

The constraint of each request determines its text, which differs between requests, so that an answer that reaches
another client is detected.

The run fails (exit status 1) in these cases:

- a request is lost or answered with another request's text;
- nonsense is not refused in its API's own format;
- at the end a request is open, or a page is in use or missing;
- the memory of one of the server's processes, or of all together, grows: in the last third of the time by more than 16 MiB above either
  earlier third, medians each.

Memory is measured after a warm-up. In its first half the clients join one after another, so that steps of all sizes
occur: the pool is written, constraints are compiled, and torch and its libraries fill their bounded caches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from dovetail.bench.own_server import own_server
from dovetail.config import Config
from load_memory import Memory
from load_protocols import PROTOCOLS, Protocol

console = Console(stderr=True)
LEAVES, NONSENSE = 0.10, 0.05
SETTLE_SECONDS = 20.0
WORDS = [
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "flint",
    "grove",
    "hazel",
    "indigo",
    "jade",
    "koral",
    "lilac",
    "maple",
    "north",
    "ochre",
    "pearl",
]
TEXTS = [" ".join(random.Random(i).choices(WORDS, k=2 + i % 5)) for i in range(64)]
"""The texts that requests must produce: few enough that their constraints are compiled once."""


@dataclass
class Tally:
    """Hold what was sent, how it ended, and what was wrong."""

    answered: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """Return the number of requests whose result is known."""
        return self.answered.total() + self.left.total() + self.refused.total() + len(self.wrong)


class Load:
    """Run the clients of one server."""

    def __init__(
        self,
        url: str,
        model: str,
        protocols: Sequence[Protocol] = PROTOCOLS,
        texts: Sequence[str] = TEXTS,
        seed: int = 0,
    ) -> None:
        """Connect to ``url``; ``texts`` are the texts that requests must produce."""
        self.tally = Tally()
        self._texts = texts
        self._model = model
        self._protocols = protocols
        self._seed = seed
        self._http = httpx.AsyncClient(
            base_url=url, timeout=120, trust_env=False, limits=httpx.Limits(max_connections=None)
        )

    async def run(self, clients: int, seconds: float, joining: float = 0.0) -> None:
        """Run ``clients`` clients at a time for ``seconds`` seconds; they join one after another in the first
        ``joining`` seconds.

        Requests that began in time finish.
        """
        end = time.monotonic() + seconds
        async with self._http:
            each = (self._client(random.Random(self._seed + i), i * joining / clients, end) for i in range(clients))
            await asyncio.gather(*each)

    async def _client(self, source: random.Random, joins: float, end: float) -> None:
        await asyncio.sleep(joins)
        while time.monotonic() < end:
            protocol, chance = source.choice(self._protocols), source.random()
            self.tally.sent += 1
            try:
                if chance < NONSENSE:
                    await self._nonsense(protocol, source)
                else:
                    await self._ask(protocol, source, leaves=chance < NONSENSE + LEAVES)
            except Exception as error:
                self.tally.wrong.append(f"{protocol.name}: {type(error).__name__}: {error}")

    async def _nonsense(self, protocol: Protocol, source: random.Random) -> None:
        body = source.choice(protocol.nonsense(self._model))
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self._http.post(protocol.path, content=content, headers=protocol.headers)
        if answer.status_code not in (400, 404, 422) or not protocol.is_error(answer.json()):
            self.tally.wrong.append(
                f"{protocol.name}: {content!r:.80} is answered {answer.status_code} {answer.text:.120}"
            )
        else:
            self.tally.refused[protocol.name] += 1

    async def _ask(self, protocol: Protocol, source: random.Random, leaves: bool) -> None:
        text = source.choice(self._texts)
        prompt = f"{source.choice(WORDS)} " * source.randint(4, 60) + text
        body = protocol.body(self._model, prompt, text)
        started, patience, pieces, ended = time.perf_counter(), source.randint(0, 4), list[str](), False
        async with self._http.stream("POST", protocol.path, json=body, headers=protocol.headers) as answer:
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code} {(await answer.aread())[:160]!r}")
            async for piece, last in protocol.pieces(_lines(answer)):
                if not pieces:
                    self.tally.ttft_ms.append(1e3 * (time.perf_counter() - started))
                pieces.append(piece)
                ended = ended or last
                patience -= 1
                if leaves and patience < 0:
                    self.tally.left[protocol.name] += 1
                    return
        written = protocol.written("".join(pieces))
        if not ended or written != text:
            raise ValueError(f"asked for {text!r}, answered {written!r}{'' if ended else ', cut off'}")
        self.tally.answered[protocol.name] += 1


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line:
            yield line


async def settled(url: str) -> list[str]:
    """Return what is left of the load; a server may need a moment to notice that clients have disconnected."""
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        deadline = time.monotonic() + SETTLE_SECONDS
        while left := await _left(client):
            if time.monotonic() > deadline:
                return [f"left behind: {left}"]
            await asyncio.sleep(0.1)
        flushed = await client.post("/flush_cache")
        stats = (await client.get("/server_info")).json()["stats"]
        if flushed.status_code != 200 or stats["pages_cached"]:
            return [f"after a flush {stats['pages_cached']} pages are cached still ({flushed.text})"]
    return []


async def _left(client: httpx.AsyncClient) -> dict[str, int]:
    info = (await client.get("/server_info")).json()
    found = {name: info["stats"][name] for name in ("running", "waiting", "pages_used")}
    return {name: count for name, count in {"open": info["open_requests"], **found}.items() if count}


def report(tally: Tally, memory: Memory, seconds: float) -> dict[str, Any]:
    """Return the numbers of a run."""
    ttft = sorted(tally.ttft_ms)
    return {
        "sent": tally.sent,
        "answered": tally.answered,
        "left": tally.left,
        "refused": tally.refused,
        "per_second": tally.sent / seconds,
        "ttft_ms": {"median": statistics.median(ttft), "p99": ttft[int(0.99 * (len(ttft) - 1))]} if ttft else None,
        "memory_mib": memory.report(),
        "wrong": tally.wrong[:20],
        "wrong_count": len(tally.wrong),
    }


async def _main(args: argparse.Namespace) -> int:
    # a host allocates memory when it is written, and a small pool is soon completely written
    config = Config.model_validate({"server": {"log_level": "error"}, "memory": {"kv_gib": 0.125}})
    with own_server(config) as server:
        load = Load(server.url, config.model.name)
        memory = Memory()
        watching = asyncio.create_task(memory.watch(server.pid, args.warm_up))
        await load.run(args.clients, args.warm_up + args.seconds, joining=args.warm_up / 2)
        watching.cancel()
        tally = load.tally
        if tally.sent != tally.ended:
            tally.wrong.append(f"{tally.sent} requests were sent, of {tally.ended} it is known how they ended")
        tally.wrong += await settled(server.url)
    tally.wrong += memory.faults()
    found = report(tally, memory, args.warm_up + args.seconds)
    print(json.dumps(found, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2), encoding="utf-8")
    console.print("FAIL" if tally.wrong else "PASS")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=90.0, help="Seconds of load before memory is sampled.")
    parser.add_argument("--json", help="Write the numbers there.")
    sys.exit(asyncio.run(_main(parser.parse_args())))
