"""Palettized matrices: indices into small tables of values.

Notable here:
- a group of consecutive rows (or columns) shares a table, whose values are arbitrary, not on a grid
- table entries are scalars; tables of vectors are not supported

Source: the palettization of arXiv:2407.21075, section on optimization (16 rows or columns share a table of 2^b values).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float16, Int32, UInt8
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.quantization.codes import Codes, words_of
from pippin.nn.quantization.packed import Bits


@checked
@dataclass(frozen=True, eq=False)
class Palette:
    """A matrix of indices into tables of values.

    Args:
        indices: integers below ``2 ** bits``.
        tables: one for each group of rows or columns, in order; the last group may be smaller than the others.
        bits: 2, 3, 4 or 8.
        axis: whether consecutive "rows" or "columns" share a table.
        group_size: number of rows or columns that share a table.

    Raises:
        InvalidArgument: indices that are too large, tables that do not fit them.

    >>> indices = torch.tensor([[0, 3], [1, 0]], dtype=torch.uint8)
    >>> tables = torch.tensor([[0.0, 1.0, 2.0, 8.0], [-1.0, -5.0, 0.0, 0.0]]).half()
    >>> Palette(indices, tables, bits=2, axis="rows", group_size=1).dense().tolist()
    [[0.0, 8.0], [-5.0, -1.0]]
    """

    indices: UInt8[Tensor, "rows columns"]
    tables: Float16[Tensor, "groups entries"]
    bits: Bits
    axis: Literal["rows", "columns"]
    group_size: PositiveInt

    def __post_init__(self) -> None:
        carrier(self.indices, self.bits)  # which checks the indices
        wanted = (-(-self.indices.shape[self._dim] // self.group_size), 2**self.bits)
        if self.tables.shape != wanted:
            raise InvalidArgument(
                f"{tuple(self.tables.shape)} values in tables do not fit {self.indices.shape[self._dim]} {self.axis} "
                f"in groups of {self.group_size} with {self.bits} bits: {wanted} are needed"
            )
        if not self.tables.isfinite().all():
            raise InvalidArgument("a table holds a value that is not finite; half precision holds up to 65504")

    @property
    def _dim(self) -> int:
        return 0 if self.axis == "rows" else 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.indices.shape[0], self.indices.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes on disk: the words of the indices, and two bytes for each value of the tables."""
        rows, columns = self.shape
        return rows * words_of(columns, self.bits) * 4 + self.tables.nbytes

    def dense(self) -> Float[Tensor, "rows columns"]:
        """The dequantized matrix, float32."""
        table = (
            torch.arange(self.indices.shape[self._dim], device=self.indices.device) // self.group_size
        ) << self.bits
        index = self.indices.long() + (table[:, None] if self.axis == "rows" else table)  # into the flat tables
        return self.tables.float().reshape(-1)[index]

    def words(self) -> Int32[Tensor, "rows words"]:
        """The indices as they are stored, like codes (see `Codes.words`)."""
        return carrier(self.indices, self.bits).words()


def carrier(indices: UInt8[Tensor, "rows columns"], bits: Bits) -> Codes:
    """Indices as `Codes` with a dummy scale, as both have the same format on disk.

    Raises:
        InvalidArgument: an unsupported number of bits, or an index that is too large.
    """
    return Codes(indices, torch.ones(1, 1, dtype=torch.float16, device=indices.device), bits, 0.0)
