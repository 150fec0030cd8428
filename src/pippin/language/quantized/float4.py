"""Four-bit floats: MXFP4 (a power of two for each 32) and NVFP4 (an 8-bit float for each 16, one factor for all).

Notable here:
- the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives are whole halves up to 12, so MXFP4 becomes ggml's Q5_0,
  whose codes reach from -16 to 15, without loss; a power of two beyond half precision takes float32 scales
- groups of 16 have no kernels, so NVFP4 is widened

Source: OCP Microscaling Formats v1.0; `transformers.integrations.mxfp4`, `compressed_tensors.compressors.nvfp4`,
`modelopt.torch.quantization.qtensor.nvfp4_tensor`.
"""

from __future__ import annotations

from math import prod
from typing import Final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from pippin.core.errors import CorruptedFile
from pippin.core.formats.checkpoint import Checkpoint
from pippin.language.quantized.matrix import (
    BYTES,
    FLOATS,
    WORDS,
    Blocks,
    Packable,
    QuantizedMatrix,
    Rows,
    read_scales,
    require_parts,
    require_shape,
    some,
)
from pippin.nn.quantization.affine import AffineCodes

GROUP: Final = 32
"""Inputs that share a scale in MXFP4."""
SMALL_GROUP: Final = 16
"""Inputs that share a scale in NVFP4."""
_BIAS: Final = 127  # of the exponents of MXFP4
_HALVES: Final = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def mxfp4(checkpoint: Checkpoint, name: str, words: str, exponents: str) -> QuantizedMatrix:
    """A matrix, or those of all experts, in MXFP4.

    Args:
        checkpoint: where it is.
        name: of the tensor that it stands for.
        words: name of the codes, two in a byte: (..., rows, groups, 16), or (..., rows, bytes) of 8 or 32 bits.
        exponents: name of the exponents, (..., rows, groups), one byte each.

    Raises:
        CorruptedFile: parts are missing or contradict each other.
    """
    require_parts(checkpoint, {words: (*BYTES, *WORDS), exponents: (*BYTES, "F8_E8M0")})
    shape, word_shape = checkpoint.shape(exponents), checkpoint.shape(words)
    stored = checkpoint.tensor(exponents).view(torch.uint8)
    nbytes = checkpoint.tensor(words).nbytes
    if len(shape) < 2 or word_shape[: len(shape) - 1] != shape[:-1] or nbytes != stored.numel() * GROUP // 2:
        raise CorruptedFile(f"{checkpoint.folder}: {words} has shape {word_shape}, its {exponents} {shape}")
    if not stored.numel() or int(stored.max()) == 255:
        raise CorruptedFile(f"{checkpoint.folder}: {exponents} has a scale that is not a number; download it again")
    # half of the power of two is the step of the codes
    kind = "Q5_0" if int(stored.min()) >= _BIAS + 1 - 24 and int(stored.max()) <= _BIAS + 1 + 15 else "AFFINE5/32"
    rows = prod(shape[:-1])

    def load(chosen: Rows | None) -> Packable | Tensor:
        packed = some(checkpoint.tensor(words).view(torch.uint8).reshape(rows, -1), chosen)
        powers = some(checkpoint.tensor(exponents).view(torch.uint8).reshape(rows, -1), chosen).int() - _BIAS - 1
        # the smallest are below float32's normal numbers, and exact
        steps = torch.ldexp(torch.ones(powers.shape, dtype=torch.float64), powers).float()
        codes = (halves(packed) + 16).view(torch.uint8)
        if kind == "Q5_0":
            return Blocks(_q5_0(codes, steps), kind)
        return AffineCodes(codes, steps, -16.0 * steps, 5)

    return QuantizedMatrix(checkpoint, name, (words, exponents), (*shape[:-1], shape[-1] * GROUP), kind, load)


def nvfp4(checkpoint: Checkpoint, name: str, words: str, scales: str, factor: str, *, divided: bool) -> QuantizedMatrix:
    """A matrix in NVFP4.

    Args:
        checkpoint: where it is.
        name: of the tensor that it stands for.
        words: name of the codes, two in a byte: (rows, bytes).
        scales: name of the scales, (rows, groups), 8-bit floats.
        factor: name of the factor of all scales.
        divided: whether scales are divided by the factor; otherwise they are multiplied by it.

    Raises:
        CorruptedFile: parts are missing or contradict each other, a scale is not a number, or the factor is zero.
    """
    parts = (words, scales, factor)
    require_parts(checkpoint, {words: BYTES, scales: FLOATS, factor: FLOATS})
    shape = checkpoint.shape(words)
    if len(shape) != 2 or prod(checkpoint.shape(factor)) != 1:
        raise CorruptedFile(f"{checkpoint.folder}: {words} has shape {shape}, its {factor} {checkpoint.shape(factor)}")
    columns = 2 * shape[1]
    require_shape(checkpoint, scales, (shape[0], columns // SMALL_GROUP))
    read_scales(checkpoint, scales, zeros=True)
    read_scales(checkpoint, factor)

    def load(chosen: Rows | None) -> Tensor:
        codes = halves(some(checkpoint.tensor(words).view(torch.uint8), chosen)).float().mul_(0.5)
        own, whole = some(checkpoint.tensor(scales).float(), chosen), checkpoint.tensor(factor).float().reshape(())
        steps = own / whole if divided else own * whole
        return codes.view(*steps.shape, SMALL_GROUP).mul_(steps[..., None]).view(len(codes), columns)

    reason = "the kernels have no groups of 16"
    return QuantizedMatrix(checkpoint, name, parts, (shape[0], columns), "", load, reason)


def halves(packed: UInt8[Tensor, "rows bytes"]) -> Tensor:
    """The codes of bytes, the low four bits first, as twice their values: int8 (rows, 2 * bytes)."""
    both = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return _HALVES[both.int()]


def _q5_0(codes: UInt8[Tensor, "rows columns"], steps: Float[Tensor, "rows groups"]) -> UInt8[Tensor, "rows bytes"]:
    """Codes of 5 bits and steps as ggml's blocks: step, fifth bits, low bits of inputs i and 16 + i in a byte."""
    grouped = codes.view(*steps.shape, GROUP)
    low = grouped & 15
    fifth = ((grouped >> 4).view(*steps.shape, 4, 8) << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)
    nibbles = low[..., :16] | low[..., 16:] << 4
    return torch.cat([steps.half()[..., None].view(torch.uint8), fifth, nibbles], -1).flatten(1)
