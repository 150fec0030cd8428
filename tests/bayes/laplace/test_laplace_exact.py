"""Every subset x structure x curvature x likelihood against brute-force autograd, and closed forms where they exist.

The oracle writes the Jacobian or the Hessian of each example's loss by `torch.autograd.functional`, forms the matrices
and inverts them, in float64; it shares no code with what it judges.
"""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

from pippin.bayes.laplace.curvature import EF, GGN, Hessian
from pippin.bayes.laplace.functional import Functional
from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.laplace.low_rank import LowRank
from pippin.bayes.laplace.structure import Diag, Full
from pippin.bayes.likelihood import Classification, MultiLabel, Regression
from pippin.bayes.weight_subset import All, LastLayer, Named, Subnetwork
from pippin.core.errors import InvalidArgument

N, SIGMA, T, PRIOR = 12, 0.7, 1.3, 0.9


def network(outputs=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()


def examples(kind, outputs=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    if kind == "classification":
        return x, torch.arange(N) % outputs
    if kind == "multi_label":
        return x, (torch.rand(N, outputs, generator=generator) > 0.5).double()
    return x, torch.randn(N, outputs, generator=generator, dtype=torch.float64)


LIKELIHOODS = {"classification": Classification(), "regression": Regression(SIGMA), "multi_label": MultiLabel()}
SUBSETS = {
    "all": All(),
    "last_layer": LastLayer(),
    "subnetwork": Subnetwork([0, 5, 9, 13, 20, 26]),
    "named": Named(lambda name: "bias" in name),
}
PLACES = {  # in the vector of all 27 weights, written out by hand
    "all": list(range(27)),
    "last_layer": list(range(12, 27)),
    "subnetwork": [0, 5, 9, 13, 20, 26],
    "named": [*range(8, 12), *range(24, 27)],
}
STRUCTURES = {
    "full": Full(),
    "diag": Diag(),
    "lowrank": LowRank(27, passes=3),
    "functional": Functional(N),
}
CURVATURES = {"ggn": GGN(), "ef": EF(), "hessian": Hessian()}


class Oracle:
    """One loss per example as a function of all weights, and what follows from it."""

    def __init__(self, model, kind, x, y):
        self.kind, self.x, self.y, self.known = kind, x, y, {}
        names = [name for name, _ in model.named_parameters()]
        shapes = [p.shape for _, p in model.named_parameters()]
        self.at = torch.cat([p.detach().flatten() for p in model.parameters()])

        def outputs(vector, x):
            parts = vector.split([shape.numel() for shape in shapes])
            own = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
            return functional_call(model, own, (x[None],))[0]

        self.outputs = outputs

    def loss(self, f, y):
        if self.kind == "classification":
            return -f.log_softmax(-1)[y]
        if self.kind == "multi_label":
            return -(y * f.sigmoid().log() + (1 - y) * (1 - f.sigmoid()).log()).sum()
        return 0.5 * (f - y).square().sum()

    def jacobian(self, x):
        return jacobian(lambda v: self.outputs(v, x), self.at)

    def curvature(self, kind):
        if kind not in self.known:
            self.known[kind] = self.compute(kind)
        return self.known[kind]

    def compute(self, kind):
        total = torch.zeros(len(self.at), len(self.at), dtype=torch.float64)
        for x, y in zip(self.x, self.y, strict=True):
            if kind == "hessian":
                total += hessian(lambda v, x=x, y=y: self.loss(self.outputs(v, x), y), self.at)
            elif kind == "ggn":
                f = self.outputs(self.at, x)
                j = self.jacobian(x)
                total += j.T @ hessian(lambda f, y=y: self.loss(f, y), f) @ j
            else:
                g = jacobian(lambda v, x=x, y=y: self.loss(self.outputs(v, x), y), self.at)
                total += torch.outer(g, g)
        return total

    def precision(self, subset, structure, curvature, prior):
        """Of the chosen weights, at SIGMA for a regression."""
        h = self.curvature(curvature)[PLACES[subset]][:, PLACES[subset]]
        if structure == "diag":
            h = torch.diag(h.diagonal())
        if structure == "lowrank":
            values, vectors = torch.linalg.eigh(h)
            h = vectors @ torch.diag(values.clamp_min(0)) @ vectors.T
        sigma = SIGMA if self.kind == "regression" else 1.0
        return h * sigma ** -(4 if curvature == "ef" else 2) / T + prior * torch.eye(len(h), dtype=torch.float64)

    def evidence(self, precision, subset, prior):
        sigma = SIGMA if self.kind == "regression" else 1.0
        loss = sum(self.loss(self.outputs(self.at, x), y) for x, y in zip(self.x, self.y, strict=True))
        value = -loss / sigma**2 / T
        if self.kind == "regression":
            value -= self.y.numel() * math.log(sigma * math.sqrt(2 * math.pi))
        weights = self.at[PLACES[subset]]
        occam = torch.logdet(precision) - len(weights) * math.log(prior) + prior * weights.square().sum()
        return value - 0.5 * occam


def combinations():
    for likelihood, subset, structure, curvature in itertools.product(LIKELIHOODS, SUBSETS, STRUCTURES, CURVATURES):
        if not (curvature == "hessian" and structure in ("diag", "functional")):
            yield likelihood, subset, structure, curvature


@pytest.fixture(scope="module")
def oracles():
    model = network()
    return model, {kind: Oracle(model, kind, *examples(kind)) for kind in LIKELIHOODS}


@pytest.mark.parametrize(("likelihood", "subset", "structure", "curvature"), list(combinations()))
def test_every_combination_is_what_brute_force_gives(oracles, likelihood, subset, structure, curvature):
    model, by_kind = oracles
    oracle = by_kind[likelihood]
    prior = 30.0 if curvature == "hessian" else PRIOR  # the Hessian of a random network is not positive
    x, y = oracle.x, oracle.y
    chosen = (LIKELIHOODS[likelihood], SUBSETS[subset], STRUCTURES[structure], CURVATURES[curvature])
    laplace = Laplace(model, *chosen, prior_precision=prior, temperature=T)
    laplace.fit([(x[:5], y[:5]), (x[5:], y[5:])])
    precision = oracle.precision(subset, structure, curvature, prior)
    covariance = precision.inverse()
    evidence = oracle.evidence(precision, subset, prior)
    torch.testing.assert_close(laplace.log_marginal_likelihood(), evidence, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(laplace.posterior.log_det, torch.logdet(precision), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(laplace.posterior.variances(), covariance.diagonal(), rtol=1e-7, atol=1e-10)
    probe = torch.randn(3, len(precision), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(laplace.posterior.solve(probe), probe @ covariance, rtol=1e-7, atol=1e-10)
    density = torch.distributions.MultivariateNormal(oracle.at[PLACES[subset]], precision_matrix=precision)
    torch.testing.assert_close(laplace.log_prob(laplace.mean + probe), density.log_prob(laplace.mean + probe))
    seen = x[:3]
    j = torch.stack([oracle.jacobian(one)[:, PLACES[subset]] for one in seen])
    torch.testing.assert_close(laplace(seen).covariance, j @ covariance @ j.mT, rtol=1e-6, atol=1e-9)
    flat = j.flatten(0, 1)
    torch.testing.assert_close(laplace(seen, joint=True).covariance, flat @ covariance @ flat.T, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("structure", ["full", "diag", "lowrank", "functional"])
@pytest.mark.parametrize("per", ["all", "layer", "weight"])
def test_the_evidence_has_the_gradient_of_brute_force(oracles, structure, per):
    model, by_kind = oracles
    oracle = by_kind["regression"]
    x, y = oracle.x, oracle.y
    laplace = Laplace(model, Regression(SIGMA), "all", STRUCTURES[structure]).fit([(x, y)])
    count = {"all": 1, "layer": 2, "weight": 27}[per]
    prior = torch.linspace(0.5, 2.0, count, dtype=torch.float64).requires_grad_()
    sigma = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    laplace.log_marginal_likelihood(prior, sigma).backward()
    h = oracle.curvature("ggn")
    h = torch.diag(h.diagonal()) if structure == "diag" else h

    def value(prior, sigma):
        full = prior[torch.tensor([0] * 12 + [1] * 15)] if per == "layer" else prior.expand(27)
        loss = sum(oracle.loss(oracle.outputs(oracle.at, a), b) for a, b in zip(x, y, strict=True))
        fit = -loss / sigma**2 - y.numel() * (sigma * math.sqrt(2 * math.pi)).log()
        precision = h / sigma**2 + torch.diag(full)
        return fit - 0.5 * (torch.logdet(precision) - full.log().sum() + (full * oracle.at.square()).sum())

    for_prior, for_sigma = jacobian(value, (prior.detach(), sigma.detach()))
    torch.testing.assert_close(prior.grad, for_prior, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(sigma.grad, for_sigma, rtol=1e-7, atol=1e-9)


def test_a_linear_model_with_gaussian_noise_is_bayesian_linear_regression():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(4, 1, generator=generator, dtype=torch.float64) + 0.3 * torch.randn(30, 1, generator=generator)
    sigma, prior = 0.4, 2.5
    design = torch.cat([x, torch.ones(30, 1, dtype=torch.float64)], 1)
    precision = design.T @ design / sigma**2 + prior * torch.eye(5, dtype=torch.float64)
    mean = torch.linalg.solve(precision, design.T @ y / sigma**2)[:, 0]
    model = nn.Linear(4, 1).double()
    with torch.no_grad():
        model.weight.copy_(mean[None, :4])
        model.bias.copy_(mean[4:])
    marginal = design @ design.T / prior + sigma**2 * torch.eye(30, dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(torch.zeros(30, dtype=torch.float64), marginal).log_prob(y[:, 0])
    for structure in (Full(), LowRank(5), Functional(30)):
        laplace = Laplace(model, Regression(sigma), "all", structure, prior_precision=prior).fit([(x, y)])
        torch.testing.assert_close(laplace.log_marginal_likelihood(), exact, rtol=1e-8, atol=1e-8)
        new = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        wide = torch.cat([new, torch.ones(6, 1, dtype=torch.float64)], 1)
        found = laplace(new, joint=True)
        torch.testing.assert_close(found.covariance, wide @ precision.inverse() @ wide.T, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.mean[:, 0], wide @ mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.variance[:, 0], found.covariance.diagonal() + sigma**2)


def test_logistic_regression_has_the_textbook_curvature():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.5 * torch.randn(50, generator=generator) > 0).double()[:, None]
    model = nn.Linear(3, 1, bias=False).double()
    laplace = Laplace(model, "multi_label", "all", "full").fit([(x, y)])
    p = (x @ model.weight[0]).sigmoid()
    textbook = (x.T * (p * (1 - p))) @ x + torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(laplace.posterior.log_det, torch.logdet(textbook))
    true = Laplace(model, "multi_label", "all", "full", "hessian").fit([(x, y)])
    torch.testing.assert_close(true.posterior.log_det, torch.logdet(textbook))


def test_low_rank_keeps_the_largest_eigenvalues(oracles):
    model, by_kind = oracles
    oracle = by_kind["classification"]
    laplace = Laplace(model, "classification", "all", LowRank(4, oversample=3, passes=12))
    laplace.fit([(oracle.x, oracle.y)])
    largest = torch.linalg.eigvalsh(oracle.curvature("ggn"))[-4:]
    torch.testing.assert_close(laplace._state.values, largest, rtol=1e-6, atol=1e-9)


def test_a_functional_posterior_on_few_points_is_the_full_one_on_those_points(oracles):
    model, by_kind = oracles
    oracle = by_kind["regression"]
    laplace = Laplace(model, "regression", "all", Functional(4, seed=5)).fit([(oracle.x[:7], oracle.y[:7])] * 1)
    rows = laplace._state.tensors()["rows"]
    assert rows.shape == (4, 3, 27)
    every = torch.stack([oracle.jacobian(one) for one in oracle.x[:7]])
    distance = (rows[:, None] - every[None]).abs().amax((2, 3))
    assert (distance.amin(1) < 1e-12).all()
    assert len(set(distance.argmin(1).tolist())) == 4


def test_reservoir_gives_every_example_the_same_chance():
    counts = torch.zeros(8)
    selection = All().resolve(nn.Linear(1, 1, bias=False))
    for seed in range(800):
        state, kept = Functional(2, seed=seed).start(selection, torch.zeros(0)), {}
        for first, count in ((0, 3), (3, 5)):
            places, state._seen = state._sample_slots(count), state._seen + count
            kept |= {place: first + example for example, place in enumerate(places) if place is not None}
        counts[list(kept.values())] += 1
    assert counts.sum() == 1600
    assert (counts - 200).abs().max() < 50  # four standard deviations


def test_sampled_curvature_is_right_on_average(oracles):
    model, by_kind = oracles
    for kind in LIKELIHOODS:
        oracle = by_kind[kind]
        laplace = Laplace(model, LIKELIHOODS[kind], "last_layer", "full", GGN(num_samples=4000))
        laplace.fit([(oracle.x, oracle.y)])
        exact = oracle.curvature("ggn")[12:, 12:]
        assert (laplace._state.curvature - exact).norm() / exact.norm() < 0.05


def test_sampled_curvature_is_the_same_at_every_fit(oracles):
    model, by_kind = oracles
    data = [(by_kind["classification"].x, by_kind["classification"].y)]
    laplace = Laplace(model, "classification", "all", "diag", "mc")
    first = laplace.fit(data).log_marginal_likelihood()
    assert torch.equal(laplace.fit(data).log_marginal_likelihood(), first)
    other = Laplace(model, "classification", "all", "diag", GGN(1, seed=1)).fit(data)
    assert other.log_marginal_likelihood() != first


def test_a_reward_model_is_logistic_regression_on_differences():
    generator = torch.Generator().manual_seed(6)
    a, b = (torch.randn(20, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    y = torch.randint(0, 2, (20,), generator=generator)
    torch.manual_seed(7)
    model = nn.Linear(3, 1).double()
    laplace = Laplace(model, "reward_model", "all", "full").fit([((a[:9], b[:9]), y[:9]), ((a[9:], b[9:]), y[9:])])
    difference = torch.cat([a - b, torch.zeros(20, 1, dtype=torch.float64)], 1)
    p = (difference[:, :3] @ model.weight[0]).sigmoid()
    precision = (difference.T * (p * (1 - p))) @ difference + torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(laplace.posterior.log_det, torch.logdet(precision))
    covariance = precision.inverse()
    single = laplace(a[:2])
    wide = torch.cat([a[:2], torch.ones(2, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(single.mean, model(a[:2]).detach())
    torch.testing.assert_close(single.covariance[:, 0, 0], ((wide @ covariance) * wide).sum(-1))
    assert single.probs is None
    pair = laplace((a[:2], b[:2]))
    spread = ((difference[:2] @ covariance) * difference[:2]).sum(-1)
    expected = (difference[:2, :3] @ model.weight[0] / (1 + math.pi / 8 * spread).sqrt()).sigmoid()
    torch.testing.assert_close(pair.probs, torch.stack([expected, 1 - expected], -1).detach())


def test_the_hessian_needs_a_structure_that_can_hold_it():
    with pytest.raises(InvalidArgument, match="cannot be represented as diag"):
        Laplace(network(), "classification", hessian_structure="diag", curvature="hessian")
