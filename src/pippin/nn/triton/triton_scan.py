"""Parallel scan of linear recurrences, in Triton: chunks in parallel, one program per chunk.

Notable here:
- three kernels: the effect of each chunk on the state before it, the states between chunks, then every state; matrices
  are read twice and states written once
- a program keeps the running matrix of its chunk in registers: one number, or four, for each channel
- the steps of a reverse scan are counted from the end, so that the kernels need only one direction
- there are kernels for diagonal and 2 x 2 matrices; others are scanned by torch
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, no_type_check

import torch
from torch import Tensor

from pippin.nn.triton.triton_matvec import TritonWeight, jit

# Triton's language module, after import; kernels look it up here.
tl: Any = None

_WIDTH: Final = 64
"""Channels of a program."""
_CHUNK: Final = 64
"""Minimum steps of a chunk."""
_CHUNKS: Final = 256
"""Maximum number of chunks, which are combined sequentially."""


def available(a: Tensor, b: Tensor) -> bool:
    """Whether there are kernels for these shapes on their device."""
    return b.device.type == "cuda" and (a.ndim == b.ndim or a.shape[2] == 2) and TritonWeight.missing() is None


def scan(a: Tensor, b: Tensor, initial: Tensor | None, *, reverse: bool) -> Tensor:
    """As `pippin.nn.recurrent.scan.linear_scan`, for diagonal and 2 x 2 matrices, without gradients and checks.

    Raises:
        MissingDependency: Triton is not installed.
    """
    batch, time = b.shape[:2]
    diagonal = a.ndim == b.ndim
    h = torch.empty_like(b, memory_format=torch.contiguous_format)
    size = 1 if diagonal else 2
    width = b[0, 0].numel() // size
    if not b.numel():
        return h
    if diagonal:
        matrices, added = a.reshape(batch, time, 1, 1, width), b.reshape(batch, time, 1, width)
    else:
        matrices, added = _side_by_side(a), _side_by_side(b)
    state = torch.zeros_like(h[:, 0]) if initial is None else initial.contiguous()
    chunk = max(_CHUNK, _power(-(-time // _CHUNKS)))
    chunks = -(-time // chunk)
    through = torch.empty(batch, chunks, size * size, width, dtype=b.dtype, device=b.device)
    sums = torch.empty(batch, chunks, size, width, dtype=b.dtype, device=b.device)
    before = torch.empty_like(sums)
    strides = (*matrices.stride()[:4], *added.stride()[:3])
    ends, join, fill = _kernels()
    columns = -(-width // _WIDTH)
    shape = {"SIZE": size, "CHUNK": chunk, "WIDTH": _WIDTH, "REVERSE": reverse}
    ends[(batch * chunks, columns)](matrices, added, through, sums, *strides, time, chunks, width, **shape)
    join[(batch, columns)](through, sums, state, before, chunks, width, SIZE=size, CHUNKS=_power(chunks), WIDTH=_WIDTH)
    fill[(batch * chunks, columns)](matrices, added, before, h, *strides, time, chunks, width, **shape)
    return h


def _power(count: int) -> int:
    """The next power of two, so that kernels are compiled for few lengths."""
    return 1 << (count - 1).bit_length()


def _side_by_side(x: Tensor) -> Tensor:
    """A copy with contiguous channels."""
    return x if x.stride(-1) == 1 else x.contiguous()


@cache
def _kernels() -> tuple[Any, ...]:
    return jit(globals(), _ends, _join, _fill)


@no_type_check
def _ends(
    matrices,
    added,
    through,
    sums,
    a_batch,
    a_time,
    a_row,
    a_column,
    b_batch,
    b_time,
    b_row,
    time,
    chunks,
    width,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Kernel: the product of the matrices of a chunk, and its final state from a zero initial state."""
    batch, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < width
    a, b = matrices + batch * a_batch + channel, added + batch * b_batch + channel
    zeros = tl.zeros([WIDTH], sums.dtype.element_ty)
    p00, p01, p10, p11 = zeros + 1, zeros, zeros, zeros + 1
    h0, h1 = zeros, zeros
    for step in range(CHUNK):
        place = chunk * CHUNK + step
        now = inside & (place < time)  # beyond the last step the matrix is one
        t = (time - 1 - place if REVERSE else place).to(tl.int64)
        a00 = tl.load(a + t * a_time, mask=now, other=1.0)
        b0 = tl.load(b + t * b_time, mask=now, other=0.0)
        if SIZE == 1:
            p00, h0 = a00 * p00, a00 * h0 + b0
        else:
            a01 = tl.load(a + t * a_time + a_column, mask=now, other=0.0)
            a10 = tl.load(a + t * a_time + a_row, mask=now, other=0.0)
            a11 = tl.load(a + t * a_time + a_row + a_column, mask=now, other=1.0)
            b1 = tl.load(b + t * b_time + b_row, mask=now, other=0.0)
            p00, p10 = a00 * p00 + a01 * p10, a10 * p00 + a11 * p10
            p01, p11 = a00 * p01 + a01 * p11, a10 * p01 + a11 * p11
            h0, h1 = a00 * h0 + a01 * h1 + b0, a10 * h0 + a11 * h1 + b1
    number = batch * chunks + chunk
    product, end = through + number * (SIZE * SIZE) * width + channel, sums + number * SIZE * width + channel
    tl.store(product, p00, mask=inside)
    tl.store(end, h0, mask=inside)
    if SIZE == 2:
        tl.store(product + width, p01, mask=inside)
        tl.store(product + 2 * width, p10, mask=inside)
        tl.store(product + 3 * width, p11, mask=inside)
        tl.store(end + width, h1, mask=inside)


