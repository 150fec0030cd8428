"""Products of the true Hessian of a batch's loss with vectors, without forming the matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pippin.bayes import batches
from pippin.bayes.likelihood import Likelihood
from pippin.bayes.weight_subset import Selection


class _Called(nn.Module):
    """A module that calls the model by `call_model`, so that `functional_call` can be used."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, inputs: Any) -> Tensor:
        return batches.call_model(self.model, inputs)


def outputs_as_function(model: nn.Module, selection: Selection, inputs: Any) -> Callable[[Tensor], Tensor]:
    """The differentiable function from the selected weights [P] to the outputs [n, C]."""
    called = _Called(model)

    def outputs(vector: Tensor) -> Tensor:
        own = {f"model.{name}": value for name, value in selection.tensors(model, vector).items()}
        result: Tensor = functional_call(called, own, (inputs,))
        return result

    return outputs


def products(
    model: nn.Module, selection: Selection, likelihood: Likelihood, inputs: Any, targets: Tensor
) -> Callable[[Tensor], Tensor]:
    """The function from vectors [k, P] to their products with the Hessian of the batch's summed loss."""
    vector = selection.vector(model).requires_grad_()
    with torch.enable_grad():
        loss = likelihood.loss(outputs_as_function(model, selection, inputs)(vector), targets)
        (gradient,) = torch.autograd.grad(loss, vector, create_graph=True)

    def product(vectors: Tensor) -> Tensor:
        if not gradient.requires_grad:  # the loss is linear in the weights
            return torch.zeros_like(vectors)
        columns = [
            torch.autograd.grad(gradient, vector, one.to(gradient), retain_graph=True, materialize_grads=True)[0]
            for one in vectors
        ]
        return torch.stack(columns)

    return product
