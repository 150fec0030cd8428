"""Quantized models on disk: a folder in Hugging Face layout whose matrices are codes and scales.

Notable here:
- the folder has one layout for all methods (training, GPTQ, rounding, palettes), and `pippin.load` opens it
- "quantization_config" in `config.json` describes how each matrix is stored; the weights are `NAME.codes` (32-bit
  words) and `NAME.scales` for a matrix on a uniform grid, `NAME.indices` and `NAME.tables` for a palettized one
- tensors that are not quantized (norms, biases, routers, excluded layers) are stored unchanged
- nothing is converted: a loaded weight is ``scale * (code - zero_point)``, bit-identical to that of the method
- shapes are known from the headers, so that a folder is compared with its configuration before a weight is touched
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile, InvalidArgument, UnsupportedModel
from pippin.core.formats.checkpoint import Checkpoint, open_folder, save_folder
from pippin.data.text.tokenizer import Tokenizer
from pippin.data.text.tool_dialect_name import ToolDialectName
from pippin.language import families, kept_metadata
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig
from pippin.language.quantized import QuantizedMatrix, read_matrices, settings_of
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.linear import Linear
from pippin.nn.quantization.codes import Codes, native_group, words_of
from pippin.nn.quantization.packed import BITS
from pippin.nn.quantization.palette import Palette

METHOD: Final = "pippin"
PARTS: Final = {"codes": ("codes", "scales"), "palette": ("indices", "tables")}


@runtime_checkable
class QuantizedModel(Protocol):
    """The interface of the model that codes belong to, usually a `pippin.language.LanguageModel`."""

    @property
    def name(self) -> str:
        """Name of the model in messages."""

    @property
    def module(self) -> Decoder:
        """The decoder, packed or not."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which is saved with the weights."""

    @property
    def source(self) -> Path | None:
        """The file or folder that the model was read from."""

    @property
    def tool_dialect(self) -> ToolDialectName | None:
        """How the model writes calls of tools, where that was named."""


