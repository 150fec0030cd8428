r"""A variational autoencoder with a posterior over its decoder's weights, for out-of-distribution (OOD) detection.

Notable here:
- all posterior samples use the same latent noise for an input, so that their likelihoods differ by the weights only
- a change of the likelihood that is common to all samples cancels in the effective sample size; this removes part of
  the bias of likelihoods towards simple images, and costs power where the likelihood itself separates the data
- there is no default score: which is best depends on the data sets, so each call names one
- the score of an input does not depend on the other inputs of the batch

Source: Daxberger and Hernández-Lobato, "Bayesian Variational Autoencoders for Unsupervised Out-of-Distribution
Detection", arXiv:1912.05651. Model and score follow its abstract, as the full text was not available; the sampler
follows its own publication (`pippin.bayes.predictors.sghmc`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from pippin.bayes.latent.vae import VAE, Elbo, VAEConfig, moments
from pippin.bayes.predictors.sghmc import SGHMC, SGHMCConfig
from pippin.core import device as devices
from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import (
    ChainDiverged,
    CorruptedFile,
    InferenceAtRisk,
    InvalidArgument,
    InvalidInput,
    NonFiniteLoss,
    NotFitted,
)
from pippin.core.formats import checkpoint
from pippin.data.streams import Shuffled
from pippin.train import AdamW, ConstantSchedule, Trainer

Kind = Literal["ess", "entropy", "waic", "variance", "ll", "typicality"]
_MAX_ELEMENTS = 1 << 22  # elements of decoded output that are held at once
_NUM_CHECKED = 256  # training examples on which the samples are checked after a fit
_HEALTHY = (0.2, 0.98)  # range of the effective share of samples outside of which `fit` warns


@checked
def ood_score(
    log_likelihood: Float[Tensor, "samples n"], kind: Kind, *, training: float | Float[Tensor, ""] | None = None
) -> Float[Tensor, " n"]:
    r"""A score of how similar each input is to the training data, from its log-likelihood under posterior samples.

    With M samples and $w = \mathrm{softmax}_m(L_m)$:

    - "ess": $1 / \sum_m w_m^2$, from 1 to M: the effective number of samples when they are reweighted by p(x)
    - "entropy": $\exp H(w)$, a smoother score of the same range
    - "ll": $\log \frac1M \sum_m e^{L_m}$, the posterior predictive log-likelihood
    - "waic": mean minus variance of L over the samples
    - "variance": minus the variance of L over the samples
    - "typicality": minus the distance of "ll" from its mean over training data

    Args:
        log_likelihood: L, in nats, of n inputs under at least 2 samples.
        kind: the score.
        training: the mean "ll" of training data; required for "typicality".

    Returns:
        Scores in float64; for every kind, higher is more similar to the training data.

    Raises:
        InvalidArgument: "typicality" without ``training``, or a ``training`` that is not a single number.
        InvalidInput: fewer than 2 samples, or values that are not finite.

    Source: arXiv:1912.05651 (ess); Watanabe 2010 and arXiv:1810.01392 (waic); arXiv:1906.02994 (typicality).

    >>> ood_score(torch.tensor([[-3.0, -3.0], [-3.0, -9.0]]), "ess").round(decimals=2).tolist()
    [2.0, 1.0]
    """
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
    """A temperature to divide log-likelihoods by, so that effective sample sizes do not all collapse to 1.

    The differences between log-likelihoods grow with the number of pixels. Choose the temperature on held-out
    in-distribution data only; a score computed with it is no longer the published one.

    Args:
        log_likelihood: log-likelihoods of held-out data, in nats.
        share: the desired mean of the effective sample size over M, above 1/M and below 1.

    Returns:
        The smallest such temperature, at least 1.

    Raises:
        InvalidArgument: a share out of range.
        InvalidInput: see `ood_score`.
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


@dataclass(frozen=True)
class BayesianVAEConfig:
    """The config of a saved Bayesian VAE.

    Attributes:
        vae: config of the autoencoder.
        prior_precision: see `BayesianVAE`.
        bayes_encoder: see `BayesianVAE`.
    """

    vae: VAEConfig
    prior_precision: PositiveFloat
    bayes_encoder: bool


