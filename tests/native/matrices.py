"""Random packed matrices, and what they stand for by the reference implementation of their formats.

Notable here:
- blocks of ggml's formats are random bytes, so that every code and every scale occurs; the `gguf` package reads them
- a matrix knows the size of its products, part by part: bounds of rounding errors are multiples of it
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from pippin.core import native

# name: number, inputs of a block, bytes of a block, where its half-precision scale and minimum are
GGML = {
    "Q4_0": (2, 32, 18, 0, None),
    "Q4_1": (3, 32, 20, 0, 2),
    "Q5_0": (6, 32, 22, 0, None),
    "Q5_1": (7, 32, 24, 0, 2),
    "Q8_0": (8, 32, 34, 0, None),
    "Q4_K": (12, 256, 144, 0, 2),
    "Q5_K": (13, 256, 176, 0, 2),
    "Q6_K": (14, 256, 210, 208, None),
}
OURS = {f"INT{bits}/{group}": (bits, group) for bits in (2, 3, 4, 8) for group in (32, 64, 128)}
AFFINE = {
    f"AFFINE{bits}/{group}": (bits, group)
    for bits, group in ((2, 64), (3, 32), (4, 64), (4, 128), (5, 32), (6, 64), (8, 128))
}
DENSE = ("F32", "BF16")
FORMATS = (*GGML, *OURS, *AFFINE, *DENSE)
UNIT_ROUNDOFF = 2.0**-24


def block_of(name: str) -> int:
    """Inputs that share a scale: columns must be a multiple of it."""
    return GGML[name][1] if name in GGML else {**OURS, **AFFINE}.get(name, (0, 1))[1]


def aligned(size: int) -> np.ndarray:
    """Zero bytes that begin at a multiple of 64."""
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def address(array: np.ndarray) -> int:
    """Where its first element lies."""
    return int(array.ctypes.data)


@dataclass
class Packed:
    """A packed matrix; ``values`` are what it stands for, ``parts`` the sum of |scale * code| and |minimum|."""

    name: str
    matrix: native.NativeMatrix
    data: np.ndarray
    values: np.ndarray
    parts: np.ndarray
    source: tuple[np.ndarray, ...]  # what it was packed from: blocks, codes and scales, or numbers

    def rows(self, ids: np.ndarray | None = None) -> np.ndarray:
        """The rows ``ids`` (default all) as the library reads them back."""
        ids = np.arange(self.matrix.rows) if ids is None else ids
        ids = np.ascontiguousarray(ids, dtype=np.int64)
        out = np.full((len(ids), self.matrix.columns), np.nan, np.float32)
        library().rows(self.matrix, address(ids), len(ids), address(out))
        return out

    def matmul(self, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        """x W^T + bias."""
        y = np.full((len(x), self.matrix.rows), np.nan, np.float32)
        self.matmul_into(y, x, bias)
        return y

    def matmul_into(self, y: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None) -> None:
        """The same into rows of ``y`` that may lie further apart, as those of ``x`` may."""
        assert x.dtype == y.dtype == np.float32
        assert x.strides[1] == y.strides[1] == 4
        strides = x.strides[0] // 4, y.strides[0] // 4
        where = None if bias is None else address(bias)
        library().matmul(self.matrix, address(x), strides[0], len(x), where, address(y), strides[1])


def library() -> native.Native:
    """The library, which has to be there."""
    found = native.library()
    assert found is not None, native.unavailable_reason()
    return found


def halves(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Random half-precision scales: "usual", or "extreme" ones (subnormal, largest, zero)."""
    if kind == "usual":
        return (rng.standard_normal(shape) * 0.05).astype(np.float16)
    extremes = np.array([0.0, -0.0, 6e-8, -6e-8, 5.9e-5, 6.1e-5, 65504.0, -65504.0, 1.0], np.float16)
    return rng.choice(extremes, shape)


