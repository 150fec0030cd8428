"""Recurrent layers of a decoder: a state of constant size instead of attention.

Notable here:
- the state of a layer for a sequence is one vector, the last inputs of its convolution and the state of its cell, so
  that the ten thousandth token takes no more memory and time than the tenth
- whole sequences are solved in parallel by the cell; single tokens of many sequences take one step together
- packed documents never affect each other: neither the convolution nor the cell reaches past the start of a document
- a state cannot be truncated as keys and values can: a rejected token requires recomputing from the beginning
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.context import LayerContext
from pippin.nn.kv_cache import KeyValues, KVCache, New, NoCache, PackedDocuments, causal_mask
from pippin.nn.linear import Linear
from pippin.nn.norm import RMSNorm

CellName = Literal["gru", "lstm"]

# The state of each sequence in one layer, in float32 at least.
States = Float[Tensor, "sequences size"]


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


@runtime_checkable
class StatefulCache(KVCache, Protocol):
    """A cache that stores the states of recurrent layers in addition to keys and values."""

    @property
    def counts(self) -> list[int] | None:
        """Numbers of new tokens per sequence, if they are packed in one row; None if each row is a sequence."""

    def recall(self, layer: int) -> States | None:
        """The state of each sequence before the new tokens; None at the beginning of all. Zeros are an initial
        state."""

    def remember(self, layer: int, states: States) -> None:
        """Store the states after the new tokens."""


class RecurrentState:
    """Keys, values and states of the rows of a batch over several passes: the simplest `StatefulCache`.

    An interrupted pass changes nothing. With sliding windows it stores more than is used.

    >>> RecurrentState().length
    0
    """

    def __init__(self) -> None:
        self.length = 0
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, Tensor] = {}
        self._new_keys: dict[int, tuple[Tensor, Tensor]] = {}
        self._new_states: dict[int, Tensor] = {}

    @property
    def positions(self) -> None:
        """None: positions are consecutive."""
        return None

    @property
    def counts(self) -> None:
        """None: each row is a sequence."""
        return None

    def append(self, layer: int, k: New, v: New, window: int | None) -> KeyValues:
        """Concatenate the new keys and values to the cached ones."""
        new = k.shape[2]
        if layer in self.keys:
            keys, values = self.keys[layer]
            k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        self._new_keys[layer] = (k, v)
        return k, v, causal_mask(self.length, new, window, None, k.device)

    def recall(self, layer: int) -> States | None:
        """The state of each row before the new tokens; None at the beginning."""
        return self.states.get(layer)

    def remember(self, layer: int, states: States) -> None:
        """Store the states after the new tokens; `advance` commits them."""
        self._new_states[layer] = states

    def advance(self, new: int) -> None:
        """Commit the keys, values and states of this pass."""
        self.length += new
        self.keys |= self._new_keys
        self.states |= self._new_states
        self._new_keys, self._new_states = {}, {}


class Recurrent(nn.Module):
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

    def forward(
        self,
        x: Float[Tensor, "batch new width"],
        context: LayerContext,
    ) -> Float[Tensor, "batch kept width"]:
        """Run over the new tokens; the cache stores the state for the next ones, if it is stateful.

        Args:
            x: normalized hidden states.
            context: the cache, which stores states or gives document boundaries, and adapters; with a selection, only
                its tokens are returned.

        Raises:
            InvalidArgument: a cache that neither stores states nor gives document boundaries.
        """
        adapters, selection = context.adapters, context.selection
        u, gate = self.in_proj(x, adapters).chunk(2, -1)
        y = self._through(u, context.cache, context.layer)
        if selection is not None:
            y, gate = y.index_select(1, selection.rows), gate.index_select(1, selection.rows)
            adapters = selection.adapters
        out: Tensor = self.out_proj(self.norm((y * F.silu(gate)).to(x.dtype)), adapters)
        return out

    def _through(self, u: Tensor, cache: KVCache, layer: int) -> Tensor:
        """Run convolution and cell over the sequences that the cache defines."""
        if isinstance(cache, StatefulCache):
            before = cache.recall(layer)
            if cache.counts is None:
                y, after = self._whole(u, before) if u.shape[1] > 1 else self._step(u, before)
            else:
                y, after = self._end_to_end(u, cache.counts, before)
            cache.remember(layer, after)
            return y
        if isinstance(cache, PackedDocuments):
            if u.shape[:2] != (1, sum(cache.counts)):
                raise InvalidArgument(
                    f"documents of {sum(cache.counts)} tokens were given {u.shape[0]} rows of {u.shape[1]}; "
                    "lay the rows end to end: ids.view(1, -1)"
                )
            return self._whole(u, None, (cache.positions == 0)[None].to(u.device))[0]
        if isinstance(cache, NoCache):
            starts = None
            if cache.padding is not None:
                starts = torch.arange(u.shape[1], device=u.device) == cache.padding[:, None]
            return self._whole(u, None, starts)[0]
        raise InvalidArgument(
            f"layer {layer} is recurrent, and a {type(cache).__name__} keeps no states: whole sequences need no cache, "
            "cached ones `pippin.nn.recurrent.layer.RecurrentState` or an engine; a mask means nothing to a recurrence"
        )

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
        return y, torch.cat([seen[:, new:].flatten(1), state.flatten(1)], 1)

    def _step(
        self, u: Float[Tensor, "rows 1 inner"], before: States | None
    ) -> tuple[Float[Tensor, "rows 1 inner"], States]:
        """One new token of each sequence."""
        tail, state = self._parts(before, u)
        seen = torch.cat([tail, u.to(tail.dtype)], 1)
        v = (seen * self.conv_weight[:, 0].T).sum(1) + self.conv_bias
        y, state = self.cell.step(F.silu(v), state)
        return y[:, None], torch.cat([seen[:, 1:].flatten(1), state.flatten(1)], 1)

    def _end_to_end(
        self, u: Float[Tensor, "1 tokens inner"], counts: Sequence[int], before: States | None
    ) -> tuple[Float[Tensor, "1 tokens inner"], States]:
        """Several packed sequences in one row: those with one new token together, the others one by one."""
        outputs = list(u.split(list(counts), 1))
        if before is None:
            before = u.new_zeros(len(counts), self.state_size, dtype=torch.promote_types(u.dtype, torch.float32))
        states = list(before.split(1))
        single = [index for index, count in enumerate(counts) if count == 1]
        if single:
            y, after = self._step(torch.cat([outputs[index] for index in single]), before[single])
            for index, part, state in zip(single, y.split(1), after.split(1), strict=True):
                outputs[index], states[index] = part, state
        for index, count in enumerate(counts):
            if count > 1:
                outputs[index], states[index] = self._whole(outputs[index], states[index])
        return torch.cat(outputs, 1), torch.cat(states)

    def _parts(self, before: States | None, u: Tensor) -> tuple[Tensor, Tensor]:
        """The last inputs of the convolution, (rows, conv - 1, inner), and the state of the cell."""
        tail, rows = (self.spec.conv - 1) * self.inner, u.shape[0]
        wide = torch.promote_types(u.dtype, torch.float32)
        before = u.new_zeros(rows, self.state_size, dtype=wide) if before is None else before.to(wide)
        return before[:, :tail].reshape(rows, self.spec.conv - 1, self.inner), before[:, tail:].reshape(
            rows, *self.cell.state_shape
        )
