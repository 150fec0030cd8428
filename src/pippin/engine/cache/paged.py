"""The paged cache of the torch runner: keys and values in blocks, and a view of it for one pass over several sequences.

Notable here:
- contiguous blocks are read as a view; only scattered tables are gathered, and only the part that is attended to
- each layer's tokens are written before any is read, so that attention reads the same precision as in later passes: a
  warm and a cold cache differ only by the order of sums
- 8-bit codes have a scale for each token and head, so that writing a token does not change another
- states of recurrent layers are stored with the sequences, not in blocks: a pass reads them and replaces them
- after `narrow`, only the tokens whose logits are returned are queries: one query at the end of a prompt needs no mask
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import NotEnoughMemory
from pippin.engine.model_runner import BLOCK_SIZE, KVCacheDtype, ModelInput
from pippin.language.decoder_config import DecoderConfig
from pippin.nn.attention_capture import AttentionCapture
from pippin.nn.kv_cache import AttentionObserver, KeyValues, New, PackedKeyValues
from pippin.nn.recurrent.states import States

DTYPES: dict[KVCacheDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}

# Location of keys: a range of slots; or blocks, and the range of slots within them.
Location = slice | tuple[Tensor, slice]


def block_bytes(
    config: DecoderConfig, kv_cache_dtype: KVCacheDtype, groups: Sequence[Sequence[int]] | None = None
) -> int:
    """Memory of one block; with groups of layers, of one that serves any of them.

    >>> from pippin.language.decoder_config import LayerSpec
    >>> from pippin.nn.attention import AttentionSpec
    >>> from pippin.nn.feedforward import FeedForwardSpec
    >>> layer = LayerSpec(AttentionSpec(), FeedForwardSpec(32))
    >>> config = DecoderConfig("llama", 100, 16, (layer,), num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    ...     max_position_embeddings=64)
    >>> block_bytes(config, "float32"), block_bytes(config, "int8")
    (1024, 384)
    """
    layers = len(config.cached_layers) if groups is None else max(map(len, groups))
    vectors = 2 * layers * config.num_key_value_heads * BLOCK_SIZE
    return vectors * (config.head_dim * DTYPES[kv_cache_dtype].itemsize + (4 if kv_cache_dtype == "int8" else 0))


class PagedStore:
    """Keys and values of all blocks.

    Args:
        config: the decoder whose layers are stored.
        blocks: number of blocks.
        kv_cache_dtype: precision of keys and values.
        device: device of the tensors.
        groups: layers with their own KV cache, in groups with a block table each; None for one group.
        zeros: fill them with zeros, so that slots that are not written yet can be read and masked.

    Raises:
        NotEnoughMemory: the device cannot hold that many blocks.
    """

    @checked
    def __init__(
        self,
        config: DecoderConfig,
        blocks: PositiveInt,
        kv_cache_dtype: KVCacheDtype,
        device: torch.device,
        *,
        groups: Sequence[Sequence[int]] | None = None,
        zeros: bool = False,
    ) -> None:
        self.blocks, self.device = blocks, device
        self.groups = (config.cached_layers,) if groups is None else groups
        shape = (max(map(len, self.groups)), 2, config.num_key_value_heads, blocks * BLOCK_SIZE, config.head_dim)
        make = torch.zeros if zeros else torch.empty
        try:
            self.values = make(shape, dtype=DTYPES[kv_cache_dtype], device=device)
            self.scales = make(shape[:-1], dtype=torch.float32, device=device) if kv_cache_dtype == "int8" else None
        except RuntimeError as error:  # torch's out-of-memory errors, on every device
            size = blocks * block_bytes(config, kv_cache_dtype, groups) / 1e9
            raise NotEnoughMemory(
                f"{device} has no room for {blocks} cache blocks ({size:.1f} GB); take fewer, or kv_cache_dtype='int8'"
            ) from error
        self.group_of = {layer: group for group, layers in enumerate(self.groups) for layer in layers}
        self._index = {layer: i for layers in self.groups for i, layer in enumerate(layers)}

    def write(self, layer: int, slots: slice | Tensor, k: New, v: New) -> None:
        """Write the keys and values of new tokens (one row of a batch) into their slots."""
        index = self._index[layer]
        for part, new in ((0, k[0]), (1, v[0])):
            values = self.values[index, part]
            if self.scales is not None:
                scale = new.float().abs().amax(-1) / 127
                # the scale of a zero vector is 0; divide by 1 instead
                new = (new / torch.where(scale > 0, scale, 1.0)[..., None]).round_().to(torch.int8)
                _put(self.scales[index, part], slots, scale)
            _put(values, slots, new)

    def read(self, layer: int, location: Location, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values at a location, (1, kv_heads, tokens, head_dim) each; views if the slots are contiguous."""
        index = self._index[layer]
        values = _take(self.values[index], location)
        if self.scales is not None:
            values = values * _take(self.scales[index], location)[..., None]
        keys, values = values.to(dtype)
        return keys[None], values[None]

    def layer(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """All slots of one layer, (2, kv_heads, slots, head_dim), and their scales, (2, kv_heads, slots)."""
        index = self._index[layer]
        return self.values[index], None if self.scales is None else self.scales[index]

    def gather(self, layer: int, tables: Int[Tensor, "batch blocks"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of all blocks of some tables, (batch, kv_heads, tokens, head_dim) each, copied."""
        location = (tables.flatten(), slice(None))
        keys, values = (part[0].unflatten(1, (len(tables), -1)) for part in self.read(layer, location, dtype))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def copy(self, source: int, target: int) -> None:
        """Copy one block over another."""
        for tensor in self._tensors():
            self._blocks(tensor)[:, :, :, target] = self._blocks(tensor)[:, :, :, source]

    def dump(self, blocks: Sequence[int]) -> UInt8[Tensor, "blocks bytes"]:
        """The contents of blocks, as bytes on the CPU."""
        chosen = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        parts = []
        for tensor in self._tensors():
            rows = self._blocks(tensor).index_select(3, chosen).movedim(3, 0).contiguous()
            parts.append(rows.cpu().view(len(blocks), -1).view(torch.uint8))
        return torch.cat(parts, 1)

    def restore(self, blocks: Sequence[int], data: UInt8[Tensor, "blocks bytes"]) -> None:
        """Fill blocks with data that `dump` returned."""
        chosen = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        start = 0
        for tensor in self._tensors():
            paged = self._blocks(tensor)
            shape = (len(blocks), *paged.shape[:3], *paged.shape[4:])
            size = tensor.nbytes // self.blocks
            if not size:  # a model whose layers are all recurrent
                continue
            rows = data[:, start : start + size].contiguous().view(tensor.dtype).view(shape).to(self.device)
            paged.index_copy_(3, chosen, rows.movedim(0, 3))
            start += size

    def _tensors(self) -> list[Tensor]:
        return [self.values] if self.scales is None else [self.values, self.scales]

    def _blocks(self, tensor: Tensor) -> Tensor:
        """The tensor with a separate dimension for the slots of a block: (layers, 2, kv_heads, blocks, BLOCK, …)."""
        paged: Tensor = tensor.unflatten(3, (self.blocks, BLOCK_SIZE))
        return paged


def _put(target: Tensor, slots: slice | Tensor, new: Tensor) -> None:
    """Write to slots, the second dimension."""
    if isinstance(slots, slice):
        target[:, slots] = new
    else:
        target.index_copy_(1, slots, new.to(target.dtype))


def _take(source: Tensor, location: Location) -> Tensor:
    """Read from slots, the third dimension."""
    if isinstance(location, slice):
        return source[:, :, location]
    blocks, part = location
    chosen: Tensor = source.unflatten(2, (-1, BLOCK_SIZE)).index_select(2, blocks)
    return chosen.flatten(2, 3)[:, :, part]


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a pass: cached tokens, block tables, new tokens, which of them have logits, what they see."""

    num_computed_tokens: int
    tables: Sequence[Sequence[int]]
    count: int
    output_rows: Sequence[int]
    visible: Sequence[int] | None
    attention: AttentionCapture | None

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
        """The slots of the new tokens in one group of layers."""
        slots = [
            sequence.tables[group][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for sequence, span in zip(self._sequences, spans, strict=True)
            for p in span
        ]
        if all(b - a == 1 for a, b in pairwise(slots)):
            return slice(slots[0], slots[-1] + 1)
        return _integers(slots, self.store.device)

    def append(self, layer: int, k: New, v: New, window: int | None) -> KeyValues | PackedKeyValues:
        """Write the new tokens of one layer; return the keys and values that they attend to."""
        self.store.write(layer, self._slots[self.store.group_of[layer]], k, v)
        return self.view(layer, window)

    def view(self, layer: int, window: int | None) -> KeyValues | PackedKeyValues:
        """The keys and values that the queries attend to, in a layer that is already written."""
        reads, counts, observers = [], [], []
        group = self.store.group_of[layer]
        for index, sequence in enumerate(self._sequences):
            querying = sequence.output_rows if self._narrowed else range(sequence.count)
            if not querying:
                continue
            if (index, group, window) not in self._plans:
                self._plans[index, group, window] = self._plan(sequence, group, querying, window)
            location, mask = self._plans[index, group, window]
            reads.append((*self.store.read(layer, location, self.dtype), mask))
            counts.append(len(querying))
            observers.append(None if sequence.attention is None else self._observer(sequence, layer, window))
        if any(observers):
            return PackedKeyValues(counts, reads, observers)
        return reads[0] if len(reads) == 1 else PackedKeyValues(counts, reads)

    def _observer(self, sequence: _Sequence, layer: int, window: int | None) -> AttentionObserver:
        """Gives the attention of one layer to the sequence's capture."""
        capture, cached = sequence.attention, sequence.num_computed_tokens
        assert capture is not None
        first = _first_visible(cached, window)

        def observe(q: Tensor, keys: Tensor, mask: Any, *, scale: float, softcap: float | None) -> None:
            new, seen = q.shape[2], keys.shape[2]
            if not isinstance(mask, Tensor):  # causal order
                mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)[None, None]
            capture.add(layer, q, keys, mask[0, 0], scale=scale, first=first, cached=cached, softcap=softcap)

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
