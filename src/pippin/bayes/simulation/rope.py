r"""Robust posterior estimation (RoPE): calibrated posteriors under misspecified simulators.

Notable here:
- real observations are out of distribution for a network trained on simulations; they are coupled with simulations by
  optimal transport, and each posterior is the mixture of the posteriors of simulations with the plan's weights
- a few real observations with measured parameters fine-tune a copy of the encoder, which is optional
- the posterior of a new observation reuses the potentials of a stored batch: its weights are the row update of the
  solver, so an observation of that batch has the same posterior again
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt, Le
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes.simulation.npe import NPE, BestWeights, NPEConfig, Simulator, observations
from pippin.bayes.simulation.priors import SimulatorPrior
from pippin.bayes.transport.sinkhorn import TransportPlan, row_weights, semibalanced_sinkhorn
from pippin.core.checks import OpenFraction, PositiveFloat, PositiveInt, checked
from pippin.core.errors import CorruptedFile, InferenceAtRisk, InvalidArgument, InvalidInput, NotFitted
from pippin.core.formats import checkpoint
from pippin.data.streams import Shuffled
from pippin.train import AdamW, ConstantSchedule, Loss, Trainer
from pippin.train.result import TrainingResult

_TUNED, _NPE, _REFERENCE = "tuned.", "npe.", "reference."


@dataclass(frozen=True)
class MixturePosterior:
    r"""$p(\theta | x_i) = \sum_j \alpha_{ij}\, p_\phi(\theta | x_j^{sim})$ for n real and m simulated observations.

    Attributes:
        npe: the posterior estimator of the components.
        features: features of the m simulations [m, l].
        log_weights: log alpha [n, m]; each row of alpha sums to 1.
        cost: mean distance between features of real and simulated observations, the scale of gamma.
        transport: the transport plan; None for new observations that reuse one.
    """

    npe: NPE
    features: Float[Tensor, "m l"]
    log_weights: Float[Tensor, "n m"]
    cost: float
    transport: TransportPlan | None = None

    @property
    def coupling(self) -> Float[Tensor, "n m"]:
        """The transport plan, with mass 1/n in each row."""
        return self.log_weights.exp() / len(self.log_weights)

    @property
    def effective_simulations(self) -> Float[Tensor, " n"]:
        """Effective number of simulations of each posterior: the exponential of the entropy of its weights, 1 to m."""
        return (-(self.log_weights.exp() * self.log_weights.clamp_min(-1e9)).sum(-1)).exp()

    def log_prob(self, theta: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Log density of one theta for each observation, in units of theta.

        Raises:
            InvalidInput: theta of another shape.
        """
        self._check(theta)
        return self.from_pairs(self.npe.log_prob_pairs(theta, self.features))

    def from_pairs(self, pairs: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
        """`log_prob` from log densities of the components (`NPE.log_prob_pairs`), which can be shared in a batch."""
        return (self.log_weights + pairs.to(self.log_weights)).logsumexp(-1).float()

    @checked
    def sample(self, n: PositiveInt, generator: torch.Generator | None = None) -> Float[Tensor, "samples n k"]:
        """``n`` samples of each posterior: a simulation by its weight, then a sample of its component.

        Args:
            n: number of samples.
            generator: source of randomness on the CPU; None takes one with seed 0.
        """
        generator = generator or torch.Generator().manual_seed(0)
        component = torch.multinomial(self.log_weights.exp().cpu(), n, replacement=True, generator=generator).mT
        features = self.features[component.flatten().to(self.features.device)]  # (n * observations, l)
        return self.npe.sample_from_features(1, features, generator)[0].view(n, len(self.log_weights), -1)

    def component_samples(
        self, num_samples: int = 100, generator: torch.Generator | None = None
    ) -> Float[Tensor, "samples m k"]:
        """Samples of each component, for `ranks`; posteriors of one batch may share them."""
        return self.npe.sample_from_features(num_samples, self.features, generator)

    def ranks(self, theta: Float[Tensor, "n k"], samples: Float[Tensor, "samples m k"]) -> Float[Tensor, "n k"]:
        """Posterior mass below each parameter, for `pippin.bayes.simulation.metrics.acauc`.

        The weights are exact; only the components are approximated by samples.

        Raises:
            InvalidInput: theta of another shape.
        """
        self._check(theta)
        alpha, theta = self.log_weights.exp(), theta.to(samples)
        columns = []
        for index in range(theta.shape[1]):
            ordered = samples[..., index].mT.sort(-1).values.contiguous()  # (m, samples)
            below = torch.searchsorted(ordered, theta[:, index].expand(len(ordered), -1).contiguous())  # (m, n)
            columns.append((alpha * (below.mT / ordered.shape[1]).to(alpha)).sum(-1))
        return torch.stack(columns, -1).float()

    def _check(self, theta: Tensor) -> None:
        """Refuse parameters of another shape, or that are not finite."""
        expected = (len(self.log_weights), len(self.npe.support))
        if tuple(theta.shape) != expected or not theta.isfinite().all():
            raise InvalidInput(f"theta of shape {list(theta.shape)}; give finite values of shape {list(expected)}")


@dataclass(frozen=True)
class RobustPosteriorConfig:
    """The config of a saved estimation.

    Attributes:
        npe: config of the neural posterior.
        gamma, tau: see `RobustPosteriorEstimation`.
        tuned: whether a fine-tuned copy of the encoder is saved.
    """

    npe: NPEConfig
    gamma: PositiveFloat
    tau: Annotated[float, Gt(0), Le(1)]
    tuned: bool


class RobustPosteriorEstimation:
    r"""RoPE: neural posterior estimation, fine-tuning, and optimal transport between real and simulated observations.

    It assumes that a real observation is independent of theta given its simulation.

    Args:
        npe: a fitted posterior.
        gamma: weight of the entropy of the plan, in units of distances between features; usually 0.1 to 1. A smaller
            one makes posteriors sharper, and too small a one overconfident; from about 5 they are the prior.
        tau: 1 for a balanced plan; 0.9 if the distribution of real parameters may differ from the prior.

    Attributes:
        tuned: the fine-tuned copy of the encoder for real observations; None before `calibrate`, in which case the
            encoder of ``npe`` is used.

    Raises:
        InvalidArgument: ``npe`` is not an `NPE`.
        NotFitted: the posterior is not fitted.

    Source: Wehenkel et al. 2024, arXiv:2405.08719, section 3 and algorithm 1.
    """

    model_type: ClassVar[str] = "pippin_robust_posterior"

    @checked
    def __init__(self, npe: NPE, gamma: PositiveFloat = 0.5, tau: Annotated[float, Gt(0), Le(1)] = 1.0) -> None:
        if not isinstance(npe, NPE):
            raise InvalidArgument(f"npe must be a fitted NPE, got {type(npe).__name__}")
        if npe.flow is None:
            raise NotFitted("the posterior is not fitted; call npe.fit() first")
        self.npe, self.gamma, self.tau = npe, float(gamma), float(tau)
        self.tuned: nn.Module | None = None
        self._reference: tuple[Tensor, Tensor] | None = None

    # --- calibration ----------------------------------------------------------------------------------------------

    @checked
    def calibrate(
        self,
        theta: Float[Tensor, "n k"],
        x: Float[Tensor, "n ..."],
        *,
        simulator: Simulator | None = None,
        num_simulations: PositiveInt = 16,
        validation: OpenFraction = 0.2,
        steps: PositiveInt = 600,
        batch_size: PositiveInt = 100,
        lr: PositiveFloat = 1e-4,
        seed: int = 0,
    ) -> TrainingResult:
        r"""Fine-tune a copy of the encoder on real observations with measured parameters.

        Minimizes $\sum_i \| g(x_i) - \mathbb E\, h(S(\theta_i)) \|$; the weights that are best on held-out observations
        are used, including the initial ones. An encoder without weights is followed by a linear layer, initially the
        identity.

        Args:
            theta: measured parameters.
            x: their real observations.
            simulator: None for that of `NPE.fit`, or for its stored simulations nearest in theta.
            num_simulations: number of simulations of each theta, whose mean features are the target.
            validation: fraction of observations that is held out, at least one of them.
            steps: number of updates.
            batch_size: observations per update.
            lr: learning rate of AdamW, without weight decay.
            seed: seed of simulations, of the held-out observations and of the order.

        Returns:
            The training history.

        Raises:
            InvalidArgument: no simulator, and no stored simulations.
            InvalidInput: fewer than two rows, parameters outside the prior, or observations that are not finite.
        """
        self.npe.support.check(theta)
        if len(theta) < 2:
            raise InvalidInput(
                f"a calibration set of {len(theta)} rows cannot be split; give 10 or more, or leave calibrate() out"
            )
        x = observations(x, len(theta), self.npe.shape, "x")
        target = self._targets(theta.float(), simulator, num_simulations, torch.Generator().manual_seed(seed))
        order = torch.randperm(len(theta), generator=torch.Generator().manual_seed(seed))
        cut = max(1, round(validation * len(theta)))
        return self._tune(x, target, order[:cut], order[cut:].tolist(), steps, batch_size, lr, seed)

    def _tune(
        self,
        x: Tensor,
        target: Tensor,
        held_out: Tensor,
        train_rows: list[int],
        steps: int,
        batch_size: int,
        lr: float,
        seed: int,
    ) -> TrainingResult:
        """Fine-tune on ``train_rows``, and use the weights that are best on the rows ``held_out``."""
        tuned = _tunable_copy(self.npe).requires_grad_(True)

        def distance(model: nn.Module, rows: Tensor) -> Tensor:
            norm: Tensor = (self.npe.encode(x[rows], model) - target[rows].to(self.npe.center)).norm(dim=-1)
            return norm

        def objective(model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
            return Loss(distance(model, batch.cpu()).sum(), len(batch))

        @torch.no_grad()
        def score(model: nn.Module) -> float:
            return float(distance(model.eval(), held_out).mean())

        best = BestWeights(score)
        best(tuned)
        trainer = Trainer(
            tuned,
            objective,
            Shuffled(train_rows, min(batch_size, len(train_rows)), seed=seed, collate=torch.tensor),
            steps=steps,
            optimizer=AdamW(lr=lr, weight_decay=0.0),
            schedule=ConstantSchedule(),
            seed=seed,
            show_progress=False,
        )
        while trainer.step < steps and trainer.advance(max(1, steps // 40)):
            best(tuned)
        best.restore(tuned)
        self.tuned, self._reference = tuned.requires_grad_(False).eval(), None
        return trainer.result

    @torch.no_grad()
    def _targets(self, theta: Tensor, simulator: Simulator | None, count: int, generator: torch.Generator) -> Tensor:
        """Mean features of ``count`` simulations of each theta: (n, l)."""
        simulator = simulator or self.npe.simulator
        if simulator is not None:
            repeated = theta.repeat_interleave(count, 0)
            x = observations(simulator(repeated, generator), len(repeated), self.npe.shape, "the simulator's x")
            return self.npe.encode(x).view(len(theta), count, -1).mean(1)
        if self.npe.stored is None:
            raise InvalidArgument("there is nothing to simulate with; give a simulator")
        stored, x = self.npe.stored
        distance = torch.cdist(self._free(theta), self._free(stored))
        nearest = distance.topk(min(count, len(stored)), largest=False).indices  # (n, count)
        return self.npe.encode(x[nearest.flatten().cpu()]).view(*nearest.shape, -1).mean(1)

    def _free(self, theta: Tensor) -> Tensor:
        """Parameters in unbounded space."""
        return self.npe.support.free(theta.to(self.npe.center))[0]

    # --- posteriors -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n l"]:
        """Features of real observations, by the fine-tuned encoder if there is one.

        Raises:
            InvalidInput: observations of another shape, or that are not finite.
        """
        return self.npe.encode(x, self.tuned)

    def posterior(
        self,
        x: Float[Tensor, "n ..."],
        *,
        simulations: int | Float[Tensor, "m ..."] | None = None,
        simulator: Simulator | None = None,
        seed: int = 0,
        tolerance: float = 1e-6,
    ) -> MixturePosterior:
        r"""The posterior of each real observation of a batch, from a transport plan over the batch (transductive).

        The plan's potentials are stored, so that `inductive_posterior` can use them for new observations.

        Args:
            x: all real observations; their parameters should be distributed like the prior.
            simulations: number of simulations of the plan, or their observations; None for 2,000. Use many more than
                $e^{LPP_{sim} - LPP_{prior}}$, or sharp components leave gaps between them.
            simulator: see `calibrate`.
            seed: seed of the simulations.
            tolerance: tolerance of the plan's columns, see `semibalanced_sinkhorn`.

        Raises:
            InvalidArgument: a single observation with a balanced plan, whose posterior would be the prior.
            InvalidInput: observations that are not finite or of another shape.
            NotConverged: the plan did not reach the tolerance.

        Warns:
            InferenceAtRisk: the median effective number of simulations of a posterior is below 5.
        """
        real = self.encode(x).double()
        if len(real) == 1 and self.tau == 1:
            raise InvalidArgument(
                "a balanced plan of one observation gives the prior; give a batch and then use inductive_posterior, or "
                "set tau below 1"
            )
        features = self._simulated(simulations, simulator, torch.Generator().manual_seed(seed))
        cost = torch.cdist(real, features.double())
        transport = semibalanced_sinkhorn(cost, self.gamma, self.tau, tolerance=tolerance)
        self._reference = (features, transport.columns)
        return self._mixture(features, row_weights(cost, transport.columns, self.gamma), cost, transport)

    def inductive_posterior(self, x: Float[Tensor, "n ..."]) -> MixturePosterior:
        """The posterior of new observations by the stored potentials of the last `posterior`.

        Args:
            x: real observations, at least one.

        Raises:
            InvalidInput: observations that are not finite or of another shape.
            NotFitted: before `posterior` was called.

        Warns:
            InferenceAtRisk: as `posterior`.
        """
        real = self.encode(x).double()
        if self._reference is None:
            raise NotFitted("no batch is stored yet; call posterior(batch) first")
        features, columns = self._reference
        cost = torch.cdist(real, features.double())
        return self._mixture(features, row_weights(cost, columns, self.gamma), cost, None)

    def _mixture(
        self, features: Tensor, log_weights: Tensor, cost: Tensor, transport: TransportPlan | None
    ) -> MixturePosterior:
        """The mixture posterior, with a warning if it rests on few simulations."""
        posterior = MixturePosterior(self.npe, features, log_weights, float(cost.mean()), transport)
        effective = float(posterior.effective_simulations.median())
        if effective < min(5, len(features)):
            warnings.warn(
                f"a posterior rests on {effective:.1f} simulations (median): gamma {self.gamma:g} is small for a mean "
                f"distance of {posterior.cost:.3g}, and posteriors may be overconfident; raise gamma or simulate more",
                InferenceAtRisk,
                stacklevel=3,
            )
        return posterior

    @torch.no_grad()
    def _simulated(
        self, simulations: int | Tensor | None, simulator: Simulator | None, generator: torch.Generator
    ) -> Tensor:
        """Features of the simulations of a plan."""
        if isinstance(simulations, Tensor):
            return self.npe.encode(simulations)
        count = 2000 if simulations is None else simulations
        if count < 2:
            raise InvalidArgument(f"{count} simulations; give 2 or more, best 2,000")
        simulator = simulator or self.npe.simulator
        if simulator is not None:
            return self.npe.encode(self.npe.simulate(count, simulator, generator)[1])
        if self.npe.stored is None:
            raise InvalidArgument("there is nothing to simulate with; give a simulator or simulations")
        stored = self.npe.stored[1]
        return self.npe.encode(stored[torch.randperm(len(stored), generator=generator)[:count]])

    # --- files ----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the posterior, the fine-tuned encoder and the stored potentials to a folder that `load` reads.

        Raises:
            DiskFull: nothing was written.
        """
        tensors = {_NPE + name: tensor for name, tensor in self.npe.state_dict().items()}
        if self.tuned is not None:
            tensors |= {_TUNED + name: tensor for name, tensor in self.tuned.state_dict().items()}
        if self._reference is not None:
            tensors |= dict(zip((_REFERENCE + "features", _REFERENCE + "columns"), self._reference, strict=True))
        config = RobustPosteriorConfig(self.npe.describe(), self.gamma, self.tau, self.tuned is not None)
        checkpoint.save(tensors, path, model_type=self.model_type, config=config)

    @classmethod
    def load(
        cls, path: str | Path, prior: SimulatorPrior, encoder: nn.Module | None = None
    ) -> RobustPosteriorEstimation:
        """Read a folder that `save` wrote, with the same prior and the same encoder architecture.

        The simulator is not saved: give it to `posterior` for a new batch; `inductive_posterior` does not need it.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: the folder holds another kind of model.
            CorruptedFile: a file is damaged, or the tensors do not fit the prior or the encoder.
        """
        saved = checkpoint.open_model(path, model_type=cls.model_type, config_type=RobustPosteriorConfig)
        config, stored = saved.config, saved.checkpoint
        npe = NPE.restore(config.npe, stored.tensors(_NPE), prior, encoder, where=str(path))
        estimation = cls(npe, config.gamma, config.tau)
        if config.tuned:
            estimation.tuned = _tunable_copy(npe)
            try:
                estimation.tuned.load_state_dict(stored.tensors(_TUNED))
            except RuntimeError as error:
                raise CorruptedFile(f"{path}: no robust posterior of this prior and encoder: {error}") from error
            estimation.tuned.requires_grad_(False).eval()
        reference = stored.tensors(_REFERENCE)
        if reference:
            estimation._reference = (reference["features"], reference["columns"])
        return estimation


def _tunable_copy(npe: NPE) -> nn.Module:
    """A copy of the encoder; one without weights is followed by a linear layer, initially the identity."""
    encoder = copy.deepcopy(npe.encoder)
    if any(True for _ in encoder.parameters()):
        return encoder
    features = npe.describe().features
    linear = nn.utils.skip_init(nn.Linear, features, features, device=npe.center.device)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(features))
        linear.bias.zero_()
    return nn.Sequential(encoder, linear)
