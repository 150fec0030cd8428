r"""Mamba-2: the recurrent layer of Mamba 2, Granite 4, Falcon-H1 and Nemotron-H.

A head's state is a matrix that forgets as a whole: $S_t = e^{A \Delta_t} S_{t-1} + \Delta_t x_t B_t^\top$,
$y_t = S_t C_t + D x_t$, where $B$, $C$ and the time step $\Delta$ depend on the input.

Notable here:
- within a chunk, outputs are attention with decays for scores ("state space duality"): a few matrix products; only the
  matrix between chunks is carried step by step
- decays are summed as logarithms and only differences of them are exponentiated, none of which is positive
- the recurrence is computed in float32 at least

Source: Dao and Gu 2024, arXiv:2405.21060, sections 6 and 7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.checks import NonNegativeFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices
from pippin.nn.recurrent.convolution import CausalConvolution
from pippin.nn.recurrent.gated_delta import initialize_decays
from pippin.nn.recurrent.gated_norm import Gate, GatedNorm
from pippin.nn.recurrent.states import StatefulLayer, States, join_state, split_state

CHUNK = 64
"""Tokens of a chunk."""


@checked
@dataclass(frozen=True)
class Mamba2Spec:
    """Configuration of a Mamba-2 layer.

    Args:
        heads: number of heads.
        head_dim: channels of a head.
        state: size of the vectors B and C.
        groups: number of different B and C; heads that share them follow each other. Divides ``heads``.
        conv: width of the convolution in tokens, the current one included.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections have biases.
        norm: the gate of the norm of outputs, which are normalized in groups; None for a gate without norm.
        min_step: shortest time step.
        max_step: longest time step; infinite for no bound.

    Raises:
        InvalidArgument: groups that do not divide the heads, or bounds of time steps that cross.
    """

    heads: PositiveInt
    head_dim: PositiveInt
    state: PositiveInt
    groups: PositiveInt = 1
    conv: PositiveInt = 4
    conv_bias: bool = True
    bias: bool = False
    norm: Gate | None = "silu before"
    min_step: NonNegativeFloat = 0.0
    max_step: float = math.inf

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise InvalidArgument(f"{self.groups} groups do not divide {self.heads} heads")
        if not self.min_step <= self.max_step:
            raise InvalidArgument(f"time steps of at least {self.min_step} cannot be at most {self.max_step}")

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def sizes(self) -> list[int]:
        """Channels of x, B and C."""
        return [self.inner, self.groups * self.state, self.groups * self.state]

    def state_size(self, width: int) -> int:
        """The last inputs of the convolution, and a matrix for each head."""
        return (self.conv - 1) * sum(self.sizes) + self.inner * self.state

    def work_size(self, width: int) -> int:
        """What enters the recurrence, what is convolved, and what leaves; see `StateSpec`."""
        return 2 * sum(self.sizes) + 2 * self.inner + self.heads

    def build(self, width: int, *, eps: float) -> Mamba2:
        """The layer; see `StateSpec`."""
        return Mamba2(self, width, eps=eps)


class Mamba2(StatefulLayer):
    """One Mamba-2 layer.

    Args:
        spec: configuration of the layer.
        width: model width.
        eps: epsilon of the norm.
    """

    def __init__(self, spec: Mamba2Spec, width: int, *, eps: float) -> None:
        super().__init__()
        self.spec, self.state_size = spec, spec.state_size(width)
        self.in_proj = Linear(width, spec.inner + sum(spec.sizes) + spec.heads, bias=spec.bias)
        self.conv = CausalConvolution(sum(spec.sizes), spec.conv, bias=spec.conv_bias)
        self.A_log = nn.Parameter(torch.empty(spec.heads))
        self.dt_bias = nn.Parameter(torch.empty(spec.heads))
        self.D = nn.Parameter(torch.empty(spec.heads))
        self.norm = None if spec.norm is None else GatedNorm(spec.inner, eps=eps, gate=spec.norm, groups=spec.groups)
        self.out_proj = Linear(spec.inner, width, bias=spec.bias)

    def initialize(self, generator: torch.Generator) -> None:
        """As the published implementation: rates of forgetting, time steps and taps that differ between channels."""
        self.conv.initialize(generator)
        initialize_decays(self.A_log, self.dt_bias, generator)

    def enter(self, x: Tensor, adapters: AdapterSlices | None) -> tuple[Tensor, Tensor]:
        """Inputs of the convolution and time steps; the gate."""
        gate, u = self.in_proj(x, adapters).split([self.spec.inner, sum(self.spec.sizes) + self.spec.heads], -1)
        return u, gate

    def whole(self, u: Tensor, before: States | None) -> tuple[Tensor, States]:
        """Convolution and recurrence over all new tokens."""
        x, b, c, step, tail, memory = self._inputs(u, before)
        y, memory = state_space(x, b, c, step, -self.A_log.to(x.dtype).exp(), memory)
        y = y + x * self.D.to(x.dtype)[:, None]
        return y.flatten(2), join_state(tail, memory)

    def step(self, u: Tensor, before: States | None) -> tuple[Tensor, States]:
        """Convolution and recurrence for one token of each sequence."""
        x, b, c, step, tail, memory = self._inputs(u, before)
        x, step, share = x[:, 0], step[:, 0, :, None, None], self.spec.heads // self.spec.groups
        b, c = (part[:, 0].repeat_interleave(share, 1) for part in (b, c))
        decay = (-self.A_log.to(x.dtype).exp()[:, None, None] * step).exp()
        memory = torch.addcmul(memory * decay, x[..., None] * step, b[:, :, None])
        y = (memory @ c[..., None])[..., 0] + x * self.D.to(x.dtype)[:, None]
        return y.flatten(1)[:, None], join_state(tail, memory)

    def leave(self, y: Tensor, gate: Tensor, adapters: AdapterSlices | None) -> Tensor:
        """Gate, norm and output projection."""
        gated = y * F.silu(gate.to(y.dtype)) if self.norm is None else self.norm(y, gate)
        out: Tensor = self.out_proj(gated.to(gate.dtype), adapters)
        return out

    def _inputs(self, u: Tensor, before: States | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x, B, C and time steps, (rows, new, heads or groups, ...); inputs of the convolution and memory."""
        spec = self.spec
        tail, memory = split_state(before, u, (spec.conv - 1, sum(spec.sizes)), (spec.heads, spec.head_dim, spec.state))
        mixed, step = u.split([sum(spec.sizes), spec.heads], -1)
        mixed, tail = self.conv(mixed, tail)
        x, b, c = F.silu(mixed).split(spec.sizes, -1)
        step = F.softplus(step.to(x.dtype) + self.dt_bias.to(x.dtype)).clamp(spec.min_step, spec.max_step)
        groups = (spec.groups, -1)
        return x.unflatten(-1, (spec.heads, -1)), b.unflatten(-1, groups), c.unflatten(-1, groups), step, tail, memory


