"""Dequantization of ggml's block formats.

Notable here:
- every format is a few lines of tensor arithmetic on a `blocks block_bytes` view of the file; no compiled code
- the arithmetic is float32 in ggml's order of operations, so the values are bit-identical to ggml's
- the work is split into pieces that fit the CPU cache, so the float32 intermediate is never allocated in full

Source: the layouts of ggml-common.h and the reference `gguf.quants` (both from ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float16, UInt8
from torch import Tensor

from pippin.core.errors import UnsupportedModel
from pippin.core.formats import ggml_codebooks

# Weights per piece: a float32 intermediate of 4 MiB, about the size of a core's L2 cache.
_PIECE = 1 << 20


@dataclass(frozen=True)
class BlockFormat:
    """How one ggml type stores weights: ``size`` weights in ``nbytes`` bytes."""

    name: str
    size: int
    nbytes: int


def _formats() -> dict[int, BlockFormat]:
    table = """0 F32 1 4; 1 F16 1 2; 2 Q4_0 32 18; 3 Q4_1 32 20; 6 Q5_0 32 22; 7 Q5_1 32 24; 8 Q8_0 32 34; 9 Q8_1 32 40;
    10 Q2_K 256 84; 11 Q3_K 256 110; 12 Q4_K 256 144; 13 Q5_K 256 176; 14 Q6_K 256 210; 15 Q8_K 256 292;
    16 IQ2_XXS 256 66; 17 IQ2_XS 256 74; 18 IQ3_XXS 256 98; 19 IQ1_S 256 50; 20 IQ4_NL 32 18; 21 IQ3_S 256 110;
    22 IQ2_S 256 82; 23 IQ4_XS 256 136; 24 I8 1 1; 25 I16 1 2; 26 I32 1 4; 27 I64 1 8; 28 F64 1 8; 29 IQ1_M 256 56;
    30 BF16 1 2; 34 TQ1_0 256 54; 35 TQ2_0 256 66; 39 MXFP4 32 17; 40 NVFP4 64 36; 41 Q1_0 128 18"""
    rows = (row.split() for row in table.split(";"))
    return {int(number): BlockFormat(name, int(size), int(nbytes)) for number, name, size, nbytes in rows}


FORMATS: dict[int, BlockFormat] = _formats()
"""All ggml types by their number in the file, including those that only `gguf.GGUFFile.raw` supports."""


def dequantize_blocks(
    blocks: UInt8[Tensor, "blocks nbytes"], name: str, dtype: torch.dtype
) -> Float[Tensor, "blocks size"]:
    """Dequantize blocks of weights: computed in float32 and rounded once to ``dtype``.

    Args:
        blocks: one block per row, as in the file; rows must start at even addresses.
        name: the ggml type, e.g. "Q4_K".
        dtype: any floating-point dtype.

    Returns:
        A new tensor; never a view of ``blocks``.

    Raises:
        UnsupportedModel: the type is not supported here.

    >>> one = torch.tensor([[0, 60] + [1] * 32], dtype=torch.uint8)  # scale 1.0 in half precision, then the weights
    >>> dequantize_blocks(one, "Q8_0", torch.float32).sum().item()
    32.0
    """
    if name not in _READERS:
        raise UnsupportedModel(
            f"weights of type {name} cannot be read; supported types: {', '.join(_READERS)}. "
            "Convert the file with llama.cpp's llama-quantize, or use another quantization of the model"
        )
    reader, size = _READERS[name], _SIZES[name]
    out = torch.empty(len(blocks), size, dtype=dtype)
    step = _PIECE // size
    for start in range(0, len(blocks), step):
        out[start : start + step] = reader(blocks[start : start + step])
    return out


def _half(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """The ``count`` float16 numbers at byte ``start`` of each block, as float32 of shape `blocks count`."""
    return blocks[:, start : start + 2 * count].view(torch.float16).float()


def _nibbles(packed: Tensor, group: int) -> Tensor:
    """The low 4 bits of ``group`` bytes, then their high 4 bits, group after group: `blocks 2*bytes` of uint8."""
    packed = packed.reshape(len(packed), -1, group)
    return torch.cat([packed & 15, packed >> 4], dim=2).flatten(1)


def _bits(packed: Tensor, group: int, width: int) -> Tensor:
    """Fields of ``width`` bits: the lowest fields of ``group`` bytes, then the next higher ones, group after group."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    fields = (packed.reshape(len(packed), -1, 1, group) >> shifts) & ((1 << width) - 1)
    return fields.flatten(1)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float16)


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.bfloat16)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:], 16).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    scale = _half(blocks, 0, 2)
    return _nibbles(blocks[:, 4:], 16).float().mul_(scale[:, :1]).add_(scale[:, 1:])


