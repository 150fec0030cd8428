"""Laplace's approximation against the network alone, an ensemble, dropout, SWAG and temperature scaling, on real data.

Notable here:
- every arm but the ensemble and dropout starts from the same trained network, whose prior is that of the posterior
- costs are processor seconds over those of one training; what gets worse stands in the same table as what gets better
- the evidence is asked to rank networks that it did not choose, by weight decay and by width
- the ResNet-56 of the catalogue was trained by others: only its last layer gets a posterior, from a part of its data
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pippin.bayes.predictors import Predictor
    from pippin.claims._small_networks import World


@dataclass(frozen=True)
class Size:
    """Seeds and networks of an ensemble; epochs on digits; clothes, epochs on them and tests; tables; CIFAR-10."""

    seeds: tuple[int, ...]
    members: int
    epochs: int
    clothes: int
    clothes_epochs: int
    clothes_test: int
    tables: tuple[str, ...]
    table_epochs: int
    pictures: int


SIZES = {
    "smoke": Size((0,), 2, 8, 0, 0, 0, (), 0, 0),
    "laptop": Size(
        (0, 1, 2), 5, 60, 6_000, 12, 2_000, ("uci-yacht", "uci-mpg", "uci-fish-toxicity", "uci-airfoil"), 60, 2_000
    ),
    "gpu": Size(
        (0, 1, 2, 3, 4),
        5,
        60,
        50_000,
        30,
        10_000,
        ("uci-yacht", "uci-mpg", "uci-fish-toxicity", "uci-airfoil", "uci-wine-red", "uci-robot-arm"),
        200,
        10_000,
    ),
}
DECAYS = (0.01, 0.1, 1.0, 10.0, 100.0)
WIDTHS = (2, 4, 6, 9, 14)
LEFT_OUT = 0.005
"""A difference in AUROC that counts as none: a quarter of its standard deviation between seeds on digits."""


@claim(
    id="laplace",
    source="arXiv:2106.14806",
    paper="a last-layer Laplace approximation is competitive with deep ensembles and other Bayesian methods in "
    "calibration, under distribution shift and in detecting foreign inputs, at a fraction of their cost, nearly that "
    "of the network alone; its evidence selects models",
    setting="digits of scikit-learn (300 of 0 to 4, perceptron 64-64-64-5) and Fashion-MNIST (6,000, two "
    "convolutions), both trained with a prior of precision 1; shift: turned by 60 degrees; foreign: digits 5 to 9, "
    "MNIST; far: N(0, 1) times 100; arms: network, temperature, ensemble of 5, dropout, SWAG, Laplace (last "
    "layer, Kronecker GGN, evidence), Laplace for foreign inputs (last layer, full empirical Fisher). UCI tables with "
    "the middle third of a column left out, perceptron of 50 units, full GGN over all weights. CIFAR-10: last layer of "
    "a ResNet-56 of known accuracy, foreign: Fashion-MNIST, shift: noise. Evidence of 5 weight decays on digits. "
    "3 seeds",
    accept="exact: posterior mean, variance and evidence of a linear model equal Bayesian linear regression to 1e-8, "
    "and the Kronecker trace of a two-layer perceptron is within 2 % of the full GGN's. Means over 3 seeds: confidence "
    "far away at least 0.2 below the network's on digits and clothes; loss on turned digits at most 0.7 times the "
    "network's, on turned clothes below the network's; AUROC of foreign inputs, by the better of the two Laplace arms, "
    "not more than 0.005 below the network's on digits, clothes and CIFAR-10, and not more than 0.01 below the "
    "ensemble's on digits and clothes; calibration: the calibration error on unshifted test data is not above the "
    "network's on clothes and CIFAR-10; cost: fit and tuning of Laplace at most 0.15 of one training on clothes. "
    "Tables: with the gap, loss at least 0.1 nats below one variance for all, and on random rows not more than 0.05 "
    "above it. Spearman correlation of evidence and test loss over the 5 weight decays below -0.6, mean over 3 seeds. "
    "The calibration error on digits, which is expected to rise, is reported",
)
def run(scale: Scale) -> Evidence:
    """Closed forms, digits, clothes, tables, CIFAR-10 and the ranking."""
    from pippin.claims import _small_networks as small

    evidence, size = Evidence(), SIZES[scale.name]
    if size.clothes and not small.available("fashion-mnist", "mnist"):
        size = replace(size, clothes=0)
    if size.pictures and not small.available("cifar-10", "cifar-10-classifiers", "fashion-mnist"):
        size = replace(size, pictures=0)
    if size.tables and not small.available("uci"):
        size = replace(size, tables=())
    rules = {"exact": _exact(evidence)}
    warm = small.digits(0)  # the first training loads and compiles what later ones find ready
    small.train(small.perceptron((64, 8, 5), 0), *warm.train, epochs=1, seed=0)
    for seed in size.seeds:
        _arms(evidence, "digits", small.digits(seed), seed, size)
        _ranking(evidence, seed, size)
        if size.clothes:
            world = small.clothes(seed, size.clothes, size.clothes_test).on(small.device_for(scale.name))
            _arms(evidence, "clothes", world, seed, size)
        if size.tables:
            _tables(evidence, seed, size)
    if size.pictures:
        _pictures(evidence, size)
    worlds = ["digits", *(["clothes"] if size.clothes else [])]
    rules |= _class_rules(evidence, worlds, cifar=bool(size.pictures))
    rules["ranking"] = evidence.mean("rank correlation of evidence and test loss, weight decays") < -0.6
    if size.tables:
        mean = evidence.mean
        rules["gap"] = mean("tables, loss in the gap, Laplace") <= mean("tables, loss in the gap, network") - 0.1
        rules["tables"] = mean("tables, loss, Laplace") <= mean("tables, loss, network") + 0.05
    return evidence.accept(**rules)


def _class_rules(evidence: Evidence, worlds: list[str], cifar: bool) -> dict[str, bool]:
    mean = evidence.mean

    def foreign(world: str) -> float:
        return max(mean(f"{world}, AUROC of foreign, {arm}") for arm in ("Laplace", "Laplace, full EF"))

    shares = {"digits": 0.7, "clothes": 1.0}
    every = [*worlds, *(["CIFAR-10"] if cifar else [])]
    rules = {
        "far": all(
            mean(f"{w}, confidence far away, Laplace") <= mean(f"{w}, confidence far away, network") - 0.2
            for w in worlds
        ),
        "shift": all(
            mean(f"{w}, loss turned, Laplace") < shares[w] * mean(f"{w}, loss turned, network") for w in worlds
        ),
        "foreign": all(foreign(w) >= mean(f"{w}, AUROC of foreign, network") - LEFT_OUT for w in every),
        "ensemble": all(foreign(w) >= mean(f"{w}, AUROC of foreign, ensemble") - 2 * LEFT_OUT for w in worlds),
    }
    if "clothes" in worlds:
        rules["calibration"] = all(
            mean(f"{w}, calibration error, Laplace") <= mean(f"{w}, calibration error, network")
            for w in every
            if w != "digits"
        )
        rules["cost"] = mean("clothes, cost in trainings, Laplace") <= 0.15
    return rules


# --- closed forms -----------------------------------------------------------------------------------------------------


def _exact(evidence: Evidence) -> bool:
    """A linear model against Bayesian linear regression, and the trace of Kronecker factors against the full GGN's."""
    import torch
    from torch import nn

    from pippin.bayes.laplace import Laplace
    from pippin.bayes.likelihood import Regression
    from pippin.claims import _small_networks as small

    generator = torch.Generator().manual_seed(0)
    x, new = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (50, 20))
    sigma, precision = 0.3, 2.0
    y = x @ torch.randn(4, 1, generator=generator, dtype=torch.float64)
    y = y + sigma * torch.randn(50, 1, generator=generator, dtype=torch.float64)
    phi, phi_new = (torch.cat([part, torch.ones(len(part), 1, dtype=torch.float64)], 1) for part in (x, new))
    covariance = torch.linalg.inv(phi.T @ phi / sigma**2 + precision * torch.eye(5, dtype=torch.float64))
    weights = covariance @ phi.T @ y / sigma**2
    model = nn.Linear(4, 1).double()
    model.load_state_dict({"weight": weights[:4].T, "bias": weights[4]})
    fitted = Laplace(model.eval(), Regression(sigma), subset="all", structure="full", prior_precision=precision).fit(
        [(x, y)]
    )
    found = fitted(new)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(50, dtype=torch.float64),
        phi @ phi.T / precision + sigma**2 * torch.eye(50, dtype=torch.float64),
    )
    errors = {
        "mean": (found.mean - phi_new @ weights).abs().max(),
        "variance": (found.function_variance[:, 0] - (phi_new @ covariance * phi_new).sum(1)).abs().max(),
        "evidence": (fitted.log_marginal_likelihood() - marginal.log_prob(y[:, 0])).detach().abs(),
    }
    for name, error in errors.items():
        evidence.add(f"linear model, error of the {name}", float(error))
    net = small.perceptron((4, 8, 3), 0).double().eval()
    labels = torch.randint(3, (200,), generator=generator)
    inputs = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    full, kron = (_trace(net, structure, inputs, labels) for structure in ("full", "kron"))
    evidence.add("trace, Kronecker / full", kron / full)
    return all(float(error) < 1e-8 for error in errors.values()) and abs(kron / full - 1) < 0.02


