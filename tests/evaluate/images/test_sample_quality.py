"""Oracles: closed forms of Gaussians, scipy's matrix root, double loops, and laws of distances."""

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings, strategies as st

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.evaluate.images.features import Pixels
from pippin.evaluate.images.sample_quality import (
    compare,
    energy_ratio,
    frechet_distance,
    frechet_extrapolated,
    gaussian_frechet,
    kernel_distance,
    precision_recall,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def covariance(dim: int, seed: int, rank: int | None = None) -> torch.Tensor:
    root = normal(dim, rank or dim + 2, seed=seed).double()
    return root @ root.T / dim


@pytest.mark.parametrize("rank", [None, 3])
def test_frechet_distance_of_gaussians_is_that_of_scipys_matrix_root(rank):
    one, two = covariance(6, 1), covariance(6, 2, rank)
    mean = normal(6, seed=3).double()
    root = scipy.linalg.sqrtm((one @ two).numpy()).real
    expected = float(mean.square().sum()) + np.trace(one.numpy() + two.numpy() - 2 * root)
    assert gaussian_frechet(mean, one, torch.zeros(6), two) == pytest.approx(expected, abs=1e-5)


def test_frechet_distance_of_diagonal_gaussians_is_the_sum_over_axes():
    s, t = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([3.0, 2.0, 1.0])
    expected = ((s - t) ** 2).sum().item() + 1.25
    found = gaussian_frechet(torch.tensor([1.0, 0.5, 0.0]), s.square().diag(), torch.zeros(3), t.square().diag())
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("n", "m"), [(50, 70), (4, 5), (4, 60)])
def test_distance_of_rows_is_that_of_their_means_and_covariances(n, m):
    a, b = normal(n, 8, seed=1).double(), 2 * normal(m, 8, seed=2).double() + 0.3
    expected = gaussian_frechet(a.mean(0), torch.cov(a.T), b.mean(0), torch.cov(b.T))
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.floats(-3, 3))
def test_laws_of_the_frechet_distance(seed, dim, shift):
    a, b = normal(30, dim, seed=seed), normal(40, dim, seed=seed + 1) * 2 + shift
    distance = frechet_distance(a, b)
    turn = torch.linalg.qr(normal(dim, dim, seed=seed + 2))[0]
    assert distance >= 0
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(b, a) == pytest.approx(distance, rel=1e-6, abs=1e-6)
    assert frechet_distance(a @ turn, b @ turn) == pytest.approx(distance, rel=1e-3, abs=1e-4)
    assert frechet_distance(3 * a, 3 * b) == pytest.approx(9 * distance, rel=1e-4, abs=1e-4)


def test_extrapolation_takes_most_of_the_bias_away():
    # the true distance of these is 0.25 * 12 = 3, and a finite set's is larger
    a, b = normal(1500, 12, seed=1), normal(1500, 12, seed=2) + 0.5
    found = frechet_extrapolated(a, b)
    assert found.value - 3 > 0.05
    assert abs(found.extrapolated - 3) < 0.5 * abs(frechet_distance(a[:200], b[:200]) - 3)
    same = frechet_extrapolated(normal(600, 12, seed=3), normal(600, 12, seed=4))
    assert abs(same.extrapolated) < 0.4 * same.value
    assert same.bias == pytest.approx(same.value - same.extrapolated)


def test_kernel_distance_is_the_double_loop():
    a, b = normal(9, 3, seed=1), normal(9, 3, seed=2) + 1

    def kernel(x, y):
        return (float(x @ y) / 3 + 1) ** 3

    pairs = [(i, j) for i in range(9) for j in range(9) if i != j]
    own = sum(kernel(a[i], a[j]) + kernel(b[i], b[j]) for i, j in pairs) / 72
    cross = sum(kernel(x, y) for x in a for y in b) / 81
    # a subset as large as the set is the set, in another order
    found = kernel_distance(a, b, subsets=3)
    assert found.value == pytest.approx(own - 2 * cross, rel=1e-5)
    assert found.std == pytest.approx(0, abs=1e-9)


def test_kernel_distance_of_one_distribution_is_zero_on_average():
    values = [
        kernel_distance(normal(40, 4, seed=2 * i), normal(40, 4, seed=2 * i + 1), subsets=1).value for i in range(80)
    ]
    mean = float(np.mean(values))
    assert abs(mean) < 3 * np.std(values) / 80**0.5
    assert min(values) < 0
    assert kernel_distance(normal(200, 4), normal(200, 4, seed=1) + 1).value > 10 * np.std(values)


