"""Export: a model in the format of another runtime, from ONNX to GGUF.

Notable here:
- codes of a quantized folder are kept in the program and in GGUF; what must be stored in more bits is said
- a folder as the target of a program has the tokenizer and the configuration beside it, as Optimum writes them
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pippin.core import progress
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.files import format_bytes
from pippin.core.options import Option
from pippin.recipes.options import StrPath, refuse_existing
from pippin.recipes.shape.stored_bits import stored_bits

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel
    from pippin.shape.export import ExportedModel
    from pippin.shape.export.backends import BackendName

GGUFType = Literal["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]
"""As `llama-quantize` names them."""
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
    out: Annotated[
        StrPath,
        Option(
            "The file to write; or a folder, which has the tokenizer and the configuration of a language model, too.",
            metavar="PATH",
        ),
    ]
    type: Annotated[
        GGUFType | None,
        Option("GGUF: what the matrices are stored as. Without it codes of a quantized folder stay, others are Q8_0."),
    ] = None
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
        InvalidArgument: a file name that does not end as the format wants it, or that exists already; or an interface
            for weights alone.
        ModelNotFound, CheckpointError: the model cannot be loaded.
        MissingDependency, BackendUnavailable, ExportError: the backend is absent, or cannot write this model.
    """
    from pippin.shape.export import generate_interface
    from pippin.shape.export.backends import find
    from pippin.shape.export.gguf import export_gguf, stored_codes

    out = Path(config.out)
    ending = PROGRAMS[config.to][1] if config.to in PROGRAMS else ".gguf" if config.to == "gguf" else ""
    is_folder = config.to in PROGRAMS and not out.suffix
    if ending and out.suffix != ending and not is_folder:
        raise InvalidArgument(f"out (--out) must end in {ending} for --to {config.to}, got {str(out)!r}")
    if config.to not in PROGRAMS and config.interface is not None:
        raise InvalidArgument(f"interface (--interface) is for exported programs; {config.to} holds weights only")
    if config.to != "gguf" and config.type is not None:
        raise InvalidArgument(f"type (--type) is for --to gguf, not for {config.to}")
    refuse_existing(out)
    (out if is_folder else out.parent).mkdir(parents=True, exist_ok=True)
    if config.to == "gguf":
        model = _language_model(config.model)
        if config.type is not None and stored_codes(model):
            progress.note(
                f"the codes of {model.name} are rounded anew to {config.type}; without --type they stay as they are",
                show_progress=show_progress,
            )
        export_gguf(model, out, config.type or "Q8_0", codes={} if config.type else None, show_progress=show_progress)
        return _result(config, out, [out])
    if config.to == "safetensors":
        _language_model(config.model).save(out)
        return _result(config, out, _inside(out))
    asset, captured = _open(config.model, config.max_context, show_progress=show_progress)
    target = out / f"model{ending}" if is_folder and ending else out
    with progress.busy(f"writing {target.name}", show_progress=show_progress):
        find(PROGRAMS[config.to][0]).write(asset, target)
    if config.interface is not None:
        generate_interface(asset, Path(config.interface))
    if is_folder and captured is not None:
        _save_tokenizer(captured, out)
    elif captured is not None:
        progress.note(
            f"the program takes token ids; for the tokenizer beside it, give a folder: --out {out.with_suffix('')}",
            show_progress=show_progress,
        )
    return _result(config, out, _inside(out) if out.is_dir() else _beside(target, ending, asset))


def open_asset(model: str, max_context: int, *, show_progress: bool = True) -> ExportedModel:
    """The exported program of a folder, or a language model captured for sequences of at most this length."""
    return _open(model, max_context, show_progress=show_progress)[0]


def _open(model: str, max_context: int, *, show_progress: bool) -> tuple[ExportedModel, LanguageModel | None]:
    """The program, and the language model that it was captured from."""
    from pippin.shape.export import ExportedModel, capture_decoder
    from pippin.shape.export.compression import with_codes
    from pippin.shape.export.gguf import stored_codes

    if (Path(model) / "asset.json").is_file():
        return ExportedModel.load(model), None
    loaded = _language_model(model)
    with progress.busy(f"capturing the program of {loaded.name}", show_progress=show_progress):
        asset = capture_decoder(loaded.module, context=min(max_context, loaded.context_size))
    if codes := stored_codes(loaded):
        asset = with_codes(asset, {f"decoder.{name}.weight": matrix for name, matrix in codes.items()})
    elif (bits := stored_bits(loaded.source)) < 16:
        progress.note(
            f"the weights of {bits:.3g} bits become float32 ({format_bytes(asset.nbytes)}); to keep few bits, quantize "
            "the model first (pippin shape quantize) and export that folder",
            show_progress=show_progress,
        )
    return asset, loaded


def _save_tokenizer(model: LanguageModel, folder: Path) -> None:
    """Tokenizer, chat template, `config.json` and `generation_config.json`, as in a folder of Hugging Face."""
    from pippin.core.files import atomic_write
    from pippin.language import families, kept_metadata

    model.tokenizer.save(folder)
    kept = kept_metadata.token_ids(model.tokenizer) | kept_metadata.config_fields(model)
    for name, content in (
        ("config.json", families.to_hf(model.config) | kept),
        ("generation_config.json", kept_metadata.generation_config(model)),
    ):
        with atomic_write(folder / name, mode="w") as file:
            json.dump(content, file, indent=2)


def _result(config: Config, out: Path, files: list[Path]) -> ExportResult:
    return ExportResult(config.to, out, tuple(files), sum(file.stat().st_size for file in files))


def _inside(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _beside(target: Path, ending: str, asset: ExportedModel) -> list[Path]:
    """The file of a program, those of its further functions, and those of their weights."""
    programs = [target, *(target.with_suffix(f".{name}{ending}") for name in asset.functions if name != "main")]
    weights = (place for file in programs for place in (file.with_suffix(".bin"), Path(f"{file}.data")))
    return [file for file in (*programs, *weights) if file.is_file()]


def _language_model(ref: str) -> LanguageModel:
    """With unpacked float32 weights, on the CPU."""
    from pippin.language.language_model import load as load_language_model

    return load_language_model(ref, device="cpu", dtype="float32", pack=False)
