"""Priors over weights: one precision for all, one for each layer, or one for each weight."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.bayes.subset import Selection
from pippin.core.errors import InvalidArgument


def group_ids(model: nn.Module, selection: Selection) -> tuple[tuple[str, ...], Int[Tensor, " p"]]:
    """The layers that hold the weights, and the place of its layer for each weight.

    A layer is a module with its own parameters, all of them together: a weight and its bias share a precision, since a
    normalisation after them sees only their common scale.
    """
    owners = [name.rpartition(".")[0] for name in selection.names]
    layers = tuple(dict.fromkeys(owners))
    ids = torch.zeros(selection.size, dtype=torch.long)
    for name, owner in zip(selection.names, owners, strict=True):
        ids[selection.of(name)] = layers.index(owner)
    return layers, ids


def expand(prior: Float[Tensor, " groups"], layer_of_weight: Int[Tensor, " p"], layers: int) -> Float[Tensor, " p"]:
    """A prior for each weight, from 1, ``layers`` or P numbers; gradients flow through.

    Raises:
        InvalidArgument: another number of them, or one that is not positive and finite.
    """
    size = len(layer_of_weight)
    if len(prior) not in (1, layers, size):
        raise InvalidArgument(
            f"prior_precision has {len(prior)} numbers; give 1, one for each of {layers} layers, or one for each of "
            f"{size} weights"
        )
    bad = prior[~((prior > 0) & prior.isfinite())]
    if len(bad):
        raise InvalidArgument(f"prior_precision holds {bad[0].item():g}; precisions are above 0 and finite")
    if len(prior) == 1:
        return prior.expand(size)
    return prior[layer_of_weight] if len(prior) == layers else prior
