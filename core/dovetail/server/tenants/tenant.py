"""One tenant while the server runs: what it may still use, and what it has used."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dovetail.config.tenants import TenantLimits
from dovetail.errors import RateLimitError, RequestError
from dovetail.server.tenants.buckets import TokenBucket

Clock = Callable[[], float]

_SOON = 1.0
"""Seconds after which to come again where nothing tells when there will be room."""

_BETWEEN = 0.05
"""Seconds between two refusals: even these take the time of others, where a client sends at once again what was refused, over
many connections."""

_LONGEST = 2.0
"""Seconds that a refusal waits at most."""


@dataclass(slots=True)
class TenantUsage:
    """Totals since the server started."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Tenant:
    """The state of one tenant; belongs to one event loop.

    A request passes two gates. ``arrive`` counts it before anything of it is read, so that what is malformed or too large
    costs its sender as well. ``admit`` knows what it asks for, and reserves it: outputs at the same time, and the tokens of its
    prompts and of its longest possible outputs; the ``Lease`` gives back what was not used.
    """

    def __init__(self, name: str, limits: TenantLimits, salt: str, clock: Clock = time.monotonic) -> None:
        """``salt`` begins the namespaces of its cached prefixes."""
        self.name = name
        self.salt = salt
        self.limits = limits
        self.running = 0
        self.used = TenantUsage()
        self.refused: Counter[str] = Counter()
        self._clock = clock
        self._told = clock()
        self._requests = _bucket(None, limits.requests_per_minute, clock())
        self._tokens = _bucket(None, limits.tokens_per_minute, clock())

    def update(self, limits: TenantLimits, salt: str) -> None:
        """Other limits from now on; what runs and what was used stays counted."""
        now = self._clock()
        self.limits = limits
        self.salt = salt
        self._requests = _bucket(self._requests, limits.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now)

    def namespace(self, own: str) -> str:
        """Where its prefixes are cached; ``own`` is what the request says, which divides that further. Salts have no slash,
        so that no two pairs make one name."""
        return f"{self.salt}/{own}"

    def priority(self, own: int) -> int:
        """Of a request that asks for ``own``: it may come after the tenant's others, not before them."""
        return max(self.limits.priority + min(own, 0), -(2**31))

    def arrive(self) -> None:
        """A request has come. Raises ``RateLimitError``."""
        self._wait_for_requests(1)
        if self._requests is not None:
            self._requests.take(1, self._clock())

    def admit(self, outputs: int, prompt_tokens: int, new_tokens: int) -> Lease:
        """Let a request that has arrived run: ``prompt_tokens`` of all its prompts, at most ``new_tokens`` of all its outputs.
        Raises ``RateLimitError``, and ``RequestError`` for what would never be let in; nothing is taken then."""
        self._check_possible(outputs, prompt_tokens)
        most = self.limits.max_concurrency
        if most is not None and self.running + outputs > most:
            self._refuse(
                "concurrency",
                f"{outputs} more than the {self.running} that run; allowed: {most} outputs at a time",
                _SOON,
            )
        self._wait_for_requests(outputs - 1)
        reserved = self._wait_for_tokens(prompt_tokens + new_tokens)
        if self._requests is not None:
            self._requests.take(outputs - 1, self._clock())
        self.running += outputs
        return Lease(self, outputs, reserved)

    def settle(self, outputs: int, reserved: int, used: int) -> None:
        """A request has ended."""
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
        """Reserve tokens, a minute's at most: what an output makes beyond that is charged at its end. Returns how many."""
        bucket = self._tokens
        if bucket is None:
            return 0
        now = self._clock()
        reserved = min(count, int(bucket.capacity))
        wait = bucket.wait(reserved, now)
        if wait:
            text = f"allowed: {self.limits.tokens_per_minute} tokens a minute; this request reserves {reserved}"
            self._refuse("tokens", f"{text} for its prompt and the longest output that it asks for", wait)
        bucket.take(reserved, now)
        return reserved

    def _refuse(self, reason: str, text: str, wait: float) -> None:
        self.refused[reason] += 1
        now = self._clock()
        self._told = min(max(self._told, now) + _BETWEEN, now + _LONGEST)
        raise RateLimitError(f"the limit of {self.name!r} is reached: {text}", wait, self._told - now)


class Lease:
    """What a running request holds of its tenant's limits, until ``settle``."""

    def __init__(self, tenant: Tenant, outputs: int, reserved: int) -> None:
        self._tenant: Tenant | None = tenant
        self._outputs = outputs
        self._reserved = reserved

    def settle(self, used: int) -> None:
        """The request has ended and took ``used`` tokens. Only the first call counts."""
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
