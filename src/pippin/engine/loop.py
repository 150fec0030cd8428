"""The thread of an engine: it accepts requests, computes them step by step, and sends their events.

Notable here:
- a step is one pass over the new tokens of all scheduled requests; requests join and leave between two steps
- an error of one request reaches its caller only; an error of a pass reaches the callers of that pass, and the loop
  continues with an empty cache
- nothing polls: the thread waits for work, and ends after `IDLE_SECONDS` without any; blocks of the cache that hold
  nothing are then given back to the system
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
from pippin.engine.decoding.token_ids import common_prefix
from pippin.engine.model_runner import BLOCK_SIZE, Capture, Runner
from pippin.engine.output_processor import OutputProcessor
from pippin.engine.scheduling.request_state import END, ContinuationState, RequestState, ScheduledChunk
from pippin.engine.scheduling.scheduler import Scheduler
from pippin.engine.speculation.drafts import CachePosition, Draft

IDLE_SECONDS: Final = 5.0
"""The thread ends after this many seconds without work; the next request starts another."""

COUNTERS: Final = (
    *("requests", "refused", "finished", "cancelled", "failed"),
    *("tokens_generated", "drafted", "accepted", "steps"),
)
"""Names of the counters; see `EngineStats`."""

T = TypeVar("T")


class EngineLoop:
    """Runs requests; `submit`, `call_between_steps`, `refuse_if_full` and `close` may be called from any thread.

    Args:
        runner: computes the passes.
        scheduler: plans them.
        max_waiting: requests that may wait to be admitted.

    Attributes:
        counts: counters of events so far, by the names of `COUNTERS`.
        requests: requests that have not ended.
        closing: whether new requests are refused.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, max_waiting: int) -> None:
        self._runner, self._scheduler, self._max_waiting = runner, scheduler, max_waiting
        self.requests: set[RequestState] = set()
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.closing = False
        self._inbox: list[RequestState] = []  # requests that the thread has not taken yet
        self._calls: deque[tuple[Callable[[], Any], SimpleQueue[tuple[Any, BaseException | None]]]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._mean_seconds = 1.0  # running mean of the time that a request takes
        _loops.add(self)

    def refuse_if_full(self) -> None:
        """Raise `Overloaded` if `submit` would.

        Raises:
            Overloaded: the queue is full, or the loop is closed.
        """
        with self._wake:
            self._refuse_if_closed()
            max_num_seqs, busy = self._scheduler.max_num_seqs, len(self.requests)
            if busy >= max_num_seqs + self._max_waiting:
                self.counts["refused"] += 1
                wait = max(1.0, self._mean_seconds * (busy - max_num_seqs + 1) / max_num_seqs)
                raise Overloaded(
                    f"{max_num_seqs} requests are running and {busy - max_num_seqs} are waiting, the most that this "
                    f"engine takes; try again in {wait:.0f} seconds",
                    retry_after=wait,
                )

    def _refuse_if_closed(self) -> None:
        if self.closing:
            raise Overloaded("the engine is closed and takes no more requests")

    def submit(self, request: RequestState) -> None:
        """Queue a request.

        Raises:
            Overloaded: the queue is full, or the loop is closed.
        """
        with self._wake:
            self.refuse_if_full()
            request.set_arrival(self.counts["requests"])
            self.counts["requests"] += 1
            self.requests.add(request)
            self._inbox.append(request)
            self._start()

    def call_between_steps(self, function: Callable[[], T]) -> T:
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
        """End all requests and the thread; see `Engine.close`."""
        with self._wake:
            self.closing = True
            thread = self._thread
            self._wake.notify()
        if thread is not None and drain:
            thread.join(timeout)
        with self._wake:
            for request in self.requests:
                request.closed = True
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        """Wake the thread, or start one; a forked process has no thread, even if its parent had one."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="pippin-engine", daemon=True)
            self._thread.start()
        self._wake.notify()

    # --- in the engine's thread -----------------------------------------------------------------

    def _run(self) -> None:
        """Run steps as long as there are requests or calls."""
        try:
            while self._has_work():
                try:
                    self._step()
                except Exception as error:
                    self._fail(error)
        except BaseException as error:  # a fault of the engine itself: no caller may wait for it forever
            with self._wake:
                self.closing, self._thread = True, None
                requests, self.requests = self.requests, set()
            for request in requests:  # not through the scheduler, whose state may be inconsistent now
                self.counts["failed"] += 1
                if request.cache is not None:
                    request.cache.clear()
                    request.cache.end()
                request.events.put(GenerationError(f"the engine failed: {error!r}"))
            while self._calls:
                self._calls.popleft()[1].put((None, GenerationError(f"the engine failed: {error!r}")))
            self._scheduler.reset()
            raise

    def _has_work(self) -> bool:
        """Wait for requests or calls; False if the thread is to end."""
        with self._wake:
            if not (self.requests or self._calls or self.closing):
                self._wake.wait(IDLE_SECONDS)
            if not (self.requests or self._calls):
                self._thread = None
                if not self.closing:
                    self._runner.give_back(self._scheduler.pool.take_unused())
                return False
            new, self._inbox = self._inbox, []
        for request in new:
            self._scheduler.add(request)
        while self._calls:
            function, answer = self._calls.popleft()
            try:
                answer.put((function(), None))
            except BaseException as error:
                answer.put((None, error))
        return True

    @torch.inference_mode()
    def _step(self) -> None:
        """Remove cancelled requests, admit new ones, then compute the next tokens of all in one pass."""
        scheduler = self._scheduler
        self._drop_cancelled()
        scheduler.prepare()
        chunks = scheduler.plan(self._drafts())
        if not chunks:
            if scheduler.running or scheduler.waiting:
                raise GenerationError("there are requests, and none of them can be scheduled")
            return
        inputs = [chunk.model_input() for chunk in chunks]
        logits = self._runner.forward(inputs)
        self.counts["steps"] += 1
        for chunk, model_input, rows in zip(chunks, inputs, logits, strict=True):
            self._process_output(chunk, rows, model_input.capture)

    def _drop_cancelled(self) -> None:
        scheduler = self._scheduler
        cancelled = [
            request for request in (*scheduler.waiting, *scheduler.running) if request.closed or request.cancelled()
        ]
        for request in cancelled:
            last = (
                Overloaded("the engine was closed") if request.output is None else request.output.finished("cancelled")
            )
            self._end(request, last, "cancelled")

    def _drafts(self) -> dict[RequestState, Draft]:
        """The drafts of decoding requests that use speculative decoding."""
        drafts: dict[RequestState, Draft] = {}
        for request in [
            request for request in self._scheduler.running if request.max_draft_tokens and request.decoding
        ]:
            output = request.output
            if output is None or request.num_pending_tokens > self._scheduler.max_num_batched_tokens:
                continue
            try:
                max_tokens = min(
                    request.max_draft_tokens, len(request.block_table) * BLOCK_SIZE - len(request.token_ids)
                )
                if not request.has_own_positions and self._scheduler.original_max_position_embeddings is not None:
                    # beyond it the sequence is computed anew
                    max_tokens = min(
                        max_tokens, self._scheduler.original_max_position_embeddings - len(request.token_ids)
                    )
                position = (
                    CachePosition(
                        self._runner,
                        request.block_table,
                        request.num_computed_tokens,
                        request.adapter,
                        tuple(request.tables[1:]),
                    )
                    if output.drafts_with_target and not request.has_own_positions
                    else None
                )
                draft = output.propose(request.keys, max_tokens, position)
            except Exception as error:
                self._end(request, error, "failed")
                continue
            if draft is not None:
                drafts[request] = draft
        return drafts

    def _process_output(
        self, chunk: ScheduledChunk, rows: Float[Tensor, "rows vocab"], capture: Capture | None
    ) -> None:
        """Process the logits of one scheduled chunk."""
        sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
        request = sequence.parent if isinstance(sequence, ContinuationState) else sequence
        assert isinstance(request, RequestState)
        if request not in self._scheduler.running:  # another continuation of it has failed
            return
        if chunk.probe and request.cache is not None:
            request.cache.advance_probe(len(chunk.probe), capture)
            return
        self._scheduler.mark_computed(sequence, chunk.num_tokens)
        try:
            if request.cache is not None:
                request.cache.advance(request.token_ids[start : start + chunk.num_tokens], capture)
            if request.output is not None:
                if not sequence.num_pending_tokens:
                    self._append_tokens(request, request.output, rows, chunk.draft, capture)
            elif isinstance(sequence, ContinuationState):
                assert request.scores is not None
                request.scores.add_logits(sequence.index, start - len(request.token_ids), rows)
                if not sequence.num_pending_tokens:
                    self._scheduler.drop_branch(sequence)
            elif request.scores is not None and len(rows):
                request.scores.add_prompt_logits(rows[0])
            if (
                request.output is None
                and not request.num_pending_tokens
                and (request.scores is None or not request.scores.num_incomplete)
            ):
                self._end(request, len(request.token_ids), "finished")
        except Exception as error:
            self._end(request, error, "failed")

    def _append_tokens(
        self,
        request: RequestState,
        output: OutputProcessor,
        rows: Float[Tensor, "rows vocab"],
        draft: Draft | None,
        capture: Capture | None,
    ) -> None:
        """Sample the next tokens of a request; it ends here when it is complete."""
        request.decoding = True
        if not output.prompt_seconds:
            output.prompt_done()
        at = len(request.token_ids)
        hidden = None if capture is None else capture.hidden_states
        for token in output.process(rows, draft, hidden):
            request.append(token.id)
            if request.choice is not None:
                request.choice.extend(request.token_ids)
            request.events.put(token)
        self.counts["tokens_generated"] += len(request.token_ids) - at
        if draft is not None:
            accepted = common_prefix(draft.tokens, request.token_ids[at:])
            self.counts["drafted"] += len(draft.tokens)
            self.counts["accepted"] += accepted
            self._scheduler.mark_computed(request, accepted)
        if output.finish_reason is not None:
            self._end(request, output.finished(output.finish_reason), "finished")

    def _end(self, request: RequestState, event: Any, outcome: str) -> None:
        """Send the last event and release the blocks; ``outcome`` names the counter."""
        self._scheduler.remove(request, keep=outcome != "failed")
        if request.cache is not None:
            if outcome == "failed":
                request.cache.clear()
            request.cache.end()
        with self._wake:
            self.requests.discard(request)
        self.counts[outcome] += 1
        if outcome == "finished":
            self._mean_seconds += 0.1 * (time.perf_counter() - request.start_time - self._mean_seconds)
        request.events.put(event)
        request.events.put(END)

    def _fail(self, error: Exception) -> None:
        """Fail all requests that took part in a step, and continue with an empty cache."""
        scheduler = self._scheduler
        failed = scheduler.reset()
        if not failed and scheduler.waiting:  # then the next in the queue could not be admitted
            failed = [scheduler.waiting[0]]
        for request in failed:
            wrapped = GenerationError(f"the step that this request took part in failed: {error!r}")
            wrapped.__cause__ = error
            self._end(request, wrapped, "failed")


_loops: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop the threads before the interpreter shuts down, which would crash a thread that computes."""
    for loop in list(_loops):
        loop.close(drain=False, timeout=None)
