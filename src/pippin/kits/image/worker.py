"""Execution of image plans: batch after batch, with cancellation, in this thread or in the background.

Notable here:
- sampling is cancelled in the callback after each step; nothing is computed after it
- a background thread samples while a loop reads events; leaving the loop ends the thread within one step
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
from pippin.generate.contract import SamplingStep
from pippin.kits.image import styles
from pippin.kits.image.job import ImageBackend, ImageJob
from pippin.kits.image.planner import ImagePlan
from pippin.kits.image.request import Blocked, CreatedImage, Progress

Event: TypeAlias = Progress | CreatedImage | Blocked
Judge: TypeAlias = Callable[[Tensor], str | None]
"""Checks a finished image (from -1 to 1); a category blocks it, None allows it."""


def run(
    backend: ImageBackend, judge: Judge | None, plan: ImagePlan, tell: Callable[[Progress], None], stop: threading.Event
) -> Iterator[CreatedImage | Blocked]:
    """Sample the images of a plan, batch after batch.

    Args:
        backend: the backend that samples.
        judge: checks the images.
        plan: the plan.
        tell: called after each step.
        stop: if it is set, sampling stops after the current step.

    Raises:
        Cancelled: ``stop`` was set.
        CreationFailed: a sample is not finite, or memory ran out.
    """
    limit, together = plan.request.limit, plan.batch_size
    batches = -(-limit // together)
    for batch in range(batches):
        first = batch * together
        job = replace(plan.job, n=min(together, limit - first), seed=plan.request.seed + first)
        reached = 0

        def on_step(step: SamplingStep, batch: int = batch, first: int = first) -> None:
            nonlocal reached
            reached = step.done
            if stop.is_set():
                raise Cancelled(f"the drawing was cancelled after step {step.done} of {step.total}")
            done = batch * step.total + step.done
            tell(Progress(done, batches * step.total, first, step.estimate))

        if stop.is_set():
            raise Cancelled(f"the drawing was cancelled before image {first}")
        try:
            samples = _draw(backend, job, on_step)
        except NonFiniteSample as error:
            raise CreationFailed(f"image {first} could not be drawn: {error}", step=error.step) from error
        except torch.OutOfMemoryError as error:
            raise CreationFailed(
                f"memory ran out at step {reached}; set memory_budget, or draw fewer together", step=reached
            ) from error
        for offset, sample in enumerate(samples):
            yield _finished(judge, plan, first + offset, sample)


def _draw(backend: ImageBackend, job: ImageJob, on_step: Callable[[SamplingStep], None]) -> Tensor:
    """The samples of a batch; pixels outside the mask are exactly the given ones."""
    if job.start is not None and job.strength == 0:
        on_step(SamplingStep(1, 1, lambda: cast(Tensor, job.start)[None]))
        return job.start.expand(job.n, *job.start.shape)
    x = backend.run(job, on_step).detach().cpu()
    if job.redraw is not None and job.start is not None:
        x = torch.where(job.redraw, x, job.start)
    return x


def _finished(judge: Judge | None, plan: ImagePlan, index: int, sample: Tensor) -> CreatedImage | Blocked:
    """Apply style, size and judge."""
    details = plan.details | {"seed": plan.request.seed + index, "index": index}
    picture = CreatedImage.of(index, styles.finished(sample, plan.style), plan.enlarged, details)
    category = None if judge is None else judge(picture.x)
    return picture if category is None else Blocked(index, category)


def events(backend: ImageBackend, judge: Judge | None, plan: ImagePlan) -> Iterator[Event]:
    """All events; sampling runs in a thread, and closing the iterator ends it within a step."""
    queue, stop = SimpleQueue[Any](), threading.Event()
    thread = threading.Thread(
        target=work, args=(backend, judge, plan, queue.put, stop), name="pippin images", daemon=True
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


def work(
    backend: ImageBackend, judge: Judge | None, plan: ImagePlan, put: Callable[[Any], None], stop: threading.Event
) -> None:
    """Sample in a thread; puts events, then None."""
    try:
        for item in run(backend, judge, plan, put, stop):
            put(item)
    except BaseException as error:
        put(error)
    put(None)


async def aevents(backend: ImageBackend, judge: Judge | None, plan: ImagePlan) -> AsyncGenerator[Event, None]:
    """As `events`, for an event loop."""
    loop, queue, stop = asyncio.get_running_loop(), asyncio.Queue[Any](), threading.Event()

    def put(item: Any) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, item)

    thread = threading.Thread(target=work, args=(backend, judge, plan, put, stop), name="pippin images", daemon=True)
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
    """Raise an error for images that were withheld.

    Raises:
        ConceptsBlocked: at least one was.
    """
    if withheld:
        named = ", ".join(f"{one.index} ({one.category})" for one in withheld)
        raise ConceptsBlocked(f"the judge withheld image {named}", category=withheld[0].category)
