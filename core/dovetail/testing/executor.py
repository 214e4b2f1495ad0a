"""Test executors: the conformance suite of their interface."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dovetail.errors import ConfigError, RankLostError
from dovetail.interfaces.executor import Executor, WarmUpProgress
from dovetail.interfaces.features import Feature
from dovetail.testing.executor_case import ExecutorCase
from dovetail.testing.executor_ranks import PretendedRank, RankFault, RankScript, show
from dovetail.testing.executor_runs import (
    ExecutorRun,
    await_true,
    has_ended,
    interrupted,
    open_descriptors,
    private_temp,
    unused_shared_memory,
    within,
)
from dovetail.testing.executor_traffic import MASK_WIDTH
from dovetail.types import StepPlan

each_size = pytest.mark.parametrize("size", [1, 3])
ATTEMPTS = 5
"""How often a call is made whose shortest time is that of the call: a busy machine may delay each of them."""
ENDS_WITHIN = 8.0
"""The seconds within which processes that have no reason to run any more must have ended."""


class ExecutorSuite(ExecutorCase):
    """Test an executor. ``class TestMine(ExecutorSuite): name = "mine"`` is a complete test file.

    The ranks are ``PretendedRank``: no model is loaded. ``settings`` should make the deadlines of an executor that has
    some as short as ``deadline_seconds``: every call must return or raise within that time and a few seconds.
    """

    # -- plans and results -------------------------------------------------------------------------------------------

    @each_size
    def test_every_plan_reaches_every_rank(self, size: int) -> None:
        """Each rank gets each plan once and in order, with all fields equal bit for bit, and the texts of its
        requests. Results belong to their plans."""
        for seed in range(3):
            with self.drive(RankScript(), size, seed=seed) as run:
                run.run()
                run.compare_journals()

    @each_size
    def test_overlapped_steps(self, size: int) -> None:
        """A step is launched before the step before it was waited for, also while the device is slow. Results belong to
        their plans."""
        for seed, seconds in ((0, 0.0), (1, 0.01)):
            with self.drive(RankScript(step_seconds=seconds), size, seed=seed) as run:
                run.run_overlapped()
                run.compare_journals()

    def test_a_launch_does_not_wait_for_the_step_before(self) -> None:
        """While the device computes a step, the next one is launched on it.

        The quickest of some launches counts, because other processes may have the processors.
        """
        with self.drive(RankScript(step_seconds=0.5)) as run:
            before, seconds = run.schedule(), 1.0
            run.launch(before)
            run.sample(before)
            for _ in range(ATTEMPTS):
                plan = run.schedule()
                start = time.monotonic()
                run.launch(plan)
                seconds = min(seconds, time.monotonic() - start)
                run.commit(before)
                run.sample(plan)
                before = plan
                if seconds < 0.4:
                    break
            run.commit(before)
            assert seconds < 0.4, "launch waits for the step before"
            launched, *_ = run.executor.call("waits")[0]
            assert launched == 2, "the second step was launched after the first was waited for"

    def test_long_plans_and_results(self) -> None:
        """Prompts of 100,000 tokens, and many of them at once, arrive as short ones do."""
        with self.drive(RankScript(), max_prompt=100_000) as run:
            run.run(12)
            run.compare_journals()

    def test_plans_are_not_changed(self) -> None:
        """No call changes the plan, and arrays that change after the step was waited for do not matter."""
        with self.drive(RankScript()) as run:
            for _ in range(5):
                plan = run.schedule()
                before = {name: show(getattr(plan, name)) for name in StepPlan.__slots__}
                run.launch(plan)
                run.sample(plan)
                assert {name: show(getattr(plan, name)) for name in StepPlan.__slots__} == before
                run.commit(plan)
                for array in (plan.prefix_lens, plan.extend_lens, plan.samples):
                    array[:] = 0
            run.compare_journals()

    @each_size
    def test_masks(self, size: int) -> None:
        """The masks of a step arrive bit for bit. They are not overwritten by those of the next step, which are written
        while the first is not waited for."""
        with self.drive(RankScript(step_seconds=0.005), size, seed=5) as run:
            run.run_overlapped(60)
            run.compare_journals()
            assert sum(entry.parts["masks"] != show(None) for entry in run.reference.samples) > 5
            first, second = (run.executor.mask_buffer(9, MASK_WIDTH) for _ in range(2))
            first[:], second[:] = 1, 2
            assert (first == 1).all(), "two buffers in a row share memory"

    @each_size
    def test_texts_of_logits_processors(self, size: int) -> None:
        """When a step is sampled, the ranks have the whole texts of the requests with logits processors, also under
        overlap."""
        with self.drive(RankScript(), size, seed=3) as run:
            run.run_overlapped(60)
            run.compare_journals()
            texts = [entry.parts["texts"] for entry in run.reference.samples]
            assert sum(shown != show([]) for shown in texts) > 5

    @each_size
    @pytest.mark.parametrize("trees", [False, True])
    def test_drafts(self, size: int, trees: bool) -> None:
        """Drafts are proposed for the plan and verified in it; the drafter sees what was accepted, and the whole text of
        requests that leave."""
        for seed in range(2):
            with self.drive(RankScript(draft_width=4, trees=trees), size, seed=seed) as run:
                run.run()
                run.compare_journals()

    def test_it_describes_the_engine(self) -> None:
        """``info`` is that of the rank's engine, except for ``fails_late``, ``page_table`` has its shape, and ``describe`` names every rank."""
        script = RankScript(draft_width=2)
        with self.open(script) as executor:
            rank = PretendedRank(script)
            assert executor.info == rank.info._replace(fails_late=executor.info.fails_late)
            assert (executor.page_table.shape, executor.page_table.dtype) == (rank.page_table.shape, np.int32)
            described = executor.describe()
            assert {key: described[key] for key in rank.describe()} == rank.describe()
            assert [entry["rank"] for entry in described["ranks"]] == [0]
            msgspec.json.encode(described)

    @each_size
    def test_control_calls_reach_every_rank(self, size: int) -> None:
        """A control call is answered by each rank, in order. An unknown one raises ``ValueError``, and later calls
        work."""
        with self.open(RankScript(captures=2), size) as executor:
            args = {"text": "x" * 200_000, "number": 5, "bytes": b"\0\1", "list": [None, True, 1.5]}
            assert executor.call("echo", args) == [[rank, args] for rank in range(size)]
            for name in ("no_such_call", "describe"):
                with pytest.raises(ValueError, match=f"no control call '{name}'"):
                    executor.call(name)
            assert [executor.idle() for _ in range(3)] == [True, True, False], "two graphs are missing"
            assert executor.call("echo", 1) == [[rank, 1] for rank in range(size)]

    def test_ranks_do_not_look_at_a_slow_device_all_the_time(self) -> None:
        """While the device computes a long step, ``ready`` is called now and then, and no processor is kept busy."""
        with self.drive(RankScript(step_seconds=0.6)) as run:
            run.step()
            (looks,) = run.executor.call("late_looks")
            assert looks < 200, f"ready was called {looks} times in the second half of the step"

    def test_it_reports_progress(self) -> None:
        """``progress`` is that of the engine of rank 0, at most two seconds ago, and does not wait for a step."""
        with self.drive(RankScript(captures=3, step_seconds=1.0)) as run:
            assert await_true(lambda: run.executor.progress == WarmUpProgress(7, 7, 0, 3), 2.0)
            assert run.executor.idle()
            assert await_true(lambda: run.executor.progress == WarmUpProgress(7, 7, 1, 2), 2.0), "it is not up to date"
            seconds = 1.0
            for _ in range(ATTEMPTS):
                plan = run.schedule()
                run.launch(plan)
                run.sample(plan)
                start = time.monotonic()
                assert run.executor.progress == WarmUpProgress(7, 7, 1, 2)
                seconds = min(seconds, time.monotonic() - start)
                run.commit(plan)
                if seconds < 0.5:
                    break
            assert seconds < 0.5, "it waits for the step"

    # -- errors ------------------------------------------------------------------------------------------------------

    @each_size
    @pytest.mark.parametrize("at", ["launch", "launched", "sample", "wait"])
    def test_an_error_of_all_ranks_fails_one_step(self, size: int, at: str) -> None:
        """The error names its class and its first line. Later steps run, and no page update is lost."""
        failing = (3, 4, 7, 11)
        script = RankScript(faults=[RankFault(at, "RuntimeError", number=number) for number in failing])
        with self.drive(script, size) as run:
            table = run.traffic.page_table
            for _ in range(14):
                plan = run.traffic.plan()
                launched, error = self._try(run, plan)
                if error is None:
                    assert plan.number not in failing, "the error of the ranks was not raised"
                    continue
                assert plan.number in failing, f"plan {plan.number} failed, which no rank has failed: {error!r}"
                assert "RuntimeError: out of luck" in f"{type(error).__name__}: {error}"
                assert run.executor.lost(error) is None
                if launched and at in ("launch", "launched"):
                    assert run.executor.info.fails_late, "the scheduler must know that errors of launch surface later"
                run.traffic.fail(plan, take_back=not launched)
            for there in run.executor.call("table"):
                np.testing.assert_array_equal(there, table, "a page update was lost")

    def _try(self, run: ExecutorRun, plan: StepPlan) -> tuple[bool, Exception | None]:
        """Make a step. Return whether ``launch`` has returned, and what was raised."""
        launched = False
        try:
            run.executor.launch(plan)
            launched = True
            masks = run.traffic.masks(plan, run.executor.mask_buffer) if plan.constrained else None
            run.executor.sample(plan, masks)
            result = within(self.patience, lambda: run.executor.wait(plan))
        except Exception as error:
            return launched, error
        run.traffic.commit(plan, result)
        return True, None

    def test_an_error_under_overlap_fails_its_own_step(self) -> None:
        """The steps before and after the one that fails have their results."""
        script = RankScript(faults=[RankFault("wait", "RuntimeError", number=3)])
        with self.drive(script) as run:
            plans = []
            for number in range(1, 6):
                plan = run.traffic.plan()
                plans.append(plan)
                run.executor.launch(plan)
                run.executor.sample(plan, None)
                if number > 1:
                    self._expect(run, plans[-2], fails=plans[-2].number == 3)
            self._expect(run, plans[-1], fails=False)

    def _expect(self, run: ExecutorRun, plan: StepPlan, *, fails: bool) -> None:
        if fails:
            with pytest.raises(RuntimeError, match="out of luck"):
                run.executor.wait(plan)
            run.traffic.fail(plan, take_back=False)
        else:
            run.traffic.commit(plan, run.executor.wait(plan))

    @each_size
    @pytest.mark.parametrize("at", ["propose", "observe", "forget"])
    def test_an_error_of_the_drafter_costs_no_step(self, size: int, at: str) -> None:
        """An error of the drafter is raised by a drafter's call, and never by the step."""
        number = 0 if at == "forget" else 3
        script = RankScript(draft_width=2, faults=[RankFault(at, "RuntimeError", number=number)])
        raised = 0
        with self.drive(script, size) as run:
            executor, traffic = run.executor, run.traffic
            for _ in range(12):
                plan, departed = traffic.plan(), traffic.take_departed()
                for call in [lambda d=departed: executor.forget(d)] if departed else []:
                    raised += _raises(call)
                raised += _raises(lambda plan=plan: executor.propose(plan))
                executor.launch(plan)
                executor.sample(plan, traffic.masks(plan, executor.mask_buffer) if plan.constrained else None)
                committed = traffic.commit(plan, within(self.patience, lambda plan=plan: executor.wait(plan)))
                raised += _raises(lambda plan=plan, committed=committed: executor.observe(plan, committed))
            assert raised, f"the error of {at} was not raised"
            assert raised == 1 or at == "forget"
            assert executor.lost(RuntimeError("out of luck")) is None

    @each_size
    def test_drafts_that_break_their_contract_cost_no_step(self, size: int) -> None:
        """An executor that cannot send drafts raises, and the step runs without them."""
        with self.drive(RankScript(draft_width=2, broken_drafts=3), size) as run:
            for _ in range(6):
                plan = run.traffic.plan()
                with suppress(Exception):
                    run.executor.propose(plan)
                launched, error = self._try(run, plan)
                assert launched, f"plan {plan.number} was not launched: {error!r}"
                assert error is None, f"plan {plan.number} failed: {error!r}"

    def test_a_lost_device_is_reported(self) -> None:
        """If an engine says that its device is lost, so does the executor."""
        script = RankScript(faults=[RankFault("wait", "RuntimeError", number=2, text="device gone")])
        with self.drive(script) as run:
            run.step()
            error = self._step_fails(run)
            assert "the pretended device is gone" in (run.executor.lost(error) or "")

    @each_size
    @pytest.mark.parametrize("at", ["launch", "propose", "observe"])
    def test_an_interrupt_costs_one_call(self, size: int, at: str) -> None:
        """An interrupt (Ctrl-C) at any point of ``launch`` fails this step, one in a drafter's call costs drafts. Later
        steps run, and every rank then gets all that the interrupted call would have sent."""
        script = RankScript(draft_width=0 if at == "launch" else 2)
        with self.drive(script, size) as run:
            executor, traffic, reference = run.executor, run.traffic, run.reference
            for step in range(240):
                stop = step // 2 + 1 if step % 2 else 0  # every second step runs as usual
                plan = traffic.plan()
                if at != "launch":
                    self._reached(lambda plan=plan: executor.propose(plan), stop if at == "propose" else 0)
                if self._reached(lambda plan=plan: executor.launch(plan), stop if at == "launch" else 0):
                    traffic.fail(plan, take_back=True)
                    continue
                reference.launch(plan)
                executor.sample(plan, traffic.masks(plan, executor.mask_buffer) if plan.constrained else None)
                committed = traffic.commit(plan, within(self.patience, lambda plan=plan: executor.wait(plan)))
                if at != "launch":
                    self._reached(lambda p=plan, c=committed: executor.observe(p, c), stop if at == "observe" else 0)
            assert executor.lost(RuntimeError("out of luck")) is None
            expected = {entry.number: entry.parts for entry in reference.journal if entry.verb == "launch"}
            for rank, journal in enumerate(executor.call("journal")):
                got = {number: parts for verb, number, parts in journal if verb == "launch"}
                for number, parts in expected.items():
                    assert got.get(number) == parts, f"rank {rank}: plan {number} is another one"

    def _reached(self, call: Callable[[], object], calls: int) -> bool:
        """Run ``call``. With ``calls``, interrupt it at its ``calls``-th call of a function. Return True if it was
        interrupted."""
        if calls:
            return interrupted(call, calls)
        call()
        return False

    # -- ranks that are lost -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("at", ["launch", "sample", "wait"])
    def test_an_error_of_one_rank_loses_the_group(self, at: str) -> None:
        """The ranks are not in the same state any more: the step fails, and the reason names the rank."""
        for rank in (0, 2):
            script = RankScript(faults=[RankFault(at, "RuntimeError", rank, 3)])
            with self.drive(script, 3) as run:
                pids = self._pids(run.executor)
                run.run(2)
                self._check_lost(run, pids, f"rank {rank}")

    @pytest.mark.parametrize("what", ["kill", "exit"])
    @pytest.mark.parametrize("at", ["idle_between", "launch", "launched", "sampled", "wait"])
    def test_a_rank_that_dies_ends_the_step(self, at: str, what: str) -> None:
        """Before a step, in the middle of it, or after it: the waiting call raises at once, and not at the deadline. The
        reason names the rank, and the others are ended."""
        for rank in (0, 1):
            script = RankScript(faults=[RankFault(at, what, rank, 3)])
            with self.drive(script, 2) as run:
                pids = self._pids(run.executor)
                run.run(2)
                if at == "idle_between":
                    run.step()
                    time.sleep(0.5)
                start = time.monotonic()
                self._check_lost(run, pids, f"rank {rank}")
                assert time.monotonic() - start < self.deadline_seconds, "the death was noticed late"

    @pytest.mark.parametrize("what", ["hang", "stop"])
    def test_a_rank_that_hangs_ends_the_step(self, what: str) -> None:
        """The waiting call raises once the deadline has passed."""
        for rank in (0, 1):
            script = RankScript(faults=[RankFault("launch", what, rank, 3)])
            with self.drive(script, 2) as run:
                pids = self._pids(run.executor)
                run.run(2)
                self._check_lost(run, pids, f"rank {rank}")

    @pytest.mark.parametrize("at", ["propose", "idle", "echo"])
    @pytest.mark.parametrize("what", ["kill", "hang"])
    def test_a_rank_that_is_lost_in_another_call(self, at: str, what: str) -> None:
        """Calls that are no step have deadlines too."""
        number = 1 if at == "propose" else 0
        script = RankScript(draft_width=2, faults=[RankFault(at, what, 1, number), RankFault(at, what, 0, number)])
        with self.drive(script, 2) as run:
            pids = self._pids(run.executor)
            calls = {
                "propose": lambda: run.executor.propose(run.traffic.plan()),
                "idle": run.executor.idle,
                "echo": lambda: run.executor.call("echo"),
            }
            with pytest.raises(RankLostError) as caught:
                within(self.patience, calls[at])
            assert "rank " in (run.executor.lost(caught.value) or "")
            assert await_true(lambda: all(map(has_ended, pids)), ENDS_WITHIN)

    def test_it_says_why_a_rank_could_not_be_built(self) -> None:
        """The error of the rank is raised, with its whole text."""
        script = RankScript(faults=[RankFault("build", "ConfigError", 0, text="set this\nor that")])
        with pytest.raises(ConfigError, match="set this\nor that"):
            within(30 + self.patience, lambda: self.start(script, 1))

    def test_a_rank_that_dies_while_it_is_built(self) -> None:
        """Construction fails at once, and names the rank."""
        self.require(Feature.EXECUTOR_RANKS)
        for what in ("exit", "kill"):
            script = RankScript(faults=[RankFault("build", what, 1)])
            with pytest.raises(Exception, match="rank 1"):
                within(30 + self.patience, lambda script=script: self.start(script, 2))

    def _pids(self, executor: Executor) -> list[int]:
        pids = [entry["pid"] for entry in executor.describe()["ranks"]]
        assert os.getpid() not in pids
        return pids

    def _step_fails(self, run: ExecutorRun) -> Exception:
        """Make steps until one raises, in whichever call, and return what it raises."""

        def step() -> None:
            end = time.monotonic() + self.patience
            while time.monotonic() < end:
                plan = run.traffic.plan()
                run.executor.launch(plan)
                masks = run.traffic.masks(plan, run.executor.mask_buffer) if plan.constrained else None
                run.executor.sample(plan, masks)
                run.traffic.commit(plan, run.executor.wait(plan))

        try:
            within(2 * self.patience, step)
        except Exception as error:
            return error
        pytest.fail("every step has a result, although a rank is lost")

    def _check_lost(self, run: ExecutorRun, pids: Sequence[int], named: str) -> None:
        """Check that a step fails because the group is lost, that every later call raises, and that all ranks end."""
        executor = run.executor
        error = self._step_fails(run)
        reason = executor.lost(error)
        assert reason is not None, f"the group is not reported as lost after {error!r}"
        assert named in reason, f"the reason does not name the rank: {reason}"
        for call in (executor.idle, lambda: executor.call("echo"), lambda: executor.launch(run.traffic.plan())):
            with pytest.raises(RankLostError):
                within(self.patience, call)
        assert await_true(lambda: all(map(has_ended, pids)), ENDS_WITHIN), "a rank runs on after the group was lost"

    # -- the end -----------------------------------------------------------------------------------------------------

    @each_size
    def test_close(self, size: int) -> None:
        """Closing ends the ranks and leaves no process, descriptor, shared memory or file behind. It can be repeated."""
        with private_temp() as folder:
            self.start(RankScript(), size).close()
            before = open_descriptors()
            executor = self.start(RankScript(), size)
            pids = [entry["pid"] for entry in executor.describe()["ranks"] if entry["pid"] != os.getpid()]
            within(self.patience, executor.close)
            within(self.patience, executor.close)
            assert all(map(has_ended, pids)), "a rank runs on after close"
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a process was not waited for"
            del executor
            assert open_descriptors() == before, "a descriptor was left open"
            assert not os.listdir(folder), "a file was left behind"

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
    @pytest.mark.parametrize("busy", [False, True])
    def test_the_ranks_end_with_their_parent(self, number: int, busy: bool) -> None:
        """If the process ends without closing the executor (killed, or by Ctrl-C in its terminal), its ranks end within
        seconds, also in the middle of a step, and leave nothing behind."""
        self.require(Feature.EXECUTOR_RANKS)
        with private_temp() as folder:
            shared = unused_shared_memory()
            parent, pids = self.start_in_another_process(busy)
            try:
                os.killpg(parent, number)
                assert await_true(lambda: has_ended(parent), ENDS_WITHIN), "the process does not end"
                assert await_true(lambda: all(map(has_ended, pids)), ENDS_WITHIN), (
                    "a rank runs on after its parent has ended"
                )
                assert await_true(lambda: not os.listdir(folder), ENDS_WITHIN), "a file was left behind"
                assert not unused_shared_memory() - shared, "shared memory was left behind"
            finally:
                os.waitpid(parent, 0)
                for pid in itertools.filterfalse(has_ended, pids):
                    os.kill(pid, signal.SIGKILL)


def _raises(call: Callable[[], object]) -> bool:
    """Return True if ``call`` raises the error of a pretended rank."""
    try:
        call()
    except RuntimeError as error:
        return "out of luck" in str(error)
    return False
