"""Move the tensors of nested batches to a device, and list them by name.

Notable here:
- a batch is a tensor, or a dictionary, tuple, list or dataclass of batches; other values are left unchanged
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on ``device``; tensors that are already there are not copied.

    >>> to_device({"x": torch.ones(1), "name": "a"}, torch.device("cpu"))
    {'x': tensor([1.]), 'name': 'a'}
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = {f.name: to_device(getattr(batch, f.name), device) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **changed)
    return batch


def tensors_of(batch: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of a batch, each with a dotted name.

    >>> [name for name, _ in tensors_of({"x": torch.ones(1), "y": [torch.ones(1)]})]
    ['batch.x', 'batch.y.0']
    """
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from tensors_of(value, f"{name}.{key}")
    elif isinstance(batch, list | tuple):
        for index, value in enumerate(batch):
            yield from tensors_of(value, f"{name}.{index}")
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for entry in dataclasses.fields(batch):
            yield from tensors_of(getattr(batch, entry.name), f"{name}.{entry.name}")
