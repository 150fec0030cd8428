"""Saving a quantised model: a folder in Hugging Face layout whose matrices are codes and scales.

Notable here:
- whatever made the codes (training, GPTQ, rounding, tables), the folder looks the same and `pippin.load` runs it
- what is not quantised (norms, biases, routers, layers that were left out) is stored as it is
- nothing is converted on the way: a loaded weight is ``scale * (code - zero)``, to the bit what the method computed
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pippin.core.checkpoint import open_folder, save_folder
from pippin.core.errors import InvalidArgument, UnsupportedModel
from pippin.language import families
from pippin.language.load import LanguageModel
from pippin.language.stored import METHOD, PARTS, stored_matrices
from pippin.nn.codes import Codes
from pippin.nn.embedding import Embedding
from pippin.nn.linear import Linear
from pippin.nn.palette import Palette


def save_quantised(
    folder: str | Path,
    model: LanguageModel,
    codes: Mapping[str, Codes | Palette],
    *,
    note: Mapping[str, Any] | None = None,
) -> None:
    """Write a model whose matrices are quantised; `pippin.load` reads it back.

    Args:
        folder: created where it does not exist; a checkpoint already in it is replaced.
        model: the model that was quantised, or that the codes belong to; its other weights are stored as they are.
        codes: the quantised matrices by the names of their layers ("layers.0.mlp.up_proj", "embed_tokens"); of a tied
            model, the embedding stands for the output matrix as well.
        note: what else `config.json` should say about how they were made, JSON values only (method, ranges of the
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
        stem = families.to_hf_name(f"{name}.weight").removesuffix(".weight")
        stored |= _parts(stem, matrix)
        entries[stem] = _entry(matrix)
    for name, tensor in _plain(model, codes).items():
        offset = families.norm_offset(name, model.config)
        stored[families.to_hf_name(name)] = tensor.detach() - offset if offset else tensor.detach()
    generation = {"eos_token_id": list(model.tokenizer.eos_ids), "bos_token_id": model.tokenizer.bos_id}
    config = families.to_hf(model.config) | generation | {"dtype": str(model.dtype).removeprefix("torch.")}
    config["quantization_config"] = {"quant_method": METHOD, "weights": entries, "note": dict(note or {})}
    save_folder(Path(folder), config=config, tensors=stored, tokenizer=model.tokenizer, generation_config=generation)


def read_quantised(folder: str | Path) -> dict[str, Codes | Palette]:
    """The quantised matrices of a folder by the names of their layers, as `save_quantised` was given them.

    Raises:
        ModelNotFound: there is no such folder.
        CorruptedFile: the folder is incomplete or contradicts itself.
        UnsupportedModel: its weights are not quantised, or by another method.
    """
    found = {stem: matrix.read() for stem, matrix in stored_matrices(open_folder(folder)).items()}
    if not found:
        raise UnsupportedModel(f"{folder} holds no quantised matrices; `pippin shape quantize` makes such folders")
    return {families.hf_name(stem) or stem: matrix for stem, matrix in found.items()}


def matrix_shapes(model: LanguageModel) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix of a model, by the name of its layer; a tied output matrix is not listed."""
    shapes = {}
    for name, part in model.module.named_modules():
        if isinstance(part, Linear):
            shapes[name] = (part.outputs, part.inputs)
        elif isinstance(part, Embedding):
            shapes[name] = (part.rows, part.width)
    if model.config.tied:
        shapes.pop("lm_head", None)
    return shapes


def _plain(model: LanguageModel, codes: Mapping[str, Codes | Palette]) -> dict[str, Tensor]:
    """What is stored as it is: all weights but those of the quantised matrices, and what training added to them."""
    plain: dict[str, Tensor] = {}
    matrices = matrix_shapes(model)
    for name, part in model.module.named_modules():
        if ".parametrizations" in name or (name == "lm_head" and model.config.tied):
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


def _parts(stem: str, matrix: Codes | Palette) -> dict[str, Tensor]:
    words, values = (f"{stem}.{part}" for part in PARTS["codes" if isinstance(matrix, Codes) else "palette"])
    return {words: matrix.words(), values: matrix.scales if isinstance(matrix, Codes) else matrix.tables}


def _entry(matrix: Codes | Palette) -> dict[str, Any]:
    """What `config.json` says about a matrix; read by `pippin.language.stored`."""
    shared = {"bits": matrix.bits, "columns": matrix.shape[1]}
    if isinstance(matrix, Codes):
        return {"form": "codes", **shared, "zero": matrix.zero}
    return {"form": "palette", **shared, "axis": matrix.axis, "group": matrix.group}
