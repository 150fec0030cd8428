"""A full covariance over few weights against a diagonal one over all: between clusters, under rotation, in gaps.

Notable here:
- a posterior that is wide everywhere wins nothing: uncertainty between the clusters is divided by that on the data
- every rule chooses the same number of weights from the same network, and random choices are drawn several times
- on digits each posterior's prior precision is tuned by its own evidence, and figures at precision 1 stand beside
- in the gaps of real tables, a few weights of a large network compete with all weights of a small one

The source gives no geometry for its two clusters. Five were looked at in a pilot on another seed. The first, [-2, -1]
and [1, 2] with the gap measured in [-0.7, 0.7], failed one condition there: the contrast of SWAG's 1 % was not above 5.
As the one taken in its place, [-2, -1.2] and [1.2, 2] with [-0.3, 0.3], was chosen after that, both are run here, and a
condition holds only if it holds on both.
"""

from __future__ import annotations

import math
import statistics
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from pippin.bayes.subset import Subset


@dataclass(frozen=True)
class Size:
    """How much is done: seeds; width, training epochs, snapshots and random draws; then digits; then tables."""

    seeds: tuple[int, ...]
    width: int
    epochs: int
    snapshots: int
    draws: int
    digit_epochs: int
    digit_width: int
    tables: tuple[str, ...]
    gaps: int
    table_epochs: int


TABLES = ("uci-yacht", "uci-mpg", "uci-fish-toxicity")
SIZES = {
    "smoke": Size((0,), 8, 20, 3, 1, 2, 16, TABLES[:1], 1, 1),
    "laptop": Size((0, 1, 2), 50, 2000, 256, 5, 60, 64, TABLES, 2, 100),
    "gpu": Size((0, 1, 2, 3, 4), 50, 4000, 256, 10, 60, 64, (*TABLES, "uci-wine-red", "uci-airfoil"), 4, 200),
}
NOISE, CLUSTER = 0.1, 35
GEOMETRIES = {"edge 1": (1.0, 0.7), "edge 1.2": (1.2, 0.3)}
"""Inner edge of the clusters, which end at 2, and half the width of the gap."""
SHARES = (0.10, 0.03, 0.01)
DIGIT_SHARES = (0.01, 0.05, 0.20)
RULES = ("swag", "random", "diag_laplace", "exact", "pvc")
"""Published; control; the literal rule on a diagonal and on the exact posterior; the share in the variance."""
SMALL = 20


@claim(
    id="subnetwork-inference",
    source="arXiv:2010.14689",
    paper="full-covariance inference over 50%, 3% and 1% of the weights of a 2-layer network keeps in-between "
    "uncertainty better than a diagonal posterior over all of them; on rotated MNIST it has a better likelihood than "
    "the plain network and than a random subnetwork of its size; on UCI gap splits, subnetworks of large networks are "
    "ahead of all weights of small ones",
    setting="1-D regression, 35 + 35 points in two clusters, between 1 and 2 and their mirror image with the gap in "
    "+-0.7, and between 1.2 and 2 with the gap in +-0.3; tanh 1-50-50-1 (2,701 weights), noise 0.1, prior precision 1, "
    "5 random draws; digits 0-4 of scikit-learn, 300 to train, 64-64-64-5, turned by 60 degrees, 1, 5 and "
    "20 % of the weights, precision by evidence; three UCI tables, two gaps each, 50-50 hidden units with as many "
    "chosen weights as a network of 20 hidden units has in all; SWAG's variances from 256 snapshots; 3 seeds",
    accept="1-D, on both geometries, each by itself, means over seeds: the ratio of the standard deviation in the gap "
    "to that on the training inputs is above 5 for the 1 % that SWAG chooses, and at least 3 times that of the "
    "diagonal posterior over all weights; SWAG's choice is wider in the gap than the random one at 10, 3 and 1 %; on "
    "every seed nested choices never lower a variance, and all weights and the last layer's give the full and the "
    "last-layer posterior within 1e-8. Digits, means over seeds, precision by evidence: the loss at 60 degrees is "
    "below that of the plain network and of the random choice at 1, 5 and 20 %. Tables, means over sets, gaps and "
    "seeds: the log-density of the large network's subnetwork is above that of the small network's full posterior",
)
def run(scale: Scale) -> Evidence:
    """Clusters, digits and tables for each seed."""
    evidence, size = Evidence(), SIZES[scale.name]
    exact = []
    for seed in size.seeds:
        exact += [_clusters(evidence, seed, size, where) for where in GEOMETRIES]
        _digits(evidence, seed, size)
        _tables(evidence, seed, size)
    mean = evidence.mean
    return evidence.accept(
        contrast=all(mean(f"contrast, swag, 1 %, {where}") > 5 for where in GEOMETRIES),
        contrast_diagonal=all(
            mean(f"contrast, swag, 1 %, {where}") >= 3 * mean(f"contrast, diagonal over all, {where}")
            for where in GEOMETRIES
        ),
        wider=all(
            mean(_name("gap", "swag", s, f", {where}")) > mean(_name("gap", "random", s, f", {where}"))
            for s, where in product(SHARES, GEOMETRIES)
        ),
        exact=all(exact),
        turned_plain=all(mean(_name("loss turned", "swag", s)) < mean("loss turned, plain") for s in DIGIT_SHARES),
        turned_random=all(
            mean(_name("loss turned", "swag", s)) < mean(_name("loss turned", "random", s)) for s in DIGIT_SHARES
        ),
        tables=mean("log-density in gaps, large, swag") > mean("log-density in gaps, small, full"),
    )


