r"""Which few weights keep a network's uncertainty: the rules for choosing a subnetwork.

Notable here:
- the published rule keeps the weights of largest marginal variance, estimated by SWAG: a weight that moves under
  gradient descent has a gradient; the same rule on a Laplace posterior finds the weights that nothing depends on
- the share of a weight in the predictive variance, its squared Jacobian times its variance, needs no training run
- only what the network does on training inputs is looked at, and what was chosen is checked: inert weights are named
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.bayes.batches import check_data, read
from pippin.bayes.likelihood import Likelihood, likelihood as chosen
from pippin.bayes.rows import Rows
from pippin.bayes.subset import All, Named
from pippin.bayes.swag import SWAG, SWAGConfig
from pippin.core.errors import InertWeights, InvalidArgument

SCORES = ("swag", "pvc", "diag_laplace", "magnitude", "random")
NEED_DATA = ("swag", "pvc", "diag_laplace")


@dataclass(frozen=True)
class ScoreOptions:
    """What the rules need besides a model and data.

    Attributes:
        prior_precision: of the diagonal posterior behind "diag_laplace" and "pvc"; > 0.
        swag: how the snapshots of "swag" are taken; 256, one for each pass, were published.
    """

    prior_precision: float = 1.0
    swag: SWAGConfig = field(default_factory=lambda: SWAGConfig(snapshots=256, rank=0))

    def __post_init__(self) -> None:
        if not 0 < self.prior_precision < math.inf:
            raise InvalidArgument(f"a prior precision of {self.prior_precision}; give a positive number")


def select_subnetwork(
    model: nn.Module,
    n: int | None = None,
    fraction: float | None = None,
    score: str | Tensor = "swag",
    loader: Iterable[Any] | None = None,
    *,
    likelihood: str | Likelihood = "classification",
    among: Sequence[str] | Callable[[str], bool] | None = None,
    options: ScoreOptions = ScoreOptions(),
    generator: torch.Generator | None = None,
) -> Int[Tensor, " chosen"]:
    r"""The weights with the largest scores, for `Subnetwork`.

    Under a diagonal posterior with variances $\sigma_p^2$, the squared 2-Wasserstein distance to the posterior that
    holds all but the chosen weights fixed is the sum of the other variances, so the largest ones are kept. The rules:

    - "swag": variances of a constant-rate descent from the trained weights (published).
    - "pvc": $\sum_n J_{np}^2 \sigma_p^2$, the share in the predictive variance, with the variances of "diag_laplace".
    - "diag_laplace": $1 / (h_p + \lambda)$, the literal rule; it finds weights without effect, and warns of them.
    - "magnitude": $|w_p|$.
    - "random": every weight alike.
    - a tensor [P]: one score for each weight, in the order of ``model.named_parameters()``.

    Args:
        model: trained; it is left as it is. In evaluation mode where it holds batch norms.
        n: how many weights to choose; this or ``fraction``.
        fraction: how many, as a share of all weights of the model; in (0, 1].
        score: the rule.
        loader: training batches (inputs, targets) that can be iterated again: "swag", "pvc" and "diag_laplace" need
            them; with any rule, what was chosen is checked on them.
        likelihood: what the outputs mean, as an object or a word; only looked at with a loader.
        among: names of the parameters to choose from, or a predicate of a name; None is all of them. The published code
            takes weights outside norm layers, no biases.
        options: of the rules.
        generator: of "random", and of the seed of "swag"; None takes a new one with seed 0.

    Returns:
        Places in the vector of all parameters, in ascending order; of equal scores the first one wins.

    Raises:
        InvalidArgument: neither or both of ``n`` and ``fraction``, a number below 1 or above the weights there are, an
            unknown rule, scores of another length or not finite, a rule that needs a loader without one.
        InvalidInput: data that is empty or not finite, or targets that do not fit.

    Warns:
        InertWeights: more than one in a hundred of the chosen weights have no curvature on ``loader``.

    Source: Daxberger et al., arXiv:2010.14689, section 4.

    >>> layer = nn.Linear(2, 1)
    >>> select_subnetwork(layer, n=2, score=torch.tensor([3.0, 1.0, 2.0])).tolist()
    [0, 2]
    """
    everything = All().resolve(model)
    allowed = _allowed(model, among)
    count = _count(n, fraction, everything.size, int(allowed.sum()))
    _check_score(score, everything.size, loader)
    meaning = chosen(likelihood)
    if loader is not None:
        check_data(loader)
    scores = _scores(model, score, loader, meaning, options, generator)
    order = torch.where(allowed.to(scores.device), scores.double(), -math.inf).argsort(descending=True, stable=True)
    indices = order[:count].sort().values.cpu()
    if loader is not None:
        _check_inert(model, indices, loader, meaning)
    return indices


def jacobian_energy(model: nn.Module, loader: Iterable[Any]) -> Float[Tensor, " weights"]:
    r"""$\sum_n \sum_c J_{ncp}^2$ of every weight p: how far the outputs on the data move with it.

    Args:
        model: whose outputs.
        loader: batches (inputs, targets); targets are not looked at.

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
    """The diagonal of the generalised Gauss-Newton matrix, noise included."""
    return _summed(model, loader, likelihood.root) / likelihood.sigma_noise**2


def _summed(model: nn.Module, loader: Iterable[Any], root: Callable[[Tensor], Tensor]) -> Tensor:
    """The diagonal of the sum over the data of J^T S S^T J, for roots S of the outputs."""
    selection = All().resolve(model)
    rows, total = Rows(model, selection), torch.zeros_like(selection.vector(model))
    for inputs, _ in read(loader, model):
        with rows.forward(inputs) as p:
            total += p.diagonal(root(p.outputs))
    return total


def _check_inert(model: nn.Module, indices: Tensor, loader: Iterable[Any], likelihood: Likelihood) -> None:
    """Warn where the data does not bend along the chosen weights."""
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
    """Which weights may be chosen."""
    everything = All().resolve(model)
    mask = torch.zeros(everything.size, dtype=torch.bool)
    for name in everything.names if among is None else Named(among).resolve(model).names:
        mask[everything.of(name)] = True
    return mask


def _count(n: int | None, fraction: float | None, size: int, allowed: int) -> int:
    """How many weights to choose."""
    if (n is None) == (fraction is None):
        raise InvalidArgument("give either n, the number of weights, or fraction, their share of all, and not both")
    if fraction is not None:
        if not 0 < fraction <= 1:
            raise InvalidArgument(f"fraction={fraction}; give a number above 0 and up to 1")
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
            place = int((~score.isfinite()).nonzero()[0])
            raise InvalidArgument(f"the score of weight {place} is {float(score[place])}; scores must be finite")
        return
    if score not in SCORES:
        raise InvalidArgument(f"score={score!r}; choose one of {', '.join(SCORES)}, or give a tensor of scores")
    if score in NEED_DATA and loader is None:
        raise InvalidArgument(f"score={score!r} looks at training data; give a loader")
