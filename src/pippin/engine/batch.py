"""Continuous batching: one thread answers many requests at once, and each may come and go between two steps.

Notable here:
- a step is one forward pass over the new tokens of all requests, laid end to end: one token of each request that is
  writing, and a part of each prompt that is being read; so a long prompt does not hold up the others
- the new tokens share every matrix product, while each request looks at keys of its own; nothing is padded
- first come, first served; a request that finds no memory waits, and if memory runs out while several write, the
  youngest is put back in the queue and later goes on where it was
- an error of one request reaches its caller only; an error of a step reaches the callers of that step, and the engine
  goes on with empty slots
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import GenerationError, InvalidArgument, Overloaded
from pippin.engine import engine as single, scoring
from pippin.engine.cache import DenseCache, SideBySide
from pippin.engine.engine import Finished, Prefix, Request, Token, Writer
from pippin.engine.jobs import END, Events, Job
from pippin.engine.sampling import SamplingOptions
from pippin.engine.slots import Slots, affordable, token_bytes
from pippin.language.load import LanguageModel
from pippin.nn.cache import KVCache
from pippin.nn.lora import Adapter, Shares

# The thread ends after so many seconds without work; the next request starts another.
IDLE_SECONDS: Final = 5.0


@dataclass(frozen=True)
class BatchStats:
    """What a `BatchEngine` has done and is doing.

    Args:
        slots: requests that can be answered at the same time.
        active: requests in a slot. waiting: requests in the queue.
        requests: taken in so far. refused: turned away because the queue was full.
        finished, cancelled, failed: how the others ended.
        preempted: how often a request was put back in the queue because memory ran out.
        prompt_tokens: tokens of the prompts of all requests that got a slot. cached_tokens: those of them that were
            not computed, because a slot held them.
        tokens_generated: tokens of all answers.
        steps: forward passes over a batch.
        cache_tokens_used: tokens that memory is held for. cache_tokens_capacity: their bound.
        cache_bytes_used: that memory.
    """

    slots: int
    active: int
    waiting: int
    requests: int
    refused: int
    finished: int
    cancelled: int
    failed: int
    preempted: int
    prompt_tokens: int
    cached_tokens: int
    tokens_generated: int
    steps: int
    cache_tokens_used: int
    cache_tokens_capacity: int
    cache_bytes_used: int


class BatchEngine:
    """Runs one model for many requests at once; every method may be called from any thread.

    It has the face of `Engine`. ``Request.prefix`` is not used: the engine itself finds the slot that holds the
    beginning of a prompt, among those that requests of the same ``owner`` have left.

    The choice of tokens belongs to the request: its random numbers, penalties and grammar depend on nothing else. The
    logits are another matter. The sum inside a matrix product may be taken in another order when more tokens take part
    in it, so the same request gives logits that differ in the last bits with the company it has, how its prompt was
    cut and what was cached. The same seed gives the same text except where two tokens are that close; in float32 that
    is rare, in bfloat16 it happens. `Engine` computes a request alone and is the same to the bit.

    Args:
        model: what `pippin.load` returned.
        slots: requests answered at the same time.
        queue: requests that may wait for a slot; one more raises `Overloaded`.
        chunk: prompt tokens computed in one step when nobody is writing, None for 256 on a CPU and 1,024 on an
            accelerator; a quarter of it while somebody is.
        cache_tokens: tokens that all slots may hold together, at least 128; memory is taken as it is needed. None for
            the full context in every slot, or what a quarter of the free memory holds if that is less. No request may
            be longer.
        reuse: whether slots keep what they hold for later requests; False forgets it with the request.

    Raises:
        InvalidArgument: a number outside its range.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        slots: int = 8,
        queue: int = 64,
        chunk: int | None = None,
        cache_tokens: int | None = None,
        reuse: bool = True,
    ) -> None:
        if chunk is not None and chunk < 1:
            raise InvalidArgument(f"chunk must be at least 1 token, got {chunk}")
        if queue < 0:
            raise InvalidArgument(f"queue must be 0 or more, got {queue}")
        self.model, self.queue, self.reuse = model, queue, reuse
        self.chunk = chunk or (256 if model.device.type == "cpu" else 1024)
        self._slots = Slots(model, slots, affordable(model, slots) if cache_tokens is None else cache_tokens)
        self.context_size = min(model.context_size, self._slots.capacity)
        self._waiting: deque[Job] = deque()
        self._active: list[Job] = []
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._seconds = 1.0  # what a request takes, on average
        self._counts = dict.fromkeys(_COUNTERS, 0)
        _engines.add(self)

    def __enter__(self) -> BatchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(self, request: Request) -> Iterator[Token | Finished]:
        """Answer a request, token by token; the last event is `Finished`.

        Closing the iterator, or dropping it, ends the request within one step.

        Raises:
            InvalidArgument: an empty prompt, or an id outside the vocabulary (in ``logit_bias`` too).
            ContextOverflow: prompt and ``max_tokens`` do not fit the context or ``cache_tokens``.
            ModelNotFound: no adapter of this name is loaded.
            Overloaded: the queue is full, or the engine is closed.
            SchemaError, UnsupportedGuide, EmptySchema: the grammar cannot be used.
            DecodingFailure: (while iterating) no token can be chosen.
            GenerationError: (while iterating) the step that the request took part in failed.
        """
        self.check(request.prompt, request.options)
        adapter = self.model.adapter(request.adapter)
        self._refuse_if_full()
        writer = Writer(self.model, request, self.context_size)
        job = Job(request.prompt, adapter, writer=writer, owner=request.owner)
        if request.cancel is not None:
            job.cancelled = request.cancel.is_set
        self._submit(job)
        return Events(job)

    def check(self, prompt: Sequence[int], options: SamplingOptions) -> None:
        """Raise what `stream` raises for this prompt, without starting.

        Raises:
            InvalidArgument: an empty prompt, or an id outside the vocabulary (in ``logit_bias`` too).
            ContextOverflow: prompt and answer do not fit.
        """
        single.check(self.model, prompt, options, self.context_size)

    def prefill(
        self, prompt: Sequence[int], prefix: Prefix | None = None, *, adapter: str | None = None, owner: str = ""
    ) -> int:
        """Compute a prompt into a slot: a request that begins with it starts sooner. Returns how many tokens that are.

        The contents stay until the slot is needed for something else; ``prefix`` is not used.

        Raises:
            InvalidArgument, ContextOverflow, ModelNotFound, Overloaded: as `stream`.
        """
        if not prompt:
            return 0
        scoring.check(self.model, prompt, (), self.context_size)
        self._call(Job(prompt, self.model.adapter(adapter), after=lambda cache, logits: iter(()), owner=owner))
        return len(prompt)

    def score(
        self,
        prompt: Sequence[int],
        continuations: Sequence[Sequence[int]],
        *,
        prefix: Prefix | None = None,
        adapter: str | None = None,
        owner: str = "",
    ) -> list[float]:
        """How likely each continuation is after the prompt; see `Engine.score`. ``prefix`` is not used.

        Raises:
            InvalidArgument, ContextOverflow, ModelNotFound: as `Engine.score`.
            Overloaded: the queue is full, or the engine is closed.
        """
        scoring.check(self.model, prompt, continuations, self.context_size)
        if not continuations:
            return []
        low_rank = self.model.adapter(adapter)
        longest = max(map(len, continuations))
        groups = scoring.groups(continuations, max(min(self.chunk, self.context_size - len(prompt)), longest))
        module = self.model.module

        def after(cache: DenseCache, logits: Tensor) -> Iterator[list[float]]:
            return scoring.scores(module, cache, logits, groups, low_rank)

        return self._call(Job(prompt, low_rank, after=after, extra=scoring.room(groups), owner=owner))

    def stats(self) -> BatchStats:
        """Counts so far and the state of this moment."""
        with self._wake:
            held = self._slots.held
            return BatchStats(
                slots=len(self._slots.slots),
                active=len(self._active),
                waiting=len(self._waiting),
                cache_tokens_used=held,
                cache_tokens_capacity=self._slots.capacity,
                cache_bytes_used=held * token_bytes(self.model),
                **self._counts,
            )

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Take no more requests, end those that run, and free the memory. Closing twice is harmless.

        Args:
            drain: answer what is running and waiting first; otherwise it is cancelled.
            timeout: seconds after which draining becomes cancelling; None waits as long as it takes.
        """
        with self._wake:
            self._closing = True
            thread = self._thread
            self._wake.notify()
        if thread is not None and drain:
            thread.join(timeout)
        with self._wake:
            for job in [*self._waiting, *self._active]:
                job.closed = True
        if thread is not None:
            thread.join()
        self._slots.clear()

    def _call(self, job: Job) -> list[float]:
        """Compute a prompt in turn with the other requests, then something with its cache; return its result."""
        self._refuse_if_full()
        self._submit(job)
        result: list[float] = next(Events(job))
        return result

    def _refuse_if_full(self) -> None:
        """Raise `Overloaded` if one more request is too many."""
        with self._wake:
            if self._closing:
                raise Overloaded("the engine is closed and takes no more requests")
            slots, busy = len(self._slots.slots), len(self._active) + len(self._waiting)
            if busy >= slots + self.queue:
                self._counts["refused"] += 1
                wait = max(1.0, self._seconds * (len(self._waiting) + 1) / slots)
                raise Overloaded(
                    f"{slots} requests are being answered and {busy - slots} are waiting, the most that this engine "
                    f"takes; try again in {wait:.0f} seconds",
                    retry_after=wait,
                )

    def _submit(self, job: Job) -> None:
        with self._wake:
            self._refuse_if_full()
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="pippin-batch", daemon=True)
                thread.start()
                self._thread = thread
            job.number = self._counts["requests"]
            self._counts["requests"] += 1
            self._waiting.append(job)
            self._wake.notify()

    # --- what follows runs in the engine's thread -----------------------------------------------------------------

    def _work(self) -> None:
        """Step while there is something to do."""
        while True:
            with self._wake:
                if not (self._waiting or self._active or self._closing):
                    self._wake.wait(IDLE_SECONDS)
                if not (self._waiting or self._active):
                    self._thread = None
                    return
            try:
                self._step()
            except Exception as error:
                self._fail(error)

    @torch.inference_mode()
    def _step(self) -> None:
        """Let requests leave and join, then compute the next tokens of all in one pass."""
        self._drop_cancelled()
        self._admit()
        self._make_room()
        for job in [job for job in self._active if job.parts is not None]:
            self._add_part(job)
        plan = self._plan()
        if not plan:
            return
        done = [job for job, count in plan if job.pending == count]
        logits = self._forward(plan)
        for job, row in zip(done, logits, strict=True):
            self._advance(job, row)

    def _drop_cancelled(self) -> None:
        with self._wake:
            waiting = [job for job in self._waiting if job.closed or job.cancelled()]
            for job in waiting:
                self._waiting.remove(job)
        for job in [*waiting, *(job for job in self._active if job.closed or job.cancelled())]:
            last = Overloaded("the engine was closed") if job.writer is None else job.writer.finished("cancelled")
            self._end(job, last, "cancelled")

    def _admit(self) -> None:
        """Give slots to those who wait, in the order in which they came, as long as there is memory."""
        while self._waiting:
            job = self._waiting[0]
            slot = self._slots.acquire(job.ids, job.adapter, len(job.ids) + job.extra, job.owner)
            if slot is None:
                return
            with self._wake:
                self._waiting.popleft()
                self._active.append(job)
            job.slot = slot
            if not job.admitted:
                job.admitted = True
                self._counts["prompt_tokens"] += len(job.ids)
                self._counts["cached_tokens"] += len(slot.ids)
                if job.writer is not None:
                    job.writer.cached = len(slot.ids)

    def _make_room(self) -> None:
        """Let caches grow where they must, the oldest request's first; the youngest make room if there is none."""
        for job in sorted(self._active, key=lambda job: job.number):
            while job.slot is not None and not self._slots.extend(job.slot, len(job.ids) + job.extra):
                self._preempt(max(self._active, key=lambda job: job.number))

    def _preempt(self, job: Job) -> None:
        """Back to the head of the queue; it will go on where it was, from its prompt and what it wrote."""
        assert job.slot is not None
        self._slots.release(job.slot, keep=True)
        job.slot = job.parts = None
        self._counts["preempted"] += 1
        with self._wake:
            self._active.remove(job)
            self._waiting.appendleft(job)

    def _plan(self) -> list[tuple[Job, int]]:
        """How many tokens of each request the next pass computes: all that write, and a fair share of each prompt."""
        writing = [job for job in self._active if job.pending == 1]
        reading = sorted((job for job in self._active if job.pending > 1), key=lambda job: job.pending)
        budget = self.chunk // 4 if writing else self.chunk
        plan = [(job, 1) for job in writing]
        for index, job in enumerate(reading):  # the shortest first, so that what it leaves goes to the others
            count = min(job.pending, max(1, budget // (len(reading) - index)))
            budget -= count
            plan.append((job, count))
        return plan

    def _forward(self, plan: list[tuple[Job, int]]) -> Float[Tensor, "done vocab"]:
        """One pass; the logits of those whose tokens are all computed then, float32 on the CPU."""
        caches: list[DenseCache] = []
        ids: list[int] = []
        ends: list[int] = []
        shares: list[tuple[Adapter, slice]] = []
        for job, count in plan:
            assert job.slot is not None
            assert job.slot.cache is not None
            start, held = len(ids), len(job.slot.ids)
            caches.append(job.slot.cache)
            ids += job.ids[held : held + count]
            if job.adapter is not None:
                shares.append((job.adapter, slice(start, len(ids))))
            if job.pending == count:
                ends.append(len(ids) - 1)
        cache: KVCache = SideBySide(caches, [count for _, count in plan]) if len(plan) > 1 else caches[0]
        logits = _last_logits(self.model, ids, cache, ends, shares or None)
        for job, count in plan:
            assert job.slot is not None
            held = len(job.slot.ids)
            job.slot.ids += job.ids[held : held + count]
        self._counts["steps"] += 1
        return logits

    def _advance(self, job: Job, logits: Float[Tensor, vocab]) -> None:
        """Let a request choose its next tokens; it ends here when it is complete or fails."""
        writer, slot = job.writer, job.slot
        assert slot is not None
        assert slot.cache is not None
        if job.after is not None:
            job.parts, job.result = job.after(slot.cache, logits), []
            return
        assert writer is not None
        try:
            if not writer.prompt_seconds:
                writer.prompt_done()
            for token in writer.take(logits):
                job.events.put(token)
                job.ids.append(token.id)
                self._counts["tokens_generated"] += 1
            if writer.reason is not None:
                self._end(job, writer.finished(writer.reason), "finished")
        except Exception as error:
            self._end(job, error, "failed")

    def _add_part(self, job: Job) -> None:
        """Compute one more part of what is wanted of a prompt, or end with what there is."""
        assert job.parts is not None
        try:
            part = next(job.parts, None)
        except Exception as error:
            self._end(job, error, "failed")
            return
        if part is None:
            self._end(job, job.result, "finished")
        else:
            job.result += part

    def _end(self, job: Job, event: Any, how: str) -> None:
        """Send the last event and give the slot back."""
        if job.slot is not None:
            self._slots.release(job.slot, keep=self.reuse)
            job.slot = None
        with self._wake:
            if job in self._active:
                self._active.remove(job)
        self._counts[how] += 1
        if how == "finished":
            self._seconds += 0.1 * (time.perf_counter() - job.began - self._seconds)
        job.events.put(event)
        job.events.put(END)

    def _fail(self, error: Exception) -> None:
        """A step went wrong: tell everyone who took part, and begin again with empty slots."""
        with self._wake:
            if not self._active and self._waiting:  # then it was the next in the queue that could not be taken in
                self._active.append(self._waiting.popleft())
        for job in list(self._active):
            wrapped = GenerationError(f"the step that this request took part in failed: {error!r}")
            wrapped.__cause__ = error
            self._end(job, wrapped, "failed")
        self._slots.clear()


_COUNTERS: Final = (
    *("requests", "refused", "finished", "cancelled", "failed", "preempted"),
    *("prompt_tokens", "cached_tokens", "tokens_generated", "steps"),
)
_engines: weakref.WeakSet[BatchEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that computes while the interpreter is taken down would end the process badly."""
    for engine in list(_engines):
        engine.close()


def _last_logits(
    model: LanguageModel, ids: list[int], cache: KVCache, ends: list[int], shares: Shares | None
) -> Float[Tensor, "ends vocab"]:
    """One pass over ``ids``; the logits after those at ``ends``, float32 on the CPU."""
    hidden = model.module.hidden(torch.tensor([ids], device=model.device), cache=cache, adapters=shares)
    if not ends:
        return torch.empty(0, model.config.vocab_size)
    logits: Tensor = model.module.lm_head(hidden[:, ends])
    return logits[0].float().cpu()
