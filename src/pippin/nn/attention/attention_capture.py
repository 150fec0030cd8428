"""The attention that cached tokens receive in a pass: what policies of bounded caches rank tokens by.

Notable here:
- a probability is that of one key for one query head and query; it is reduced over the queries of the pass and the
  heads that share the key, so that the result has one number for each key and key head
- what attention sinks take is left out: probabilities are shares among the keys
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass
class AttentionCapture:
    """Collects the attention of one sequence in a pass.

    Args:
        reduction: over queries and the heads of a key head, "sum" or "max".
        before: the softmax is over the keys in slots before this one only; None for all that a query sees.

    Attributes:
        received: for each layer with keys of its own, (kv_heads, tokens): attention received by each token of the
            sequence, from all layers that read its keys. Filled by the pass; what an earlier one left is removed.
    """

    reduction: Literal["sum", "max"] = "sum"
    before: int | None = None
    received: dict[int, Float[Tensor, "kv_heads tokens"]] = field(default_factory=dict)

    def add(
        self,
        layer: int,
        q: Float[Tensor, "1 heads new head_dim"],
        keys: Float[Tensor, "1 kv_heads seen head_dim"],
        visible: Bool[Tensor, "some_heads new seen"],
        *,
        scale: float,
        first: int,
        cached: int,
        lost: int | Int[Tensor, kv_heads],
        softcap: float | None,
    ) -> None:
        """Add what the keys of one layer receive from a layer that reads them.

        Args:
            layer: index of the layer that has the keys.
            q: queries.
            keys: keys that they may see.
            visible: which query sees which key, of each key head or of all together.
            scale: multiplier on the scores.
            first: index of the first key in the sequence.
            cached: tokens of the sequence before the pass.
            lost: those of them that are no longer there, of each key head if they differ.
            softcap: bound of the scores.
        """
        _, new, seen = visible.shape
        gone = torch.as_tensor(lost, device=visible.device).view(-1, 1, 1)
        scores = (q[0].unflatten(0, (keys.shape[1], -1)).float() * scale) @ keys[0].float()[:, None].transpose(-1, -2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if self.before is not None:
            visible = visible & (torch.arange(first, first + seen, device=visible.device) < self.before - gone)
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        given = scores.softmax(-1).nan_to_num(0.0)  # a query that sees no key gives nothing
        total = given.sum((1, 2)) if self.reduction == "sum" else given.amax((1, 2))
        received = torch.zeros(keys.shape[1], max(first + seen, cached - int(gone.min()) + new), device=total.device)
        received[:, first : first + seen] = total
        earlier = self.received.get(layer)
        if earlier is not None:  # of another layer that reads the same keys
            received = received.cpu()
            received = earlier + received if self.reduction == "sum" else torch.maximum(earlier, received)
        self.received[layer] = received.cpu()
