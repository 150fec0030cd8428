r"""An affine autoregressive block: the invertible step that flows of pictures and clips are made of.

A causal transformer reads the tokens before each token and tells its mean and scale: $z_i = (x_i - \mu_i) / \sigma_i$.
Forward is one pass; the inverse goes token by token with kept keys, or in windows (`pippin.generate.jacobi`).

Notable here:
- the log-determinant is the sum of $-\log\sigma_i$: exact, at the cost of nothing
- the inverse reads through a `Reading`, which keeps keys in memory taken beforehand and can go back: token by token, in
  windows and with a known beginning are the same calls
- guidance reads the second branch as more rows of the same batch: one pass for both
- weights are packed for the inverse, in a copy: the block itself stays trainable
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.generate.condition import Embedded
from pippin.generate.jacobi import Guess, Jacobi, SolveInfo, jacobi_invert
from pippin.nn.adaptive import AdaptiveBlock
from pippin.nn.cache import KVCache, NoCache, Visible
from pippin.nn.linear import Linear
from pippin.nn.time_embedding import sinusoidal

Turn = tuple[Tensor, Tensor]
"""Cosine and sine of the place of each token, in natural order (`pippin.nn.axial.axial_tables`)."""
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Mean and log scale of guided tokens from: mean and log scale with the condition, those without, and the weight w of
each token (tokens, 1)."""
_ONE = math.log(math.e - 1)  # softplus of this is 1


