"""Attack a server of the embedded model in every way that it must withstand, and print what its other clients notice.

    python benchmarks/attack.py
    python benchmarks/attack.py --only answers grammars
    python benchmarks/attack.py --only embeddings scores --rounds 5

Each attack has its own server, which this script starts and stops. Everything is sent to 127.0.0.1. Ten innocent clients
with a key of their own send short prompts, first in peace and then while the attacker, whose address is 127.0.0.2, does its
worst for at most ``--seconds``, ``--rounds`` times in turns. Attacks on connections have no key; the others have the key of a tenant without limits.

A row shows the innocents' times to the first token of all rounds (p50, p99 and the longest, in peace and under attack), their
failed requests, the slowest answer of /health on a new connection, and the resident memory of the server's front before,
at most and after.
The exit status is 1 if a row breaks the promise of docs/reliability.md: no failed request of an innocent client, a p99 of at
most twice that in peace, and memory that returns to within 50 MiB of its level.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from dovetail.bench.client.connections import ConnectionPool
from dovetail.config.tenants import key_digest
from dovetail.server.tenants.keys import new_key

CLIENTS = 10
DESCRIPTORS = 1024
HOST, ATTACKER = "127.0.0.1", "127.0.0.2"
KEYS = {name: new_key() for name in ("innocent", "attacker", "ops")}
_REST_SECONDS = 11.0
"""The seconds before a measurement in peace: the server warms up, or forgets that it had several tenants."""

HEAD = f"host: {HOST}\r\ncontent-type: application/json\r\n"


# attacks: each sends until it is done or cancelled


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(HOST, port, local_addr=(ATTACKER, 0))


async def _post(port: int, path: str, body: bytes, key: str) -> None:
    """Send a request and discard its answer as it arrives."""
    reader, writer = await _connect(port)
    head = f"POST {path} HTTP/1.1\r\n{HEAD}authorization: Bearer {key}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    with contextlib.suppress(ConnectionError):
        writer.write(head.encode() + body)
        await writer.drain()
        while await reader.read(1 << 20):
            pass
    writer.close()


async def _at_once(port: int, path: str, body: object, key: str, count: int = 8) -> None:
    data = json.dumps(body).encode()
    await asyncio.gather(*(_post(port, path, data, key) for _ in range(count)))


async def pipelined(port: int, key: str) -> None:
    """Send 25 MiB of requests on one connection without reading an answer."""
    _, writer = await _connect(port)
    one = f"GET /v1/models HTTP/1.1\r\nhost: {HOST}\r\n\r\n".encode()
    block = one * (65536 // len(one))
    with contextlib.suppress(ConnectionError):
        for _ in range(25 * 2**20 // len(block)):
            writer.write(block)
            await writer.drain()
    await asyncio.sleep(3)


async def headers(port: int, key: str) -> None:
    """Keep 1,500 connections with half a header, and open those again that are closed."""

    async def keep() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await _connect(port)
                writer.write(b"GET /health HTTP/1.1\r\nhost: lo")
                await reader.read()
                writer.close()
            await asyncio.sleep(1)

    await asyncio.gather(*(keep() for _ in range(1500)))


async def bodies(port: int, key: str) -> None:
    """Send 400 bodies, a byte a second."""

    async def slow() -> None:
        with contextlib.suppress(OSError):
            _, writer = await _connect(port)
            writer.write(f"POST /v1/completions HTTP/1.1\r\n{HEAD}content-length: 100000\r\n\r\n".encode())
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(1)

    await asyncio.gather(*(slow() for _ in range(400)))


async def calls(port: int, key: str) -> None:
    """Send 8 chats with 60,000 tool calls each."""
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call] * 60_000},
    ]
    await _at_once(port, "/v1/chat/completions", {"messages": messages}, key)


async def embeddings(port: int, key: str) -> None:
    """Send 8 requests for the embeddings of 8,000 texts."""
    await _at_once(port, "/v1/embeddings", {"input": [f"text {i} of many" for i in range(8000)]}, key)


async def scores(port: int, key: str) -> None:
    """Send 8 requests for the scores of 8,000 texts."""
    body = {"query": "a", "items": [f"text {i}" for i in range(8000)], "label_token_ids": [5, 6]}
    await _at_once(port, "/v1/score", body, key)


async def grammars(port: int, key: str) -> None:
    """Send 24 constraints that take seconds to compile."""

    def body(i: int) -> bytes:
        regex = f"[ab]*a[ab]{{{12 + i % 4}}}x{i}" + "".join(f"(c{j}|d{{1,{50 + i}}}){{1,40}}" for j in range(4))
        return json.dumps({"prompt": "a", "max_tokens": 4, "regex": regex}).encode()

    await asyncio.gather(*(_post(port, "/v1/completions", body(i), key) for i in range(24)))


async def answers(port: int, key: str) -> None:
    """Ask with 10 KiB for an answer of 718 MiB."""
    params = {"max_new_tokens": 1, "n": 128}
    body = {"input_ids": [5 + i % 100 for i in range(1900)], "sampling_params": params, "return_logprob": True}
    await _at_once(port, "/generate", body | {"logprob_start_len": 0, "top_logprobs_num": 100}, key, 1)


ATTACKS: dict[str, Callable[[int, str], Awaitable[None]]] = {
    one.__name__: one for one in (pipelined, headers, bodies, calls, embeddings, scores, grammars, answers)
}


def run_attacks(name: str, port: int, key: str, seconds: float, rounds: int, begin: Event, ended: Event) -> None:
    """Run an attack in a process of its own, ``rounds`` times: from ``begin`` on, for at most ``seconds``. Sets ``ended``
    after each."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))

    async def bounded() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await ATTACKS[name](port, key)

    for _ in range(rounds):
        begin.wait()
        begin.clear()
        asyncio.run(bounded())
        ended.set()


