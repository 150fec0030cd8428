"""The decoder: one class for all families, configured by a list of layer specs.

Notable here:
- Llama, Qwen, Gemma, SmolLM and decoders with KV-sharing layers or experts are configs of the same code
- parameters have Hugging Face's names, so a checkpoint is memory-mapped without conversion
- `pack()` converts the weights of a loaded decoder to the layout of the fastest kernels
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.checks import NonNegativeFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.alternating_updates import AlternatingUpdates, LowRankResidual, MergingNorm, Streams
from pippin.nn.attention import Attention, AttentionSpec, QKNorm
from pippin.nn.context import LayerContext
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.expert_mask import ExpertMaskSlices
from pippin.nn.feedforward import (
    NO_FEED_FORWARD,
    XIELU,
    ExpertBranch,
    FeedForward,
    FeedForwardSpec,
    MixtureOfExperts,
)
from pippin.nn.kv_cache import KVCache, NoCache, QuerySelection, ResumableCache, VisibleKeyValues
from pippin.nn.latent_attention import LatentAttention
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices
from pippin.nn.norm import RMSNorm
from pippin.nn.packed_layers import PackedLinear, PackedTokenEmbedding, pack
from pippin.nn.per_layer_input import PerLayerEmbedding, PerLayerInput
from pippin.nn.recurrent.convolution import ShortConvolutionSpec
from pippin.nn.recurrent.gated_delta import GatedDeltaSpec
from pippin.nn.recurrent.layer import RecurrentSpec
from pippin.nn.recurrent.mamba2 import Mamba2Spec
from pippin.nn.recurrent.rg_lru import RGLRUSpec
from pippin.nn.recurrent.states import StatefulLayer
from pippin.nn.rotary import long_positions
from pippin.nn.steering import SteeringSlices, steer

if TYPE_CHECKING:
    from pippin.nn.rotary import Rotary


Residual = Literal["pre", "post", "pre and post", "parallel", "parallel two norms"]
"""Norms of a layer: before attention and feed-forward layer ("pre"), after each ("post", OLMo 2), both (Gemma); or both
in parallel, on one normalized input (Cohere) or on two (GPT-NeoX)."""


Recurrence = RecurrentSpec | ShortConvolutionSpec | GatedDeltaSpec | Mamba2Spec | RGLRUSpec
"""The kinds of recurrent layers; by name, so that configs are saved and read."""


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: attention, a recurrence in its place or beside it, and a feed-forward layer.

    Args:
        attention: the attention layer.
        feedforward: the feed-forward layer; `NO_FEED_FORWARD` for none.
        recurrent: the recurrence; None for none. With attention, both read the same input and their outputs are added.
        attends: whether there is attention.
        residual: where the norms of this layer are; None for where the decoder's are.

    Args:
        attention: the attention layer.
        feedforward: the feed-forward layer.
        recurrent: the recurrence; None for none.
        experts: experts beside a dense feed-forward layer, in layers with norms before and after; None for none.

    Raises:
        InvalidArgument: attention in a layer that attends to nothing, or a layer of nothing.
    """

    attention: AttentionSpec
    feedforward: FeedForwardSpec
    recurrent: Recurrence | None = None
    experts: FeedForwardSpec | None = None
    attends: bool = True
    residual: Residual | None = None

    def __post_init__(self) -> None:
        if not self.attends and self.attention != AttentionSpec(rotary=None):
            raise InvalidArgument(f"a layer that attends to nothing cannot have {self.attention}")
        if not self.attends and self.recurrent is None and self.feedforward == NO_FEED_FORWARD:
            raise InvalidArgument("a layer needs attention, a recurrence or a feed-forward layer")

    @classmethod
    def recurring(cls, recurrent: Recurrence, feedforward: FeedForwardSpec) -> LayerSpec:
        """A layer with a recurrence instead of attention."""
        return cls(AttentionSpec(rotary=None), feedforward, recurrent, attends=False)


