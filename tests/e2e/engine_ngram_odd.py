"""Run an engine process whose drafter fails in every other call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dovetail.config import Config
from dovetail.server.client import Endpoints
from dovetail.server.engine_process import open_loop, serve_loop


@contextmanager
def open_odd_loop(config: Config) -> Iterator[object]:
    with open_loop(config) as loop:
        propose, calls = loop.executor.rank.drafter.propose, 0

        def odd(batch):
            nonlocal calls
            calls += 1
            if calls % 2:
                raise LookupError("odd")
            return propose(batch)

        loop.executor.rank.drafter.propose = odd
        yield loop


def run_odd_engine(config: Config, endpoints: Endpoints) -> None:
    """Run the process."""
    serve_loop(lambda: open_odd_loop(config), endpoints, config.server.log_level)
