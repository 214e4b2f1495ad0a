"""Measure whether two servers on the same processors slow each other down more than they must.

It prints the tokens per second of a server alone, and of two servers at the same time.

    python benchmarks/two_servers.py MODEL [--rounds 5] [--tokens 64] [--requests 1] [--busy 0]
        [--set KEY=VALUE]... [--env NAME=VALUE]... [--also KEY=VALUE]...

Each server has ``--requests`` greedy requests at a time. Rounds alternate between the first server alone, the second alone, and both. With ``--busy N`` there is one server, which
generates alone and next to N other processes that are always busy. ``--also threads=2`` starts as many more servers with this setting, which do not adapt their threads, and the
servers with and without it take turns. ``--env OMP_WAIT_POLICY=active`` or ``--env GOMP_SPINCOUNT=300000`` (OpenMP's default) shows the effect of the engine's own setting.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

DOVETAIL = Path(sys.executable).with_name("dovetail")
PROMPT = "Once upon a time, there was a lighthouse on a rock in the sea, and in it lived"


class Server:
    """Hold a server that was started for the measurement with ``sets`` (``KEY=VALUE``)."""

    def __init__(self, args: argparse.Namespace, sets: list[str]) -> None:
        settings = [part for value in sets for part in ("--set", value)]
        command = [DOVETAIL, "serve", args.model, "--port", "0", *settings]
        env = {**os.environ, **dict(pair.split("=", 1) for pair in args.env)}
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self._client, self._tokens, self._requests = self._connect(), args.tokens, args.requests

    def _connect(self) -> httpx.Client:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"on (http://127\.0\.0\.1:\d+), ready", line):
                threading.Thread(target=self._process.stderr.read, daemon=True).start()
                return httpx.Client(base_url=found[1], timeout=600)
        raise SystemExit("a server did not start")

    def rate(self) -> float:
        """Return the tokens per second of all requests together."""
        body = {
            "text": [f"{number} {PROMPT}" for number in range(self._requests)] if self._requests > 1 else PROMPT,
            "sampling_params": {"temperature": 0, "max_new_tokens": self._tokens, "ignore_eos": True},
        }
        start = time.perf_counter()
        self._client.post("/generate", json=body).raise_for_status()
        return self._requests * self._tokens / (time.perf_counter() - start)

    def close(self) -> None:
        """End the server."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


class Arm:
    """Hold servers with the same settings, those of ``--set`` and ``also``, and their rates."""

    def __init__(self, args: argparse.Namespace, also: list[str], stack: ExitStack) -> None:
        self._name, self._busy = f"with {' '.join(also)}: " if also else "", args.busy
        self.servers = [Server(args, [*args.sets, *also]) for _ in range(1 if args.busy else 2)]
        for server in self.servers:
            stack.callback(server.close)
            server.rate()
        self._alone: list[float] = []
        self._beside: list[float] = []

    def measure_alone(self) -> None:
        """Measure each server while the others have no work."""
        self._alone += [server.rate() for server in self.servers]

    def measure_beside(self) -> None:
        """Measure all servers at the same time, next to the busy processes."""
        with busy(self._busy), ThreadPoolExecutor(len(self.servers)) as pool:
            self._beside += pool.map(Server.rate, self.servers)

    def report(self) -> None:
        """Print medians and all rates."""
        one, each = statistics.median(self._alone), statistics.median(self._beside)
        beside = f"next to {self._busy} busy" if self._busy else "side by side"
        print(f"{self._name}alone {one:.1f} tok/s, {beside} {each:.1f} tok/s each: {each / one:.2f} of one alone")
        print(
            f"  alone {[round(rate, 1) for rate in self._alone]}, {beside} {[round(rate, 1) for rate in self._beside]}"
        )


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Keep ``number`` processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("model")
    add("--rounds", type=int, default=5)
    add("--tokens", type=int, default=64)
    add("--requests", type=int, default=1)
    add("--busy", type=int, default=0)
    add("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    add("--also", action="append", default=[], metavar="KEY=VALUE")
    add("--env", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    with ExitStack() as stack:
        arms = [Arm(args, also, stack) for also in ([[], args.also] if args.also else [[]])]
        for _ in range(args.rounds):
            for arm in arms:
                arm.measure_alone()
            for arm in arms:
                arm.measure_beside()
    for arm in arms:
        arm.report()


if __name__ == "__main__":
    main()
