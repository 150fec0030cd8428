r"""The AFM on-device decoder: a dense model whose last layers read the KV cache of the last layer that has one.

Notable here:
- the published dimensions give exactly the published number of parameters, which a test checks
- it is a configuration of the one decoder (`pippin.language.decoder`): the last ``num_kv_shared_layers`` have no
  key or value projection, and attend with their own queries to the keys and values of the layer before them
- those layers write nothing to the cache, so the engine computes them only for the last token of a prompt, which is
  exact and reduces the time to the first token

Source: "Apple Intelligence Foundation Language Models: Tech Report 2025", arXiv:2507.13575; dimensions as
in the public toolkit for training adapters.
"""

from __future__ import annotations

from dataclasses import dataclass

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec


@checked
@dataclass(frozen=True)
class AFMConfig:
    r"""Sizes of an AFM decoder; the defaults are those of the published 3-billion-parameter model.

    RMS norms before attention and before the feed-forward layer, RMS norms over each query and key head before the
    rotation, SwiGLU, no biases, and the embedding as output matrix.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the model.
        num_hidden_layers: number of layers.
        num_kv_shared_layers: number of last layers that read the keys and values of the layer before them; 0 for an
            ordinary decoder.
        num_attention_heads: query heads.
        num_key_value_heads: heads of keys and values; divides the query heads.
        head_dim: width of a head, even.
        intermediate_size: inner width of the feed-forward layers.
        rope_theta: base of the rotary positions.
        max_position_embeddings: longest sequence, in tokens.
        rms_norm_eps: epsilon of all norms.
        qk_norm: whether query and key heads are normalized.

    Raises:
        InvalidArgument: no layer with its own KV cache, query heads that are not a multiple of the key-value heads, an
            odd head width.

    >>> AFMConfig.on_device_3b().num_parameters
    3111368064
    >>> AFMConfig.on_device_3b().cache_size_per_token
    17920
    """

    vocab_size: PositiveInt = 153_600
    hidden_size: PositiveInt = 2048
    num_hidden_layers: PositiveInt = 56
    num_kv_shared_layers: NonNegativeInt = 21
    num_attention_heads: PositiveInt = 16
    num_key_value_heads: PositiveInt = 2
    head_dim: PositiveInt = 128
    intermediate_size: PositiveInt = 6656
    rope_theta: float = 500_000.0
    max_position_embeddings: PositiveInt = 65_536
    rms_norm_eps: float = 1e-5
    qk_norm: bool = True

    def __post_init__(self) -> None:
        layers, shared = self.num_hidden_layers, self.num_kv_shared_layers
        if shared >= layers:
            raise InvalidArgument(
                f"num_kv_shared_layers must be at most {layers - 1}, so that one of {layers} layers keeps keys and "
                f"values to be read, got {shared}"
            )
        self.decoder()  # checks that the sizes are consistent

    @classmethod
    def on_device_3b(cls) -> AFMConfig:
        """The published on-device model: 56 layers, 35 with their own KV cache; 3,111,368,064 parameters."""
        return cls()

    @classmethod
    def draft(cls) -> AFMConfig:
        """Its draft model: 12 layers of width 256, the same vocabulary; 48,765,952 parameters."""
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
    def num_own_kv_layers(self) -> int:
        """Number of layers with their own KV cache."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    def decoder(self) -> DecoderConfig:
        """The config for `pippin.language.Decoder`; it is saved in the layout of Qwen3 or Llama."""
        rotary, feedforward = Rotary(self.rope_theta), FeedForwardSpec(self.intermediate_size)
        own = LayerSpec(AttentionSpec(rotary=rotary), feedforward)
        reuse = LayerSpec(AttentionSpec(rotary=rotary, kv_source=self.num_own_kv_layers - 1), feedforward)
        return DecoderConfig(
            family="qwen3" if self.qk_norm else "llama",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=(own,) * self.num_own_kv_layers + (reuse,) * self.num_kv_shared_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rms_norm_eps=self.rms_norm_eps,
            qk_norm="head" if self.qk_norm else None,
            tie_word_embeddings=True,
        )

    @property
    def num_parameters(self) -> int:
        """Number of parameters; the embedding, which is also the output matrix, counts once."""
        d, norms = self.hidden_size, self.head_dim if self.qk_norm else 0
        reuse = 2 * d * self._queries + 3 * d * self.intermediate_size + 2 * d + norms
        own = reuse + 2 * d * self._keys + norms
        layers = self.num_own_kv_layers * own + self.num_kv_shared_layers * reuse
        return layers + self.vocab_size * d + d

    def num_adapter_parameters(self, rank: int = 32) -> int:
        """Number of parameters of a LoRA adapter on every projection; KV-sharing layers have no key or value pair.

        Args:
            rank: rank of each pair, at least 1.

        >>> AFMConfig.on_device_3b().num_adapter_parameters(rank=32)
        66633728
        """
        d = self.hidden_size
        reuse = 2 * (d + self._queries) + 3 * (d + self.intermediate_size)
        own = reuse + 2 * (d + self._keys)
        return rank * (self.num_own_kv_layers * own + self.num_kv_shared_layers * reuse)

    @property
    def cache_size_per_token(self) -> int:
        """Number of elements in the cache for one token."""
        return self.num_own_kv_layers * 2 * self._keys

    @property
    def _queries(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def _keys(self) -> int:
        return self.num_key_value_heads * self.head_dim
