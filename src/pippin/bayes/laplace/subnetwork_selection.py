r"""Rules for choosing the subnetwork of weights whose posterior preserves most of a network's uncertainty.

Notable here:
- the published rule selects the weights of largest marginal variance, estimated by SWAG; with the variances of a
  Laplace posterior the same rule would select weights without any effect
- the contribution of a weight to the predictive variance, its squared Jacobian times its variance, needs no training
- the selection is checked on training inputs: weights without effect (inert weights) are named in a warning
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt, Le
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.bayes.batches import check_data, iterate_batches
from pippin.bayes.laplace.jacobians.backend import JacobianBackend
from pippin.bayes.likelihood import Likelihood, LikelihoodName, to_likelihood
from pippin.bayes.predictors.swag import SWAG, SWAGConfig
from pippin.bayes.weight_subset import All, Named
from pippin.core.checks import PositiveFloat, checked
from pippin.core.errors import InertWeights, InvalidArgument

Score = Literal["swag", "pvc", "diag_laplace", "magnitude", "random"]
NEED_DATA = ("swag", "pvc", "diag_laplace")


@checked
@dataclass(frozen=True)
class ScoreOptions:
    """Options of the selection rules.

    Attributes:
        prior_precision: prior precision of the diagonal posterior of "diag_laplace" and "pvc"; > 0.
        swag: settings of "swag"; the paper took 256 snapshots, one for each pass over the data.
    """

    prior_precision: PositiveFloat = 1.0
    swag: SWAGConfig = field(default_factory=lambda: SWAGConfig(num_snapshots=256, rank=0))


@checked
def select_subnetwork(
    model: nn.Module,
    n: int | None = None,
    fraction: Annotated[float, Gt(0), Le(1)] | None = None,
    score: Score | Tensor = "swag",
    loader: Iterable[Any] | None = None,
    *,
    likelihood: LikelihoodName | Likelihood = "classification",
    among: Sequence[str] | Callable[[str], bool] | None = None,
    options: ScoreOptions = ScoreOptions(),
    generator: torch.Generator | None = None,
) -> Int[Tensor, " chosen"]:
    r"""Select the weights with the largest scores, for `Subnetwork`.

    Under a diagonal posterior with variances $\sigma_p^2$, the squared 2-Wasserstein distance to the posterior that
    fixes all but the selected weights is the sum of the other variances, so the largest variances are selected. Rules:

    - "swag": variances under SGD with a constant learning rate from the trained weights (published).
    - "pvc": $\sum_n J_{np}^2 \sigma_p^2$, the contribution to the predictive variance, with the variances of
      "diag_laplace".
    - "diag_laplace": $1 / (h_p + \lambda)$, the literal rule; it selects weights without effect, and warns of them.
    - "magnitude": $|w_p|$.
    - "random": uniformly random.
    - a tensor [P]: one score for each weight, in the order of ``model.named_parameters()``.

    Args:
        model: a trained network; it is not changed. In evaluation mode if it has batch norms.
        n: number of weights to select; give this or ``fraction``.
        fraction: share of all weights to select, in (0, 1].
        score: the rule.
        loader: training batches (inputs, targets) that can be iterated repeatedly; required by "swag", "pvc" and
            "diag_laplace". With any rule the selection is checked on them.
        likelihood: name or object; only used with a loader.
        among: names of the parameters to select from, or a predicate of names; None is all. The published code takes
            weights outside of norm layers, and no biases.
        options: options of the rules.
        generator: source of randomness for "random" and for the seed of "swag"; None takes one with seed 0.

    Returns:
        Indices into the vector of all parameters, ascending; of equal scores the first is selected.

    Raises:
        InvalidArgument: neither or both of ``n`` and ``fraction``, a number below 1 or above the number of weights, an
            unknown rule, scores of another length or not finite, or a rule that needs a loader without one.
        InvalidInput: data that is empty or not finite, or targets that do not fit.

    Warns:
        InertWeights: more than one in a hundred of the selected weights have no curvature on ``loader``.

    Source: Daxberger et al., arXiv:2010.14689, section 4.

    >>> layer = nn.Linear(2, 1)
    >>> select_subnetwork(layer, n=2, score=torch.tensor([3.0, 1.0, 2.0])).tolist()
    [0, 2]
    """
    everything = All().resolve(model)
    allowed = _allowed(model, among)
    count = _count(n, fraction, everything.size, int(allowed.sum()))
    _check_score(score, everything.size, loader)
    chosen = to_likelihood(likelihood)
    if loader is not None:
        check_data(loader)
    scores = _scores(model, score, loader, chosen, options, generator)
    order = torch.where(allowed.to(scores.device), scores.double(), -math.inf).argsort(descending=True, stable=True)
    indices = order[:count].sort().values.cpu()
    if loader is not None:
        _check_inert(model, indices, loader, chosen)
    return indices


def jacobian_energy(model: nn.Module, loader: Iterable[Any]) -> Float[Tensor, " weights"]:
    r"""The sensitivity $\sum_n \sum_c J_{ncp}^2$ of the outputs on the data to every weight p.

    Args:
        model: the network.
        loader: batches (inputs, targets); targets are ignored.

    Raises:
        InvalidInput: data that is empty or not finite.
    """
    return _summed(model, loader, lambda outputs: torch.eye(outputs.shape[1]).to(outputs).expand(len(outputs), -1, -1))


def _scores(
    model: nn.Module,
    score: str | Tensor,
    loader: Iterable[Any] | None,
    likelihood: Likelihood,
    options: ScoreOptions,
    generator: torch.Generator | None,
) -> Tensor:
    if isinstance(score, Tensor):
        return score
    weights = All().resolve(model).vector(model)
    source = generator or torch.Generator().manual_seed(0)
    if score == "magnitude":
        return weights.abs()
    if score == "random":
        return torch.rand(len(weights), generator=source, device=source.device)
    assert loader is not None
    if score == "swag":
        seed = int(torch.randint(2**31, (1,), generator=source, device=source.device))
        variance = SWAG(model, likelihood, options.swag).fit(loader, seed=seed).variance
        assert variance is not None
        return variance
    variance = 1 / (_curvature(model, loader, likelihood) + options.prior_precision)
    return variance if score == "diag_laplace" else variance * jacobian_energy(model, loader)


def _curvature(model: nn.Module, loader: Iterable[Any], likelihood: Likelihood) -> Tensor:
    """The diagonal of the generalized Gauss-Newton matrix, noise included."""
    return _summed(model, loader, likelihood.root) / likelihood.sigma_noise**2


def _summed(model: nn.Module, loader: Iterable[Any], root: Callable[[Tensor], Tensor]) -> Tensor:
    """The diagonal of the sum over the data of J^T S S^T J, for roots S of the outputs."""
    selection = All().resolve(model)
    rows, total = JacobianBackend(model, selection), torch.zeros_like(selection.vector(model))
    for inputs, _ in iterate_batches(loader, model):
        with rows.forward(inputs) as p:
            total += p.diagonal(root(p.outputs))
    return total


def _check_inert(model: nn.Module, indices: Tensor, loader: Iterable[Any], likelihood: Likelihood) -> None:
    """Warn of selected weights without curvature on the data."""
    curvature = _curvature(model, loader, likelihood).cpu()
    zero = indices[curvature[indices] <= torch.finfo(curvature.dtype).tiny]
    if len(zero) <= 0.01 * len(indices):
        return
    everything = All().resolve(model)
    ends = torch.tensor([*everything.offsets[1:], everything.size])
    held = torch.bincount(torch.searchsorted(ends, zero, right=True), minlength=len(ends)).tolist()
    named = ", ".join(f"{name} ({count})" for name, count in zip(everything.names, held, strict=True) if count)
    warnings.warn(
        f"{len(zero)} of the {len(indices)} chosen weights have no curvature and cannot change a prediction: {named}; "
        "use score='swag' or 'pvc'",
        InertWeights,
        stacklevel=3,
    )


def _allowed(model: nn.Module, among: Sequence[str] | Callable[[str], bool] | None) -> Tensor:
    """A mask of the weights that may be selected, [P]."""
    everything = All().resolve(model)
    mask = torch.zeros(everything.size, dtype=torch.bool)
    for name in everything.names if among is None else Named(among).resolve(model).names:
        mask[everything.of(name)] = True
    return mask


def _count(n: int | None, fraction: float | None, size: int, allowed: int) -> int:
    """The number of weights to select."""
    if (n is None) == (fraction is None):
        raise InvalidArgument("give either n, the number of weights, or fraction, their share of all, and not both")
    if fraction is not None:
        n = max(1, round(fraction * size))
    assert n is not None
    if isinstance(n, bool) or not 1 <= n <= allowed:
        raise InvalidArgument(f"n={n} weights of {allowed} to choose from; give a number from 1 to {allowed}")
    return n


def _check_score(score: str | Tensor, size: int, loader: Iterable[Any] | None) -> None:
    if isinstance(score, Tensor):
        if tuple(score.shape) != (size,):
            raise InvalidArgument(f"scores have shape {tuple(score.shape)}; give one for each of the {size} weights")
        if not score.isfinite().all():
            index = int((~score.isfinite()).nonzero()[0])
            raise InvalidArgument(f"the score of weight {index} is {float(score[index])}; scores must be finite")
        return
    if score in NEED_DATA and loader is None:
        raise InvalidArgument(f"score={score!r} needs training data; give a loader")
