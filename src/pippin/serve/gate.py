"""Who may enter next: a bounded number at once, and turns taken between callers.

Notable here:
- callers take turns, so that one with a hundred requests does not make another with one wait for all of them; requests
  of a higher priority go before all others
- a few more than the slots are let in ahead, so that a slot that falls free finds the next prompt already prepared
- to be used from one event loop; what waits is a future, not a thread
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class Gate:
    """Lets a bounded number of requests in.

    Args:
        slots: requests that are really answered at once.
        ahead: requests let in beyond them.
    """

    def __init__(self, slots: int, *, ahead: int = 0) -> None:
        self.slots, self.limit = slots, slots + ahead
        self.inside = 0
        self._lanes: dict[int, OrderedDict[str, deque[asyncio.Future[None]]]] = {}  # by priority, then by caller

    @property
    def active(self) -> int:
        """Requests in a slot."""
        return min(self.inside, self.slots)

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet, let in or not."""
        return self.inside - self.active + sum(len(lane) for lanes in self._lanes.values() for lane in lanes.values())

    async def enter(self, caller: str, priority: int = 0) -> None:
        """Wait for one's turn; `leave` must follow, unless this raises."""
        if self.inside < self.limit and not self._lanes:
            self.inside += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lanes.setdefault(priority, OrderedDict()).setdefault(caller, deque()).append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.leave()  # the turn came in the same moment
            else:
                self._forget(priority, caller, turn)
            raise

    def leave(self) -> None:
        """Make room for the next."""
        self.inside -= 1
        while self.inside < self.limit and self._lanes:
            priority = max(self._lanes)
            lanes = self._lanes[priority]
            caller, lane = lanes.popitem(last=False)
            turn = lane.popleft()
            if lane:
                lanes[caller] = lane  # behind the others
            elif not lanes:
                del self._lanes[priority]
            if not turn.done():
                turn.set_result(None)
                self.inside += 1

    def _forget(self, priority: int, caller: str, turn: asyncio.Future[None]) -> None:
        lanes = self._lanes.get(priority, OrderedDict())
        lane = lanes.get(caller)
        if lane is not None and turn in lane:
            lane.remove(turn)
            if not lane:
                del lanes[caller]
            if not lanes:
                del self._lanes[priority]
