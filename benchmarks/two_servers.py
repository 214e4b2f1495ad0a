"""Measure whether two servers on the same processors slow each other down more than they must.

It prints the tokens per second of a server alone, and of two servers at the same time.

    python benchmarks/two_servers.py MODEL [--rounds 5] [--tokens 64] [--set KEY=VALUE]... [--env NAME=VALUE]...

Each server has one greedy request at a time. Rounds alternate between the first server alone, the second alone, and both. ``--set threads=2`` in a second run shows what servers do
that do not adapt their threads, and ``--env OMP_WAIT_POLICY=active`` or ``--env GOMP_SPINCOUNT=300000`` (OpenMP's default) the effect of the engine's own
setting.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx

DOVETAIL = Path(sys.executable).with_name("dovetail")
PROMPT = "Once upon a time, there was a lighthouse on a rock in the sea, and in it lived"


class Server:
    """Hold a server that was started for the measurement."""

    def __init__(self, args: argparse.Namespace) -> None:
        settings = [part for value in args.sets for part in ("--set", value)]
        command = [DOVETAIL, "serve", args.model, "--port", "0", *settings]
        env = {**os.environ, **dict(pair.split("=", 1) for pair in args.env)}
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self._client, self._tokens = self._connect(), args.tokens

    def _connect(self) -> httpx.Client:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"on (http://127\.0\.0\.1:\d+), ready", line):
                threading.Thread(target=self._process.stderr.read, daemon=True).start()
                return httpx.Client(base_url=found[1], timeout=600)
        raise SystemExit("a server did not start")

    def rate(self) -> float:
        """Return the tokens per second of one request."""
        body = {
            "text": PROMPT,
            "sampling_params": {"temperature": 0, "max_new_tokens": self._tokens, "ignore_eos": True},
        }
        start = time.perf_counter()
        self._client.post("/generate", json=body).raise_for_status()
        return self._tokens / (time.perf_counter() - start)

    def close(self) -> None:
        """End the server."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


def together(servers: list[Server]) -> list[float]:
    """Return the rates of servers that generate at the same time."""
    with ThreadPoolExecutor(len(servers)) as pool:
        return list(pool.map(Server.rate, servers))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("model")
    add("--rounds", type=int, default=5)
    add("--tokens", type=int, default=64)
    add("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    add("--env", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    with ExitStack() as stack:
        servers = [Server(args) for _ in range(2)]
        for server in servers:
            stack.callback(server.close)
            server.rate()
        alone: list[float] = []
        both: list[float] = []
        for _ in range(args.rounds):
            alone += [server.rate() for server in servers]
            both += together(servers)
    one, each = statistics.median(alone), statistics.median(both)
    print(f"alone {one:.1f} tok/s, side by side {each:.1f} tok/s each: {each / one:.2f} of one alone")
    print(f"alone {[round(rate, 1) for rate in alone]}, side by side {[round(rate, 1) for rate in both]}")


if __name__ == "__main__":
    main()
