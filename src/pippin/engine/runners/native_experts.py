"""Experts that come when a pass of the native kernels needs them: calls from the library back to Python.

Notable here:
- each mixture of a pass asks twice or more: for the first wave of the experts that its tokens need, then for the next
  one until all came. What a wave is made of changes no result
- an error of the source ends the pass and is raised where the pass began
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from pippin.core import native
from pippin.engine.runners.native_decoder import NativeDecoder
from pippin.language.decoder_config import DecoderConfig


@runtime_checkable
class ExpertSource(Protocol):
    """Brings the experts that a pass needs, or looks on."""

    @property
    def depth(self) -> int:
        """For how many of the next mixtures it wants predictions; 0 for none."""
        ...

    def begin_pass(self, tokens: int) -> None:
        """A pass over so many tokens begins with the first mixture."""
        ...

    def waves(
        self, layer: int, needed: list[int], predicted: Float32[np.ndarray, "depth experts"] | None
    ) -> Iterator[Sequence[int]]:
        """The needed experts in the waves in which they are computed; each is in memory until the next is asked for.

        Args:
            layer: number of the mixture among those of the model, from 0.
            needed: its experts that tokens of the pass chose, ascending.
            predicted: for each of the next mixtures how likely each expert is to be needed: of the token that is most
                likely to; negative for mixtures that do not follow. None with a depth of 0.
        """
        ...


def mixtures(config: DecoderConfig) -> list[int]:
    """The layers that have experts."""
    return [index for index, layer in enumerate(config.layers) if (layer.experts or layer.feedforward).num_experts]


class ExpertFetch:
    """Connects a decoder of the library with a source, as long as it is referenced.

    Args:
        decoder: the decoder.
        config: its config.
        source: brings the experts.
    """

    def __init__(self, decoder: NativeDecoder, config: DecoderConfig, source: ExpertSource) -> None:
        self.source = source
        self._numbers = {layer: number for number, layer in enumerate(mixtures(config))}
        self._experts = [(layer.experts or layer.feedforward).num_experts for layer in config.layers]
        self._waves: Iterator[Sequence[int]] = iter(())
        self._room = 0  # numbers that the library has room for
        self._error: BaseException | None = None
        self._callback = native.FETCH(self._fetch)
        decoder.native.model_fetch(decoder.handle, self._callback, source.depth)

    def begin_pass(self, tokens: int) -> None:
        """See `ExpertSource`."""
        self._error = None
        self.source.begin_pass(tokens)

    def raise_error(self) -> None:
        """Raise what ended the pass, if the source did."""
        if self._error is not None:
            raise self._error

    def _fetch(self, context: Any, layer: int, needed: Any, count: int, predicted: Any, wave: Any) -> int:
        try:
            if count:
                self._room = count
                scores = None
                if predicted:
                    shape = (self.source.depth, self._experts[layer])
                    scores = np.ctypeslib.as_array(predicted, shape).copy()
                self._waves = self.source.waves(self._numbers[layer], needed[:count], scores)
            following = next(self._waves, ())
            if len(following) > self._room:
                return -1
            if following:
                ctypes.memmove(wave, (ctypes.c_int32 * len(following))(*following), 4 * len(following))
            return len(following)
        except BaseException as error:  # Ctrl-C as well: nothing can be raised through the library
            self._error = error
            return -1
