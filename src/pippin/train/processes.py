"""The interface between the trainer and the processes of a distributed run, and its single-process implementation.

Notable here:
- after the last micro-batch of a step, gradients are sums over all processes, never means: the trainer divides once,
  by the number of units of all processes
- every process reads the same data and uses its part of the micro-batches, so the number of processes does not change
  the result
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Processes(Protocol):
    """One process of a group that trains a model together.

    Attributes:
        rank: the rank of this process, from 0; rank 0 writes files.
        size: the number of processes.
    """

    rank: int
    size: int

    def prepare(self, model: nn.Module) -> nn.Module:
        """Replicate or shard the model, in place where possible; the objective is called with the result."""

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Context for forward and backward of one micro-batch; gradients are reduced in the ``last`` one only."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum the values over all processes; every process gets the result."""

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The total 2-norm of all gradients, over the shards of all processes."""

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Gather a tensor that may be sharded; every process gets the full tensor."""

    def shard(self, full: Tensor, like: Tensor) -> Tensor:
        """This process's shard of a full tensor, with the layout, device and dtype of ``like``."""

    def barrier(self) -> None:
        """Wait until all processes have reached this call."""


class SingleProcess:
    """`Processes` for a run with a single process."""

    rank = 0
    size = 1

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model unchanged."""
        return model

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """A context that does nothing."""
        return nullcontext()

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the values unchanged."""
        return values

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The total 2-norm of all gradients."""
        return torch.nn.utils.get_total_norm(gradients)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor unchanged."""
        return tensor

    def shard(self, full: Tensor, like: Tensor) -> Tensor:
        """The tensor with the device and dtype of ``like``."""
        return full.to(like)

    def barrier(self) -> None:
        """Return at once."""
