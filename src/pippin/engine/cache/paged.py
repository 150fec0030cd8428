"""The cache of one pass of the torch runner, over the block tables of several sequences.

Notable here:
- contiguous blocks are read as a view; only scattered tables are gathered, and only the part that is attended to
- each layer's tokens are written before any is read, so that attention reads the same precision as in later passes: a
  warm and a cold cache differ only by the order of sums
- states of recurrent layers are stored with the sequences, not in blocks: a pass reads them and replaces them
- after `narrow`, only the tokens whose logits are returned are queries: one query at the end of a prompt needs no mask
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from pippin.engine.cache import apart
from pippin.engine.cache.paged_store import Location, PagedStore
from pippin.engine.head_tables import HeadTables
from pippin.engine.model_runner import BLOCK_SIZE, ModelInput
from pippin.nn.attention.attention_capture import AttentionCapture
from pippin.nn.kv_cache import AttentionObserver, KeyValues, New, PackedKeyValues
from pippin.nn.recurrent.states import States


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a pass: cached tokens, block tables, new tokens, which of them have logits, what they see."""

    num_computed_tokens: int
    tables: Sequence[Sequence[int]]
    count: int
    output_rows: Sequence[int]
    visible: Sequence[int] | None
    attention: AttentionCapture | None
    heads: HeadTables | None

    def last_visible(self, index: int) -> int:
        """The last slot that one of its new tokens sees."""
        return self.num_computed_tokens + index if self.visible is None else self.visible[index]


