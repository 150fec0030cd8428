"""How near a set of samples is to a set of real ones: distances, precision and recall, and sharpness.

Notable here:
- a Frechet distance between finite sets is too large, by about a constant over their size; `frechet_extrapolated`
  measures it at several sizes and says what is left at infinitely many
- the kernel distance has no such bias, and comes with its spread
- precision (are samples like real ones?) and recall (are all real ones covered?) part what one distance mixes
- everything works on features of any kind: rows of numbers; sums are in 64 bits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.core.report import Report, Row
from pippin.evaluate.features import Features

_CHUNK: Final = 1024
"""Rows of a table of distances that are in memory at once."""


@dataclass(frozen=True)
class Measured:
    """A figure and its standard deviation over repetitions."""

    value: float
    spread: float


@dataclass(frozen=True)
class Extrapolated:
    """A Frechet distance with its bias.

    Attributes:
        value: between the sets as they are: too large.
        n: rows of the smaller set.
        infinite: what is left at infinitely many rows, by a straight line over 1 / n; may be slightly below 0 for sets
            from one distribution.
        spread: standard error of ``infinite`` from the scatter about the line.
    """

    value: float
    n: int
    infinite: float
    spread: float

    @property
    def bias(self) -> float:
        """How much too large ``value`` is, by this estimate."""
        return self.value - self.infinite


def frechet_distance(a: Float[Tensor, "n dim"], b: Float[Tensor, "m dim"]) -> float:
    r"""The Frechet distance of two sets' Gaussians, $|\mu_a - \mu_b|^2 + \mathrm{tr}(C_a + C_b - 2 (C_a C_b)^{1/2})$.

    It is biased: with finite sets it is too large, the more so the more features there are. Compare figures of equal
    numbers of rows only, or use `frechet_extrapolated`.

    Args:
        a: features of one set, at least 2 rows.
        b: features of the other.

    Raises:
        InvalidArgument: features of different numbers.
        InvalidInput: fewer than 2 rows, or features that are not finite.

    Source: "GANs Trained by a Two Time-Scale Update Rule" (arXiv:1706.08500), eq. 6.

    >>> a = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    >>> round(frechet_distance(a, a + torch.tensor([2.0, 0.0, 0.0])), 6)
    4.0
    """
    a, b = _rows(a, b)
    # any factors of the covariances do; those of the centred rows need no covariance, and are small where rows are few
    one, two = _factor(a), _factor(b)
    shared = torch.linalg.svdvals(one @ two.T).sum()
    apart = (a.mean(0) - b.mean(0)).square().sum()
    return max(float(apart + one.square().sum() + two.square().sum() - 2 * shared), 0.0)


def gaussian_frechet(
    mean_a: Float[Tensor, dim],
    cov_a: Float[Tensor, "dim dim"],
    mean_b: Float[Tensor, dim],
    cov_b: Float[Tensor, "dim dim"],
) -> float:
    """The Frechet distance (squared Wasserstein-2 distance) of two Gaussians, given by means and covariances.

    >>> two = torch.eye(2)
    >>> gaussian_frechet(torch.zeros(2), two, torch.zeros(2), 4 * two)
    2.0
    """
    # tr (A B)^(1/2) is the sum of the singular values of A^(1/2) B^(1/2): symmetric roots only, and never below zero
    roots = [_root(cov.double().cpu()) for cov in (cov_a, cov_b)]
    shared = torch.linalg.svdvals(roots[0] @ roots[1]).sum()
    apart = (mean_a.double().cpu() - mean_b.double().cpu()).square().sum()
    distance = apart + cov_a.diagonal().double().sum().cpu() + cov_b.diagonal().double().sum().cpu() - 2 * shared
    return max(float(distance), 0.0)


def frechet_extrapolated(
    a: Float[Tensor, "n dim"], b: Float[Tensor, "m dim"], *, points: int = 6, repeats: int = 4, seed: int = 0
) -> Extrapolated:
    r"""The Frechet distance at infinitely many rows: a line through distances of parts of the sets, over $1/n$.

    Args:
        a: features of one set.
        b: features of the other; both are cut to parts of equal size.
        points: sizes, evenly spread in 1 / n, from a quarter of the smaller set to all of it.
        repeats: parts drawn of each size.
        seed: of the parts.

    Raises:
        InvalidArgument: fewer than 3 points, no repeats, or features of different numbers.
        InvalidInput: fewer than 16 rows, or features that are not finite.

    Source: "Effectively Unbiased FID and Inception Score and where to find them" (arXiv:1911.07023), section 4.
    """
    if points < 3 or repeats < 1:
        raise InvalidArgument(f"a line needs 3 points or more and 1 repeat or more, got {points} and {repeats}")
    a, b = _rows(a, b, least=16)
    n = min(len(a), len(b))
    generator = torch.Generator().manual_seed(seed)
    x, y = [], []
    for inverse in torch.linspace(1 / n, 4 / n, points, dtype=torch.float64).tolist():
        size = round(1 / inverse)
        for _ in range(repeats):
            parts = [rows[torch.randperm(len(rows), generator=generator)[:size]] for rows in (a, b)]
            x.append(1 / size)
            y.append(frechet_distance(*parts))
    table = torch.stack([torch.ones(len(x), dtype=torch.float64), torch.tensor(x, dtype=torch.float64)], 1)
    values = torch.tensor(y, dtype=torch.float64)
    inverse_gram = torch.linalg.inv(table.T @ table)
    line = inverse_gram @ (table.T @ values)
    scatter = (values - table @ line).square().sum() / (len(x) - 2)
    spread = float((scatter * inverse_gram[0, 0]).sqrt())
    return Extrapolated(frechet_distance(a, b), n, float(line[0]), spread)


def kernel_distance(
    a: Float[Tensor, "n dim"], b: Float[Tensor, "m dim"], *, size: int = 250, subsets: int = 20, seed: int = 0
) -> Measured:
    r"""The squared maximum mean discrepancy under $k(x, y) = (x^\top y / d + 1)^3$, without bias: 0 for equal
    distributions on average, and so below 0 at times.

    Args:
        a: features of one set.
        b: features of the other.
        size: rows of a subset; fewer where a set is smaller.
        subsets: how many are drawn; the value is their mean.
        seed: of the subsets.

    Returns:
        The mean over subsets, and the standard deviation of one subset.

    Raises:
        InvalidArgument: features of different numbers, size below 2 or subsets below 1.
        InvalidInput: fewer than 2 rows, or features that are not finite.

    Source: "Demystifying MMD GANs" (arXiv:1801.01401), eq. 4 and section 4.
    """
    if size < 2 or subsets < 1:
        raise InvalidArgument(f"give subsets of 2 rows or more, and at least 1; got size={size}, subsets={subsets}")
    a, b = _rows(a, b)
    size = min(size, len(a), len(b))
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(subsets):
        x, y = (rows[torch.randperm(len(rows), generator=generator)[:size]] for rows in (a, b))
        values.append(_discrepancy(x, y))
    found = torch.tensor(values, dtype=torch.float64)
    return Measured(float(found.mean()), float(found.std()) if subsets > 1 else 0.0)


def precision_recall(samples: Float[Tensor, "n dim"], real: Float[Tensor, "m dim"], k: int = 3) -> tuple[float, float]:
    """Precision and recall by nearest neighbours.

    Precision is the share of samples that lie within the ball of some real row, whose radius is the distance to its
    k-th nearest real neighbour; recall is the same with the sets exchanged.

    Args:
        samples: features of what was made.
        real: features of what it is to be like. Sets of equal size give figures that can be compared.
        k: neighbour that makes a ball; more makes both figures larger.

    Raises:
        InvalidArgument: features of different numbers, or k below 1.
        InvalidInput: k or fewer rows, or features that are not finite.

    Source: "Improved Precision and Recall Metric for Assessing Generative Models" (arXiv:1904.06991), eq. 1 and 2.

    >>> precision_recall(torch.tensor([[0.0], [9.0]]), torch.tensor([[0.1], [0.3]]), k=1)
    (0.5, 1.0)
    """
    if k < 1:
        raise InvalidArgument(f"k is {k}; give 1 or more")
    samples, real = _rows(samples, real, least=k + 1)
    return _covered(samples, real, k), _covered(real, samples, k)


def energy_ratio(x: Float[Tensor, "n ..."], real: Float[Tensor, "m ..."]) -> float:
    """Energy of the finest Haar band of pictures over that of real ones: below 1 for blur, above 1 for noise.

    Args:
        x: pictures (channels, height, width); an odd last row or column is left out.
        real: pictures of the same shape.

    Raises:
        InvalidArgument: another shape, or fewer than 2 by 2 pixels.
        InvalidInput: no pictures, or real ones without any such energy.

    >>> checks = torch.tensor([[[[1.0, -1.0], [-1.0, 1.0]]]])
    >>> energy_ratio(checks / 2, checks)
    0.25
    """
    if x.shape[1:] != real.shape[1:] or x.ndim != 4 or min(x.shape[2:]) < 2:
        raise InvalidArgument(
            f"pictures of {tuple(x.shape[1:])} and {tuple(real.shape[1:])}; give equal ones, 2 by 2 up"
        )
    if not len(x) or not len(real):
        raise InvalidInput(f"{len(x)} pictures and {len(real)} real ones: give at least one of each")
    whole = _fine_energy(real)
    if not whole > 0:
        raise InvalidInput("the real pictures have no fine detail at all, so nothing can be compared with it")
    return _fine_energy(x) / whole


def compare(
    samples: Float[Tensor, "n ..."], real: Float[Tensor, "m ..."], features: Features, *, seed: int = 0
) -> Report:
    """All figures of this module in one table.

    Args:
        samples: pictures from -1 to 1.
        real: pictures that they are to be like.
        features: what they are compared in.
        seed: of the parts that are drawn.

    Raises:
        InvalidArgument: pictures of different shapes.
        InvalidInput: fewer than 16 pictures of either, or pixels that are not finite.
    """
    a, b = features(samples), features(real)
    # each distance of thousands of features takes seconds
    distance = frechet_extrapolated(a, b, repeats=4 if features.dim <= 512 else 1, seed=seed)
    kernel = kernel_distance(a, b, seed=seed)
    precision, recall = precision_recall(a, b)
    return Report(
        f"{len(samples)} samples against {len(real)} real pictures, in {features.name} ({features.dim} features)",
        [
            Row(f"Frechet distance at n = {distance.n}", distance.value, "squared"),
            Row("Frechet distance at infinite n", distance.infinite, "squared", distance.spread),
            Row("kernel distance", kernel.value, "squared", kernel.spread),
            Row("precision", precision, "share"),
            Row("recall", recall, "share"),
            Row("fine energy over real", energy_ratio(samples, real), "ratio"),
        ],
    )


def _rows(a: Tensor, b: Tensor, least: int = 2) -> tuple[Tensor, Tensor]:
    """Both sets, checked, in 64 bits on the CPU."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise InvalidArgument(f"features of shapes {tuple(a.shape)} and {tuple(b.shape)}; give rows of equal length")
    if min(len(a), len(b)) < least:
        raise InvalidInput(f"{len(a)} and {len(b)} rows; this measure needs {least} or more of each")
    if not bool(a.isfinite().all()) or not bool(b.isfinite().all()):
        raise InvalidInput("features hold NaN or infinite values")
    return a.detach().cpu().double(), b.detach().cpu().double()


