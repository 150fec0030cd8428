"""The runner of the native kernels: one call computes a whole pass, all layers of all sequences.

Notable here:
- the decoder is described to the library once; a pass gets token ids, block tables and the buffer of the logits
- the weights are read in place, those of adapters from float32 copies with the lifetime of the adapter
- a token's logits are bit-identical for any batch, any chunks of the prompt, and any cache
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from itertools import groupby
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from pippin.core import memory, native
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument, NotEnoughMemory
from pippin.engine.cache.paged_store import DTYPES as CACHE_DTYPES
from pippin.engine.head_tables import HeadTokens, heads_alike, padded
from pippin.engine.model_runner import KVCacheDtype, KVCacheDtypeChoice, ModelInput
from pippin.engine.runners.native_decoder import NativeAdapter, NativeDecoder
from pippin.engine.runners.native_experts import ExpertFetch, ExpertSource, mixtures
from pippin.engine.runners.native_inputs import Extras, PackedInputs, address, is_plain
from pippin.engine.runners.native_recurrent import RecurrentStates
from pippin.language.language_model import LanguageModel
from pippin.nn.lora import Adapter
from pippin.nn.quantization.packed import NativeWeight

_ALIGNMENT: Final = 64


class NativeRunner:
    """Passes over one packed model with the native kernels; see `pippin.engine.model_runner.Runner`.

    Args:
        model: a model that `pippin.load` returned, for which `supports` is true.
        blocks: blocks in the pool; memory is allocated when they are first written.
        kv_cache_dtype: precision of keys and values; "auto" for float32 with float32 weights, and bfloat16 otherwise.
        groups: layers with their own KV cache, in groups with a block table each, the layers of a group with one
            sliding window; None for one group.

    Raises:
        InvalidArgument: an unknown precision, or a model that the kernels cannot compute.
        NotEnoughMemory: there is no memory for so many blocks.
    """

    invariant: Final = True

    @checked
    def __init__(
        self,
        model: LanguageModel,
        blocks: PositiveInt,
        kv_cache_dtype: KVCacheDtypeChoice = "auto",
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.kv_cache_dtype = _precision(model, kv_cache_dtype)
        self.model, self.blocks = model, blocks
        self._decoder = NativeDecoder(model.module, groups)
        self.windows = [model.config.group_window(layers) for layers in groups or [model.config.cached_layers]]
        self._group_size = len(model.config.cached_layers) if groups is None else max(map(len, groups))
        self._native = self._decoder.native
        self._cache = native.CACHE_TYPES[self.kv_cache_dtype]
        self.block_bytes = self._native.block_bytes(self._decoder.handle, self._cache)
        self._recurs = bool(model.config.recurrent_layers)
        self._layers, self._width, self._vocab = (
            len(model.config.layers),
            model.config.hidden_size,
            model.config.vocab_size,
        )
        self._head_dim = model.config.head_dim
        self._pool: Tensor | None = _zeros(blocks, self.block_bytes)
        self._adapters: weakref.WeakKeyDictionary[Adapter, NativeAdapter] = weakref.WeakKeyDictionary()
        self._experts: ExpertFetch | None = None
        self._mixtures = mixtures(model.config)

    @classmethod
    def supports(cls, model: LanguageModel) -> bool:
        """Whether the native kernels are available and can compute this model."""
        if native.library() is None:
            return False
        try:
            NativeDecoder(model.module)
        except InvalidArgument:
            return False
        return True

    @classmethod
    def block_bytes_of(cls, model: LanguageModel, kv_cache_dtype: KVCacheDtypeChoice = "auto") -> int:
        """Bytes of 16 tokens in all layers, without a pool.

        Raises:
            InvalidArgument: an unknown precision, or a model that the kernels cannot compute.
        """
        described = NativeDecoder(model.module)
        return described.native.block_bytes(described.handle, native.CACHE_TYPES[_precision(model, kv_cache_dtype)])

    def forward(self, inputs: Sequence[ModelInput]) -> list[Float[Tensor, "outputs vocab"]]:
        """One pass over the new tokens of several sequences; float32 logits.

        Raises:
            InvalidArgument: a token id, a table or outputs that are impossible; layers or residuals that do not fit the
                model.
        """
        for model_input in inputs:
            if not is_plain(model_input, len(self.windows)):
                model_input.check(len(self.windows), self._width)
        if all(model_input.depth is None and model_input.resume == 0 for model_input in inputs):
            return self._pass(PackedInputs(inputs), 0, self._layers, None)
        groups: dict[tuple[int, int], list[int]] = {}
        for index, model_input in enumerate(inputs):
            groups.setdefault(
                (model_input.resume, self._layers if model_input.depth is None else model_input.depth), []
            ).append(index)
        parts = []  # all of them are checked before the first is computed
        for (first, stop), members in groups.items():
            chosen = [inputs[index] for index in members]
            parts.append((members, PackedInputs(chosen), first, stop, self._enter(chosen, first, stop)))
        results: dict[int, Tensor] = {}
        for members, packed_inputs, first, stop, residual in parts:
            results.update(zip(members, self._pass(packed_inputs, first, stop, residual), strict=True))
            if residual is not None and stop < self._layers:
                _copy_residuals([inputs[index] for index in members], residual)
        return [results[index] for index in range(len(inputs))]

    def fetch_experts(self, source: ExpertSource) -> None:
        """Let a source bring the experts of mixtures, or look on, from the next pass on."""
        self._experts = ExpertFetch(self._decoder, self.model.config, source)

    def place_expert(self, layer: int, expert: int, place: native.Expert | None) -> None:
        """Tell the kernels where an expert lies; between passes, or in a wave of the source.

        Args:
            layer: number of the mixture among those of the model, from 0.
            expert: its index there.
            place: its matrices, to which its biases are added; None for nowhere.
        """
        if place is not None:
            biases = self._decoder.experts[layer][expert]
            place.gate_bias, place.up_bias, place.down_bias = biases.gate_bias, biases.up_bias, biases.down_bias
        self._native.model_expert(self._decoder.handle, self._mixtures[layer], expert, place)

    def _pass(self, packed_inputs: PackedInputs, first: int, stop: int, residual: Tensor | None) -> list[Tensor]:
        """Layers [first, stop) of the new tokens of some sequences."""
        memory, outputs = self._memory, len(packed_inputs.rows)
        extras = Extras(packed_inputs, self.model, first)
        self._decoder.ensure_positions(extras.furthest)
        logits = torch.empty(outputs, self._vocab)
        batch = native.NativeBatch(
            len(packed_inputs.ids),
            address(packed_inputs.ids),
            len(packed_inputs.counts),
            address(packed_inputs.starts),
            address(packed_inputs.num_computed_tokens),
            address(packed_inputs.tables),
            address(packed_inputs.table_starts),
            outputs,
            address(packed_inputs.rows),
            logits.data_ptr() if outputs else None,
            None,
            first,
            stop,
            None if residual is None else residual.data_ptr(),
        )
        if packed_inputs.shares:
            batch.shares, batch.share = len(packed_inputs.shares), self._share(packed_inputs.shares)
        extras.fill(batch)
        states = RecurrentStates(packed_inputs.inputs, self.model.config) if self._recurs else None
        if states is not None:
            states.fill(batch)
        if self._experts is not None:
            self._experts.begin_pass(len(packed_inputs.ids))
        status = self._native.forward(self._decoder.handle, memory.data_ptr(), self.blocks, self._cache, batch)
        if status < 0:
            if self._experts is not None:
                self._experts.raise_error()
            self._native.check(status)
        extras.give()
        if states is not None:
            states.give()
        return [logits] if len(packed_inputs.counts) == 1 else list(logits.split(packed_inputs.counts))

    def _enter(self, inputs: Sequence[ModelInput], first: int, stop: int) -> Tensor | None:
        """Input of layer ``first``, or a buffer for the output of the last one; None for a pass of all layers."""
        if not 0 <= first < stop <= self._layers:
            raise InvalidArgument(f"layers {first} to {stop} of {self._layers} cannot be computed")
        if first == 0 and stop == self._layers:
            return None
        for model_input in inputs:
            wanted = (len(model_input.token_ids), self._width)
            if first and model_input.residual is None:
                raise InvalidArgument(f"a pass that resumes at layer {first} needs the residual that was left there")
            if model_input.residual is not None and model_input.residual.shape != wanted:
                raise InvalidArgument(
                    f"a residual has shape {tuple(model_input.residual.shape)}, its tokens need {wanted}"
                )
        if first:
            return torch.cat(
                [model_input.residual for model_input in inputs if model_input.residual is not None]
            ).float()
        return torch.empty(sum(len(model_input.token_ids) for model_input in inputs), self._width)

    def _share(self, shares: Sequence[tuple[Adapter, int, int]]) -> ctypes.Array[native.SequenceShare]:
        """Adapters and their ranges of tokens, as the library's structure."""
        listed = (native.SequenceShare * len(shares))()
        for index, (adapter, begin, end) in enumerate(shares):
            changes = self._adapters.get(adapter)
            if changes is None:
                changes = self._adapters[adapter] = NativeAdapter(adapter, self.model.module)
            listed[index] = native.SequenceShare(changes.array, begin, end)
        return listed

    @property
    def _memory(self) -> Tensor:
        if self._pool is None:
            raise InvalidArgument("the runner is closed")
        return self._pool

    def _rows(self, blocks: Sequence[int]) -> Tensor:
        """Block numbers as indices, after a check."""
        if blocks and not (min(blocks) >= 0 and max(blocks) < self.blocks):
            raise InvalidArgument(f"the pool has blocks 0 to {self.blocks - 1}, not {min(blocks)} to {max(blocks)}")
        return torch.tensor(blocks, dtype=torch.int64)

    def copy(self, source: int, target: int) -> None:
        """Copy one block over another.

        Raises:
            InvalidArgument: there is no such block.
        """
        self._rows([source, target])
        self._memory[target] = self._memory[source]

    def read(self, blocks: Sequence[int]) -> UInt8[Tensor, "blocks bytes"]:
        """The contents of blocks.

        Raises:
            InvalidArgument: there is no such block.
        """
        return self._memory.index_select(0, self._rows(blocks))

    def write(self, blocks: Sequence[int], data: UInt8[Tensor, "blocks bytes"]) -> None:
        """Fill blocks with data that `read` returned.

        Raises:
            InvalidArgument: there is no such block, or the data is of another size.
        """
        if data.shape != (len(blocks), self.block_bytes):
            raise InvalidArgument(
                f"{len(blocks)} blocks of {self.block_bytes} bytes cannot hold data of shape {tuple(data.shape)}"
            )
        self._memory.index_copy_(0, self._rows(blocks), data)

    def give_back(self, blocks: Sequence[int]) -> None:
        """See `Runner.give_back`: whole pages of neighboring blocks."""
        begin = self._memory.data_ptr()
        for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
            numbers = [block for _, block in run]
            memory.forget(begin + numbers[0] * self.block_bytes, len(numbers) * self.block_bytes)

    @property
    def heads_in_block(self) -> int:
        """See `Runner.heads_in_block`."""
        config = self.model.config
        return self._group_size * config.num_key_value_heads if heads_alike(config) else 0

    def read_head(self, head_blocks: Sequence[int], tokens: int) -> HeadTokens:
        """See `Runner.read_head`."""
        raw, size = self._head_blocks[list(head_blocks)], CACHE_DTYPES[self.kv_cache_dtype]
        at = 16 * self._head_dim * size.itemsize
        keys = raw[:, :at].contiguous().view(size).view(-1, self._head_dim, 16).transpose(1, 2)
        values = raw[:, at : 2 * at].contiguous().view(size).view(-1, 16, self._head_dim)
        parts = [keys.flatten(0, 1)[:tokens], values.flatten(0, 1)[:tokens]]
        if size == torch.int8:
            scales = raw[:, 2 * at :].contiguous().view(torch.float32).view(-1, 2, 16)
            parts += [scales[:, 0].flatten()[:tokens], scales[:, 1].flatten()[:tokens]]
        return HeadTokens(*parts)

    def write_head(self, head_blocks: Sequence[int], data: HeadTokens) -> None:
        """See `Runner.write_head`."""
        blocks = -(-len(data) // 16)
        keys = padded(data.keys, 16 * blocks).view(blocks, 16, self._head_dim).transpose(1, 2).contiguous()
        values = padded(data.values, 16 * blocks).view(blocks, 16, self._head_dim).contiguous()
        parts = [part.view(torch.uint8).view(blocks, -1) for part in (keys, values)]
        if data.key_scales is not None and data.value_scales is not None:
            pairs = [padded(each, 16 * blocks).view(blocks, 16) for each in (data.key_scales, data.value_scales)]
            parts.append(torch.cat(pairs, 1).view(torch.uint8))
        self._head_blocks[list(head_blocks[:blocks])] = torch.cat(parts, 1)

    @property
    def _head_blocks(self) -> Tensor:
        """The pool as head-blocks, (blocks * heads in a block, bytes of a head)."""
        if not (heads := self.heads_in_block):
            raise InvalidArgument(f"the heads of {self.model.name} cannot lie apart: its layers differ")
        return self._memory.view(self.blocks * heads, -1)

    def close(self) -> None:
        """Free the pool; the runner has no blocks from then on."""
        self._pool, self.blocks = None, 0


@checked
def _precision(model: LanguageModel, kv_cache_dtype: KVCacheDtypeChoice) -> KVCacheDtype:
    """The precision, with "auto" replaced by the one that suits the model."""
    if kv_cache_dtype == "auto":
        packed = getattr(model.module.embed_tokens, "packed", None)
        exact = isinstance(packed, NativeWeight) and packed.format == native.GGML_FORMATS["F32"]
        return "float32" if exact else "bfloat16"
    return kv_cache_dtype


def _copy_residuals(inputs: Sequence[ModelInput], residual: Tensor) -> None:
    """Copy the output of the last layer into the residual of each input that has one."""
    begin = 0
    for model_input in inputs:
        if model_input.residual is not None:
            model_input.residual.copy_(residual[begin : begin + len(model_input.token_ids)])
        begin += len(model_input.token_ids)


def _zeros(blocks: int, block_bytes: int) -> Tensor:
    """A pool whose memory the system allocates when it is first written to."""
    try:
        memory = torch.from_numpy(np.zeros(blocks * block_bytes + _ALIGNMENT, dtype=np.uint8))
    except MemoryError as error:
        raise NotEnoughMemory(f"{blocks} blocks of {block_bytes:,} bytes do not fit into memory: {error}") from error
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + blocks * block_bytes].view(blocks, block_bytes)
