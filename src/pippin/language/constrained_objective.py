"""Cross-entropy of the next token among those that a grammar allows, as constrained decoding chooses it.

Notable here:
- only tokens at which the grammar leaves a choice count; forced ones are neither learned nor computed
- the allowed tokens are bits, an eighth of the vocabulary in bytes for each token that counts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.data.token_batches import TokenBatch
from pippin.language.chunked_loss import hidden_states, sum_in_chunks
from pippin.train.objective import Loss


@dataclass(frozen=True)
class ConstrainedExample:
    """One sequence with the choices that a grammar left in it.

    Attributes:
        ids: its tokens.
        places: positions of ``ids`` before a choice, in order.
        targets: the token that was chosen after each.
        allowed: the tokens that could be chosen, as bits, the lowest first.
        weights: how much each choice counts; None for all the same.
    """

    ids: tuple[int, ...]
    places: Int[np.ndarray, " choices"]
    targets: Int[np.ndarray, " choices"]
    allowed: UInt8[np.ndarray, "choices bytes"]
    weights: Float[np.ndarray, " choices"] | None = None


@dataclass(frozen=True)
class ConstrainedBatch:
    """Sequences packed one after the other, none of which attends to another.

    Attributes:
        tokens: the packed sequences.
        places: positions among all tokens before a choice.
        targets: the token that was chosen.
        allowed: bits of the tokens that could be chosen.
        weights: how much each choice counts.
    """

    tokens: TokenBatch
    places: Int[Tensor, " choices"]
    targets: Int[Tensor, " choices"]
    allowed: UInt8[Tensor, "choices bytes"]
    weights: Float[Tensor, " choices"]

    @classmethod
    def of(cls, examples: Sequence[ConstrainedExample]) -> ConstrainedBatch:
        """Pack examples.

        Raises:
            InvalidArgument: there are none.
        """
        if not examples:
            raise InvalidArgument("a batch needs at least one example")
        lengths = [len(each.ids) for each in examples]
        starts = np.cumsum([0, *lengths[:-1]])
        ids = torch.tensor([[token for each in examples for token in each.ids]])
        return cls(
            TokenBatch(ids, torch.zeros_like(ids), tuple(lengths)),
            torch.from_numpy(
                np.concatenate([each.places + start for each, start in zip(examples, starts, strict=True)])
            ),
            torch.from_numpy(np.concatenate([each.targets for each in examples])),
            torch.from_numpy(np.concatenate([each.allowed for each in examples])),
            torch.from_numpy(np.concatenate([_weights(each) for each in examples])).float(),
        )


class ConstrainedNextToken:
    """Cross-entropy among the allowed tokens, an objective for `pippin.train.Trainer`.

    The total is in nats over the choices, with weights of mean 1; the metric "accuracy" counts those where the target
    is the likeliest.
    """

    unit = "choices"

    def __call__(self, model: nn.Module, batch: ConstrainedBatch, generator: torch.Generator | None = None) -> Loss:
        """The loss of a batch; ``generator`` is not used."""
        hidden = hidden_states(model, batch.tokens)[batch.places]
        weights = batch.weights / batch.weights.mean()

        def score(logits: Float[Tensor, "part vocab"], part: slice) -> tuple[Tensor, dict[str, Tensor]]:
            allowed = _unpacked(batch.allowed[part], logits.shape[-1])
            logits, targets = logits.float().masked_fill(~allowed, -torch.inf), batch.targets[part]
            right = (logits.argmax(-1) == targets).sum()
            return (weights[part] * F.cross_entropy(logits, targets, reduction="none")).sum(), {
                "accuracy": right.float()
            }

        total, sums = sum_in_chunks(model, hidden, score)
        metrics: dict[str, Any] = sums or {"accuracy": torch.zeros(())}
        return Loss(total, float(len(batch.targets)), metrics)


def _weights(example: ConstrainedExample) -> Float[np.ndarray, " choices"]:
    return np.ones(len(example.targets)) if example.weights is None else example.weights


def _unpacked(bits: UInt8[Tensor, "part bytes"], size: int) -> Tensor:
    """The bits as booleans; tokens beyond them are padding of the vocabulary."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    found = ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)
    return F.pad(found, (0, max(0, size - found.shape[1])))[:, :size]
