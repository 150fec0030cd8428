"""Cost estimate of image generation before sampling: bytes and seconds, extrapolated from the first steps.

Notable here:
- memory is measured by tracking every tensor of one image's first two steps: exact for any network, and stopped as soon
  as it would exceed the budget
- tensors of a batch grow with its size; weights do not; so a batch is made smaller before a request is refused
- weights are counted from the files' sizes, before they are read
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pippin.core.errors import OverMemoryBudget
from pippin.core.files import format_bytes
from pippin.generate.contract import OnStep, SamplingStep
from pippin.kits.image.job import Closing, ImageBackend, ImageJob

OVERHEAD: Final = 1.5
"""Factor for memory beyond the tensors: copies in the layout of convolutions, and memory kept by the allocator.
Measured on a CPU with a U-Net; on a GPU it is less."""
STARTED: Final = 56_000_000
"""Bytes that the first run of a process takes in any case: workspaces of libraries, code that is loaded
on first use. Measured on a CPU with three small models, which took 33 to 61 MB more than their tensors."""
WATCHED: Final = 2
"""Steps that are measured for memory."""
TIMED: Final = 3
"""Steps that are timed; the first is the warm-up."""


@dataclass(frozen=True)
class Cost:
    """Cost of generating images.

    Attributes:
        bytes: peak memory, beyond that of the process without a model.
        seconds: until the last image.
        first_seconds: until the first image.
        weight_bytes: the part of ``bytes`` for the model and the encoder.
        bytes_per_image: increase of ``bytes`` for each image of a batch.
        batch_size: images in a batch.
    """

    bytes: int
    seconds: float
    first_seconds: float
    weight_bytes: int
    bytes_per_image: int
    batch_size: int

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.bytes)} ({format_bytes(self.weight_bytes)} of weights), {self.seconds:.1f} s, the "
            "first "
            f"image after {self.first_seconds:.1f} s"
        )


class _Stop(Exception):
    """Enough steps were measured."""


class _Beyond(Exception):
    """The memory limit is exceeded."""


class LiveBytes(TorchDispatchMode):
    """Tracks the bytes of the tensors that are created inside the block and still alive: now, and at the peak.

    Args:
        limit: bytes beyond which an exception ends the block; None for no limit.

    >>> with LiveBytes() as watch:
    ...     a = torch.ones(1000)
    ...     b = a + a
    ...     del a
    ...     c = b + b
    >>> watch.peak, watch.live
    (8000, 8000)
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit, self.live, self.peak = limit, 0, 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the memory of its results."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._known.setdefault(leaf.untyped_storage(), 0)  # it existed before, or is already counted
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        if storage in self._known:
            return
        size = int(storage.nbytes())
        self._known[storage] = size
        self.live += size
        weakref.finalize(storage, self._freed, size)
        self.peak = max(self.peak, self.live)
        if self.limit is not None and self.live > self.limit:
            raise _Beyond

    def _freed(self, size: int) -> None:
        self.live -= size


def weights_of(*modules: Any) -> int:
    """Bytes of the parameters and buffers of modules; None counts nothing."""
    found = {
        tensor.data_ptr(): tensor.nbytes
        for module in modules
        if isinstance(module, nn.Module)
        for tensor in (*module.parameters(), *module.buffers())
    }
    return sum(found.values())


def stored_weights(folder: Path) -> int:
    """Bytes of the weights in a folder, from the file sizes."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def refuse_weights(name: str, weights: int, budget: int | None) -> None:
    """Refuse a model whose weights alone exceed the budget.

    Raises:
        OverMemoryBudget: they exceed it.
    """
    if budget is not None and weights > budget:
        raise OverMemoryBudget(
            f"{name} has {format_bytes(weights)} of weights, the budget is {format_bytes(budget)}; take a smaller "
            "model or a larger memory_budget",
            estimate=weights,
            budget=budget,
        )


def bytes_of_one(backend: ImageBackend, job: ImageJob, limit: int | None) -> int:
    """Bytes beyond the weights that one image of a job needs, measured on its first steps."""
    one = replace(job, n=1)
    parts = [backend.run, backend.close] if isinstance(backend, Closing) else [backend.run]
    peak = 0
    for part in parts:
        watch = LiveBytes(limit)
        with contextlib.suppress(_Stop, _Beyond), watch:
            part(one, _until(WATCHED))
        peak = max(peak, watch.peak)
    return round(peak * OVERHEAD)


def seconds_of(backend: ImageBackend, job: ImageJob) -> float:
    """Seconds of a job, extrapolated from its first steps."""
    before, each, total = _timed(backend.run, job)
    if not each or not isinstance(backend, Closing):
        return before + each * total
    after, of_one, steps = _timed(backend.close, job)
    closings = backend.closings(job)
    return before + each * max(0, total - closings * steps) + closings * (after + of_one * steps)


def _timed(part: Callable[[ImageJob, OnStep], Any], job: ImageJob) -> tuple[float, float, int]:
    """Seconds before the steps, seconds of each step, and the number of steps; a finished part has only the first."""
    begun, marks = time.perf_counter(), list[float]()
    total = 0

    def mark(step: SamplingStep) -> None:
        nonlocal total
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
        total = step.total
        if len(marks) == TIMED:
            raise _Stop

    try:
        part(job, mark)
        return time.perf_counter() - begun, 0.0, total
    except _Stop:
        each = (marks[-1] - marks[0]) / (len(marks) - 1)
        return max(0.0, marks[0] - begun - each), each, total


def _until(steps: int) -> OnStep:
    def stop(step: SamplingStep) -> None:
        if step.done >= steps:
            raise _Stop

    return stop


def largest_batch(
    backend: ImageBackend, job: ImageJob, limit: int, batch_size: int, *, weights: int, budget: int | None
) -> tuple[int, int]:
    """Batch size, and the bytes of each image.

    Args:
        backend: the backend that samples.
        job: of one batch.
        limit: number of images in total.
        batch_size: maximum batch size.
        weights: bytes of the model and its encoder.
        budget: bytes that may be used; None for no limit.

    Raises:
        OverMemoryBudget: not even one image fits; nothing beyond the budget was allocated.
    """
    refuse_weights("the model", weights, budget)
    room = None if budget is None else max(0, budget - weights - STARTED)
    each = bytes_of_one(backend, job, room)
    if room is not None and each > room:
        assert budget is not None
        raise OverMemoryBudget(
            f"one image needs at least {format_bytes(weights + STARTED + each)}, {format_bytes(weights)} of them "
            f"weights; the budget is {format_bytes(budget)}. Take a smaller model, no guidance, or more memory_budget",
            estimate=weights + STARTED + each,
            budget=budget,
        )
    most = batch_size if room is None else max(1, min(batch_size, room // max(1, each)))
    return min(limit, most), each


def cost_of(
    backend: ImageBackend,
    job: ImageJob,
    limit: int,
    *,
    batch_size: int,
    each: int,
    weights: int,
) -> Cost:
    """Cost of all images of a request, sampled in batches."""
    batch = seconds_of(backend, replace(job, n=batch_size))
    batches = -(-limit // batch_size)
    return Cost(weights + STARTED + batch_size * each, batch * batches, batch, weights, each, batch_size)
