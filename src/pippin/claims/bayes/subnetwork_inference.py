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

import statistics
import warnings
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from pippin.claims import Condition, Evidence, Scale, claim

if TYPE_CHECKING:
    from torch import nn

    from pippin.bayes.laplace.structure import StructureName
    from pippin.bayes.weight_subset import Subnetwork, Subset, SubsetName


@dataclass(frozen=True)
class _Size:
    """Seeds, then the sizes for the clusters, for the digits and for the tables."""

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
SIZES = Scale.choose(
    smoke=_Size((0,), 8, 20, 3, 1, 2, 16, TABLES[:1], 1, 1),
    laptop=_Size((0, 1, 2), 50, 2000, 256, 5, 60, 64, TABLES, 2, 100),
    gpu=_Size((0, 1, 2, 3, 4), 50, 4000, 256, 10, 60, 64, (*TABLES, "uci-wine-red", "uci-airfoil"), 4, 200),
)
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
    headline="full-covariance inference over 50%, 3% and 1% of the weights of a 2-layer network keeps in-between "
    "uncertainty better than a diagonal posterior over all of them; on rotated MNIST it has a better likelihood than "
    "the plain network and than a random subnetwork of its size; on UCI gap splits, subnetworks of large networks are "
    "ahead of all weights of small ones",
    setting="1-D regression, 35 + 35 points in two clusters, between 1 and 2 and their mirror image with the gap in "
    "+-0.7, and between 1.2 and 2 with the gap in +-0.3; tanh 1-50-50-1 (2,701 weights), noise 0.1, prior precision 1, "
    "5 random choices; digits 0-4 of scikit-learn, 300 to train, 64-64-64-5, rotated by 60 degrees, 1, 5 and "
    "20 % of the weights, precision by evidence; three UCI tables, two gaps each, 50-50 hidden units with as many "
    "chosen weights as a network of 20 hidden units has in all; SWAG's variances from 256 snapshots; 3 seeds",
    method="swag",
    negative_controls=("random", "diagonal over all", "plain", "temperature", "uniform"),
    positive_control="full",
    conditions=[
        Condition(
            "in between",
            "1-D, on both geometries: the ratio of the standard deviation in the gap to that on the training inputs is "
            "above 5 for 1 % of the weights and at least 3 times that of the diagonal posterior over all, means over "
            "seeds",
            lambda e, arm: all(
                e.mean(f"contrast, {arm}, 1 %, {where}") > 5
                and e.mean(f"contrast, {arm}, 1 %, {where}") >= 3 * e.mean(f"contrast, diagonal over all, {where}")
                for where in GEOMETRIES
            ),
            headline=True,
            positive=True,
        ),
        Condition(
            "rotated",
            "digits at 60 degrees: the loss at 1, 5 and 20 % is below the plain network's, the random choice's, a "
            "temperature's of equal loss on upright digits, and a uniform prediction's (1.609 nats), means over seeds",
            lambda e, arm: all(
                e.mean(_name("loss turned", arm, s)) < e.mean(_name("loss turned", other, s))
                for s in DIGIT_SHARES
                for other in ("uniform", "plain", "random", "temperature")
            ),
            headline=True,
        ),
        Condition(
            "upright",
            "and the loss on upright digits rises by at most 0.1 nats over the plain network's, means over seeds",
            lambda e, arm: all(
                e.mean(_name("loss", arm, s)) <= e.mean(_name("loss", "plain", s)) + 0.1 for s in DIGIT_SHARES
            ),
        ),
        Condition(
            "tables",
            "the log-density in gaps of the large network's subnetwork is above that of the small network's full "
            "posterior: 95 % interval of the paired difference above 0",
            lambda e, arm: e.paired("log-density in gaps", f"large, {arm}", "small, full").low > 0,
            headline=True,
        ),
        Condition(
            "wider",
            "the choice is wider in the gap than the random one at 10, 3 and 1 %, on both geometries, means over seeds",
            lambda e, arm: all(
                e.mean(_name("gap", arm, s, f", {where}")) > e.mean(_name("gap", "random", s, f", {where}"))
                for s, where in product(SHARES, GEOMETRIES)
            ),
        ),
    ],
    version=2,
    superseded={
        1: "on rotated digits a uniform prediction beats every arm, and what it cost on upright digits was not "
        "bounded; identities are held by tests"
    },
)
def run(scale: Scale) -> Evidence:
    """Measure clusters, digits and tables on each seed."""
    evidence, size = Evidence(), SIZES[scale]
    for seed in size.seeds:
        for where in GEOMETRIES:
            _clusters(evidence, seed, size, where)
        _digits(evidence, seed, size)
        _tables(evidence, seed, size)
    return evidence


