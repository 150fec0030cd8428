r"""Tune the prior precision by the evidence, by held-out data, or by cross-validation without retraining.

Notable here:
- the evidence is maximized over logarithms by L-BFGS from the best point of a coarse grid, as it may have two maxima
- the held-out likelihood uses one curvature for all precisions, and one Jacobian per batch
- cross-validation fits the curvature without a fold and moves the mean by one Newton step of the linear model, which is
  exact for a linear model with Gaussian noise; it costs one fit per fold
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes import batches
from pippin.bayes.laplace.curvature import GGN, Hessian
from pippin.bayes.laplace.jacobians.hessian_products import outputs_as_function
from pippin.bayes.laplace.structure import CurvatureState, WeightGaussian
from pippin.bayes.likelihood import Likelihood
from pippin.bayes.prediction import Link, apply_link, check_link
from pippin.core.errors import InferenceError, InvalidArgument, InvalidInput, NonFiniteEvidence

if TYPE_CHECKING:
    from pippin.bayes.laplace.laplace import Laplace

LOG_RANGE = math.log(1e8)
"""Precisions and noise stay between 1e-8 and 1e8, as the prior of weights without effect would diverge."""

_WALL = 1e12


def search_grid(
    laplace: Laplace, data: Iterable[Any], grid: Sequence[float] | Tensor | None, link_approx: Link, folds: int | None
) -> None:
    """Set the prior precision with the highest log-likelihood on held-out data or, given folds, in cross-validation."""
    if laplace.likelihood.name != "regression":
        check_link(laplace.likelihood, link_approx)
    batches.check_data(data)
    tried = torch.as_tensor(torch.logspace(-4, 4, 21) if grid is None else grid, dtype=torch.float64)
    if tried.ndim != 1 or not len(tried) or not ((tried > 0) & tried.isfinite()).all():
        raise InvalidArgument(f"grid must be a list of precisions above 0, got {grid}")
    if folds is None:
        scores = _held_out_scores(laplace, data, tried, link_approx)
    else:
        scores = _fold_scores(laplace, data, tried, folds, link_approx)
    if not scores.isfinite().any():
        raise NonFiniteEvidence("no precision of the grid gives a finite likelihood; try larger ones")
    laplace.prior_precision = float(tried[scores.nan_to_num(nan=-math.inf).argmax()])


def maximize_evidence(laplace: Laplace, prior_structure: str, *, noise: bool) -> None:
    """Set the prior precision, and the noise of a regression, to the values that maximize the evidence."""
    device = laplace.prior_precision.device
    groups = {"scalar": 1, "layerwise": len(laplace.layers), "diag": laplace.selection.size}[prior_structure]
    noise = noise and laplace.likelihood.name == "regression"
    start = _best_start(laplace)
    prior = start.expand(groups).clone().requires_grad_()
    sigma = torch.tensor(math.log(laplace.sigma_noise), dtype=torch.float64, device=device, requires_grad=noise)
    free = [prior, sigma] if noise else [prior]
    optimizer = torch.optim.LBFGS(free, max_iter=100, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        try:
            value = -_evidence(laplace, prior, sigma)
        except InferenceError:  # no posterior exists there: a large value makes the line search turn back
            return (prior.sum() + sigma) * 0 + _WALL
        value.backward()
        return value

    optimizer.step(closure)
    found = prior.detach().clamp(-LOG_RANGE, LOG_RANGE)
    if not found.isfinite().all():
        raise NonFiniteEvidence("the evidence led to a precision that is not finite; look at the targets and weights")
    laplace.prior_precision = found.exp()
    if noise:
        laplace.sigma_noise = math.exp(min(max(float(sigma.detach()), -LOG_RANGE), LOG_RANGE))


def _best_start(laplace: Laplace) -> Float[Tensor, " 1"]:
    """The log of the best single precision of a coarse grid, or of the posterior's own where that is better."""
    prior, value = laplace.prior_precision, -math.inf
    best: Tensor | None = None
    own = prior.log().mean().reshape(1)
    sigma = torch.tensor(math.log(laplace.sigma_noise), dtype=torch.float64, device=prior.device)
    for candidate in [own, *own.new_tensor([math.log(10.0**k) for k in range(-4, 5)])[:, None]]:
        try:
            with torch.no_grad():
                here = float(_evidence(laplace, candidate, sigma))
        except InferenceError:  # a precision at which the posterior does not exist, with the Hessian
            continue
        if here > value:
            best, value = candidate, here
    if best is None:
        raise NonFiniteEvidence("no precision between 1e-4 and 1e4 gives a posterior; use the curvature ggn")
    return best


