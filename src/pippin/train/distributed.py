"""One run over several processes, by torch.distributed: DDP (whole copies of the model) or FSDP (shards of it).

Notable here:
- started by `torchrun` (or by Ray Train): a process learns from its environment which one it is
- gradients are summed, not averaged, so that the loop divides once by the units of all processes; and every process
  reads the whole stream and keeps its share: two processes have the losses of one with twice the micro-batches
- shards are FSDP2's: parameters become DTensors, optimizers and averages work on a process's part of them, and
  checkpoints hold whole tensors, so that any number of processes can go on from them
- a process that ends takes the others with it, with an error that says so, rather than leaving them to wait
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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
from pippin.core.errors import InvalidArgument, TrainingError

BUCKET = 2**23
"""Numbers of gradients that travel in one message, where every process has a whole copy of the model."""
_ENDED = ("connection closed", "connection reset", "broken pipe", "timed out waiting", "remote process")
"""What the backends say, in errors of no type of their own, when another process is gone."""


class DistributedProcesses:
    """The processes that `torchrun` started, as `Trainer(processes=...)` wants them.

    Args:
        strategy: "ddp": each process holds the whole model, for models that fit; "fsdp": each holds a part of
            every parameter, its gradient and its optimizer state, and gathers a block at a time when it computes.
        backend: "gloo" between CPUs, "nccl" between CUDA devices; None for the one that fits this machine.
        methods: with "fsdp", what an objective calls on the model beside ``forward``; names it does not have are
            left out.
        timeout: seconds that a process waits for the others before the run ends.

    Attributes:
        rank: which of the processes this is, from 0; the first one shows progress, logs and writes.
        size: how many there are.
        device: the device of this process, as `Trainer(device=...)` takes it.

    Raises:
        InvalidArgument: this process was not started together with others.

    A script of three lines more than without it, for ``torchrun --nproc-per-node 2 script.py``:

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
            chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
            dist.init_process_group(chosen, timeout=timedelta(seconds=timeout))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        cuda = dist.get_backend() == "nccl"
        self.device = f"cuda:{os.environ.get('LOCAL_RANK', self.rank)}" if cuda else "cpu"
        if cuda:
            torch.cuda.set_device(self.device)

    def prepare(self, model: nn.Module) -> nn.Module:
        """The same model on every process: its weights are those of the first one; cut into shards if so asked."""
        with _together():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=0)
        if self.strategy == "fsdp":
            mesh = init_device_mesh(self.device.split(":")[0], (self.size,))
            for block in _blocks(model):
                fully_shard(block, mesh=mesh)
            # what belongs to no block stays whole from forward to backward: an objective reads the head's weight itself
            fully_shard(model, mesh=mesh, reshard_after_forward=False)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    # one kind of sum for every backend; gloo knows no mean
                    module.set_force_sum_reduction_for_comms(True)
            for name in self._methods:
                if hasattr(model, name):
                    register_fsdp_forward_method(model, name)
        return model

    @contextmanager
    def micro_batch(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Around forward and backward; after the ``last`` one the gradients are sums over all processes."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
        with _together():
            yield
            if last and self.strategy == "ddp":
                _sum_gradients([p for p in model.parameters() if p.requires_grad])

    def all_reduce(self, values: Tensor) -> Tensor:
        """The values summed over all processes, on each of them."""
        with _together():
            dist.all_reduce(values)
        return values

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all gradients together, over all processes' parts of them."""
        with _together():
            return self.full_tensor(torch.nn.utils.get_total_norm(gradients))

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """A tensor of which each process may hold a part, whole, on each of them."""
        with _together():
            return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def shard(self, whole: Tensor, like: Tensor) -> Tensor:
        """This process's part of a whole tensor that all processes have, laid out and placed like ``like``."""
        whole = whole.to(device=like.device, dtype=like.dtype)
        if not isinstance(like, DTensor):
            return whole
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)

    def barrier(self) -> None:
        """Until all processes are here."""
        with _together():
            dist.barrier()

    def close(self) -> None:
        """Leave the group; only where this object has joined it."""
        if self._started and dist.is_initialized():
            dist.destroy_process_group()


def is_distributed() -> bool:
    """Whether this process is one of several that were started for one run, by `torchrun`, say."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """What is gathered by itself: the members of the outermost lists of modules, such as the layers of a decoder."""
    if isinstance(model, nn.ModuleList):
        return [child for child in model if next(child.parameters(), None) is not None]
    return [block for child in model.children() for block in _blocks(child)]


def _sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Gradients summed in place over all processes; a parameter that no process has a gradient of keeps none."""
    if not parameters:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(present)
    wanted = [parameter for parameter, count in zip(parameters, present.tolist(), strict=True) if count]
    for parameter in wanted:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([parameter.grad for parameter in wanted if parameter.grad is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat)
        for gradient, values in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(values.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one precision at a time, about `BUCKET` numbers together."""
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
def _together() -> Iterator[None]:
    """Say what has happened where another process is no longer there."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error).lower() for word in _ENDED):
            raise
        said = str(error).splitlines()[0].split(". ")[0]
        raise TrainingError(
            f"process {dist.get_rank()} of {dist.get_world_size()} lost the others: one of them has ended or does not "
            f"answer ({said}); its own message says why. Start the run again: it goes on from its newest checkpoint"
        ) from error
