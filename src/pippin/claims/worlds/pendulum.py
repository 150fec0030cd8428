"""A pendulum that is damped in reality but not in its simulator, and the scores of every inference method.

Notable here:
- task C of arXiv:2405.08719: frequency and amplitude from a noisy series with a random phase; only the real amplitude
  decays
- every method uses the same encoder, and all transport plans of a seed share one set of simulations, so that only the
  method differs
- density and calibration are always given together
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pippin.bayes.simulation.npe import NPE
    from pippin.bayes.simulation.rope import MixturePosterior, RobustPosteriorEstimation
    from pippin.claims import Evidence

LENGTH, SECONDS, NOISE = 100, 10.0, 0.5
BATCH, RATE = 128, 1e-3
LOW, HIGH = (0.0, 0.5), (3.0, 10.0)
"""Of frequency and amplitude."""


def pendulum(damping: float) -> Any:
    """Simulator of a pendulum whose amplitude decays at a random rate up to ``damping``; 0 for no damping."""
    import torch

    times = torch.linspace(0, SECONDS, LENGTH)

    def series(theta: Tensor, generator: torch.Generator) -> Tensor:
        phase = math.pi * (2 * torch.rand(len(theta), 1, generator=generator) - 1)
        decay = damping * torch.rand(len(theta), 1, generator=generator)
        clean = theta[:, 1:] * torch.cos(theta[:, :1] * times + phase) * torch.exp(-decay * times)
        return clean + NOISE * torch.randn(len(theta), LENGTH, generator=generator)

    return series


def network(seed: int, device: str) -> NPE:
    """A spline flow over features of a convolutional encoder of series."""
    import torch

    from pippin.bayes.simulation.npe import NPE, DensityEstimatorConfig, SeriesEncoder
    from pippin.bayes.simulation.priors import BoxPrior

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = SeriesEncoder(LENGTH, features=10, width=32)
    return NPE(BoxPrior(LOW, HIGH), encoder, DensityEstimatorConfig("spline"), seed=seed).to(device)


class Bench:
    """A fitted network, real observations with their parameters, and the simulations that all plans of a seed share."""

    def __init__(
        self, evidence: Evidence, seed: int, device: str, *, steps: int, real: int, simulations: int, draws: int
    ) -> None:
        import torch

        self.evidence, self.seed, self.draws = evidence, seed, draws
        self.generator = torch.Generator().manual_seed(9_000 + seed)
        self.reality, self.simulator = pendulum(1.0), pendulum(0.0)
        self.npe = network(seed, device)
        self.npe.fit(self.simulator, steps=steps, batch_size=BATCH, lr=RATE, seed=seed)
        self.theta = self.npe.prior.sample(real, self.generator)
        self.x = self.reality(self.theta, self.generator)
        self.simulated = self.npe.simulate(simulations, self.simulator, self.generator)[1]
        with torch.no_grad():
            features = self.npe.encode(self.simulated)
        self.pairs = self.npe.log_prob_pairs(self.theta, features)
        self.pool = self.npe.sample_from_features(draws, features, self.generator)

    def note(self, arm: str, log_probs: Tensor, ranks: Tensor, labels: tuple[int | str, ...]) -> None:
        """Record both scores of a method, for these numbers of labels or for a named setting."""
        from pippin.bayes.simulation.metrics import acauc, lpp

        for what in labels:
            name = f"{what} labels" if isinstance(what, int) else what
            value = lpp(log_probs.clamp_min(-1e6))
            self.evidence.add(f"LPP, {name}", value, arm=arm, seed=self.seed, unit="nats")
            self.evidence.add(f"ACAUC, {name}", acauc(ranks.cpu()), arm=arm, seed=self.seed)

    def network(self, arm: str, npe: NPE, x: Tensor, labels: tuple[int | str, ...], encoder: Any = None) -> None:
        """Record the scores of a network without transport."""
        import torch

        from pippin.bayes.simulation.metrics import posterior_ranks

        with torch.no_grad():
            features = npe.encode(x, encoder)
            log_probs = npe.log_prob_from_features(self.theta, features)
        sampled = npe.sample_from_features(self.draws, features, self.generator).cpu()
        self.note(arm, log_probs, posterior_ranks(sampled, self.theta), labels)

    def plan(
        self, rope: RobustPosteriorEstimation, arm: str, labels: tuple[int | str, ...], tolerance: float = 1e-6
    ) -> None:
        """Record the scores of the mixtures that a plan over the whole batch gives."""
        posterior = plan_posterior(rope, self.x, simulations=self.simulated, tolerance=tolerance)
        self.note(arm, posterior.from_pairs(self.pairs), posterior.ranks(self.theta, self.pool), labels)

    def misspecification(self) -> None:
        """Record the misspecification test on real data, and on simulations, where it must not reject."""
        from pippin.bayes.simulation.metrics import detect_misspecification
        from pippin.core.errors import Misspecified

        fair = self.simulator(self.theta, self.generator)
        for what, x in (("reality", self.x), ("simulations", fair)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Misspecified)
                found = detect_misspecification(self.npe, x, seed=self.seed)
            self.evidence.add(f"p-value, {what}", found.p_value, seed=self.seed)


def plan_posterior(
    rope: RobustPosteriorEstimation, x: Tensor, *, inductive: bool = False, **options: Any
) -> MixturePosterior:
    """A posterior by a transport plan; the warning about small gammas, which are swept on purpose, is silenced."""
    from pippin.core.errors import InferenceAtRisk

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferenceAtRisk)
        return rope.inductive_posterior(x) if inductive else rope.posterior(x, **options)
