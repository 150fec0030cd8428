"""Token embeddings.

`pippin.nn.packed_layers.PackedTokenEmbedding` replaces them for inference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


class TokenEmbedding(nn.Module):
    """One vector for each id.

    Args:
        rows: number of ids.
        width: size of each vector.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.rows = rows
        self.width = width
        self.weight = nn.Parameter(torch.empty(rows, width))

    @property
    def device(self) -> torch.device:
        """Device of the table."""
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the table."""
        return self.weight.dtype

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        """The vectors of these ids.

        Raises:
            IndexError: an id out of range.
        """
        return F.embedding(ids, self.weight)

    def dense_weight(self) -> Float[Tensor, "rows width"]:
        """The table as a matrix; a packed table is unpacked."""
        return self.weight.data