def wide(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Random float32 scales: "usual", or some beyond half precision."""
    if kind == "usual":
        return (rng.standard_normal(shape) * 0.05).astype(np.float32)
    return rng.choice(np.array([0.0, -0.0, 1e-30, -1e-30, 1e9, -1e9, 1.0], np.float32), shape)


def random_blocks(rng: np.random.Generator, name: str, rows: int, columns: int, kind: str = "usual") -> np.ndarray:
    """Rows of random blocks (rows, bytes)."""
    _, size, nbytes, scale, minimum = GGML[name]
    blocks = rng.integers(0, 256, (rows * columns // size, nbytes), dtype=np.uint8)
    for start in (scale, minimum):
        if start is not None:
            blocks[:, start : start + 2] = halves(rng, (len(blocks), 1), kind).view(np.uint8)
    return blocks.reshape(rows, -1)


def dequantized(name: str, blocks: np.ndarray) -> np.ndarray:
    """What blocks stand for, by the `gguf` package."""
    with np.errstate(invalid="ignore"):  # scales that are not finite
        return dequantize(blocks, GGMLQuantizationType[name]).astype(np.float32)


def parts_of(name: str, blocks: np.ndarray) -> np.ndarray:
    """|scale * code| + |minimum| of each weight: the blocks once without their minima, once without their scales."""
    _, _, nbytes, scale, minimum = GGML[name]
    total = np.zeros(1)
    for start in (scale, minimum):
        if start is not None:
            cut = blocks.reshape(-1, nbytes).copy()
            cut[:, start : start + 2] = 0
            total = total + np.abs(dequantized(name, cut.reshape(blocks.shape)).astype(np.float64))
    return total if minimum is not None else np.abs(dequantized(name, blocks).astype(np.float64))


def pack_ggml(name: str, blocks: np.ndarray, columns: int) -> Packed:
    """Pack blocks (rows, bytes)."""
    form, rows = GGML[name][0], len(blocks)
    data = aligned(library().packed_bytes(form, 0, rows, columns))
    library().pack_ggml(form, address(blocks), rows, columns, address(data))
    matrix = native.NativeMatrix(form, 0, rows, columns, 0.0, 0, address(data))
    return Packed(name, matrix, data, dequantized(name, blocks), parts_of(name, blocks), (blocks,))


def pack_codes(name: str, codes: np.ndarray, scales: np.ndarray, zero: float | None = None) -> Packed:
    """Pack codes (rows, columns) and scales (rows, columns / group)."""
    (bits, group), (rows, columns) = OURS[name], codes.shape
    zero = (2**bits - 1) / 2 if zero is None else zero
    form = native.GROUP_FORMATS[bits]
    data = aligned(library().packed_bytes(form, group, rows, columns))
    library().pack_codes(form, group, address(codes), address(scales), rows, columns, address(data))
    wide = np.repeat(scales.astype(np.float32), group, axis=1)
    with np.errstate(invalid="ignore"):  # scales that are not finite
        values = (codes.astype(np.float32) - np.float32(zero)) * wide
    matrix = native.NativeMatrix(form, group, rows, columns, zero, 0, address(data))
    return Packed(name, matrix, data, values, np.abs(values.astype(np.float64)), (codes, scales))


def pack_affine(name: str, codes: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> Packed:
    """Pack codes (rows, columns) with float32 scales and minima (rows, columns / group)."""
    (bits, group), (rows, columns) = AFFINE[name], codes.shape
    form = native.AFFINE_FORMATS[bits]
    data = aligned(library().packed_bytes(form, group, rows, columns))
    library().pack_affine(form, group, address(codes), address(scales), address(minima), rows, columns, address(data))
    wide, low = (np.repeat(values, group, axis=1) for values in (scales, minima))
    with np.errstate(invalid="ignore", over="ignore"):
        products = codes.astype(np.float32) * wide
        values = products + low
    matrix = native.NativeMatrix(form, group, rows, columns, 0.0, 0, address(data))
    parts = np.abs(products.astype(np.float64)) + np.abs(low.astype(np.float64))
    return Packed(name, matrix, data, values, parts, (codes, scales, minima))


def bf16(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 values, ties to even, as float32: by float64 arithmetic, not by bits."""
    exponent = np.frexp(np.where(x == 0, 1, x).astype(np.float64))[1]
    step = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    return (np.rint(x / step) * step).astype(np.float32)


def pack_dense(name: str, values: np.ndarray) -> Packed:
    """Pack float32 ``values``; for BF16 they must be bfloat16 numbers. Its rows may lie apart."""
    rows, columns = values.shape
    form = native.GGML_FORMATS[name]
    source, stride = values, values.strides[0] // 4
    if name == "BF16":
        source, stride = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16), columns
    data = aligned(library().packed_bytes(form, 0, rows, columns))
    library().pack_dense(form, address(source), stride, rows, columns, address(data))
    matrix = native.NativeMatrix(form, 0, rows, columns, 0.0, 0, address(data))
    return Packed(name, matrix, data, values, np.abs(values.astype(np.float64)), (source,))


