"""SWAG: moments against a loop by hand, samples against the published covariance, the model untouched."""

import copy

import pytest
import torch
from torch import nn

from pippin.bayes.likelihood import Regression
from pippin.bayes.predictors.swag import SGD, SWAG, SWAGConfig
from pippin.core.errors import InvalidArgument, InvalidInput, NotFitted


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(*, norm=False):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(2, 4), *([nn.BatchNorm1d(4)] if norm else []), nn.Tanh(), nn.Linear(4, 1)]
        return nn.Sequential(*layers).double().eval()


BATCHES = [(normal(6, 2, seed=i), normal(6, 1, seed=10 + i)) for i in range(3)]
CONFIG = SWAGConfig(num_snapshots=5, lr=0.05, momentum=0.9, weight_decay=0.1, rank=3)


def by_hand(model):
    """Weights after each pass of SGD on the mean loss, written out."""
    model = copy.deepcopy(model)
    speed = [torch.zeros_like(p) for p in model.parameters()]
    visited = []
    for _ in range(5):
        for x, y in BATCHES:
            loss = 0.5 * (model(x) - y).square().sum() / len(y)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, v, g in zip(model.parameters(), speed, gradients, strict=True):
                    v.mul_(0.9).add_(g + 0.1 * p)
                    p.sub_(0.05 * v)
        visited.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return torch.stack(visited)


def test_mean_variance_and_deviations_are_those_of_the_weights_visited():
    swag = SWAG(network(), "regression", CONFIG).fit(BATCHES)
    visited = by_hand(network())
    torch.testing.assert_close(swag.mean, visited.mean(0))
    torch.testing.assert_close(swag.variance, visited.var(0, correction=0).clamp(min=1e-30))
    running = visited.cumsum(0) / torch.arange(1, 6, dtype=torch.float64)[:, None]
    torch.testing.assert_close(swag.deviations, (visited - running)[2:])


def test_samples_have_the_published_covariance():
    swag = SWAG(network(), "regression", CONFIG).fit(BATCHES)
    drawn = swag.sample(60_000, torch.Generator().manual_seed(1))
    expected = torch.diag(swag.variance / 2) + swag.deviations.T @ swag.deviations / (2 * 2)
    scale = expected.diagonal().sqrt()
    torch.testing.assert_close(drawn.mean(0), swag.mean, rtol=0, atol=float(4 * scale.max() / 60_000**0.5))
    torch.testing.assert_close(
        drawn.T.cov() / scale / scale[:, None], expected / scale / scale[:, None], rtol=0, atol=0.03
    )


def test_rank_zero_is_diagonal():
    swag = SWAG(network(), "regression", SWAGConfig(num_snapshots=4, rank=0)).fit(BATCHES)
    drawn = swag.sample(40_000)
    torch.testing.assert_close(drawn.var(0), swag.variance, rtol=0.05, atol=0.0)
    assert swag.deviations.shape[0] == 0


def test_a_prediction_averages_the_sampled_networks():
    model = network()
    swag = SWAG(model, Regression(0.5), CONFIG).fit(BATCHES)
    x = normal(4, 2, seed=5)
    prediction = swag(x, num_samples=7, generator=torch.Generator().manual_seed(3))
    outputs = []
    for weights in swag.sample(7, torch.Generator().manual_seed(3)):
        changed = copy.deepcopy(model)
        nn.utils.vector_to_parameters(weights, changed.parameters())
        outputs.append(changed(x).detach())
    outputs = torch.stack(outputs)
    torch.testing.assert_close(prediction.mean, outputs.mean(0))
    torch.testing.assert_close(prediction.variance, outputs.var(0) + 0.25)
    assert prediction.probs is None


def test_probabilities_are_averages_of_softmax_and_sigmoid():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Linear(2, 3).double()
    data = [(normal(9, 2), torch.arange(9) % 3)]
    swag = SWAG(model, "classification", SWAGConfig(num_snapshots=3)).fit(data)
    probs = swag(normal(5, 2), num_samples=4).probs
    torch.testing.assert_close(probs.sum(-1), torch.ones(5, dtype=torch.float64))
    labels = SWAG(model, "multi_label", SWAGConfig(num_snapshots=3)).fit([(normal(9, 2), (normal(9, 3) > 0).double())])
    drawn = labels.sample(4, torch.Generator().manual_seed(2))
    expected = torch.stack(
        [(normal(5, 2) @ w[:6].view(3, 2).T + w[6:]).sigmoid() for w in drawn]
    ).mean(0)  # fmt: skip
    torch.testing.assert_close(
        labels(normal(5, 2), num_samples=4, generator=torch.Generator().manual_seed(2)).probs, expected
    )


def test_the_model_its_statistics_and_the_global_generator_stay():
    model = network(norm=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    swag = SWAG(model, "regression", CONFIG).fit(BATCHES)
    swag(BATCHES[0][0], num_samples=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert swag.mean.isfinite().all()


def test_frozen_parameters_do_not_move():
    model = network()
    model[0].requires_grad_(False)
    swag = SWAG(model, "regression", CONFIG).fit(BATCHES)
    assert (swag.variance[:12] == 0).all()
    assert (swag.variance[12:] > 0).all()
    torch.testing.assert_close(swag.sample(2)[:, :12], swag.mean[:12].expand(2, -1))


def test_bad_input_is_named():
    model = network()
    with pytest.raises(InvalidArgument, match="snapshots"):
        SWAGConfig(num_snapshots=1)
    with pytest.raises(InvalidArgument, match="snapshot_every must be"):
        SWAGConfig(snapshot_every=0)
    with pytest.raises(InvalidArgument, match="rank is 1"):
        SWAGConfig(rank=1)
    with pytest.raises(InvalidArgument, match="lr must be"):
        SWAGConfig(lr=-1.0)
    with pytest.raises(InvalidArgument, match="momentum must be"):
        SGD(momentum=1.0)
    with pytest.raises(InvalidArgument, match="weight_decay must be"):
        SGD(weight_decay=-1.0)
    with pytest.raises(InvalidArgument, match="nothing to train"):
        SWAG(network().requires_grad_(False), "regression")
    with pytest.raises(InvalidArgument, match="nothing to train"):
        SGD().build(network().requires_grad_(False))
    with pytest.raises(InvalidArgument, match=r"likelihood must be .* got 'poisson'"):
        SWAG(model, "poisson")
    swag = SWAG(model, "regression", CONFIG)
    with pytest.raises(NotFitted, match="call fit"):
        swag.sample(1)
    with pytest.raises(NotFitted, match="call fit"):
        swag(BATCHES[0][0])
    with pytest.raises(InvalidInput, match="no batch"):
        swag.fit([])
    with pytest.raises(InvalidArgument, match="read once"):
        swag.fit(iter(BATCHES))
    with pytest.raises(InvalidInput, match="real numbers"):
        swag.fit([(BATCHES[0][0], torch.arange(6)[:, None])])
    with pytest.raises(InvalidInput, match="hold nan"):
        swag.fit([(BATCHES[0][0] * torch.nan, BATCHES[0][1])])
    swag.fit(BATCHES)
    with pytest.raises(InvalidArgument, match="n must be at least 1"):
        swag.sample(0)
    with pytest.raises(InvalidArgument, match="num_samples must be at least 2"):
        swag(BATCHES[0][0], num_samples=1)
