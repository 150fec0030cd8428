r"""The AFM on-device decoder: a small dense model whose last layers read the cache of the last layer that has one.

Notable here:
- the published dimensions give the published number of parameters to the unit, which the tests hold
- it is a configuration of the one decoder (`pippin.language.transformer`): the last ``num_kv_shared_layers`` have no
  key or value projection, and attend with queries of their own to the keys and values of the layer before them
- those layers leave no trace in the cache, so the engine computes them for the last token of a prompt only: the skip
  is exact, and saves their share of the work before the first token

Source: "Apple Intelligence Foundation Language Models: Tech Report 2025", arXiv:2507.13575; dimensions as
in the public toolkit for training adapters.
"""

from __future__ import annotations

from dataclasses import dataclass

from pippin.core.errors import InvalidArgument
from pippin.language.transformer import DecoderConfig, LayerSpec
from pippin.nn.attention import AttentionSpec
from pippin.nn.feedforward import FeedForwardSpec
from pippin.nn.rotary import Rotary


@dataclass(frozen=True)
class AFMConfig:
    r"""Sizes of an AFM decoder; the defaults are those of the published 3-billion-parameter model.

    RMS norms before attention and before the feed-forward layer, RMS norms over each query and key head before the
    rotation, SwiGLU, no biases, and the embedding as output matrix.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the model.
        num_hidden_layers: all layers.
        num_kv_shared_layers: how many of them, at the end, read the keys and values of the last layer before them;
            0 for an ordinary decoder.
        num_attention_heads: query heads.
        num_key_value_heads: heads of keys and values; divides the query heads.
        head_dim: width of a head, even.
        intermediate_size: inner width of the feed-forward layers.
        rope_theta: base of the rotary positions.
        max_position_embeddings: longest sequence, in tokens.
        rms_norm_eps: of all norms.
        qk_norm: whether query and key heads are normed.

    Raises:
        InvalidArgument: shared layers below 0 or no layer left to share, query heads that are no multiple of the
            key-value heads, an odd head width, a size below 1.

    >>> AFMConfig.on_device_3b().parameters
    3111368064
    >>> AFMConfig.on_device_3b().cached_values
    17920
    """

    vocab_size: int = 153_600
    hidden_size: int = 2048
    num_hidden_layers: int = 56
    num_kv_shared_layers: int = 21
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 128
    intermediate_size: int = 6656
    rope_theta: float = 500_000.0
    max_position_embeddings: int = 65_536
    rms_norm_eps: float = 1e-5
    qk_norm: bool = True

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        for name in (*sizes, "head_dim", "intermediate_size", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {getattr(self, name)}")
        layers, shared = self.num_hidden_layers, self.num_kv_shared_layers
        if not 0 <= shared < layers:
            raise InvalidArgument(
                f"num_kv_shared_layers must be from 0 to {layers - 1}, so that one of {layers} layers keeps keys and "
                f"values to be read, got {shared}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidArgument(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise InvalidArgument(f"head_dim must be even to be rotated, got {self.head_dim}")

    @classmethod
    def on_device_3b(cls) -> AFMConfig:
        """The published on-device model: 56 layers, 35 with keys and values of their own; 3,111,368,064 parameters."""
        return cls()

    @classmethod
    def draft(cls) -> AFMConfig:
        """The model that guesses ahead for it: 12 layers of width 256, the same vocabulary; 48,765,952 parameters."""
        return cls(
            hidden_size=256,
            num_hidden_layers=12,
            num_kv_shared_layers=0,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            intermediate_size=768,
        )

    @property
    def own_layers(self) -> int:
        """Layers with keys and values of their own."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    def decoder(self) -> DecoderConfig:
        """The same as a configuration of `pippin.language.Decoder`; saved, its layout is that of Qwen3 or Llama."""
        rotary, feedforward = Rotary(self.rope_theta), FeedForwardSpec(self.intermediate_size)
        own = LayerSpec(AttentionSpec(rotary=rotary), feedforward)
        reuse = LayerSpec(AttentionSpec(rotary=rotary, source=self.own_layers - 1), feedforward)
        return DecoderConfig(
            family="qwen3" if self.qk_norm else "llama",
            vocab_size=self.vocab_size,
            width=self.hidden_size,
            layers=(own,) * self.own_layers + (reuse,) * self.num_kv_shared_layers,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_context=self.max_position_embeddings,
            eps=self.rms_norm_eps,
            qk_norm=self.qk_norm,
            tied=True,
        )

    @property
    def parameters(self) -> int:
        """All weights; the embedding, which is also the output matrix, counts once."""
        d, norms = self.hidden_size, self.head_dim if self.qk_norm else 0
        reuse = 2 * d * self._queries + 3 * d * self.intermediate_size + 2 * d + norms
        own = reuse + 2 * d * self._keys + norms
        layers = self.own_layers * own + self.num_kv_shared_layers * reuse
        return layers + self.vocab_size * d + d

    def adapter_parameters(self, rank: int = 32) -> int:
        """Weights of low-rank pairs on every projection of every layer; reuse layers have no key or value pair.

        Args:
            rank: of each pair, at least 1.

        >>> AFMConfig.on_device_3b().adapter_parameters(rank=32)
        66633728
        """
        d = self.hidden_size
        reuse = 2 * (d + self._queries) + 3 * (d + self.intermediate_size)
        own = reuse + 2 * (d + self._keys)
        return rank * (self.own_layers * own + self.num_kv_shared_layers * reuse)

    @property
    def cached_values(self) -> int:
        """Numbers that the cache holds for one token."""
        return self.own_layers * 2 * self._keys

    @property
    def _queries(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def _keys(self) -> int:
        return self.num_key_value_heads * self.head_dim