def _name(what: str, rule: str, share: float, more: str = "") -> str:
    return f"{what}, {rule}, {100 * share:g} %{more}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of inert weights: the literal rule is here to show them."""
    from pippin.core.errors import InertWeights

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertWeights)
        yield


def _options(snapshots: int, precision: float) -> Any:
    from pippin.bayes.selection import ScoreOptions
    from pippin.bayes.swag import SWAGConfig

    return ScoreOptions(precision, SWAGConfig(snapshots=snapshots, rank=0))


# --- two clusters -----------------------------------------------------------------------------------------------------


def _clusters(evidence: Evidence, seed: int, size: Size, where: str) -> bool:
    """All posteriors of one network on one geometry; whether the exact properties hold."""
    import torch

    from pippin.bayes.laplace import Laplace
    from pippin.bayes.likelihood import Regression
    from pippin.bayes.subset import Subnetwork
    from pippin.claims import _small_networks as small

    edge, half = GEOMETRIES[where]
    generator = torch.Generator().manual_seed(3_000 + seed)
    left, right = (torch.rand(CLUSTER, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    x = torch.cat([(2 - edge) * left - 2, (2 - edge) * right + edge])
    y = torch.sin(2 * x) + NOISE * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    gap = torch.linspace(-half, half, 29, dtype=torch.float64)[:, None]
    model = _tanh((1, size.width, size.width, 1), seed)
    small.train(model, x, y, epochs=size.epochs, seed=seed, lr=1e-2, batch=len(x), precision=NOISE**2)
    order = torch.randperm(len(x), generator=generator)
    data = small.batches(x[order], y[order], 10)

    def posterior(subset: str | Subset, structure: str = "full") -> Any:
        return Laplace(model, Regression(NOISE), subset, structure).fit(data)

    def sd(fitted: Any) -> tuple[Tensor, float]:
        return fitted(gap).function_variance.sqrt()[:, 0], float(fitted(x).function_variance.sqrt().mean())

    def note(what: str, value: float) -> None:
        evidence.add(f"{what}, {where}", value, seed=seed)

    full = posterior("all")
    between, on_data = sd(full)
    wide = float(between.mean())
    note("contrast, full", wide / on_data)
    diagonal, on_data = sd(posterior("all", "diag"))
    note("gap, diagonal over all", float(diagonal.mean()) / wide)
    note("contrast, diagonal over all", float(diagonal.mean()) / on_data)
    spreads: dict[float, Tensor] = {}
    for share in SHARES:
        for rule in RULES:
            found = []
            for draw in range(size.draws if rule == "random" else 1):
                score: Any = full.posterior.variances() if rule == "exact" else rule
                indices = _chosen(model, share, score, data, Regression(NOISE), size.snapshots, 1.0, 100 * seed + draw)
                found.append(sd(posterior(Subnetwork(indices))))
            if rule == "swag":
                spreads[share] = found[0][0]
            gaps = [float(values.mean()) for values, _ in found]
            note(_name("gap", rule, share), statistics.mean(gaps) / wide)
            contrasts = [value / on_data for value, (_, on_data) in zip(gaps, found, strict=True)]
            note(_name("contrast", rule, share), statistics.mean(contrasts))
    everything = torch.arange(full.selection.size)
    last = everything[-(size.width + 1) :]
    apart = max(
        float((sd(posterior(Subnetwork(everything)))[0] - between).abs().max()),
        float((sd(posterior(Subnetwork(last)))[0] - sd(posterior("last_layer"))[0]).abs().max()),
    )
    note("largest difference of equal posteriors", apart)
    nested = [spreads[share] for share in sorted(SHARES)] + [between]
    grows = all(bool((a <= b * (1 + 1e-9)).all()) for a, b in pairwise(nested))
    return grows and apart < 1e-8


def _chosen(
    model: nn.Module,
    share: float | int,
    score: Any,
    data: Any,
    likelihood: Any,
    snapshots: int,
    precision: float,
    seed: int,
) -> Tensor:
    """A share of the weights, or a number of them."""
    import torch

    from pippin.bayes.selection import select_subnetwork

    count: dict[str, Any] = {"n": share} if isinstance(share, int) else {"fraction": share}
    generator = torch.Generator().manual_seed(seed)
    how = {"likelihood": likelihood, "options": _options(snapshots, precision), "generator": generator}
    with _quiet():
        return select_subnetwork(model, score=score, loader=data, **count, **how)


def _tanh(sizes: tuple[int, ...], seed: int) -> nn.Module:
    """Linear layers with tanh between them, in float64."""
    from torch import nn

    from pippin.claims import _small_networks as small

    def make() -> nn.Module:
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers[:-1]).double()

    return small.seeded(seed, make)


# --- digits, turned ---------------------------------------------------------------------------------------------------


def _digits(evidence: Evidence, seed: int, size: Size) -> None:
    """The loss under rotation at three sizes, for SWAG's choice and random ones, tuned and not."""
    from pippin.bayes import metrics
    from pippin.bayes.baselines import PlainNetwork
    from pippin.bayes.laplace import Laplace
    from pippin.bayes.likelihood import Classification
    from pippin.bayes.subset import Subnetwork
    from pippin.claims import _small_networks as small

    world = small.digits(seed)
    model = small.perceptron((64, size.digit_width, size.digit_width, 5), seed)
    small.train(model, *world.train, epochs=size.digit_epochs, seed=seed)
    data = small.batches(*world.train, 32)

    def losses(predictor: Any) -> tuple[float, float]:
        turned = metrics.nll(predictor(world.shifted[0]).probs, world.shifted[1])
        return turned, metrics.nll(predictor(world.test[0]).probs, world.test[1])

    turned, straight = losses(PlainNetwork(model, "classification"))
    evidence.add("loss turned, plain", turned, seed=seed, unit="nats")
    evidence.add("loss, plain", straight, seed=seed, unit="nats")
    for share in DIGIT_SHARES:
        for rule in ("swag", "random"):
            rows = []
            for draw in range(size.draws if rule == "random" else 1):
                indices = _chosen(model, share, rule, data, Classification(), size.snapshots, 1.0, 100 * seed + draw)
                fitted = Laplace(model, "classification", Subnetwork(indices), "full").fit(data)
                as_it_is = losses(fitted)[0]
                rows.append((*losses(fitted.tune("evidence")), as_it_is, math.log(float(fitted.prior_precision[0]))))
            means = [statistics.mean(column) for column in zip(*rows, strict=True)]
            evidence.add(_name("loss turned", rule, share), means[0], seed=seed, unit="nats")
            evidence.add(_name("loss", rule, share), means[1], seed=seed, unit="nats")
            evidence.add(_name("loss turned", rule, share, ", precision 1"), means[2], seed=seed, unit="nats")
            evidence.add(_name("log precision", rule, share), means[3], seed=seed)


# --- gaps in tables ---------------------------------------------------------------------------------------------------


def _tables(evidence: Evidence, seed: int, size: Size) -> None:
    """Log-densities of the middle third of a column, for posteriors with equally many weights."""
    from pippin.bayes.laplace import Laplace
    from pippin.bayes.subset import Subnetwork
    from pippin.claims import _small_networks as small
    from pippin.data import tables

    figures: dict[str, list[float]] = {}
    for name in size.tables:
        table = tables.load(name)
        for column in range(size.gaps):
            part = tables.gap_split(table, column)
            train, test = (part.train.x, part.train.y[:, None]), (part.test.x, part.test.y[:, None])
            data, inputs = small.batches(*train, 32), train[0].shape[1]

            def note(what: str, fitted: Any, test: Any = test) -> None:
                prediction = fitted.tune("evidence")(test[0])
                figures.setdefault(what, []).append(_log_density(prediction, test[1]))

            tiny, large = _tanh((inputs, SMALL, 1), seed), _tanh((inputs, 50, 50, 1), seed)
            for model in (tiny, large):
                small.train(model, *train, epochs=size.table_epochs, seed=seed, lr=1e-2, precision=0.01)
            note("small, full", Laplace(tiny, "regression", "all", "full").fit(data))
            count = sum(p.numel() for p in tiny.parameters())
            for rule in ("swag", "random"):
                indices = _chosen(large, count, rule, data, "regression", min(64, size.snapshots), 1.0, seed)
                note(f"large, {rule}", Laplace(large, "regression", Subnetwork(indices), "full").fit(data))
            note("large, last layer", Laplace(large, "regression", "last_layer", "full").fit(data))
            note("large, diagonal over all", Laplace(large, "regression", "all", "diag").fit(data))
    for what, values in figures.items():
        evidence.add(f"log-density in gaps, {what}", statistics.mean(values), seed=seed, unit="nats")


def _log_density(prediction: Any, y: Tensor) -> float:
    """Mean log-density of targets under Gaussian predictions."""
    from pippin.bayes import metrics

    return -float(metrics.gaussian_nll(prediction.mean[:, 0], prediction.variance[:, 0], y[:, 0]))
