"""Root-mean-square layer normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    r"""Scale the last dimension to unit root mean square: $y = w \odot x / \sqrt{\mathrm{mean}(x^2) + \epsilon}$.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Normalise the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
