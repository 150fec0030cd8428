"""What a picture will cost, before it is drawn: bytes and seconds, measured on its first steps and carried on.

Notable here:
- memory is measured by watching every tensor of one picture's first two steps come and go: exact for any network, and
  stopped as soon as it would go beyond the budget
- tensors of a batch grow with its size; weights do not; so a batch is made smaller before anything is refused
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
from pippin.generate.contract import OnStep, Step
from pippin.kits.image.backends import Backend, Closing, Job

OVERHEAD: Final = 1.5
"""What is taken beyond the tensors, as a factor: copies in the layout of convolutions, and memory kept by the
allocator. Measured on a CPU with a U-Net; on a GPU it is less."""
STARTED: Final = 56_000_000
"""Bytes that the first drawing of a process takes whatever it draws: work spaces of libraries, code that is loaded
when it is first run. Measured on a CPU with three small models, which took 33 to 61 MB more than their tensors."""
WATCHED: Final = 2
"""Steps that are watched for memory."""
TIMED: Final = 3
"""Steps that are timed; the first is warming up."""


@dataclass(frozen=True)
class Cost:
    """What a drawing takes.

    Attributes:
        bytes: of memory at the peak, beyond what the process has without a model.
        seconds: until the last picture.
        first_seconds: until the first picture.
        weights: the part of ``bytes`` that the model and the encoder take.
        each: what each picture of a batch adds to ``bytes``.
        together: pictures in a batch.
    """

    bytes: int
    seconds: float
    first_seconds: float
    weights: int
    each: int
    together: int

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.bytes)} ({format_bytes(self.weights)} of weights), {self.seconds:.1f} s, the first "
            f"picture after {self.first_seconds:.1f} s"
        )


class _Stop(Exception):
    """Enough steps were seen."""


class _Beyond(Exception):
    """More memory than is allowed is in use."""


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that are made inside the block and still live: now, and at the peak.

    Args:
        limit: bytes at which the block is left by an exception; None for none.

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
        """Run an operation, and count the memory that its results brought."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._known.setdefault(leaf.untyped_storage(), 0)  # it was there before, or is counted
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
    """Bytes of the weights in a folder, by its files' sizes."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def refuse_weights(name: str, weights: int, budget: int | None) -> None:
    """Refuse a model whose weights alone are beyond the budget.

    Raises:
        OverMemoryBudget: they are.
    """
    if budget is not None and weights > budget:
        raise OverMemoryBudget(
            f"{name} has {format_bytes(weights)} of weights, the budget is {format_bytes(budget)}; take a smaller "
            "model or a larger memory_budget",
            estimate=weights,
            budget=budget,
        )


def bytes_of_one(backend: Backend, job: Job, limit: int | None) -> int:
    """Bytes beyond the weights that one picture of a job needs, by its first steps."""
    one = replace(job, n=1)
    parts = [backend.run, backend.close] if isinstance(backend, Closing) else [backend.run]
    peak = 0
    for part in parts:
        watch = LiveBytes(limit)
        with contextlib.suppress(_Stop, _Beyond), watch:
            part(one, _until(WATCHED))
        peak = max(peak, watch.peak)
    return round(peak * OVERHEAD)


def seconds_of(backend: Backend, job: Job) -> float:
    """Seconds of a job, by its first steps."""
    before, each, total = _timed(backend.run, job)
    if not each or not isinstance(backend, Closing):
        return before + each * total
    after, of_one, steps = _timed(backend.close, job)
    closings = backend.closings(job)
    return before + each * max(0, total - closings * steps) + closings * (after + of_one * steps)


def _timed(part: Callable[[Job, OnStep], Any], job: Job) -> tuple[float, float, int]:
    """Seconds before the steps, of each, and how many there are; a part that is over has its seconds before them."""
    begun, marks = time.perf_counter(), list[float]()
    total = 0

    def mark(step: Step) -> None:
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
    def stop(step: Step) -> None:
        if step.done >= steps:
            raise _Stop

    return stop


def fit(backend: Backend, job: Job, limit: int, together: int, *, weights: int, budget: int | None) -> tuple[int, int]:
    """How many pictures are drawn at once, and what each of them takes in bytes.

    Args:
        backend: draws.
        job: of one batch.
        limit: pictures in all.
        together: at once, at most.
        weights: bytes of the model and its encoder.
        budget: bytes that may be used; None for any.

    Raises:
        OverMemoryBudget: not even one picture fits; nothing beyond the budget was allocated.
    """
    refuse_weights("the model", weights, budget)
    room = None if budget is None else max(0, budget - weights - STARTED)
    each = bytes_of_one(backend, job, room)
    if room is not None and each > room:
        assert budget is not None
        raise OverMemoryBudget(
            f"one picture needs at least {format_bytes(weights + STARTED + each)}, {format_bytes(weights)} of them "
            f"weights; the budget is {format_bytes(budget)}. Take a smaller model, no guidance, or more memory_budget",
            estimate=weights + STARTED + each,
            budget=budget,
        )
    most = together if room is None else max(1, min(together, room // max(1, each)))
    return min(limit, most), each


def cost_of(
    backend: Backend,
    job: Job,
    limit: int,
    *,
    together: int,
    each: int,
    weights: int,
) -> Cost:
    """What all pictures of a request take, drawn in batches."""
    batch = seconds_of(backend, replace(job, n=together))
    batches = -(-limit // together)
    return Cost(weights + STARTED + together * each, batch * batches, batch, weights, each, together)
