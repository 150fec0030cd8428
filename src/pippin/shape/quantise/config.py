"""What is asked of a quantisation: the same settings for training and for rounding afterwards.

Notable here:
- the defaults are the published ones for two bits (balanced levels, searched scales, an embedding of 4 bits), with a
  scale for each group of 64 inputs, which is what the kernels of the engine read
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pippin.core.errors import InvalidArgument
from pippin.nn.fake_quant import Granularity
from pippin.nn.packed import BITS


@dataclass(frozen=True)
class QuantisationSettings:
    """How the matrices of a model are quantised.

    Args:
        bits: of the matrices inside the layers: 2, 3, 4 or 8.
        levels: "balanced" (half-integers, {-1.5, -0.5, 0.5, 1.5} at two bits) or "unbalanced" ({-2, -1, 0, 1}).
        granularity: one scale for each "group" of a row's inputs, for each row ("channel"), or for the "tensor".
        group: inputs that share a scale, where the granularity is "group".
        init: "newton" searches scales with a small squared error; "absmax" takes the largest weight.
        embedding_bits: of the embedding and the output matrix; None leaves them exact.
        cache_bits: 8 to train with keys and values rounded to 8 bits as well, see `pippin.shape.quantise.cache`; None
            leaves them exact. Methods without training have no use for it.
        skip: names of layers that are left exact.

    Raises:
        InvalidArgument: a value that is none of these.

    Source: arXiv:2507.13575, section on 2-bit quantisation-aware training.
    """

    bits: int = 2
    levels: Literal["balanced", "unbalanced"] = "balanced"
    granularity: Granularity = "group"
    group: int = 64
    init: Literal["newton", "absmax"] = "newton"
    embedding_bits: int | None = 4
    cache_bits: int | None = None
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        choices: dict[str, tuple[object, ...]] = {
            "bits": BITS,
            "levels": ("balanced", "unbalanced"),
            "granularity": ("group", "channel", "tensor"),
            "init": ("newton", "absmax"),
            "embedding_bits": (*BITS, None),
            "cache_bits": (8, None),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InvalidArgument(
                    f"{name} is {getattr(self, name)!r}; choose one of {', '.join(map(str, allowed))}"
                )
        if self.group < 1:
            raise InvalidArgument(f"group is {self.group}; at least one input has a scale")