def state_space(
    x: Float[Tensor, "rows new heads channels"],
    b: Float[Tensor, "rows new groups state"],
    c: Float[Tensor, "rows new groups state"],
    step: Float[Tensor, "rows new heads"],
    rate: Float[Tensor, " heads"],
    state: Float[Tensor, "rows heads channels state"],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "rows new heads channels"], Float[Tensor, "rows heads channels state"]]:
    r"""Outputs $S_t C_t$, and the state after all tokens.

    Args:
        x: inputs.
        b: where they are written.
        c: where they are read.
        step: time steps, positive.
        rate: the rate of each head, negative.
        state: before the first token.
        chunk: tokens of a chunk. It changes the rounding and the time, not the result.

    >>> one = torch.ones(1, 3, 1, 1)
    >>> rate = torch.tensor([0.5]).log()
    >>> state_space(one, one, one, torch.ones(1, 3, 1), rate, torch.zeros(1, 1, 1, 1))[0].flatten().tolist()
    [1.0, 1.5, 1.75]
    """
    share = x.shape[2] // b.shape[2]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    outputs = []
    for part, to, at, dt in zip(*(each.transpose(1, 2).split(chunk, 2) for each in (x, b, c, step)), strict=True):
        new = part.shape[2]
        total = (rate[:, None] * dt).cumsum(2)  # log of all that is forgotten since the beginning of the chunk
        between = (total[..., None] - total[:, :, None]).masked_fill(later[:new, :new], -torch.inf).exp()
        scores = (at @ to.transpose(2, 3)).repeat_interleave(share, 1) * between
        to, at = (each.repeat_interleave(share, 1) for each in (to, at))
        scaled = part * dt[..., None]
        outputs.append(scores @ scaled + (at * total.exp()[..., None]) @ state.transpose(2, 3))
        left = (total[:, :, -1:] - total).exp()[..., None]
        state = state * total[:, :, -1:, None].exp() + scaled.transpose(2, 3) @ (to * left)
    return torch.cat(outputs, 2).transpose(1, 2), state
