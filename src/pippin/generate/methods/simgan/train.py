"""Alternating training of a refiner and its discriminator, with checks that labels remain valid.

Notable here:
- refiner and discriminator each have their own `Trainer`, which are advanced alternately
- both losses are means over patches, and self-regularization is a mean over pixels, so its weight does not depend on
  the size of the images
- a probe trained on synthetic images predicts the labels of refined ones, with a warning if its score drops; the
  displacement of edges between an image and its refined version is measured, too
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from pippin.core import plotting, progress
from pippin.core.checks import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput, LabelDrift
from pippin.core.report import Report, Row
from pippin.data.random_batches import RandomBatches, resampled
from pippin.generate.methods.simgan.model import (
    HistoryBuffer,
    PatchDiscriminator,
    Regularizer,
    SimRefiner,
    check_images,
    initialize,
    regularized_features,
)
from pippin.train import AdamW, CosineSchedule, LinearSchedule, Loss, Trainer, TrainingResult

TOLERANCE: Final = 0.1
"""Maximum relative loss of the probe's score on refined images."""
_EVAL_IMAGES: Final = 512
"""Number of images in an evaluation."""

Measure = Callable[[SimRefiner, PatchDiscriminator], Mapping[str, float]]
"""Computes further metrics for an evaluation."""


@checked
@dataclass(frozen=True)
class RefinerTrainingConfig:
    """Settings of the training of a refiner.

    Attributes:
        weight: weight of self-regularization (the paper's lambda), the mean absolute difference of the features.
        regularizer: the features; see `pippin.generate.methods.simgan.model.Regularizer`.
        batch_size: number of synthetic and of real images in a step; even, if there is a history.
        refiner_steps: steps of the refiner in a round.
        discriminator_steps: steps of the discriminator in a round.
        discriminator_warmup_steps: steps of the discriminator before the first round.
        history_size: number of images in the history; 0 for no history.
        lr: initial learning rate of both, which decays linearly to a tenth.
        eval_every: rounds between two evaluations.
        probe_steps: training steps of the probe, if labels are given.

    Raises:
        InvalidArgument: numbers out of range.
    """

    weight: NonNegativeFloat = 5.0
    regularizer: Regularizer = "identity"
    batch_size: PositiveInt = 32
    refiner_steps: PositiveInt = 2
    discriminator_steps: PositiveInt = 1
    discriminator_warmup_steps: NonNegativeInt = 200
    history_size: NonNegativeInt = 2048
    lr: PositiveFloat = 1e-3
    eval_every: PositiveInt = 50
    probe_steps: PositiveInt = 300

    def __post_init__(self) -> None:
        if self.history_size and (self.batch_size % 2 or self.history_size < self.batch_size):
            raise InvalidArgument(
                f"batch_size={self.batch_size} with history_size={self.history_size}: half of a batch comes from the "
                "history, so batch_size must be even and at most history_size; history_size=0 for no history"
            )


