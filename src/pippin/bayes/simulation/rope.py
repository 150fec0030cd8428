r"""Robust posterior estimation (RoPE): posteriors that stay calibrated though the simulator is wrong.

Notable here:
- real observations are not trusted to the network that learned from simulations; they are carried to simulations by an
  optimal transport plan, and each posterior is the plan's mixture of the posteriors of simulations
- a few real observations with measured parameters tune a copy of the encoder, so that the carrying knows what matters;
  without them the plan alone still works
- the posterior of one new observation reuses the plan of a stored batch: its row is the row update of the solver, so an
  observation of that batch gets the very posterior that it got there
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
        npe: gives the components.
        features: of the m simulations [m, l].
        log_weights: log alpha [n, m]; each row of alpha sums to 1.
        cost: mean distance between real and simulated observations: what gamma is to be compared with.
        transport: the solved problem; None for new observations that reuse one.
    """

    npe: NPE
    features: Float[Tensor, "m l"]
    log_weights: Float[Tensor, "n m"]
    cost: float
    transport: TransportPlan | None = None

    @property
    def coupling(self) -> Float[Tensor, "n m"]:
        """The plan: mass 1/n in each row."""
        return self.log_weights.exp() / len(self.log_weights)

    @property
    def effective_simulations(self) -> Float[Tensor, " n"]:
        """Simulations that carry each posterior: the exponential of the entropy of its weights, 1 to m."""
        return (-(self.log_weights.exp() * self.log_weights.clamp_min(-1e9)).sum(-1)).exp()

    def log_prob(self, theta: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Log density of one theta for each observation, in units of theta.

        Raises:
            InvalidInput: theta of another shape.
        """
        self._check(theta)
        return self.from_pairs(self.npe.log_prob_pairs(theta, self.features))

    def from_pairs(self, pairs: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
        """`log_prob` from what the components say (`NPE.log_prob_pairs`), which posteriors of one batch share."""
        return (self.log_weights + pairs.to(self.log_weights)).logsumexp(-1).float()

    @checked
    def sample(self, n: PositiveInt, generator: torch.Generator | None = None) -> Float[Tensor, "draws n k"]:
        """``n`` draws of each posterior: a simulation by its weight, then a draw of its component.

        Args:
            n: draws.
            generator: on the CPU; None begins at seed 0.
        """
        generator = generator or torch.Generator().manual_seed(0)
        chosen = torch.multinomial(self.log_weights.exp().cpu(), n, replacement=True, generator=generator).mT
        features = self.features[chosen.flatten().to(self.features.device)]
        return self.npe.sample_from_features(1, features, generator)[0].view(n, len(self.log_weights), -1)

    def component_samples(
        self, draws: int = 100, generator: torch.Generator | None = None
    ) -> Float[Tensor, "draws m k"]:
        """Draws of each component, for `ranks`; posteriors of one batch may share them."""
        return self.npe.sample_from_features(draws, self.features, generator)

    def ranks(self, theta: Float[Tensor, "n k"], pool: Float[Tensor, "draws m k"]) -> Float[Tensor, "n k"]:
        """Posterior mass below each parameter, for `pippin.bayes.simulation.metrics.acauc`.

        The weights enter exactly; only the components are represented by draws.

        Raises:
            InvalidInput: theta of another shape.
        """
        self._check(theta)
        alpha, theta = self.log_weights.exp(), theta.to(pool)
        columns = []
        for index in range(theta.shape[1]):
            draws = pool[..., index].mT.sort(-1).values.contiguous()
            below = torch.searchsorted(draws, theta[:, index].expand(len(draws), -1).contiguous())
            columns.append((alpha * (below.mT / draws.shape[1]).to(alpha)).sum(-1))
        return torch.stack(columns, -1).float()

    def _check(self, theta: Tensor) -> None:
        wanted = (len(self.log_weights), len(self.npe.support))
        if tuple(theta.shape) != wanted or not theta.isfinite().all():
            raise InvalidInput(f"theta of shape {list(theta.shape)}; give finite values of shape {list(wanted)}")


@dataclass(frozen=True)
class RobustPosteriorConfig:
    """What a saved estimation says beside its tensors.

    Attributes:
        npe: of the neural posterior.
        gamma, tau: of the plan.
        tuned: whether there is a tuned copy of the encoder.
    """

    npe: NPEConfig
    gamma: PositiveFloat
    tau: Annotated[float, Gt(0), Le(1)]
    tuned: bool


class RobustPosteriorEstimation:
    r"""Neural posterior estimation, a tuned copy of its encoder, and transport between real and simulated observations.

    Args:
        npe: fitted.
        gamma: weight of the entropy of the plan, in units of distances between features; 0.1 to 1. Less makes sharper
            posteriors and in the end over-confident ones, 5 and more gives the prior back.
        tau: 1 for a balanced plan; 0.9 where the prior of reality may differ from that of the simulations.

    Attributes:
        tuned: the copy of the encoder, None before `calibrate`: then both sides are read by the same encoder.

    Raises:
        InvalidArgument: ``npe`` is no `NPE`.
        NotFitted: the posterior was not fitted.

    Source: Wehenkel et al. 2024, arXiv:2405.08719, section 3 and algorithm 1. What the paper assumes is that a real
    observation tells nothing of theta beyond what its simulation tells.
    """

    model_type: ClassVar[str] = "pippin_robust_posterior"

    @checked
    def __init__(self, npe: NPE, gamma: PositiveFloat = 0.5, tau: Annotated[float, Gt(0), Le(1)] = 1.0) -> None:
        if not isinstance(npe, NPE):
            raise InvalidArgument(f"npe must be a fitted NPE, got {type(npe).__name__}")
        if npe.flow is None:
            raise NotFitted("the posterior was not fitted; call npe.fit() first")
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
        r"""Tune a copy of the encoder on real observations with measured parameters.

        Minimizes $\sum_i \| g(x_i) - \mathbb E\, h(S(\theta_i)) \|$; the steps that do best on the held-out part are
        kept, the start among them. An encoder without weights is followed by a linear map that begins as the identity.

        Args:
            theta: measured parameters.
            x: their real observations.
            simulator: None takes the one that `NPE.fit` was given, or the stored simulations nearest in theta.
            num_simulations: simulations of each theta, whose mean is the target.
            validation: the share that is held out, at least one row.
            steps: updates at most.
            batch_size: rows of one.
            lr: learning rate of AdamW without decay of the weights.
            seed: of simulations, of the held-out part and of the order.

        Raises:
            InvalidArgument: there is nothing to simulate with.
            InvalidInput: fewer than two rows, parameters outside of the prior, observations that are not finite.
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
        self, x: Tensor, target: Tensor, held: Tensor, rest: list[int], steps: int, batch: int, lr: float, seed: int
    ) -> TrainingResult:
        tuned = _copied(self.npe).requires_grad_(True)

        def distance(model: nn.Module, rows: Tensor) -> Tensor:
            apart: Tensor = (self.npe.encode(x[rows], model) - target[rows].to(self.npe.center)).norm(dim=-1)
            return apart

        def objective(model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
            return Loss(distance(model, batch.cpu()).sum(), len(batch))

        @torch.no_grad()
        def score(model: nn.Module) -> float:
            return float(distance(model.eval(), held).mean())

        best = BestWeights(score)
        best(tuned)
        trainer = Trainer(
            tuned,
            objective,
            Shuffled(rest, min(batch, len(rest)), seed=seed, collate=torch.tensor),
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
    def _targets(self, theta: Tensor, simulator: Simulator | None, draws: int, generator: torch.Generator) -> Tensor:
        """Mean features of simulations of each theta."""
        simulator = simulator or self.npe.simulator
        if simulator is not None:
            repeated = theta.repeat_interleave(draws, 0)
            x = observations(simulator(repeated, generator), len(repeated), self.npe.shape, "the simulator's x")
            return self.npe.encode(x).view(len(theta), draws, -1).mean(1)
        if self.npe.stored is None:
            raise InvalidArgument("there is nothing to simulate with; give a simulator")
        stored, x = self.npe.stored
        apart = torch.cdist(self._free(theta), self._free(stored))
        nearest = apart.topk(min(draws, len(stored)), largest=False).indices
        return self.npe.encode(x[nearest.flatten().cpu()]).view(*nearest.shape, -1).mean(1)

    def _free(self, theta: Tensor) -> Tensor:
        return self.npe.support.free(theta.to(self.npe.center))[0]

    # --- posteriors -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n l"]:
        """Features of real observations: by the tuned encoder, where there is one.

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
        r"""The posterior of each real observation of a batch (transductive), from a plan over the whole batch.

        The batch is stored, so that `inductive_posterior` can carry further observations by its plan.

        Args:
            x: real observations, all at once: their parameters should be samples of the prior.
            simulations: how many to carry to, or their observations; None for 2,000. Take well more than
                $e^{LPP_{sim} - LPP_{prior}}$, or sharp posteriors leave gaps between them.
            simulator: None as in `calibrate`.
            seed: of the simulations.
            tolerance: of the plan's columns, see `semibalanced_sinkhorn`.

        Raises:
            InvalidArgument: one observation in a balanced plan, which would get the prior.
            InvalidInput: observations that are not finite or of another shape.
            NotConverged: the plan did not reach the tolerance.

        Warns:
            InferenceAtRisk: posteriors rest on fewer than 5 simulations each (the median of them).
        """
        real = self.encode(x).double()
        if len(real) == 1 and self.tau == 1:
            raise InvalidArgument(
                "a balanced plan of one observation gives the prior back; give a batch and then use "
                "inductive_posterior, or set tau below 1"
            )
        features = self._simulated(simulations, simulator, torch.Generator().manual_seed(seed))
        cost = torch.cdist(real, features.double())
        solved = semibalanced_sinkhorn(cost, self.gamma, self.tau, tolerance=tolerance)
        self._reference = (features, solved.columns)
        return self._mixture(features, row_weights(cost, solved.columns, self.gamma), cost, solved)

    def inductive_posterior(self, x: Float[Tensor, "n ..."]) -> MixturePosterior:
        """The posterior of further observations by the plan of the batch that `posterior` stored; one is enough.

        Args:
            x: real observations.

        Raises:
            InvalidInput: observations that are not finite or of another shape.
            NotFitted: before any `posterior`.

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
        self, features: Tensor, log_weights: Tensor, cost: Tensor, solved: TransportPlan | None
    ) -> MixturePosterior:
        made = MixturePosterior(self.npe, features, log_weights, float(cost.mean()), solved)
        carrying = float(made.effective_simulations.median())
        if carrying < min(5, len(features)):
            warnings.warn(
                f"a posterior rests on {carrying:.1f} simulations (median): gamma {self.gamma:g} is small for a mean "
                f"distance of {made.cost:.3g}, and the posteriors may be over-confident; raise gamma or simulate more",
                InferenceAtRisk,
                stacklevel=3,
            )
        return made

    @torch.no_grad()
    def _simulated(
        self, simulations: int | Tensor | None, simulator: Simulator | None, generator: torch.Generator
    ) -> Tensor:
        """Features of the simulations to carry to."""
        if isinstance(simulations, Tensor):
            return self.npe.encode(simulations)
        count = 2000 if simulations is None else simulations
        if count < 2:
            raise InvalidArgument(f"{count} simulations; carry to 2 or more, best 2,000")
        simulator = simulator or self.npe.simulator
        if simulator is not None:
            return self.npe.encode(self.npe.simulate(count, simulator, generator)[1])
        if self.npe.stored is None:
            raise InvalidArgument("there is nothing to simulate with; give a simulator or simulations")
        stored = self.npe.stored[1]
        return self.npe.encode(stored[torch.randperm(len(stored), generator=generator)[:count]])

    # --- files ----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the posterior, the tuned encoder and the stored batch's plan to a folder that `load` reads.

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
        """Read what `save` wrote, with a prior and an encoder of the same form as then.

        A simulator is not stored: give it to `posterior` for a new batch. `inductive_posterior` needs none.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: it holds another kind of model.
            CorruptedFile: a file is damaged, or the tensors do not fit the prior or the encoder.
        """
        saved = checkpoint.open_model(path, model_type=cls.model_type, config_type=RobustPosteriorConfig)
        config, stored = saved.config, saved.checkpoint
        npe = NPE.restore(config.npe, stored.tensors(_NPE), prior, encoder, where=str(path))
        made = cls(npe, config.gamma, config.tau)
        if config.tuned:
            made.tuned = _copied(npe)
            try:
                made.tuned.load_state_dict(stored.tensors(_TUNED))
            except RuntimeError as error:
                raise CorruptedFile(f"{path}: no robust posterior of this prior and encoder: {error}") from error
            made.tuned.requires_grad_(False).eval()
        reference = stored.tensors(_REFERENCE)
        if reference:
            made._reference = (reference["features"], reference["columns"])
        return made


def _copied(npe: NPE) -> nn.Module:
    """A copy of the encoder that can be tuned; one without weights gets a linear map behind it, first the identity."""
    encoder = copy.deepcopy(npe.encoder)
    if any(True for _ in encoder.parameters()):
        return encoder
    features = npe.describe().features
    change = nn.utils.skip_init(nn.Linear, features, features, device=npe.center.device)
    with torch.no_grad():
        change.weight.copy_(torch.eye(features))
        change.bias.zero_()
    return nn.Sequential(encoder, change)
