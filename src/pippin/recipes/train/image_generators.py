"""Untrained image generators by name of the method, for `images` beside this file.

Notable here:
- only recipes select a method by name; other packages take models and configs
- default patch sizes let a laptop train and sample in minutes: at most 64 tokens, 256 positions for a U-Net
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch import nn

from pippin.core.checks import NonNegativeFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import ConditioningSpec
from pippin.recipes.options import GeneratorMethod


@dataclass(frozen=True)
class UntrainedGenerator:
    """A model with random weights and its training settings.

    Attributes:
        model: the generator.
        objective: the objective for `pippin.train.Trainer`, on batches of `Samples`.
        unit: unit of the loss.
        lr: peak learning rate.
        ema: decay of the moving average of the weights.
    """

    model: nn.Module
    objective: Any
    unit: str
    lr: float
    ema: float = 0.999


@dataclass(frozen=True)
class _ModelSpec:
    shape: tuple[int, int, int]
    condition: ConditioningSpec
    width: int
    layers: int
    patch: int
    seed: int
    noise_std: float | None = None

    @property
    def condition_dropout(self) -> float:
        """The dropout rate of conditions, for classifier-free guidance."""
        return 0.1 if self.condition.null else 0.0


@checked
def untrained(
    method: GeneratorMethod,
    shape: tuple[int, int, int],
    condition: ConditioningSpec,
    *,
    hidden_size: PositiveInt | None = None,
    num_hidden_layers: PositiveInt | None = None,
    patch_size: PositiveInt | None = None,
    noise_std: NonNegativeFloat | None = None,
    seed: int = 0,
) -> UntrainedGenerator:
    """A generator for images of a shape.

    Args:
        method: the kind of model.
        shape: channels, height and width of the images.
        condition: kind of conditioning.
        hidden_size: width of the hidden states (U-Net: channels of its first level); None for the method's default.
        num_hidden_layers: number of layers (flows: in each block; U-Net: levels); None for the method's default.
        patch_size: side of a patch in pixels; None for the smallest within the method's maximum number of tokens.
        noise_std: standard deviation of the Gaussian noise that tarflow and starflow are trained with; None for the
            method's default. tarflow: 0 for the uniform noise of a level, which `TarFlow.bits_per_dim` needs.
        seed: seed of the random weights.

    Raises:
        InvalidArgument: an unknown method, noise that the method does not have, or a size that does not fit.

    >>> untrained("unet", (1, 28, 28), ConditioningSpec(num_classes=10, null=True)).model.shape
    (1, 28, 28)
    """
    if noise_std is not None and method not in ("tarflow", "starflow"):
        raise InvalidArgument(f"noise_std (--noise-std) is for methods 'tarflow' and 'starflow', not for {method!r}")
    if noise_std == 0 and method == "starflow":
        raise InvalidArgument(
            "noise_std (--noise-std) is 0; starflow learns from its noise, so give more, or method 'tarflow' "
            "(--method tarflow) for exact likelihoods"
        )
    make, default_width, default_layers, max_tokens = METHODS[method]
    patch_size = patch_size or patch_size_for(shape[1], shape[2], max_tokens)
    return make(
        _ModelSpec(
            shape,
            condition,
            hidden_size or default_width,
            num_hidden_layers or default_layers,
            patch_size,
            seed,
            noise_std,
        )
    )


def patch_size_for(height: int, width: int, max_tokens: int) -> int:
    """The smallest patch size that divides both sides and gives at most ``max_tokens`` tokens.

    Raises:
        InvalidArgument: there is none.

    >>> patch_size_for(28, 28, 64), patch_size_for(32, 32, 256)
    (4, 2)
    """
    for patch in range(1, min(height, width) + 1):
        if height % patch == 0 and width % patch == 0 and height * width <= max_tokens * patch * patch:
            return patch
    raise InvalidArgument(
        f"no patch divides {height} by {width} pixels into at most {max_tokens} tokens; resize them to a multiple of 8"
    )


def _diffusion(spec: _ModelSpec, network: Any) -> UntrainedGenerator:
    from pippin.generate.diffusion.diffusion import Denoising, Diffusion, DiffusionConfig
    from pippin.generate.diffusion.schedules import NoiseSchedule

    config = DiffusionConfig(
        spec.shape, network, spec.condition, NoiseSchedule.flow(), prediction="flow", method="heun", steps=20
    )
    objective = Denoising(condition_dropout=spec.condition_dropout, times="logit_normal")
    return UntrainedGenerator(Diffusion(config).initialize(spec.seed), objective, "squared error", 1e-3)


def _unet(spec: _ModelSpec) -> UntrainedGenerator:
    from pippin.generate.diffusion.unet import UNetConfig

    return _diffusion(spec, UNetConfig(base_channels=spec.width, num_levels=spec.layers, patch_size=spec.patch))


def _dit(spec: _ModelSpec, **how: Any) -> UntrainedGenerator:
    from pippin.generate.diffusion.dit import DiTConfig

    heads = max(1, spec.width // 32)
    return _diffusion(
        spec,
        DiTConfig(
            hidden_size=spec.width,
            num_hidden_layers=spec.layers,
            num_attention_heads=heads,
            patch_size=spec.patch,
            **how,
        ),
    )


def _ec_dit(spec: _ModelSpec) -> UntrainedGenerator:
    return _dit(spec, feed_forward="expert_choice")


def _tarflow(spec: _ModelSpec, noise_range: tuple[float, float] | None = None) -> UntrainedGenerator:
    from pippin.generate.flows.tarflow import FlowLikelihood, TarFlow, TarFlowConfig

    config = TarFlowConfig(
        shape=spec.shape,
        patch_size=spec.patch,
        hidden_size=spec.width,
        layers_per_block=(spec.layers,) * 4,
        condition=spec.condition,
        noise_std=0.0 if noise_range else 0.1 if spec.noise_std is None else spec.noise_std,
        noise_std_range=noise_range,
        soft_clip=4.0,
    )
    return UntrainedGenerator(
        TarFlow(config).initialize(spec.seed),
        FlowLikelihood(condition_dropout=spec.condition_dropout),
        "nats per dimension",
        1e-3,
    )


def _itarflow(spec: _ModelSpec) -> UntrainedGenerator:
    return _tarflow(spec, (0.02, 0.5))


def _starflow(spec: _ModelSpec) -> UntrainedGenerator:
    from pippin.generate.flows.starflow.config import StarFlowConfig
    from pippin.generate.flows.starflow.loss import LikelihoodAndScore
    from pippin.generate.flows.starflow.model import StarFlow

    config = StarFlowConfig(
        shape=spec.shape,
        patch_size=max(1, spec.patch // 2),
        hidden_size=spec.width,
        layers_per_block=(1, 1, 1, spec.layers),
        condition=spec.condition,
        noise_std=0.3 if spec.noise_std is None else spec.noise_std,
    )
    return UntrainedGenerator(
        StarFlow(config).initialize(spec.seed),
        LikelihoodAndScore(condition_dropout=spec.condition_dropout),
        "nats per dimension",
        1e-3,
    )


def _dart(spec: _ModelSpec) -> UntrainedGenerator:
    from pippin.generate.methods.dart.loss import NoisyViews
    from pippin.generate.methods.dart.model import DART, DartConfig

    config = DartConfig(
        shape=spec.shape,
        patch_size=spec.patch,
        num_hidden_layers=spec.layers,
        hidden_size=spec.width,
        num_attention_heads=max(1, spec.width // 32),
        condition=spec.condition,
    )
    return UntrainedGenerator(
        DART(config).initialize(spec.seed), NoisyViews(condition_dropout=spec.condition_dropout), "squared error", 1e-3
    )


class _Default(NamedTuple):
    make: Callable[[_ModelSpec], UntrainedGenerator]
    width: int
    layers: int
    max_tokens: int


METHODS: Final[Mapping[GeneratorMethod, _Default]] = {
    "unet": _Default(_unet, 32, 2, 256),
    "dit": _Default(_dit, 128, 6, 64),
    "ec-dit": _Default(_ec_dit, 128, 6, 64),
    "tarflow": _Default(_tarflow, 128, 2, 64),
    "itarflow": _Default(_itarflow, 128, 2, 64),
    "starflow": _Default(_starflow, 128, 4, 64),
    "dart": _Default(_dart, 128, 6, 64),
}
"""Constructor, default width, default layers and maximum tokens per image (for the default patch size) by method."""
