"""Prior precisions from the linear model's own optimum, and one for each scale-invariant group: what both are worth.

Notable here:
- the scale of weights before a norm is changed by hand; predictions and evidence must not notice, and with a shared
  precision they do
- both ways to tune run on the same network, with the same curvature, groups and number of rounds; only the weights of
  the scatter term differ
- evidence is compared with evidence and test density with test density, and the gap belongs to the test
"""

from __future__ import annotations

import math
import statistics
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """How much is done: seeds; hidden units and rounds for rescaling; steps of training; tables; pictures to learn."""

    seeds: tuple[int, ...]
    hidden: int
    rounds: int
    steps: tuple[int, ...]
    tables: tuple[str, ...]
    epochs: tuple[int, ...]
    pictures: int


TABLES = ("uci-yacht", "uci-mpg", "uci-fish-toxicity")
SIZES = {
    "smoke": Size((0,), 8, 60, (30,), TABLES[:1], (3,), 0),
    "laptop": Size((0, 1, 2), 30, 300, (30, 100, 2000), TABLES, (10, 100), 0),
    "gpu": Size((0, 1, 2), 30, 300, (30, 100, 2000), (*TABLES, "uci-wine-red", "uci-airfoil"), (10, 100), 20_000),
}
NOISE, POINTS, SMALL = 0.1, 80, 16
"""Of the 1-D problem: standard deviation of the noise, training points, hidden units where training is cut short."""
SCALES = (0.1, 10.0)


@claim(
    id="linearised-laplace",
    source="arXiv:2206.08900",
    paper="the evidence of the linear model is to be taken at that model's own optimum, not at the weights where "
    "training stopped, and weights before a norm layer need a precision of their own: without it predictions depend on "
    "a scale that means nothing; both improve test log-likelihood across architectures",
    setting="1-D regression, 80 points with a gap, tanh 1-h-h-1 with a norm (no constant, no gains) after the second "
    "layer or without, exact Jacobians in float64; rescaling of the layer by 0.1 and 10 at h = 30 (60 steps, the first "
    "of ten starts whose evidence keeps a part of the layer); training cut at 30, 100 and 2,000 steps, initial weights "
    "x1 and x3, with and without the norm, h = 16; three UCI tables, random tenths as test, 20-20 hidden units with a "
    "layer norm and without, 10 and 100 epochs; 3 seeds",
    accept="rescaling, every seed and factor: outputs agree within 1e-12; with its own precision standard deviations "
    "change by at most 1e-4 of themselves and the evidence by less than 1e-3 nats, the precision by the factor's "
    "inverse square within 1 %; with a shared one the largest change of a standard deviation is at least 5 %, and the "
    "evidence moves by more than 0.1 nats at 0.1. Optimum, means over seeds: in all 12 settings precisions differ by a "
    "factor of at least 1.5 and the linear model's evidence is better with its own optimum; the gradient at the "
    "network's weights exceeds that of the prior which they were tuned with; test log-density is better in at least 10 "
    "of 12. A linear network has the evidence of Bayesian linear regression within 1e-8, and the fixed point is that "
    "of gradient ascent within 1e-4. Tables: mean test log-density over sets, norms, epochs and seeds is better with "
    "the optimum of the linear model. With 20,000 pictures of clothes (on a GPU): test loss of a residual network with "
    "batch norms is lower with the linear model's optimum and groups than with the network's weights and one precision",
)
def run(scale: Scale) -> Evidence:
    """Rescaling, unfinished training, oracle and tables for each seed; pictures where there is a GPU."""
    evidence, size = Evidence(), SIZES[scale.name]
    invariant, oracle = [], []
    for seed in size.seeds:
        invariant.append(_rescaling(evidence, seed, size))
        for steps in size.steps:
            for width in (1.0, 3.0):
                for norm in (False, True):
                    _cut_short(evidence, seed, steps, width, norm)
        oracle.append(_oracle(evidence, seed))
        _tables(evidence, seed, size)
        if size.pictures:
            _pictures(evidence, seed, size.pictures)
    settings = [_setting(s, w, n) for s in size.steps for w in (1.0, 3.0) for n in (False, True)]
    mean = evidence.mean
    gains = [mean(f"test log-density, {s}, linear - network") for s in settings]
    evidence.add("settings with a better test log-density", sum(gain > 0 for gain in gains))
    conditions = {
        "own": all(own for own, _ in invariant),
        "shared": all(shared for _, shared in invariant),
        "precisions": all(mean(f"ratio of precisions, {s}") >= 1.5 for s in settings),
        "evidence": all(mean(f"evidence, {s}, linear - network") > 0 for s in settings),
        "no_mode": all(mean(f"gradient over prior's, {s}") > 1 for s in settings),
        "density": sum(gain > 0 for gain in gains) >= len(gains) * 10 / 12,
        "oracle": all(oracle),
        "tables": mean("tables, test log-density, linear") > mean("tables, test log-density, network"),
    }
    if size.pictures:
        conditions["pictures"] = mean("pictures, loss, linear, groups") < mean("pictures, loss, network, one")
    return evidence.accept(**conditions)


