r"""Round to nearest: every weight is rounded to the nearest level, with a searched scale.

Notable here:
- needs no data and takes seconds; nearly lossless at 8 bits, poor at 2 bits
- "newton" clips each group if that lowers its squared error (the search of `pippin.nn.quantization.packed.quantize`);
  "absmax" maps the largest weight of a group to the largest level
- also used by GPTQ (for its scales) and AWQ (after rescaling)

Source: the levels and the clipping search are those of arXiv:2507.13575, section on 2-bit quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Float16, UInt8
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.language.language_model import LanguageModel
from pippin.nn.quantization import packed
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.packed import Bits
from pippin.shape.quantize.calibration import check_dense, is_outer, matrices
from pippin.shape.quantize.config import QuantizationConfig

_MAX_ELEMENTS = 1 << 22  # weights per step, which bounds the memory


def quantize(
    model: LanguageModel,
    config: QuantizationConfig,
    calibration: Tensor | None = None,
    *,
    bits: Mapping[str, Bits] | None = None,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, Codes]:
    """Codes of every matrix of a model, by name; the model is not changed.

    Args:
        model: a model with float weights (`pippin.load` with ``pack=False``).
        config: bits, levels, groups and the search of scales.
        calibration: not used; every method has this parameter.
        bits: bits of single matrices, if different from the config.
        on_matrix: called with the name of each finished matrix.

    Raises:
        InvalidArgument: packed weights, weights that are not finite or all zero, groups that do not fit.

    >>> from pippin.shape.quantize.config import QuantizationConfig
    >>> round_weight(torch.tensor([[-3.0, -1.0, 1.0, 3.0]]), 2, QuantizationConfig(group=4)).dense().tolist()
    [[-3.0, -1.0, 1.0, 3.0]]
    """
    check_dense(model.module)
    codes = {}
    for name, part in matrices(model.module).items():
        chosen = width(name, config, bits)
        if chosen is not None:
            codes[name] = round_weight(part.dense_weight(), chosen, config, name=name)
        on_matrix(name)
    return codes


def width(name: str, config: QuantizationConfig, bits: Mapping[str, Bits] | None) -> Bits | None:
    """Bits of one matrix; None if it is not quantized."""
    if name in config.skip:
        return None
    chosen = None if bits is None else bits.get(name)
    return chosen or (config.embedding_bits if is_outer(name) else config.bits)


def round_weight(
    weight: Float[Tensor, "rows columns"], bits: Bits, config: QuantizationConfig, *, name: str = "the weight"
) -> Codes:
    """One matrix, rounded to the nearest levels.

    Raises:
        InvalidArgument: weights that are not finite or all zero, or groups that do not fit.
    """
    weight, zero = weight.detach(), zero_of(bits, config)
    if config.init == "newton" and config.granularity != "tensor":
        _check(weight, name)
        group = group_size(weight.shape[1], config, name=name)
        return Codes(*packed.quantize(weight, bits, group, zero_point=zero, name=name), bits, zero)
    scales = find_scales(weight, bits, config, name=name)
    return Codes(nearest(weight, scales, bits, zero), scales, bits, zero)


def zero_of(bits: Bits, config: QuantizationConfig) -> float:
    """The zero point: the middle of the balanced levels, 2^(b-1) for the unbalanced ones."""
    return packed.middle_code(bits) if config.levels == "balanced" else float(1 << (bits - 1))


def group_size(columns: int, config: QuantizationConfig, *, name: str = "the weight") -> int:
    """Number of neighboring inputs that share a scale: the configured group, or the largest smaller one that fits.

    Raises:
        InvalidArgument: no group of 32 or more divides the columns.

    >>> from pippin.shape.quantize.config import QuantizationConfig
    >>> group_size(576, QuantizationConfig(group=128))
    64
    """
    if config.granularity != "group":
        return columns
    for group in (config.group, *(size for size in reversed(packed.GROUPS) if size < config.group)):
        if columns % group == 0:
            return group
    raise InvalidArgument(
        f"{name} has rows of {columns} weights, which groups of {config.group} do not divide; "
        "choose another group, or granularity='channel'"
    )


def find_scales(
    weight: Float[Tensor, "rows columns"], bits: Bits, config: QuantizationConfig, *, name: str = "the weight"
) -> Float16[Tensor, "scale_rows groups"]:
    """The scale of each row and group; with granularity "tensor" a single one.

    Raises:
        InvalidArgument: weights that are not finite or all zero, too large for half precision, or groups that do not
            fit.
    """
    rows, columns = weight.shape
    _check(weight, name)
    group = group_size(columns, config, name=name)
    if config.granularity == "tensor":
        weight, group = weight.reshape(1, -1), rows * columns
    zero = zero_of(bits, config)
    if config.init == "newton":
        return packed.quantize(weight, bits, group, zero_point=zero, name=name)[1]
    largest = weight.reshape(len(weight), -1, group).abs().amax(-1).float()
    scales = (largest / zero).half()
    if scales.isinf().any():
        raise InvalidArgument(f"{name} holds {float(largest.max()):.3g}, too large for half-precision scales")
    return scales


def clipped_share(weight: Float[Tensor, "rows columns"], codes: Codes) -> float:
    """The share of weights beyond the outermost levels of their codes by more than half a step."""
    scales = codes.scales.float()[..., None]
    inside = torch.where(scales == 0, 1.0, scales)
    at = weight.detach().float().view(len(weight), codes.scales.shape[1], -1) / inside + codes.zero_point
    return float(((at < -0.5) | (at > 2**codes.bits - 0.5)).float().mean())


def _check(weight: Tensor, name: str) -> None:
    if not weight.isfinite().all():
        raise InvalidArgument(f"{name} holds values that are not finite, so it cannot be quantized")
    if not weight.any():
        raise InvalidArgument(f"{name} is all zero, so it has no scale; leave it out with skip=({name!r},)")


def nearest(
    weight: Float[Tensor, "rows columns"], scales: Float16[Tensor, "scale_rows groups"], bits: Bits, zero: float
) -> UInt8[Tensor, "rows columns"]:
    """The code of the level nearest to each weight."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    divisor = scales.float()
    divisor = torch.where(divisor == 0, 1.0, divisor)[..., None]
    step = max(1, _MAX_ELEMENTS // columns)
    for start in range(0, rows, step):
        piece = weight[start : start + step].float().view(-1, scales.shape[1], columns // scales.shape[1])
        by = divisor if len(divisor) == 1 else divisor[start : start + step]
        codes[start : start + step] = (piece / by).add_(zero).round_().clamp_(0, 2**bits - 1).view(-1, columns)
    return codes
