"""What a decoder is made of: one config for all families, with a spec for each layer.

Notable here:
- Llama, Qwen, Gemma, SmolLM and decoders with KV-sharing layers or experts are configs of the same code
- layers with their own keys and values are divided into cache groups, one for each sliding window
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pippin.core.checks import NonNegativeFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.attention.attention import AttentionSpec, QKNorm
from pippin.nn.feedforward.feedforward import (
    NO_FEED_FORWARD,
    FeedForwardSpec,
)
from pippin.nn.parallel.tracks import Tracks
from pippin.nn.recurrent.convolution import ShortConvolutionSpec
from pippin.nn.recurrent.gated_delta import GatedDeltaSpec
from pippin.nn.recurrent.layer import RecurrentSpec
from pippin.nn.recurrent.mamba2 import Mamba2Spec
from pippin.nn.recurrent.rg_lru import RGLRUSpec

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
        qk_norm: RMS norms of queries and keys; see `pippin.nn.attention.attention.Attention`.
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
        tracks: the tracks of a decoder whose layers lie side by side; None for one layer after another. ``layers`` then
            has those of all tracks, block by block and in a block track by track, and widths are those of a track.
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
    tracks: Tracks | None = None
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
        if self.tracks is not None:
            self._check_tracks(self.tracks)
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

    def _check_tracks(self, tracks: Tracks) -> None:
        """Raise if the layers are no whole blocks of tracks, or go beyond their track."""
        if len(self.layers) % tracks.block_size:
            raise InvalidArgument(
                f"{len(self.layers)} layers are no whole blocks of {tracks.num_tracks} tracks with "
                f"{tracks.block_depth} layers each"
            )
        if (
            self.num_streams > 1
            or self.per_layer_size
            or any(each.attention.kv_source is not None for each in self.layers)
        ):
            raise InvalidArgument(
                "tracks have neither several streams, nor inputs of layers, nor layers that share keys"
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
