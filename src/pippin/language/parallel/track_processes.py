"""Training of a decoder with tracks in several processes, each of which has some of the tracks.

Notable here:
- all processes read the same data, and compute the same loss from the joined states; only the joins are exchanged, and
  backwards the gradients of what entered a block
- checkpoints hold the whole model: a run goes on with any number of processes that divides the tracks, also with one

Source: Parallel Track Transformers, arXiv:2602.07306, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.language.decoder import Decoder
from pippin.language.parallel.divide_model import own_layers, share_tracks
from pippin.nn.parallel.collectives import Collectives
from pippin.train.distributed import DistributedProcesses, connection_errors
from pippin.train.processes import total_norm

_LAYER = re.compile(r"(?:^|(?<=\.))layers\.(\d+)(?=\.)")


class TrackProcesses(DistributedProcesses):
    """The processes that share a decoder's tracks, for `pippin.train.Trainer(processes=...)`.

    Args:
        backend: "gloo" between CPUs, "nccl" between CUDA devices; None selects by this machine.
        timeout: seconds that a process waits for the others before the run fails.

    Attributes:
        rank: the rank of this process, from 0; rank 0 shows progress, logs and writes files.
        size: 1: all processes read the same data.
        collectives: connects them.

    Raises:
        InvalidArgument: this process was not started as one of a group.

    A script for ``torchrun --nproc-per-node 4 script.py``:

    ```py
    processes = TrackProcesses()
    model = Decoder(PTMoEConfig(..., num_tracks=4).decoder()).initialize(seed=0)
    Trainer(model, NextToken(), data, steps=100, processes=processes).fit()
    processes.close()
    ```
    """

    def __init__(self, *, backend: str | None = None, timeout: float = 600.0) -> None:
        super().__init__(backend=backend, timeout=timeout)
        self.size, self.replica = 1, 0
        self.collectives = Collectives()
        self._layers: list[int] = []
        self._shared: set[int] = set()
        self._whole: Decoder | None = None

    def check(self, model: nn.Module) -> Decoder:
        """The same model, after a check that these processes can divide its tracks.

        Raises:
            InvalidArgument: the model is no decoder with tracks, or they cannot be divided.
        """
        if not isinstance(model, Decoder):
            raise InvalidArgument(f"tracks are those of a Decoder, not of a {type(model).__name__}")
        if model.config.tracks is None:
            raise InvalidArgument(
                f"this {model.config.family} decoder has no tracks to divide: strategy ddp divides the batch instead, "
                "and nano-pt-moe is a preset with tracks"
            )
        own_layers(model.config, self.collectives)
        return model

    def prepare(self, model: nn.Module) -> nn.Module:
        """Broadcast the weights of rank 0, and keep those of this process's tracks.

        Raises:
            InvalidArgument: as `check`.
        """
        model = self.check(model)
        part = share_tracks(model, self.collectives)
        super().prepare(model)
        self._whole = model
        self._layers = own_layers(model.config, self.collectives)
        own = {id(parameter) for parameter in part.layers.parameters()}
        self._shared = {id(parameter) for parameter in part.parameters()} - own
        return part

    @contextmanager
    def micro_batch(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Context for forward and backward; the joins exchange what is needed."""
        with connection_errors():
            yield

    def all_reduce(self, values: Tensor) -> Tensor:
        """The mean over the processes, which have the same values but for what each measures of its own tracks."""
        return super().all_reduce(values) / self.collectives.size

    def total_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The total 2-norm of the gradients of all tracks, and of what all processes have, once."""
        shared = [each for each in parameters if id(each) in self._shared]
        own = [each for each in parameters if id(each) not in self._shared]
        with connection_errors():
            tracks = self.collectives.all_reduce(total_norm(own).square())
        return torch.stack([tracks, total_norm(shared).square()]).sum().sqrt()

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all processes, those of layers by their number in the whole model."""
        found = {name: tensor for name, tensor in tensors.items() if not _LAYER.search(name)}
        with connection_errors():
            for rank in range(self.collectives.size):
                found.update(self._layers_of(rank, tensors))
        return found

    def _layers_of(self, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of one process's layers, in all processes."""
        mine = rank == self.rank
        layers = {name: tensor for name, tensor in tensors.items() if _LAYER.search(name)}
        whole = {self._whole_name(name): tensor for name, tensor in layers.items()} if mine else {}
        kinds: list[Any] = [{name: (tensor.shape, tensor.dtype) for name, tensor in whole.items()} if mine else None]
        dist.broadcast_object_list(kinds, src=rank)
        for name, (shape, dtype) in kinds[0].items():
            if not mine:
                whole[name] = torch.empty(shape, dtype=dtype, device=self.device)
            sent = whole[name].to(self.device).contiguous()
            dist.broadcast(sent, src=rank)
            whole[name] = sent
        return whole

    @torch.no_grad()
    def finish(self) -> None:
        """Give the whole model the weights of the tracks that other processes trained."""
        if self._whole is None:
            return
        tensors = self._whole.state_dict()
        trained = self.gather(self.own(tensors))
        for name, tensor in tensors.items():
            tensor.copy_(trained[name])

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of this process, those of layers by their number in its part."""
        numbers = {layer: number for number, layer in enumerate(self._layers)}
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            layer = _LAYER.search(name)
            if layer is None:
                found[name] = tensor
            elif int(layer[1]) in numbers:
                found[_LAYER.sub(f"layers.{numbers[int(layer[1])]}", name)] = tensor
        return found

    def _whole_name(self, name: str) -> str:
        return _LAYER.sub(lambda layer: f"layers.{self._layers[int(layer[1])]}", name)
