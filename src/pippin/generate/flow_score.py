r"""Flow-score matching: a network learns the score of a flow while the flow is learnt, and takes noise off with it.

Notable here:
- a flow is trained on samples with noise, so what it draws is noisy; the score of its density says where the noise lies
- the exact score needs the flow's whole gradient, and is as rough as the flow; a network that is fitted to it is
  smooth, has no order of tokens, and costs one pass
- the target comes with the gradient that trains the flow anyway: one backward pass gives both
- frames see the frames before them and one frame ahead, whatever the depth, so a stream is late by one frame
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.generate.condition import Condition, ConditionEmbedding, ConditionSpec, Samples
from pippin.nn.adaptive import AdaptiveBlock
from pippin.nn.axial import axial_tables, grid
from pippin.nn.cache import Visible
from pippin.nn.linear import Linear
from pippin.train.objective import Loss

if TYPE_CHECKING:
    from pippin.generate.starflow import StarFlow


@dataclass(frozen=True)
class ScoreConfig:
    """How large the score network is.

    Attributes:
        layers: of attention.
        width: of its tokens.
        heads: of its attention.
        window: frames that a layer looks back at, its own among them.

    Raises:
        InvalidArgument: a number below 1.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    window: int = 4

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "window"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"ScoreConfig: {name} is {getattr(self, name)}; give 1 or more")

    @property
    def past(self) -> int:
        """Frames before a frame that its score depends on: each layer looks back by a window less itself."""
        return self.layers * (self.window - 1)


class ScoreNetwork(nn.Module):
    r"""$s_\phi(\tilde x)$, about $\sigma \nabla_{\tilde x}(-\log p(\tilde x))$: near the noise that was added, over σ.

    Args:
        config: its size.
        inner: numbers of a token.
        size: rows and columns of tokens of a frame.
        condition: what it reads.
    """

    def __init__(self, config: ScoreConfig, inner: int, size: tuple[int, int], condition: ConditionSpec) -> None:
        super().__init__()
        self.config, self.size = config, size
        self.embedding = ConditionEmbedding(condition, config.width)
        self.into = Linear(inner, config.width, bias=True)
        self.blocks = nn.ModuleList(
            AdaptiveBlock(config.width, config.heads, vector=0 if condition.empty else config.width)
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = Linear(config.width, inner, bias=True)

    def forward(
        self, tokens: Float[Tensor, "n frames places inner"], condition: Condition | None = None
    ) -> Float[Tensor, "n frames places inner"]:
        """The score of every token, times σ."""
        n, frames, places, inner = tokens.shape
        hidden = self.into(tokens.reshape(n, frames * places, inner))
        turn = axial_tables(grid(frames, *self.size).to(tokens.device), self.config.width // self.config.heads)
        embedded = self.embedding(condition, n)
        vector = None if self.embedding.spec.empty else embedded.vector[:, None]
        for number, block in enumerate(self.blocks):
            seen = frame_mask(frames, places, self.config.window, ahead=1 if number == 0 else 0)
            hidden = block(hidden, turn, Visible(seen.to(tokens.device)), number, vector=vector)
        out: Tensor = self.head(self.norm(hidden))
        return out.float().view(n, frames, places, inner)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> ScoreNetwork:
        """Random weights, and scores of zero."""
        self.embedding.initialise(generator)
        assert self.into.weight is not None
        assert self.head.weight is not None
        self.into.weight.normal_(0.0, self.into.inputs**-0.5, generator=generator)
        for block in self.blocks:
            assert isinstance(block, AdaptiveBlock)
            block.initialise(generator, depth=self.config.layers)
        self.head.weight.zero_()
        return self


def frame_mask(frames: int, places: int, window: int, *, ahead: int = 0) -> Bool[Tensor, "1 1 tokens tokens"]:
    """Who sees whom: tokens of one frame see each other, ``window - 1`` frames before theirs and ``ahead`` behind it.

    >>> frame_mask(3, 1, 2, ahead=1)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    """
    number = torch.arange(frames).repeat_interleave(places)
    back = number[:, None] - number[None, :]
    return ((back < window) & (back >= -ahead))[None, None]


class LikelihoodAndScore:
    r"""Both losses of a `StarFlow`, in one pass: an objective for `pippin.train.Trainer`.

    Samples get noise of the model's σ. The flow's loss is $-\log p(\tilde x)$ for each number of a sample; the score
    network's is $\|s_\phi(\tilde x) - \sigma \nabla_{\tilde x} (-\log p(\tilde x))\|^2$, also for each number. The
    second does not touch the flow, and its target is a by-product of the first one's backward pass. Without a score
    network there is only the first. Metrics: "nll" (nats for each number) and "score".

    Args:
        drop: share of samples whose condition is left out, as guidance needs.
        weight: of the score network's loss.

    Raises:
        InvalidArgument: a share outside 0 to 1, a weight that is not positive; later, a share above 0 for a model whose
            condition has no null.

    Source: STARFlow-V, arXiv:2511.20462, section on flow-score matching.
    """

    unit = "samples"

    def __init__(self, *, drop: float = 0.0, weight: float = 1.0) -> None:
        if not 0 <= drop < 1:
            raise InvalidArgument(f"drop is {drop}; give a share from 0 to below 1")
        if not weight > 0:
            raise InvalidArgument(f"weight is {weight}; give a positive number")
        self.drop, self.weight = drop, weight

    def __call__(self, model: nn.Module, batch: Samples, generator: torch.Generator) -> Loss:
        """The loss of a batch of clips or pictures from -1 to 1."""
        flow: StarFlow = model  # type: ignore[assignment]
        condition = batch.condition
        if condition is not None and self.drop:
            if not flow.condition.null:
                raise InvalidArgument(
                    f"drop={self.drop} leaves conditions out; make the model's ConditionSpec null=True"
                )
            kept = torch.rand(len(batch), generator=generator, device=generator.device) >= self.drop
            condition = condition.dropped(kept)
        latents = flow.to_latents(batch.x)
        drawn = torch.randn(latents.shape, generator=generator, device=generator.device).to(latents)
        noisy = latents + flow.config.noise * drawn
        numbers = noisy[0].numel()
        learning = torch.is_grad_enabled()
        with torch.enable_grad():
            noisy.requires_grad_()
            total = -flow.latent_log_prob(noisy, condition).sum()
            if flow.score_network is None:
                return Loss(total / numbers, len(batch), {"nll": total.detach() / numbers})
            parameters = [p for p in flow.flow_parameters() if p.requires_grad] if learning else []
            into, *slopes = torch.autograd.grad(total, [noisy, *parameters], allow_unused=True)
        loss = total.detach() / numbers
        if parameters:
            known = [None if slope is None else slope / numbers for slope in slopes]
            loss = _Known.apply(loss, known, *parameters)  # type: ignore[no-untyped-call]
        guess = flow.score_network(flow.to_tokens(noisy.detach()), condition)
        off = F.mse_loss(guess, flow.to_tokens(flow.config.noise * into), reduction="sum") / guess[0].numel()
        metrics: dict[str, Tensor | float] = {"nll": total.detach() / numbers, "score": off.detach()}
        return Loss(loss + self.weight * off, len(batch), metrics)


class _Known(torch.autograd.Function):
    """A value whose gradients with respect to parameters are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slopes: Sequence[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.slopes = slopes
        return value.clone()

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(None if slope is None else change * slope for slope in ctx.slopes))
