"""A mask of the experts that the tokens of a request may be routed to.

Notable here:
- the mask acts before the choice: the likeliest of the allowed experts are chosen, and weighted among themselves
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pippin.core.errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class ExpertMask:
    """The experts that may be chosen in each layer.

    Args:
        allowed: true for the experts that may be chosen; rows of layers without experts do not matter.
    """

    allowed: Bool[Tensor, "layers experts"]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the mask, as hexadecimal digits."""
        head = repr(tuple(self.allowed.shape)).encode()
        return hashlib.sha256(head + self.allowed.cpu().contiguous().numpy().tobytes()).hexdigest()

    def check(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Check that it can be used with a decoder.

        Args:
            sizes: number of experts of each layer, and how many of them a token takes; 0 for dense layers.

        Raises:
            InvalidArgument: a model without experts, a mask of another shape, or too few experts left in a layer.
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


# Masks of experts, each with the tokens that it applies to: a slice of all tokens of the flattened batch.
ExpertMaskSlices = Sequence[tuple[ExpertMask, slice]]


def mask_scores(
    scores: Float[Tensor, "tokens experts"], layer: int, masks: ExpertMaskSlices | None
) -> Float[Tensor, "tokens experts"]:
    """Routing scores of one layer, minus infinity for the experts that a token may not choose."""
    if not masks:
        return scores
    masked = scores.clone()
    for mask, tokens in masks:
        masked[tokens].masked_fill_(~mask.allowed[layer, : scores.shape[1]].to(scores.device), -torch.inf)
    return masked
