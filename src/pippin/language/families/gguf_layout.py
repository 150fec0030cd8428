"""What a family needs to say about its GGUF files, and the header that it reads.

Notable here:
- a header is metadata and shapes alone, so the one of a file that is about to be written can be read back first
- a family says only what is its own; what most share is read and written in `pippin.language.families.gguf`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.core.formats.gguf import GGUFFile, metadata_value
from pippin.nn.attention.rotary import Rotary

if TYPE_CHECKING:
    from pippin.language.decoder_config import DecoderConfig
    from pippin.language.families.family import TensorRule

T = TypeVar("T")


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says before its weights are read.

    Args:
        where: the file, for messages.
        metadata: all pairs.
        shapes: of all tensors, in torch's order.
        read: the values of a small tensor.
    """

    where: str
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]

    @classmethod
    def of(cls, file: GGUFFile) -> GGUFHeader:
        """The header of an open file."""
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        return cls(str(file.path), file.metadata, shapes, file.dequantize)

    @property
    def architecture(self) -> str:
        """The name that llama.cpp has for the family."""
        return metadata_value(self.metadata, "general.architecture", str, None, self.where)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A value of the architecture's own, by its key without the architecture.

        Raises:
            CorruptedFile: it is missing and there is no default, or has another type.
        """
        return metadata_value(self.metadata, f"{self.architecture}.{key}", kind, default, self.where)

    def count(self, key: str, default: int | None = None, *, varied: bool = False) -> int:
        """A number that may be given once, or once for each layer; layers without what it counts have 0.

        Args:
            key: as of `get`.
            default: as of `get`.
            varied: whether layers may differ, and the largest is meant.

        Raises:
            UnsupportedModel: layers that differ.
            CorruptedFile: as of `get`.
        """
        value = self.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, list):
            return self.get(key, int, default)
        if not value or any(type(one) is not int for one in value):
            raise CorruptedFile(f"{self.where}: metadata {key!r} is {value!r:.80}, expected integers")
        found = set(value) - {0} or {0}
        if len(found) > 1 and not varied:
            raise UnsupportedModel(f"{self.where}: layers with different {key} ({value!r:.80}) are not supported")
        return int(max(found))

    def __contains__(self, name: str) -> bool:
        """Whether the architecture's metadata have a key, or the file has a tensor."""
        return f"{self.architecture}.{name}" in self.metadata or name in self.shapes


@dataclass(frozen=True)
class GGUFLayout:
    """How llama.cpp stores a family.

    Args:
        architecture: its name in GGUF.
        read: the fields of a `config.json` beyond those that the usual metadata give, which it is given, too.
        write: metadata beside the usual ones, by their keys without the architecture; None leaves a usual one out.
        rules: rules that go before the usual ones.
        tables: tensors beside the decoder's own.
        interleaved: whether the rotated pairs of stored queries and keys are neighbors.
        applies: whether a header of this architecture is one of this family, for those that share an architecture.
        window: the window where the file does not say; 0 for none.
        pattern: of how many layers one attends to everything, where the file does not say; 0 if all have the window.
        windows: whether llama.cpp has the windows; where it has not, they are stored for Pippin, and it is said.
        any_head_dim: whether the heads together may be wider or narrower than the hidden states.
        biases: of which layers, beside queries, keys and values, llama.cpp has biases.
        own_output: whether the output matrix must be there even where it is the embedding.
        read_as: the decoder that a written one is read as, where that is another.
        own_rotary: whether ``read`` says all of the rotary encoding, and its number of dimensions and table are not the
            usual ones.
        varied: keys of numbers that may differ between layers, which ``read`` reads.
        merges: whether a SentencePiece vocabulary has its merges.
        numbers: learned numbers that a file has as metadata, one for each layer: by their whole key, Pippin's name of
            them in a layer.
        with_experts: its name in GGUF for models with experts, where that is another.
    """

    architecture: str
    read: Callable[[GGUFHeader, Mapping[str, Any]], Mapping[str, Any]] = lambda header, fields: {}
    write: Callable[[DecoderConfig], Mapping[str, Any]] = lambda config: {}
    rules: Callable[[DecoderConfig], Sequence[TensorRule]] = lambda config: ()
    tables: Callable[[DecoderConfig], Mapping[str, Tensor]] = lambda config: {}
    interleaved: bool = False
    applies: Callable[[GGUFHeader], bool] = lambda header: True
    window: int = 0
    pattern: int = 0
    windows: bool = False
    any_head_dim: bool = False
    biases: tuple[Literal["attention output", "feed-forward"], ...] = ()
    own_output: bool = False
    read_as: Callable[[DecoderConfig], DecoderConfig] = lambda config: config
    own_rotary: bool = False
    varied: tuple[str, ...] = ()
    merges: bool = False
    numbers: Mapping[str, str] = field(default_factory=dict)
    with_experts: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names in GGUF of the family's models."""
        return (self.architecture,) if self.with_experts is None else (self.architecture, self.with_experts)

    def name_of(self, config: DecoderConfig) -> str:
        """The name in GGUF of a decoder of the family."""
        return self.names[-1] if any(layer.feedforward.num_experts for layer in config.layers) else self.architecture


SIGMOID_ROUTER: Final = 2
"""GGUF's number of a router that scores experts by sigmoids."""
ALL_BIASES: Final = ("attention output", "feed-forward")
"""What `GGUFLayout.biases` may name."""
TABLE = "rope_freqs.weight"
"""Divisors of the frequencies of rotary encodings."""
SHORT_TABLE, LONG_TABLE = "rope_factors_short.weight", "rope_factors_long.weight"
"""The same for short and for long sequences."""


def main_rotary(config: DecoderConfig) -> Rotary | None:
    """The encoding of the layers that attend to everything, or of the others if those have none."""
    rotated = [spec.attention for spec in config.layers if spec.attention.rotary is not None]
    first = next((attention for attention in rotated if attention.window is None), rotated[0] if rotated else None)
    return None if first is None else first.rotary


def rotary_table(config: DecoderConfig) -> dict[str, Tensor]:
    """The tensor of frequencies that are stretched one by one, for the architectures of llama.cpp that read it."""
    rotary = main_rotary(config)
    if rotary is None or (rotary.divisors is None and rotary.scaling != "llama3"):
        return {}
    dims = rotary.dims or config.head_dim
    return {TABLE: Rotary(rotary.theta).frequencies(dims) / replace(rotary, dims=None).frequencies(dims)}


def long_tables(config: DecoderConfig) -> dict[str, Tensor]:
    """The tensors of a family with one table for short and one for long sequences."""
    rotary = main_rotary(config)
    if rotary is None or rotary.divisors is None:
        return {}
    tables = {SHORT_TABLE: rotary.divisors, LONG_TABLE: rotary.long_divisors or rotary.divisors}
    return {name: torch.tensor(table) for name, table in tables.items()}
