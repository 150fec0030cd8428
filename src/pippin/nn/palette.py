"""Matrices stored as indices into small tables of values: what palettisation leaves of a weight.

Notable here:
- a group of neighbouring rows (or columns) shares a table, whose values lie wherever the weights do, not on a grid
- a table may be of vectors of one value only: the plain form, which is also the one that is easy to read back

Source: the palettisation of arXiv:2407.21075, section on optimisation (16 rows or columns share a table of 2^b values).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float16, Int32, UInt8
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.nn.codes import Codes, words_of


@dataclass(frozen=True, eq=False)
class Palette:
    """A matrix of indices into tables.

    Args:
        indices: below ``2 ** bits``.
        tables: one for each group of rows or columns, in order; the last group may be smaller than the others.
        bits: 2, 3, 4 or 8.
        axis: whether neighbouring "rows" or "columns" share a table.
        group: how many of them do.

    Raises:
        InvalidArgument: other bits, indices that are too large, tables that do not fit them.

    >>> indices = torch.tensor([[0, 3], [1, 0]], dtype=torch.uint8)
    >>> tables = torch.tensor([[0.0, 1.0, 2.0, 8.0], [-1.0, -5.0, 0.0, 0.0]]).half()
    >>> Palette(indices, tables, bits=2, axis="rows", group=1).dense().tolist()
    [[0.0, 8.0], [-5.0, -1.0]]
    """

    indices: UInt8[Tensor, "rows columns"]
    tables: Float16[Tensor, "groups entries"]
    bits: int
    axis: Literal["rows", "columns"]
    group: int

    def __post_init__(self) -> None:
        carrier(self.indices, self.bits)  # which checks bits and indices
        if self.axis not in ("rows", "columns"):
            raise InvalidArgument(f"axis is {self.axis!r}; rows or columns share a table")
        if self.group < 1:
            raise InvalidArgument(f"group is {self.group}; at least one of the {self.axis} has a table")
        wanted = (-(-self.indices.shape[self._dim] // self.group), 2**self.bits)
        if self.tables.shape != wanted:
            raise InvalidArgument(
                f"{tuple(self.tables.shape)} values in tables do not fit {self.indices.shape[self._dim]} {self.axis} "
                f"in groups of {self.group} with {self.bits} bits: {wanted} are needed"
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
        """Bytes on disk: the words of the indices, and two for each value of a table."""
        rows, columns = self.shape
        return rows * words_of(columns, self.bits) * 4 + self.tables.nbytes

    def dense(self) -> Float[Tensor, "rows columns"]:
        """The weights that are meant, float32."""
        table = (torch.arange(self.indices.shape[self._dim], device=self.indices.device) // self.group) << self.bits
        places = self.indices.long() + (table[:, None] if self.axis == "rows" else table)
        return self.tables.float().reshape(-1)[places]

    def words(self) -> Int32[Tensor, "rows words"]:
        """The indices as they are stored, like codes (see `Codes.words`)."""
        return carrier(self.indices, self.bits).words()


def carrier(indices: UInt8[Tensor, "rows columns"], bits: int) -> Codes:
    """Indices in the form of codes, whose words they share; the scale means nothing.

    Raises:
        InvalidArgument: other bits, or an index that is too large.
    """
    return Codes(indices, torch.ones(1, 1, dtype=torch.float16, device=indices.device), bits, 0.0)
