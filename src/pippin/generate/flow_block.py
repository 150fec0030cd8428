r"""An affine autoregressive block: the invertible step that flows of pictures and clips are made of.

A causal transformer reads the tokens before each token and tells its mean and scale: $z_i = (x_i - \mu_i) / \sigma_i$.
Forward is one pass; the inverse goes token by token with kept keys, or in windows (`pippin.generate.jacobi`).

Notable here:
- the log-determinant is the sum of $-\log\sigma_i$: exact, at the cost of nothing
- the inverse reads through a `Reading`, which keeps keys in memory taken beforehand and can go back: token by token, in
  windows and with a known beginning are the same calls
- guidance reads the second branch as more rows of the same batch: one pass for both
- training and density take the layers as they are, the inverse takes their weights packed, and fewer, larger calls
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.generate.condition import Embedded
from pippin.generate.flow_native import NativeBlock
from pippin.generate.flow_reading import (
    Guide as Guide,
    Quick,
    Reading as Reading,
    Turn as Turn,
    linear_guidance as linear_guidance,
    sequential_invert as sequential_invert,
    visible,
)
from pippin.generate.jacobi import Guess, Jacobi, SolveInfo, jacobi_invert
from pippin.nn.adaptive import AdaptiveBlock
from pippin.nn.cache import KVCache, NoCache, Visible
from pippin.nn.linear import Linear
from pippin.nn.time_embedding import sinusoidal

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
        self.kept: dict[str, list[Quick] | NativeBlock] | None = None  # packed layers, in copies for inference
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
                # twenty times the published size: small models tell places apart within hundreds of steps
                parameter.normal_(0.0, 0.2, generator=generator)
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
            cache = Visible(visible(embedded.mask, 0, hidden.shape[1]))
        turn = self.turn_of(turn, 0, x.shape[1], 0 if prefix is None else prefix.shape[1])
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
        if solver is None or (solver.window == 1 and guess is None):
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
        """A copy for inference: its readings share packed weights, which do not follow later changes of the block."""
        if self.kept is not None:
            return self
        block = copy.copy(self)
        block.kept = {}
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
        assert self.proj_in.bias is not None
        vector = embedded.vector.to(self.proj_in.bias.device)
        if self.noise_up is not None and self.noise_down is not None and t is not None:
            waves = sinusoidal(t.log(), self.spec.width, scale=1.0).to(self.proj_in.bias.dtype)
            vector = vector + self.noise_down(F.gelu(self.noise_up(waves)))
        return vector[:, None]

    def told(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log scale, float32."""
        return self.bounded(self.proj_out(hidden).float())

    def bounded(self, out: Float[Tensor, "*batch both"]) -> tuple[Tensor, Tensor]:
        """Mean and log scale from the numbers that the transformer tells."""
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

    def turn_of(self, turn: Turn | None, first: int, stop: int, prefix: int) -> Turn | None:
        """Of the inputs that tell tokens ``first`` to ``stop``, behind a text that is not turned."""
        if turn is None:
            return None
        cos, sin = (part[max(first, self.behind) : stop] for part in turn)
        return F.pad(cos, (0, 0, prefix, 0), value=1.0), F.pad(sin, (0, 0, prefix, 0))
