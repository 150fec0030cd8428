"""One request on its way: what its worker thread hands to the event loop, and the ways in which it may end.

Notable here:
- the thread never waits for the client: events lie in a queue that is at most one answer long
- the time limit is a timer of the loop, not a wait around each step, so it holds whichever task reads the events
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from pippin.core.errors import TimedOut
from pippin.serve import logs
from pippin.session.provider import Done, TurnEvent
from pippin.session.response import Usage

if TYPE_CHECKING:
    from pippin.serve.limits import Caller
    from pippin.session.provider import Turn


class Flight:
    """A request between its arrival and its end.

    Args:
        model: the name of its model.
        adapter: and of its adapter; None for the plain model.
        caller: who asks.
        seconds: until `TimedOut`.
        clock: seconds that only go up.
        priority: -10 to 10; higher ones go before lower ones.
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
        self.turn: Turn | None = None
        self.cancelled = False
        self._limit = seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: asyncio.Queue[TurnEvent | BaseException | None] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def seconds_left(self) -> float:
        """Until the time limit, 0 or above."""
        return max(0.0, self._limit - (self._clock() - self.began))

    def timed_out(self) -> TimedOut:
        """The error of a request that took too long."""
        return TimedOut(f"the answer was not complete within the {self._limit:g} seconds that this server allows")

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch the time."""
        self._loop = loop
        self._timer = loop.call_later(self.seconds_left, self._expire)

    def post(self, event: TurnEvent | BaseException | None) -> None:
        """Hand over an event, an error, or None for the end; from the worker thread."""
        if isinstance(event, Done):
            self.usage = event.usage
        assert self._loop is not None
        if not self.cancelled:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def events(self) -> AsyncIterator[TurnEvent]:
        """The events as they come; ends after the last one or raises what went wrong."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event

    def cancel(self) -> None:
        """End it before its next token; whoever reads its events has gone. No harm once it is over."""
        self.cancelled = True
        if self._timer is not None:
            self._timer.cancel()
        if self.turn is not None:
            self.turn.cancel.set()

    def abort(self, error: BaseException) -> None:
        """End it before its next token and tell whoever reads its events why."""
        if not self.cancelled:
            self._events.put_nowait(error)
            self.cancel()

    def _expire(self) -> None:
        self.abort(self.timed_out())
