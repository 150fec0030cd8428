r"""Paged attention of one new token per sequence over keys and values in blocks, in Triton.

Notable here:
- nothing is gathered: a program follows the block table of its sequence, so a step reads each key and value once
- the query heads of a KV head are computed together, as the rows of a small matrix product
- a long sequence is split among programs; each stores a weighted sum with its largest score and its sum of weights, and
  a second kernel combines them: $y = \sum_s e^{m_s - m} a_s / \sum_s e^{m_s - m} l_s$
- keys and values may be 8-bit codes with a scale for each token and head

Source: the split is that of Flash-Decoding, Dao et al. 2023; the running maximum is that of Milakov and Gimelshein,
arXiv:1805.02867.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, no_type_check

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from pippin.nn.triton.triton_matvec import TritonWeight, jit

# Triton's language module, after import; kernels look it up here.
tl: Any = None

_TILE: Final = 64
"""Tokens in a tile of a program."""
_PROGRAMS: Final = 264
"""Programs that keep a large GPU busy: two for each of its multiprocessors."""
_EVERYTHING: Final = 1 << 30
"""Window size that stands for no window."""
_LEAST_SPLIT: Final = 256
"""Minimum number of tokens for a program."""


def available(device: torch.device) -> bool:
    """Whether the kernels can run on this device."""
    return device.type == "cuda" and TritonWeight.missing() is None


def paged_attention(
    q: Float[Tensor, "batch heads 1 head_dim"],
    values: Shaped[Tensor, "2 kv_heads slots head_dim"],
    scales: Float[Tensor, "2 kv_heads slots"] | None,
    tables: Int[Tensor, "batch blocks"],
    positions: Int[Tensor, "batch 1"],
    *,
    block: int = 16,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Tensor, "batch 1 all_heads"]:
    """Attention of each query over the tokens of its sequence up to its own position.

    Args:
        q: queries; ``heads`` is a multiple of ``kv_heads``.
        values: keys, then values, of all cache positions; contiguous.
        scales: factors of int8 codes.
        tables: the blocks of each sequence, in order.
        positions: positions of the queries.
        block: cache positions in a block.
        window: a query sees itself and the ``window - 1`` tokens before it; None for all.
        scale: multiplier on the scores; None for ``head_dim ** -0.5``.

    Raises:
        MissingDependency: Triton is not installed.
    """
    batch, heads, _, dim = q.shape
    kv_heads, slots = values.shape[1:3]
    splits, span = _split(batch * kv_heads, tables.shape[1] * block)
    q = q.reshape(batch, heads, dim).contiguous()
    sums = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=q.device)
    peaks, weights = torch.empty(2, batch, heads, splits, dtype=torch.float32, device=q.device)
    y = torch.empty(batch, 1, heads * dim, dtype=q.dtype, device=q.device)
    groups, size = heads // kv_heads, max(16, 1 << (dim - 1).bit_length())
    look, join = _kernels()
    look[(batch, kv_heads, splits)](
        *(q, *values, *(values if scales is None else scales), tables, positions, sums, peaks, weights),
        *(tables.stride(0), positions.stride(0), kv_heads, slots, span),
        *(_EVERYTHING if window is None else window, dim**-0.5 if scale is None else scale),
        DIM=dim,
        SIZE=size,
        GROUPS=groups,
        ROWS=max(16, 1 << (groups - 1).bit_length()),
        TILE=_TILE if q.element_size() < 4 else _TILE // 2,  # which is what shared memory holds
        BLOCK=block,
        SPLITS=splits,
        CODES=scales is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
    )
    join[(batch * heads,)](sums, peaks, weights, y, DIM=dim, SIZE=size, SPLITS=splits)
    return y


def _split(programs: int, tokens: int) -> tuple[int, int]:
    """The number of parts (a power of two) for sequences of up to ``tokens`` tokens, and the tokens of a part."""
    splits = 1
    while splits * programs < _PROGRAMS and splits * _LEAST_SPLIT < tokens:
        splits *= 2
    return splits, -(-tokens // (splits * _TILE)) * _TILE


@cache
def _kernels() -> tuple[Any, ...]:
    return jit(globals(), _look, _join)


@no_type_check
def _look(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    positions,
    sums,
    peaks,
    weights,
    table_stride,
    position_stride,
    kv_heads,
    slots,
    span,
    window,
    factor,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    CODES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Kernel: attention of the queries of one KV head of one sequence over one part of it."""
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, d = tl.arange(0, ROWS), tl.arange(0, SIZE)
    place = (sequence * kv_heads + head) * GROUPS + row
    query_in = (row < GROUPS)[:, None] & (d < DIM)[None, :]
    query = tl.load(q + place[:, None] * DIM + d[None, :], mask=query_in, other=0.0)
    position = tl.load(positions + sequence * position_stride).to(tl.int32)
    first = tl.maximum(position - window + 1, 0)
    low = tl.maximum(split * span, first // TILE * TILE)
    high = tl.minimum(split * span + span, position + 1)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(low, high, TILE):
        # every tile holds a visible token, so no maximum is taken over nothing
        token = start + tl.arange(0, TILE)
        seen = (token >= first) & (token < high)
        block = tl.load(tables + sequence * table_stride + token // BLOCK, mask=seen, other=0).to(tl.int64)
        slot = head.to(tl.int64) * slots + block * BLOCK + token % BLOCK
        inside = seen[:, None] & (d < DIM)[None, :]
        key = tl.load(keys + slot[:, None] * DIM + d[None, :], mask=inside, other=0)
        value = tl.load(values + slot[:, None] * DIM + d[None, :], mask=inside, other=0)
        if CODES:
            key_scale = tl.load(key_scales + slot, mask=seen, other=0.0)
            value_scale = tl.load(value_scales + slot, mask=seen, other=0.0)
            key = key.to(tl.float32) * key_scale[:, None]
            value = value.to(tl.float32) * value_scale[:, None]
        key, value = key.to(query.dtype), value.to(query.dtype)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * factor
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        share, fade = tl.exp(score - higher[:, None]), tl.exp(peak - higher)
        weight = weight * fade + tl.sum(share, 1)
        total = total * fade[:, None] + tl.dot(share.to(value.dtype), value, input_precision=PRECISION)
        peak = higher
    target = place * SPLITS + split
    tl.store(sums + target[:, None] * DIM + d[None, :], total, mask=query_in)
    tl.store(peaks + target, peak, mask=row < GROUPS)
    tl.store(weights + target, weight, mask=row < GROUPS)


@no_type_check
def _join(sums, peaks, weights, y, DIM: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Kernel: combines the parts of one query head of one sequence."""
    place = tl.program_id(0)
    split, d = tl.arange(0, SPLITS), tl.arange(0, SIZE)
    peak = tl.load(peaks + place * SPLITS + split)
    fade = tl.exp(peak - tl.max(peak, 0))
    weight = tl.sum(tl.load(weights + place * SPLITS + split) * fade, 0)
    part = sums + (place * SPLITS + split)[:, None] * DIM + d[None, :]
    total = tl.sum(tl.load(part, mask=(d < DIM)[None, :], other=0.0) * fade[:, None], 0)
    tl.store(y + place * DIM + d, (total / weight).to(y.dtype.element_ty), mask=d < DIM)
