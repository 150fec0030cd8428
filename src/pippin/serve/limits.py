"""How much one caller may use: token buckets per minute, a quota per day, and what is left of them as headers.

Notable here:
- the clock is an argument, so the laws are tested without waiting
- tokens are charged when they are known, after the answer: a caller may go into debt by what runs at that moment, and
  waits until it is paid off
- callers that have not asked for a while cost nothing: a full bucket is the same as none
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pippin.core.errors import InvalidArgument, QuotaExceeded, RateLimited
from pippin.serve.settings import Settings

DAY = 86_400.0
_MOST_CALLERS = 10_000


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Args:
        id: keeps one caller's things apart from another's: the name of the key, or the address where there are none.
        key_name: the name of the key; empty where there are none.
    """

    id: str
    key_name: str = ""


class Bucket:
    """Holds ``capacity`` tokens, regains ``rate`` a second, and may be charged below zero.

    Args:
        capacity: most that it holds; it begins full.
        rate: tokens regained each second.
        clock: seconds that only go up.

    >>> now = 0.0
    >>> bucket = Bucket(2, 1, clock=lambda: now)
    >>> bucket.take(), bucket.take(), bucket.take()
    (0.0, 0.0, 1.0)
    """

    def __init__(self, capacity: float, rate: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not capacity > 0 or not rate > 0:
            raise InvalidArgument(f"a bucket needs a capacity and a rate above 0, got {capacity} and {rate}")
        self.capacity, self.rate, self._clock = capacity, rate, clock
        self._level, self._then = float(capacity), clock()

    @property
    def level(self) -> float:
        """Tokens in it now; below zero is debt."""
        now = self._clock()
        self._level = min(self.capacity, self._level + max(0.0, now - self._then) * self.rate)
        self._then = max(now, self._then)
        return self._level

    def wait(self, tokens: float = 1) -> float:
        """Seconds until so many are in it; infinite if they never fit."""
        if tokens > self.capacity:
            return math.inf
        return max(0.0, (tokens - self.level) / self.rate)

    def take(self, tokens: float = 1) -> float:
        """Take tokens out and return 0, or take none and return the seconds until they are there."""
        seconds = self.wait(tokens)
        if seconds == 0.0:
            self._level -= tokens
        return seconds

    def charge(self, tokens: float) -> None:
        """Take tokens out, whether they are there or not."""
        self._level = self.level - tokens

    def until_full(self) -> float:
        """Seconds until it is full again."""
        return max(0.0, (self.capacity - self.level) / self.rate)


class _Account:
    """What one caller has left."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
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
        clock: seconds that only go up.
        date: seconds since the epoch, for the quota of a day.
    """

    def __init__(
        self,
        settings: Settings,
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
            RateLimited: too many requests or tokens in the last minute; ``retry_after`` says when to come back.
            QuotaExceeded: the tokens of the day are used up.
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
        """Count tokens that a request has read and written."""
        if not self.enabled or not tokens:
            return
        account = self._account(caller)
        account.spent += tokens
        if account.tokens is not None:
            account.tokens.charge(tokens)

    def headers(self, caller: Caller) -> dict[str, str]:
        """What a caller has left, under the names that OpenAI uses; empty where nothing is limited."""
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
        self._accounts[caller.id] = account  # the one that asked last stands last
        while len(self._accounts) > _MOST_CALLERS:
            self._accounts.popitem(last=False)
        day = int(self._date() // DAY)
        if day != account.day:
            account.day, account.spent = day, 0
        return account
