"""Rate limits per caller: token buckets per minute, a daily quota, and the remaining amounts as headers.

Notable here:
- the clock is an argument, so tests need not wait
- tokens are charged when they are known, after the answer: the requests that are running can take a caller below zero,
  and it waits until the balance is positive
- callers that have not sent a request for a while use no memory: a full bucket is the same as none
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pippin.core.checks import PositiveFloat, checked
from pippin.core.errors import QuotaExceeded, RateLimited
from pippin.serve.settings import ServerSettings

DAY = 86_400.0
_MOST_CALLERS = 10_000


@dataclass(frozen=True)
class Caller:
    """The sender of a request.

    Args:
        id: separates the data of callers: the name of the key, or the address if there are no keys.
        key_name: the name of the key; empty if there are no keys.
    """

    id: str
    key_name: str = ""


class Bucket:
    """Holds ``capacity`` tokens, regains ``rate`` a second, and may be charged below zero.

    Args:
        capacity: maximum amount; it starts full.
        rate: tokens regained each second.
        clock: a monotonic clock in seconds.

    >>> now = 0.0
    >>> bucket = Bucket(2, 1, clock=lambda: now)
    >>> bucket.take(), bucket.take(), bucket.take()
    (0.0, 0.0, 1.0)
    """

    @checked
    def __init__(
        self, capacity: PositiveFloat, rate: PositiveFloat, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.capacity, self.rate, self._clock = capacity, rate, clock
        self._level, self._then = float(capacity), clock()

    @property
    def level(self) -> float:
        """Tokens in it now; a negative number is debt."""
        now = self._clock()
        self._level = min(self.capacity, self._level + max(0.0, now - self._then) * self.rate)
        self._then = max(now, self._then)
        return self._level

    def wait(self, tokens: float = 1) -> float:
        """Seconds until it contains ``tokens``; infinite if they never fit."""
        if tokens > self.capacity:
            return math.inf
        return max(0.0, (tokens - self.level) / self.rate)

    def take(self, tokens: float = 1) -> float:
        """Take tokens out and return 0, or take none and return the seconds until they are available."""
        seconds = self.wait(tokens)
        if seconds == 0.0:
            self._level -= tokens
        return seconds

    def charge(self, tokens: float) -> None:
        """Take tokens out, even below zero."""
        self._level = self.level - tokens

    def until_full(self) -> float:
        """Seconds until it is full again."""
        return max(0.0, (self.capacity - self.level) / self.rate)


class _Account:
    """The remaining amounts of one caller."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float]) -> None:
        self.requests = self.tokens = None
        if settings.requests_per_minute is not None:
            self.requests = Bucket(settings.requests_per_minute, settings.requests_per_minute / 60, clock=clock)
        if settings.tokens_per_minute is not None:
            self.tokens = Bucket(settings.tokens_per_minute, settings.tokens_per_minute / 60, clock=clock)
        self.day, self.spent = -1, 0


class Limits:
    """The accounts of all callers.

    Args:
        settings: the limits.
        clock: a monotonic clock in seconds.
        date: seconds since the epoch, for the daily quota.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        date: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._clock, self._date = settings, clock, date
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        rates = (settings.requests_per_minute, settings.tokens_per_minute, settings.tokens_per_day)
        self.enabled = any(rate is not None for rate in rates)

    def admit(self, caller: Caller) -> None:
        """Count one request.

        Raises:
            RateLimited: too many requests or tokens in the last minute; ``retry_after`` is the time to wait.
            QuotaExceeded: the daily tokens are used up.
        """
        if not self.enabled:
            return
        settings, account = self._settings, self._account(caller)
        if settings.tokens_per_day is not None and account.spent >= settings.tokens_per_day:
            raise QuotaExceeded(
                f"the {settings.tokens_per_day:,} tokens of this day are used up; they return at midnight UTC",
                retry_after=DAY - self._date() % DAY,
            )
        if account.tokens is not None and (seconds := account.tokens.wait(1)):
            raise RateLimited(
                f"more than {settings.tokens_per_minute:,} tokens in a minute; wait {math.ceil(seconds)} s",
                retry_after=seconds,
            )
        if account.requests is not None and (seconds := account.requests.take()):
            raise RateLimited(
                f"more than {settings.requests_per_minute:,} requests in a minute; wait {math.ceil(seconds)} s",
                retry_after=seconds,
            )

    def charge(self, caller: Caller, tokens: int) -> None:
        """Count the input and output tokens of a request."""
        if not self.enabled or not tokens:
            return
        account = self._account(caller)
        account.spent += tokens
        if account.tokens is not None:
            account.tokens.charge(tokens)

    def headers(self, caller: Caller) -> dict[str, str]:
        """The remaining amounts, under OpenAI's header names; empty if nothing is limited."""
        if not self.enabled:
            return {}
        account, found = self._account(caller), {}
        for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = f"{bucket.capacity:.0f}"
                found[f"x-ratelimit-remaining-{name}"] = f"{max(0, math.floor(bucket.level))}"
                found[f"x-ratelimit-reset-{name}"] = f"{bucket.until_full():.3f}s"
        if self._settings.tokens_per_day is not None:
            found["x-quota-limit-tokens"] = f"{self._settings.tokens_per_day}"
            found["x-quota-remaining-tokens"] = f"{max(0, self._settings.tokens_per_day - account.spent)}"
        return found

    def _account(self, caller: Caller) -> _Account:
        account = self._accounts.pop(caller.id, None) or _Account(self._settings, self._clock)
        self._accounts[caller.id] = account  # the most recent caller is last
        while len(self._accounts) > _MOST_CALLERS:
            self._accounts.popitem(last=False)
        day = int(self._date() // DAY)
        if day != account.day:
            account.day, account.spent = day, 0
        return account
