"""Profiling: size, latency and quality of a model, as a whole, per layer and per operator.

Notable here:
- every backend that is asked for is a row, also one that is not installed: it says what it lacks
- quality is that of the language model itself on a text, in nats, whatever the backend
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.recipes.options import StrPath
from pippin.recipes.shape.export import MaxContext, Source, open_asset

if TYPE_CHECKING:
    from pippin.shape.export import PerformanceReport

WINDOW = 1024
"""Tokens that a prediction may look back on when quality is measured, where the model's context holds as many."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a measurement."""

    model: Source
    backends: Annotated[
        tuple[str, ...],
        Option("torch, onnxruntime, openvino, coreai, executorch; with commas between.", metavar="NAMES", parse=_names),
    ] = ("torch", "onnxruntime")
    max_context: MaxContext = 1024
    length: Annotated[PositiveInt, Option("Tokens of the sequence that is timed.", metavar="N")] = 128
    batch_size: Annotated[PositiveInt, Option("Sequences that are timed together.", metavar="N")] = 1
    repetitions: Annotated[PositiveInt, Option("Runs that are timed.", metavar="N")] = 10
    data: Annotated[
        StrPath | None, Option("Text that the model was not trained on, to measure its quality on.", metavar="PATH")
    ] = None


@dataclass(frozen=True)
class ProfilingResult:
    """What was measured.

    Attributes:
        performance: sizes and times of every backend, by operator, module and device.
        weight_bytes: of the program's weights.
        sizes: of the dynamic dimensions, as they were timed.
        quality: nats per token and byte, and perplexity; None without data.
    """

    performance: PerformanceReport = field(repr=False)
    weight_bytes: int
    sizes: Mapping[str, int]
    quality: Mapping[str, float] | None

    def layers(self) -> list[dict[str, Any]]:
        """The figures of modules, added up by layer, in the order of the model."""
        sums: dict[tuple[str, str], dict[str, Any]] = {}
        for row in self.performance.rows("module"):
            layer = _layer(row["module"])
            entry = sums.setdefault(
                (row["label"], layer), {"label": row["label"], "layer": layer, "p50_ms": 0.0, "share": 0.0, "flops": 0}
            )
            for figure in ("p50_ms", "share", "flops"):
                entry[figure] += row[figure]
        return sorted(sums.values(), key=lambda row: (row["label"], *_order(row["layer"])))


def run(config: Config, *, show_progress: bool = True) -> ProfilingResult:
    """Measure a language model or an exported program.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: a backend that there is not, or data for an exported program.
        ModelNotFound, CheckpointError: the model cannot be loaded.
    """
    from pippin.shape.export import profile
    from pippin.shape.export.backends import NAMES

    if unknown := [name for name in config.backends if name not in NAMES]:
        raise InvalidArgument(f"backends (--backends) are {', '.join(NAMES)}, not {unknown[0]!r}")
    quality = None if config.data is None else _quality(config.model, Path(config.data))
    asset = open_asset(config.model, config.max_context, show_progress=show_progress)
    dynamic = asset.signature().ranges
    given = {"batch": config.batch_size, "length": config.length}
    sizes = {name: size for name, size in given.items() if name in dynamic}
    performance = profile(asset, list(config.backends), sizes=sizes, runs=config.repetitions)
    return ProfilingResult(performance, asset.nbytes, sizes, quality)


def _quality(ref: str, data: Path) -> dict[str, float]:
    """How well a language model predicts a text."""
    import pippin
    from pippin.core.text_files import read_text
    from pippin.language.likelihood import text_likelihood

    if (Path(ref) / "asset.json").is_file():
        raise InvalidArgument("data (--data) measures language models; an exported program has no tokenizer")
    text = read_text(data)
    model = pippin.load(ref, device="cpu")
    found = text_likelihood(model, text, max_length=min(WINDOW, model.context_size))
    return {
        "nats per token": found.per_token,
        "nats per byte": found.per_byte,
        "perplexity": found.perplexity,
        "tokens": found.tokens,
    }


def _layer(module: str) -> str:
    """ "decoder.layers.3.mlp.up_proj" is in layer "layers.3"; a module outside of layers is its own first part."""
    parts = module.removeprefix("decoder.").split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return parts[0] or "(the model itself)"


def _order(layer: str) -> tuple[int, int, str]:
    number = layer.rpartition(".")[2]
    return (1, int(number), layer) if number.isdecimal() else (0 if "embed" in layer else 2, 0, layer)
