"""Whether each dimension of a code stands for one factor of variation, and each factor has one dimension: DCI.

Notable here:
- for each factor, boosted trees predict it from the codes; how much they use each dimension is the importance matrix
- three figures are read off: disentanglement (does a dimension serve one factor?), completeness (is a factor in one
  dimension?), informativeness (is it there at all?); the first two say little where the third is low
- rows are drawn for training and for testing without overlap

Source: Eastwood and Williams, "A framework for the quantitative evaluation of disentangled representations", ICLR 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pippin.core import figures
from pippin.core.errors import InvalidArgument, InvalidInput, MissingDependency
from pippin.core.report import Report, Row

if TYPE_CHECKING:
    from pathlib import Path

    from jaxtyping import Float, Int
    from torch import Tensor


@dataclass(frozen=True)
class DCI:
    """What the importances of codes for factors add up to.

    Attributes:
        importance: how much the prediction of each factor (column) uses each dimension (row); columns sum to 1, or are
            zero where the trees found nothing to use.
        accuracy: share of test rows at which each factor is predicted rightly.
        names: of the factors.
    """

    importance: np.ndarray[Any, np.dtype[np.float64]]
    accuracy: tuple[float, ...]
    names: tuple[str, ...]

    @property
    def disentanglement(self) -> float:
        """From 0 to 1: see `disentanglement`."""
        return disentanglement(self.importance)

    @property
    def completeness(self) -> float:
        """From 0 to 1: see `completeness`."""
        return completeness(self.importance)

    @property
    def informativeness(self) -> float:
        """The mean accuracy."""
        return float(np.mean(self.accuracy))

    @property
    def report(self) -> Report:
        """All figures as a table."""
        rows = [
            Row("disentanglement", self.disentanglement),
            Row("completeness", self.completeness),
            Row("informativeness", self.informativeness),
        ]
        rows += [Row(f"accuracy, {name}", value) for name, value in zip(self.names, self.accuracy, strict=True)]
        return Report("disentanglement of a code", rows)

    def plot(self, path: Path) -> None:
        """Draw the importance matrix.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        figure = figures.new(1.5 + 0.6 * len(self.names), 1.5 + 0.4 * len(self.importance), layout="tight")
        axes = figure.subplots()
        axes.imshow(self.importance, cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(len(self.names)), self.names, rotation=45, ha="right")
        axes.set_yticks(range(len(self.importance)))
        axes.set_ylabel("dimension of the code")
        axes.set_title(f"D {self.disentanglement:.2f}  C {self.completeness:.2f}  I {self.informativeness:.2f}")
        figures.save(figure, path, dpi=150)


def dci(
    codes: Float[Tensor, "n dimensions"],
    factors: Int[Tensor, "n factors"],
    *,
    train: int = 10_000,
    test: int = 5_000,
    trees: int = 100,
    seed: int = 0,
    names: Sequence[str] | None = None,
) -> DCI:
    """Disentanglement, completeness and informativeness of codes, by gradient-boosted trees.

    The time is mostly that of ``trees`` times the values of all factors; 2,000 training rows give about the same
    figures as 10,000 in a fifth of it.

    Args:
        codes: one row for each example, such as posterior means.
        factors: the values of each factor, as whole numbers from any set.
        train: rows to train on.
        test: other rows to measure the accuracy on. Where there are fewer rows than both together, the numbers shrink
            in proportion.
        trees: boosting rounds, of depth 3.
        seed: of the choice of rows and of the trees.
        names: of the factors, for the report.

    Raises:
        InvalidArgument: numbers of rows or trees below 1, or as many names as there are not factors.
        InvalidInput: no row, different numbers of rows, codes that are not finite, a factor with one value, or one
            whose rarest values are so few that the training rows hold one value only.
        MissingDependency: scikit-learn is not installed.

    Source: Eastwood and Williams 2018, section 3; trees in place of the lasso as in Locatello et al.,
    arXiv:1811.12359, appendix on metrics.

    >>> import torch
    >>> factors = torch.cartesian_prod(torch.arange(3), torch.arange(4), torch.arange(20))[:, :2]
    >>> found = dci(factors.double(), factors, trees=10)
    >>> round(found.disentanglement, 3), round(found.completeness, 3), found.informativeness
    (1.0, 1.0, 1.0)
    """
    x, y = _arrays(codes, factors)
    _check(x, y, train, test, trees, names)
    boosting = _boosting()
    share = min(1.0, len(x) / (train + test))
    order = np.random.default_rng(seed).permutation(len(x))
    learnt = max(1, int(train * share))
    learn, judge = order[:learnt], order[learnt : learnt + max(1, int(test * share))]
    importance, accuracy = np.zeros((x.shape[1], y.shape[1])), []
    for factor in range(y.shape[1]):
        if len(np.unique(y[learn, factor])) < 2:
            raise InvalidInput(f"the training rows hold one value of factor {factor}; give more rows, or leave it out")
        model = boosting(n_estimators=trees, random_state=seed).fit(x[learn], y[learn, factor])
        importance[:, factor] = np.abs(model.feature_importances_)
        accuracy.append(float(model.score(x[judge], y[judge, factor])))
    called = tuple(names) if names is not None else tuple(f"factor {index}" for index in range(y.shape[1]))
    return DCI(importance, tuple(accuracy), called)


