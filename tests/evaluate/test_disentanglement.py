"""DCI on codes whose figures are known: the factors themselves, mixtures of them, copies, noise; and its errors."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from pippin.core.errors import InvalidArgument, InvalidInput, MissingDependency
from pippin.evaluate.disentanglement import completeness, dci, disentanglement

HOW = {"train": 400, "test": 200, "num_trees": 10}


@pytest.fixture(scope="module")
def factors():
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randint(count, (600,), generator=generator) for count in (3, 4, 5)], 1)


def noise(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_factors_themselves_score_one(factors):
    found = dci(factors[:, [2, 0, 1]].float(), factors, **HOW)
    assert found.disentanglement == pytest.approx(1, abs=1e-6)
    assert found.completeness == pytest.approx(1, abs=1e-6)
    assert found.informativeness == 1
    np.testing.assert_allclose(found.importance, [[0, 0, 1], [1, 0, 0], [0, 1, 0]], atol=1e-6)


def test_one_dimension_for_all_factors_is_complete_and_not_disentangled(factors):
    code = (factors * torch.tensor([1, 3, 12])).sum(1, keepdim=True).float()
    found = dci(code, factors, **HOW)
    assert found.disentanglement == pytest.approx(0, abs=1e-6)
    assert found.completeness == 1


def test_a_factor_spread_over_two_dimensions_is_disentangled_and_not_complete(factors):
    low, high = factors[:, 2] % 2, factors[:, 2] // 2
    found = dci(torch.stack([factors[:, 0], factors[:, 1], low, high], 1).float(), factors, **HOW)
    assert found.disentanglement > 0.99
    assert found.completeness < 0.95
    assert found.importance[:2, 2].max() < 0.01


def test_rotated_codes_score_less_than_aligned_ones(factors):
    centered = factors.float() - factors.float().mean(0)
    turn = torch.linalg.qr(noise(3, 3))[0]
    aligned, turned = dci(centered, factors, **HOW), dci(centered @ turn, factors, **HOW)
    assert turned.disentanglement < 0.6 < aligned.disentanglement
    assert turned.completeness < 0.6 < aligned.completeness


def test_noise_predicts_no_better_than_chance_and_a_dead_dimension_changes_nothing(factors):
    found = dci(noise(600, 4), factors, **HOW)
    assert found.disentanglement < 0.2
    assert found.informativeness == pytest.approx(np.mean([1 / 3, 1 / 4, 1 / 5]), abs=0.08)
    dead = dci(torch.cat([factors.float(), torch.zeros(600, 1)], 1), factors, **HOW)
    assert dead.disentanglement == pytest.approx(1, abs=1e-6)
    assert (dead.importance[3] == 0).all()


def test_figures_of_a_matrix_are_those_of_the_formula():
    matrix = np.array([[0.7, 0.1, 0.2], [0.2, 0.6, 0.0], [0.1, 0.3, 0.8], [0.0, 0.0, 0.0]])
    total, expected = matrix.sum(), 0.0
    for row in matrix[:3]:
        entropy = -sum(p * math.log(p, 3) for p in row / row.sum() if p > 0)
        expected += row.sum() / total * (1 - entropy)
    assert disentanglement(matrix) == pytest.approx(expected, rel=1e-12)
    columns = [1 + sum(p * math.log(p, 4) for p in column if p > 0) for column in matrix.T]
    assert completeness(matrix) == pytest.approx(np.mean(columns), rel=1e-12)
    assert disentanglement(np.zeros((3, 3))) == 0


@settings(max_examples=50, deadline=None)
@given(arrays(float, (4, 3), elements=st.floats(0, 10)), st.permutations(range(4)), st.floats(0.1, 10))
def test_figures_lie_in_zero_to_one_and_know_neither_order_nor_scale(matrix, order, scale):
    for figure in (disentanglement, completeness):
        value = figure(matrix)
        assert 0 <= value <= 1
        assert figure(scale * matrix[order]) == pytest.approx(value, abs=1e-9)


def test_rows_and_trees_follow_the_seed_and_few_rows_shrink_both_parts(factors):
    codes = factors.float() + 0.7 * noise(600, 3)
    one, same, other = (dci(codes, factors, seed=seed, num_trees=5) for seed in (0, 0, 1))
    assert (one.importance == same.importance).all()
    assert (one.importance != other.importance).any()
    assert one.accuracy == same.accuracy


def test_a_report_and_a_plot(factors, tmp_path):
    found = dci(factors.numpy().astype(float), factors.numpy(), names=("shape", "x", "y"), **HOW)
    rows = {row.name: row.value for row in found.report.rows}
    assert rows["accuracy, shape"] == 1.0
    assert rows["disentanglement"] == found.disentanglement
    found.plot(tmp_path / "dci.png")
    assert (tmp_path / "dci.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("codes", "change", "message"),
    [
        (torch.zeros(599, 2), {}, "equally many rows"),
        (torch.zeros(600), {}, "equally many rows"),
        (torch.zeros(600, 0), {}, "a column in each"),
        (torch.full((600, 2), torch.nan), {}, "row 0 holds NaN"),
        (torch.zeros(600, 2), {"factors": torch.zeros(600, 3)}, "must be integers"),
        (torch.zeros(600, 2), {"factors": torch.tensor([[0, 1]] * 600)}, "factor 0 has the same value"),
        (torch.zeros(600, 2), {"factors": torch.eye(600, dtype=torch.long)[:, :1], "train": 2}, "hold one value"),
        (torch.zeros(600, 2), {"train": 0}, "at least 1"),
        (torch.zeros(600, 2), {"num_trees": 0}, "at least 1"),
        (torch.zeros(600, 2), {"names": ("a",)}, "1 names for 3 factors"),
    ],
)
def test_bad_input_is_refused(factors, codes, change, message):
    arguments = {"factors": factors, **HOW, **change}
    with pytest.raises((InvalidInput, InvalidArgument), match=message):
        dci(codes, arguments.pop("factors"), **arguments)


def test_no_rows_are_refused():
    with pytest.raises(InvalidInput, match="at least 2 rows"):
        dci(torch.zeros(0, 2), torch.zeros(0, 1, dtype=torch.long))


def test_missing_libraries_name_their_extra(factors, monkeypatch, tmp_path):
    found = dci(factors.float(), factors, **{**HOW, "num_trees": 1})
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(MissingDependency, match=r"pippin\[bayes\]"):
        dci(factors.float(), factors)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"pippin\[plot\]"):
        found.plot(tmp_path / "dci.png")