# the innocent clients


@dataclass
class Seen:
    """Hold what the innocent clients have seen: seconds to the first token, errors, and the slowest /health."""

    ttft: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    health: float = 0.0

    def add(self, other: Seen) -> None:
        """Add what was seen in another round."""
        self.ttft += other.ttft
        self.errors += other.errors
        self.health = max(self.health, other.health)

    @property
    def row(self) -> str:
        """Return p50, p99 and the longest time to the first token in milliseconds."""
        return " / ".join(f"{self.quantile(q):.0f}" for q in (0.5, 0.99, 1))

    def quantile(self, q: float) -> float:
        """Return a quantile of the times to the first token in milliseconds."""
        return float(np.quantile(self.ttft, q)) * 1000 if self.ttft else float("nan")


class Innocents:
    """Send short prompts from ten clients until ``stop``."""

    def __init__(self, port: int, constrained: bool) -> None:
        self.seen = Seen()
        self._port = port
        self._constrained = constrained
        self._random = random.Random(0)

    async def run(self, until: Callable[[], bool]) -> Seen:
        """Send requests until ``until()``."""
        await asyncio.gather(*(self._client(until) for _ in range(CLIENTS)), self._health(until))
        return self.seen

    async def _client(self, until: Callable[[], bool]) -> None:
        pool = ConnectionPool(f"http://{HOST}:{self._port}", 60, {"authorization": f"Bearer {KEYS['innocent']}"})
        while not until():
            await asyncio.sleep(self._random.uniform(0.2, 0.6))
            await self._ask(pool)
        pool.close()

    async def _ask(self, pool: ConnectionPool) -> None:
        params: dict[str, object] = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        if self._constrained:
            params["regex"] = f"[a-z]{{1,20}}{self._random.randrange(10**9)}"
        ids = [self._random.randrange(8, 256) for _ in range(64)]
        body = json.dumps({"input_ids": ids, "sampling_params": params, "stream": True}).encode()
        arrivals: list[float] = []
        began = time.perf_counter()
        try:
            reply = await pool.post("/generate", body, lambda _: arrivals.append(time.perf_counter()))
        except OSError as error:
            self.seen.errors.append(type(error).__name__)
            return
        if reply.status == 200 and arrivals:
            self.seen.ttft.append(arrivals[0] - began)
        else:
            self.seen.errors.append(str(reply.status))

    async def _health(self, until: Callable[[], bool]) -> None:
        while not until():
            began = time.perf_counter()
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(HOST, self._port)
                writer.write(f"GET /health HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n\r\n".encode())
                if not (await reader.read()).startswith(b"HTTP/1.1 200"):
                    self.seen.errors.append("health")
                writer.close()
            self.seen.health = max(self.seen.health, time.perf_counter() - began)
            await asyncio.sleep(0.25)


