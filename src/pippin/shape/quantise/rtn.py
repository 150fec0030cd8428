r"""Round to nearest: every weight takes the nearest level, and the scale is the only thing that is searched.

Notable here:
- needs no data, and takes seconds; at 8 bits there is nothing left to gain, at 2 bits little is left of the model
- "newton" clips each group where that lowers its squared error (the search of `pippin.nn.packed.quantise`); "absmax"
  lets the largest weight of a group be the largest level
- the other methods end here too: GPTQ takes its scales from `find_scales`, AWQ rounds what it has rescaled

Source: the levels and the search for the clip are those of arXiv:2507.13575, section on 2-bit quantisation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Float16, UInt8
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.language.load import LanguageModel
from pippin.nn import packed
from pippin.nn.codes import Codes
from pippin.shape.quantise.calibration import check_dense, is_outer, matrices
from pippin.shape.quantise.config import QuantisationSettings

_PIECE = 1 << 22  # weights rounded at a time


def quantise(
    model: LanguageModel,
    settings: QuantisationSettings,
    calibration: Tensor | None = None,
    *,
    bits: Mapping[str, int] | None = None,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, Codes]:
    """Codes of every matrix of a model, by name; the model is left as it is.

    Args:
        model: float weights (`pippin.load` with ``pack=False``).
        settings: bits, levels, groups, and how scales are found.
        calibration: not needed; here because every method takes it.
        bits: the width of single matrices, where it is not that of the settings.
        on_matrix: told the name of each matrix that is done.

    Raises:
        InvalidArgument: packed weights, weights that are not finite or all zero, groups that do not fit.

    >>> from pippin.shape.quantise.config import QuantisationSettings
    >>> round_weight(torch.tensor([[-3.0, -1.0, 1.0, 3.0]]), 2, QuantisationSettings(group=4)).dense().tolist()
    [[-3.0, -1.0, 1.0, 3.0]]
    """
    check_dense(model.module)
    codes = {}
    for name, part in matrices(model.module).items():
        chosen = width(name, settings, bits)
        if chosen is not None:
            codes[name] = round_weight(part.dense_weight(), chosen, settings, name=name)
        on_matrix(name)
    return codes


def width(name: str, settings: QuantisationSettings, bits: Mapping[str, int] | None) -> int | None:
    """Bits of one matrix; None for one that is left exact."""
    if name in settings.skip:
        return None
    chosen = None if bits is None else bits.get(name)
    return chosen or (settings.embedding_bits if is_outer(name) else settings.bits)


def round_weight(
    weight: Float[Tensor, "rows columns"], bits: int, settings: QuantisationSettings, *, name: str = "the weight"
) -> Codes:
    """One matrix, rounded to the nearest levels.

    Raises:
        InvalidArgument: weights that are not finite or all zero, or groups that do not fit.
    """
    weight, zero = weight.detach(), zero_of(bits, settings)
    if settings.init == "newton" and settings.granularity != "tensor":
        _check(weight, name)
        group = group_size(weight.shape[1], settings, name=name)
        return Codes(*packed.quantise(weight, bits, group, zero=zero, name=name), bits, zero)
    scales = find_scales(weight, bits, settings, name=name)
    return Codes(nearest(weight, scales, bits, zero), scales, bits, zero)


def zero_of(bits: int, settings: QuantisationSettings) -> float:
    """The code that stands for 0: the middle of the balanced levels, 2^(b-1) of the unbalanced ones."""
    return packed.zero_point(bits) if settings.levels == "balanced" else float(1 << (bits - 1))


def group_size(columns: int, settings: QuantisationSettings, *, name: str = "the weight") -> int:
    """Neighbouring inputs that share a scale: the group asked for, or the largest smaller one that fits.

    Raises:
        InvalidArgument: no group of 32 or more divides the columns.

    >>> from pippin.shape.quantise.config import QuantisationSettings
    >>> group_size(576, QuantisationSettings(group=128))
    64
    """
    if settings.granularity != "group":
        return columns
    for group in (settings.group, *(size for size in reversed(packed.GROUPS) if size < settings.group)):
        if columns % group == 0:
            return group
    raise InvalidArgument(
        f"{name} has rows of {columns} weights, which groups of {settings.group} do not divide; "
        "choose another group, or granularity='channel'"
    )


def find_scales(
    weight: Float[Tensor, "rows columns"], bits: int, settings: QuantisationSettings, *, name: str = "the weight"
) -> Float16[Tensor, "scale_rows groups"]:
    """The scale of each row and group; with granularity "tensor" a single one.

    Raises:
        InvalidArgument: weights that are not finite or all zero, too large for half precision, or groups that do not
            fit.
    """
    rows, columns = weight.shape
    _check(weight, name)
    group = group_size(columns, settings, name=name)
    if settings.granularity == "tensor":
        weight, group = weight.reshape(1, -1), rows * columns
    zero = zero_of(bits, settings)
    if settings.init == "newton":
        return packed.quantise(weight, bits, group, zero=zero, name=name)[1]
    largest = weight.reshape(len(weight), -1, group).abs().amax(-1).float()
    scales = (largest / zero).half()
    if scales.isinf().any():
        raise InvalidArgument(f"{name} holds {float(largest.max()):.3g}, too large for half-precision scales")
    return scales


def clipped_share(weight: Float[Tensor, "rows columns"], codes: Codes) -> float:
    """The share of weights beyond the outermost levels of their codes by more than half a step."""
    scales = codes.scales.float()[..., None]
    inside = torch.where(scales == 0, 1.0, scales)
    at = weight.detach().float().view(len(weight), codes.scales.shape[1], -1) / inside + codes.zero
    return float(((at < -0.5) | (at > 2**codes.bits - 0.5)).float().mean())


def _check(weight: Tensor, name: str) -> None:
    if not weight.isfinite().all():
        raise InvalidArgument(f"{name} holds values that are not finite, so it cannot be quantised")
    if not weight.any():
        raise InvalidArgument(f"{name} is all zero, so it has no scale; leave it out with skip=({name!r},)")


def nearest(
    weight: Float[Tensor, "rows columns"], scales: Float16[Tensor, "scale_rows groups"], bits: int, zero: float
) -> UInt8[Tensor, "rows columns"]:
    """The code of the level nearest to each weight."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    divisor = scales.float()
    divisor = torch.where(divisor == 0, 1.0, divisor)[..., None]
    step = max(1, _PIECE // columns)
    for start in range(0, rows, step):
        piece = weight[start : start + step].float().view(-1, scales.shape[1], columns // scales.shape[1])
        by = divisor if len(divisor) == 1 else divisor[start : start + step]
        codes[start : start + step] = (piece / by).add_(zero).round_().clamp_(0, 2**bits - 1).view(-1, columns)
    return codes
