"""Scenes labeled by their number of objects, batches of them, and how far samples are from true ones.

Notable here:
- every arm of a claim sees the same images in the same order
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pippin.data.synthetic.scenes import Scenes, SceneSpec
    from pippin.generate.conditions import Samples


def labeled(scenes: Scenes) -> Samples:
    """Images with their number of objects, less the smallest, as class."""
    from pippin.generate.conditions import Conditioning, Samples

    return Samples(scenes.x, Conditioning(labels=scenes.counts - scenes.spec.objects[0]))


def rows(samples: Samples, index: Any) -> Samples:
    """The samples at these indices."""
    from pippin.generate.conditions import Samples

    return Samples(samples.x[index], None if samples.condition is None else samples.condition.select(index))


class PoolBatches:
    """Endless random batches of fixed samples, the same for every arm of a seed."""

    def __init__(self, samples: Samples, batch: int, seed: int) -> None:
        self.samples, self.batch, self.seed = samples, batch, seed

    def __iter__(self) -> Iterator[Samples]:
        """Yield the batches."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield rows(self.samples, torch.randint(len(self.samples), (self.batch,), generator=generator))


class Distance:
    """Frechet distance of samples to true scenes, in the features of a small classifier of scenes."""

    def __init__(self, true: Tensor, spec: SceneSpec, steps: int) -> None:
        from pippin.evaluate.images.features import scene_features

        self.features = scene_features(spec, 0, steps=steps)
        self.true = self.features(true)

    def __call__(self, x: Tensor) -> float:
        """The distance of these samples."""
        from pippin.evaluate.images.sample_quality import frechet_distance

        return frechet_distance(self.features(x.cpu()), self.true)
