"""The runner of the native kernels: one call computes a whole pass, all layers of all sequences.

Notable here:
- the decoder is described to the library once; a pass gets token ids, block tables and the buffer of the logits
- the weights are read in place, those of adapters from float32 copies with the lifetime of the adapter
- a token's logits are bit-identical for any batch, any chunks of the prompt, and any cache
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from pippin.core import native
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import AdapterMismatch, InvalidArgument, NotEnoughMemory
from pippin.engine.model_runner import KVCacheDtype, KVCacheDtypeChoice, ModelInput
from pippin.engine.runners.native_inputs import Extras, PackedInputs, address, is_plain
from pippin.language.decoder import Decoder, DecoderConfig, DecoderLayer
from pippin.language.language_model import LanguageModel
from pippin.nn.attention import Attention
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.feedforward import NO_FEED_FORWARD, FeedForward, MixtureOfExperts
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRankUpdate
from pippin.nn.norm import RMSNorm
from pippin.nn.quantization.packed import NativeWeight
from pippin.nn.rotary import Rotary
from pippin.nn.routing import RouterSpec

_ALIGNMENT: Final = 64
_FEWEST_POSITIONS: Final = 1024  # positions of the smallest rotary tables


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
        self._decoder = _NativeDecoder(model.module, groups)
        self.windows = [model.config.group_window(layers) for layers in groups or [model.config.cached_layers]]
        self._native = self._decoder.native
        self._cache = native.CACHE_TYPES[self.kv_cache_dtype]
        self.block_bytes = self._native.block_bytes(self._decoder.handle, self._cache)
        self._layers, self._width, self._vocab = (
            len(model.config.layers),
            model.config.hidden_size,
            model.config.vocab_size,
        )
        self._pool: Tensor | None = _zeros(blocks, self.block_bytes)
        self._adapters: weakref.WeakKeyDictionary[Adapter, _AdapterArrays] = weakref.WeakKeyDictionary()

    @classmethod
    def supports(cls, model: LanguageModel) -> bool:
        """Whether the native kernels are available and can compute this model."""
        if native.library() is None:
            return False
        try:
            _NativeDecoder(model.module)
        except InvalidArgument:
            return False
        return True

    @classmethod
    def block_bytes_of(cls, model: LanguageModel, kv_cache_dtype: KVCacheDtypeChoice = "auto") -> int:
        """Bytes of 16 tokens in all layers, without a pool.

        Raises:
            InvalidArgument: an unknown precision, or a model that the kernels cannot compute.
        """
        described = _NativeDecoder(model.module)
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
        status = self._native.forward(self._decoder.handle, memory.data_ptr(), self.blocks, self._cache, batch)
        if status < 0:
            self._native.check(status)
        extras.give()
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
                changes = self._adapters[adapter] = _AdapterArrays(adapter, self.model.module)
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


class _NativeDecoder:
    """A decoder's description for the library: its handle, and references to everything that the handle points to.

    Raises:
        InvalidArgument: the kernels cannot compute it.
    """

    def __init__(self, module: Decoder, groups: Sequence[Sequence[int]] | None = None) -> None:
        found = native.library()
        if found is None:
            raise InvalidArgument(f"the native kernels are not available: {native.unavailable_reason()}")
        if missing := _not_in_kernels(module.config):
            raise InvalidArgument(f"the native kernels have no {', no '.join(missing)}")
        self.native = found
        self._alive: list[Any] = [module]
        self._head_dim = module.config.head_dim
        specs = [spec.attention.rotary for spec in module.config.layers]
        self._rotaries: list[Rotary] = list(dict.fromkeys(rotary for rotary in specs if rotary is not None))
        layers = (native.Layer * len(module.layers))()
        for index, layer in enumerate(module.layers):
            assert isinstance(layer, DecoderLayer)
            rotary = specs[index]
            self._fill(layers[index], layer)
            layers[index].rope = -1 if rotary is None else self._rotaries.index(rotary)
        for group, members in enumerate(groups or ()):
            for index in members:
                layers[index].group = group
        self.handle = found.model_new(self._config(module), layers)
        # not at exit, when an engine's thread may still use it
        weakref.finalize(self, found.model_free, self.handle).atexit = False
        self._positions = 0
        for index, rotary in enumerate(self._rotaries):
            if rotary.axes is not None:
                axes = np.array(rotary.axes, dtype=np.uint8)
                found.model_rope_axes(self.handle, index, axes.ctypes.data)

    def ensure_positions(self, positions: int) -> None:
        """Extend the rotary tables to at least ``positions`` positions."""
        if positions <= self._positions:
            return
        size = max(_FEWEST_POSITIONS, 1 << (positions - 1).bit_length())
        half = self._head_dim // 2
        for index, rotary in enumerate(self._rotaries):
            with torch.inference_mode():
                cos, sin = rotary.tables(torch.arange(size), self._head_dim)
                cos, sin = cos[:, :half].contiguous(), sin[:, half:].contiguous()
            self.native.model_rope(self.handle, index, cos.data_ptr(), sin.data_ptr(), size)  # it copies them
        self._positions = size

    def _config(self, module: Decoder) -> native.NativeConfig:
        config = module.config
        return native.NativeConfig(
            config.vocab_size,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            len(config.layers),
            config.rms_norm_eps,
            config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            config.embedding_scale,
            len(self._rotaries),
            self._matrix(module.embed_tokens),
            self._matrix(module.lm_head),
            self._norm(module.norm),
        )

    def _fill(self, to: native.Layer, layer: DecoderLayer) -> None:
        """Describe a layer, except for its rotary tables."""
        attention, spec = layer.self_attn, layer.self_attn.spec
        assert isinstance(attention, Attention)
        if attention.qkv_proj is not None:
            raise InvalidArgument(
                "the layers of this decoder were fused for torch, which the native kernels cannot read"
            )
        to.q, to.q_bias = self._linear(attention.q_proj)
        to.output, to.output_bias = self._linear(attention.o_proj)
        if spec.kv_source is None:
            assert attention.v_proj is not None
            to.k, to.k_bias = self._linear(attention.k_proj)
            to.v, to.v_bias = self._linear(attention.v_proj)
        to.source, to.window = -1 if spec.kv_source is None else spec.kv_source, spec.window or 0
        to.q_norm, to.k_norm = self._norm(attention.q_norm), self._norm(attention.k_norm)
        to.attention_norm = self._norm(layer.input_layernorm)
        if layer.pre_feedforward_layernorm is None:
            to.feedforward_norm = self._norm(layer.post_attention_layernorm)
        else:
            to.post_attention_norm = self._norm(layer.post_attention_layernorm)
            to.feedforward_norm = self._norm(layer.pre_feedforward_layernorm)
            to.post_feedforward_norm = self._norm(layer.post_feedforward_layernorm)
        to.activation = native.ACTIVATIONS[layer.mlp.spec.activation]
        if isinstance(layer.mlp, MixtureOfExperts):
            self._mixture(to, layer.mlp)
        else:
            to.gate, to.up, to.down = self._feedforward(layer.mlp)

    def _mixture(self, to: native.Layer, mixture: MixtureOfExperts) -> None:
        spec = mixture.spec
        to.experts, to.active, to.renormalize = spec.num_experts, spec.num_experts_per_tok, int(spec.norm_topk_prob)
        to.router = self._floats(mixture.gate.weight)
        experts = (native.Expert * spec.num_experts)()
        for index, expert in enumerate(mixture.experts):
            assert isinstance(expert, FeedForward)
            experts[index] = native.Expert(*self._feedforward(expert))
        self._alive.append(experts)
        to.expert = experts

    def _feedforward(self, layer: FeedForward) -> tuple[native.NativeMatrix, native.NativeMatrix, native.NativeMatrix]:
        if layer.up_proj is None or any(
            part is not None and part.bias is not None for part in (layer.gate_proj, layer.up_proj, layer.down_proj)
        ):
            raise InvalidArgument("feed-forward layers with biases or fused for torch have no native kernels")
        gate = native.NativeMatrix() if layer.gate_proj is None else self._matrix(layer.gate_proj)
        return gate, self._matrix(layer.up_proj), self._matrix(layer.down_proj)

    def _linear(self, layer: Linear) -> tuple[native.NativeMatrix, int | None]:
        return self._matrix(layer), None if layer.bias is None else self._floats(layer.bias)

    def _matrix(self, layer: Linear | TokenEmbedding) -> native.NativeMatrix:
        packed = getattr(layer, "packed", None)
        if not isinstance(packed, NativeWeight):
            raise InvalidArgument(
                "a weight of this decoder is not packed for the native kernels; load it with pack=True"
            )
        return packed.matrix

    def _norm(self, norm: nn.Module | None) -> int | None:
        assert norm is None or isinstance(norm, RMSNorm)
        return None if norm is None else self._floats(norm.weight)

    def _floats(self, tensor: Tensor | None) -> int:
        """The address of a float32 vector or matrix."""
        if tensor is None or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise InvalidArgument("norms, biases and routers must be float32 and on the CPU for the native kernels")
        values = tensor.detach().contiguous()
        self._alive.append(values)
        return values.data_ptr()


def _not_in_kernels(config: DecoderConfig) -> list[str]:
    """What a decoder has beyond the kernels: they compute RMS norms before, or before and after, each part of a layer,
    attention with norms of heads before the rotation, and gated or plain feed-forward layers and experts."""
    inner = [layer.feedforward for layer in config.layers]
    extras = {
        "recurrent layers": bool(config.recurrent_layers),
        "layers of one part": any(not layer.attends or layer.feedforward == NO_FEED_FORWARD for layer in config.layers),
        "layer norms": config.norm != "rms",
        "norms without weights": not config.norm_weight,
        f"residual connections of the kind {config.residual!r}": config.residual not in ("pre", "pre and post"),
        f"norms of queries and keys of the kind {config.qk_norm!r}": config.qk_norm not in (None, "head"),
        "scaled residual connections": config.residual_scale != 1.0,
        "scaled or bounded logits": config.logit_scale != 1.0 or config.logit_softcap is not None,
        "learned positions": config.learned_positions,
        "gated attention": config.attention_gate,
        "layers with norms of their own": any(layer.residual is not None for layer in config.layers),
        "bounded scores": any(layer.attention.softcap is not None for layer in config.layers),
        "attention sinks": any(layer.attention.sinks for layer in config.layers),
        "latent attention": any(layer.attention.latent is not None for layer in config.layers),
        "queries scaled by position": any(layer.attention.position_scale is not None for layer in config.layers),
        "heads of different layers that differ": any(
            layer.attention.num_key_value_heads or layer.attention.head_dim for layer in config.layers
        ),
        "norms of values, or keys as values": any(
            layer.attention.value_norm or layer.attention.keys_are_values for layer in config.layers
        ),
        "experts beside dense layers": any(layer.experts is not None for layer in config.layers),
        "inputs of each layer": bool(config.per_layer_size),
        "scaled layers": config.layer_scalar,
        "normalized embeddings": config.embedding_norm,
        "bias of the output matrix": config.head_bias,
        "feed-forward layers with biases": any(spec.bias for spec in inner),
        "bounded feed-forward layers": any(spec.limit is not None for spec in inner),
        "routers of this kind": any(spec.num_experts and spec.router != RouterSpec() for spec in inner),
        "shared experts": any(spec.shared_intermediate_size for spec in inner),
        "such activation": any(spec.activation not in native.ACTIVATIONS for spec in inner),
    }
    return [name for name, there in extras.items() if there]


class _AdapterArrays:
    """An adapter's low-rank updates in the library's layout: seven for each layer, in float32."""

    def __init__(self, adapter: Adapter, module: Decoder) -> None:
        self._alive: list[Tensor] = []
        self.array = (native.Change * (7 * len(module.layers)))()
        known = 0
        for index, layer in enumerate(_changeable(module)):
            parts = adapter.changes.get(layer) if layer is not None else None
            if parts:
                assert layer is not None
                self.array[index] = self._change(parts, layer.outputs)
                known += 1
        if known != len(adapter.changes):
            raise AdapterMismatch(f"the adapter {adapter.name!r} changes layers that are not of this model")

    def _change(self, parts: Sequence[LowRankUpdate], outputs: int) -> native.Change:
        """Several low-rank updates as one, with their ranks concatenated."""
        ranks = [len(part.down) for part in parts]
        down = torch.cat([part.down for part in parts]).float().contiguous()
        up = torch.zeros(outputs, sum(ranks))
        for part, end, rank in zip(parts, accumulate(ranks), ranks, strict=True):
            up[part.start : part.start + len(part.up), end - rank : end] = part.up
        self._alive += [down, up]
        return native.Change(down.data_ptr(), up.data_ptr(), *down.shape, outputs)


def _changeable(module: Decoder) -> Iterator[Linear | None]:
    """The layers that an adapter may change, seven for each layer of the decoder; None where there is none."""
    for layer in module.layers:
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(attention, Attention)
        own = attention.spec.kv_source is None
        yield attention.q_proj
        yield attention.k_proj if own else None
        yield attention.v_proj if own else None
        yield attention.o_proj
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj) if isinstance(mlp, FeedForward) else (None, None, None)
