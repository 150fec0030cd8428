"""Batches without end, in an order that a seed fixes and that can be taken up again at any place.

Notable here:
- a stream is an iterable with a cursor: `state_dict()` gives it as JSON values, `load_state_dict()` moves there, and
  what follows is what would have followed, to the bit
- the order of an epoch is a permutation from seed and epoch, so a cursor is two numbers and no state of a generator
- pieces of documents are packed into rows by best fit, so that few tokens are padding; none looks at another's
- processes that train together all go through the same stream, and `pippin.train.Trainer` gives each its batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from pippin.core.errors import InvalidArgument
from pippin.data.batches import IGNORE, TokenBatch
from pippin.data.chat import ChatTemplate
from pippin.data.records import Record, data_files, read_records
from pippin.data.tokenizer import Tokenizer
from pippin.data.tokens import Corpus, Learn, Piece, Tokenisation, cut, tokenise

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
S = TypeVar("S")

_GROUP = 64  # rows that are packed together: enough for the best fit to leave hardly any gaps


@runtime_checkable
class Stream(Protocol[T_co]):
    """An iterable with a cursor.

    Iterating begins at the cursor and moves it; at its end a finite stream goes back to its beginning.
    """

    def __iter__(self) -> Iterator[T_co]:
        """The items from the cursor on."""

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the item that was given last, as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor; an iteration that is under way is not affected."""


