"""Packing of documents into token batches, as resumable streams with a seeded order.

Notable here:
- pieces of documents are packed into rows by best fit, so that few tokens are padding; none attends to another
- a cursor is the start of a group of rows, the pieces that waited then, and the number of rows since: JSON values
- distributed processes all read the same stream, and `pippin.train.Trainer` gives each its batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.data.corpus import Corpus, LossOn, Tokenization, TokenizedPiece, cut, tokenize
from pippin.data.records import TrainingRecord, data_files, read_records
from pippin.data.streams import Buffered, DataStream, Mapped, Shuffled
from pippin.data.text.chat_template import ChatTemplate
from pippin.data.text.tokenizer import Tokenizer
from pippin.data.token_batches import IGNORE, TokenBatch

_GROUP = 64  # rows that are packed together: enough for the best fit to leave hardly any gaps


class Packed:
    """Pieces of documents packed in rows of equal length, several to a row, none attending to another.

    Rows are filled by best fit from the pieces of some 64 rows, the longest first; rows that are not full at the end
    wait for the next pieces. The remaining gaps are padding, which does not count in the loss.

    Args:
        pieces: a stream of pieces of at most ``max_length`` tokens.
        max_length: tokens of a row.
        batch_size: rows of a batch; the last batch may have fewer.
        seed: seed of the order of the rows.
        padding: the id that fills gaps.

    Raises:
        InvalidArgument: while iterating, a piece that is too long.
    """

    @checked
    def __init__(
        self,
        pieces: DataStream[TokenizedPiece],
        max_length: PositiveInt,
        batch_size: PositiveInt,
        *,
        seed: int = 0,
        padding: int = 0,
    ) -> None:
        self.pieces, self.max_length, self.batch_size = pieces, max_length, batch_size
        self.seed, self.padding = seed, padding
        self._start = _Group(pieces.state_dict())
        self._given = 0

    def __iter__(self) -> Iterator[TokenBatch]:
        """The batches from the cursor on."""
        group, given = self._start, self._given
        self.pieces.load_state_dict(group.cursor)
        source = iter(self.pieces)
        waiting: list[list[TokenizedPiece]] = []
        places: list[tuple[_Group, int]] = []  # the cursor after each of the rows that wait
        while True:
            rows, following = self._pack(group, source)
            for number, row in enumerate(rows[given:], given + 1):
                waiting.append(row)
                places.append((group, number))
                if len(waiting) == self.batch_size:
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

    def _pack(
        self, group: _Group, source: Iterator[TokenizedPiece]
    ) -> tuple[list[list[TokenizedPiece]], _Group | None]:
        """The rows of a group, and the beginning of the next one; None at the end of the pieces."""
        pieces, last = list(group.carried), True
        room = _GROUP * self.max_length - sum(map(len, pieces))
        for piece in source:
            if len(piece) > self.max_length:
                raise InvalidArgument(f"a piece of {len(piece)} tokens does not fit into rows of {self.max_length}")
            pieces.append(piece)
            room -= len(piece)
            if room <= 0:
                last = False
                break
        rows = best_fit(pieces, self.max_length)
        carried: list[TokenizedPiece] = []
        if not last:
            # rows with a gap of more than a sixteenth wait, but never so many that no row is complete
            full = [row for row in rows if 16 * sum(map(len, row)) >= 15 * self.max_length]
            full = full or rows
            carried = [piece for row in rows if not any(row is other for other in full) for piece in row]
            rows = full
        order = np.random.default_rng((self.seed, group.number)).permutation(len(rows))
        following = None if last else _Group(self.pieces.state_dict(), tuple(carried), group.number + 1)
        return [rows[int(index)] for index in order], following

    def _batch(self, rows: list[list[TokenizedPiece]]) -> TokenBatch:
        ids = np.full((len(rows), self.max_length), self.padding, dtype=np.int64)
        targets = np.full((len(rows), self.max_length), IGNORE, dtype=np.int64)
        counts: list[int] = []
        for row, pieces in enumerate(rows):
            stop = 0
            for piece in pieces:
                start, stop = stop, stop + len(piece)
                ids[row, start:stop], targets[row, start:stop] = piece.ids, piece.targets
                counts.append(len(piece))
            if stop < self.max_length:
                counts.append(self.max_length - stop)
        whole = len(counts) == len(rows)
        return TokenBatch(torch.from_numpy(ids), torch.from_numpy(targets), None if whole else tuple(counts))

    def state_dict(self) -> dict[str, Any]:
        """The start of the group of rows, and the number of rows since."""
        return {**self._start.state_dict(), "given": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor."""
        self._start = _Group.from_state(state)
        self._given = int(state["given"])


class _Group:
    """The state at the start of a group of rows."""

    def __init__(self, cursor: dict[str, Any], carried: Sequence[TokenizedPiece] = (), number: int = 0) -> None:
        self.cursor, self.carried, self.number = cursor, carried, number

    def state_dict(self) -> dict[str, Any]:
        carried = [[piece.ids.tolist(), piece.targets.tolist()] for piece in self.carried]
        return {"source": self.cursor, "carried": carried, "group": self.number}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> _Group:
        carried = tuple(TokenizedPiece(np.array(ids), np.array(targets)) for ids, targets in state["carried"])
        return cls(dict(state["source"]), carried, int(state["group"]))


