"""Old data among the new, on the command line: its options, its rows, and what forgetting is measured on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pippin.data.streams import Packed
    from pippin.data.tokenizer import Tokenizer
    from pippin.data.tokens import Piece, Subset

_DATA = "Data"

Inject = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        help="Share of the tokens that come from --pretrain-data, 0.01 say, so that the model forgets less.",
        rich_help_panel=_DATA,
    ),
]
PretrainData = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Text like that which the model learnt before; what it forgets is measured on a part of it. Repeatable.",
        rich_help_panel=_DATA,
    ),
]

OPTIONS: Final[dict[str, tuple[Any, Any]]] = {"inject": (Inject, 0.0), "pretrain_data": (PretrainData, None)}
"""Of verbs whose model has something to forget, each with its default."""


def at_most(pieces: Subset, tokens: int) -> Subset:
    """So many of the pieces, spread evenly, that they hold about so many tokens."""
    from pippin.data.tokens import Subset

    count = max(1, round(len(pieces) * min(1.0, tokens / pieces.tokens)))
    return Subset(pieces, [place * len(pieces) // count for place in range(count)])


def injected(
    new: Sequence[Piece], old: Sequence[Piece], tokenizer: Tokenizer, share: float, *, length: int, rows: int, seed: int
) -> Packed:
    """Rows of new pieces with old ones among them, by the share of the tokens; each side shuffled anew each epoch."""
    from pippin.data.injection import Injected
    from pippin.data.ordering import Mapped, Shuffled
    from pippin.data.streams import Packed

    def shuffled(pieces: Sequence[Piece]) -> Mapped[list[Piece], Piece]:
        order: Shuffled[Piece, list[Piece]] = Shuffled(pieces, 1, seed=seed)
        return Mapped(order, iter)

    mixed = Injected(shuffled(new), shuffled(old), share, seed=seed, size=len)
    padding = tokenizer.eos_ids[0] if tokenizer.eos_ids else 0
    return Packed(mixed, length, rows, seed=seed, padding=padding)
