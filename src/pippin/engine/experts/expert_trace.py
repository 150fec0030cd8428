"""Traces: which experts each layer needed in each pass of a mixture, and which ones were predicted.

Notable here:
- a pass is a step of decoding or a part of a prompt; what its tokens need is a set for each layer
- the sets lie end to end in one array; a file is a NumPy archive without pickled objects
- a prediction is a score for each expert of a layer, made some layers before it
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float16, Int32, Int64

from pippin.core.errors import CorruptedFile, InvalidArgument, InvalidInput
from pippin.core.files import atomic_write

VERSION: Final = 1
_NAMES: Final = ("version", "model", "sizes", "tokens", "experts", "offsets", "predicted")


@dataclass(frozen=True)
class ExpertTrace:
    """The experts that passes of a model needed.

    Attributes:
        model: hash of the model's weights, or a name for a synthetic trace.
        sizes: bytes of each expert, [layers, experts].
        tokens: tokens of each pass.
        experts: what was needed: the experts of the first layer in the first pass, then those of the second...
        offsets: where the set of each layer of each pass begins in ``experts``, and where the last one ends.
        predicted: scores of the experts of each layer of each pass, [passes, depth, layers, experts], the first ones
            predicted one layer before; NaN where there is no prediction. None where nothing was predicted.

    Raises:
        InvalidArgument: parts do not fit together, or an expert is none of the layer's.
    """

    model: str
    sizes: Int64[np.ndarray, "layers experts"]
    tokens: Int64[np.ndarray, passes]
    experts: Int32[np.ndarray, needed]
    offsets: Int64[np.ndarray, passes_times_layers_and_one]
    predicted: Float16[np.ndarray, "passes depth layers experts"] | None = None

    def __post_init__(self) -> None:
        if self.sizes.ndim != 2 or self.sizes.size == 0 or (self.sizes <= 0).any():
            raise InvalidArgument("sizes of experts must be positive and have the shape [layers, experts]")
        layers, experts = self.sizes.shape
        if len(self.offsets) != len(self.tokens) * layers + 1:
            raise InvalidArgument(
                f"{len(self.tokens)} passes through {layers} layers have {len(self.tokens) * layers + 1} offsets, "
                f"not {len(self.offsets)}"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.experts) or (np.diff(self.offsets) < 0).any():
            raise InvalidArgument(f"offsets must rise from 0 to {len(self.experts)}, the number of needed experts")
        if len(self.experts) and not 0 <= self.experts.min() <= self.experts.max() < experts:
            wrong = self.experts[(self.experts < 0) | (self.experts >= experts)][0]
            raise InvalidArgument(f"expert {wrong} is none of the {experts} of a layer")
        if self.predicted is not None and (
            self.predicted.ndim != 4
            or self.predicted.shape[0] != len(self.tokens)
            or self.predicted.shape[2:] != self.sizes.shape
        ):
            raise InvalidArgument(
                f"predictions for {len(self.tokens)} passes, {layers} layers and {experts} experts have the shape "
                f"[passes, depth, layers, experts], not {list(self.predicted.shape)}"
            )

    @classmethod
    def of(
        cls,
        needed: Sequence[Sequence[Sequence[int]]],
        sizes: Int64[np.ndarray, "layers experts"],
        *,
        model: str = "synthetic",
        tokens: Sequence[int] | None = None,
        predicted: Float16[np.ndarray, "passes depth layers experts"] | None = None,
    ) -> ExpertTrace:
        """A trace of the experts that each layer of each pass needed, in lists.

        >>> ExpertTrace.of([[[0, 2], [1]], [[2], [1, 0]]], np.full((2, 3), 1000)).needed(1, 1).tolist()
        [0, 1]
        """
        sets = [np.unique(np.array(layer, dtype=np.int32)) for each in needed for layer in each]
        return cls(
            model,
            np.asarray(sizes, dtype=np.int64),
            np.array([1] * len(needed) if tokens is None else tokens, dtype=np.int64),
            np.concatenate([np.zeros(0, dtype=np.int32), *sets]).astype(np.int32),
            np.concatenate([[0], np.cumsum([len(each) for each in sets])]).astype(np.int64),
            predicted,
        )

    @property
    def num_passes(self) -> int:
        """Number of passes."""
        return len(self.tokens)

    @property
    def num_layers(self) -> int:
        """Number of layers with experts."""
        return int(self.sizes.shape[0])

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return int(self.sizes.shape[1])

    def needed(self, number: int, layer: int) -> Int32[np.ndarray, experts]:
        """The experts that a layer needs in a pass, in their order."""
        place = number * self.num_layers + layer
        return self.experts[self.offsets[place] : self.offsets[place + 1]]

    def save(self, path: str | Path) -> None:
        """Write the trace to a file, atomically."""
        parts = {name: getattr(self, name) for name in ("model", "sizes", "tokens", "experts", "offsets")}
        if self.predicted is not None:
            parts["predicted"] = self.predicted
        with atomic_write(Path(path)) as file:
            np.savez_compressed(file, version=VERSION, **parts)

    @classmethod
    def load(cls, path: str | Path) -> ExpertTrace:
        """Read a trace.

        Raises:
            InvalidInput: there is no such file.
            CorruptedFile: the file is no trace, or one of a later version.
        """
        path = Path(path)
        if not path.is_file():
            raise InvalidInput(f"no file {str(path)!r}; give the path of a trace, as `ExpertTrace.save` writes it")
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as parts:
                found = {name: parts[name] for name in parts.files if name in _NAMES}
            if int(found.pop("version")) != VERSION:
                raise CorruptedFile(f"{path} is a trace of a later version of pippin; update it")
            return cls(str(found.pop("model")), **found)
        except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise CorruptedFile(f"{path} is no trace of experts: {error}") from error
