"""Enforce the limits of one tenant and count its usage while the server runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dovetail.config.tenants import TenantLimits
from dovetail.errors import RateLimitError, RequestError
from dovetail.server.tenants.buckets import TokenBucket

Clock = Callable[[], float]

_DEFAULT_RETRY_SECONDS = 1.0
"""Seconds after which to retry if the time of the next free slot is unknown."""

_REFUSAL_INTERVAL = 0.05
"""Seconds between two refusals of one tenant. Without this delay, a client that sends refused requests again at once over many
connections would take time from other tenants."""

_MAX_REFUSAL_DELAY = 2.0
"""The longest time in seconds that a refusal is delayed."""


@dataclass(slots=True)
class TenantUsage:
    """Count the totals of a tenant since the server started."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Tenant:
    """Hold the state of one tenant. An object belongs to one event loop.

    A request is checked twice. ``arrive`` counts it before its body is read, so that malformed and too large requests count as
    well. ``admit`` reserves what it requests: concurrent outputs, and the tokens of its prompts and of its longest possible
    outputs. The ``Lease`` gives back what was not used.
    """

    def __init__(self, name: str, limits: TenantLimits, salt: str, clock: Clock = time.monotonic) -> None:
        """``salt`` is the first part of the namespaces of the tenant's cached prefixes."""
        self.name = name
        self.salt = salt
        self.limits = limits
        self.running = 0
        self.used = TenantUsage()
        self.refused: Counter[str] = Counter()
        self._clock = clock
        self._next_refusal = clock()
        self._requests = _bucket(None, limits.requests_per_minute, clock())
        self._tokens = _bucket(None, limits.tokens_per_minute, clock())

    def update(self, limits: TenantLimits, salt: str) -> None:
        """Change the limits. Running requests and usage stay counted."""
        now = self._clock()
        self.limits = limits
        self.salt = salt
        self._requests = _bucket(self._requests, limits.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now)

    def namespace(self, own: str) -> str:
        """Return the namespace of a request's cached prefixes. ``own`` is the namespace that the request gives, which divides the
        tenant's further. Salts contain no slash, so that two different pairs never give the same name."""
        return f"{self.salt}/{own}"

    def priority(self, own: int) -> int:
        """Return the priority of a request that gives ``own``. It may lower the tenant's priority, not raise it."""
        return max(self.limits.priority + min(own, 0), -(2**31))

    def arrive(self) -> None:
        """Count a request that has arrived. Raises ``RateLimitError``."""
        self._wait_for_requests(1)
        if self._requests is not None:
            self._requests.take(1, self._clock())

    def admit(self, outputs: int, prompt_tokens: int, new_tokens: int) -> Lease:
        """Admit a request that has arrived. ``prompt_tokens`` is the number of tokens of all its prompts, ``new_tokens`` the largest
        number that all its outputs together can have. Raises ``RateLimitError``, or ``RequestError`` for a request that can never be admitted; nothing is
        reserved then."""
        self._check_possible(outputs, prompt_tokens)
        most = self.limits.max_concurrency
        if most is not None and self.running + outputs > most:
            self._refuse(
                "concurrency",
                f"the request has {outputs} outputs and {self.running} are running; allowed: {most} outputs at the same time",
                _DEFAULT_RETRY_SECONDS,
            )
        self._wait_for_requests(outputs - 1)
        reserved = self._wait_for_tokens(prompt_tokens + new_tokens)
        if self._requests is not None:
            self._requests.take(outputs - 1, self._clock())
        self.running += outputs
        return Lease(self, outputs, reserved)

    def settle(self, outputs: int, reserved: int, used: int) -> None:
        """Record that a request has ended."""
        self.running -= outputs
        if self._tokens is not None:
            self._tokens.take(used - reserved, self._clock())

    def _check_possible(self, outputs: int, prompt_tokens: int) -> None:
        limits = self.limits
        for name, most in (
            ("max_concurrency", limits.max_concurrency),
            ("requests_per_minute", limits.requests_per_minute),
        ):
            if most is not None and outputs > most:
                raise RequestError(
                    f"the request asks for {outputs} outputs; {name} of {self.name!r} is {most}", code="over_limit"
                )
        most = limits.tokens_per_minute
        if most is not None and prompt_tokens >= most:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens; tokens_per_minute of {self.name!r} is {most}, for prompt and output",
                code="over_limit",
            )

    def _wait_for_requests(self, count: int) -> None:
        bucket = self._requests
        wait = bucket.wait(count, self._clock()) if bucket is not None else 0.0
        if wait:
            self._refuse("requests", f"allowed: {self.limits.requests_per_minute} requests a minute", wait)

    def _wait_for_tokens(self, count: int) -> int:
        """Reserve tokens and return their number, which is at most the amount per minute. Tokens beyond it are charged when the
        request ends."""
        bucket = self._tokens
        if bucket is None:
            return 0
        now = self._clock()
        reserved = min(count, int(bucket.capacity))
        wait = bucket.wait(reserved, now)
        if wait:
            text = f"allowed: {self.limits.tokens_per_minute} tokens a minute; this request reserves {reserved}"
            self._refuse("tokens", f"{text} for its prompt and its longest possible output", wait)
        bucket.take(reserved, now)
        return reserved

    def _refuse(self, reason: str, text: str, wait: float) -> None:
        self.refused[reason] += 1
        now = self._clock()
        self._next_refusal = min(max(self._next_refusal, now) + _REFUSAL_INTERVAL, now + _MAX_REFUSAL_DELAY)
        raise RateLimitError(f"the limit of {self.name!r} is reached: {text}", wait, self._next_refusal - now)


class Lease:
    """Hold what a running request reserves of its tenant's limits, until ``settle``."""

    def __init__(self, tenant: Tenant, outputs: int, reserved: int) -> None:
        self._tenant: Tenant | None = tenant
        self._outputs = outputs
        self._reserved = reserved

    def settle(self, used: int) -> None:
        """Record that the request has ended and used ``used`` tokens. Only the first call counts."""
        if self._tenant is not None:
            tenant, self._tenant = self._tenant, None
            tenant.settle(self._outputs, self._reserved, used)


def _bucket(old: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if old is None:
        return TokenBucket(per_minute, now)
    old.resize(per_minute, now)
    return old
