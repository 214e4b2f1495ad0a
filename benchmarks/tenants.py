"""Check whether the tenants of a server disturb each other or learn of each other, on the embedded model and a server
started for it.

    python benchmarks/tenants.py timing --trials 200
    python benchmarks/tenants.py flood --rounds 6

``timing``: one tenant sends a prompt; another tenant then sends either the same prompt or a new one. A
Kolmogorov-Smirnov test decides whether the second tenant could recognise the difference by its times to the first
token. It must not (p > 0.05) if each tenant has its own salt, and it must if they share one (p < 0.001), because
otherwise the test would prove nothing.

``flood``: one tenant sends a request from time to time. Another sends as fast as it can over many connections, and does
not wait when it is refused. The p99 of the first tenant's times to the first token must not be more than twice its
value without the flood while the limits restrict the other tenant. Without limits it must be, because otherwise the
test would prove nothing. This must hold for the p99 of all requests, and for the median of the rounds' p99, on which a
short disturbance of the machine has less effect.

Rounds alternate, so that other work of the machine affects all arms. All tenants have the same priority. The
measurements are printed, then the verdict as the last line; the exit status is 1 if it is FAIL.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np
from scipy.stats import ks_2samp

from dovetail.bench.client.connections import ConnectionPool
from dovetail.config.tenants import key_digest
from dovetail.server.tenants.keys import new_key

VOCAB = 256
"""The token ids below this number are in every vocabulary."""

KEYS = {name: new_key() for name in ("victim", "spy", "friend", "partner", "quiet", "held", "free", "ops")}
LIMITS: dict[str, dict[str, object]] = {
    "friend": {"salt": "both"},
    "partner": {"salt": "both"},
    "held": {"requests_per_minute": 30, "tokens_per_minute": 30_000, "max_concurrency": 1},
}
FLOOD = {"clients": 32, "prompt": 512, "output": 32}


def key_file() -> dict[str, object]:
    """Return the key file of the server."""
    keys = {name: [key_digest(key.encode())] for name, key in KEYS.items()}
    tenants = {name: {"keys": keys[name], **LIMITS.get(name, {})} for name in KEYS if name != "ops"}
    return {"tenants": tenants, "admins": {"ops": {"keys": keys["ops"]}}}


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Run a server in separate processes and yield its URL."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    sets = ("model=tiny", "threads=1", f"server.port={port}", "server.keys=env:BENCH_KEYS", "server.log_level=warning")
    command = [
        str(Path(sys.executable).with_name("dovetail")),
        "serve",
        *(word for one in sets for word in ("--set", one)),
    ]
    process = subprocess.Popen(command, env={**os.environ, "BENCH_KEYS": json.dumps(key_file())})
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            if process.poll() is not None:
                sys.exit(f"the server ended with status {process.returncode}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


class Caller:
    """Send the requests of one tenant to /generate."""

    def __init__(self, url: str, key: str) -> None:
        self.pool = ConnectionPool(url, 60, {"authorization": f"Bearer {key}"})

    async def ask(self, ids: Sequence[int], tokens: int = 1) -> tuple[int, float]:
        """Return the status, and the seconds to the first token."""
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": list(ids), "sampling_params": params, "stream": True}).encode()
        arrivals: list[float] = []
        began = time.perf_counter()
        reply = await self.pool.post("/generate", body, lambda _: arrivals.append(time.perf_counter()))
        return reply.status, arrivals[0] - began if arrivals else 0.0


def random_ids(source: random.Random, count: int) -> list[int]:
    """Return a prompt that no tenant has sent before."""
    return [source.randrange(8, VOCAB) for _ in range(count)]


# timing


@dataclass(frozen=True)
class Timing:
    """Hold the seconds to the first token of prompts that the other tenant had sent, and of new prompts."""

    sent: list[float]
    cold: list[float]

    @property
    def p(self) -> float:
        """Return the p-value of the two-sample Kolmogorov-Smirnov test: the probability of such a difference if
        there is none."""
        return float(ks_2samp(self.sent, self.cold).pvalue)


async def timing(url: str, keys: tuple[str, str], trials: int, length: int, seed: int) -> Timing:
    """Time ``trials`` prompts of either kind, in random order. ``keys`` are those of the tenant that sends first and
    of the tenant that measures."""
    source = random.Random(seed)
    first, spy = (Caller(url, key) for key in keys)
    times: dict[bool, list[float]] = {True: [], False: []}
    order = [True, False] * trials
    source.shuffle(order)
    for warm in (True, False, *order):
        prompt, other = random_ids(source, length), random_ids(source, length)
        await first.ask(prompt if warm else other)
        times[warm].append((await spy.ask(prompt))[1])
    for caller in (first, spy):
        caller.pool.close()
    return Timing(times[True][1:], times[False][1:])


def run_timing(options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    """Run with separate salts, then with a common one."""
    results = {}
    with server() as url:
        for name, pair in (("own salts", ("victim", "spy")), ("a common salt", ("friend", "partner"))):
            keys = (KEYS[pair[0]], KEYS[pair[1]])
            results[name] = found = asyncio.run(timing(url, keys, options.trials, options.length, options.seed))
            medians = [1e3 * float(np.median(times)) for times in (found.sent, found.cold)]
            print(
                f"{name}: median {medians[0]:.2f} ms where the other had sent it, {medians[1]:.2f} ms cold; p = {found.p:.3g}"
            )
    ok = results["own salts"].p > 0.05 and results["a common salt"].p < 0.001
    return {name: {"p": found.p, **asdict(found)} for name, found in results.items()}, ok


# flood


async def flood(url: str, key: str, clients: int, prompt: int, output: int) -> None:
    """Send as many requests as possible until this process is ended. A refused client tries again at once."""
    source = random.Random()

    async def one() -> None:
        caller, ids, status = Caller(url, key), [8], 200
        while True:
            if status == 200:  # a refused prompt is sent again, so that its sender takes little of this machine's time
                ids = random_ids(source, prompt)
            status, _ = await caller.ask(ids, output)

    await asyncio.gather(*(one() for _ in range(clients)))


@contextlib.contextmanager
def flooding(url: str, key: str) -> Iterator[None]:
    """Run another tenant that sends as fast as it can, in a separate process."""
    command = [sys.executable, __file__, "flooder", url, *map(str, FLOOD.values())]
    process = subprocess.Popen(command, env={**os.environ, "FLOOD_KEY": key}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        time.sleep(1)
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def quiet(url: str, key: str, requests: int, gap: float, length: int, source: random.Random) -> list[float]:
    """Return the seconds to the first token of requests at random times, ``gap`` seconds apart on average."""
    caller = Caller(url, key)

    async def one() -> float:
        status, seconds = await caller.ask(random_ids(source, length), 4)
        assert status == 200
        return seconds

    running = []
    for _ in range(requests):
        await asyncio.sleep(source.expovariate(1 / gap))
        running.append(asyncio.ensure_future(one()))
    times = list(await asyncio.gather(*running))
    caller.pool.close()
    return times


def measure_flood(url: str, flooder: str | None, options: argparse.Namespace, source: random.Random) -> list[float]:
    """Run one round."""
    with flooding(url, KEYS[flooder]) if flooder else contextlib.nullcontext():
        return asyncio.run(quiet(url, KEYS["quiet"], options.requests, options.gap, options.length, source))


def run_flood(options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    """Run alone, with a flood under limits, and with a flood without limits, in turns."""
    source = random.Random(options.seed)
    times: dict[str, list[list[float]]] = {"alone": [], "held": [], "free": []}
    with server() as url:
        measure_flood(url, None, options, source)  # warm up
        for _ in range(options.rounds):
            for name, rounds in times.items():
                rounds.append(measure_flood(url, None if name == "alone" else name, options, source))
        refused = httpx.get(f"{url}/metrics", headers={"x-api-key": KEYS["ops"]}).text
    print("\n".join(line for line in refused.splitlines() if line.startswith("dovetail_tenant") and "held" in line))
    every = {name: [seconds for one in rounds for seconds in one] for name, rounds in times.items()}
    of_all = {name: p99_ms(one) for name, one in every.items()}
    of_rounds = {name: float(np.median([p99_ms(one) for one in rounds])) for name, rounds in times.items()}
    for name, one in every.items():
        print(
            f"{name}: {len(one)} requests, median {1e3 * np.median(one):.1f} ms, "
            f"p99 {of_all[name]:.1f} ms ({of_all[name] / of_all['alone']:.2f} x alone), "
            f"of a round {of_rounds[name]:.1f} ms ({of_rounds[name] / of_rounds['alone']:.2f} x alone)"
        )
    ok = all(p99["held"] <= 2 * p99["alone"] < p99["free"] for p99 in (of_all, of_rounds))
    return {"p99_ms": of_all, "p99_of_a_round_ms": of_rounds, "seconds": times}, ok


def p99_ms(seconds: Sequence[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return 1e3 * float(np.quantile(seconds, 0.99))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("timing", "flood"):
        command = commands.add_parser(name)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--length", type=int, default=512 if name == "timing" else 256, help="tokens of a prompt")
        command.add_argument("--json", type=Path, help="write all times there")
    commands.choices["timing"].add_argument("--trials", type=int, default=200, help="of either kind")
    commands.choices["flood"].add_argument("--rounds", type=int, default=6)
    commands.choices["flood"].add_argument("--requests", type=int, default=100, help="a round")
    commands.choices["flood"].add_argument("--gap", type=float, default=0.4, help="seconds between two, on average")
    hidden = commands.add_parser("flooder")
    for name in ("url", *FLOOD):
        hidden.add_argument(name, type=str if name == "url" else int)
    options = parser.parse_args()
    if options.command == "flooder":
        print("ready", flush=True)
        asyncio.run(flood(options.url, os.environ["FLOOD_KEY"], options.clients, options.prompt, options.output))
    found, ok = run_timing(options) if options.command == "timing" else run_flood(options)
    if options.json:
        options.json.write_text(json.dumps(found))
    print("PASS" if ok else "FAIL")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