def _five_bits(low: Tensor, high: Tensor) -> Tensor:
    """Four bits of ``low`` and the fifth from the 32 bits of ``high``, one per weight, as float32."""
    return (_nibbles(low, 16) | (_bits(high, 1, 1) << 4)).float()


def _q5_0(blocks: Tensor) -> Tensor:
    return _five_bits(blocks[:, 6:], blocks[:, 2:6]).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    scale = _half(blocks, 0, 2)
    return _five_bits(blocks[:, 8:], blocks[:, 4:8]).mul_(scale[:, :1]).add_(scale[:, 1:])


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _affine(q: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """``scale * q - minimum`` where runs of equal length share a scale and a minimum: `blocks 256`."""
    runs = q.reshape(*scale.shape, -1).float()
    return runs.mul_(scale[..., None]).sub_(minimum[..., None]).flatten(1)


def _scaled(q: Tensor, scale: Tensor) -> Tensor:
    """``scale * q`` where runs of equal length share a scale: `blocks 256`."""
    runs = q.reshape(*scale.shape, -1).float()
    return runs.mul_(scale[..., None]).flatten(1)


def _q2_k(blocks: Tensor) -> Tensor:
    packed, scale = blocks[:, :16], _half(blocks, 80, 2)
    return _affine(_bits(blocks[:, 16:80], 32, 2), scale[:, :1] * (packed & 15), scale[:, 1:] * (packed >> 4))


def _q3_k(blocks: Tensor) -> Tensor:
    # 16 scales of 6 bits: the low four as nibbles of 8 bytes, the high two spread over the next 4 bytes.
    scales = (_nibbles(blocks[:, 96:104], 8) | (_bits(blocks[:, 104:108], 4, 2) << 4)).to(torch.int8) - 32
    # A cleared bit in the mask means "minus four".
    high = (_bits(blocks[:, :32], 32, 1) ^ 1) << 2
    q = _bits(blocks[:, 32:96], 32, 2).to(torch.int8) - high.to(torch.int8)
    return _scaled(q, _half(blocks, 108) * scales)


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 minimums of Q4_K and Q5_K: 6 bits each in bytes 4 to 15, times the block's two factors."""
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([a & 63, (c & 15) | ((a >> 2) & 48)], dim=1)
    minimums = torch.cat([b & 63, (c >> 4) | ((b >> 2) & 48)], dim=1)
    factors = _half(blocks, 0, 2)
    return factors[:, :1] * scales, factors[:, 1:] * minimums


def _q4_k(blocks: Tensor) -> Tensor:
    return _affine(_nibbles(blocks[:, 16:], 32), *_scales_and_minimums(blocks))


def _q5_k(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 48:], 32) | (_bits(blocks[:, 16:48], 32, 1) << 4)
    return _affine(q, *_scales_and_minimums(blocks))


def _q6_k(blocks: Tensor) -> Tensor:
    q = (_nibbles(blocks[:, :128], 64) | (_bits(blocks[:, 128:192], 32, 2) << 4)).to(torch.int8) - 32
    return _scaled(q, _half(blocks, 208) * blocks[:, 192:208].view(torch.int8))


# The sixteen quantization levels of the IQ4 formats, spaced more finely near zero.
_LEVELS = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)


def _levels(packed: Tensor) -> Tensor:
    indices = _nibbles(packed, 16)
    return _LEVELS.index_select(0, indices.flatten().int()).view(indices.shape)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _levels(blocks[:, 2:]).mul_(_half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Tensor:
    # 8 scales of 6 bits: four low bits from 4 bytes, two high bits from 2 bytes before them, in the same order.
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=2).flatten(1)
    scales = (low | (_bits(blocks[:, 2:4], 1, 2) << 4)).to(torch.int8) - 32
    return _scaled(_levels(blocks[:, 8:]), _half(blocks, 0) * scales)


def _ternary(blocks: Tensor, packed: Tensor, at: int) -> Tensor:
    """Codes 0, 1 and 2 (minus, zero, plus) times the factor at a byte."""
    return packed.float().sub_(1).mul_(_half(blocks, at))


def _threes(packed: Tensor, group: int, digits: int) -> Tensor:
    """Base-3 digits of ``group`` bytes, the first digits of all, then the next ones, group after group.

    A byte is the fraction of which the digits are the expansion, so each digit is the integer part of three times it.
    """
    powers = torch.tensor([1, 3, 9, 27, 81][:digits], dtype=torch.uint8)[:, None]
    fractions = packed.reshape(len(packed), -1, 1, group) * powers  # wraps around: the digits before are dropped
    return ((fractions.int() * 3) >> 8).to(torch.uint8).flatten(1)


