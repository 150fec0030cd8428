"""Sequences of the torch runner whose heads have lost tokens: where each head's tokens lie, and what they see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pippin.engine.cache.paged_store import PagedStore
from pippin.engine.head_tables import HeadTables, HeadTokens
from pippin.engine.model_runner import BLOCK_SIZE
from pippin.nn.kv_cache import New

# Coordinates of slots in a store: layer, head and slot, of the same shape.
Places = tuple[Tensor, Tensor, Tensor]


def read_head(store: PagedStore, head_blocks: Sequence[int], tokens: int) -> HeadTokens:
    """See `pippin.engine.model_runner.Runner.read_head`."""
    places = _places(store, torch.tensor(head_blocks, device=store.device), torch.arange(tokens, device=store.device))
    parts = [part.cpu() for part in _at(store.values, places)]
    scales = [] if store.scales is None else [part.cpu() for part in _at(store.scales, places)]
    return HeadTokens(*parts, *scales)


def write_head(store: PagedStore, head_blocks: Sequence[int], data: HeadTokens) -> None:
    """See `pippin.engine.model_runner.Runner.write_head`."""
    slots = torch.arange(len(data), device=store.device)
    places = _places(store, torch.tensor(head_blocks, device=store.device), slots)
    for part, (new, scale) in enumerate(((data.keys, data.key_scales), (data.values, data.value_scales))):
        _put(store.values, part, places, new.to(store.device))
        if store.scales is not None and scale is not None:
            _put(store.scales, part, places, scale.to(store.device))


def append(store: PagedStore, layer: int, heads: HeadTables, held: int, k: New, v: New) -> None:
    """Write the keys and values of new tokens (one row of a batch) behind what each head has.

    Args:
        store: the blocks.
        layer: index of the layer.
        heads: of the sequence.
        held: tokens of the sequence before.
        k: keys of the new tokens. v: values.
    """
    tables, lost = _of_layer(store, layer, heads)
    slots = held - lost[:, None] + torch.arange(k.shape[2], device=store.device)
    places = _places(store, tables, slots)
    for part, new in ((0, k[0]), (1, v[0])):
        codes, scale = store.codes(new)
        _put(store.values, part, places, codes)
        if store.scales is not None and scale is not None:
            _put(store.scales, part, places, scale)


def visible(
    store: PagedStore, layer: int, heads: HeadTables, queries: Sequence[int], dtype: torch.dtype, window: int | None
) -> tuple[
    Float[Tensor, "1 kv_heads seen head_dim"],
    Float[Tensor, "1 kv_heads seen head_dim"],
    Bool[Tensor, "1 kv_heads new seen"],
]:
    """Keys and values that some tokens of a sequence see, and which of them each sees.

    Args:
        store: the blocks.
        layer: index of the layer.
        heads: of the sequence.
        queries: slots of the tokens, ascending.
        dtype: precision of what is returned.
        window: the sliding window of the layer; None for none.
    """
    tables, lost = _of_layer(store, layer, heads)
    seen = torch.arange(queries[-1] + 1 - int(lost.min()), device=store.device)
    # of shorter heads the last block is read again, and masked
    last = (queries[-1] - lost)[:, None]
    places = _places(store, tables, torch.minimum(seen, last))
    parts = _at(store.values, places)
    if store.scales is not None:
        parts = parts * _at(store.scales, places)[..., None]
    keys, values = parts.to(dtype)
    ends = torch.tensor(queries, device=store.device) - lost[:, None]
    mask = seen <= ends[..., None]
    if window is not None:
        mask &= ends[..., None] - seen < window
    return keys[None], values[None], mask[None]


def _of_layer(store: PagedStore, layer: int, heads: HeadTables) -> tuple[Tensor, Tensor]:
    """Tables (kv_heads, blocks) of a layer, and what its heads have lost."""
    index = store.layers.index(layer)
    return heads.tables[index].to(store.device, torch.int64), heads.lost[index].to(store.device, torch.int64)


def _places(store: PagedStore, tables: Int[Tensor, "*heads blocks"], slots: Int[Tensor, "*heads count"]) -> Places:
    """Where the slots of heads lie."""
    found = tables.gather(-1, (slots // BLOCK_SIZE).expand(*tables.shape[:-1], slots.shape[-1]))
    heads, kv_heads = store.heads_in_block, store.values.shape[2]
    number = found % heads
    return number // kv_heads, number % kv_heads, found // heads * BLOCK_SIZE + slots % BLOCK_SIZE


def _at(tensor: Tensor, places: Places) -> Tensor:
    """Both parts at some places, (2, *places, ...)."""
    layer, head, slot = places
    return torch.stack([tensor[layer, part, head, slot] for part in (0, 1)])


def _put(tensor: Tensor, part: int, places: Places, new: Tensor) -> None:
    layer, head, slot = places
    tensor[layer, part, head, slot] = new.to(tensor.dtype)
