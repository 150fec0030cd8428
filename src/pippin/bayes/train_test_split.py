r"""Split labeled data of any common form into random parts.

Notable here:
- a pair of tensors or arrays, a `Dataset`, a `DataLoader`, or batches: each is split into parts that can be iterated
  more than once
- of a `DataLoader` the data set is split, so that shuffling moves no example from one part to another
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from pippin.bayes.batches import check_data, inputs_and_targets, num_examples
from pippin.core.errors import InvalidInput


def split_data(
    data: Any, shares: Sequence[float], *, seed: int | None, batch_size: int, model: nn.Module
) -> list[Iterable[Any]]:
    """Split labeled examples into parts of batches (inputs, targets).

    Args:
        data: a pair (inputs, targets) of tensors, arrays or pandas tables, a map-style `Dataset`, a `DataLoader`, or an
            iterable of batches, which is held in memory.
        shares: sizes of the parts as shares of the examples; they sum to 1.
        seed: seed of the random order before splitting; None keeps the order.
        batch_size: examples per batch, where the data has no batches of its own.
        model: arrays become tensors of its dtype.

    Returns:
        For each part an iterable of batches.

    Raises:
        InvalidInput: no examples, too few for the parts, different numbers of inputs and targets, or an unsupported
            form of data.
    """
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        length, collate = len(data.dataset), data.collate_fn  # type: ignore[arg-type]  # map-style sets have one
        batch_size = data.batch_size or batch_size
        return [_loader(data.dataset, part, batch_size, collate) for part in _split(length, shares, seed)]
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return [_loader(data, part, batch_size, None) for part in _split(len(data), shares, seed)]  # type: ignore[arg-type]
    inputs, targets = _whole(data, model)
    if num_examples(inputs) != len(targets):
        raise InvalidInput(f"there are {num_examples(inputs)} inputs and {len(targets)} targets; give one for each")
    parts = _split(len(targets), shares, seed)
    return [[(_take(inputs, at), targets[at]) for at in part.split(batch_size)] for part in parts]


def input_batches(data: Any, *, batch_size: int, model: nn.Module) -> list[Any]:
    """Batches of inputs from a tensor or array, an iterable of tensors, or labeled data, whose targets are dropped.

    Raises:
        InvalidInput: there are no inputs.
    """
    if hasattr(data, "__array__"):
        found = list(tensor(data, model).split(batch_size))
    elif isinstance(data, (list, tuple)) and len(data) and all(isinstance(one, Tensor) for one in data):
        pair = len(data) == 2 and (data[1].ndim < 2 or data[0].shape[1:] != data[1].shape[1:])
        found = [data[0]] if pair else list(data)
    else:
        found = [x for part in split_data(data, (1.0,), seed=None, batch_size=batch_size, model=model) for x, _ in part]
    if not any(num_examples(one) for one in found):
        raise InvalidInput("there are no inputs")
    return found


def _split(count: int, shares: Sequence[float], seed: int | None) -> list[Tensor]:
    if count == 0:
        raise InvalidInput("the data holds no examples")
    order = torch.arange(count)
    if seed is not None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    edges = [round(count * sum(shares[:number])) for number in range(len(shares))] + [count]
    parts = [order[low:high] for low, high in pairwise(edges)]
    if min(map(len, parts)) < (2 if len(parts) > 1 else 1):
        raise InvalidInput(f"{count} examples are too few to be cut into {len(parts)} parts; give more of them")
    return parts


def _loader(dataset: Any, part: Tensor, batch_size: int, collate: Any) -> DataLoader[Any]:
    return DataLoader(Subset(dataset, part.tolist()), batch_size=batch_size, shuffle=False, collate_fn=collate)


def _whole(data: Any, model: nn.Module) -> tuple[Any, Tensor]:
    """All examples as one batch."""
    if isinstance(data, (tuple, list)) and len(data) == 2 and hasattr(data[1], "__array__"):
        return tensor(data[0], model), tensor(data[1], model)
    if isinstance(data, Mapping):
        return inputs_and_targets(data)
    check_data(data)
    pairs = [inputs_and_targets(batch) for batch in data]
    if not pairs:
        raise InvalidInput("the data holds no batch; give at least one batch of inputs and targets")
    return _joined([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def tensor(values: Any, model: nn.Module) -> Any:
    """Convert an array or a pandas table to a tensor; floating-point values get the dtype of the model's weights.

    Raises:
        InvalidInput: values that are not numeric.
    """
    if not hasattr(values, "__array__"):
        return values
    if not isinstance(values, Tensor):
        array = np.ascontiguousarray(values)
        if array.dtype.kind not in "biuf":
            raise InvalidInput(f"{type(values).__name__} holds values of type {array.dtype}; convert them to numbers")
        values = torch.from_numpy(array if array.flags.writeable else array.copy())
    return values.to(next(model.parameters()).dtype) if values.is_floating_point() else values


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, (tuple, list)):
        return tuple(_joined(column) for column in zip(*parts, strict=True))
    return torch.cat(list(parts))


def _take(inputs: Any, at: Tensor) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _take(value, at) for name, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(_take(value, at) for value in inputs)
    return inputs[at]
