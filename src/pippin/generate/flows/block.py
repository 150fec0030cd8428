r"""An affine autoregressive block: the invertible layer of flows of images and videos.

A causal transformer predicts the mean and scale of each token from those before it: $z_i = (x_i - \mu_i) / \sigma_i$.
Forward is one pass; the inverse is sequential with a KV cache, or in windows (`pippin.generate.flows.jacobi`).

Notable here:
- the log-determinant is the sum of $-\log\sigma_i$: exact, at no extra cost
- the inverse uses a `SequentialDecoding`, whose cache is preallocated and can be truncated, so decoding token by token,
  in windows, or after known tokens uses the same calls
- the unconditional branch of guidance is the second half of the batch, computed in the same pass
- training and density use the modules; the inverse uses packed weights, in fewer and larger calls
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

from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import EmbeddedConditioning
from pippin.generate.flows.decoding import (
    LinearGuidance as LinearGuidance,
    PackedLayer,
    RotaryTables as RotaryTables,
    SequentialDecoding as SequentialDecoding,
    linear_guidance as linear_guidance,
    sequential_invert as sequential_invert,
    visible,
)
from pippin.generate.flows.jacobi import Guess, Jacobi, SolveInfo, jacobi_invert
from pippin.generate.flows.native import NativeBlock
from pippin.nn.images.adaptive_norm import AdaptiveBlock
from pippin.nn.images.time_embedding import sinusoidal
from pippin.nn.kv_cache import KVCache, MaskedCache, NoCache
from pippin.nn.linear import Linear

_ONE = math.log(math.e - 1)  # softplus of this is 1


@checked
@dataclass(frozen=True)
class FlowBlockSpec:
    """Configuration of a `FlowBlock`.

    Attributes:
        num_hidden_layers: number of transformer layers.
        hidden_size: dimension of the hidden states.
        num_attention_heads: number of attention heads; the hidden size over it must be an even whole number.
        reverse: whether tokens are processed from the last to the first.
        start: "zero" leaves the first token unchanged; "token" predicts it, too, from a learned start token.
        position_embedding: "learned" for a table of this block; "rotary" for tables that are given to each call, which
            allow any number of tokens.
        scale: "exp" or "softplus" of the transformer's output, shifted so that both are 1 at 0.
        soft_clip: bound on the predicted mean and log scale, applied by a tanh; None for no bound.
        noise: whether the block is conditioned on the standard deviation of the noise in its input.
        text: whether the tokens of the text precede those of the image; if not, the block gets only their mean, as part
            of the condition's vector.

    Raises:
        InvalidArgument: numbers out of range.
    """

    num_hidden_layers: PositiveInt = 2
    hidden_size: PositiveInt = 64
    num_attention_heads: PositiveInt = 1
    reverse: bool = False
    start: Literal["zero", "token"] = "zero"
    position_embedding: Literal["learned", "rotary"] = "learned"
    scale: Literal["exp", "softplus"] = "exp"
    soft_clip: PositiveFloat | None = None
    noise: bool = False
    text: bool = False


class FlowBlock(nn.Module):
    """An invertible block over tokens of shape (n, tokens, inner).

    Args:
        inner: dimension of a token.
        tokens: number of tokens of a sample; with rotary positions, a call may have another number.
        spec: the configuration.

    Source: Zhai et al. 2024, arXiv:2412.06329, section 3.2; start token, softplus and soft clip: arXiv:2506.06276.
    """

    def __init__(self, inner: int, tokens: int, spec: FlowBlockSpec) -> None:
        super().__init__()
        self.inner, self.tokens, self.spec = inner, tokens, spec
        # packed weights by layout, filled on use; None except in the copies for inference that `packed` makes
        self.packed_weights: dict[str, list[PackedLayer] | NativeBlock] | None = None
        self.num_unpredicted = int(spec.start == "zero")  # number of leading tokens that are not predicted
        self.proj_in = Linear(inner, spec.hidden_size, bias=True)
        self.layers = nn.ModuleList(
            AdaptiveBlock(spec.hidden_size, spec.num_attention_heads, bias=True, activation="gelu")
            for _ in range(spec.num_hidden_layers)
        )
        self.proj_out = Linear(spec.hidden_size, 2 * inner, bias=True)
        self.start = nn.Parameter(torch.zeros(spec.hidden_size)) if spec.start == "token" else None
        learned = spec.position_embedding == "learned"
        # one embedding for each input token, in the block's own order
        self.position_embedding = (
            nn.Parameter(torch.zeros(tokens - self.num_unpredicted, spec.hidden_size)) if learned else None
        )
        self.noise_up = Linear(spec.hidden_size, 4 * spec.hidden_size, bias=True) if spec.noise else None
        self.noise_down = Linear(4 * spec.hidden_size, spec.hidden_size, bias=True) if spec.noise else None

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> FlowBlock:
        """Set random weights with which the block is the identity."""
        for layer in self.layers:
            assert isinstance(layer, AdaptiveBlock)
            layer.initialize(generator, depth=self.spec.num_hidden_layers)
        for linear in (self.proj_in, self.noise_up, self.noise_down):
            if linear is not None and linear.weight is not None and linear.bias is not None:
                linear.weight.normal_(0.0, linear.inputs**-0.5, generator=generator)
                linear.bias.zero_()
        for parameter in (self.proj_out.weight, self.proj_out.bias):
            assert parameter is not None
            parameter.zero_()
        for parameter in (self.position_embedding, self.start):
            if parameter is not None:
                # twenty times the published standard deviation, with which small models learn positions faster
                parameter.normal_(0.0, 0.2, generator=generator)
        return self

    def forward(
        self,
        x: Float[Tensor, "n tokens inner"],
        embedded: EmbeddedConditioning,
        t: Float[Tensor, n] | None = None,
        *,
        cos_sin: RotaryTables | None = None,
    ) -> tuple[Float[Tensor, "n tokens inner"], Float[Tensor, n]]:
        """Transform x into z; return z and the log of the absolute determinant of dz/dx, in nats, float32.

        Args:
            x: the tokens, in natural order.
            embedded: the embedded condition, of the block's hidden size.
            t: standard deviation of the noise in x, of each sample; for blocks that are conditioned on it.
            cos_sin: cosines and sines of the tokens' positions, for blocks with rotary positions.

        Raises:
            InvalidArgument: ``t`` or ``cos_sin`` is given to a block that does not use it, or is missing; or the number
                of tokens differs from that of the learned positions.
        """
        mean, log_scale = self.stats(x, embedded, t, cos_sin=cos_sin)
        return (x - mean) * (-log_scale).exp(), -log_scale.sum((1, 2))

    def stats(
        self,
        x: Float[Tensor, "n tokens inner"],
        embedded: EmbeddedConditioning,
        t: Float[Tensor, n] | None = None,
        *,
        cos_sin: RotaryTables | None = None,
    ) -> tuple[Float[Tensor, "n tokens inner"], Float[Tensor, "n tokens inner"]]:
        """Mean and log scale of every token, predicted from those before it in the block's order.

        Arguments and errors as for `forward`; the results are in natural order, float32.
        """
        self._check(x.shape[1], t, cos_sin)
        x, cos_sin = self.ordered(x), self._ordered_cos_sin(cos_sin)
        hidden = self.embed(x[:, :-1], 0, x.shape[1], self.vector(embedded, t))
        cache: KVCache = NoCache()
        prefix = embedded.tokens if self.spec.text else None
        if prefix is not None:
            assert embedded.mask is not None
            hidden = torch.cat([prefix.to(hidden.dtype), hidden], 1)
            cache = MaskedCache(visible(embedded.mask, 0, hidden.shape[1]))
        cos_sin = self.select_cos_sin(cos_sin, 0, x.shape[1], 0 if prefix is None else prefix.shape[1])
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, cos_sin, cache, number)
        mean, log_scale = self.split_output(hidden if prefix is None else hidden[:, prefix.shape[1] :])
        if self.num_unpredicted:
            mean, log_scale = F.pad(mean, (0, 0, 1, 0)), F.pad(log_scale, (0, 0, 1, 0))
        return self.ordered(mean), self.ordered(log_scale)

    @torch.no_grad()
    def inverse(
        self,
        z: Float[Tensor, "n tokens inner"],
        embedded: EmbeddedConditioning,
        t: Float[Tensor, n] | None = None,
        *,
        cos_sin: RotaryTables | None = None,
        solver: Jacobi | None = None,
        guide: LinearGuidance | None = None,
        guess: Guess | None = None,
        on_tokens: Callable[[int, Tensor], None] | None = None,
    ) -> tuple[Float[Tensor, "n tokens inner"], SolveInfo]:
        """Compute x from z, both in natural order; the inverse of `forward` without guidance.

        Args:
            z: the noise, in natural order.
            embedded: as for `forward`.
            t: as for `forward`.
            cos_sin: as for `forward`.
            solver: options of Jacobi iteration over windows of tokens; None to compute one token after another.
            guide: guidance by a second branch; None for none.
            guess: initial values of a window, in the block's order.
            on_tokens: called with the number of computed tokens and the sequence so far, in the block's order.

        Returns:
            x, and the iterations and convergence of the inversion.
        """
        decoding = self.packed().decoding(embedded, t, cos_sin=cos_sin, tokens=z.shape[1], guide=guide)
        z = self.ordered(z).float()
        if solver is None or (solver.window == 1 and guess is None):
            x, info = sequential_invert(decoding, z, on_tokens=on_tokens)
        else:
            x, info = jacobi_invert(decoding, z, solver, guess=guess, on_tokens=on_tokens)
        return self.ordered(x), info

    def decoding(
        self,
        embedded: EmbeddedConditioning,
        t: Float[Tensor, n] | None = None,
        *,
        cos_sin: RotaryTables | None = None,
        tokens: int | None = None,
        guide: LinearGuidance | None = None,
    ) -> SequentialDecoding:
        """Start decoding sequences of up to ``tokens`` tokens, in the block's order; faster with a `packed` block."""
        tokens = self.tokens if tokens is None else tokens
        self._check(tokens, t, cos_sin)
        return SequentialDecoding(self, embedded, t, self._ordered_cos_sin(cos_sin), tokens, guide)

    def packed(self) -> FlowBlock:
        """A copy for inference, whose decodings share packed weights; later changes of the block have no effect."""
        if self.packed_weights is not None:
            return self
        block = copy.copy(self)
        block.packed_weights = {}
        return block

    def ordered(self, x: Tensor) -> Tensor:
        """Convert tokens (dimension 1) from natural order to the block's own order, or back."""
        return x.flip(1) if self.spec.reverse else x

    def embed(self, x: Tensor, first: int, stop: int, vector: Tensor) -> Tensor:
        """Input embeddings (n, stop - first, width) from which tokens ``first`` to ``stop - 1`` are predicted.

        Args:
            x: the token before each of them, in the block's order.
            first: first predicted token.
            stop: one past the last predicted token.
            vector: the result of `vector`.
        """
        hidden: Tensor = self.proj_in(x)
        if self.start is not None and first == 0:
            start = self.start.to(hidden.dtype).expand(len(x), 1, -1)
            hidden = torch.cat([start, hidden], 1)
        if len(vector) != len(hidden):  # guidance: the conditional and the unconditional branch
            hidden = hidden.repeat(len(vector) // len(hidden), 1, 1)
        if self.position_embedding is not None:
            hidden = (
                hidden + self.position_embedding[max(first - self.num_unpredicted, 0) : stop - self.num_unpredicted]
            )
        return hidden + vector

    def vector(self, embedded: EmbeddedConditioning, t: Tensor | None) -> Float[Tensor, "n 1 width"]:
        """Embedding of condition and noise level, which is added to every input."""
        assert self.proj_in.bias is not None
        vector = embedded.vector.to(self.proj_in.bias.device)
        if self.noise_up is not None and self.noise_down is not None and t is not None:
            features = sinusoidal(t.log(), self.spec.hidden_size, scale=1.0).to(self.proj_in.bias.dtype)
            vector = vector + self.noise_down(F.gelu(self.noise_up(features)))
        return vector[:, None]

    def split_output(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log scale from the last hidden states, float32."""
        return self.bounded(self.proj_out(hidden).float())

    def bounded(self, out: Float[Tensor, "*batch both"]) -> tuple[Tensor, Tensor]:
        """Mean and log scale from the outputs of the transformer, softly clipped."""
        clip = self.spec.soft_clip
        if clip is not None:
            out = clip * torch.tanh(out / clip)
        log_scale, mean = out.chunk(2, -1)
        if self.spec.scale == "softplus":  # log softplus(out + softplus^-1(1))
            raw = log_scale + _ONE
            # softplus(x) is about exp(x) for very negative x, so its log is x; the logarithm itself would underflow
            log_scale = torch.where(raw < -15, raw, F.softplus(raw.clamp(min=-15)).log())
        return mean, log_scale

    def _check(self, tokens: int, t: Tensor | None, cos_sin: RotaryTables | None) -> None:
        """Refuse arguments that do not fit the configuration; see `forward`."""
        if self.spec.noise != (t is not None):
            raise InvalidArgument(
                "the block reads the noise level; give t"
                if self.spec.noise
                else "the block reads no noise level; leave t at None"
            )
        if (self.spec.position_embedding == "rotary") != (cos_sin is not None):
            raise InvalidArgument("blocks with rotary positions need cos_sin, and no others take it")
        if self.position_embedding is not None and tokens != self.tokens:
            raise InvalidArgument(f"{tokens} tokens for a block with learned positions of {self.tokens}")

    def _ordered_cos_sin(self, cos_sin: RotaryTables | None) -> RotaryTables | None:
        """Rotary tables in the block's own order."""
        return None if cos_sin is None else (cos_sin[0].flip(0), cos_sin[1].flip(0)) if self.spec.reverse else cos_sin

    def select_cos_sin(self, cos_sin: RotaryTables | None, first: int, stop: int, prefix: int) -> RotaryTables | None:
        """Rotary tables of the inputs for tokens ``first`` to ``stop - 1``, after ``prefix`` unrotated tokens."""
        if cos_sin is None:
            return None
        cos, sin = (table[max(first, self.num_unpredicted) : stop] for table in cos_sin)
        return F.pad(cos, (0, 0, prefix, 0), value=1.0), F.pad(sin, (0, 0, prefix, 0))