def save_quantized(
    path: str | Path,
    model: QuantizedModel,
    codes: Mapping[str, Codes | Palette],
    *,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a model whose matrices are quantized; `pippin.load` reads it back.

    Args:
        path: created where it does not exist; a checkpoint already in it is replaced.
        model: the model that was quantized, or that the codes belong to; its other weights are stored as they are.
        codes: the quantized matrices by the names of their layers ("layers.0.mlp.up_proj", "embed_tokens"); of a tied
            model, the embedding stands for the output matrix as well.
        metadata: what else `config.json` should say about how they were made, JSON values only (method, ranges of the
            cache, data).

    Raises:
        InvalidArgument: a name that is no matrix of this model, another shape, or a matrix that is packed for inference
            and not among the codes.
        UnsupportedModel: a decoder that has no configuration on disk.
        DiskFull: there is less free space than needed; nothing was changed.
    """
    stored: dict[str, Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}
    shapes = matrix_shapes(model)
    for name, matrix in codes.items():
        if name not in shapes:
            raise InvalidArgument(f"{model.name} has no matrix {name!r} to be stored as codes")
        if matrix.shape != shapes[name]:
            raise InvalidArgument(f"codes of {name} have shape {matrix.shape}, the layer is {shapes[name]}")
        stem = _stored(name)
        stored |= _parts(stem, matrix)
        entries[stem] = _entry(matrix)
    for name, tensor in _plain(model, codes).items():
        stored[_stored(name)] = tensor.detach()
    config = (
        families.to_hf(model.module.config)
        | kept_metadata.token_ids(model.tokenizer)
        | {"dtype": str(model.module.embed_tokens.dtype).removeprefix("torch.")}
        | kept_metadata.config_fields(model)
    )
    config["quantization_config"] = {"quant_method": METHOD, "weights": entries, "note": dict(metadata or {})}
    generation = kept_metadata.generation_config(model)
    save_folder(Path(path), config=config, tensors=stored, tokenizer=model.tokenizer, generation_config=generation)


def read_quantized(path: str | Path) -> dict[str, Codes | Palette]:
    """The quantized matrices of a folder by the names of their layers, as `save_quantized` was given them.

    Raises:
        ModelNotFound: there is no such folder.
        CorruptedFile: the folder is incomplete or contradicts itself.
        UnsupportedModel: its weights are not quantized, or by another method.
    """
    found = {stem: matrix.read() for stem, matrix in stored_matrices(open_folder(path)).items()}
    if not found:
        raise UnsupportedModel(f"{path} holds no quantized matrices; `pippin shape quantize` makes such folders")
    return {families.without_prefix(stem): matrix for stem, matrix in found.items()}


def matrix_shapes(model: QuantizedModel) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix of a model, by the name of its layer; a tied output matrix is not listed."""
    shapes = {}
    for name, part in model.module.named_modules():
        if isinstance(part, Linear):
            shapes[name] = (part.outputs, part.inputs)
        elif isinstance(part, TokenEmbedding):
            shapes[name] = (part.rows, part.width)
    if model.module.config.tie_word_embeddings:
        shapes.pop("lm_head", None)
    return shapes


def _plain(model: QuantizedModel, codes: Mapping[str, Codes | Palette]) -> dict[str, Tensor]:
    """What is stored as it is: all weights but those of the quantized matrices, and what training added to them."""
    plain: dict[str, Tensor] = {}
    matrices = matrix_shapes(model)
    for name, part in model.module.named_modules():
        if ".parametrizations" in name or (name == "lm_head" and model.module.config.tie_word_embeddings):
            continue
        if name in matrices and name not in codes:
            if getattr(part, "packed", None) is not None:
                raise InvalidArgument(
                    f"{name} is packed for inference and not among the codes; load {model.name} with pack=False"
                )
            plain[f"{name}.weight"] = part.weight  # which a prepared layer computes
        for owned, parameter in part.named_parameters(recurse=False):
            if not (name in matrices and owned == "weight"):
                plain[f"{name}.{owned}" if name else owned] = parameter
    return plain


def _stored(name: str) -> str:
    """The name in the file: Pippin's own, with the usual prefix."""
    return name if name.startswith("lm_head") else f"model.{name}"


def _parts(stem: str, matrix: Codes | Palette) -> dict[str, Tensor]:
    words, values = (f"{stem}.{part}" for part in PARTS["codes" if isinstance(matrix, Codes) else "palette"])
    return {words: matrix.words(), values: matrix.scales if isinstance(matrix, Codes) else matrix.tables}


def _entry(matrix: Codes | Palette) -> dict[str, Any]:
    """What `config.json` says about a matrix; read by `stored_matrices`."""
    shared = {"bits": matrix.bits, "columns": matrix.shape[1]}
    if isinstance(matrix, Codes):
        return {"form": "codes", **shared, "zero": matrix.zero_point}
    return {"form": "palette", **shared, "axis": matrix.axis, "group": matrix.group_size}


@dataclass(frozen=True)
class StoredMatrix:
    """One quantized matrix of a folder, not read yet.

    Args:
        path: where it is.
        stem: its name in the file, without ".weight".
        entry: what `config.json` says about it, checked by `stored_matrices`.
    """

    path: Checkpoint
    stem: str
    entry: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the tensor that it stands for."""
        return f"{self.stem}.weight"

    @property
    def parts(self) -> tuple[str, str]:
        """Names of its tensors: words, then scales or tables."""
        words, values = PARTS[self.entry["form"]]
        return f"{self.stem}.{words}", f"{self.stem}.{values}"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.path.shape(self.parts[0])[0], self.entry["columns"]

    @property
    def kind(self) -> str:
        """How it may be kept in memory: "INT2/64" for two bits in groups of 64; empty where the kernels have no form.

        The group is the kernels': a scale of more inputs is repeated.
        """
        if self.entry["form"] != "codes":
            return ""
        group = native_group(self.entry["columns"] // self.path.shape(self.parts[1])[1])
        return f"INT{self.entry['bits']}/{group}" if group else ""

    @property
    def reason(self) -> str:
        """Why the kernels have no form for it; empty if they have one."""
        if self.kind:
            return ""
        return "palettes have no kernels" if self.entry["form"] == "palette" else "their groups have no kernels"

    def taken(self, source: families.TensorSource, config: DecoderConfig) -> StoredMatrix:
        """The matrix itself: such a folder holds a decoder's own matrices."""
        return self

    def read(self) -> Codes | Palette:
        """The matrix as it is stored.

        Raises:
            CorruptedFile: tensors that contradict each other.
        """
        words, values = (self.path.tensor(name) for name in self.parts)
        bits, columns = self.entry["bits"], self.entry["columns"]
        try:
            if self.entry["form"] == "codes":
                return Codes.from_words(words, values.clone(), bits, columns, float(self.entry["zero"]))
            indices = Codes.from_words(words, torch.ones(1, 1).half(), bits, columns, 0.0).codes
            return Palette(indices, values.clone(), bits, self.entry["axis"], self.entry["group"])
        except InvalidArgument as error:
            raise CorruptedFile(f"{self.path.folder}: {self.stem} cannot be read: {error}") from error

    def dense(self) -> Tensor:
        """The dequantized matrix, float32."""
        return self.read().dense()


def quantized_matrices(path: Checkpoint) -> tuple[str | None, Mapping[str, StoredMatrix | QuantizedMatrix]]:
    """The method that quantized a folder (None for an ordinary one) and the matrices, by the names of their tensors.

    Raises:
        UnsupportedModel: weights quantized in a way that this version does not know.
        CorruptedFile: the configuration contradicts itself or the tensors, or a scale is not usable.
    """
    found = settings_of(path)
    if found is None:
        return None, {}
    if found[0] != METHOD:
        return found[0], read_matrices(path, *found)
    return METHOD, {matrix.name: matrix for matrix in stored_matrices(path).values()}


def stored_matrices(path: Checkpoint) -> dict[str, StoredMatrix]:
    """The quantized matrices that Pippin saved, by their names in the file without ".weight"; none of other folders.

    Raises:
        UnsupportedModel: weights quantized by another library, or in a form that this version does not know.
        CorruptedFile: the configuration contradicts itself or the tensors.
    """
    if "quantization_config" not in path.config:
        return {}
    described = path.config["quantization_config"]
    method = described.get("quant_method", "unknown") if isinstance(described, dict) else "unknown"
    if method != METHOD:
        raise UnsupportedModel(f"{path.folder} holds weights quantized by {method}, not by Pippin")
    weights = described.get("weights")
    if not isinstance(weights, dict):
        raise CorruptedFile(f"{path.folder}: quantization_config has no 'weights'; save the model again")
    held = set(path.names())
    found = {}
    for stem, entry in weights.items():
        _check_entry(path, stem, entry)
        found[stem] = StoredMatrix(path, stem, entry)
        if missing := [name for name in found[stem].parts if name not in held]:
            raise CorruptedFile(f"{path.folder} lacks {missing[0]!r}, which its quantization_config names")
        words, values = (path.shape(name) for name in found[stem].parts)
        per_row = words_of(entry["columns"], entry["bits"])
        whole = entry["form"] != "codes" or (len(values) == 2 and values[1] and entry["columns"] % values[1] == 0)
        if len(words) != 2 or words[1] != per_row or not whole:
            raise CorruptedFile(
                f"{path.folder}: {stem} has words of shape {words} and values of shape {values}, which are no matrix "
                f"of {entry['columns']} columns at {entry['bits']} bits"
            )
    return found


def _check_entry(folder: Checkpoint, stem: str, entry: object) -> None:
    if not isinstance(entry, dict) or entry.get("form") not in PARTS:
        form = entry.get("form") if isinstance(entry, dict) else entry
        raise UnsupportedModel(f"{folder.folder}: {stem} is stored in the form {form!r}; known: {', '.join(PARTS)}")
    bits, columns = entry.get("bits"), entry.get("columns")
    sound = bits in BITS and isinstance(columns, int) and columns > 0
    if entry["form"] == "codes":
        sound = sound and isinstance(entry.get("zero"), int | float)
    else:
        sound = sound and entry.get("axis") in ("rows", "columns") and isinstance(entry.get("group"), int)
    if not sound:
        raise CorruptedFile(f"{folder.folder}: what quantization_config says of {stem} is no such matrix: {entry}")
