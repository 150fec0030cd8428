"""Distributed training with torch.distributed: DDP (replicated model) or FSDP (sharded model).

Notable here:
- started by `torchrun` or Ray Train; a process reads its rank from the environment
- gradients are summed, not averaged, and the trainer divides once by the units of all processes; every process reads
  the whole data stream and uses its part: two processes have the same losses as one with twice the micro-batches
- FSDP2 shards parameters as DTensors; optimizer states and averages are sharded too, and checkpoints store full
  tensors, so that a run can be resumed with any number of processes
- if a process ends, the others end as well with an error that says so, instead of waiting
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from pippin.core.checks import PositiveFloat, checked
from pippin.core.device import is_distributed
from pippin.core.errors import InvalidArgument, TrainingError
from pippin.nn.parallel.collectives import lost_connection
from pippin.train.processes import total_norm

BUCKET = 2**23
"""Gradient elements per all-reduce with DDP."""


class DistributedProcesses:
    """The process group that `torchrun` started, for `Trainer(processes=...)`.

    Args:
        strategy: "ddp": each process has a full copy of the model; "fsdp": each has a shard of every parameter, its
            gradient and its optimizer state, and gathers one block at a time to compute.
        backend: "gloo" between CPUs, "nccl" between CUDA devices; None selects by this machine.
        methods: with "fsdp", methods of the model beside ``forward`` that the objective calls; names that the model
            does not have are ignored.
        timeout: seconds that a process waits for the others before the run fails.

    Attributes:
        rank: the rank of this process, from 0; rank 0 shows progress, logs and writes files.
        size: the number of processes.
        replica: the same as the rank: every process reads other data.
        device: the device of this process, for `Trainer(device=...)`.

    Raises:
        InvalidArgument: this process was not started as one of a group.

    A script for ``torchrun --nproc-per-node 2 script.py``:

    ```py
    processes = DistributedProcesses("fsdp")
    Trainer(model, objective, data, steps=100, device=processes.device, processes=processes).fit()
    processes.close()
    ```

    Source: FSDP, arXiv:2304.11277; summed gradients: torch.distributed.fsdp.fully_shard.
    """

    @checked
    def __init__(
        self,
        strategy: Literal["ddp", "fsdp"] = "ddp",
        *,
        backend: str | None = None,
        methods: Sequence[str] = ("hidden",),
        timeout: PositiveFloat = 600.0,
    ) -> None:
        self.strategy, self._methods = strategy, tuple(methods)
        self._started = not dist.is_initialized()
        if self._started:
            if not is_distributed():
                raise InvalidArgument(
                    "this process was started alone: run the script with torchrun --nproc-per-node N, or leave "
                    "processes out"
                )
            backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.replica = self.rank
        cuda = dist.get_backend() == "nccl"
        self.device = f"cuda:{os.environ.get('LOCAL_RANK', self.rank)}" if cuda else "cpu"
        if cuda:
            torch.cuda.set_device(self.device)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Broadcast the weights of rank 0 to all processes; with "fsdp", shard the model."""
        with connection_errors():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=0)
        if self.strategy == "fsdp":
            mesh = init_device_mesh(self.device.split(":")[0], (self.size,))
            for block in _blocks(model):
                fully_shard(block, mesh=mesh)
            # parameters outside of blocks stay gathered from forward to backward: objectives read the head's weight
            fully_shard(model, mesh=mesh, reshard_after_forward=False)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    # sums instead of means, since gloo has no mean reduction
                    module.set_force_sum_reduction_for_comms(True)
            for name in self._methods:
                if hasattr(model, name):
                    register_fsdp_forward_method(model, name)
        return model

    @contextmanager
    def micro_batch(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Context for forward and backward; after the ``last`` one, gradients are summed over all processes."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
        with connection_errors():
            yield
            if last and self.strategy == "ddp":
                _sum_gradients([p for p in model.parameters() if p.requires_grad])

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum the values over all processes, in place; every process gets the result."""
        with connection_errors():
            dist.all_reduce(values)
        return values

    def total_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The total 2-norm of all gradients, over the shards of all processes."""
        with connection_errors():
            return _full(total_norm(parameters))

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, whole; every process gets them."""
        with connection_errors():
            return {name: _full(tensor) for name, tensor in tensors.items()}

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors: every process has a part of each."""
        return dict(tensors)

    def shard(self, full: Tensor, like: Tensor) -> Tensor:
        """This process's shard of a full tensor, with the layout, device and dtype of ``like``."""
        full = full.to(device=like.device, dtype=like.dtype)
        if not isinstance(like, DTensor):
            return full
        return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)

    def barrier(self) -> None:
        """Wait until all processes have reached this call."""
        with connection_errors():
            dist.barrier()

    def finish(self) -> None:
        """Nothing to do: a copy is whole, and shards stay sharded."""

    def close(self) -> None:
        """Destroy the process group, if this object initialized it."""
        if self._started and dist.is_initialized():
            dist.destroy_process_group()


def _full(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules to shard separately: members of the outermost `ModuleList`s, such as the layers of a decoder."""
    if isinstance(model, nn.ModuleList):
        return [child for child in model if next(child.parameters(), None) is not None]
    return [block for child in model.children() for block in _blocks(child)]


def _sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum gradients over all processes, in place; a parameter without a gradient on any process keeps None."""
    if not parameters:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(present)
    with_gradient = [parameter for parameter, count in zip(parameters, present.tolist(), strict=True) if count]
    for parameter in with_gradient:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([parameter.grad for parameter in with_gradient if parameter.grad is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat)
        for gradient, values in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(values.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group gradients of one dtype into buckets of up to `BUCKET` elements."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        full = sum(member.numel() for member in bucket) + gradient.numel() > BUCKET
        if bucket and (full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


@contextmanager
def connection_errors() -> Iterator[None]:
    """Raise `TrainingError` for errors that mean that another process has ended."""
    try:
        yield
    except RuntimeError as error:
        if (reason := lost_connection(error)) is None:
            raise
        raise TrainingError(
            f"process {dist.get_rank()} of {dist.get_world_size()} lost the others: one of them has ended or does not "
            f"answer ({reason}); its own message says why. Start the run again to resume from its newest checkpoint"
        ) from error
