"""Test that kernels which were noted are compiled by other processes, exactly those that a launch needs. Compiled for compute
capability 9.0, which needs no GPU.

.venv/bin/python -m pytest -q tests/core/test_kernels_ahead.py
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import replace

import pytest
import torch
from triton import knobs
from triton.runtime import cache, driver

from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, RoutingRule
from dovetail.layers import linear
from dovetail.ops.triton import ahead as module
from dovetail.ops.triton import (
    decode,
    expert_layers,
    filters,
    launch,
    matmul,
    norm,
    rotary,
    routing,
    sampling,
    verify,
)
from dovetail.ops.triton.ahead import KernelsAhead
from dovetail.ops.triton.compile_worker import AbsentDevice, Task, WaitingTasks
from dovetail.ops.triton.driver import start_digest
from dovetail.ops.triton.kernel_cache import cache_directory
from dovetail.ops.triton.launch import INTERPRETED
from dovetail.ops.triton.tuning import ProductTile
from dovetail_attention.triton.schedule import Schedule, ScheduleEntries, fill
from dovetail_attention.triton.tiles import AttentionTile

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

SECONDS = 240.0
TILE = ProductTile(16, 64, 64, 4, 2)


@pytest.fixture
def device(monkeypatch, tmp_path):
    """Have kernels compiled for a device that this machine need not have, into an empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = {"PDL": True, "launch_pdl": True}
    monkeypatch.setattr(
        launch, "_options", lambda warps, stages, *_: {**options, "num_warps": warps, "num_stages": stages}
    )
    before = driver._active
    driver.set_active(AbsentDevice(90))
    monkeypatch.setattr(cache, "triton_key", cache.triton_key)
    start_digest.cache_clear()
    forget()
    yield tmp_path
    forget()
    start_digest().join()
    start_digest.cache_clear()
    driver._active = before
    assert knobs.runtime.jit_cache_hook is None, "the hook outlives what it was needed for"


@pytest.fixture
def hits(monkeypatch):
    """Record for each kernel that this process takes or compiles whether the cache had it."""
    found = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, src, cache_hit, **_: found.append((src.name, cache_hit))
    )
    return found


def forget():
    """Forget the kernels that this process has loaded."""
    sampled = sampling._stats_kernel, sampling._sample_kernel, filters.filtered_kernel
    for kernel in (matmul._few_rows, norm._rms_norm, rotary._rotate_and_store, *sampled):
        kernel.device_caches.clear()


