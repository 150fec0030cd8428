"""Tokens as a training step reads them: ids, the token that should follow each, and where documents begin.

Notable here:
- a target stands beside each id, already moved by one, so that documents cut into pieces lose no prediction at the seam
- `IGNORE` marks what is not learnt: prompts, padding, the last token of a document
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jaxtyping import Int
from torch import Tensor

from pippin.core.errors import InvalidArgument

IGNORE: Final = -100
"""The target of a token after which nothing is learnt; torch's own ``ignore_index``."""


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens, and what should follow each.

    Args:
        ids: token ids.
        targets: the wanted next token after each id; `IGNORE` where no loss is taken.
        documents: token counts of the documents, over all rows laid end to end; no token looks at another document.
            They add up to ``rows * length``, and none crosses the end of a row. None: each row is one document.

    Raises:
        InvalidArgument: counts that do not add up.

    >>> import torch
    >>> ids = torch.tensor([[5, 6, 7, 5]])
    >>> TokenBatch(ids, torch.tensor([[6, 7, IGNORE, 6]]), documents=(3, 1)).learnt
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
    def learnt(self) -> int:
        """Tokens that a loss is taken of."""
        return int((self.targets != IGNORE).sum())
