"""Losses over a large vocabulary without its logits in memory: the output matrix is read for a few tokens at a time.

Notable here:
- gradients are taken within the forward pass, piece by piece, and the logits of a piece are gone before the next one:
  nothing is computed twice, as it would be by checkpointing, and memory does not grow with tokens times vocabulary
- whatever the output matrix is made of (tied, fake-quantised, adapted), every parameter that it reaches is found
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.data.batches import TokenBatch
from pippin.nn.cache import Documents
from pippin.nn.linear import Linear

LOGITS = 1 << 24
"""Numbers in one piece of logits, at most: 64 MiB in float32."""

# Logits of some tokens, and which those are, become the sum of their losses and sums to be logged.
Score = Callable[[Float[Tensor, "part vocab"], slice], tuple[Tensor, Mapping[str, Tensor]]]


def hidden_states(model: Any, batch: TokenBatch) -> Float[Tensor, "tokens width"]:
    """What the output matrix of a decoder reads for every token of a batch, its rows laid end to end."""
    if batch.documents is None:
        hidden: Tensor = model.hidden(batch.ids)
    else:
        hidden = model.hidden(batch.ids.reshape(1, -1), cache=Documents(batch.documents))
    return hidden.flatten(0, 1)


def read_out(
    model: Any, hidden: Float[Tensor, "tokens width"], score: Score, *, piece: int | None = None
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """The sum of losses over all tokens, with its graph, and the sums to be logged.

    Args:
        model: what has ``lm_head``, the output matrix, and a ``config``.
        hidden: as the output matrix reads them.
        score: called for consecutive pieces with their logits and their place among the tokens.
        piece: tokens in a piece; None for as many as make `LOGITS` logits.
    """
    if len(hidden) == 0:
        return hidden.sum(), {}
    piece = piece or max(1, LOGITS // model.config.vocab_size)
    parts = [slice(start, min(start + piece, len(hidden))) for start in range(0, len(hidden), piece)]
    sums: dict[str, Tensor] = {}

    def once(states: Tensor, part: slice) -> Tensor:
        total, logged = score(model.lm_head(states), part)
        for name, value in logged.items():
            sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        return total

    if len(parts) == 1 or not torch.is_grad_enabled():
        return torch.stack([once(hidden[part], part) for part in parts]).sum(), sums
    total: Tensor = _Pieces.apply(once, parts, hidden, *_reached(model))  # type: ignore[no-untyped-call]
    return total, sums


def _reached(model: Any) -> list[Tensor]:
    """What takes the gradients of the pieces: the output matrix where that is one tensor, else all parameters.

    A matrix that is computed (fake-quantised) and kept between two readings passes its gradient on once, not for each
    piece.
    """
    head = model.lm_head
    weight = getattr(head, "weight", None)
    if type(head).forward is Linear.forward and head.bias is None and weight is not None and head.weight is weight:
        return [weight] if weight.requires_grad else []
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class _Pieces(torch.autograd.Function):
    """The sum of a function over pieces of its input; its gradients are ready when the sum is."""

    @staticmethod
    def forward(
        ctx: Any, once: Callable[[Tensor, slice], Tensor], parts: Sequence[slice], hidden: Tensor, *others: Tensor
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        states = torch.zeros_like(hidden)
        gradients: list[Tensor | None] = [None] * len(others)
        for part in parts:
            with torch.enable_grad():
                leaf = hidden[part].detach().requires_grad_()
                loss = once(leaf, part)
                states[part], *found = torch.autograd.grad(loss, [leaf, *others], allow_unused=True)
            total += loss.detach()
            for index, gradient in enumerate(found):
                if gradient is not None:
                    before = gradients[index]
                    gradients[index] = gradient if before is None else before.add_(gradient)
        ctx.states, ctx.gradients = states, gradients
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        scale = outer[0]
        states, gradients, ctx.states, ctx.gradients = ctx.states, ctx.gradients, None, None
        return None, None, states.mul_(scale), *(None if g is None else g.mul_(scale) for g in gradients)
