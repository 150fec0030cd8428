"""Sequential decoding with a flow block: its inverse, a few tokens at a time, with a KV cache.

Notable here:
- the KV cache is preallocated, so only new keys and values are copied, and a pass over the same tokens may be repeated,
  as in Jacobi iteration
- a pass makes few and large calls: one product for queries, keys and values, with weights packed for the batch size
- the unconditional branch of guidance is the second half of the batch
- where the native kernels support a block (`pippin.generate.flows.native`), a pass or a complete inverse is one call
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from pippin.core import native
from pippin.core.checks import PositiveFloat, checked
from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import EmbeddedConditioning
from pippin.generate.flows.jacobi import SolveInfo
from pippin.generate.flows.native import NativeBlock, NativeDecoding, supports
from pippin.nn.attention.rotary import apply_rotary
from pippin.nn.feedforward.feedforward import FeedForward
from pippin.nn.images.adaptive_norm import AdaptiveBlock
from pippin.nn.linear import Linear
from pippin.nn.packed_layers import OneDNNWeight, fuse
from pippin.nn.quantization.packed import NativeWeight

if TYPE_CHECKING:
    from pippin.generate.flows.block import FlowBlock

RotaryTables = tuple[Tensor, Tensor]
"""Cosine and sine of the position of each token, in natural order (`pippin.nn.attention.axial_rotary.axial_tables`)."""
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Mean and log scale of guided tokens from: mean and log scale with the condition, those without, and the weight w of
each token (tokens, 1)."""

_SMALL = 1 << 24
"""Largest number of elements of the precomputed sum of positions and condition."""


