r"""Functional structure: a Gaussian process with the model's tangent kernel, on some of the data.

Notable here:
- the rows $S^\top J$ of some random points are all that is kept; with every point of the data among them it is the full
  Gauss-Newton posterior, in a form that costs the number of points cubed and not that of the weights
- the points are drawn while the data goes by (reservoir sampling), so its length need not be known
- the points left out add no curvature, so its variances are too large and never too small
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes import memory
from pippin.bayes.lowrank import Woodbury
from pippin.bayes.structure import Batch, check_finite, precise
from pippin.bayes.subset import Selection
from pippin.core.errors import InvalidArgument


@dataclass(frozen=True)
class Functional:
    """A random subset of the data, exact on it.

    Args:
        points: how many examples are kept; memory is points x outputs x P numbers.
        seed: which they are.

    Raises:
        InvalidArgument: fewer than one point.

    Source: Khan et al. 2019, arXiv:1906.01930; Immer et al. 2021, arXiv:2008.08400, section 3.
    """

    points: int = 200
    seed: int = 0
    name = "functional"
    hessian = False

    def __post_init__(self) -> None:
        if self.points < 1:
            raise InvalidArgument(f"points is {self.points}; give 1 or more")

    def start(self, selection: Selection, like: Tensor) -> FunctionalState:
        """No points."""
        return FunctionalState(self, selection.size, like)


class FunctionalState:
    """The rows S^T J of the points that were drawn, [points, r, P]."""

    def __init__(self, structure: Functional, size: int, like: Tensor) -> None:
        self._structure, self._size = structure, size
        self._generator = torch.Generator().manual_seed(structure.seed)
        self._seen = 0
        self._rows = like.new_zeros(0, 1, size)
        self._values: Tensor | None = None

    def add(self, batch: Batch, root: Float[Tensor, "n c r"]) -> None:
        """Let the examples of a batch take places among the points, each example seen so far with the same chance."""
        places, self._seen = self._draw(len(root)), self._seen + len(root)
        chosen = {place: example for example, place in enumerate(places) if place is not None}
        if not chosen:
            return
        width = root.shape[2]
        total = max(len(self._rows), max(chosen) + 1)
        need = total * width * self._size * self._rows.element_size()
        if total > len(self._rows):
            instead = "use fewer points, subset='last_layer', or structure='kron' or 'diag'"
            memory.require(need, self._rows.device, f"{self._structure.points} points", instead)
            fresh = self._rows.new_zeros(total, width, self._size)
            if len(self._rows):
                fresh[: len(self._rows)] = self._rows
            self._rows = fresh
        rows = batch.rows(root)
        self._rows[list(chosen)] = rows[list(chosen.values())]

    def _draw(self, count: int) -> list[int | None]:
        """The place that each of the next examples takes; None for those that take none."""
        places: list[int | None] = []
        for seen in range(self._seen, self._seen + count):
            if seen < self._structure.points:
                places.append(seen)
                continue
            place = int(torch.randint(seen + 1, (1,), generator=self._generator))
            places.append(place if place < self._structure.points else None)
        return places

    def finish(self) -> None:
        """See that the rows are finite."""
        check_finite(self._rows)
        self._values = None

    @property
    def values(self) -> Tensor:
        """The eigenvalues of the kernel between the points at prior precision 1, computed once."""
        if self._values is None:
            factor = self._rows.flatten(0, 1).double()
            self._values = torch.linalg.eigvalsh(factor @ factor.T).clamp_min(0)
        return self._values

    def posterior(self, prior: Float[Tensor, " p"], scale: Float[Tensor, ""]) -> Woodbury:
        """The Gaussian with precision scale * R^T R + diag(prior), R the rows of the points."""
        return Woodbury(self._rows.flatten(0, 1), precise(prior), scale.double(), self)

    def tensors(self) -> dict[str, Tensor]:
        """The rows."""
        return {"rows": self._rows, "seen": torch.tensor(self._seen)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The rows."""
        self._rows, self._seen = tensors["rows"].to(self._rows), int(tensors["seen"])
        self._values = None
