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
from pippin.engine.runners.native_recurrent import RecurrentStates, describe, inputs_of
from pippin.language.decoder import Decoder, DecoderConfig, DecoderLayer
from pippin.language.language_model import LanguageModel
from pippin.nn.attention import Attention
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.feedforward import FeedForward, MixtureOfExperts
from pippin.nn.latent_attention import LatentAttention
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRankUpdate
from pippin.nn.norm import RMSNorm
from pippin.nn.quantization.packed import NativeWeight
from pippin.nn.recurrent.layer import RecurrentSpec
from pippin.nn.rotary import Rotary

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
        self._recurs = bool(model.config.recurrent_layers)
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
        states = RecurrentStates(packed_inputs.inputs, self.model.config) if self._recurs else None
        if states is not None:
            states.fill(batch)
        status = self._native.forward(self._decoder.handle, memory.data_ptr(), self.blocks, self._cache, batch)
        if status < 0:
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
        specs = [
            None if spec.attention.rotary is None else (spec.attention.rotary, module.config.rotary_dim(spec.attention))
            for spec in module.config.layers
        ]
        self._rotaries: list[tuple[Rotary, int]] = list(dict.fromkeys(pair for pair in specs if pair is not None))
        if module.streams is not None or any(spec.feedforward.activation_sparsity for spec in module.config.layers):
            raise InvalidArgument("the native kernels have no streams of hidden states and no sparse activations")
        layers = (native.Layer * len(module.layers))()
        for index, layer in enumerate(module.layers):
            assert isinstance(layer, DecoderLayer)
            pair = specs[index]
            self._fill(layers[index], layer)
            layers[index].rope = -1 if pair is None else self._rotaries.index(pair)
        for group, members in enumerate(groups or ()):
            for index in members:
                layers[index].group = group
        self.handle = found.model_new(self._config(module), layers)
        # not at exit, when an engine's thread may still use it
        weakref.finalize(self, found.model_free, self.handle).atexit = False
        self._positions = 0
        for index, (rotary, _) in enumerate(self._rotaries):
            if rotary.axes is not None:
                axes = np.array(rotary.axes, dtype=np.uint8)
                found.model_rope_axes(self.handle, index, axes.ctypes.data)

    def ensure_positions(self, positions: int) -> None:
        """Extend the rotary tables to at least ``positions`` positions."""
        if positions <= self._positions:
            return
        size = max(_FEWEST_POSITIONS, 1 << (positions - 1).bit_length())
        for index, (rotary, width) in enumerate(self._rotaries):
            half = width // 2
            with torch.inference_mode():
                cos, sin = rotary.tables(torch.arange(size), width)
                cos, sin = cos[:, :half].contiguous(), sin[:, half:].contiguous()
            self.native.model_rope(self.handle, index, cos.data_ptr(), sin.data_ptr(), size)  # it copies them
        self._positions = size

    def _config(self, module: Decoder) -> native.NativeConfig:
        config = module.config
        made = native.NativeConfig(
            config.vocab_size,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            len(config.layers),
            config.rms_norm_eps,
            _score_scale(module),
            config.embedding_scale,
            len(self._rotaries),
            native.NORMS[config.norm],
            config.residual_scale,
            config.logit_scale,
            config.logit_softcap or 0.0,
            self._matrix(module.embed_tokens),
            self._matrix(module.lm_head),
        )
        made.final_norm, made.final_norm_bias = self._norm(module.norm)
        made.head_bias = None if module.lm_head.bias is None else self._floats(module.lm_head.bias)
        if config.embedding_norm:
            made.embedding_norm = self._floats(torch.ones(config.hidden_size))
        if module.embed_positions is not None:
            made.position = self._matrix(module.embed_positions)
        dims = (ctypes.c_int32 * len(self._rotaries))(*(width for _, width in self._rotaries))
        self._alive.append(dims)
        made.rotary_dims = dims
        if module.per_layer is not None:
            made.layer_table = self._matrix(module.per_layer.embed)
            made.layer_projection = self._matrix(module.per_layer.proj)
            made.layer_input_norm = self._norm(module.per_layer.norm)[0]
        return made

    def _fill(self, to: native.Layer, layer: DecoderLayer) -> None:
        """Describe a layer, except for its rotary tables."""
        to.source = -1
        to.scalar = 1.0 if layer.layer_scalar is None else float(layer.layer_scalar)
        if layer.attends and isinstance(layer.self_attn, LatentAttention):
            self._fill_latent(to, layer.self_attn)
        elif layer.attends:
            assert isinstance(layer.self_attn, Attention)
            self._fill_attention(to, layer.self_attn)
        if layer.recurrent is not None:
            recurrent = describe(layer.recurrent, self._linear, self._floats)
            self._alive.append(recurrent)
            to.recurrent = ctypes.pointer(recurrent)
        norms = {
            "pre": ("attention",) * layer.mixes + ("feedforward",) * layer.feeds,
            "post": ("post_attention", "post_feedforward"),
            "pre and post": ("attention", "post_attention", "feedforward", "post_feedforward"),
            "parallel": ("attention",),
            "parallel two norms": ("attention", "feedforward"),
        }[layer.residual]
        there = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.pre_feedforward_layernorm,
            layer.post_feedforward_layernorm,
        )
        for name, norm in zip(norms, (norm for norm in there if norm is not None), strict=True):
            weight, bias = self._norm(norm)
            setattr(to, f"{name}_norm", weight)
            setattr(to, f"{name}_norm_bias", bias)
        to.parallel = int(layer.residual.startswith("parallel"))
        if not layer.feeds:
            return
        if layer.layer_input is not None:
            to.input_gate, to.input_projection = (
                self._matrix(layer.layer_input.gate),
                self._matrix(layer.layer_input.proj),
            )
            to.input_norm = self._norm(layer.layer_input.norm)[0]
        if layer.expert_branch is not None:
            branch = layer.expert_branch
            self._mixture(to, branch.mlp)
            to.experts_norm = self._norm(branch.input_norm)[0]
            to.post_experts_norm = self._norm(branch.output_norm)[0]
            to.post_dense_norm = self._norm(branch.dense_norm)[0]
        spec = layer.mlp.spec
        to.activation, to.limit = native.ACTIVATIONS[spec.activation], spec.limit or 0.0
        if isinstance(layer.mlp, MixtureOfExperts):
            self._mixture(to, layer.mlp)
            return
        if layer.mlp.act_fn is not None:
            to.xielu = layer.mlp.act_fn.coefficients()
        dense = self._feedforward(layer.mlp)
        for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
            setattr(to, name, getattr(dense, name))

    def _fill_attention(self, to: native.Layer, attention: Attention) -> None:
        spec = attention.spec
        if attention.qkv_proj is not None:
            raise InvalidArgument(
                "the layers of this decoder were fused for torch, which the native kernels cannot read"
            )
        to.q, to.q_bias = self._linear(attention.q_proj)
        to.output, to.output_bias = self._linear(attention.o_proj)
        if spec.kv_source is None:
            to.k, to.k_bias = self._linear(attention.k_proj)
            if attention.v_proj is not None:
                to.v, to.v_bias = self._linear(attention.v_proj)
            if spec.value_norm:
                to.v_norm = self._floats(torch.ones(attention.head_dim))
        if attention.gate_proj is not None:
            to.attention_gate, to.attention_gate_bias = self._linear(attention.gate_proj)
        to.source, to.window = -1 if spec.kv_source is None else spec.kv_source, spec.window or 0
        to.kv_heads, to.head_dim = attention.kv_heads, attention.head_dim
        to.qk_norm = native.QK_NORMS[attention.qk_norm]
        for name, norm in (("q_norm", attention.q_norm), ("k_norm", attention.k_norm)):
            setattr(to, name, None if norm is None else self._norm(norm)[0])
        to.softcap = spec.softcap or 0.0
        if attention.sinks is not None:
            to.sinks = self._floats(attention.sinks)
        if spec.position_scale is not None:
            to.position_beta, to.position_length = spec.position_scale.beta, spec.position_scale.length

    def _fill_latent(self, to: native.Layer, attention: LatentAttention) -> None:
        spec, sizes = attention.spec, attention.latent
        latent = native.NativeLatent(sizes.kv_rank, sizes.rotated_dim, sizes.plain_dim, sizes.value_dim)
        latent.eps, latent.kv_norm = attention.kv_a_layernorm.eps, self._floats(attention.kv_a_layernorm.weight)
        if sizes.q_rank is None:
            to.q, to.q_bias = self._linear(attention.q_proj)
        else:
            latent.q_a, latent.q_a_bias = self._linear(attention.q_a_proj)
            latent.q_a_norm = self._floats(attention.q_a_layernorm.weight)
            to.q, to.q_bias = self._linear(attention.q_b_proj)
        to.k, to.k_bias = self._linear(attention.kv_a_proj_with_mqa)
        to.output, to.output_bias = self._linear(attention.o_proj)
        latent.keys = self._heads(attention.k_b_proj.native_by_head(transposed=True))
        latent.values = self._heads(attention.v_b_proj.native_by_head(transposed=False))
        to.window = spec.window or 0
        if spec.position_scale is not None:
            to.position_beta, to.position_length = spec.position_scale.beta, spec.position_scale.length
        self._alive.append(latent)
        to.latent = ctypes.pointer(latent)

    def _heads(self, packed: Sequence[NativeWeight]) -> ctypes.Array[native.NativeMatrix]:
        matrices = (native.NativeMatrix * len(packed))(*(weight.matrix for weight in packed))
        self._alive.append(matrices)
        return matrices

    def _mixture(self, to: native.Layer, mixture: MixtureOfExperts) -> None:
        spec, gate = mixture.spec, mixture.gate
        to.experts, to.active = spec.num_experts, spec.num_experts_per_tok
        router, choice_bias = spec.router, gate.e_score_correction_bias
        width = gate.inputs
        to.router = native.NativeRouter(
            self._floats(gate.weight),
            None if gate.bias is None else self._floats(gate.bias),
            self._floats(gate.scale.float() * width**-0.5) if router.scaled else None,
            self._floats(gate.per_expert_scale) if router.scaled else None,
            None if choice_bias is None else self._floats(choice_bias),
            native.ROUTER_SCORES[router.scores],
            int(spec.norm_topk_prob),
            router.num_groups,
            router.num_chosen_groups,
            int(router.group_score == "top two"),
            0,
            router.scale,
            router.jitter,
        )
        experts = (native.Expert * spec.num_experts)()
        for index, expert in enumerate(mixture.experts):
            assert isinstance(expert, FeedForward)
            experts[index] = self._feedforward(expert)
        self._alive.append(experts)
        to.expert = experts
        if mixture.shared_expert is not None:
            to.shared = self._feedforward(mixture.shared_expert)
            if spec.shared_gate:
                to.shared_gate = self._floats(mixture.shared_expert_gate.dense_weight().float())

    def _feedforward(self, layer: FeedForward) -> native.Expert:
        if layer.up_proj is None:
            raise InvalidArgument("feed-forward layers that are fused for torch have no native kernels")
        made = native.Expert()
        parts = {"gate": layer.gate_proj, "up": layer.up_proj, "down": layer.down_proj}
        for name, part in parts.items():
            if part is not None:
                matrix, bias = self._linear(part)
                setattr(made, name, matrix)
                setattr(made, f"{name}_bias", bias)
        return made

    def _linear(self, layer: Linear) -> tuple[native.NativeMatrix, int | None]:
        return self._matrix(layer), None if layer.bias is None else self._floats(layer.bias)

    def _matrix(self, layer: Linear | TokenEmbedding) -> native.NativeMatrix:
        packed = getattr(layer, "packed", None)
        if not isinstance(packed, NativeWeight):
            raise InvalidArgument(
                "a weight of this decoder is not packed for the native kernels; load it with pack=True"
            )
        return packed.matrix

    def _norm(self, norm: nn.Module) -> tuple[int, int | None]:
        """The addresses of a norm's weight and bias, ones and zeros where it has none; no bias of an RMS norm."""
        if isinstance(norm, RMSNorm):
            return self._floats(norm.weight), None
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        shape = tuple(norm.normalized_shape)
        weight = torch.ones(shape) if norm.weight is None else norm.weight
        if isinstance(norm, nn.RMSNorm):
            return self._floats(weight), None
        return self._floats(weight), self._floats(torch.zeros(shape) if norm.bias is None else norm.bias)

    def _floats(self, tensor: Tensor | None) -> int:
        """The address of a float32 vector or matrix."""
        if tensor is None or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise InvalidArgument("norms, biases and routers must be float32 and on the CPU for the native kernels")
        values = tensor.detach().contiguous()
        self._alive.append(values)
        return values.data_ptr()


