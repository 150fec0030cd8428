"""Orders of items that a seed fixes and that can be taken up again at any place.

Notable here:
- a stream is an iterable with a cursor: `state_dict()` gives it as JSON values, `load_state_dict()` moves there, and
  what follows is what would have followed, to the bit
- the order of an epoch is a permutation from seed and epoch, so a cursor is two numbers and no state of a generator
- items may be anything: pictures, moves, records, whole batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from pippin.core.errors import InvalidArgument

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
S = TypeVar("S")


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


class Numbered(Generic[T]):
    """Batches of items that a number is enough to make, without end.

    Args:
        draw: makes items number ``first`` to ``first + n``, called as ``draw(n, first)``.
        batch: items of a batch.

    Raises:
        InvalidArgument: a batch of fewer than one.

    >>> import itertools
    >>> list(itertools.islice(Numbered(lambda n, first: list(range(first, first + n)), 2), 2))
    [[0, 1], [2, 3]]
    """

    def __init__(self, draw: Callable[[int, int], T], batch: int) -> None:
        if batch < 1:
            raise InvalidArgument(f"batch is {batch}; give at least 1")
        self.draw, self.batch, self._given = draw, batch, 0

    def __iter__(self) -> Iterator[T]:
        """The batches from the cursor on."""
        given = self._given
        while True:
            drawn = self.draw(self.batch, given * self.batch)
            given += 1
            self._given = given
            yield drawn

    def state_dict(self) -> dict[str, Any]:
        """Batches given."""
        return {"given": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor."""
        self._given = int(state["given"])


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
