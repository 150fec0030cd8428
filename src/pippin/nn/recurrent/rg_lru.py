r"""The real-gated linear recurrent unit: the recurrent layer of Griffin and RecurrentGemma.

$h_t = a_t \odot h_{t-1} + \sqrt{1 - a_t^2} \odot (i_t \odot x_t)$ with
$\log a_t = -8\,\mathrm{softplus}(\Lambda) \odot r_t$ and gates $i_t$, $r_t$ that are sigmoids of blocks of the input.

Notable here:
- each channel is a linear recurrence of its own, which `linear_scan` computes in parallel
- the first token of a sequence enters unscaled, so the state has one more element: whether a token came before
- the recurrence is computed in float32 at least

Source: De et al. 2024, Griffin, arXiv:2402.19427, section 2.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.feedforward.feedforward import Activation, activate
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices
from pippin.nn.recurrent.convolution import CausalConvolution
from pippin.nn.recurrent.scan import linear_scan
from pippin.nn.recurrent.states import StatefulLayer, States, join_state, split_state

SHARPNESS = 8.0
"""c in the paper, eq. 6."""


@checked
@dataclass(frozen=True)
class RGLRUSpec:
    """Configuration of a real-gated linear recurrent unit.

    Args:
        size: channels of the recurrence.
        heads: blocks of the gates' matrices; divides ``size``.
        conv: width of the convolution in tokens, the current one included.
        activation: nonlinearity of the branch that multiplies the outputs.

    Raises:
        InvalidArgument: heads that do not divide the channels.
    """

    size: PositiveInt
    heads: PositiveInt
    conv: PositiveInt = 4
    activation: Activation = "gelu_tanh"

    def __post_init__(self) -> None:
        if self.size % self.heads:
            raise InvalidArgument(f"{self.heads} heads do not divide {self.size} channels")

    def state_size(self, width: int) -> int:
        """The last inputs of the convolution, a number for each channel, and whether a token came before."""
        return self.conv * self.size + 1

    def work_size(self, width: int) -> int:
        """What enters the recurrence, what is convolved, and what leaves; see `StateSpec`."""
        return 4 * self.size

    def build(self, width: int, *, eps: float) -> RGLRU:
        """The layer; see `StateSpec`."""
        return RGLRU(self, width)


class RGLRU(StatefulLayer):
    """One recurrent block of Griffin.

    Args:
        spec: configuration of the layer.
        width: model width.
    """

    def __init__(self, spec: RGLRUSpec, width: int) -> None:
        super().__init__()
        self.spec, self.state_size = spec, spec.state_size(width)
        self.x_proj, self.gate_proj = (Linear(width, spec.size, bias=True) for _ in range(2))
        self.conv = CausalConvolution(spec.size, spec.conv, bias=True)
        block = spec.size // spec.heads
        self.input_gate_weight, self.recurrent_gate_weight = (
            nn.Parameter(torch.empty(spec.heads, block, block)) for _ in range(2)
        )
        self.input_gate_bias, self.recurrent_gate_bias = (
            nn.Parameter(torch.empty(spec.heads, block)) for _ in range(2)
        )
        self.recurrent_param = nn.Parameter(torch.empty(spec.size))
        self.out_proj = Linear(spec.size, width, bias=True)

    def initialize(self, generator: torch.Generator) -> None:
        """Decays of open gates from 0.9 to 0.999, and gates that are half open.

        Source: Griffin, section 2.4.
        """
        self.conv.initialize(generator)
        with torch.no_grad():
            for bias in (self.input_gate_bias, self.recurrent_gate_bias):
                bias.zero_()
            square = torch.empty(self.spec.size).uniform_(0.9**2, 0.999**2, generator=generator)
            self.recurrent_param.copy_((square.log() * -0.5 / SHARPNESS).expm1().log())  # softplus of it, times -8

    def enter(self, x: Tensor, adapters: AdapterSlices | None) -> tuple[Tensor, Tensor]:
        """The inputs of the convolution, and the other branch."""
        return self.x_proj(x, adapters), activate(self.gate_proj(x, adapters), self.spec.activation)

    def whole(self, u: Tensor, before: States | None) -> tuple[Tensor, States]:
        """Convolution and recurrence over all new tokens."""
        size = self.spec.size
        tail, state, begun = split_state(before, u, (self.spec.conv - 1, size), (size,), (1,))
        x, tail = self.conv(u, tail)
        opened, forget = (self._gate(x, name) for name in ("input", "recurrent"))
        log_a = -SHARPNESS * forget * F.softplus(self.recurrent_param.to(x.dtype))
        scale = (-torch.expm1(2 * log_a)).clamp(min=1e-12).sqrt()  # the bound keeps gradients finite
        first = torch.where(begun > 0, scale[:, 0], 1.0)[:, None]
        h = linear_scan(log_a.exp(), x * opened * torch.cat([first, scale[:, 1:]], 1), initial=state)
        return h, join_state(tail, h[:, -1], torch.ones_like(begun))

    def leave(self, y: Tensor, gate: Tensor, adapters: AdapterSlices | None) -> Tensor:
        """Product of the branches, and output projection."""
        out: Tensor = self.out_proj((y * gate).to(gate.dtype), adapters)
        return out

    def _gate(self, x: Tensor, name: str) -> Tensor:
        """A gate: the sigmoid of a product with a matrix in blocks."""
        weight, bias = (getattr(self, f"{name}_gate_{part}").to(x.dtype) for part in ("weight", "bias"))
        blocks = torch.einsum("rthi,hij->rthj", x.unflatten(-1, (self.spec.heads, -1)), weight) + bias
        gate: Tensor = blocks.flatten(2).sigmoid()
        return gate
