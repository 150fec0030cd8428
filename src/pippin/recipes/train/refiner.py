"""SimGAN: adversarial refinement of simulated images that preserves their labels.

Notable here:
- refiner and discriminator are trained alternately; a probe classifier checks that labels are still valid for the
  refined images
- the folder contains the refiner, refined.npz (8-bit images with the original labels), samples.png (synthetic images
  above refined ones) and checks.json
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pippin.core import progress
from pippin.core.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidInput
from pippin.core.options import Option
from pippin.engine.options import Device
from pippin.recipes import options
from pippin.recipes.options import RUN, StrPath

if TYPE_CHECKING:
    from torch import Tensor

    from pippin.core.report import Report
    from pippin.data.images import ImageSet
    from pippin.generate.methods.simgan.train import RefinerTrainingResult

_MODEL = "Model"
MIN_PROBED = 20
"""Minimum number of labeled images to train the probe."""


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a run."""

    synthetic: Annotated[
        str,
        Option("Images of the simulator: a folder (each folder in it one class) or a .npz file.", positional=True),
    ]
    real: Annotated[str, Option("Real images; their labels are not used.", positional=True)]
    out: Annotated[StrPath, Option("Folder of the refiner, the refined images and the checks.", None, "PATH")]
    max_rounds: Annotated[PositiveInt, Option("In each, the refiner makes its steps, then the discriminator.", RUN)] = (
        500
    )
    regularization: Annotated[
        NonNegativeFloat,
        Option("Weight of staying near the input: more keeps labels, less looks more real.", RUN),
    ] = 5.0
    keep: Annotated[
        Literal["identity", "gradient", "channel_mean"],
        Option("What stays: the pixels, their gradients (brightness may change), or the mean of the channels.", RUN),
    ] = "identity"
    refiner_steps: Annotated[PositiveInt, Option("Steps of the refiner in a round.", RUN)] = 2
    batch_size: Annotated[PositiveInt, Option("Images of each kind in a step.", RUN)] = 32
    history_size: Annotated[
        NonNegativeInt, Option("Earlier refined images that the discriminator sees again; 0 for none.", RUN)
    ] = 2048
    lr: options.LearningRate = 1e-3
    eval_every: Annotated[PositiveInt, Option("Rounds between checks of the labels.", RUN)] = 50
    hidden_channels: Annotated[PositiveInt, Option("Channels inside the refiner.", _MODEL)] = 64
    blocks: Annotated[PositiveInt, Option("Residual blocks of the refiner.", _MODEL)] = 4
    image_size: options.ImageSize = None
    limit: options.Limit = None
    skip_bad: options.SkipBad = False
    seed: options.Seed = 0
    device: Device = None


@dataclass(frozen=True)
class SimGANResult:
    """The result of a run.

    Attributes:
        out: folder of the refiner, the refined images and the checks.
        images: number of refined images.
        num_rounds: number of rounds.
        labeled: whether labels were checked.
        refinement: the losses, and the checks by round.
    """

    out: Path
    images: int
    num_rounds: int
    labeled: bool
    refinement: RefinerTrainingResult = field(repr=False)

    @property
    def figures(self) -> dict[str, float]:
        """The metrics of the last check: displacement of edges, and score of the label probe."""
        return dict(self.refinement.evaluations[-1][1])

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {"out": str(self.out), "images": self.images, "rounds": self.num_rounds, **self.figures}

    def report(self) -> Report:
        """Losses and checks."""
        return self.refinement.report()


def run(config: Config, *, show_progress: bool = True) -> SimGANResult:
    """Train a refiner on synthetic and real images, and refine the synthetic ones.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: settings that are incompatible with each other or with the images.
        InvalidInput: images that cannot be read, or of two shapes.
    """
    from pippin.core import device as devices
    from pippin.core.files import check_folder
    from pippin.generate.methods.simgan.model import RefinerConfig, SimRefiner
    from pippin.generate.methods.simgan.train import RefinerTrainingConfig, fit

    out = Path(config.out)
    training = RefinerTrainingConfig(
        config.regularization,
        config.keep,
        config.batch_size,
        config.refiner_steps,
        history_size=config.history_size,
        lr=config.lr,
        eval_every=config.eval_every,
    )
    options.refuse_existing(out)
    check_folder(out)
    synthetic, real = _image_sets(config, show_progress=show_progress)
    labels = synthetic.labels if len(synthetic) >= MIN_PROBED else None
    if labels is None:
        progress.note("no labels to check: only the displacement of edges is measured", show_progress=show_progress)
    refiner = SimRefiner(RefinerConfig(synthetic.shape, config.hidden_channels, config.blocks), seed=config.seed).to(
        devices.choose(config.device)
    )
    refiner.metadata = {"synthetic": synthetic.name, "real": real.name}
    parameters = sum(p.numel() for p in refiner.parameters())
    progress.note(
        f"{parameters:,} parameters, {len(synthetic):,} synthetic and {len(real):,} real images of {synthetic.shape}, "
        f"{config.max_rounds} rounds",
        show_progress=show_progress,
    )
    refinement = fit(
        refiner,
        synthetic.x,
        real.x,
        config.max_rounds,
        labels=labels,
        config=training,
        seed=config.seed,
        show_progress=show_progress,
    )
    refiner.save(out)
    refined = refiner.refine(synthetic.x)
    _write(out, synthetic, refined, refinement.evaluations)
    result = SimGANResult(out, len(synthetic), config.max_rounds, labels is not None, refinement)
    if result.labeled and "label_score" not in result.figures:
        progress.note(
            "the probe cannot predict labels of synthetic images either: only the displacement of edges is measured",
            show_progress=show_progress,
        )
    return result


def _image_sets(config: Config, *, show_progress: bool) -> tuple[ImageSet, ImageSet]:
    from pippin.data import images

    synthetic, real = (
        images.load(
            name, size=config.image_size, limit=config.limit, skip_bad=config.skip_bad, show_progress=show_progress
        )
        for name in (config.synthetic, config.real)
    )
    if synthetic.shape != real.shape:
        raise InvalidInput(
            f"{config.synthetic} holds images of {synthetic.shape} (channels, height, width), {config.real} of "
            f"{real.shape}; give image_size (--image-size) to make them equal, or both with as many channels"
        )
    for name, found in ((config.synthetic, synthetic), (config.real, real)):
        if found.skipped:
            progress.note(
                f"{name}: left out {len(found.skipped)} files that cannot be read", show_progress=show_progress
            )
    return synthetic, real


def _write(out: Path, synthetic: ImageSet, refined: Tensor, checks: list[tuple[int, dict[str, Any]]]) -> None:
    """Write the refined images, a grid of samples, and the checks; each file atomically."""
    import numpy as np
    import torch

    from pippin.core.files import atomic_write
    from pippin.data import image_files
    from pippin.data.images import to_levels

    arrays = {"images": to_levels(refined).permute(0, 2, 3, 1).numpy()}  # [n, height, width, channels], 8 bits
    if synthetic.labels is not None:
        arrays |= {"labels": synthetic.labels.numpy(), "classes": np.array(synthetic.class_names)}
    with atomic_write(out / "refined.npz") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    with atomic_write(out / "checks.json") as file:
        file.write(json.dumps([{"round": after, **found} for after, found in checks], indent=1).encode() + b"\n")
    n = min(10, len(synthetic))
    sheet = image_files.image_grid(torch.cat([synthetic.x[:n], refined[:n]]), columns=n, zoom=3)
    image_files.write_image(out / "samples.png", sheet)
