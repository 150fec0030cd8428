"""Mixtures of predictions against sampling, scipy's densities and laws."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError
from scipy import special, stats

from pippin.bayes.prediction import Prediction
from pippin.bayes.predictors.predictor import (
    check_weights,
    mix_predictions,
    mixture_log_likelihood,
    predict_all,
    predict_with_targets,
)
from pippin.core.errors import InvalidArgument, InvalidInput


def regression(seed, n=3, outputs=2, noise=0.3):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(n, outputs, outputs, generator=generator, dtype=torch.float64)
    mean = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    return Prediction(mean, root @ root.mT, None, noise)


def classification(seed, n=3, classes=4):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=generator, dtype=torch.float64)
    return Prediction(logits, None, logits.softmax(-1))


WEIGHTS = [0.2, 0.5, 0.3]


def test_moments_of_a_mixture_are_those_of_its_samples():
    members = [regression(seed) for seed in range(3)]
    mixed = mix_predictions(members, WEIGHTS)
    generator = torch.Generator().manual_seed(9)
    drawn = []
    for share, one in zip(WEIGHTS, members, strict=True):
        count = round(200_000 * share)
        root = torch.linalg.cholesky(one.covariance + one.noise * torch.eye(2))
        z = torch.randn(count, 3, 2, generator=generator, dtype=torch.float64)
        drawn.append(one.mean + torch.einsum("nij,snj->sni", root, z))
    samples = torch.cat(drawn)
    torch.testing.assert_close(samples.mean(0), mixed.mean, atol=0.02, rtol=0)
    total = torch.stack([torch.cov(samples[:, i].T) for i in range(3)])
    torch.testing.assert_close(total, mixed.covariance + mixed.noise * torch.eye(2), atol=0.05, rtol=0.02)


def test_a_joint_mixture_has_the_blocks_of_the_single_ones():
    parts = [regression(seed) for seed in range(2)]
    joint = [Prediction(one.mean, torch.block_diag(*one.covariance), None, one.noise) for one in parts]
    mixed, separate = mix_predictions(joint), mix_predictions(parts)
    blocks = torch.stack([mixed.covariance[i : i + 2, i : i + 2] for i in (0, 2, 4)])
    torch.testing.assert_close(blocks, separate.covariance)
    torch.testing.assert_close(mixed.variance, separate.variance)
    apart = (parts[0].mean - parts[1].mean) / 2
    torch.testing.assert_close(mixed.covariance[0, 3], apart[0, 0] * apart[1, 1])  # examples move together


def test_densities_are_those_of_scipy():
    members = [regression(seed) for seed in range(3)]
    y = torch.randn(3, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = mixture_log_likelihood(members, check_weights(WEIGHTS, 3), y)
    for row in range(3):
        each = [
            np.log(share)
            + stats.multivariate_normal(m.mean[row], (m.covariance[row] + 0.3 * torch.eye(2)).numpy()).logpdf(y[row])
            for share, m in zip(WEIGHTS, members, strict=True)
        ]
        assert float(found[row]) == pytest.approx(special.logsumexp(each))


def test_probabilities_are_averaged_and_not_logits():
    members = [classification(seed) for seed in range(3)]
    expected = sum(share * one.probs for share, one in zip(WEIGHTS, members, strict=True))
    mixed = mix_predictions(members, WEIGHTS)
    torch.testing.assert_close(mixed.probs, expected)
    assert not torch.allclose(mixed.probs, mixed.mean.softmax(-1))
    labels = torch.tensor([0, 3, 1])
    found = mixture_log_likelihood(members, check_weights(WEIGHTS, 3), labels)
    torch.testing.assert_close(found, expected[torch.arange(3), labels].log())


def test_one_member_is_itself():
    one = regression(0)
    mixed = mix_predictions([one])
    assert torch.equal(mixed.mean, one.mean)
    assert torch.equal(mixed.covariance, one.covariance)
    assert mixed.noise == one.noise


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), st.integers(0, 99))
def test_a_mixtures_variance_is_at_least_the_mean_variance_of_its_members(raw, seed):
    weights = [one / sum(raw) for one in raw]
    members = [regression(seed + k) for k in range(len(raw))]
    mean = sum(share * one.variance for share, one in zip(weights, members, strict=True))
    assert (mix_predictions(members, weights).variance >= mean - 1e-9).all()


@pytest.mark.parametrize("weights", [[0.5, 0.6], [1.5, -0.5], [1.0], [0.5, float("nan")], [float("inf"), 0.0]])
def test_weights_that_are_none(weights):
    with pytest.raises(InvalidArgument, match="weights"):
        check_weights(weights, 2)


def test_members_that_do_not_fit_together():
    with pytest.raises(InvalidArgument, match="at least one member"):
        mix_predictions([])
    with pytest.raises(InvalidArgument, match="same outputs"):
        mix_predictions([regression(0), regression(0, outputs=1)])
    with pytest.raises(InvalidArgument, match="same likelihood"):
        mix_predictions([regression(0, outputs=4), classification(0)])


def test_gathering_goes_through_every_batch():
    whole = classification(0, n=7)
    batches = [(torch.arange(7)[part], torch.arange(7)[part]) for part in (slice(0, 4), slice(4, 7))]

    def predict(at):
        return Prediction(whole.mean[at], None, whole.probs[at])

    prediction, targets = predict_with_targets(predict, batches)
    assert torch.equal(prediction.probs, whole.probs)
    assert torch.equal(targets, torch.arange(7))
    assert torch.equal(predict_all(predict, [x for x, _ in batches]).mean, whole.mean)


def test_data_that_cannot_be_gathered():
    one = classification(0)
    with pytest.raises(InvalidInput, match="no batches"):
        predict_with_targets(lambda x: one, [])
    with pytest.raises(InvalidInput, match="2 targets for 3"):
        predict_with_targets(lambda x: one, [(torch.zeros(3), torch.zeros(2))])
    with pytest.raises(InvalidArgument, match=r"this one a Tensor.*MAPNetwork"):
        predict_with_targets(lambda x: x, [(torch.zeros(3), torch.zeros(3))])
    with pytest.raises(InvalidInput, match="pair"):
        predict_with_targets(lambda x: one, [torch.zeros(3)])
    with pytest.raises(InvalidInput, match="no inputs"):
        predict_all(lambda x: one, [])


def test_targets_without_a_density():
    flat = Prediction(torch.zeros(2, 1), None, None)
    with pytest.raises(InvalidInput, match="no variance"):
        mixture_log_likelihood([flat], torch.ones(1).double(), torch.zeros(2, 1))
    with pytest.raises((InvalidInput, TypeCheckError), match="3 targets"):
        mixture_log_likelihood([flat], torch.ones(1).double(), torch.zeros(3, 1))
