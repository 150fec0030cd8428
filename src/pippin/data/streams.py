"""Batches of tokens without end, in an order that a seed fixes and that can be taken up again at any place.

Notable here:
- pieces of documents are packed into rows by best fit, so that few tokens are padding; none looks at another's
- a cursor is where a group of rows began, the pieces that waited then, and the rows given since: JSON values
- processes that train together all go through the same stream, and `pippin.train.Trainer` gives each its batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pippin.core.errors import InvalidArgument
from pippin.data.batches import IGNORE, TokenBatch
from pippin.data.chat import ChatTemplate
from pippin.data.ordering import Buffered, Mapped, Shuffled, Stream
from pippin.data.records import Record, data_files, read_records
from pippin.data.tokenizer import Tokenizer
from pippin.data.tokens import Corpus, Learn, Piece, Tokenisation, cut, tokenise

_GROUP = 64  # rows that are packed together: enough for the best fit to leave hardly any gaps


class Packed:
    """Pieces of documents in rows of equal length, several to a row, none looking at another.

    Rows are filled by best fit from the pieces of some 64 rows, the longest first; rows that are not full at the end
    wait for the next pieces. What stays empty at last is padding, which is not learnt.

    Args:
        pieces: a stream of pieces of at most ``length`` tokens.
        length: tokens of a row.
        rows: rows of a batch; the last batch may have fewer.
        seed: of the order of the rows.
        padding: the id that fills gaps.

    Raises:
        InvalidArgument: numbers out of range; while iterating, a piece that is too long.
    """

    def __init__(
        self,
        pieces: Stream[Piece],
        length: int,
        rows: int,
        *,
        seed: int = 0,
        padding: int = 0,
    ) -> None:
        if length < 1 or rows < 1:
            raise InvalidArgument(f"length ({length}) and rows ({rows}) must be at least 1")
        self.pieces, self.length, self.rows, self.seed, self.padding = pieces, length, rows, seed, padding
        self._start = _Group(pieces.state_dict())
        self._given = 0

    def __iter__(self) -> Iterator[TokenBatch]:
        """The batches from the cursor on."""
        group, given = self._start, self._given
        self.pieces.load_state_dict(group.cursor)
        source = iter(self.pieces)
        waiting: list[list[Piece]] = []
        places: list[tuple[_Group, int]] = []  # where the cursor stands after each of the rows that wait
        while True:
            rows, following = self._pack(group, source)
            for number, row in enumerate(rows[given:], given + 1):
                waiting.append(row)
                places.append((group, number))
                if len(waiting) == self.rows:
                    self._start, self._given = places[-1]
                    yield self._batch(waiting)
                    waiting, places = [], []
            given = 0
            if following is None:
                break
            group = following
        if waiting:
            self._start, self._given = places[-1]
            yield self._batch(waiting)
        self._start, self._given = _Group(self.pieces.state_dict()), 0

    def _pack(self, group: _Group, source: Iterator[Piece]) -> tuple[list[list[Piece]], _Group | None]:
        """The rows of a group, and the beginning of the next one; None at the end of the pieces."""
        pieces, last = list(group.carried), True
        room = _GROUP * self.length - sum(map(len, pieces))
        for piece in source:
            if len(piece) > self.length:
                raise InvalidArgument(f"a piece of {len(piece)} tokens does not fit into rows of {self.length}")
            pieces.append(piece)
            room -= len(piece)
            if room <= 0:
                last = False
                break
        rows = best_fit(pieces, self.length)
        carried: list[Piece] = []
        if not last:
            # rows with a gap of more than a sixteenth wait, but never so many that nothing is given
            full = [row for row in rows if 16 * sum(map(len, row)) >= 15 * self.length]
            full = full or rows
            carried = [piece for row in rows if not any(row is other for other in full) for piece in row]
            rows = full
        order = np.random.default_rng((self.seed, group.number)).permutation(len(rows))
        following = None if last else _Group(self.pieces.state_dict(), tuple(carried), group.number + 1)
        return [rows[int(index)] for index in order], following

    def _batch(self, rows: list[list[Piece]]) -> TokenBatch:
        ids = np.full((len(rows), self.length), self.padding, dtype=np.int64)
        targets = np.full((len(rows), self.length), IGNORE, dtype=np.int64)
        counts: list[int] = []
        for row, pieces in enumerate(rows):
            stop = 0
            for piece in pieces:
                start, stop = stop, stop + len(piece)
                ids[row, start:stop], targets[row, start:stop] = piece.ids, piece.targets
                counts.append(len(piece))
            if stop < self.length:
                counts.append(self.length - stop)
        whole = len(counts) == len(rows)
        return TokenBatch(torch.from_numpy(ids), torch.from_numpy(targets), None if whole else tuple(counts))

    def state_dict(self) -> dict[str, Any]:
        """The beginning of the group of rows, and how many of them were given."""
        return {**self._start.state_dict(), "given": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor."""
        self._start = _Group.from_state(state)
        self._given = int(state["given"])


