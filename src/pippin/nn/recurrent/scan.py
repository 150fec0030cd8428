r"""Parallel scan of linear recurrences, $h_t = A_t h_{t-1} + b_t$, in chunks.

Notable here:
- $A_t$ is diagonal, or one small matrix for each channel, or one full matrix
- the steps of a chunk are sequential, but all chunks run together: about $3 \sqrt{T}$ calls instead of $T$. First the
  effect of each chunk on the state before it is computed, then the states between chunks, then all states
- the gradient is the same scan, backward in time, of the transposed matrices; it can be differentiated again
- half-precision numbers are scanned in float32, also under autocast, since products of many factors accumulate rounding

Source: Blelloch 1990, "Prefix sums and their applications", section 1.4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.triton import triton_scan

_UNROLL = 4
"""Maximum rows of a matrix for which products are written out, which keeps channels contiguous in memory."""


@checked
def linear_scan(
    a: Float[Tensor, "batch time ..."],
    b: Float[Tensor, "batch time *state"],
    *,
    initial: Float[Tensor, " batch *state"] | None = None,
    reverse: bool = False,
    chunk: PositiveInt | None = None,
) -> Float[Tensor, "batch time *state"]:
    r"""All states of $h_t = A_t h_{t-1} + b_t$ for t = 1 to T.

    Args:
        a: the matrices. Of the shape of ``b``, they are diagonal; ``batch time m m channels`` for a ``b`` of
            ``batch time m channels`` is an m x m matrix for each channel (a full matrix has one channel).
        b: the added vectors.
        initial: $h_0$; None for zeros.
        reverse: from the last step to the first, $h_t = A_t h_{t+1} + b_t$; ``initial`` comes after the last step.
        chunk: steps of a chunk on a CPU; None for about $\sqrt{T / 3}$. It changes the rounding and the time, not the
            result.

    Returns:
        The states, in the precision of ``b``.

    Raises:
        InvalidArgument: no steps, or shapes that do not fit together.

    >>> a, b = torch.full((1, 4, 1), 0.5), torch.ones(1, 4, 1)
    >>> linear_scan(a, b).flatten().tolist()
    [1.0, 1.5, 1.75, 1.875]
    >>> linear_scan(a, b, initial=torch.full((1, 1), 8.0), reverse=True).flatten().tolist()
    [2.375, 2.75, 3.5, 5.0]
    """
    _check(a, b, initial)
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    before = None if initial is None else initial.to(wide)
    with torch.autocast(b.device.type, enabled=False):
        h: Tensor = _Scan.apply(a.to(wide), b.to(wide), before, reverse, chunk)  # type: ignore[no-untyped-call]
    return h.to(b.dtype)


def adjoint_scan(
    a: Float[Tensor, "batch time ..."],
    g: Float[Tensor, "batch time *state"],
    after: Float[Tensor, " batch *state"] | None = None,
) -> Float[Tensor, "batch time *state"]:
    r"""The adjoint of a forward scan: $\lambda_t = g_t + A_{t+1}^\top \lambda_{t+1}$.

    Args:
        a: the matrices of the scan; the first is not used.
        g: the direct gradient of each state.
        after: the gradient of the last state from steps beyond it, already multiplied by their matrix.
    """
    last = g[:, -1] if after is None else g[:, -1] + after
    if g.shape[1] == 1:
        return last[:, None]
    turned = a[:, 1:] if a.ndim == g.ndim else a[:, 1:].transpose(2, 3)
    return torch.cat([linear_scan(turned, g[:, :-1], initial=last, reverse=True), last[:, None]], 1)


def times(a: Float[Tensor, "*batch"], h: Float[Tensor, "*rows"], diagonal: bool) -> Float[Tensor, "*rows"]:
    """``A h`` for one step or many; the last dimensions are those of `linear_scan`."""
    if diagonal:
        return a * h
    return (a * h.unsqueeze(-3)).sum(-2)


class _Scan(torch.autograd.Function):
    """The scan; saves the matrices and the states."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, initial: Tensor | None, reverse: bool, chunk: int | None) -> Tensor:
        h = scan(a, b, initial, reverse=reverse, chunk=chunk)
        ctx.save_for_backward(a, h, initial)
        ctx.reverse = reverse
        return h

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        a, h, initial = ctx.saved_tensors
        (g,) = outer
        if ctx.reverse:
            a, h, g = a.flip(1), h.flip(1), g.flip(1)
        diagonal = a.ndim == h.ndim
        worth = adjoint_scan(a, g)
        first = h.new_zeros(h[:, :1].shape) if initial is None else initial[:, None]
        before = torch.cat([first, h[:, :-1]], 1)
        of_a = worth * before if diagonal else worth.unsqueeze(3) * before.unsqueeze(2)
        turned = a[:, 0] if diagonal else a[:, 0].transpose(1, 2)
        of_initial = None if initial is None else times(turned, worth[:, 0], diagonal)
        if ctx.reverse:
            of_a, worth = of_a.flip(1), worth.flip(1)
        return of_a, worth, of_initial, None, None


