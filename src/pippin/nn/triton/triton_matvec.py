r"""Matrix-vector products with 2- to 8-bit weights in groups, in Triton.

Notable here:
- a decode step reads every weight once and is bound by memory bandwidth; nothing is unpacked to memory
- the codes of one 32-bit word are a fixed distance apart in their group: each step of the unpacking reads contiguous
  activations, and a scale serves a whole word
- $\sum_j s\,(c_j - z)\,x_j = s\,(\sum_j c_j x_j - z \sum_j x_j)$, and the second sum is shared by all rows: the
  fractional zero of the balanced formats costs next to nothing
- from some tens of tokens on the product is compute-bound: the weight is expanded once, and torch multiplies
- Triton comes with torch's CUDA builds and is imported with the first product; its interpreter runs the same kernels on
  a CPU, for tests without a GPU
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float16, Int, UInt8
from torch import Tensor

from pippin.core.errors import InvalidArgument, MissingDependency
from pippin.nn.quantization.packed import check_codes, middle_code

# Triton's language module, after import; kernels look it up here.
tl: Any = None

_STORED: Final = {2: 2, 3: 4, 4: 4, 8: 8}
"""Bits of a code in memory: three do not divide a word."""
_EXPAND_FROM: Final = 32
"""Tokens from which on expanding the weight is cheaper than reading it for a few tokens at a time."""
_ROWS: Final = 1 << 22
"""Weights unpacked at a time for a transposed product."""


class TritonWeight:
    """A matrix of 2- to 8-bit codes with a half-precision scale for each row and group of inputs.

    Created by `from_codes`, from the same codes and scales as `pippin.nn.quantization.packed.NativeWeight`.

    Args:
        words: packed codes.
        scales: one for each row and group.
        bits: bits of a code in memory: 2, 4 or 8.
        zero: the code that stands for 0.
        dtype: precision of the results of `select` and `dense`.
    """

    def __init__(
        self,
        words: Int[Tensor, "rows words"],
        scales: Float16[Tensor, "rows groups"],
        bits: int,
        zero: float,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.words, self.scales, self.bits, self.zero, self.dtype = words, scales, bits, zero, dtype
        self.rows, self.columns = len(words), words.shape[1] * 32 // bits

    @staticmethod
    def missing() -> str | None:
        """The reason why the kernels are not available; None if they are."""
        if find_spec("triton") is None:
            return "triton is not installed; it comes with torch's builds for CUDA"
        return None

    @classmethod
    def from_codes(
        cls,
        codes: UInt8[Tensor, "rows columns"],
        scales: Float16[Tensor, "rows groups"],
        bits: int,
        group_size: int,
        zero_point: float | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> TritonWeight:
        """Pack codes and scales, on the device that they are on.

        Args:
            codes: below ``2 ** bits``.
            scales: one for each row and group.
            bits: 2, 3, 4 or 8; 3 take as much memory as 4.
            group_size: 32, 64 or 128.
            zero_point: the code that stands for 0; None for the middle.
            dtype: precision of the results of `select` and `dense`.

        Raises:
            InvalidArgument: other bits or groups, codes that are too large, or shapes that do not fit together.

        >>> codes = torch.arange(64, dtype=torch.uint8).remainder(4)[None]
        >>> weight = TritonWeight.from_codes(codes, torch.full((1, 2), 2.0).half(), bits=2, group_size=32)
        >>> weight.dense()[0, :4].tolist(), weight.nbytes
        ([-3.0, -1.0, 1.0, 3.0], 20)
        """
        rows, columns = codes.shape
        check_codes(codes, scales, bits, group_size)
        zero_point = middle_code(bits) if zero_point is None else zero_point
        stored = _STORED[bits]
        # code j of word w of a group is that of input j * (words of a group) + w
        grouped = codes.view(rows, columns // group_size, 32 // stored, -1)
        words = torch.zeros(rows, columns // group_size, grouped.shape[-1], dtype=torch.int32, device=codes.device)
        for place in range(32 // stored):
            words |= grouped[:, :, place].to(torch.int32) << (stored * place)
        return cls(words.view(rows, -1), scales.contiguous(), stored, zero_point, dtype)

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.words.device

    @property
    def nbytes(self) -> int:
        """Bytes of memory, all of which a product with one vector reads."""
        return self.words.nbytes + self.scales.nbytes

    def matmul(self, x: Float[Tensor, "*batch inputs"], bias: Tensor | None) -> Float[Tensor, "*batch outputs"]:
        """Return ``x @ weight.T + bias`` in the precision of ``x``, accumulated in float32; without gradients.

        Raises:
            InvalidArgument: an input of another width.
            MissingDependency: Triton is not installed.
        """
        if x.shape[-1] != self.columns:
            raise InvalidArgument(f"a weight of {self.columns} inputs was given {x.shape[-1]}")
        flat = x.detach().reshape(-1, self.columns).contiguous()
        if len(flat) >= _EXPAND_FROM:
            return F.linear(x, self._expand(x.dtype), None if bias is None else bias.to(x.dtype))
        y = torch.empty(len(flat), self.rows, dtype=x.dtype, device=x.device)
        tokens, rows, words = _tile(len(flat), self.words.shape[1])
        if len(flat):
            kernel = _kernels()[0]
            kernel[(-(-self.rows // rows), -(-len(flat) // tokens))](
                *(flat, self.words, self.scales, y if bias is None else bias, y),
                *(len(flat), self.rows, self.words.shape[1], self.zero),
                BITS=self.bits,
                GROUP=self._group_words,
                BIAS=bias is not None,
                TOKENS=tokens,
                ROWS=rows,
                WORDS=words,
            )
        return y if x.ndim == 2 else y.view(*x.shape[:-1], self.rows)

    def matmul_transposed(self, y: Float[Tensor, "*batch outputs"]) -> Float[Tensor, "*batch inputs"]:
        """Return ``y @ weight`` in the precision of ``y``; unpacks some rows of the weight at a time."""
        flat = y.detach().reshape(-1, self.rows)
        total = torch.zeros(len(flat), self.columns, dtype=torch.float32, device=flat.device)
        step = max(1, _ROWS // self.columns)
        for start in range(0, self.rows, step):
            rows = torch.arange(start, min(start + step, self.rows), device=self.device)
            total += flat[:, start : start + step] @ self.select(rows).to(y.dtype)
        return total.to(y.dtype).view(*y.shape[:-1], self.columns)

    def select(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch columns"]:
        """The rows with these indices."""
        flat = ids.reshape(-1)
        words = self.words[flat].unflatten(-1, (-1, 1, self._group_words))
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32, device=self.device)[:, None]
        codes = ((words >> shifts) & ((1 << self.bits) - 1)).flatten(2)
        values = (codes - self.zero) * self.scales[flat].float()[..., None]
        rows: Tensor = values.to(self.dtype).view(*ids.shape, self.columns)
        return rows

    def dense(self) -> Float[Tensor, "rows columns"]:
        """The weight as a dense matrix."""
        return self.select(torch.arange(self.rows, device=self.device))

    @property
    def _group_words(self) -> int:
        """Words of one group of inputs."""
        return self.words.shape[1] // self.scales.shape[1]

    def _expand(self, dtype: torch.dtype) -> Tensor:
        """The weight as a dense matrix, in one pass over memory."""
        weight = torch.empty(self.rows, self.columns, dtype=dtype, device=self.device)
        _, rows, words = _tile(1, self.words.shape[1])
        kernel = _kernels()[1]
        kernel[(-(-self.rows // rows), -(-self.words.shape[1] // words))](
            *(self.words, self.scales, weight, self.rows, self.words.shape[1], self.zero),
            BITS=self.bits,
            GROUP=self._group_words,
            ROWS=rows,
            WORDS=words,
        )
        return weight


def _tile(tokens: int, words: int) -> tuple[int, int, int]:
    """Tokens, rows and words of one program of a kernel: powers of two.

    Enough programs for every multiprocessor, and no more accumulators than fit into registers.
    """
    together = 1 if tokens == 1 else 2 if tokens == 2 else 4
    return together, 8 if together == 1 else 4, min(128, 1 << (words - 1).bit_length())


def jit(namespace: dict[str, Any], *functions: Callable[..., None]) -> tuple[Any, ...]:
    """Kernels for Triton to compile with their first launch; ``tl`` of their module becomes Triton's language.

    MissingDependency: Triton is not installed.
        MissingDependency: there is no Triton.
    """
    if (reason := TritonWeight.missing()) is not None:
        raise MissingDependency(reason)
    triton, namespace["tl"] = import_module("triton"), import_module("triton.language")
    return tuple(triton.jit(function) for function in functions)


@cache
def _kernels() -> tuple[Any, ...]:
    return jit(globals(), _product, _unpack)


@no_type_check
def _product(
    x,
    codes,
    scales,
    bias,
    y,
    tokens,
    rows,
    words,
    zero,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Kernel: TOKENS x ROWS outputs, accumulated over all words of a row, WORDS at a time; GROUP words have one
    scale."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row_in, token_in = row < rows, token < tokens
    # offsets into a large head do not fit 32 bits
    code_rows = codes + row.to(tl.int64)[:, None] * words
    scale_rows = scales + row.to(tl.int64)[:, None] * (words // GROUP)
    x_rows = x + token.to(tl.int64)[:, None] * (words * (32 // BITS))
    total = tl.zeros([TOKENS, ROWS, WORDS], tl.float32)
    for start in range(0, words, WORDS):
        word = start + tl.arange(0, WORDS)
        word_in = word < words
        inside = row_in[:, None] & word_in[None, :]
        packed = tl.load(code_rows + word[None, :], mask=inside, other=0)
        scale = tl.load(scale_rows + (word // GROUP)[None, :], mask=inside, other=0.0).to(tl.float32)
        column = (word // GROUP) * (GROUP * (32 // BITS)) + word % GROUP
        part = tl.zeros([TOKENS, ROWS, WORDS], tl.float32)
        plain = tl.zeros([TOKENS, WORDS], tl.float32)
        for place in tl.static_range(32 // BITS):
            code = ((packed >> (BITS * place)) & ((1 << BITS) - 1)).to(tl.float32)
            seen = token_in[:, None] & word_in[None, :]
            value = tl.load(x_rows + (column + place * GROUP)[None, :], mask=seen, other=0.0).to(tl.float32)
            part += code[None, :, :] * value[:, None, :]
            plain += value
        total += (part - zero * plain[:, None, :]) * scale[None, :, :]
    result = tl.sum(total, 2)
    if BIAS:
        result += tl.load(bias + row, mask=row_in, other=0.0).to(tl.float32)[None, :]
    target = y + token.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(target, result.to(y.dtype.element_ty), mask=token_in[:, None] & row_in[None, :])


@no_type_check
def _unpack(
    codes,
    scales,
    weight,
    rows,
    words,
    zero,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Kernel: unpacks ROWS x WORDS words of codes to weights in memory."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = (row < rows)[:, None] & (word < words)[None, :]
    packed = tl.load(codes + row[:, None] * words + word[None, :], mask=inside, other=0)
    group = (word // GROUP)[None, :]
    scale = tl.load(scales + row[:, None] * (words // GROUP) + group, mask=inside, other=0.0).to(tl.float32)
    column = group * (GROUP * (32 // BITS)) + (word % GROUP)[None, :]
    target = weight + row[:, None] * (words * (32 // BITS)) + column
    for place in tl.static_range(32 // BITS):
        code = ((packed >> (BITS * place)) & ((1 << BITS) - 1)).to(tl.float32)
        tl.store(target + place * GROUP, ((code - zero) * scale).to(weight.dtype.element_ty), mask=inside)
