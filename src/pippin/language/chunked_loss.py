"""Losses over a large vocabulary: logits are computed for a chunk of tokens at a time.

Notable here:
- gradients are computed within the forward pass, chunk by chunk, and the logits of a chunk are freed before the next:
  nothing is computed twice, as with checkpointing, and memory does not grow with tokens times vocabulary
- the output matrix may be tied, fake-quantized or adapted: all parameters that it depends on get their gradients
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.data.token_batches import TokenBatch
from pippin.language.decoder import logits_of
from pippin.nn.kv_cache import PackedDocuments
from pippin.nn.linear import Linear

MAX_LOGITS = 1 << 24
"""Maximum number of logits in one chunk: 64 MiB in float32."""

# From the logits of a chunk and its range of tokens to the sum of their losses and the sums of metrics.
Score = Callable[[Float[Tensor, "part vocab"], slice], tuple[Tensor, Mapping[str, Tensor]]]


def hidden_states(model: Any, batch: TokenBatch) -> Float[Tensor, "tokens width"]:
    """The input of the output matrix for every token of a batch, flattened."""
    if batch.documents is None:
        hidden: Tensor = model.hidden(batch.ids)
    else:
        hidden = model.hidden(batch.ids.reshape(1, -1), cache=PackedDocuments(batch.documents))
    return hidden.flatten(0, 1)


def sum_in_chunks(
    model: Any, hidden: Float[Tensor, "tokens width"], score: Score, *, chunk_size: int | None = None
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """The sum of losses over all tokens, differentiable, and the sums of metrics.

    Args:
        model: a model with ``lm_head``, the output matrix, and a ``config``.
        hidden: inputs of the output matrix.
        score: called for consecutive chunks with their logits and their range of tokens.
        chunk_size: tokens in a chunk; None for as many as have `MAX_LOGITS` logits.
    """
    if len(hidden) == 0:
        return hidden.sum(), {}
    chunk_size = chunk_size or max(1, MAX_LOGITS // model.config.vocab_size)
    parts = [slice(start, min(start + chunk_size, len(hidden))) for start in range(0, len(hidden), chunk_size)]
    sums: dict[str, Tensor] = {}

    def chunk_loss(states: Tensor, part: slice) -> Tensor:
        total, logged = score(logits_of(model, states), part)
        for name, value in logged.items():
            sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        return total

    if len(parts) == 1 or not torch.is_grad_enabled():
        return torch.stack([chunk_loss(hidden[part], part) for part in parts]).sum(), sums
    total: Tensor = _ChunkedSum.apply(chunk_loss, parts, hidden, *_differentiable(model))  # type: ignore[no-untyped-call]
    return total, sums


def _differentiable(model: Any) -> list[Tensor]:
    """The tensors that get gradients from the chunks: the output matrix if it is one tensor, else all parameters.

    A matrix that is computed (by fake quantization) and cached propagates its gradient once, not for each chunk.
    """
    head = model.lm_head
    weight = getattr(head, "weight", None)
    if type(head).forward is Linear.forward and head.bias is None and weight is not None and head.weight is weight:
        return [weight] if weight.requires_grad else []
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class _ChunkedSum(torch.autograd.Function):
    """The sum of a function over chunks of its input; its gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, chunk_loss: Callable[[Tensor, slice], Tensor], parts: Sequence[slice], hidden: Tensor, *others: Tensor
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        states = torch.zeros_like(hidden)
        gradients: list[Tensor | None] = [None] * len(others)
        for part in parts:
            with torch.enable_grad():
                leaf = hidden[part].detach().requires_grad_()
                loss = chunk_loss(leaf, part)
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
