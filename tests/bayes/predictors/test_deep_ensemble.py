"""The deep ensemble against explicit averages and variances."""

import pytest
import torch
from torch import nn

from pippin.bayes.likelihood import Regression
from pippin.bayes.predictors.deep_ensemble import DeepEnsemble
from pippin.core.errors import InvalidArgument


def network(seed, outputs=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs)).eval()


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def test_an_ensemble_averages_probabilities():
    models = [network(seed) for seed in range(3)]
    weights = [0.5, 0.25, 0.25]
    expected = sum(w * m(X).softmax(-1) for w, m in zip(weights, models, strict=True))
    torch.testing.assert_close(DeepEnsemble(models, weights=weights)(X).probs, expected)


def test_the_variance_is_that_between_networks_plus_the_noise():
    models = [network(seed, outputs=1) for seed in range(4)]
    outputs = torch.stack([m(X) for m in models])
    found = DeepEnsemble(models, Regression(0.1))(X)
    torch.testing.assert_close(found.mean, outputs.mean(0))
    torch.testing.assert_close(found.variance, outputs.var(0, correction=0) + 0.01)


def test_bad_input_names_the_value():
    model = network(0)
    with pytest.raises(InvalidArgument, match="at least one model"):
        DeepEnsemble([])
    with pytest.raises(InvalidArgument, match="add up to 1"):
        DeepEnsemble([model, model], weights=[0.5, 0.6])
    with pytest.raises(InvalidArgument, match="same outputs"):
        DeepEnsemble([model, network(1, outputs=2)])(X)
