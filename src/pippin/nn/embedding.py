"""The table that turns token ids into vectors; plain, or packed like any other weight.

Notable here:
- packed, it may be the very weight of the output matrix (a tied model holds it once), and rows are unpacked as they
  are asked for
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.nn.packed import NativeWeight, PackedTable


class Embedding(nn.Module):
    """One vector for each id.

    Args:
        rows: number of ids.
        width: of each vector.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.rows = rows
        self.width = width
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(rows, width))
        self.packed: PackedTable | None = None

    @property
    def device(self) -> torch.device:
        """Where the vectors are."""
        return self._held.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the vectors."""
        return self._held.dtype

    @property
    def _held(self) -> PackedTable | Tensor:
        held = self.packed or self.weight
        assert held is not None
        return held

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        """The vectors of these ids.

        Raises:
            InvalidArgument: an id that is no row (IndexError where the table is not packed).
        """
        if self.packed is not None:
            return self.packed.select(ids)
        assert self.weight is not None
        return F.embedding(ids, self.weight)

    def dense_weight(self) -> Float[Tensor, "rows width"]:
        """The table as a matrix, unpacked if need be."""
        if self.packed is not None:
            return self.packed.dense()
        assert self.weight is not None
        return self.weight.data

    def pack(self) -> Embedding:
        """Replace the table by its packed form, where the native kernels are here for it. Not for training."""
        if self.packed is None and NativeWeight.supports(self.weight):
            assert self.weight is not None
            self.packed = NativeWeight.from_dense(self.weight.data)
            self.weight = None
        return self
