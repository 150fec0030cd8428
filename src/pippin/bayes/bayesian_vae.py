r"""A variational autoencoder whose decoder is a posterior, and how far its samples disagree about an input.

Notable here:
- every sample scores an input with the same latent draws, so that what differs is the weights and not the estimate
- a shift of the likelihood that all samples share cancels in the effective sample size, and with it part of what makes
  plain likelihoods prefer simple pictures; where the likelihood is right, the same cancelling costs power
- no score is the default: which one wins depends on the pair of data sets, so each call names its own
- the score of an input depends on nothing else that is scored with it

Source: Daxberger and Hernández-Lobato, "Bayesian Variational Autoencoders for Unsupervised Out-of-Distribution
Detection", arXiv:1912.05651. The text was not at hand in full: model and score follow its abstract, the sampler follows
its own publication (`pippin.bayes.sghmc`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from pippin.bayes.sghmc import SGHMC, Chain
from pippin.bayes.vae import VAE, Elbo, VAEConfig, moments
from pippin.core import checkpoint
from pippin.core.errors import (
    ChainDiverged,
    CorruptedFile,
    InferenceAtRisk,
    InvalidArgument,
    InvalidInput,
    NonFiniteLoss,
    NotFitted,
)
from pippin.data.ordering import Shuffled
from pippin.train import AdamW, Constant, Trainer

Kind = Literal["ess", "entropy", "waic", "variance", "ll", "typicality"]
_KINDS = ("ess", "entropy", "waic", "variance", "ll", "typicality")
_ROOM = 1 << 22  # numbers of decoded output that are held at once
_LOOKED_AT = 256  # training examples on which the samples are checked after a fit
_HEALTHY = (0.2, 0.98)
_TYPE = "bayesian-vae"


def ood_score(
    log_likelihood: Float[Tensor, "samples n"], kind: Kind, *, training: float | Float[Tensor, ""] | None = None
) -> Float[Tensor, " n"]:
    r"""How much each input looks like the training data, from its log-likelihood under every posterior sample.

    With $w = \mathrm{softmax}_m(L_m)$:

    - "ess": $1 / \sum_m w_m^2$, from 1 to M: the effective size of the posterior sample once x was seen
    - "entropy": $\exp H(w)$, a smoother one of the same range
    - "ll": $\log \frac1M \sum_m e^{L_m}$, the posterior predictive
    - "waic": mean minus variance of L over the samples
    - "variance": minus that variance
    - "typicality": minus the distance of "ll" from its mean over training data

    Args:
        log_likelihood: L, in nats, of n inputs under at least 2 samples.
        kind: the score.
        training: the mean "ll" of training data; for "typicality".

    Returns:
        Scores, higher meaning more like the training data for every kind; float64.

    Raises:
        InvalidArgument: an unknown kind, "typicality" without ``training``, or a ``training`` that is not one number.
        InvalidInput: fewer than 2 samples, or values that are not finite.

    Source: arXiv:1912.05651 (ess); Watanabe 2010 and arXiv:1810.01392 (waic); arXiv:1906.02994 (typicality).

    >>> ood_score(torch.tensor([[-3.0, -3.0], [-3.0, -9.0]]), "ess").round(decimals=2).tolist()
    [2.0, 1.0]
    """
    if kind not in _KINDS:
        raise InvalidArgument(f"kind is {kind!r}; choose one of {', '.join(_KINDS)}")
    if kind == "typicality" and training is None:
        raise InvalidArgument("typicality needs training=, the mean 'll' of training data")
    if isinstance(training, Tensor) and training.ndim:
        raise InvalidArgument(
            f"training has the shape {tuple(training.shape)}; give one number, the mean of ood_score(..., 'll') on "
            "training data"
        )
    if len(log_likelihood) < 2:
        raise InvalidInput(f"{len(log_likelihood)} posterior sample; scores compare at least 2")
    found = log_likelihood.double()
    if not found.isfinite().all():
        sample, row = (~found.isfinite()).nonzero()[0].tolist()
        raise InvalidInput(f"the log-likelihood of input {row} under sample {sample} is {found[sample, row]}")
    if kind in ("waic", "variance"):
        variance = found.var(0, correction=0)
        return found.mean(0) - variance if kind == "waic" else -variance
    if kind in ("ll", "typicality"):
        mixture = found.logsumexp(0) - math.log(len(found))
        return mixture if training is None or kind == "ll" else -(mixture - training).abs()
    logs = found.log_softmax(0)
    if kind == "entropy":
        return (-(logs.exp() * logs).sum(0)).exp()
    return (-(2 * logs).logsumexp(0)).exp()


def score_temperature(log_likelihood: Float[Tensor, "samples n"], *, share: float = 0.6) -> float:
    """A number to divide log-likelihoods by, so that effective sample sizes do not all collapse to 1.

    The spread of log-likelihoods grows with the number of pixels. Choose this on held-out data of the training kind
    and on nothing else; a score computed with it is no longer the published one.

    Args:
        log_likelihood: of held-out data.
        share: the mean effective share of the samples that is wanted, above 1/M and below 1.

    Returns:
        1 where the share is reached without any.

    Raises:
        InvalidArgument: a share out of range.
        InvalidInput: as `ood_score`.
    """
    count = len(log_likelihood)
    if not 1 / max(count, 1) < share < 1:
        raise InvalidArgument(f"share is {share}; with {count} samples give a number from above {1 / count:.3g} to 1")

    def reached(log_temperature: float) -> bool:
        tempered = log_likelihood.double() / math.exp(log_temperature)
        return float(ood_score(tempered, "ess").mean()) / count >= share

    low, high = 0.0, 20.0
    if reached(low):
        return 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return math.exp(high)


def mutated(x: Float[Tensor, "n ..."], rate: float, generator: torch.Generator) -> Float[Tensor, "n ..."]:
    """The same examples, each element replaced by a uniform number of the data's range with probability ``rate``.

    What a background model is trained on: the difference of the two models' log-likelihoods is a score.

    Raises:
        InvalidArgument: a rate outside 0 to 1.

    Source: Ren et al., arXiv:1906.02845.
    """
    if not 0 <= rate <= 1:
        raise InvalidArgument(f"rate is {rate}; give a probability")
    low, high = float(x.min()), float(x.max())
    chosen = torch.rand(x.shape, generator=generator) < rate
    return torch.where(chosen, low + (high - low) * torch.rand(x.shape, generator=generator), x)


class BayesianVAE:
    """A VAE with samples of its decoder's posterior (and of its encoder's), and the scores made of them.

    Args:
        vae: the model; `fit` trains it in place.
        prior_precision: of the Gaussian prior over each sampled weight.
        bayes_encoder: whether the encoder is sampled too ("BVAE2"); otherwise it is trained until the end of burn-in
            and then stands still ("BVAE1").

    Attributes:
        samples: weights by name, with the samples as their first axis; empty before `fit`.

    Raises:
        InvalidArgument: a prior precision that is not above 0.

    >>> x = torch.rand(64, 4, generator=torch.Generator().manual_seed(0)).round()
    >>> model = BayesianVAE(VAE(VAEConfig((4,), latent=1, hidden=(8,))))
    >>> chain = Chain(warm_up=50, burn_in=20, samples=4, thin=5)
    >>> model.fit(x, chain).score(x[:3], "ess").shape
    torch.Size([3])
    """

    def __init__(self, vae: VAE, *, prior_precision: float = 1.0, bayes_encoder: bool = False) -> None:
        if not 0 < prior_precision < math.inf:
            raise InvalidArgument(f"prior_precision is {prior_precision}; it must be above 0")
        self.vae, self.prior_precision, self.bayes_encoder = vae, prior_precision, bayes_encoder
        self.samples: dict[str, Tensor] = {}

    @classmethod
    def of(cls, models: Sequence[VAE]) -> BayesianVAE:
        """A deep ensemble in place of a chain: each model is one sample, with its own encoder.

        Raises:
            InvalidArgument: fewer than 2 models, or of different configs.
        """
        if len(models) < 2:
            raise InvalidArgument(f"{len(models)} models; scores compare at least 2")
        if any(model.config != models[0].config for model in models):
            raise InvalidArgument("the models have different configs; an ensemble is of one kind")
        made = cls(models[0], bayes_encoder=True)
        states = [dict(model.named_parameters()) for model in models]
        made.samples = {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}
        return made

    def fit(
        self, x: Float[Tensor, "n ..."], chain: Chain | None = None, *, seed: int = 0, show: bool = False
    ) -> BayesianVAE:
        """Train, burn in, and keep samples.

        Args:
            x: training examples, held in memory.
            chain: how long, how fast; None for `Chain()`.
            seed: of the batches, the latent draws and the chain.
            show: whether bars are drawn.

        Raises:
            InvalidInput: examples that the model cannot have made; see `VAE.check`.
            ChainDiverged: a loss or a weight is no longer finite; it names the step, counted from the first with noise.
            NonFiniteLoss: the same before any noise.

        Warns:
            InferenceAtRisk: on training data the effective sample size is below 0.2 or above 0.98 of the samples: the
                scores will hardly tell inputs apart.
        """
        self.vae.check(x)
        chain = chain or Chain()
        x = x.to(next(self.vae.parameters()).device)
        if chain.warm_up:
            adam = AdamW(lr=chain.warm_up_lr, weight_decay=0.0)
            how: dict[str, Any] = {"optimiser": adam, "schedule": Constant(), "seed": seed, "show": show}
            Trainer(self.vae, Elbo(), _batches(x, chain.batch, seed), steps=chain.warm_up, title="warm-up", **how).fit()
        try:
            self._sample(x, chain, seed)
        except NonFiniteLoss as error:
            raise ChainDiverged(
                f"the chain left at step {error.step}: its loss is not finite; take a smaller lr than {chain.lr}",
                step=error.step,
            ) from error
        self._warn(x[:_LOOKED_AT])
        return self

    def _sample(self, x: Tensor, chain: Chain, seed: int) -> None:
        """Burn-in, then the samples, all in one run of the trainer."""
        built = _Burning(chain, len(x), self.prior_precision, self.bayes_encoder, seed)
        steps = chain.burn_in + chain.samples * chain.thin
        trainer = Trainer(
            self.vae,
            Elbo(),
            _batches(x, chain.batch, seed + 1),
            steps=steps,
            optimiser=built,
            schedule=Constant(),
            clip=None,
            seed=seed + 1,
            show=False,
        )
        kept: list[dict[str, Tensor]] = []
        wanted = {name: parameter.requires_grad for name, parameter in self.vae.encoder.named_parameters()}
        try:
            trainer.advance(chain.burn_in)
            for optimiser in trainer.optimisers:
                if isinstance(optimiser, SGHMC):
                    optimiser.freeze()
            if not self.bayes_encoder:
                self.vae.encoder.requires_grad_(False)
            for _ in range(chain.samples):
                trainer.advance(chain.thin)
                kept.append({name: parameter.detach().clone() for name, parameter in self._sampled()})
        finally:
            for name, parameter in self.vae.encoder.named_parameters():
                parameter.requires_grad_(wanted[name])
        self.samples = {name: torch.stack([sample[name] for sample in kept]) for name in kept[0]}

    def _sampled(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.vae.named_parameters():
            if self.bayes_encoder or name.startswith("decoder."):
                yield name, parameter

    def _warn(self, x: Tensor) -> None:
        share = float(self.score(x, "ess").mean()) / len(self)
        if not _HEALTHY[0] <= share <= _HEALTHY[1]:
            remedy = (
                "divide log-likelihoods by score_temperature(held-out data), or take a larger prior_precision"
                if share < _HEALTHY[0]
                else "the samples are nearly one: raise thin or lr, or sample longer"
            )
            warnings.warn(
                f"on training data the effective sample size is {share:.2f} of the {len(self)} samples; {remedy}",
                InferenceAtRisk,
                stacklevel=3,
            )

    def __len__(self) -> int:
        """How many posterior samples there are."""
        return len(next(iter(self.samples.values()))) if self.samples else 0

    @torch.no_grad()
    def log_likelihood(self, x: Float[Tensor, "n ..."], *, n_z: int = 64, seed: int = 0) -> Float[Tensor, "samples n"]:
        r"""log p(x | weights) of each posterior sample by importance sampling, in nats.

        $\log \frac1S \sum_s p(x \mid z_s) p(z_s) / q(z_s \mid x)$, whose standard normal draws are the same for every
        sample and every input.

        Args:
            x: inputs.
            n_z: S; with few, the estimate is low.
            seed: of the draws.

        Raises:
            InvalidInput: inputs that the model cannot have made; see `VAE.check`.
            InvalidArgument: ``n_z`` below 1.
            NotFitted: before `fit`.
        """
        if not self.samples:
            raise NotFitted("there are no posterior samples; call fit first")
        if n_z < 1:
            raise InvalidArgument(f"n_z is {n_z}; give 1 or more")
        self.vae.check(x)
        device = next(self.vae.parameters()).device
        noise = torch.randn(n_z, 1, self.vae.config.latent, generator=torch.Generator().manual_seed(seed)).to(device)
        size = max(1, _ROOM // (n_z * math.prod(self.vae.config.shape)))
        return torch.cat([self._chunk(part.to(device), noise) for part in x.split(size)], 1)

    def _chunk(self, x: Tensor, noise: Tensor) -> Tensor:
        """Log-likelihoods [samples, n] of so many inputs that their decodings fit into memory."""
        rows = []
        drawn = None if self.bayes_encoder else _draw(self.vae.encode(x), noise)
        for sample in self._states():
            if self.bayes_encoder:
                drawn = _draw(moments(functional_call(self.vae.encoder, _part(sample, "encoder."), (x,))), noise)
            assert drawn is not None
            z, ratio = drawn
            logits = self._logits(sample, z.flatten(0, 1)).view(len(noise), *x.shape)
            terms = self.vae.log_likelihood(x[None], logits).double() + ratio
            rows.append(terms.logsumexp(0) - math.log(len(noise)))
        return torch.stack(rows)

    def _logits(self, sample: dict[str, Tensor], z: Tensor) -> Tensor:
        out: Tensor = functional_call(self.vae.decoder, _part(sample, "decoder."), (z,))
        return out.view(-1, *self.vae.config.shape)

    def _states(self) -> Iterator[dict[str, Tensor]]:
        for index in range(len(self)):
            yield {name: value[index] for name, value in self.samples.items()}

    def score(
        self, x: Float[Tensor, "n ..."], kind: Kind, *, n_z: int = 64, seed: int = 0, training: float | None = None
    ) -> Float[Tensor, " n"]:
        """`ood_score` of inputs; higher is more like the training data.

        Raises:
            As `log_likelihood` and `ood_score`.
        """
        return ood_score(self.log_likelihood(x, n_z=n_z, seed=seed), kind, training=training)

    @torch.no_grad()
    def latent_score(
        self, z: Float[Tensor, "n latent"], kind: Kind, *, n_x: int = 20, n_z: int = 64, seed: int = 0
    ) -> Float[Tensor, " n"]:
        """How well the model knows what a latent code stands for: the mean score of outputs drawn from it.

        Each output is drawn from p(x | z) of a posterior sample that is drawn first. Low values lie outside the region
        that the data told anything about.

        Args:
            z: codes.
            kind: a score other than "typicality".
            n_x: outputs a code.
            n_z: latent draws for the likelihood of each.
            seed: of all draws.

        Raises:
            InvalidArgument: "typicality", or ``n_x`` below 1.
            InvalidInput: codes of another width, or not finite.
            NotFitted: before `fit`.

        Source: arXiv:1912.05651, D(z) as the expectation of D(x) under p(x | z).
        """
        if not self.samples:
            raise NotFitted("there are no posterior samples; call fit first")
        if kind == "typicality" or n_x < 1:
            raise InvalidArgument(f"kind {kind!r} with n_x={n_x}: give 1 output or more, and a kind but typicality")
        if z.shape[1:] != (self.vae.config.latent,) or not z.isfinite().all():
            raise InvalidInput(f"codes are finite rows of {self.vae.config.latent}, got shape {tuple(z.shape)}")
        device = next(self.vae.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(self), (n_x,), generator=generator).tolist()
        states = list(self._states())
        logits = torch.cat([self._logits(states[index], z.to(device)) for index in chosen])
        drawn = self.vae.sample_output(logits, torch.Generator(device).manual_seed(seed))
        return self.score(drawn, kind, n_z=n_z, seed=seed).view(n_x, len(z)).mean(0)

    def save(self, folder: str | Path) -> None:
        """Write config, weights and samples.

        Raises:
            NotFitted: there are no samples.
            DiskFull: as `pippin.core.checkpoint.save_folder`.
        """
        if not self.samples:
            raise NotFitted("there are no posterior samples to save; call fit first")
        config = {
            "model_type": _TYPE,
            "vae": asdict(self.vae.config),
            "prior_precision": self.prior_precision,
            "bayes_encoder": self.bayes_encoder,
        }
        tensors = {f"vae.{name}": value for name, value in self.vae.state_dict().items()}
        checkpoint.save_folder(folder, config, tensors | {f"samples.{k}": v for k, v in self.samples.items()})

    @classmethod
    def load(cls, folder: str | Path) -> BayesianVAE:
        """What `save` wrote.

        Raises:
            ModelNotFound: no such folder.
            CorruptedFile: it holds something else, or a part is missing.
        """
        opened = checkpoint.open_folder(folder)
        if opened.config.get("model_type") != _TYPE:
            raise CorruptedFile(f"{folder} holds {opened.config.get('model_type')!r}, no Bayesian VAE")
        tensors = {name: opened.tensor(name).clone() for name in opened.names()}
        try:
            described = dict(opened.config["vae"])
            described |= {name: tuple(described[name]) for name in ("shape", "hidden")}
            made = cls(
                VAE(VAEConfig(**described)),
                prior_precision=opened.config["prior_precision"],
                bayes_encoder=opened.config["bayes_encoder"],
            )
            made.vae.load_state_dict(_part(tensors, "vae."))
        except (KeyError, TypeError, RuntimeError, InvalidArgument) as error:
            raise CorruptedFile(f"{folder}: config and weights do not describe a Bayesian VAE: {error}") from error
        made.samples = _part(tensors, "samples.")
        return made


@dataclass(frozen=True)
class _Burning:
    """The chain over what is sampled, and AdamW over the rest; an optimiser for the trainer."""

    chain: Chain
    n_data: int
    prior_precision: float
    bayes_encoder: bool
    seed: int

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        sampled = [p for name, p in named if self.bayes_encoder or name.startswith("decoder.")]
        rest = [(name, p) for name, p in named if not (self.bayes_encoder or name.startswith("decoder."))]
        chain = SGHMC(
            sampled,
            self.chain.lr,
            n_data=self.n_data,
            friction=self.chain.friction,
            prior_precision=self.prior_precision,
            temperature=self.chain.temperature,
            seed=self.seed,
        )
        trained = AdamW(lr=self.chain.warm_up_lr, weight_decay=0.0)
        return [chain, trained.over(rest)] if rest else [chain]


def _batches(x: Tensor, batch: int, seed: int) -> Shuffled[int, Tensor]:
    return Shuffled(range(len(x)), batch, seed=seed, collate=lambda rows: x[torch.tensor(rows, device=x.device)])


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _draw(q: tuple[Tensor, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [draws, n, latent] of q(z | x), and log p(z) - log q(z | x) [draws, n] in float64."""
    mean, log_var = q
    z = mean + (0.5 * log_var).exp() * noise
    ratio = 0.5 * (noise.double().square() + log_var.double() - z.double().square()).sum(-1)
    return z, ratio
