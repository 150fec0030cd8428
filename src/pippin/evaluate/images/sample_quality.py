"""How close a set of generated images is to a set of real ones: distances, precision and recall, and sharpness.

Notable here:
- a Frechet distance between finite sets is biased upward by about a constant over their size; `frechet_extrapolated`
  measures it at several sizes and extrapolates to infinitely many images
- the kernel distance is unbiased, and is given with its standard deviation
- precision (are samples realistic?) and recall (is all of the real distribution covered?) separate what one distance
  mixes
- everything works on any features, one row for each image, and is computed in float64
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import torch
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.core.report import Report, Row
from pippin.evaluate.images.features import Features

_CHUNK: Final = 1024
"""Rows of a distance matrix that are computed at a time."""


@dataclass(frozen=True)
class SampleQuality:
    """A value and its standard deviation over random subsets."""

    value: float
    std: float


@dataclass(frozen=True)
class Extrapolated:
    """A Frechet distance with an estimate of its bias.

    Attributes:
        value: distance between the finite sets, biased upward.
        n: number of rows of the smaller set.
        extrapolated: extrapolation to infinitely many rows by a straight line over 1 / n; may be slightly below 0 for
            sets from the same distribution.
        standard_error: standard error of ``extrapolated`` from the residuals of the line.
    """

    value: float
    n: int
    extrapolated: float
    standard_error: float

    @property
    def bias(self) -> float:
        """Estimated bias of ``value``."""
        return self.value - self.extrapolated


def frechet_distance(a: Float[Tensor, "n dim"], b: Float[Tensor, "m dim"]) -> float:
    r"""The Frechet distance between Gaussians fitted to two sets of features.

    It is $|\mu_a - \mu_b|^2 + \mathrm{tr}(C_a + C_b - 2 (C_a C_b)^{1/2})$. For finite sets it is biased upward, and the
    bias grows with the number of features. Compare only figures of equal numbers of rows, or use
    `frechet_extrapolated`.

    Args:
        a: features of one set, at least 2 rows.
        b: features of the other set.

    Raises:
        InvalidArgument: different numbers of features.
        InvalidInput: fewer than 2 rows, or features that are not finite.

    Source: "GANs Trained by a Two Time-Scale Update Rule" (arXiv:1706.08500), eq. 6.

    >>> a = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    >>> round(frechet_distance(a, a + torch.tensor([2.0, 0.0, 0.0])), 6)
    4.0
    """
    a, b = _rows(a, b)
    # tr (C_a C_b)^(1/2) is the sum of the singular values of R_a R_b^T for any factors R^T R = C; QR factors of the
    # centered rows need no covariance matrix, and are small where there are few rows
    factor_a, factor_b = _factor(a), _factor(b)
    cross = torch.linalg.svdvals(factor_a @ factor_b.T).sum()
    means = (a.mean(0) - b.mean(0)).square().sum()
    return max(float(means + factor_a.square().sum() + factor_b.square().sum() - 2 * cross), 0.0)


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
    # tr (A B)^(1/2) is the sum of the singular values of A^(1/2) B^(1/2), which needs symmetric roots only
    roots = [_root(cov.double().cpu()) for cov in (cov_a, cov_b)]
    cross = torch.linalg.svdvals(roots[0] @ roots[1]).sum()
    means = (mean_a.double().cpu() - mean_b.double().cpu()).square().sum()
    distance = means + cov_a.diagonal().double().sum().cpu() + cov_b.diagonal().double().sum().cpu() - 2 * cross
    return max(float(distance), 0.0)


@checked
def frechet_extrapolated(
    a: Float[Tensor, "n dim"],
    b: Float[Tensor, "m dim"],
    *,
    points: Annotated[int, Ge(3)] = 6,
    repeats: PositiveInt = 4,
    seed: int = 0,
) -> Extrapolated:
    r"""The Frechet distance extrapolated to infinitely many rows.

    A straight line over $1/n$ is fitted to the distances between random subsets of n rows, and evaluated at 0.

    Args:
        a: features of one set.
        b: features of the other set; subsets of both have equal sizes.
        points: number of subset sizes, evenly spaced in 1 / n, from a quarter of the smaller set to all of it.
        repeats: random subsets of each size.
        seed: seed of the subsets.

    Raises:
        InvalidArgument: arguments out of range, or different numbers of features.
        InvalidInput: fewer than 16 rows, or features that are not finite.

    Source: "Effectively Unbiased FID and Inception Score and where to find them" (arXiv:1911.07023), section 4.
    """
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
    # least squares for (intercept, slope)
    design = torch.stack([torch.ones(len(x), dtype=torch.float64), torch.tensor(x, dtype=torch.float64)], 1)
    values = torch.tensor(y, dtype=torch.float64)
    inverse_gram = torch.linalg.inv(design.T @ design)
    line = inverse_gram @ (design.T @ values)
    variance = (values - design @ line).square().sum() / (len(x) - 2)
    standard_error = float((variance * inverse_gram[0, 0]).sqrt())
    return Extrapolated(frechet_distance(a, b), n, float(line[0]), standard_error)


@checked
def kernel_distance(
    a: Float[Tensor, "n dim"],
    b: Float[Tensor, "m dim"],
    *,
    size: Annotated[int, Ge(2)] = 250,
    subsets: PositiveInt = 20,
    seed: int = 0,
) -> SampleQuality:
    r"""The unbiased estimate of the squared maximum mean discrepancy under $k(x, y) = (x^\top y / d + 1)^3$.

    Its mean is 0 for equal distributions, so single values may be negative.

    Args:
        a: features of one set.
        b: features of the other set.
        size: rows of a subset; fewer where a set is smaller.
        subsets: number of random subsets; the value is their mean.
        seed: seed of the subsets.

    Returns:
        The mean over subsets, and the standard deviation between subsets.

    Raises:
        InvalidArgument: arguments out of range, or different numbers of features.
        InvalidInput: fewer than 2 rows, or features that are not finite.

    Source: "Demystifying MMD GANs" (arXiv:1801.01401), eq. 4 and section 4.
    """
    a, b = _rows(a, b)
    size = min(size, len(a), len(b))
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(subsets):
        x, y = (rows[torch.randperm(len(rows), generator=generator)[:size]] for rows in (a, b))
        values.append(_discrepancy(x, y))
    found = torch.tensor(values, dtype=torch.float64)
    return SampleQuality(float(found.mean()), float(found.std()) if subsets > 1 else 0.0)


@checked
def precision_recall(
    samples: Float[Tensor, "n dim"], real: Float[Tensor, "m dim"], k: PositiveInt = 3
) -> tuple[float, float]:
    """Precision and recall of generated images by nearest neighbors in feature space.

    Around each real image there is a ball whose radius is the distance to its k-th nearest real neighbor. Precision is
    the share of samples within at least one ball; recall is the same with the two sets exchanged.

    Args:
        samples: features of generated images.
        real: features of real images. Figures are comparable between sets of equal size.
        k: the neighbor that sets the radius of a ball; a larger k makes both figures larger.

    Raises:
        InvalidArgument: k out of range, or different numbers of features.
        InvalidInput: k or fewer rows, or features that are not finite.

    Source: "Improved Precision and Recall Metric for Assessing Generative Models" (arXiv:1904.06991), eq. 1 and 2.

    >>> precision_recall(torch.tensor([[0.0], [9.0]]), torch.tensor([[0.1], [0.3]]), k=1)
    (0.5, 1.0)
    """
    samples, real = _rows(samples, real, least=k + 1)
    return _covered(samples, real, k), _covered(real, samples, k)


def energy_ratio(x: Float[Tensor, "n ..."], real: Float[Tensor, "m ..."]) -> float:
    """Energy of the finest Haar bands of images, relative to real images: below 1 for blur, above 1 for noise.

    Args:
        x: images [n, channels, height, width]; an odd last row or column is left out.
        real: images of the same size.

    Raises:
        InvalidArgument: images of different sizes, or fewer than 2 by 2 pixels.
        InvalidInput: no images, or real images without fine detail.

    >>> checks = torch.tensor([[[[1.0, -1.0], [-1.0, 1.0]]]])
    >>> energy_ratio(checks / 2, checks)
    0.25
    """
    if x.shape[1:] != real.shape[1:] or x.ndim != 4 or min(x.shape[2:]) < 2:
        raise InvalidArgument(f"images of {tuple(x.shape[1:])} and {tuple(real.shape[1:])}; give equal ones, 2 by 2 up")
    if not len(x) or not len(real):
        raise InvalidInput(f"{len(x)} images and {len(real)} real ones: give at least one of each")
    whole = _fine_energy(real)
    if not whole > 0:
        raise InvalidInput("the real images have no fine detail at all, so nothing can be compared with it")
    return _fine_energy(x) / whole


def compare(
    samples: Float[Tensor, "n ..."], real: Float[Tensor, "m ..."], features: Features, *, seed: int = 0
) -> Report:
    """Frechet distance, kernel distance, precision, recall and energy ratio in one table.

    Args:
        samples: generated images with values from -1 to 1.
        real: real images to compare with.
        features: the feature extractor.
        seed: seed of the random subsets.

    Raises:
        InvalidArgument: images of different shapes.
        InvalidInput: fewer than 16 images of either, or pixels that are not finite.
    """
    a, b = features(samples), features(real)
    # with thousands of features each distance takes seconds, so there are fewer repeats
    distance = frechet_extrapolated(a, b, repeats=4 if features.dim <= 512 else 1, seed=seed)
    kernel = kernel_distance(a, b, seed=seed)
    precision, recall = precision_recall(a, b)
    return Report(
        f"{len(samples)} samples against {len(real)} real images, in {features.name} ({features.dim} features)",
        [
            Row(f"Frechet distance at n = {distance.n}", distance.value, "squared"),
            Row("Frechet distance at infinite n", distance.extrapolated, "squared", distance.standard_error),
            Row("kernel distance", kernel.value, "squared", kernel.std),
            Row("precision", precision, "share"),
            Row("recall", recall, "share"),
            Row("fine energy over real", energy_ratio(samples, real), "ratio"),
        ],
    )


def _rows(a: Tensor, b: Tensor, least: int = 2) -> tuple[Tensor, Tensor]:
    """Check both sets of features and convert them to float64 on the CPU."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise InvalidArgument(f"features of shapes {tuple(a.shape)} and {tuple(b.shape)}; give rows of equal length")
    if min(len(a), len(b)) < least:
        raise InvalidInput(f"{len(a)} and {len(b)} rows; this measure needs {least} or more of each")
    if not bool(a.isfinite().all()) or not bool(b.isfinite().all()):
        raise InvalidInput("features hold NaN or infinite values")
    return a.detach().cpu().double(), b.detach().cpu().double()


