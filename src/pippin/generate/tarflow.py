r"""TarFlow: a transformer flow of pictures, trained by likelihood alone, that both scores and draws.

A picture's patches pass blocks of affine autoregression (`flow_block`) that take turns in their direction. The density
is exact: $\log p(x) = \log N(z) + \sum \log|\det|$.

Notable here:
- the noise that a model is trained with is part of its configuration, so that no density or denoising is asked of the
  wrong model: uniform noise for bits per dimension, Gaussian noise for samples, a range of noise for denoising in steps
- denoising is one step along the exact score: $\hat x = y + \sigma^2 \nabla \log p(y)$
- samples are drawn token by token, or windows of tokens at a time; both give the same samples
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument, InvalidInput, NonFiniteSample
from pippin.generate.condition import Condition, ConditionEmbedding, ConditionSpec, Samples
from pippin.generate.contract import OnStep, Step, check_samples, prepare
from pippin.generate.flow_block import FlowBlock, FlowBlockSpec, Guide, Turn
from pippin.generate.folder import device_of
from pippin.generate.jacobi import Jacobi, SolveInfo
from pippin.generate.noise import Noise
from pippin.nn.axial import axial_tables, grid
from pippin.nn.patches import patchify, unpatchify
from pippin.train.objective import Loss


@dataclass(frozen=True)
class TarFlowConfig:
    """The form of a flow.

    Attributes:
        shape: channels, height and width of a picture.
        patch: height and width of a patch.
        layers: of the transformer of each block, from the data to the noise.
        width: of hidden states.
        heads: of the attention; None for one for each 64 of the width.
        condition: what it reads; no map. Text is read in the last block, as a prefix; its mean in all.
        noise: standard deviation of the Gaussian noise that it is trained with; 0 for uniform noise as wide as a level.
        noise_range: least and largest standard deviation, for a model that is told it; None for the one above.
        levels: of the pictures.
        alternate: whether every second block goes from the last token to the first; False is for comparisons.
        start: as `FlowBlockSpec`.
        positions: as `FlowBlockSpec`.
        scale: as `FlowBlockSpec`.
        soft_clip: as `FlowBlockSpec`.

    Raises:
        InvalidArgument: numbers out of range or that do not divide each other.
    """

    shape: tuple[int, int, int]
    patch: int = 2
    layers: tuple[int, ...] = (2, 2, 2, 2)
    width: int = 64
    heads: int | None = None
    condition: ConditionSpec = field(default_factory=ConditionSpec)
    noise: float = 0.0
    noise_range: tuple[float, float] | None = None
    levels: int = 256
    alternate: bool = True
    start: Literal["zero", "token"] = "zero"
    positions: Literal["learned", "rotary"] = "learned"
    scale: Literal["exp", "softplus"] = "exp"
    soft_clip: float | None = None

    def __post_init__(self) -> None:
        _, height, width = self.shape
        if min(self.shape) < 1 or self.patch < 1 or height % self.patch or width % self.patch:
            raise InvalidArgument(f"pictures of shape {self.shape} cannot be cut into patches of {self.patch}")
        if self.tokens < 2 or not self.layers:
            raise InvalidArgument(f"{self.tokens} tokens and {len(self.layers)} blocks; give at least 2 and 1")
        heads = self.attention_heads
        if heads < 1 or self.width % heads or (self.width // heads) % 2:
            raise InvalidArgument(f"{heads} heads do not divide a width of {self.width} into even parts; give heads")
        if not 0 <= self.noise < math.inf or self.levels < 2:
            raise InvalidArgument(f"noise is {self.noise} and levels {self.levels}; give 0 or more and at least 2")
        if self.noise_range is not None:
            low, high = self.noise_range
            if not 0 < low < high < math.inf or self.noise:
                raise InvalidArgument(
                    f"noise_range is {self.noise_range} and noise {self.noise}; the range rises from above 0, and "
                    "noise stays 0 beside it"
                )
        if self.condition.map:
            raise InvalidArgument("a flow reads no map; give classes, text or a vector")

    @property
    def tokens(self) -> int:
        """Patches of a picture."""
        return self.shape[1] * self.shape[2] // self.patch**2

    @property
    def inner(self) -> int:
        """Numbers of a patch."""
        return self.shape[0] * self.patch**2

    @property
    def attention_heads(self) -> int:
        """Heads of the attention."""
        return max(self.width // 64, 1) if self.heads is None else self.heads

    @property
    def numbers(self) -> int:
        """Numbers of a picture."""
        return math.prod(self.shape)


class TarFlow(nn.Module):
    """The flow.

    Attributes:
        config: its form.
        facts: see `pippin.generate.contract.Generator`.

    Source: Zhai et al. 2024, arXiv:2412.06329; with a range of noise: Chen et al. 2026, arXiv:2604.20041.
    """

    config_type = TarFlowConfig

    def __init__(self, config: TarFlowConfig) -> None:
        super().__init__()
        self.config, self.facts = config, cast(dict[str, Any], {})
        spec = FlowBlockSpec(
            width=config.width,
            heads=config.attention_heads,
            start=config.start,
            positions=config.positions,
            scale=config.scale,
            soft_clip=config.soft_clip,
            noise=config.noise_range is not None,
        )
        last = len(config.layers) - 1
        self.blocks = nn.ModuleList(
            FlowBlock(
                config.inner,
                config.tokens,
                replace(
                    spec,
                    layers=layers,
                    reverse=config.alternate and number % 2 == 1,
                    text=bool(config.condition.text) and number == last,
                ),
            )
            for number, layers in enumerate(config.layers)
        )
        self.embeddings = nn.ModuleList(ConditionEmbedding(config.condition, config.width) for _ in config.layers)
        self._turns: Turn | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        return self.config.shape

    @property
    def condition(self) -> ConditionSpec:
        """What it reads."""
        return self.config.condition

    def initialise(self, seed: int = 0) -> TarFlow:
        """Random weights; the flow is the identity at first."""
        generator = torch.Generator().manual_seed(seed)
        for block, embedding in zip(self.blocks, self.embeddings, strict=True):
            cast(FlowBlock, block).initialise(generator)
            cast(ConditionEmbedding, embedding).initialise(generator, size=0.2)
        return self

    def forward(
        self, x: Float[Tensor, "n channels height width"], condition: Condition | None = None, t: Any = None
    ) -> tuple[Float[Tensor, "n tokens inner"], Float[Tensor, n]]:
        """The noise z of pictures, and the log of the absolute determinant of dz/dx in nats.

        Args:
            x: from -1 to 1, with the noise that the model was trained with.
            condition: what they show; None for nothing.
            t: standard deviation of their noise, a number or one for each; for models with a range of noise.

        Raises:
            InvalidArgument: another shape, a condition that the model does not read, or a ``t`` missing, out of the
                range, or given to a model without one.
            InvalidInput: integers, or values that are not finite.
        """
        check_samples(x, self.shape)
        z, level = patchify(x, self.config.patch), self._level(t, len(x))
        total = torch.zeros(len(x), device=x.device)
        for block, embedding in zip(self.blocks, self.embeddings, strict=True):
            z, log_det = block(z, embedding(condition, len(x)), level, turn=self._turn())
            total = total + log_det
        return z, total

    def log_prob(
        self, x: Float[Tensor, "n channels height width"], condition: Condition | None = None, t: Any = None
    ) -> Float[Tensor, n]:
        """The log density of each picture, with its noise, in nats; arguments and errors as `forward`."""
        z, log_det = self(x, condition, t)
        log_prob: Tensor = log_det - 0.5 * z.square().sum((1, 2)) - 0.5 * math.log(2 * math.pi) * self.config.numbers
        return log_prob

    @torch.no_grad()
    def bits_per_dim(
        self, images: Integer[Tensor, "n channels height width"], condition: Condition | None = None, *, seed: int = 0
    ) -> Float[Tensor, n]:
        r"""A bound of $-\log_2 P$ of pictures of levels for each of their numbers, by one draw of uniform noise.

        Args:
            images: levels from 0 up.
            condition: what they show.
            seed: of the noise.

        Raises:
            InvalidArgument: a model trained with Gaussian noise, which knows no density of levels; another shape.
            InvalidInput: no integers, or levels out of range.
        """
        config = self.config
        if config.noise or config.noise_range:
            raise InvalidArgument(
                f"bits per dimension mean nothing for a model trained with Gaussian noise "
                f"({config.noise_range or config.noise}); train one with noise=0"
            )
        if images.is_floating_point() or images.dtype == torch.bool:
            raise InvalidInput(f"bits per dimension are those of integer levels, got {images.dtype}")
        if len(images) and (int(images.min()) < 0 or int(images.max()) >= config.levels):
            raise InvalidInput(
                f"levels from {int(images.min())} to {int(images.max())}; 0 to {config.levels - 1} expected"
            )
        noise = Noise(len(images), seed=seed, device=images.device).uniform(images.shape[1:])
        log_prob = self.log_prob((images + noise) * (2 / config.levels) - 1, condition)
        return math.log2(config.levels / 2) - log_prob / (config.numbers * math.log(2))

    def score(
        self, x: Float[Tensor, "n channels height width"], condition: Condition | None = None, t: Any = None
    ) -> Float[Tensor, "n channels height width"]:
        """The gradient of the log density; arguments and errors as `forward`. Not under ``torch.inference_mode``."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.log_prob(x, condition, t).sum(), x)
        return slope

    def denoise(
        self,
        x: Float[Tensor, "n channels height width"],
        sigma: float | None = None,
        condition: Condition | None = None,
    ) -> Float[Tensor, "n channels height width"]:
        r"""The mean of the clean picture given a noisy one, $x + \sigma^2 \nabla\log p(x)$.

        Args:
            x: pictures with Gaussian noise.
            sigma: its standard deviation; None for the model's own ``noise``.
            condition: what they show.

        Raises:
            InvalidArgument: a sigma that is negative, or missing where the model has none of its own; as `forward`.

        Source: arXiv:2412.06329, section 3.4 (Tweedie's formula).
        """
        config = self.config
        sigma = (config.noise or None) if sigma is None else sigma
        if sigma is None or not 0 <= sigma < math.inf:
            raise InvalidArgument(f"sigma is {sigma}; give the standard deviation of the pictures' noise, 0 or more")
        if sigma == 0:
            return x
        return x + sigma**2 * self.score(x, condition, sigma if config.noise_range else None)

    @torch.no_grad()
    def inverse(
        self,
        z: Float[Tensor, "n tokens inner"],
        condition: Condition | None = None,
        t: Any = None,
        *,
        solver: Jacobi | None = None,
        guides: tuple[Guide | None, ...] | None = None,
        on_step: OnStep | None = None,
    ) -> tuple[Float[Tensor, "n channels height width"], tuple[SolveInfo, ...]]:
        """Pictures of noise, and how each block's inversion went, from the data to the noise; undoes `forward`.

        Args:
            z: the noise.
            condition: what to show.
            t: as `forward`.
            solver: windows of tokens at a time; None for one token after another.
            guides: of each block, from the data to the noise; None for no guidance.
            on_step: called after each token or window; steps are tokens of blocks.

        Raises:
            NonFiniteSample: a token that is not finite; block and token are named, in natural order.
            InvalidArgument: as `forward`.
        """
        count, level = len(self.blocks), self._level(t, len(z))
        infos: list[SolveInfo] = []
        for number in reversed(range(count)):
            block = cast(FlowBlock, self.blocks[number])
            embedded = self.embeddings[number](condition, len(z))

            def tell(done: int, x: Tensor, number: int = number, block: FlowBlock = block) -> None:
                if on_step is not None:
                    before = (count - 1 - number) * self.config.tokens
                    on_step(Step(before + done, count * self.config.tokens, lambda: self._picture(block.ordered(x))))

            z, info = block.inverse(
                z,
                embedded,
                level,
                turn=self._turn(),
                solver=solver,
                guide=None if guides is None else guides[number],
                on_tokens=None if on_step is None else tell,
            )
            _check_finite(block.ordered(z), block, number)
            infos.append(info)
        return self._picture(z), tuple(reversed(infos))

    def sample(
        self,
        condition: Condition | None = None,
        n: int | None = None,
        *,
        steps: int | None = None,
        guidance: float = 1.0,
        seed: int = 0,
        on_step: OnStep | None = None,
        solver: Jacobi | Literal["sequential", "jacobi"] = "sequential",
        anneal: bool = True,
        temperature: float = 1.0,
        t: float | None = None,
        denoise: bool = True,
    ) -> Float[Tensor, "n channels height width"]:
        """Draw pictures, from about -1 to 1.

        Args:
            condition: what each is to show; None for nothing.
            n: pictures; None for as many as the condition has, or 1.
            steps: with the Jacobi solver, the most rounds of a window; None for as many as settle it. Token by token
                there is no choice, and it stays None.
            guidance: 1 for none; w of the papers is this less 1.
            seed: picture i depends on ``seed + i`` alone.
            on_step: called after each token or window.
            solver: "sequential", "jacobi" (in windows that pay for so many pictures), or how its windows are solved.
            anneal: whether guidance grows over the tokens of each block.
            temperature: by which the second branch of guidance divides its attention scores; with another value than 1
                guidance works without a condition, too.
            t: noise level to draw at, of a model with a range; None for its largest.
            denoise: whether the noise of the training is taken from the samples, in one step.

        Raises:
            InvalidArgument: numbers out of range, a condition that the model does not read, or guidance without
                anything to compare with.
            NonFiniteSample: a token that is not finite; block and token are named.
        """
        device = device_of(self)
        alone = condition is None and temperature != 1
        condition, n = prepare(self.condition, condition, n, 1.0 if alone else guidance, device)
        if alone and not 0 <= guidance < math.inf:
            raise InvalidArgument(f"guidance is {guidance}; give a number of 0 or more, 1 for none")
        solve = _solver(solver, steps, n, device)
        config = self.config
        if config.noise_range and t is None:
            t = config.noise_range[1]
        guides = None
        if guidance != 1:
            null = None if condition is None else condition.null()
            guides = tuple(
                Guide(embedding(null, n), guidance - 1, anneal=anneal, temperature=temperature)
                for embedding in self.embeddings
            )
        z = Noise(n, seed=seed, device=device).normal((config.tokens, config.inner))
        x, _ = self.inverse(z, condition, t, solver=solve, guides=guides, on_step=on_step)
        sigma = t if config.noise_range else config.noise
        if not (denoise and sigma):
            return x
        x = self.denoise(x, sigma, condition)
        if not bool(x.isfinite().all()):
            raise NonFiniteSample(
                "taking the noise off ended in values that are not finite: the samples lie far outside what the model "
                "learnt; lower guidance, give soft_clip to its configuration, or take another seed",
                step=config.tokens * len(self.blocks),
            )
        return x

    def _picture(self, tokens: Tensor) -> Tensor:
        return unpatchify(tokens, self.config.patch, self.config.shape[1:])

    def _level(self, t: Any, n: int) -> Tensor | None:
        """The noise of each sample, checked."""
        limits = self.config.noise_range
        if (t is None) != (limits is None):
            raise InvalidArgument(
                "the model has no noise_range and takes no t"
                if limits is None
                else f"give t, the standard deviation of the noise, from {limits[0]} to {limits[1]}"
            )
        if t is None or limits is None:
            return None
        level = torch.as_tensor(t, dtype=torch.float32, device=device_of(self))
        if level.ndim > 1 or (level.ndim == 1 and len(level) != n):
            raise InvalidArgument(f"t of shape {tuple(level.shape)} for {n} samples; give one number, or one for each")
        if not bool(((level >= limits[0] * (1 - 1e-5)) & (level <= limits[1] * (1 + 1e-5))).all()):
            raise InvalidArgument(f"t is {t}; the model was trained with noise from {limits[0]} to {limits[1]}")
        return level.expand(n)

    def _turn(self) -> Turn | None:
        """Rows and columns as rotations; None where positions are learnt."""
        config = self.config
        if config.positions == "learned":
            return None
        device = device_of(self)
        if self._turns is None or self._turns[0].device != device:
            places = grid(config.shape[1] // config.patch, config.shape[2] // config.patch).to(device)
            self._turns = axial_tables(places, config.width // config.attention_heads)
        return self._turns


class Likelihood:
    r"""The negative log-likelihood of noisy pictures per number of theirs; an objective for `pippin.train.Trainer`.

    The noise is the configuration's: uniform within a level, Gaussian, or Gaussian of a standard deviation drawn from
    the range, by which the loss is weighted. The constant $\frac12\log 2\pi$ is part of it.

    Args:
        drop: share of the conditions that are left out, of models whose condition has a null.

    Raises:
        InvalidArgument: a share outside 0 to 1.

    Source: arXiv:2412.06329, eq. 4; weights by the noise: arXiv:2604.20041.
    """

    unit = "samples"

    def __init__(self, *, drop: float = 0.1) -> None:
        if not 0 <= drop <= 1:
            raise InvalidArgument(f"drop is {drop}; give a share from 0 to 1")
        self.drop = drop

    def __call__(self, model: nn.Module, batch: Samples, generator: torch.Generator) -> Loss:
        """The loss of a batch; its metric "bits" is in bits of each number of a picture of levels."""
        flow = cast(TarFlow, getattr(model, "module", model))
        config, x, condition = flow.config, batch.x, batch.condition
        if condition is not None and self.drop and config.condition.null:
            condition = condition.dropped(torch.rand(len(x), generator=generator, device=x.device) >= self.drop)
        x, t = noisy(x, config, generator)
        z, log_det = model(x, condition, t)
        nats = 0.5 * z.square().sum((1, 2)) + 0.5 * math.log(2 * math.pi) * config.numbers - log_det
        loss = nats / config.numbers
        bits = loss.detach() / math.log(2) + math.log2(config.levels / 2)
        return Loss((loss if t is None else t * loss).sum(), float(len(x)), {"bits": bits.sum()})


def noisy(x: Tensor, config: TarFlowConfig, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Pictures with the noise that a model is trained with, and its standard deviation where the model is told."""

    def draw(shape: Any) -> Tensor:
        return torch.rand(shape, generator=generator, device=x.device)

    if config.noise_range is not None:
        low, high = config.noise_range
        t = low + (high - low) * draw(len(x))
        normal = torch.randn(x.shape, generator=generator, device=x.device)
        return x + t.view(-1, *[1] * (x.ndim - 1)) * normal, t
    if config.noise:
        return x + config.noise * torch.randn(x.shape, generator=generator, device=x.device), None
    # a level i, which came as 2 i / (levels - 1) - 1, becomes the interval that it stands for
    levels = ((x + 1) * ((config.levels - 1) / 2)).round()
    return (levels + draw(x.shape)) * (2 / config.levels) - 1, None


def _solver(solver: Jacobi | str, steps: int | None, n: int, device: torch.device) -> Jacobi | None:
    if solver == "sequential":
        if steps is not None:
            raise InvalidArgument(f"steps is {steps}, but a flow inverted token by token has no budget; leave it None")
        return None
    if solver == "jacobi":
        return Jacobi.fitting(n, device, most=steps)
    if not isinstance(solver, Jacobi):
        raise InvalidArgument(f"solver is {solver!r}; choose sequential, jacobi or Jacobi(...)")
    return solver if steps is None else replace(solver, most=steps)


def _check_finite(x: Tensor, block: FlowBlock, number: int) -> None:
    """Refuse tokens, in the block's order, that are not finite."""
    bad = ~x.isfinite().all(-1)
    if bool(bad.any()):
        first = int(bad.any(0).int().argmax())
        token = x.shape[1] - 1 - first if block.spec.reverse else first
        sample = int(bad[:, first].int().argmax())
        raise NonFiniteSample(
            f"block {number} made token {token} of sample {sample} infinite or NaN; guide less, draw another seed, or "
            "train with soft_clip=4",
            step=first,
            block=number,
            token=token,
        )
