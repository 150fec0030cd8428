"""Gated DeltaNet, the recurrent layer of Qwen3-Next, Qwen 3.5 and OLMo hybrid, and Kimi delta attention.

Notable here:
- queries, keys and values pass a short convolution; queries and keys have length 1
- several heads of values may share the queries and keys of one head
- in Kimi delta attention each channel of a key forgets by itself; the gates have a low rank
- projections are separate, as in OLMo's files; Qwen's, which join some of them, are split when they are read
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices
from pippin.nn.recurrent.convolution import CausalConvolution, convolve
from pippin.nn.recurrent.delta import delta_rule, delta_step, normalized
from pippin.nn.recurrent.gated_norm import Gate, GatedNorm
from pippin.nn.recurrent.states import StatefulLayer, States, join_state, split_state


@checked
@dataclass(frozen=True)
class GatedDeltaSpec:
    """Configuration of a Gated DeltaNet layer.

    Args:
        key_heads: heads of queries and keys.
        value_heads: heads of values, a multiple of ``key_heads``.
        key_dim: size of a head of queries or keys.
        value_dim: size of a head of values.
        conv: width of the convolution in tokens, the current one included.
        beta: how much of a new value is written at most. Above 1, the memory's eigenvalues may be negative.
        norm_eps: epsilon of the norm of outputs; None for that of the model's norms.
        tiled: heads of values that share a head of keys do not follow each other: all first ones come before all
            second ones.
        channel_rank: each channel of a key forgets by itself, and outputs are gated by a sigmoid, both through matrices
            of this rank (Kimi delta attention); None for heads that forget as a whole, and gates of full rank.

    Raises:
        InvalidArgument: heads of values that are no multiple of those of keys.
    """

    key_heads: PositiveInt
    value_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    conv: PositiveInt = 4
    beta: PositiveFloat = 1.0
    norm_eps: PositiveFloat | None = None
    tiled: bool = False
    channel_rank: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise InvalidArgument(f"{self.value_heads} heads of values are no multiple of {self.key_heads} of keys")

    @property
    def sizes(self) -> list[int]:
        """Channels of all queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return [keys, keys, self.value_heads * self.value_dim]

    @property
    def decays(self) -> int:
        """Numbers of a token that say how much is forgotten."""
        return self.value_heads * (1 if self.channel_rank is None else self.key_dim)

    def state_size(self, width: int) -> int:
        """The last inputs of the convolution, and a matrix for each head of values."""
        return (self.conv - 1) * sum(self.sizes) + self.value_heads * self.key_dim * self.value_dim

    def work_size(self, width: int) -> int:
        """What enters the recurrence, what is convolved, and what leaves; see `StateSpec`."""
        return 2 * sum(self.sizes) + 2 * self.sizes[-1] + 2 * self.value_heads + 2 * self.decays

    def build(self, width: int, *, eps: float) -> GatedDeltaNet:
        """The layer; see `StateSpec`."""
        return GatedDeltaNet(self, width, eps=eps)


