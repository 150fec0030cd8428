r"""GPTQ: columns are rounded one after the other, and the remaining ones are updated to compensate for the error.

Notable here:
- minimizes the error of the outputs on calibration text, $\lVert (W - \hat W) X \rVert^2 = \sum_r e_r H e_r^\top$ with
  $H = E[x x^\top]$: row $j$ of the Cholesky factor of $H^{-1}$ is the update of the later columns per error of column
  $j$
- the scale of a group is searched when its first column is reached, on updated weights; with ``act_order`` (columns by
  descending second moment) all scales are searched first, so that groups stay contiguous in memory
- at the end the scales of each row are refitted jointly by least squares, which cannot increase the error
- each layer is calibrated on the outputs of the quantized layers before it; within a layer, each stage on those of the
  stages before it

Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1; the scales at the end are least squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Float16, Int
from torch import Tensor, nn

from pippin.core.checks import PositiveFloat, checked
from pippin.language.language_model import LanguageModel
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.linear import Linear
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.packed import Bits
from pippin.shape.quantize.calibration import LayerwiseCalibration, check_calibration, is_outer, matrices, stages
from pippin.shape.quantize.config import QuantizationConfig
from pippin.shape.quantize.rtn import find_scales, group_size, round_weight, width, zero_of

_BLOCK = 128  # columns whose updates of later columns are applied together
_MAX_ELEMENTS = 1 << 23  # per step of refitting scales, which bounds its memory


@checked
def quantize(
    model: LanguageModel,
    config: QuantizationConfig,
    calibration: Int[Tensor, "rows length"],
    *,
    bits: Mapping[str, Bits] | None = None,
    damping: PositiveFloat = 0.01,
    act_order: bool = True,
    refit: bool = True,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, Codes]:
    """Codes of every matrix of a model, by name; the model is not changed.

    The embedding is rounded to nearest, as it has no activations as inputs. An untied output matrix is quantized with
    GPTQ.

    Args:
        model: a model with float weights (`pippin.load` with ``pack=False``).
        config: bits, levels and groups.
        calibration: token ids, see `calibration_ids`; about ten thousand tokens are enough.
        bits: bits of single matrices, if different from the config.
        damping: added to the diagonal of the second moments, relative to its mean, so that the inverse exists.
        act_order: whether columns are rounded by descending second moment.
        refit: whether the scales are refitted at the end.
        on_matrix: called with the name of each finished matrix.

    Raises:
        InvalidArgument: packed weights, weights that are not finite or all zero, groups that do not fit, ids that are
            not valid for the model, a damping that is not above zero.
    """
    module = model.module
    check_calibration(module, calibration)
    parts: dict[str, Linear | TokenEmbedding] = matrices(module)
    codes: dict[str, Codes] = {}
    calibrated = LayerwiseCalibration(module, calibration)

    def solved(name: str, weight: Tensor, moments: Tensor | None) -> Codes | None:
        chosen, found = width(name, config, bits), None
        if chosen is not None and moments is None:
            found = round_weight(weight, chosen, config, name=name)
        elif chosen is not None and moments is not None:
            how: dict[str, Any] = {"damping": damping, "act_order": act_order, "refit": refit, "name": name}
            found = solve(weight, moments, chosen, config, **how)
        on_matrix(name)
        return found

    for index in range(len(module.layers)):
        with calibrated.layer(index) as layer:
            for names in stages(layer):
                moments = calibrated.moments(index, names)
                for short in names:
                    part = layer.get_submodule(short)
                    assert isinstance(part, Linear)
                    weight, name = part.dense_weight(), f"layers.{index}.{short}"
                    if (found := solved(name, weight, moments[short])) is not None:
                        codes[name] = found
                        part.weight = nn.Parameter(found.dense().to(weight.dtype))
    for name, outer in parts.items():
        if is_outer(name):
            found = solved(name, outer.dense_weight(), calibrated.outer_moments() if name == "lm_head" else None)
            codes |= {} if found is None else {name: found}
    return codes


def solve(
    weight: Float[Tensor, "rows columns"],
    moments: Float[Tensor, "columns columns"],
    bits: Bits,
    config: QuantizationConfig,
    *,
    damping: float = 0.01,
    act_order: bool = True,
    refit: bool = True,
    name: str = "the weight",
) -> Codes:
    r"""Quantize one matrix with GPTQ.

    With $U$ the upper Cholesky factor of $H^{-1}$, rounding column $j$ leaves $\epsilon = (w_j - \hat w_j) / U_{jj}$,
    and every later column becomes $w_k - \epsilon\,U_{jk}$.

    Returns rounding to nearest if that has the smaller (damped) error of the outputs.

    Args:
        weight: the matrix.
        moments: second moments of its inputs; all zero for rounding to nearest.
        bits: 2, 3, 4 or 8.
        config: levels and groups.
        damping: as for `quantize`.
        act_order: as for `quantize`.
        refit: as for `quantize`.
        name: name of the matrix in error messages.

    Source: arXiv:2210.17323, eq. 2 and algorithm 1.
    """
    weight = weight.detach()
    plain = round_weight(weight, bits, config, name=name)
    energy = moments.diagonal()
    if not energy.any():
        return plain
    damped = moments.double() + torch.eye(len(moments), dtype=torch.float64, device=moments.device) * (
        damping * energy.double().mean()
    )
    order = energy.argsort(descending=True) if act_order else None
    given = plain.scales if act_order or config.granularity == "tensor" else None
    found = _round_in_order(weight, damped, bits, config, order, given, name)
    if refit and config.granularity != "tensor":
        found = refitted(weight, damped, found)
    return min(found, plain, key=lambda codes: output_error(weight, codes, damped))


def output_error(weight: Tensor, codes: Codes, moments: Float[Tensor, "columns columns"]) -> float:
    r"""Squared error of the outputs per token, $\sum_r e_r H e_r^\top$ with $e = W - \hat W$."""
    error = weight.detach().to(moments.dtype) - codes.dense().to(moments.dtype)
    return float(((error @ moments) * error).sum())


def _round_in_order(
    weight: Tensor,
    moments: Float[Tensor, "columns columns"],
    bits: Bits,
    config: QuantizationConfig,
    order: Int[Tensor, columns] | None,
    given: Float16[Tensor, "scale_rows groups"] | None,
    name: str,
) -> Codes:
    """The loop of the paper's algorithm 1; ``given`` scales are fixed, others are searched when a group is reached."""
    rows, columns = weight.shape
    group, zero, top = group_size(columns, config, name=name), zero_of(bits, config), 2**bits - 1
    left = weight.float().clone() if order is None else weight.float()[:, order]
    places = torch.arange(columns, device=weight.device) if order is None else order
    factor = _factor(moments if order is None else moments[order][:, order]).to(left.dtype)
    scales = torch.empty(rows, columns // group, dtype=torch.float16, device=weight.device)
    if given is not None:
        scales[:] = given
    codes = torch.empty(columns, rows, dtype=torch.uint8, device=weight.device)
    block = min(group, _BLOCK)
    groups = (places // group).tolist()
    for start in range(0, columns, block):
        end = min(start + block, columns)
        if given is None and start % group == 0:
            piece = left[:, start : start + group]
            scales[:, start // group] = _group_scales(piece, bits, config, group)
        now, errors = left[:, start:end].T.contiguous(), torch.empty(end - start, rows, device=weight.device)
        along = factor[start:end, start:end]
        steps = scales.float()
        steps = torch.where(steps == 0, 1.0, steps)
        for i in range(end - start):
            step = steps[:, groups[start + i]]
            level = (now[i] / step).add_(zero).round_().clamp_(0, top)
            codes[start + i] = level
            errors[i] = (now[i] - (level - zero) * step) / along[i, i]
            now[i + 1 :] -= along[i, i + 1 :, None] * errors[i]
        left[:, end:] -= errors.T @ factor[start:end, end:]
    ordered = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    ordered[:, places] = codes.T
    return Codes(ordered, scales, bits, zero)


def _group_scales(piece: Tensor, bits: Bits, config: QuantizationConfig, group: int) -> Tensor:
    """Scales of one group of every row; ones where a row is all zero."""
    if not piece.any():
        return torch.ones(len(piece), dtype=torch.float16, device=piece.device)
    scales = find_scales(piece, bits, QuantizationConfig(group=group, levels=config.levels, init=config.init))
    return scales[:, 0]


def _factor(moments: Float[Tensor, "columns columns"]) -> Float[Tensor, "columns columns"]:
    """The upper Cholesky factor of the inverse, in double precision."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def refitted(weight: Tensor, moments: Float[Tensor, "columns columns"], codes: Codes) -> Codes:
    r"""The same codes with the scales of least squared error of the outputs.

    For fixed levels $v_g$ the error is quadratic in the scales of a row: $\sum_h s_h\, v_g^\top H_{gh} v_h =
    v_g^\top H_g w$ for each group $g$.
    """
    (rows, columns), groups = codes.shape, codes.scales.shape[1]
    blocks = moments.float().view(groups, codes.group_size, columns)
    scales = torch.empty(rows, groups, device=weight.device)
    step = max(1, _MAX_ELEMENTS // (columns * groups))
    for start in range(0, rows, step):
        levels = (codes.codes[start : start + step].float() - codes.zero_point).view(-1, groups, codes.group_size)
        through = (levels.transpose(0, 1) @ blocks).transpose(0, 1)  # (rows, groups, columns): v_g H_g
        left = (through.unflatten(2, (groups, -1)) * levels[:, None]).sum(-1).double()
        right = (through * weight[start : start + step, None].float()).sum(-1).double()
        ridge = 1e-9 * left.diagonal(dim1=1, dim2=2).mean(-1) + 1e-30
        left.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
        scales[start : start + step] = torch.linalg.solve(left, right)
    valid = (scales.abs() < 6e4) & scales.isfinite()  # representable in float16
    return Codes(codes.codes, torch.where(valid, scales, codes.scales.float()).half(), codes.bits, codes.zero_point)
