"""The decoder: one file, one class, and a list of layer specs that says which family it is.

Notable here:
- Llama, Qwen, Gemma, SmolLM and decoders with shared caches or experts are configurations of the same code
- parameters carry Hugging Face's names, so a checkpoint is mapped into memory rather than converted
- `pack()` turns a loaded decoder into one that is quick to decode with: weights in the layout of the fastest kernels
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.nn.attention import Attention, AttentionSpec
from pippin.nn.cache import Cut, KVCache, NoCache, Resumable, Seen
from pippin.nn.embedding import Embedding
from pippin.nn.feedforward import FeedForward, FeedForwardSpec, MixtureOfExperts
from pippin.nn.linear import Linear
from pippin.nn.lora import Shares
from pippin.nn.norm import RMSNorm
from pippin.nn.recurrent import Recurrent, RecurrentSpec

if TYPE_CHECKING:
    from pippin.nn.rotary import Rotary


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: what it attends to, or the recurrence in attention's place, and how it feeds forward.

    Raises:
        InvalidArgument: a recurrent layer that is to attend to something; see `recurring`.
    """

    attention: AttentionSpec
    feedforward: FeedForwardSpec
    recurrent: RecurrentSpec | None = None

    def __post_init__(self) -> None:
        if self.recurrent is not None and self.attention != AttentionSpec(rotary=None):
            raise InvalidArgument(f"a recurrent layer attends to nothing, so it cannot have {self.attention}")

    @classmethod
    def recurring(cls, recurrent: RecurrentSpec, feedforward: FeedForwardSpec) -> LayerSpec:
        """A layer with a recurrence in attention's place."""
        return cls(AttentionSpec(rotary=None), feedforward, recurrent)


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder, completely described.

    Args:
        family: checkpoint family, which decides the layout of saved files ("llama", "qwen3", "gemma3_text", …).
        vocab_size: rows of the embedding; at least the size of the tokenizer's vocabulary.
        width: model width.
        layers: one spec per layer.
        heads: query heads.
        kv_heads: key and value heads; divides ``heads``.
        head_dim: width of a head, even.
        max_context: longest sequence the model was made for, in tokens.
        eps: of the RMS norms.
        qkv_bias: biases on the query, key and value projections.
        qk_norm: RMS norms on query and key heads.
        post_norms: a second norm after attention and after the feed-forward layer (Gemma).
        embedding_scale: multiplier on embeddings.
        attention_scale: multiplier on attention scores; None for ``head_dim ** -0.5``.
        tied: whether the output matrix is the embedding.
        kv_routing: how often a layer read an earlier layer's keys and values while this decoder was trained (see
            `pippin.language.kv_routing`), from 0 to 1; None if it was not trained so.

    Raises:
        InvalidArgument: sizes that do not fit together.
    """

    family: str
    vocab_size: int
    width: int
    layers: tuple[LayerSpec, ...]
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    tied: bool = True
    kv_routing: float | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise InvalidArgument("a decoder needs at least one layer")
        if self.kv_routing is not None and not 0.0 <= self.kv_routing <= 1.0:
            raise InvalidArgument(f"kv_routing is a share of layers from 0 to 1, got {self.kv_routing}")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise InvalidArgument(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise InvalidArgument(f"head_dim must be even to be rotated, got {self.head_dim}")
        for index, layer in enumerate(self.layers):
            source = layer.attention.source
            if source is not None and not (0 <= source < index and source in self.cached_layers):
                raise InvalidArgument(
                    f"layer {index} reads layer {source}, which is not an earlier layer with its own keys"
                )

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Layers that have keys and values of their own."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.attention.source is None and not layer.recurrent)

    def reading(self, sources: Sequence[int | None]) -> DecoderConfig:
        """The same decoder, each layer reading the keys and values of the one given for it (None: its own).

        Raises:
            InvalidArgument: a layer that is not an earlier one with keys of its own.
        """
        layers = tuple(
            replace(layer, attention=replace(layer.attention, source=source))
            for layer, source in zip(self.layers, sources, strict=True)
        )
        return replace(self, layers=layers)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers that keep a state of constant size in place of keys and values."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.recurrent)

    @property
    def state_bytes(self) -> int:
        """Memory of the states that all recurrent layers keep of one sequence, however long it is."""
        return 4 * sum(layer.recurrent.state_size(self.width) for layer in self.layers if layer.recurrent)


class DecoderLayer(nn.Module):
    """Attention (or a recurrence) and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: DecoderConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.recurrent: Recurrent | None = None
        if spec.recurrent is not None:
            self.recurrent = Recurrent(spec.recurrent, config.width, eps=config.eps)
        else:
            self.self_attn = Attention(
                spec.attention,
                width=config.width,
                heads=config.heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                bias=config.qkv_bias,
                qk_norm=config.qk_norm,
                scale=config.attention_scale,
                eps=config.eps,
            )
        mlp = MixtureOfExperts if spec.feedforward.experts else FeedForward
        self.mlp = mlp(spec.feedforward, config.width)
        self.input_layernorm = RMSNorm(config.width, eps=config.eps)
        self.post_attention_layernorm = RMSNorm(config.width, eps=config.eps)
        self.pre_feedforward_layernorm: RMSNorm | None = None
        self.post_feedforward_layernorm: RMSNorm | None = None
        if config.post_norms:
            self.pre_feedforward_layernorm = RMSNorm(config.width, eps=config.eps)
            self.post_feedforward_layernorm = RMSNorm(config.width, eps=config.eps)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor] | None,
        cache: KVCache,
        index: int,
        shared: Seen | None,
        adapters: Shares | None = None,
        cut: Cut | None = None,
    ) -> tuple[Tensor, Seen | None]:
        """Return the new hidden states (of ``cut.rows``, if given), and the keys, values and mask that were read."""
        read: Seen | None = None
        if self.recurrent is not None:
            y = self.recurrent(self.input_layernorm(x), cache, index, adapters, cut)
        else:
            y, read = self.self_attn(self.input_layernorm(x), turn, cache, index, shared, adapters, cut)
        if cut is not None:
            x, adapters = x.index_select(1, cut.rows), cut.adapters
            if x.shape[1] == 0:
                return x, read
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x = x + y
            return x + self.mlp(self.post_attention_layernorm(x), adapters), read
        x = x + self.post_attention_layernorm(y)
        inner = self.mlp(self.pre_feedforward_layernorm(x), adapters)
        return x + self.post_feedforward_layernorm(inner), read

    def pack(self) -> None:
        """Pack all weights of this layer for inference."""
        (self.self_attn if self.recurrent is None else self.recurrent).pack()
        self.mlp.pack()
        for norm in self.children():
            if isinstance(norm, RMSNorm):
                norm.pack()


