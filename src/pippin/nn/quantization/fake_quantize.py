r"""Fake quantization for quantization-aware training: rounded weights with straight-through gradients.

$\tilde W = s\,(\mathrm{clamp}(\mathrm{round}(W / s + z), q_{min}, q_{max}) - z)$ with $s = f \max|W| / q_{max}$ and a
learned factor $f > 0$ for each scale.

Notable here:
- the scale is rounded to half precision in the forward pass, as files store it, so that the trained weights are
  bit-identical to the exported ones
- a custom autograd function processes blocks that stay in the processor's cache; it saves only references to weight and
  factors, and supports several backward passes
- the parameter is the logarithm of $f$, so $f$ stays positive; $\max|W|$ is recomputed each time, without a gradient
- the initial factors come from a Newton search of the clipping range, as $\max|W|$ is a poor scale at two bits

Source: arXiv:2507.13575, section on 2-bit quantization-aware training; the gradient of the scale is that of LSQ,
arXiv:1902.08153, eq. 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Float16
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.packed import Bits

Granularity = Literal["tensor", "channel", "group"]
MAX_OFFSET = 0.3
"""Largest distance of a weight from the level of its given code in `FakeQuantizer.begin`, in steps; 0.5 is the edge."""
LARGEST = torch.finfo(torch.float16).max
_PIECE = 1 << 17  # weights processed at a time on a CPU
_steps = [0]  # steps of all optimizers, as torch's fused ones change a parameter without increasing its version


def _stepped(*_: object) -> None:
    _steps[0] += 1


register_optimizer_step_post_hook(_stepped)


@checked
@dataclass(frozen=True)
class Levels:
    """The quantization levels, in units of the scale.

    Args:
        bits: 2, 3, 4 or 8.
        balanced: whether levels are half-integers symmetric around 0 ({-1.5, -0.5, 0.5, 1.5} at two bits); otherwise
            they are integers, with one more below 0 than above ({-2, -1, 0, 1}).

    >>> Levels(2).values, Levels(2, balanced=False).values
    ((-1.5, -0.5, 0.5, 1.5), (-2.0, -1.0, 0.0, 1.0))
    """

    bits: Bits
    balanced: bool = True

    @property
    def shift(self) -> float:
        """The shift z: 0.5 for balanced levels, 0 otherwise."""
        return 0.5 if self.balanced else 0.0

    @property
    def low(self) -> int:
        """The smallest integer before the shift, q_min."""
        return -(1 << self.bits - 1) + self.balanced

    @property
    def high(self) -> int:
        """The largest integer before the shift, q_max."""
        return self.low + (1 << self.bits) - 1

    @property
    def zero(self) -> float:
        """The zero point of `Codes` with these levels."""
        return self.shift - self.low

    @property
    def values(self) -> tuple[float, ...]:
        """All levels in ascending order."""
        return tuple(q - self.shift for q in range(self.low, self.high + 1))


class FakeQuantizer(nn.Module):
    """Rounds a matrix to quantization levels, with a learned factor for each scale.

    Args:
        weight: the matrix to be quantized; finite.
        levels: the quantization levels.
        granularity: one scale for the "tensor", for each row ("channel"), or for each ``group_size`` of a row.
        group_size: number of consecutive inputs that share a scale, for the granularity "group".
        init: "newton" initializes scales by minimizing the squared error, "absmax" by the largest weight.
        gain: factor of the gradients of weight and factors.
        keep: whether to cache the result until weight or factors change, for a matrix that is used several times in a
            forward pass.
        name: name of the weight in error messages.

    Raises:
        InvalidArgument: a group size that does not divide the rows, or a weight that is all zeros, not finite, or too
            large for half-precision scales.

    >>> weight = torch.tensor([[-3.0, -1.0, 1.0, 3.1]])
    >>> quantize = FakeQuantizer(weight, Levels(2), "tensor")
    >>> quantize(weight).tolist(), quantize.codes(weight).codes.tolist()
    ([[-3.0439453125, -1.0146484375, 1.0146484375, 3.0439453125]], [[0, 1, 2, 3]])
    """

    def __init__(
        self,
        weight: Float[Tensor, "rows columns"],
        levels: Levels,
        granularity: Granularity = "group",
        group_size: int = 64,
        *,
        init: Literal["newton", "absmax"] = "newton",
        gain: float = 1.0,
        keep: bool = False,
        name: str = "the weight",
    ) -> None:
        super().__init__()
        weight = weight.detach()
        self.levels, self.gain, self.keep = levels, gain, keep
        self.shape = scale_shape(weight.shape, granularity, group_size, name=name)
        largest = largest_weights(weight, self.shape)
        if not largest.isfinite().all():
            raise InvalidArgument(f"{name} holds values that are not finite, so it cannot be quantized")
        if not largest.any():
            raise InvalidArgument(f"{name} is all zeros, so it has no scale")
        if float(largest.max()) / levels.high > LARGEST:
            raise InvalidArgument(f"{name} holds {float(largest.max()):.3g}, too large for half-precision scales")
        factors = torch.ones_like(largest)
        if init == "newton":
            scales = newton_scales(weight, levels, self.shape)
            factors = torch.where(scales > 0, scales * levels.high / torch.where(largest > 0, largest, 1.0), 1.0)
        # one-dimensional, so that optimizers do not treat it as a matrix, and may give it another learning rate
        self.log_factor = nn.Parameter(factors.log().flatten())
        self._kept: tuple[tuple[int, ...], Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}  # the cache belongs to the original's weight

    @property
    def factors(self) -> Float[Tensor, " scales"]:
        """The learned factors f, one for each scale."""
        return self.log_factor.detach().exp()

    def forward(self, weight: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        """The quantized weight; in the dtype of autocast, if that is enabled."""
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        factor = self.log_factor
        state = (
            weight.data_ptr(),
            weight._version,
            factor.data_ptr(),
            factor._version,
            int(torch.is_grad_enabled()),
            dtype.itemsize,
            _steps[0],
        )
        if self.keep and self._kept is not None and self._kept[0] == state:
            return self._kept[1]
        rounded: Tensor = _FakeQuantize.apply(weight, factor, self.levels, self.shape, self.gain, dtype)  # type: ignore[no-untyped-call]
        self._kept = (state, rounded) if self.keep else None
        return rounded

    def scales(self, weight: Float[Tensor, "rows columns"]) -> Float16[Tensor, "scale_rows groups"]:
        """The scales in half precision, as they are stored."""
        return _scales(weight.detach(), self.log_factor.detach(), self.levels, self.shape)[1]

    @torch.no_grad()
    def codes(self, weight: Float[Tensor, "rows columns"]) -> Codes:
        """The codes to export; ``codes(weight).dense()`` and ``forward(weight)`` are bit-identical."""
        scales = self.scales(weight)
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        for rows, scale in _pieces(weight, scales.float()):
            piece = weight[rows].float().view(len(weight[rows]), self.shape[1], -1)
            rounded = _round(piece, scale, self.levels).clamp_(self.levels.low, self.levels.high)
            codes[rows] = rounded.sub_(self.levels.low).view(codes[rows].shape).to(torch.uint8)
        return Codes(codes, scales, self.levels.bits, self.levels.zero)

    @torch.no_grad()
    def begin(self, weight: Float[Tensor, "rows columns"], codes: Codes) -> None:
        """Change weight and factors in place so that they give these codes and scales, to start training there.

        Weights further than `MAX_OFFSET` steps from the level of their code move to that distance. Without a margin,
        weights that another method did not round to the nearest level would lie at the edge between two levels, and
        the first training step would change all of their codes.

        The scale of a group of zeros cannot be changed; it stays 0.

        Args:
            weight: the weight, changed in place.
            codes: codes of the same shape, with the same levels and shape of scales.
        """
        scales = codes.scales.to(weight.device).float()
        top = 2**self.levels.bits - 1
        for rows, scale in _pieces(weight, scales):
            code = codes.codes[rows].to(weight.device).float().view(len(weight[rows]), self.shape[1], -1)
            v = code - codes.zero_point
            # the outermost codes are unbounded on the outside
            low = torch.where(code == 0, -torch.inf, (v - MAX_OFFSET) * scale)
            high = torch.where(code == top, torch.inf, (v + MAX_OFFSET) * scale)
            piece = weight[rows].view(code.shape)
            piece.copy_(torch.minimum(torch.maximum(piece, low.to(piece.dtype)), high.to(piece.dtype)))
        largest = largest_weights(weight, self.shape).float()
        reached = (largest > 0) & (scales > 0)
        factors = torch.where(reached, scales * self.levels.high / torch.where(reached, largest, 1.0), 1.0)
        self.log_factor.copy_(factors.log().flatten())

    @torch.no_grad()
    def clipped(self, weight: Float[Tensor, "rows columns"]) -> float:
        """The share of weights beyond the outermost levels by more than half a step, from 0 to 1."""
        scales, beyond = self.scales(weight).float(), 0
        for rows, scale in _pieces(weight, scales):
            q = _round(weight[rows].float().view(len(weight[rows]), self.shape[1], -1), scale, self.levels)
            beyond += int(((q < self.levels.low) | (q > self.levels.high)).sum())
        return beyond / weight.numel()


@checked
def scale_shape(
    shape: torch.Size | tuple[int, int], granularity: Granularity, group_size: PositiveInt, *, name: str = "the weight"
) -> tuple[int, int]:
    """The numbers of rows and groups of a matrix's scales.

    Raises:
        InvalidArgument: a group size that does not divide the rows.

    >>> scale_shape((8, 128), "group", 64), scale_shape((8, 128), "channel", 64), scale_shape((8, 128), "tensor", 64)
    ((8, 2), (8, 1), (1, 1))
    """
    rows, columns = shape
    if granularity == "tensor":
        return 1, 1
    if granularity == "channel":
        return rows, 1
    if columns % group_size:
        raise InvalidArgument(f"{name} has rows of {columns} weights, which groups of {group_size} do not divide")
    return rows, columns // group_size


def largest_weights(
    weight: Float[Tensor, "rows columns"], shape: tuple[int, int]
) -> Float[Tensor, "scale_rows groups"]:
    """The largest magnitude among the weights that share a scale."""
    grouped = weight.view(len(weight), shape[1], -1)
    largest = torch.maximum(grouped.amax(-1), grouped.amin(-1).neg_())  # many times faster than aminmax
    return largest if shape[0] == len(weight) else largest.amax(0, keepdim=True)


@torch.no_grad()
def newton_scales(
    weight: Float[Tensor, "rows columns"], levels: Levels, shape: tuple[int, int], *, iterations: int = 10
) -> Float[Tensor, "scale_rows groups"]:
    r"""Scales with a small squared error, by alternating rounding and Newton steps, from max|W| / q_max.

    For fixed levels v the error $\|W - s v\|^2$ is quadratic in s, so that the Newton step is exact:
    $s = \langle W, v \rangle / \langle v, v \rangle$.

    Args:
        weight: finite weights.
        levels: the quantization levels.
        shape: shape of the scales, see `scale_shape`.
        iterations: number of alternations.

    Source: the search of the clipping range in arXiv:2507.13575, whose steps are not published; these are our own.

    >>> weight = torch.randn(1, 400_000, generator=torch.Generator().manual_seed(0))
    >>> round(float(newton_scales(weight, Levels(2), (1, 1))), 2)
    1.0
    """
    scales = largest_weights(weight, shape).float() / levels.high
    for _ in range(iterations):
        along, square = torch.zeros_like(scales), torch.zeros_like(scales)
        for rows, scale in _pieces(weight, scales):
            piece = weight[rows].float().view(len(weight[rows]), shape[1], -1)
            v = _round(piece, scale, levels).clamp_(levels.low, levels.high).sub_(levels.shift)
            for sums, part in ((along, (piece * v).sum(-1)), (square, v.square_().sum(-1))):
                if shape[0] == len(weight):
                    sums[rows] = part
                else:
                    sums += part.sum(0, keepdim=True)
        scales = torch.where(square > 0, along / torch.where(square > 0, square, 1.0), scales)
    return scales


def _scales(
    weight: Tensor, log_factor: Tensor, levels: Levels, shape: tuple[int, int]
) -> tuple[Float[Tensor, "scale_rows groups"], Float16[Tensor, "scale_rows groups"]]:
    """The learned scales, and the scales in half precision as they are stored."""
    exact = log_factor.float().exp().view(shape) * (largest_weights(weight, shape).float() / levels.high)
    return exact, exact.clamp(max=LARGEST).half()


def _pieces(weight: Tensor, scales: Tensor) -> list[tuple[slice, Tensor]]:
    """Blocks of rows, and their scales (rows or 1, groups, 1); a scale of 0 becomes 1."""
    safe = torch.where(scales == 0, 1.0, scales)[:, :, None]
    step = max(1, _PIECE // weight.shape[1]) if weight.device.type == "cpu" else len(weight)
    parts = [slice(start, min(start + step, len(weight))) for start in range(0, len(weight), step)]
    return [(rows, safe[rows] if len(scales) == len(weight) else safe) for rows in parts]


def _round(piece: Tensor, scale: Tensor, levels: Levels) -> Tensor:
    """round(W / s + z), as a new tensor."""
    return torch.div(piece, scale).add_(levels.shift).round_()


class _FakeQuantize(torch.autograd.Function):
    """Rounding with a straight-through gradient inside the clipping range.

    Only references to the leaves are saved, so that there may be several backward passes (such as for the pieces of an
    output matrix); it is checked that they did not change in between.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        log_factor: Tensor,
        levels: Levels,
        shape: tuple[int, int],
        gain: float,
        dtype: torch.dtype,
    ) -> Tensor:
        _, stored = _scales(weight, log_factor, levels, shape)
        ctx.leaves = weight, log_factor
        ctx.versions = weight._version, log_factor._version
        ctx.levels, ctx.shape, ctx.gain = levels, shape, gain
        rounded = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        exact = stored.to(weight.dtype)
        for (rows, safe), (_, scale) in zip(_pieces(weight, exact), _true_scales(weight, exact), strict=True):
            piece = weight[rows].view(len(weight[rows]), shape[1], -1)
            q = _round(piece, safe, levels).clamp_(levels.low, levels.high).sub_(levels.shift)
            rounded[rows] = q.mul_(scale).view(rounded[rows].shape)
        return rounded

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        weight, log_factor = ctx.leaves
        if (weight._version, log_factor._version) != ctx.versions:
            raise RuntimeError("a fake-quantized weight was changed between its forward and its backward pass")
        levels, shape, grad = ctx.levels, ctx.shape, outer[0]
        learned, stored = _scales(weight, log_factor, levels, shape)
        inner = torch.empty_like(weight)
        slopes = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        for rows, safe in _pieces(weight, stored.to(weight.dtype)):
            piece = weight[rows].view(len(weight[rows]), shape[1], -1)
            wanted = grad[rows].to(weight.dtype).reshape(piece.shape)
            u = torch.div(piece, safe)
            q = torch.add(u, levels.shift).round_()
            v = q.clamp(levels.low, levels.high)
            inside = torch.eq(v, q, out=q)  # 1 or 0, in the dtype of the weight
            torch.mul(wanted, inside, out=inner[rows].view(piece.shape))
            slope = v.sub_(levels.shift).addcmul_(u, inside, value=-1.0).mul_(wanted).sum(-1)
            if shape[0] == len(weight):
                slopes[rows] = slope
            else:
                slopes += slope.sum(0, keepdim=True)
        # d s / d log f = s; a stored scale of 0 has no gradient
        factors = (slopes * learned.to(weight.dtype) * (stored != 0)).flatten().to(log_factor.dtype)
        if ctx.gain != 1.0:
            inner.mul_(ctx.gain)
            factors.mul_(ctx.gain)
        return inner, factors, None, None, None, None


def _true_scales(weight: Tensor, scales: Tensor) -> list[tuple[slice, Tensor]]:
    """As `_pieces`, with scales of 0 left as they are."""
    return [
        (rows, scales[rows][:, :, None] if len(scales) == len(weight) else scales[:, :, None])
        for rows, _ in _pieces(weight, scales)
    ]


def gain_of(weight: Float[Tensor, "rows columns"]) -> float:
    """1 / sqrt(number of neurons): how much the gradients of a fake-quantized matrix are scaled down.

    Source: attributed to arXiv:2507.13575 by the reproduction Anemll/qwen3_apple_style_2bit_qat_lora.
    """
    return 1.0 / math.sqrt(len(weight))
