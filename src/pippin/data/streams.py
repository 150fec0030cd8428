"""Data streams: seeded, resumable orders of items.

Notable here:
- a stream is an iterable with a cursor: `state_dict()` returns it as JSON values, `load_state_dict()` sets it, and the
  stream continues bit-identically
- the order of an epoch is a permutation of seed and epoch, so a cursor is two numbers and no state of a generator
- items may be anything: images, moves, records, whole batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
S = TypeVar("S")


@runtime_checkable
class DataStream(Protocol[T_co]):
    """An iterable with a cursor.

    Iterating begins at the cursor and moves it; at its end a finite stream returns to its beginning.
    """

    def __iter__(self) -> Iterator[T_co]:
        """The items from the cursor on."""

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last item, as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the cursor; a running iteration is not affected."""


class Shuffled(Generic[T, S]):
    """Items of a collection in a new random order each epoch, in batches.

    Args:
        items: a collection with a length; items are looked up on demand.
        batch_size: items in a batch; the last one of an epoch may be smaller.
        seed: seed of the order.
        epochs: number of passes over the items; None for no limit.
        collate: makes the batch from a list of items; None leaves the list.

    Raises:
        InvalidArgument: no items.

    >>> import itertools
    >>> stream = Shuffled(range(5), 2, seed=0, epochs=1)
    >>> first = next(iter(stream))
    >>> rest = Shuffled(range(5), 2, seed=0, epochs=1)
    >>> rest.load_state_dict(stream.state_dict())
    >>> sorted(itertools.chain(first, *rest))
    [0, 1, 2, 3, 4]
    """

    @checked
    def __init__(
        self,
        items: Sequence[T],
        batch_size: PositiveInt,
        *,
        seed: int = 0,
        epochs: PositiveInt | None = None,
        collate: Callable[[list[T]], S] | None = None,
    ) -> None:
        if not len(items):
            raise InvalidArgument("there are no items to shuffle")
        self.items, self.batch_size, self.seed, self.epochs = items, batch_size, seed, epochs
        self.collate = collate
        self._epoch, self._done = 0, 0

    def __iter__(self) -> Iterator[S]:
        """The batches from the cursor on."""
        epoch, done = self._epoch, self._done
        while self.epochs is None or epoch < self.epochs:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.items))
            while done < len(order):
                chosen = [self.items[int(index)] for index in order[done : done + self.batch_size]]
                done += len(chosen)
                self._epoch, self._done = epoch, done
                yield chosen if self.collate is None else self.collate(chosen)  # type: ignore[misc]
            epoch, done = epoch + 1, 0
        self._epoch, self._done = 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Epoch, and number of items taken from it."""
        return {"epoch": self._epoch, "done": self._done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor."""
        self._epoch, self._done = int(state["epoch"]), int(state["done"])


class Buffered(Generic[T]):
    """Items of a source that does not fit into memory, shuffled with a buffer.

    Each item is sampled from the buffer, and the next item of the source takes its place. Resuming reads the source
    again up to the cursor, without processing the items.

    Args:
        source: opens the source at its beginning.
        size: items in the buffer; 1 keeps the order of the source.
        seed: seed of the order.
        epochs: number of passes over the source; None for no limit.

    Raises:
        InvalidArgument: while iterating, a source without items.
    """

    @checked
    def __init__(
        self,
        source: Callable[[], Iterable[T]],
        size: PositiveInt = 1024,
        *,
        seed: int = 0,
        epochs: PositiveInt | None = None,
    ) -> None:
        self.source, self.size, self.seed, self.epochs = source, size, seed, epochs
        self._epoch, self._done = 0, 0

    def __iter__(self) -> Iterator[T]:
        """The items from the cursor on."""
        epoch, begin = self._epoch, self._done
        while self.epochs is None or epoch < self.epochs:
            done = 0
            for done, item in enumerate(self._shuffled(epoch), 1):
                if done > begin:
                    self._epoch, self._done = epoch, done
                    yield item
            if done == 0:
                raise InvalidArgument("the source has no items")
            epoch, begin = epoch + 1, 0
        self._epoch, self._done = 0, 0

    def _shuffled(self, epoch: int) -> Iterator[T]:
        generator = np.random.default_rng((self.seed, epoch))
        buffer: list[T] = []
        for item in self.source():
            if len(buffer) < self.size:
                buffer.append(item)
                continue
            index = int(generator.integers(self.size))
            chosen, buffer[index] = buffer[index], item
            yield chosen
        yield from (buffer[int(index)] for index in generator.permutation(len(buffer)))

    def state_dict(self) -> dict[str, Any]:
        """Epoch, and number of items taken from it."""
        return {"epoch": self._epoch, "done": self._done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor."""
        self._epoch, self._done = int(state["epoch"]), int(state["done"])


class Numbered(Generic[T]):
    """Infinite batches of items that are created from their index.

    Args:
        make: creates items number ``first`` to ``first + n``, called as ``make(n, first)``.
        batch_size: items in a batch.

    >>> import itertools
    >>> list(itertools.islice(Numbered(lambda n, first: list(range(first, first + n)), 2), 2))
    [[0, 1], [2, 3]]
    """

    @checked
    def __init__(self, make: Callable[[int, int], T], batch_size: PositiveInt) -> None:
        self.make, self.batch_size, self._given = make, batch_size, 0

    def __iter__(self) -> Iterator[T]:
        """The batches from the cursor on."""
        given = self._given
        while True:
            batch = self.make(self.batch_size, given * self.batch_size)
            given += 1
            self._given = given
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Number of batches so far."""
        return {"given": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor."""
        self._given = int(state["given"])


class Mapped(Generic[T, S]):
    """A stream of the results of a function for each item of another stream: zero, one or more results each.

    Args:
        stream: the other stream.
        function: returns the results for one item; must be deterministic.
    """

    def __init__(self, stream: DataStream[T], function: Callable[[T], Iterable[S]]) -> None:
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
        """The cursor before the item, and the number of its results so far."""
        return {"before": self._before, "given": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor."""
        self._before, self._given = dict(state["before"]), int(state["given"])


class Mixture(Generic[T]):
    """Several streams as one: each item is sampled from one of them, by weight.

    When a stream ends, the mixture continues with the others; it ends with the last of them.

    Args:
        streams: for each name a stream and its weight, the share of items that come from it (weights need not add up to
            1). Weights of streams of batches are shares of batches, those of documents shares of documents.
        seed: seed of the choices.

    Raises:
        InvalidArgument: no streams, or a weight that is not above 0.

    >>> import itertools
    >>> streams = {"a": (Shuffled(["a"], 1), 3.0), "b": (Shuffled(["b"], 1), 1.0)}
    >>> drawn = [item for [item] in itertools.islice(Mixture(streams, seed=0), 400)]
    >>> 280 < drawn.count("a") < 320
    True
    """

    def __init__(self, streams: Mapping[str, tuple[DataStream[T], float]], *, seed: int = 0) -> None:
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
        """Number of choices, the streams that have ended, and the cursor of each."""
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
