r"""Locality of a conditional model's scores, which predicts length generalization: to more objects than in training.

Notable here:
- three figures at each time: the effect of a conditioner inside its region over that outside, the radius of influence
  on a pixel, and whether the effects of two conditioners add up
- the trivial part of a score, ``-x / s²``, is excluded exactly: influence is measured on the estimate of the data
- a length curve measures the samples: the accuracy of images of K objects, and the largest K that still succeeds
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.core import plotting
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.report import Report, Row
from pippin.data.synthetic import scenes as synthetic_scenes
from pippin.data.synthetic.scenes import SceneSpec
from pippin.generate.conditions import Conditioning
from pippin.generate.diffusion.prediction import Estimate
from pippin.generate.diffusion.schedules import NoiseSchedule
from pippin.generate.noise import Noise

Draw = Callable[[Bool[Tensor, "n conditioners"]], Conditioning]
"""Makes the condition with these conditioners (such as objects at given positions) present."""


@runtime_checkable
class ScoreModel(Protocol):
    """A model that estimates data and noise, such as `pippin.generate.diffusion.diffusion.Diffusion`."""

    def estimate(self, x: Tensor, t: float | Tensor, condition: Conditioning | None = None) -> Estimate:
        """Estimate data and noise in samples at a time, under a condition."""


@dataclass(frozen=True)
class AtTime:
    """Locality at one time.

    Attributes:
        t: the time.
        sensitivity: effect of each conditioner (column) on the score in each region (row); rows add up to 1.
        ratio: R_cond, the mean of the diagonal of ``sensitivity`` over the mean off the diagonal; infinite if
            conditioners change nothing outside their regions, and 1 if they change nothing at all.
        influence: the fraction of the influence on a pixel that comes from each Chebyshev distance, from 0 pixels up.
        r90: the distance in pixels within which 90 % of the influence lies.
        gap: additivity gap: relative difference between the effect of two conditioners together and the sum of their
            effects, 0 to about 1.
    """

    t: float
    sensitivity: Float[Tensor, "conditioners conditioners"]
    ratio: float
    influence: tuple[float, ...]
    r90: int
    gap: float

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values; an infinite ratio becomes None."""
        return {
            "t": self.t,
            "R_cond": self.ratio if math.isfinite(self.ratio) else None,
            "r90": self.r90,
            "additivity_gap": self.gap,
            "influence": list(self.influence),
            "sensitivity": self.sensitivity.tolist(),
        }


@dataclass(frozen=True)
class LocalityReport:
    """Locality of a model at several times.

    Attributes:
        at: the figures of each time, in ascending order of times.
    """

    at: tuple[AtTime, ...]

    @property
    def R_cond(self) -> float:
        """The geometric mean of R_cond over the times."""
        return math.exp(sum(math.log(max(entry.ratio, 1e-30)) for entry in self.at) / len(self.at))

    @property
    def r90(self) -> int:
        """The largest radius over the times."""
        return max(entry.r90 for entry in self.at)

    @property
    def additivity_gap(self) -> float:
        """The mean gap over the times."""
        return sum(entry.gap for entry in self.at) / len(self.at)

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values; an infinite ratio becomes None."""
        return {
            "R_cond": self.R_cond if math.isfinite(self.R_cond) else None,
            "r90": self.r90,
            "additivity_gap": self.additivity_gap,
            "at": [entry.to_dict() for entry in self.at],
        }

    def report(self) -> Report:
        """The figures as a table."""
        rows = []
        for entry in self.at:
            rows.append(Row(f"conditional locality at t={entry.t:.2f}", entry.ratio))
            rows.append(Row(f"radius of 90 % of the influence at t={entry.t:.2f}", entry.r90, "pixels"))
            rows.append(Row(f"additivity gap at t={entry.t:.2f}", entry.gap))
        return Report("Locality of the score", rows)

    def __str__(self) -> str:
        return str(self.report())

    def plot(self, path: Path) -> None:
        """Plot, for each time, influence by distance and the effect of each conditioner by region.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure = plotting.new(2.2 * (1 + len(self.at)), 2.6)
        panels = figure.subplots(1, 1 + len(self.at))
        for entry in self.at:
            panels[0].plot(range(len(entry.influence)), entry.influence, marker="o", label=f"t={entry.t:.2f}")
        panels[0].set(xlabel="distance, pixels", ylabel="fraction of influence", yscale="log")
        panels[0].legend(fontsize=6)
        for panel, entry in zip(panels[1:], self.at, strict=True):
            panel.imshow(entry.sensitivity.numpy(), vmin=0, vmax=1, cmap="magma")
            panel.set(title=f"t={entry.t:.2f}", xlabel="conditioner", ylabel="region")
        plotting.save(figure, path)