@dataclass
class RefinerTrainingResult:
    """Result of `fit`.

    Attributes:
        discriminator: the trained discriminator.
        refiner_training: training history of the refiner.
        discriminator_training: training history of the discriminator, with its accuracy.
        evaluations: round and the metrics after it: "change" (mean absolute difference of pixels), "moved" (mean
            displacement of edges, in pixels), "label_score" (the probe's score on refined images over that on synthetic
            ones, if the latter is above 0), "accuracy" of the discriminator, and further metrics of ``measure``.
    """

    discriminator: PatchDiscriminator
    refiner_training: TrainingResult
    discriminator_training: TrainingResult
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def report(self) -> Report:
        """The last evaluation."""
        units = {"moved": "pixels", "label_score": "share", "accuracy": "share"}
        step, metrics = self.evaluations[-1]
        rows = [Row(name, value, units.get(name, "")) for name, value in metrics.items()]
        return Report(f"refiner after round {step}", [Row("rounds", step), *rows])

    def plot(self, path: Path) -> None:
        """Plot the metrics of the evaluations over the rounds.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        names = list(self.evaluations[-1][1])
        figure = plotting.new(7, 1.6 * len(names) + 0.6)
        steps = [step for step, _ in self.evaluations]
        for panel, name in zip(figure.subplots(len(names), squeeze=False, sharex=True)[:, 0], names, strict=True):
            panel.plot(steps, [metrics[name] for _, metrics in self.evaluations], "o-", ms=3)
            panel.set_ylabel(name)
        panel.set_xlabel("round")
        plotting.save(figure, path)


@checked
def fit(
    refiner: SimRefiner,
    synthetic: Float[Tensor, "n ..."],
    real: Float[Tensor, "m ..."],
    steps: PositiveInt,
    *,
    labels: Tensor | None = None,
    config: RefinerTrainingConfig = RefinerTrainingConfig(),
    measure: Measure | None = None,
    seed: int = 0,
    show_progress: bool = True,
) -> RefinerTrainingResult:
    """Train a refiner against a new discriminator.

    Args:
        refiner: the refiner, trained in place.
        synthetic: images of the simulator, -1 to 1.
        real: unlabeled real images, -1 to 1.
        steps: number of rounds, in each of which the refiner takes its steps, then the discriminator.
        labels: labels of the synthetic images for the probe: classes (n,), or values (n, k) of a regression.
        config: see `RefinerTrainingConfig`.
        measure: computes further metrics for the evaluations.
        seed: random seed.
        show_progress: whether to show a progress bar.

    Returns:
        The discriminator, the training histories and the evaluations.

    Raises:
        InvalidArgument: steps below 1, images of another shape, or an unknown regularizer.
        InvalidInput: no images, values outside -1 to 1, or another number of labels than of images.
        NonFiniteLoss: training diverged; the weights are those before the step.

    Warns:
        LabelDrift: the probe lost more than a tenth of its score.

    Source: arXiv:1612.07828, algorithm 1. Adam is used instead of the paper's gradient descent.
    """
    check_images(synthetic, refiner.config.shape, "synthetic images")
    check_images(real, refiner.config.shape, "real images")
    regularized_features(synthetic[:1], config.regularizer)  # refuses an unknown regularizer
    if labels is not None and len(labels) != len(synthetic):
        raise InvalidInput(f"{len(labels)} labels for {len(synthetic)} synthetic images; give one for each")
    device = next(refiner.parameters()).device
    discriminator = PatchDiscriminator(refiner.config, seed=seed + 1).to(device)
    history = HistoryBuffer(config.history_size, seed=seed) if config.history_size else None
    pairs = _RefinedAndReal(refiner, synthetic, real, config.batch_size, history, seed + 2)
    settings: dict[str, Any] = {"schedule": LinearSchedule(min_lr_ratio=0.1), "show_progress": False}
    adam = AdamW(lr=config.lr, betas=(0.5, 0.99), weight_decay=0.0)
    discriminator_trainer = Trainer(
        discriminator,
        _discriminator_loss,
        pairs,
        steps=config.discriminator_warmup_steps + steps * config.discriminator_steps,
        optimizer=adam,
        seed=seed,
        **settings,
    )
    objective = _RefinerLoss(discriminator, config.weight, config.regularizer)
    batches = _random_batches(synthetic, config.batch_size, seed + 3)
    refiner_trainer = Trainer(
        refiner, objective, batches, steps=steps * config.refiner_steps, optimizer=adam, seed=seed, **settings
    )
    probe = None if labels is None else LabelProbe.fit(synthetic, labels, steps=config.probe_steps, seed=seed)
    result = RefinerTrainingResult(discriminator, refiner_trainer.result, discriminator_trainer.result)
    eval_images = synthetic[-_EVAL_IMAGES:]
    discriminator_trainer.advance(config.discriminator_warmup_steps)
    with progress.bar(
        steps, "refiner and discriminator", unit="rounds", advice="Ctrl-C ends it unsaved", show_progress=show_progress
    ) as bar:
        for step in range(1, steps + 1):
            refiner_trainer.advance(config.refiner_steps)
            discriminator_trainer.advance(config.discriminator_steps)
            if step % config.eval_every == 0 or step == steps:
                metrics = _evaluate(refiner, eval_images, None if labels is None else labels[-_EVAL_IMAGES:], probe)
                metrics["accuracy"] = discriminator_trainer.result.steps[-1].metrics["accuracy"]
                if measure is not None:
                    metrics |= {name: float(value) for name, value in measure(refiner, discriminator).items()}
                result.evaluations.append((step, metrics))
                bar.say(f"moved {metrics['moved']:.2f} pixels, discriminator accuracy {metrics['accuracy']:.0%}")
            bar.advance(1)
    _warn(result.evaluations[-1][1])
    return result


class LabelProbe:
    """A small network that predicts labels, trained on synthetic images augmented by noise, blur and brightness.

    Args:
        network: maps images to logits or values.
        classes: whether labels are classes.
        base: its score on held-out synthetic images.
    """

    def __init__(self, network: nn.Module, *, classes: bool, base: float) -> None:
        self.network, self.classes, self.base = network, classes, base

    @classmethod
    def fit(cls, images: Float[Tensor, "n ..."], labels: Tensor, *, steps: int = 300, seed: int = 0) -> LabelProbe:
        """Train a probe; the last tenth of the images is held out for its score.

        Args:
            images: synthetic images, -1 to 1.
            labels: classes (integers), or values (n, k) of a regression.
            steps: training steps, of 64 images each.
            seed: seed of weights and batches.

        Raises:
            InvalidInput: fewer than 20 images.
        """
        if len(images) < 20:
            raise InvalidInput(f"a probe needs 20 images with labels or more, got {len(images)}")
        classes = not labels.is_floating_point()
        outputs = int(labels.max()) + 1 if classes else labels[0].numel()
        num_held_out = max(10, len(images) // 10)
        network = _probe_network(images.shape[1], outputs, seed)
        targets = labels if classes else labels.float().view(len(labels), -1)
        data = _augmented(images[:-num_held_out], targets[:-num_held_out], 64, seed)
        adam = AdamW(lr=3e-3, weight_decay=0.01)
        Trainer(
            network,
            _probe_loss,
            data,
            steps=steps,
            optimizer=adam,
            schedule=CosineSchedule(warmup_steps=0.05),
            seed=seed,
            show_progress=False,
        ).fit()
        probe = cls(network.eval().requires_grad_(False), classes=classes, base=1.0)
        probe.base = probe.score(images[-num_held_out:], labels[-num_held_out:])
        return probe

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "n ..."]) -> Tensor:
        """Predicted labels: classes (n,), or values (n, k)."""
        outputs = torch.cat([self.network(part.float().cpu()) for part in images.split(512)])
        return outputs.argmax(1) if self.classes else outputs

    def score(self, images: Float[Tensor, "n ..."], labels: Tensor) -> float:
        """Accuracy for classes; R squared over all values for regression."""
        predicted, labels = self.predict(images), labels.cpu()
        if self.classes:
            return float((predicted == labels).double().mean())
        target = labels.double().view(len(labels), -1)
        unexplained = (predicted.double() - target).square().sum() / (target - target.mean(0)).square().sum()
        return float(1 - unexplained)


@checked
def displacement(
    before: Float[Tensor, "n ..."], after: Float[Tensor, "n ..."], *, max_shift: PositiveInt = 3
) -> Float[Tensor, n]:
    """Displacement of the edges of each image in pixels, by normalized cross-correlation, to a fraction of a pixel.

    Args:
        before: images (n, channels, height, width).
        after: changed versions of them.
        max_shift: largest shift along an axis; a border of this width is not compared.

    Raises:
        InvalidArgument: different shapes, or images too small for such shifts.
    """
    if before.shape != after.shape or min(before.shape[2:]) < 4 * max_shift:
        raise InvalidArgument(
            f"images of shapes {tuple(before.shape)} and {tuple(after.shape)} cannot be compared over shifts of "
            f"{max_shift} pixels; give equal shapes of {4 * max_shift} pixels or more, or lower max_shift"
        )
    first, second = (_edges(x.detach().float()) for x in (before, after))  # (n, height, width)
    height, width = first.shape[1:]
    fixed = _standardized(second[:, max_shift : height - max_shift, max_shift : width - max_shift])
    side = 2 * max_shift + 1
    scores = torch.stack(
        [
            (_standardized(first[:, i : i + height - 2 * max_shift, j : j + width - 2 * max_shift]) * fixed).sum((1, 2))
            for i in range(side)
            for j in range(side)
        ],
        1,
    ).view(-1, side, side)  # correlation of each image at each shift
    best = scores.flatten(1).argmax(1)
    row, column = best // side, best % side
    index = torch.arange(len(scores), device=scores.device)
    down = row + _peak(scores[index, :, column], row)
    right = column + _peak(scores[index, row], column)
    return torch.hypot(down - max_shift, right - max_shift)


# --- objectives and data ----------------------------------------------------------------------------------------------


class _RefinerLoss:
    """The refiner's loss: the adversarial loss with a fixed discriminator, and self-regularization (eq. 1)."""

    unit = "images"

    def __init__(self, discriminator: PatchDiscriminator, weight: float, regularizer: Regularizer) -> None:
        self.discriminator, self.weight, self.regularizer = discriminator, weight, regularizer

    def __call__(self, model: nn.Module, batch: Tensor, generator: torch.Generator) -> Loss:
        refined = model(batch)
        # detached, so that only the refiner gets gradients
        parameters = {name: parameter.detach() for name, parameter in self.discriminator.named_parameters()}
        logits = functional_call(self.discriminator, parameters, (refined,))  # (n, rows, columns)
        realism = F.softplus(logits).flatten(1).mean(1).sum()
        before, after = (regularized_features(x, self.regularizer) for x in (batch, refined))
        change = (after - before).abs().flatten(1).mean(1).sum()
        metrics = {"realism": realism.detach(), "change": change.detach()}
        return Loss(realism + self.weight * change, len(batch), metrics)


