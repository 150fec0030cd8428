"""The neurons of a model in storage: what a pass needs is read, and stays as long as it may be needed again.

Notable here:
- a layer computes with its neurons in pieces of bounded size, in the order of their numbers: a prompt that needs nearly
  all of them fits in any room, and what was in memory before changes no bit of the outputs
- a token is new to its own sequence: with several sequences in a pass the window of each reaches as far back
- what experts are for mixtures, neurons are here: the same share of a budget, asked before each pass and layer

Source: Alizadeh et al. 2024, arXiv:2312.11514, section 3.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument, NotEnoughMemory, SlowStorage
from pippin.core.files import format_bytes
from pippin.engine.neurons.neuron_reader import THREADS, NeuronReader
from pippin.engine.neurons.neuron_window import Neurons, NeuronWindow
from pippin.language.stored_neurons import LEAST_NEURONS, PIECE, StoredNeurons

_JUDGED: Final = 32
"""Passes after which the share of a file that each reads is judged."""
_TOO_MUCH: Final = 0.5
"""Share of a file from which on reading it in pieces pays no more: it is read in about as many blocks as it has."""
_NO_NEURONS: Final = np.empty(0, dtype=np.int64)
Counts = Int64[np.ndarray, "layers"]


@dataclass(frozen=True)
class NeuronStats:
    """What neurons in storage cost so far; arrays have a number for each layer.

    Attributes:
        needed: neurons that passes needed; those of one pass count once.
        hits: of these, the ones that were in memory.
        active: neurons of all tokens, each token's by itself.
        tokens: tokens that were computed.
        reads: reads from the file.
        bytes_read: bytes read from the file, in whole blocks.
        stall_seconds: for which passes waited for reads, over all layers.
        resident_bytes: memory of the neurons that are there, and of those that were and may be overwritten.
        direct: whether all reads went around the page cache of the system.
    """

    needed: Counts
    hits: Counts
    active: Counts
    tokens: Counts
    reads: Counts
    bytes_read: Counts
    stall_seconds: float
    resident_bytes: int
    direct: bool

    @property
    def hit_rates(self) -> list[float]:
        """Share of the needed neurons of each layer that were in memory; 1 where none was needed."""
        return [hits / needed if needed else 1.0 for hits, needed in zip(self.hits, self.needed, strict=True)]

    @property
    def hit_rate(self) -> float:
        """The same over all layers."""
        return float(self.hits.sum() / self.needed.sum()) if self.needed.any() else 1.0


class NeuronStore:
    """Brings neurons from their file; used by one pass at a time, which holds `lock`.

    Args:
        stored: the file.
        capacity: most bytes of memory for neurons that are kept.
        window: tokens; a neuron is kept if it was active in one of the last so many. None keeps it until others need
            its room.
        threads: that read at the same time.
        gap: blocks between two neurons that are read with them, for fewer and larger reads.
        share: from the tokens of a pass, and the bytes that neurons take now, to those that they may take in it. None
            for all of the capacity.

    Raises:
        NotEnoughMemory: the capacity is less than the least that works, which the message names.
        InvalidArgument: a window or threads below 1.
        ModelNotFound: the file is gone.
    """

    @checked
    def __init__(
        self,
        stored: StoredNeurons,
        capacity: PositiveInt,
        *,
        window: PositiveInt | None = 5,
        threads: PositiveInt = THREADS,
        gap: NonNegativeInt = 0,
        share: Callable[[int, int], int] | None = None,
    ) -> None:
        self._least = least_room(stored)
        if capacity < self._least:
            raise NotEnoughMemory(
                f"{capacity:,} bytes are too few for neurons of {stored.path}; the least that works is {self._least:,}"
            )
        self.stored, self.window, self._share, self._given = stored, window, share, capacity
        self.windows = [
            NeuronWindow(layer.neurons, layer.numbers, stored.torch_dtype, rows)
            for layer, rows in zip(stored.layers, self._rows(capacity), strict=True)
        ]
        self.lock = threading.RLock()
        self.reader = NeuronReader(stored, threads=threads, gap=gap)
        layers = len(stored.layers)
        self._needed, self._hits, self._active, self._tokens = (np.zeros(layers, dtype=np.int64) for _ in range(4))
        self._uses = [np.zeros(layer.neurons, dtype=np.int64) for layer in stored.layers]
        self._clock = 0
        self._stamps: tuple[Int64[np.ndarray, tokens], ...] = ()
        self._judged = self._judged_bytes = self._before = 0
        self._judging = self._warned = False

    @property
    def stats(self) -> NeuronStats:
        """What was counted so far."""
        counts = (self._needed.copy(), self._hits.copy(), self._active.copy(), self._tokens.copy())
        read = (self.reader.reads.copy(), self.reader.bytes_read.copy(), self.reader.seconds)
        return NeuronStats(*counts, *read, self.nbytes, self.reader.direct)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that neurons take now."""
        return sum(window.nbytes for window in self.windows)

    def begin_pass(self, counts: Sequence[int], outputs: Sequence[Sequence[int]] | None = None) -> None:
        """Begin with the first layer again.

        Args:
            counts: new tokens of each sequence, packed end to end.
            outputs: of each sequence the new tokens that the last layers compute; None for all.
        """
        self._judge()
        if self._share is not None:
            self._resize(self._share(sum(counts), self.nbytes))
        longest = max(counts)
        # the last token of each sequence is that of now
        everywhere = [self._clock + longest - count + np.arange(count) for count in counts]
        chosen = everywhere if outputs is None else [a[list(b)] for a, b in zip(everywhere, outputs, strict=True)]
        self._stamps = (np.concatenate(everywhere), np.concatenate(chosen))
        self._clock += longest
        self._judging = longest == 1

    def stamps(self, tokens: int) -> Int64[np.ndarray, tokens]:
        """When each of some tokens of the pass is, in tokens of its sequence; see `begin_pass`."""
        found = next((stamps for stamps in self._stamps if len(stamps) == tokens), None)
        if found is None:
            raise InvalidArgument(f"{tokens} tokens are none of a pass that began; see `NeuronStore.begin_pass`")
        return found

    def pieces(
        self, layer: int, active: Shaped[np.ndarray, "tokens neurons"]
    ) -> Iterator[tuple[Neurons, Shaped[Tensor, "piece numbers"]]]:
        """The bundles of all neurons that are active for one of the tokens, a part of them at a time.

        Args:
            layer: its index in the file.
            active: for each token of the pass which neurons are active.

        Returns:
            The neurons of each part, ascending, and copies of their bundles.

        Raises:
            CorruptedFile: the file is damaged. InvalidArgument: the store is closed.
        """
        window, stamps = self.windows[layer], self.stamps(len(active))
        needed = np.flatnonzero(active.any(0))
        when = _last_stamps(active[:, needed], stamps)
        if self._share is not None and (room := self._share(0, self.nbytes)) < self._given:
            self._resize(room)
        if self.window is not None and len(stamps):
            window.forget(int(stamps.min()) - self.window)
        missing = window.missing(needed)
        self._count(layer, active, len(needed), len(missing))
        self._uses[layer][needed] += 1
        there = np.isin(needed, missing, assume_unique=True, invert=True)
        window.touch(needed[there], when[there])
        size = max(1, min(window.capacity, PIECE // window.row_bytes))
        for begin in range(0, len(needed), size):
            piece, last = needed[begin : begin + size], when[begin : begin + size]
            absent = np.isin(piece, window.missing(piece), assume_unique=True)
            if absent.any():
                window.make_room(int(absent.sum()), piece)
                self._bring(layer, piece[absent], last[absent])
            yield piece, window.gather(piece)

    def warm(self, hot: Sequence[np.ndarray]) -> None:
        """Bring neurons before they are needed, as far as there is room without a pass.

        Args:
            hot: of each layer, those that are worth most first.

        Raises:
            CorruptedFile: the file is damaged. InvalidArgument: the store is closed.
        """
        if self._share is not None:
            self._resize(self._share(1, self.nbytes))
        for layer, (window, neurons) in enumerate(zip(self.windows, hot, strict=True)):
            coming = np.sort(window.missing(neurons)[: window.capacity - window.used])
            if len(coming):
                self._bring(layer, coming, np.full(len(coming), self._clock))

    def most_used(self) -> list[np.ndarray]:
        """Of each layer the neurons that passes needed, those that most of them needed first."""
        return [np.argsort(-uses, kind="stable")[: np.count_nonzero(uses)] for uses in self._uses]

    def close(self) -> None:
        """Close the file, after a read that is under way; later passes are refused."""
        self.reader.close()

    def _bring(self, layer: int, neurons: Neurons, when: Int64[np.ndarray, neurons]) -> None:
        """Read neurons that are not there, ascending, to rows that are free."""
        window = self.windows[layer]
        words = torch.int16 if window.rows.itemsize == 2 else torch.int32
        rows = window.next_rows(len(neurons)).view(words).numpy()
        self.reader.read(layer, neurons, rows.view(f"u{rows.itemsize}"))
        window.append(neurons, when)

    def _resize(self, room: int) -> None:
        self._given = room
        for window, rows in zip(self.windows, self._rows(room), strict=True):
            window.resize(rows)

    def _rows(self, room: int) -> list[int]:
        """Neurons of each layer in some bytes, in proportion to its size, and the least in any case."""
        total, rows = self.stored.nbytes, []
        for index, layer in enumerate(self.stored.layers):
            size = self.stored.bundle_bytes(index)
            rows.append(max(min(LEAST_NEURONS, layer.neurons), int(room * layer.neurons / total)))
            rows[-1] = min(rows[-1], layer.neurons, max(LEAST_NEURONS, room // size))
        return rows

    def _count(self, layer: int, active: np.ndarray, needed: int, missing: int) -> None:
        self._needed[layer] += needed
        self._hits[layer] += needed - missing
        self._active[layer] += int(np.count_nonzero(active))
        self._tokens[layer] += len(active)

    def _judge(self) -> None:
        """Warn once if passes of one token read so much that they could as well read everything."""
        read = int(self.reader.bytes_read.sum())
        if not self._warned and not self.reader.direct and read:
            self._warned = True
            warnings.warn(
                f"the file system of {self.stored.path} has no direct reads: they go through the page cache of the "
                "system, which takes memory that no budget counts; move the file to another disk",
                SlowStorage,
                stacklevel=2,
            )
        if self._judging:
            self._judged, self._judged_bytes = self._judged + 1, self._judged_bytes + read - self._before
        self._before = read
        if self._judged != _JUDGED:
            return
        self._judged += 1
        share = self._judged_bytes / _JUDGED / self.stored.nbytes
        if share >= _TOO_MUCH:
            neurons = np.array([layer.neurons for layer in self.stored.layers])
            firing = float(self._active.sum() / (self._tokens * neurons).sum())
            warnings.warn(
                f"{firing:.0%} of the neurons are active for a token, and {share:.0%} of {self.stored.path} "
                f"({format_bytes(self.stored.nbytes)}) is read for each: no less time than reading all of it in one "
                "go. Answers are right; take more memory, or a model with sparser activations",
                SlowStorage,
                stacklevel=2,
            )


def least_room(stored: StoredNeurons) -> int:
    """The least bytes for neurons that are kept, with which any pass works."""
    return sum(
        min(LEAST_NEURONS, layer.neurons) * stored.bundle_bytes(index) for index, layer in enumerate(stored.layers)
    )


def _last_stamps(active: np.ndarray, stamps: Int64[np.ndarray, tokens]) -> Int64[np.ndarray, neurons]:
    """The last of the tokens in which each neuron is active; each is in one of them."""
    if not active.shape[1]:
        return _NO_NEURONS
    order = np.argsort(-stamps, kind="stable")
    last: Int64[np.ndarray, neurons] = stamps[order[active[order].argmax(0)]]
    return last