@checked
def locality_report(
    model: ScoreModel,
    schedule: NoiseSchedule,
    x0: Float[Tensor, "n channels height width"],
    present: Bool[Tensor, "scenes conditioners"],
    draw: Draw,
    regions: Bool[Tensor, "regions rows columns"],
    *,
    times: Sequence[float] = (0.2, 0.5, 0.8),
    probes: PositiveInt = 8,
    seed: int = 0,
) -> LocalityReport:
    r"""Measure how local a model's scores are.

    - $Q_{ij}$: the mean squared change of the score in the region of conditioner i when conditioner j is toggled; rows
      are normalized, and R_cond is the mean of the diagonal over the mean off the diagonal.
    - Influence: $\lvert\partial \hat x_{0,u} / \partial x_{t,v}\rvert^2$ by distance of u and v, for ``probes`` random
      pixels u in each sample.
    - Additivity gap: with $\delta(c) = s(c) - s(\emptyset)$,
      $\lVert\delta(c_{12}) - \delta(c_1) - \delta(c_2)\rVert / \lVert\delta(c_{12})\rVert$ for two of the conditioners
      that are present.

    Args:
        model: the model, in evaluation mode.
        schedule: its noise schedule.
        x0: samples with the conditioners of ``present``; two in each is best, since toggling then leaves 1 or 3.
        present: which conditioners each sample has; some sample has at least two.
        draw: makes the condition of given conditioners; of none, the null condition.
        regions: the region of each conditioner's object, and possibly the remaining pixels as one more region; a
            partition of the image.
        times: times of the measurement.
        probes: number of pixels of each sample whose inputs are traced.
        seed: seed of noise and probes.

    Raises:
        InvalidArgument: a model in training mode or with random results, times outside the schedule, regions that are
            no partition or have another size, no sample with two conditioners, or a condition that toggling does not
            change.

    Source: Bradley 2025, arXiv:2509.16447, definitions of pixel and conditional locality; the estimators are our own.
    """
    _check_regions(x0, present, regions)
    if not times or any(not 0 < t <= schedule.max_time for t in times):
        raise InvalidArgument(f"times {tuple(times)} must be above 0 and at most {schedule.max_time}")
    if isinstance(model, nn.Module) and model.training:
        raise InvalidArgument("the model is in training mode, where dropout is on; call eval() first")
    _check_toggles(present, draw)
    noise = Noise(len(x0), seed=seed, device=x0.device)
    at = []
    for t in sorted(times):
        x = schedule.a(t) * x0 + schedule.s(t) * noise.normal(x0.shape[1:])
        sensitivity = _sensitivity(model, schedule.s(t), x, t, present, draw, regions)
        influence = _influence(model, x, t, draw(present), probes, noise)
        gap = _gap(model, schedule.s(t), x, t, present, draw, noise)
        cumulative = influence.cumsum(0) / influence.sum().clamp_min(1e-30)
        r90 = int((cumulative >= 0.9 - 1e-9).nonzero()[0]) if bool(influence.any()) else 0
        fractions = tuple((influence / influence.sum().clamp_min(1e-30)).tolist())
        at.append(AtTime(t, sensitivity, _ratio(sensitivity), fractions, r90, gap))
    return LocalityReport(tuple(at))


@torch.no_grad()
def _sensitivity(
    model: ScoreModel, s: float, x: Tensor, t: float, present: Tensor, draw: Draw, regions: Tensor
) -> Tensor:
    """Q of `locality_report`, (regions, conditioners); rows add up to 1."""
    base = model.estimate(x, t, draw(present)).score(s)
    repeated = model.estimate(x, t, draw(present)).score(s)
    if not torch.equal(base, repeated):
        raise InvalidArgument("two evaluations of the model differ; turn off everything random in it")
    k = present.shape[1]
    masks = regions[:k].flatten(1).to(base)  # (regions, pixels)
    columns = []
    for j in range(k):
        toggled = present.clone()
        toggled[:, j] ^= True
        change = (model.estimate(x, t, draw(toggled)).score(s) - base).square().sum(1).mean(0)  # (height, width)
        columns.append(masks @ change.flatten() / masks.sum(1))
    q = torch.stack(columns, 1)
    return q / q.sum(1, keepdim=True).clamp_min(1e-30)


