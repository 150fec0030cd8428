"""One request of the batching engine on its way, and what its caller iterates over.

Notable here:
- the two know each other through a queue of events and one flag, so that a caller who stops listening, or is collected,
  ends the request and never waits for it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Final

from torch import Tensor

from pippin.engine.cache import DenseCache
from pippin.engine.engine import Writer
from pippin.engine.slots import Slot
from pippin.nn.lora import Adapter

END: Final = object()
"""What comes after the last event."""


class Job:
    """A request in the queue or in a slot.

    Args:
        prompt: token ids.
        adapter: what to compute it with.
        writer: writes the answer; None if there is none to be written.
        after: without a writer: what to do with the prompt's cache and last logits, one part of the result, and one
            pass, at a time; the whole result is the only event.
        extra: tokens of room that ``after`` needs behind the prompt.
        owner: whose request it is.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        adapter: Adapter | None,
        *,
        writer: Writer | None = None,
        after: Callable[[DenseCache, Tensor], Iterator[list[float]]] | None = None,
        extra: int = 0,
        owner: str = "",
    ) -> None:
        self.owner = owner
        self.ids = list(prompt)  # and what was answered so far
        self.adapter, self.writer, self.after, self.extra = adapter, writer, after, extra
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.cancelled: Callable[[], bool] = bool
        self.closed = self.admitted = False
        self.parts: Iterator[list[float]] | None = None
        self.result: list[float] = []
        self.number = 0
        self.slot: Slot | None = None
        self.began = time.perf_counter()

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.ids) - (0 if self.slot is None else len(self.slot.ids))


class Events:
    """The events of a job, for one consumer."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._over = False

    def __iter__(self) -> Events:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        event = self._job.events.get()
        if event is END or isinstance(event, Exception):
            self._over = True
            raise event if isinstance(event, Exception) else StopIteration
        return event

    def close(self) -> None:
        """End the request within one step; there are no more events."""
        self._over = self._job.closed = True

    def __del__(self) -> None:
        self._job.closed = True
