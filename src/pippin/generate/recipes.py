"""A generator of each kind, made for pictures of a size: what `pippin train images` begins from.

Notable here:
- a method is a name here and nowhere else: everything below takes models and configurations
- patches are chosen so that a laptop trains and draws in minutes: at most 64 tokens, 256 places for a U-Net
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch import nn

from pippin.core.errors import InvalidArgument
from pippin.generate.condition import ConditionSpec


@dataclass(frozen=True)
class Recipe:
    """A model to be trained, and how.

    Attributes:
        model: with random weights.
        objective: for `pippin.train.Trainer`, on batches of `Samples`.
        unit: of the loss.
        lr: highest learning rate.
        ema: decay of the average of the weights.
    """

    model: nn.Module
    objective: Any
    unit: str
    lr: float
    ema: float = 0.999


@dataclass(frozen=True)
class _Wanted:
    shape: tuple[int, int, int]
    condition: ConditionSpec
    width: int
    layers: int
    patch: int
    seed: int

    @property
    def drop(self) -> float:
        """The share of conditions that are left out."""
        return 0.1 if self.condition.null else 0.0


def recipe(
    method: str,
    shape: tuple[int, int, int],
    condition: ConditionSpec,
    *,
    width: int | None = None,
    layers: int | None = None,
    patch: int | None = None,
    seed: int = 0,
) -> Recipe:
    """A generator for pictures of a shape.

    Args:
        method: one of `METHODS`.
        shape: channels, height and width.
        condition: what it is to read.
        width: of the hidden states (U-Net: of its first level); None for the method's own.
        layers: in all (flows: in each block; U-Net: levels); None for the method's own.
        patch: side of a token in pixels; None for the smallest that leaves few enough tokens.
        seed: of the weights.

    Raises:
        InvalidArgument: no such method, or numbers that do not fit; the message names them.

    >>> recipe("unet", (1, 28, 28), ConditionSpec(classes=10, null=True)).model.shape
    (1, 28, 28)
    """
    if method not in METHODS:
        raise InvalidArgument(f"no method {method!r}; choose one of {', '.join(METHODS)}")
    make, usual_width, usual_layers, tokens = METHODS[method]
    for name, value in (("width", width), ("layers", layers), ("patch", patch)):
        if value is not None and value < 1:
            raise InvalidArgument(f"{name} is {value}; give 1 or more")
    patch = patch or patch_of(shape[1], shape[2], tokens)
    return make(_Wanted(shape, condition, width or usual_width, layers or usual_layers, patch, seed))


def patch_of(height: int, width: int, most: int) -> int:
    """The smallest patch that divides both sides and leaves at most so many tokens.

    Raises:
        InvalidArgument: none does.

    >>> patch_of(28, 28, 64), patch_of(32, 32, 256)
    (4, 2)
    """
    for patch in range(1, min(height, width) + 1):
        if height % patch == 0 and width % patch == 0 and height * width <= most * patch * patch:
            return patch
    raise InvalidArgument(
        f"no patch divides {height} by {width} pixels into at most {most} tokens; resize them to a multiple of 8"
    )


def _diffusion(wanted: _Wanted, network: Any) -> Recipe:
    from pippin.generate.diffusion import Denoising, Diffusion, DiffusionConfig
    from pippin.generate.schedules import NoiseSchedule

    config = DiffusionConfig(
        wanted.shape, network, wanted.condition, NoiseSchedule.flow(), prediction="flow", method="heun", steps=20
    )
    objective = Denoising(drop=wanted.drop, times="logit_normal")
    return Recipe(Diffusion(config).initialise(wanted.seed), objective, "squared error", 1e-3)


def _unet(wanted: _Wanted) -> Recipe:
    from pippin.generate.unet import UNetConfig

    return _diffusion(wanted, UNetConfig(width=wanted.width, levels=wanted.layers, patch=wanted.patch))


def _dit(wanted: _Wanted, **how: Any) -> Recipe:
    from pippin.generate.dit import DiTConfig

    heads = max(1, wanted.width // 32)
    return _diffusion(
        wanted, DiTConfig(width=wanted.width, layers=wanted.layers, heads=heads, patch=wanted.patch, **how)
    )


def _ec_dit(wanted: _Wanted) -> Recipe:
    return _dit(wanted, feed_forward="expert_choice")


def _tarflow(wanted: _Wanted, noise_range: tuple[float, float] | None = None) -> Recipe:
    from pippin.generate.tarflow import Likelihood, TarFlow, TarFlowConfig

    config = TarFlowConfig(
        shape=wanted.shape,
        patch=wanted.patch,
        width=wanted.width,
        layers=(wanted.layers,) * 4,
        condition=wanted.condition,
        noise=0.0 if noise_range else 0.1,
        noise_range=noise_range,
        soft_clip=4.0,
    )
    return Recipe(TarFlow(config).initialise(wanted.seed), Likelihood(drop=wanted.drop), "nats per number", 1e-3)


def _itarflow(wanted: _Wanted) -> Recipe:
    return _tarflow(wanted, (0.02, 0.5))


def _starflow(wanted: _Wanted) -> Recipe:
    from pippin.generate.flow_score import LikelihoodAndScore
    from pippin.generate.starflow import StarFlow, StarFlowConfig

    config = StarFlowConfig(
        shape=wanted.shape,
        patch=max(1, wanted.patch // 2),
        width=wanted.width,
        layers=(1, 1, 1, wanted.layers),
        condition=wanted.condition,
    )
    return Recipe(
        StarFlow(config).initialise(wanted.seed), LikelihoodAndScore(drop=wanted.drop), "nats per number", 1e-3
    )


def _dart(wanted: _Wanted) -> Recipe:
    from pippin.generate.dart import DART, DartConfig
    from pippin.generate.dart_training import NoisyViews

    config = DartConfig(
        shape=wanted.shape,
        patch=wanted.patch,
        layers=wanted.layers,
        width=wanted.width,
        heads=max(1, wanted.width // 32),
        condition=wanted.condition,
    )
    return Recipe(DART(config).initialise(wanted.seed), NoisyViews(drop=wanted.drop), "squared error", 1e-3)


class _Method(NamedTuple):
    make: Callable[[_Wanted], Recipe]
    width: int
    layers: int
    tokens: int


METHODS: Final[Mapping[str, _Method]] = {
    "unet": _Method(_unet, 32, 2, 256),
    "dit": _Method(_dit, 128, 6, 64),
    "ec-dit": _Method(_ec_dit, 128, 6, 64),
    "tarflow": _Method(_tarflow, 128, 2, 64),
    "itarflow": _Method(_itarflow, 128, 2, 64),
    "starflow": _Method(_starflow, 128, 4, 64),
    "dart": _Method(_dart, 128, 6, 64),
}
"""By name: what makes it, its usual width and layers, and the most tokens of a picture where no patch is given."""