def _name(what: str, rule: str, share: float, more: str = "") -> str:
    return f"{what}, {rule}, {100 * share:g} %{more}"


def _chosen(
    model: nn.Module, share: float | int, score: Any, data: Any, likelihood: Any, size: _Size, seed: int
) -> Any:
    """Choose a share or a number of weights; the warning about inert weights is silenced, since one arm has them."""
    import torch

    from pippin.bayes.laplace.subnetwork_selection import ScoreOptions, select_subnetwork
    from pippin.bayes.predictors.swag import SWAGConfig
    from pippin.bayes.weight_subset import Subnetwork
    from pippin.core.errors import InertWeights

    count: dict[str, Any] = {"n": share} if isinstance(share, int) else {"fraction": share}
    snapshots = min(64, size.snapshots) if isinstance(share, int) else size.snapshots
    options = ScoreOptions(1.0, SWAGConfig(num_snapshots=snapshots, rank=0))
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertWeights)
        chosen = select_subnetwork(
            model, score=score, loader=data, likelihood=likelihood, options=options, generator=generator, **count
        )
        return Subnetwork(chosen)


def _clusters(evidence: Evidence, seed: int, size: _Size, where: str) -> None:
    """Record all posteriors of one network on one geometry."""
    from pippin.bayes.laplace.laplace import Laplace
    from pippin.bayes.likelihood import Regression
    from pippin.claims.worlds import small_networks as small
    from pippin.claims.worlds.gap_regression import NOISE, two_clusters

    x, y, gap = two_clusters(seed, *GEOMETRIES[where])
    model, likelihood = small.tanh((1, size.width, size.width, 1), seed), Regression(NOISE)
    small.train(model, x, y, epochs=size.epochs, seed=seed, lr=1e-2, batch=len(x), precision=NOISE**2)
    data = small.batches(x, y, 10)

    def posterior(subset: SubsetName | Subset, structure: StructureName = "full") -> Any:
        return Laplace(model, likelihood, subset, structure).fit(data)

    def widths(fitted: Any) -> tuple[float, float]:
        """Mean predictive standard deviations in the gap and on the training inputs."""
        gap_sd, own_sd = (float(fitted(at).function_variance.sqrt().mean()) for at in (gap, x))
        return gap_sd, own_sd

    def note(what: str, value: float) -> None:
        evidence.add(f"{what}, {where}", value, seed=seed)

    full = posterior("all")
    wide = widths(full)[0]
    for arm, (between, on_data) in (("full", widths(full)), ("diagonal over all", widths(posterior("all", "diag")))):
        note(f"gap, {arm}", between / wide)
        note(f"contrast, {arm}", between / on_data)
        note(_name("contrast", arm, 0.01), between / on_data)
    for share, rule in product(SHARES, RULES):
        score: Any = full.posterior.variances() if rule == "exact" else rule
        seeds = [100 * seed + draw for draw in range(size.draws if rule == "random" else 1)]
        found = [widths(posterior(_chosen(model, share, score, data, likelihood, size, one))) for one in seeds]
        note(_name("gap", rule, share), statistics.mean(between for between, _ in found) / wide)
        note(_name("contrast", rule, share), statistics.mean(between / on_data for between, on_data in found))