class Decoder(nn.Module):
    """A causal language model: token ids in, logits out.

    Parameters are uninitialised memory until a checkpoint is loaded or `initialise` is called.

    >>> from pippin.nn.rotary import Rotary
    >>> layer = LayerSpec(AttentionSpec(rotary=Rotary()), FeedForwardSpec(size=32))
    >>> config = DecoderConfig("llama", 100, 16, (layer, layer), heads=2, kv_heads=1, head_dim=8, max_context=64)
    >>> Decoder(config).initialise(seed=0)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 100])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(DecoderLayer(config, spec) for spec in config.layers)
        self.norm = RMSNorm(config.width, eps=config.eps)
        self.lm_head = Linear(config.width, config.vocab_size)
        self.tie()
        self._sources = {spec.attention.source for spec in config.layers}
        self._rotaries = {spec.attention.rotary for spec in config.layers if spec.attention.rotary is not None}
        self._turns: dict[Rotary, tuple[Tensor, Tensor]] = {}

    def forward(
        self,
        ids: Int[Tensor, "batch new"],
        *,
        cache: KVCache | None = None,
        padding: Int[Tensor, batch] | None = None,
        last: int | None = None,
        adapters: Shares | None = None,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Logits of the next token after each of the given ones.

        Args:
            ids: token ids.
            cache: keys and values of the tokens before; the new ones are added. None for a pass over whole sequences.
            padding: pad tokens at the left of each row, counted over the whole sequence. Logits of pads mean nothing.
            last: only the logits of the last so many tokens; None for all.
            adapters: low-rank changes, each with the tokens (of the whole batch, laid end to end) that it works on.

        Raises:
            InvalidArgument: a sequence longer than the rotary tables may grow, or no tokens at all.
        """
        hidden = self.hidden(ids, cache=cache, padding=padding, adapters=adapters)
        logits: Tensor = self.lm_head(hidden if last is None else hidden[:, -last:])
        return logits

    def hidden(
        self,
        ids: Int[Tensor, "batch new"],
        *,
        cache: KVCache | None = None,
        padding: Int[Tensor, batch] | None = None,
        adapters: Shares | None = None,
    ) -> Float[Tensor, "batch new width"]:
        """Normalised hidden states, as the output matrix reads them; arguments as for `forward`."""
        if ids.shape[1] == 0:
            raise InvalidArgument("the decoder was given no tokens")
        cache = NoCache(padding) if cache is None else cache
        x = self.through(self.embed(ids), cache, padding=padding, adapters=adapters)
        cache.advance(ids.shape[1])
        hidden: Tensor = self.norm(x)
        return hidden

    def embed(self, ids: Int[Tensor, "batch new"]) -> Float[Tensor, "batch new width"]:
        """What enters the first layer."""
        x: Tensor = self.embed_tokens(ids)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)

    def through(
        self,
        x: Float[Tensor, "batch new width"],
        cache: KVCache,
        *,
        layers: range | None = None,
        padding: Int[Tensor, batch] | None = None,
        adapters: Shares | None = None,
        cut: Cut | None = None,
    ) -> Float[Tensor, "batch kept width"]:
        """What leaves the last of some layers; ``cache.advance`` is the caller's matter.

        Args:
            x: what enters the first of them.
            cache: keys and values; a `Resumable` one where layers are left out at the beginning, or tokens are cut.
            layers: those to compute, in order; None for all.
            padding: as for `forward`.
            adapters: low-rank changes, each with the tokens that it works on.
            cut: from the queries of which layer on only which tokens are computed, in a batch of one row. Exact if no
                later layer has keys of its own or a state.
        """
        turns = self._rotations(cache, x.shape[1], padding, x.dtype, x.device)
        read: dict[int, Seen] = {}
        for index in range(len(self.layers)) if layers is None else layers:
            spec = self.config.layers[index].attention
            here = cut if cut is not None and cut.layer == index else None
            if here is not None:
                assert isinstance(cache, Resumable)
                cache.narrow()
                read.clear()
            shared = None if spec.source is None else self._shared(spec.source, read, cache)
            turn = turns.get(spec.rotary)
            x, seen = self.layers[index](x, turn, cache, index, shared, adapters, here)
            if index in self._sources:
                read[index] = seen
            if here is not None:
                adapters = here.adapters
                turns = {way: (cos[here.rows], sin[here.rows]) for way, (cos, sin) in turns.items()}
            if x.shape[1] == 0:
                break
        return x

    def _shared(self, source: int, read: dict[int, Seen], cache: KVCache) -> Seen:
        """What a layer reads that has no keys of its own; from the cache, if its source is not part of this pass."""
        if source not in read:
            assert isinstance(cache, Resumable), f"layer {source} was not computed"
            read[source] = cache.view(source, self.config.layers[source].attention.window)
        return read[source]

    def _rotations(
        self, cache: KVCache, new: int, padding: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> dict[Rotary | None, tuple[Tensor, Tensor]]:
        """Cosine and sine of the new positions, for each way of rotating that occurs."""
        start, positions = cache.length, cache.positions
        if positions is not None and positions.ndim == 1 and len(positions) != new:
            raise InvalidArgument(f"the cache has {len(positions)} positions for {new} tokens")
        if positions is None and padding is not None:
            positions = (torch.arange(start, start + new, device=device) - padding[:, None]).clamp(min=0)
        turns: dict[Rotary | None, tuple[Tensor, Tensor]] = {}
        for rotary in self._rotaries:
            cos, sin = self._table(rotary, start + new, dtype, device)
            if positions is None:
                turns[rotary] = (cos[start : start + new], sin[start : start + new])
            elif positions.ndim == 1:
                turns[rotary] = (cos[positions], sin[positions])
            else:
                turns[rotary] = (cos[positions][:, None], sin[positions][:, None])
        return turns

    def _table(self, rotary: Rotary, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tables of at least ``length`` positions; they double when they are too short."""
        cos, sin = self._turns.get(rotary, (None, None))
        if cos is None or sin is None or cos.shape[0] < length or cos.dtype != dtype or cos.device != device:
            size = max(512, 1 << (length - 1).bit_length())
            with torch.inference_mode(False):  # the tables outlive this pass and may be trained with later
                tables = rotary.tables(torch.arange(size, device=device), self.config.head_dim)
                cos, sin = (table.to(dtype) for table in tables)
            self._turns[rotary] = (cos, sin)
        return cos, sin

    def rotary_tables(self) -> list[tuple[Tensor, Tensor]]:
        """The tables of cosine and sine in use; longer ones take their place when a longer sequence comes."""
        return list(self._turns.values())

    def pack_head(self) -> None:
        """Pack the embedding and what comes after the layers."""
        self.norm.pack()
        self.embed_tokens.pack()
        self.tie()
        self.lm_head.pack()

    def tie(self) -> None:
        """Make the output matrix the embedding, where the configuration says so."""
        if self.config.tied and self.lm_head.packed is None:
            self.lm_head.weight, self.lm_head.packed = self.embed_tokens.weight, self.embed_tokens.packed

    def initialise(self, *, seed: int) -> Decoder:
        """Random weights: normal with standard deviation 0.02, output projections scaled down by depth; norms at one.

        What leads to the cell of a recurrent layer, and the cell itself, have schemes of their own.

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
                part.initialise(generator)
        return self

    def pack(self) -> Decoder:
        """Pack all weights for inference, in place; the decoder can no longer be trained or saved."""
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.pack()
        self.pack_head()
        return self.requires_grad_(False).eval()
