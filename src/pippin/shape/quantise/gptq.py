r"""GPTQ: weights are rounded one input after the other, and those that are left make up for what went wrong.

Notable here:
- the error is that of the outputs on calibration text, $\lVert (W - \hat W) X \rVert^2 = \sum_r e_r H e_r^\top$ with
  $H = E[x x^\top]$: rounding input $j$ leaves an error that the later inputs can cancel, and the row $j$ of the
  Cholesky factor of $H^{-1}$ says by how much each of them moves
- a group's scale is searched when its first input is reached, among weights that have moved already; with
  ``act_order`` (the inputs of most energy first) all scales are found before, so that groups stay neighbours in memory
- after the last input the scales are solved for once more, all groups of a row together, which can only lower the error
- each layer sees what the layers before it give once they are quantised, and inside a layer each stage sees the ones
  before it

Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1; the scales at the end are least squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Float16, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.language.load import LanguageModel
from pippin.nn.codes import Codes
from pippin.nn.embedding import Embedding
from pippin.nn.linear import Linear
from pippin.shape.quantise.calibration import Walk, check_calibration, is_outer, matrices, stages
from pippin.shape.quantise.config import QuantisationSettings
from pippin.shape.quantise.rtn import find_scales, group_size, round_weight, width, zero_of

_BLOCK = 128  # inputs whose effect on the later ones is summed up before it is applied
_PIECE = 1 << 23  # numbers at a time, where scales are solved for


def quantise(
    model: LanguageModel,
    settings: QuantisationSettings,
    calibration: Int[Tensor, "rows length"],
    *,
    bits: Mapping[str, int] | None = None,
    damping: float = 0.01,
    act_order: bool = True,
    refit: bool = True,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, Codes]:
    """Codes of every matrix of a model, by name; the model is left as it is.

    The embedding is rounded to nearest: it reads no activations. An output matrix of its own is solved like the others.

    Args:
        model: float weights (`pippin.load` with ``pack=False``).
        settings: bits, levels and groups.
        calibration: token ids, see `calibration_ids`; some ten thousand tokens are enough.
        bits: the width of single matrices, where it is not that of the settings.
        damping: share of the mean energy that every input gets on top, against directions the text never shows.
        act_order: whether the inputs of most energy are rounded first.
        refit: whether the scales are solved for once more at the end.
        on_matrix: told the name of each matrix that is done.

    Raises:
        InvalidArgument: packed weights, weights that are not finite or all zero, groups that do not fit, ids that are
            no text of the model, a damping that is not above zero.
    """
    if not damping > 0:
        raise InvalidArgument(f"damping is {damping}; it must be above 0, for the inverse to exist")
    module = model.module
    check_calibration(module, calibration)
    parts: dict[str, Linear | Embedding] = matrices(module)
    codes: dict[str, Codes] = {}
    walk = Walk(module, calibration)

    def solved(name: str, weight: Tensor, moments: Tensor | None) -> Codes | None:
        chosen, found = width(name, settings, bits), None
        if chosen is not None and moments is None:
            found = round_weight(weight, chosen, settings, name=name)
        elif chosen is not None and moments is not None:
            how: dict[str, Any] = {"damping": damping, "act_order": act_order, "refit": refit, "name": name}
            found = solve(weight, moments, chosen, settings, **how)
        on_matrix(name)
        return found

    for index in range(len(module.layers)):
        with walk.layer(index) as layer:
            for names in stages(layer):
                moments = walk.moments(index, names)
                for short in names:
                    part = layer.get_submodule(short)
                    assert isinstance(part, Linear)
                    weight, name = part.dense_weight(), f"layers.{index}.{short}"
                    if (found := solved(name, weight, moments[short])) is not None:
                        codes[name] = found
                        part.weight = nn.Parameter(found.dense().to(weight.dtype))
    for name, outer in parts.items():
        if is_outer(name):
            found = solved(name, outer.dense_weight(), walk.outer_moments() if name == "lm_head" else None)
            codes |= {} if found is None else {name: found}
    return codes


def solve(
    weight: Float[Tensor, "rows columns"],
    moments: Float[Tensor, "columns columns"],
    bits: int,
    settings: QuantisationSettings,
    *,
    damping: float = 0.01,
    act_order: bool = True,
    refit: bool = True,
    name: str = "the weight",
) -> Codes:
    r"""One matrix, with the least error of its outputs that rounding input by input finds.

    With $U$ the upper Cholesky factor of $H^{-1}$, rounding input $j$ leaves $\epsilon = (w_j - \hat w_j) / U_{jj}$,
    and every later input becomes $w_k - \epsilon\,U_{jk}$.

    Never worse than rounding to nearest by more than the damping accounts for: where it would be, that is returned.

    Args:
        weight: the matrix.
        moments: second moments of its inputs; all zero where nothing is known, which gives rounding to nearest.
        bits: 2, 3, 4 or 8.
        settings: levels and groups.
        damping: as for `quantise`.
        act_order: as for `quantise`.
        refit: as for `quantise`.
        name: what to call the matrix in an error.

    Source: arXiv:2210.17323, eq. 2 and algorithm 1.
    """
    weight = weight.detach()
    plain = round_weight(weight, bits, settings, name=name)
    energy = moments.diagonal()
    if not energy.any():
        return plain
    damped = moments.double() + torch.eye(len(moments), dtype=torch.float64, device=moments.device) * (
        damping * energy.double().mean()
    )
    order = energy.argsort(descending=True) if act_order else None
    given = plain.scales if act_order or settings.granularity == "tensor" else None
    found = _round_in_order(weight, damped, bits, settings, order, given, name)
    if refit and settings.granularity != "tensor":
        found = refitted(weight, damped, found)
    return min(found, plain, key=lambda codes: output_error(weight, codes, damped))


def output_error(weight: Tensor, codes: Codes, moments: Float[Tensor, "columns columns"]) -> float:
    r"""Squared error of the outputs per token, $\sum_r e_r H e_r^\top$ with $e = W - \hat W$."""
    wrong = weight.detach().to(moments.dtype) - codes.dense().to(moments.dtype)
    return float(((wrong @ moments) * wrong).sum())


def _round_in_order(
    weight: Tensor,
    moments: Float[Tensor, "columns columns"],
    bits: int,
    settings: QuantisationSettings,
    order: Int[Tensor, columns] | None,
    given: Float16[Tensor, "scale_rows groups"] | None,
    name: str,
) -> Codes:
    """The loop of the paper's algorithm 1; ``given`` scales stay, others are searched as their group is reached."""
    rows, columns = weight.shape
    group, zero, top = group_size(columns, settings, name=name), zero_of(bits, settings), 2**bits - 1
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
            scales[:, start // group] = _group_scales(piece, bits, settings, group)
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


def _group_scales(piece: Tensor, bits: int, settings: QuantisationSettings, group: int) -> Tensor:
    """Scales of one group of every row; ones where a row is all zero."""
    if not piece.any():
        return torch.ones(len(piece), dtype=torch.float16, device=piece.device)
    scales = find_scales(piece, bits, QuantisationSettings(group=group, levels=settings.levels, init=settings.init))
    return scales[:, 0]


def _factor(moments: Float[Tensor, "columns columns"]) -> Float[Tensor, "columns columns"]:
    """The upper Cholesky factor of the inverse, in double precision."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def refitted(weight: Tensor, moments: Float[Tensor, "columns columns"], codes: Codes) -> Codes:
    r"""The same codes with the scales that give the least error of the outputs.

    For fixed levels $v_g$ the error is quadratic in the scales of a row: $\sum_h s_h\, v_g^\top H_{gh} v_h =
    v_g^\top H_g w$ for each group $g$.
    """
    (rows, columns), groups = codes.shape, codes.scales.shape[1]
    blocks = moments.float().view(groups, codes.group, columns)
    scales = torch.empty(rows, groups, device=weight.device)
    step = max(1, _PIECE // (columns * groups))
    for start in range(0, rows, step):
        levels = (codes.codes[start : start + step].float() - codes.zero).view(-1, groups, codes.group)
        through = (levels.transpose(0, 1) @ blocks).transpose(0, 1)
        left = (through.unflatten(2, (groups, -1)) * levels[:, None]).sum(-1).double()
        right = (through * weight[start : start + step, None].float()).sum(-1).double()
        ridge = 1e-9 * left.diagonal(dim1=1, dim2=2).mean(-1) + 1e-30
        left.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
        scales[start : start + step] = torch.linalg.solve(left, right)
    kept = (scales.abs() < 6e4) & scales.isfinite()
    return Codes(codes.codes, torch.where(kept, scales, codes.scales.float()).half(), codes.bits, codes.zero)
