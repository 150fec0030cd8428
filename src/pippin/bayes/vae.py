r"""A variational autoencoder: a Gaussian latent code, an encoder that guesses it, a decoder that explains what is seen.

Notable here:
- one class for vectors and for pictures, with Bernoulli, Gaussian or categorical outputs: `VAEConfig` says which
- there is no normalisation over a batch, so the decoder may be sampled by a Markov chain, one weight at a time
- `terms` gives both halves of the bound for each example, with the code they were computed at: what is built on top
  (a heavier prior, a total correlation, weights) combines them and needs no other loop

Source: Kingma and Welling, arXiv:1312.6114; Higgins et al., "beta-VAE", ICLR 2017 (beta).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.train.objective import Loss

_LOG_VARIANCE = 10.0


@dataclass(frozen=True)
class VAEConfig:
    """The shape of a variational autoencoder.

    Attributes:
        shape: of one example: (features,), (channels, height, width), or (steps, choices) of one-hot rows.
        latent: dimensions of the code.
        hidden: widths of the encoder's hidden layers, the decoder's reversed. With ``kind="conv"`` channels of
            convolutions of stride 2, and the last entry the width of a dense layer behind them.
        likelihood: of the output: "bernoulli" for numbers from 0 to 1, "gaussian" for any, "categorical" for one-hot
            vectors along the last axis.
        noise: standard deviation of a Gaussian output.
        kind: "mlp", or "conv" for pictures.

    Raises:
        InvalidArgument: a value outside its range.
    """

    shape: tuple[int, ...]
    latent: int
    hidden: tuple[int, ...] = (100,)
    likelihood: Literal["bernoulli", "gaussian", "categorical"] = "bernoulli"
    noise: float = 0.1
    kind: Literal["mlp", "conv"] = "mlp"

    def __post_init__(self) -> None:
        numbers = (*self.shape, self.latent, *self.hidden)
        if not self.shape or not self.hidden or any(number < 1 for number in numbers):
            raise InvalidArgument(
                f"shape {self.shape}, latent {self.latent}, hidden {self.hidden}: give at least one size in each, all "
                "1 or more"
            )
        if self.likelihood not in ("bernoulli", "gaussian", "categorical"):
            raise InvalidArgument(f"likelihood is {self.likelihood!r}; choose bernoulli, gaussian or categorical")
        if not 0 < self.noise < math.inf:
            raise InvalidArgument(f"noise is {self.noise}; give a standard deviation above 0")
        if self.kind not in ("mlp", "conv"):
            raise InvalidArgument(f"kind is {self.kind!r}; choose mlp or conv")
        if self.kind == "conv":
            side = 2 ** (len(self.hidden) - 1)
            if len(self.shape) != 3 or len(self.hidden) < 2 or self.shape[1] % side or self.shape[2] % side:
                raise InvalidArgument(
                    f"convolutions of {self.hidden[:-1]} channels and a dense layer need pictures (channels, height, "
                    f"width) with sides that are multiples of {side}, got {self.shape} and hidden {self.hidden}"
                )


@dataclass(frozen=True)
class Terms:
    """Both halves of the bound for each example, and the code that they were computed at.

    Attributes:
        log_likelihood: log p(x | z) in nats.
        kl: KL(q(z | x) || p(z)) in nats.
        z: the code that was drawn.
        mean: of q.
        log_var: of q.
    """

    log_likelihood: Float[Tensor, " n"]
    kl: Float[Tensor, " n"]
    z: Float[Tensor, "n latent"]
    mean: Float[Tensor, "n latent"]
    log_var: Float[Tensor, "n latent"]


class VAE(nn.Module):
    """An encoder q(z | x) and a decoder p(x | z), with z ~ N(0, I).

    Args:
        config: its shape.
        seed: of the initial weights; the global generator is left alone.

    Attributes:
        encoder: examples to means and log variances, [n, 2 latent].
        decoder: codes to what the likelihood is made of, `logits`.

    >>> vae = VAE(VAEConfig((4,), latent=2, hidden=(8,)))
    >>> mean, log_var = vae.encode(torch.rand(3, 4))
    >>> mean.shape, vae.decode(mean).shape
    (torch.Size([3, 2]), torch.Size([3, 4]))
    """

    def __init__(self, config: VAEConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder, self.decoder = (_conv if config.kind == "conv" else _mlp)(config)

    def encode(self, x: Float[Tensor, "n ..."]) -> tuple[Float[Tensor, "n latent"], Float[Tensor, "n latent"]]:
        """Mean and log variance of q(z | x).

        Raises:
            InvalidInput: examples of another shape than the model's.
        """
        if tuple(x.shape[1:]) != self.config.shape:
            raise InvalidInput(f"examples of shape {tuple(x.shape[1:])}; the model reads {self.config.shape}")
        return moments(self.encoder(x))

    def logits(self, z: Float[Tensor, "n latent"]) -> Float[Tensor, "n ..."]:
        """What the decoder says before the likelihood: log odds, means, or log weights of the choices."""
        out: Tensor = self.decoder(z)
        return out.view(-1, *self.config.shape)

    def decode(self, z: Float[Tensor, "n latent"]) -> Float[Tensor, "n ..."]:
        """The mean of p(x | z): probabilities, except for a Gaussian."""
        return self.mean_of(self.logits(z))

    def mean_of(self, logits: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """The mean of x that these `logits` stand for."""
        if self.config.likelihood == "gaussian":
            return logits
        return logits.sigmoid() if self.config.likelihood == "bernoulli" else logits.softmax(-1)

    def log_likelihood(self, x: Float[Tensor, ...], logits: Float[Tensor, ...]) -> Float[Tensor, ...]:
        """log p(x | z) in nats, where the decoder said ``logits``; their leading axes are broadcast.

        A Bernoulli's x may lie between 0 and 1: it is then the usual cross-entropy and no density.
        """
        if self.config.likelihood == "gaussian":
            spread = self.config.noise
            each = -0.5 * ((x - logits) / spread).square() - math.log(spread) - 0.5 * math.log(2 * math.pi)
        elif self.config.likelihood == "bernoulli":
            each = x * logits - F.softplus(logits)
        else:
            each = x * logits.log_softmax(-1)
        return each.flatten(-len(self.config.shape)).sum(-1)

    def sample_output(
        self, logits: Float[Tensor, "n ..."], generator: torch.Generator | None = None
    ) -> Float[Tensor, "n ..."]:
        """One x drawn from p(x | z) for each row."""
        mean = self.mean_of(logits)
        if self.config.likelihood == "gaussian":
            noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
            return mean + self.config.noise * noise
        if self.config.likelihood == "bernoulli":
            return mean.bernoulli(generator=generator)
        drawn = torch.multinomial(mean.flatten(0, -2), 1, generator=generator)[:, 0]
        return F.one_hot(drawn, mean.shape[-1]).to(mean.dtype).view(mean.shape)

    def terms(self, x: Float[Tensor, "n ..."], generator: torch.Generator | None = None) -> Terms:
        """Both halves of the bound at one drawn code for each example.

        Raises:
            InvalidInput: examples of another shape than the model's.
        """
        mean, log_var = self.encode(x)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
        z = mean + (0.5 * log_var).exp() * noise
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(-1)
        return Terms(self.log_likelihood(x, self.logits(z)), kl, z, mean, log_var)

    def forward(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """The reconstruction at the mean code."""
        return self.decode(self.encode(x)[0])

    def check(self, x: Float[Tensor, "n ..."]) -> None:
        """Refuse examples that the model cannot have made.

        Raises:
            InvalidInput: no tensor, another precision than that of the weights, no example, another shape, values that
                are not finite, outside 0 to 1 for a Bernoulli, or not one-hot for a categorical; the first such row is
                named.
        """
        dtype = next(self.parameters()).dtype
        if not isinstance(x, Tensor) or x.dtype != dtype:
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInput(f"examples are {found}, the weights {dtype}; give torch.as_tensor(x, dtype={dtype})")
        if not len(x):
            raise InvalidInput("there are no examples")
        if tuple(x.shape[1:]) != self.config.shape:
            raise InvalidInput(f"examples of shape {tuple(x.shape[1:])}; the model reads {self.config.shape}")
        flat = x.flatten(1)
        wrong, why = ~flat.isfinite().all(1), "holds values that are not finite; leave it out"
        if not wrong.any() and self.config.likelihood == "bernoulli":
            wrong, why = ((flat < 0) | (flat > 1)).any(1), "has values outside 0 to 1; rescale, or use a Gaussian"
        elif not wrong.any() and self.config.likelihood == "categorical":
            hot = ((x == 0) | (x == 1)).all(-1) & (x.sum(-1) == 1)
            wrong, why = ~hot.view(len(x), -1).all(1), "is not one-hot along its last axis"
        if wrong.any():
            raise InvalidInput(f"row {int(wrong.nonzero()[0, 0])} {why}")


class Elbo:
    r"""The negative bound, $w\,[\beta\,\mathrm{KL}(q(z \mid x) \| p(z)) - \log p(x \mid z)]$; for the `Trainer`.

    A batch is a tensor of examples, or a tuple of it and of their weights; further parts of a tuple are not read. Loss
    and metrics ("reconstruction" and "kl", in nats) are means over examples, whatever their weights add up to.

    Args:
        beta: how much the prior counts, or a function of the number of updates made.
        weighted: whether the second part of a tuple is the weights.

    Raises:
        InvalidArgument: a negative or non-finite ``beta``.
    """

    unit = "examples"

    def __init__(self, beta: float | Callable[[int], float] = 1.0, *, weighted: bool = False) -> None:
        if not callable(beta) and not 0 <= beta < math.inf:
            raise InvalidArgument(f"beta is {beta}; give a number of 0 or more")
        self.beta, self.weighted, self.step = beta, weighted, 0

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

    def after_step(self, model: nn.Module, step: int) -> None:
        """Beta may change with the updates."""
        self.step = step

    def state_dict(self) -> dict[str, Tensor]:
        """Updates made."""
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from there."""
        self.step = int(state["step"])


