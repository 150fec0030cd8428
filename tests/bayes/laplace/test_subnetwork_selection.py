"""Rules for subnetworks: each against a formula by hand, what a posterior over the choice does, and every error."""

import warnings

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError
from torch import nn
from torch.func import functional_call, jacrev

from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.laplace.subnetwork_selection import ScoreOptions, jacobian_energy, select_subnetwork
from pippin.bayes.likelihood import Regression
from pippin.bayes.predictors.swag import SWAG, SWAGConfig
from pippin.bayes.weight_subset import Subnetwork
from pippin.core.errors import InertWeights, InvalidArgument, InvalidInput, NotEnoughMemory


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(outputs=1):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def jacobian(model, x):
    own = {name: p.detach() for name, p in model.named_parameters()}
    parts = jacrev(lambda parameters: functional_call(model, parameters, (x,)))(own)
    return torch.cat([part.flatten(2) for part in parts.values()], -1)


X, Y, CLASSES = normal(12, 2), normal(12, 1, seed=1), torch.arange(12) % 3
DATA = [(X[:7], Y[:7]), (X[7:], Y[7:])]


def top(scores, n):
    return scores.argsort(descending=True, stable=True)[:n].sort().values


def test_magnitude_and_given_scores_take_the_largest():
    model = network()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(select_subnetwork(model, n=6, score="magnitude"), top(weights.abs(), 6))
    given = normal(33, seed=5)
    assert torch.equal(select_subnetwork(model, fraction=0.5, score=given), top(given, 16))
    assert select_subnetwork(model, n=3, score=torch.zeros(33)).tolist() == [0, 1, 2]


def test_the_literal_rule_and_the_share_in_the_variance_are_their_formulas():
    model, sigma = network(), 0.5
    j = jacobian(model, X)[:, 0]
    variance = 1 / (j.square().sum(0) / sigma**2 + 2.0)
    options = ScoreOptions(prior_precision=2.0)
    how = {"loader": DATA, "likelihood": Regression(sigma), "options": options}
    assert torch.equal(select_subnetwork(model, n=5, score="diag_laplace", **how), top(variance, 5))
    share = variance * j.square().sum(0)
    assert torch.equal(select_subnetwork(model, n=5, score="pvc", **how), top(share, 5))
    torch.testing.assert_close(jacobian_energy(model, DATA), j.square().sum(0))


def test_for_classes_the_curvature_is_that_of_softmax_and_the_energy_is_not():
    model = network(outputs=3)
    j, p = jacobian(model, X), model(X).softmax(-1).detach()
    bend = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    curvature = torch.einsum("ncp,ncd,ndp->p", j, bend, j)
    share = j.square().sum((0, 1)) / (curvature + 0.1)
    how = {"loader": [(X, CLASSES)], "options": ScoreOptions(prior_precision=0.1)}
    assert torch.equal(select_subnetwork(model, n=10, score="pvc", **how), top(share, 10))


def test_swag_takes_the_variances_of_the_descent():
    model = network()
    config = SWAGConfig(num_snapshots=6, lr=0.02, rank=0)
    variance = SWAG(model, "regression", config).fit(DATA).variance
    found = select_subnetwork(
        model, n=7, score="swag", loader=DATA, likelihood="regression", options=ScoreOptions(swag=config)
    )
    assert torch.equal(found, top(variance, 7))


def test_random_choices_follow_the_generator_and_leave_the_global_one():
    model, state = network(), torch.get_rng_state()
    first = select_subnetwork(model, n=9, score="random", generator=torch.Generator().manual_seed(1))
    again = select_subnetwork(model, n=9, score="random", generator=torch.Generator().manual_seed(1))
    other = select_subnetwork(model, n=9, score="random", generator=torch.Generator().manual_seed(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_choice_among_some_parameters():
    model = network()
    found = select_subnetwork(model, n=4, score="magnitude", among=lambda name: "bias" in name)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    allowed = torch.cat([torch.arange(16, 24), torch.tensor([32])])
    assert torch.equal(found, allowed[top(weights.abs()[allowed], 4)])
    assert select_subnetwork(model, n=8, score="magnitude", among=["2.weight"]).tolist() == list(range(24, 32))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 33), st.integers(0, 100))
def test_nested_choices_never_lower_a_variance(n, seed):
    model, scores, grid = network(), normal(33, seed=seed), normal(5, 2, seed=9)

    def variance(count):
        subset = Subnetwork(select_subnetwork(model, n=count, score=scores))
        return Laplace(model, Regression(0.3), subset, "full").fit(DATA)(grid).function_variance

    assert (variance(n) <= variance(min(n + 4, 33)) * (1 + 1e-9)).all()


