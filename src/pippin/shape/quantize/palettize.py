r"""Palettization: groups of rows or columns share a small table of values, found by weighted k-means.

Notable here:
- one-dimensional k-means needs no distances: values are sorted once, and an iteration is a few searches in their
  cumulative sums, so millions of weights take well under a second
- k-means weights each value by its expected squared gradient, its importance for the loss
- with ``average_bits``, each matrix gets 2 or 4 bits, allocated by the largest reduction of the loss per bit

Source: arXiv:2407.21075, section on optimization (groups of 16 rows or columns, 2 and 4 bits mixed to 3.5 to 3.7);
the weighting by squared gradients is that of arXiv:2306.07629, eq. 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from jaxtyping import Float, Float16, Int, UInt8
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.language.language_model import LanguageModel
from pippin.nn.quantization.packed import Bits
from pippin.nn.quantization.palette import Palette
from pippin.shape.quantize import mixed_precision
from pippin.shape.quantize.calibration import check_dense, is_outer, matrices
from pippin.shape.quantize.config import QuantizationConfig

_MAX_ELEMENTS = 1 << 21  # weights per step, which bounds the memory
_LARGEST = torch.finfo(torch.float16).max


@checked
@dataclass(frozen=True)
class PalettizationConfig:
    """Config of palettization.

    Args:
        bits: bits of an index, for the matrices inside the layers.
        average_bits: bits of an index on average; each matrix then gets 2 or 4, and ``bits`` is not used. None for
            ``bits``.
        axis: whether "rows" or "columns" share a table.
        group: number of rows or columns that share a table.
        embedding_bits: bits of the embedding and the output matrix; None leaves them in full precision.
        skip: names of layers that are not palettized.
    """

    bits: Bits = 4
    average_bits: Annotated[float, Ge(2), Le(4)] | None = None
    axis: Literal["rows", "columns"] = "rows"
    group: PositiveInt = 16
    embedding_bits: Bits | None = 4
    skip: tuple[str, ...] = ()


def palettize(
    model: LanguageModel,
    config: PalettizationConfig,
    calibration: Int[Tensor, "rows length"] | None = None,
    *,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, Palette]:
    """Indices and tables of every matrix of a model, by the name of its layer; the model is not changed.

    Args:
        model: a model with float weights (`pippin.load` with ``pack=False``).
        config: bits, groups and layers to skip.
        calibration: token ids (see `calibration_ids`) for the squared gradients; None for equal importance.
        on_matrix: called with the name of each finished matrix.

    Raises:
        InvalidArgument: packed weights, weights that are not finite, an average without calibration.
    """
    check_dense(model.module)
    if config.average_bits is not None and calibration is None:
        raise InvalidArgument(f"an average of {config.average_bits} bits needs calibration text to choose widths by")
    shared = QuantizationConfig(skip=config.skip)
    importance = {} if calibration is None else mixed_precision.squared_gradients(model, shared, calibration)
    parts = {name: part for name, part in matrices(model.module).items() if name not in config.skip}
    if config.embedding_bits is None:
        parts = {name: part for name, part in parts.items() if not is_outer(name)}
    weights = {name: part.dense_weight().float() for name, part in parts.items()}
    widths: dict[str, Bits | None] = {
        name: config.embedding_bits if is_outer(name) else config.bits for name in weights
    }
    if config.average_bits is not None:
        widths |= _choose_bits(weights, importance, config)
    found = {}
    for name, weight in weights.items():
        bits = widths[name]
        assert bits is not None
        found[name] = palette_of(weight, bits, config.axis, config.group, importance.get(name), name=name)
        on_matrix(name)
    return found


@checked
def palette_of(
    weight: Float[Tensor, "rows columns"],
    bits: Bits,
    axis: Literal["rows", "columns"] = "rows",
    group: int = 16,
    importance: Float[Tensor, "rows columns"] | None = None,
    *,
    max_iterations: int = 12,
    name: str = "the weight",
) -> Palette:
    """Indices and tables of one matrix.

    Args:
        weight: a matrix of finite values.
        bits: bits of an index.
        axis: whether rows or columns share a table.
        group: number of rows or columns that share a table; the last group may be smaller.
        importance: weight of each value in k-means, at least 0; None for equal weights.
        max_iterations: iterations of k-means.
        name: name of the weight in error messages.

    Raises:
        InvalidArgument: values that are not finite or too large for half precision.

    >>> found = palette_of(torch.tensor([[0.0, 0.1, 7.0, 7.1, 3.0, -2.0, -2.0, 3.0]]), bits=2, group=1)
    >>> [round(value, 2) for value in found.tables[0].tolist()]
    [-2.0, 0.05, 3.0, 7.05]
    """
    if not weight.isfinite().all() or float(weight.abs().max()) > _LARGEST:
        raise InvalidArgument(f"{name} holds values that half precision cannot; it cannot be put into tables")
    transposed = axis == "columns"
    values = weight.detach().float().T.contiguous() if transposed else weight.detach().float()
    if importance is None:
        importance = torch.ones_like(values)
    else:
        importance = importance.float().T.contiguous() if transposed else importance.float()
    step = max(1, _MAX_ELEMENTS // (group * values.shape[1])) * group
    found = []
    for start in range(0, len(values), step):
        rows, row_weights = values[start : start + step], importance[start : start + step]
        complete = len(rows) // group * group  # rows in whole groups
        for part in (slice(0, complete), slice(complete, len(rows))):
            if len(rows[part]):
                count = max(1, len(rows[part]) // group)
                found.append(_kmeans(rows[part], row_weights[part], count, bits, max_iterations))
    indices, tables = (torch.cat(part) for part in zip(*found, strict=True))
    return Palette(indices.T.contiguous() if transposed else indices, tables, bits, axis, group)


def _choose_bits(
    weights: Mapping[str, Tensor], importance: Mapping[str, Tensor], config: PalettizationConfig
) -> dict[str, Bits]:
    """2 or 4 bits for each matrix inside the layers, by the expected increase of the loss."""
    assert config.average_bits is not None
    costs: dict[str, dict[Bits, float]] = {}
    for name, weight in weights.items():
        if name in importance:
            costs[name] = {}
            widths: tuple[Bits, ...] = (2, 4)
            for bits in widths:
                palette = palette_of(weight, bits, config.axis, config.group, importance[name], name=name)
                costs[name][bits] = float((importance[name] * (palette.dense() - weight).square_()).sum())
    return mixed_precision.allocate(costs, {name: weights[name].numel() for name in costs}, config.average_bits)


def _kmeans(
    values: Float[Tensor, "rows columns"],
    importance: Float[Tensor, "rows columns"],
    groups: int,
    bits: int,
    max_iterations: int,
) -> tuple[UInt8[Tensor, "rows columns"], Float16[Tensor, "groups entries"]]:
    """Weighted k-means of each group's values."""
    entries, flat = 2**bits, values.reshape(groups, -1)
    ordered, order = flat.sort(dim=1)
    weights = importance.reshape(groups, -1).gather(1, order).double()
    # a small constant, so that a group without any importance has means
    weights = weights + 1e-3 * weights.mean(1, keepdim=True) + 1e-30
    ordered = ordered.double()
    mass, moment = _cumulative(weights), _cumulative(weights * ordered)
    # initial centers: the mean of the quantiles and an even spacing over the range
    shares = (torch.arange(entries, dtype=torch.float64) + 0.5) / entries
    quantiles = ordered[:, (shares * (flat.shape[1] - 1)).long()]
    centers = 0.5 * quantiles + 0.5 * (ordered[:, :1] + shares * (ordered[:, -1:] - ordered[:, :1]))
    for _ in range(max_iterations):
        between = (centers[:, 1:] + centers[:, :-1]) / 2
        ends = torch.searchsorted(ordered, between.contiguous())
        ends = torch.cat([torch.zeros_like(ends[:, :1]), ends, torch.full_like(ends[:, :1], flat.shape[1])], 1)
        weight = mass.gather(1, ends).diff(dim=1)
        centers = torch.where(weight > 0, moment.gather(1, ends).diff(dim=1) / weight.clamp(min=1e-300), centers)
        centers = centers.sort(dim=1).values
    tables = centers.half()
    between = (tables[:, 1:].float() + tables[:, :-1].float()) / 2
    indices = torch.searchsorted(between.contiguous(), flat.contiguous()).to(torch.uint8)
    return indices.view(values.shape), tables


def _cumulative(x: Float[Tensor, "groups values"]) -> Float[Tensor, "groups ends"]:
    """Cumulative sums that start with 0."""
    return torch.cat([torch.zeros_like(x[:, :1]), x.cumsum(1)], 1)
