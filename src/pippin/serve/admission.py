"""Admission queue: a bounded number of requests at once, scheduled fairly between callers.

Notable here:
- callers take turns (round robin), so that a caller with a hundred requests does not delay another with one; requests
  of a higher priority go before all others
- a few more than `max_num_seqs` are admitted ahead, so that the next prompt is prepared when an answer ends
- to be used from one event loop; a waiting request is a future, not a thread
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class AdmissionQueue:
    """Admits a bounded number of requests.

    Args:
        max_num_seqs: requests that are answered at once.
        ahead: requests admitted beyond them.
    """

    def __init__(self, max_num_seqs: int, *, ahead: int = 0) -> None:
        self.max_num_seqs, self.limit = max_num_seqs, max_num_seqs + ahead
        self.inside = 0
        self._queues: dict[int, OrderedDict[str, deque[asyncio.Future[None]]]] = {}  # by priority, then by caller

    @property
    def active(self) -> int:
        """Requests that are being answered."""
        return min(self.inside, self.max_num_seqs)

    @property
    def waiting(self) -> int:
        """Requests that are not being answered yet, admitted or not."""
        return (
            self.inside - self.active + sum(len(queue) for queues in self._queues.values() for queue in queues.values())
        )

    async def enter(self, caller: str, priority: int = 0) -> None:
        """Wait for admission; `leave` must follow, unless this raises."""
        if self.inside < self.limit and not self._queues:
            self.inside += 1
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(priority, OrderedDict()).setdefault(caller, deque()).append(admitted)
        try:
            await admitted
        except BaseException:
            if admitted.done() and not admitted.cancelled():
                self.leave()  # admitted in the same moment
            else:
                self._forget(priority, caller, admitted)
            raise

    def leave(self) -> None:
        """Free a slot for the next request."""
        self.inside -= 1
        while self.inside < self.limit and self._queues:
            priority = max(self._queues)
            queues = self._queues[priority]
            caller, queue = queues.popitem(last=False)
            admitted = queue.popleft()
            if queue:
                queues[caller] = queue  # behind the others
            elif not queues:
                del self._queues[priority]
            if not admitted.done():
                admitted.set_result(None)
                self.inside += 1

    def _forget(self, priority: int, caller: str, admitted: asyncio.Future[None]) -> None:
        queues = self._queues.get(priority, OrderedDict())
        queue = queues.get(caller)
        if queue is not None and admitted in queue:
            queue.remove(admitted)
            if not queue:
                del queues[caller]
            if not queues:
                del self._queues[priority]
