"""Sample quality: compare a set of generated images with a set of real ones.

Notable here:
- distances depend on the features and on the number of images: compare only values with the same features and number
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from pippin.core import progress
from pippin.core.checks import NonNegativeInt, checked
from pippin.core.errors import InvalidInput
from pippin.core.options import Option
from pippin.recipes import options

if TYPE_CHECKING:
    from pippin.core.report import Report
    from pippin.data.images import ImageSet
    from pippin.evaluate.images.features import Features

MIN_IMAGES = 16
RELIABLE_IMAGES = 1000
"""With fewer images the Fréchet distance has a large positive bias; the kernel distance is unbiased."""


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a comparison."""

    samples: Annotated[str, Option("Images to judge: a folder, or a .npz file with 'images'.", positional=True)]
    real: Annotated[
        str, Option("What they are compared with: a folder, a .npz file, fashion-mnist or cifar-10.", positional=True)
    ]
    features: Annotated[
        Literal["small", "inception", "pixels"],
        Option(
            "Compare in the features of a small network trained on REAL now, in those of Inception (pippin pull "
            "inception-fid; about half a second an image), or in pixels."
        ),
    ] = "small"
    image_size: options.ImageSize = None
    limit: Annotated[int, Ge(MIN_IMAGES), Option("Images of each set at most.")] = 5000
    skip_bad: options.SkipBad = False
    seed: Annotated[NonNegativeInt, Option("Of the small network and of the random subsets.")] = 0


def run(config: Config, *, show_progress: bool = True) -> Report:
    """Measure Fréchet and kernel distance, precision, recall and fine detail of generated against real images.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidInput: images cannot be read, there are too few, or the two sets have different shapes.
    """
    from pippin.data import images
    from pippin.evaluate.images.sample_quality import compare

    real = images.load(
        config.real,
        size=config.image_size,
        limit=config.limit,
        skip_bad=config.skip_bad,
        show_progress=show_progress,
    )
    samples = images.load(
        config.samples,
        size=config.image_size,
        channels=_channels(config.samples, real),
        limit=config.limit,
        skip_bad=config.skip_bad,
        show_progress=show_progress,
    )
    if samples.shape != real.shape:
        raise InvalidInput(
            f"{config.samples} holds images of {samples.shape} (channels, height, width), {config.real} of "
            f"{real.shape}; give image_size (--image-size) to make them equal"
        )
    for name, found in ((config.samples, samples), (config.real, real)):
        if len(found) < MIN_IMAGES:
            raise InvalidInput(f"{name} holds {len(found)} images; give {MIN_IMAGES} or more")
        if found.skipped:
            progress.note(
                f"{name}: left out {len(found.skipped)} files that cannot be read", show_progress=show_progress
            )
    if min(len(samples), len(real)) < RELIABLE_IMAGES:
        progress.note(
            f"fewer than {RELIABLE_IMAGES} images: the Fréchet distance is much too large; see that at infinite n",
            show_progress=show_progress,
        )
    return compare(samples.x, real.x, _features(config, real, show_progress=show_progress), seed=config.seed)


def _channels(samples: str, real: ImageSet) -> Any:
    """The channels to read image files with: those of the real images, since gray files could be read as RGB too."""
    return None if Path(samples).suffix == ".npz" else real.shape[0]


def _features(config: Config, real: ImageSet, *, show_progress: bool) -> Features:
    from pippin.evaluate.images.features import Pixels, train_features
    from pippin.evaluate.images.inception import inception

    if config.features == "inception":
        return inception()
    if config.features == "pixels":
        return Pixels(real.shape)
    progress.note("training the small network on the real images", show_progress=show_progress)
    labels = "classes" if real.labels is not None else "rotations"
    name = f"small network, {labels} of {real.name}, seed {config.seed}"
    return train_features(real.x, real.labels, name=name, seed=config.seed)