def _digits(evidence: Evidence, seed: int, size: _Size) -> None:
    """Record the loss under rotation for three subnetwork sizes, chosen by SWAG or at random, tuned and not."""
    from pippin import metrics
    from pippin.bayes.laplace.laplace import Laplace
    from pippin.bayes.likelihood import Classification
    from pippin.bayes.predictors.map_network import MAPNetwork
    from pippin.claims.worlds import ood_classification as ood, small_networks as small

    world = ood.digits(seed)
    model = small.perceptron((64, size.digit_width, size.digit_width, 5), seed)
    small.train(model, *world.train, epochs=size.digit_epochs, seed=seed)
    data = small.batches(*world.train, 32)

    def losses(predictor: Any) -> list[float]:
        """Log loss on rotated digits and on upright ones."""
        return [metrics.log_loss(ood.probabilities(predictor, x), y) for x, y in (world.shifted, world.test)]

    def note(arm: str, share: float, pair: list[float]) -> None:
        for what, value in zip(("loss turned", "loss"), pair, strict=True):
            evidence.add(_name(what, arm, share), value, seed=seed, unit="nats")

    for share, rule in product(DIGIT_SHARES, ("swag", "random")):
        rows = []
        for draw in range(size.draws if rule == "random" else 1):
            subset = _chosen(model, share, rule, data, Classification(), size, 100 * seed + draw)
            fitted = Laplace(model, "classification", subset, "full").fit(data)
            as_it_is = losses(fitted)[0]
            rows.append((*losses(fitted.tune()), as_it_is, float(fitted.prior_precision[0].log())))
        means = [statistics.mean(column) for column in zip(*rows, strict=True)]
        note(rule, share, means[:2])
        evidence.add(_name("loss turned", rule, share, ", precision 1"), means[2], seed=seed, unit="nats")
        evidence.add(_name("log precision", rule, share), means[3], seed=seed)
        if rule == "swag":
            plain = MAPNetwork(model)
            note("plain", share, losses(plain))
            note("temperature", share, losses(ood.at_equal_loss(plain, fitted, world)))
            note("uniform", share, losses(ood.uniform(world.outputs)))


def _tables(evidence: Evidence, seed: int, size: _Size) -> None:
    """Record log-densities on the middle third of a column, for posteriors over equally many weights."""
    from pippin.bayes.laplace.laplace import Laplace
    from pippin.claims.worlds import small_networks as small
    from pippin.data import tables

    figures: dict[str, list[float]] = {}
    for table, column in product(map(tables.load, size.tables), range(size.gaps)):
        part = tables.gap_split(table, column)
        train, test = (part.train.x, part.train.y[:, None]), (part.test.x, part.test.y[:, None])
        data, inputs = small.batches(*train, 32), train[0].shape[1]
        tiny, large = small.tanh((inputs, SMALL, 1), seed), small.tanh((inputs, 50, 50, 1), seed)
        for model in (tiny, large):
            small.train(model, *train, epochs=size.table_epochs, seed=seed, lr=1e-2, precision=0.01)
        count = sum(p.numel() for p in tiny.parameters())
        arms: dict[str, tuple[nn.Module, SubsetName | Subnetwork, StructureName]] = {
            "small, full": (tiny, "all", "full"),
            "large, last layer": (large, "last_layer", "full"),
            "large, diagonal over all": (large, "all", "diag"),
        }
        for rule in ("swag", "random"):
            arms[f"large, {rule}"] = large, _chosen(large, count, rule, data, "regression", size, seed), "full"
        for arm, (model, subset, structure) in arms.items():
            fitted = Laplace(model, "regression", subset, structure).fit(data).tune()
            figures.setdefault(arm, []).append(small.log_density(fitted(test[0]), test[1]))
    for arm, values in figures.items():
        evidence.add(f"log-density in gaps, {arm}", statistics.mean(values), seed=seed, unit="nats")