def _evidence(laplace: Laplace, log_prior: Tensor, log_sigma: Tensor) -> Tensor:
    prior = log_prior.clamp(-LOG_RANGE, LOG_RANGE).exp()
    if laplace.likelihood.name != "regression":
        return laplace.evidence_at(prior, None)
    return laplace.evidence_at(prior, log_sigma.clamp(-LOG_RANGE, LOG_RANGE).exp())


def log_likelihood(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, y: Tensor, noise: float, link_approx: Link
) -> Float[Tensor, ""]:
    """Summed log-probability, or log-density, of targets under a prediction, in nats."""
    if likelihood.name == "regression":
        eye = torch.eye(mean.shape[1], dtype=torch.float64, device=mean.device)
        normal = torch.distributions.MultivariateNormal(mean.double(), covariance.double() + noise * eye)
        density: Tensor = normal.log_prob(y.double()).sum()
        return density
    probs = apply_link(likelihood, mean, covariance, link_approx).double()
    if likelihood.name == "multi_label":
        return (y * probs.clamp_min(1e-30).log() + (1 - y) * (1 - probs).clamp_min(1e-30).log()).sum()
    return probs.clamp_min(1e-30).log().gather(1, y[:, None]).sum()


def _held_out_scores(
    laplace: Laplace, validation: Iterable[Any], grid: Tensor, link_approx: Link
) -> Float[Tensor, " precisions"]:
    """Mean log-likelihood of held-out data at each precision."""
    gaussians = _gaussians(laplace, laplace._fitted(), grid)
    scores, count = torch.zeros(len(grid), dtype=torch.float64), 0
    for inputs, targets in batches.iterate_batches(validation, laplace.model):
        with laplace.rows.forward(inputs) as batch:
            f = batch.outputs.detach()
            y = laplace.likelihood.check(f, targets)
            for index, gaussian in enumerate(gaussians):
                scores[index] += _score(laplace, gaussian, batch, f, y, link_approx)
        count += len(f)
    return scores / count


def _gaussians(laplace: Laplace, state: CurvatureState, grid: Tensor) -> list[WeightGaussian | None]:
    """A posterior for each precision; None where none exists."""
    found: list[WeightGaussian | None] = []
    for precision in grid.tolist():
        prior = torch.tensor([precision], dtype=torch.float64, device=laplace._like.device)
        try:
            gaussian = state.posterior(laplace._expand(prior), _scale(laplace))
            gaussian.solve(laplace._like.new_zeros(1, laplace.selection.size))
        except InferenceError:
            found.append(None)
        else:
            found.append(gaussian)
    return found


def _scale(laplace: Laplace) -> Tensor:
    return laplace._scale(torch.tensor(laplace.sigma_noise, dtype=torch.float64, device=laplace._like.device))


def _score(
    laplace: Laplace, gaussian: WeightGaussian | None, batch: Any, f: Tensor, y: Tensor, link_approx: Link
) -> float:
    if gaussian is None:
        return -math.inf
    covariance = gaussian.covariance(batch).detach().to(f.dtype)
    return float(log_likelihood(laplace.likelihood, f, covariance, y, laplace.sigma_noise**2, link_approx))