def best_fit(pieces: Sequence[TokenizedPiece], length: int) -> list[list[TokenizedPiece]]:
    """Put pieces into rows: the longest first, each into the fullest row that has room for it.

    Source: Ding et al. 2024, arXiv:2404.10830 (best-fit packing), after the classical best-fit decreasing.

    >>> sizes = [5, 3, 2, 6, 4]
    >>> pieces = [TokenizedPiece(np.zeros(n, int), np.zeros(n, int)) for n in sizes]
    >>> [[len(piece) for piece in row] for row in best_fit(pieces, 10)]
    [[6, 4], [5, 3, 2]]
    """
    rows: list[list[TokenizedPiece]] = []
    with_room: list[list[int]] = [[] for _ in range(length + 1)]  # rows by their free length
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


@checked
def token_batches(
    data: str | Path | Iterable[str | Path] | Sequence[TrainingRecord],
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    max_length: PositiveInt,
    batch_size: PositiveInt,
    seed: int = 0,
    epochs: int | None = None,
    loss_on: LossOn = "assistant",
    fields: Mapping[str, str] | None = None,
    buffer: int | None = None,
    show_progress: bool = True,
) -> Packed:
    """Batches of tokens from files or records: a resumable stream, and data for `pippin.train.Trainer`.

    Everything is tokenized once, before the first batch, into a temporary file. With a ``buffer``, data is tokenized as
    a stream, again in each epoch, for data that is too large for a file.

    Args:
        data: files and folders as `read_records` takes them, or records.
        tokenizer: the model's tokenizer.
        template: the model's chat template, for conversations and prompts.
        max_length: tokens of a row; longer documents are cut.
        batch_size: rows of a batch.
        seed: seed of all orders.
        epochs: number of passes over the data; None for no limit.
        loss_on: "assistant" takes the loss on texts, completions and the assistant's turns; "all" on everything.
        fields: see `read_records`.
        buffer: records that are shuffled among each other; None for all of them, tokenized in advance.
        show_progress: show a progress bar while tokenizing.

    Raises:
        InvalidRecord: a file or a record that cannot be read; with a buffer, only when it is reached.
        InvalidArgument: a path that does not exist, a file of an unknown kind.
        InvalidInput: no token of the data counts in the loss.
        MissingDependency: a table, without pyarrow installed.
    """
    if buffer is None:
        corpus = tokenized(
            data,
            tokenizer,
            template=template,
            max_length=max_length,
            loss_on=loss_on,
            fields=fields,
            show_progress=show_progress,
        )
        return packed(corpus, tokenizer, max_length=max_length, batch_size=batch_size, seed=seed, epochs=epochs)
    rules = Tokenization(tokenizer, template, loss_on)

    def pieces_of(record: TrainingRecord) -> Iterator[TokenizedPiece]:
        # the blocks of a text are shuffled, so each is a document of its own
        return cut([replace(rules(record), ends=True)], max_length)

    source = Buffered(_opener(data, fields), buffer, seed=seed, epochs=epochs)
    return Packed(Mapped(source, pieces_of), max_length, batch_size, seed=seed, padding=_padding(tokenizer))


@checked
def tokenized(
    data: str | Path | Iterable[str | Path] | Sequence[TrainingRecord],
    tokenizer: Tokenizer,
    *,
    template: ChatTemplate | None = None,
    max_length: PositiveInt,
    loss_on: LossOn = "assistant",
    fields: Mapping[str, str] | None = None,
    show_progress: bool = True,
) -> Corpus:
    """All of the data in pieces of at most ``max_length`` tokens; arguments and errors as in `token_batches`."""
    documents = tokenize(_opener(data, fields)(), tokenizer, template, loss_on=loss_on)
    return Corpus(cut(documents, max_length), tokenizer.vocab_size, show_progress=show_progress)


@checked
def packed(
    pieces: Sequence[TokenizedPiece],
    tokenizer: Tokenizer,
    *,
    max_length: PositiveInt,
    batch_size: PositiveInt,
    seed: int = 0,
    epochs: int | None = None,
) -> Packed:
    """Batches of packed tokens, with all pieces shuffled again each epoch; arguments as in `token_batches`."""
    order: Shuffled[TokenizedPiece, list[TokenizedPiece]] = Shuffled(pieces, 1, seed=seed, epochs=epochs)
    stream: Mapped[list[TokenizedPiece], TokenizedPiece] = Mapped(order, iter)
    return Packed(stream, max_length, batch_size, seed=seed, padding=_padding(tokenizer))


def _padding(tokenizer: Tokenizer) -> int:
    return tokenizer.eos_ids[0] if tokenizer.eos_ids else 0


def _opener(data: Any, fields: Mapping[str, str] | None) -> Callable[[], Iterable[TrainingRecord]]:
    """A function that reads the records, from the beginning at each call."""
    given: list[Any] = [data] if isinstance(data, str | Path) else list(data)
    if given and isinstance(given[0], TrainingRecord):
        return lambda: given
    data_files(given)
    return lambda: read_records(given, fields=fields)
