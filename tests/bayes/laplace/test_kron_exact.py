"""Kronecker factors in every subset x curvature x likelihood against an oracle written from their definition.

The oracle goes through the examples one by one: it captures what each matrix read (patches cut out place by place, for
a convolution), takes the Jacobian of the outputs in what the matrix gave and the Hessian or the gradient of the loss by
autograd, and forms A as the mean of the outer products of inputs and B as the sum of those that came back. Everything
else gets its exact block. It shares no code with what it judges, and works in float64.
"""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian

from pippin.bayes.laplace.curvature import EF, GGN
from pippin.bayes.laplace.kron import Kron
from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.likelihood import Classification, MultiLabel, Regression
from pippin.bayes.weight_subset import All, LastLayer, Named

N, SIGMA, T, PRIOR = 7, 0.7, 1.3, 0.9
LIKELIHOODS = {"classification": Classification(), "regression": Regression(SIGMA), "multi_label": MultiLabel()}
CURVATURES = {"ggn": GGN(), "ef": EF()}
LAST = {"mlp": "2", "conv": "4"}
NAMED = {"mlp": ["0.weight", "2.bias"], "conv": ["0.weight", "0.bias", "1.weight", "4.weight"]}


def network(kind):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = {
            "mlp": [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)],
            "conv": [
                *(nn.Conv2d(2, 2, 2, padding=1, stride=2), nn.GroupNorm(1, 2), nn.Tanh(), nn.Flatten()),
                nn.Linear(8, 3),
            ],
        }[kind]
        model = nn.Sequential(*layers).double().eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.7)
    return model


def examples(kind, likelihood):
    generator = torch.Generator().manual_seed(4)
    shape = (3,) if kind == "mlp" else (2, 3, 3)
    x = torch.randn(N, *shape, generator=generator, dtype=torch.float64)
    if likelihood == "classification":
        return x, torch.arange(N) % 3
    if likelihood == "multi_label":
        return x, (torch.rand(N, 3, generator=generator) > 0.5).double()
    return x, torch.randn(N, 3, generator=generator, dtype=torch.float64)


def loss(likelihood, f, y):
    if likelihood == "classification":
        return -f.log_softmax(-1)[y]
    if likelihood == "multi_label":
        return -(y * f.sigmoid().log() + (1 - y) * (1 - f.sigmoid()).log()).sum()
    return 0.5 * (f - y).square().sum()


def columns_of(f, parts):
    """The Jacobian of outputs [C] in each of some tensors: [C, *shape], one output after the other."""
    every = [torch.autograd.grad(one, parts, retain_graph=True) for one in f]
    return [torch.stack([grads[i] for grads in every]) for i in range(len(parts))]


def read_by(module, x, out):
    """What a layer read for each place of its output, and where that place lies: pairs of a vector and an index."""
    if isinstance(module, nn.Linear):
        yield x, ()
        return
    (up, left), (high, wide), (down, right) = module.padding, module.kernel_size, module.stride
    framed = torch.zeros(x.shape[0], x.shape[1] + 2 * up, x.shape[2] + 2 * left, dtype=x.dtype)
    framed[:, up : up + x.shape[1], left : left + x.shape[2]] = x
    for i, j in itertools.product(*map(range, out.shape[1:])):
        yield framed[:, i * down : i * down + high, j * right : j * right + wide].flatten(), (i, j)


