r"""Neural posterior estimation: a conditional flow that tells, for any observation, which parameters made it.

Notable here:
- an encoder reads the observation, a flow of zuko the parameters given what was read; both learn together from
  simulations, fresh ones at every step where the simulator can be called
- bounded parameters are learnt in logit space, so no mass leaks over a bound and densities are in units of theta
- draws come from a generator of the caller's; zuko's own global draws are never used
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes.priors import Prior, Support, refuse_rows
from pippin.core.checkpoint import open_folder, save_folder
from pippin.core.errors import CorruptedFile, InvalidArgument, InvalidInput, MissingDependency, NotFitted
from pippin.data.ordering import Numbered, Shuffled
from pippin.train import AdamW, Cosine, Loss, Trainer
from pippin.train.trainer import Evaluation
from pippin.train.training import Training

Simulator = Callable[[Tensor, torch.Generator], Tensor]
"""Makes observations [n, ...] of parameters [n, k]; all that is random in it comes from the generator."""

CHUNK = 65_536
"""Pairs of parameters and observations that go through the flow at once."""


@dataclass(frozen=True)
class FlowConfig:
    """The conditional flow.

    Attributes:
        kind: "spline" for autoregressive rational-quadratic splines, "affine" for autoregressive shifts and scales,
            "mixture" for Gaussians with full covariances, the fastest of the three.
        transforms: of a flow; a mixture has none.
        hidden: widths of the network of each transform, or of the mixture.
        bins: of each spline.
        components: of the mixture.
    """

    kind: Literal["spline", "affine", "mixture"] = "spline"
    transforms: int = 3
    hidden: tuple[int, ...] = (64, 64)
    bins: int = 8
    components: int = 8

    def __post_init__(self) -> None:
        if self.kind not in ("spline", "affine", "mixture"):
            raise InvalidArgument(f"a flow of kind {self.kind!r}; choose spline, affine or mixture")
        counts = (self.transforms, self.bins, self.components, *self.hidden)
        if not self.hidden or min(counts) < 1 or self.bins < 2:
            raise InvalidArgument(f"every count of a flow must be at least 1, and bins at least 2, got {self}")

    def build(self, parameters: int, features: int) -> nn.Module:
        """The flow, with weights from the global generator.

        Raises:
            MissingDependency: zuko is not installed.
        """
        try:
            import zuko
        except ImportError as error:
            raise MissingDependency("conditional flows need zuko: pip install 'pippin[bayes]'") from error
        how: dict[str, Any] = {"hidden_features": self.hidden}
        flow: nn.Module
        if self.kind == "mixture":
            flow = zuko.flows.GMM(parameters, features, components=self.components, **how)
        elif self.kind == "affine":
            flow = zuko.flows.MAF(parameters, features, transforms=self.transforms, **how)
        else:
            flow = zuko.flows.NSF(parameters, features, transforms=self.transforms, bins=self.bins, **how)
        return flow


class SeriesEncoder(nn.Module):
    """Features of a series of numbers [n, length]: strided convolutions, then two linear layers.

    Args:
        length: numbers of a series, at least 16.
        features: how many come out.
        width: channels.
    """

    def __init__(self, length: int, features: int = 10, width: int = 32) -> None:
        super().__init__()
        if length < 16 or features < 1 or width < 1:
            raise InvalidArgument(f"length {length}, features {features}, width {width}: at least 16, 1 and 1")
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
    r"""An amortised posterior $p(\theta | h_w(x))$.

    Args:
        prior: of the parameters; see `pippin.bayes.priors`.
        encoder: makes features [n, l] of observations, which are standardised before by what simulations showed; None
            gives the flow the (standardised, flattened) observations themselves.
        flow: of the parameters given the features.
        seed: of all weights of the flow. The encoder's are the caller's.

    Attributes:
        shape: of one observation; None before `fit`.

    Raises:
        InvalidArgument: no prior, or no module where an encoder is expected.
        MissingDependency: zuko is not installed.

    Source: Papamakarios & Murray 2016, arXiv:1605.06376; Greenberg et al. 2019, arXiv:1905.07488, without rounds.
    """

    centre: Tensor
    scale: Tensor

    def __init__(
        self, prior: Prior, encoder: nn.Module | None = None, flow: FlowConfig = FlowConfig(), *, seed: int = 0
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
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    # --- fitting --------------------------------------------------------------------------------------------------

    def fit(
        self,
        data: Simulator | tuple[Tensor, Tensor],
        *,
        steps: int = 2000,
        batch: int = 256,
        lr: float = 1e-3,
        held_out: int = 1024,
        seed: int = 0,
        show: bool = False,
    ) -> Training:
        r"""Minimise $-\log p(\theta | h_w(x))$ over simulations; the weights that do best on others are kept.

        Args:
            data: a simulator, called with fresh draws of the prior for every step; or stored simulations
                ``(theta [n, k], x [n, ...])``.
            steps: updates.
            batch: simulations of one.
            lr: peak learning rate of AdamW; it falls to 0 as a cosine.
            held_out: simulations that choose the best weights; of stored ones at most a fifth.
            seed: of simulations and their order.
            show: whether a bar is drawn.

        Raises:
            InvalidArgument: data of another form, fewer than 10 stored simulations, or counts out of range.
            InvalidInput: parameters outside of the prior, observations that are not finite or of another number.
            NonFiniteLoss: training diverged; lower ``lr``.
        """
        if min(steps, batch, held_out) < 1 or not 0 < lr < math.inf:
            raise InvalidArgument(f"steps {steps}, batch {batch}, held_out {held_out}, lr {lr} must all be above 0")
        if callable(data):
            first = self.simulate(4096, data, torch.Generator().manual_seed(seed + 1_000_003))
            stream: Any = Numbered(lambda n, start: self.simulate(n, data, _seeded(seed, start)), batch)
            theta, x = (part[:held_out] for part in self.simulate(held_out, data, _seeded(seed, -1)))
            self.simulator, self.stored = data, None
        else:
            first = self._checked(data)
            theta, x, stream = _split(*first, held_out, batch, seed)
            self.simulator, self.stored = None, first
        self._build(first[1])
        best = BestWeights(lambda model: -float(self.log_prob(theta, x).mean()))
        training = Trainer(
            self,
            _posterior_loss,
            stream,
            steps=steps,
            optimiser=AdamW(lr=lr, weight_decay=0.0),
            schedule=Cosine(warmup=0.02, final=0.0),
            evaluation=Evaluation(best, max(1, steps // 20)),
            seed=seed,
            title="neural posterior",
            show=show,
        ).fit()
        best.restore(self)
        self.eval()
        return training

    def simulate(
        self, n: int, simulator: Simulator, generator: torch.Generator
    ) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n ..."]]:
        """``n`` draws of the prior and an observation of each.

        Raises:
            InvalidInput: the simulator's observations are not finite or of another number.
        """
        theta = self.prior.sample(n, generator)
        return theta, observations(simulator(theta, generator), n, None, "the simulator's observations")

    def _checked(self, data: Any) -> tuple[Tensor, Tensor]:
        if not (isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
            raise InvalidArgument(f"data is a {type(data).__name__}; give a simulator or a pair of tensors (theta, x)")
        theta, x = data[0].float(), data[1].float()
        self.support.check(theta)
        if len(theta) < 10:
            raise InvalidArgument(f"{len(theta)} simulations are too few to learn from; give at least 10")
        return theta, observations(x, len(theta), None, "x")

    def _build(self, x: Tensor) -> None:
        """Standardisation from first observations, and the flow for as many features as the encoder makes."""
        device = self.support.low.device
        self.shape = tuple(x.shape[1:])
        scale = x.std(0)
        self.centre = x.mean(0).to(device)
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
            encoder: another one than the network's own, such as a tuned copy of it.

        Raises:
            NotFitted: before `fit`.
            InvalidInput: observations that are not finite (their rows are named), or of another shape.
            InvalidArgument: the encoder makes no rows of features.
        """
        if self.shape is None:
            raise NotFitted("this posterior knows no observations yet; call fit() first")
        x = observations(x, len(x), self.shape, "x").to(self.centre)
        features: Tensor = (encoder or self.encoder)((x - self.centre) / self.scale)
        if features.ndim != 2 or len(features) != len(x):
            raise InvalidArgument(
                f"the encoder made {list(features.shape)} of {len(x)} rows; it must make [n, features]"
            )
        return features

    def log_prob(self, theta: Float[Tensor, "n k"], x: Float[Tensor, "n ..."]) -> Float[Tensor, " n"]:
        """Log density of each ``theta`` given its ``x``, in units of theta; minus infinity outside of the prior.

        Raises:
            NotFitted, InvalidInput: as `encode`; theta of another shape.
        """
        return self.log_prob_given(theta, self.encode(x))

    def log_prob_given(self, theta: Float[Tensor, "n k"], features: Float[Tensor, "n l"]) -> Float[Tensor, " n"]:
        """As `log_prob`, from features."""
        flow = self._fitted()
        if theta.ndim != 2 or theta.shape[1] != len(self.support) or len(theta) != len(features):
            raise InvalidInput(
                f"theta is {list(theta.shape)} for {len(features)} observations of {len(self.support)} parameters each"
            )
        theta = theta.to(features)
        u, gradient = self.support.free(theta)
        log_prob: Tensor = flow(features).log_prob(u) + gradient
        return torch.where(self.support.inside(theta), log_prob, -torch.inf)

    @torch.no_grad()
    def log_prob_pairs(self, theta: Float[Tensor, "n k"], features: Float[Tensor, "m l"]) -> Float[Tensor, "n m"]:
        """Log density of every theta under the posterior of every row of features, in chunks."""
        flow, rows, parts = self._fitted(), max(1, CHUNK // len(features)), []
        if self.config.kind == "mixture":  # its densities do not depend on theta, so one pass makes all of them
            theta = theta.to(features)
            u, gradient = self.support.free(theta)
            mixture = flow(features)
            found = torch.cat([mixture.log_prob(part[:, None]) for part in u.split(rows)]) + gradient[:, None]
            return torch.where(self.support.inside(theta)[:, None], found, -torch.inf)
        for part in theta.split(rows):
            left = part.repeat_interleave(len(features), 0)
            right = features.repeat(len(part), 1)
            parts.append(self.log_prob_given(left, right).view(len(part), len(features)))
        return torch.cat(parts)

    def sample(
        self, n: int, x: Float[Tensor, "b ..."], generator: torch.Generator | None = None
    ) -> Float[Tensor, "n b k"]:
        """``n`` draws for each observation, within the prior's bounds.

        Args:
            n: draws of each.
            x: observations.
            generator: on the CPU; None begins at seed 0.

        Raises:
            InvalidArgument: fewer than one.
            NotFitted, InvalidInput: as `encode`.
        """
        with torch.no_grad():
            return self.sample_given(n, self.encode(x), generator)

    @torch.no_grad()
    def sample_given(
        self, n: int, features: Float[Tensor, "b l"], generator: torch.Generator | None = None
    ) -> Float[Tensor, "n b k"]:
        """As `sample`, from features."""
        if n < 1:
            raise InvalidArgument(f"n is {n}; draw 1 sample or more")
        flow, generator = self._fitted(), generator or torch.Generator().manual_seed(0)
        drawn = [self._draw(flow, part, generator) for part in features.repeat(n, 1).split(CHUNK)]
        return torch.cat(drawn).view(n, len(features), len(self.support))

    def _draw(self, flow: nn.Module, features: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(len(features), len(self.support), generator=generator).to(features)
        distribution = flow(features)
        if self.config.kind != "mixture":
            return self.support.bound(distribution.transform.inv(noise))
        weights = distribution.logits.softmax(-1)
        place = torch.rand(len(features), 1, generator=generator).to(features)
        chosen = torch.searchsorted(weights.cumsum(-1), place).clamp_max(weights.shape[-1] - 1)
        base, rows = distribution.base, torch.arange(len(features), device=features.device)
        mean, factor = base.loc[rows, chosen[:, 0]], base.scale_tril[rows, chosen[:, 0]]
        return self.support.bound(mean + (factor @ noise[..., None])[..., 0])

    def _fitted(self) -> nn.Module:
        if self.flow is None:
            raise NotFitted("this posterior has not seen a simulation yet; call fit() first")
        return self.flow

    # --- files ----------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write a folder that `load` reads; the simulator and stored simulations are not kept.

        Raises:
            NotFitted: before `fit`.
            DiskFull: nothing was written.
        """
        self._fitted()
        save_folder(Path(folder), config={"model_type": "pippin_npe", **self.facts()}, tensors=self.state_dict())

    def facts(self) -> dict[str, Any]:
        """What `restore` needs beside the tensors, as JSON values."""
        assert self.shape is not None
        features = len(self.encode(torch.zeros(1, *self.shape))[0])
        return {"flow": asdict(self.config), "shape": list(self.shape), "features": features, "seed": self.seed}

    @classmethod
    def load(cls, folder: str | Path, prior: Prior, encoder: nn.Module | None = None) -> NPE:
        """Read what `save` wrote, with a prior and an encoder of the same form as then.

        Raises:
            ModelNotFound: there is no such folder.
            CorruptedFile: it holds something else, or tensors of other shapes.
        """
        checkpoint = open_folder(folder)
        tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
        return cls.restore(checkpoint.config, tensors, prior, encoder, where=str(folder))

    @classmethod
    def restore(
        cls, facts: dict[str, Any], tensors: dict[str, Tensor], prior: Prior, encoder: nn.Module | None, where: str
    ) -> NPE:
        """Make a fitted one of `facts` and tensors.

        Raises:
            CorruptedFile: they do not fit each other, the prior or the encoder; ``where`` says which file.
        """
        try:
            flow = facts["flow"] | {"hidden": tuple(facts["flow"]["hidden"])}
            made = cls(prior, encoder, FlowConfig(**flow), seed=facts["seed"])
            made.shape = tuple(facts["shape"])
            made.centre, made.scale = tensors["centre"].clone(), tensors["scale"].clone()
            with torch.random.fork_rng([]):
                made.flow = made.config.build(len(made.support), facts["features"])
            made.support.check_same(tensors)
            made.load_state_dict(tensors)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            said = str(error).splitlines()[0]
            raise CorruptedFile(f"{where}: no posterior of this prior and this encoder: {said}") from error
        return made.eval()


class BestWeights:
    """The weights that scored best so far; a measure for `pippin.train.Evaluation`.

    Args:
        score: of a model, lower is better.
    """

    def __init__(self, score: Callable[[nn.Module], float]) -> None:
        self.score, self.least = score, math.inf
        self.weights: dict[str, Tensor] = {}

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Score a model and remember it if it is the best."""
        score = self.score(model)
        if score < self.least:
            self.least, self.weights = score, copy.deepcopy(model.state_dict())
        return {"loss": score}

    def restore(self, model: nn.Module) -> None:
        """Give the model its best weights; it keeps its own where no score was finite."""
        if self.weights:
            model.load_state_dict(self.weights)


def observations(x: Any, n: int, shape: tuple[int, ...] | None, name: str) -> Tensor:
    """Observations as float32, checked.

    Raises:
        InvalidArgument: no tensor.
        InvalidInput: none at all, another number or shape, or values that are not finite (the rows are named).
    """
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"{name}: got a {type(x).__name__}; give a tensor [n, ...]")
    if x.ndim < 2 or not x.numel() or len(x) != n:
        raise InvalidInput(f"{name} of shape {list(x.shape)} for {n} rows; give [n, ...], a row for each")
    if shape is not None and tuple(x.shape[1:]) != shape:
        raise InvalidInput(f"{name} of shape {list(x.shape)}; one observation must have the shape {list(shape)}")
    found: Tensor = x.float()
    refuse_rows(~found.flatten(1).isfinite().all(-1), f"{name}: not finite")
    return found


def _posterior_loss(model: nn.Module, batch: tuple[Tensor, Tensor], generator: torch.Generator) -> Loss:
    assert isinstance(model, NPE)
    theta, x = batch
    return Loss(-model.log_prob(theta, x).sum(), len(theta))


def _seeded(seed: int, number: int) -> torch.Generator:
    """A generator for the simulations from number ``number`` on; the held-out ones are number -1."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number + 1) % 2**62)


def _split(theta: Tensor, x: Tensor, held_out: int, batch: int, seed: int) -> tuple[Tensor, Tensor, Any]:
    """Held-out parameters and observations, and a stream of batches of the others."""
    order = torch.randperm(len(theta), generator=torch.Generator().manual_seed(seed))
    cut = max(1, min(held_out, len(theta) // 5))
    rest = order[cut:].tolist()

    def collate(rows: list[int]) -> tuple[Tensor, Tensor]:
        return theta[rows], x[rows]

    return theta[order[:cut]], x[order[:cut]], Shuffled(rest, batch, seed=seed, collate=collate)