def _tq1_codes(blocks: Tensor) -> Tensor:
    parts = [(blocks[:, :32], 32, 5), (blocks[:, 32:48], 16, 5), (blocks[:, 48:52], 4, 4)]
    return torch.cat([_threes(*part) for part in parts], 1)


def _tq2_codes(blocks: Tensor) -> Tensor:
    return _bits(blocks[:, :64], 32, 2)


def _tq1_0(blocks: Tensor) -> Tensor:
    return _ternary(blocks, _tq1_codes(blocks), 52)


def _tq2_0(blocks: Tensor) -> Tensor:
    return _ternary(blocks, _tq2_codes(blocks), 64)


# The values of four-bit floats (e2m1), doubled so that they are integers.
_FOUR_BIT_FLOATS = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def _four_bit_floats(packed: Tensor, group: int) -> Tensor:
    indices = _nibbles(packed, group)
    return _FOUR_BIT_FLOATS.index_select(0, indices.flatten().int()).view(indices.shape)


def _mxfp4(blocks: Tensor) -> Tensor:
    # the scale is a power of two with bias 127; half of it, as the values are doubled
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23)
    return _four_bit_floats(blocks[:, 1:], 16).float().mul_(bits.view(torch.float32))


def _nvfp4(blocks: Tensor) -> Tensor:
    # four scales of eight bits (e4m3 without sign) of 16 weights each; half of them, as the values are doubled
    stored = blocks[:, :4]
    exponent, mantissa = ((stored >> 3) & 15).int(), (stored & 7).float()
    scales = torch.where(exponent == 0, mantissa * 2.0**-10, torch.ldexp(1.0 + mantissa / 8.0, exponent - 8))
    scales = scales.masked_fill(stored == 0x7F, 0.0)
    return _scaled(_four_bit_floats(blocks[:, 4:], 8), scales)


def kernel_kind(name: str) -> str:
    """What a type is computed with: itself, or the type or Pippin's format that holds the same values in little more.

    >>> kernel_kind("IQ4_NL"), kernel_kind("TQ1_0"), kernel_kind("IQ1_S")
    ('Q8_0', 'INT2/128', 'IQ1_S')
    """
    return {"IQ4_NL": "Q8_0", "MXFP4": "Q8_0", "TQ1_0": "INT2/128", "TQ2_0": "INT2/128"}.get(name, name)


def to_q8_0(rows: UInt8[Tensor, "rows row_bytes"], name: str) -> UInt8[Tensor, "rows q8_bytes"]:
    """Rows of IQ4_NL or MXFP4 as Q8_0 with the same values; rows of other types as they are.

    Raises:
        UnsupportedModel: a scale that half precision does not hold.
    """
    if kernel_kind(name) != "Q8_0" or name == "Q8_0":
        return rows
    blocks = rows.reshape(-1, 18 if name == "IQ4_NL" else 17)
    if name == "IQ4_NL":
        scales, values = blocks[:, :2], _levels(blocks[:, 2:]).to(torch.int8)
    else:
        values, exponents = _four_bit_floats(blocks[:, 1:], 16), blocks[:, :1].int() - 128
        used = (values != 0).any(1, keepdim=True)
        if bool((((exponents < -24) | (exponents > 15)) & used).any()):
            raise UnsupportedModel(
                "a scale of MXFP4 is beyond half precision, so there are no kernels for it; load with dtype='bfloat16'"
            )
        scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents * used).half().view(torch.uint8)
    return torch.cat([scales, values.view(torch.uint8)], 1).view(len(rows), -1)


def ternary_codes(
    rows: UInt8[Tensor, "rows row_bytes"], name: str
) -> tuple[UInt8[Tensor, "rows columns"], Float16[Tensor, "rows groups"]]:
    """Codes 0, 1 and 2, of which 1 stands for zero, and their scales, of rows of TQ1_0 or TQ2_0 blocks."""
    nbytes, codes = (54, _tq1_codes) if name == "TQ1_0" else (66, _tq2_codes)
    blocks = rows.reshape(-1, nbytes)
    scales = blocks[:, nbytes - 2 :].view(torch.float16)
    return codes(blocks).view(len(rows), -1), scales.reshape(len(rows), -1)


_READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    **ggml_codebooks.READERS,
}
_SIZES = {form.name: form.size for form in FORMATS.values()}