def _factor(rows: Tensor) -> Tensor:
    """A factor R with $R^\top R$ the covariance of the rows; R has at most as many rows as there are features."""
    return torch.as_tensor(torch.linalg.qr((rows - rows.mean(0)) / (len(rows) - 1) ** 0.5, mode="r").R)


def _root(cov: Tensor) -> Tensor:
    """The symmetric square root of a covariance; eigenvalues that rounding made negative are set to zero."""
    values, vectors = torch.linalg.eigh(cov)
    return torch.as_tensor((vectors * values.clamp_min(0).sqrt()) @ vectors.T)


def _discrepancy(x: Tensor, y: Tensor) -> float:
    """Unbiased squared maximum mean discrepancy of two sets [n, d] of equal size."""
    n, d = x.shape
    kernels = [(rows @ rows.T / d + 1) ** 3 for rows in (x, y)]
    within = sum((kernel.sum() - kernel.diagonal().sum()) / (n * (n - 1)) for kernel in kernels)
    return float(within - 2 * ((x @ y.T / d + 1) ** 3).mean())


def _covered(points: Tensor, balls: Tensor, k: int) -> float:
    """The share of the points that lie within at least one ball; a ball's radius is its k-th neighbor's distance."""
    radii = torch.cat(
        # k + 1, as the nearest row is the row itself
        [_distances(part, balls).kthvalue(k + 1, dim=1).values for part in balls.split(_CHUNK)]
    )
    inside = [(_distances(part, balls) <= radii).any(1) for part in points.split(_CHUNK)]
    return float(torch.cat(inside).double().mean())


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _fine_energy(x: Tensor) -> float:
    """Mean square of the three finest Haar bands, which is that of each 2 by 2 block minus its mean."""
    x = x.detach().double().cpu()[..., : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]
    blocks = x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    return float((blocks - blocks.mean(-1, keepdim=True)).square().mean())
