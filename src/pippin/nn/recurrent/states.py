"""States of recurrent layers: the caches that keep them, and the walk over sequences that all such layers share.

Notable here:
- whatever a layer carries from token to token (the last inputs of its convolution, a matrix per head) is one float32
  vector for each sequence, so that the ten thousandth token takes no more memory than the tenth, and a cache copies,
  saves and restores states without knowing what is in them
- whole sequences are computed in parallel, single tokens of many sequences together
- a state cannot be truncated as keys and values can: a rejected token requires recomputing from the beginning
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.nn.context import LayerContext
from pippin.nn.kv_cache import KeyValues, KVCache, New, NoCache, PackedDocuments, causal_mask
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices

# The state of each sequence in one layer, in float32 at least. Zeros are an initial state.
States = Float[Tensor, "sequences size"]


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


@runtime_checkable
class StateSpec(Protocol):
    """The configuration of one kind of recurrent layer; a frozen dataclass, so that configs compare."""

    def state_size(self, width: int) -> int:
        """Elements of the state of a layer for a sequence, in a model of this width."""

    def work_size(self, width: int) -> int:
        """Elements of a token while the layer is computed, in a model of this width."""

    def build(self, width: int, *, eps: float) -> StatefulLayer:
        """The layer, in a model of this width whose norms have this epsilon."""


class StatefulLayer(nn.Module):
    """A layer that reads its sequence through a state.

    A kind of layer computes what enters the recurrence for each token (`enter`), the recurrence over the new tokens of
    whole sequences (`whole`) and over one token of each (`step`), and what leaves the layer (`leave`).
    """

    state_size: int
    """Elements of the state of one sequence."""
    out_proj: Linear
    """The last matrix of the layer."""
    autocasts = False
    """Whether autocast applies to the recurrence, which else is computed in float32 at least."""

    def enter(self, x: Tensor, adapters: AdapterSlices | None) -> tuple[Tensor, Tensor]:
        """The inputs of the recurrence, and the gate of its outputs: (batch, new, ...) each."""
        raise NotImplementedError

    def whole(self, u: Float[Tensor, "rows new inner"], before: States | None) -> tuple[Tensor, States]:
        """Outputs (rows, new, outer) and the states after all new tokens of sequences of one length."""
        raise NotImplementedError

    def step(self, u: Float[Tensor, "rows 1 inner"], before: States | None) -> tuple[Tensor, States]:
        """`whole` for one new token of each sequence."""
        return self.whole(u, before)

    def leave(self, y: Tensor, gate: Tensor, adapters: AdapterSlices | None) -> Tensor:
        """The outputs of the layer, from those of the recurrence and their gate."""
        raise NotImplementedError

    def initialize(self, generator: torch.Generator) -> None:
        """Initialize what the decoder's scheme does not fit."""

    def forward(self, x: Float[Tensor, "batch new width"], context: LayerContext) -> Float[Tensor, "batch kept width"]:
        """Run over the new tokens; the cache stores the state for the next ones, if it is stateful.

        Args:
            x: normalized hidden states.
            context: the cache, which stores states or gives document boundaries, and adapters; with a selection, only
                its tokens are returned.

        Raises:
            InvalidArgument: a cache that neither stores states nor gives document boundaries.
        """
        adapters, selection = context.adapters, context.selection
        u, gate = self.enter(x, adapters)
        device = x.device.type
        with torch.autocast(device, enabled=self.autocasts and torch.is_autocast_enabled(device)):
            y = self._through(u, context.cache, context.layer)
        if selection is not None:
            y, gate = y.index_select(1, selection.rows), gate.index_select(1, selection.rows)
            adapters = selection.adapters
        return self.leave(y, gate, adapters)

    def restarted(self, u: Float[Tensor, "rows new inner"], starts: Bool[Tensor, "#rows new"]) -> Tensor:
        """Outputs of rows in which new documents begin where ``starts`` is true: each document alone."""
        outputs = []
        for row, begins in zip(u.split(1), starts.expand(len(u), -1), strict=True):
            cuts = [0, *begins.nonzero().flatten().tolist(), u.shape[1]]
            parts = row.split([b - a for a, b in pairwise(cuts)], 1)
            outputs.append(torch.cat([self.whole(part, None)[0] for part in parts if part.shape[1]], 1))
        return torch.cat(outputs)

    def _through(self, u: Tensor, cache: KVCache, layer: int) -> Tensor:
        """Run over the sequences that the cache defines."""
        if isinstance(cache, StatefulCache):
            before = cache.recall(layer)
            if cache.counts is None:
                y, after = self.whole(u, before) if u.shape[1] > 1 else self.step(u, before)
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
            return self.restarted(u, (cache.positions == 0)[None].to(u.device))
        if isinstance(cache, NoCache):
            if cache.padding is None:
                return self.whole(u, None)[0]
            return self.restarted(u, torch.arange(u.shape[1], device=u.device) == cache.padding[:, None])
        raise InvalidArgument(
            f"layer {layer} is recurrent, and a {type(cache).__name__} keeps no states: whole sequences need no cache, "
            "cached ones `pippin.nn.recurrent.states.RecurrentState` or an engine; a mask means nothing to a recurrence"
        )

    def _end_to_end(
        self, u: Float[Tensor, "1 tokens inner"], counts: Sequence[int], before: States | None
    ) -> tuple[Float[Tensor, "1 tokens outer"], States]:
        """Several packed sequences in one row: those with one new token together, the others one by one."""
        inputs = list(u.split(list(counts), 1))
        if before is None:
            before = u.new_zeros(len(counts), self.state_size, dtype=torch.promote_types(u.dtype, torch.float32))
        outputs, states = dict[int, Tensor](), list(before.split(1))
        single = [index for index, count in enumerate(counts) if count == 1]
        if single:
            y, after = self.step(torch.cat([inputs[index] for index in single]), before[single])
            for index, part, state in zip(single, y.split(1), after.split(1), strict=True):
                outputs[index], states[index] = part, state
        for index, count in enumerate(counts):
            if count > 1:
                outputs[index], states[index] = self.whole(inputs[index], states[index])
        return torch.cat([outputs[index] for index in range(len(counts))], 1), torch.cat(states)


def split_state(before: States | None, u: Float[Tensor, "rows new inner"], *shapes: tuple[int, ...]) -> list[Tensor]:
    """The parts of a state, (rows, *shape) each, in float32 at least; zeros at the beginning of all sequences.

    Args:
        before: the states; None at the beginning.
        u: inputs, for their number of rows, device and precision.
        shapes: shapes of the parts of one sequence, in order.
    """
    sizes = [math.prod(shape) for shape in shapes]
    wide = torch.promote_types(u.dtype, torch.float32)
    before = u.new_zeros(len(u), sum(sizes), dtype=wide) if before is None else before.to(wide)
    return [part.view(len(u), *shape) for part, shape in zip(before.split(sizes, 1), shapes, strict=True)]


def join_state(*parts: Tensor) -> States:
    """The parts of a state as one vector for each sequence; the inverse of `split_state`."""
    return torch.cat([part.flatten(1) for part in parts], 1)