def random_matrix(rng: np.random.Generator, name: str, rows: int, columns: int, kind: str = "usual") -> Packed:
    """A packed matrix of random contents."""
    if name in GGML:
        return pack_ggml(name, random_blocks(rng, name, rows, columns, kind), columns)
    if name in OURS:
        bits, group = OURS[name]
        codes = rng.integers(0, 2**bits, (rows, columns), dtype=np.uint8)
        return pack_codes(name, codes, halves(rng, (rows, columns // group), kind))
    if name in AFFINE:
        bits, group = AFFINE[name]
        codes = rng.integers(0, 2**bits, (rows, columns), dtype=np.uint8)
        scales, minima = (wide(rng, (rows, columns // group), kind) for _ in range(2))
        return pack_affine(name, codes, scales, minima)
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    return pack_dense(name, bf16(values) if name == "BF16" else values)


def exact_activations(rng: np.random.Generator, name: str, tokens: int, columns: int) -> np.ndarray:
    """Activations that the format's kernels represent exactly.

    For integer formats: whole multiples, up to 127 and with 127 in each 32, of a power of two for each 32.
    """
    if name == "F32":
        return rng.standard_normal((tokens, columns)).astype(np.float32)
    if name == "BF16":
        return bf16(rng.standard_normal((tokens, columns)).astype(np.float32))
    x = rng.integers(-127, 128, (tokens, columns // 32, 32)).astype(np.float32)
    x[:, :, 5] = rng.choice([-127, 127], x.shape[:2])
    return np.ascontiguousarray(
        (x * 2.0 ** rng.integers(-12, 6, (*x.shape[:2], 1))).reshape(tokens, columns), np.float32
    )


def rounding_bound(packed: Packed, x: np.ndarray) -> np.ndarray:
    """How far float32 sums may be from the exact product (tokens, rows), for activations represented exactly.

    A float format adds `columns` products one by one, in two sums. An integer format's sums within a unit of 32 inputs
    are exact; then at most three float additions and products follow for each unit, of which each of two halves (Q6_K)
    or two parts (scale and minimum) rounds: fewer than 8 roundings per unit, and 4 of the reference's own values.
    """
    roundings = packed.matrix.columns + 2 if packed.name in DENSE else 8 * packed.matrix.columns // 32 + 4
    return roundings * UNIT_ROUNDOFF * (np.abs(x).astype(np.float64) @ packed.parts.T) + 1e-43


def quantization_bound(packed: Packed, x: np.ndarray) -> np.ndarray:
    """How far rounding the activations may move a product (tokens, rows).

    Two digits of 8 bits: half a step, of max / 32512, for each input, in blocks of 32 (a whole one where the fine digit
    would be 128), and less than another half for sums beyond 2^24. bfloat16: one part in 256 of each input. float32:
    nothing.
    """
    weights = np.abs(packed.values.astype(np.float64))
    if packed.name == "F32":
        return np.zeros((len(x), len(weights)))
    if packed.name == "BF16":
        return np.abs(x).astype(np.float64) @ weights.T * 2.0**-8
    most = np.abs(x).astype(np.float64).reshape(len(x), -1, 32).max(axis=2)
    return (1.5 * most / 32512) @ weights.reshape(len(weights), -1, 32).sum(axis=2).T
