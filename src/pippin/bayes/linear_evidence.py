r"""Prior precisions from the evidence of the linearised network: MacKay's fixed point at the linear model's optimum.

Notable here:
- the scatter term takes the most probable weights of the linear model, not those that training stopped at; predictions
  keep the network's own outputs as their mean
- the weights in front of a norm layer have a scale that means nothing, and a precision of their own, so that neither
  predictions nor evidence depend on that scale
- curvature comes from any structure of `Laplace`; only its log determinant and its marginal variances are needed
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes.batches import check_data, check_mode, read
from pippin.bayes.invariance import ParamGroup, find_scale_invariant_groups, partition
from pippin.bayes.laplace import Laplace
from pippin.bayes.likelihood import Likelihood
from pippin.bayes.linear_model import LinearModel
from pippin.bayes.predictive import Prediction
from pippin.bayes.subset import Subset
from pippin.core.errors import InferenceAtRisk, InvalidArgument, NonFiniteEvidence, NotConverged

BOUNDS = (1e-8, 1e8)
"""Precisions stay between these; one that reaches the upper bound is warned of."""


@dataclass(frozen=True, eq=False)
class LinearisedPosterior:
    """A posterior whose prior was chosen by the evidence of the linear model.

    Attributes:
        laplace: the posterior, with that prior, for everything that `Laplace` does.
        groups: of parameters that share a precision.
        prior_precision: by the name of the group.
        effective_dim: directions that the data determines, by the name of the group; between 0 and the group's size.
        log_evidence: of the training data, in nats.
        weights: [P], the linear model's most probable weights (the network's own for ``mode="network"``).
        rounds: of the fixed point.
        change: of the largest log precision in the last round.
    """

    laplace: Laplace
    groups: tuple[ParamGroup, ...]
    prior_precision: dict[str, float]
    effective_dim: dict[str, float]
    log_evidence: float
    weights: Float[Tensor, " weights"]
    rounds: int
    change: float

    def __call__(self, x: Any, **options: Any) -> Prediction:
        """As `Laplace` predicts: the network's outputs, and the covariance J (H + Lambda)^-1 J^T around them."""
        return self.laplace(x, **options)


