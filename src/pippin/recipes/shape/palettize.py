"""Palettization: store the matrices of a language model as indices into small lookup tables.

Notable here:
- palettization saves disk space but no time or memory, since weights are decoded when they are loaded;
  `pippin.recipes.shape.quantize` saves all of these
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pippin.core import progress
from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.recipes import options
from pippin.recipes.options import StrPath, paths
from pippin.recipes.shape.quantize import sizes_on_disk

if TYPE_CHECKING:
    from pippin.core.report import Report


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a run."""

    model: options.Model
    out: Annotated[StrPath, Option("Folder of the result.", None, "PATH")]
    bits: Annotated[Literal[2, 3, 4, 8] | None, Option("Of an index: 2, 3, 4 or 8; 4 without it.")] = None
    average_bits: Annotated[
        PositiveFloat | None,
        Option("In place of --bits: 2 or 4 for each matrix, so many on average (3.5, say).", metavar="BITS"),
    ] = None
    data: Annotated[
        tuple[StrPath, ...],
        Option("Text on which weights are weighed by their gradients; may be repeated.", metavar="PATH"),
    ] = ()
    axis: Annotated[Literal["rows", "columns"], Option("What shares a table: rows or columns.")] = "rows"
    group_size: Annotated[PositiveInt, Option("Rows or columns that share a table.")] = 16
    embedding_bits: Annotated[Literal[2, 3, 4, 8, 16], Option("2, 3, 4, 8, or 16 for exact.")] = 4
    calibration_tokens: Annotated[PositiveInt, Option("Tokens of the text that gradients are taken on.")] = 4096


@dataclass(frozen=True)
class PalettizationResult:
    """A palettized model.

    Attributes:
        model: name of the model before.
        out: folder that it was saved to.
        bytes_before: size of the weights on disk; 0 if they were not loaded from a file.
        bytes_after: size of the saved weights.
        bits_per_weight: average bits, including the tables.
        widths: number of matrices by bits of their indices.
        squared_error: squared error of the weights, relative to the sum of their squares.
    """

    model: str
    out: Path
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    widths: Mapping[int, int]
    squared_error: float

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        return vars(self) | {"out": str(self.out)}

    def report(self) -> Report:
        """Report sizes and the error of the weights."""
        from pippin.core.report import Report, Row

        rows = [
            Row("weights before", self.bytes_before / 1e6, "MB"),
            Row("weights after", self.bytes_after / 1e6, "MB"),
        ]
        rows.append(Row("bits per weight, with tables", self.bits_per_weight))
        rows += [Row(f"matrices of {bits} bits", count) for bits, count in self.widths.items() if count]
        rows.append(Row("squared error of the weights", 100 * self.squared_error, "%"))
        return Report(f"{self.model}, palettized", rows)


def run(config: Config, *, show_progress: bool = True) -> PalettizationResult:
    """Palettize a model and save it as a folder for `pippin.load`.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: settings that are incompatible with each other or with the model.
        ModelNotFound, InvalidRecord: the model or the data cannot be read.
    """
    import pippin
    from pippin.data.records import read_records
    from pippin.language.quantized_checkpoint import matrix_shapes, save_quantized
    from pippin.shape.quantize.calibration import calibration_ids
    from pippin.shape.quantize.palettize import PalettizationConfig, palettize

    if config.bits is not None and config.average_bits is not None:
        raise InvalidArgument("give bits (--bits) or average_bits (--average-bits), not both")
    if config.average_bits is not None and not config.data:
        raise InvalidArgument("average_bits chooses bits by the gradients on a text; give some with data (--data FILE)")
    out = Path(config.out)
    options.refuse_existing(out)
    embedding_bits = None if config.embedding_bits == 16 else config.embedding_bits
    settings = PalettizationConfig(
        config.bits or 4, config.average_bits, config.axis, config.group_size, embedding_bits
    )
    model = pippin.load(config.model, device="cpu", dtype="float32", pack=False)
    ids = None
    if config.data:
        texts = (record.text for record in read_records(paths(config.data)))
        ids = calibration_ids(model, texts, tokens=config.calibration_tokens)
    with progress.bar(len(matrix_shapes(model)), "palettizing", unit="matrices", show_progress=show_progress) as bar:
        palettes = palettize(model, settings, ids, on_matrix=lambda name: bar.advance(1))
    save_quantized(out, model, palettes, metadata={"method": "palette", "settings": dataclasses.asdict(settings)})
    error = square = 0.0
    for name, palette in palettes.items():
        weight = model.module.get_submodule(name).dense_weight().float()
        error += float((palette.dense() - weight).square().sum())
        square += float(weight.square().sum())
    weights = sum(palette.indices.numel() for palette in palettes.values())
    return PalettizationResult(
        model.name,
        out,
        *sizes_on_disk(model, out),
        bits_per_weight=8 * sum(palette.nbytes for palette in palettes.values()) / weights,
        widths={bits: sum(palette.bits == bits for palette in palettes.values()) for bits in (2, 3, 4, 8)},
        squared_error=error / square,
    )
