"""The blocks of the torch runner: keys and values of all layers, written and read by slots.

Notable here:
- contiguous blocks are read as a view; only scattered ones are gathered
- 8-bit codes have a scale for each token and head, so that writing a token does not change another
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import NotEnoughMemory
from pippin.engine.head_tables import int8_codes
from pippin.engine.model_runner import BLOCK_SIZE, KVCacheDtype
from pippin.language.decoder_config import DecoderConfig
from pippin.nn.kv_cache import New

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
    >>> from pippin.nn.attention.attention import AttentionSpec
    >>> from pippin.nn.feedforward.feedforward import FeedForwardSpec
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
        self.layers = config.cached_layers
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
            codes, scale = self.codes(new)
            if self.scales is not None and scale is not None:
                _put(self.scales[index, part], slots, scale)
            _put(self.values[index, part], slots, codes)

    def codes(self, new: Tensor) -> tuple[Tensor, Tensor | None]:
        """New keys or values as they are stored, and the scale of each; None without 8-bit codes."""
        return (new, None) if self.scales is None else int8_codes(new)

    def index(self, layer: int) -> int:
        """Which layer of its group a layer is."""
        return self._index[layer]

    @property
    def heads_in_block(self) -> int:
        """Heads whose keys and values a block holds, in all layers of a group."""
        return self.values.shape[0] * self.values.shape[2]

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