def linear_guidance(mean: Tensor, log: Tensor, null_mean: Tensor, null_log: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Extrapolate mean and log scale from the unconditional branch through the conditional one, by the factor 1 + w.

    Source: Zhai et al. 2024, arXiv:2412.06329, section 3.5.
    """
    return torch.lerp(null_mean, mean, 1 + w), torch.lerp(null_log, log, 1 + w)


def gaussian_guidance(
    mean: Tensor, log: Tensor, null_mean: Tensor, null_log: Tensor, w: Tensor | float
) -> tuple[Tensor, Tensor]:
    r"""Mean and log scale of $\mathcal N(\mu_c, \sigma_c^2)^{1+w} / \mathcal N(\mu_u, \sigma_u^2)^w$, normalized.

    With $s = \min(\sigma_c / \sigma_u, 1)^2$: $\sigma = \sigma_c / \sqrt{1 + w - ws}$ and
    $\mu = ((1 + w) \mu_c - ws \mu_u) / (1 + w - ws)$. The minimum keeps the precision positive where the conditional
    Gaussian is the wider one.

    Args:
        mean: mean with the condition.
        log: log scale with the condition.
        null_mean: mean without the condition.
        null_log: log scale without the condition.
        w: guidance scale minus 1; at least -1.

    Source: arXiv:2506.06276, section on guidance.

    >>> one = torch.ones(1)
    >>> mean, log = gaussian_guidance(one, 0 * one, 0 * one, 0 * one, 3.0)
    >>> mean.item(), log.item()
    (4.0, 0.0)
    """
    ratio = (2 * (log - null_log).clamp(max=0)).exp()  # s: ratio of variances
    precision = 1 + w * (1 - ratio)
    return ((1 + w) * mean - w * ratio * null_mean) / precision, log - 0.5 * precision.log()


@checked
@dataclass(frozen=True)
class LinearGuidance:
    """Classifier-free guidance of a block's inverse.

    Attributes:
        embedded: the condition of the second branch, for the same number of samples; None for that of the first branch.
        weight: w, the guidance scale minus 1; a negative weight interpolates towards the second branch.
        rule: function that combines mean and log scale of both branches.
        anneal: whether the weight grows linearly over the tokens, to w at the last.
        temperature: divides the attention scores of the second branch.

    Raises:
        InvalidArgument: a temperature that is not positive.
    """

    embedded: EmbeddedConditioning | None
    weight: float
    rule: Rule = linear_guidance
    anneal: bool = False
    temperature: PositiveFloat = 1.0


class SequentialDecoding:
    """The state of decoding a batch with one block, in the block's order of tokens; made by `FlowBlock.decoding`.

    Attributes:
        block: the block.
        tokens: maximum number of tokens.
    """

    def __init__(
        self,
        block: FlowBlock,
        embedded: EmbeddedConditioning,
        t: Tensor | None,
        cos_sin: RotaryTables | None,
        tokens: int,
        guide: LinearGuidance | None,
    ) -> None:
        self.block, self.tokens, self.guide, self._cos_sin = block, tokens, guide, cos_sin
        query_scale = None
        n = len(embedded.vector)
        if guide is not None:
            embedded = _concatenated(embedded, guide.embedded or embedded)
            t = None if t is None else torch.cat([t, t])
            if guide.temperature != 1:
                query_scale = torch.ones(2 * n, 1, 1, 1, device=embedded.vector.device)
                query_scale[n:] = 1 / guide.temperature
        with torch.no_grad():
            self._vector = block.vector(embedded, t)
            positions = block.position_embedding
            if positions is not None and len(self._vector) * positions.numel() <= _SMALL:
                self._added: Tensor | None = positions + self._vector
            else:
                self._added = None
        self._weights: Tensor | None = None
        prefix = embedded.tokens if block.spec.text else None
        self._prefix = 0 if prefix is None else prefix.shape[1]
        text_mask = embedded.mask if prefix is not None else None
        self._cache = _PreallocatedCache(block, self._prefix + tokens - block.num_unpredicted, text_mask, query_scale)
        self._layers: list[PackedLayer] = []
        self._layout = ""
        self._native: NativeDecoding | None = None
        if self._added is not None and n and supports(block):
            packed = {} if block.packed_weights is None else block.packed_weights
            if "block" not in packed:
                packed["block"] = NativeBlock(block)
            weights = packed["block"]
            assert isinstance(weights, NativeBlock)
            self._native = NativeDecoding(weights, self._added, n, query_scale)
        if prefix is not None:
            self._forward(prefix, block.select_cos_sin(cos_sin, 0, 0, self._prefix))

    @torch.no_grad()
    def stats(self, x: Float[Tensor, "n known inner"], first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Mean and log scale of tokens ``first`` to ``stop - 1``, with guidance; uses ``x`` up to token ``stop - 2``.

        The cache is truncated to ``first``; the tokens before must have been computed by earlier calls.

        Raises:
            InvalidArgument: tokens beyond the last, or after tokens that are not in the cache.
        """
        block = self.block
        num_unpredicted = block.num_unpredicted
        length = self._prefix + max(first - num_unpredicted, 0)  # cached inputs that stay valid
        if not 0 <= first < stop <= self.tokens or length > self._cache.length:
            raise InvalidArgument(
                f"tokens {first} to {stop} of {self.tokens} after {self._cache.length - self._prefix} were computed"
            )
        self._cache.length = length
        if stop <= num_unpredicted:  # unpredicted tokens have mean 0 and log scale 0
            zero = x.new_zeros(len(x), stop - first, block.inner)
            return zero, zero
        if self._native is not None and self._native.fits(x):
            mean, log_scale = block.bounded(self._native.forward(x, length, stop - 1))
            self._cache.length = stop - 1
        else:
            hidden = self._embed(x[:, max(first - 1, 0) : stop - 1], first, stop)
            cos_sin = None if self._cos_sin is None else block.select_cos_sin(self._cos_sin, first, stop, 0)
            mean, log_scale = block.split_output(self._forward(hidden, cos_sin))
        if self.guide is not None:
            mean, log_scale = self._guided(mean, log_scale, max(first, num_unpredicted), stop)
        if first < num_unpredicted:
            mean, log_scale = F.pad(mean, (0, 0, 1, 0)), F.pad(log_scale, (0, 0, 1, 0))
        return mean, log_scale

    def invert(self, x: Float[Tensor, "n tokens inner"], z: Float[Tensor, "n tokens inner"], first: int) -> bool:
        """Compute the tokens of ``x`` from ``first`` on, in place, by one native call; False if not supported."""
        spec, rule = self.block.spec, None if self.guide is None else self.guide.rule
        if self._native is None or spec.scale != "exp" or spec.soft_clip is not None:
            return False
        complete = x.shape == z.shape and x.shape[1] == self.tokens and self._native.fits(x) and self._native.fits(z)
        if not complete or rule not in (None, linear_guidance) or self._cache.length < first - 1:
            return False
        if first == 0:  # the first token is unchanged by the block
            x[:, 0] = z[:, 0]
        start = max(first, 1)
        if start < self.tokens:
            self._native.invert(x, z, None if self.guide is None else self._weight(), start)
            self._cache.length = self.tokens - 1
        return True

    def _embed(self, x: Tensor, first: int, stop: int) -> Tensor:
        """See `FlowBlock.embed`; uses the precomputed sum of positions and condition, if there is one."""
        block = self.block
        if self._added is None or block.start is not None:
            return block.embed(x, first, stop, self._vector)
        hidden = F.linear(x, block.proj_in.dense_weight(), block.proj_in.bias)
        added = self._added[:, max(first - 1, 0) : stop - 1]
        return hidden + added if self.guide is None else torch.cat([hidden, hidden]) + added

    def _forward(self, hidden: Tensor, cos_sin: RotaryTables | None) -> Tensor:
        """Hidden states after all layers; keys and values are appended to the cache."""
        if (layout := _layout(hidden)) != self._layout:
            self._layout, self._layers = layout, _packed_layers(self.block, layout)
        mask = self._cache.mask(hidden.shape[1])
        for number, layer in enumerate(self._layers):
            hidden = layer(hidden, cos_sin, self._cache, number, mask)
        self._cache.length += hidden.shape[1]
        return hidden

    def _guided(self, mean: Tensor, log_scale: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Combine both branches of tokens ``first`` to ``stop - 1`` by the guidance rule."""
        assert self.guide is not None
        (mean, null_mean), (log_scale, null_log) = mean.chunk(2), log_scale.chunk(2)
        mean, log_scale = self.guide.rule(mean, log_scale, null_mean, null_log, self._weight()[first:stop])
        clip = self.block.spec.soft_clip
        return mean, log_scale if clip is None else log_scale.clamp(-clip, clip)

    def _weight(self) -> Float[Tensor, "tokens 1"]:
        """Guidance weight w of each token."""
        assert self.guide is not None
        if self._weights is None:
            self._weights = torch.full((self.tokens, 1), self.guide.weight, device=self._vector.device)
            if self.guide.anneal:
                positions = torch.arange(self.tokens, device=self._vector.device)
                self._weights *= positions[:, None] / max(self.tokens - 1, 1)
        return self._weights


@torch.no_grad()
def sequential_invert(
    decoding: SequentialDecoding,
    z: Float[Tensor, "n tokens inner"],
    *,
    x: Float[Tensor, "n tokens inner"] | None = None,
    first: int = 0,
    on_tokens: Callable[[int, Tensor], None] | None = None,
) -> tuple[Float[Tensor, "n tokens inner"], SolveInfo]:
    """Invert token by token: exact, with as many passes as there are tokens.

    Arguments and results as for `pippin.generate.flows.jacobi.jacobi_invert`.
    """
    x = torch.zeros_like(z) if x is None else x
    tokens = z.shape[1]
    done = on_tokens is None and decoding.invert(x, z, first)
    for position in range(first, first if done else tokens):
        mean, log_scale = decoding.stats(x, position, position + 1)
        x[:, position : position + 1] = torch.addcmul(mean, z[:, position : position + 1], log_scale.exp())
        if on_tokens is not None:
            on_tokens(position + 1, x)
    n = len(z)
    return x, SolveInfo((1,) * (tokens - first), z.new_zeros(n), torch.ones(n, dtype=torch.bool, device=z.device))


class _PreallocatedCache:
    """A preallocated KV cache: keys and values of a text with padding first, then those of the tokens.

    Args:
        block: the block.
        capacity: maximum number of text tokens and inputs together.
        text_mask: false for padding of the text; None without text.
        query_scale: factor on the queries of each row of the batch; None for 1.
    """

    def __init__(self, block: FlowBlock, capacity: int, text_mask: Tensor | None, query_scale: Tensor | None) -> None:
        self.length, self._capacity, self._text_mask, self.query_scale = 0, capacity, text_mask, query_scale
        # for each layer: keys and values (2, batch, heads, capacity, size), and views of the keys and of the values
        self._cached: list[tuple[Tensor, Tensor, Tensor] | None] = [None] * block.spec.num_hidden_layers
        self._mask: tuple[int, int, Tensor | None] = (-1, -1, None)

    def put(self, layer: int, kv: Float[Tensor, "2 rows heads new size"]) -> tuple[Tensor, Tensor]:
        """Append new keys and values of a layer; returns all cached ones."""
        new = kv.shape[3]
        cached = self._cached[layer]
        if cached is None:
            buffer = kv.new_empty(*kv.shape[:3], self._capacity, kv.shape[4])
            cached = self._cached[layer] = (buffer, buffer[0], buffer[1])
        buffer, keys, values = cached
        buffer.narrow(3, self.length, new).copy_(kv)
        stop = self.length + new
        return keys.narrow(2, 0, stop), values.narrow(2, 0, stop)

    def mask(self, new: int) -> Tensor | None:
        """Attention mask of new tokens; None for causal attention without padding, or attention to all tokens."""
        start = self.length
        if (new == 1 or not start) and self._text_mask is None:
            return None
        if self._mask[:2] != (start, new):
            text_mask = torch.ones(1, 0, dtype=torch.bool) if self._text_mask is None else self._text_mask
            self._mask = (start, new, visible(text_mask, start, start + new))
        return self._mask[2]


class PackedLayer:
    """A layer of a flow block for inference: computes the same as `AdaptiveBlock`, in few calls on packed weights.

    Args:
        layer: a layer with biases and without adaptive modulation.
        layout: the weight layout, as `_layout` chooses it.
    """

    def __init__(self, layer: AdaptiveBlock, layout: str) -> None:
        attention, feed_forward = layer.attention, layer.feed_forward
        self.heads, self.size = attention.heads, attention.head_dim
        self.norm, self.norm2 = layer.attention_norm, layer.feed_norm
        assert attention.v_proj is not None
        assert attention.v_proj is not None
        self.qkv = _product(fuse([attention.q_proj, attention.k_proj, attention.v_proj]), layout)
        self.output = _product(attention.o_proj, layout)
        assert isinstance(feed_forward, FeedForward)
        assert feed_forward.up_proj is not None
        self.up, self.down = _product(feed_forward.up_proj, layout), _product(feed_forward.down_proj, layout)

    def __call__(
        self, x: Tensor, cos_sin: RotaryTables | None, cache: _PreallocatedCache, number: int, mask: Tensor | None
    ) -> Tensor:
        """Output of the layer for new tokens (batch, new, width); ``number`` is the layer's index in the cache."""
        batch, new, width = x.shape
        norm = self.norm
        flat = x.view(-1, width)
        projected = self.qkv(torch.layer_norm(flat, (width,), norm.weight, norm.bias, norm.eps))
        qkv = projected.view(batch, new, 3, self.heads, self.size).permute(
            2, 0, 3, 1, 4
        )  # (3, batch, heads, new, size)
        q, kv = qkv[0], qkv[1:]  # qkv: (3, batch, heads, new, size)
        if cos_sin is not None:
            q = apply_rotary(q, *cos_sin)
            kv = torch.stack([apply_rotary(qkv[1], *cos_sin), qkv[2]])
        if cache.query_scale is not None:
            q = q * cache.query_scale
        causal = mask is None and new > 1
        y = F.scaled_dot_product_attention(q, *cache.put(number, kv), attn_mask=mask, is_causal=causal)
        flat = self.output(y.transpose(1, 2).reshape(-1, width)).add_(flat)  # (batch * new, width)
        norm = self.norm2
        inner = F.gelu(self.up(torch.layer_norm(flat, (width,), norm.weight, norm.bias, norm.eps)))
        return self.down(inner).add_(flat).view(batch, new, width)


def _layout(x: Tensor) -> str:
    """The weight layout that is fastest for this number of rows, as measured on an AMD and an Intel processor."""
    rows = x.numel() // x.shape[-1]
    if x.device.type != "cpu" or rows == 1:
        return "dense"
    return "native" if rows < 32 else "onednn"


def _packed_layers(block: FlowBlock, layout: str) -> list[PackedLayer]:
    """The layers of a block in this weight layout; cached by packed blocks."""
    packed = {} if block.packed_weights is None else block.packed_weights
    if layout not in packed:
        packed[layout] = [PackedLayer(layer, layout) for layer in block.layers if isinstance(layer, AdaptiveBlock)]
    layers = packed[layout]
    assert isinstance(layers, list)
    return layers


def _product(linear: Linear, layout: str) -> Callable[[Tensor], Tensor]:
    """A function for ``x @ weight.T + bias`` without gradients, in a weight layout."""
    weight = linear.dense_weight()
    bias = None if linear.bias is None else linear.bias.detach()
    if layout == "native" and weight.dtype == torch.float32 and NativeWeight.supports(weight):
        return _native_product(NativeWeight.from_dense(weight), bias)
    if layout != "dense" and OneDNNWeight.supports(weight):
        onednn = OneDNNWeight(weight)
        return lambda x: onednn.matmul(x, bias)
    return lambda x: F.linear(x, weight, bias)


def _native_product(weight: NativeWeight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A faster `NativeWeight.matmul` for contiguous float32 input only; a decode step consists mostly of such calls."""
    library = native.library()
    assert library is not None
    bias = None if bias is None else bias.float().contiguous()
    address = None if bias is None else bias.data_ptr()
    matmul, matrix, outputs, inputs = library.matmul, weight.matrix, weight.rows, weight.columns

    # the default argument keeps the memory behind the addresses alive
    def product(x: Tensor, owners: tuple[NativeWeight, Tensor | None] = (weight, bias)) -> Tensor:
        y = x.new_empty(len(x), outputs)
        matmul(matrix, x.data_ptr(), inputs, len(x), address, y.data_ptr(), outputs)
        return y

    return product


def visible(text_mask: Bool[Tensor, "n text"], start: int, stop: int) -> Bool[Tensor, "n 1 new keys"]:
    """Causal attention mask after a text with padding; each token attends at least to itself."""
    positions = torch.arange(stop, device=text_mask.device)
    itself = positions[None] == positions[start:stop, None]
    present = F.pad(text_mask[:, :stop], (0, max(stop - text_mask.shape[1], 0)), value=True)  # (n, stop)
    return ((positions[None] <= positions[start:stop, None])[None] & present[:, None] | itself[None])[:, None]


def _concatenated(first: EmbeddedConditioning, second: EmbeddedConditioning) -> EmbeddedConditioning:
    """Two conditions as one batch; texts are padded to the longer one."""
    vector = torch.cat([first.vector, second.vector])
    if first.tokens is None or second.tokens is None or first.mask is None or second.mask is None:
        return EmbeddedConditioning(vector)
    max_length = max(first.tokens.shape[1], second.tokens.shape[1])

    def padded(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        padding = max_length - tokens.shape[1]
        return F.pad(tokens, (0, 0, 0, padding)), F.pad(mask, (0, padding))

    (tokens, mask), (tokens2, mask2) = padded(first.tokens, first.mask), padded(second.tokens, second.mask)
    return EmbeddedConditioning(vector, torch.cat([tokens, tokens2]), torch.cat([mask, mask2]))