def _ratio(q: Tensor) -> float:
    """R_cond: the mean of the diagonal over the mean off the diagonal."""
    k = len(q)
    diagonal = float(q.diagonal().mean())
    off_diagonal = float((q.sum() - q.diagonal().sum()).clamp_min(0) / (k * (k - 1))) if k > 1 else 0.0
    if diagonal == 0 and off_diagonal == 0:
        return 1.0
    return diagonal / off_diagonal if off_diagonal > 1e-12 else math.inf


def _influence(model: ScoreModel, x: Tensor, t: float, condition: Conditioning, probes: int, noise: Noise) -> Tensor:
    """Squared derivatives of the estimated data at random pixels, summed by Chebyshev distance: (max(h, w),)."""
    n, c, h, w = x.shape
    energy = torch.zeros(max(h, w), device=x.device, dtype=torch.float64)
    row_index, column_index = torch.arange(h, device=x.device), torch.arange(w, device=x.device)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        data = model.estimate(x, t, condition).x0
        for _ in range(probes):
            pixel = (noise.uniform((2,)) * torch.tensor([h, w], device=x.device)).long()  # (n, 2): row, column
            # random signs: the expected square is the sum of the channels' squares
            signs = noise.uniform((c,)).ge(0.5).to(x) * 2 - 1
            probe = torch.zeros_like(x)
            probe[torch.arange(n), :, pixel[:, 0], pixel[:, 1]] = signs
            (gradient,) = torch.autograd.grad(data, x, probe, retain_graph=True)
            rows, columns = (row_index - pixel[:, :1]).abs(), (column_index - pixel[:, 1:]).abs()
            distance = torch.maximum(rows[:, :, None], columns[:, None, :])  # (n, h, w)
            energy.index_add_(0, distance.flatten(), gradient.double().square().sum(1).flatten())
    return energy


@torch.no_grad()
def _gap(model: ScoreModel, s: float, x: Tensor, t: float, present: Tensor, draw: Draw, noise: Noise) -> float:
    """Additivity gap of two random conditioners of each sample that has at least two."""
    enough = present.sum(1) >= 2
    # random order in which conditioners that are present come first
    order = (noise.uniform((present.shape[1],)) + present.float()).argsort(1, descending=True)[enough]
    x, none = x[enough], torch.zeros_like(present[enough])
    first, second = none.scatter(1, order[:, :1], True), none.scatter(1, order[:, 1:2], True)
    empty, one, two, both = (model.estimate(x, t, draw(c)).score(s) for c in (none, first, second, first | second))
    effect = (both - empty).norm().clamp_min(1e-30)
    return float((both - one - two + empty).norm() / effect)


def _check_regions(x0: Tensor, present: Tensor, regions: Tensor) -> None:
    """Refuse regions that do not partition the image, and samples without two conditioners."""
    k = present.shape[1]
    if regions.ndim != 3 or len(regions) not in (k, k + 1) or regions.shape[1:] != x0.shape[2:]:
        raise InvalidArgument(
            f"regions of shape {tuple(regions.shape)} for {k} conditioners and images of {tuple(x0.shape[2:])}; give "
            "one region for each, and at most one for the remaining pixels"
        )
    covered = regions.sum(0)
    if not bool((covered == 1).all()) or not bool(regions[:k].flatten(1).any(1).all()):
        raise InvalidArgument(
            f"regions are no partition: {int((covered > 1).sum())} pixels lie in several, {int((covered == 0).sum())} "
            "in none (give the remaining pixels as one more region)"
        )
    if len(x0) != len(present) or not bool((present.sum(1) >= 2).any()):
        raise InvalidArgument(
            f"{len(x0)} samples, conditioners of {len(present)}; the numbers must agree, and some sample must have two "
            "conditioners"
        )


def _check_toggles(present: Tensor, draw: Draw) -> None:
    """Refuse conditioners whose presence does not change the condition."""
    base = draw(present)
    for j in range(present.shape[1]):
        toggled = present.clone()
        toggled[:, j] ^= True
        other = draw(toggled)
        if all(torch.equal(getattr(base, name), getattr(other, name)) for name in base.parts):
            raise InvalidArgument(f"conditioner {j} cannot be toggled: the condition is the same with it and without")


