"""What a model of transformers keeps, in blocks, and a cache of transformers' kind over them for one pass.

Notable here:
- every layer has its own heads and sizes, and may keep a third vector of each token (the keys of an indexer)
- keys are returned with padding on the left where a sequence is shorter than the longest of its pass, which is how
  transformers decodes a batch; its masks hide it, and they also make sliding windows and chunks
- states of recurrent layers are stored with the sequences: a pass reads them and replaces them
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionLayer

from pippin.core.errors import NotEnoughMemory
from pippin.language.transformers_models.network import LayerCache, TransformersConfig


@runtime_checkable
class NewTokens(Protocol):
    """New tokens of one sequence; a `pippin.engine.model_runner.ModelInput` is one."""

    token_ids: Sequence[int]
    num_computed_tokens: int
    block_table: Sequence[int]
    states: dict[int, Float[Tensor, size]]


def token_bytes(config: TransformersConfig, dtype: torch.dtype) -> int:
    """Memory of the vectors of one token in all layers."""
    return dtype.itemsize * sum(heads * size for layer in config.layers for heads, size in layer.vectors)


class VectorStore:
    """Vectors of all blocks and layers.

    Args:
        config: what each layer keeps.
        blocks: number of blocks.
        block_size: tokens of a block.
        dtype: precision of the vectors.
        device: device of the tensors.

    Attributes:
        tensors: by layer, one of (heads, slots, size) for each kind of vector.

    Raises:
        NotEnoughMemory: the device cannot hold that many blocks.
    """

    def __init__(
        self, config: TransformersConfig, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.blocks, self.block_size, self.device = blocks, block_size, device
        slots = blocks * block_size
        try:
            self.tensors = [
                [torch.empty(heads, slots, size, dtype=dtype, device=device) for heads, size in layer.vectors]
                for layer in config.layers
            ]
        except RuntimeError as error:  # torch's out-of-memory errors, on every device
            size = slots * token_bytes(config, dtype) / 1e9
            raise NotEnoughMemory(f"{device} has no room for {blocks} cache blocks ({size:.1f} GB)") from error

    def _paged(self) -> list[Tensor]:
        """All tensors with a dimension for blocks in front: (blocks, heads, block_size, size)."""
        tensors = (tensor for layer in self.tensors for tensor in layer)
        return [tensor.unflatten(1, (self.blocks, self.block_size)).movedim(1, 0) for tensor in tensors]

    def copy(self, source: int, target: int) -> None:
        """Copy one block over another."""
        for tensor in self._paged():
            tensor[target] = tensor[source]

    def dump(self, blocks: Sequence[int]) -> UInt8[Tensor, "blocks bytes"]:
        """The contents of blocks, as bytes on the CPU."""
        chosen = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        rows = [tensor.index_select(0, chosen).contiguous().flatten(1).cpu() for tensor in self._paged()]
        return torch.cat([row.view(torch.uint8) for row in rows], 1) if rows else torch.empty(len(blocks), 0).byte()

    def restore(self, blocks: Sequence[int], data: UInt8[Tensor, "blocks bytes"]) -> None:
        """Fill blocks with data that `dump` returned."""
        chosen, start = torch.tensor(blocks, dtype=torch.int64, device=self.device), 0
        for tensor in self._paged():
            size = tensor[0].numel() * tensor.itemsize
            rows = data[:, start : start + size].contiguous().view(tensor.dtype)
            tensor[chosen] = rows.view(len(blocks), *tensor.shape[1:]).to(self.device)
            start += size


class CachePass:
    """The blocks and states of the sequences of one pass; all of them have as many new tokens.

    Args:
        store: the blocks.
        config: what each layer keeps.
        inputs: the sequences.

    Attributes:
        cache: what transformers reads and fills.
        lengths: tokens of each sequence before its new ones.
    """

    def __init__(self, store: VectorStore, config: TransformersConfig, inputs: Sequence[NewTokens]) -> None:
        self._store, self._config, self._inputs = store, config, inputs
        size, device = store.block_size, store.device
        self.lengths = [each.num_computed_tokens for each in inputs]
        self.new = len(inputs[0].token_ids)
        longest = max(self.lengths) + self.new
        slots = [
            _slots(each.block_table, start + self.new, size).to(device)
            for each, start in zip(inputs, self.lengths, strict=True)
        ]
        self._written = torch.cat([one[-self.new :] for one in slots])
        # padding reads a slot that is written, since masks do not hide what is not a number
        self._read = torch.cat([torch.cat([one[:1].expand(longest - len(one)), one]) for one in slots])
        # one sequence in contiguous blocks is read where it lies
        lies = len(inputs) == 1 and bool((self._read.diff() == 1).all())
        self._range = slice(int(self._read[0]), int(self._read[-1]) + 1) if lies else None
        self.cache = Cache(layers=[self._layer(index, layer) for index, layer in enumerate(config.layers)])

    @property
    def mask(self) -> Bool[Tensor, "batch tokens"] | None:
        """Which tokens are there, cached and new, and which are padding; None where there is none."""
        longest = max(self.lengths)
        if min(self.lengths) == longest or not self._config.cached_layers:
            return None
        padding = torch.tensor([longest - length for length in self.lengths])
        return torch.arange(longest + self.new) >= padding[:, None]

    def _layer(self, index: int, layer: LayerCache) -> Any:
        """The cache of one layer."""
        if not layer.states:
            return PagedLayer(self, index) if layer.vectors else DummyLayer()
        made = HybridLayer(self, index) if layer.vectors else LinearAttentionLayer(1 + max(s[1] for s in layer.states))
        if self.lengths[0]:  # sequences that begin are computed alone
            self._recall(made, index, layer)
        return made

    def _recall(self, made: LinearAttentionLayer, index: int, layer: LayerCache) -> None:
        """Give a layer the states of all sequences."""
        flat = torch.stack([each.states[index] for each in self._inputs]).to(self._store.device)
        parts = flat.split([prod(shape) for _, _, shape, _ in layer.states], 1)
        for (kind, number, shape, dtype), part in zip(layer.states, parts, strict=True):
            state = part.reshape(-1, *shape).to(dtype, copy=True)  # transformers writes into it
            getattr(made, f"{kind}_states")[number] = state
            getattr(made, f"is_{kind}_states_initialized")[number] = True
            if kind == "conv":
                made.conv_kernel_size[number] = shape[-1]
            made.dtype, made.device = state.dtype, state.device
        for number in layer.begun:
            made.has_previous_state[number] = True

    def remember(self) -> None:
        """Store the states after the new tokens with the sequences."""
        for index, layer in enumerate(self._config.layers):
            if layer.states:
                made = self.cache.layers[index]
                parts = [getattr(made, f"{kind}_states")[number] for kind, number, _, _ in layer.states]
                flat = torch.cat([part.flatten(1).float() for part in parts], 1).cpu()
                for each, state in zip(self._inputs, flat.unbind(), strict=True):
                    each.states[index] = state.clone()

    def append(
        self, layer: int, part: int, new: Float[Tensor, "batch heads new size"]
    ) -> Float[Tensor, "batch heads tokens size"]:
        """Write vectors of the new tokens; return those of all tokens, behind padding in shorter sequences."""
        tensor = self._store.tensors[layer][part]
        tensor.index_copy_(1, self._written, new.transpose(0, 1).flatten(1, 2).to(tensor.dtype))
        read = tensor.index_select(1, self._read) if self._range is None else tensor[:, self._range]
        rows: Tensor = read.unflatten(1, (len(self._inputs), -1)).transpose(0, 1)
        return rows.to(new.dtype)


def _slots(table: Sequence[int], tokens: int, size: int) -> Int[Tensor, tokens]:
    """The slots of the first tokens of a sequence."""
    blocks = torch.tensor(table[: -(-tokens // size)], dtype=torch.int64)
    return (blocks[:, None] * size + torch.arange(size)).flatten()[:tokens]


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer, in the blocks of a pass."""

    is_sliding = False

    def __init__(self, view: CachePass, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.view, self.index, self.seen = view, index, max(view.lengths)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the blocks are there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Float[Tensor, "batch heads tokens size"], Float[Tensor, "batch heads tokens value_size"]]:
        """Write the new keys and values; return all."""
        self.seen = max(self.view.lengths) + self.view.new
        return self.view.append(self.index, 0, key_states), self.view.append(self.index, 1, value_states)

    def update_indexer(self, indexer_key_states: Float[Tensor, "batch new size"]) -> Float[Tensor, "batch tokens size"]:
        """Write the new keys of an indexer; return all."""
        return self.view.append(self.index, 2, indexer_key_states[:, None])[:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that are returned, and the place of the first: sliding windows too keep the whole context."""
        return max(self.view.lengths) + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of the longest sequence so far."""
        return self.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class HybridLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[override]  # as the classes of transformers
    """Keys and values beside states."""

    def __init__(self, view: CachePass, index: int) -> None:
        PagedLayer.__init__(self, view, index)
        numbers = [number for _, number, _, _ in view._config.layers[index].states]
        LinearAttentionLayer.__init__(self, 1 + max(numbers))
