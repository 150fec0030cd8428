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
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.checks import NonNegativeFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.attention import Attention, AttentionSpec
from pippin.nn.context import LayerContext
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.feedforward import FeedForward, FeedForwardSpec, MixtureOfExperts
from pippin.nn.kv_cache import KVCache, NoCache, QuerySelection, ResumableCache, VisibleKeyValues
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices
from pippin.nn.norm import RMSNorm
from pippin.nn.packed_layers import PackedLinear, PackedTokenEmbedding, pack
from pippin.nn.recurrent.layer import Recurrent, RecurrentSpec

if TYPE_CHECKING:
    from pippin.nn.rotary import Rotary


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: attention, or a recurrence that replaces it, and a feed-forward layer.

    Raises:
        InvalidArgument: a recurrent layer with attention; see `recurring`.
    """

    attention: AttentionSpec
    feedforward: FeedForwardSpec
    recurrent: RecurrentSpec | None = None

    def __post_init__(self) -> None:
        if self.recurrent is not None and self.attention != AttentionSpec(rotary=None):
            raise InvalidArgument(f"a recurrent layer attends to nothing, so it cannot have {self.attention}")

    @classmethod
    def recurring(cls, recurrent: RecurrentSpec, feedforward: FeedForwardSpec) -> LayerSpec:
        """A layer with a recurrence instead of attention."""
        return cls(AttentionSpec(rotary=None), feedforward, recurrent)


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
        num_key_value_heads: key and value heads; divides ``num_attention_heads``.
        head_dim: width of a head, even.
        max_position_embeddings: longest sequence that the model was trained for, in tokens.
        rms_norm_eps: epsilon of the RMS norms.
        qkv_bias: biases on the query, key and value projections.
        qk_norm: RMS norms on query and key heads.
        post_norms: a second norm after attention and after the feed-forward layer (Gemma).
        embedding_scale: multiplier on embeddings.
        attention_scale: multiplier on attention scores; None for ``head_dim ** -0.5``.
        tie_word_embeddings: whether the output matrix is the embedding.
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
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    tie_word_embeddings: bool = True
    training_methods: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise InvalidArgument("a decoder needs at least one layer")
        if self.num_attention_heads % self.num_key_value_heads:
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

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Indices of layers with their own KV cache."""
        return tuple(
            i for i, layer in enumerate(self.layers) if layer.attention.kv_source is None and not layer.recurrent
        )

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
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of layers with a state of constant size instead of keys and values."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.recurrent)

    @property
    def state_bytes(self) -> int:
        """Bytes of all recurrent states of one sequence; they do not depend on its length."""
        return 4 * sum(layer.recurrent.state_size(self.hidden_size) for layer in self.layers if layer.recurrent)