def _trace(net: nn.Module, structure: str, x: Tensor, y: Tensor) -> float:
    import torch

    from pippin.bayes.laplace import Laplace

    fitted = Laplace(net, "classification", subset="all", structure=structure).fit([(x, y)])
    size = fitted.selection.size
    return float(fitted.posterior.quadratic(torch.eye(size, dtype=torch.float64)).sum()) - size


# --- digits and clothes -----------------------------------------------------------------------------------------------


def _network(name: str, world: World, number: int, size: Size, dropout: float = 0.0) -> tuple[nn.Module, float]:
    """A trained network, and the processor seconds that it took."""
    from pippin.claims import _small_networks as small

    if name == "digits":
        model = small.perceptron((64, 64, 64, 5), number, dropout)
        return model, small.train(model, *world.train, epochs=size.epochs, seed=number, precision=1.0)
    model = small.convolutional(number, dropout=dropout)
    epochs = size.clothes_epochs
    return model, small.train(model, *world.train, epochs=epochs, seed=number, batch=64, precision=1.0)


def _arms(evidence: Evidence, name: str, world: World, seed: int, size: Size) -> None:
    """Every arm of one world, with its cost."""
    import time

    from pippin.bayes.baselines import DeepEnsemble, MCDropout, PlainNetwork
    from pippin.bayes.laplace import Laplace
    from pippin.bayes.likelihood import Classification
    from pippin.bayes.swag import SWAG, SWAGConfig
    from pippin.bayes.temperature import TemperatureScaling
    from pippin.claims import _small_networks as small

    trained = [_network(name, world, 100 * seed + member, size) for member in range(size.members)]
    network, training = trained[0]
    dropped, dropping = _network(name, world, 100 * seed + 99, size, dropout=0.2)
    data, held = small.batches(*world.train), small.batches(*world.tune)
    swag_data = small.batches(*world.train, size=64)
    makers: dict[str, tuple[float, Any]] = {
        "network": (training, lambda: PlainNetwork(network)),
        "temperature": (training, lambda: TemperatureScaling(PlainNetwork(network)).fit(held)),
        "ensemble": (sum(seconds for _, seconds in trained), lambda: DeepEnsemble([model for model, _ in trained])),
        "dropout": (dropping, lambda: MCDropout(dropped, samples=30)),
        "SWAG": (training, lambda: SWAG(network, Classification(), SWAGConfig(snapshots=10, rank=10)).fit(swag_data)),
        "Laplace": (training, lambda: Laplace(network, "classification").fit(data).tune()),
        "Laplace, full EF": (
            training,
            lambda: Laplace(network, "classification", structure="full", curvature="ef").fit(data).tune(),
        ),
        "Laplace, precision by held-out loss": (
            training,
            lambda: Laplace(network, "classification").fit(data).tune("grid", validation=held),
        ),
    }
    for arm, (before, make) in makers.items():
        began = time.process_time()
        predictor = make()
        extra = time.process_time() - began
        cost = extra / training if arm.startswith("Laplace") else (before + extra) / training
        evidence.add(f"{name}, cost in trainings, {arm}", cost, seed=seed)
        _note(evidence, name, arm, predictor, world, seed)


