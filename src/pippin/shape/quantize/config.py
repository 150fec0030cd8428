"""The config of a quantization, for quantization-aware training and post-training quantization.

Notable here:
- the defaults are the published ones for two bits (balanced levels, searched scales, a 4-bit embedding), with a scale
  per group of 64 inputs, a group size that the engine's kernels support
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pippin.core.checks import PositiveInt, checked
from pippin.nn.quantization.fake_quantize import Granularity
from pippin.nn.quantization.packed import Bits


@checked
@dataclass(frozen=True)
class QuantizationConfig:
    """How the matrices of a model are quantized.

    Args:
        bits: bits per weight of the matrices inside the layers.
        levels: "balanced" (half-integers, {-1.5, -0.5, 0.5, 1.5} at two bits) or "unbalanced" ({-2, -1, 0, 1}).
        granularity: one scale for each "group" of a row's inputs, for each row ("channel"), or for the "tensor".
        group: inputs that share a scale, where the granularity is "group".
        init: "newton" searches scales with a small squared error; "absmax" takes the largest weight.
        embedding_bits: bits per weight of the embedding and the output matrix; None leaves them in full precision.
        cache_bits: 8 to train with keys and values rounded to 8 bits as well, see `pippin.shape.quantize.kv_cache_qat`;
            None leaves them exact. Only quantization-aware training uses it.
        skip: names of layers that are not quantized.

    Source: arXiv:2507.13575, section on 2-bit quantization-aware training.
    """

    bits: Bits = 2
    levels: Literal["balanced", "unbalanced"] = "balanced"
    granularity: Granularity = "group"
    group: PositiveInt = 64
    init: Literal["newton", "absmax"] = "newton"
    embedding_bits: Bits | None = 4
    cache_bits: Literal[8] | None = None
    skip: tuple[str, ...] = ()
