"""Rotary position embeddings (RoPE) and methods to extend them beyond the trained context length.

Notable here:
- tables of cosine and sine are computed once, in float32, and indexed by position
- the sine table includes the sign of each half, so that a rotation is a product, a roll and a fused multiply-add
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """The angles of a rotary position embedding.

    Args:
        theta: base of the geometric progression of wavelengths.
        scaling: "none"; "linear" divides positions by ``factor``; "llama3" scales long wavelengths only; "yarn"
            interpolates between both by wavelength and scales the attention logits.
        factor: factor by which the context is extended.
        original_max_position_embeddings: trained context length, used by "llama3" and "yarn".
        low: "llama3": low frequency factor; "yarn": beta_slow.
        high: "llama3": high frequency factor; "yarn": beta_fast.
        attention_factor: multiplier on cosine and sine; None means ``0.1 ln(factor) + 1`` for "yarn" and 1 otherwise.
        divisors: one divisor for each frequency, for checkpoints that store the scaling as a table.
        dims: number of dimensions that are rotated, even; the others have frequency 0. None for all. The rotated pairs
            are (i, i + head_dim / 2) for i < dims / 2.

    Source: Su et al. 2021, arXiv:2104.09864; YaRN arXiv:2309.00071; Llama 3 arXiv:2407.21783.
    """

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low: float = 1.0
    high: float = 4.0
    attention_factor: float | None = None
    divisors: tuple[float, ...] | None = None
    dims: int | None = None

    def frequencies(self, head_dim: int) -> Float[Tensor, half]:
        """Angle per position of each pair of dimensions, in radians."""
        if self.dims is not None and self.dims < head_dim:
            return F.pad(self._frequencies(self.dims), (0, (head_dim - self.dims) // 2))
        return self._frequencies(head_dim)

    def _frequencies(self, head_dim: int) -> Float[Tensor, half]:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequency = 1.0 / self.theta**exponent
        if self.divisors is not None:
            return frequency / torch.tensor(self.divisors)
        if self.scaling == "linear":
            return frequency / self.factor
        if self.scaling == "llama3":
            # 0 for wavelengths that fit `high` times into the trained context, 1 for those that fit at most `low` times
            turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
            stretched = ((self.high - turns) / (self.high - self.low)).clamp(0, 1)
            return frequency * (1 - stretched) + frequency / self.factor * stretched
        if self.scaling == "yarn":
            first, last = (self._dimension_with(turns, head_dim) for turns in (self.high, self.low))
            first, last = max(math.floor(first), 0), min(math.ceil(last), head_dim - 1)
            ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
            stretched = ramp.clamp(0, 1)
            return frequency * (1 - stretched) + frequency / self.factor * stretched
        return frequency

    def _dimension_with(self, turns: float, head_dim: int) -> float:
        """The (fractional) pair of dimensions that makes ``turns`` rotations over the trained context."""
        return (
            head_dim
            * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(self.theta))
        )

    @property
    def magnitude(self) -> float:
        """Factor of cosine and sine; other than 1 for YaRN, or where `attention_factor` says so."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.scaling != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def tables(
        self, positions: Int[Tensor, "*batch seq"], head_dim: int
    ) -> tuple[Float[Tensor, "*batch seq dim"], Float[Tensor, "*batch seq dim"]]:
        """Cosine and signed sine of every position, float32."""
        angles = positions[..., None].float() * self.frequencies(head_dim).to(positions.device)
        cos, sin = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        if self.dims is not None:
            cos[..., self.dims // 2 :] = 1.0  # the magnitude is that of rotated dimensions
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def apply_rotary(
    x: Float[Tensor, "*batch seq dim"], cos: Float[Tensor, "*#batch seq dim"], sin: Float[Tensor, "*#batch seq dim"]
) -> Float[Tensor, "*batch seq dim"]:
    """Rotate each pair (i, i + dim/2) by its angle; ``cos`` and ``sin`` come from `Rotary.tables`.

    >>> cos, sin = Rotary().tables(torch.tensor([0, 3]), 2)
    >>> apply_rotary(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), cos, sin)
    tensor([[ 1.0000,  0.0000],
            [-0.9900,  0.1411]])
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
