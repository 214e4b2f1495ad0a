"""Test token buckets and the limits of a tenant.

Run: pytest tests/core/test_tenants_limits.py
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.config.tenants import TenantLimits
from dovetail.errors import RateLimitError, RequestError
from dovetail.server.tenants.buckets import TokenBucket
from dovetail.server.tenants.tenant import Tenant


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def tenant(clock, **limits):
    return Tenant("acme", TenantLimits(**limits), "acme", clock)


def refusal(call, *args):
    with pytest.raises(RateLimitError) as caught:
        call(*args)
    return caught.value


# the bucket


def test_a_bucket_is_full_at_first_and_fills_at_its_rate():
    bucket = TokenBucket(60, 0.0)
    bucket.take(60, 0.0)
    assert bucket.wait(1, 0.0) == 1.0
    assert bucket.wait(60, 0.0) == 60.0
    assert bucket.wait(10, 10.0) == 0.0
    assert bucket.level(10_000.0) == 60


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(-50, 50), st.integers(0, 1000), st.floats(0, 1)), max_size=60),
)
def test_no_minute_gets_more_than_a_full_bucket_and_what_flows_in(per_minute, steps):
    """For every interval, with clocks that go back and with refunds: taken <= capacity + time * rate."""
    now = latest = 0.0
    bucket, used = TokenBucket(per_minute, now), 0.0
    for step, amount, share_used in steps:
        now += step
        latest = max(latest, now)
        amount = min(amount, per_minute)
        if bucket.wait(amount, now) == 0.0:
            bucket.take(amount, now)
            bucket.take(-(amount - int(amount * share_used)), now)
            used += int(amount * share_used)
        assert bucket.level(now) <= per_minute
        assert used <= per_minute + latest * per_minute / 60 + 1e-3


def test_waiting_for_the_reported_time_is_enough():
    for per_minute in (1, 7, 60, 977):
        bucket = TokenBucket(per_minute, 0.1)
        bucket.take(per_minute, 0.1)
        at = 0.1 + bucket.wait(1, 0.1)
        assert bucket.wait(1, at) == 0.0


def test_a_clock_that_goes_back_fills_nothing_twice():
    bucket = TokenBucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.level(50.0) == 0
    assert bucket.level(100.0) == 0
    assert bucket.level(101.0) == 1


def test_another_rate_keeps_what_was_used():
    bucket = TokenBucket(60, 0.0)
    bucket.take(50, 0.0)
    bucket.resize(100, 0.0)
    assert bucket.level(0.0) == 50
    bucket.resize(10, 0.0)
    assert bucket.level(0.0) == -40
    assert bucket.level(600.0) == 10


# a tenant


def test_without_limits_everything_is_let_in(clock):
    one = tenant(clock)
    for _ in range(1000):
        one.arrive()
        one.admit(128, 10**6, 10**6)
    assert one.running == 128_000


def test_requests_a_minute(clock):
    one = tenant(clock, requests_per_minute=6)
    for _ in range(6):
        one.arrive()
        one.admit(1, 1, 1)
    assert refusal(one.arrive).retry_after == pytest.approx(10)
    clock.now += 10
    one.arrive()
    assert one.refused == {"requests": 1}


def test_each_output_counts_as_a_request(clock):
    one = tenant(clock, requests_per_minute=6)
    one.arrive()
    one.admit(6, 1, 1)
    refusal(one.arrive)
    clock.now += 30  # three tokens are available again
    one.arrive()
    refusal(one.admit, 4, 1, 1)
    one.admit(3, 1, 1)


def test_concurrency_counts_outputs_and_is_given_back_once(clock):
    one = tenant(clock, max_concurrency=4)
    lease = one.admit(3, 1, 1)
    assert refusal(one.admit, 2, 1, 1).retry_after == 1
    one.admit(1, 1, 1)
    for _ in range(3):
        lease.settle(5)
    assert one.running == 1
    one.admit(3, 1, 1)


def test_tokens_are_reserved_and_what_is_left_comes_back(clock):
    one = tenant(clock, tokens_per_minute=600)
    lease = one.admit(1, 100, 400)
    assert refusal(one.admit, 1, 100, 100).retry_after == pytest.approx(10)
    lease.settle(110)
    one.admit(1, 90, 400)
    refusal(one.admit, 1, 1, 1)


def test_more_output_than_a_minute_holds_takes_all_of_it_and_the_rest_as_debt(clock):
    one = tenant(clock, tokens_per_minute=600)
    lease = one.admit(1, 100, 100_000)
    lease.settle(900)  # 300 more than were available
    assert refusal(one.admit, 1, 1, 59).retry_after == pytest.approx(36)
    clock.now += 36
    one.admit(1, 1, 59)


def test_a_refused_request_takes_nothing(clock):
    one = tenant(clock, requests_per_minute=100, tokens_per_minute=100, max_concurrency=4)
    one.admit(2, 50, 40)
    before = (one.running, one._requests.level(clock.now), one._tokens.level(clock.now))
    refusal(one.admit, 3, 1, 1)  # concurrency
    refusal(one.admit, 2, 10, 10)  # tokens
    for impossible in ((5, 1, 1), (1, 100, 1)):
        with pytest.raises(RequestError, match="'acme' is") as caught:
            one.admit(*impossible)
        assert caught.value.code == "over_limit"
    assert (one.running, one._requests.level(clock.now), one._tokens.level(clock.now)) == before


@given(st.lists(st.tuples(st.sampled_from(["admit", "settle", "wait", "update"]), st.integers(1, 50)), max_size=80))
def test_whatever_comes_all_is_given_back_in_the_end(steps):
    clock = Clock()
    one = tenant(clock, tokens_per_minute=1000, max_concurrency=20, requests_per_minute=1000)
    open_ = []
    for what, amount in steps:
        if what == "admit" and one.running + amount % 5 + 1 <= 20:
            with suppress(RateLimitError):
                open_.append(one.admit(amount % 5 + 1, amount, amount * 3))
        elif what == "settle" and open_:
            open_.pop(amount % len(open_)).settle(amount)
        elif what == "wait":
            clock.now += amount
        elif what == "update":
            one.update(
                TenantLimits(tokens_per_minute=500 + amount, max_concurrency=20, requests_per_minute=900), "acme"
            )
        assert 0 <= one.running <= 20
    for lease in open_:
        lease.settle(0)
    assert one.running == 0
    clock.now += 3600
    assert one._tokens.level(clock.now) == one._tokens.capacity


def test_refusals_come_one_after_another_for_a_client_that_does_not_wait(clock):
    one, other = (tenant(clock, requests_per_minute=1) for _ in range(2))
    one.arrive()
    pauses = [refusal(one.arrive).pause for _ in range(100)]
    assert pauses[:3] == pytest.approx([0.05, 0.1, 0.15])
    assert pauses[-1] == pytest.approx(2)
    other.arrive()
    assert refusal(other.arrive).pause == pytest.approx(0.05)
    clock.now += 3
    assert refusal(one.arrive).pause == pytest.approx(0.05)


def test_namespaces_of_two_tenants_never_meet(clock):
    names = {
        Tenant(name, TenantLimits(), salt, clock).namespace(own)
        for name, salt in (("a", "a"), ("b", "b"), ("a.b", "a.b"), ("ops", "admin:ops"))
        for own in ("", "b", "a/b", "/", "ops")
    }
    assert len(names) == 20


def test_a_request_may_come_after_its_tenants_others_and_not_before(clock):
    one = tenant(clock, priority=5)
    assert [one.priority(own) for own in (-3, 0, 1, 10**9)] == [2, 5, 5, 5]
    assert tenant(clock, priority=-(2**31)).priority(-5) == -(2**31)
