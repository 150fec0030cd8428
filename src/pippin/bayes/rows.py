"""Rows of Jacobians, and the sums of their squares, of a model's outputs by its weights.

Notable here:
- what a posterior needs of a model is R = S^T J, rows of the Jacobian J weighted with a root S of the curvature of
  each example
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from pippin.bayes.subset import Selection


class Pass:
    """One batch: its outputs, and the rows of their Jacobian."""

    def __init__(self, model: nn.Module, selection: Selection, batch: Any, outputs: Tensor) -> None:
        self._model, self._selection, self._batch = model, selection, batch
        self.outputs = outputs

    def jacobian(self) -> Float[Tensor, "n outputs weights"]:
        """J."""
        own = {name: p.detach() for name, p in self._selection.parameters(self._model).items()}

        def one(parameters: dict[str, Tensor], example: Any) -> Tensor:
            if isinstance(example, Mapping):
                given = {k: v[None] for k, v in example.items()}
                out = functional_call(self._model, parameters, (), given)
            else:
                out = functional_call(self._model, parameters, (example[None],))
            out = getattr(out, "logits", out)
            return out.reshape(-1)

        batch = dict(self._batch) if isinstance(self._batch, Mapping) else self._batch
        parts = vmap(jacrev(one), (None, 0))(own, batch)
        flat = torch.cat([parts[name].flatten(2) for name in own], -1)
        index = self._selection.indices
        return flat if index is None else flat[..., index]

    def rows(self, root: Float[Tensor, "n outputs columns"]) -> Float[Tensor, "n columns weights"]:
        """S^T J."""
        return root.mT @ self.jacobian()

    def diagonal(self, root: Float[Tensor, "n outputs columns"]) -> Float[Tensor, " weights"]:
        """Diagonal of the sum over examples of J^T S S^T J."""
        return self.rows(root).square().sum((0, 1))

    def gram(self, root: Float[Tensor, "n outputs columns"]) -> Float[Tensor, "weights weights"]:
        """Sum over examples of J^T S S^T J."""
        rows = self.rows(root).flatten(0, 1)
        return rows.mT @ rows


class Rows:
    """Rows of the Jacobian of a model's outputs by a selection of its weights."""

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        self.model, self.selection = model, selection

    @contextmanager
    def forward(self, batch: Any) -> Iterator[Pass]:
        """Run the model on a batch."""
        with torch.no_grad():
            out = self.model(**batch) if isinstance(batch, Mapping) else self.model(batch)
        out = getattr(out, "logits", out)
        yield Pass(self.model, self.selection, batch, out.reshape(len(out), -1))