def moments(encoded: Float[Tensor, "n both"]) -> tuple[Float[Tensor, "n latent"], Float[Tensor, "n latent"]]:
    """Mean and log variance of what an encoder said; the latter within ±10, so that no variance under- or overflows."""
    mean, log_var = encoded.chunk(2, -1)
    return mean, log_var.clamp(-_LOG_VARIANCE, _LOG_VARIANCE)


def _mlp(config: VAEConfig) -> tuple[nn.Module, nn.Module]:
    size = math.prod(config.shape)
    down, up = (size, *config.hidden), (config.latent, *reversed(config.hidden))
    encoder = [nn.Flatten(), *_dense(down), nn.Linear(down[-1], 2 * config.latent)]
    return nn.Sequential(*encoder), nn.Sequential(*_dense(up), nn.Linear(up[-1], size))


def _dense(widths: tuple[int, ...]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers


def _conv(config: VAEConfig) -> tuple[nn.Module, nn.Module]:
    channels, height, width = config.shape
    *convolutions, dense = config.hidden
    side = 2 ** len(convolutions)
    low = (convolutions[-1], height // side, width // side)
    down, up = [channels, *convolutions], [*reversed(convolutions), channels]
    encoder: list[nn.Module] = []
    for before, after in itertools.pairwise(down):
        encoder += [nn.Conv2d(before, after, 4, 2, 1), nn.ReLU()]
    size = math.prod(low)
    encoder += [nn.Flatten(), nn.Linear(size, dense), nn.ReLU(), nn.Linear(dense, 2 * config.latent)]
    decoder: list[nn.Module] = [nn.Linear(config.latent, dense), nn.ReLU(), nn.Linear(dense, size)]
    decoder += [nn.Unflatten(1, low)]
    for before, after in itertools.pairwise(up):
        decoder += [nn.ReLU(), nn.ConvTranspose2d(before, after, 4, 2, 1)]
    return nn.Sequential(*encoder), nn.Sequential(*decoder)