class Oracle:
    """The curvature of each parameter of a model, and what follows for those that are chosen."""

    def __init__(self, model, kind, x, y):
        self.model, self.kind, self.x, self.y, self.known = model, kind, x, y, {}
        self.names = [name for name, _ in model.named_parameters()]
        self.jacobians = [torch.cat([j.flatten(1) for j in self.one(x[i])[2]], 1).detach() for i in range(len(x))]

    def one(self, x):
        """Of one example: the outputs, what each matrix read and gave, and the Jacobian in each parameter."""
        seen = {}
        handles = [
            module.register_forward_hook(lambda m, args, out: seen.__setitem__(m, (args[0][0].detach(), out)))
            for module in self.model
        ]
        f = self.model(x[None])[0]
        for handle in handles:
            handle.remove()
        return f, seen, columns_of(f, list(self.model.parameters()))

    def middle(self, f, y, curvature):
        """The curvature in the outputs [C, C]."""
        if curvature == "ggn":
            return hessian(lambda f: loss(self.kind, f, y), f.detach())
        leaf = f.detach().requires_grad_()
        (g,) = torch.autograd.grad(loss(self.kind, leaf, y), leaf)
        return torch.outer(g, g)

    def blocks(self, curvature):
        """The curvature of each parameter by its name."""
        if curvature in self.known:
            return self.known[curvature]
        a, b, count, exact = {}, {}, {}, {}
        for x, y in zip(self.x, self.y, strict=True):
            f, seen, jacobians = self.one(x)
            middle = self.middle(f, y, curvature)
            for (name, parameter), j in zip(self.model.named_parameters(), jacobians, strict=True):
                flat = j.flatten(1)
                exact[name] = exact.get(name, 0) + flat.T @ middle @ flat
                if parameter.ndim == 1:
                    continue
                module = self.model[int(name.split(".")[0])]
                inputs, out = seen[module]
                (back,) = columns_of(f, [out])
                for vector, place in read_by(module, inputs, out[0]):
                    came = back[(slice(None), 0, slice(None), *place)]
                    a[name] = a.get(name, 0) + torch.outer(vector, vector)
                    b[name] = b.get(name, 0) + came.T @ middle @ came
                    count[name] = count.get(name, 0) + 1
        made = {name: torch.kron(b[name], a[name] / count[name]) if name in a else exact[name] for name in self.names}
        self.known[curvature] = {name: block.detach() for name, block in made.items()}
        return self.known[curvature]

    def chosen(self, names):
        """Where the weights of some parameters lie among all."""
        sizes = [p.numel() for p in self.model.parameters()]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        every = zip(self.names, starts, sizes, strict=True)
        return [place for name, start, size in every if name in names for place in range(start, start + size)]

    def curvature(self, names, curvature):
        return torch.block_diag(*[block for name, block in self.blocks(curvature).items() if name in names])

    def precision(self, names, curvature, prior, sigma):
        h = self.curvature(names, curvature)
        return h * sigma ** -(4 if curvature == "ef" else 2) / T + prior * torch.eye(len(h), dtype=torch.float64)

    def total_loss(self):
        with torch.no_grad():
            return sum(loss(self.kind, self.model(x[None])[0], y) for x, y in zip(self.x, self.y, strict=True))

    def evidence(self, names, curvature, prior, sigma):
        """Differentiable in prior and noise."""
        value = -self.total_loss() / sigma**2 / T
        if self.kind == "regression":
            value = value - self.y.numel() * (sigma * math.sqrt(2 * math.pi)).log()
        weights = torch.cat([p.detach().flatten() for n, p in self.model.named_parameters() if n in names])
        occam = torch.logdet(self.precision(names, curvature, prior, sigma))
        return value - 0.5 * (occam - len(weights) * prior.log() + prior * weights.square().sum())


@pytest.fixture(scope="module")
def oracles():
    return {
        (net, kind): Oracle(network(net), kind, *examples(net, kind))
        for net, kind in itertools.product(LAST, LIKELIHOODS)
    }


def picked(oracle, net, subset):
    """The subset and the names of its parameters, written out."""
    last = [f"{LAST[net]}.weight", f"{LAST[net]}.bias"]
    return {"all": (All(), oracle.names), "last_layer": (LastLayer(), last), "named": (Named(NAMED[net]), NAMED[net])}[
        subset
    ]


def fitted(oracle, subset, curvature, structure=None, temperature=T):
    likelihood = LIKELIHOODS[oracle.kind]
    chosen = (likelihood, subset, structure or Kron(), curvature)
    made = Laplace(oracle.model, *chosen, prior_precision=PRIOR, temperature=temperature)
    return made.fit([(oracle.x[:3], oracle.y[:3]), (oracle.x[3:], oracle.y[3:])])