def disentanglement(importance: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Mean over dimensions (rows) of 1 less the entropy of their importances, weighted by their share of all of it.

    >>> disentanglement(np.eye(3)), round(disentanglement(np.ones((3, 3))), 6)
    (1.0, 0.0)
    """
    total = importance.sum()
    if total <= 0:
        return 0.0
    return float(np.clip((_peaked(importance) * importance.sum(1) / total).sum(), 0, 1))


def completeness(importance: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """The same for factors (columns).

    >>> completeness(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])) < 1
    True
    """
    return disentanglement(importance.T)


def _peaked(importance: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """1 less the entropy of each row, in units of the largest one possible; 1 where there is one column."""
    if importance.shape[1] == 1:
        return np.ones(len(importance))
    sums = importance.sum(1, keepdims=True)
    shares = importance / np.where(sums > 0, sums, 1.0)
    logs = np.log(np.where(shares > 0, shares, 1.0))
    peaked: np.ndarray[Any, np.dtype[np.float64]] = 1 + (shares * logs).sum(1) / np.log(importance.shape[1])
    return peaked


def _arrays(codes: Any, factors: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    def numbers(value: Any) -> np.ndarray[Any, Any]:
        return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)

    return numbers(codes), numbers(factors)


def _check(
    x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], train: int, test: int, trees: int, names: Sequence[str] | None
) -> None:
    if train < 1 or test < 1 or trees < 1:
        raise InvalidArgument(f"train ({train}), test ({test}) and trees ({trees}) must be at least 1")
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise InvalidInput(f"codes and factors are two tables of as many rows; got shapes {x.shape} and {y.shape}")
    if len(x) < 2 or not x.shape[1] or not y.shape[1]:
        raise InvalidInput(f"there must be at least 2 rows and a column in each table; got {x.shape} and {y.shape}")
    if not np.isfinite(x).all():
        row = int((~np.isfinite(x)).any(1).argmax())
        raise InvalidInput(f"the code of row {row} holds NaN or infinity")
    if y.dtype.kind not in "iub":
        raise InvalidInput(f"factors are whole numbers, got {y.dtype}; number the values of each factor")
    for factor in range(y.shape[1]):
        if len(np.unique(y[:, factor])) < 2:
            raise InvalidInput(f"factor {factor} has the same value in every row; leave it out")
    if names is not None and len(names) != y.shape[1]:
        raise InvalidArgument(f"{len(names)} names for {y.shape[1]} factors")


def _boosting() -> Any:
    try:
        from sklearn.ensemble import GradientBoostingClassifier
    except ImportError as error:
        raise MissingDependency("DCI needs scikit-learn: pip install 'pippin[bayes]'") from error
    return GradientBoostingClassifier
