r"""The time of a diffusion or a flow as a vector that a network can read.

Notable here:
- sinusoids of geometrically spaced rates, then a small perceptron: near times have near vectors, whatever the scale
- times are between 0 and 1 and are stretched by 1000 first, the number of steps that the rates were made for
- the head begins at zero, so what is trained from it begins from the mean of its targets
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.nn.linear import Linear


def sinusoidal(
    t: Float[Tensor, "*batch"], width: int, *, period: float = 10_000.0, scale: float = 1000.0
) -> Float[Tensor, "*batch {width}"]:
    r"""Cosines, then sines, of $s\,t\,P^{-2i/w}$ for $i < w/2$; float32.

    Args:
        t: times, usually from 0 to 1.
        width: numbers of each vector, even.
        period: P, of the slowest rate, in stretched time over $2\pi$.
        scale: s, by which times are stretched.

    Raises:
        InvalidArgument: a width that is odd or below 2, or a period or scale that is not positive.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5; for times, Ho et al. 2020, arXiv:2006.11239.

    >>> sinusoidal(torch.zeros(2), 4).tolist()
    [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]
    """
    if width < 2 or width % 2:
        raise InvalidArgument(f"the width of a time embedding must be even and at least 2, got {width}")
    if not (0 < period < math.inf and 0 < scale < math.inf):
        raise InvalidArgument(f"period ({period}) and scale ({scale}) must be positive and finite")
    half = width // 2
    rates = scale * torch.exp(-math.log(period) / half * torch.arange(half, device=t.device, dtype=torch.float32))
    angles = t.float()[..., None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


class TimeEmbedding(nn.Module):
    """Sinusoids through a perceptron of two layers.

    Args:
        width: of the result.
        frequencies: numbers that are read, half of them cosines.
    """

    def __init__(self, width: int, *, frequencies: int = 256) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.up = Linear(frequencies, width, bias=True)
        self.down = Linear(width, width, bias=True)

    def forward(self, t: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        """The vector of each time."""
        waves = sinusoidal(t, self.frequencies).to(self.up.dense_weight().dtype)
        vector: Tensor = self.down(F.silu(self.up(waves)))
        return vector

    @torch.no_grad()
    def initialise(self, generator: torch.Generator, *, size: float = 1.0) -> TimeEmbedding:
        """Random weights that keep the size of what passes; results have a root mean square of about ``size``."""
        for layer, gain in ((self.up, 2.0), (self.down, 2.0 * size)):
            assert layer.weight is not None
            assert layer.bias is not None
            layer.weight.normal_(0.0, gain / math.sqrt(layer.inputs), generator=generator)
            layer.bias.zero_()
        return self


class TimedHead(nn.Module):
    """What ends a network that reads the time: a layer norm that the time shifts and scales, and a matrix.

    Args:
        inner: width of the hidden states and of the time's vector.
        width: of the result.

    Source: Peebles and Xie 2023, arXiv:2212.09748, section 3.2 (adaLN-Zero).
    """

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.adapt = Linear(inner, 2 * inner, bias=True)
        self.out = Linear(inner, width, bias=True)

    def forward(
        self, hidden: Float[Tensor, "*batch tokens inner"], time: Float[Tensor, "*batch inner"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """The result for each token, float32."""
        shift, scale = self.adapt(F.silu(time))[..., None, :].chunk(2, -1)
        y: Tensor = self.out(F.layer_norm(hidden, hidden.shape[-1:]) * (1 + scale) + shift)
        return y.float()

    @torch.no_grad()
    def initialise(self) -> TimedHead:
        """All zero: results are 0 at first, at every time."""
        for parameter in self.parameters():
            parameter.zero_()
        return self
