"""The interface between the trainer and the processes of a distributed run, and its single-process implementation.

Notable here:
- after the last micro-batch of a step, gradients are sums over all processes, never means: the trainer divides once,
  by the number of units of all processes
- every process reads the same data and uses its part of the micro-batches, so the number of processes does not change
  the result
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Processes(Protocol):
    """One process of a group that trains a model together.

    Attributes:
        rank: the rank of this process, from 0; rank 0 writes files.
        size: the number of processes that read different data.
        replica: which of them this process is; processes that have parts of one model read the same data.
    """

    rank: int
    size: int
    replica: int

    def prepare(self, model: nn.Module) -> nn.Module:
        """Replicate or shard the model, in place where possible; the objective is called with the result."""

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Context for forward and backward of one micro-batch; gradients are reduced in the ``last`` one only."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum the values over all that read different data; every process gets the result."""

    def total_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The total 2-norm of the gradients of all processes; each of these parameters has one."""

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The full tensors of all processes, by their names in the whole model; every process gets them."""

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the whole model's tensors that this process has, whole, by its names."""

    def shard(self, full: Tensor, like: Tensor) -> Tensor:
        """This process's shard of a full tensor, with the layout, device and dtype of ``like``."""

    def barrier(self) -> None:
        """Wait until all processes have reached this call."""

    def finish(self) -> None:
        """After the last step: give the model that `prepare` was given the weights that other processes trained."""


class SingleProcess:
    """`Processes` for a run with a single process."""

    rank = 0
    size = 1
    replica = 0

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model unchanged."""
        return model

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """A context that does nothing."""
        return nullcontext()

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the values unchanged."""
        return values

    def total_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The total 2-norm of all gradients."""
        return total_norm(parameters)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors."""
        return dict(tensors)

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors."""
        return dict(tensors)

    def shard(self, full: Tensor, like: Tensor) -> Tensor:
        """The tensor with the device and dtype of ``like``."""
        return full.to(like)

    def barrier(self) -> None:
        """Return at once."""

    def finish(self) -> None:
        """Nothing to do."""


def total_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The total 2-norm of the gradients that this process has."""
    return torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
