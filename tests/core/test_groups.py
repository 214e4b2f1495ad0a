"""Test groups: siblings wait for the first member, are admitted together, and their shared pages are held for members
that arrive later.

.venv/bin/python -m pytest -q tests/core/test_groups.py
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import RequestError
from dovetail.sampling_params import SamplingParams
from dovetail.scheduler.groups import group_adjacent
from dovetail.types import FinishKind, Req

sys.path.insert(0, str(Path(__file__).parent))
from pretended import Run, build, half_right, reqs_of

PAGE = 4
SHARED = list(range(10, 50))  # ten pages
each_lag = pytest.mark.parametrize("lag", [False, True], ids=["at-once", "one-step-late"])


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def service(lag=False, num_pages=200, drafts=None, **limits):
    """Return a scheduler with pages for pins on a pretended device, and its clock."""
    clock = Clock()
    settings = {"max_running": 16, "chunk_size": 100, "pin_pages": num_pages - 1} | limits
    scheduler, device = build(PAGE, num_pages, clock=clock, **settings)
    return Run(scheduler, device, lag, drafts), scheduler, clock


def ask(run, rid, prompt, new=2, **hints):
    run.add(rid, prompt, hints, max_new_tokens=new, ignore_eos=True)


def prompts_entered(run, steps=40):
    """Return the requests whose prompts enter each step, in their order."""
    entered, schedule = [], run.scheduler.schedule

    def noted():
        plan = schedule()
        if plan is not None and plan.num_extend:
            entered.append([r.rid for r in reqs_of(run.scheduler, plan)[: plan.num_extend]])
        return plan

    run.scheduler.schedule = noted
    run.finish(steps)
    return entered


@each_lag
@pytest.mark.parametrize("wait", [True, False], ids=["waits-anyway", "waits-as-a-group"])
def test_siblings_wait_for_the_first_and_enter_together(lag, wait):
    run, scheduler, _ = service(lag, wait_for_prefix=wait)
    for i in range(5):
        ask(run, f"g{i}", [*SHARED, i], group="g", group_size=5)
        ask(run, f"o{i}", [5 + i] * 20)
    entered = prompts_entered(run)
    assert entered[0][:2] == ["g0", "o0"]
    siblings = [rids for rids in entered if "g1" in rids]
    assert len(siblings) == 1
    assert "".join(siblings[0]).count("g1g2g3g4") == 1, "siblings are not adjacent rows"
    assert scheduler.totals.cached_tokens >= 4 * 40
    assert len(scheduler.groups) == scheduler.pins.pages == 0


def test_without_a_group_no_request_waits_where_waiting_is_off():
    run, scheduler, _ = service(wait_for_prefix=False, chunk_size=1000)
    for i in range(5):
        ask(run, f"r{i}", [*SHARED, i])
    assert prompts_entered(run) == [[f"r{i}" for i in range(5)]]
    assert scheduler.totals.cached_tokens == 0


def test_members_of_other_groups_are_not_waited_for():
    run, _, _ = service(wait_for_prefix=False, chunk_size=1000)
    for i, (name, namespace) in enumerate(itertools.product("ab", ("", "tenant"))):
        for j in range(2):
            hints = {"group": name, "group_size": 2, "namespace": namespace}
            ask(run, f"{i}{j}", [*SHARED, j], **hints)
    assert prompts_entered(run) == [["00", "10", "20", "30"], ["01", "11", "21", "31"]]


def test_those_that_do_not_fit_come_in_the_next_step():
    run, _, _ = service(chunk_size=50, wait_for_prefix=False)
    for i in range(6):
        ask(run, f"g{i}", [*SHARED, *[i] * 20], group="g", group_size=6)
    entered = prompts_entered(run)
    assert entered == [["g0"], ["g0", "g1", "g2"], ["g3", "g4", "g5"], ["g5"]]


@given(st.lists(st.tuples(st.sampled_from("xab"), st.sampled_from(["", "tenant"]))))
def test_groups_are_placed_where_their_first_member_is(asked):
    """This holds for every order that a policy returns; ``x`` stands for no group."""
    reqs = []
    for i, (name, namespace) in enumerate(asked):
        reqs.append(Req(str(i), np.zeros(1, np.int32), 1, SamplingParams(), namespace=namespace, uid=i))
        reqs[-1].group = "" if name == "x" else name
    keys = [(r.group, r.namespace) if r.group else r.uid for r in reqs]
    firsts = list(dict.fromkeys(keys))
    ordered = group_adjacent(reqs)
    assert [r.uid for r in ordered] == [i for first in firsts for i, key in enumerate(keys) if key == first]


def test_a_group_without_end_delays_no_request():
    """Members go before others that came after their first, but only as far as one step takes them."""
    run, _, _ = service(max_running=1)
    for i in range(3):
        ask(run, f"g{i}", [*SHARED, i], new=1, group="g", group_size=1000)
    ask(run, "o", [5] * 20, new=1)
    for i in range(3, 20):
        ask(run, f"g{i}", [*SHARED, i], new=1, group="g", group_size=1000)
        run.step()
        if "o" in run.ends:
            break
    assert i < 10, "the request has starved"
    run.finish()


@each_lag
def test_siblings_decode_as_one_shared_group(lag):
    run, scheduler, _ = service(lag, shared_prefixes=True)
    for i in range(4):
        ask(run, f"g{i}", [*SHARED, i], new=20, group="g", group_size=4)
    for i in range(2):
        ask(run, f"o{i}", [5 + i] * 9, new=20)
    seen, forward = [], run.device.forward

    def noted(plan):
        if plan.shared is not None:
            starts, lens, reqs = plan.shared.starts.tolist(), plan.shared.lens.tolist(), reqs_of(scheduler, plan)
            groups = [{r.rid for r in reqs[a:b]} for a, b in itertools.pairwise(starts)]
            seen.append(dict(zip(map(frozenset, groups), lens, strict=True)))
        return forward(plan)

    run.device.forward = noted
    run.finish()
    assert {"g0", "g1", "g2", "g3"} in [names for groups in seen for names in groups]
    assert all(groups.get(frozenset(["g0", "g1", "g2", "g3"]), 40) == 40 for groups in seen)


def crowd_out(run, count=12):
    """Send other texts through the cache, one after another, until only locked pages of the earlier texts are left."""
    for i in range(count):
        ask(run, f"crowd{len(run.prompts)}", [i, *range(49 - i, 10, -1)], new=1)
        for _ in range(5):
            run.step()
    assert not run.busy


@each_lag
@pytest.mark.parametrize("pinned", [True, False])
def test_what_a_group_shares_is_cached_for_members_that_come_late(lag, pinned):
    run, scheduler, _ = service(lag, num_pages=41, pin_pages=20 if pinned else 0)
    for rid in "abc":
        ask(run, rid, [*SHARED, ord(rid) % 50], group="g", group_size=3)
        for _ in range(6):
            run.step()
        assert not run.busy
        if rid != "c":
            assert scheduler.pins.pages == (10 if pinned else 0)
            crowd_out(run)
    assert scheduler.totals.cached_tokens == (80 if pinned else 0)
    assert scheduler.pins.pages == len(scheduler.groups) == 0
    assert scheduler.totals.pins_taken == (1 if pinned else 0)


def test_the_pin_shrinks_to_what_members_share():
    run, scheduler, _ = service()
    ask(run, "a", [*SHARED, *[3] * 8], group="g", group_size=3)
    run.finish_requests()
    assert scheduler.pins.pages == 12
    ask(run, "b", [*SHARED, *[4] * 8], group="g", group_size=3)
    assert scheduler.pins.pages == 10
    ask(run, "c", [1, 2, 3], group="g", group_size=3)
    assert scheduler.pins.pages == 0
    run.finish()


@pytest.mark.parametrize("kind", ["group", "session"])
def test_pins_give_way_to_requests_that_need_pages(kind):
    """Admission and the next token of running requests take pinned pages: no request waits or is retracted because of
    a pin."""
    for prompt, new in ((116, 4), (60, 60)):
        run, scheduler, _ = service(num_pages=31)
        hints = {"group": "g", "group_size": 2} if kind == "group" else {"session": "s"}
        ask(run, "a", SHARED, new=1, **hints)
        run.finish_requests()
        assert scheduler.pins.pages == 10
        ask(run, "large", [3] * prompt, new=new)
        run.step()
        assert [r.rid for r in scheduler.running] == ["large"], "the request has waited for a pin"
        run.finish()
        assert (scheduler.totals.pins_dropped, scheduler.totals.retractions) == (1, 0)


def test_the_oldest_pin_goes_first_and_no_more_than_needed():
    run, scheduler, _ = service(num_pages=41)
    for i in range(3):
        ask(run, f"s{i}", [i] * 40, new=1, session=f"s{i}")
        run.finish_requests()
    ask(run, "s0'", [*[0] * 40, 1], new=1, session="s0")
    run.finish_requests()
    assert scheduler.pins.pages == 30
    ask(run, "large", [5] * 60, new=1)
    run.finish_requests()
    assert (scheduler.pins.pages, scheduler.totals.pins_dropped) == (20, 1)
    before = scheduler.totals.cached_tokens
    for i in (0, 2, 1):
        ask(run, f"t{i}", [*[i] * 40, 9], new=1)
        run.finish_requests()
    assert scheduler.totals.cached_tokens - before == 2 * 40 + 16, "six pages of the third session were needed"


def test_a_pin_that_was_renewed_is_younger():
    run, scheduler, clock = service(num_pages=41)
    ask(run, "a", SHARED, new=1, group="g", group_size=3)
    run.finish_requests()
    ask(run, "b", [1] * 40, new=1, session="s")
    run.finish_requests()
    clock.now += 30
    ask(run, "a2", SHARED, new=1, group="g", group_size=3)
    run.finish_requests()
    clock.now += 30
    scheduler.expire()
    assert (scheduler.totals.pins_expired, scheduler.pins.pages) == (1, 10), "the session's pin has expired"


def test_pins_stay_within_their_bound():
    run, scheduler, _ = service(pin_pages=12)
    for i, length in enumerate((40, 40, 60)):
        ask(run, f"s{i}", [i] * length, new=1, session=f"s{i}")
        run.finish_requests()
        assert scheduler.pins.pages == 10
    assert scheduler.totals.pins_dropped == 2, "the first was released for the second; the third is too long"
    ask(run, "t", [*[1] * 40, 3, 3, 3, 3, 3], new=1, session="other")
    run.finish_requests()
    assert scheduler.pins.pages == 11, "pages that two pins hold count once"


def test_pins_for_members_that_do_not_arrive_expire():
    run, scheduler, clock = service(pin_seconds=60)
    ask(run, "a", [*SHARED, 1], group="g", group_size=4)
    run.finish_requests()
    clock.now += 50
    ask(run, "b", [*SHARED, 2], group="g", group_size=4)
    run.finish_requests()
    clock.now += 50
    scheduler.expire()
    assert (scheduler.pins.pages, len(scheduler.groups)) == (10, 1), "the second member has renewed the pin"
    clock.now += 10
    scheduler.expire()
    assert (scheduler.pins.pages, len(scheduler.groups), scheduler.totals.pins_expired) == (0, 0, 1)
    ask(run, "late", [*SHARED, 3], group="g", group_size=4)
    run.finish_requests()
    assert scheduler.totals.cached_tokens == 80
    clock.now += 60
    ask(run, "other", [1, 2, 3])
    run.finish()
    assert scheduler.totals.pins_expired == 2


def test_groups_of_two_namespaces_are_two():
    run, scheduler, _ = service()
    for namespace in ("a", "b"):
        ask(run, namespace, SHARED, group="g", group_size=2, namespace=namespace)
    run.finish_requests()
    assert (len(scheduler.groups), scheduler.pins.pages) == (2, 20)
    ask(run, "a2", SHARED, group="g", group_size=2, namespace="a")
    run.finish_requests()
    assert (len(scheduler.groups), scheduler.pins.pages) == (1, 10)


@each_lag
def test_a_request_that_leaves_before_its_turn_counts_as_begun(lag):
    run, scheduler, _ = service(lag, max_running=1)
    for rid in "abc":
        ask(run, rid, [*SHARED, 1], group="g", group_size=3)
    run.step()
    for rid in "bc":
        run.take(scheduler.abort(rid, "changed my mind"))
    assert len(scheduler.groups) == 0
    run.finish()


def test_groups_without_new_members_are_forgotten(monkeypatch):
    monkeypatch.setattr("dovetail.scheduler.groups.MAX_GROUPS", 3)
    run, scheduler, _ = service()
    for i in range(6):
        ask(run, f"r{i}", [i] * 8, group=f"g{i}", group_size=2)
        run.finish_requests()
    assert (len(scheduler.groups), scheduler.pins.pages) == (3, 6)


def test_a_group_has_at_least_one_member():
    run, _, _ = service()
    with pytest.raises(RequestError, match="group_size is 0"):
        ask(run, "a", SHARED, group="g", group_size=0)


@pytest.mark.parametrize("turns", [2, 4])
def test_a_session_keeps_the_last_text_only(turns):
    run, scheduler, _ = service(num_pages=41)
    text = SHARED[:20]
    for turn in range(turns):
        ask(run, f"t{turn}", text, new=5, session="s")
        run.finish_requests()
        known = len(run.texts[f"t{turn}"]) - 1  # the last token has not entered a step
        assert scheduler.pins.pages == known // PAGE
        crowd_out(run)
        assert run.cached[f"t{turn}"] == (0 if turn == 0 else (len(text) - 2 - 1) // PAGE * PAGE)
        text = [*run.texts[f"t{turn}"], 1, 2]
    assert scheduler.totals.pins_dropped == 0


def test_a_failed_request_keeps_nothing():
    run, scheduler, _ = service()
    ask(run, "a", SHARED, new=1)
    run.finish_requests()
    ask(run, "b", [*SHARED, *SHARED], new=5, session="s")
    scheduler.fail(scheduler.schedule(), "broken")
    assert scheduler.pins.pages == 0
    assert scheduler.ledger.cache.total == (10,)


def test_the_operator_ends_all_pins():
    run, scheduler, _ = service()
    ask(run, "a", SHARED, session="s")
    ask(run, "b", [*SHARED, 1], group="g", group_size=2)
    run.finish_requests()
    assert scheduler.pins.pages > 0
    ask(run, "c", [*SHARED, 1], session="t")
    run.step()
    run.take(scheduler.abort_all("maintenance"))
    assert (scheduler.pins.pages, len(scheduler.groups)) == (0, 0)
    assert scheduler.totals.pins_dropped == 0
    run.finish()


@pytest.mark.parametrize("limits", [{"cache": "none"}, {"pin_pages": 0}, {"pin_seconds": 0}], ids=str)
def test_where_nothing_is_kept_hints_change_nothing(limits):
    run, scheduler, _ = service(**limits)
    for i in range(4):
        ask(run, f"g{i}", [*SHARED, i], group="g", group_size=5, session=f"s{i}")
    run.finish()
    assert (scheduler.totals.pins_taken, scheduler.totals.pins_dropped, scheduler.pins.pages) == (0, 0, 0)


@each_lag
@pytest.mark.parametrize("chunk", [7, 100])
def test_no_new_tokens_compute_and_cache_the_prompt(lag, chunk):
    run, scheduler, _ = service(lag, chunk_size=chunk)
    for rid in "ab":  # all pages of the second prompt but the last are cached
        ask(run, rid, SHARED, new=0)
        run.finish()
        assert (run.ends[rid], run.texts[rid]) == (FinishKind.LENGTH, SHARED)
    assert scheduler.ledger.cache.total == (10,)
    assert scheduler.totals.generated_tokens == 0
    ask(run, "c", [*SHARED, 1], new=3)
    run.finish()
    assert run.cached == {"a": 0, "b": 36, "c": 40}


@pytest.mark.parametrize("lag", [False, True])
def test_no_new_tokens_amid_others(lag):
    """Drafts, retraction and aborts take part; requests that ask for tokens get all of them."""
    drafts = None if lag else half_right
    run, scheduler, _ = service(lag, num_pages=40, drafts=drafts, draft_width=0 if lag else 3, chunk_size=30)
    for i in range(20):
        ask(run, f"r{i}", [i] * (5 + 2 * i), new=0 if i % 2 else 40)
        run.step()
        if i % 7 == 6:
            run.take(scheduler.abort(f"r{i}", "changed my mind"))
    run.finish()
    assert scheduler.totals.retractions > 0
    for i in range(20):
        if i % 7 != 6:
            assert len(run.texts[f"r{i}"]) == 5 + 2 * i + (0 if i % 2 else 40)
