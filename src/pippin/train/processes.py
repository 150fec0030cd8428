"""What the loop asks of the processes that share a run, and the answer of a process that is alone.

Notable here:
- gradients that come out of the last micro-batch of a step are sums over all processes, never means: the loop divides
  once, by the number of units of all of them
- every process reads the same data and takes its share of the micro-batches, so a run on more processes is the same run
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Processes(Protocol):
    """One process among those that train a model together.

    Attributes:
        rank: which one this is, from 0; the first one writes files.
        size: how many there are.
    """

    rank: int
    size: int

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model as the objective shall call it; spread over the processes, in place where that is possible."""

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of one micro-batch; gradients travel between processes in the ``last`` only."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """The values summed over all processes, on each of them."""

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all gradients together, over all processes' parts of them."""

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """A tensor of which each process may hold a part, whole, on each of them."""

    def shard(self, whole: Tensor, like: Tensor) -> Tensor:
        """This process's part of a whole tensor, laid out and placed like ``like``."""

    def barrier(self) -> None:
        """Until all processes are here."""


class SingleProcess:
    """The only process of a run."""

    rank = 0
    size = 1

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Nothing to arrange."""
        return nullcontext()

    def all_reduce(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all gradients together."""
        return torch.nn.utils.get_total_norm(gradients)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def shard(self, whole: Tensor, like: Tensor) -> Tensor:
        """The tensor, on the device and in the precision of ``like``."""
        return whole.to(like)

    def barrier(self) -> None:
        """Nobody to wait for."""