def _score_scale(module: Decoder) -> float:
    """The factor of attention scores."""
    for layer in module.layers:
        if isinstance(layer, DecoderLayer) and layer.attends and isinstance(layer.self_attn, LatentAttention):
            return float(layer.self_attn.scale)
    config = module.config
    return config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale


def _not_in_kernels(config: DecoderConfig) -> list[str]:
    """What a decoder has that the kernels do not compute."""
    inner = [layer.feedforward for layer in config.layers]
    extras = {
        "nonlinear recurrences": any(isinstance(layer.recurrent, RecurrentSpec) for layer in config.layers),
        "latent attention of several sizes": len({layer.attention.latent for layer in config.layers if layer.attends})
        > 1
        and any(layer.attention.latent for layer in config.layers),
        "such activation": any(spec.activation not in native.ACTIVATIONS for spec in inner),
    }
    return [name for name, there in extras.items() if there]


class _AdapterArrays:
    """An adapter's low-rank updates in the library's layout, in float32."""

    def __init__(self, adapter: Adapter, module: Decoder) -> None:
        self._alive: list[Tensor] = []
        self.array = (native.Change * (native.CHANGES * len(module.layers)))()
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
    """The layers that an adapter may change, in the library's order; None where there is none."""
    for layer in module.layers:
        assert isinstance(layer, DecoderLayer)
        attention = layer.self_attn if layer.attends else None
        if isinstance(attention, LatentAttention):
            narrow = attention.latent.q_rank is not None
            yield attention.q_b_proj if narrow else attention.q_proj
            yield attention.kv_a_proj_with_mqa
            yield attention.q_a_proj if narrow else None
            yield attention.o_proj
        elif isinstance(attention, Attention):
            own = attention.spec.kv_source is None
            yield attention.q_proj
            yield attention.k_proj if own else None
            yield attention.v_proj if own else None
            yield attention.o_proj
        else:
            yield from (None,) * 4
        mlp = layer.mlp if layer.feeds else None
        if isinstance(mlp, FeedForward):
            yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        else:
            yield from (None,) * 3
        yield attention.gate_proj if isinstance(attention, Attention) else None
        if layer.recurrent is None:
            yield from (None,) * (native.RECURRENT_INPUTS + 1)
        else:
            yield from inputs_of(layer.recurrent)
            yield layer.recurrent.out_proj
        yield None if layer.layer_input is None else layer.layer_input.gate
        yield None if layer.layer_input is None else layer.layer_input.proj
