r"""Likelihoods: the loss of outputs and targets, its gradient, and its Hessian in the outputs.

Notable here:
- one interface serves every curvature: the Hessian A of the loss in the outputs has a square root $S S^\top = A$ in
  closed form, the residual is the gradient, and sampled residuals have A as their mean outer product
- losses are sums over examples at noise 1; the noise of a regression scales the whole loss elsewhere
- targets are checked before anything is computed, and messages show the wrong value
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional

from pippin.bayes.batches import call_model
from pippin.core.checks import PositiveFloat, checked
from pippin.core.errors import InvalidArgument, InvalidInput


@runtime_checkable
class Likelihood(Protocol):
    """The likelihood of targets y given outputs f, as posteriors use it."""

    name: str

    @property
    def sigma_noise(self) -> float:
        """Standard deviation of a regression's noise, in units of the targets; 1 for other likelihoods."""

    def check(self, f: Float[Tensor, "n c"], y: Shaped[Tensor, ...]) -> Shaped[Tensor, "n ..."]:
        """Check targets, and convert them to the shape and dtype that the other methods take.

        Raises:
            InvalidInput: targets of another length, type or range than the outputs allow.
        """

    def loss(self, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]) -> Float[Tensor, ""]:
        """The sum over examples of the negative log-likelihood at noise 1, without constants."""

    def residual(self, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n c"]:
        """The gradient of the loss in the outputs."""

    def root(self, f: Float[Tensor, "n c"]) -> Float[Tensor, "n c r"]:
        """A square root S of the Hessian of the loss in the outputs, S S^T, for each example."""

    def sampled(self, f: Float[Tensor, "n c"], k: int, generator: torch.Generator | None) -> Float[Tensor, "n c k"]:
        """Residuals of k targets sampled from the model's own predictive distribution, at noise 1."""

    def normalizer(self, examples: int, outputs: int, sigma_noise: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The part of the log-likelihood of so many examples that does not depend on the loss, in nats."""


class _WithoutNoise:
    """Base of the likelihoods without a noise parameter."""

    sigma_noise = 1.0

    def normalizer(self, examples: int, outputs: int, sigma_noise: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Zero: the loss is the whole negative log-likelihood."""
        return torch.zeros_like(sigma_noise)


@dataclass(frozen=True)
class Classification(_WithoutNoise):
    """Softmax over the outputs; targets are class indices [n], integers from 0.

    The loss is the cross-entropy, its Hessian diag(p) - p p^T.
    """

    name = "classification"

    def check(self, f: Float[Tensor, "n c"], y: Shaped[Tensor, ...]) -> Shaped[Tensor, "n ..."]:
        """Class indices as int64.

        Raises:
            InvalidInput: a single output, or targets that are not integers, have another shape or are out of range.
        """
        classes = f.shape[1]
        if classes < 2:
            raise InvalidInput(
                f"classification needs two outputs or more, the model has {classes}; a single logit is MultiLabel()"
            )
        _check_length(f, y)
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise InvalidInput(
                f"classes must be integers, got {y.dtype}; convert with y.long(), or use regression for real targets"
            )
        if y.ndim != 1:
            raise InvalidInput(
                f"classes must have one number per example, got shape {tuple(y.shape)}; of one-hot rows take argmax(-1)"
            )
        y = y.long()
        wrong = y[(y < 0) | (y >= classes)]
        if len(wrong):
            raise InvalidInput(f"class {int(wrong[0])} is not among the model's {classes} outputs, 0 to {classes - 1}")
        return y

    def loss(self, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]) -> Float[Tensor, ""]:
        """Summed cross-entropy in nats."""
        return functional.cross_entropy(f, y, reduction="sum")

    def residual(self, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n c"]:
        """p - e_y."""
        return f.softmax(-1) - functional.one_hot(y, f.shape[1]).to(f.dtype)

    def root(self, f: Float[Tensor, "n c"]) -> Float[Tensor, "n c r"]:
        r"""The Cholesky factor of diag(p) - p p^T in closed form, without its last column, which is 0.

        With $q_i = \sum_{j > i} p_j$: $L_{ii} = \sqrt{p_i q_i / q_{i-1}}$ and $L_{ji} = -L_{ii} p_j / q_i$ below.

        Source: Tanabe & Sagae 1992, Journal of the Royal Statistical Society B 54(1).
        """
        p = f.softmax(-1)
        tail = p.flip(-1).cumsum(-1).flip(-1)  # q from sums, as 1 - cumsum would cancel
        least = torch.finfo(f.dtype).tiny
        before, after = tail[:, :-1].clamp_min(least), tail[:, 1:].clamp_min(least)
        side = (p[:, :-1] * (after / before)).sqrt()
        lower = -(p[:, :, None] / after[:, None, :]) * side[:, None, :]
        on_diagonal = functional.pad(torch.diag_embed(side), (0, 0, 0, 1))
        return on_diagonal + lower.tril(-1)

    def sampled(self, f: Float[Tensor, "n c"], k: int, generator: torch.Generator | None) -> Float[Tensor, "n c k"]:
        """p - e_y for classes y sampled from p."""
        p = f.softmax(-1)
        classes = torch.multinomial(p, k, replacement=True, generator=generator)
        return p[:, :, None] - functional.one_hot(classes, f.shape[1]).transpose(1, 2).to(f.dtype)


@checked
@dataclass(frozen=True)
class Regression:
    """Gaussian noise around the outputs; targets are real, [n, c], or [n] for a single output.

    The loss is half the squared distance, at noise 1, and its Hessian the identity. All outputs share one noise level:
    standardize targets of different units first.

    Args:
        sigma_noise: standard deviation of the noise, in units of the targets; > 0.
    """

    sigma_noise: PositiveFloat = 1.0
    name = "regression"

    def check(self, f: Float[Tensor, "n c"], y: Shaped[Tensor, ...]) -> Shaped[Tensor, "n ..."]:
        """Targets [n, c] in the precision of the outputs.

        Raises:
            InvalidInput: integers (class numbers?), or another shape than the outputs.
        """
        _check_length(f, y)
        if not y.is_floating_point():
            raise InvalidInput(f"targets of a regression must be real numbers, got {y.dtype}; convert with y.float()")
        if y.ndim == 1:
            y = y[:, None]
        if y.shape != f.shape:
            raise InvalidInput(f"targets of shape {tuple(y.shape)} do not fit outputs of shape {tuple(f.shape)}")
        return y.to(f.dtype)

    def loss(self, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]) -> Float[Tensor, ""]:
        """Half the summed squared distance, in squared units of the targets."""
        return 0.5 * (f - y).square().sum()

    def residual(self, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n c"]:
        """f - y."""
        return f - y

    def root(self, f: Float[Tensor, "n c"]) -> Float[Tensor, "n c r"]:
        """The identity."""
        return torch.eye(f.shape[1], dtype=f.dtype, device=f.device).expand(len(f), -1, -1)

    def sampled(self, f: Float[Tensor, "n c"], k: int, generator: torch.Generator | None) -> Float[Tensor, "n c k"]:
        """Standard normal noise."""
        return torch.randn((*f.shape, k), generator=generator, dtype=f.dtype, device=f.device)

    def normalizer(self, examples: int, outputs: int, sigma_noise: Float[Tensor, ""]) -> Float[Tensor, ""]:
        r"""$-N C \log(\sigma \sqrt{2 \pi})$."""
        return -examples * outputs * (sigma_noise.log() + 0.5 * math.log(2 * math.pi))


@dataclass(frozen=True)
class MultiLabel(_WithoutNoise):
    """Independent binary labels, a Bernoulli for each output; targets are 0 or 1, [n, c], or [n] for one output."""

    name = "multi_label"

    def check(self, f: Float[Tensor, "n c"], y: Shaped[Tensor, ...]) -> Shaped[Tensor, "n ..."]:
        """Labels [n, c] in the precision of the outputs.

        Raises:
            InvalidInput: another shape than the outputs, or a value besides 0 and 1.
        """
        _check_length(f, y)
        if y.ndim == 1:
            y = y[:, None]
        if y.shape != f.shape:
            raise InvalidInput(f"labels of shape {tuple(y.shape)} do not fit outputs of shape {tuple(f.shape)}")
        y = y.to(f.dtype)
        wrong = y[(y != 0) & (y != 1)]
        if len(wrong):
            raise InvalidInput(f"labels must be 0 or 1, got {wrong[0].item():g}")
        return y

    def loss(self, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]) -> Float[Tensor, ""]:
        """Summed binary cross-entropy in nats."""
        return functional.binary_cross_entropy_with_logits(f, y, reduction="sum")

    def residual(self, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n c"]:
        """p - y."""
        return f.sigmoid() - y

    def root(self, f: Float[Tensor, "n c"]) -> Float[Tensor, "n c r"]:
        """Diagonal, with the square roots of p (1 - p)."""
        return torch.diag_embed((f.sigmoid() * (-f).sigmoid()).sqrt())

    def sampled(self, f: Float[Tensor, "n c"], k: int, generator: torch.Generator | None) -> Float[Tensor, "n c k"]:
        """p - y for labels y sampled from p."""
        p = f.sigmoid()[..., None].expand(*f.shape, k)
        return p - torch.bernoulli(p, generator=generator)


@dataclass(frozen=True)
class RewardModel(Classification):
    """Preferences between pairs (Bradley-Terry): the probability is the sigmoid of the difference in reward.

    A batch is ((a, b), y) with y = 0 where a was preferred and 1 where b was; the model gives one reward per example,
    [n] or [n, 1]. Called with a pair, the posterior returns the probabilities of both; called with a single input, the
    reward and its variance.
    """

    name = "reward_model"

    def check(self, f: Float[Tensor, "n c"], y: Shaped[Tensor, ...]) -> Shaped[Tensor, "n ..."]:
        """The index of the preferred input of each pair, as int64.

        Raises:
            InvalidInput: inputs that are not pairs, or a preference other than 0 and 1.
        """
        if f.shape[1] != 2:
            raise InvalidInput("a reward model is fitted on pairs: a batch must be ((a, b), preferred)")
        return super().check(f, y)


class PairwiseReward(nn.Module):
    """A reward model that also takes a pair of inputs and returns both rewards."""

    def __init__(self, reward: nn.Module) -> None:
        super().__init__()
        self.reward = reward
        self.train(reward.training)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Rewards of one input (n, 1), or of a pair of them (n, 2)."""
        if named:
            return call_model(self.reward, named)
        if len(inputs) > 2:
            raise InvalidInput(f"a reward model takes an input or a pair of them, got {len(inputs)}")
        rewards = [call_model(self.reward, part) for part in inputs]
        if any(part.shape[1] != 1 for part in rewards):
            raise InvalidInput(f"a reward model must give one number per example, got {tuple(rewards[0].shape)}")
        return torch.cat(rewards, 1)


LikelihoodName = Literal["classification", "regression", "reward_model", "multi_label"]
LIKELIHOODS: dict[str, type[Any]] = {
    "classification": Classification,
    "regression": Regression,
    "reward_model": RewardModel,
    "multi_label": MultiLabel,
}


@checked
def to_likelihood(likelihood: LikelihoodName | Likelihood) -> Likelihood:
    """A likelihood by its name; an object is returned unchanged.

    Raises:
        InvalidArgument: an unknown name, or an object that is not a likelihood.

    >>> to_likelihood("regression")
    Regression(sigma_noise=1.0)
    """
    found = LIKELIHOODS[likelihood]() if isinstance(likelihood, str) else likelihood
    if not isinstance(found, Likelihood):
        raise InvalidArgument(f"likelihood must be a name or a Likelihood, got {type(found).__name__}")
    return found


def check_sigma(sigma_noise: float) -> None:
    """Check that a noise level is positive and finite.

    Raises:
        InvalidArgument: it is not.
    """
    if not 0 < sigma_noise < math.inf:
        raise InvalidArgument(f"sigma_noise is {sigma_noise}; give a standard deviation above 0")


def _check_length(f: Tensor, y: Tensor) -> None:
    if y.ndim == 0 or len(y) != len(f):
        raise InvalidInput(f"there are {len(f)} outputs and targets of shape {tuple(y.shape)}: one for each example")
