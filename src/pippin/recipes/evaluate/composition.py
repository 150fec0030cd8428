"""Composability: predict whether the scores of several conditions of a diffusion model can be added."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.engine.options import Device
from pippin.recipes.options import StrPath

if TYPE_CHECKING:
    from pippin.generate.composition.compose import Composability, Composed
    from pippin.generate.conditions import Conditioning
    from pippin.generate.diffusion.diffusion import Diffusion

NOTHING = "nothing"


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a measurement."""

    model: Annotated[
        StrPath, Option("Folder of a diffusion model, as `pippin train images` makes it.", positional=True)
    ]
    part: Annotated[
        tuple[str, ...],
        Option("A class (name or number), or a text; repeat it for each part.", metavar="WHAT"),
    ]
    background: Annotated[
        str,
        Option(
            "What all parts have in common, and nothing of what they add; 'nothing' is the model without a condition.",
            metavar="WHAT",
        ),
    ]
    weight: Annotated[
        tuple[float, ...], Option("Weight of each part, in their order; 1 without it.", metavar="NUMBER")
    ] = ()
    num_samples: Annotated[PositiveInt, Option("Images that it is measured on.", metavar="N")] = 16
    draw: Annotated[StrPath | None, Option("Write so many images into this file, too (.png).", metavar="PATH")] = None
    corrector_steps: Annotated[
        NonNegativeInt, Option("Langevin steps near the end of sampling, for the images that are written.")
    ] = 0
    seed: Annotated[NonNegativeInt, Option("Of the noise.")] = 0
    device: Device = None


def run(config: Config, *, show_progress: bool = True) -> Composability:
    """Measure whether the scores of several conditions can be added, and the reason if not.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: a folder without a diffusion model, a condition that it does not have, or an output file that
            is not .png.
    """
    from pippin.generate.composition.compose import composability, compose
    from pippin.generate.contract import GeneratorModule
    from pippin.generate.diffusion.diffusion import Diffusion

    if config.draw is not None and Path(config.draw).suffix != ".png":
        raise InvalidArgument(f"draw (--draw) writes .png, got {str(config.draw)!r}")
    model = GeneratorModule.load(config.model, device=config.device)
    if not isinstance(model, Diffusion):
        raise InvalidArgument(
            f"{config.model} holds a {type(model).__name__}; scores are added for diffusion models only"
        )
    *parts, background = _conditions(model, [*config.part, config.background])
    composed = compose(parts, background, of=model, weights=list(config.weight) or None)
    report = composability(composed, n=config.num_samples, seed=config.seed)
    if config.draw is not None:
        _draw(composed, config, Path(config.draw), show_progress=show_progress)
    return report


def _conditions(model: Diffusion, words: Sequence[str]) -> list[Conditioning]:
    """The condition of each class name or text."""
    import torch

    from pippin.generate.conditions import Conditioning
    from pippin.recipes.prompt_encoder import PromptEncoder

    spec = model.condition
    if spec.map_channels or spec.vector_dim or bool(spec.num_classes) == bool(spec.text_dim):
        raise InvalidArgument(
            "parts must be classes or texts, and the model has other conditions; use pippin.generate.compose"
        )
    if NOTHING in words and not spec.null:
        raise InvalidArgument("'nothing' needs a model that was also trained without its condition; name a background")
    if spec.num_classes:
        names = [str(name) for name in model.metadata.get("classes") or range(spec.num_classes)]
        labels = [-1 if word == NOTHING else _label(word, names) for word in words]
        return [Conditioning(labels=torch.tensor([label])) for label in labels]
    known = model.metadata.get("text_encoder") or {}
    encoder = PromptEncoder.load(known["name"], max_tokens=known["tokens"]) if known else PromptEncoder.load()
    return [encoder.condition(["" if word == NOTHING else word]) for word in words]


def _label(word: str, names: Sequence[str]) -> int:
    known = [name.lower() for name in names]
    if word.lower() in known:
        return known.index(word.lower())
    if word.isdigit() and int(word) < len(names):
        return int(word)
    raise InvalidArgument(f"{word!r} is no class of the model; it has {', '.join(names)}, and 'nothing'")


def _draw(composed: Composed, config: Config, path: Path, *, show_progress: bool) -> None:
    """Write a grid of samples."""
    from pippin.core.errors import CompositionAtRisk
    from pippin.data.image_files import image_grid, write_image
    from pippin.generate.contract import sampling_progress
    from pippin.generate.diffusion.samplers import Langevin

    at = composed.schedule.time(0.02)
    langevin = None
    if config.corrector_steps:
        langevin = Langevin(config.corrector_steps, 0.1 * composed.schedule.s(at) ** 2, at)
    with warnings.catch_warnings(), sampling_progress("sampling", show_progress=show_progress) as on_step:
        warnings.simplefilter("ignore", CompositionAtRisk)  # the report says the same
        x = composed.sample(n=config.num_samples, seed=config.seed, on_step=on_step, corrector=langevin)
    write_image(path, image_grid(x, zoom=max(1, 128 // x.shape[-1])))