# the server


@contextlib.contextmanager
def server() -> Iterator[tuple[int, int]]:
    """Run a server with 1,024 descriptors. Yields its port and the id of its front process."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port = taken.getsockname()[1]
    tenants = {name: {"keys": [key_digest(KEYS[name].encode())]} for name in ("innocent", "attacker")}
    keys = json.dumps({"tenants": tenants, "admins": {"ops": {"keys": [key_digest(KEYS["ops"].encode())]}}})
    sets = ("model=tiny", "threads=1", f"server.port={port}", "server.keys=env:BENCH_KEYS", "server.log_level=error")
    command = [str(Path(sys.executable).with_name("dovetail")), "serve"]
    command += [word for one in sets for word in ("--set", one)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "BENCH_KEYS": keys},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
    )
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
                break
            if process.poll() is not None:
                sys.exit(f"the server ended with status {process.returncode}")
            time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


class Memory:
    """Sample the resident memory of a process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak = 0.0

    def now(self) -> float:
        """Return MiB."""
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return float("nan")

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note the peak meanwhile."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                self.peak = max(self.peak, self.now())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def measure(name: str, calm_seconds: float, seconds: float, rounds: int) -> tuple[str, bool]:
    """Run one attack. Return its row of the table, and whether the promise was kept."""
    calm, seen = Seen(), Seen()
    with server() as (port, pid):
        spawn = multiprocessing.get_context("spawn")
        begin, ended = spawn.Event(), spawn.Event()
        args = (name, port, KEYS["attacker"], seconds, rounds, begin, ended)
        attack = spawn.Process(target=run_attacks, args=args, daemon=True)
        attack.start()  # its start is no part of the attack

        def innocents(until: Callable[[], bool]) -> Seen:
            return asyncio.run(Innocents(port, name == "grammars").run(until))

        memory = Memory(pid)
        before = float("nan")
        for i in range(rounds):
            innocents(_after(_REST_SECONDS))
            calm.add(innocents(_after(calm_seconds)))
            before = before if i else memory.now()
            with memory.watched():
                begin.set()
                earliest = time.monotonic() + 5
                seen.add(innocents(lambda: time.monotonic() > earliest and ended.is_set()))  # noqa: B023
            ended.clear()
        attack.join()
        time.sleep(5)
        after = memory.now()
    errors = sorted(set(seen.errors))
    quick = seen.quantile(0.99) <= 2 * calm.quantile(0.99)
    kept = not errors and quick and after <= before + 50
    row = (
        f"| {name} | {calm.row} | {seen.row} "
        f"| {len(seen.errors)} of {len(seen.ttft) + len(seen.errors)} {' '.join(errors)} | {seen.health * 1000:.0f} "
        f"| {before:.0f} / {memory.peak:.0f} / {after:.0f} |"
    )
    return row, kept


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def main() -> None:
    """Run the attacks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), help="attacks to run")
    parser.add_argument("--calm", type=float, default=8.0, help="seconds of measurement in peace")
    parser.add_argument(
        "--rounds", type=int, default=1, help="measurements of each attack; with several, p99 is not one request"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="the longest duration of an attack")
    args = parser.parse_args()
    print(
        "| attack | TTFT in peace, p50 / p99 / longest ms | under attack | failed | /health ms | front MiB before / peak / after |"
    )
    print("|---|---|---|---|---|---|")
    broken: list[str] = []
    for name in args.only:
        row, kept = measure(name, args.calm, args.seconds, args.rounds)
        print(row, flush=True)
        broken += [] if kept else [name]
    print(f"FAIL: {', '.join(broken)}" if broken else "PASS")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