class GatedDeltaNet(StatefulLayer):
    """One Gated DeltaNet layer.

    Args:
        spec: configuration of the layer.
        width: model width.
        eps: epsilon of the norm, unless the spec has its own.

    Source: Yang et al. 2024, arXiv:2412.06464; negative eigenvalues: Grazzi et al. 2024, arXiv:2411.12537; channels
    that forget by themselves: Kimi Team 2025, arXiv:2510.26692, section 3.
    """

    def __init__(self, spec: GatedDeltaSpec, width: int, *, eps: float) -> None:
        super().__init__()
        self.spec, self.state_size = spec, spec.state_size(width)
        values = spec.sizes[-1]
        self.q_proj, self.k_proj, self.v_proj = (Linear(width, size) for size in spec.sizes)
        self.gate_proj, self.a_proj = (_projection(width, size, spec.channel_rank) for size in (values, spec.decays))
        self.b_proj = Linear(width, spec.value_heads)
        self.q_conv, self.k_conv, self.v_conv = (CausalConvolution(size, spec.conv) for size in spec.sizes)
        self.A_log = nn.Parameter(torch.empty(spec.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(spec.decays))
        gate: Gate = "silu after" if spec.channel_rank is None else "sigmoid after"
        self.norm = GatedNorm(spec.value_dim, eps=eps if spec.norm_eps is None else spec.norm_eps, gate=gate)
        self.out_proj = Linear(values, width)

    def initialize(self, generator: torch.Generator) -> None:
        """Taps as torch's own convolutions have them; decays as `initialize_decays` has them."""
        for conv in (self.q_conv, self.k_conv, self.v_conv):
            conv.initialize(generator)
        initialize_decays(self.A_log, self.dt_bias, generator)

    def enter(self, x: Tensor, adapters: AdapterSlices | None) -> tuple[Tensor, Tensor]:
        """Queries, keys, values and both gates of the memory; the gate of the outputs."""
        parts = (self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj)
        return torch.cat([part(x, adapters) for part in parts], -1), self.gate_proj(x, adapters)

    def whole(self, u: Tensor, before: States | None) -> tuple[Tensor, States]:
        """Convolution and delta rule over all new tokens."""
        parts, tail, memory = self._inputs(u, before)
        q, k, v, decay, beta = (part.transpose(1, 2) for part in parts)
        y, memory = delta_rule(q, k, v, decay, beta, memory)
        return y.transpose(1, 2).flatten(2), join_state(tail, memory)

    def step(self, u: Tensor, before: States | None) -> tuple[Tensor, States]:
        """Convolution and delta rule for one token of each sequence."""
        parts, tail, memory = self._inputs(u, before)
        q, k, v, decay, beta = (part[:, 0] for part in parts)
        y, memory = delta_step(q, k, v, decay, beta, memory)
        return y.flatten(1)[:, None], join_state(tail, memory)

    def leave(self, y: Tensor, gate: Tensor, adapters: AdapterSlices | None) -> Tensor:
        """Norm of each head, gate and output projection."""
        heads = (self.spec.value_heads, -1)
        normed = self.norm(y.unflatten(-1, heads), gate.unflatten(-1, heads)).flatten(-2)
        out: Tensor = self.out_proj(normed.to(gate.dtype), adapters)
        return out

    def _inputs(self, u: Tensor, before: States | None) -> tuple[list[Tensor], Tensor, Tensor]:
        """Queries, keys, values, decays and betas, (rows, new, heads, ...); inputs of the convolution and memory."""
        spec = self.spec
        shapes = (spec.conv - 1, sum(spec.sizes)), (spec.value_heads, spec.key_dim, spec.value_dim)
        tail, memory = split_state(before, u, *shapes)
        mixed, a, b = u.split([sum(spec.sizes), spec.decays, spec.value_heads], -1)
        taps = torch.cat([self.q_conv.weight, self.k_conv.weight, self.v_conv.weight])
        mixed, tail = convolve(mixed, tail, taps, None)
        q, k, v = F.silu(mixed).split(spec.sizes, -1)
        share = spec.value_heads // spec.key_heads
        q, k = (normalized(part.unflatten(-1, (spec.key_heads, -1))) for part in (q, k))
        if spec.tiled:
            q, k = q.repeat(1, 1, share, 1), k.repeat(1, 1, share, 1)
        else:
            q, k = q.repeat_interleave(share, 2), k.repeat_interleave(share, 2)
        heads = (spec.value_heads, -1)
        speed = F.softplus(a.to(v.dtype) + self.dt_bias.to(v.dtype)).unflatten(-1, heads)
        decay = -self.A_log.to(v.dtype).exp()[:, None] * speed
        beta = spec.beta * b.to(v.dtype).sigmoid()
        return [q * spec.key_dim**-0.5, k, v.unflatten(-1, heads), decay, beta], tail, memory


class LowRankLinear(nn.Module):
    """A linear layer through a narrower one."""

    def __init__(self, inputs: int, rank: int, outputs: int) -> None:
        super().__init__()
        self.down, self.up = Linear(inputs, rank), Linear(rank, outputs)

    def forward(self, x: Tensor, adapters: AdapterSlices | None = None) -> Tensor:
        """Apply both layers."""
        y: Tensor = self.up(self.down(x, adapters), adapters)
        return y


def _projection(inputs: int, outputs: int, rank: int | None) -> Linear | LowRankLinear:
    return Linear(inputs, outputs) if rank is None else LowRankLinear(inputs, rank, outputs)


def initialize_decays(a_log: Tensor, dt_bias: Tensor, generator: torch.Generator) -> None:
    """Rates of forgetting from 1 to 16, and time steps from 0.001 to 0.1 of which the logarithms are uniform.

    Source: the published implementation of Mamba-2.
    """
    with torch.no_grad():
        a_log.copy_(torch.empty(a_log.shape).uniform_(1.0, 16.0, generator=generator).log())
        log_step = torch.empty(dt_bias.shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator)
        step = log_step.exp()
        dt_bias.copy_(step + (-torch.expm1(-step)).log())  # softplus of it is the step
