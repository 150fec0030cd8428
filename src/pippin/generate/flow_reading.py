"""Reading a sequence with a flow block, a few tokens at a time: what its inverse is made of.

Notable here:
- keys and values lie in memory taken beforehand, so that nothing is copied but the new ones, and a pass over the same
  tokens may be repeated
- a pass makes few and large calls: one product for queries, keys and values, weights packed for the number of rows
- guidance reads the second branch as more rows of the same batch
- where the native kernels can (`pippin.generate.flow_native`), a pass is one call, and so is a whole inverse token by
  token
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from pippin.core import native
from pippin.core.errors import InvalidArgument
from pippin.generate.condition import Embedded
from pippin.generate.flow_native import NativeBlock, NativeReading, supports
from pippin.generate.jacobi import SolveInfo
from pippin.nn.adaptive import AdaptiveBlock
from pippin.nn.feedforward import FeedForward
from pippin.nn.linear import Linear, OneDNNWeight
from pippin.nn.packed import NativeWeight
from pippin.nn.rotary import rotate

if TYPE_CHECKING:
    from pippin.generate.flow_block import FlowBlock

Turn = tuple[Tensor, Tensor]
"""Cosine and sine of the place of each token, in natural order (`pippin.nn.axial.axial_tables`)."""
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Mean and log scale of guided tokens from: mean and log scale with the condition, those without, and the weight w of
each token (tokens, 1)."""

_SMALL = 1 << 24
"""Numbers that are laid ready at most."""