@dataclass(frozen=True)
class LengthCurve:
    """Accuracy of samples by requested number of objects.

    Attributes:
        counts: the requested numbers of objects.
        accuracy: fraction of cells in which an object is present if and only if it was requested.
        exact: fraction of scenes in which all cells are right.
        error: mean number of sampled objects minus the requested number.
    """

    counts: tuple[int, ...]
    accuracy: tuple[float, ...]
    exact: tuple[float, ...]
    error: tuple[float, ...]

    @property
    def horizon(self) -> int:
        """The largest tested number of objects up to which at least 95 % of cells are always right; 0 for none."""
        best = 0
        for count, accuracy in zip(self.counts, self.accuracy, strict=True):
            if accuracy < 0.95:
                break
            best = count
        return best

    def report(self) -> Report:
        """The figures as a table."""
        rows = [Row("horizon", self.horizon, "objects")]
        for index, count in enumerate(self.counts):
            rows.append(Row(f"right cells, {count} objects", self.accuracy[index]))
            rows.append(Row(f"exact scenes, {count} objects", self.exact[index]))
            rows.append(Row(f"count error, {count} objects", self.error[index], "objects"))
        return Report("Length curve", rows)

    def __str__(self) -> str:
        return str(self.report())

    def plot(self, path: Path) -> None:
        """Plot accuracy, exact scenes and count error.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure = plotting.new(6, 2.6)
        left, right = figure.subplots(1, 2)
        left.plot(self.counts, self.accuracy, marker="o", label="cells")
        left.plot(self.counts, self.exact, marker="o", label="scenes")
        left.set(xlabel="requested objects", ylabel="accuracy", ylim=(0, 1.05))
        left.legend()
        right.plot(self.counts, self.error, marker="o")
        right.set(xlabel="requested objects", ylabel="sampled - requested objects")
        plotting.save(figure, path)


@checked
def length_curve(
    sample: Callable[[Bool[Tensor, "n cells cells"], int], Float[Tensor, "n channels height width"]],
    spec: SceneSpec,
    counts: Sequence[int],
    *,
    n: PositiveInt = 64,
    seed: int = 0,
) -> LengthCurve:
    """Sample scenes with given numbers of objects, and detect which cells hold one.

    Args:
        sample: samples images with objects in these cells, with this seed.
        spec: scenes with cells; its numbers of objects are not used.
        counts: numbers of objects, ascending.
        n: number of scenes for each number of objects.
        seed: seed of the cells and of sampling.

    Raises:
        InvalidArgument: scenes without cells, counts that are not ascending or exceed the number of cells.
    """
    if not spec.cells:
        raise InvalidArgument("scenes without a grid have no cells; give SceneSpec(cells=...)")
    ascending = all(a < b for a, b in itertools.pairwise(counts))
    if not counts or not ascending or counts[0] < 0 or counts[-1] > spec.cells**2:
        raise InvalidArgument(f"counts={list(counts)} must rise from 0 to {spec.cells**2}")
    accuracy, exact, error = [], [], []
    for count in counts:
        requested = random_cells(spec.cells, count, n, seed=seed)
        detected = synthetic_scenes.cells(sample(requested, seed).cpu(), spec)
        accuracy.append(float((detected == requested).float().mean()))
        exact.append(float((detected == requested).flatten(1).all(1).float().mean()))
        error.append(float((detected.sum((1, 2)) - count).float().mean()))
    return LengthCurve(tuple(counts), tuple(accuracy), tuple(exact), tuple(error))


def random_cells(cells: int, count: int, n: int, *, seed: int = 0) -> Bool[Tensor, "n cells cells"]:
    """``n`` random sets of ``count`` cells of a grid.

    >>> random_cells(4, 3, 2).sum((1, 2)).tolist()
    [3, 3]
    """
    rank = torch.rand(n, cells**2, generator=torch.Generator().manual_seed(seed)).argsort(1).argsort(1)
    return (rank < count).view(n, cells, cells)


def cell_regions(cells: int, size: int) -> Bool[Tensor, "conditioners size size"]:
    """The pixels of each cell of a grid; cells are in row-major order.

    >>> cell_regions(2, 4)[1].int().tolist()
    [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    """
    cell = torch.arange(size) * cells // size  # row or column of cells of each pixel
    index = cell[:, None] * cells + cell[None]  # (size, size)
    return index[None] == torch.arange(cells**2)[:, None, None]
