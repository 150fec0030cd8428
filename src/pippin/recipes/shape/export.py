"""Export: a model in the format of another runtime, from ONNX to GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.files import format_bytes
from pippin.core.options import Option
from pippin.recipes.options import StrPath

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel
    from pippin.shape.export import ExportedModel
    from pippin.shape.export.backends import BackendName

Format = Literal["onnx", "coreai", "coreml", "openvino", "executorch", "gguf", "safetensors", "torch"]

PROGRAMS: Mapping[Format, tuple[BackendName, str]] = {
    "onnx": ("onnxruntime", ".onnx"),
    "coreai": ("coreai", ".aimodel"),
    "coreml": ("coreml", ".mlpackage"),
    "openvino": ("openvino", ".xml"),
    "executorch": ("executorch", ".pte"),
    "torch": ("torch", ""),
}
"""By format of a program: the backend that writes it, and the ending of its file ("" for a folder)."""

Source = Annotated[
    str,
    Option(
        "Catalog name, hub repository, folder or .gguf file of a language model; or the folder of an exported program "
        "(--to torch writes one).",
        positional=True,
    ),
]
MaxContext = Annotated[PositiveInt, Option("Longest sequence of a language model's program, in tokens.", metavar="N")]


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of an export."""

    model: Source
    to: Annotated[Format, Option("The format.")]
    out: Annotated[StrPath, Option("The file or folder to write.", metavar="PATH")]
    max_context: MaxContext = 1024
    interface: Annotated[StrPath | None, Option("Write a typed Python class for the program, too.", metavar="PATH")] = (
        None
    )


@dataclass(frozen=True)
class ExportResult:
    """What was written.

    Attributes:
        format: the format.
        out: the file or folder.
        files: all files of it.
        bytes: their sizes together.
    """

    format: Format
    out: Path
    files: tuple[Path, ...]
    bytes: int

    def __str__(self) -> str:
        count = len(self.files)
        return f"{self.out}: {format_bytes(self.bytes)} in {count} file{'s' if count > 1 else ''}"

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        return vars(self) | {"out": str(self.out), "files": [str(file) for file in self.files]}


def run(config: Config, *, show_progress: bool = True) -> ExportResult:
    """Write a model for another runtime.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: a file name that does not end as the format wants it, or an interface for weights alone.
        ModelNotFound, CheckpointError: the model cannot be loaded.
        MissingDependency, BackendUnavailable, ExportError: the backend is absent, or cannot write this model.
    """
    from pippin.shape.export import generate_interface
    from pippin.shape.export.backends import find
    from pippin.shape.export.gguf import export_gguf

    out = Path(config.out)
    ending = PROGRAMS[config.to][1] if config.to in PROGRAMS else ".gguf" if config.to == "gguf" else ""
    if ending and out.suffix != ending:
        raise InvalidArgument(f"out (--out) must end in {ending} for --to {config.to}, got {str(out)!r}")
    if config.to not in PROGRAMS and config.interface is not None:
        raise InvalidArgument(f"interface (--interface) is for exported programs; {config.to} holds weights only")
    out.parent.mkdir(parents=True, exist_ok=True)
    if config.to == "gguf":
        export_gguf(_language_model(config.model), out)
    elif config.to == "safetensors":
        _language_model(config.model).save(out)
    else:
        asset = open_asset(config.model, config.max_context)
        find(PROGRAMS[config.to][0]).write(asset, out)
        if config.interface is not None:
            generate_interface(asset, Path(config.interface))
    files = _written(out, ending)
    return ExportResult(config.to, out, tuple(files), sum(file.stat().st_size for file in files))


def open_asset(model: str, max_context: int) -> ExportedModel:
    """The exported program of a folder, or a language model captured for sequences of at most this length."""
    from pippin.shape.export import ExportedModel, capture_decoder

    if (Path(model) / "asset.json").is_file():
        return ExportedModel.load(model)
    loaded = _language_model(model)
    return capture_decoder(loaded.module, context=min(max_context, loaded.context_size))


def _written(out: Path, ending: str) -> list[Path]:
    """The files of an export: those of the folder, or those that share the name before the ending."""
    if out.is_dir():
        return sorted(file for file in out.rglob("*") if file.is_file())
    stem = out.name.removesuffix(ending)
    return sorted(file for file in out.parent.glob(f"{stem}.*") if file.is_file())


def _language_model(ref: str) -> LanguageModel:
    """With unpacked float32 weights, on the CPU."""
    from pippin.language.language_model import load as load_language_model

    return load_language_model(ref, device="cpu", dtype="float32", pack=False)
