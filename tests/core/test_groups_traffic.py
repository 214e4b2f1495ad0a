"""Test groups and sessions in random traffic: no page is lost and no token is wrong.

.venv/bin/python -m pytest -q tests/core/test_groups_traffic.py
"""

import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

sys.path.insert(0, str(Path(__file__).parent))
from pretended import Run, build, half_right

PAGE = 4
STEMS = [[10 + i] * 9 + list(range(20, 40)) for i in range(3)]
NAMES = st.sampled_from(["", "a", "b"])


class Traffic(RuleBasedStateMachine):
    """Add, step, abort, fail and let time pass in any order; ``lag`` and ``drafts`` are those of the loop."""

    lag, drafts = False, False

    @initialize(
        num_pages=st.integers(34, 60), bound=st.integers(0, 40), chunk=st.sampled_from([5, 20, 200]), wait=st.booleans()
    )
    def start(self, num_pages, bound, chunk, wait):
        self.now = 0.0
        width = 3 if self.drafts else 0
        limits = {
            "pin_pages": bound,
            "pin_seconds": 10.0,
            "chunk_size": chunk,
            "wait_for_prefix": wait,
            "max_waiting": 999,
        }
        scheduler, device = build(
            PAGE, num_pages, clock=lambda: self.now, draft_width=width, shared_prefixes=not width, **limits
        )
        self.run = Run(scheduler, device, self.lag, half_right if width else None)
        self.scheduler, self.bound = scheduler, bound

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(1, 29),
        tail=st.integers(0, 49),
        new=st.integers(0, 30),
        group=NAMES,
        size=st.integers(1, 4),
        session=NAMES,
        namespace=st.sampled_from(["", "", "tenant"]),
        count=st.integers(1, 4),
    )
    def ask(self, stem, cut, tail, new, group, size, session, namespace, count):
        for i in range(count):
            hints = {"group": group, "group_size": size, "session": session, "namespace": namespace}
            prompt = [*stem[:cut], (tail + i) % 50]
            self.run.add(f"r{len(self.run.prompts)}", prompt, hints, max_new_tokens=new, ignore_eos=bool(tail % 2))

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.run.step()

    @rule(which=st.integers(0, 100))
    def abort(self, which):
        rids = [r for r in self.run.prompts if r not in self.run.ends]
        if rids:
            self.run.take(self.scheduler.abort(rids[which % len(rids)], "changed my mind"))

    @precondition(lambda self: not self.lag)
    @rule()
    def fail(self):
        plan = self.scheduler.schedule()
        if plan is not None:
            self.run.device.miss(plan)
            self.scheduler.take_back(plan)
            for answer in self.scheduler.fail(plan, "broken"):
                self.run.ends[answer.rid] = answer.status

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def abort_all(self):
        self.run.take(self.scheduler.abort_all("maintenance"))
        assert self.scheduler.pins.pages == len(self.scheduler.groups) == 0

    @invariant()
    def is_sound(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert self.scheduler.pins.pages <= self.bound
            self.pins_beside_requests_are_counted()

    def pins_beside_requests_are_counted(self):
        """Pages that cannot be evicted are locked by running requests, or are pinned in addition."""
        ledger, running = self.scheduler.ledger, self.scheduler.running
        read = {page for r in running for page in ledger.table.pages[0, r.slot, : r.shared_pages].tolist()}
        locked = ledger.cache.total[0] - ledger.cache.evictable[0]
        assert locked - len(read) == self.scheduler.pins.count_unread(running)[0]

    def teardown(self):
        """End all requests. The pages that are left are pinned, and only until their time expires."""
        if not hasattr(self, "scheduler"):
            return
        self.run.finish_requests()
        assert self.run.ends.keys() == self.run.prompts.keys()
        ledger, pins = self.scheduler.ledger, self.scheduler.pins
        assert ledger.available == ledger.allocator.num_total - pins.pages
        self.now += 10.0
        self.scheduler.expire()
        assert pins.pages == len(self.scheduler.groups) == 0
        ledger.check_integrity([])
        ledger.flush()
        assert ledger.allocator.num_free == ledger.allocator.num_total
        assert ledger.table.num_free == self.scheduler.limits.max_running


@pytest.mark.parametrize(("lag", "drafts"), [(False, False), (True, False), (False, True)])
def test_random_traffic(lag, drafts):
    machine = type("Machine", (Traffic,), {"lag": lag, "drafts": drafts})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=40))
