"""Causal convolutions over a few tokens: a part of most recurrent layers, and the whole of LFM2's.

Notable here:
- each channel is convolved by itself, so that the state is the last inputs of each channel
- taps are added one by one: a token's output is bit-identical, alone or in a prompt
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, checked
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices
from pippin.nn.recurrent.states import StatefulLayer, States, join_state, split_state


class CausalConvolution(nn.Module):
    """A convolution of each channel with its last inputs.

    Args:
        channels: number of channels.
        width: number of taps, the current input included.
        bias: whether there is a bias.
    """

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.weight.no_decay = True  # type: ignore[attr-defined]  # read by `pippin.train`

    def initialize(self, generator: torch.Generator) -> None:
        """Uniform taps, as torch's own convolutions have."""
        bound = self.weight.shape[-1] ** -0.5
        with torch.no_grad():
            self.weight.copy_(torch.empty(self.weight.shape).uniform_(-bound, bound, generator=generator))

    def forward(
        self, u: Float[Tensor, "rows new channels"], tail: Float[Tensor, "rows past channels"]
    ) -> tuple[Float[Tensor, "rows new channels"], Float[Tensor, "rows past channels"]]:
        """Outputs in float32 at least, and the last inputs.

        Args:
            u: new inputs.
            tail: the ``width - 1`` inputs before them; zeros at the beginning of a sequence.
        """
        return convolve(u, tail, self.weight, self.bias)


def convolve(u: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`CausalConvolution` with given taps (channels, 1, width) and bias (channels)."""
    new, taps = u.shape[1], weight[:, 0].to(tail.dtype).unbind(-1)
    seen = torch.cat([tail, u.to(tail.dtype)], 1)
    y = seen[:, :new] * taps[0]
    for index, tap in enumerate(taps[1:], 1):
        y = torch.addcmul(y, seen[:, index : index + new], tap)
    return y if bias is None else y + bias, seen[:, new:]


@checked
@dataclass(frozen=True)
class ShortConvolutionSpec:
    """A layer that is a gated convolution; see `ShortConvolution`.

    Args:
        conv: width of the convolution in tokens, the current one included.
        bias: whether convolution and projections have biases.
    """

    conv: PositiveInt = 3
    bias: bool = False

    def state_size(self, width: int) -> int:
        """The last inputs of each channel."""
        return (self.conv - 1) * width

    def work_size(self, width: int) -> int:
        """What enters the recurrence, what is convolved, and what leaves; see `StateSpec`."""
        return 5 * width

    def build(self, width: int, *, eps: float) -> ShortConvolution:
        """The layer; see `StateSpec`."""
        return ShortConvolution(self, width)


class ShortConvolution(StatefulLayer):
    r"""A gated short convolution: $y = W_o (C \odot \mathrm{conv}(B \odot x))$; the input makes $B$, $C$ and $x$.

    Args:
        spec: configuration of the layer.
        width: model width.

    Source: LFM2 technical report, Liquid AI 2025, arXiv:2511.23404, section 2.
    """

    def __init__(self, spec: ShortConvolutionSpec, width: int) -> None:
        super().__init__()
        self.spec, self.width, self.state_size = spec, width, spec.state_size(width)
        self.in_proj = Linear(width, 3 * width, bias=spec.bias)
        self.conv = CausalConvolution(width, spec.conv, bias=spec.bias)
        self.out_proj = Linear(width, width, bias=spec.bias)

    def initialize(self, generator: torch.Generator) -> None:
        """Taps as torch's own convolutions have them."""
        self.conv.initialize(generator)

    def enter(self, x: Tensor, adapters: AdapterSlices | None) -> tuple[Tensor, Tensor]:
        """The gated inputs of the convolution, and the gate of its outputs."""
        before, gate, u = self.in_proj(x, adapters).chunk(3, -1)
        return before * u, gate

    def whole(self, u: Tensor, before: States | None) -> tuple[Tensor, States]:
        """The convolution."""
        (tail,) = split_state(before, u, (self.spec.conv - 1, self.width))
        y, tail = self.conv(u, tail)
        return y, join_state(tail)

    def leave(self, y: Tensor, gate: Tensor, adapters: AdapterSlices | None) -> Tensor:
        """Gate and output projection."""
        out: Tensor = self.out_proj((gate * y).to(gate.dtype), adapters)
        return out
