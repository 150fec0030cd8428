r"""Prior precisions from the evidence of the linearized network: MacKay's fixed point at the linear model's optimum.

Notable here:
- the scatter term uses the mode of the linear model, not the trained weights; predictions keep the network's own
  outputs as their mean
- the weights before a norm layer have an arbitrary scale; they get a precision of their own, so that neither
  predictions nor evidence depend on that scale
- any structure of `Laplace` gives the curvature; only its log-determinant and marginal variances are needed
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes.batches import check_data, check_mode, iterate_batches
from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.laplace.linearized.model import LinearizedModel
from pippin.bayes.laplace.linearized.scale_invariance import (
    GroupChoice,
    ParamGroup,
    find_scale_invariant_groups,
    partition,
)
from pippin.bayes.likelihood import Likelihood, LikelihoodName
from pippin.bayes.prediction import Prediction
from pippin.bayes.weight_subset import Subset, SubsetName
from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InferenceAtRisk, NonFiniteEvidence, NotConverged

BOUNDS = (1e-8, 1e8)
"""The range of precisions; a precision at the upper bound gives a warning."""


@dataclass(frozen=True, eq=False)
class LinearizedPosterior:
    """A posterior whose prior maximizes the evidence of the linear model.

    Attributes:
        laplace: the posterior with that prior.
        groups: groups of parameters that share a precision.
        prior_precision: precision of each group, by its name.
        effective_dim: number of directions that the data determine, by group; between 0 and the group's size.
        log_evidence: log evidence of the training data, in nats.
        weights: [P], the mode of the linear model (of `NetworkEvidence`, the network's own weights).
        iterations: number of fixed-point iterations.
        change: largest change of a log precision in the last iteration.
    """

    laplace: Laplace
    groups: tuple[ParamGroup, ...]
    prior_precision: dict[str, float]
    effective_dim: dict[str, float]
    log_evidence: float
    weights: Float[Tensor, " weights"]
    iterations: int
    change: float

    def __call__(self, x: Any, **options: Any) -> Prediction:
        """Predict by `Laplace.__call__`: the network's outputs, with covariance J (H + Lambda)^-1 J^T."""
        return self.laplace(x, **options)


class LinearizedEvidence:
    r"""Chooses one prior precision for each group of weights by the evidence of the linearized network.

    $$M(\Lambda) = -L_h(v^*) - \tfrac12 \log\det(\Lambda^{-1} H + I), \quad
      \gamma_g = d_g - \lambda_g \operatorname{tr}_g (H + \Lambda)^{-1}, \quad
      \lambda_g \leftarrow \gamma_g / \lVert v^*_g \rVert^2$$

    Args:
        model: a trained network; in evaluation mode if it has batch norms.
        likelihood: see `Laplace`.
        subset_of_weights: see `Laplace`.
        hessian_structure: the structure of the curvature H: "full", "kron" or "diag".
        groups: "auto" gives each scale-invariant module a precision, and all other weights a common one; "layerwise"
            gives each module one; "scalar" one for all; or a list of `ParamGroup` that covers every parameter once.

    Raises:
        InvalidArgument: an unknown name, a noise that is not positive, or batch norm or dropout in training mode.

    Source: Antoran et al., arXiv:2206.08900, recommendations 1 and 2; MacKay 1992 for the fixed point.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodName | Likelihood,
        *,
        subset_of_weights: SubsetName | Subset = "all",
        hessian_structure: Literal["full", "kron", "diag"] = "full",
        groups: GroupChoice | Sequence[ParamGroup] = "auto",
    ) -> None:
        self.laplace = Laplace(
            model, likelihood, subset_of_weights=subset_of_weights, hessian_structure=hessian_structure
        )
        check_mode(model)
        self.model, self.groups = self.laplace.model, groups

    @checked
    def fit(
        self,
        loader: Iterable[Any],
        max_iterations: PositiveInt = 40,
        *,
        initial_precision: Annotated[float, Ge(1e-8), Lt(1e8)] = 1.0,
        tolerance: PositiveFloat = 1e-3,
    ) -> LinearizedPosterior:
        """Alternate between the linear model's weights and the precisions.

        Args:
            loader: batches (inputs, targets) that can be iterated repeatedly.
            max_iterations: largest number of iterations.
            initial_precision: initial precision of every group: the weight decay of the mean loss times the number of
                examples. For a scale-invariant group it is divided by the mean square weight.
            tolerance: the iteration stops when no log precision changes by more than this.

        Raises:
            NotConverged: no output depends on a group, so that its precision grows without bound.
            NonFiniteEvidence: the evidence is infinite or NaN.

        Warns:
            InferenceAtRisk: the iteration did not converge, or the precision of a group reached its upper bound.
        """
        check_data(loader)
        inputs, _ = next(iterate_batches(loader, self.model))
        groups = self._partition(inputs)
        laplace = self.laplace.fit(loader)
        selection = laplace.selection
        slices = [[selection.of(name) for name in group.parameters] for group in groups]
        scale = 1 / (laplace.sigma_noise**2 * laplace.temperature)
        linear = LinearizedModel(self.model, laplace.likelihood, selection, loader, scale=scale)
        log_precision = _first(groups, slices, linear.weights, initial_precision)
        weights, change, done = linear.weights, math.inf, 0
        while True:
            laplace.prior_precision = prior = _spread(log_precision.exp(), slices, linear.weights)
            weights = self._weights(linear, prior, weights)
            effective = _effective(laplace, slices)
            # weights and evidence of the result are those at the last precisions
            if change < tolerance or done == max_iterations:
                break
            if done == 0:
                _check_used(groups, slices, effective)
            done += 1
            fresh = _fixed_point(slices, effective, weights)
            change = float((fresh - log_precision).abs().max())
            log_precision = fresh
        if change >= tolerance:
            warnings.warn(
                f"a log precision still changed by {change:.2g} in round {max_iterations} of {max_iterations}; give "
                "more rounds",
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
        return LinearizedPosterior(
            laplace,
            tuple(groups),
            dict(zip(names, log_precision.exp().tolist(), strict=True)),
            dict(zip(names, effective.tolist(), strict=True)),
            evidence(laplace, linear, weights),
            weights,
            done,
            change,
        )

    def _partition(self, inputs: Any) -> list[ParamGroup]:
        return partition(self.model, self.groups, inputs, self.laplace.selection.names)

    def _weights(self, linear: LinearizedModel, prior: Tensor, weights: Tensor) -> Tensor:
        """The weights for the scatter term, started at those of the previous iteration."""
        return linear.mode(prior, weights)


class NetworkEvidence(LinearizedEvidence):
    """`LinearizedEvidence` with the scatter term at the trained weights: the usual Laplace evidence.

    It is only meaningful if training ended in a minimum with that prior. `InferenceAtRisk` is also warned of where
    scale-invariant weights share a precision with others.
    """

    def _partition(self, inputs: Any) -> list[ParamGroup]:
        groups = super()._partition(inputs)
        found = {group.parameters for group in find_scale_invariant_groups(self.model, inputs)}
        own = {group.parameters for group in groups}
        if found - own:
            names = ", ".join(names[0] for names in sorted(found - own))
            warnings.warn(
                f"the scale of {names} is arbitrary, since a norm follows, but affects the evidence at the network's "
                "own weights; use LinearizedEvidence with groups='auto'",
                InferenceAtRisk,
                stacklevel=4,
            )
        return groups

    def _weights(self, linear: LinearizedModel, prior: Tensor, weights: Tensor) -> Tensor:
        return weights


def evidence(laplace: Laplace, linear: LinearizedModel, weights: Float[Tensor, " weights"]) -> float:
    r"""The log evidence of the linear model, in nats.

    It is $-L_h(v) - \tfrac12 (\log\det(s H + \Lambda) - \log\det \Lambda)$ plus the constants of the likelihood.

    Args:
        laplace: a fitted posterior; gives H, the prior and the noise.
        linear: the linear model; gives $L_h$.
        weights: v.

    Raises:
        NonFiniteEvidence: the evidence is infinite or NaN; the message has the terms.
    """
    prior = _prior(laplace)
    scatter = float(linear.loss(weights, prior))
    volume = float(laplace.posterior.log_det) - float(prior.log().sum())
    sigma = torch.tensor(laplace.sigma_noise, dtype=torch.float64)
    constant = float(laplace.likelihood.normalizer(laplace.examples, laplace.outputs, sigma))
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
    """Check by the first effective dimensions that the outputs depend on every group."""
    for group, parts, dimension in zip(groups, slices, effective.tolist(), strict=True):
        if dimension <= 1e-12 * sum(part.stop - part.start for part in parts):
            raise NotConverged(
                f"the prior precision of group {group.name!r} grows without bound: no output depends on these weights "
                f"(effective dimension {dimension:.3g}); leave them out of the subset",
                iterations=0,
                residual=math.inf,
            )


def _first(groups: list[ParamGroup], slices: list[list[slice]], weights: Tensor, start: float) -> Tensor:
    """Initial log precisions; those of scale-invariant groups follow the group's scale, as the optimum does.

    The fixed point can have several solutions, and the choice between them must not depend on an arbitrary scale.
    """
    squares = [torch.cat([weights[part] for part in parts]).double().square().mean() for parts in slices]
    units = [1 / float(square) if group.invariant else 1.0 for group, square in zip(groups, squares, strict=True)]
    return (start * torch.tensor(units, dtype=torch.float64)).clamp(*BOUNDS).log()


def _fixed_point(slices: list[list[slice]], effective: Tensor, weights: Tensor) -> Tensor:
    """The next log precisions; at the upper bound for groups without effective dimensions."""
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