class _Group:
    """Where the packing of some rows begins."""

    def __init__(self, cursor: dict[str, Any], carried: Sequence[Piece] = (), number: int = 0) -> None:
        self.cursor, self.carried, self.number = cursor, carried, number

    def state_dict(self) -> dict[str, Any]:
        carried = [[piece.ids.tolist(), piece.targets.tolist()] for piece in self.carried]
        return {"source": self.cursor, "carried": carried, "group": self.number}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> _Group:
        carried = tuple(Piece(np.array(ids), np.array(targets)) for ids, targets in state["carried"])
        return cls(dict(state["source"]), carried, int(state["group"]))


def best_fit(pieces: Sequence[Piece], length: int) -> list[list[Piece]]:
    """Put pieces into rows: the longest first, each into the fullest row that has room for it.

    Source: Ding et al. 2024, arXiv:2404.10830 (best-fit packing), after the classical best-fit decreasing.

    >>> sizes = [5, 3, 2, 6, 4]
    >>> pieces = [Piece(np.zeros(n, int), np.zeros(n, int)) for n in sizes]
    >>> [[len(piece) for piece in row] for row in best_fit(pieces, 10)]
    [[6, 4], [5, 3, 2]]
    """
    rows: list[list[Piece]] = []
    with_room: list[list[int]] = [[] for _ in range(length + 1)]  # rows by the room that they have
    for piece in sorted(pieces, key=len, reverse=True):
        room = next((room for room in range(len(piece), length + 1) if with_room[room]), None)
        if room is None:
            row, room = len(rows), length
            rows.append([])
        else:
            row = with_room[room].pop()
        rows[row].append(piece)
        with_room[room - len(piece)].append(row)
    return rows


def token_batches(
    data: str | Path | Iterable[str | Path] | Sequence[Record],
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    length: int,
    rows: int,
    seed: int = 0,
    epochs: int | None = None,
    learn: Learn = "assistant",
    fields: Mapping[str, str] | None = None,
    buffer: int | None = None,
    show: bool = True,
) -> Packed:
    """Batches of tokens from files or records: a resumable stream, and data for `pippin.train.Trainer`.

    Everything is tokenised once, before the first batch, into a temporary file; with a ``buffer``, as it comes, each
    epoch anew, for data that is too large for that.

    Args:
        data: files and folders as `read_records` takes them, or records.
        tokenizer: of the model.
        template: its chat template, for conversations and prompts.
        length: tokens of a row; longer documents are cut.
        rows: rows of a batch.
        seed: of all orders.
        epochs: how often to go through the data; None goes on for ever.
        learn: "assistant" learns texts, completions and the assistant's turns; "all" everything.
        fields: see `read_records`.
        buffer: records that are shuffled among each other; None for all of them, tokenised beforehand.
        show: draw a progress bar while tokenising.

    Raises:
        InvalidRecord: a file or a record that cannot be read; with a buffer, only when its turn comes.
        InvalidArgument: numbers out of range, a path that does not exist, a file of an unknown kind.
        InvalidInput: nothing in the data is learnt.
        MissingDependency: a table, without pyarrow.
    """
    if buffer is None:
        corpus = tokenised(data, tokenizer, template=template, length=length, learn=learn, fields=fields, show=show)
        return packed(corpus, tokenizer, length=length, rows=rows, seed=seed, epochs=epochs)
    _check_length(length)
    rules = Tokenisation(tokenizer, template, learn)

    def pieces_of(record: Record) -> Iterator[Piece]:
        # the blocks of a text come in any order, so each is a document of its own
        return cut([replace(rules(record), ends=True)], length)

    source = Buffered(_opener(data, fields), buffer, seed=seed, epochs=epochs)
    return Packed(Mapped(source, pieces_of), length, rows, seed=seed, padding=_padding(tokenizer))


def tokenised(
    data: str | Path | Iterable[str | Path] | Sequence[Record],
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    length: int,
    learn: Learn = "assistant",
    fields: Mapping[str, str] | None = None,
    show: bool = True,
) -> Corpus:
    """All of the data in pieces of at most ``length`` tokens; arguments and errors as in `token_batches`."""
    _check_length(length)
    documents = tokenise(_opener(data, fields)(), tokenizer, template, learn=learn)
    return Corpus(cut(documents, length), tokenizer.vocab_size, show=show)


def packed(
    pieces: Sequence[Piece], tokenizer: Tokenizer, *, length: int, rows: int, seed: int = 0, epochs: int | None = None
) -> Packed:
    """Batches of tokens from pieces, all of them shuffled anew each epoch; arguments as in `token_batches`."""
    order: Shuffled[Piece, list[Piece]] = Shuffled(pieces, 1, seed=seed, epochs=epochs)
    stream: Mapped[list[Piece], Piece] = Mapped(order, iter)
    return Packed(stream, length, rows, seed=seed, padding=_padding(tokenizer))


def _padding(tokenizer: Tokenizer) -> int:
    return tokenizer.eos_ids[0] if tokenizer.eos_ids else 0


def _check_length(length: int) -> None:
    if length < 1:
        raise InvalidArgument(f"length is {length}; rows need at least 1 token")


def _opener(data: Any, fields: Mapping[str, str] | None) -> Callable[[], Iterable[Record]]:
    """What reads the records, from the beginning each time it is called."""
    given: list[Any] = [data] if isinstance(data, str | Path) else list(data)
    if given and isinstance(given[0], Record):
        return lambda: given
    data_files(given)
    return lambda: read_records(given, fields=fields)