def _setting(steps: int, width: float, norm: bool) -> str:
    return f"{steps} steps, x{width:g}, {'norm' if norm else 'plain'}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that the worse arm of a comparison is bound to give."""
    from pippin.core.errors import InferenceAtRisk

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferenceAtRisk)
        yield


def _fitted(model: nn.Module, data: Any, rounds: int, tolerance: float = 1e-4, **how: Any) -> Any:
    from pippin.bayes.likelihood import Regression
    from pippin.bayes.linear_evidence import LinearisedEvidence

    likelihood = how.pop("likelihood", None) or Regression(NOISE)
    with _quiet():
        return LinearisedEvidence(model, likelihood, **how).fit(data, rounds, tolerance=tolerance)


# --- one dimension ----------------------------------------------------------------------------------------------------


def _problem(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training points left and right of a gap; test points everywhere between the outermost."""
    import torch

    generator = torch.Generator().manual_seed(4_000 + seed)

    def wave(x: Tensor) -> Tensor:
        return torch.sin(3 * x) + NOISE * torch.randn(x.shape, generator=generator, dtype=torch.float64)

    sides = torch.rand(2, POINTS // 2, 1, generator=generator, dtype=torch.float64)
    x = torch.cat([1.4 * sides[0] - 2, 1.4 * sides[1] + 0.6])
    test = torch.linspace(-2, 2, 161, dtype=torch.float64)[:, None]
    return x, wave(x), test, wave(test)


def _network(hidden: int, seed: int, *, norm: bool, width: float = 1.0) -> nn.Module:
    """A tanh network in float64; its layer before the norm is number 2."""
    import torch
    from torch import nn

    from pippin.claims import _small_networks as small

    class Norm(nn.Module):
        """Centre and divide by the standard deviation over units."""

        def forward(self, x: Tensor) -> Tensor:
            """As a layer norm without constant and gains."""
            centred = x - x.mean(-1, keepdim=True)
            normed: Tensor = centred / centred.square().mean(-1, keepdim=True).sqrt()
            return normed

    def make() -> nn.Module:
        middle = [Norm()] if norm else []
        layers = [nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), *middle, nn.Tanh(), nn.Linear(hidden, 1)]
        return nn.Sequential(*layers).double()

    model = small.seeded(seed, make)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(width)
    return model


def _density(prediction: Any, y: Tensor) -> float:
    """Mean log-density of targets."""
    from pippin.bayes import metrics

    return -metrics.gaussian_nll(prediction.mean[:, 0], prediction.variance[:, 0], y[:, 0])


def _rescaling(evidence: Evidence, seed: int, size: Size) -> tuple[bool, bool]:
    """Whether a group of its own leaves everything as it was, and whether a shared precision does not."""
    from pippin.bayes.invariance import rescaled

    x, y, grid, _ = _problem(seed)
    model, data = _undecided(x, y, seed, size), [(x, y)]
    layer: Any = model.get_submodule("2")
    outputs, own, shared = model(grid).detach(), True, True
    for groups, word in (("auto", "own"), ("scalar", "shared")):
        before = _fitted(model, data, size.rounds, 1e-8, groups=groups)
        sd = before(grid).function_variance.sqrt()
        for factor in SCALES:
            with rescaled([layer.weight, layer.bias], None, factor):
                after = _fitted(model, data, size.rounds, 1e-8, groups=groups)
                change = float((after(grid).function_variance.sqrt() / sd - 1).abs().max())
                apart = float((model(grid).detach() - outputs).abs().max())
            moved = abs(after.log_evidence - before.log_evidence)
            evidence.add(f"x{factor:g}, {word} precision, largest change of sd", change, seed=seed)
            evidence.add(f"x{factor:g}, {word} precision, change of evidence", moved, seed=seed, unit="nats")
            if groups == "scalar":
                shared = shared and change >= 0.05 and (moved > 0.1 or factor > 1)
                continue
            ratio = before.prior_precision["2"] / after.prior_precision["2"] / factor**2
            evidence.add(f"x{factor:g}, own precision, ratio over the factor's square", ratio, seed=seed)
            own = own and apart <= 1e-12 and change <= 1e-4 and moved < 1e-3 and abs(ratio - 1) < 0.01
    return own, shared


def _undecided(x: Tensor, y: Tensor, seed: int, size: Size) -> nn.Module:
    """A network trained for 60 steps: the first of ten starts whose evidence keeps a part of the layer before the norm.

    Where it keeps none, that layer's precision has no end, and there is no ratio to look at.
    """
    from pippin.claims import _small_networks as small

    for start in range(10):
        model = _network(size.hidden, 10 * seed + start, norm=True)
        small.train(model, x, y, epochs=60, seed=seed, lr=1e-2, batch=len(x))
        if _fitted(model, [(x, y)], size.rounds, 1e-8, groups="auto").prior_precision["2"] < 1e4:
            break
    return model


def _cut_short(evidence: Evidence, seed: int, steps: int, width: float, norm: bool) -> None:
    """Both ways to tune, on a network whose training stopped early or not."""
    from pippin.bayes.linear_evidence import evidence as evidence_at
    from pippin.bayes.linear_model import LinearModel
    from pippin.claims import _small_networks as small

    x, y, test_x, test_y = _problem(seed)
    model = _network(SMALL, seed, norm=norm, width=width)
    small.train(model, x, y, epochs=steps, seed=seed, lr=1e-2, batch=len(x))
    data, name = [(x, y)], _setting(steps, width, norm)
    found = {mode: _fitted(model, data, 200, groups="auto", mode=mode) for mode in ("linear", "network")}
    linear, network = found["linear"], found["network"]
    ratios = [abs(math.log(linear.prior_precision[g] / network.prior_precision[g])) for g in linear.prior_precision]
    evidence.add(f"ratio of precisions, {name}", math.exp(max(ratios)), seed=seed)
    laplace = network.laplace
    straight = LinearModel(model, laplace.likelihood, laplace.selection, data, scale=1 / NOISE**2)
    theirs = evidence_at(laplace, straight, straight.mode(laplace.prior_precision))
    evidence.add(f"evidence, {name}, linear - network", linear.log_evidence - theirs, seed=seed, unit="nats")
    gain = _density(linear(test_x), test_y) - _density(network(test_x), test_y)
    evidence.add(f"test log-density, {name}, linear - network", gain, seed=seed, unit="nats")
    prior = laplace.prior_precision
    pull = (prior * straight.weights).norm()
    gradient = straight.gradient(straight.weights, prior).norm()
    evidence.add(f"gradient over prior's, {name}", float(gradient / pull), seed=seed)


def _oracle(evidence: Evidence, seed: int) -> bool:
    """A linear network against Bayesian linear regression, and its precision against gradient ascent."""
    import torch
    from torch import nn
    from torch.distributions import MultivariateNormal

    from pippin.claims import _small_networks as small

    generator = torch.Generator().manual_seed(5_000 + seed)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-0.5], [0.2]], dtype=torch.float64)
    y = y + NOISE * torch.randn(y.shape, generator=generator, dtype=torch.float64)
    model = small.seeded(seed, lambda: nn.Linear(3, 1).double())
    fitted = _fitted(model, [(x, y)], 1000, 1e-10)
    design = torch.cat([x, torch.ones(40, 1, dtype=torch.float64)], 1)

    def exact(log_precision: Tensor) -> Tensor:
        covariance = design @ design.T / log_precision.exp() + NOISE**2 * torch.eye(40, dtype=torch.float64)
        density: Tensor = MultivariateNormal(torch.zeros(40, dtype=torch.float64), covariance).log_prob(y[:, 0])
        return density

    (found,) = fitted.prior_precision.values()
    apart = abs(fitted.log_evidence - float(exact(torch.tensor(math.log(found), dtype=torch.float64))))
    log_precision = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for _ in range(400):
        (slope,) = torch.autograd.grad(exact(log_precision), log_precision)
        with torch.no_grad():
            log_precision += 0.2 * slope
    ratio = found / float(log_precision.exp().detach())
    evidence.add("oracle, difference of evidence", apart, seed=seed, unit="nats")
    evidence.add("oracle, precision over gradient ascent's", ratio, seed=seed)
    return bool(apart < 1e-8 and abs(ratio - 1) < 1e-4)


# --- tables -----------------------------------------------------------------------------------------------------------


def _tables(evidence: Evidence, seed: int, size: Size) -> None:
    """Test log-densities of both ways, averaged over sets, norms and lengths of training."""
    from pippin.data import tables

    densities: dict[str, list[float]] = {"linear": [], "network": []}
    for name in size.tables:
        part = tables.split(tables.load(name), 0.9, seed=seed)
        for norm in (False, True):
            for epochs in size.epochs:
                model, noise, data = _regressor(part, seed, epochs, norm)
                for mode, values in densities.items():
                    fitted = _fitted(model, data, 40, 1e-3, mode=mode, likelihood=noise)
                    values.append(_density(fitted(part.test.x), part.test.y[:, None]))
                gain = densities["linear"][-1] - densities["network"][-1]
                what = f"{name}, {'norm' if norm else 'plain'}, {epochs} epochs"
                evidence.add(f"{what}, linear - network", gain, seed=seed, unit="nats")
    for mode, values in densities.items():
        evidence.add(f"tables, test log-density, {mode}", statistics.mean(values), seed=seed, unit="nats")


def _regressor(part: Any, seed: int, epochs: int, norm: bool) -> tuple[nn.Module, Any, Any]:
    """A network of 20-20 hidden units, its noise from a held-out tenth of the training part, and its batches."""
    from torch import nn

    from pippin.bayes.likelihood import Regression
    from pippin.claims import _small_networks as small

    def make() -> nn.Module:
        middle = [nn.LayerNorm(20)] if norm else []
        layers = [nn.Linear(part.train.x.shape[1], 20), nn.Tanh(), nn.Linear(20, 20), *middle, nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(20, 1)).double()

    model, x, y = small.seeded(seed, make), part.train.x, part.train.y[:, None]
    kept = len(x) * 9 // 10
    small.train(model, x[:kept], y[:kept], epochs=epochs, seed=seed, lr=5e-3)
    noise = float((model(x[kept:]) - y[kept:]).detach().square().mean().sqrt())
    return model, Regression(noise), small.batches(x[:kept], y[:kept])


# --- pictures ---------------------------------------------------------------------------------------------------------


def _pictures(evidence: Evidence, seed: int, count: int) -> None:
    """Four variants on a residual network with batch norms: where the scatter is taken, and how many precisions."""
    import torch

    from pippin.bayes import metrics
    from pippin.bayes.likelihood import Classification
    from pippin.bayes.predictors import gather
    from pippin.claims import _small_networks as small

    device = "cuda" if torch.cuda.is_available() else "cpu"
    world = small.clothes(seed, count, 5000)
    model = small.seeded(seed, _residual).to(device)
    x, y = (part.to(device) for part in world.train)
    small.train(model, x, y, epochs=10, seed=seed, batch=128)
    data = small.batches(x[:1000], y[:1000], 250)
    test = small.batches(world.test[0].to(device), world.test[1].to(device), 250)
    targets = torch.cat([labels for _, labels in test])
    for mode in ("linear", "network"):
        for groups, word in (("auto", "groups"), ("scalar", "one")):
            how = {"curvature": "diag", "groups": groups, "mode": mode, "likelihood": Classification()}
            probs: Any = gather(_fitted(model, data, 5, 1e-2, **how), test)[0].probs
            loss = metrics.nll(probs.to(targets.device), targets)
            evidence.add(f"pictures, loss, {mode}, {word}", loss, seed=seed, unit="nats")


def _residual() -> nn.Module:
    """A small residual network over pictures of 28 by 28, with batch norms."""
    from torch import nn

    class Block(nn.Module):
        """Two convolutions and a shortcut."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
                *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
            )

        def forward(self, x: Tensor) -> Tensor:
            """Add, then cut off below zero."""
            summed: Tensor = (x + self.body(x)).relu()
            return summed

    def down(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    return nn.Sequential(
        *(*down(1, 16), Block(16), *down(16, 32), Block(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    )
