"""What the scheduler moves: requests, the branches of a score, and what a caller iterates over.

Notable here:
- caller and engine know each other through a queue of events and one flag, so that a caller who stops listening, or is
  collected, ends the request and never waits for it, and a slow one holds up nobody
- a branch is a sequence of its own that begins with its parent's blocks and states; it lives only while it is computed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

from torch import Tensor

from pippin.engine.radix import Key, Node
from pippin.engine.runner import BLOCK, Work
from pippin.engine.scores import Scores
from pippin.engine.speculation.drafts import Draft
from pippin.engine.writer import Writer
from pippin.nn.lora import Adapter

END: Final = object()
"""What comes after the last event."""


def blocks_for(tokens: int) -> int:
    """How many blocks hold so many tokens.

    >>> blocks_for(0), blocks_for(16), blocks_for(17)
    (0, 1, 2)
    """
    return -(-tokens // BLOCK)


class Line:
    """A sequence of tokens, of which the cache holds a beginning.

    Args:
        ids: all tokens so far.
        adapter: what they are computed with.

    Attributes:
        held: tokens that are computed.
        table: the blocks, with room for ``held`` tokens at least.
        states: those of recurrent layers after the ``held`` tokens; see `Work`.
        rank: who comes first; the smaller, the sooner, and the later to make room.
    """

    def __init__(self, ids: list[int], adapter: Adapter | None, rank: tuple[int, int, int]) -> None:
        self.ids, self.adapter, self.rank = ids, adapter, rank
        self.held = 0
        self.table: list[int] = []
        self.states: dict[int, Tensor] = {}

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.ids) - self.held


class Job(Line):
    """A request that waits or is being computed; ``ids`` are its prompt and what was answered so far.

    Args:
        prompt: token ids.
        adapter: what to compute it with.
        writer: writes the answer.
        scores: instead of an answer: what is wanted of continuations. Without either the prompt is only computed.
        owner: whose request it is.
        priority: -10 to 10.
        draft_room: tokens of a draft, at most.

    Attributes:
        shared: blocks at the beginning of the table that the prefix tree holds too; ``node`` is the last of them.
        writing: whether the prompt is computed.
        branches: continuations that are being computed.
        first: whether it gets its place for the first time.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        adapter: Adapter | None,
        *,
        writer: Writer | None = None,
        scores: Scores | None = None,
        owner: str = "",
        priority: int = 0,
        draft_room: int = 0,
    ) -> None:
        super().__init__(list(prompt), adapter, (-priority, 0, 0))
        self.key: Key = (owner, adapter)
        self.writer, self.scores, self.priority, self.draft_room = writer, scores, priority, draft_room
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.cancelled: Callable[[], bool] = bool
        self.closed = False
        self.began = time.perf_counter()
        self.first, self.writing = True, False
        self.shared = 0
        self.node: Node | None = None
        self.branches: list[Branch] = []

    @property
    def wants_logits(self) -> bool:
        """Whether those after the last token are of use."""
        return self.writer is not None or (self.scores is not None and not self.scores.begun)

    def number(self, number: int) -> None:
        """Give it its place in the order of arrival."""
        self.rank = (-self.priority, number, 0)


class Branch(Line):
    """One continuation on its way: its parent's prompt, and behind it all tokens but its last.

    Args:
        parent: whose prompt is computed.
        index: which continuation.
        continuation: its tokens, at least two.
    """

    def __init__(self, parent: Job, index: int, continuation: Sequence[int]) -> None:
        super().__init__([*parent.ids, *continuation[:-1]], parent.adapter, (*parent.rank[:2], 1 + index))
        self.parent, self.index = parent, index


@dataclass
class Part:
    """What a pass computes of one sequence: its next ``count`` tokens, and a draft behind the last."""

    line: Line
    count: int
    draft: Draft | None = None

    def work(self) -> Work:
        """The same for a runner."""
        line = self.line
        work = Work(line.ids[line.held : line.held + self.count], line.held, line.table, (), line.adapter)
        work.states = line.states
        if isinstance(line, Branch):
            work.outputs = range(self.count)
        elif self.count == line.pending and isinstance(line, Job) and line.wants_logits:
            work.outputs = (self.count - 1,)
        if self.draft is not None:
            work.outputs = range(self.count - 1, self.count + len(self.draft.tokens))
            work.ids = [*work.ids, *self.draft.tokens]
            work.resume, work.residual = self.draft.resume, self.draft.residual
        return work


class Events:
    """The events of a job, for one consumer; waiting for one can be interrupted."""

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
