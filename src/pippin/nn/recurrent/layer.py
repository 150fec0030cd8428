"""The recurrent layer of ParaRNN: nonlinear cells that are solved in parallel over the sequence.

Notable here:
- the state of a layer for a sequence is the last inputs of its convolution and the state of its cell
- whole sequences are solved in parallel by the cell; single tokens of many sequences take one step together
- packed documents never affect each other: neither the convolution nor the cell reaches past the start of a document
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices
from pippin.nn.norm import RMSNorm
from pippin.nn.recurrent.states import StatefulLayer, States, join_state, split_state

CellName = Literal["gru", "lstm"]


@checked
@dataclass(frozen=True)
class RecurrentSpec:
    """Configuration of one recurrent layer.

    Args:
        cell: "gru" or "lstm", with diagonal state matrices (`ParaGRU`, `ParaLSTM`).
        heads: blocks of the cell's input matrices; divides the inner width.
        conv: width of the causal convolution before the cell, in tokens including the current one.
        expand: inner width as a multiple of the model's.
    """

    cell: CellName = "gru"
    heads: PositiveInt = 2
    conv: PositiveInt = 4
    expand: PositiveInt = 1

    def state_size(self, width: int) -> int:
        """Elements of the state of a layer for a sequence, in a model of this width.

        >>> RecurrentSpec().state_size(64), RecurrentSpec("lstm", conv=1).state_size(64)
        (256, 128)
        """
        return (self.conv - 1 + {"gru": 1, "lstm": 2}[self.cell]) * self.expand * width

    def work_size(self, width: int) -> int:
        """What enters the recurrence, what is convolved, and what leaves; see `StateSpec`."""
        return ({"gru": 3, "lstm": 4}[self.cell] + 2) * self.expand * width

    def build(self, width: int, *, eps: float) -> Recurrent:
        """The layer; see `StateSpec`."""
        return Recurrent(self, width, eps=eps)


class Recurrent(StatefulLayer):
    r"""One recurrent layer: $y = W_o\,\mathrm{norm}(c \odot \mathrm{silu}(g))$, with a cell's outputs $c$.

    The cell reads $\mathrm{silu}(\mathrm{conv}(u))$; $u$ and the gate $g$ are halves of one projection of the input.

    Args:
        spec: configuration of the layer.
        width: model width.
        eps: epsilon of the norm.

    Raises:
        InvalidArgument: heads that do not divide the inner width.

    Source: the cells and their parallel solution: Danieli et al. 2025, arXiv:2510.21450; the block around them (a short
    convolution, a norm behind a gate) is that of Mamba-2, Dao and Gu 2024, arXiv:2405.21060, section 7.
    """

    autocasts = True  # the cells choose what is computed in float32

    def __init__(self, spec: RecurrentSpec, width: int, *, eps: float) -> None:
        super().__init__()
        from pippin.nn.recurrent.cells import ParaGRU, ParaLSTM  # decoders without recurrence need not load it

        inner = spec.expand * width
        if inner % spec.heads:
            raise InvalidArgument(f"{spec.heads} heads of a recurrent layer do not divide its inner width, {inner}")
        self.spec, self.inner, self.state_size = spec, inner, spec.state_size(width)
        self.in_proj = Linear(width, 2 * inner)
        self.conv_weight = nn.Parameter(torch.empty(inner, 1, spec.conv))
        self.conv_bias = nn.Parameter(torch.zeros(inner))
        self.cell = (ParaGRU if spec.cell == "gru" else ParaLSTM)(inner, inner, heads=spec.heads)
        self.norm = RMSNorm(inner, eps=eps)
        self.out_proj = Linear(inner, width)
        self.conv_weight.no_decay = True  # type: ignore[attr-defined]  # read by `pippin.train`

    def initialize(self, generator: torch.Generator) -> None:
        """Initialize all but the output projection, which the decoder initializes.

        The usual scale of 0.02 would leave the gates of a narrow layer constant, so the projections to them use more.
        """
        bound = self.spec.conv**-0.5
        with torch.no_grad():
            shape = self.in_proj.outputs, self.in_proj.inputs
            drawn = torch.empty(shape).normal_(0.0, self.in_proj.inputs**-0.5, generator=generator)
            self.in_proj.weight.copy_(drawn)
            drawn = torch.empty(self.conv_weight.shape).uniform_(-bound, bound, generator=generator)
            self.conv_weight.copy_(drawn)
            self.conv_bias.zero_()
        self.cell.initialize(generator)

    def enter(self, x: Tensor, adapters: AdapterSlices | None) -> tuple[Tensor, Tensor]:
        """The inputs of the convolution, and the gate of the outputs."""
        u, gate = self.in_proj(x, adapters).chunk(2, -1)
        return u, gate

    def leave(self, y: Tensor, gate: Tensor, adapters: AdapterSlices | None) -> Tensor:
        """Gate, norm and output projection."""
        out: Tensor = self.out_proj(self.norm((y * F.silu(gate)).to(gate.dtype)), adapters)
        return out

    def whole(self, u: Tensor, before: States | None) -> tuple[Tensor, States]:
        """All new tokens of sequences with one length."""
        return self._whole(u, before)

    def restarted(self, u: Tensor, starts: Bool[Tensor, "#rows new"]) -> Tensor:
        """All documents of all rows in one solution."""
        return self._whole(u, None, starts)[0]

    def _whole(
        self,
        u: Float[Tensor, "rows new inner"],
        before: States | None,
        starts: Bool[Tensor, "#rows new"] | None = None,
    ) -> tuple[Float[Tensor, "rows new inner"], States]:
        """All new tokens of sequences with one length; ``starts`` is true for the first tokens of documents."""
        lags, new = self.spec.conv - 1, u.shape[1]
        tail, state = self._parts(before, u)
        seen = torch.cat([tail, u.to(tail.dtype)], 1)
        v = seen[:, lags:] * self.conv_weight[:, 0, lags] + self.conv_bias
        beyond = starts
        for lag in range(1, lags + 1):
            part = seen[:, lags - lag : lags - lag + new]
            if starts is not None and beyond is not None:
                part = part.masked_fill(beyond[..., None], 0.0)
                beyond = beyond | F.pad(starts, (lag, 0))[:, :new]
            v = v + part * self.conv_weight[:, 0, lags - lag]
        y, state = self.cell(F.silu(v), state, starts=starts)
        return y, join_state(seen[:, new:], state)

    def step(
        self, u: Float[Tensor, "rows 1 inner"], before: States | None
    ) -> tuple[Float[Tensor, "rows 1 inner"], States]:
        """One new token of each sequence."""
        tail, state = self._parts(before, u)
        seen = torch.cat([tail, u.to(tail.dtype)], 1)
        v = (seen * self.conv_weight[:, 0].T).sum(1) + self.conv_bias
        y, state = self.cell.step(F.silu(v), state)
        return y[:, None], join_state(seen[:, 1:], state)

    def _parts(self, before: States | None, u: Tensor) -> tuple[Tensor, Tensor]:
        """The last inputs of the convolution, (rows, conv - 1, inner), and the state of the cell."""
        tail, state = split_state(before, u, (self.spec.conv - 1, self.inner), self.cell.state_shape)
        return tail, state