@dataclass(frozen=True)
class FlowBlockSpec:
    """The form of a block.

    Attributes:
        layers: of its transformer.
        width: of its hidden states.
        heads: of its attention; they divide the width into even parts.
        reverse: whether it goes through the tokens from the last to the first.
        start: "zero" passes its first token unchanged; "token" begins with a learnt token, so that it changes, too.
        positions: "learned" for each place; "rotary" by tables given with each call, for any number of tokens.
        scale: "exp" or "softplus" of what the transformer tells; both are 1 at 0.
        soft_clip: bounds what it tells, mean and log scale, softly to plus and minus this; None for no bound.
        noise: whether it reads the standard deviation of the noise in its input.
        text: whether it reads the text's tokens, before the picture's; else their mean, as part of the vector, alone.

    Raises:
        InvalidArgument: numbers out of range.
    """

    layers: int = 2
    width: int = 64
    heads: int = 1
    reverse: bool = False
    start: Literal["zero", "token"] = "zero"
    positions: Literal["learned", "rotary"] = "learned"
    scale: Literal["exp", "softplus"] = "exp"
    soft_clip: float | None = None
    noise: bool = False
    text: bool = False

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise InvalidArgument(f"layers is {self.layers}; give at least 1")
        if self.soft_clip is not None and not 0 < self.soft_clip < math.inf:
            raise InvalidArgument(f"soft_clip is {self.soft_clip}; give a positive number, or None")


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
    """

    embedded: Embedded | None
    weight: float
    rule: Rule = linear_guidance
    anneal: bool = False
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise InvalidArgument(f"temperature is {self.temperature}; give a positive number")


class FlowBlock(nn.Module):
    """One block over (n, tokens, inner).

    Args:
        inner: numbers of a token.
        tokens: of a sample; with rotary positions a call may bring another number.
        spec: the form.

    Source: Zhai et al. 2024, arXiv:2412.06329, section 3.2; start token, softplus and soft clip: arXiv:2506.06276.
    """

    def __init__(self, inner: int, tokens: int, spec: FlowBlockSpec) -> None:
        super().__init__()
        self.inner, self.tokens, self.spec = inner, tokens, spec
        self.behind = int(spec.start == "zero")  # tokens that no input predicts
        self.proj_in = Linear(inner, spec.width, bias=True)
        self.layers = nn.ModuleList(
            AdaptiveBlock(spec.width, spec.heads, bias=True, activation="gelu") for _ in range(spec.layers)
        )
        self.proj_out = Linear(spec.width, 2 * inner, bias=True)
        self.start = nn.Parameter(torch.zeros(spec.width)) if spec.start == "token" else None
        learned = spec.positions == "learned"
        # one for each input, in the block's own order
        self.places = nn.Parameter(torch.zeros(tokens - self.behind, spec.width)) if learned else None
        self.noise_up = Linear(spec.width, 4 * spec.width, bias=True) if spec.noise else None
        self.noise_down = Linear(4 * spec.width, spec.width, bias=True) if spec.noise else None

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> FlowBlock:
        """Random weights; the block is the identity at first."""
        for layer in self.layers:
            assert isinstance(layer, AdaptiveBlock)
            layer.initialise(generator, depth=self.spec.layers)
        for linear in (self.proj_in, self.noise_up, self.noise_down):
            if linear is not None and linear.weight is not None and linear.bias is not None:
                linear.weight.normal_(0.0, linear.inputs**-0.5, generator=generator)
                linear.bias.zero_()
        for parameter in (self.proj_out.weight, self.proj_out.bias):
            assert parameter is not None
            parameter.zero_()
        for parameter in (self.places, self.start):
            if parameter is not None:
                parameter.normal_(0.0, 0.01, generator=generator)
        return self

    def forward(
        self,
        x: Float[Tensor, "n tokens inner"],
        embedded: Embedded,
        t: Float[Tensor, n] | None = None,
        *,
        turn: Turn | None = None,
    ) -> tuple[Float[Tensor, "n tokens inner"], Float[Tensor, n]]:
        """z, and the log of the absolute determinant of dz/dx in nats, float32.

        Args:
            x: the tokens, in natural order.
            embedded: the condition, of the block's width.
            t: standard deviation of the noise in x, of each sample; for blocks that read it.
            turn: places of the tokens, for blocks with rotary positions.

        Raises:
            InvalidArgument: ``t`` or ``turn`` where the block reads none, or not given where it does; another number of
                tokens than a block with learnt positions has.
        """
        mean, log_scale = self.stats(x, embedded, t, turn=turn)
        return (x - mean) * (-log_scale).exp(), -log_scale.sum((1, 2))

    def stats(
        self,
        x: Float[Tensor, "n tokens inner"],
        embedded: Embedded,
        t: Float[Tensor, n] | None = None,
        *,
        turn: Turn | None = None,
    ) -> tuple[Float[Tensor, "n tokens inner"], Float[Tensor, "n tokens inner"]]:
        """Mean and log scale of every token from those before it in the block's order; in natural order, float32."""
        self._check(x.shape[1], t, turn)
        x, turn = self.ordered(x), self._turned(turn)
        hidden = self.embed(x[:, :-1], 0, x.shape[1], self.vector(embedded, t))
        cache: KVCache = NoCache()
        prefix = embedded.tokens if self.spec.text else None
        if prefix is not None:
            assert embedded.mask is not None
            hidden = torch.cat([prefix.to(hidden.dtype), hidden], 1)
            cache = Visible(_visible(embedded.mask, 0, hidden.shape[1]))
        turn = self._turn_of(turn, 0, x.shape[1], 0 if prefix is None else prefix.shape[1])
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, turn, cache, number)
        mean, log_scale = self.told(hidden if prefix is None else hidden[:, prefix.shape[1] :])
        if self.behind:
            mean, log_scale = F.pad(mean, (0, 0, 1, 0)), F.pad(log_scale, (0, 0, 1, 0))
        return self.ordered(mean), self.ordered(log_scale)

    @torch.no_grad()
    def inverse(
        self,
        z: Float[Tensor, "n tokens inner"],
        embedded: Embedded,
        t: Float[Tensor, n] | None = None,
        *,
        turn: Turn | None = None,
        solver: Jacobi | None = None,
        guide: Guide | None = None,
        guess: Guess | None = None,
        on_tokens: Callable[[int, Tensor], None] | None = None,
    ) -> tuple[Float[Tensor, "n tokens inner"], SolveInfo]:
        """x of z, in natural order; undoes `forward` where nothing guides.

        Args:
            z: the noise, in natural order.
            embedded: as for `forward`.
            t: as for `forward`.
            turn: as for `forward`.
            solver: windows of tokens at a time; None for one token after another.
            guide: a second branch, and how it is used.
            guess: where the solver's windows begin from, in the block's order.
            on_tokens: called with the number of tokens done and the sequence so far, in the block's order.
        """
        reading = self.packed().reading(embedded, t, turn=turn, tokens=z.shape[1], guide=guide)
        z = self.ordered(z).float()
        if solver is None:
            x, info = sequential_invert(reading, z, on_tokens=on_tokens)
        else:
            x, info = jacobi_invert(reading, z, solver, guess=guess, on_tokens=on_tokens)
        return self.ordered(x), info

    def reading(
        self,
        embedded: Embedded,
        t: Float[Tensor, n] | None = None,
        *,
        turn: Turn | None = None,
        tokens: int | None = None,
        guide: Guide | None = None,
    ) -> Reading:
        """Begin to read sequences of up to ``tokens`` tokens, in the block's order; `packed` blocks are quicker."""
        tokens = self.tokens if tokens is None else tokens
        self._check(tokens, t, turn)
        return Reading(self, embedded, t, self._turned(turn), tokens, guide)

    def packed(self) -> FlowBlock:
        """A copy for inference, with weights in the form that is read fastest."""
        block = copy.deepcopy(self).requires_grad_(False).eval()
        for layer in block.layers:
            assert isinstance(layer, AdaptiveBlock)
            layer.attention.pack()
            layer.feed_forward.pack()
        block.proj_in.pack()
        block.proj_out.pack()
        return block

    def ordered(self, x: Tensor) -> Tensor:
        """From natural to the block's own order of tokens (dimension 1), or back."""
        return x.flip(1) if self.spec.reverse else x

    def embed(self, x: Tensor, first: int, stop: int, vector: Tensor) -> Tensor:
        """The inputs that tell tokens ``first`` to ``stop`` (the block's order), from the tokens before each: ``x``."""
        hidden: Tensor = self.proj_in(x)
        if self.start is not None and first == 0:
            start = self.start.to(hidden.dtype).expand(len(x), 1, -1)
            hidden = torch.cat([start, hidden], 1)
        if len(vector) != len(hidden):  # both branches of a guided inverse
            hidden = hidden.repeat(len(vector) // len(hidden), 1, 1)
        if self.places is not None:
            hidden = hidden + self.places[max(first - self.behind, 0) : stop - self.behind]
        return hidden + vector

    def vector(self, embedded: Embedded, t: Tensor | None) -> Float[Tensor, "n 1 width"]:
        """What is added to every input: condition and noise level."""
        vector = embedded.vector
        if self.noise_up is not None and self.noise_down is not None and t is not None:
            waves = sinusoidal(t.log(), self.spec.width, scale=1.0)
            vector = vector + self.noise_down(F.gelu(self.noise_up(waves)))
        return vector[:, None]

    def told(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log scale, float32."""
        out: Tensor = self.proj_out(hidden).float()
        clip = self.spec.soft_clip
        if clip is not None:
            out = clip * torch.tanh(out / clip)
        log_scale, mean = out.chunk(2, -1)
        if self.spec.scale == "softplus":
            raw = log_scale + _ONE
            # softplus is the exponential where that is small
            log_scale = torch.where(raw < -15, raw, F.softplus(raw.clamp(min=-15)).log())
        return mean, log_scale

    def _check(self, tokens: int, t: Tensor | None, turn: Turn | None) -> None:
        if self.spec.noise != (t is not None):
            raise InvalidArgument(
                "the block reads the noise level; give t" if self.spec.noise else "the block reads no noise level t"
            )
        if (self.spec.positions == "rotary") != (turn is not None):
            raise InvalidArgument("blocks with rotary positions take a turn, and no others")
        if self.places is not None and tokens != self.tokens:
            raise InvalidArgument(f"{tokens} tokens for a block with learnt positions of {self.tokens}")

    def _turned(self, turn: Turn | None) -> Turn | None:
        """Places in the block's own order."""
        return None if turn is None else (turn[0].flip(0), turn[1].flip(0)) if self.spec.reverse else turn

    def _turn_of(self, turn: Turn | None, first: int, stop: int, prefix: int) -> Turn | None:
        """Of the inputs that tell tokens ``first`` to ``stop``, behind a text that is not turned."""
        if turn is None:
            return None
        cos, sin = (part[max(first, self.behind) : stop] for part in turn)
        return F.pad(cos, (0, 0, prefix, 0), value=1.0), F.pad(sin, (0, 0, prefix, 0))


class Reading:
    """What a block has read of a batch so far, in its own order; made by `FlowBlock.reading`.

    Attributes:
        block: whose.
        tokens: at most.
    """

    def __init__(
        self, block: FlowBlock, embedded: Embedded, t: Tensor | None, turn: Turn | None, tokens: int, guide: Guide | None
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
        self._vector = block.vector(embedded, t)
        prefix = embedded.tokens if block.spec.text else None
        self._prefix = 0 if prefix is None else prefix.shape[1]
        there = embedded.mask if prefix is not None else None
        self._keys = _Keys(block.spec.layers, self._prefix + tokens - block.behind, there, temperature)
        if prefix is not None:
            self._pass(prefix, block._turn_of(turn, 0, 0, self._prefix))

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
        self._keys.rewind(at)
        if stop <= behind:
            zero = x.new_zeros(len(x), stop - first, block.inner)
            return zero, zero
        hidden = block.embed(x[:, max(first - 1, 0) : stop - 1], first, stop, self._vector)
        mean, log_scale = block.told(self._pass(hidden, block._turn_of(self._turn, first, stop, 0)))
        if self.guide is not None:
            mean, log_scale = self._guided(mean, log_scale, max(first, behind), stop)
        if first < behind:
            mean, log_scale = F.pad(mean, (0, 0, 1, 0)), F.pad(log_scale, (0, 0, 1, 0))
        return mean, log_scale

    def _pass(self, hidden: Tensor, turn: Turn | None) -> Tensor:
        """Through all layers; what was read is kept."""
        for number, layer in enumerate(self.block.layers):
            hidden = layer(hidden, turn, self._keys, number)
        self._keys.advance(hidden.shape[1])
        return hidden

    def _guided(self, mean: Tensor, log_scale: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
        assert self.guide is not None
        (mean, null_mean), (log_scale, null_log) = mean.chunk(2), log_scale.chunk(2)
        w = mean.new_full((stop - first, 1), self.guide.weight)
        if self.guide.anneal:
            w = w * torch.arange(first, stop, device=w.device)[:, None] / max(self.tokens - 1, 1)
        mean, log_scale = self.guide.rule(mean, log_scale, null_mean, null_log, w)
        clip = self.block.spec.soft_clip
        return mean, log_scale if clip is None else log_scale.clamp(-clip, clip)


@torch.no_grad()
def sequential_invert(
    reading: Reading,
    z: Float[Tensor, "n tokens inner"],
    *,
    x: Float[Tensor, "n tokens inner"] | None = None,
    first: int = 0,
    on_tokens: Callable[[int, Tensor], None] | None = None,
) -> tuple[Float[Tensor, "n tokens inner"], SolveInfo]:
    """As `jacobi_invert`, one token after another: exact, with as many passes as tokens."""
    x = torch.zeros_like(z) if x is None else x
    tokens = z.shape[1]
    for place in range(first, tokens):
        mean, log_scale = reading.stats(x, place, place + 1)
        torch.addcmul(mean, z[:, place : place + 1], log_scale.exp(), out=x[:, place : place + 1])
        if on_tokens is not None:
            on_tokens(place + 1, x)
    n = len(z)
    return x, SolveInfo((1,) * (tokens - first), z.new_zeros(n), torch.ones(n, dtype=torch.bool, device=z.device))


class _Keys:
    """Keys and values of a reading, in memory taken beforehand: a text with gaps first, then the inputs.

    Args:
        layers: of the block.
        capacity: text and inputs at most.
        there: which tokens of the text there are; None without text.
        temperature: by what the queries of each row are multiplied; None for nothing.
    """

    positions = None

    def __init__(self, layers: int, capacity: int, there: Tensor | None, temperature: Tensor | None) -> None:
        self.length, self._capacity, self._there, self._temperature = 0, capacity, there, temperature
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._mask: tuple[int, int, Tensor | None] = (-1, -1, None)

    def append(self, layer: int, k: Tensor, v: Tensor, window: int | None) -> _Read:
        """Put new keys and values behind those kept."""
        start, new = self.length, k.shape[2]
        stop = start + new
        kept = self._kept[layer]
        if kept is None:
            rows, heads, _, size = k.shape
            kept = (k.new_empty(rows, heads, self._capacity, size), v.new_empty(rows, heads, self._capacity, size))
            self._kept[layer] = kept
        keys, values = (part[:, :, :stop] for part in kept)
        keys[:, :, start:], values[:, :, start:] = k, v
        return _Read(keys, values, self._visible(start, new, k.device), self._temperature)

    def advance(self, new: int) -> None:
        """Keep what was appended to every layer."""
        self.length += new

    def rewind(self, length: int) -> None:
        """Forget from here on."""
        self.length = length

    def _visible(self, start: int, new: int, device: torch.device) -> Tensor | None:
        if self._mask[:2] != (start, new):
            mask = None
            if self._there is not None:
                mask = _visible(self._there, start, start + new)
            elif new > 1:
                seen = torch.arange(start + new, device=device)
                mask = seen[None] <= seen[start:, None]
            self._mask = (start, new, mask)
        return self._mask[2]


@dataclass(frozen=True)
class _Read:
    """What the new tokens of one layer look at."""

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    temperature: Tensor | None

    def attend(self, q: Tensor, scale: float | None) -> Tensor:
        """What they read."""
        if self.temperature is not None:
            q = q * self.temperature
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=self.mask, scale=scale)
        return y.transpose(1, 2).flatten(2)


def _visible(there: Bool[Tensor, "n text"], start: int, stop: int) -> Bool[Tensor, "n 1 new seen"]:
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
    tokens = [F.pad(part.tokens, (0, 0, 0, longest - part.tokens.shape[1])) for part in (first, second)]  # type: ignore[union-attr, arg-type]
    masks = [F.pad(part.mask, (0, longest - part.mask.shape[1])) for part in (first, second)]  # type: ignore[union-attr, arg-type]
    return Embedded(vector, torch.cat(tokens), torch.cat(masks))
