"""The norm of a recurrence's outputs, with a gate before or after it."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Gate = Literal["silu before", "silu after", "sigmoid after"]
"""The gate's nonlinearity, and whether outputs are multiplied by it before or after they are normalized."""


class GatedNorm(nn.Module):
    """An RMS norm of groups of channels, and a gate; computed in float32 at least.

    Args:
        width: number of channels.
        eps: epsilon of the norm.
        gate: see `Gate`.
        groups: number of groups of channels, each normalized by itself.

    Source: Mamba-2, Dao and Gu 2024, arXiv:2405.21060, section 7 (gate before); Gated DeltaNet, Yang et al. 2024,
    arXiv:2412.06464 (gate after).
    """

    def __init__(self, width: int, *, eps: float, gate: Gate, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.gate, self.groups = eps, gate, groups

    def forward(
        self, y: Float[Tensor, "*batch width"], gate: Float[Tensor, "*batch width"]
    ) -> Float[Tensor, "*batch width"]:
        """Normalize and gate."""
        gate = gate.to(y.dtype)
        opening = gate.sigmoid() if self.gate == "sigmoid after" else F.silu(gate)
        if self.gate == "silu before":
            y = y * opening
        grouped: Tensor = y.unflatten(-1, (self.groups, -1))
        normalized = F.rms_norm(grouped, grouped.shape[-1:], None, self.eps).flatten(-2) * self.weight
        return normalized if self.gate == "silu before" else normalized * opening
