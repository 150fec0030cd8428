"""The MAP network against softmax, sigmoid and observation noise by hand."""

import pytest
import torch
from torch import nn

from pippin.bayes.likelihood import Regression
from pippin.bayes.predictors.map_network import MAPNetwork
from pippin.core.errors import InvalidArgument


def network(seed, outputs=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs)).eval()


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def test_predictions_are_softmax_sigmoid_or_outputs_with_noise():
    model = network(0)
    prediction = MAPNetwork(model)(X)
    torch.testing.assert_close(prediction.probs, model(X).softmax(-1))
    assert prediction.covariance is None
    assert not prediction.mean.requires_grad
    real = MAPNetwork(model, Regression(0.5))(X)
    torch.testing.assert_close(real.variance, torch.full((5, 3), 0.25))
    assert real.probs is None
    torch.testing.assert_close(MAPNetwork(model, "multi_label")(X).probs, model(X).sigmoid())


def test_half_precision_adds_up_to_one():
    model = network(0).bfloat16()
    prediction = MAPNetwork(model, "classification")(torch.randn(50, 4).bfloat16())
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(50))


def test_bad_input_names_the_value():
    model = network(0)
    with pytest.raises(InvalidArgument, match="training mode"):
        MAPNetwork(nn.Sequential(network(0), nn.Dropout(0.5)).train())
    with pytest.raises(InvalidArgument, match="reward_model"):
        MAPNetwork(model, "reward_model")
    with pytest.raises(InvalidArgument, match=r"likelihood must be .* got 'guess'"):
        MAPNetwork(model, "guess")
    with pytest.raises(InvalidArgument, match=r"at least two classes.* likelihood='regression'"):
        MAPNetwork(network(0, outputs=1))(X)
