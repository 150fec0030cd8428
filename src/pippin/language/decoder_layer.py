"""A layer of a decoder: attention or a recurrence, a feed-forward layer, and the norms of its family around them."""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.language.decoder_config import DecoderConfig, LayerSpec, Residual
from pippin.nn.alternating_updates import AlternatingUpdates, LowRankResidual
from pippin.nn.attention.attention import Attention
from pippin.nn.attention.latent_attention import LatentAttention
from pippin.nn.context import LayerContext
from pippin.nn.feedforward.feedforward import (
    NO_FEED_FORWARD,
    ExpertBranch,
    FeedForward,
    MixtureOfExperts,
)
from pippin.nn.kv_cache import VisibleKeyValues
from pippin.nn.norm import RMSNorm
from pippin.nn.per_layer_input import PerLayerInput
from pippin.nn.recurrent.states import StatefulLayer
from pippin.nn.steering import steer


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
