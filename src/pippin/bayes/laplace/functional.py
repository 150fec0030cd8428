r"""Functional structure: a Gaussian process with the model's tangent kernel, on a random subset of the data.

Notable here:
- only the rows $S^\top J$ of some random points are stored; with all points of the data it is the full Gauss-Newton
  posterior, at a cost cubic in the number of points instead of the number of weights
- the points are chosen by reservoir sampling, so the length of the data need not be known
- points that are left out add no curvature, so variances are overestimated, never underestimated
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes.laplace import memory_check
from pippin.bayes.laplace.low_rank import Woodbury
from pippin.bayes.laplace.structure import CurvatureBatch, check_finite, to_float64
from pippin.bayes.weight_subset import Selection
from pippin.core.checks import PositiveInt, checked


@checked
@dataclass(frozen=True)
class Functional:
    """A random subset of the data, whose curvature is exact.

    Args:
        num_points: number of examples to store; memory is points x outputs x P elements.
        seed: seed of the choice of points.

    Source: Khan et al. 2019, arXiv:1906.01930; Immer et al. 2021, arXiv:2008.08400, section 3.
    """

    num_points: PositiveInt = 200
    seed: int = 0
    name = "functional"
    hessian = False

    def start(self, selection: Selection, like: Tensor) -> FunctionalState:
        """A state without points."""
        return FunctionalState(self, selection.size, like)


class FunctionalState:
    """The rows S^T J of the sampled points, [points, r, P]."""

    def __init__(self, structure: Functional, size: int, like: Tensor) -> None:
        self._structure, self._size = structure, size
        self._generator = torch.Generator().manual_seed(structure.seed)
        self._seen = 0
        self._rows = like.new_zeros(0, 1, size)
        self._values: Tensor | None = None

    def add(self, batch: CurvatureBatch, root: Float[Tensor, "n c r"]) -> None:
        """Reservoir sampling: every example seen so far is among the points with the same probability."""
        slots, self._seen = self._sample_slots(len(root)), self._seen + len(root)
        chosen = {slot: example for example, slot in enumerate(slots) if slot is not None}
        if not chosen:
            return
        width = root.shape[2]
        total = max(len(self._rows), max(chosen) + 1)
        need = total * width * self._size * self._rows.element_size()
        if total > len(self._rows):
            instead = "use fewer points, subset_of_weights='last_layer', or hessian_structure='kron' or 'diag'"
            memory_check.require_memory(need, self._rows.device, f"{self._structure.num_points} points", instead)
            grown = self._rows.new_zeros(total, width, self._size)
            if len(self._rows):
                grown[: len(self._rows)] = self._rows
            self._rows = grown
        rows = batch.rows(root)
        self._rows[list(chosen)] = rows[list(chosen.values())]

    def _sample_slots(self, count: int) -> list[int | None]:
        """The slot of the reservoir for each of the next examples; None for examples that are not stored."""
        slots: list[int | None] = []
        for seen in range(self._seen, self._seen + count):
            if seen < self._structure.num_points:
                slots.append(seen)
                continue
            slot = int(torch.randint(seen + 1, (1,), generator=self._generator))
            slots.append(slot if slot < self._structure.num_points else None)
        return slots

    def finish(self) -> None:
        """Check that the rows are finite."""
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
        return Woodbury(self._rows.flatten(0, 1), to_float64(prior), scale.double(), self)

    def tensors(self) -> dict[str, Tensor]:
        """The rows, and the number of examples seen."""
        return {"rows": self._rows, "seen": torch.tensor(self._seen)}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the rows."""
        self._rows, self._seen = tensors["rows"].to(self._rows), int(tensors["seen"])
        self._values = None
