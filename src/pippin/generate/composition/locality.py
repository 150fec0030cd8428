r"""Locality of a conditional model's scores, which predicts whether it generalizes to more objects than in training.

Notable here:
- three figures at each time: the effect of a conditioner in its own region against elsewhere, the radius of influence
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
from pippin.data.synthetic import scenes as made_scenes
from pippin.data.synthetic.scenes import SceneSpec
from pippin.generate.conditions import Conditioning
from pippin.generate.diffusion.prediction import Estimate
from pippin.generate.diffusion.schedules import NoiseSchedule
from pippin.generate.noise import Noise

Draw = Callable[[Bool[Tensor, "n conditioners"]], Conditioning]
"""Returns the condition with these conditioners present."""


@runtime_checkable
class ScoreModel(Protocol):
    """A model that estimates data and noise, such as `pippin.generate.diffusion.diffusion.Diffusion`."""

    def estimate(self, x: Tensor, t: float | Tensor, condition: Conditioning | None = None) -> Estimate:
        """Data and noise at a time, under a condition."""


@dataclass(frozen=True)
class AtTime:
    """The figures at one time.

    Attributes:
        t: the time.
        sensitivity: effect of each conditioner (column) on the score in each region (row); rows add up to 1.
        ratio: mean of its diagonal over the mean of the rest; infinite if conditioners change nothing elsewhere, and 1
            if they change nothing at all.
        influence: the share of the influence on a pixel from pixels at each distance (0 first), in pixels along the
            longer of the two axes.
        r90: the distance within which 90 % of that influence lies.
        gap: additivity gap: how far the effect of two conditioners together differs from the sum of both, 0 to about 1.
    """

    t: float
    sensitivity: Float[Tensor, "conditioners conditioners"]
    ratio: float
    influence: tuple[float, ...]
    r90: int
    gap: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; an infinite ratio is None."""
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
    """Locality of a model, at several times.

    Attributes:
        at: the figures of each time, in ascending order.
    """

    at: tuple[AtTime, ...]

    @property
    def R_cond(self) -> float:
        """The geometric mean of the ratio over the times."""
        return math.exp(sum(math.log(max(one.ratio, 1e-30)) for one in self.at) / len(self.at))

    @property
    def r90(self) -> int:
        """The largest radius over the times."""
        return max(one.r90 for one in self.at)

    @property
    def additivity_gap(self) -> float:
        """The mean gap over the times."""
        return sum(one.gap for one in self.at) / len(self.at)

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "R_cond": self.R_cond if math.isfinite(self.R_cond) else None,
            "r90": self.r90,
            "additivity_gap": self.additivity_gap,
            "at": [one.to_dict() for one in self.at],
        }

    def report(self) -> Report:
        """The figures as a table."""
        rows = []
        for one in self.at:
            rows.append(Row(f"conditional locality at t={one.t:.2f}", one.ratio))
            rows.append(Row(f"radius of 90 % of the influence at t={one.t:.2f}", one.r90, "pixels"))
            rows.append(Row(f"additivity gap at t={one.t:.2f}", one.gap))
        return Report("Locality of the score", rows)

    def __str__(self) -> str:
        return str(self.report())

    def plot(self, path: Path) -> None:
        """Plot influence by distance, and the effect of each conditioner by region, for each time.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure = plotting.new(2.2 * (1 + len(self.at)), 2.6)
        panels = figure.subplots(1, 1 + len(self.at))
        for one in self.at:
            panels[0].plot(range(len(one.influence)), one.influence, marker="o", label=f"t={one.t:.2f}")
        panels[0].set(xlabel="distance, pixels", ylabel="share of influence", yscale="log")
        panels[0].legend(fontsize=6)
        for panel, one in zip(panels[1:], self.at, strict=True):
            panel.imshow(one.sensitivity.numpy(), vmin=0, vmax=1, cmap="magma")
            panel.set(title=f"t={one.t:.2f}", xlabel="conditioner", ylabel="region")
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

    - $Q_{ij}$: the mean square by which the score changes in the region of conditioner i when conditioner j is toggled;
      rows are normalized, and R_cond is the mean of the diagonal over the mean of the rest.
    - Influence: $\lvert\partial \hat x_{0,u} / \partial x_{t,v}\rvert^2$ by distance of u and v, for ``probes`` random
      pixels u in each sample.
    - Additivity gap: with $\delta(c) = s(c) - s(\emptyset)$,
      $\lVert\delta(c_{12}) - \delta(c_1) - \delta(c_2)\rVert / \lVert\delta(c_{12})\rVert$ for two of the conditioners
      that are present.

    Args:
        model: in evaluation mode.
        schedule: its noise schedule.
        x0: samples with the conditioners of ``present``; two in each is best, as toggling then makes 1 or 3.
        present: at least two in some sample.
        draw: the condition of given conditioners; of none, the null condition.
        regions: the region of each conditioner's object; disjoint, and together the whole image, except for one more
            row that may hold the rest.
        times: times of the measurement.
        probes: pixels of each sample whose inputs are traced.
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
        total = influence.cumsum(0) / influence.sum().clamp_min(1e-30)
        r90 = int((total >= 0.9 - 1e-9).nonzero()[0]) if bool(influence.any()) else 0
        shares = tuple((influence / influence.sum().clamp_min(1e-30)).tolist())
        at.append(AtTime(t, sensitivity, _ratio(sensitivity), shares, r90, gap))
    return LocalityReport(tuple(at))


@torch.no_grad()
def _sensitivity(
    model: ScoreModel, s: float, x: Tensor, t: float, present: Tensor, draw: Draw, regions: Tensor
) -> Tensor:
    """Q with rows that add up to 1."""
    base = model.estimate(x, t, draw(present)).score(s)
    again = model.estimate(x, t, draw(present)).score(s)
    if not torch.equal(base, again):
        raise InvalidArgument("the model answers differently when it is asked twice; a probe needs a fixed model")
    k = present.shape[1]
    masks = regions[:k].flatten(1).to(base)
    columns = []
    for j in range(k):
        toggled = present.clone()
        toggled[:, j] ^= True
        changed = (model.estimate(x, t, draw(toggled)).score(s) - base).square().sum(1).mean(0)
        columns.append(masks @ changed.flatten() / masks.sum(1))
    q = torch.stack(columns, 1)
    return q / q.sum(1, keepdim=True).clamp_min(1e-30)


def _ratio(q: Tensor) -> float:
    k = len(q)
    own = float(q.diagonal().mean())
    other = float((q.sum() - q.diagonal().sum()).clamp_min(0) / (k * (k - 1))) if k > 1 else 0.0
    if own == 0 and other == 0:
        return 1.0
    return own / other if other > 1e-12 else math.inf


def _influence(model: ScoreModel, x: Tensor, t: float, condition: Conditioning, probes: int, noise: Noise) -> Tensor:
    """Squared derivatives of the estimated data at random pixels, summed by distance."""
    n, c, h, w = x.shape
    energy = torch.zeros(max(h, w), device=x.device, dtype=torch.float64)
    lines, columns = torch.arange(h, device=x.device), torch.arange(w, device=x.device)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        data = model.estimate(x, t, condition).x0
        for _ in range(probes):
            at = (noise.uniform((2,)) * torch.tensor([h, w], device=x.device)).long()
            signs = noise.uniform((c,)).ge(0.5).to(x) * 2 - 1
            probe = torch.zeros_like(x)
            probe[torch.arange(n), :, at[:, 0], at[:, 1]] = signs
            (found,) = torch.autograd.grad(data, x, probe, retain_graph=True)
            rows, cols = (lines - at[:, :1]).abs(), (columns - at[:, 1:]).abs()
            distance = torch.maximum(rows[:, :, None], cols[:, None, :])
            energy.index_add_(0, distance.flatten(), found.double().square().sum(1).flatten())
    return energy


@torch.no_grad()
def _gap(model: ScoreModel, s: float, x: Tensor, t: float, present: Tensor, draw: Draw, noise: Noise) -> float:
    """Additivity gap of two present conditioners."""
    enough = present.sum(1) >= 2
    order = (noise.uniform((present.shape[1],)) + present.float()).argsort(1, descending=True)[enough]
    x, none = x[enough], torch.zeros_like(present[enough])
    first, second = none.scatter(1, order[:, :1], True), none.scatter(1, order[:, 1:2], True)
    empty, one, two, both = (model.estimate(x, t, draw(c)).score(s) for c in (none, first, second, first | second))
    wanted = (both - empty).norm().clamp_min(1e-30)
    return float((both - one - two + empty).norm() / wanted)


def _check_regions(x0: Tensor, present: Tensor, regions: Tensor) -> None:
    k = present.shape[1]
    if regions.ndim != 3 or len(regions) not in (k, k + 1) or regions.shape[1:] != x0.shape[2:]:
        raise InvalidArgument(
            f"regions of shape {tuple(regions.shape)} for {k} conditioners and images of {tuple(x0.shape[2:])}"
        )
    covered = regions.sum(0)
    if not bool((covered == 1).all()) or not bool(regions[:k].flatten(1).any(1).all()):
        raise InvalidArgument(
            f"regions are no partition: {int((covered > 1).sum())} pixels lie in several, {int((covered == 0).sum())} "
            "in none (give the rest as one more region)"
        )
    if len(x0) != len(present) or not bool((present.sum(1) >= 2).any()):
        raise InvalidArgument(f"{len(x0)} samples, conditioners of {len(present)}; some sample must hold two of them")


def _check_toggles(present: Tensor, draw: Draw) -> None:
    """Refuse conditioners that do not change the condition."""
    base = draw(present)
    for j in range(present.shape[1]):
        toggled = present.clone()
        toggled[:, j] ^= True
        other = draw(toggled)
        if all(torch.equal(getattr(base, name), getattr(other, name)) for name in base.parts):
            raise InvalidArgument(f"conditioner {j} cannot be toggled: the condition is the same with it and without")


@dataclass(frozen=True)
class LengthCurve:
    """Accuracy of samples with K objects.

    Attributes:
        counts: the requested numbers of objects.
        accuracy: share of cells that hold an object exactly where one was requested.
        exact: share of scenes in which all cells are right.
        error: mean number of sampled objects minus requested ones.
    """

    counts: tuple[int, ...]
    accuracy: tuple[float, ...]
    exact: tuple[float, ...]
    error: tuple[float, ...]

    @property
    def horizon(self) -> int:
        """The largest number up to which at least 95 % of cells are right, for every tested number; 0 for none."""
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
        """Plot the three curves.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure = plotting.new(6, 2.6)
        left, right = figure.subplots(1, 2)
        left.plot(self.counts, self.accuracy, marker="o", label="cells")
        left.plot(self.counts, self.exact, marker="o", label="scenes")
        left.set(xlabel="objects asked for", ylabel="share right", ylim=(0, 1.05))
        left.legend()
        right.plot(self.counts, self.error, marker="o")
        right.set(xlabel="objects asked for", ylabel="drawn - asked for")
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
        sample: samples an image with objects in these cells, with this seed.
        spec: scenes with cells; its numbers of objects are not used.
        counts: numbers of objects, ascending.
        n: number of scenes of each.
        seed: seed of the cells; sampling gets ``seed`` too.

    Raises:
        InvalidArgument: scenes without cells, counts that are not ascending or exceed the cells.
    """
    if not spec.cells:
        raise InvalidArgument("scenes without a grid have no cells; give SceneSpec(cells=...)")
    rising = all(a < b for a, b in itertools.pairwise(counts))
    if not counts or not rising or counts[0] < 0 or counts[-1] > spec.cells**2:
        raise InvalidArgument(f"counts={list(counts)} must rise from 0 to {spec.cells**2}")
    accuracy, exact, error = [], [], []
    for count in counts:
        wanted = random_cells(spec.cells, count, n, seed=seed)
        right = made_scenes.cells(sample(wanted, seed).cpu(), spec)
        accuracy.append(float((right == wanted).float().mean()))
        exact.append(float((right == wanted).flatten(1).all(1).float().mean()))
        error.append(float((right.sum((1, 2)) - count).float().mean()))
    return LengthCurve(tuple(counts), tuple(accuracy), tuple(exact), tuple(error))


def random_cells(cells: int, count: int, n: int, *, seed: int = 0) -> Bool[Tensor, "n cells cells"]:
    """``n`` times ``count`` different cells of a grid.

    >>> random_cells(4, 3, 2).sum((1, 2)).tolist()
    [3, 3]
    """
    order = torch.rand(n, cells**2, generator=torch.Generator().manual_seed(seed)).argsort(1).argsort(1)
    return (order < count).view(n, cells, cells)


def cell_regions(cells: int, size: int) -> Bool[Tensor, "conditioners size size"]:
    """The pixels of each cell of a grid, row by row.

    >>> cell_regions(2, 4)[1].int().tolist()
    [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    """
    of = torch.arange(size) * cells // size
    index = of[:, None] * cells + of[None]
    return index[None] == torch.arange(cells**2)[:, None, None]
