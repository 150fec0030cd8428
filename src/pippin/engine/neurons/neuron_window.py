"""The neurons of one layer that are in memory: those that were active in one of the last tokens.

Notable here:
- one preallocated matrix has a row for each neuron that is there, without gaps: the last rows are moved into the places
  of those that leave, and new ones are appended. The order of neurons does not change what a layer computes
- rows that were never used take no memory, and the matrix can be cut after each pass

Source: Alizadeh et al. 2024, arXiv:2312.11514, sections 3.1 (windowing) and 3.3 (memory management).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from pippin.core import memory

_NOWHERE: Final = -1
Neurons = Int64[np.ndarray, "neurons"]


class NeuronWindow:
    """The neurons of a layer that are in memory.

    Args:
        neurons: how many the layer has.
        numbers: numbers of each one's bundle.
        dtype: their precision.
        capacity: most neurons that are there at a time.

    Attributes:
        rows: the matrix, (neurons, numbers), of which the first `num_used` rows are meaningful.
        used: how many are there.
        touched: rows that take memory.

    >>> window = NeuronWindow(8, 2, torch.float32, 3)
    >>> window.append(np.array([1, 5, 6]), np.array([1, 1, 2]))[:] = torch.tensor([[1.0], [5.0], [6.0]])
    >>> window.forget(2)  # neurons that were last active before token 2
    >>> window.neurons.tolist(), window.missing(np.array([1, 6])).tolist(), window.gather(np.array([6])).tolist()
    ([6], [1], [[6.0, 6.0]])
    """

    def __init__(self, neurons: int, numbers: int, dtype: torch.dtype, capacity: int) -> None:
        self.rows: Tensor = torch.empty(neurons, numbers, dtype=dtype)
        self.capacity, self.used, self.touched = min(capacity, neurons), 0, 0
        self._pointer = np.full(neurons, _NOWHERE, dtype=np.int64)  # the neuron of each row
        self._row = np.full(neurons, _NOWHERE, dtype=np.int64)  # the row of each neuron
        self._last = np.zeros(neurons, dtype=np.int64)  # when the neuron of each row was active last

    @property
    def row_bytes(self) -> int:
        """Bytes of a neuron."""
        return self.rows.shape[1] * self.rows.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rows take."""
        return self.touched * self.row_bytes

    @property
    def neurons(self) -> Neurons:
        """The neurons that are there, in the order of their rows."""
        return self._pointer[: self.used].copy()

    def missing(self, neurons: Neurons) -> Int64[np.ndarray, missing]:
        """Those of some neurons that are not there."""
        missing: Int64[np.ndarray, missing] = neurons[self._row[neurons] == _NOWHERE]
        return missing

    def gather(self, neurons: Neurons) -> Shaped[Tensor, "neurons numbers"]:
        """Copies of the rows of neurons that are there."""
        return self.rows.index_select(0, torch.from_numpy(self._row[neurons]))

    def touch(self, neurons: Neurons, when: Int64[np.ndarray, neurons]) -> None:
        """Note when neurons that are there were active."""
        rows = self._row[neurons]
        self._last[rows] = np.maximum(self._last[rows], when)

    def forget(self, before: int) -> None:
        """Drop the neurons that were last active before a token."""
        self._drop(np.flatnonzero(self._last[: self.used] < before))

    def make_room(self, count: int, keep: Neurons) -> None:
        """Drop as many neurons as ``count`` others need the room of, those whose last activity is longest ago first.

        Args:
            count: no more than the capacity without those that are kept.
            keep: neurons that stay.
        """
        if (excess := self.used + count - self.capacity) <= 0:
            return
        last = self._last[: self.used].copy()
        rows = self._row[keep]
        last[rows[rows != _NOWHERE]] = np.iinfo(np.int64).max
        self._drop(np.sort(np.argpartition(last, excess - 1)[:excess]))

    def next_rows(self, count: int) -> Shaped[Tensor, "neurons numbers"]:
        """The rows that new neurons are written to before they are appended."""
        self.touched = max(self.touched, self.used + count)
        return self.rows[self.used : self.used + count]

    def append(self, neurons: Neurons, when: Int64[np.ndarray, neurons]) -> Shaped[Tensor, "neurons numbers"]:
        """Add neurons that are not there, and return their rows.

        Args:
            neurons: each once; there is room for them.
            when: the last token in which each was active.
        """
        found = self.next_rows(len(neurons))
        rows = np.arange(self.used, self.used + len(neurons))
        self._pointer[rows], self._row[neurons], self._last[rows] = neurons, rows, when
        self.used += len(neurons)
        return found

    def resize(self, capacity: int) -> None:
        """Change the capacity, at least 1; what does not fit leaves, and its memory goes to the system."""
        self.capacity = min(capacity, len(self._row))
        self.make_room(0, np.empty(0, dtype=np.int64))
        if self.touched > self.capacity:
            rest = self.rows[self.capacity : self.touched]
            memory.forget(rest.data_ptr(), rest.nbytes)
            self.touched = self.capacity

    def _drop(self, holes: np.ndarray) -> None:
        """Remove rows, and move the last ones into the places of those before them.

        Args:
            holes: rows, ascending.
        """
        if not len(holes):
            return
        left = self.used - len(holes)
        self._row[self._pointer[holes]] = _NOWHERE
        stays = np.ones(self.used - left, dtype=bool)
        stays[holes[holes >= left] - left] = False
        source, target = np.flatnonzero(stays) + left, holes[holes < left]
        self.rows[torch.from_numpy(target)] = self.rows[torch.from_numpy(source)]
        self._pointer[target], self._last[target] = self._pointer[source], self._last[source]
        self._row[self._pointer[target]] = target
        self._pointer[left : self.used] = _NOWHERE
        self.used = left
