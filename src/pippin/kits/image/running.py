"""Plans carried out: batch after batch, cancelled within a step, in this thread or beside it.

Notable here:
- a callback after each step is where a drawing is cancelled; nothing is computed after it
- a thread draws while a loop reads events; leaving the loop ends the thread within one step
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from pippin.core.errors import Cancelled, ConceptsBlocked, CreationFailed, NonFiniteSample
from pippin.generate.contract import Step
from pippin.kits.image import styles
from pippin.kits.image.backends import Backend, Job
from pippin.kits.image.planner import Plan
from pippin.kits.image.request import Blocked, Picture, Progress

Event: TypeAlias = Progress | Picture | Blocked
Judge: TypeAlias = Callable[[Tensor], str | None]
"""Looks at a finished picture (from -1 to 1); a category blocks it, None lets it pass."""


def run(
    backend: Backend, judge: Judge | None, plan: Plan, tell: Callable[[Progress], None], stop: threading.Event
) -> Iterator[Picture | Blocked]:
    """Draw a plan, batch after batch.

    Args:
        backend: draws.
        judge: looks at what was drawn.
        plan: what is drawn.
        tell: told of each step.
        stop: set, it ends the drawing after the step that is being made.

    Raises:
        Cancelled: ``stop`` was set.
        CreationFailed: what was drawn is not finite, or memory ran out.
    """
    limit, together = plan.request.limit, plan.together
    batches = -(-limit // together)
    for batch in range(batches):
        first = batch * together
        job = replace(plan.job, n=min(together, limit - first), seed=plan.request.seed + first)
        reached = 0

        def on_step(step: Step, batch: int = batch, first: int = first) -> None:
            nonlocal reached
            reached = step.done
            if stop.is_set():
                raise Cancelled(f"the drawing was cancelled after step {step.done} of {step.total}")
            done = batch * step.total + step.done
            tell(Progress(done, batches * step.total, first, step.estimate))

        if stop.is_set():
            raise Cancelled(f"the drawing was cancelled before picture {first}")
        try:
            samples = _draw(backend, job, on_step)
        except NonFiniteSample as error:
            raise CreationFailed(f"picture {first} could not be drawn: {error}", step=error.step) from error
        except torch.OutOfMemoryError as error:
            raise CreationFailed(
                f"memory ran out at step {reached}; set memory_budget, or draw fewer together", step=reached
            ) from error
        for offset, sample in enumerate(samples):
            yield _finished(judge, plan, first + offset, sample)


def _draw(backend: Backend, job: Job, on_step: Callable[[Step], None]) -> Tensor:
    """The samples of a batch; what a mask keeps is exactly what was given."""
    if job.start is not None and job.strength == 0:
        on_step(Step(1, 1, lambda: cast(Tensor, job.start)[None]))
        return job.start.expand(job.n, *job.start.shape)
    x = backend.run(job, on_step).detach().cpu()
    if job.redraw is not None and job.start is not None:
        x = torch.where(job.redraw, x, job.start)
    return x


def _finished(judge: Judge | None, plan: Plan, index: int, sample: Tensor) -> Picture | Blocked:
    """Style, size and judgement."""
    details = plan.details | {"seed": plan.request.seed + index, "index": index}
    picture = Picture.of(index, styles.finished(sample, plan.style), plan.enlarged, details)
    category = None if judge is None else judge(picture.x)
    return picture if category is None else Blocked(index, category)


def events(backend: Backend, judge: Judge | None, plan: Plan) -> Iterator[Event]:
    """All that happens, drawn in a thread; closing the iterator ends it within a step."""
    queue, stop = SimpleQueue[Any](), threading.Event()
    thread = threading.Thread(
        target=work, args=(backend, judge, plan, queue.put, stop), name="pippin pictures", daemon=True
    )
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()


def work(backend: Backend, judge: Judge | None, plan: Plan, put: Callable[[Any], None], stop: threading.Event) -> None:
    """Draw in a thread; what happens is put, then None."""
    try:
        for item in run(backend, judge, plan, put, stop):
            put(item)
    except BaseException as error:
        put(error)
    put(None)


async def aevents(backend: Backend, judge: Judge | None, plan: Plan) -> AsyncGenerator[Event, None]:
    """As `events`, for an event loop."""
    loop, queue, stop = asyncio.get_running_loop(), asyncio.Queue[Any](), threading.Event()

    def put(item: Any) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, item)

    thread = threading.Thread(target=work, args=(backend, judge, plan, put, stop), name="pippin pictures", daemon=True)
    thread.start()
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        await asyncio.shield(asyncio.to_thread(thread.join))


def tell_withheld(withheld: Sequence[Blocked]) -> None:
    """Raise for pictures that were withheld.

    Raises:
        ConceptsBlocked: there are some.
    """
    if withheld:
        named = ", ".join(f"{one.index} ({one.category})" for one in withheld)
        raise ConceptsBlocked(f"the judge withheld picture {named}", category=withheld[0].category)