class LinearisedEvidence:
    r"""Chooses one prior precision for each group of weights by the evidence of the linearised network.

    $$M(\Lambda) = -L_h(v^*) - \tfrac12 \log\det(\Lambda^{-1} H + I), \quad
      \gamma_g = d_g - \lambda_g \operatorname{tr}_g (H + \Lambda)^{-1}, \quad
      \lambda_g \leftarrow \gamma_g / \lVert v^*_g \rVert^2$$

    Args:
        model: trained in whatever way; in evaluation mode if it holds batch norms.
        likelihood: an object or a word, as for `Laplace`.
        subset: of the weights, as for `Laplace`.
        curvature: the structure of the curvature H: "full", "kron" or "diag".
        groups: "auto" gives each scale-invariant module a precision and all else one; "layer" gives each module one;
            "scalar" one for all; or a list of `ParamGroup` that covers every parameter once.
        mode: where the scatter term is taken: "linear" at the linear model's optimum, "network" at the trained weights,
            which is the usual Laplace evidence and means little unless training ended in a minimum with that prior.

    Raises:
        InvalidArgument: an unknown word, or a noise that is not positive; batch norm or dropout in training mode.

    Source: Antoran et al., arXiv:2206.08900, recommendations 1 and 2; MacKay 1992 for the fixed point.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        *,
        subset: str | Subset = "all",
        curvature: Literal["full", "kron", "diag"] = "full",
        groups: Literal["auto", "layer", "scalar"] | Sequence[ParamGroup] = "auto",
        mode: Literal["linear", "network"] = "linear",
    ) -> None:
        if curvature not in ("full", "kron", "diag"):
            raise InvalidArgument(f"curvature={curvature!r}; choose 'full', 'kron' or 'diag'")
        if mode not in ("linear", "network"):
            raise InvalidArgument(f"mode={mode!r}; choose 'linear' or 'network'")
        self.laplace = Laplace(model, likelihood, subset=subset, structure=curvature)
        check_mode(model)
        self.model, self.groups, self.mode = self.laplace.model, groups, mode

    def fit(
        self, loader: Iterable[Any], rounds: int = 40, *, start: float = 1.0, tolerance: float = 1e-3
    ) -> LinearisedPosterior:
        """Alternate between the linear model's weights and the precisions.

        Args:
            loader: batches (inputs, targets) that can be iterated again.
            rounds: at most so many.
            start: the first precision of every group; the weight decay of the mean loss, times the number of examples.
                For a scale-invariant group it counts in units of its mean square weight.
            tolerance: the fixed point is reached when no log precision changes by more.

        Raises:
            InvalidArgument: ``rounds`` below 1, a ``start`` or a tolerance that is not positive.
            NotConverged: no output depends on a group, so that its precision grows without bound.
            NonFiniteEvidence: the evidence is infinite or NaN.

        Warns:
            InferenceAtRisk: precisions still change after all rounds; the evidence wants no part of a group, whose
                precision is then held at 1e8; or ``mode="network"`` and scale-invariant weights share a precision with
                others.
        """
        _check(rounds, start, tolerance)
        check_data(loader)
        groups = self._groups(loader)
        laplace = self.laplace.fit(loader)
        selection = laplace.selection
        slices = [[selection.of(name) for name in group.parameters] for group in groups]
        scale = 1 / (laplace.sigma_noise**2 * laplace.temperature)
        linear = LinearModel(self.model, laplace.likelihood, selection, loader, scale=scale)
        log_precision = _first(groups, slices, linear.weights, start)
        weights, change, done = linear.weights, math.inf, 0
        while True:
            laplace.prior_precision = prior = _spread(log_precision.exp(), slices, linear.weights)
            weights = linear.mode(prior, weights) if self.mode == "linear" else weights
            effective = _effective(laplace, slices)
            # the last precisions are followed by their own weights and evidence, and by nothing more
            if change < tolerance or done == rounds:
                break
            if done == 0:
                _check_used(groups, slices, effective)
            done += 1
            fresh = _fixed_point(slices, effective, weights)
            change = float((fresh - log_precision).abs().max())
            log_precision = fresh
        if change >= tolerance:
            warnings.warn(
                f"a log precision still changed by {change:.2g} in round {rounds} of {rounds}; give more rounds",
                InferenceAtRisk,
                stacklevel=2,
            )
        names = [group.name for group in groups]
        if unwanted := [name for name, at in zip(names, log_precision.exp().tolist(), strict=True) if at >= BOUNDS[1]]:
            warnings.warn(
                f"the evidence wants no part of the groups {', '.join(unwanted)}; their precision is held at "
                f"{BOUNDS[1]:g}, so that they add no uncertainty; join them with others if that is not meant",
                InferenceAtRisk,
                stacklevel=2,
            )
        return LinearisedPosterior(
            laplace,
            tuple(groups),
            dict(zip(names, log_precision.exp().tolist(), strict=True)),
            dict(zip(names, effective.tolist(), strict=True)),
            evidence(laplace, linear, weights),
            weights,
            done,
            change,
        )

    def _groups(self, loader: Iterable[Any]) -> list[ParamGroup]:
        """The groups, after the warning that is due."""
        inputs, _ = next(read(loader, self.model))
        groups = partition(self.model, self.groups, inputs, self.laplace.selection.names)
        if self.mode == "network":
            found = {group.parameters for group in find_scale_invariant_groups(self.model, inputs)}
            own = {group.parameters for group in groups}
            if found - own:
                names = ", ".join(names[0] for names in sorted(found - own))
                warnings.warn(
                    f"the scale of {names} means nothing, since a norm follows, but the evidence at the network's own "
                    "weights takes it for information; use mode='linear' and groups='auto'",
                    InferenceAtRisk,
                    stacklevel=3,
                )
        return groups


def evidence(laplace: Laplace, linear: LinearModel, weights: Float[Tensor, " weights"]) -> float:
    r"""$-L_h(v) - \tfrac12 (\log\det(s H + \Lambda) - \log\det \Lambda)$ with the constants of the likelihood, in nats.

    Args:
        laplace: fitted: gives H, the prior and the noise.
        linear: gives $L_h$.
        weights: v.

    Raises:
        NonFiniteEvidence: the message has the terms.
    """
    prior = _prior(laplace)
    scatter = float(linear.loss(weights, prior))
    volume = float(laplace.posterior.log_det) - float(prior.log().sum())
    sigma = torch.tensor(laplace.sigma_noise, dtype=torch.float64)
    constant = float(laplace.likelihood.normaliser(laplace.examples, laplace.outputs, sigma))
    value = constant - scatter - 0.5 * volume
    if not math.isfinite(value):
        raise NonFiniteEvidence(
            f"the evidence is {value} (scatter {scatter}, log determinants {volume}): check the data"
        )
    return value


def _prior(laplace: Laplace) -> Tensor:
    """One precision for each weight."""
    return laplace.prior_precision.expand(laplace.selection.size)


def _effective(laplace: Laplace, slices: list[list[slice]]) -> Tensor:
    """Effective dimension of each group."""
    determined = 1 - (_prior(laplace) * laplace.posterior.variances()).double()
    return torch.stack([sum(determined[part].sum() for part in parts) for parts in slices])  # type: ignore[misc]


def _check_used(groups: list[ParamGroup], slices: list[list[slice]], effective: Tensor) -> None:
    """See that the outputs depend on every group, as far as the first effective dimensions tell."""
    for group, parts, dimension in zip(groups, slices, effective.tolist(), strict=True):
        if dimension <= 1e-12 * sum(part.stop - part.start for part in parts):
            raise NotConverged(
                f"the prior precision of group {group.name!r} grows without bound: no output depends on these weights "
                f"(effective dimension {dimension:.3g}); leave them out of the subset",
                iterations=0,
                residual=math.inf,
            )


def _first(groups: list[ParamGroup], slices: list[list[slice]], weights: Tensor, start: float) -> Tensor:
    """Log precisions to begin with; those of scale-invariant groups follow the group's scale, as the optimum does.

    A fixed point can have several solutions; from one and the same start, scale alone would decide between them.
    """
    squares = [torch.cat([weights[part] for part in parts]).double().square().mean() for parts in slices]
    units = [1 / float(square) if group.invariant else 1.0 for group, square in zip(groups, squares, strict=True)]
    return (start * torch.tensor(units, dtype=torch.float64)).clamp(*BOUNDS).log()


def _fixed_point(slices: list[list[slice]], effective: Tensor, weights: Tensor) -> Tensor:
    """The next log precisions; at the upper bound where the evidence wants no part of a group."""
    squares = torch.stack([sum(weights[part].double().square().sum() for part in parts) for parts in slices])  # type: ignore[misc]
    fresh = effective.clamp(min=0.0) / squares
    fresh = torch.where((effective <= 0) | fresh.isnan(), BOUNDS[1], fresh)
    return fresh.clamp(*BOUNDS).log()


def _spread(precision: Tensor, slices: list[list[slice]], like: Tensor) -> Tensor:
    """One precision for each weight."""
    prior = torch.ones_like(like, dtype=torch.float64)
    for value, parts in zip(precision.tolist(), slices, strict=True):
        for part in parts:
            prior[part] = value
    return prior


def _check(rounds: int, start: float, tolerance: float) -> None:
    if rounds < 1:
        raise InvalidArgument(f"rounds={rounds}; give 1 or more")
    if not BOUNDS[0] <= start < BOUNDS[1]:
        raise InvalidArgument(f"a first precision of {start}; give a number from {BOUNDS[0]:g} to {BOUNDS[1]:g}")
    if not 0 < tolerance < math.inf:
        raise InvalidArgument(f"a tolerance of {tolerance}; give a positive number")
