"""The thread of an engine: takes requests in, lets them be computed step by step, and sends what comes of it.

Notable here:
- a step is one pass over the new tokens of all requests that take part; between two steps requests come and go
- an error of one request reaches its caller only; an error of a pass reaches the callers of that pass, and the loop
  goes on with an empty cache
- nothing polls: the thread waits for work, and ends when there has been none for a while
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import GenerationError, Overloaded
from pippin.engine.runner import BLOCK, Runner
from pippin.engine.scheduler import Scheduler
from pippin.engine.sequences import END, Branch, Job, Part
from pippin.engine.speculation.drafts import Draft, Place
from pippin.engine.writer import Writer, common_prefix

IDLE_SECONDS: Final = 5.0
"""The thread ends after so many seconds without work; the next request starts another."""

COUNTERS: Final = (
    *("requests", "refused", "finished", "cancelled", "failed"),
    *("tokens_generated", "drafted", "accepted", "steps"),
)
"""What is counted; see `EngineStats`."""

T = TypeVar("T")


class Loop:
    """Runs jobs; `submit`, `between`, `refuse_if_full` and `close` may be called from any thread.

    Args:
        runner: computes the passes.
        scheduler: says what they compute.
        queue: jobs that may wait for a place.

    Attributes:
        counts: what has happened so far, by the names of `COUNTERS`.
        jobs: all that have not ended.
        closing: whether no more are taken.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, queue: int) -> None:
        self._runner, self._scheduler, self._queue = runner, scheduler, queue
        self.jobs: set[Job] = set()
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.closing = False
        self._inbox: list[Job] = []  # jobs that the thread has not seen yet
        self._calls: deque[tuple[Callable[[], Any], SimpleQueue[tuple[Any, BaseException | None]]]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._seconds = 1.0  # what a request takes, on average
        _loops.add(self)

    def refuse_if_full(self) -> None:
        """Raise what `submit` would.

        Raises:
            Overloaded: too many are there, or the loop is closed.
        """
        with self._wake:
            self._refuse_if_closed()
            slots, busy = self._scheduler.slots, len(self.jobs)
            if busy >= slots + self._queue:
                self.counts["refused"] += 1
                wait = max(1.0, self._seconds * (busy - slots + 1) / slots)
                raise Overloaded(
                    f"{slots} requests are being answered and {busy - slots} are waiting, the most that this engine "
                    f"takes; try again in {wait:.0f} seconds",
                    retry_after=wait,
                )

    def _refuse_if_closed(self) -> None:
        if self.closing:
            raise Overloaded("the engine is closed and takes no more requests")

    def submit(self, job: Job) -> None:
        """Take a job in.

        Raises:
            Overloaded: too many are there, or the loop is closed.
        """
        with self._wake:
            self.refuse_if_full()
            job.number(self.counts["requests"])
            self.counts["requests"] += 1
            self.jobs.add(job)
            self._inbox.append(job)
            self._start()

    def between(self, function: Callable[[], T]) -> T:
        """Call a function in the loop's thread, between two steps; return its result, or raise what it raised.

        Raises:
            Overloaded: the loop is closed.
        """
        answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        with self._wake:
            self._refuse_if_closed()
            self._calls.append((function, answer))
            self._start()
        result, error = answer.get()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]  # of this very function

    def close(self, *, drain: bool, timeout: float | None) -> None:
        """End everything, and the thread; see `Engine.close`."""
        with self._wake:
            self.closing = True
            thread = self._thread
            self._wake.notify()
        if thread is not None and drain:
            thread.join(timeout)
        with self._wake:
            for job in self.jobs:
                job.closed = True
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        """Wake the thread, or start one; after a fork of the process there is none, whatever was before."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="pippin-engine", daemon=True)
            self._thread.start()
        self._wake.notify()

    # --- what follows runs in the engine's thread -----------------------------------------------------------------

    def _work(self) -> None:
        """Step while there is something to do."""
        try:
            while self._has_work():
                try:
                    self._step()
                except Exception as error:
                    self._fail(error)
        except BaseException as error:  # a fault of the engine itself: nobody shall wait for it for ever
            with self._wake:
                self.closing, self._thread = True, None
                jobs, self.jobs = self.jobs, set()
            for job in jobs:  # past the scheduler, whose books cannot be relied on any more
                self.counts["failed"] += 1
                job.events.put(GenerationError(f"the engine failed: {error!r}"))
            while self._calls:
                self._calls.popleft()[1].put((None, GenerationError(f"the engine failed: {error!r}")))
            self._scheduler.reset()
            raise

    def _has_work(self) -> bool:
        """Wait until there is some; False if the thread is to end."""
        with self._wake:
            if not (self.jobs or self._calls or self.closing):
                self._wake.wait(IDLE_SECONDS)
            if not (self.jobs or self._calls):
                self._thread = None
                return False
            new, self._inbox = self._inbox, []
        for job in new:
            self._scheduler.add(job)
        while self._calls:
            function, answer = self._calls.popleft()
            try:
                answer.put((function(), None))
            except BaseException as error:
                answer.put((None, error))
        return True

    @torch.inference_mode()
    def _step(self) -> None:
        """Let requests leave and join, then compute the next tokens of all in one pass."""
        scheduler = self._scheduler
        self._drop_cancelled()
        scheduler.prepare()
        parts = scheduler.plan(self._drafts())
        if not parts:
            if scheduler.active or scheduler.waiting:
                raise GenerationError("there are requests, and none of them can go on")
            return
        logits = self._runner.forward([part.work() for part in parts])
        self.counts["steps"] += 1
        for part, rows in zip(parts, logits, strict=True):
            self._advance(part, rows)

    def _drop_cancelled(self) -> None:
        scheduler = self._scheduler
        gone = [job for job in (*scheduler.waiting, *scheduler.active) if job.closed or job.cancelled()]
        for job in gone:
            last = Overloaded("the engine was closed") if job.writer is None else job.writer.finished("cancelled")
            self._end(job, last, "cancelled")

    def _drafts(self) -> dict[Job, Draft]:
        """What those who write, and speculate, guess."""
        drafts: dict[Job, Draft] = {}
        for job in [job for job in self._scheduler.active if job.draft_room and job.writing]:
            writer = job.writer
            if writer is None or job.pending > self._scheduler.chunk:
                continue
            try:
                room = min(job.draft_room, len(job.table) * BLOCK - len(job.ids))
                place = Place(self._runner, job.table, job.held, job.adapter) if writer.drafts_here else None
                draft = writer.propose(job.ids, room, place)
            except Exception as error:
                self._end(job, error, "failed")
                continue
            if draft is not None:
                drafts[job] = draft
        return drafts

    def _advance(self, part: Part, rows: Float[Tensor, "rows vocab"]) -> None:
        """Take in what was computed of one sequence."""
        line, start = part.line, part.line.held
        job = line.parent if isinstance(line, Branch) else line
        assert isinstance(job, Job)
        if job not in self._scheduler.active:  # another branch of it has failed
            return
        self._scheduler.computed(line, part.count)
        try:
            if job.writer is not None:
                if not line.pending:
                    self._write(job, job.writer, rows, part.draft)
            elif isinstance(line, Branch):
                assert job.scores is not None
                job.scores.add(line.index, start - len(job.ids), rows)
                if not line.pending:
                    self._scheduler.drop_branch(line)
            elif job.scores is not None and len(rows):
                job.scores.begin(rows[0])
            if job.writer is None and not job.pending and (job.scores is None or not job.scores.missing):
                self._end(job, len(job.ids), "finished")
        except Exception as error:
            self._end(job, error, "failed")

    def _write(self, job: Job, writer: Writer, rows: Float[Tensor, "rows vocab"], draft: Draft | None) -> None:
        """Let a request choose its next tokens; it ends here when it is complete."""
        job.writing = True
        if not writer.prompt_seconds:
            writer.prompt_done()
        at = len(job.ids)
        for token in writer.take(rows, draft):
            job.ids.append(token.id)
            job.events.put(token)
        self.counts["tokens_generated"] += len(job.ids) - at
        if draft is not None:
            held = common_prefix(draft.tokens, job.ids[at:])
            self.counts["drafted"] += len(draft.tokens)
            self.counts["accepted"] += held
            self._scheduler.computed(job, held)
        if writer.reason is not None:
            self._end(job, writer.finished(writer.reason), "finished")

    def _end(self, job: Job, event: Any, how: str) -> None:
        """Send the last event and give the place back."""
        self._scheduler.remove(job, keep=how != "failed")
        with self._wake:
            self.jobs.discard(job)
        self.counts[how] += 1
        if how == "finished":
            self._seconds += 0.1 * (time.perf_counter() - job.began - self._seconds)
        job.events.put(event)
        job.events.put(END)

    def _fail(self, error: Exception) -> None:
        """A step went wrong: tell everyone who took part, and begin again with an empty cache."""
        scheduler = self._scheduler
        gone = scheduler.reset()
        if not gone and scheduler.waiting:  # then it was the next in the queue that could not be taken in
            gone = [scheduler.waiting[0]]
        for job in gone:
            wrapped = GenerationError(f"the step that this request took part in failed: {error!r}")
            wrapped.__cause__ = error
            self._end(job, wrapped, "failed")


_loops: weakref.WeakSet[Loop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that computes while the interpreter is taken down would end the process badly."""
    for loop in list(_loops):
        loop.close(drain=False, timeout=None)
