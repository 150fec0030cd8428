"""A mask of the experts that the tokens of a request may be routed to, with multipliers on their weights.

Notable here:
- the mask acts before the choice: the likeliest of the allowed experts are chosen, and weighted among themselves; the
  multipliers act after it
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pippin.core.errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class ExpertMask:
    """The experts that may be chosen in each layer.

    Args:
        allowed: true for the experts that may be chosen; rows of layers without experts do not matter.
        weights: multipliers on the weights of the allowed experts, above 0; None for 1.
    """

    allowed: Bool[Tensor, "layers experts"]
    weights: Float[Tensor, "rows columns"] | None = None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the mask and its weights, as hexadecimal digits."""
        head = repr(tuple(self.allowed.shape)).encode()
        return hashlib.sha256(head + self.multipliers.numpy().tobytes()).hexdigest()

    @cached_property
    def multipliers(self) -> Float[Tensor, "layers experts"]:
        """Multipliers in float32 on the CPU, 0 for experts that may not be chosen."""
        allowed = self.allowed.cpu()
        weights = torch.ones(allowed.shape) if self.weights is None else self.weights.detach().cpu().float()
        return torch.where(allowed, weights, 0.0).contiguous()

    def check(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Check that it can be used with a decoder.

        Args:
            sizes: number of experts of each layer, and how many of them a token takes; 0 for dense layers.

        Raises:
            InvalidArgument: a model without experts, a mask of another shape, too few experts left in a layer, or
                weights that are not above 0.
        """
        most = max((experts for experts, _ in sizes), default=0)
        if not most:
            raise InvalidArgument("this model has no experts to be masked; leave the mask out")
        if self.allowed.dtype != torch.bool or self.allowed.shape != (len(sizes), most):
            raise InvalidArgument(
                f"a mask of experts must be boolean and of shape {(len(sizes), most)}, a row for each layer, got "
                f"{self.allowed.dtype} of shape {tuple(self.allowed.shape)}"
            )
        for index, (experts, active) in enumerate(sizes):
            left = int(self.allowed[index, :experts].sum())
            if left < active:
                raise InvalidArgument(
                    f"the mask leaves {left} of {experts} experts in layer {index}, and each token takes {active}"
                )
        if self.weights is None:
            return
        if self.weights.shape != self.allowed.shape:
            raise InvalidArgument(
                f"weights of experts must have the shape of the mask, {tuple(self.allowed.shape)}, got "
                f"{tuple(self.weights.shape)}"
            )
        allowed = self.weights[self.allowed]
        if not bool((allowed.isfinite() & (allowed > 0)).all()):
            raise InvalidArgument(
                f"weights of allowed experts must be above 0 and finite, the least is {float(allowed.min())}; experts "
                "that must not be chosen are left out of the mask"
            )


# Masks of experts, each with the tokens that it applies to: a slice of all tokens of the flattened batch.
ExpertMaskSlices = Sequence[tuple[ExpertMask, slice]]


def mask_scores(
    scores: Float[Tensor, "tokens experts"], layer: int, masks: ExpertMaskSlices | None
) -> Float[Tensor, "tokens experts"]:
    """Routing scores of one layer, minus infinity for the experts that a token may not choose."""
    if not masks:
        return scores
    forbidden = ~torch.stack([mask.allowed[layer, : scores.shape[1]] for mask, _ in masks])
    free = torch.zeros_like(forbidden[:1])
    return scores.masked_fill(torch.cat([free, forbidden]).to(scores.device)[_numbers(scores, masks)], -torch.inf)


def multiply_weights(
    weights: Float[Tensor, "tokens chosen"],
    chosen: Int[Tensor, "tokens chosen"],
    layer: int,
    masks: ExpertMaskSlices | None,
) -> Float[Tensor, "tokens chosen"]:
    """The weights of one layer's chosen experts, multiplied by those of the masks."""
    if not masks or all(mask.weights is None for mask, _ in masks):
        return weights
    rows = [None, *(mask.weights for mask, _ in masks)]
    one = weights.new_ones(masks[0][0].allowed.shape[1])
    table = torch.stack([one if row is None else row[layer].to(weights) for row in rows])
    return weights * table[_numbers(weights, masks)[:, None], chosen]


def _numbers(tokens: Float[Tensor, "tokens _"], masks: ExpertMaskSlices) -> Int[Tensor, tokens]:
    """Which mask each token has, from 1; 0 for none."""
    numbers = torch.zeros(len(tokens), dtype=torch.long)
    for number, (_, own) in enumerate(masks, 1):
        numbers[own] = number
    return numbers.to(tokens.device)
