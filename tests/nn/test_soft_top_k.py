"""Soft top-k against bisection in float64, the optimum of its problem, finite differences, and its limits."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.optimize import brentq

from pippin.core.errors import InvalidArgument
from pippin.nn.soft_top_k import soft_top_k, top_k_indices, top_k_mask


def by_root_finding(z: np.ndarray, k: int, eps: float) -> np.ndarray:
    """The same weights from the one equation that the shift must fulfill."""

    def weights(shift: float) -> np.ndarray:
        return np.minimum(1.0, np.exp(np.minimum((z + shift) / eps, 0.0)))

    low, high = -z.max() - 50 * eps - 10, -z.min() + 1e-9
    return weights(brentq(lambda shift: weights(shift).sum() - k, low, high, xtol=1e-13, rtol=1e-15))


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("eps", [2.0, 1.0, 0.1, 0.01])
@pytest.mark.parametrize("k", [1, 48, 511])
def test_weights_are_those_of_a_root_finder_and_sum_to_k(k, eps):
    z = normal(3, 512)
    found = soft_top_k(z, k, eps)
    wanted = np.stack([by_root_finding(row, k, eps) for row in z.numpy()])
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-9)
    torch.testing.assert_close(found.sum(-1), torch.full((3,), float(k), dtype=torch.float64), rtol=0, atol=1e-9)
    in_float32 = soft_top_k(z.float(), k, eps)
    assert in_float32.dtype == torch.float32
    assert in_float32.double().sum(-1).sub(k).abs().max() < 1e-3


def test_no_other_weights_have_a_better_objective():
    """Random feasible neighbors of the solution lose in z . w + eps H(w)."""
    z, k, eps = normal(12), 4, 0.5

    def value(w: torch.Tensor) -> float:
        return float(z @ w - eps * torch.xlogy(w, w).sum() + eps * w.sum())

    best = soft_top_k(z, k, eps)
    for seed in range(200):
        other = (best + normal(12, seed=seed, scale=0.05)).clamp(1e-9, 1)
        other = other * (k / other.sum())
        if other.max() <= 1:
            assert value(other) <= value(best) + 1e-12


@pytest.mark.parametrize(("k", "eps"), [(1, 1.0), (3, 0.2), (7, 0.05), (7, 1.0)])
def test_gradients_are_those_of_finite_differences(k, eps):
    z = normal(2, 8, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: soft_top_k(x, k, eps), z, eps=1e-7, atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: top_k_mask(x, k, eps), z, eps=1e-7, atol=1e-6)


def test_saturated_scores_get_no_gradient_and_the_others_sum_to_none():
    z = torch.tensor([9.0, 1.0, 0.5, -1.0], requires_grad=True)
    weights = soft_top_k(z, 2, 0.5)
    (weights * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert weights[0] == 1.0
    assert z.grad[0] == 0.0
    assert abs(float(z.grad.sum())) < 1e-6
    assert z.grad[1:].abs().min() > 0


@given(st.lists(st.sampled_from([-2.0, 0.0, 0.0, 1.0]), min_size=1, max_size=9), st.data())
def test_exactly_k_survive_whatever_the_ties_and_the_first_of_equals_wins(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    z = torch.tensor(scores)
    wanted = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])
    assert top_k_indices(z, k).tolist() == wanted
    mask = top_k_mask(z, k, 0.3)
    assert mask.nonzero().flatten().tolist() == wanted
    torch.testing.assert_close(mask[wanted], soft_top_k(z, k, 0.3)[wanted])


def test_all_of_all_are_ones_and_extreme_scores_stay_finite():
    assert torch.equal(soft_top_k(normal(5), 5, 0.1), torch.ones(5, dtype=torch.float64))
    hard = soft_top_k(torch.tensor([1e4, -1e4, 3.0, 2.0, 1.0]), 3, 1e-3)
    torch.testing.assert_close(hard, torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]))
    z = torch.tensor([[1e4, 3.0, -1e4]], requires_grad=True)
    top_k_mask(z, 3, 1e-3).sum().backward()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize(
    ("scores", "k", "eps", "message"),
    [
        (torch.zeros(4), 0, 1.0, "k must be at least 1, got 0"),
        (torch.zeros(4), 5, 1.0, "got 5"),
        (torch.zeros(4), 2, 0.0, "eps must be above 0 and finite, got 0.0"),
        (torch.tensor([0.0, float("nan"), 1.0]), 2, 1.0, "1 of 3 scores are not finite"),
        (torch.tensor([0.0, float("inf"), 1.0]), 2, 1.0, "1 of 3 scores are not finite"),
    ],
)
def test_bad_input_names_the_value(scores, k, eps, message):
    for function in (soft_top_k, top_k_mask):
        with pytest.raises(InvalidArgument, match=message):
            function(scores, k, eps)
