"""Sums over the processes that compute one model together, with their gradients, and a count of them.

Notable here:
- `copy` and `sum` are a pair: what stands between them is computed by every process in part. The sum's gradient is the
  same everywhere, since all go on with the same result; the copy's is the sum over the processes
- every collective is counted, with its bytes: how often processes wait for each other is what parallel tracks are about

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (the operators f and g).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument

_LOST = ("connection closed", "connection reset", "broken pipe", "timed out waiting", "remote process")
"""Parts of the backends' messages when another process has ended or does not answer; they raise plain RuntimeErrors."""


def lost_connection(error: BaseException) -> str | None:
    """What a backend said of a process that has ended or does not answer; None for any other error."""
    known = isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _LOST)
    if not known and not isinstance(error, dist.DistError):
        return None
    return str(error).splitlines()[0].split(". ")[0]


class Collectives:
    """The processes of a group, as one of them sees them.

    Args:
        group: a group of `torch.distributed`; None for all processes.

    Attributes:
        rank: the rank of this process in the group.
        size: the number of processes.
        count: collectives so far.
        bytes: bytes that this process gave to them.

    Raises:
        InvalidArgument: the processes are not connected.
    """

    def __init__(self, group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise InvalidArgument(
                "this process is not connected to others: start it with torchrun --nproc-per-node N, and call "
                "torch.distributed.init_process_group before"
            )
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.count = self.bytes = 0

    def sum(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The sum over all processes; its gradient is passed on as it is."""
        total: Tensor = _Sum.apply(x, self)  # type: ignore[no-untyped-call]
        return total

    def copy(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The same numbers, for a part of the model that is this process's own; gradients are summed."""
        copied: Tensor = _Copy.apply(x, self)  # type: ignore[no-untyped-call]
        return copied

    def all_reduce(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The sum over all processes, in new memory, without a gradient."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        self.count += 1
        self.bytes += x.numel() * x.element_size()
        dist.all_reduce(x, group=self.group)
        return x


class _Sum(torch.autograd.Function):
    """Forward an all-reduce, backward nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        return collectives.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Copy(torch.autograd.Function):
    """Forward nothing, backward an all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.collectives.all_reduce(gradient), None
