r"""TarFlow: a transformer normalizing flow of images, trained by maximum likelihood.

An image's patches pass affine autoregressive blocks (`pippin.generate.flows.block`) of alternating direction. The
density is exact: $\log p(x) = \log N(z; 0, I) + \sum \log|\det|$.

Notable here:
- the training noise is part of the configuration, so a model refuses what its noise does not allow: uniform noise is
  for bits per dimension, Gaussian noise for samples, a range of noise levels for iterative denoising
- denoising is one step along the exact score, $\hat x = y + \sigma^2 \nabla \log p(y)$
- sampling inverts the blocks token by token, or by Jacobi iteration over windows of tokens, with the same result
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Unpack, cast

import torch
from annotated_types import Ge
from jaxtyping import Float, Integer
from torch import Tensor, nn

from pippin.core.checks import NonNegativeFloat, PositiveFloat, PositiveInt, Probability, checked
from pippin.core.errors import InvalidArgument, InvalidInput, NonFiniteSample
from pippin.generate.conditions import ConditionEmbedding, Conditioning, ConditioningSpec, Samples
from pippin.generate.contract import GeneratorModule, GeneratorOptions, OnStep, SamplingStep, check_samples
from pippin.generate.flows.block import FlowBlock, FlowBlockSpec, LinearGuidance, RotaryTables
from pippin.generate.flows.jacobi import Jacobi, SolveInfo
from pippin.generate.noise import Noise
from pippin.nn.attention.axial_rotary import axial_tables, grid_positions
from pippin.nn.images.patches import patchify, unpatchify
from pippin.train.objective import Loss


@checked
@dataclass(frozen=True)
class TarFlowConfig:
    """Configuration of a `TarFlow`.

    Attributes:
        shape: channels, height and width of an image.
        patch_size: height and width of a patch.
        layers_per_block: transformer layers of each block, from the data to the noise.
        hidden_size: dimension of the hidden states.
        num_attention_heads: number of attention heads; None for ``hidden_size // 64``, at least 1.
        condition: the conditions that the model reads; no map. Text is a prefix of the tokens in the last block; in all
            blocks its mean is added to the inputs.
        noise_std: standard deviation of the Gaussian training noise; 0 for uniform noise of the width of a level.
        noise_std_range: smallest and largest standard deviation of the training noise, for a model that is conditioned
            on it; None for ``noise_std``.
        levels: number of levels of a pixel.
        alternate: whether every second block processes tokens from the last to the first; False is for ablations.
        start: see `FlowBlockSpec`.
        position_embedding: see `FlowBlockSpec`.
        scale: see `FlowBlockSpec`.
        soft_clip: see `FlowBlockSpec`.

    Raises:
        InvalidArgument: numbers that are out of range or do not divide each other.
    """

    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    patch_size: PositiveInt = 2
    layers_per_block: tuple[PositiveInt, ...] = (2, 2, 2, 2)
    hidden_size: PositiveInt = 64
    num_attention_heads: PositiveInt | None = None
    condition: ConditioningSpec = field(default_factory=ConditioningSpec)
    noise_std: NonNegativeFloat = 0.0
    noise_std_range: tuple[PositiveFloat, PositiveFloat] | None = None
    levels: Annotated[int, Ge(2)] = 256
    alternate: bool = True
    start: Literal["zero", "token"] = "zero"
    position_embedding: Literal["learned", "rotary"] = "learned"
    scale: Literal["exp", "softplus"] = "exp"
    soft_clip: PositiveFloat | None = None

    def __post_init__(self) -> None:
        _, height, width = self.shape
        if height % self.patch_size or width % self.patch_size:
            raise InvalidArgument(f"images of shape {self.shape} cannot be cut into patches of {self.patch_size}")
        if self.num_tokens < 2 or not self.layers_per_block:
            raise InvalidArgument(
                f"{self.num_tokens} tokens and {len(self.layers_per_block)} blocks; give at least 2 and 1"
            )
        heads = self.attention_heads
        if self.hidden_size % heads or (self.hidden_size // heads) % 2:
            raise InvalidArgument(
                f"hidden_size={self.hidden_size} with num_attention_heads={heads}; the size of a head must be even"
            )
        if self.noise_std_range is not None:
            low, high = self.noise_std_range
            if not low < high or self.noise_std:
                raise InvalidArgument(
                    f"noise_std_range is {self.noise_std_range} and noise_std {self.noise_std}; the range must rise, "
                    "and noise_std must be 0 with it"
                )
        if self.condition.map_channels:
            raise InvalidArgument("a flow reads no map; give classes, text or a vector")

    @property
    def num_tokens(self) -> int:
        """Number of patches of an image."""
        return self.shape[1] * self.shape[2] // self.patch_size**2

    @property
    def token_dim(self) -> int:
        """Number of elements of a patch."""
        return self.shape[0] * self.patch_size**2

    @property
    def attention_heads(self) -> int:
        """Number of attention heads, with the default resolved."""
        return max(self.hidden_size // 64, 1) if self.num_attention_heads is None else self.num_attention_heads

    @property
    def num_dims(self) -> int:
        """Number of dimensions of an image."""
        return math.prod(self.shape)


class TarFlow(GeneratorModule):
    """A TarFlow; images are from -1 to 1.

    Args:
        config: the configuration.

    Attributes:
        metadata: see `pippin.generate.contract.Generator`.

    Source: Zhai et al. 2024, arXiv:2412.06329; with a range of noise: Chen et al. 2026, arXiv:2604.20041.
    """

    config: TarFlowConfig
    model_type = "pippin_tarflow"
    config_type = TarFlowConfig

    def __init__(self, config: TarFlowConfig) -> None:
        super().__init__(config)
        spec = FlowBlockSpec(
            hidden_size=config.hidden_size,
            num_attention_heads=config.attention_heads,
            start=config.start,
            position_embedding=config.position_embedding,
            scale=config.scale,
            soft_clip=config.soft_clip,
            noise=config.noise_std_range is not None,
        )
        last = len(config.layers_per_block) - 1
        self.blocks = nn.ModuleList(
            FlowBlock(
                config.token_dim,
                config.num_tokens,
                replace(
                    spec,
                    num_hidden_layers=layers,
                    reverse=config.alternate and number % 2 == 1,
                    text=bool(config.condition.text_dim) and number == last,
                ),
            )
            for number, layers in enumerate(config.layers_per_block)
        )
        self.embeddings = nn.ModuleList(
            ConditionEmbedding(config.condition, config.hidden_size) for _ in config.layers_per_block
        )
        self._cos_sin_tables: RotaryTables | None = None

    def initialize(self, seed: int = 0) -> TarFlow:
        """Set random weights, with which the flow is the identity."""
        generator = torch.Generator().manual_seed(seed)
        for block, embedding in zip(self.blocks, self.embeddings, strict=True):
            cast(FlowBlock, block).initialize(generator)
            cast(ConditionEmbedding, embedding).initialize(generator, size=0.2)
        return self

    def forward(
        self, x: Float[Tensor, "n channels height width"], condition: Conditioning | None = None, t: Any = None
    ) -> tuple[Float[Tensor, "n tokens inner"], Float[Tensor, n]]:
        """Transform images into noise z; return z and the log of the absolute determinant of dz/dx, in nats.

        Args:
            x: images from -1 to 1, with the training noise.
            condition: condition of each image; None for the null condition.
            t: standard deviation of the noise in x, one number or one for each image; for models with a range of noise.

        Raises:
            InvalidArgument: another shape, a condition that the model does not read, or a ``t`` that is missing, out of
                range, or given to a model without a range of noise.
            InvalidInput: integers, or values that are not finite.
        """
        check_samples(x, self.shape)
        z, level = patchify(x, self.config.patch_size), self._level(t, len(x))  # (n, tokens, inner), (n,)
        total = torch.zeros(len(x), device=x.device)
        for block, embedding in zip(self.blocks, self.embeddings, strict=True):
            z, log_det = block(z, embedding(condition, len(x)), level, cos_sin=self._cos_sin())
            total = total + log_det
        return z, total

    def log_prob(
        self, x: Float[Tensor, "n channels height width"], condition: Conditioning | None = None, t: Any = None
    ) -> Float[Tensor, n]:
        """The log density of each noisy image, in nats; arguments and errors as for `forward`."""
        z, log_det = self(x, condition, t)
        log_prob: Tensor = log_det - 0.5 * z.square().sum((1, 2)) - 0.5 * math.log(2 * math.pi) * self.config.num_dims
        return log_prob

    @torch.no_grad()
    def bits_per_dim(
        self,
        images: Integer[Tensor, "n channels height width"],
        condition: Conditioning | None = None,
        *,
        seed: int = 0,
    ) -> Float[Tensor, n]:
        r"""Upper bound of $-\log_2 P$ per dimension of images of discrete levels, by one sample of uniform noise.

        Args:
            images: integer levels, from 0 to ``config.levels - 1``.
            condition: condition of each image; None for the null condition.
            seed: seed of the noise.

        Raises:
            InvalidArgument: a model that was trained with Gaussian noise, whose density is not that of levels, or
                another shape.
            InvalidInput: images that are not integers, or levels out of range.
        """
        config = self.config
        if config.noise_std or config.noise_std_range:
            raise InvalidArgument(
                f"bits per dimension mean nothing for a model trained with Gaussian noise "
                f"({config.noise_std_range or config.noise_std}); train one with noise_std=0 (--noise-std 0)"
            )
        if images.is_floating_point() or images.dtype == torch.bool:
            raise InvalidInput(f"bits per dimension are those of integer levels, got {images.dtype}; give integers")
        if len(images) and (int(images.min()) < 0 or int(images.max()) >= config.levels):
            raise InvalidInput(
                f"levels from {int(images.min())} to {int(images.max())}; 0 to {config.levels - 1} expected"
            )
        noise = Noise(len(images), seed=seed, device=images.device).uniform(images.shape[1:])
        log_prob = self.log_prob((images + noise) * (2 / config.levels) - 1, condition)
        return math.log2(config.levels / 2) - log_prob / (config.num_dims * math.log(2))

    def score(
        self, x: Float[Tensor, "n channels height width"], condition: Conditioning | None = None, t: Any = None
    ) -> Float[Tensor, "n channels height width"]:
        """The gradient of the log density with respect to x; arguments and errors as for `forward`.

        It cannot be computed under ``torch.inference_mode``.
        """
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.log_prob(x, condition, t).sum(), x)
        return gradient

    def denoise(
        self,
        x: Float[Tensor, "n channels height width"],
        sigma: float | None = None,
        condition: Conditioning | None = None,
    ) -> Float[Tensor, "n channels height width"]:
        r"""The posterior mean of the clean image given a noisy one, $x + \sigma^2 \nabla\log p(x)$.

        Args:
            x: images with Gaussian noise.
            sigma: standard deviation of the noise; None for ``config.noise_std``.
            condition: condition of each image; None for the null condition.

        Raises:
            InvalidArgument: a sigma that is negative, or missing where ``config.noise_std`` is 0; and as `forward`.

        Source: arXiv:2412.06329, section 3.4 (Tweedie's formula).
        """
        config = self.config
        sigma = (config.noise_std or None) if sigma is None else sigma
        if sigma is None or not 0 <= sigma < math.inf:
            raise InvalidArgument(f"sigma is {sigma}; give the standard deviation of the images' noise, 0 or more")
        if sigma == 0:
            return x
        return x + sigma**2 * self.score(x, condition, sigma if config.noise_std_range else None)

    @torch.no_grad()
    def inverse(
        self,
        z: Float[Tensor, "n tokens inner"],
        condition: Conditioning | None = None,
        t: Any = None,
        *,
        solver: Jacobi | None = None,
        guides: tuple[LinearGuidance | None, ...] | None = None,
        on_step: OnStep | None = None,
    ) -> tuple[Float[Tensor, "n channels height width"], tuple[SolveInfo, ...]]:
        """Compute images from noise; the inverse of `forward` without guidance.

        Args:
            z: the noise.
            condition: condition of each image; None for the null condition.
            t: as for `forward`.
            solver: options of Jacobi iteration over windows of tokens; None to compute one token after another.
            guides: guidance of each block, from the data to the noise; None for no guidance.
            on_step: called after each token or window; a step is one token of one block.

        Returns:
            The images, and the convergence of each block's inversion, from the data to the noise.

        Raises:
            NonFiniteSample: a token is not finite; block and token (in natural order) are named.
            InvalidArgument: as `forward`.
        """
        count, level = len(self.blocks), self._level(t, len(z))
        infos: list[SolveInfo] = []
        for number in reversed(range(count)):
            block = cast(FlowBlock, self.blocks[number])
            embedded = self.embeddings[number](condition, len(z))

            # the default arguments keep the values of this iteration
            def report(done: int, x: Tensor, number: int = number, block: FlowBlock = block) -> None:
                if on_step is not None:
                    before = (count - 1 - number) * self.config.num_tokens
                    total = count * self.config.num_tokens
                    on_step(SamplingStep(before + done, total, lambda: self._unpatchify(block.ordered(x))))

            z, info = block.inverse(
                z,
                embedded,
                level,
                cos_sin=self._cos_sin(),
                solver=solver,
                guide=None if guides is None else guides[number],
                on_tokens=None if on_step is None else report,
            )
            _check_finite(block.ordered(z), block, number)
            infos.append(info)
        return self._unpatchify(z), tuple(reversed(infos))

    def sample(
        self,
        condition: Conditioning | None = None,
        n: int | None = None,
        *,
        solver: Jacobi | Literal["sequential", "jacobi"] = "sequential",
        anneal: bool = True,
        temperature: float = 1.0,
        t: float | None = None,
        denoise: bool = True,
        **options: Unpack[GeneratorOptions],
    ) -> Float[Tensor, "n channels height width"]:
        """Sample images, from about -1 to 1.

        Args:
            condition: one for each image, or one for all; None for no condition.
            n: number of images; None for as many as the condition has, or 1.
            solver: "sequential" (token by token), "jacobi" (with windows of a size that is fast for n images), or the
                options of Jacobi iteration.
            anneal: whether the guidance weight grows linearly over the tokens of each block.
            temperature: divides the attention scores of the unconditional branch; with another value than 1, guidance
                works without a condition, too.
            t: noise level to sample at, for a model with a range of noise; None for the largest.
            denoise: whether the training noise is removed from the samples, by one step of Tweedie's formula.
            **options: see `GeneratorOptions`; ``steps`` is the maximum number of iterations of a Jacobi window, and
                must be None for the sequential solver; ``guidance`` is w + 1 of the papers.

        Raises:
            InvalidArgument: numbers out of range, a condition that the model does not read, or guidance without a
                condition or a temperature.
            NonFiniteSample: a token is not finite; block and token are named.
        """
        call = self.prepare(condition, n, unconditional_guidance=temperature != 1, **options)
        condition, n, guidance = call.condition, call.n, call.guidance
        solve = _solver(solver, call.steps, n, call.device)
        config = self.config
        if config.noise_std_range and t is None:
            t = config.noise_std_range[1]
        guides = None
        if guidance != 1:
            null = None if condition is None else condition.null()
            guides = tuple(
                LinearGuidance(embedding(null, n), guidance - 1, anneal=anneal, temperature=temperature)
                for embedding in self.embeddings
            )
        z = call.noise().normal((config.num_tokens, config.token_dim))
        x, _ = self.inverse(z, condition, t, solver=solve, guides=guides, on_step=call.on_step)
        sigma = t if config.noise_std_range else config.noise_std
        if not (denoise and sigma):
            return x
        x = self.denoise(x, sigma, condition)
        if not bool(x.isfinite().all()):
            raise NonFiniteSample(
                "denoising gave values that are not finite: the samples are far from the training data; lower "
                "guidance, train with soft_clip, or take another seed",
                step=config.num_tokens * len(self.blocks),
            )
        return x

    def _unpatchify(self, tokens: Tensor) -> Tensor:
        """Images from tokens (n, tokens, inner)."""
        return unpatchify(tokens, self.config.patch_size, self.config.shape[1:])

    def _level(self, t: Any, n: int) -> Tensor | None:
        """Check the noise level and expand it to (n,); None for a model without a range of noise."""
        limits = self.config.noise_std_range
        if (t is None) != (limits is None):
            raise InvalidArgument(
                "the model has no noise_std_range and takes no t"
                if limits is None
                else f"give t, the standard deviation of the noise, from {limits[0]} to {limits[1]}"
            )
        if t is None or limits is None:
            return None
        level = torch.as_tensor(t, dtype=torch.float32, device=self.device)
        if level.ndim > 1 or (level.ndim == 1 and len(level) != n):
            raise InvalidArgument(f"t of shape {tuple(level.shape)} for {n} samples; give one number, or one for each")
        if not bool(((level >= limits[0] * (1 - 1e-5)) & (level <= limits[1] * (1 + 1e-5))).all()):
            raise InvalidArgument(f"t is {t}; the model was trained with noise from {limits[0]} to {limits[1]}")
        return level.expand(n)

    def _cos_sin(self) -> RotaryTables | None:
        """Rotary tables of rows and columns, cached for each device; None for learned positions."""
        config = self.config
        if config.position_embedding == "learned":
            return None
        device = self.device
        if self._cos_sin_tables is None or self._cos_sin_tables[0].device != device:
            positions = grid_positions(config.shape[1] // config.patch_size, config.shape[2] // config.patch_size).to(
                device
            )
            self._cos_sin_tables = axial_tables(positions, config.hidden_size // config.attention_heads)
        return self._cos_sin_tables


class FlowLikelihood:
    r"""Negative log-likelihood per dimension of noisy images, in nats; an objective for `pippin.train.Trainer`.

    The noise is that of the configuration: uniform within a level, Gaussian, or Gaussian with a standard deviation
    sampled uniformly from the range, which is also the weight of the loss. The loss contains the constant
    $\frac12\log 2\pi$.

    Args:
        condition_dropout: probability of replacing a condition by the null condition, where the model has one.

    Raises:
        InvalidArgument: a probability outside 0 to 1.

    Source: arXiv:2412.06329, eq. 4; weights by the noise level: arXiv:2604.20041.
    """

    unit = "samples"

    @checked
    def __init__(self, *, condition_dropout: Probability = 0.1) -> None:
        self.condition_dropout = condition_dropout

    def __call__(self, model: nn.Module, batch: Samples, generator: torch.Generator) -> Loss:
        """The loss of a batch, summed over images; the metric "bits" is the loss in bits per dimension of levels."""
        flow = cast(TarFlow, getattr(model, "module", model))
        config, x, condition = flow.config, batch.x, batch.condition
        if condition is not None and self.condition_dropout and config.condition.null:
            condition = condition.dropout(self.condition_dropout, generator)
        x, t = add_training_noise(x, config, generator)
        z, log_det = model(x, condition, t)
        nats = 0.5 * z.square().sum((1, 2)) + 0.5 * math.log(2 * math.pi) * config.num_dims - log_det
        loss = nats / config.num_dims
        bits = loss.detach() / math.log(2) + math.log2(config.levels / 2)
        return Loss((loss if t is None else t * loss).sum(), float(len(x)), {"bits": bits.sum()})


def add_training_noise(x: Tensor, config: TarFlowConfig, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Add training noise to images; return also its standard deviations (n,) if the model is conditioned on them."""

    def uniform(shape: Any) -> Tensor:
        return torch.rand(shape, generator=generator, device=x.device)

    if config.noise_std_range is not None:
        low, high = config.noise_std_range
        t = low + (high - low) * uniform(len(x))
        normal = torch.randn(x.shape, generator=generator, device=x.device)
        return x + t.view(-1, *[1] * (x.ndim - 1)) * normal, t
    if config.noise_std:
        return x + config.noise_std * torch.randn(x.shape, generator=generator, device=x.device), None
    # level i, given as 2 i / (levels - 1) - 1, becomes a uniform sample from its interval of width 2 / levels
    levels = ((x + 1) * ((config.levels - 1) / 2)).round()
    return (levels + uniform(x.shape)) * (2 / config.levels) - 1, None


def _solver(solver: Jacobi | str, steps: int | None, n: int, device: torch.device) -> Jacobi | None:
    """Options of Jacobi iteration for the arguments of `TarFlow.sample`; None for the sequential solver."""
    if solver == "sequential":
        if steps is not None:
            raise InvalidArgument(f"steps is {steps}, but the sequential solver has no iterations; leave steps at None")
        return None
    if solver == "jacobi":
        return Jacobi.fitting(n, device, max_iterations=steps)
    if not isinstance(solver, Jacobi):
        raise InvalidArgument(f"solver is {solver!r}; choose 'sequential', 'jacobi' or Jacobi(...)")
    return solver if steps is None else replace(solver, max_iterations=steps)


def _check_finite(x: Tensor, block: FlowBlock, number: int) -> None:
    """Refuse tokens (n, tokens, inner), in the block's order, that are not finite."""
    nonfinite = ~x.isfinite().all(-1)  # (n, tokens)
    if bool(nonfinite.any()):
        first = int(nonfinite.any(0).int().argmax())
        token = x.shape[1] - 1 - first if block.spec.reverse else first
        sample = int(nonfinite[:, first].int().argmax())
        raise NonFiniteSample(
            f"block {number} made token {token} of sample {sample} infinite or NaN; lower guidance, take another seed, "
            "or train with soft_clip=4",
            step=first,
            block=number,
            token=token,
        )
