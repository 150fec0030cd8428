"""Roots, residuals and samples against derivatives of the loss, and what targets are refused."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.autograd.functional import hessian, jacobian

from pippin.bayes.likelihood import Classification, MultiLabel, Regression, RewardModel, to_likelihood
from pippin.core.errors import InvalidArgument, InvalidInput

KINDS = [Classification(), Regression(2.0), MultiLabel(), RewardModel()]


def case(kind, outputs, seed):
    generator = torch.Generator().manual_seed(seed)
    outputs = 2 if isinstance(kind, RewardModel) else outputs
    f = 3 * torch.randn(4, outputs, generator=generator, dtype=torch.float64)
    if isinstance(kind, Classification):
        return f, torch.randint(0, outputs, (4,), generator=generator)
    if isinstance(kind, MultiLabel):
        return f, (torch.rand(4, outputs, generator=generator) > 0.5).double()
    return f, torch.randn(4, outputs, generator=generator, dtype=torch.float64)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(KINDS), st.integers(2, 5), st.integers(0, 1000))
def test_root_and_residual_are_derivatives_of_the_loss(kind, outputs, seed):
    f, y = case(kind, outputs, seed)
    y = kind.check(f, y)
    root = kind.root(f)
    torch.testing.assert_close(kind.residual(f, y), jacobian(lambda f: kind.loss(f, y), f), rtol=1e-8, atol=1e-10)
    curvature = hessian(lambda f: kind.loss(f, y), f)
    for n in range(len(f)):
        torch.testing.assert_close(root[n] @ root[n].T, curvature[n, :, n], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_residuals_have_the_curvature_as_their_second_moment(kind):
    f, _ = case(kind, 3, 0)
    drawn = kind.sampled(f, 40_000, torch.Generator().manual_seed(1))
    moment = drawn @ drawn.mT / drawn.shape[2]
    exact = kind.root(f) @ kind.root(f).mT
    assert (moment - exact).abs().max() < 0.02


def test_normalizer_makes_the_gaussian_a_density():
    f, y = torch.randn(5, 2).double(), torch.randn(5, 2).double()
    sigma = torch.tensor(0.3, dtype=torch.float64)
    kind = Regression(0.3)
    ours = kind.normalizer(5, 2, sigma) - kind.loss(f, y) / sigma**2
    torch.testing.assert_close(ours, torch.distributions.Normal(f, sigma).log_prob(y).sum())
    assert Classification().normalizer(5, 2, torch.tensor(1.0)) == 0


@pytest.mark.parametrize(
    ("kind", "f", "y", "message"),
    [
        (Classification(), torch.zeros(2, 3), torch.tensor([0, 3]), "class 3 is not among the model's 3 outputs"),
        (Classification(), torch.zeros(2, 3), torch.tensor([-1, 0]), "class -1 is not among"),
        (Classification(), torch.zeros(2, 3), torch.tensor([0.0, 1.0]), "must be integers"),
        (Classification(), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long), "one number per example"),
        (Classification(), torch.zeros(2, 1), torch.tensor([0, 0]), "needs two outputs or more"),
        (Classification(), torch.zeros(2, 3), torch.tensor([0]), "2 outputs and targets of shape"),
        (Regression(), torch.zeros(2, 1), torch.tensor([0, 1]), "must be real numbers"),
        (Regression(), torch.zeros(2, 3), torch.zeros(2), "do not fit outputs"),
        (Regression(), torch.zeros(2, 3), torch.tensor(1.0), "2 outputs and targets of shape"),
        (MultiLabel(), torch.zeros(2, 1), torch.tensor([0.0, 0.5]), "must be 0 or 1, got 0.5"),
        (MultiLabel(), torch.zeros(2, 3), torch.zeros(2, 2), "do not fit outputs"),
        (RewardModel(), torch.zeros(2, 1), torch.tensor([0, 1]), "is fitted on pairs"),
        (RewardModel(), torch.zeros(2, 2), torch.tensor([0, 2]), "class 2 is not among"),
    ],
)
def test_targets_that_do_not_fit_are_named(kind, f, y, message):
    with pytest.raises(InvalidInput, match=message):
        kind.check(f, y)


def test_noise_must_be_positive():
    with pytest.raises(InvalidArgument, match=r"sigma_noise must be above 0 and finite, got 0\.0"):
        Regression(0.0)


def test_words():
    assert to_likelihood("multi_label") == MultiLabel()
    kind = Regression(0.5)
    assert to_likelihood(kind) is kind
    with pytest.raises(InvalidArgument, match=r"likelihood must be .classification."):
        to_likelihood("poisson")
