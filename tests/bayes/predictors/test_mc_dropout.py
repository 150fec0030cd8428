"""Monte Carlo dropout against masks by hand, and what a call must leave unchanged."""

import pytest
import torch
from torch import nn

from pippin.bayes.predictors.mc_dropout import MCDropout
from pippin.core.errors import InvalidArgument, InvalidInput, UnsupportedLayer


def network(seed, outputs=3, dropout=None):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs)]
    if dropout is not None:
        layers.insert(2, nn.Dropout(dropout))
    return nn.Sequential(*layers).eval()


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


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


def test_bad_input_names_the_value():
    with pytest.raises(UnsupportedLayer, match="no dropout layer"):
        MCDropout(network(0))
    with pytest.raises(UnsupportedLayer, match="no dropout layer"):
        MCDropout(network(0, dropout=0.0))
    with pytest.raises(InvalidArgument, match="samples"):
        MCDropout(network(0, dropout=0.5), num_samples=0)
    with pytest.raises(InvalidArgument, match="training mode"):
        MCDropout(network(0, dropout=0.5).train())
