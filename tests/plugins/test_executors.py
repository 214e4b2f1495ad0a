"""Test the executors: the suite for each, and what is particular to one of them.

Run: python -m pytest -q tests/plugins/test_executors.py
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from dovetail.errors import RankLostError
from dovetail.interfaces.executor import ExecutorContext
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from dovetail.scheduler.plans import _entry
from dovetail.testing.executor import ExecutorSuite
from dovetail.testing.executor_ranks import TARGET, RankFault, RankScript
from dovetail.testing.executor_runs import has_ended, interrupted
from dovetail.testing.executor_traffic import PlanTraffic
from dovetail.types import PageUpdates
from dovetail_executors.config import WorkersConfig
from dovetail_executors.workers.executor import Workers
from dovetail_executors.workers.packing import Packer, Unpacker
from dovetail_executors.workers.ring import SLOT_BYTES, SLOTS, RingReader, RingWriter, create_ring


class _Arrays(msgspec.Struct):
    first: np.ndarray
    second: np.ndarray
    text: str


@pytest.mark.parametrize("dtype", ["?", "<i4", ">i4", "<u2", ">u8", "<f4", ">f8", "f2"])
def test_arrays_arrive_as_they_were_sent(dtype):
    rng, packer, unpacker = np.random.default_rng(0), Packer(), Unpacker(_Arrays)
    for shape in ((), (0,), (3,), (2, 5), (2, 0, 3)):
        values = [
            rng.integers(0, 200, shape).astype(dtype),
            np.asfortranarray(rng.integers(0, 9, (3, 4)).astype(dtype)),
        ]
        got = unpacker.unpack(bytearray(packer.pack(_Arrays(*values, "text"))))
        assert got.text == "text"
        for array, expected in zip((got.first, got.second), values, strict=True):
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("dtype", ["O", "S3", "U2", "M8[s]", "c16", "g", [("a", "i4")]])
def test_arrays_that_are_no_numbers_are_refused(dtype):
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        Packer().pack(np.zeros(3, dtype))


def test_an_interrupted_long_message_does_not_stop_the_next_ones():
    """It was written, but not published."""
    memory, (wake_read, wake_write) = create_ring(), os.pipe()
    writer, reader = RingWriter(memory, [wake_write]), RingReader(memory)
    sent, interrupts = [], 0

    def stuck():
        raise TimeoutError

    for calls in range(1, 60):
        data = bytes([calls]) * (SLOT_BYTES + calls)
        before = writer.published
        interrupts += interrupted(lambda data=data: writer.put(1, 2, data, stuck), calls)
        if writer.published > before:
            sent.append(data)
        while (message := reader.take()) is not None:
            assert message.data == sent.pop(0)
    assert interrupts > 3
    assert not sent
    for fd in (wake_read, wake_write):
        os.close(fd)
    memory.close()


class TestLocal(ExecutorSuite):
    name = "local"


@pytest.mark.sample(3)
class TestWorkers(ExecutorSuite):
    name = "workers"
    settings: ClassVar[Mapping[str, Any]] = {"step_seconds": 3.0}
    deadline_seconds = 3.0

    def test_ranks_import_nothing_from_the_current_folder(self, tmp_path, monkeypatch):
        (tmp_path / "json.py").write_text("raise SystemExit(3)")
        monkeypatch.chdir(tmp_path)
        with self.open(RankScript()) as executor:
            assert executor.call("echo", 1) == [[0, 1]]

    def test_the_first_reason_stays(self):
        with self.open(RankScript()) as executor:
            group = executor._group
            for call in (lambda: group.lose("first"), lambda: group.await_finished(9), lambda: group.lose("second")):
                with pytest.raises(RankLostError, match="first"):
                    call()
            assert executor.lost(RuntimeError()) == "first"

    def test_a_process_that_cannot_be_killed_does_not_hold_the_group(self, monkeypatch):
        executor = self.start(RankScript(), 1)
        process, waits = executor._group.handles[0].process, []

        def wait(self, timeout=None):
            waits.append(timeout)
            raise subprocess.TimeoutExpired("rank", timeout)

        with monkeypatch.context() as patched:
            patched.setattr(subprocess.Popen, "wait", wait)
            executor._group.end()
        assert len(waits) == 1
        assert waits[0] is not None
        process.wait(5)

    def test_closing_does_not_wait_for_a_rank_that_hangs(self):
        """The rank takes no messages any more, and there is no place for another one. The deadline of a step is far."""
        script = RankScript(faults=[RankFault("launch", "stop", 1, 1)])
        description = msgspec.json.encode(script)
        context = ExecutorContext(2, lambda *_: None, TARGET, description)
        executor = Workers(WorkersConfig(step_seconds=300), context)
        pids = [entry["pid"] for entry in executor.describe()["ranks"]]
        traffic = PlanTraffic(0, executor.page_table)
        executor.launch(traffic.plan())
        time.sleep(0.3)  # rank 1 has taken the message, and stopped
        for _ in range(SLOTS - 1):
            executor.launch(traffic.plan())
        start = time.monotonic()
        executor.close()
        assert time.monotonic() - start < 10
        assert all(map(has_ended, pids))

    def test_no_message_is_sent_without_page_updates(self):
        with self.open(RankScript()) as executor:
            for count, sent in ((0, 0), (2, 1)):
                before, column = executor._group.num_sent, np.arange(count, dtype=np.int32)
                executor.locate_updates(PageUpdates(column, column, column[None]))
                assert executor._group.num_sent - before == sent

    def test_grammars_do_not_travel(self):
        """Ranks get bitmasks."""
        sent = []
        with self.open(RankScript()) as executor:
            put = executor._group._ring.put
            executor._group._ring.put = lambda kind, tag, data, wait: sent.append(data) or put(kind, tag, data, wait)
            req = SimpleNamespace(
                slot=1,
                uid=7,
                params=SamplingParams(grammar=GrammarSpec(GrammarKind.REGEX, "a needle in a haystack")),
                seed=1,
                prompt_len=2,
                token_ids=np.zeros(9, np.int32),
                known_len=2,
                namespace="",
                num_retractions=0,
                matcher=object(),
                adapter=None,
                states=None,
            )
            plan = PlanTraffic(0, executor.page_table).plan()
            plan.admitted += (_entry(req),)
            executor.launch(plan)
        assert "needle" in req.params.grammar.text
        assert plan.admitted[-1].constrained
        assert not any(b"needle" in data for data in sent)

    def test_an_interrupt_while_it_closes_ends_the_ranks(self, monkeypatch):
        executor = self.start(RankScript(), 2)
        pids = [entry["pid"] for entry in executor.describe()["ranks"]]

        def put(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(executor._group._ring, "put", put)
        with pytest.raises(KeyboardInterrupt):
            executor.close()
        assert all(map(has_ended, pids))
