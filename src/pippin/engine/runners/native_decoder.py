"""A decoder and its adapters as the native library reads them: descriptions that point to the weights.

Notable here:
- the weights of the decoder are read in place; those of adapters are float32 copies
- what the kernels cannot compute is refused by name, and torch computes it
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from pippin.core import native
from pippin.core.errors import AdapterMismatch, InvalidArgument
from pippin.engine.runners.native_recurrent import describe, inputs_of
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig
from pippin.language.decoder_layer import DecoderLayer
from pippin.nn.attention.attention import Attention
from pippin.nn.attention.latent_attention import LatentAttention
from pippin.nn.attention.rotary import Rotary
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.feedforward.feedforward import FeedForward, MixtureOfExperts
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRankUpdate
from pippin.nn.norm import RMSNorm
from pippin.nn.quantization.packed import AbsentWeight, NativeWeight
from pippin.nn.recurrent.layer import RecurrentSpec

_FEWEST_POSITIONS: Final = 1024  # positions of the smallest rotary tables


class NativeDecoder:
    """A decoder's description for the library: its handle, and references to everything that the handle points to.

    Attributes:
        experts: the experts of each mixture, as they were described.

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
        self.experts: list[ctypes.Array[native.Expert]] = []
        specs = [
            None if spec.attention.rotary is None else (spec.attention.rotary, module.config.rotary_dim(spec.attention))
            for spec in module.config.layers
        ]
        self._rotaries: list[tuple[Rotary, int]] = list(dict.fromkeys(pair for pair in specs if pair is not None))
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
        if config.tracks is not None:
            made.tracks, made.track_depth = config.tracks.num_tracks, config.tracks.block_depth
            made.track_join = native.TRACK_JOINS[config.tracks.join]
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
            router.softcap or 0.0,
            router.scale,
            router.jitter,
        )
        to.fetched = int(any(isinstance(getattr(part, "packed", None), AbsentWeight) for part in mixture.modules()))
        experts = (native.Expert * spec.num_experts)()
        for index, expert in enumerate(mixture.experts):
            assert isinstance(expert, FeedForward)
            experts[index] = self._feedforward(expert)
        self.experts.append(experts)
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
        "streams of hidden states": config.num_streams > 1 or config.laurel_rank > 0,
        "sparse activations": any(spec.activation_sparsity for spec in inner),
        "such activation": any(spec.activation not in native.ACTIVATIONS for spec in inner),
    }
    return [name for name, there in extras.items() if there]


class NativeAdapter:
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