def _fold_scores(
    laplace: Laplace, data: Iterable[Any], grid: Tensor, folds: int, link_approx: Link
) -> Float[Tensor, " precisions"]:
    r"""Mean log-likelihood of each fold under the posterior of the others, at each precision.

    With g the gradient of the other folds' loss at $\theta^*$ and P their precision, the mean of their linear model is
    $\theta^* - P^{-1} (s g + \Lambda (\theta^* - \mu))$, whatever the precision was that the network was trained with.

    Raises:
        InvalidArgument: the curvature is the Hessian, for which this is not defined.
        InvalidInput: fewer batches than folds.
    """
    if isinstance(laplace.curvature, Hessian):
        raise InvalidArgument("cross-validation moves the mean by the GGN's linear model; use the curvature ggn or ef")
    count = sum(1 for _ in batches.iterate_batches(data, laplace.model))
    if count < folds:
        raise InvalidInput(f"{folds} folds need as many batches, the data has {count}; give smaller batches")
    gradients = [_gradient(laplace, data, fold, folds) for fold in range(folds)]
    total = torch.stack(gradients).sum(0)
    scores, examples = torch.zeros(len(grid), dtype=torch.float64), 0
    for fold in range(folds):
        state = _without(laplace, data, fold, folds)
        gaussians = _gaussians(laplace, state, grid)
        steps = [
            _step(laplace, gaussian, total - gradients[fold], float(p))
            for gaussian, p in zip(gaussians, grid, strict=True)
        ]
        for inputs, targets in _fold(laplace, data, fold, folds):
            change = _change(laplace, inputs)
            with laplace.rows.forward(inputs) as batch:
                f = batch.outputs.detach()
                y = laplace.likelihood.check(f, targets)
                for index, (gaussian, step) in enumerate(zip(gaussians, steps, strict=True)):
                    moved = f + change(step)
                    scores[index] += _score(laplace, gaussian, batch, moved, y, link_approx)
            examples += len(f)
    return scores / examples


def _fold(laplace: Laplace, data: Iterable[Any], fold: int, folds: int, *, others: bool = False) -> Iterable[Any]:
    """The batches of a fold, or those of all others."""
    pairs = enumerate(batches.iterate_batches(data, laplace.model))
    return (pair for number, pair in pairs if (number % folds == fold) != others)


def _gradient(laplace: Laplace, data: Iterable[Any], fold: int, folds: int) -> Float[Tensor, " p"]:
    """The gradient of a fold's summed loss."""
    total = torch.zeros(laplace.selection.size, dtype=torch.float64, device=laplace._like.device)
    for inputs, targets in _fold(laplace, data, fold, folds):
        vector = laplace.selection.vector(laplace.model).requires_grad_()
        with torch.enable_grad():
            f = outputs_as_function(laplace.model, laplace.selection, inputs)(vector)
            loss = laplace.likelihood.loss(f, laplace.likelihood.check(f, targets))
            total += torch.autograd.grad(loss, vector)[0]
    return total


def _change(laplace: Laplace, inputs: Any) -> Callable[[Tensor], Tensor]:
    """The function from a step [P] of the weights to J times it [n, C], as the derivative of u -> J^T u."""
    vector = laplace.selection.vector(laplace.model).requires_grad_()
    with torch.enable_grad():
        f = outputs_as_function(laplace.model, laplace.selection, inputs)(vector)
        u = torch.zeros_like(f, requires_grad=True)
        (pulled,) = torch.autograd.grad(f, vector, u, create_graph=True)
    return lambda step: torch.autograd.grad(pulled, u, step, retain_graph=True)[0]


def _without(laplace: Laplace, data: Iterable[Any], fold: int, folds: int) -> CurvatureState:
    """The curvature of all other folds."""
    state = laplace.structure.start(laplace.selection, laplace._like)
    for _ in range(getattr(laplace.structure, "passes", 1)):
        if isinstance(laplace.curvature, GGN):
            laplace.curvature.restart()
        for inputs, targets in _fold(laplace, data, fold, folds, others=True):
            laplace._add(state, inputs, targets)
        state.finish()
    return state


def _step(laplace: Laplace, gaussian: WeightGaussian | None, gradient: Tensor, precision: float) -> Float[Tensor, " p"]:
    """The Newton step from the fitted weights to the mean of the linear model."""
    assert laplace.mean is not None
    if gaussian is None:
        return torch.zeros_like(laplace.mean)
    pull = laplace.sigma_noise**-2 / laplace.temperature * gradient
    pull = pull + precision * (laplace.mean.double() - laplace.prior_mean)
    return -gaussian.solve(pull[None])[0].to(laplace.mean.dtype)
