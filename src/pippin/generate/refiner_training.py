"""How a refiner and its judge are trained in turns, and how it is watched that labels keep their meaning.

Notable here:
- refiner and judge each have their own `Trainer`, and the trainers take turns: there is no other loop
- both losses are means over patches, and self-regularisation is a mean over pixels: its weight means the same for
  pictures of any size
- a probe that was trained on simulated pictures reads labels off refined ones: where it reads them much worse than
  before, a warning says so; pictures are also matched with what they were, to see whether anything moved
"""

from __future__ import annotations

import math
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

from pippin.core import figures, progress
from pippin.core.errors import InvalidArgument, InvalidInput, LabelDrift
from pippin.core.report import Report, Row
from pippin.generate.refiner import (
    HistoryBuffer,
    PatchDiscriminator,
    Regulariser,
    SimRefiner,
    check_pictures,
    initialise,
    kept,
)
from pippin.train import AdamW, Cosine, Linear, Loss, Trainer, Training

TOLERANCE: Final = 0.1
"""The share of its score that the probe may lose on refined pictures."""
_WATCHED: Final = 512
"""Pictures that are looked at in a check."""

Measure = Callable[[SimRefiner, PatchDiscriminator], Mapping[str, float]]


@dataclass(frozen=True)
class Refining:
    """How a refiner is trained.

    Attributes:
        weight: of self-regularisation (the paper's lambda), on the mean absolute difference of what is kept.
        regulariser: what is kept; see `pippin.generate.refiner.Regulariser`.
        batch: pictures of each kind in a step; even where there is a history.
        refiner_steps: of the refiner in a round.
        judge_steps: of the judge in a round.
        warm: steps of the judge before the first round.
        history: pictures in the history; 0 for none.
        lr: rate of both, falling to a tenth.
        every: rounds between two checks.
        probe: steps of the training of the probe, where labels are given.

    Raises:
        InvalidArgument: numbers out of range.
    """

    weight: float = 5.0
    regulariser: Regulariser = "identity"
    batch: int = 32
    refiner_steps: int = 2
    judge_steps: int = 1
    warm: int = 200
    history: int = 2048
    lr: float = 1e-3
    every: int = 50
    probe: int = 300

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise InvalidArgument(f"weight (lambda) is {self.weight}; give a finite number of 0 or more")
        for name in ("batch", "refiner_steps", "judge_steps", "every", "probe"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.warm < 0 or self.history < 0:
            raise InvalidArgument(f"warm={self.warm}, history={self.history}: give 0 or more")
        if self.history and (self.batch % 2 or self.history < self.batch):
            raise InvalidArgument(
                f"batch={self.batch} with a history of {self.history}: half of a batch comes from the history, so give "
                "an even batch and a history of at least as many pictures; history=0 for none"
            )


@dataclass
class Refinement:
    """What happened in a training.

    Attributes:
        judge: as it was at the end.
        refining: steps of the refiner.
        judging: steps of the judge, with its accuracy.
        checks: round, and what was measured after it: "moved" in pixels, "kept" (the probe's score on refined pictures
            over that on simulated ones, with labels that it can read off those), "accuracy" of the judge, and whatever
            was asked for.
    """

    judge: PatchDiscriminator
    refining: Training
    judging: Training
    checks: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def report(self) -> Report:
        """The last check."""
        units = {"moved": "pixels", "kept": "share", "accuracy": "share"}
        after, figures = self.checks[-1]
        rows = [Row(name, value, units.get(name, "")) for name, value in figures.items()]
        return Report(f"refiner after round {after}", [Row("rounds", after), *rows])

    def plot(self, path: Path) -> None:
        """Draw what the checks measured over the rounds.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        names = list(self.checks[-1][1])
        figure = figures.new(7, 1.6 * len(names) + 0.6)
        for panel, name in zip(figure.subplots(len(names), squeeze=False, sharex=True)[:, 0], names, strict=True):
            panel.plot([after for after, _ in self.checks], [found[name] for _, found in self.checks], "o-", ms=3)
            panel.set_ylabel(name)
        panel.set_xlabel("round")
        figures.save(figure, path)


def fit(
    refiner: SimRefiner,
    synthetic: Float[Tensor, "n ..."],
    real: Float[Tensor, "m ..."],
    rounds: int,
    *,
    labels: Tensor | None = None,
    how: Refining = Refining(),
    measure: Measure | None = None,
    seed: int = 0,
    show: bool = True,
) -> Refinement:
    """Train a refiner against a new judge.

    Args:
        refiner: is changed in place.
        synthetic: pictures of the simulator, -1 to 1.
        real: pictures that they are to look like, without labels.
        rounds: in each, the refiner makes its steps, then the judge.
        labels: of the simulated pictures, for the probe: classes, or numbers [n, k].
        how: see `Refining`.
        measure: further figures for the checks.
        seed: of everything random.
        show: whether a bar is drawn.

    Returns:
        The judge, both trainings and the checks.

    Raises:
        InvalidArgument: rounds below 1, or pictures of another shape.
        InvalidInput: no pictures, values outside -1 to 1, or labels of another number.
        NonFiniteLoss: training diverged; the weights are those before the step.

    Warns:
        LabelDrift: the probe lost more than a tenth of its score.

    Source: arXiv:1612.07828, algorithm 1. Adam takes the place of the paper's gradient descent.
    """
    if rounds < 1:
        raise InvalidArgument(f"rounds is {rounds}; give 1 or more")
    check_pictures(synthetic, refiner.config.shape, "simulated pictures")
    check_pictures(real, refiner.config.shape, "real pictures")
    kept(synthetic[:1], how.regulariser)
    if labels is not None and len(labels) != len(synthetic):
        raise InvalidInput(f"{len(labels)} labels for {len(synthetic)} simulated pictures")
    place = next(refiner.parameters()).device
    judge = PatchDiscriminator(refiner.config, seed=seed + 1).to(place)
    history = HistoryBuffer(how.history, seed=seed) if how.history else None
    made = _Pairs(refiner, synthetic, real, how.batch, history, seed + 2)
    settings: dict[str, Any] = {"schedule": Linear(final=0.1), "show": False}
    adam = AdamW(lr=how.lr, betas=(0.5, 0.99), weight_decay=0.0)
    judging = Trainer(
        judge, _judge_loss, made, steps=how.warm + rounds * how.judge_steps, optimiser=adam, seed=seed, **settings
    )
    objective = _RefinerLoss(judge, how.weight, how.regulariser)
    drawn = _Drawn(synthetic, how.batch, seed + 3)
    refining = Trainer(
        refiner, objective, drawn, steps=rounds * how.refiner_steps, optimiser=adam, seed=seed, **settings
    )
    probe = None if labels is None else LabelProbe.learn(synthetic, labels, steps=how.probe, seed=seed)
    result = Refinement(judge, refining.training, judging.training)
    watch = synthetic[-_WATCHED:]
    judging.advance(how.warm)
    with progress.bar(rounds, "refiner and judge", unit="rounds", show=show) as bar:
        for after in range(1, rounds + 1):
            refining.advance(how.refiner_steps)
            judging.advance(how.judge_steps)
            if after % how.every == 0 or after == rounds:
                found = _check(refiner, watch, None if labels is None else labels[-_WATCHED:], probe)
                found["accuracy"] = judging.training.steps[-1].metrics["accuracy"]
                if measure is not None:
                    found |= {name: float(value) for name, value in measure(refiner, judge).items()}
                result.checks.append((after, found))
                bar.say(f"moved {found['moved']:.2f} pixels, the judge is right on {found['accuracy']:.0%}")
            bar.advance(1)
    _warn(result.checks[-1][1])
    return result


class LabelProbe:
    """A small network that reads labels off pictures, trained on simulated ones with noise, blur and other brightness.

    Args:
        network: pictures to labels.
        classes: whether labels are classes.
        base: its score on simulated pictures that it did not learn from.
    """

    def __init__(self, network: nn.Module, *, classes: bool, base: float) -> None:
        self.network, self.classes, self.base = network, classes, base

    @classmethod
    def learn(cls, pictures: Float[Tensor, "n ..."], labels: Tensor, *, steps: int = 300, seed: int = 0) -> LabelProbe:
        """Train a probe; the last tenth of the pictures is held out for its score.

        Args:
            pictures: simulated ones.
            labels: classes (whole numbers), or numbers [n, k].
            steps: of training, of 64 pictures each.
            seed: of weights and batches.

        Raises:
            InvalidInput: fewer than 20 pictures.
        """
        if len(pictures) < 20:
            raise InvalidInput(f"a probe needs 20 pictures with labels or more, got {len(pictures)}")
        classes = not labels.is_floating_point()
        outputs = int(labels.max()) + 1 if classes else labels[0].numel()
        held = max(10, len(pictures) // 10)
        network = _probe_network(pictures.shape[1], outputs, seed)
        shown = labels if classes else labels.float().view(len(labels), -1)
        data = _Spoilt(pictures[:-held], shown[:-held], 64, seed)
        adam = AdamW(lr=3e-3, weight_decay=0.01)
        Trainer(
            network, _probe_loss, data, steps=steps, optimiser=adam, schedule=Cosine(warmup=0.05), seed=seed, show=False
        ).fit()
        probe = cls(network.eval().requires_grad_(False), classes=classes, base=1.0)
        probe.base = probe.score(pictures[-held:], labels[-held:])
        return probe

    @torch.no_grad()
    def read(self, pictures: Float[Tensor, "n ..."]) -> Tensor:
        """Labels: classes, or numbers [n, k]."""
        said = torch.cat([self.network(part.float().cpu()) for part in pictures.split(512)])
        return said.argmax(1) if self.classes else said

    def score(self, pictures: Float[Tensor, "n ..."], labels: Tensor) -> float:
        """The share of right classes; or R squared, the share of the labels' variance that it explains."""
        said, labels = self.read(pictures), labels.cpu()
        if self.classes:
            return float((said == labels).double().mean())
        wanted = labels.double().view(len(labels), -1)
        left = (said.double() - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum()
        return float(1 - left)


def displacement(before: Float[Tensor, "n ..."], after: Float[Tensor, "n ..."], *, most: int = 3) -> Float[Tensor, n]:
    """How far the edges in pictures moved as a whole, in pixels, by matching one with the other at every shift.

    Args:
        before: pictures (channels, height, width).
        after: the same, changed.
        most: largest shift along an axis; the border of this width is left out.

    Raises:
        InvalidArgument: different shapes, or pictures too small for such shifts.
    """
    if before.shape != after.shape or min(before.shape[2:]) < 4 * most or most < 1:
        raise InvalidArgument(
            f"pictures of {tuple(before.shape)} and {tuple(after.shape)} to be matched over {most} pixels: give equal "
            f"shapes of {4 * most} pixels or more"
        )
    first, second = (_edges(x.detach().float()) for x in (before, after))
    height, width = first.shape[1:]
    fixed = _normal(second[:, most : height - most, most : width - most])
    side = 2 * most + 1
    scores = torch.stack(
        [
            (_normal(first[:, i : i + height - 2 * most, j : j + width - 2 * most]) * fixed).sum((1, 2))
            for i in range(side)
            for j in range(side)
        ],
        1,
    ).view(-1, side, side)
    best = scores.flatten(1).argmax(1)
    row, column = best // side, best % side
    index = torch.arange(len(scores), device=scores.device)
    down = row + _peak(scores[index, :, column], row)
    right = column + _peak(scores[index, row], column)
    return torch.hypot(down - most, right - most)


# --- objectives and data ----------------------------------------------------------------------------------------------


class _RefinerLoss:
    """The refiner's loss: what the judge, held still, takes for refined, and how far pictures went."""

    unit = "pictures"

    def __init__(self, judge: PatchDiscriminator, weight: float, regulariser: Regulariser) -> None:
        self.judge, self.weight, self.regulariser = judge, weight, regulariser

    def __call__(self, model: nn.Module, batch: Tensor, generator: torch.Generator) -> Loss:
        refined = model(batch)
        still = {name: parameter.detach() for name, parameter in self.judge.named_parameters()}
        odds = functional_call(self.judge, still, (refined,))
        realism = F.softplus(odds).flatten(1).mean(1).sum()
        before, after = (kept(x, self.regulariser) for x in (batch, refined))
        change = (after - before).abs().flatten(1).mean(1).sum()
        metrics = {"realism": realism.detach(), "change": change.detach()}
        return Loss(realism + self.weight * change, len(batch), metrics)


def _judge_loss(model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
    """Cross-entropy over patches of refined and of real pictures."""
    refined, real = batch
    odds = model(torch.cat([refined, real])).flatten(1)
    fake, true = odds[: len(refined)], odds[len(refined) :]
    loss = F.softplus(-fake).mean(1).sum() + F.softplus(true).mean(1).sum()
    right = ((fake > 0).float().mean(1).sum() + (true <= 0).float().mean(1).sum()) / 2
    return Loss(loss, len(refined), {"accuracy": right.detach()})


class _Drawn:
    """Pictures drawn again and again."""

    def __init__(self, pictures: Tensor, batch: int, seed: int) -> None:
        self.pictures, self.batch, self.seed = pictures, batch, seed

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield self.pictures[torch.randint(len(self.pictures), (self.batch,), generator=generator)].float()


class _Pairs:
    """Pictures as the refiner makes them now, some earlier ones among them, and real ones."""

    def __init__(
        self, refiner: SimRefiner, synthetic: Tensor, real: Tensor, batch: int, history: HistoryBuffer | None, seed: int
    ) -> None:
        self.refiner, self.history = refiner, history
        self.synthetic, self.real = _Drawn(synthetic, batch, seed), _Drawn(real, batch, seed + 1_000_000)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        place = next(self.refiner.parameters()).device
        for x, real in zip(self.synthetic, self.real, strict=True):
            with torch.no_grad():
                refined = self.refiner(x.to(place))
            yield (refined if self.history is None else self.history.mix(refined)), real


class _Spoilt:
    """Pictures with labels, brighter or darker, blurred and noisy: a probe is to read shapes, not levels."""

    def __init__(self, pictures: Tensor, labels: Tensor, batch: int, seed: int) -> None:
        self.pictures, self.labels, self.batch, self.seed = pictures, labels, batch, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            index = torch.randint(len(self.pictures), (self.batch,), generator=generator)
            x = self.pictures[index].float()
            amount = torch.rand(4, self.batch, 1, 1, 1, generator=generator)
            blurred = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
            x = x.lerp(blurred, amount[0]) * (0.6 + 0.8 * amount[1]) + 0.6 * (amount[2] - 0.5)
            noise = torch.randn(x.shape, generator=generator)
            yield (x + 0.2 * amount[3] * noise).clamp(-1, 1), self.labels[index]


def _probe_network(channels: int, outputs: int, seed: int) -> nn.Sequential:
    with torch.random.fork_rng([]):
        network = nn.Sequential(
            *(nn.Conv2d(channels, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 48), nn.ReLU(), nn.Linear(48, outputs)),
        )
    initialise(network, seed)
    return network


def _probe_loss(model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
    x, labels = batch
    said = model(x)
    if labels.is_floating_point():
        return Loss((said - labels).square().mean(1).sum(), len(x))
    return Loss(F.cross_entropy(said, labels, reduction="sum"), len(x))


# --- checks -----------------------------------------------------------------------------------------------------------


def _check(refiner: SimRefiner, x: Tensor, labels: Tensor | None, probe: LabelProbe | None) -> dict[str, float]:
    """What refinement does to pictures that are looked at."""
    refined = refiner.refine(x)
    found = {"change": float((refined - x).abs().mean())}
    most = min(3, min(x.shape[2:]) // 4)
    found["moved"] = float(displacement(x, refined, most=most).mean()) if most else 0.0
    if probe is not None and labels is not None and probe.base > 0:
        found["kept"] = probe.score(refined, labels) / probe.base
    return found


def _warn(found: Mapping[str, float]) -> None:
    if found.get("kept", 1.0) < 1 - TOLERANCE:
        warnings.warn(
            f"a probe keeps {found['kept']:.0%} of its score on refined pictures: labels may have lost their meaning; "
            "give more weight to self-regularisation, or fewer rounds",
            LabelDrift,
            stacklevel=3,
        )


def _edges(x: Tensor) -> Tensor:
    """The size of the slope at each pixel, over all channels."""
    x = F.pad(x, (1, 1, 1, 1), mode="replicate")
    down = (x[:, :, 2:, 1:-1] - x[:, :, :-2, 1:-1]).square()
    right = (x[:, :, 1:-1, 2:] - x[:, :, 1:-1, :-2]).square()
    return (down + right).sum(1).sqrt()


def _normal(x: Tensor) -> Tensor:
    x = x - x.mean((1, 2), keepdim=True)
    return x / x.square().sum((1, 2), keepdim=True).sqrt().clamp_min(1e-9)


def _peak(scores: Tensor, at: Tensor) -> Tensor:
    """Where between pixels a parabola through the best score and its neighbours has its top: -0.5 to 0.5."""
    inside = at.clamp(1, scores.shape[1] - 2)
    left, middle, right = (scores.gather(1, (inside + i)[:, None])[:, 0] for i in (-1, 0, 1))
    bend = (left - 2 * middle + right).clamp_max(-1e-9)
    return torch.where(inside == at, ((left - right) / (2 * bend)).clamp(-0.5, 0.5), torch.zeros_like(bend))
