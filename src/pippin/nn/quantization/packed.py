r"""Weights in the packed formats of the native kernels, and quantization to Pippin's own formats.

Notable here:
- weights in ggml's blocks are not requantized: packing only reorders their codes and scales
- Pippin's formats are balanced: codes of b bits, $w = s\,(c - z)$ with $z = (2^b - 1) / 2$ and one half-precision scale
  for each group of inputs, so that no code is spent on exact zeros, which are rare
- the scale of a group minimizes the squared error: for fixed codes the error is quadratic in the scale, so rounding
  alternates with an exact Newton step, from several initial scales of which the best result is used
- packed weights are allocated in huge pages, one after the other, for memory bandwidth
- the transposed product, which gradients need, unpacks and transposes a block of rows at a time and uses the same
  kernels, so that there is never a dense copy of the whole weight

Source: the balanced levels and the search for the clip are those of arXiv:2507.13575, section on 2-bit quantization.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from typing import Any, Final, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float, Float16, Float32, Int, UInt8
from torch import Tensor

from pippin.core import native
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import CorruptedFile, InvalidArgument, NotEnoughMemory, UnsupportedModel
from pippin.core.formats.ggml_quants import FORMATS

Bits = Literal[2, 3, 4, 8]
BITS: Final = get_args(Bits)
GROUPS: Final = (32, 64, 128)

# Step of the optimal balanced levels for a normal distribution, in standard deviations: one of the initial scales.
_NORMAL_STEP: Final = {2: 0.996, 3: 0.586, 4: 0.335, 8: 0.031}
_CLIPS = (1.0, 0.85)  # the other initial scales: clipping at these shares of the group's largest weight
_ITERATIONS = 3
_PIECE = 1 << 18  # weights quantized at a time, so that temporaries stay in the cache
_ROWS = 1 << 20  # weights unpacked at a time for a transposed product


def middle_code(bits: int) -> float:
    """The (fractional) code that represents 0 in Pippin's formats.

    >>> middle_code(2)
    1.5
    """
    return ((1 << bits) - 1) / 2


@checked
def quantize(
    weight: Float[Tensor, "rows columns"],
    bits: Bits,
    group_size: PositiveInt = 64,
    *,
    zero_point: float | None = None,
    name: str = "the weight",
) -> tuple[UInt8[Tensor, "rows columns"], Float16[Tensor, "rows groups"]]:
    """Quantize a matrix to codes and scales, with scales that minimize the squared error approximately.

    Args:
        weight: finite values.
        bits: 2, 3, 4 or 8.
        group_size: number of consecutive inputs that share a scale; divides the columns.
        zero_point: the code that represents 0; None for the middle, so that the levels are balanced.
        name: name of the weight in error messages.

    Raises:
        InvalidArgument: a group that does not divide the columns, weights that are not finite, or so large
            that half precision cannot hold their scale.

    >>> codes, scales = quantize(torch.tensor([[-3.0, -1.0, 1.0, 3.0]]), bits=2, group_size=4)
    >>> codes.tolist(), scales.tolist()
    ([[0, 1, 2, 3]], [[2.0]])
    """
    rows, columns = weight.shape
    if columns % group_size:
        raise InvalidArgument(f"{name} has rows of {columns} weights, which groups of {group_size} do not divide")
    zero_point = middle_code(bits) if zero_point is None else zero_point
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, columns // group_size, dtype=torch.float16, device=weight.device)
    step = max(1, _PIECE // columns)
    for start in range(0, rows, step):
        piece = weight[start : start + step].float()
        if not piece.isfinite().all():
            raise InvalidArgument(f"{name} holds values that are not finite, so it cannot be quantized")
        grouped = piece.reshape(-1, group_size)
        scale = _best_scales(grouped, bits, zero_point).half()
        if scale.isinf().any():
            raise InvalidArgument(f"{name} holds {float(piece.abs().max()):.3g}, too large for half-precision scales")
        codes[start : start + step] = _codes(grouped, scale.float(), bits, zero_point).view(piece.shape)
        scales[start : start + step] = scale.view(len(piece), -1)
    return codes, scales


def check_codes(codes: Tensor, scales: Tensor, bits: int, group_size: int) -> None:
    """Check that codes (rows, columns) and scales (rows, groups) form a weight in one of Pippin's formats.

    Raises:
        InvalidArgument: unsupported bits or group size, codes that are too large, or shapes that do not match.
    """
    rows, columns = codes.shape
    fits = (
        bits in BITS
        and group_size in GROUPS
        and columns % group_size == 0
        and scales.shape == (rows, columns // group_size)
    )
    if not fits:
        raise InvalidArgument(
            f"codes of {rows} x {columns} with scales of {tuple(scales.shape)} are not a weight of {bits} bits in "
            f"groups of {group_size}; bits may be {', '.join(map(str, BITS))}, groups {', '.join(map(str, GROUPS))}"
        )
    if bits < 8 and codes.numel() and int(codes.max()) >= 1 << bits:
        raise InvalidArgument(f"a code is {int(codes.max())}, {bits} bits hold up to {2**bits - 1}")


def dequantize(
    codes: UInt8[Tensor, "rows columns"], scales: Float16[Tensor, "rows groups"], zero_point: float
) -> Float[Tensor, "rows columns"]:
    """Dequantize codes and scales to float32: ``scale * (code - zero_point)``."""
    grouped = codes.view(*scales.shape, -1).float() - zero_point
    return (grouped * scales.float()[..., None]).view(codes.shape)


def _codes(grouped: Tensor, scale: Tensor, bits: int, zero: float) -> Tensor:
    """The nearest code of each weight, as float32; arbitrary for groups with a scale of zero."""
    divisor = torch.where(scale == 0, 1.0, scale)
    return (grouped / divisor).add_(zero).round_().clamp_(0, 2**bits - 1)


def _best_scales(grouped: Tensor, bits: int, zero: float) -> Tensor:
    """The best scale found for each group, (groups, 1), by alternating rounding and Newton steps."""
    top = 2**bits - 1
    largest = grouped.abs().amax(-1, keepdim=True)
    deviation = grouped.square().mean(-1, keepdim=True).sqrt()
    best, most = torch.zeros_like(largest), torch.full_like(largest, -1.0)
    levels, products = torch.empty_like(grouped), torch.empty_like(grouped)
    for start in (*(largest * (clip / zero) for clip in _CLIPS), deviation * _NORMAL_STEP[bits]):
        scale = start
        for _ in range(_ITERATIONS):
            inverse = torch.where(scale == 0, 0.0, scale.reciprocal())
            torch.mul(grouped, inverse, out=levels).add_(zero).round_().clamp_(0, top).sub_(zero)
            along = torch.mul(grouped, levels, out=products).sum(-1, keepdim=True)
            scale = along / torch.mul(levels, levels, out=products).sum(-1, keepdim=True)
        # |w|^2 minus the squared error, after the Newton step
        gain = along * scale
        better = gain > most
        best, most = torch.where(better, scale, best), torch.where(better, gain, most)
    return best


@runtime_checkable
class PackedEmbedding(Protocol):
    """A packed weight that also supports looking up single rows, as an embedding needs."""

    @property
    def device(self) -> torch.device:
        """Device of the weight."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the rows that `select` returns."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""

    def select(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch columns"]:
        """The rows with these indices."""

    def matmul(self, x: Float[Tensor, "*batch inputs"], bias: Tensor | None) -> Float[Tensor, "*batch outputs"]:
        """Return ``x @ weight.T + bias``."""

    def matmul_transposed(self, y: Float[Tensor, "*batch outputs"]) -> Float[Tensor, "*batch inputs"]:
        """Return ``y @ weight``."""

    def dense(self) -> Float[Tensor, "rows columns"]:
        """Return the weight as an ordinary matrix."""


class NativeWeight:
    """A matrix packed for the native kernels; the ``from_`` class methods create it.

    Args:
        form: number of the format in the C interface.
        rows: number of outputs.
        columns: number of inputs.
        group: number of inputs that share a scale in Pippin's formats; 0 for other formats.
        zero: the code that represents 0 in Pippin's formats.

    Raises:
        InvalidArgument: the format does not support such a matrix.
    """

    def __init__(self, form: int, rows: int, columns: int, group: int = 0, zero: float = 0.0) -> None:
        self._native = _library()
        self.format, self.rows, self.columns, self.group = form, rows, columns, group
        self.data = allocate(self._native.packed_bytes(form, group, rows, columns))
        self.matrix = native.NativeMatrix(form, group, rows, columns, zero, 0, self.data.data_ptr())

    @staticmethod
    def supports(weight: Tensor | None) -> bool:
        """Whether this machine has kernels for a dense weight of this device and dtype."""
        return (
            weight is not None
            and weight.device.type == "cpu"
            and weight.dtype in (torch.float32, torch.bfloat16)
            and native.library() is not None
        )

    @classmethod
    def from_dense(cls, weight: Float[Tensor, "rows columns"]) -> NativeWeight:
        """Pack a float32 or bfloat16 matrix without quantization.

        Raises:
            InvalidArgument: another dtype.
        """
        form = {torch.float32: "F32", torch.bfloat16: "BF16"}.get(weight.dtype)
        if form is None:
            raise InvalidArgument(f"weights of {weight.dtype} have no kernels; convert them to float32 or bfloat16")
        weight = weight.detach().contiguous()
        rows, columns = weight.shape
        packed = cls(native.GGML_FORMATS[form], rows, columns)
        packed._native.pack_dense(packed.format, weight.data_ptr(), columns, rows, columns, packed.matrix.data)
        return packed

    @classmethod
    def from_ggml(cls, blocks: UInt8[Tensor, "rows row_bytes"], kind: str) -> NativeWeight:
        """Pack ggml's blocks as they are stored in a file.

        Args:
            blocks: the bytes of each row.
            kind: ggml's name of the block type, such as "Q4_1".

        Raises:
            UnsupportedModel: there are no kernels for this type.
            CorruptedFile: rows that are not whole blocks.
        """
        if kind not in native.GGML_FORMATS:
            raise UnsupportedModel(
                f"weights of type {kind} have no kernels; there are: {', '.join(native.GGML_FORMATS)}"
            )
        form = native.GGML_FORMATS[kind]
        block = FORMATS[form]
        rows, row_bytes = blocks.shape
        if row_bytes % block.nbytes:
            raise CorruptedFile(f"rows of {row_bytes} bytes are not whole {kind} blocks of {block.nbytes}")
        blocks = blocks.contiguous()
        packed = cls(form, rows, row_bytes // block.nbytes * block.size)
        packed._native.pack_ggml(form, blocks.data_ptr(), rows, packed.columns, packed.matrix.data)
        return packed

    @classmethod
    def from_codes(
        cls,
        codes: UInt8[Tensor, "rows columns"],
        scales: Float16[Tensor, "rows groups"],
        bits: int,
        group_size: int,
        zero_point: float | None = None,
    ) -> NativeWeight:
        """Pack codes and scales of Pippin's formats, such as those of `quantize`.

        Args:
            codes: integers below ``2 ** bits``.
            scales: one for each row and group.
            bits: 2, 3, 4 or 8.
            group_size: 32, 64 or 128.
            zero_point: the code that represents 0; None for the middle.

        Raises:
            InvalidArgument: unsupported bits or group size, codes that are too large, or shapes that do not match.
        """
        rows, columns = codes.shape
        check_codes(codes, scales, bits, group_size)
        codes, scales = codes.contiguous(), scales.contiguous()
        packed = cls(
            native.GROUP_FORMATS[bits],
            rows,
            columns,
            group_size,
            middle_code(bits) if zero_point is None else zero_point,
        )
        packed._native.pack_codes(
            packed.format, group_size, codes.data_ptr(), scales.data_ptr(), rows, columns, packed.matrix.data
        )
        return packed

    @classmethod
    def from_affine(
        cls,
        codes: UInt8[Tensor, "rows columns"],
        scales: Float32[Tensor, "rows groups"],
        minima: Float32[Tensor, "rows groups"],
        bits: int,
        group_size: int,
    ) -> NativeWeight:
        """Pack codes with a scale and a minimum for each group: ``scale * code + minimum``.

        Args:
            codes: integers below ``2 ** bits``.
            scales: one for each row and group.
            minima: likewise.
            bits: 2 to 6 or 8.
            group_size: 32, 64 or 128.

        Raises:
            InvalidArgument: unsupported bits or group size, codes that are too large, or shapes that do not match.
        """
        rows, columns = codes.shape
        if bits not in native.AFFINE_FORMATS or not tuple(scales.shape) == tuple(minima.shape) == (
            rows,
            columns // group_size,
        ):
            raise InvalidArgument(
                f"codes of {rows} x {columns} with scales of {tuple(scales.shape)} and minima of "
                f"{tuple(minima.shape)} are not a weight of {bits} bits in groups of {group_size}"
            )
        codes, scales, minima = codes.contiguous(), scales.contiguous(), minima.contiguous()
        packed = cls(native.AFFINE_FORMATS[bits], rows, columns, group_size)
        packed._native.pack_affine(
            packed.format,
            group_size,
            codes.data_ptr(),
            scales.data_ptr(),
            minima.data_ptr(),
            rows,
            columns,
            packed.matrix.data,
        )
        return packed

    def __repr__(self) -> str:
        return f"NativeWeight({self.kind}, {self.rows} x {self.columns})"

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeWeight:
        return self  # immutable

    @property
    def kind(self) -> str:
        """Name of the format: ggml's, or "INT2" to "INT8" and "AFFINE2" to "AFFINE8" for Pippin's."""
        names = {number: name for name, number in native.GGML_FORMATS.items()}
        names |= {number: f"INT{bits}" for bits, number in native.GROUP_FORMATS.items()}
        names |= {number: f"AFFINE{bits}" for bits, number in native.AFFINE_FORMATS.items()}
        return names[self.format]

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the rows that `select` returns: float32."""
        return torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of memory, all of which a product with one vector reads."""
        return self.data.nbytes

    def matmul(self, x: Float[Tensor, "*batch inputs"], bias: Tensor | None) -> Float[Tensor, "*batch outputs"]:
        """Return ``x @ weight.T + bias`` in the dtype of ``x``; without gradients."""
        flat = x.detach().reshape(-1, self.columns).float()
        flat = flat if flat.stride(1) == 1 and flat.stride(0) >= self.columns else flat.contiguous()
        y = torch.empty(len(flat), self.rows)
        bias = None if bias is None else bias.detach().float().contiguous()
        if len(flat):
            address = None if bias is None else bias.data_ptr()
            self._native.matmul(
                self.matrix, flat.data_ptr(), flat.stride(0), len(flat), address, y.data_ptr(), self.rows
            )
        y = y.to(x.dtype)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], self.rows)

    def matmul_transposed(self, y: Float[Tensor, "*batch outputs"]) -> Float[Tensor, "*batch inputs"]:
        """Return ``y @ weight`` in the dtype of ``y``, accumulated in float32; without gradients.

        For bfloat16 ``y`` the weights are rounded to bfloat16 and torch multiplies; otherwise the native kernels do.
        """
        flat = y.detach().reshape(-1, self.rows)
        step = max(1, _ROWS // self.columns)
        total: Tensor | None = None
        for start in range(0, self.rows, step):
            part, weight = flat[:, start : start + step], self.select(torch.arange(start, min(start + step, self.rows)))
            term = (part @ weight.bfloat16()).float() if y.dtype == torch.bfloat16 else self._product(part, weight)
            total = term if total is None else total.add_(term)
        assert total is not None
        return total.to(y.dtype).view(*y.shape[:-1], self.columns)

    def _product(self, y: Tensor, weight: Tensor) -> Tensor:
        """``y @ weight`` of float32 matrices, by the kernels."""
        form, (rows, columns) = native.GGML_FORMATS["F32"], weight.shape
        transposed, y = weight.T.contiguous(), y.float().contiguous()
        memory = torch.empty(self._native.packed_bytes(form, 0, columns, rows), dtype=torch.uint8)
        matrix = native.NativeMatrix(form, 0, columns, rows, 0.0, 0, memory.data_ptr())
        self._native.pack_dense(form, transposed.data_ptr(), rows, columns, rows, matrix.data)
        result = torch.empty(len(y), columns)
        if len(y):
            self._native.matmul(matrix, y.data_ptr(), rows, len(y), None, result.data_ptr(), columns)
        return result

    def select(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch columns"]:
        """The rows with these indices, float32.

        Raises:
            InvalidArgument: an index out of range.
        """
        flat = ids.reshape(-1).to(torch.int64).contiguous()
        rows = torch.empty(len(flat), self.columns)
        if len(flat):
            self._native.rows(self.matrix, flat.data_ptr(), len(flat), rows.data_ptr())
        return rows.view(*ids.shape, self.columns)

    def dense(self) -> Float[Tensor, "rows columns"]:
        """The unpacked weight as a float32 matrix."""
        return self.select(torch.arange(self.rows))


class AbsentWeight(NativeWeight):
    """A matrix that is not in memory: the kernels get it when a pass needs it.

    Args:
        form: number of the format in the C interface.
        rows: number of outputs.
        columns: number of inputs.
        group: number of inputs that share a scale in Pippin's formats; 0 for other formats.
        zero: the code that represents 0 in Pippin's formats.
    """

    def __init__(self, form: int, rows: int, columns: int, group: int = 0, zero: float = 0.0) -> None:
        self._native = _library()
        self.format, self.rows, self.columns, self.group = form, rows, columns, group
        self.data = torch.empty(0, dtype=torch.uint8)
        self.matrix = native.NativeMatrix(form, group, rows, columns, zero, 0, None)

    @property
    def nbytes(self) -> int:
        """Bytes of memory once it is there."""
        return packed_size(self.format, self.rows, self.columns, self.group)

    def matmul(self, x: Float[Tensor, "*batch inputs"], bias: Tensor | None) -> Float[Tensor, "*batch outputs"]:
        """Refuse: only the engine has the weights.

        Raises:
            InvalidArgument: always.
        """
        raise InvalidArgument(
            "weights of this model are in a file, and only the engine brings them; load it as a whole for anything but "
            "generating"
        )

    def select(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch columns"]:
        """Refuse, as `matmul`.

        Raises:
            InvalidArgument: always.
        """
        return self.matmul(ids, None)


def packed_size(form: int, rows: int, columns: int, group: int = 0) -> int:
    """The number of bytes of a weight in this format.

    Raises:
        InvalidArgument: the format does not support such a matrix.
    """
    return _library().packed_bytes(form, group, rows, columns)


def _library() -> native.Native:
    found = native.library()
    if found is None:
        raise InvalidArgument(f"weights cannot be packed for the native kernels: {native.unavailable_reason()}")
    return found


# --- memory -----------------------------------------------------------------------------------------------------------

_ALIGNMENT = 64
_HUGE = 2 << 20
_SLAB = 16 << 20
_lock = threading.Lock()
_slab: list[Tensor] = []  # the unused rest of the current mapping


def allocate(nbytes: int) -> Tensor:
    """Allocate memory for a packed weight, aligned to 64 bytes, in huge pages where the system supports them.

    Small weights share a mapping of 16 MiB, which is released with the last of them.

    Raises:
        NotEnoughMemory: the system has not enough memory.
    """
    size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    # the rest of a mapping serves later weights, which must not be inference tensors because the first one was
    with torch.inference_mode(False), _lock:
        if size > _SLAB // 4:
            return _map(size)[:nbytes]
        if not _slab or len(_slab[0]) < size:
            _slab[:] = [_map(_SLAB)]
        piece, _slab[0] = _slab[0][:nbytes], _slab[0][size:]
    return piece


def _map(size: int) -> Tensor:
    """A new memory mapping that is aligned to huge pages."""
    try:
        pages = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise NotEnoughMemory(f"{size:,} bytes for weights could not be allocated: {error}") from error
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux only; otherwise ordinary pages are used
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE, start, size // _HUGE * _HUGE or size)
    return whole[start : start + size]
