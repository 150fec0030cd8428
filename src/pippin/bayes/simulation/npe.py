r"""Neural posterior estimation (NPE): a conditional density estimator of parameters given an observation.

Notable here:
- an encoder computes features of the observation, and a zuko flow models the parameters given these; both are trained
  on simulations, with new ones in every step if a simulator is given
- bounded parameters are modeled in logit space, so there is no mass outside the bounds; densities are in units of theta
- samples come from the caller's generator, never from the global one that zuko uses
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes.batches import refuse_rows
from pippin.bayes.simulation.priors import SimulatorPrior, Support
from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import CorruptedFile, InvalidArgument, InvalidInput, MissingDependency, NotFitted
from pippin.core.formats import checkpoint
from pippin.data.streams import Numbered, Shuffled
from pippin.train import AdamW, CosineSchedule, Loss, Trainer
from pippin.train.result import TrainingResult
from pippin.train.trainer import Evaluation

Simulator = Callable[[Tensor, torch.Generator], Tensor]
"""Maps parameters [n, k] to observations [n, ...]; all randomness comes from the generator."""

CHUNK = 65_536
"""Pairs of parameters and observations that the flow evaluates at a time."""


@checked
@dataclass(frozen=True)
class DensityEstimatorConfig:
    """The config of the conditional density estimator.

    Attributes:
        architecture: "spline" for autoregressive rational-quadratic splines, "affine" for autoregressive affine
            transforms, "mixture" for a mixture of Gaussians with full covariances, which is the fastest.
        num_transforms: number of transforms of a flow; unused for a mixture.
        hidden_sizes: hidden sizes of the network of each transform, or of the mixture.
        num_bins: number of bins of each spline.
        num_components: number of components of the mixture.
    """

    architecture: Literal["spline", "affine", "mixture"] = "spline"
    num_transforms: PositiveInt = 3
    hidden_sizes: tuple[PositiveInt, ...] = (64, 64)
    num_bins: Annotated[int, Ge(2)] = 8
    num_components: PositiveInt = 8

    def __post_init__(self) -> None:
        if not self.hidden_sizes:
            raise InvalidArgument("hidden_sizes is empty; give the width of at least one layer")

    def build(self, parameters: int, features: int) -> nn.Module:
        """Build the flow, with weights from torch's global generator.

        Raises:
            MissingDependency: zuko is not installed.
        """
        try:
            import zuko
        except ImportError as error:
            raise MissingDependency("conditional flows need zuko: pip install 'pippin[bayes]'") from error
        options: dict[str, Any] = {"hidden_features": self.hidden_sizes}
        flow: nn.Module
        if self.architecture == "mixture":
            flow = zuko.flows.GMM(parameters, features, components=self.num_components, **options)
        elif self.architecture == "affine":
            flow = zuko.flows.MAF(parameters, features, transforms=self.num_transforms, **options)
        else:
            flow = zuko.flows.NSF(parameters, features, transforms=self.num_transforms, bins=self.num_bins, **options)
        return flow


@dataclass(frozen=True)
class NPEConfig:
    """The config of a saved posterior.

    Attributes:
        flow: config of the density estimator.
        shape: shape of one observation.
        features: number of features of the encoder.
        seed: seed of the flow's initial weights.
    """

    flow: DensityEstimatorConfig
    shape: tuple[PositiveInt, ...]
    features: PositiveInt
    seed: int


class SeriesEncoder(nn.Module):
    """Features of time series [n, length]: strided convolutions followed by two linear layers.

    Args:
        length: length of a series, at least 16.
        features: number of features.
        width: number of channels.
    """

    @checked
    def __init__(self, length: Annotated[int, Ge(16)], features: PositiveInt = 10, width: PositiveInt = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        while length > 8 and len(layers) < 12:
            layers += [nn.Conv1d(channels, width, 5, stride=2, padding=2), nn.GELU()]
            channels, length = width, (length + 1) // 2
        self.convolutions = nn.Sequential(*layers)
        self.read_out = nn.Sequential(nn.Linear(width * length, 2 * width), nn.GELU(), nn.Linear(2 * width, features))

    def forward(self, x: Float[Tensor, "n length"]) -> Float[Tensor, "n features"]:
        """The features of each series."""
        out: Tensor = self.read_out(self.convolutions(x[:, None]).flatten(1))
        return out


class NPE(nn.Module):
    r"""An amortized posterior $p(\theta | h_w(x))$.

    Args:
        prior: prior of the parameters; see `pippin.bayes.simulation.priors`.
        encoder: maps standardized observations to features [n, l]; None uses the standardized, flattened observations
            as features.
        flow: config of the density estimator.
        seed: seed of the flow's weights; the encoder is initialized by the caller.

    Attributes:
        shape: shape of one observation; None before `fit`.
        result: result of the training; None before `fit` and after loading.

    Raises:
        InvalidArgument: ``prior`` is not a prior, or the encoder is not a module.
        MissingDependency: zuko is not installed.

    Source: Papamakarios & Murray 2016, arXiv:1605.06376; Greenberg et al. 2019, arXiv:1905.07488, without rounds.
    """

    model_type: ClassVar[str] = "pippin_npe"

    center: Tensor
    scale: Tensor

    def __init__(
        self,
        prior: SimulatorPrior,
        encoder: nn.Module | None = None,
        flow: DensityEstimatorConfig = DensityEstimatorConfig(),
        *,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if encoder is not None and not isinstance(encoder, nn.Module):
            raise InvalidArgument(f"the encoder is a {type(encoder).__name__}; give a torch module or None")
        self.prior, self.config, self.seed = prior, flow, seed
        self.support = Support(prior, seed)
        self.encoder = nn.Flatten() if encoder is None else encoder
        self.flow: nn.Module | None = None
        self.shape: tuple[int, ...] | None = None
        self.simulator: Simulator | None = None
        self.stored: tuple[Tensor, Tensor] | None = None
        self.result: TrainingResult | None = None
        self.register_buffer("center", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    # --- fitting --------------------------------------------------------------------------------------------------

    @checked
    def fit(
        self,
        data: Simulator | tuple[Tensor, Tensor],
        *,
        steps: PositiveInt = 2000,
        batch_size: PositiveInt = 256,
        lr: PositiveFloat = 1e-3,
        num_held_out: PositiveInt = 1024,
        seed: int = 0,
        show_progress: bool = False,
    ) -> NPE:
        r"""Minimize $-\log p(\theta | h_w(x))$ over simulations, and use the weights that are best on held-out ones.

        Args:
            data: a simulator, which is called with new samples of the prior in every step; or stored simulations
                ``(theta [n, k], x [n, ...])``.
            steps: number of updates.
            batch_size: simulations per update.
            lr: peak learning rate of AdamW; it decays to 0 along a cosine.
            num_held_out: number of simulations for choosing the best weights; at most a fifth of stored ones.
            seed: seed of simulations and their order.
            show_progress: whether to show a progress bar.

        Returns:
            The posterior itself.

        Raises:
            InvalidArgument: data of another type, or fewer than 10 stored simulations.
            InvalidInput: parameters outside the prior, or observations that are not finite or of another number.
            NonFiniteLoss: training diverged; lower ``lr``.
        """
        if callable(data):
            reference = self.simulate(4096, data, torch.Generator().manual_seed(seed + 1_000_003))
            stream: Any = Numbered(lambda n, start: self.simulate(n, data, _seeded(seed, start)), batch_size)
            theta, x = (part[:num_held_out] for part in self.simulate(num_held_out, data, _seeded(seed, -1)))
            self.simulator, self.stored = data, None
        else:
            reference = self._checked(data)
            theta, x, stream = _split(*reference, num_held_out, batch_size, seed)
            self.simulator, self.stored = None, reference
        self._build(reference[1])
        best = BestWeights(lambda model: -float(self.log_prob(theta, x).mean()))
        self.result = Trainer(
            self,
            _posterior_loss,
            stream,
            steps=steps,
            optimizer=AdamW(lr=lr, weight_decay=0.0),
            schedule=CosineSchedule(warmup_steps=0.02, min_lr_ratio=0.0),
            evaluation=Evaluation(best, max(1, steps // 20)),
            seed=seed,
            title="neural posterior",
            show_progress=show_progress,
        ).fit()
        best.restore(self)
        return self.eval()

    def simulate(
        self, n: int, simulator: Simulator, generator: torch.Generator
    ) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n ..."]]:
        """Sample ``n`` parameters from the prior, and simulate an observation of each.

        Raises:
            InvalidInput: the simulator's observations are not finite or of another number.
        """
        theta = self.prior.sample(n, generator)
        return theta, observations(simulator(theta, generator), n, None, "the simulator's observations")

    def _checked(self, data: Any) -> tuple[Tensor, Tensor]:
        """Check stored simulations and convert them to float32."""
        if not (isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
            raise InvalidArgument(f"data is a {type(data).__name__}; give a simulator or a pair of tensors (theta, x)")
        theta, x = data[0].float(), data[1].float()
        self.support.check(theta)
        if len(theta) < 10:
            raise InvalidArgument(f"{len(theta)} simulations are too few to learn from; give at least 10")
        return theta, observations(x, len(theta), None, "x")

    def _build(self, x: Tensor) -> None:
        """Set the standardization from observations, and build the flow for the encoder's number of features."""
        device = self.support.low.device
        self.shape = tuple(x.shape[1:])
        scale = x.std(0)
        self.center = x.mean(0).to(device)
        # elements that are constant in simulations are not scaled
        self.scale = torch.where(scale > 1e-6 * scale.max().clamp_min(1e-12), scale, 1.0).to(device)
        with torch.no_grad():
            features = self.encode(x[:2])
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed)
            self.flow = self.config.build(len(self.support), features.shape[1]).to(device)

    # --- use ------------------------------------------------------------------------------------------------------

    def encode(self, x: Float[Tensor, "n ..."], encoder: nn.Module | None = None) -> Float[Tensor, "n l"]:
        """Features of observations.

        Args:
            x: observations.
            encoder: another encoder than the network's own, such as a fine-tuned copy of it.

        Raises:
            NotFitted: before `fit`.
            InvalidInput: observations that are not finite (the message names the rows), or of another shape.
            InvalidArgument: the encoder's output is not [n, features].
        """
        if self.shape is None:
            raise NotFitted("this posterior is not fitted; call fit() first")
        x = observations(x, len(x), self.shape, "x").to(self.center)
        features: Tensor = (encoder or self.encoder)((x - self.center) / self.scale)
        if features.ndim != 2 or len(features) != len(x):
            raise InvalidArgument(
                f"the encoder's output has shape {list(features.shape)} for {len(x)} rows; it must be [n, features]"
            )
        return features

    def log_prob(self, theta: Float[Tensor, "n k"], x: Float[Tensor, "n ..."]) -> Float[Tensor, " n"]:
        """Log density of each ``theta`` given its ``x``, in units of theta; minus infinity outside the prior.

        Raises:
            NotFitted: before `fit`.
            InvalidInput: theta of another shape; see also `encode`.
        """
        return self.log_prob_from_features(theta, self.encode(x))

    def log_prob_from_features(
        self, theta: Float[Tensor, "n k"], features: Float[Tensor, "n l"]
    ) -> Float[Tensor, " n"]:
        """`log_prob` given features instead of observations."""
        flow = self._fitted()
        if theta.ndim != 2 or theta.shape[1] != len(self.support) or len(theta) != len(features):
            raise InvalidInput(
                f"theta has shape {list(theta.shape)}; give [{len(features)}, {len(self.support)}], a row for each "
                "observation"
            )
        theta = theta.to(features)
        u, log_det = self.support.free(theta)
        log_prob: Tensor = flow(features).log_prob(u) + log_det
        return torch.where(self.support.inside(theta), log_prob, -torch.inf)

    @torch.no_grad()
    def log_prob_pairs(self, theta: Float[Tensor, "n k"], features: Float[Tensor, "m l"]) -> Float[Tensor, "n m"]:
        """Log density of every theta under the posterior of every row of features, in chunks."""
        flow, rows, chunks = self._fitted(), max(1, CHUNK // len(features)), []
        if self.config.architecture == "mixture":  # the mixtures do not depend on theta: one pass of the network
            theta = theta.to(features)
            u, log_det = self.support.free(theta)
            mixture = flow(features)
            log_prob = torch.cat([mixture.log_prob(chunk[:, None]) for chunk in u.split(rows)]) + log_det[:, None]
            return torch.where(self.support.inside(theta)[:, None], log_prob, -torch.inf)
        for chunk in theta.split(rows):
            repeated_theta = chunk.repeat_interleave(len(features), 0)
            repeated_features = features.repeat(len(chunk), 1)
            log_prob = self.log_prob_from_features(repeated_theta, repeated_features)
            chunks.append(log_prob.view(len(chunk), len(features)))
        return torch.cat(chunks)

    @checked
    def sample(
        self, n: PositiveInt, x: Float[Tensor, "b ..."], generator: torch.Generator | None = None
    ) -> Float[Tensor, "n b k"]:
        """Sample parameters for each observation, within the prior's bounds.

        Args:
            n: number of samples for each observation.
            x: observations.
            generator: source of randomness on the CPU; None takes one with seed 0.

        Raises:
            NotFitted: before `fit`.
            InvalidInput: see `encode`.
        """
        with torch.no_grad():
            return self.sample_from_features(n, self.encode(x), generator)

    @torch.no_grad()
    @checked
    def sample_from_features(
        self, n: PositiveInt, features: Float[Tensor, "b l"], generator: torch.Generator | None = None
    ) -> Float[Tensor, "n b k"]:
        """`sample` given features instead of observations."""
        flow, generator = self._fitted(), generator or torch.Generator().manual_seed(0)
        samples = [self._sample(flow, chunk, generator) for chunk in features.repeat(n, 1).split(CHUNK)]
        return torch.cat(samples).view(n, len(features), len(self.support))

    def _sample(self, flow: nn.Module, features: Tensor, generator: torch.Generator) -> Tensor:
        """One sample for each row of features, (n, k), with random numbers of the generator only."""
        noise = torch.randn(len(features), len(self.support), generator=generator).to(features)
        distribution = flow(features)
        if self.config.architecture != "mixture":
            return self.support.bound(distribution.transform.inv(noise))
        weights = distribution.logits.softmax(-1)
        uniform = torch.rand(len(features), 1, generator=generator).to(features)
        component = torch.searchsorted(weights.cumsum(-1), uniform).clamp_max(weights.shape[-1] - 1)  # (n, 1)
        base, rows = distribution.base, torch.arange(len(features), device=features.device)
        mean, factor = base.loc[rows, component[:, 0]], base.scale_tril[rows, component[:, 0]]
        return self.support.bound(mean + (factor @ noise[..., None])[..., 0])

    def _fitted(self) -> nn.Module:
        """The density estimator, if `fit` was called."""
        if self.flow is None:
            raise NotFitted("this posterior is not fitted; call fit() first")
        return self.flow

    # --- files ----------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a folder that `load` reads, without the simulator and stored simulations.

        Raises:
            NotFitted: before `fit`.
            DiskFull: nothing was written.
        """
        self._fitted()
        checkpoint.save(self, path, model_type=self.model_type, config=self.describe())

    def describe(self) -> NPEConfig:
        """The config that `restore` needs beside the tensors."""
        assert self.shape is not None
        features = len(self.encode(torch.zeros(1, *self.shape))[0])
        return NPEConfig(self.config, self.shape, features, self.seed)

    @classmethod
    def load(cls, path: str | Path, prior: SimulatorPrior, encoder: nn.Module | None = None) -> NPE:
        """Read a folder that `save` wrote, with the same prior and the same encoder architecture.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: the folder holds another kind of model.
            CorruptedFile: a file is damaged, or the tensors do not fit the prior or the encoder.
        """
        saved = checkpoint.open_model(path, model_type=cls.model_type, config_type=NPEConfig)
        return cls.restore(saved.config, saved.checkpoint.tensors(), prior, encoder, where=str(path))

    @classmethod
    def restore(
        cls,
        config: NPEConfig,
        tensors: dict[str, Tensor],
        prior: SimulatorPrior,
        encoder: nn.Module | None,
        where: str,
    ) -> NPE:
        """Rebuild a fitted posterior from the result of `describe` and the tensors.

        Raises:
            CorruptedFile: config, tensors, prior and encoder do not fit each other; the message names ``where``.
        """
        try:
            npe = cls(prior, encoder, config.flow, seed=config.seed)
            npe.shape = config.shape
            npe.center, npe.scale = tensors["center"].clone(), tensors["scale"].clone()
            with torch.random.fork_rng([]):
                npe.flow = npe.config.build(len(npe.support), config.features)
            npe.support.check_same(tensors)
            npe.load_state_dict(tensors)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise CorruptedFile(f"{where}: no posterior of this prior and this encoder: {reason}") from error
        return npe.eval()


class BestWeights:
    """Stores the weights with the best score so far; for `pippin.train.Evaluation`.

    Args:
        score: maps a model to its score; lower is better.
    """

    def __init__(self, score: Callable[[nn.Module], float]) -> None:
        self.score, self.best_score = score, math.inf
        self.weights: dict[str, Tensor] = {}

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Score a model, and store its weights if they are the best."""
        score = self.score(model)
        if score < self.best_score:
            self.best_score, self.weights = score, copy.deepcopy(model.state_dict())
        return {"loss": score}

    def restore(self, model: nn.Module) -> None:
        """Load the best weights into the model; it is unchanged if no score was finite."""
        if self.weights:
            model.load_state_dict(self.weights)


def observations(x: Any, n: int, shape: tuple[int, ...] | None, name: str) -> Tensor:
    """Check observations, and convert them to float32.

    Raises:
        InvalidArgument: not a tensor.
        InvalidInput: no observations, another number or shape, or values that are not finite (the message names rows).
    """
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"{name}: got a {type(x).__name__}; give a tensor [n, ...]")
    if x.ndim < 2 or not x.numel() or len(x) != n:
        raise InvalidInput(f"{name} of shape {list(x.shape)} for {n} rows; give [n, ...], a row for each")
    if shape is not None and tuple(x.shape[1:]) != shape:
        raise InvalidInput(f"{name} of shape {list(x.shape)}; one observation must have the shape {list(shape)}")
    converted: Tensor = x.float()
    refuse_rows(~converted.flatten(1).isfinite().all(-1), f"{name}: not finite")
    return converted


def _posterior_loss(model: nn.Module, batch: tuple[Tensor, Tensor], generator: torch.Generator) -> Loss:
    """Negative log density of the parameters, summed over the batch."""
    assert isinstance(model, NPE)
    theta, x = batch
    return Loss(-model.log_prob(theta, x).sum(), len(theta))


def _seeded(seed: int, number: int) -> torch.Generator:
    """A generator for the simulations from index ``number`` on; -1 stands for the held-out ones."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number + 1) % 2**62)


def _split(theta: Tensor, x: Tensor, num_held_out: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor, Any]:
    """Held-out parameters and observations, and a stream of batches of the others."""
    order = torch.randperm(len(theta), generator=torch.Generator().manual_seed(seed))
    cut = max(1, min(num_held_out, len(theta) // 5))
    train_rows = order[cut:].tolist()

    def collate(rows: list[int]) -> tuple[Tensor, Tensor]:
        return theta[rows], x[rows]

    return theta[order[:cut]], x[order[:cut]], Shuffled(train_rows, batch_size, seed=seed, collate=collate)
