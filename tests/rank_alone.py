"""Stand in for the collectives of two ranks, and build the engine of one of them, in tests of what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dovetail.engine.engine import Engine
from dovetail.interfaces.mesh import Mesh, OneRank
from dovetail.registry.machine import Machine
from dovetail.registry.resolver import resolve
from dovetail.registry.setup import setup

ROWS = 16


class Alone(OneRank):
    """Compute as one of two ranks, of which the other adds nothing."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_gather(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        return torch.cat([x, x], 1)[:, :width].contiguous()


def build_engine(
    checkpoint: Path, rank: int, num_pages: int, load_format: str = "safetensors", speculative: Any = "none"
) -> Engine:
    """Return the engine of one of two ranks with data-parallel attention, on the CPU. It runs up to ``ROWS`` requests and has pages of four
    tokens."""
    arguments = {
        "model": {"path": str(checkpoint), "dtype": "float32", "load_format": load_format},
        "parallel": {"tp": 2, "attention": "data"},
        "scheduler": {"max_running": ROWS},
        "memory": {"num_pages": num_pages, "page_size": 4},
        "speculative": speculative,
        "grammar": "none",
        "device": "cpu",
    }
    config, registry = setup((), arguments=arguments)
    return Engine(resolve(config, registry, Machine.detect("cpu")), frozenset(), Mesh(Alone(rank), attention="data"))