def test_precision_and_recall_are_the_double_loop():
    samples, real = normal(40, 2, seed=1) * 0.5, normal(30, 2, seed=2)

    def covered(points, balls, k):
        table = torch.cdist(balls, balls)
        radius = [sorted(table[i].tolist())[k] for i in range(len(balls))]
        inside = [any(float((p - b).norm()) <= r for b, r in zip(balls, radius, strict=True)) for p in points]
        return sum(inside) / len(points)

    found = precision_recall(samples, real, k=3)
    assert found == pytest.approx((covered(samples, real, 3), covered(real, samples, 3)))


def test_precision_and_recall_tell_a_lost_mode_from_a_made_up_one():
    modes = torch.tensor([[0.0, 0.0], [20.0, 0.0]])
    real = normal(200, 2, seed=1) + modes[torch.arange(200) % 2]
    lost = normal(200, 2, seed=2)
    added = normal(200, 2, seed=3) + torch.cat([modes, torch.tensor([[0.0, 50.0]])])[torch.arange(200) % 3]
    precision, recall = precision_recall(lost, real)
    assert precision > 0.8
    assert 0.35 < recall < 0.55
    precision, recall = precision_recall(added, real)
    assert 0.5 < precision < 0.7
    assert recall > 0.8
    assert precision_recall(real, real) == (1.0, 1.0)


def test_fine_energy_is_that_of_the_haar_bands():
    x = normal(5, 2, 7, 6)
    even = x[:, :, :6].numpy()
    a, b = even[:, :, 0::2, 0::2], even[:, :, 0::2, 1::2]
    c, d = even[:, :, 1::2, 0::2], even[:, :, 1::2, 1::2]
    bands = [(a - b + c - d) / 2, (a + b - c - d) / 2, (a - b - c + d) / 2]
    expected = sum(float((band**2).sum()) for band in bands) / even.size
    checks = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(3, 3)[None, None].repeat(1, 2, 1, 1)
    checks = torch.nn.functional.pad(checks, (0, 0, 0, 1))
    assert energy_ratio(x, checks) == pytest.approx(expected, rel=1e-6)
    assert energy_ratio(x.roll(1, 0), x) == pytest.approx(1)


def test_compare_reports_every_figure_and_the_extractor():
    real, samples = normal(40, 1, 4, 4, seed=1), normal(40, 1, 4, 4, seed=2)
    report = compare(samples, real, Pixels((1, 4, 4)))
    rows = {row.name: row for row in report.rows}
    a, b = samples.flatten(1), real.flatten(1)
    assert rows["Frechet distance at n = 40"].value == frechet_distance(a, b)
    assert rows["kernel distance"].value == kernel_distance(a, b).value
    assert (rows["precision"].value, rows["recall"].value) == precision_recall(a, b)
    assert rows["fine energy over real"].value == energy_ratio(samples, real)
    assert "pixels (16 features)" in report.title


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: frechet_distance(normal(5, 2), normal(5, 3)), InvalidArgument, r"\(5, 2\) and \(5, 3\)"),
        (lambda: frechet_distance(normal(1, 2), normal(5, 2)), InvalidInput, "1 and 5 rows.*2 or more"),
        (lambda: frechet_distance(normal(5, 2) / 0, normal(5, 2)), InvalidInput, "NaN or infinite"),
        (lambda: frechet_extrapolated(normal(9, 2), normal(99, 2)), InvalidInput, "9 and 99 rows.*16"),
        (
            lambda: frechet_extrapolated(normal(99, 2), normal(99, 2), points=2),
            InvalidArgument,
            "points must be at least 3",
        ),
        (lambda: kernel_distance(normal(9, 2), normal(9, 2), size=1), InvalidArgument, "size must be"),
        (lambda: precision_recall(normal(9, 2), normal(9, 2), k=0), InvalidArgument, "k must be"),
        (lambda: precision_recall(normal(3, 2), normal(9, 2)), InvalidInput, "3 and 9 rows.*4 or more"),
        (lambda: energy_ratio(normal(1, 1, 4, 4), normal(1, 1, 4, 6)), InvalidArgument, r"\(1, 4, 4\) and \(1, 4, 6\)"),
        (lambda: energy_ratio(normal(0, 1, 4, 4), normal(1, 1, 4, 4)), InvalidInput, "0 images"),
        (lambda: energy_ratio(normal(1, 1, 4, 4), torch.ones(1, 1, 4, 4)), InvalidInput, "no fine detail"),
    ],
)
def test_bad_input_names_the_value(call, error, message):
    with pytest.raises(error, match=message):
        call()