class Shuffled(Generic[T, S]):
    """Items of a collection in a new random order each epoch, in batches.

    Args:
        items: a collection with a length; items are looked up when they are due.
        batch: items of a batch; the last one of an epoch may be smaller.
        seed: of the order.
        epochs: how often to go through the items; None goes on for ever.
        collate: makes the batch of a list of items; None leaves the list.

    Raises:
        InvalidArgument: no items, or numbers out of range.

    >>> import itertools
    >>> stream = Shuffled(range(5), 2, seed=0, epochs=1)
    >>> first = next(iter(stream))
    >>> rest = Shuffled(range(5), 2, seed=0, epochs=1)
    >>> rest.load_state_dict(stream.state_dict())
    >>> sorted(itertools.chain(first, *rest))
    [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        items: Sequence[T],
        batch: int,
        *,
        seed: int = 0,
        epochs: int | None = None,
        collate: Callable[[list[T]], S] | None = None,
    ) -> None:
        if not len(items):
            raise InvalidArgument("there are no items to shuffle")
        if batch < 1 or (epochs is not None and epochs < 1):
            raise InvalidArgument(f"batch ({batch}) and epochs ({epochs}) must be at least 1")
        self.items, self.batch, self.seed, self.epochs = items, batch, seed, epochs
        self.collate = collate
        self._epoch, self._done = 0, 0

    def __iter__(self) -> Iterator[S]:
        """The batches from the cursor on."""
        epoch, done = self._epoch, self._done
        while self.epochs is None or epoch < self.epochs:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.items))
            while done < len(order):
                chosen = [self.items[int(index)] for index in order[done : done + self.batch]]
                done += len(chosen)
                self._epoch, self._done = epoch, done
                yield chosen if self.collate is None else self.collate(chosen)  # type: ignore[misc]
            epoch, done = epoch + 1, 0
        self._epoch, self._done = 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Epoch and items taken of it."""
        return {"epoch": self._epoch, "done": self._done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor."""
        self._epoch, self._done = int(state["epoch"]), int(state["done"])


class Buffered(Generic[T]):
    """Items of a source that is too large to keep, shuffled through a buffer.

    Each item given is drawn from the buffer, and the next of the source takes its place. Taking up the stream again
    reads the source once more up to the cursor, without doing anything else with the items.

    Args:
        source: opens the source at its beginning.
        size: items in the buffer; 1 leaves the order of the source.
        seed: of the order.
        epochs: how often to go through the source; None goes on for ever.

    Raises:
        InvalidArgument: numbers out of range; while iterating, a source without items.
    """

    def __init__(
        self, source: Callable[[], Iterable[T]], size: int = 1024, *, seed: int = 0, epochs: int | None = None
    ) -> None:
        if size < 1 or (epochs is not None and epochs < 1):
            raise InvalidArgument(f"size ({size}) and epochs ({epochs}) must be at least 1")
        self.source, self.size, self.seed, self.epochs = source, size, seed, epochs
        self._epoch, self._done = 0, 0

    def __iter__(self) -> Iterator[T]:
        """The items from the cursor on."""
        epoch, begin = self._epoch, self._done
        while self.epochs is None or epoch < self.epochs:
            done = 0
            for done, item in enumerate(self._drawn(epoch), 1):
                if done > begin:
                    self._epoch, self._done = epoch, done
                    yield item
            if done == 0:
                raise InvalidArgument("the source has no items")
            epoch, begin = epoch + 1, 0
        self._epoch, self._done = 0, 0

    def _drawn(self, epoch: int) -> Iterator[T]:
        generator = np.random.default_rng((self.seed, epoch))
        buffer: list[T] = []
        for item in self.source():
            if len(buffer) < self.size:
                buffer.append(item)
                continue
            place = int(generator.integers(self.size))
            drawn, buffer[place] = buffer[place], item
            yield drawn
        yield from (buffer[int(index)] for index in generator.permutation(len(buffer)))

    def state_dict(self) -> dict[str, Any]:
        """Epoch and items given of it."""
        return {"epoch": self._epoch, "done": self._done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor."""
        self._epoch, self._done = int(state["epoch"]), int(state["done"])


class Mapped(Generic[T, S]):
    """A stream of what a function makes of each item of another: any number of results, none, or one.

    Args:
        stream: the other.
        function: gives the results for one item; the same ones each time.
    """

    def __init__(self, stream: Stream[T], function: Callable[[T], Iterable[S]]) -> None:
        self.stream, self.function = stream, function
        self._before = stream.state_dict()
        self._given = 0

    def __iter__(self) -> Iterator[S]:
        """The results from the cursor on."""
        given = self._given
        self.stream.load_state_dict(self._before)
        items = iter(self.stream)
        while True:
            before = self.stream.state_dict()
            item = next(items, None)
            if item is None:
                break
            for number, result in enumerate(self.function(item), 1):
                if number > given:
                    self._before, self._given = before, number
                    yield result
            given = 0
        self._before, self._given = self.stream.state_dict(), 0

    def state_dict(self) -> dict[str, Any]:
        """The cursor before the item, and how many of its results were given."""
        return {"before": self._before, "given": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor."""
        self._before, self._given = dict(state["before"]), int(state["given"])


class Mixture(Generic[T]):
    """Several streams as one: each item is drawn from one of them, by weight.

    A stream that ends leaves the mixture to the others; the mixture ends with the last of them.

    Args:
        streams: for each name a stream and its weight, the share of items that come from it (weights need not add up
            to 1). Weights of streams of batches are shares of batches, those of documents shares of documents.
        seed: of the choices.

    Raises:
        InvalidArgument: no streams, or a weight that is not above 0.

    >>> import itertools
    >>> streams = {"a": (Shuffled(["a"], 1), 3.0), "b": (Shuffled(["b"], 1), 1.0)}
    >>> drawn = [item for [item] in itertools.islice(Mixture(streams, seed=0), 400)]
    >>> 280 < drawn.count("a") < 320
    True
    """

    def __init__(self, streams: Mapping[str, tuple[Stream[T], float]], *, seed: int = 0) -> None:
        for name, (_, weight) in streams.items():
            if not 0 < weight < float("inf"):
                raise InvalidArgument(f"the weight of {name!r} is {weight}; it must be above 0")
        if not streams:
            raise InvalidArgument("a mixture needs at least one stream")
        self.streams = {name: stream for name, (stream, _) in streams.items()}
        self.weights = {name: float(weight) for name, (_, weight) in streams.items()}
        self.seed = seed
        self._drawn, self._ended = 0, list[str]()

    def __iter__(self) -> Iterator[T]:
        """The items from the cursor on."""
        drawn, ended = self._drawn, list(self._ended)
        items = {name: iter(stream) for name, stream in self.streams.items() if name not in ended}
        while items:
            weights = np.array([self.weights[name] for name in items])
            point = np.random.default_rng((self.seed, drawn)).random() * weights.sum()
            name = list(items)[min(int(np.searchsorted(weights.cumsum(), point, side="right")), len(items) - 1)]
            drawn += 1
            try:
                item = next(items[name])
            except StopIteration:
                del items[name]
                ended.append(name)
                continue
            self._drawn, self._ended = drawn, list(ended)
            yield item
        self._drawn, self._ended = 0, []

    def state_dict(self) -> dict[str, Any]:
        """Choices made, streams that ended, and the cursor of each."""
        cursors = {name: stream.state_dict() for name, stream in self.streams.items()}
        return {"drawn": self._drawn, "ended": list(self._ended), "streams": cursors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor.

        Raises:
            InvalidArgument: the cursor of a mixture of other streams.
        """
        if state["streams"].keys() != self.streams.keys():
            raise InvalidArgument(f"the cursor is one of {sorted(state['streams'])}, not of {sorted(self.streams)}")
        self._drawn, self._ended = int(state["drawn"]), list(state["ended"])
        for name, stream in self.streams.items():
            stream.load_state_dict(state["streams"][name])


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