def kernels(size):
    """Launch a product and two norms, whose kernels depend on ``size``."""
    x = torch.empty(4, size, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(256, size, dtype=torch.bfloat16, device="meta")
    space = matmul.Workspace(torch.device("meta"))
    matmul.matmul(x, weight, None, TILE._replace(block_k=size // 2), space)
    norm.rms_norm(x, weight[0], 1e-5)
    norm.rms_norm(x, weight[0], 1e-5, residual=x)
    norm.rms_norm(x[:1], weight[0], 1e-5)  # the same kernel as the first norm


def start(size):
    ahead = KernelsAhead(90, f"kernels of {size}", processes=2)
    with ahead.noting():
        kernels(size)
    return ahead


def test_processes_compile_what_a_launch_needs(device, hits, caplog):
    caplog.set_level(logging.INFO)
    ahead = start(128)
    try:
        assert ahead.counts.noted == ahead.position == 3
        assert ahead.has_compiled(0)
        assert not ahead.has_compiled(3), "processes need seconds to start"
        assert ahead.wait(SECONDS)
        assert ahead.has_compiled(3)
        assert ahead.counts == (3, 3, 0)
        assert hits == [], "this process has compiled a kernel"
        with ahead._instead("compile"):
            kernels(128)
        assert hits == [("_few_rows", True), ("_rms_norm", True), ("_rms_norm", True)]
        ahead.release()
        assert not ahead.is_active
        assert "compiled 3 Triton kernels" in caplog.text
        forget()
        again = start(128)
        again.close()
        assert again._compiler is None, "everything is in the cache, and a process was started"
        assert again.counts == (3, 3, 0)
        assert again.position == 0, "there is nothing to wait for"
    finally:
        ahead.close()


def test_what_an_equal_engine_has_noted_is_known(device, monkeypatch):
    """It is not known with other settings, or once a file that defines a kernel has changed, or without its mark."""

    def make(settings):
        return KernelsAhead(90, "kernels of 128", processes=2, settings=settings)

    failed = make("a")
    try:
        with failed.noting():
            norm.rms_norm(
                torch.empty(4, 128, device="meta").bfloat16(), torch.empty(128, device="meta").bfloat16(), 1e-5
            )
        assert failed.wait(SECONDS)
    finally:
        failed.close()  # without release: it may have noted a part of its kernels only
    first = make("a")
    try:
        assert not first.is_known
        with first.noting():
            kernels(128)
        assert first.wait(SECONDS)
        first.release()
    finally:
        first.close()
    marks = [file for file in (device / "dovetail-ahead").iterdir() if file.stat().st_size]
    (mark,) = marks
    assert norm.__file__ in json.loads(mark.read_text())["sources"]
    assert linear.__file__ in json.loads(mark.read_text())["sources"], "layers choose kernels"

    again = make("a")
    assert again.is_known
    assert again.counts == (3, 3, 0)
    assert again.wait(0.0)
    again.release()
    again.close()
    assert again._compiler is None
    assert make_and_close(make, "a").is_known, "the mark is lost"
    assert not make_and_close(make, "b").is_known
    assert not make_and_close(make, "").is_known, "unknown settings are equal to no others"

    written = mark.read_text()
    changed = json.loads(written)
    changed["sources"][norm.__file__][1] -= 1
    for text in (json.dumps(changed), written[:-5], "", "[]", json.dumps({**changed, "sources": {"/gone": [1, 2]}})):
        mark.write_text(text)
        assert not make_and_close(make, "a").is_known, text
    mark.write_text(written)
    assert make_and_close(make, "a").is_known


def make_and_close(make, settings):
    made = make(settings)
    made.close()
    return made


@pytest.mark.parametrize("form", ["plain", "fp8_rows", "fp8_blocks"])
def test_kernels_of_experts_compile_whatever_the_choice(device, form):
    """What the interpreter accepts need not compile. A number of tokens has one set of kernels."""
    rule = RoutingRule(16, 4, "sigmoid", corrected=True, groups=4, groups_kept=2)
    gate_up, down, correction = (torch.empty(*shape, device="meta") for shape in ((16, 128, 64), (16, 64, 64), (16,)))
    weights = ExpertWeights(gate_up.bfloat16(), down.bfloat16(), SILU, whole=16)
    if form != "plain":
        shapes = ((16, 2, 2), (16, 1, 2)) if form == "fp8_blocks" else ((16, 128), (16, 64))
        scales = {
            f"{name}_scale": torch.empty(shape, device="meta")
            for name, shape in zip(("gate_up", "down"), shapes, strict=True)
        }
        codes = {"gate_up": gate_up.to(torch.float8_e4m3fn), "down": down.to(torch.float8_e4m3fn)}
        weights = replace(weights, **codes, **scales, format=form, block=(64, 32))
    ahead, counts = KernelsAhead(90, "experts", processes=2), list[int]()
    try:
        for tokens in (1, 3, 16, 2000, 2001):
            x, logits = (
                torch.empty(tokens, 64, dtype=torch.bfloat16, device="meta"),
                torch.empty(tokens, 16, device="meta"),
            )
            with ahead.noting():
                expert_layers.experts(x, routing.route(logits, rule, correction), weights)
            counts.append(ahead.counts.noted)
        assert counts[1] == counts[2]
        assert counts[3] == counts[4]
        assert ahead.wait(SECONDS)
        assert ahead.counts == (counts[-1], counts[-1], 0)
    finally:
        ahead.close()


def test_a_launch_waits_for_the_process_that_compiles_its_kernel(device, hits):
    ahead = start(256)
    try:
        with ahead._instead("compile"):
            kernels(256)
        assert hits == [("_few_rows", True), ("_rms_norm", True), ("_rms_norm", True)]
        assert ahead.waited > 0
        assert ahead.counts == (3, 3, 0)
    finally:
        ahead.close()


class Pool(Executor):
    """Stand in for processes, which finish what they have got when ``finish`` is called."""

    def __init__(self, broken=None):
        self.submitted, self.futures, self.broken = [], [], broken

    def submit(self, function, *task):
        if self.broken is not None:
            raise self.broken
        self.submitted.append(task[1])
        self.futures.append(Future())
        return self.futures[-1]

    def finish(self, error=None):
        future = self.futures.pop(0)
        future.set_exception(error) if error is not None else future.set_result(1.0)


def reported(capsys):
    return [(line["task"][1], line["error"]) for line in map(json.loads, capsys.readouterr().out.splitlines())]


def test_what_a_launch_waits_for_is_compiled_next(capsys):
    tasks = WaitingTasks(pool := Pool(), 2)
    for name in "abcdef":
        tasks.add([Task("module", name, "{}")])
    assert pool.submitted == ["a", "b"], "others could not be brought forward"
    tasks.bring_forward([Task("module", name, "{}") for name in "eaf"])
    pool.finish()
    assert pool.submitted[2:] == ["e"]
    waiter = threading.Thread(target=tasks.wait, daemon=True)
    waiter.start()
    for _ in range(4):
        pool.finish()
    assert waiter.is_alive(), "one task is not finished"
    pool.finish()
    waiter.join(10)
    assert not waiter.is_alive()
    assert pool.submitted == ["a", "b", "e", "f", "c", "d"]
    assert reported(capsys) == [(name, None) for name in "abefcd"]


def test_all_tasks_are_reported_if_a_process_is_killed(capsys):
    tasks = WaitingTasks(pool := Pool(), 1)
    tasks.add([Task("module", name, "{}") for name in "abc"])
    pool.broken = BrokenExecutor("killed")
    pool.finish(pool.broken)
    tasks.add([Task("module", "d", "{}")])
    tasks.wait()
    assert reported(capsys) == [(name, "BrokenExecutor('killed')") for name in "abcd"]


def test_a_launch_is_not_behind_everything_that_was_noted(device, hits):
    """The processes say that they compile it next."""
    ahead = KernelsAhead(90, "many kernels", processes=1)
    try:
        with ahead.noting():
            for size in (128, 256, 512, 1024):
                kernels(size)
        first, last = ahead._queue[0], ahead._queue[-2:]
        assert first.ended.wait(SECONDS)
        with ahead._instead("compile"):
            kernels(1024)
        assert all(one.ended.is_set() for one in last)
        assert not ahead.wait(0.0), "kernels that were noted before are still to be compiled"
        assert [cached for _, cached in hits] == [True] * 3
    finally:
        ahead.close()


def test_kernels_are_compiled_here_if_the_process_dies(device, hits, caplog):
    caplog.set_level(logging.WARNING)
    ahead = start(128)
    try:
        assert ahead._compiler is not None
        ahead._compiler.kill()
        assert ahead.wait(SECONDS)
        assert ahead.counts.failed > 0
        ahead.release()
        deadline = time.monotonic() + 10
        while "the process that compiles kernels ended" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "status -9" in caplog.text
    finally:
        ahead.close()


def test_a_launch_does_not_wait_for_ever(device, hits, caplog, monkeypatch):
    monkeypatch.setattr(module, "_BOOT", "import time; time.sleep(600)")
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.2)
    ahead = start(128)
    began = time.monotonic()
    with ahead._instead("compile"):
        kernels(128)
    assert hits == [("_few_rows", False), ("_rms_norm", False), ("_rms_norm", False)]
    assert "was not compiled within 0.2 s" in caplog.text
    assert ahead.counts == (3, 0, 3)
    assert not ahead.is_active
    assert time.monotonic() - began < 60


def test_the_place_of_single_numbers_does_not_matter(device):
    """Views of a packed copy begin anywhere; a kernel for each combination would be compiled while requests wait."""
    ahead = KernelsAhead(90, "alignment", processes=1)
    counts = []
    try:
        for offset in (0, 1):
            numbers = [torch.zeros(9 + offset, 1, dtype=dtype)[offset:] for dtype in (torch.float32, torch.float64)]
            ids = torch.zeros(9 + offset, dtype=torch.int64)[offset:]
            heat, share = numbers
            assert heat.data_ptr() % 16 == 4 * offset
            with ahead.noting():
                sampling.sample(torch.zeros(9, 512), heat, None, None, None, share[:, 0], ids)
                sampling.sample(torch.zeros(9, 512), heat, ids[:, None], share, share, share[:, 0], ids)
                rotary.rotate_and_store(
                    torch.zeros(9, 6, 64),
                    2,
                    2,
                    torch.zeros(32, 128),
                    ids,
                    None,
                    torch.zeros(2, 16, 2, 64),
                    torch.zeros(2, 16, 2, 64),
                    ids,
                )
            counts.append(ahead.counts.noted)
    finally:
        ahead.close()
    assert counts[0] == counts[1] >= 4


@pytest.mark.parametrize("tree", [False, True])
def test_the_number_of_drafts_does_not_matter(device, tree):
    """Steps that are launched kernel by kernel have the columns that their drafts need."""
    ahead = KernelsAhead(90, "drafts", processes=1)
    try:
        for width in (1, 2, 3, 4, 8, 15, 16):
            for offset in (0, 1):
                numbers = torch.zeros(8 * width + 9, dtype=torch.int32)[offset:]
                indptr, ids = numbers[:5], numbers[5 : 5 + 4 * width].view(4, width)
                out = torch.zeros(4, 2 * width + 3, dtype=torch.int64)
                with ahead.noting():
                    verify.walk(torch.zeros(64, dtype=torch.int64), indptr, ids, ids if tree else None, out)
        assert ahead.counts.noted == 1
    finally:
        ahead.close()


def test_the_number_of_rows_does_not_matter(device):
    ahead = KernelsAhead(90, "rows", processes=1)
    tile = AttentionTile(16, 64, 4, 3, 2)
    try:
        for rows in (1, 2, 3, 8, 31, 32):
            zeros, memory = torch.zeros(rows + 1, dtype=torch.int32), Schedule.empty(64, 64, torch.device("cpu"))
            entries = ScheduleEntries(zeros, zeros[:rows], zeros[None], tile, 7, 64)
            with ahead.noting():
                fill(memory, entries, 4, None, partial=False)
        assert ahead.counts.noted == 1
        for splits in (9, 13, 16):
            q, kv = torch.zeros(5, 8, 128).bfloat16(), torch.zeros(2, 4, 2, 128).bfloat16()
            with ahead.noting():
                decode.paged_decode(q, kv, kv.clone(), zeros[None].expand(5, -1), zeros[:5], 1.0, splits=splits)
        assert ahead.counts.noted == 3, "one kernel attends, another adds up the parts"
    finally:
        ahead.close()


def test_a_kernel_is_described_once(device, monkeypatch):
    """Its description takes longer than the rest of a launch, and each layer of each step launches it."""
    asked = []
    monkeypatch.setattr(KernelsAhead, "_note", lambda self, task, source: asked.append(task))
    ahead = KernelsAhead(90, "once", processes=1)
    try:
        for _ in range(3):
            with ahead.noting():
                kernels(128)
        assert len(asked) == len(set(asked)) == 3
    finally:
        ahead.close()


def test_other_threads_launch_while_one_notes(device):
    ahead = KernelsAhead(90, "other threads", processes=1)
    seen = []

    from triton.runtime.jit import JITFunction

    original = JITFunction.run
    try:
        JITFunction.run = lambda self, *args, grid, warmup, **kwargs: seen.append(warmup)
        with ahead.noting():
            other = threading.Thread(target=lambda: kernels(128))
            other.start()
            other.join()
            assert seen == [False] * 4
            kernels(128)
            assert seen == [False] * 4 + [True] * 4
    finally:
        JITFunction.run = original
        ahead.close()


def test_what_launches_kernels_is_made_on_the_device_of_the_engine(device, monkeypatch):
    """A new thread of a rank that is not the first would ask the first device."""
    current, asked = threading.local(), []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    monkeypatch.setattr(
        driver.active, "get_current_target", lambda: asked.append(getattr(current, "device", torch.device("cuda", 0)))
    )
    ahead = KernelsAhead(90, "ranks", 1, torch.device("cuda", 1))
    ahead.wait_for_triton()
    ahead.close()
    assert asked == [torch.device("cuda", 1)]


def test_a_hook_of_something_else_is_left_alone(device, monkeypatch):
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", print)
    ahead = KernelsAhead(90, "hooked", processes=1)
    assert not ahead.is_active
    with pytest.raises(RuntimeError, match="is_active"), ahead.noting():
        pass
    ahead.close()
    assert knobs.runtime.jit_cache_hook is print
    monkeypatch.undo()


def test_every_process_names_the_kernels_of_a_config_alike():
    """Otherwise each start would start processes that find nothing to compile. The order of a set depends on the
    process."""
    code = (
        "import os, sys; from dovetail.cli.serve import read_arguments; from dovetail.registry import Machine, resolve; "
        "from dovetail.engine.kernel_set import kernel_set; assert 'torch' not in sys.modules; "
        "config, registry = read_arguments(('tiny',), sys.argv[1:], {}, dict(os.environ)); "
        "print(kernel_set(resolve(config, registry, Machine.assume('sm90'))))"
    )

    def named(seed, *sets):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, "-c", code, *sets], env=env, check=True, capture_output=True).stdout

    assert named("1") == named("2", "scheduler.chunk_size=512")
    assert named("1") != named("1", "model.dtype=float16")
    assert named("1") != named("1", "quantization=fp8")


def test_the_cache_is_in_the_cache_directory_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "chosen"))
    assert cache_directory() == tmp_path / "chosen"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "dovetail" / "triton"
    assert knobs.cache.dir == str(tmp_path / "dovetail" / "triton")