def _note(evidence: Evidence, name: str, arm: str, predictor: Predictor, world: World, seed: int) -> None:
    from pippin.claims import _small_networks as small

    for what, value in small.scores(predictor, world).items():
        evidence.add(f"{name}, {what}, {arm}", value, seed=seed, unit="nats" if what.startswith("loss") else "")


# --- the ranking ------------------------------------------------------------------------------------------------------


def _ranking(evidence: Evidence, seed: int, size: Size) -> None:
    """Evidence against test loss: five weight decays at their own precision, five widths at the tuned one."""
    from pippin.bayes import metrics
    from pippin.bayes.baselines import PlainNetwork
    from pippin.bayes.laplace import Laplace
    from pippin.claims import _small_networks as small

    world = small.digits(seed)
    data = small.batches(*world.train)
    for kind, values in (("weight decays", DECAYS), ("widths", WIDTHS)):
        evidences, losses = [], []
        for value in values:
            width, precision = (16, value) if kind == "weight decays" else (int(value), 1.0)
            model = small.perceptron((64, width, 5), 10 * seed + 7)
            small.train(model, *world.train, epochs=size.epochs, seed=seed, lr=3e-3, precision=precision)
            fitted = Laplace(model, "classification", subset="all", structure="full", prior_precision=precision).fit(
                data
            )
            if kind == "widths":
                fitted.tune()
            evidences.append(float(fitted.log_marginal_likelihood()))
            losses.append(metrics.nll(small.chances(PlainNetwork(model), world.test[0]), world.test[1]))
            evidence.add(f"evidence, {kind} {value:g}", evidences[-1], seed=seed, unit="nats")
            evidence.add(f"test loss, {kind} {value:g}", losses[-1], seed=seed, unit="nats")
        evidence.add(f"rank correlation of evidence and test loss, {kind}", _spearman(evidences, losses), seed=seed)