class DecoderLayer(nn.Module):
    """Attention (or a recurrence) and a feed-forward layer, each with a norm and a residual connection."""

    def __init__(self, config: DecoderConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.recurrent: Recurrent | None = None
        if spec.recurrent is not None:
            self.recurrent = Recurrent(spec.recurrent, config.hidden_size, eps=config.rms_norm_eps)
        else:
            self.self_attn = Attention(
                spec.attention,
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                bias=config.qkv_bias,
                qk_norm=config.qk_norm,
                scale=config.attention_scale,
                eps=config.rms_norm_eps,
            )
        mlp = MixtureOfExperts if spec.feedforward.num_experts else FeedForward
        self.mlp = mlp(spec.feedforward, config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_feedforward_layernorm: RMSNorm | None = None
        self.post_feedforward_layernorm: RMSNorm | None = None
        if config.post_norms:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, x: Float[Tensor, "batch new width"], context: LayerContext
    ) -> tuple[Float[Tensor, "batch kept width"], VisibleKeyValues | None]:
        """Return the new hidden states (of the selected tokens), and the keys, values and mask that were read."""
        read: VisibleKeyValues | None = None
        if self.recurrent is not None:
            y = self.recurrent(self.input_layernorm(x), context)
        else:
            y, read = self.self_attn(self.input_layernorm(x), context)
        if context.selection is not None:
            x = x.index_select(1, context.selection.rows)
            if x.shape[1] == 0:
                return x, read
            context = context.after_selection()
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x = x + y
            return x + self.mlp(self.post_attention_layernorm(x), context), read
        x = x + self.post_attention_layernorm(y)
        inner = self.mlp(self.pre_feedforward_layernorm(x), context)
        return x + self.post_feedforward_layernorm(inner), read


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
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.tie_weights()
        self._sources = {spec.attention.kv_source for spec in config.layers}
        self._rotaries = {spec.attention.rotary for spec in config.layers if spec.attention.rotary is not None}
        self._tables: dict[Rotary, tuple[Tensor, Tensor]] = {}

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
        logits: Tensor = self.lm_head(hidden if logits_to_keep is None else hidden[:, -logits_to_keep:])
        return logits

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
        x = self.forward_layers(self.embed(ids), cache, padding=padding, adapters=adapters)
        cache.advance(ids.shape[1])
        hidden: Tensor = self.norm(x)
        return hidden

    def embed(self, ids: Int[Tensor, "batch new"]) -> Float[Tensor, "batch new width"]:
        """Scaled embeddings: the hidden states before the first layer."""
        x: Tensor = self.embed_tokens(ids)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)

    def forward_layers(
        self,
        x: Float[Tensor, "batch new width"],
        cache: KVCache,
        *,
        layers: range | None = None,
        padding: Int[Tensor, batch] | None = None,
        adapters: AdapterSlices | None = None,
        selection: QuerySelection | None = None,
    ) -> Float[Tensor, "batch kept width"]:
        """Run some layers and return the hidden states after the last; the caller calls ``cache.advance``.

        Args:
            x: hidden states before the first of them.
            cache: keys and values; a `ResumableCache` if the first layers are skipped or tokens are selected.
            layers: the layers to compute, in order; None for all.
            padding: as for `forward`.
            adapters: LoRA adapters, each with its range of tokens.
            selection: a layer from whose queries on only some tokens are computed, in a batch of one row. Exact if no
                later layer has its own KV cache or a state.

        Raises:
            AdapterMismatch: an adapter changes layers that are not this decoder's.
        """
        for adapter, _ in adapters or ():
            adapter.check(self)
        cos_sin = self._rotations(cache, x.shape[1], padding, x.dtype, x.device)
        read: dict[int, VisibleKeyValues] = {}
        for index in range(len(self.layers)) if layers is None else layers:
            spec = self.config.layers[index].attention
            here = selection if selection is not None and selection.layer == index else None
            if here is not None:
                assert isinstance(cache, ResumableCache)
                cache.narrow()
                read.clear()
            shared = None if spec.kv_source is None else self._shared(spec.kv_source, read, cache)
            context = LayerContext(cache, index, cos_sin.get(spec.rotary), shared, adapters, here)
            x, visible = self.layers[index](x, context)
            if index in self._sources:
                read[index] = visible
            if here is not None:
                adapters = here.adapters
                cos_sin = {rotary: (cos[here.rows], sin[here.rows]) for rotary, (cos, sin) in cos_sin.items()}
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
    ) -> dict[Rotary | None, tuple[Tensor, Tensor]]:
        """Cosine and sine of the new positions, for each `Rotary` that occurs in the layers."""
        start, positions = cache.length, cache.positions
        if positions is not None and positions.ndim == 1 and len(positions) != new:
            raise InvalidArgument(f"the cache has {len(positions)} positions for {new} tokens")
        if positions is None and padding is not None:
            positions = (torch.arange(start, start + new, device=device) - padding[:, None]).clamp(min=0)
        cos_sin: dict[Rotary | None, tuple[Tensor, Tensor]] = {}
        for rotary in self._rotaries:
            cos, sin = self._table(rotary, start + new, dtype, device)
            if positions is None:
                cos_sin[rotary] = (cos[start : start + new], sin[start : start + new])
            elif positions.ndim == 1:
                cos_sin[rotary] = (cos[positions], sin[positions])
            else:
                cos_sin[rotary] = (cos[positions][:, None], sin[positions][:, None])
        return cos_sin

    def _table(self, rotary: Rotary, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables of at least ``length`` positions; they double in length when they are too short."""
        cos, sin = self._tables.get(rotary, (None, None))
        if cos is None or sin is None or cos.shape[0] < length or cos.dtype != dtype or cos.device != device:
            size = max(512, 1 << (length - 1).bit_length())
            with torch.inference_mode(False):  # the tables are cached and may be used in training later
                tables = rotary.tables(torch.arange(size, device=device), self.config.head_dim)
                cos, sin = (table.to(dtype) for table in tables)
            self._tables[rotary] = (cos, sin)
        return cos, sin

    def rotary_tables(self) -> list[tuple[Tensor, Tensor]]:
        """The cosine and sine tables in use; a longer sequence replaces them by longer ones."""
        return list(self._tables.values())

    def pack_head(self) -> None:
        """Pack the embedding, the last norm and the output matrix."""
        pack(self.norm)
        self._modules["embed_tokens"] = pack(self.embed_tokens)
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

        Recurrent layers have their own scheme (`Recurrent.initialize`).

        Source: GPT-2's scheme, Radford et al. 2019, section 2.3.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
                continue
            deep = name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight"))
            std = 0.02 / math.sqrt(2 * len(self.layers)) if deep else 0.02
            with torch.no_grad():
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
        for part in self.modules():
            if isinstance(part, Recurrent):
                part.initialize(generator)
        return self

    def pack(self) -> Decoder:
        """Pack all weights for inference, in place; the decoder can no longer be trained or saved."""
        pack(self.layers)
        self.pack_head()
        return self.requires_grad_(False).eval()