class BayesianVAE:
    """A VAE with posterior samples of its decoder's weights, optionally of its encoder's, and OOD scores.

    Args:
        vae: the model; `fit` trains it in place.
        prior_precision: precision of the Gaussian prior on each sampled weight.
        bayes_encoder: whether the encoder is sampled too ("BVAE2"); otherwise it is trained until the end of burn-in
            and then fixed ("BVAE1").

    Attributes:
        samples: sampled weights by name, [samples, ...]; empty before `fit`.

    >>> x = torch.rand(64, 4, generator=torch.Generator().manual_seed(0)).round()
    >>> model = BayesianVAE(VAE(VAEConfig((4,), latent_dim=1, hidden_sizes=(8,))))
    >>> sampler = SGHMCConfig(warmup_steps=50, burn_in_steps=20, num_samples=4, thinning=5)
    >>> model.fit(x, sampler).score(x[:3], "ess").shape
    torch.Size([3])
    """

    model_type: ClassVar[str] = "pippin_bayesian_vae"

    @checked
    def __init__(self, vae: VAE, *, prior_precision: PositiveFloat = 1.0, bayes_encoder: bool = False) -> None:
        self.vae, self.prior_precision, self.bayes_encoder = vae, prior_precision, bayes_encoder
        self.samples: dict[str, Tensor] = {}

    @classmethod
    def from_models(cls, models: Sequence[VAE]) -> BayesianVAE:
        """Use a deep ensemble instead of a Markov chain: each model is one sample, with its own encoder.

        Raises:
            InvalidArgument: fewer than 2 models, or different configs.
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
        self,
        x: Float[Tensor, "n ..."],
        sampler: SGHMCConfig | None = None,
        *,
        seed: int = 0,
        show_progress: bool = False,
    ) -> BayesianVAE:
        """Train with Adam, then run stochastic-gradient HMC: burn-in first, then samples.

        Args:
            x: training examples, held in memory.
            sampler: lengths and step sizes of warm-up and chain; None for `SGHMCConfig()`.
            seed: seed of the batches, the latent noise and the chain.
            show_progress: whether to show a progress bar.

        Returns:
            The model itself.

        Raises:
            InvalidInput: examples that do not fit the model; see `VAE.check`.
            ChainDiverged: a loss or weight of the chain is not finite; names the step, counted from the start of
                burn-in.
            NonFiniteLoss: a loss is not finite before the chain starts.

        Warns:
            InferenceAtRisk: the mean effective sample size on training data is below 0.2 or above 0.98 of the samples,
                so that scores hardly distinguish inputs.
        """
        self.vae.check(x)
        sampler = sampler or SGHMCConfig()
        x = x.to(next(self.vae.parameters()).device)
        if sampler.warmup_steps:
            Trainer(
                self.vae,
                Elbo(),
                _batches(x, sampler.batch_size, seed),
                steps=sampler.warmup_steps,
                optimizer=AdamW(lr=sampler.warmup_lr, weight_decay=0.0),
                schedule=ConstantSchedule(),
                seed=seed,
                title="warm-up",
                show_progress=show_progress,
            ).fit()
        try:
            self._sample(x, sampler, seed)
        except NonFiniteLoss as error:
            raise ChainDiverged(
                f"the chain diverged at step {error.step}: its loss is not finite; take a smaller lr than {sampler.lr}",
                step=error.step,
            ) from error
        self._warn(x[:_NUM_CHECKED])
        return self

    def _sample(self, x: Tensor, chain: SGHMCConfig, seed: int) -> None:
        """Burn-in and sampling, in one run of the trainer."""
        optimizer_config = _ChainOptimizer(chain, len(x), self.prior_precision, self.bayes_encoder, seed)
        steps = chain.burn_in_steps + chain.num_samples * chain.thinning
        trainer = Trainer(
            self.vae,
            Elbo(),
            _batches(x, chain.batch_size, seed + 1),
            steps=steps,
            optimizer=optimizer_config,
            schedule=ConstantSchedule(),
            max_grad_norm=None,
            seed=seed + 1,
            show_progress=False,
        )
        samples: list[dict[str, Tensor]] = []
        requires_grad = {name: parameter.requires_grad for name, parameter in self.vae.encoder.named_parameters()}
        try:
            trainer.advance(chain.burn_in_steps)
            for optimizer in trainer.optimizers:
                if isinstance(optimizer, SGHMC):
                    optimizer.freeze()
            if not self.bayes_encoder:
                self.vae.encoder.requires_grad_(False)
            for _ in range(chain.num_samples):
                trainer.advance(chain.thinning)
                samples.append({name: parameter.detach().clone() for name, parameter in self._sampled()})
        finally:
            for name, parameter in self.vae.encoder.named_parameters():
                parameter.requires_grad_(requires_grad[name])
        self.samples = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

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
                else "the samples are nearly equal: raise thinning or lr, or sample longer"
            )
            warnings.warn(
                f"on training data the effective sample size is {share:.2f} of the {len(self)} samples; {remedy}",
                InferenceAtRisk,
                stacklevel=3,
            )

    def __len__(self) -> int:
        """The number of posterior samples."""
        return len(next(iter(self.samples.values()))) if self.samples else 0

    @torch.no_grad()
    @checked
    def log_likelihood(
        self, x: Float[Tensor, "n ..."], *, n_z: PositiveInt = 64, seed: int = 0
    ) -> Float[Tensor, "samples n"]:
        r"""log p(x | weights) under each posterior sample, in nats, by importance sampling.

        The estimate is $\log \frac1S \sum_s p(x \mid z_s) p(z_s) / q(z_s \mid x)$; the standard normal noise behind
        $z_s$ is the same for every posterior sample and every input.

        Args:
            x: inputs.
            n_z: number S of latent samples; the estimate is biased low when it is small.
            seed: seed of the latent noise.

        Raises:
            InvalidInput: inputs that do not fit the model; see `VAE.check`.
            NotFitted: before `fit`.
        """
        if not self.samples:
            raise NotFitted("there are no posterior samples; call fit first")
        self.vae.check(x)
        device = next(self.vae.parameters()).device
        noise = torch.randn(n_z, 1, self.vae.config.latent_dim, generator=torch.Generator().manual_seed(seed)).to(
            device
        )
        size = max(1, _MAX_ELEMENTS // (n_z * math.prod(self.vae.config.shape)))
        return torch.cat([self._chunk(part.to(device), noise) for part in x.split(size)], 1)

    def _chunk(self, x: Tensor, noise: Tensor) -> Tensor:
        """Log-likelihoods [samples, n] of a batch that is small enough for the decoded outputs to fit into memory."""
        rows = []
        proposal = None if self.bayes_encoder else _sample_codes(self.vae.encode(x), noise)
        for sample in self._states():
            if self.bayes_encoder:
                q = moments(functional_call(self.vae.encoder, _part(sample, "encoder."), (x,)))
                proposal = _sample_codes(q, noise)
            assert proposal is not None
            z, ratio = proposal
            logits = self._logits(sample, z.flatten(0, 1)).view(len(noise), *x.shape)
            terms = self.vae.log_likelihood(x[None], logits).double() + ratio  # [n_z, n]
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
        """`ood_score` of inputs; higher is more similar to the training data.

        Args:
            x: inputs.
            kind: see `ood_score`.
            n_z: see `log_likelihood`.
            seed: seed of the latent noise.
            training: see `ood_score`.

        Raises:
            InvalidArgument: see `ood_score`.
            InvalidInput: inputs that do not fit the model; see `VAE.check`.
            NotFitted: before `fit`.
        """
        return ood_score(self.log_likelihood(x, n_z=n_z, seed=seed), kind, training=training)

    @torch.no_grad()
    @checked
    def latent_score(
        self, z: Float[Tensor, "n latent"], kind: Kind, *, n_x: PositiveInt = 20, n_z: PositiveInt = 64, seed: int = 0
    ) -> Float[Tensor, " n"]:
        """The mean score of outputs sampled from each latent code; low where there were no training data.

        Each output is sampled from p(x | z) under a randomly chosen posterior sample.

        Args:
            z: codes.
            kind: a score other than "typicality".
            n_x: number of outputs sampled for each code.
            n_z: latent samples for the likelihood of each output.
            seed: seed of all sampling.

        Raises:
            InvalidArgument: ``kind`` is "typicality".
            InvalidInput: codes of another number of dimensions, or not finite.
            NotFitted: before `fit`.

        Source: arXiv:1912.05651, D(z) as the expectation of D(x) under p(x | z).
        """
        if not self.samples:
            raise NotFitted("there are no posterior samples; call fit first")
        if kind == "typicality":
            raise InvalidArgument("kind is 'typicality', which no latent score is defined for; choose another")
        if z.shape[1:] != (self.vae.config.latent_dim,) or not z.isfinite().all():
            raise InvalidInput(f"codes are finite rows of {self.vae.config.latent_dim}, got shape {tuple(z.shape)}")
        device = next(self.vae.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(self), (n_x,), generator=generator).tolist()
        states = list(self._states())
        logits = torch.cat([self._logits(states[index], z.to(device)) for index in chosen])
        outputs = self.vae.sample_output(logits, torch.Generator(device).manual_seed(seed))  # [n_x n, ...]
        return self.score(outputs, kind, n_z=n_z, seed=seed).view(n_x, len(z)).mean(0)

    def save(self, path: str | Path) -> None:
        """Write config, weights and posterior samples to a folder that `load` reads.

        Raises:
            NotFitted: there are no samples.
            DiskFull: nothing was written.
        """
        if not self.samples:
            raise NotFitted("there are no posterior samples to save; call fit first")
        config = BayesianVAEConfig(self.vae.config, self.prior_precision, self.bayes_encoder)
        tensors = {f"vae.{name}": value for name, value in self.vae.state_dict().items()}
        tensors |= {f"samples.{name}": value for name, value in self.samples.items()}
        checkpoint.save(tensors, path, model_type=self.model_type, config=config)

    @classmethod
    def load(cls, path: str | Path, *, device: str | None = None) -> BayesianVAE:
        """Read a folder that `save` wrote.

        Args:
            path: the folder.
            device: see `pippin.load`; None chooses.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: it holds another kind of model.
            CorruptedFile: a file is damaged, or the tensors do not fit the config.
        """
        where = devices.choose(device)
        saved = checkpoint.open_model(path, model_type=cls.model_type, config_type=BayesianVAEConfig)
        config, stored = saved.config, saved.checkpoint
        try:
            made = cls(VAE(config.vae), prior_precision=config.prior_precision, bayes_encoder=config.bayes_encoder)
            made.vae.load_state_dict(stored.tensors("vae."))
        except (RuntimeError, InvalidArgument) as error:
            raise CorruptedFile(f"{path}: config and weights do not describe a Bayesian VAE: {error}") from error
        made.vae.to(where).eval()
        made.samples = {name: value.to(where) for name, value in stored.tensors("samples.").items()}
        return made


@dataclass(frozen=True)
class _ChainOptimizer:
    """SGHMC for the sampled weights and AdamW for the others, as an optimizer of the trainer."""

    chain: SGHMCConfig
    num_data: int
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
            num_data=self.num_data,
            friction=self.chain.friction,
            prior_precision=self.prior_precision,
            temperature=self.chain.temperature,
            seed=self.seed,
        )
        trained = AdamW(lr=self.chain.warmup_lr, weight_decay=0.0)
        return [chain, trained.for_parameters(rest)] if rest else [chain]


def _batches(x: Tensor, batch: int, seed: int) -> Shuffled[int, Tensor]:
    return Shuffled(range(len(x)), batch, seed=seed, collate=lambda rows: x[torch.tensor(rows, device=x.device)])


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _sample_codes(q: tuple[Tensor, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n_z, n, latent] from q(z | x), and log p(z) - log q(z | x) [n_z, n] in float64."""
    mean, log_var = q
    z = mean + (0.5 * log_var).exp() * noise
    ratio = 0.5 * (noise.double().square() + log_var.double() - z.double().square()).sum(-1)
    return z, ratio
