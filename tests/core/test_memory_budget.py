"""Test how the memory of a device is divided, on an invented device.

Run: python -m pytest tests/core/test_memory_budget.py
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from dovetail.config import Config, MemorySection, ModelSection, SchedulerSection
from dovetail.engine.memory import Budget, Needs, agreed_budget, budget_for, measure_peak, module_bytes, with_arena
from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.mesh import Mesh
from dovetail.interfaces.mixer_shapes import StateShape
from dovetail.interfaces.store import PageBytes
from dovetail.memory.arena import ArenaAllocator
from dovetail.memory.pool import bytes_per_page, plain_page_bytes
from dovetail.memory.state_pool import bytes_per_slot
from dovetail.testing.ranks import run_ranks, thread_meshes

GIB = 1 << 30
GROUP = CacheGroup(32, 8, 128)  # 128 KiB a token in bfloat16
TOKEN = 2 * 32 * 8 * 128 * 2
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
NEEDS = Needs(weights=15 * GIB, activations=GIB, tokens=8192, graphs=2 * GIB)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invent a device of 140 GiB, of which 120 are free once 15 GiB of weights are loaded."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (120 * GIB, 140 * GIB))


def divide(
    needs: Needs = NEEDS, device: torch.device = GPU, rows: int = 256, context: int = 100_000, **memory: object
) -> Budget:
    config = Config(scheduler=SchedulerSection(max_running=rows, chunk_size=8192), memory=MemorySection(**memory))  # type: ignore[arg-type]
    return budget_for(
        config, (plain_page_bytes(GROUP, config.memory.page_size, torch.bfloat16),), device, context, needs
    )


def test_the_pool_gets_what_the_fraction_leaves_after_everything_else() -> None:
    budget = divide(fraction=0.9)
    expected = 120 * GIB - GIB - 2 * GIB - 14 * GIB
    page = bytes_per_page(GROUP, 16, torch.bfloat16)
    assert page == 16 * TOKEN
    assert 0 <= expected - budget.pool < 2 * page
    assert budget.num_pages * page == budget.pool
    assert budget.pool_tokens == (budget.num_pages - 1) * 16
    assert budget.pool + budget.free + NEEDS.activations + NEEDS.graphs == 120 * GIB


def test_a_larger_peak_makes_a_smaller_pool() -> None:
    sizes = [divide(Needs(activations=n * GIB)).pool for n in (0, 3)]
    assert sizes[0] - sizes[1] == pytest.approx(3 * GIB, abs=16 * TOKEN)


def test_the_pool_is_no_larger_than_all_requests_can_fill() -> None:
    budget = divide(rows=2, context=1000)
    assert budget.pool_tokens == 2 * (63 + 1) * 16
    assert budget.free > 100 * GIB


STATES = CacheGroup.of_states(36, (StateShape((8192, 3)), StateShape((32, 128, 128), "float32")))


@pytest.mark.parametrize("groups", [(GROUP, STATES), (STATES,), (STATES, STATES)])
def test_states_get_slots_for_all_requests_and_more_for_snapshots(groups: tuple[CacheGroup, ...]) -> None:
    slot, kinds = bytes_per_slot(STATES, torch.bfloat16), [group.kind for group in groups]
    for memory in ({}, {"num_pages": 700}, {"kv_gib": 40}):
        config = Config(
            model=ModelSection(dtype="bfloat16"),
            scheduler=SchedulerSection(max_running=40),
            memory=MemorySection(**memory),  # type: ignore[arg-type]
        )
        sizes = [
            plain_page_bytes(group, 16, torch.bfloat16) if group is GROUP else PageBytes(slot, 0) for group in groups
        ]
        budget = with_arena(budget_for(config, sizes, GPU, 100_000, NEEDS), config, sizes)
        layout = budget.arena
        assert layout is not None
        assert layout.states == tuple(at for at, kind in enumerate(kinds) if kind == "state")
        assert all(layout.slab_bytes // layout.blocks[at] >= slot for at in layout.states)
        allocator = ArenaAllocator(layout)
        assert all(allocator.alloc_slots() is not None for _ in range(40))
        if len(groups) == 1:
            assert budget.pool_tokens == 0
            assert budget.num_pages - 1 == layout.columns >= (699 if memory.get("num_pages") else 2 * 40)
        elif groups[0] is GROUP:
            assert budget.num_pages >= 700
        assert budget.pool == layout.num_slabs * layout.slab_bytes
        assert budget.pool + budget.free <= 120 * GIB - 3 * GIB


def test_what_was_asked_for_is_given() -> None:
    assert divide(num_pages=77).num_pages == 77
    assert divide(kv_gib=8).pool == 8 * GIB
    assert divide(kv_gib=8, page_size=64).num_pages == 8 * GIB // (64 * TOKEN)


@pytest.mark.parametrize("where", [CPU, GPU])
def test_ranks_have_as_many_pages_as_the_rank_with_the_least_memory(where: torch.device) -> None:
    meshes = thread_meshes(3)
    kib = [300_000, 100_000, 200_000]
    own = [divide(device=where, kv_gib=n / 2**20) for n in kib]
    budgets = run_ranks(
        meshes, lambda pair: agreed_budget(lambda: pair[1], pair[0]), list(zip(meshes, own, strict=True))
    )
    assert [budget.num_pages for budget in budgets] == [own[1].num_pages] * 3
    assert budgets[1] == own[1]
    for budget, before in zip(budgets, own, strict=True):
        assert (budget.pool, budget.pool_tokens) == (own[1].pool, own[1].pool_tokens)
        assert budget.pool + budget.free == (before.pool + before.free if before.total else budget.pool)


def test_a_rank_without_enough_memory_stops_all() -> None:
    meshes = thread_meshes(2)

    def run(mesh: Mesh) -> str:
        try:
            agreed_budget(lambda: divide(kv_gib=1e-6 if mesh.tp.rank else 1.0), mesh)
        except ConfigError as error:
            return str(error)
        return "no error"

    found = run_ranks(meshes, run, meshes)
    assert found[0].startswith("the memory of another rank does not suffice")
    assert "memory.kv_gib (1e-06)" in found[1]


def test_a_cpu_has_a_gibibyte() -> None:
    budget = divide(device=CPU, needs=Needs(weights=5))
    assert (budget.pool, budget.total, budget.free) == (GIB, 0, 0)
    assert "left free" not in str(budget)
    assert divide(device=CPU, num_pages=10**9).num_pages == 10**9


@pytest.mark.parametrize(
    ("given", "needs", "parts"),
    [
        (
            {"kv_gib": 118},
            NEEDS,
            ("memory.kv_gib is 118", "120.0 GiB are free", "lower it", "scheduler.chunk_size (8192)"),
        ),
        ({"num_pages": 80_000}, NEEDS, ("memory.num_pages is 80000", "156.25 GiB")),
        ({"kv_gib": 0.001}, NEEDS, ("raise memory.kv_gib (0.001)", "memory.page_size")),
        ({}, Needs(15 * GIB, 110 * GIB, 8192), ("110.0 GiB (measured with 8192 tokens)", "memory.fraction (0.88)")),
        (
            {"fraction": 0.1},
            NEEDS,
            ("is 0.00 GiB", "raise memory.fraction (0.1)", "graphs.max_rows", "5.0 GiB in use by"),
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(
    given: dict[str, float], needs: Needs, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        divide(needs, **given)
    for part in parts:
        assert part in str(caught.value)


def test_the_line_and_the_json_say_the_same() -> None:
    budget = divide(fraction=0.9)
    line, found = str(budget), budget.to_json()
    expected = (
        r"memory: weights 15\.0 GiB, activations 1\.0 GiB \(measured with 8192 tokens\), graphs 2\.0 GiB reserved, "
        r"KV pool 103\.0 GiB = 843,\d{3} tokens, 14\.0 GiB left free"
    )
    assert re.fullmatch(expected, line), line
    assert found == {
        "total_bytes": 140 * GIB,
        "weights_bytes": 15 * GIB,
        "activations_bytes": GIB,
        "graphs_bytes": 2 * GIB,
        "measured_tokens": 8192,
        "kv_pool_bytes": budget.pool,
        "kv_pool_tokens": budget.pool_tokens,
        "free_bytes": budget.free,
    }
    assert "not measured" in str(divide(Needs()))


def test_modules_count_shared_parameters_once() -> None:
    a, b = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
    both = nn.ModuleList((a, b))
    assert module_bytes(both) == 2 * 15 * 4
    b.weight = a.weight
    assert module_bytes(both) == 15 * 4
    both.register_buffer("table", torch.zeros(7))
    assert module_bytes(both) == 15 * 4 + 28


def test_on_a_cpu_nothing_is_measured() -> None:
    assert measure_peak(lambda: pytest.fail("it ran"), CPU) == 0


class Allocator:
    """Stand in for torch's statistics of a device that reserves 20 at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated, self.reserved, self.peaks = 30, 40, (0, 0)
        names = {
            "memory_allocated": lambda device: self.allocated,
            "memory_reserved": lambda device: self.reserved,
            "max_memory_allocated": lambda device: self.peaks[0],
            "max_memory_reserved": lambda device: self.peaks[1],
            "reset_peak_memory_stats": lambda device: self.allocate(0),
            "synchronize": lambda device: None,
            "empty_cache": self.empty,
        }
        for name, function in names.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def allocate(self, count: int) -> None:
        self.allocated += count
        self.reserved = max(self.reserved, -(-self.allocated // 20) * 20)
        self.peaks = (max(self.peaks[0], self.allocated), max(self.peaks[1], self.reserved))
        if count == 0:
            self.peaks = (self.allocated, self.reserved)

    def empty(self) -> None:
        self.reserved = -(-self.allocated // 20) * 20


def test_a_peak_is_what_a_run_needs_beyond_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, kept = Allocator(monkeypatch), list[int]()

    def run() -> None:
        if not kept:  # a workspace, kept from the first run on
            kept.append(50)
            allocator.allocate(50)
        allocator.allocate(25)
        allocator.allocate(-25)

    assert measure_peak(run, GPU) == 40  # 80 allocated and reserved; 105 at the peak, which takes 120
    assert allocator.reserved == 80
