"""`pippin shape export`: a model in the format of another runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pippin.cli import documents, options, terminal
from pippin.core.errors import InvalidArgument
from pippin.core.files import format_bytes

if TYPE_CHECKING:
    from pippin.language.load import LanguageModel
    from pippin.shape.export import ModelAsset

Format = Literal["onnx", "coreai", "coreml", "openvino", "executorch", "gguf", "safetensors", "torch"]

# Format: back end that writes it, ending of its file ("" for a folder).
PROGRAMS = {
    "onnx": ("onnxruntime", ".onnx"),
    "coreai": ("coreai", ".aimodel"),
    "coreml": ("coreml", ".mlpackage"),
    "openvino": ("openvino", ".xml"),
    "executorch": ("executorch", ".pte"),
    "torch": ("torch", ""),
}

Model = Annotated[
    str,
    typer.Argument(
        help="Catalogue name, hub repository, folder or .gguf file of a language model; or the folder of an exported "
        "program (--to torch writes one).",
        autocompletion=options.complete_model,
    ),
]
Context = Annotated[int, typer.Option(metavar="N", help="Longest sequence of a language model, in tokens.")]


def export(
    model: Model,
    to: Annotated[Format, typer.Option("--to", help="The format.")],
    out: Annotated[Path, typer.Option("--out", metavar="PATH", help="The file or folder to write.")],
    context: Context = 1024,
    interface: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a typed Python class for the program, too.")
    ] = None,
    as_json: documents.Json = False,
) -> None:
    """Write a model for another runtime: ONNX, Core AI, Core ML, OpenVINO, ExecuTorch, GGUF, safetensors.

    pippin shape export smollm2-135m --to onnx --out smollm2.onnx
    """
    ending = PROGRAMS[to][1] if to in PROGRAMS else ".gguf" if to == "gguf" else ""
    if ending and out.suffix != ending:
        raise InvalidArgument(f"--out must end in {ending} for --to {to}, got {str(out)!r}")
    if to not in PROGRAMS and interface is not None:
        raise InvalidArgument(f"--interface is for exported programs; {to} holds weights only")
    with documents.writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if to == "gguf":
            from pippin.shape.gguf import export_gguf

            export_gguf(_language_model(model), out)
        elif to == "safetensors":
            _language_model(model).save(out)
        else:
            from pippin.shape.export import generate_interface
            from pippin.shape.export.backends import find

            asset = open_asset(model, context)
            find(PROGRAMS[to][0]).write(asset, out)
            if interface is not None:
                generate_interface(asset, interface)
    files = written(out, ending)
    size = sum(file.stat().st_size for file in files)
    record = {"format": to, "path": str(out), "files": [str(file) for file in files], "bytes": size}
    if as_json:
        terminal.write(terminal.to_json(record) + "\n")
    else:
        terminal.write(f"{out}: {format_bytes(size)} in {len(files)} file{'s' if len(files) > 1 else ''}\n")


def open_asset(ref: str, context: int) -> ModelAsset:
    """The exported program of a folder, or a language model captured with these lengths."""
    from pippin.shape.export import ModelAsset, capture_decoder

    if (Path(ref) / "asset.json").is_file():
        return ModelAsset.load(ref)
    model = _language_model(ref)
    return capture_decoder(model.module, context=min(context, model.context_size))


def written(out: Path, ending: str) -> list[Path]:
    """The files of an export: those of the folder, or those that share the name before the ending."""
    if out.is_dir():
        found = [file for file in out.rglob("*") if file.is_file()]
    else:
        stem = out.name.removesuffix(ending)
        found = [file for file in out.parent.glob(f"{stem}.*") if file.is_file()]
    return sorted(found)


def _language_model(ref: str) -> LanguageModel:
    """With ordinary float32 weights, on the CPU."""
    import pippin

    return pippin.load(ref, device="cpu", dtype="float32", pack=False)
