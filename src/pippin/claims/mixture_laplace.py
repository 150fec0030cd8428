"""Mixtures of Laplace approximations far from the data, under a shift, on foreign classes, and what they cost nearby.

Notable here:
- plain network, ensemble, Laplace and mixture come from the same checkpoints: what differs is what is made of them
- the precision of the prior is a dial between the ensemble and a very unsure mixture: its whole range is measured
- what gets worse, the calibration error on data like that of training, stands in the same table
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from pippin.bayes.predictors import Predictor
    from pippin.claims._small_networks import World


@dataclass(frozen=True)
class Size:
    """How much is trained: seeds, networks of an ensemble, epochs; then pictures of clothes and epochs on them."""

    seeds: tuple[int, ...]
    members: int
    epochs: int
    clothes: int
    clothes_epochs: int
    clothes_test: int


SIZES = {
    "smoke": Size((0,), 2, 15, 0, 0, 0),
    "laptop": Size((0, 1, 2), 5, 60, 6_000, 12, 2_000),
    "gpu": Size((0, 1, 2, 3, 4), 5, 60, 50_000, 30, 10_000),
}
PRECISIONS = (1e-1, 1.0, 1e1, 1e2, 1e3, 1e4)
"""Prior precisions of the sweep, the same for every member."""


@claim(
    id="mixture-laplace",
    source="arXiv:2111.03577",
    paper="a mixture of Laplace approximations around the networks of a deep ensemble is a post-hoc step of little "
    "cost that mitigates overconfidence far away from the training data and compares favourably on standard "
    "uncertainty benchmarks",
    setting="digits of scikit-learn: 300 pictures of 0 to 4, 5 perceptrons 64-64-64-5 without weight decay, last-layer "
    "full GGN, prior precision by evidence; shift: test pictures turned by 60 degrees; foreign: digits 5 to 9; far: "
    "N(0, 1) times 100. Fashion-MNIST (6,000 pictures, 5 convolutional networks with a prior, last-layer Kronecker) "
    "with MNIST as foreign. 3 seeds; a sweep of the precision from 0.1 to 10,000, and the precision by the likelihood "
    "of 150 held-out pictures",
    accept="digits, means over 3 seeds: confidence far away of the mixture at least 0.1 below the ensemble's, which is "
    "below the single network's; likelihood on turned digits at least 30 % lower in nats than the ensemble's; AUROC of "
    "foreign digits by the largest probability no more than 0.005 below the ensemble's and the single Laplace's; "
    "accuracy within 0.01 of the ensemble's. Clothes: confidence far away at least 0.1 below the ensemble's, loss on "
    "turned clothes below the ensemble's, AUROC against MNIST not more than 0.005 below the ensemble's. Both: a "
    "mixture of one is its component to 1e-6, and at a precision of 1e12 the mixture is the ensemble to 1e-4. Clothes: "
    "fitting the mixture costs at most a fifth of the processor time of training its networks, and predicting with it "
    "at most 3 times that of the "
    "ensemble. The calibration error on test data, which is expected to rise, is reported for every arm",
)
def run(scale: Scale) -> Evidence:
    """Digits, then clothes, for each seed."""
    from pippin.claims import _small_networks as small

    evidence, size = Evidence(), SIZES[scale.name]
    if size.clothes and not small.available("fashion-mnist", "mnist"):
        size = replace(size, clothes=0)
    exact = []
    warm = small.digits(0)  # the first training loads and compiles what later ones find ready
    small.train(small.perceptron((64, 8, 5), 0), *warm.train, epochs=1, seed=0)
    for seed in size.seeds:
        exact.append(_arms(evidence, "digits", small.digits(seed), seed, size))
        if size.clothes:
            world = small.clothes(seed, size.clothes, size.clothes_test).on(small.device_for(scale.name))
            exact.append(_arms(evidence, "clothes", world, seed, size))
    mean = evidence.mean

    def gap(what: str, first: str, second: str) -> float:
        return mean(f"{what}, {first}") - mean(f"{what}, {second}")

    rules = {
        "far": gap("digits, confidence far away", "ensemble", "mixture") >= 0.1,
        "far_order": gap("digits, confidence far away", "ensemble", "one network") < 0,
        "shift": mean("digits, loss turned, mixture") <= 0.7 * mean("digits, loss turned, ensemble"),
        "foreign": gap("digits, AUROC of foreign", "mixture", "ensemble") >= -0.005
        and gap("digits, AUROC of foreign", "mixture", "Laplace") >= -0.005,
        "accuracy": abs(gap("digits, accuracy", "mixture", "ensemble")) <= 0.01,
        "limits": all(exact),
    }
    if size.clothes:
        rules |= {
            "clothes_far": gap("clothes, confidence far away", "ensemble", "mixture") >= 0.1,
            "clothes_shift": gap("clothes, loss turned", "mixture", "ensemble") < 0,
            "clothes_foreign": gap("clothes, AUROC of foreign", "mixture", "ensemble") >= -0.005,
            "cost": mean("clothes, fit of the mixture / training") <= 0.2
            and mean("clothes, prediction of the mixture / ensemble") <= 3.0,
        }
    return evidence.accept(**rules)


def _networks(name: str, world: World, seed: int, size: Size) -> tuple[list[Any], float]:
    """The trained networks and the seconds of processor time that they took."""
    from pippin.claims import _small_networks as small

    networks, seconds = [], 0.0
    for member in range(size.members):
        number = 100 * seed + member
        if name == "digits":
            network = small.perceptron((64, 64, 64, 5), number)
            seconds += small.train(network, *world.train, epochs=size.epochs, seed=number)
        else:
            network = small.convolutional(number)
            epochs = size.clothes_epochs
            seconds += small.train(network, *world.train, epochs=epochs, seed=number, batch=64, precision=1.0)
        networks.append(network)
    return networks, seconds


def _arms(evidence: Evidence, name: str, world: World, seed: int, size: Size) -> bool:
    """Every arm of one world; whether the two exact limits hold."""
    import time

    from pippin.bayes.baselines import DeepEnsemble, PlainNetwork
    from pippin.bayes.mixture import LaplaceMixture
    from pippin.bayes.temperature import TemperatureScaling
    from pippin.claims import _small_networks as small

    networks, training = _networks(name, world, seed, size)
    data = small.batches(*world.train)
    structure = "full" if name == "digits" else "kron"
    ensemble = DeepEnsemble(networks)
    began = time.process_time()
    mixture = LaplaceMixture.from_models(networks, data, structure=structure)
    evidence.add(f"{name}, fit of the mixture / training", (time.process_time() - began) / training, seed=seed)
    ratio = _seconds(mixture, world) / _seconds(ensemble, world)
    evidence.add(f"{name}, prediction of the mixture / ensemble", ratio, seed=seed)
    arms: dict[str, Predictor] = {
        "one network": PlainNetwork(networks[0]),
        "Laplace": mixture.components[0],
        "ensemble": ensemble,
        "mixture": mixture,
    }
    for arm, predictor in arms.items():
        _measure(evidence, name, arm, predictor, world, seed)
    found = [float(one.prior_precision.mean()) for one in mixture.components]
    evidence.add(f"{name}, precision by evidence", sum(found) / len(found), seed=seed)
    test = world.test[0]
    alone = small.chances(LaplaceMixture(mixture.components[:1]), test) - small.chances(arms["Laplace"], test)
    kept = [one.prior_precision for one in mixture.components]
    for precision in PRECISIONS:
        _set(mixture, precision)
        _measure(evidence, name, f"mixture at {precision:g}", mixture, world, seed)
    _set(mixture, 1e12)
    apart = float((small.chances(mixture, test) - small.chances(ensemble, test)).abs().max())
    mixture.tune(small.batches(*world.tune), "prior")
    _measure(evidence, name, "mixture, precision by held-out loss", mixture, world, seed)
    _set(mixture, *kept)
    mixture.tune(small.batches(*world.tune), "temperature")
    _measure(evidence, name, "mixture, evidence and temperature", mixture, world, seed)
    warmed = TemperatureScaling(ensemble).fit(small.batches(*world.tune))
    _measure(evidence, name, "ensemble and temperature", warmed, world, seed)
    evidence.add(f"{name}, mixture of one from its component", float(alone.abs().max()), seed=seed)
    evidence.add(f"{name}, mixture without variance from the ensemble", apart, seed=seed)
    return float(alone.abs().max()) < 1e-6 and apart < 1e-4


def _set(mixture: Any, *precisions: Any) -> None:
    """Give every member its prior precision, or all of them one."""
    for number, component in enumerate(mixture.components):
        component.prior_precision = precisions[number % len(precisions)]


def _seconds(predictor: Predictor, world: World) -> float:
    """Processor time of predicting the test inputs, the best of three."""
    import time

    times = []
    for _ in range(3):
        began = time.process_time()
        predictor(world.test[0])
        times.append(time.process_time() - began)
    return max(min(times), 1e-6)


def _measure(evidence: Evidence, name: str, arm: str, predictor: Predictor, world: World, seed: int) -> None:
    """Scores on test, turned, foreign and far inputs."""
    from pippin.claims import _small_networks as small

    for what, value in small.scores(predictor, world).items():
        unit = "nats" if what.startswith("loss") else ""
        evidence.add(f"{name}, {what}, {arm}", value, seed=seed, unit=unit)