def _factor(rows: Tensor) -> Tensor:
    """R with R' R the covariance: at most as many rows as there are features."""
    return torch.as_tensor(torch.linalg.qr((rows - rows.mean(0)) / (len(rows) - 1) ** 0.5, mode="r").R)


def _root(cov: Tensor) -> Tensor:
    """The symmetric root of a covariance; rounding below zero counts as zero."""
    values, vectors = torch.linalg.eigh(cov)
    return torch.as_tensor((vectors * values.clamp_min(0).sqrt()) @ vectors.T)


def _discrepancy(x: Tensor, y: Tensor) -> float:
    """The unbiased estimate of two sets of equal size."""
    n, d = x.shape
    own = [(rows @ rows.T / d + 1) ** 3 for rows in (x, y)]
    within = sum((table.sum() - table.diagonal().sum()) / (n * (n - 1)) for table in own)
    return float(within - 2 * ((x @ y.T / d + 1) ** 3).mean())


def _covered(points: Tensor, balls: Tensor, k: int) -> float:
    """The share of points that lie in the ball of some other row."""
    radii = torch.cat(
        # the nearest row is the row itself
        [_distances(part, balls).kthvalue(k + 1, dim=1).values for part in balls.split(_CHUNK)]
    )
    inside = [(_distances(part, balls) <= radii).any(1) for part in points.split(_CHUNK)]
    return float(torch.cat(inside).double().mean())


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _fine_energy(x: Tensor) -> float:
    """Mean square of what the three fine Haar bands hold: what is left of each 2 by 2 block without its mean."""
    x = x.detach().double().cpu()[..., : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]
    blocks = x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    return float((blocks - blocks.mean(-1, keepdim=True)).square().mean())