@pytest.mark.parametrize("net", list(LAST))
@pytest.mark.parametrize("kind", list(LIKELIHOODS))
@pytest.mark.parametrize("subset", ["all", "last_layer", "named"])
@pytest.mark.parametrize("curvature", list(CURVATURES))
def test_every_combination_is_what_the_definition_gives(oracles, net, kind, subset, curvature):
    oracle = oracles[net, kind]
    chosen, names = picked(oracle, net, subset)
    laplace = fitted(oracle, chosen, CURVATURES[curvature])
    sigma = torch.tensor(SIGMA if kind == "regression" else 1.0, dtype=torch.float64, requires_grad=True)
    prior = torch.tensor(PRIOR, dtype=torch.float64, requires_grad=True)
    evidence = oracle.evidence(names, curvature, prior, sigma)
    precision = oracle.precision(names, curvature, PRIOR, sigma.item())
    covariance = precision.inverse()
    torch.testing.assert_close(laplace.posterior.log_det, torch.logdet(precision), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(laplace.log_marginal_likelihood(), evidence.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(laplace.posterior.variances(), covariance.diagonal(), rtol=1e-8, atol=1e-10)
    eye = torch.eye(len(precision), dtype=torch.float64)
    torch.testing.assert_close(laplace.posterior.solve(eye), covariance, rtol=1e-8, atol=1e-10)
    probe = torch.randn(3, len(precision), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    density = torch.distributions.MultivariateNormal(laplace.mean, precision_matrix=precision)
    torch.testing.assert_close(laplace.log_prob(laplace.mean + probe), density.log_prob(laplace.mean + probe))

    j = torch.stack(oracle.jacobians)[:4, :, oracle.chosen(names)]
    torch.testing.assert_close(laplace(oracle.x[:4]).covariance, j @ covariance @ j.mT, rtol=1e-8, atol=1e-10)
    flat = j.flatten(0, 1)
    joint = laplace(oracle.x[:4], joint=True).covariance
    torch.testing.assert_close(joint, flat @ covariance @ flat.T, rtol=1e-8, atol=1e-10)

    by_hand = torch.autograd.grad(evidence, [prior, sigma] if kind == "regression" else [prior])
    prior, sigma = prior.detach().requires_grad_(), sigma.detach().requires_grad_()
    given = (prior, sigma) if kind == "regression" else (prior,)
    found = torch.autograd.grad(laplace.log_marginal_likelihood(*given), given)
    torch.testing.assert_close(found, by_hand, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("net", list(LAST))
def test_the_evidence_has_the_right_gradient_in_a_prior_for_each_layer(oracles, net):
    oracle = oracles[net, "classification"]
    laplace = fitted(oracle, All(), GGN())
    layers = [name.split(".")[0] for name in oracle.names]
    order = list(dict.fromkeys(layers))
    place = [order.index(layer) for layer in layers]
    sizes = torch.tensor([p.numel() for p in oracle.model.parameters()])
    prior = torch.linspace(0.4, 2.0, len(order), dtype=torch.float64, requires_grad=True)
    full = prior[torch.tensor(place)].repeat_interleave(sizes)
    weights = torch.cat([p.detach().flatten() for p in oracle.model.parameters()])
    precision = oracle.curvature(oracle.names, "ggn") / T + torch.diag(full)
    occam = torch.logdet(precision) - full.log().sum() + (full * weights.square()).sum()
    value = -oracle.total_loss() / T - 0.5 * occam
    (expected,) = torch.autograd.grad(value, prior)
    other = prior.detach().requires_grad_()
    found = laplace.log_marginal_likelihood(other)
    torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.autograd.grad(found, other)[0], expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("net", list(LAST))
@pytest.mark.parametrize("kind", list(LIKELIHOODS))
def test_sampled_curvature_is_right_on_average(oracles, net, kind):
    oracle = oracles[net, kind]
    laplace = fitted(oracle, All(), GGN(num_samples=2000), temperature=1.0)
    eye = torch.eye(laplace.selection.size, dtype=torch.float64)
    sigma = SIGMA if kind == "regression" else 1.0
    found = (laplace.posterior.solve(eye).inverse() - PRIOR * eye) * sigma**2
    exact = oracle.curvature(oracle.names, "ggn")
    assert (found - exact).norm() / exact.norm() < 0.06


@pytest.mark.parametrize("net", list(LAST))
def test_samples_have_the_moments_of_the_definition(oracles, net):
    oracle = oracles[net, "classification"]
    laplace = fitted(oracle, All(), GGN())
    covariance = oracle.precision(oracle.names, "ggn", PRIOR, 1.0).inverse()
    n = 20_000
    drawn = laplace.sample(n, torch.Generator().manual_seed(6)) - laplace.mean
    spread = covariance.diagonal().sqrt()
    assert (drawn.mean(0).abs() / spread).max() < 5 / math.sqrt(n)
    second = drawn.T @ drawn / n  # each entry has variance (s_i^2 s_j^2 + c_ij^2) / n
    error = ((spread[:, None] * spread).square() + covariance.square()).div(n).sqrt()
    assert ((second - covariance).abs() / error).max() < 5.5


def test_one_example_makes_the_block_of_each_matrix_exact():
    model = network("mlp")
    x, y = examples("mlp", "multi_label")
    for name, curvature in itertools.product(["0.weight", "0.bias", "2.weight", "2.bias"], CURVATURES.values()):
        pair = [
            Laplace(model, "multi_label", Named([name]), structure, curvature).fit([(x[:1], y[:1])])
            for structure in (Kron(), "full")
        ]
        torch.testing.assert_close(pair[0].posterior.log_det, pair[1].posterior.log_det, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(pair[0](x).covariance, pair[1](x).covariance, rtol=1e-9, atol=1e-11)


def test_a_kernel_as_large_as_the_picture_makes_the_factors_of_a_linear_layer():
    x, y = examples("conv", "classification")
    with torch.random.fork_rng():
        torch.manual_seed(8)
        convolution = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()).double()
    linear = nn.Sequential(nn.Flatten(), nn.Linear(18, 3)).double()
    with torch.no_grad():
        linear[1].weight.copy_(convolution[0].weight.flatten(1))
        linear[1].bias.copy_(convolution[0].bias)
    a, b = (Laplace(model, "classification", "all", "kron").fit([(x, y)]) for model in (convolution, linear))
    torch.testing.assert_close(a.log_marginal_likelihood(), b.log_marginal_likelihood(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(a(x, joint=True).covariance, b(x, joint=True).covariance, rtol=1e-9, atol=1e-11)


def test_a_linear_regression_without_bias_is_bayesian_linear_regression():
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    precision = x.T @ x / SIGMA**2 + PRIOR * torch.eye(4, dtype=torch.float64)
    model = nn.Linear(4, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(precision, x.T @ y / SIGMA**2).T)
    kron, full = (
        Laplace(model, Regression(SIGMA), "all", structure, prior_precision=PRIOR).fit([(x[:9], y[:9]), (x[9:], y[9:])])
        for structure in ("kron", "full")
    )
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(20, dtype=torch.float64), x @ x.T / PRIOR + SIGMA**2 * torch.eye(20, dtype=torch.float64)
    )
    torch.testing.assert_close(kron.log_marginal_likelihood(), marginal.log_prob(y.T).sum(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(kron.posterior.log_det, full.posterior.log_det, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(kron(x, joint=True).covariance, full(x, joint=True).covariance, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("size", [2, N])
def test_the_weight_of_a_last_layer_is_exact_for_a_regression(oracles, size):
    oracle = oracles["mlp", "regression"]
    data = [(oracle.x[:size], oracle.y[:size])]
    kron, full = (
        Laplace(oracle.model, Regression(SIGMA), Named(["2.weight"]), structure).fit(data)
        for structure in ("kron", "full")
    )
    eye = torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(kron.posterior.solve(eye), full.posterior.solve(eye), rtol=1e-9, atol=1e-11)
    classes = [
        Laplace(oracle.model, "classification", Named(["2.weight"]), structure).fit(
            [(oracle.x[:size], torch.arange(size) % 3)]
        )
        for structure in ("kron", "full")
    ]  # the factors of several examples with different probabilities are not exact, so the test above proves something
    assert abs(float(classes[0].posterior.log_det - classes[1].posterior.log_det)) > 1e-4


def test_the_trace_of_a_two_layer_perceptron_is_within_two_percent_of_the_full_one():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (200,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    traces = []
    for structure in ("full", "kron"):
        fitted = Laplace(model, "classification", "all", structure).fit([(x, y)])
        size = fitted.selection.size
        # the precision is the curvature and a prior of 1 on the diagonal
        traces.append(float(fitted.posterior.quadratic(torch.eye(size, dtype=torch.float64)).sum()) - size)
    assert traces[1] == pytest.approx(traces[0], rel=0.02)
