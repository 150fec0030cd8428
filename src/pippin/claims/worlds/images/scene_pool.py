"""Scenes labeled by their number of objects, how networks are trained on them, and how far samples are from true ones.

Notable here:
- every arm of a claim sees the same images in the same order
- a learning rate is searched for each arm alike: short runs with a seed of their own, judged on scenes of their own
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from pippin.data.synthetic.scenes import Scenes, SceneSpec
    from pippin.generate.conditions import Samples

SEARCH_SEED = 99
"""Of the data and the weights of every search; no claim's own seed."""


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


def fit(
    model: nn.Module, objective: Any, data: Any, steps: int, seed: int, optimizer: Any, device: str, **options: Any
) -> Any:
    """Train in place; averaged weights are loaded at the end where `ema` is given; leaves evaluation mode.

    Returns:
        The training's history.
    """
    from pippin.train import CosineSchedule, Trainer

    settings: dict[str, Any] = {"precision": "bfloat16" if device == "cuda" else "float32", "show_progress": False}
    settings |= {"optimizer": optimizer, "schedule": CosineSchedule(warmup_steps=0.05), "seed": seed, "device": device}
    trainer = Trainer(model, objective, data, steps=steps, **settings | options)
    history = trainer.fit()
    if trainer.ema is not None:
        model.load_state_dict({**model.state_dict(), **trainer.ema.averages})
    model.eval().requires_grad_(False)
    return history


def best_rate(rates: Sequence[float], loss_at: Callable[[float], float]) -> float:
    """The learning rate of the lowest validation loss; a single rate is returned untried."""
    import math

    from pippin.core.errors import NonFiniteLoss, NonFiniteSample

    def finite(rate: float) -> float:
        try:
            loss = loss_at(rate)
        except (NonFiniteLoss, NonFiniteSample):  # a rate that is too high
            return math.inf
        return math.inf if math.isnan(loss) else loss

    return rates[0] if len(rates) == 1 else min(rates, key=finite)


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
