"""Token batches of a training step: ids, targets, and document boundaries.

Notable here:
- targets are already shifted by one, so that documents cut into pieces lose no prediction at the cut
- `IGNORE` marks positions without loss: prompts, padding, the last token of a document
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jaxtyping import Int
from torch import Tensor

from pippin.core.errors import InvalidArgument

IGNORE: Final = -100
"""Target of a token without loss; torch's own ``ignore_index``."""


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens, and the next token of each.

    Args:
        ids: token ids.
        targets: the next token after each id; `IGNORE` for no loss.
        documents: token counts of the packed documents, over all rows in order; no token attends to another document.
            They add up to ``rows * length``, and none crosses the end of a row. None: each row is one document.

    Raises:
        InvalidArgument: counts that do not add up.

    >>> import torch
    >>> ids = torch.tensor([[5, 6, 7, 5]])
    >>> TokenBatch(ids, torch.tensor([[6, 7, IGNORE, 6]]), documents=(3, 1)).learned
    3
    """

    ids: Int[Tensor, "rows length"]
    targets: Int[Tensor, "rows length"]
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        counts = self.documents
        if counts is not None and (sum(counts) != self.ids.numel() or min(counts, default=0) < 1):
            raise InvalidArgument(
                f"documents of {sum(counts)} tokens (the shortest has {min(counts, default=0)}) do not fill rows of "
                f"{self.ids.numel()} tokens in all"
            )

    @property
    def learned(self) -> int:
        """Number of tokens that count in the loss."""
        return int((self.targets != IGNORE).sum())
