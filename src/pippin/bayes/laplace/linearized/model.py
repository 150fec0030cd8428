r"""The linearized network $h(v, x) = f(w, x) + J(x) (v - w)$ and the mode of its weights.

Notable here:
- the weights of a trained network are usually not a mode of the posterior; those of the linear model are the optimum of
  a convex problem, for any prior, and need no training
- for small problems the Jacobian is stored, and systems are solved over weights or outputs, whichever are fewer, in
  float64
- for large problems it is never formed: conjugate gradients inside Newton's method, with one forward-mode and one
  reverse-mode product per step, preconditioned by the diagonal of the curvature
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import jvp, vjp

from pippin.bayes.batches import call_model, check_data, iterate_batches
from pippin.bayes.laplace.jacobians.backend import JacobianBackend
from pippin.bayes.laplace.jacobians.hessian_products import outputs_as_function
from pippin.bayes.likelihood import Likelihood, Regression
from pippin.bayes.weight_subset import Selection
from pippin.core.checks import PositiveFloat, checked
from pippin.core.errors import NotConverged

DENSE_BYTES = 2**29
"""Jacobians up to this size, in float64, are stored."""

Product = Callable[[Tensor], Tensor]
Step = tuple[Tensor, Tensor, Product, Product]
"""One batch: linearized outputs, targets, and the products J d and J^T u as functions."""


class LinearizedModel:
    """A network that is linearized in some of its weights, at their current values.

    Args:
        model: the network; its weights are the point of linearization and are not changed.
        likelihood: the likelihood of the outputs.
        selection: the P weights in which the model is linear.
        loader: batches (inputs, targets) that can be iterated repeatedly.
        scale: the factor 1 / (noise variance x temperature) of the loss.
        dense: whether to store the Jacobian; None stores it up to half a gigabyte.

    Attributes:
        weights: [P], the point of linearization.
        dense: whether the Jacobian is stored.

    Source: Antoran et al., arXiv:2206.08900, recommendation 1: the linear model's own optimum.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        selection: Selection,
        loader: Iterable[Any],
        *,
        scale: PositiveFloat = 1.0,
        dense: bool | None = None,
    ) -> None:
        check_data(loader)
        self.model, self.likelihood, self.selection, self.loader = model, likelihood, selection, loader
        self.scale, self.weights = scale, selection.vector(model).detach().clone()
        self.dense = _fits(model, selection, loader) if dense is None else dense
        self._steps = list(self._kept()) if self.dense else None
        if not self.dense:
            _load_forward_mode()

    def loss(self, v: Float[Tensor, " weights"], prior: Float[Tensor, " weights"]) -> Tensor:
        r"""$L_h(v) = s \sum_i \ell(h(v, x_i), y_i) + \tfrac12 v^T \Lambda v$, the scatter term of the evidence.

        Args:
            v: weights of the linear model.
            prior: the diagonal of $\Lambda$.
        """
        data = sum((self.likelihood.loss(h, y) for h, y, _, _ in self._at(v)), torch.zeros(()))
        v = v.to(self._dtype)
        return self.scale * data + 0.5 * (prior.to(v) * v.square()).sum()

    def outputs(self, v: Float[Tensor, " weights"]) -> Float[Tensor, "n outputs"]:
        """The linear model's outputs on the loader, in its order."""
        return torch.cat([h for h, _, _, _ in self._at(v)])

    def mode(
        self,
        prior: Float[Tensor, " weights"],
        start: Float[Tensor, " weights"] | None = None,
        *,
        max_iterations: int = 50,
    ) -> Float[Tensor, " weights"]:
        """The minimizer of `loss`: one linear solve for squared errors, Newton's method with a line search otherwise.

        Args:
            prior: positive, the diagonal of the prior precision.
            start: initial weights; None is the point of linearization. The result does not depend on it.
            max_iterations: largest number of Newton steps.

        Returns:
            Weights in float64 where the Jacobian is stored, otherwise in the network's dtype.

        Raises:
            NotConverged: the loss still decreases after ``max_iterations`` steps; the residual is half the Newton
                decrement.
        """
        v = (self.weights if start is None else start).to(self._dtype).clone()
        prior = prior.to(v)
        tolerance = torch.finfo(v.dtype).eps ** 0.75
        exact = self.dense and isinstance(self.likelihood, Regression)
        decrement = math.inf
        for _ in range(max_iterations):
            value, gradient = self._value_and_gradient(v, prior)
            direction = self._solve(v, prior, -gradient)
            decrement = -0.5 * float(gradient @ direction)
            if exact:
                return v + direction
            if decrement <= tolerance * (1.0 + abs(value)):
                return v + direction
            v = self._line(v, direction, prior, value, decrement)
        raise NotConverged(
            f"Newton's method for the linear model did not converge in {max_iterations} steps; use a larger prior "
            "precision, or more steps",
            iterations=max_iterations,
            residual=decrement,
        )

    def gradient(self, v: Float[Tensor, " weights"], prior: Float[Tensor, " weights"]) -> Float[Tensor, " weights"]:
        """The gradient of `loss` in v."""
        v = v.to(self._dtype)
        return self._value_and_gradient(v, prior.to(v))[1]

    # --- products with the curvature ---

    def _value_and_gradient(self, v: Tensor, prior: Tensor) -> tuple[float, Tensor]:
        gradient, value = prior * v, 0.5 * float((prior * v.square()).sum())
        for h, y, _, back in self._at(v):
            h = h.detach().requires_grad_()
            with torch.enable_grad():
                data = self.likelihood.loss(h, y)
                (residual,) = torch.autograd.grad(data, h)
            gradient = gradient + self.scale * back(residual)
            value += self.scale * float(data.detach())
        return value, gradient

    def _solve(self, v: Tensor, prior: Tensor, right: Tensor) -> Tensor:
        """(s J^T A J + Lambda)^-1 ``right``, with A at the outputs of ``v``."""
        if self.dense:
            return solve(self._root_rows(v), prior, right)
        roots = [self.likelihood.root(h).to(v) for h, _, _, _ in self._at(v)]

        def product(d: Tensor) -> Tensor:
            total = prior * d
            for root, (forward, back) in zip(roots, self._products(), strict=True):
                weighted = torch.einsum("ncr,ndr,nd->nc", root, root, forward(d))
                total = total + self.scale * back(weighted)
            return total

        # a Newton step need not be exact, as the next one corrects it
        reduction = torch.finfo(v.dtype).eps if isinstance(self.likelihood, Regression) else 1e-2
        return _conjugate_gradients(product, right, prior + self.scale * self._diagonal(), reduction)

    def _root_rows(self, v: Tensor) -> Tensor:
        """Rows R [m, P] with R^T R = s J^T A J."""
        parts = []
        for jacobian, (h, _, _, _) in zip(self._jacobians, self._at(v), strict=True):
            root = self.likelihood.root(h).to(jacobian)
            parts.append(torch.einsum("ncr,ncp->nrp", root, jacobian).flatten(0, 1))
        return math.sqrt(self.scale) * torch.cat(parts)

    def _diagonal(self) -> Tensor:
        """The curvature's diagonal at the point of linearization, cached."""
        if not hasattr(self, "_preconditioner"):
            rows, total = JacobianBackend(self.model, self.selection), torch.zeros_like(self.weights)
            for inputs, _ in iterate_batches(self.loader, self.model):
                with rows.forward(inputs) as p:
                    total += p.diagonal(self.likelihood.root(p.outputs))
            self._preconditioner = total
        return self._preconditioner

    def _line(self, v: Tensor, direction: Tensor, prior: Tensor, value: float, decrement: float) -> Tensor:
        """Backtracking line search: halve the step until the loss decreases sufficiently (Armijo's rule)."""
        size = 1.0
        for _ in range(30):
            if float(self.loss(v + size * direction, prior)) <= value - 2e-4 * size * decrement:
                break
            size /= 2
        return v + size * direction

    # --- batches ---

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.dense else self.weights.dtype

    def _kept(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Outputs less J w, targets and Jacobian of every batch, in float64."""
        rows = JacobianBackend(self.model, self.selection)
        for inputs, y in iterate_batches(self.loader, self.model):
            with rows.forward(inputs) as p:
                outputs, jacobian = p.outputs.detach().double(), p.jacobian().double()
            y = self.likelihood.check(outputs, y)
            yield outputs - jacobian @ self.weights.double(), y, jacobian

    @property
    def _jacobians(self) -> list[Tensor]:
        assert self._steps is not None
        return [jacobian for _, _, jacobian in self._steps]

    def _at(self, v: Tensor) -> Iterator[Step]:
        if self._steps is not None:
            for offset, y, jacobian in self._steps:
                yield (
                    offset + jacobian @ v.double(),
                    y,
                    lambda d, j=jacobian: j @ d,  # type: ignore[misc]
                    lambda u, j=jacobian: torch.einsum("ncp,nc->p", j, u),  # type: ignore[misc]
                )
            return
        moved = v - self.weights
        for (inputs, y), (forward, back) in zip(
            iterate_batches(self.loader, self.model), self._products(), strict=True
        ):
            with torch.no_grad():
                outputs = call_model(self.model, inputs)
            yield outputs + forward(moved), self.likelihood.check(outputs, y), forward, back

    def _products(self) -> Iterator[tuple[Product, Product]]:
        """J d and J^T u for every batch, by one forward or one reverse pass each."""
        for inputs, _ in iterate_batches(self.loader, self.model):
            function = outputs_as_function(self.model, self.selection, inputs)
            yield (
                lambda d, f=function: jvp(f, (self.weights,), (d,))[1],  # type: ignore[misc]
                lambda u, f=function: vjp(f, self.weights)[1](u)[0],  # type: ignore[misc]
            )


def _load_forward_mode() -> None:
    """Import torch's forward-mode rules without their deprecation warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def solve(
    rows: Float[Tensor, "m weights"], prior: Float[Tensor, " weights"], right: Float[Tensor, " weights"]
) -> Float[Tensor, " weights"]:
    """(R^T R + diag(prior))^-1 right, by a system of m or of P equations, whichever is smaller.

    >>> rows, right = torch.tensor([[1.0, 1.0]]), torch.tensor([3.0, 0.0])
    >>> solve(rows, torch.ones(2), right)  # [[2, 1], [1, 2]]^-1 [3, 0]
    tensor([ 2.0000, -1.0000])
    """
    m, size = rows.shape
    if m < size:
        scaled = rows / prior
        inner = torch.eye(m, dtype=rows.dtype, device=rows.device) + scaled @ rows.mT
        base = right / prior
        return base - scaled.mT @ torch.cholesky_solve((rows @ base)[:, None], torch.linalg.cholesky(inner))[:, 0]
    precision = rows.mT @ rows + torch.diag(prior)
    return torch.cholesky_solve(right[:, None], torch.linalg.cholesky(precision))[:, 0]


def _conjugate_gradients(product: Product, right: Tensor, diagonal: Tensor, reduction: float) -> Tensor:
    """Preconditioned conjugate gradients until the squared residual has fallen by ``reduction``, or 1,000 steps."""
    x, residual = torch.zeros_like(right), right.clone()
    scaled = residual / diagonal
    direction, energy = scaled.clone(), residual @ scaled
    goal = reduction * energy
    for _ in range(1000):
        if energy <= goal:
            break
        curved = product(direction)
        size = energy / (direction @ curved)
        x = x + size * direction
        residual = residual - size * curved
        scaled = residual / diagonal
        last, energy = energy, residual @ scaled
        direction = scaled + (energy / last) * direction
    return x


def _fits(model: nn.Module, selection: Selection, loader: Iterable[Any]) -> bool:
    """Whether the Jacobian of all examples stays within `DENSE_BYTES`."""
    elements, width = 0, 0
    for inputs, y in iterate_batches(loader, model):
        if not width:
            with torch.no_grad():
                width = call_model(model, inputs).shape[1]
        elements += len(y) * width * selection.size
        if 8 * elements > DENSE_BYTES:
            return False
    return True