def _discriminator_loss(model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
    """Cross-entropy over patches of refined and of real images (eq. 2)."""
    refined, real = batch
    logits = model(torch.cat([refined, real])).flatten(1)  # (2 n, patches)
    refined_logits, real_logits = logits[: len(refined)], logits[len(refined) :]
    loss = F.softplus(-refined_logits).mean(1).sum() + F.softplus(real_logits).mean(1).sum()
    correct = ((refined_logits > 0).float().mean(1).sum() + (real_logits <= 0).float().mean(1).sum()) / 2
    return Loss(loss, len(refined), {"accuracy": correct.detach()})


def _random_batches(images: Tensor, batch_size: int, seed: int) -> RandomBatches[Tensor]:
    """Endless random batches of images, sampled with replacement."""
    return resampled(len(images), batch_size, lambda index, _: images[index].float(), seed=seed)


class _RefinedAndReal:
    """Pairs of batches: refined images, half of them from the history, and real images."""

    def __init__(
        self,
        refiner: SimRefiner,
        synthetic: Tensor,
        real: Tensor,
        batch_size: int,
        history: HistoryBuffer | None,
        seed: int,
    ) -> None:
        self.refiner, self.history = refiner, history
        self.synthetic = _random_batches(synthetic, batch_size, seed)
        self.real = _random_batches(real, batch_size, seed + 1_000_000)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = next(self.refiner.parameters()).device
        for x, real in zip(self.synthetic, self.real, strict=True):
            with torch.no_grad():
                refined = self.refiner(x.to(device))
            yield (refined if self.history is None else self.history.mix(refined)), real


def _augmented(images: Tensor, labels: Tensor, batch_size: int, seed: int) -> RandomBatches[tuple[Tensor, Tensor]]:
    """Labeled images with random brightness, contrast, blur and noise, so that a probe depends on shapes only."""

    def make(index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = images[index].float()
        amount = torch.rand(4, batch_size, 1, 1, 1, generator=generator)  # blur, contrast, brightness, noise
        blurred = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
        x = x.lerp(blurred, amount[0]) * (0.6 + 0.8 * amount[1]) + 0.6 * (amount[2] - 0.5)
        noise = torch.randn(x.shape, generator=generator)
        return (x + 0.2 * amount[3] * noise).clamp(-1, 1), labels[index]

    return resampled(len(images), batch_size, make, seed=seed)


def _probe_network(channels: int, outputs: int, seed: int) -> nn.Sequential:
    """A small convolutional network from images (n, channels, height, width) to (n, outputs)."""
    with torch.random.fork_rng([]):
        network = nn.Sequential(
            *(nn.Conv2d(channels, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 48), nn.ReLU(), nn.Linear(48, outputs)),
        )
    initialize(network, seed)
    return network


def _probe_loss(model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
    """Squared error for regression, cross-entropy for classes; summed over images."""
    x, labels = batch
    outputs = model(x)
    if labels.is_floating_point():
        return Loss((outputs - labels).square().mean(1).sum(), len(x))
    return Loss(F.cross_entropy(outputs, labels, reduction="sum"), len(x))


# --- evaluation -------------------------------------------------------------------------------------------------------


def _evaluate(refiner: SimRefiner, x: Tensor, labels: Tensor | None, probe: LabelProbe | None) -> dict[str, float]:
    """Metrics of a refiner on synthetic images; see `RefinerTrainingResult`."""
    refined = refiner.refine(x)
    metrics = {"change": float((refined - x).abs().mean())}
    max_shift = min(3, min(x.shape[2:]) // 4)
    metrics["moved"] = float(displacement(x, refined, max_shift=max_shift).mean()) if max_shift else 0.0
    if probe is not None and labels is not None and probe.base > 0:
        metrics["label_score"] = probe.score(refined, labels) / probe.base
    return metrics


def _warn(metrics: Mapping[str, float]) -> None:
    """Warn if the probe lost more of its score than `TOLERANCE`."""
    if metrics.get("label_score", 1.0) < 1 - TOLERANCE:
        warnings.warn(
            f"a probe keeps {metrics['label_score']:.0%} of its score on refined images: labels may no longer be "
            "valid; increase the weight of self-regularization, or train for fewer rounds",
            LabelDrift,
            stacklevel=3,
        )


def _edges(x: Tensor) -> Tensor:
    """Norm of the image gradient at each pixel, over all channels: (n, height, width)."""
    x = F.pad(x, (1, 1, 1, 1), mode="replicate")
    down = (x[:, :, 2:, 1:-1] - x[:, :, :-2, 1:-1]).square()
    right = (x[:, :, 1:-1, 2:] - x[:, :, 1:-1, :-2]).square()
    return (down + right).sum(1).sqrt()


def _standardized(x: Tensor) -> Tensor:
    """Images (n, height, width) with mean 0 and norm 1."""
    x = x - x.mean((1, 2), keepdim=True)
    return x / x.square().sum((1, 2), keepdim=True).sqrt().clamp_min(1e-9)


def _peak(scores: Tensor, best: Tensor) -> Tensor:
    """Offset, -0.5 to 0.5, of the maximum of a parabola through the best score and its neighbors; 0 at the border."""
    inside = best.clamp(1, scores.shape[1] - 2)
    left, middle, right = (scores.gather(1, (inside + i)[:, None])[:, 0] for i in (-1, 0, 1))
    curvature = (left - 2 * middle + right).clamp_max(-1e-9)
    offset = ((left - right) / (2 * curvature)).clamp(-0.5, 0.5)
    return torch.where(inside == best, offset, torch.zeros_like(curvature))