def linear_guidance(mean: Tensor, log: Tensor, null_mean: Tensor, null_log: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Away from what is told without the condition, by w times the difference.

    Source: Zhai et al. 2024, arXiv:2412.06329, section 3.5.
    """
    return torch.lerp(null_mean, mean, 1 + w), torch.lerp(null_log, log, 1 + w)


@dataclass(frozen=True)
class Guide:
    """How a block's inverse is guided.

    Attributes:
        embedded: what the second branch reads, as for as many samples; None for the same as the first.
        weight: w, the guidance - 1; below 0 mixes the second branch in.
        rule: how the branches are combined.
        anneal: whether the weight grows over the tokens, in a straight line to w at the last.
        temperature: the attention scores of the second branch are divided by it.

    Raises:
        InvalidArgument: a temperature that is not positive.
    """

    embedded: Embedded | None
    weight: float
    rule: Rule = linear_guidance
    anneal: bool = False
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise InvalidArgument(f"temperature is {self.temperature}; give a positive number")


class Reading:
    """What a block has read of a batch so far, in its own order; made by `FlowBlock.reading`.

    Attributes:
        block: whose.
        tokens: at most.
    """

    def __init__(
        self,
        block: FlowBlock,
        embedded: Embedded,
        t: Tensor | None,
        turn: Turn | None,
        tokens: int,
        guide: Guide | None,
    ) -> None:
        self.block, self.tokens, self.guide, self._turn = block, tokens, guide, turn
        temperature = None
        n = len(embedded.vector)
        if guide is not None:
            embedded = _joined(embedded, guide.embedded or embedded)
            t = None if t is None else torch.cat([t, t])
            if guide.temperature != 1:
                temperature = torch.ones(2 * n, 1, 1, 1, device=embedded.vector.device)
                temperature[n:] = 1 / guide.temperature
        with torch.no_grad():
            self._vector = block.vector(embedded, t)
            places = block.places
            if places is not None and len(self._vector) * places.numel() <= _SMALL:
                self._added: Tensor | None = places + self._vector
            else:
                self._added = None
        self._weights: Tensor | None = None
        prefix = embedded.tokens if block.spec.text else None
        self._prefix = 0 if prefix is None else prefix.shape[1]
        there = embedded.mask if prefix is not None else None
        self._keys = _Keys(block, self._prefix + tokens - block.behind, there, temperature)
        self._layers: list[Quick] = []
        self._form = ""
        self._native: NativeReading | None = None
        if self._added is not None and n and supports(block):
            kept = {} if block.kept is None else block.kept
            if "block" not in kept:
                kept["block"] = NativeBlock(block)
            weights = kept["block"]
            assert isinstance(weights, NativeBlock)
            self._native = NativeReading(weights, self._added, n, temperature)
        if prefix is not None:
            self._pass(prefix, block.turn_of(turn, 0, 0, self._prefix))

    @torch.no_grad()
    def stats(self, x: Float[Tensor, "n known inner"], first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Mean and log scale of tokens ``first`` to ``stop``, guided; reads tokens up to ``stop - 2`` of ``x``.

        What was read from ``first`` on is forgotten; what stands before must have been read by an earlier call.

        Raises:
            InvalidArgument: tokens beyond the last, or after some that were not read.
        """
        block = self.block
        behind = block.behind
        at = self._prefix + max(first - behind, 0)
        if not 0 <= first < stop <= self.tokens or at > self._keys.length:
            raise InvalidArgument(
                f"tokens {first} to {stop} of {self.tokens} after {self._keys.length - self._prefix} were read"
            )
        self._keys.length = at
        if stop <= behind:
            zero = x.new_zeros(len(x), stop - first, block.inner)
            return zero, zero
        if self._native is not None and self._native.fits(x):
            mean, log_scale = block.bounded(self._native.read(x, at, stop - 1))
            self._keys.length = stop - 1
        else:
            hidden = self._embed(x[:, max(first - 1, 0) : stop - 1], first, stop)
            turn = None if self._turn is None else block.turn_of(self._turn, first, stop, 0)
            mean, log_scale = block.told(self._pass(hidden, turn))
        if self.guide is not None:
            mean, log_scale = self._guided(mean, log_scale, max(first, behind), stop)
        if first < behind:
            mean, log_scale = F.pad(mean, (0, 0, 1, 0)), F.pad(log_scale, (0, 0, 1, 0))
        return mean, log_scale

    def invert(self, x: Float[Tensor, "n tokens inner"], z: Float[Tensor, "n tokens inner"], first: int) -> bool:
        """Compute tokens of ``x`` from ``first`` on one after another, in place, in one call; False where none can."""
        spec, rule = self.block.spec, None if self.guide is None else self.guide.rule
        if self._native is None or spec.scale != "exp" or spec.soft_clip is not None:
            return False
        whole = x.shape == z.shape and x.shape[1] == self.tokens and self._native.fits(x) and self._native.fits(z)
        if not whole or rule not in (None, linear_guidance) or self._keys.length < first - 1:
            return False
        if first == 0:
            x[:, 0] = z[:, 0]
        begin = max(first, 1)
        if begin < self.tokens:
            self._native.invert(x, z, None if self.guide is None else self._weight(), begin)
            self._keys.length = self.tokens - 1
        return True

    def _embed(self, x: Tensor, first: int, stop: int) -> Tensor:
        """As `FlowBlock.embed`; what is added lies ready where it is small."""
        block = self.block
        if self._added is None or block.start is not None:
            return block.embed(x, first, stop, self._vector)
        hidden = F.linear(x, block.proj_in.dense_weight(), block.proj_in.bias)
        added = self._added[:, max(first - 1, 0) : stop - 1]
        return hidden + added if self.guide is None else torch.cat([hidden, hidden]) + added

    def _pass(self, hidden: Tensor, turn: Turn | None) -> Tensor:
        """Through all layers; what was read is kept."""
        if (form := _form(hidden)) != self._form:
            self._form, self._layers = form, _quick(self.block, form)
        mask = self._keys.mask(hidden.shape[1])
        for number, layer in enumerate(self._layers):
            hidden = layer(hidden, turn, self._keys, number, mask)
        self._keys.length += hidden.shape[1]
        return hidden

    def _guided(self, mean: Tensor, log_scale: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        assert self.guide is not None
        (mean, null_mean), (log_scale, null_log) = mean.chunk(2), log_scale.chunk(2)
        mean, log_scale = self.guide.rule(mean, log_scale, null_mean, null_log, self._weight()[first:stop])
        clip = self.block.spec.soft_clip
        return mean, log_scale if clip is None else log_scale.clamp(-clip, clip)

    def _weight(self) -> Float[Tensor, "tokens 1"]:
        """w of each token."""
        assert self.guide is not None
        if self._weights is None:
            self._weights = torch.full((self.tokens, 1), self.guide.weight, device=self._vector.device)
            if self.guide.anneal:
                steps = torch.arange(self.tokens, device=self._vector.device)
                self._weights *= steps[:, None] / max(self.tokens - 1, 1)
        return self._weights


@torch.no_grad()
def sequential_invert(
    reading: Reading,
    z: Float[Tensor, "n tokens inner"],
    *,
    x: Float[Tensor, "n tokens inner"] | None = None,
    first: int = 0,
    on_tokens: Callable[[int, Tensor], None] | None = None,
) -> tuple[Float[Tensor, "n tokens inner"], SolveInfo]:
    """As `pippin.generate.jacobi.jacobi_invert`, one token after another: exact, with as many passes as tokens."""
    x = torch.zeros_like(z) if x is None else x
    tokens = z.shape[1]
    done = on_tokens is None and reading.invert(x, z, first)
    for place in range(first, first if done else tokens):
        mean, log_scale = reading.stats(x, place, place + 1)
        x[:, place : place + 1] = torch.addcmul(mean, z[:, place : place + 1], log_scale.exp())
        if on_tokens is not None:
            on_tokens(place + 1, x)
    n = len(z)
    return x, SolveInfo((1,) * (tokens - first), z.new_zeros(n), torch.ones(n, dtype=torch.bool, device=z.device))


class _Keys:
    """Keys and values of a reading, in memory taken beforehand: a text with gaps first, then the inputs.

    Args:
        block: whose.
        capacity: text and inputs at most.
        there: which tokens of the text there are; None without text.
        temperature: by what the queries of each row are multiplied; None for nothing.
    """

    def __init__(self, block: FlowBlock, capacity: int, there: Tensor | None, temperature: Tensor | None) -> None:
        self.length, self._capacity, self._there, self.temperature = 0, capacity, there, temperature
        self._kept: list[tuple[Tensor, Tensor, Tensor] | None] = [None] * block.spec.layers
        self._mask: tuple[int, int, Tensor | None] = (-1, -1, None)

    def put(self, layer: int, kv: Float[Tensor, "2 rows heads new size"]) -> tuple[Tensor, Tensor]:
        """Put new keys and values behind those kept; all there are."""
        new = kv.shape[3]
        kept = self._kept[layer]
        if kept is None:
            both = kv.new_empty(*kv.shape[:3], self._capacity, kv.shape[4])
            kept = self._kept[layer] = (both, both[0], both[1])
        both, keys, values = kept
        both.narrow(3, self.length, new).copy_(kv)
        stop = self.length + new
        return keys.narrow(2, 0, stop), values.narrow(2, 0, stop)

    def mask(self, new: int) -> Tensor | None:
        """Who sees whom among new tokens and those kept; None where causal order, or everything before, says it."""
        start = self.length
        if (new == 1 or not start) and self._there is None:
            return None
        if self._mask[:2] != (start, new):
            there = torch.ones(1, 0, dtype=torch.bool) if self._there is None else self._there
            self._mask = (start, new, visible(there, start, start + new))
        return self._mask[2]


class Quick:
    """A layer of a flow block for inference: the same as `AdaptiveBlock`, in few calls on packed weights.

    Args:
        layer: plain, with biases and without adapting vectors.
        form: of the weights, as `_form` chooses it.
    """

    def __init__(self, layer: AdaptiveBlock, form: str) -> None:
        attention, feed = layer.attention, layer.feed_forward
        self.heads, self.size = attention.heads, attention.head_dim
        self.norm, self.norm2 = layer.attention_norm, layer.feed_norm
        self.read = _product(Linear.fused([attention.q_proj, attention.k_proj, attention.v_proj]), form)
        self.write = _product(attention.o_proj, form)
        assert isinstance(feed, FeedForward)
        assert feed.up_proj is not None
        self.up, self.down = _product(feed.up_proj, form), _product(feed.down_proj, form)

    def __call__(self, x: Tensor, turn: Turn | None, keys: _Keys, number: int, mask: Tensor | None) -> Tensor:
        """The layer's output for the new tokens."""
        rows, new, width = x.shape
        norm = self.norm
        flat = x.view(-1, width)
        read = self.read(torch.layer_norm(flat, (width,), norm.weight, norm.bias, norm.eps))
        qkv = read.view(rows, new, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        q, kv = qkv[0], qkv[1:]
        if turn is not None:
            q = rotate(q, *turn)
            kv = torch.stack([rotate(qkv[1], *turn), qkv[2]])
        if keys.temperature is not None:
            q = q * keys.temperature
        causal = mask is None and new > 1
        y = F.scaled_dot_product_attention(q, *keys.put(number, kv), attn_mask=mask, is_causal=causal)
        flat = self.write(y.transpose(1, 2).reshape(-1, width)).add_(flat)
        norm = self.norm2
        inner = F.gelu(self.up(torch.layer_norm(flat, (width,), norm.weight, norm.bias, norm.eps)))
        return self.down(inner).add_(flat).view(rows, new, width)


def _form(x: Tensor) -> str:
    """The form of weights that is quickest for so many rows; measured on an AMD and an Intel processor."""
    rows = x.numel() // x.shape[-1]
    if x.device.type != "cpu" or rows == 1:
        return "dense"
    return "native" if rows < 32 else "onednn"


def _quick(block: FlowBlock, form: str) -> list[Quick]:
    """The layers of a block in this form, kept by copies for inference."""
    kept = {} if block.kept is None else block.kept
    if form not in kept:
        kept[form] = [Quick(layer, form) for layer in block.layers if isinstance(layer, AdaptiveBlock)]
    layers = kept[form]
    assert isinstance(layers, list)
    return layers


def _product(linear: Linear, form: str) -> Callable[[Tensor], Tensor]:
    """``x @ weight.T + bias`` of plain matrices, without gradients."""
    weight = linear.dense_weight()
    bias = None if linear.bias is None else linear.bias.detach()
    if form == "native" and weight.dtype == torch.float32 and NativeWeight.supports(weight):
        return _native_product(NativeWeight.from_dense(weight), bias)
    if form != "dense" and OneDNNWeight.supports(weight):
        onednn = OneDNNWeight(weight)
        return lambda x: onednn.matmul(x, bias)
    return lambda x: F.linear(x, weight, bias)


def _native_product(weight: NativeWeight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """As `NativeWeight.matmul`, for float32 matrices without gaps alone: a decode step is mostly such calls."""
    library = native.library()
    assert library is not None
    bias = None if bias is None else bias.float().contiguous()
    address = None if bias is None else bias.data_ptr()
    matmul, matrix, outputs, inputs = library.matmul, weight.matrix, weight.rows, weight.columns

    def product(x: Tensor, kept: tuple[NativeWeight, Tensor | None] = (weight, bias)) -> Tensor:
        y = x.new_empty(len(x), outputs)
        matmul(matrix, x.data_ptr(), inputs, len(x), address, y.data_ptr(), outputs)
        return y

    return product


def visible(there: Bool[Tensor, "n text"], start: int, stop: int) -> Bool[Tensor, "n 1 new seen"]:
    """Causal order behind a text of which some tokens are not there; each token sees itself at least."""
    seen = torch.arange(stop, device=there.device)
    own = seen[None] == seen[start:stop, None]
    real = F.pad(there[:, :stop], (0, max(stop - there.shape[1], 0)), value=True)
    return ((seen[None] <= seen[start:stop, None])[None] & real[:, None] | own[None])[:, None]


def _joined(first: Embedded, second: Embedded) -> Embedded:
    """Two conditions as one batch; texts are filled up to the longer one."""
    vector = torch.cat([first.vector, second.vector])
    if first.tokens is None or second.tokens is None or first.mask is None or second.mask is None:
        return Embedded(vector)
    longest = max(first.tokens.shape[1], second.tokens.shape[1])

    def filled(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        more = longest - tokens.shape[1]
        return F.pad(tokens, (0, 0, 0, more)), F.pad(mask, (0, more))

    (tokens, mask), (tokens2, mask2) = filled(first.tokens, first.mask), filled(second.tokens, second.mask)
    return Embedded(vector, torch.cat([tokens, tokens2]), torch.cat([mask, mask2]))
