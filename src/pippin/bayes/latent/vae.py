r"""A variational autoencoder (VAE): an encoder to a Gaussian latent code, and a decoder back to the data.

Notable here:
- one class for vectors and images, with Bernoulli, Gaussian or categorical outputs; `VAEConfig` chooses
- there is no batch normalization, so that the weights can be sampled by a Markov chain (`BayesianVAE`)
- `terms` returns both terms of the evidence lower bound (ELBO) per example, which other objectives recombine

Source: Kingma and Welling, arXiv:1312.6114; Higgins et al., "beta-VAE", ICLR 2017 (beta).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.checks import NonNegativeFloat, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.core.formats import checkpoint
from pippin.train.objective import CountsSteps, Loss

_LOG_VARIANCE = 10.0


@checked
@dataclass(frozen=True)
class VAEConfig:
    """The architecture and likelihood of a variational autoencoder.

    Attributes:
        shape: shape of one example: (features,), (channels, height, width), or (steps, choices) for one-hot rows.
        latent_dim: dimensions of the latent code.
        hidden_sizes: sizes of the encoder's hidden layers; the decoder uses them in reverse. With
            ``architecture="conv"`` these are the channels of convolutions with stride 2, and the last entry is the size
            of a dense layer after them.
        likelihood: distribution of the output: "bernoulli" for values from 0 to 1, "gaussian" for real values,
            "categorical" for one-hot vectors along the last axis.
        noise_std: standard deviation of a Gaussian output.
        architecture: "mlp", or "conv" for images.

    Raises:
        InvalidArgument: no sizes, or an image size that is not divisible by the strides.
    """

    shape: tuple[PositiveInt, ...]
    latent_dim: PositiveInt
    hidden_sizes: tuple[PositiveInt, ...] = (100,)
    likelihood: Literal["bernoulli", "gaussian", "categorical"] = "bernoulli"
    noise_std: PositiveFloat = 0.1
    architecture: Literal["mlp", "conv"] = "mlp"

    def __post_init__(self) -> None:
        if not self.shape or not self.hidden_sizes:
            raise InvalidArgument(
                f"shape {self.shape} and hidden_sizes {self.hidden_sizes} need at least one size each"
            )
        if self.architecture == "conv":
            side = 2 ** (len(self.hidden_sizes) - 1)
            if len(self.shape) != 3 or len(self.hidden_sizes) < 2 or self.shape[1] % side or self.shape[2] % side:
                raise InvalidArgument(
                    f"convolutions of {self.hidden_sizes[:-1]} channels and a dense layer need images (channels, "
                    f"height, width) with sides that are multiples of {side}, got shape {self.shape} and hidden_sizes "
                    f"{self.hidden_sizes}"
                )


@dataclass(frozen=True)
class ElboTerms:
    """Both terms of the ELBO for each example, estimated with one latent sample.

    Attributes:
        log_likelihood: log p(x | z) in nats.
        kl: KL(q(z | x) || p(z)) in nats.
        z: the sampled code.
        mean: mean of q(z | x).
        log_var: log variance of q(z | x).
    """

    log_likelihood: Float[Tensor, " n"]
    kl: Float[Tensor, " n"]
    z: Float[Tensor, "n latent"]
    mean: Float[Tensor, "n latent"]
    log_var: Float[Tensor, "n latent"]


class VAE(nn.Module):
    """An encoder q(z | x) and a decoder p(x | z), with the prior z ~ N(0, I).

    Args:
        config: architecture and likelihood.
        seed: seed of the initial weights; the global generator does not change.

    Attributes:
        encoder: maps examples to means and log variances, [n, 2 latent].
        decoder: maps codes to the parameters of the likelihood, see `logits`.

    >>> vae = VAE(VAEConfig((4,), latent_dim=2, hidden_sizes=(8,)))
    >>> mean, log_var = vae.encode(torch.rand(3, 4))
    >>> mean.shape, vae.decode(mean).shape
    (torch.Size([3, 2]), torch.Size([3, 4]))
    """

    model_type: ClassVar[str] = "pippin_vae"

    def __init__(self, config: VAEConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder, self.decoder = (_conv if config.architecture == "conv" else _mlp)(config)

    def encode(self, x: Float[Tensor, "n ..."]) -> tuple[Float[Tensor, "n latent"], Float[Tensor, "n latent"]]:
        """Mean and log variance of q(z | x).

        Raises:
            InvalidInput: examples of another shape than the model's.
        """
        if tuple(x.shape[1:]) != self.config.shape:
            raise InvalidInput(f"examples of shape {tuple(x.shape[1:])}; the model takes {self.config.shape}")
        return moments(self.encoder(x))

    def logits(self, z: Float[Tensor, "n latent"]) -> Float[Tensor, "n ..."]:
        """The decoder's output: Bernoulli logits, Gaussian means, or categorical logits, by the likelihood."""
        out: Tensor = self.decoder(z)
        return out.view(-1, *self.config.shape)

    def decode(self, z: Float[Tensor, "n latent"]) -> Float[Tensor, "n ..."]:
        """The mean of p(x | z): probabilities, or the mean of a Gaussian."""
        return self.mean_of(self.logits(z))

    def mean_of(self, logits: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """The mean of x from the decoder's `logits`."""
        if self.config.likelihood == "gaussian":
            return logits
        return logits.sigmoid() if self.config.likelihood == "bernoulli" else logits.softmax(-1)

    def log_likelihood(self, x: Float[Tensor, ...], logits: Float[Tensor, ...]) -> Float[Tensor, ...]:
        """log p(x | z) in nats, given the decoder's ``logits``; leading axes are broadcast.

        For a Bernoulli x may lie between 0 and 1: the value is then the usual cross-entropy, not a density.
        """
        if self.config.likelihood == "gaussian":
            std = self.config.noise_std
            each = -0.5 * ((x - logits) / std).square() - math.log(std) - 0.5 * math.log(2 * math.pi)
        elif self.config.likelihood == "bernoulli":
            each = x * logits - F.softplus(logits)  # x log p + (1 - x) log(1 - p)
        else:
            each = x * logits.log_softmax(-1)
        return each.flatten(-len(self.config.shape)).sum(-1)

    def sample_output(
        self, logits: Float[Tensor, "n ..."], generator: torch.Generator | None = None
    ) -> Float[Tensor, "n ..."]:
        """Sample one x from p(x | z) for each row of logits."""
        mean = self.mean_of(logits)
        if self.config.likelihood == "gaussian":
            noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
            return mean + self.config.noise_std * noise
        if self.config.likelihood == "bernoulli":
            return mean.bernoulli(generator=generator)
        choice = torch.multinomial(mean.flatten(0, -2), 1, generator=generator)[:, 0]
        return F.one_hot(choice, mean.shape[-1]).to(mean.dtype).view(mean.shape)

    def terms(self, x: Float[Tensor, "n ..."], generator: torch.Generator | None = None) -> ElboTerms:
        """Both terms of the ELBO with one sampled code for each example.

        Raises:
            InvalidInput: examples of another shape than the model's.
        """
        mean, log_var = self.encode(x)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
        z = mean + (0.5 * log_var).exp() * noise  # reparameterization
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(-1)
        return ElboTerms(self.log_likelihood(x, self.logits(z)), kl, z, mean, log_var)

    def forward(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """The reconstruction at the mean code."""
        return self.decode(self.encode(x)[0])

    def check(self, x: Float[Tensor, "n ..."]) -> None:
        """Check that examples fit the model's shape, dtype and likelihood.

        Raises:
            InvalidInput: not a tensor, another dtype than the weights', no examples, another shape, values that are not
                finite, outside 0 to 1 for a Bernoulli, or not one-hot for a categorical; the message names the first
                such row.
        """
        dtype = next(self.parameters()).dtype
        if not isinstance(x, Tensor) or x.dtype != dtype:
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInput(f"examples are {found}, the weights {dtype}; give torch.as_tensor(x, dtype={dtype})")
        if not len(x):
            raise InvalidInput("there are no examples")
        if tuple(x.shape[1:]) != self.config.shape:
            raise InvalidInput(f"examples of shape {tuple(x.shape[1:])}; the model takes {self.config.shape}")
        flat = x.flatten(1)
        wrong, why = ~flat.isfinite().all(1), "holds values that are not finite; leave it out"
        if not wrong.any() and self.config.likelihood == "bernoulli":
            wrong, why = ((flat < 0) | (flat > 1)).any(1), "has values outside 0 to 1; rescale, or use a Gaussian"
        elif not wrong.any() and self.config.likelihood == "categorical":
            hot = ((x == 0) | (x == 1)).all(-1) & (x.sum(-1) == 1)
            wrong, why = ~hot.view(len(x), -1).all(1), "is not one-hot along its last axis"
        if wrong.any():
            raise InvalidInput(f"row {int(wrong.nonzero()[0, 0])} {why}")

    def save(self, path: str | Path) -> None:
        """Write config and weights to a folder that `load` reads.

        Raises:
            DiskFull: nothing was written.
        """
        checkpoint.save(self, path, model_type=self.model_type, config=self.config)

    @classmethod
    def load(cls, path: str | Path, *, device: str | None = None) -> VAE:
        """Read a folder that `save` wrote.

        Args:
            path: the folder.
            device: see `pippin.load`; None chooses.

        Returns:
            The model, in evaluation mode.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: it holds another kind of model.
            CorruptedFile: a file is damaged, or the tensors do not fit the config.
        """
        return checkpoint.load(
            path, lambda saved: cls(saved.config), model_type=cls.model_type, config_type=VAEConfig, device=device
        )


class Elbo(CountsSteps):
    r"""The negative ELBO, $w\,[\beta\,\mathrm{KL}(q(z \mid x) \| p(z)) - \log p(x \mid z)]$; for the `Trainer`.

    A batch is a tensor of examples, or a tuple of examples and their weights; further elements of a tuple are ignored.
    Loss and metrics ("reconstruction" and "kl", in nats) are means over examples, regardless of the sum of the weights.

    Args:
        beta: weight of the KL term, or a function from the number of updates to it.
        weighted: whether the second element of a tuple holds weights.
    """

    unit = "examples"

    @checked
    def __init__(self, beta: NonNegativeFloat | Callable[[int], float] = 1.0, *, weighted: bool = False) -> None:
        self.beta, self.weighted = beta, weighted

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
        """The loss of a batch."""
        x = batch[0] if isinstance(batch, tuple | list) else batch
        terms = model.terms(x, generator)  # type: ignore[operator]
        beta = self.beta(self.step) if callable(self.beta) else self.beta
        loss = beta * terms.kl - terms.log_likelihood
        if self.weighted:
            loss = loss * batch[1]
        sums = {"reconstruction": -terms.log_likelihood.detach().sum(), "kl": terms.kl.detach().sum()}
        return Loss(loss.sum(), float(len(x)), sums)


def moments(encoded: Float[Tensor, "n both"]) -> tuple[Float[Tensor, "n latent"], Float[Tensor, "n latent"]]:
    """Split an encoder's output into mean and log variance; the latter is clamped to ±10 against overflow."""
    mean, log_var = encoded.chunk(2, -1)
    return mean, log_var.clamp(-_LOG_VARIANCE, _LOG_VARIANCE)


def _mlp(config: VAEConfig) -> tuple[nn.Module, nn.Module]:
    size = math.prod(config.shape)
    down, up = (size, *config.hidden_sizes), (config.latent_dim, *reversed(config.hidden_sizes))
    encoder = [nn.Flatten(), *_dense(down), nn.Linear(down[-1], 2 * config.latent_dim)]
    return nn.Sequential(*encoder), nn.Sequential(*_dense(up), nn.Linear(up[-1], size))


def _dense(widths: tuple[int, ...]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers


def _conv(config: VAEConfig) -> tuple[nn.Module, nn.Module]:
    channels, height, width = config.shape
    *convolutions, dense = config.hidden_sizes
    side = 2 ** len(convolutions)
    low = (convolutions[-1], height // side, width // side)
    down, up = [channels, *convolutions], [*reversed(convolutions), channels]
    encoder: list[nn.Module] = []
    for before, after in itertools.pairwise(down):
        encoder += [nn.Conv2d(before, after, 4, 2, 1), nn.ReLU()]
    size = math.prod(low)
    encoder += [nn.Flatten(), nn.Linear(size, dense), nn.ReLU(), nn.Linear(dense, 2 * config.latent_dim)]
    decoder: list[nn.Module] = [nn.Linear(config.latent_dim, dense), nn.ReLU(), nn.Linear(dense, size)]
    decoder += [nn.Unflatten(1, low)]
    for before, after in itertools.pairwise(up):
        decoder += [nn.ReLU(), nn.ConvTranspose2d(before, after, 4, 2, 1)]
    return nn.Sequential(*encoder), nn.Sequential(*decoder)