def test_all_weights_give_the_full_posterior_and_those_of_the_last_layer_its_own():
    model, grid = network(), normal(5, 2, seed=9)

    def predicted(subset):
        return Laplace(model, Regression(0.3), subset, "full").fit(DATA)(grid).covariance

    everything = select_subnetwork(model, fraction=1.0, score="random")
    torch.testing.assert_close(predicted(Subnetwork(everything)), predicted("all"), rtol=1e-8, atol=1e-8)
    last = select_subnetwork(model, n=9, score="random", among=["2.weight", "2.bias"])
    torch.testing.assert_close(predicted(Subnetwork(last)), predicted("last_layer"), rtol=1e-8, atol=1e-8)


def test_samples_of_a_subnetwork_leave_the_other_weights():
    model = network()
    indices = select_subnetwork(model, n=5, score="magnitude")
    posterior = Laplace(model, "regression", Subnetwork(indices), "full").fit(DATA)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    (drawn,) = posterior.sample(1)
    with posterior.selection.at(model, drawn):
        inside = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = torch.ones(33, dtype=torch.bool)
    others[indices] = False
    assert torch.equal(inside[others], before[others])
    torch.testing.assert_close(inside[indices], drawn)
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), before)


def test_the_literal_rule_finds_dead_units_and_says_so():
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=20 + index))
        model[0].bias[:] = 10.0
        model[0].bias[:3] = -100.0  # three units that never fire
    how = {"loader": DATA, "likelihood": "regression"}
    with pytest.warns(InertWeights, match=r"0\.weight \(6\), 0\.bias \(3\), 2\.weight \(3\); use score='swag'"):
        dead = select_subnetwork(model, n=12, score="diag_laplace", **how)
    assert dead.tolist() == [0, 1, 2, 3, 4, 5, 16, 17, 18, 24, 25, 26]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select_subnetwork(model, n=12, score="pvc", **how)
    with pytest.warns(InertWeights):
        select_subnetwork(model, fraction=1.0, score="random", **how)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "either n"),
        ({"n": 3, "fraction": 0.1}, "not both"),
        ({"n": 0}, "n=0 weights of 33"),
        ({"n": -2}, "n=-2"),
        ({"n": 34}, "from 1 to 33"),
        ({"n": 9, "among": ["2.weight"]}, "from 1 to 8"),
        ({"fraction": 1.5}, "fraction must be"),
        ({"n": 3, "score": "fisher"}, "score must be"),
        ({"n": 3, "score": "swag", "loader": None}, "give a loader"),
        ({"n": 3, "score": "pvc", "loader": None}, "give a loader"),
        ({"n": 3, "score": torch.zeros(5)}, "one for each of the 33 weights"),
        ({"n": 3, "score": torch.full((33,), torch.nan)}, "score of weight 0 is nan"),
        ({"n": 3, "among": ["nine"]}, "no parameters nine"),
        ({"n": 3, "loader": iter(DATA)}, "read once only"),
        ({"n": 3, "likelihood": "poisson"}, "'poisson'"),
    ],
)
def test_bad_arguments_are_named(how, message):
    with pytest.raises(InvalidArgument, match=message):
        select_subnetwork(network(), **{"score": "magnitude", "loader": DATA, "likelihood": "regression", **how})


def test_bad_data_is_named():
    with pytest.raises(InvalidInput, match="no batch"):
        select_subnetwork(network(), n=3, score="pvc", loader=[], likelihood="regression")
    with pytest.raises(InvalidInput, match="nan"):
        select_subnetwork(network(), n=3, score="pvc", loader=[(X * torch.nan, Y)], likelihood="regression")
    with pytest.raises(InvalidArgument, match="prior_precision must be"):
        ScoreOptions(prior_precision=0.0)
    with pytest.raises((InvalidArgument, TypeCheckError)):
        select_subnetwork(network(), n=2.5, score="random")


@pytest.mark.parametrize(
    "indices", [[], [1, 1], [-1], [33], torch.tensor([0.5]), torch.zeros(33, dtype=torch.bool)], ids=str
)
def test_bad_indices_are_refused(indices):
    with pytest.raises((InvalidArgument, TypeCheckError)):
        Laplace(network(), "regression", Subnetwork(indices), "full")


def test_a_matrix_that_does_not_fit_is_refused_before_it_is_made():
    model = nn.Linear(3000, 1000)
    indices = select_subnetwork(model, fraction=1.0, score="random")
    with pytest.raises(NotEnoughMemory, match="3,001,000 weights"):
        Laplace(model, "regression", Subnetwork(indices), "full").fit([(torch.zeros(2, 3000), torch.zeros(2, 1000))])