class PagedPass:
    """The cache of one pass: a `pippin.nn.kv_cache.ResumableCache` over the block tables of its sequences.

    It is also a `pippin.nn.recurrent.states.StatefulCache` over the states of the sequences.

    Args:
        store: the blocks.
        inputs: the sequences; their new tokens are packed end to end in a batch of one row.
        dtype: precision of the queries.
    """

    def __init__(self, store: PagedStore, inputs: Sequence[ModelInput], dtype: torch.dtype) -> None:
        self.store, self.dtype = store, dtype
        self._states = [model_input.states for model_input in inputs]
        self._sequences = [
            _Sequence(
                w.num_computed_tokens,
                w.tables,
                len(w.token_ids),
                w.outputs,
                w.visible,
                None if w.capture is None else w.capture.attention,
                w.heads,
            )
            for w in inputs
        ]
        for sequence in self._sequences:
            if sequence.attention is not None:
                sequence.attention.received.clear()
        spans = [
            range(model_input.num_computed_tokens, model_input.num_computed_tokens + len(model_input.token_ids))
            for model_input in inputs
        ]
        self.positions: Int[Tensor, "*axes new"] = _positions(inputs, spans, store.device)
        furthest = [
            max(span) if w.positions is None else int(w.positions.max()) for w, span in zip(inputs, spans, strict=True)
        ]
        self.length = max(furthest)  # the tables of rotations reach this far and at least one further
        self._slots = [self._slots_of(group, spans) for group in range(len(store.groups))]
        self._narrowed = False
        self._plans: dict[tuple[int, int, int | None], tuple[Location, Tensor | None]] = {}

    def _slots_of(self, group: int, spans: list[range]) -> slice | Tensor:
        """The slots of the new tokens in one group of layers; of those whose heads lie together."""
        slots = [
            sequence.tables[group][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for sequence, span in zip(self._sequences, spans, strict=True)
            for p in span
            if sequence.heads is None
        ]
        if slots and all(b - a == 1 for a, b in pairwise(slots)):
            return slice(slots[0], slots[-1] + 1)
        return _integers(slots, self.store.device)

    def append(self, layer: int, k: New, v: New, window: int | None) -> KeyValues | PackedKeyValues:
        """Write the new tokens of one layer; return the keys and values that they attend to."""
        if all(sequence.heads is None for sequence in self._sequences):
            self.store.write(layer, self._slots[self.store.group_of[layer]], k, v)
        else:
            self._append_apart(layer, k, v)
        return self.view(layer, window)

    def _append_apart(self, layer: int, k: New, v: New) -> None:
        """Write the new tokens where the heads of some sequences lie apart."""
        begin, together = 0, []
        for sequence in self._sequences:
            rows = slice(begin, begin + sequence.count)
            begin = rows.stop
            if sequence.heads is None:
                together.append(rows)
            else:
                apart.append(
                    self.store, layer, sequence.heads, sequence.num_computed_tokens, k[:, :, rows], v[:, :, rows]
                )
        if together:
            whole_k, whole_v = (torch.cat([part[:, :, rows] for rows in together], 2) for part in (k, v))
            self.store.write(layer, self._slots[self.store.group_of[layer]], whole_k, whole_v)

    def view(self, layer: int, window: int | None) -> KeyValues | PackedKeyValues:
        """The keys and values that the queries attend to, in a layer that is already written."""
        reads: list[KeyValues] = []
        counts: list[int] = []
        observers: list[AttentionObserver | None] = []
        group = self.store.group_of[layer]
        for index, sequence in enumerate(self._sequences):
            querying = sequence.output_rows if self._narrowed else range(sequence.count)
            if not querying:
                continue
            counts.append(len(querying))
            observers.append(None if sequence.attention is None else self._observer(sequence, layer, window))
            if sequence.heads is not None:
                slots = [sequence.num_computed_tokens + row for row in querying]
                reads.append(apart.visible(self.store, layer, sequence.heads, slots, self.dtype, window))
                continue
            if (index, group, window) not in self._plans:
                self._plans[index, group, window] = self._plan(sequence, group, querying, window)
            location, mask = self._plans[index, group, window]
            reads.append((*self.store.read(layer, location, self.dtype), mask))
        if any(observers):
            return PackedKeyValues(counts, reads, observers)
        return reads[0] if len(reads) == 1 else PackedKeyValues(counts, reads)

    def _observer(self, sequence: _Sequence, layer: int, window: int | None) -> AttentionObserver:
        """Gives the attention of one layer to the sequence's capture."""
        capture, cached = sequence.attention, sequence.num_computed_tokens
        assert capture is not None
        first = _first_visible(cached, window) if sequence.heads is None else 0
        lost = 0 if sequence.heads is None else sequence.heads.lost[self.store.layers.index(layer)]

        def observe(q: Tensor, keys: Tensor, mask: Any, *, scale: float, softcap: float | None) -> None:
            new, seen = q.shape[2], keys.shape[2]
            if not isinstance(mask, Tensor):  # causal order
                mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)[None, None]
            capture.add(layer, q, keys, mask[0], scale=scale, first=first, cached=cached, lost=lost, softcap=softcap)

        return observe

    @property
    def counts(self) -> list[int]:
        """New tokens of each sequence."""
        return [sequence.count for sequence in self._sequences]

    def recall(self, layer: int) -> States | None:
        """The state of each sequence before its new tokens; None if all sequences begin."""
        found = [states.get(layer) for states in self._states]
        known = next((state for state in found if state is not None), None)
        if known is None:
            return None
        return torch.stack([torch.zeros_like(known) if state is None else state for state in found])

    def remember(self, layer: int, states: States) -> None:
        """Store a copy of each sequence's state after the new tokens."""
        for mine, state in zip(self._states, states.unbind(), strict=True):
            mine[layer] = state.clone()

    def narrow(self) -> None:
        """From now on, only the tokens whose logits are returned are queries."""
        self._narrowed = True
        self._plans.clear()

    def advance(self, new: int) -> None:
        """Do nothing: the scheduler counts the tokens of a sequence."""

    def _plan(
        self, sequence: _Sequence, group: int, querying: Sequence[int], window: int | None
    ) -> tuple[Location, Tensor | None]:
        """Location of the keys that the queries attend to, and the mask (None if all of them are visible)."""
        first, last = sequence.num_computed_tokens + querying[0], sequence.last_visible(querying[-1])
        low, high = _first_visible(first, window), last + 1
        location = self._location(sequence.tables[group], low, high)
        device = self.store.device
        if sequence.visible is not None:
            return location, self._span_mask(sequence, querying, window, range(low, high))
        dense = len(querying) == high - first
        if len(querying) == 1 or (dense and first == low == 0 and (window is None or high <= window)):
            return location, None
        if device.type == "cuda" and dense and (window is None or high - low <= window):
            # flash attention supports this without a mask; the import brings torch's compiler, 70 MB and a second
            from torch.nn.attention.bias import causal_lower_right

            return location, causal_lower_right(len(querying), high - low)
        query = _integers([sequence.num_computed_tokens + index for index in querying], device)[:, None]
        key = torch.arange(low, high, device=device)
        mask = key <= query
        if window is not None:
            mask &= query - key < window
        return location, mask[None, None]

    def _span_mask(
        self, sequence: _Sequence, querying: Sequence[int], window: int | None, keys: range
    ) -> Bool[Tensor, "1 1 new seen"]:
        """The mask of tokens that also see later ones."""
        device = self.store.device
        query = _integers([sequence.num_computed_tokens + index for index in querying], device)[:, None]
        last = _integers([sequence.last_visible(index) for index in querying], device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=device)
        mask = key <= last
        if window is not None:
            mask &= query - key < window
        return mask[None, None]

    def _location(self, table: Sequence[int], low: int, high: int) -> Location:
        """The location of the tokens at positions ``low`` to ``high - 1``."""
        blocks = table[low // BLOCK_SIZE : -(-high // BLOCK_SIZE)]
        start = low % BLOCK_SIZE
        if all(b - a == 1 for a, b in pairwise(blocks)):
            begin = blocks[0] * BLOCK_SIZE + start
            return slice(begin, begin + high - low)
        return _integers(blocks, self.store.device), slice(start, start + high - low)


def _first_visible(slot: int, window: int | None) -> int:
    """The first slot that the token in a slot sees."""
    return 0 if window is None else max(0, slot - window + 1)


def _positions(inputs: Sequence[ModelInput], spans: Sequence[range], device: torch.device) -> Int[Tensor, "*axes new"]:
    """Positions of all new tokens: (new,), or (axes, 1, new) if those of a sequence have several axes."""
    if all(model_input.positions is None for model_input in inputs):
        return _integers([slot for span in spans for slot in span], device)
    axes = max(1 if w.positions is None else len(w.positions) for w in inputs)
    parts = [
        (torch.tensor([list(span)]) if w.positions is None else w.positions.cpu().long()).expand(axes, -1)
        for w, span in zip(inputs, spans, strict=True)
    ]
    together = torch.cat(parts, 1).to(device)
    return together[0] if axes == 1 else together[:, None]


def _integers(values: Sequence[int], device: torch.device) -> Int[Tensor, count]:
    return torch.tensor(values, dtype=torch.int64, device=device)