def _spearman(first: list[float], second: list[float]) -> float:
    from scipy.stats import spearmanr

    found = float(spearmanr(first, second).statistic)
    return found if math.isfinite(found) else 0.0


# --- tables -----------------------------------------------------------------------------------------------------------


def _tables(evidence: Evidence, seed: int, size: Size) -> None:
    """The mean over the tables of every loss."""
    found = [_table(evidence, table, seed, size) for table in size.tables]
    for name in found[0]:
        evidence.add(f"tables, {name}", sum(one[name] for one in found) / len(found), seed=seed, unit="nats")


def _table(evidence: Evidence, name: str, seed: int, size: Size) -> dict[str, float]:
    """A regression on random rows and with the middle of one column left out."""
    import torch

    from pippin.bayes import metrics
    from pippin.bayes.laplace import Laplace
    from pippin.bayes.likelihood import Regression
    from pippin.claims import _small_networks as small
    from pippin.data import tables

    table = tables.load(name)
    columns = [i for i in range(table.x.shape[1]) if len(table.x[:, i].unique()) > 10] or [0]
    splits = {
        "": tables.split(table, 0.8, seed=seed),
        " in the gap": tables.gap_split(table, columns[seed % len(columns)]),
    }
    losses: dict[str, float] = {}
    for where, parts in splits.items():
        x, y = parts.train.x.float(), parts.train.y.float()[:, None]
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        kept, held = order[len(x) // 10 :], order[: len(x) // 10]
        model = small.perceptron((x.shape[1], 50, 1), seed)
        small.train(model, x[kept], y[kept], epochs=size.table_epochs, seed=seed, lr=1e-2, precision=0.05)
        with torch.no_grad():
            noise = float((model(x[held]) - y[held]).square().mean().sqrt())
        fitted = Laplace(model, Regression(noise), subset="all", structure="full").fit(small.batches(x[kept], y[kept]))
        found = fitted.tune()(parts.test.x.float())
        target = parts.test.y.float()[:, None]
        for arm, variance in (("network", torch.full_like(found.mean, noise**2)), ("Laplace", found.variance)):
            loss = losses[f"loss{where}, {arm}"] = metrics.gaussian_nll(found.mean, variance, target)
            evidence.add(f"{name}, loss{where}, {arm}", loss, seed=seed, unit="nats")
            inside = metrics.interval_coverage(found.mean, variance, target)
            evidence.add(f"{name}, inside the 95 % interval{where}, {arm}", inside, seed=seed)
    return losses


# --- CIFAR-10 ---------------------------------------------------------------------------------------------------------


def _pictures(evidence: Evidence, size: Size) -> None:
    """The last layer of a ResNet-56 that others trained; seeds cut the test pictures into two halves."""
    import torch
    from torch import nn

    from pippin.bayes.baselines import PlainNetwork
    from pippin.bayes.laplace import Laplace
    from pippin.bayes.temperature import TemperatureScaling
    from pippin.claims import _small_networks as small
    from pippin.claims._cifar_classifiers import resnet56
    from pippin.data import images

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = resnet56().to(device)
    n = size.pictures
    own = images.load("cifar-10", split="train", limit=n)
    rest = images.load("cifar-10", split="test", limit=n)
    foreign = images.load("fashion-mnist", split="test", limit=n // 2, size=32, channels=3)
    assert own.labels is not None
    assert rest.labels is not None
    labels = rest.labels
    noise = torch.randn(rest.images.shape, generator=torch.Generator().manual_seed(0))
    noisy = (rest.images.float() / 255 + 0.08 * noise).clamp(0, 1)
    x, test, other = (_features(network, part.images.float() / 255) for part in (own, rest, foreign))
    shifted = _features(network, noisy)
    far = _features(network, 100 * torch.randn(200, 3, 32, 32, generator=torch.Generator().manual_seed(1)))
    head = nn.Linear(64, 10)
    head.load_state_dict(network.linear.state_dict())
    head.eval()
    data = small.batches(x, own.labels)
    share = min(1.0, n / 45_000)  # of the training pictures that the curvature is summed over
    for seed in size.seeds:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        tune, half = order[: n // 2], order[n // 2 :]
        world = small.World(
            (x, own.labels), (test[tune], labels[tune]), (test[half], labels[half]), (shifted[half], labels[half]),
            other, far, 10,
        )  # fmt: skip
        held = small.batches(*world.tune)
        arms: dict[str, Any] = {
            "network": PlainNetwork(head),
            "temperature": TemperatureScaling(PlainNetwork(head)).fit(held),
            "Laplace": Laplace(head, "classification", temperature=share).fit(data).tune(),
            "Laplace, full EF": Laplace(
                head, "classification", structure="full", curvature="ef", temperature=share
            ).fit(data).tune(),
            "Laplace, precision by held-out loss": Laplace(head, "classification", temperature=share)
            .fit(data)
            .tune("grid", validation=held),
        }  # fmt: skip
        for arm, predictor in arms.items():
            _note(evidence, "CIFAR-10", arm, predictor, world, seed)


def _features(network: nn.Module, pictures: Tensor) -> Tensor:
    """What the last layer of a network gets to see."""
    import torch

    seen: list[Tensor] = []
    hook = network.linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].cpu()))  # type: ignore[union-attr]
    device = next(network.parameters()).device
    with torch.inference_mode():
        for part in pictures.split(250):
            network(part.to(device))
    hook.remove()
    return torch.cat(seen).clone()
