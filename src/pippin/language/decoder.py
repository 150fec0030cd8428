"""The decoder: one class for all families.

Notable here:
- parameters have Hugging Face's names, so a checkpoint is memory-mapped without conversion
- `pack()` converts the weights of a loaded decoder to the layout of the fastest kernels
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.language.decoder_config import DecoderConfig
from pippin.language.decoder_layer import DecoderLayer, make_norm
from pippin.nn.alternating_updates import MergingNorm, Streams
from pippin.nn.attention.rotary import long_positions
from pippin.nn.context import LayerContext
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.expert_mask import ExpertMaskSlices
from pippin.nn.feedforward.feedforward import (
    XIELU,
)
from pippin.nn.kv_cache import KVCache, NoCache, QuerySelection, ResumableCache, VisibleKeyValues
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices
from pippin.nn.packed_layers import PackedLinear, PackedTokenEmbedding, pack
from pippin.nn.parallel.collectives import Collectives
from pippin.nn.parallel.tracks import TrackStream
from pippin.nn.per_layer_input import PerLayerEmbedding
from pippin.nn.recurrent.states import StatefulLayer
from pippin.nn.steering import SteeringSlices

if TYPE_CHECKING:
    from pippin.nn.attention.rotary import Rotary


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


class Decoder(nn.Module):
    """A causal language model: token ids in, logits out.

    Parameters are uninitialized memory until a checkpoint is loaded or `initialize` is called.

    >>> from pippin.language.decoder_config import LayerSpec
    >>> from pippin.nn.attention.attention import AttentionSpec
    >>> from pippin.nn.feedforward.feedforward import FeedForwardSpec
    >>> from pippin.nn.attention.rotary import Rotary
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
        self.collectives: Collectives | None = None  # of the processes that have other parts of the model
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

    def last_states(
        self, x: Float[Tensor, "batch new *streams width"]
    ) -> tuple[Float[Tensor, "batch new width"], Float[Tensor, "batch new width"]]:
        """The input and the result of the last norm; of several streams, the input is their mean.

        Args:
            x: the result of `forward_layers`.
        """
        if isinstance(self.norm, MergingNorm):
            x = self.norm.merged(x)
            return x, self.norm.norm(x)
        return x, self.norm(x)

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
        stream: TrackStream | None = None,
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
            stream: in a decoder with tracks, what an earlier call left between two joins; None to compute whole blocks.

        Raises:
            AdapterMismatch: an adapter changes layers that are not this decoder's.
            InvalidArgument: the layers end between two joins, and there is no ``stream``.
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
        layers = range(len(self.layers)) if layers is None else layers
        stream = self._track_stream(layers) if stream is None else stream
        for index in layers:
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
            x, visible = self.layers[index](x if stream is None else stream.enter(index, x), context)
            if stream is not None:
                x = stream.leave(index, x, None if here is None else here.rows)
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

    def _track_stream(self, layers: range) -> TrackStream | None:
        """The hidden states of a pass through tracks; None in a decoder without."""
        if self.config.tracks is None:
            return None
        self.config.tracks.check_layers(layers)
        return TrackStream(self.config.tracks, self.collectives)

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