def scan(
    a: Tensor,
    b: Tensor,
    initial: Tensor | None,
    *,
    reverse: bool = False,
    chunk: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `linear_scan`, without gradients and checks; all three arguments have the same precision."""
    if triton_scan.available(a, b):
        found = triton_scan.scan(a, b, initial, reverse=reverse)
        return found if out is None else out.copy_(found)
    time = b.shape[1]
    chunk = max(1, round(math.sqrt(time / 3))) if chunk is None else min(chunk, time)
    h = torch.empty_like(b, memory_format=torch.contiguous_format) if out is None else out
    whole = time // chunk * chunk
    state = b.new_zeros(b[:, 0].shape) if initial is None else initial
    if chunk == 1 or whole == chunk:
        _walk(a, b, state, h, range(time), reverse)
    elif reverse:
        if whole < time:
            _walk(a, b, state, h, range(whole, time), reverse)
            state = h[:, whole]
        _in_chunks(a[:, :whole], b[:, :whole], h[:, :whole], state, chunk, reverse)
    else:
        _in_chunks(a[:, :whole], b[:, :whole], h[:, :whole], state, chunk, reverse)
        if whole < time:
            _walk(a, b, h[:, whole - 1], h, range(whole, time), reverse)
    return h


def _walk(a: Tensor, b: Tensor, state: Tensor, h: Tensor, steps: range, reverse: bool) -> None:
    """Sequential scan into ``h``."""
    diagonal = a.ndim == b.ndim
    for t in reversed(steps) if reverse else steps:
        state = _step(a[:, t], state, b[:, t], h[:, t], diagonal)


def _in_chunks(a: Tensor, b: Tensor, h: Tensor, state: Tensor, chunk: int, reverse: bool) -> None:
    """All chunks in parallel, into ``h``; the number of steps is a multiple of the chunk."""
    diagonal = a.ndim == b.ndim
    a, b, h = (part.unflatten(1, (-1, chunk)) for part in (a, b, h))  # dimensions 1 and 2: chunk, step within it
    chunks, steps = range(b.shape[1]), range(b.shape[2])
    first, *others = reversed(steps) if reverse else steps
    through, added = a[:, :, first].clone(), b[:, :, first].clone()
    for t in others:
        # element by element, a result may overwrite its operand
        added = _step(a[:, :, t], added, b[:, :, t], added if diagonal else None, diagonal)
        through = through.mul_(a[:, :, t]) if diagonal else _compose(a[:, :, t], through)
    before = torch.empty_like(added, memory_format=torch.contiguous_format)
    for k in reversed(chunks) if reverse else chunks:
        before[:, k] = state
        state = _step(through[:, k], state, added[:, k], None, diagonal)
    now = before
    for t in reversed(steps) if reverse else steps:
        now = _step(a[:, :, t], now, b[:, :, t], h[:, :, t], diagonal)


def _step(a: Tensor, h: Tensor, b: Tensor, out: Tensor | None, diagonal: bool) -> Tensor:
    """``a h + b``."""
    if diagonal:
        return torch.addcmul(b, a, h, out=out)
    rows = b.shape[-2]
    if rows > _UNROLL:
        product = (a.movedim(-1, -3) @ h.movedim(-1, -2).unsqueeze(-1)).squeeze(-1).movedim(-1, -2)
        return torch.add(product, b, out=out)
    for k in range(rows):
        b = torch.addcmul(b, a[..., k, :], h[..., k : k + 1, :], out=out if k == rows - 1 else None)
    return b


def _compose(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, channel by channel."""
    if a.shape[-2] > _UNROLL:
        return (a.movedim(-1, -3) @ b.movedim(-1, -3)).movedim(-3, -1)
    c = a[..., 0:1, :] * b[..., 0:1, :, :]
    for k in range(1, a.shape[-2]):
        c = torch.addcmul(c, a[..., k : k + 1, :], b[..., k : k + 1, :, :])
    return c


def _check(a: Tensor, b: Tensor, initial: Tensor | None) -> None:
    shape = tuple(b.shape)
    if len(shape) < 3 or shape[1] == 0:
        raise InvalidArgument(
            f"b of shape {shape} has no steps to scan; it is batch, time and at least one of the state"
        )
    square = len(shape) == 4 and tuple(a.shape) == (*shape[:3], shape[2], shape[3])
    if tuple(a.shape) != shape and not square:
        raise InvalidArgument(
            f"a of shape {tuple(a.shape)} does not fit b of shape {shape}: give the same shape for diagonal matrices, "
            "or (batch, time, m, m, channels) for a b of (batch, time, m, channels)"
        )
    if initial is not None and tuple(initial.shape) != (shape[0], *shape[2:]):
        raise InvalidArgument(f"the initial state has shape {tuple(initial.shape)}, not {(shape[0], *shape[2:])}")
