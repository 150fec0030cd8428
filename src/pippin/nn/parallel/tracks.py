r"""Parallel tracks: narrow decoders side by side that exchange their hidden states once in every few layers.

Notable here:
- a decoder with n tracks lists the layers of all of them: block by block, and in a block track by track. Whatever is
  kept by layer (caches, adapters, files, experts) needs to know nothing about tracks; only the hidden states do, here
- all tracks of a block begin with the same states; at its end they are joined, by their mean ("mean"), their sum
  ("sum"), or the input plus what each of them added to it ("delta")
- where each process computes tracks of its own, a join is one all-reduce, and the layers between two joins need none:
  $L / D$ for $L$ layers in blocks of $D$, where tensor parallelism needs $2 L$
- backwards, the gradients of a block's input are summed over the processes; those of the joined states are the same in
  all of them, and so are those of what all have: embeddings, last norm and output matrix

Source: Parallel Track Transformers, arXiv:2602.07306, section 3; Apple Intelligence Foundation Language Models 2025,
arXiv:2507.13575, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.parallel.collectives import Collectives

Layer = TypeVar("Layer")
TrackJoin = Literal["mean", "delta", "sum"]


@checked
@dataclass(frozen=True)
class Tracks:
    """How many tracks a decoder has, and where they are joined.

    Args:
        num_tracks: tracks side by side.
        block_depth: layers of each track between two joins.
        join: the mean of what the tracks computed ("mean"), the block's input plus all that they added to it ("delta"),
            or the sum ("sum"), which multiplies the input by the number of tracks.

    >>> Tracks(2, 3).place(10)
    Place(block=1, track=1, depth=1)
    """

    num_tracks: PositiveInt
    block_depth: PositiveInt
    join: TrackJoin = "mean"

    @property
    def block_size(self) -> int:
        """Layers of all tracks between two joins."""
        return self.num_tracks * self.block_depth

    def place(self, layer: int) -> Place:
        """Where a layer of the list is.

        Args:
            layer: its index.
        """
        block, rest = divmod(layer, self.block_size)
        return Place(block, *divmod(rest, self.block_depth))

    def check_layers(self, layers: range) -> None:
        """Check that layers are whole blocks, since nothing can stop or resume between two joins.

        Raises:
            InvalidArgument: they are not.
        """
        if layers.start % self.block_size or layers.stop % self.block_size:
            raise InvalidArgument(
                f"layers {layers.start} to {layers.stop} cannot be computed alone: this decoder has {self.num_tracks} "
                f"tracks, which are joined after every {self.block_size} layers"
            )


def side_by_side(layers: Sequence[Layer], tracks: Tracks) -> tuple[Layer, ...]:
    """The layers of all tracks, in the order of `DecoderConfig.layers`, from those of one.

    Args:
        layers: the layers of one track.
        tracks: the tracks.

    Raises:
        InvalidArgument: they are no whole blocks.

    >>> side_by_side("abcd", Tracks(2, 2))
    ('a', 'b', 'a', 'b', 'c', 'd', 'c', 'd')
    """
    depth = tracks.block_depth
    if len(layers) % depth:
        raise InvalidArgument(f"block_depth must divide the {len(layers)} layers of a track, got {depth}")
    blocks = [layers[at : at + depth] for at in range(0, len(layers), depth)]
    return tuple(layer for block in blocks for _ in range(tracks.num_tracks) for layer in block)


def of_first_track(layers: Sequence[Layer], tracks: Tracks) -> tuple[Layer, ...]:
    """The layers of the first track; the inverse of `side_by_side`.

    Args:
        layers: the layers of all tracks.
        tracks: the tracks.
    """
    return tuple(layer for index, layer in enumerate(layers) if tracks.place(index).track == 0)


class Place(NamedTuple):
    """Where a layer is: its block, its track, and how many layers of the track and block come before it."""

    block: int
    track: int
    depth: int


class TrackStream:
    """The hidden states of one pass through the tracks.

    Args:
        tracks: the tracks of the decoder: of all, or those that this process computes.
        collectives: connects the processes that have the others; None where there are no others.
    """

    def __init__(self, tracks: Tracks, collectives: Collectives | None = None) -> None:
        self.tracks, self._collectives = tracks, collectives
        self._entered: Tensor | None = None  # what enters the block
        self._shared: Tensor | None = None  # the same, with gradients of all processes
        self._total: Tensor | None = None  # what the tracks so far computed

    def enter(self, layer: int, x: Float[Tensor, "batch new width"]) -> Float[Tensor, "batch new width"]:
        """The input of a layer: at the beginning of a track that of its block, elsewhere ``x``."""
        place = self.tracks.place(layer)
        if place.depth:
            return x
        if place.track == 0:
            self._entered = x
            self._shared = x if self._collectives is None else self._collectives.copy(x)
            self._total = None
        assert self._shared is not None
        return self._shared

    def leave(
        self, layer: int, x: Float[Tensor, "batch kept width"], rows: Int[Tensor, kept] | None = None
    ) -> Float[Tensor, "batch kept width"]:
        """The output of a layer; at the end of the last track of a block, that of the block.

        Args:
            layer: its index.
            x: what it computed.
            rows: the tokens that it kept; None for all.
        """
        if rows is not None:
            self._narrow(rows)
        place = self.tracks.place(layer)
        if place.depth + 1 < self.tracks.block_depth:
            return x
        assert self._entered is not None
        assert self._shared is not None
        added = x - self._shared if self.tracks.join == "delta" else x
        self._total = added if self._total is None else self._total + added
        if place.track + 1 < self.tracks.num_tracks:
            return x
        total, processes = self._total, 1
        if self._collectives is not None:
            total, processes = self._collectives.sum(total), self._collectives.size
        if self.tracks.join == "delta":
            return self._entered + total
        return total / (self.tracks.num_tracks * processes) if self.tracks.join == "mean" else total

    def _narrow(self, rows: Int[Tensor, kept]) -> None:
        """Keep some of the tokens only, as the layer that was computed did."""

        def kept(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.index_select(1, rows)

        self._entered, self._shared, self._total = kept(self._entered), kept(self._shared), kept(self._total)