def logits_of(model: Any, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocab"]:
    """Logits of hidden states after the last norm, scaled and bounded as the config says.

    Args:
        model: a decoder, or another model with ``lm_head`` and ``config``.
        hidden: inputs of the output matrix.
    """
    logits: Tensor = model.lm_head(hidden)
    scale, softcap = logit_scaling(model)
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def logit_scaling(model: Any) -> tuple[float, float | None]:
    """Multiplier and bound of a model's logits; 1 and None where its config has neither."""
    config = getattr(model, "config", None)
    return getattr(config, "logit_scale", 1.0), getattr(config, "logit_softcap", None)


@checked
@dataclass(frozen=True)
class DecoderConfig:
    """The config of a decoder.

    Args:
        family: checkpoint family, which determines the layout of saved files ("llama", "qwen3", "gemma3_text", …).
        vocab_size: rows of the embedding; at least the size of the tokenizer's vocabulary.
        hidden_size: width of the hidden states.
        layers: one spec per layer.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; divides ``num_attention_heads``. One in latent attention.
        head_dim: width of a head, even; in latent attention that of a cached vector.
        max_position_embeddings: longest sequence that the model was trained for, in tokens.
        rms_norm_eps: epsilon of the RMS norms.
        norm: kind of the norms: "rms", or "layer" for layer norms, which also subtract the mean.
        norm_weight: whether norms have a weight. norm_bias: whether layer norms have a bias.
        residual: where a layer's norms are, in the order of `Residual`.
        qkv_bias: biases on the query, key and value projections.
        output_bias: bias on the output projection of attention.
        attention_gate: whether the outputs of attention are multiplied by a sigmoid of the input (Qwen3-Next).
        qk_norm: RMS norms of queries and keys; see `pippin.nn.attention.Attention`.
        embedding_scale: multiplier on embeddings.
        per_layer_size: size of the input that each layer has beside the hidden states; 0 for none (Gemma 3n and 4).
        per_layer_vocab_size: rows of the table of these inputs; 0 for as many as the embedding has.
        num_streams: streams of hidden states, of which a layer computes one; see `pippin.nn.alternating_updates`.
        laurel_rank: rank of the residual path beside attention; 0 for none (Gemma 3n).
        layer_scalar: whether the output of each layer is multiplied by a number of its own.
        embedding_norm: whether embeddings are normalized to unit root mean square.
        attention_scale: multiplier on attention scores; None for ``head_dim ** -0.5``.
        residual_scale: multiplier on what attention and feed-forward layers add to the hidden states (Granite).
        logit_scale: multiplier on logits.
        logit_softcap: bound of the logits, which become ``softcap * tanh(logit / softcap)``; None for no bound.
        learned_positions: whether an embedding of each position is added to that of the token (GPT-2).
        tie_word_embeddings: whether the output matrix is the embedding.
        head_bias: whether the output matrix has a bias.
        multipliers: multipliers of a family's matrices, by their names in its files; the matrices of a decoder contain
            them (Falcon-H1).
        training_methods: metadata about training methods, by the method's name; JSON values, saved with the config.
            They do not change the computation.

    Raises:
        InvalidArgument: sizes that do not fit together.
    """

    family: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    layers: tuple[LayerSpec, ...]
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: NonNegativeFloat = 1e-6
    norm: Literal["rms", "layer"] = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    residual: Residual = "pre"
    qkv_bias: bool = False
    output_bias: bool = False
    attention_gate: bool = False
    qk_norm: QKNorm | None = None
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    per_layer_size: int = 0
    per_layer_vocab_size: int = 0
    num_streams: PositiveInt = 1
    laurel_rank: int = 0
    layer_scalar: bool = False
    attention_scale: float | None = None
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    learned_positions: bool = False
    tie_word_embeddings: bool = True
    head_bias: bool = False
    multipliers: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    training_methods: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise InvalidArgument("a decoder needs at least one layer")
        own = all(layer.attention.num_key_value_heads for layer in self.layers)
        if self.num_attention_heads % self.num_key_value_heads and not own:
            raise InvalidArgument(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise InvalidArgument(f"head_dim must be even to be rotated, got {self.head_dim}")
        for index, layer in enumerate(self.layers):
            source = layer.attention.kv_source
            if source is not None and not (0 <= source < index and source in self.cached_layers):
                raise InvalidArgument(
                    f"layer {index} reads layer {source}, which is not an earlier layer with its own keys"
                )
            self._check_heads(index, layer.attention)
            latent = layer.attention.latent
            if latent is not None and (self.num_key_value_heads, self.head_dim) != (
                1,
                latent.kv_rank + latent.rotated_dim,
            ):
                raise InvalidArgument(
                    f"latent attention of {latent.kv_rank} + {latent.rotated_dim} dimensions needs one key head of "
                    f"that size, got {self.num_key_value_heads} of {self.head_dim}"
                )

    def _check_heads(self, index: int, spec: AttentionSpec) -> None:
        """Raise if the heads of a layer do not fit the query heads or the cache."""
        heads, size = spec.num_key_value_heads or self.num_key_value_heads, spec.head_dim or self.head_dim
        fits = size % self.head_dim == 0 and heads * size <= self.num_key_value_heads * self.head_dim
        if self.num_attention_heads % heads or not fits:
            raise InvalidArgument(
                f"layer {index} has {heads} key heads of {size} dimensions, which do not fit "
                f"{self.num_attention_heads} query heads and {self.num_key_value_heads} cached heads of {self.head_dim}"
            )

    def rotary_dim(self, spec: AttentionSpec) -> int:
        """Width of the vectors that a layer rotates: a head, or its rotated part in latent attention."""
        return spec.latent.rotated_dim if spec.latent is not None else spec.head_dim or self.head_dim

    @property
    def original_max_position_embeddings(self) -> int | None:
        """Length beyond which a sequence is rotated by other tables (LongRoPE); None for the same at every length."""
        rotaries = [layer.attention.rotary for layer in self.layers]
        starts = [each.original_max_position_embeddings for each in rotaries if each and each.long_divisors is not None]
        return min(starts, default=None)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Indices of layers with their own KV cache."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.attention.kv_source is None and layer.attends)

    @property
    def cache_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers with their own KV cache, in groups that share a block table.

        All layers of a group have the same sliding window, and no group has more layers than the smallest kind, so that
        a block of any group takes about the same memory and one pool serves all. A window that is no shorter than the
        context is none.

        >>> from dataclasses import replace
        >>> local, whole = (LayerSpec(AttentionSpec(window=w), FeedForwardSpec(32)) for w in (32, None))
        >>> config = DecoderConfig("llama", 100, 16, (local, local, whole, local, local, whole), num_attention_heads=2,
        ...     num_key_value_heads=1, head_dim=8, max_position_embeddings=64)
        >>> config.cache_groups, replace(config, max_position_embeddings=32).cache_groups
        (((2, 5), (0, 1), (3, 4)), ((0, 1, 2, 3, 4, 5),))
        """
        kinds: dict[int, list[int]] = {}
        for layer in self.cached_layers:
            kinds.setdefault(self.window_of(layer) or 0, []).append(layer)
        if len(kinds) < 2:
            return (self.cached_layers,)
        size = min(len(layers) for layers in kinds.values())
        return tuple(
            tuple(layers[at : at + size]) for _, layers in sorted(kinds.items()) for at in range(0, len(layers), size)
        )

    def group_window(self, layers: Sequence[int]) -> int | None:
        """The sliding window of a group of layers; None if they differ, or see the whole context."""
        windows = {self.window_of(layer) for layer in layers}
        return windows.pop() if len(windows) == 1 else None

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer; None if it sees the whole context."""
        window = self.layers[layer].attention.window
        return None if window is None or window >= self.max_position_embeddings else window

    def with_kv_sources(self, sources: Sequence[int | None]) -> DecoderConfig:
        """The config with other KV sources: for each layer the layer whose keys and values it reads (None: its own).

        Raises:
            InvalidArgument: a source that is not an earlier layer with its own KV cache.
        """
        layers = tuple(
            replace(layer, attention=replace(layer.attention, kv_source=source))
            for layer, source in zip(self.layers, sources, strict=True)
        )
        return replace(self, layers=layers)

    @property
    def residual_width(self) -> int:
        """Numbers of one token between two layers: its hidden states in all streams."""
        return self.num_streams * self.hidden_size

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of layers with a state of constant size."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.recurrent)

    @property
    def state_bytes(self) -> int:
        """Bytes of all recurrent states of one sequence; they do not depend on its length."""
        return 4 * sum(layer.recurrent.state_size(self.hidden_size) for layer in self.layers if layer.recurrent)


class DecoderLayer(nn.Module):
    """Attention or a recurrence (or both) and a feed-forward layer, each with a norm and a residual connection.

    A layer of one of these parts has no others, and no norms for them.
    """

    def __init__(self, config: DecoderConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.recurrent: StatefulLayer | None = None
        if spec.recurrent is not None:
            self.recurrent = spec.recurrent.build(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn: Attention | LatentAttention
        if spec.attends and spec.attention.latent is not None:
            self.self_attn = LatentAttention(
                spec.attention,
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                output_bias=config.output_bias,
            )
        elif spec.attends:
            self.self_attn = Attention(
                spec.attention,
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                bias=config.qkv_bias,
                output_bias=config.output_bias,
                gate=config.attention_gate,
                qk_norm=config.qk_norm,
                scale=config.attention_scale,
                eps=config.rms_norm_eps,
                norm_weight=config.norm_weight,
            )
        self.attends, self.feeds = spec.attends, spec.feedforward != NO_FEED_FORWARD
        self.mixes = spec.attends or spec.recurrent is not None
        if self.feeds:
            mlp = MixtureOfExperts if spec.feedforward.num_experts else FeedForward
            self.mlp = mlp(spec.feedforward, config.hidden_size)
        self.residual, self.residual_scale = spec.residual or config.residual, config.residual_scale
        names = _norms_of(self.residual, self.mixes, self.feeds)
        self.input_layernorm = make_norm(config) if "input" in names else None
        # before the feed-forward layer where the layer has norms before, after attention where it has norms after
        self.post_attention_layernorm = make_norm(config) if "post_attention" in names else None
        self.pre_feedforward_layernorm = make_norm(config) if "pre_feedforward" in names else None
        self.post_feedforward_layernorm = make_norm(config) if "post_feedforward" in names else None
        self.expert_branch: ExpertBranch | None = None
        if spec.experts is not None:
            self.expert_branch = ExpertBranch(spec.experts, config.hidden_size, eps=config.rms_norm_eps)
        self.layer_input: PerLayerInput | None = None
        if config.per_layer_size:
            self.layer_input = PerLayerInput(
                config.per_layer_size, config.hidden_size, spec.feedforward.activation, eps=config.rms_norm_eps
            )
        self.updates: AlternatingUpdates | None = None
        if config.num_streams > 1:
            self.updates = AlternatingUpdates(config.num_streams, config.hidden_size, eps=config.rms_norm_eps)
        self.laurel: LowRankResidual | None = None
        if config.laurel_rank:
            self.laurel = LowRankResidual(config.hidden_size, config.laurel_rank, eps=config.rms_norm_eps)
        self.layer_scalar: Tensor | None
        self.register_buffer("layer_scalar", torch.ones(1) if config.layer_scalar else None)

    def forward(
        self, x: Float[Tensor, "batch new *streams width"], context: LayerContext
    ) -> tuple[Float[Tensor, "batch kept *streams width"], VisibleKeyValues | None]:
        """Return the new hidden states (of the selected tokens), and the keys, values and mask that were read."""
        if not self.mixes:
            return self._select(x, context)
        predicted = None
        if self.updates is not None:
            predicted = self.updates.predict(x)
            x = predicted[..., 0, :]
        read: VisibleKeyValues | None = None
        normalized = self._norm("input_layernorm", x, context)
        outputs = []
        if self.attends:
            y, read = self.self_attn(normalized, context)
            outputs.append(y)
        if self.recurrent is not None:
            outputs.append(self.recurrent(normalized, context))
        y = outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]
        if context.selection is not None:
            rows = context.selection.rows
            x, normalized = x.index_select(1, rows), normalized.index_select(1, rows)
            predicted = None if predicted is None else predicted.index_select(1, rows)
            if x.shape[1] == 0:
                return x if predicted is None else predicted, read
            context = context.after_selection()
        x = self._add(x, normalized, y, context)
        if predicted is not None:
            x = self._correct(predicted, x, context)
        elif self.layer_input is not None:
            assert context.per_layer is not None, f"layer {context.layer} needs an input of its own"
            x = x + self.layer_input(x, context.per_layer, context.adapters)
        x = x if self.layer_scalar is None else x * self.layer_scalar.to(x.dtype)
        return steer(x, f"layers.{context.layer}", context.steerings), read

    def _correct(self, predicted: Tensor, x: Tensor, context: LayerContext) -> Tensor:
        """All streams after the first was computed; the layer's input goes to the others."""
        assert self.updates is not None
        streams = self.updates.correct(predicted, x)
        if self.layer_input is None:
            return streams
        assert context.per_layer is not None, f"layer {context.layer} needs an input of its own"
        first = streams[..., 0, :]
        added = self.layer_input(first * self.updates.output_scale, context.per_layer, context.adapters)
        return torch.cat([first[..., None, :], streams[..., 1:, :] + added[..., None, :]], -2)

    def _norm(self, name: str, x: Tensor, context: LayerContext) -> Tensor:
        """The output of a norm, steered; the input where the layer has no such norm."""
        norm = getattr(self, name)
        if norm is None:
            return x
        y: Tensor = norm(x)
        return steer(y, f"layers.{context.layer}.{name}", context.steerings) if context.steerings else y

    def _select(self, x: Tensor, context: LayerContext) -> tuple[Tensor, None]:
        """A layer of nothing but a feed-forward layer, for the selected tokens."""
        if context.selection is not None:
            x, context = x.index_select(1, context.selection.rows), context.after_selection()
        y: Tensor = self.mlp(self._norm("post_attention_layernorm", x, context), context)
        return steer(x + self.residual_scale * y, f"layers.{context.layer}", context.steerings), None

    def _add(self, x: Tensor, normalized: Tensor, y: Tensor, context: LayerContext) -> Tensor:
        """The hidden states plus the output ``y`` of attention and that of the feed-forward layer."""
        scale = self.residual_scale
        if not self.feeds:
            return x + y if scale == 1.0 else x + scale * y
        if self.residual == "parallel":
            y = y + self.mlp(normalized, context)
            return x + scale * y
        if self.residual == "parallel two norms":
            y = y + self.mlp(self._norm("post_attention_layernorm", x, context), context)
            return x + scale * y
        if self.residual == "pre":
            x = x + y if scale == 1.0 else x + scale * y
            inner: Tensor = self.mlp(self._norm("post_attention_layernorm", x, context), context)
            return x + inner if scale == 1.0 else x + scale * inner
        x = x + self._norm("post_attention_layernorm", y, context)
        if self.laurel is not None:
            x = (x + self.laurel(normalized, context.adapters)) * 0.5**0.5
        inner = self.mlp(self._norm("pre_feedforward_layernorm", x, context), context)
        if self.expert_branch is not None:
            inner = self.expert_branch(x, inner, context)
        return x + self._norm("post_feedforward_layernorm", inner, context)


_NORMS: Final[dict[Residual, tuple[str, ...]]] = {
    "pre": ("input", "post_attention"),
    "post": ("post_attention", "post_feedforward"),
    "pre and post": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    "parallel": ("input",),
    "parallel two norms": ("input", "post_attention"),
}


def _norms_of(residual: Residual, mixes: bool, feeds: bool) -> tuple[str, ...]:
    """The norms of a layer.

    Raises:
        InvalidArgument: a layer of one part whose norm is not before it.
    """
    if mixes and feeds:
        return _NORMS[residual]
    if residual != "pre":
        raise InvalidArgument(f"a layer of one part has its norm before it, not residual connections {residual!r}")
    return ("input",) if mixes else ("post_attention",)


def make_norm(config: DecoderConfig) -> nn.Module:
    """A norm of the hidden states."""
    width, eps = config.hidden_size, config.rms_norm_eps
    if config.norm == "layer":
        return nn.LayerNorm(width, eps, elementwise_affine=config.norm_weight, bias=config.norm_bias)
    return RMSNorm(width, eps=eps) if config.norm_weight else nn.RMSNorm(width, eps, elementwise_affine=False)


class Decoder(nn.Module):
    """A causal language model: token ids in, logits out.

    Parameters are uninitialized memory until a checkpoint is loaded or `initialize` is called.

    >>> from pippin.nn.rotary import Rotary
    >>> layer = LayerSpec(AttentionSpec(rotary=Rotary()), FeedForwardSpec(intermediate_size=32))
    >>> config = DecoderConfig("llama", 100, 16, (layer, layer), num_attention_heads=2, num_key_value_heads=1,
    ...     head_dim=8, max_position_embeddings=64)
    >>> Decoder(config).initialize(seed=0)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 100])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, spec) for spec in config.layers)
        self.embed_positions: TokenEmbedding | None = None
        if config.learned_positions:
            self.embed_positions = TokenEmbedding(config.max_position_embeddings, config.hidden_size)
        self.per_layer: PerLayerEmbedding | None = None
        if config.per_layer_size:
            self.per_layer = PerLayerEmbedding(
                config.per_layer_vocab_size or config.vocab_size,
                len(config.layers),
                config.per_layer_size,
                config.hidden_size,
                eps=config.rms_norm_eps,
            )
        self.streams: Streams | None = None
        self.norm = make_norm(config)
        if config.num_streams > 1:
            self.streams = Streams(config.num_streams, config.hidden_size)
            self.norm = MergingNorm(config.num_streams, config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.tie_weights()
        self._sources = {spec.attention.kv_source for spec in config.layers}
        self._rotaries = {
            (spec.attention.rotary, config.rotary_dim(spec.attention))
            for spec in config.layers
            if spec.attention.rotary
        }
        self._long_start = config.original_max_position_embeddings
        self._tables: dict[tuple[Rotary, int], tuple[Tensor, Tensor]] = {}
        self._scaled_by_position = any(spec.attention.position_scale is not None for spec in config.layers)

    def forward(
        self,
        ids: Int[Tensor, "batch new"],
        *,
        cache: KVCache | None = None,
        padding: Int[Tensor, batch] | None = None,
        logits_to_keep: int | None = None,
        adapters: AdapterSlices | None = None,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Logits of the next token after each of the given ones.

        Args:
            ids: token ids.
            cache: keys and values of earlier tokens; the new ones are added. None for a pass over whole sequences.
            padding: number of pad tokens at the left of each row, over the whole sequence. Logits of pads are
                undefined.
            logits_to_keep: number of last tokens whose logits are computed; None for all.
            adapters: LoRA adapters, each with its range of tokens in the flattened batch.

        Raises:
            InvalidArgument: no tokens, or positions that do not fit the cache.
        """
        hidden = self.hidden(ids, cache=cache, padding=padding, adapters=adapters)
        return self.logits(hidden if logits_to_keep is None else hidden[:, -logits_to_keep:])

    def logits(self, hidden: Float[Tensor, "batch new width"]) -> Float[Tensor, "batch new vocab"]:
        """Logits of hidden states after the last norm."""
        return logits_of(self, hidden)

    def hidden(
        self,
        ids: Int[Tensor, "batch new"],
        *,
        cache: KVCache | None = None,
        padding: Int[Tensor, batch] | None = None,
        adapters: AdapterSlices | None = None,
    ) -> Float[Tensor, "batch new width"]:
        """Hidden states after the last norm, the input of the output matrix; arguments as for `forward`."""
        if ids.shape[1] == 0:
            raise InvalidArgument("the decoder was given no tokens")
        cache = NoCache(padding) if cache is None else cache
        x = self.embed(ids, self._positions(cache, ids.shape[1], padding, ids.device))
        x = self.forward_layers(x, cache, padding=padding, adapters=adapters, per_layer=self.per_layer_inputs(ids, x))
        cache.advance(ids.shape[1])
        hidden: Tensor = self.norm(x)
        return hidden

    def embed(
        self, ids: Int[Tensor, "batch new"], positions: Int[Tensor, "*batch new"] | None = None
    ) -> Float[Tensor, "batch new width"]:
        """Scaled embeddings: the hidden states before the first layer.

        Args:
            ids: token ids.
            positions: position of each token, used by models with learned positions; None for 0, 1, 2, ...
        """
        x: Tensor = self.embed_tokens(ids)
        if self.config.embedding_norm:
            x = F.rms_norm(x, x.shape[-1:], eps=self.config.rms_norm_eps)
        scale = self.config.embedding_scale
        x = x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)
        if self.embed_positions is None:
            return x
        numbers = torch.arange(ids.shape[1], device=x.device) if positions is None else positions
        learned: Tensor = self.embed_positions(numbers)
        return x + learned

    def per_layer_inputs(
        self, ids: Int[Tensor, "batch new"], x: Float[Tensor, "batch new width"]
    ) -> Float[Tensor, "layers batch new per_layer_size"] | None:
        """The inputs that layers have beside the hidden states; None in decoders without.

        Args:
            ids: token ids.
            x: the hidden states before the first layer.
        """
        return None if self.per_layer is None else self.per_layer(ids, x)

    def _positions(self, cache: KVCache, new: int, padding: Tensor | None, device: torch.device) -> Tensor:
        """Position of each new token, (new,) or (batch, new)."""
        if cache.positions is not None:
            if len(cache.positions) != new and cache.positions.ndim == 1:
                raise InvalidArgument(f"the cache has {len(cache.positions)} positions for {new} tokens")
            return cache.positions
        positions = torch.arange(cache.length, cache.length + new, device=device)
        return positions if padding is None else (positions - padding[:, None]).clamp(min=0)

    def forward_layers(
        self,
        x: Float[Tensor, "batch new *given width"],
        cache: KVCache,
        *,
        layers: range | None = None,
        padding: Int[Tensor, batch] | None = None,
        adapters: AdapterSlices | None = None,
        selection: QuerySelection | None = None,
        per_layer: Float[Tensor, "layers batch new per_layer_size"] | None = None,
        steerings: SteeringSlices | None = None,
        experts: ExpertMaskSlices | None = None,
    ) -> Float[Tensor, "batch kept *streams width"]:
        """Run some layers and return the hidden states after the last; the caller calls ``cache.advance``.

        Args:
            x: hidden states before the first of them: embeddings, or (batch, new, streams, width) in a decoder with
                several streams.
            cache: keys and values; a `ResumableCache` if the first layers are skipped or tokens are selected.
            layers: the layers to compute, in order; None for all.
            padding: as for `forward`.
            adapters: LoRA adapters, each with its range of tokens.
            selection: a layer from whose queries on only some tokens are computed, in a batch of one row. Exact if no
                later layer has its own KV cache or a state.
            per_layer: the result of `per_layer_inputs`.
            steerings: changes of hidden states, each with its range of tokens; that of the last norm is the caller's.
            experts: masks of experts, each with its range of tokens.

        Raises:
            AdapterMismatch: an adapter changes layers that are not this decoder's.
        """
        for adapter, _ in adapters or ():
            adapter.check(self)
        if self.streams is not None and x.ndim == 3:
            x = self.streams(x)
        cos_sin = self._rotations(cache, x.shape[1], padding, x.dtype, x.device)
        positions = None
        if self._scaled_by_position:
            positions = self._positions(cache, x.shape[1], padding, x.device)
            positions = positions[0] if positions.ndim == 3 else positions
        read: dict[int, VisibleKeyValues] = {}
        for index in range(len(self.layers)) if layers is None else layers:
            spec = self.config.layers[index].attention
            here = selection if selection is not None and selection.layer == index else None
            if here is not None:
                assert isinstance(cache, ResumableCache)
                cache.narrow()
                read.clear()
            shared = None if spec.kv_source is None else self._shared(spec.kv_source, read, cache)
            if here is not None and per_layer is not None:
                per_layer = per_layer.index_select(2, here.rows)
            turned = None if spec.rotary is None else cos_sin[spec.rotary, self.config.rotary_dim(spec)]
            own = None if per_layer is None else per_layer[index]
            context = LayerContext(
                cache, index, turned, shared, adapters, here, positions, own, steerings=steerings, experts=experts
            )
            x, visible = self.layers[index](x, context)
            if index in self._sources:
                read[index] = visible
            if here is not None:
                adapters, steerings, experts = here.adapters, here.steerings, here.experts
                cos_sin = {
                    rotary: (cos.index_select(-2, here.rows), sin.index_select(-2, here.rows))
                    for rotary, (cos, sin) in cos_sin.items()
                }
                positions = None if positions is None else positions.index_select(-1, here.rows)
            if x.shape[1] == 0:
                break
        return x

    def _shared(self, source: int, read: dict[int, VisibleKeyValues], cache: KVCache) -> VisibleKeyValues:
        """Keys and values of a KV-sharing layer; from the cache, if its source is not part of this pass."""
        if source not in read:
            assert isinstance(cache, ResumableCache), f"layer {source} was not computed"
            read[source] = cache.view(source, self.config.layers[source].attention.window)
        return read[source]

    def _rotations(
        self, cache: KVCache, new: int, padding: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> dict[tuple[Rotary, int], tuple[Tensor, Tensor]]:
        """Cosine and sine of the new positions, for each `Rotary` in the layers and each width of heads."""
        start, positions = cache.length, cache.positions
        if positions is not None and positions.ndim == 1 and len(positions) != new:
            raise InvalidArgument(f"the cache has {len(positions)} positions for {new} tokens")
        if positions is None and padding is not None:
            positions = (torch.arange(start, start + new, device=device) - padding[:, None]).clamp(min=0)
        if self._long_start is not None and not isinstance(cache, ResumableCache):  # whose engine decides
            if positions is None:
                positions = torch.arange(start, start + new, device=device)
            positions = long_positions(positions, self._long_start)
        furthest = start + new + (self._long_start or 0)
        cos_sin: dict[tuple[Rotary, int], tuple[Tensor, Tensor]] = {}
        for rotary, width in self._rotaries:
            tables = self._table(rotary, width, furthest, dtype, device)
            if positions is None:
                cos_sin[rotary, width] = (tables[0][start : start + new], tables[1][start : start + new])
            else:
                cos, sin = (rotary.at(table, positions) for table in tables)
                cos_sin[rotary, width] = (cos, sin) if cos.ndim == 2 else (cos[:, None], sin[:, None])
        return cos_sin

    def _table(
        self, rotary: Rotary, width: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables of at least ``length`` positions; they double in length when they are too short."""
        cos, sin = self._tables.get((rotary, width), (None, None))
        if cos is None or sin is None or cos.shape[0] < length or cos.dtype != dtype or cos.device != device:
            size = max(512, 1 << (length - 1).bit_length())
            with torch.inference_mode(False):  # the tables are cached and may be used in training later
                tables = rotary.tables(torch.arange(size, device=device), width)
                cos, sin = (table.to(dtype) for table in tables)
            self._tables[rotary, width] = (cos, sin)
        return cos, sin

    def ensure_tables(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compute the cosine and sine tables of at least ``length`` positions."""
        for rotary, width in self._rotaries:
            self._table(rotary, width, length, dtype, device)

    def rotary_tables(self) -> list[tuple[Tensor, Tensor]]:
        """The cosine and sine tables in use; a longer sequence replaces them by longer ones."""
        return list(self._tables.values())

    def pack_head(self) -> None:
        """Pack the embeddings, of positions too, the last norm and the output matrix."""
        pack(self.norm)
        if self.streams is not None:
            pack(self.streams)
        if self.per_layer is not None:
            pack(self.per_layer)
        self._modules["embed_tokens"] = pack(self.embed_tokens)
        if self.embed_positions is not None:
            self._modules["embed_positions"] = pack(self.embed_positions)
        self.tie_weights()
        self._modules["lm_head"] = pack(self.lm_head)

    def tie_weights(self) -> None:
        """Tie the output matrix to the embedding, if `DecoderConfig.tie_word_embeddings` is set."""
        if not self.config.tie_word_embeddings or isinstance(self.lm_head, PackedLinear):
            return
        table = self.embed_tokens
        if isinstance(table, PackedTokenEmbedding):
            self.lm_head = PackedLinear(table.packed, table.width, table.rows)
        else:
            self.lm_head.weight = table.weight

    def initialize(self, *, seed: int) -> Decoder:
        """Random weights: normal with standard deviation 0.02, output projections scaled down by depth; norms at one.

        Recurrent layers have schemes of their own (`StatefulLayer.initialize`).

        Source: GPT-2's scheme, Radford et al. 2019, section 2.3.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                nn.init.constant_(parameter, 0.0 if name.endswith(("bias", "sinks")) else 1.0)
                continue
            deep = name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight"))
            std = 0.02 / math.sqrt(2 * len(self.layers)) if deep else 0.02
            with torch.no_grad():
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
        for part in self.modules():
            if isinstance(part, StatefulLayer):
                part.initialize(generator)
            elif isinstance(part, XIELU):
                part.reset_parameters()
        return self

    def pack(self) -> Decoder:
        """Pack all weights for inference, in place; the decoder can no longer be trained or saved."""
        pack(self.layers)
        self.pack_head()
        return self.requires_grad_(False).eval()
