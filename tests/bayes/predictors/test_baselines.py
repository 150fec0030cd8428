"""The baselines against what they are made of: softmax, explicit averages, hand-made masks."""

import pytest
import torch
from torch import nn

from pippin.bayes.likelihood import Regression
from pippin.bayes.predictors.baselines import DeepEnsemble, MAPNetwork, MCDropout
from pippin.core.errors import InvalidArgument, InvalidInput, UnsupportedLayer


def network(seed, outputs=3, dropout=None):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs)]
    if dropout is not None:
        layers.insert(2, nn.Dropout(dropout))
    return nn.Sequential(*layers).eval()


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def test_a_plain_network_is_its_softmax_or_its_noise():
    model = network(0)
    prediction = MAPNetwork(model)(X)
    torch.testing.assert_close(prediction.probs, model(X).softmax(-1))
    assert prediction.covariance is None
    assert not prediction.mean.requires_grad
    real = MAPNetwork(model, Regression(0.5))(X)
    torch.testing.assert_close(real.variance, torch.full((5, 3), 0.25))
    assert real.probs is None
    torch.testing.assert_close(MAPNetwork(model, "multi_label")(X).probs, model(X).sigmoid())


def test_an_ensemble_averages_probabilities():
    models = [network(seed) for seed in range(3)]
    weights = [0.5, 0.25, 0.25]
    expected = sum(w * m(X).softmax(-1) for w, m in zip(weights, models, strict=True))
    torch.testing.assert_close(DeepEnsemble(models, weights=weights)(X).probs, expected)


def test_an_ensembles_variance_is_the_spread_of_its_networks_and_the_noise():
    models = [network(seed, outputs=1) for seed in range(4)]
    outputs = torch.stack([m(X) for m in models])
    found = DeepEnsemble(models, Regression(0.1))(X)
    torch.testing.assert_close(found.mean, outputs.mean(0))
    torch.testing.assert_close(found.variance, outputs.var(0, correction=0) + 0.01)


def test_dropout_averages_masks_that_a_seed_fixes():
    model = network(0, dropout=0.5)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sampler = MCDropout(model, num_samples=20, seed=3)
    found = sampler(X)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(layer.training for layer in model.modules())
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        hidden = model[1](model[0](X))
        expected = torch.stack([model[3](nn.functional.dropout(hidden, 0.5, True)).softmax(-1) for _ in range(20)])
    torch.testing.assert_close(found.probs, expected.mean(0))
    assert torch.equal(sampler(X).probs, found.probs)
    others = [sampler(X, torch.Generator().manual_seed(seed)).probs for seed in (1, 1, 2)]
    assert torch.equal(others[0], others[1])
    assert not torch.equal(others[0], others[2])


def test_dropout_leaves_batch_norm_alone():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    MCDropout(model)(X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_dropout_comes_off_after_an_error():
    model = network(0, dropout=0.5)
    with pytest.raises(InvalidInput, match=r"shape \(2, 7\)"):
        MCDropout(model)(torch.zeros(2, 7))
    assert not any(layer.training for layer in model.modules())


def test_half_precision_adds_up_to_one():
    model = network(0).bfloat16()
    prediction = MAPNetwork(model, "classification")(torch.randn(50, 4).bfloat16())
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(50))


def test_bad_input_names_the_value():
    model = network(0)
    with pytest.raises(UnsupportedLayer, match="no dropout layer"):
        MCDropout(model)
    with pytest.raises(UnsupportedLayer, match="no dropout layer"):
        MCDropout(network(0, dropout=0.0))
    with pytest.raises(InvalidArgument, match="samples"):
        MCDropout(network(0, dropout=0.5), num_samples=0)
    with pytest.raises(InvalidArgument, match="at least one model"):
        DeepEnsemble([])
    with pytest.raises(InvalidArgument, match="add up to 1"):
        DeepEnsemble([model, model], weights=[0.5, 0.6])
    with pytest.raises(InvalidArgument, match="same outputs"):
        DeepEnsemble([model, network(1, outputs=2)])(X)
    with pytest.raises(InvalidArgument, match="training mode"):
        MAPNetwork(network(0, dropout=0.5).train())
    with pytest.raises(InvalidArgument, match="reward_model"):
        MAPNetwork(model, "reward_model")
    with pytest.raises(InvalidArgument, match=r"likelihood must be .* got 'guess'"):
        MAPNetwork(model, "guess")
    with pytest.raises(InvalidArgument, match="at least two classes"):
        MAPNetwork(network(0, outputs=1))(X)
