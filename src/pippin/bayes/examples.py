r"""Labelled examples in whatever form a user has them, cut into parts by a seed.

Notable here:
- a pair of tensors or arrays, a `Dataset`, a `DataLoader`, or batches: each becomes parts that can be read again
- a loader that shuffles is cut in its data set, so that no example wanders from one part into another
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from pippin.bayes.batches import check_data, size, split
from pippin.core.errors import InvalidInput


def cut(data: Any, shares: Sequence[float], *, seed: int | None, batch: int, model: nn.Module) -> list[Iterable[Any]]:
    """Parts of labelled examples, as batches (inputs, targets).

    Args:
        data: a pair (inputs, targets) of tensors, arrays or tables of pandas, a map-style `Dataset`, a `DataLoader`, or
            an iterable of batches, which is then held in memory.
        shares: sizes of the parts; add up to 1.
        seed: of the order in which examples are dealt out; None keeps theirs.
        batch: examples of a batch where the data has no batches of its own.
        model: arrays become tensors of its precision.

    Raises:
        InvalidInput: no examples, too few for the parts, inputs and targets of different numbers, or another form.
    """
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        length, collate = len(data.dataset), data.collate_fn  # type: ignore[arg-type]  # map-style sets have one
        batch = data.batch_size or batch
        return [_loader(data.dataset, part, batch, collate) for part in _deal(length, shares, seed)]
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return [_loader(data, part, batch, None) for part in _deal(len(data), shares, seed)]  # type: ignore[arg-type]
    inputs, targets = _whole(data, model)
    if size(inputs) != len(targets):
        raise InvalidInput(f"there are {size(inputs)} inputs and {len(targets)} targets; give one for each")
    parts = _deal(len(targets), shares, seed)
    return [[(_take(inputs, at), targets[at]) for at in part.split(batch)] for part in parts]


def inputs_alone(data: Any, *, batch: int, model: nn.Module) -> list[Any]:
    """Batches of inputs: of a tensor or an array, of an iterable of tensors, or of labelled data without its targets.

    Raises:
        InvalidInput: there are none.
    """
    if hasattr(data, "__array__"):
        found = list(tensor(data, model).split(batch))
    elif isinstance(data, (list, tuple)) and len(data) and all(isinstance(one, Tensor) for one in data):
        pair = len(data) == 2 and (data[1].ndim < 2 or data[0].shape[1:] != data[1].shape[1:])
        found = [data[0]] if pair else list(data)
    else:
        found = [x for part in cut(data, (1.0,), seed=None, batch=batch, model=model) for x, _ in part]
    if not any(size(one) for one in found):
        raise InvalidInput("there are no inputs")
    return found


def _deal(count: int, shares: Sequence[float], seed: int | None) -> list[Tensor]:
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


def _loader(dataset: Any, part: Tensor, batch: int, collate: Any) -> DataLoader[Any]:
    return DataLoader(Subset(dataset, part.tolist()), batch_size=batch, shuffle=False, collate_fn=collate)


def _whole(data: Any, model: nn.Module) -> tuple[Any, Tensor]:
    """All examples as one batch."""
    if isinstance(data, (tuple, list)) and len(data) == 2 and hasattr(data[1], "__array__"):
        return tensor(data[0], model), tensor(data[1], model)
    if isinstance(data, Mapping):
        return split(data)
    check_data(data)
    pairs = [split(batch) for batch in data]
    if not pairs:
        raise InvalidInput("the data holds no batch; give at least one batch of inputs and targets")
    return _joined([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def tensor(values: Any, model: nn.Module) -> Any:
    """An array, or a table of pandas, as a tensor; real numbers in the precision of the model's weights.

    Raises:
        InvalidInput: values that are no numbers.
    """
    if not hasattr(values, "__array__"):
        return values
    if not isinstance(values, Tensor):
        array = np.ascontiguousarray(values)
        if array.dtype.kind not in "biuf":
            raise InvalidInput(f"{type(values).__name__} holds values of type {array.dtype}; turn them into numbers")
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
