"""A running request: the events that its worker thread passes to the event loop, and how it ends.

Notable here:
- the thread never waits for the client: events are in a queue that is at most one answer long
- the time limit is a timer of the event loop, not a wait around each step, so it applies to whichever task reads the
  events
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from pippin.core.errors import TimedOut
from pippin.serve import logs
from pippin.serve.settings import NO_ADAPTER
from pippin.session.providers.provider import Done, ProviderEvent
from pippin.session.response import Usage

if TYPE_CHECKING:
    from pippin.serve.limits import Caller
    from pippin.session.providers.provider import ProviderRequest


class ActiveRequest:
    """A request between its arrival and its end.

    Args:
        model: the name of the model.
        adapter: the name of the adapter, `NO_ADAPTER` for the base model alone, None for what suits the request.
        caller: the sender of the request.
        seconds: time limit, after which the request raises `TimedOut`.
        clock: a monotonic clock in seconds.
        priority: -10 to 10; higher priorities run first.
    """

    def __init__(
        self,
        model: str,
        adapter: str | None,
        caller: Caller,
        seconds: float,
        clock: Callable[[], float],
        *,
        priority: int = 0,
    ) -> None:
        self.model, self.adapter, self.caller, self._clock = model, adapter, caller, clock
        self.priority = priority
        self.began = clock()
        self.entered = self.began
        self.first_token: float | None = None
        self.usage, self.counted = Usage(), False
        self.record = logs.current.get()
        if self.record is not None:
            self.record.model = model if adapter is None else f"{model}:{adapter}"
        self.provider_request: ProviderRequest | None = None
        self.cancelled = False
        self._limit = seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: asyncio.Queue[ProviderEvent | BaseException | None] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None

    def adapter_or(self, suitable: str | None) -> str | None:
        """The adapter that answers: the one that was named, otherwise the one that suits the request."""
        return None if self.adapter == NO_ADAPTER else self.adapter or suitable

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit, 0 or above."""
        return max(0.0, self._limit - (self._clock() - self.began))

    def timed_out(self) -> TimedOut:
        """The error of a request that took too long."""
        return TimedOut(f"the answer was not complete within the {self._limit:g} seconds that this server allows")

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the timer of the time limit."""
        self._loop = loop
        self._timer = loop.call_later(self.seconds_left, self._expire)

    def post(self, event: ProviderEvent | BaseException | None) -> None:
        """Pass an event, an error, or None for the end; called from the worker thread."""
        if isinstance(event, Done):
            self.usage = event.usage
        assert self._loop is not None
        if not self.cancelled:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def events(self) -> AsyncIterator[ProviderEvent]:
        """The events as they arrive; ends after the last one or raises the error of the request."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event

    def cancel(self) -> None:
        """End it before its next token, because nobody reads its events any more. No effect once it is over."""
        self.cancelled = True
        if self._timer is not None:
            self._timer.cancel()
        if self.provider_request is not None:
            self.provider_request.cancel.set()

    def abort(self, error: BaseException) -> None:
        """End it before its next token and raise ``error`` to the reader of its events."""
        if not self.cancelled:
            self._events.put_nowait(error)
            self.cancel()

    def _expire(self) -> None:
        self.abort(self.timed_out())
