r"""Palettisation: groups of rows or columns share a small table of values, found by weighted k-means.

Notable here:
- in one dimension k-means needs no distances: values are sorted once, and a round is a few searches in their running
  sums, so a matrix of millions takes well under a second
- a weight that the loss feels more pulls more: the weights of the means are expected squared gradients
- with an average asked for, each matrix gets 2 or 4 bits, those first whose loss falls most for a bit

Source: arXiv:2407.21075, section on optimisation (groups of 16 rows or columns, 2 and 4 bits mixed to 3.5 to 3.7);
the weighting by squared gradients is that of arXiv:2306.07629, eq. 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float16, Int, UInt8
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.language.load import LanguageModel
from pippin.nn.packed import BITS
from pippin.nn.palette import Palette
from pippin.shape.quantise import mixed
from pippin.shape.quantise.calibration import check_dense, is_outer, matrices
from pippin.shape.quantise.config import QuantisationSettings

_PIECE = 1 << 21  # weights at a time
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class PaletteSettings:
    """How matrices are turned into indices and tables.

    Args:
        bits: of an index, inside the layers: 2, 3, 4 or 8.
        average: bits of an index on average; each matrix then gets 2 or 4, and ``bits`` is not used. None for ``bits``.
        axis: whether "rows" or "columns" share a table.
        group: how many of them do.
        embedding_bits: of the embedding and the output matrix; None leaves them exact.
        skip: names of layers that are left exact.

    Raises:
        InvalidArgument: a value that is none of these.
    """

    bits: int = 4
    average: float | None = None
    axis: Literal["rows", "columns"] = "rows"
    group: int = 16
    embedding_bits: int | None = 4
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("bits", self.bits), ("embedding_bits", self.embedding_bits)):
            if value not in BITS and not (name == "embedding_bits" and value is None):
                raise InvalidArgument(f"{name} is {value!r}; choose one of {', '.join(map(str, BITS))}")
        if self.average is not None and not 2 <= self.average <= 4:
            raise InvalidArgument(f"average is {self.average}; matrices get 2 or 4 bits, so it lies between")
        if self.axis not in ("rows", "columns") or self.group < 1:
            raise InvalidArgument(f"groups of {self.group} {self.axis!r}; give at least 1 of rows or columns")


def palettise(
    model: LanguageModel,
    settings: PaletteSettings,
    calibration: Int[Tensor, "rows length"] | None = None,
    *,
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, Palette]:
    """Indices and tables of every matrix of a model, by the name of its layer; the model is left as it is.

    Args:
        model: float weights (`pippin.load` with ``pack=False``).
        settings: bits, groups, what to leave out.
        calibration: token ids (see `calibration_ids`) on which gradients are taken; None weighs all weights alike.
        on_matrix: told the name of each matrix that is done.

    Raises:
        InvalidArgument: packed weights, weights that are not finite, an average without calibration.
    """
    check_dense(model.module)
    if settings.average is not None and calibration is None:
        raise InvalidArgument(f"an average of {settings.average} bits needs calibration text to choose widths by")
    shared = QuantisationSettings(skip=settings.skip)
    felt = {} if calibration is None else mixed.energies(model, shared, calibration)
    parts = {name: part for name, part in matrices(model.module).items() if name not in settings.skip}
    if settings.embedding_bits is None:
        parts = {name: part for name, part in parts.items() if not is_outer(name)}
    weights = {name: part.dense_weight().float() for name, part in parts.items()}
    widths = {name: settings.embedding_bits if is_outer(name) else settings.bits for name in weights}
    if settings.average is not None:
        widths |= _choose(weights, felt, settings)
    found = {}
    for name, weight in weights.items():
        bits = widths[name]
        assert bits is not None
        found[name] = palette_of(weight, bits, settings.axis, settings.group, felt.get(name), name=name)
        on_matrix(name)
    return found


def palette_of(
    weight: Float[Tensor, "rows columns"],
    bits: int,
    axis: Literal["rows", "columns"] = "rows",
    group: int = 16,
    felt: Float[Tensor, "rows columns"] | None = None,
    *,
    rounds: int = 12,
    name: str = "the weight",
) -> Palette:
    """Indices and tables of one matrix.

    Args:
        weight: finite.
        bits: of an index.
        axis: whether rows or columns share a table.
        group: how many of them do; the last group may be smaller.
        felt: how much the loss feels each weight, at least 0; None for all alike.
        rounds: of k-means.
        name: what to call the weight in an error.

    Raises:
        InvalidArgument: values that are not finite or too large for half precision, other bits.

    >>> found = palette_of(torch.tensor([[0.0, 0.1, 7.0, 7.1, 3.0, -2.0, -2.0, 3.0]]), bits=2, group=1)
    >>> [round(value, 2) for value in found.tables[0].tolist()]
    [-2.0, 0.05, 3.0, 7.05]
    """
    if bits not in BITS:
        raise InvalidArgument(f"bits is {bits!r}; choose one of {', '.join(map(str, BITS))}")
    if not weight.isfinite().all() or float(weight.abs().max()) > _LARGEST:
        raise InvalidArgument(f"{name} holds values that half precision cannot; it cannot be put into tables")
    turned = axis == "columns"
    values = weight.detach().float().T.contiguous() if turned else weight.detach().float()
    pull = None if felt is None else (felt.float().T.contiguous() if turned else felt.float())
    step = max(1, _PIECE // (group * values.shape[1])) * group
    pieces = []
    for start in range(0, len(values), step):
        piece = values[start : start + step]
        heard = None if pull is None else pull[start : start + step]
        whole = len(piece) // group * group
        for part in (slice(0, whole), slice(whole, len(piece))):
            if len(piece[part]):
                count = max(1, len(piece[part]) // group)
                pieces.append(_means(piece[part], None if heard is None else heard[part], count, bits, rounds))
    indices, tables = (torch.cat(part) for part in zip(*pieces, strict=True))
    return Palette(indices.T.contiguous() if turned else indices, tables, bits, axis, group)


def _choose(weights: Mapping[str, Tensor], felt: Mapping[str, Tensor], settings: PaletteSettings) -> dict[str, int]:
    """2 or 4 bits for each matrix inside the layers, by what each would cost."""
    assert settings.average is not None
    costs: dict[str, dict[int, float]] = {}
    for name, weight in weights.items():
        if name in felt:
            costs[name] = {}
            for bits in (2, 4):
                wrong = palette_of(weight, bits, settings.axis, settings.group, felt[name], name=name).dense() - weight
                costs[name][bits] = float((felt[name] * wrong.square_()).sum())
    return mixed.allocate(costs, {name: weights[name].numel() for name in costs}, settings.average)


def _means(
    values: Float[Tensor, "rows columns"], felt: Tensor | None, groups: int, bits: int, rounds: int
) -> tuple[UInt8[Tensor, "rows columns"], Float16[Tensor, "groups entries"]]:
    """Weighted k-means of each group's values."""
    entries, flat = 2**bits, values.reshape(groups, -1)
    ordered, order = flat.sort(dim=1)
    pull = torch.ones_like(ordered) if felt is None else felt.reshape(groups, -1).gather(1, order)
    # a little for everyone, so that a group that nothing feels still has means
    pull = pull.double() + 1e-3 * pull.double().mean(1, keepdim=True) + 1e-30
    ordered = ordered.double()
    mass, moment = _running(pull), _running(pull * ordered)
    # the beginnings: equal shares of the cube root of the density would be best; equal shares between it and the range
    shares = (torch.arange(entries, dtype=torch.float64) + 0.5) / entries
    places = (shares * (flat.shape[1] - 1)).long()
    centres = 0.5 * ordered[:, places] + 0.5 * (ordered[:, :1] + shares * (ordered[:, -1:] - ordered[:, :1]))
    for _ in range(rounds):
        between = (centres[:, 1:] + centres[:, :-1]) / 2
        ends = torch.searchsorted(ordered, between.contiguous())
        ends = torch.cat([torch.zeros_like(ends[:, :1]), ends, torch.full_like(ends[:, :1], flat.shape[1])], 1)
        weight = mass.gather(1, ends).diff(dim=1)
        centres = torch.where(weight > 0, moment.gather(1, ends).diff(dim=1) / weight.clamp(min=1e-300), centres)
        centres = centres.sort(dim=1).values
    tables = centres.half()
    between = (tables[:, 1:].float() + tables[:, :-1].float()) / 2
    indices = torch.searchsorted(between.contiguous(), flat.contiguous()).to(torch.uint8)
    return indices.view(values.shape), tables


def _running(x: Float[Tensor, "groups values"]) -> Float[Tensor, "groups ends"]:
    """Running sums that begin with 0."""
    return torch.cat([torch.zeros_like(x[:, :1]), x.cumsum(1)], 1)