@no_type_check
def _join(
    through,
    sums,
    initial,
    before,
    chunks,
    width,
    SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Kernel: the state before each chunk, sequentially."""
    batch = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < width
    h0 = tl.load(initial + batch * SIZE * width + channel, mask=inside, other=0.0)
    h1 = h0
    if SIZE == 2:
        h1 = tl.load(initial + batch * SIZE * width + width + channel, mask=inside, other=0.0)
    for chunk in range(CHUNKS):
        now = inside & (chunk < chunks)
        place = batch * chunks + chunk
        product, end = through + place * (SIZE * SIZE) * width + channel, sums + place * SIZE * width + channel
        target = before + place * SIZE * width + channel
        tl.store(target, h0, mask=now)
        p00, s0 = tl.load(product, mask=now, other=0.0), tl.load(end, mask=now, other=0.0)
        if SIZE == 1:
            h0 = p00 * h0 + s0
        else:
            tl.store(target + width, h1, mask=now)
            p01 = tl.load(product + width, mask=now, other=0.0)
            p10 = tl.load(product + 2 * width, mask=now, other=0.0)
            p11 = tl.load(product + 3 * width, mask=now, other=0.0)
            s1 = tl.load(end + width, mask=now, other=0.0)
            h0, h1 = p00 * h0 + p01 * h1 + s0, p10 * h0 + p11 * h1 + s1


@no_type_check
def _fill(
    matrices,
    added,
    before,
    states,
    a_batch,
    a_time,
    a_row,
    a_column,
    b_batch,
    b_time,
    b_row,
    time,
    chunks,
    width,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Kernel: all states of a chunk, from the state before it."""
    batch, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < width
    a, b = matrices + batch * a_batch + channel, added + batch * b_batch + channel
    begin = before + (batch * chunks + chunk) * SIZE * width + channel
    h0 = tl.load(begin, mask=inside, other=0.0)
    h1 = h0
    if SIZE == 2:
        h1 = tl.load(begin + width, mask=inside, other=0.0)
    for step in range(CHUNK):
        place = chunk * CHUNK + step
        now = inside & (place < time)  # beyond the last step the matrix is one
        t = (time - 1 - place if REVERSE else place).to(tl.int64)
        a00 = tl.load(a + t * a_time, mask=now, other=1.0)
        b0 = tl.load(b + t * b_time, mask=now, other=0.0)
        target = states + (batch * time + t) * SIZE * width + channel
        if SIZE == 1:
            h0 = a00 * h0 + b0
        else:
            a01 = tl.load(a + t * a_time + a_column, mask=now, other=0.0)
            a10 = tl.load(a + t * a_time + a_row, mask=now, other=0.0)
            a11 = tl.load(a + t * a_time + a_row + a_column, mask=now, other=1.0)
            b1 = tl.load(b + t * b_time + b_row, mask=now, other=0.0)
            h0, h1 = a00 * h0 + a01 * h1 + b0, a10 * h0 + a11 * h1 + b1
            tl.store(target + width, h1, mask=now)
        tl.store(target, h0, mask=now)
