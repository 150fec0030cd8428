r"""Embeddings of the time of a diffusion or flow, and an output layer that is conditioned on it.

Notable here:
- sinusoids with geometrically spaced frequencies, followed by a small MLP
- times between 0 and 1 are multiplied by 1000 first, the number of steps that the frequencies were designed for
- the output layer is initialized to zero
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.checks import PositiveFloat, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.linear import Linear


@checked
def sinusoidal(
    t: Float[Tensor, "*batch"],
    width: Annotated[int, Ge(2)],
    *,
    period: PositiveFloat = 10_000.0,
    scale: PositiveFloat = 1000.0,
) -> Float[Tensor, "*batch {width}"]:
    r"""The sinusoidal embedding: cosines, then sines, of $s\,t\,P^{-2i/w}$ for $i < w/2$; float32.

    Args:
        t: times, usually from 0 to 1.
        width: size w of each vector, even.
        period: P, which sets the lowest frequency.
        scale: factor s of the times.

    Raises:
        InvalidArgument: an odd width.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5; for times, Ho et al. 2020, arXiv:2006.11239.

    >>> sinusoidal(torch.zeros(2), 4).tolist()
    [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]
    """
    if width % 2:
        raise InvalidArgument(f"width must be even, got {width}")
    half = width // 2
    rates = scale * torch.exp(-math.log(period) / half * torch.arange(half, device=t.device, dtype=torch.float32))
    angles = t.float()[..., None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


class TimeEmbedding(nn.Module):
    """A sinusoidal embedding followed by an MLP of two layers.

    Args:
        width: size of the result.
        frequencies: size of the sinusoidal embedding, half of it cosines.
    """

    def __init__(self, width: int, *, frequencies: int = 256) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.up = Linear(frequencies, width, bias=True)
        self.down = Linear(width, width, bias=True)

    def forward(self, t: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        """The embedding vector of each time."""
        waves = sinusoidal(t, self.frequencies).to(self.up.dense_weight().dtype)
        vector: Tensor = self.down(F.silu(self.up(waves)))
        return vector

    @torch.no_grad()
    def initialize(self, generator: torch.Generator, *, size: float = 1.0) -> TimeEmbedding:
        """Initialize weights so that results have a root mean square of about ``size``."""
        for layer, gain in ((self.up, 2.0), (self.down, 2.0 * size)):
            assert layer.bias is not None
            layer.weight.normal_(0.0, gain / math.sqrt(layer.inputs), generator=generator)
            layer.bias.zero_()
        return self


class TimedHead(nn.Module):
    """The output layer of a time-conditioned network: an adaptive layer norm and a linear layer.

    Args:
        inner: size of the hidden states and of the time embedding.
        width: size of the result.

    Source: Peebles and Xie 2023, arXiv:2212.09748, section 3.2 (adaLN-Zero).
    """

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.adapt = Linear(inner, 2 * inner, bias=True)
        self.out = Linear(inner, width, bias=True)

    def forward(
        self, hidden: Float[Tensor, "*batch tokens inner"], time: Float[Tensor, "*batch inner"]
    ) -> Float[Tensor, "*batch tokens width"]:
        """The output for each token, float32."""
        shift, scale = self.adapt(F.silu(time))[..., None, :].chunk(2, -1)
        y: Tensor = self.out(F.layer_norm(hidden, hidden.shape[-1:]) * (1 + scale) + shift)
        return y.float()

    @torch.no_grad()
    def initialize(self) -> TimedHead:
        """Set all parameters to zero, so that initial outputs are 0."""
        for parameter in self.parameters():
            parameter.zero_()
        return self
