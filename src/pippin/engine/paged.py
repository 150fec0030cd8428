"""The cache behind the torch runner: keys and values in blocks, and what one pass over several sequences sees of them.

Notable here:
- blocks that lie one after another are read as a view; only a scattered table is gathered, and only the part in reach
- each layer's tokens are written before any is read, so that attention sees what later passes will see, in the same
  precision: a warm cache and a cold one differ by nothing but the order of sums
- 8-bit codes have a scale for each token and head, so that writing a token never touches another
- states of recurrent layers lie beside the blocks, with their sequences: a pass takes them from there and puts the new
  ones in their place
- once `narrow`ed, a pass shows what the wanted tokens may look at: one query at the end of a prompt needs no mask
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from pippin.core.errors import InvalidArgument, NotEnoughMemory
from pippin.engine.runner import BLOCK, CacheType, Work
from pippin.language.transformer import DecoderConfig
from pippin.nn.cache import EndToEnd, New, Read
from pippin.nn.recurrent import States

DTYPES: dict[CacheType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}

# Where keys lie: slots that follow each other; or blocks, and the part of their slots that is meant.
Place = slice | tuple[Tensor, slice]


def block_bytes(config: DecoderConfig, cache_type: CacheType) -> int:
    """Memory of one block.

    >>> from pippin.language.transformer import LayerSpec
    >>> from pippin.nn.attention import AttentionSpec
    >>> from pippin.nn.feedforward import FeedForwardSpec
    >>> layer = LayerSpec(AttentionSpec(), FeedForwardSpec(32))
    >>> config = DecoderConfig("llama", 100, 16, (layer,), heads=2, kv_heads=1, head_dim=8, max_context=64)
    >>> block_bytes(config, "float32"), block_bytes(config, "int8")
    (1024, 384)
    """
    vectors = 2 * len(config.cached_layers) * config.kv_heads * BLOCK
    return vectors * (config.head_dim * DTYPES[cache_type].itemsize + (4 if cache_type == "int8" else 0))


class PagedStore:
    """Keys and values of all blocks.

    Args:
        config: the decoder whose layers are to be stored.
        blocks: how many blocks.
        cache_type: precision.
        device: where they lie.
        zeros: fill them with zeros, so that what is not written yet may be read and masked.

    Raises:
        InvalidArgument: fewer than one block.
        NotEnoughMemory: the device cannot hold so many.
    """

    def __init__(
        self, config: DecoderConfig, blocks: int, cache_type: CacheType, device: torch.device, *, zeros: bool = False
    ) -> None:
        if blocks < 1:
            raise InvalidArgument(f"a cache needs at least one block of {BLOCK} tokens, got {blocks}")
        self.blocks, self.device = blocks, device
        shape = (len(config.cached_layers), 2, config.kv_heads, blocks * BLOCK, config.head_dim)
        make = torch.zeros if zeros else torch.empty
        try:
            self.values = make(shape, dtype=DTYPES[cache_type], device=device)
            self.scales = make(shape[:-1], dtype=torch.float32, device=device) if cache_type == "int8" else None
        except RuntimeError as error:  # torch's out-of-memory errors, on every device
            size = blocks * block_bytes(config, cache_type) / 1e9
            raise NotEnoughMemory(
                f"{device} has no room for {blocks} cache blocks ({size:.1f} GB); take fewer, or cache_type='int8'"
            ) from error
        self._index = {layer: i for i, layer in enumerate(config.cached_layers)}

    def write(self, layer: int, slots: slice | Tensor, k: New, v: New) -> None:
        """Put the keys and values of new tokens (one row of a batch) into their slots."""
        index = self._index[layer]
        for part, new in ((0, k[0]), (1, v[0])):
            values = self.values[index, part]
            if self.scales is not None:
                scale = new.float().abs().amax(-1) / 127
                # a vector of zeros has no scale; any will do
                new = (new / torch.where(scale > 0, scale, 1.0)[..., None]).round_().to(torch.int8)
                _put(self.scales[index, part], slots, scale)
            _put(values, slots, new)

    def read(self, layer: int, place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values at a place, (1, kv_heads, tokens, head_dim) each: views, where that is possible."""
        index = self._index[layer]
        values = _take(self.values[index], place)
        if self.scales is not None:
            values = values * _take(self.scales[index], place)[..., None]
        keys, values = values.to(dtype)
        return keys[None], values[None]

    def layer(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """All slots of one layer, (2, kv_heads, slots, head_dim), and their scales, (2, kv_heads, slots)."""
        index = self._index[layer]
        return self.values[index], None if self.scales is None else self.scales[index]

    def gather(self, layer: int, tables: Int[Tensor, "batch blocks"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of all blocks of some tables, (batch, kv_heads, tokens, head_dim) each, copied."""
        place = (tables.flatten(), slice(None))
        keys, values = (part[0].unflatten(1, (len(tables), -1)) for part in self.read(layer, place, dtype))
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
        """Fill blocks with what `dump` gave."""
        chosen = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        start = 0
        for tensor in self._tensors():
            paged = self._blocks(tensor)
            shape = (len(blocks), *paged.shape[:3], *paged.shape[4:])
            size = tensor.nbytes // self.blocks
            rows = data[:, start : start + size].contiguous().view(tensor.dtype).view(shape).to(self.device)
            paged.index_copy_(3, chosen, rows.movedim(0, 3))
            start += size

    def _tensors(self) -> list[Tensor]:
        return [self.values] if self.scales is None else [self.values, self.scales]

    def _blocks(self, tensor: Tensor) -> Tensor:
        """With the slots of a block as a dimension of their own: (layers, 2, kv_heads, blocks, BLOCK, …)."""
        paged: Tensor = tensor.unflatten(3, (self.blocks, BLOCK))
        return paged


def _put(target: Tensor, slots: slice | Tensor, new: Tensor) -> None:
    """Write along the slots, the second dimension."""
    if isinstance(slots, slice):
        target[:, slots] = new
    else:
        target.index_copy_(1, slots, new.to(target.dtype))


def _take(source: Tensor, place: Place) -> Tensor:
    """Read along the slots, the third dimension."""
    if isinstance(place, slice):
        return source[:, :, place]
    blocks, part = place
    chosen: Tensor = source.unflatten(2, (-1, BLOCK)).index_select(2, blocks)
    return chosen.flatten(2, 3)[:, :, part]


@dataclass(frozen=True)
class _Sequence:
    """One sequence in a pass: tokens held before, its blocks, and which of its new tokens ask (all, or the wanted)."""

    held: int
    table: Sequence[int]
    count: int
    wanted: Sequence[int]


class PagedPass:
    """What the sequences of one pass see: a `pippin.nn.cache.Resumable` over the blocks of their tables.

    It is a `pippin.nn.recurrent.Stateful` too, over the states that the sequences brought along.

    Args:
        store: the blocks.
        works: the sequences; their new tokens lie end to end in the single row of a batch.
        dtype: precision of the queries.
    """

    def __init__(self, store: PagedStore, works: Sequence[Work], dtype: torch.dtype) -> None:
        self.store, self.dtype = store, dtype
        self._states = [work.states for work in works]
        self._sequences = [_Sequence(w.held, w.table, len(w.ids), w.outputs) for w in works]
        self.length = max(work.held for work in works)
        spans = [range(work.held, work.held + len(work.ids)) for work in works]
        self.positions: Int[Tensor, new] = _integers([p for span in spans for p in span], store.device)
        self._slots = self._places(works, spans)
        self._narrowed = False
        self._plans: dict[tuple[int, int | None], tuple[Place, Tensor | None]] = {}

    def _places(self, works: Sequence[Work], spans: list[range]) -> slice | Tensor:
        """Where the new tokens are written."""
        slots = [w.table[p // BLOCK] * BLOCK + p % BLOCK for w, span in zip(works, spans, strict=True) for p in span]
        if all(b - a == 1 for a, b in pairwise(slots)):
            return slice(slots[0], slots[-1] + 1)
        return _integers(slots, self.store.device)

    def append(self, layer: int, k: New, v: New, window: int | None) -> Read | EndToEnd:
        """Write the new tokens of one layer; return all that they may look at."""
        self.store.write(layer, self._slots, k, v)
        return self.view(layer, window)

    def view(self, layer: int, window: int | None) -> Read | EndToEnd:
        """What the tokens that ask may look at in a layer whose keys and values are there already."""
        reads, counts = [], []
        for index, sequence in enumerate(self._sequences):
            asking = sequence.wanted if self._narrowed else range(sequence.count)
            if not asking:
                continue
            if (index, window) not in self._plans:
                self._plans[index, window] = self._plan(sequence, asking, window)
            place, mask = self._plans[index, window]
            reads.append((*self.store.read(layer, place, self.dtype), mask))
            counts.append(len(asking))
        return reads[0] if len(reads) == 1 else EndToEnd(counts, reads)

    @property
    def counts(self) -> list[int]:
        """New tokens of each sequence."""
        return [sequence.count for sequence in self._sequences]

    def recall(self, layer: int) -> States | None:
        """The state of each sequence before its new tokens; None where all of them begin."""
        found = [states.get(layer) for states in self._states]
        known = next((state for state in found if state is not None), None)
        if known is None:
            return None
        return torch.stack([torch.zeros_like(known) if state is None else state for state in found])

    def remember(self, layer: int, states: States) -> None:
        """Leave each sequence its state after the new tokens, in memory of its own."""
        for mine, state in zip(self._states, states.unbind(), strict=True):
            mine[layer] = state.clone()

    def narrow(self) -> None:
        """From now on only the wanted tokens ask."""
        self._narrowed = True
        self._plans.clear()

    def advance(self, new: int) -> None:
        """Nothing: how much a sequence holds is known to the scheduler."""

    def _plan(self, sequence: _Sequence, asking: Sequence[int], window: int | None) -> tuple[Place, Tensor | None]:
        """Where the keys lie that the asking tokens may look at, and the mask."""
        first, last = sequence.held + asking[0], sequence.held + asking[-1]
        low, high = 0 if window is None else max(0, first - window + 1), last + 1
        place = self._place(sequence.table, low, high)
        dense = len(asking) == high - first
        if len(asking) == 1 or (dense and first == low == 0 and (window is None or high <= window)):
            return place, None
        device = self.store.device
        if device.type == "cuda" and dense and (window is None or high - low <= window):
            return place, causal_lower_right(len(asking), high - low)  # which the flash kernels need no mask for
        query = _integers([sequence.held + index for index in asking], device)[:, None]
        key = torch.arange(low, high, device=device)
        mask = key <= query
        if window is not None:
            mask &= query - key < window
        return place, mask[None, None]

    def _place(self, table: Sequence[int], low: int, high: int) -> Place:
        """The place of the tokens at positions from ``low`` to before ``high``."""
        blocks = table[low // BLOCK : -(-high // BLOCK)]
        start = low % BLOCK
        if all(b - a == 1 for a, b in pairwise(blocks)):
            begin = blocks[0] * BLOCK + start
            return slice(begin, begin + high - low)
        return _integers(blocks, self.store.device), slice(start, start + high - low)


def _integers(values: Sequence[int], device: torch.device) -> Int[Tensor, count]:
    return torch.tensor(values, dtype=torch.int64, device=device)
