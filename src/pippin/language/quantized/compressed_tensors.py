"""Folders of compressed-tensors (llm-compressor): integers, packed or in bytes, 8-bit and 4-bit floats.

Notable here:
- groups of layers have schemes of their own, by names, patterns ("re:...") or the class "Linear"; which layers are
  quantized at all, the tensors say
- packed codes are unsigned, shifted by half their range; zero points are packed along the outputs
- activations are not quantized here, whatever a scheme says of them: that only makes results more exact

Source: `compressed_tensors.compressors`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.core.formats.checkpoint import Checkpoint
from pippin.language.quantized.float4 import mxfp4, nvfp4
from pippin.language.quantized.float8 import DTYPES, float8
from pippin.language.quantized.matrix import (
    FLOATS,
    WHOLE,
    WORDS,
    Packable,
    QuantizedMatrix,
    Rows,
    grid,
    group_size_of,
    read_scales,
    require_choice,
    require_parts,
    require_shape,
    some,
)
from pippin.nn.quantization.affine import affine_kind
from pippin.nn.quantization.codes import unpack_words, words_of

_FORMATS: Final = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense"),
)
_STRATEGIES: Final = ("group", "channel", "tensor", "block", "tensor_group")


def read(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> list[QuantizedMatrix]:
    """The quantized matrices of a folder.

    Raises:
        UnsupportedModel: a format, a strategy or a number of bits that is not known, or sparse weights.
        CorruptedFile: parts are missing or contradict each other or the configuration.
    """
    require_choice(checkpoint, "format", settings.get("format", "dense"), _FORMATS)
    sparsity = settings.get("sparsity_config") or {}
    require_choice(checkpoint, "sparsity format", sparsity.get("format", "dense"), ("dense",))
    schemes = settings.get("config_groups")
    if not isinstance(schemes, dict) or not all(isinstance(scheme, dict) for scheme in schemes.values()):
        raise CorruptedFile(f"{checkpoint.folder}: quantization_config has no object 'config_groups'")
    found = []
    for name in checkpoint.names():
        if name.endswith(".weight_packed"):
            found.append(
                _packed(checkpoint, stem := name.removesuffix(".weight_packed"), _weights(checkpoint, schemes, stem))
            )
        elif name.endswith(".weight") and checkpoint.dtype(name) in DTYPES:
            weights = _weights(checkpoint, schemes, name.removesuffix(".weight"))
            block = weights.get("block_structure") if weights.get("strategy") == "block" else None
            found.append(float8(checkpoint, name, f"{name}_scale", block))
        elif name.endswith(".weight") and checkpoint.dtype(name) == "I8":
            found.append(_bytes(checkpoint, name, _weights(checkpoint, schemes, name.removesuffix(".weight"))))
    held = {part for matrix in found for part in matrix.parts}
    if lost := [
        name for name in checkpoint.names() if name.endswith(("weight_scale", "weight_shape")) and name not in held
    ]:
        raise CorruptedFile(f"{checkpoint.folder} holds {lost[0]!r} without the rest of its matrix; download it again")
    return found


def _weights(checkpoint: Checkpoint, schemes: Mapping[str, Mapping[str, Any]], stem: str) -> Mapping[str, Any]:
    """How the weights of a layer are quantized: the scheme that names it, or else that of its class."""
    by_class = None
    for scheme in schemes.values():
        for target in scheme.get("targets") or ():
            if target == stem or (target.startswith("re:") and re.match(target.removeprefix("re:"), stem)):
                by_class = scheme
                break
            if by_class is None and target == "Linear":
                by_class = scheme
    weights = None if by_class is None else by_class.get("weights")
    if not isinstance(weights, dict):
        raise CorruptedFile(f"{checkpoint.folder}: no group in quantization_config says how {stem} is quantized")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    require_choice(checkpoint, "strategy", strategy, _STRATEGIES)
    if str(weights.get("actorder")).lower() in ("group", "dynamic", "true"):
        raise UnsupportedModel(
            f"{checkpoint.folder}: {stem} is quantized with actorder={weights['actorder']!r}, which compressed-tensors "
            "has given up; take a folder with actorder='weight'"
        )
    return {**weights, "strategy": strategy}


def _packed(checkpoint: Checkpoint, stem: str, weights: Mapping[str, Any]) -> QuantizedMatrix:
    name, words, scale = f"{stem}.weight", f"{stem}.weight_packed", f"{stem}.weight_scale"
    if weights.get("type") == "float":
        require_choice(checkpoint, "num_bits", weights.get("num_bits"), (4,))
        if weights.get("group_size") == 32:
            return mxfp4(checkpoint, name, words, scale)
        return nvfp4(checkpoint, name, words, scale, f"{stem}.weight_global_scale", divided=True)
    bits, sizes, zero = weights.get("num_bits"), f"{stem}.weight_shape", f"{stem}.weight_zero_point"
    require_choice(checkpoint, "num_bits", bits, (2, 3, 4, 5, 6, 8))
    assert isinstance(bits, int)
    symmetric = weights.get("symmetric", True)
    parts = (words, scale, sizes, *(() if symmetric else (zero,)))
    require_parts(checkpoint, {words: WORDS, scale: FLOATS, sizes: WHOLE, **({} if symmetric else {zero: WORDS})})
    shape = tuple(checkpoint.tensor(sizes).tolist())
    if len(shape) != 2 or min(shape) < 1:
        raise CorruptedFile(f"{checkpoint.folder}: {sizes} is {shape}, which is no matrix")
    rows, columns = shape
    require_shape(checkpoint, words, (rows, words_of(columns, bits)))
    size = _group(checkpoint, scale, rows, columns, weights)
    groups = columns // size
    if not symmetric:
        require_shape(checkpoint, zero, (words_of(rows, bits), groups))

    def zeros() -> Tensor:
        if symmetric:
            return torch.full((rows, groups), 1 << (bits - 1))
        return unpack_words(checkpoint.tensor(zero).t().contiguous(), bits, rows).t().long()

    def codes(chosen: Rows | None) -> Tensor:
        return unpack_words(some(checkpoint.tensor(words), chosen), bits, columns)

    return _matrix(checkpoint, name, parts, (rows, columns), (bits, size, scale), codes, zeros)


def _bytes(checkpoint: Checkpoint, name: str, weights: Mapping[str, Any]) -> QuantizedMatrix:
    scale, zero = f"{name}_scale", f"{name}_zero_point"
    require_choice(checkpoint, "num_bits", weights.get("num_bits"), (4, 8))
    symmetric = weights.get("symmetric", True)
    parts = (name, scale, *(() if symmetric else (zero,)))
    require_parts(checkpoint, {scale: FLOATS, **({} if symmetric else {zero: ("I8",)})})
    if len(checkpoint.shape(name)) != 2:
        raise CorruptedFile(f"{checkpoint.folder}: {name} has shape {checkpoint.shape(name)}, which is no matrix")
    rows, columns = checkpoint.shape(name)
    size = _group(checkpoint, scale, rows, columns, weights)
    groups = columns // size

    def zeros() -> Tensor:
        if symmetric:
            return torch.full((rows, groups), 128)
        return checkpoint.tensor(zero).long().reshape(-1, groups).expand(rows, groups) + 128

    def codes(chosen: Rows | None) -> Tensor:
        return (some(checkpoint.tensor(name), chosen).int() + 128).to(torch.uint8)

    if not symmetric and prod(checkpoint.shape(zero)) not in (rows * groups, 1):
        raise CorruptedFile(
            f"{checkpoint.folder}: {zero} has shape {checkpoint.shape(zero)}, its scales {checkpoint.shape(scale)}"
        )
    return _matrix(checkpoint, name, parts, (rows, columns), (8, size, scale), codes, zeros)


def _group(checkpoint: Checkpoint, scale: str, rows: int, columns: int, weights: Mapping[str, Any]) -> int:
    """Inputs that share a scale."""
    shape = checkpoint.shape(scale)
    if weights["strategy"] == "tensor":
        if prod(shape) != 1:
            raise CorruptedFile(f"{checkpoint.folder}: {scale} has shape {shape}; one scale for the tensor is needed")
        return columns
    require_choice(checkpoint, "strategy of integers", weights["strategy"], ("group", "channel"))
    require_shape(checkpoint, scale, (rows, *shape[1:2]) if len(shape) == 2 else (rows,))
    stated = weights.get("group_size") if weights["strategy"] == "group" else -1
    return group_size_of(checkpoint, scale, columns, shape[1] if len(shape) == 2 else 1, stated)


def _matrix(
    checkpoint: Checkpoint,
    name: str,
    parts: tuple[str, ...],
    shape: tuple[int, int],
    stored: tuple[int, int, str],
    codes: Any,
    zeros: Any,
) -> QuantizedMatrix:
    """A matrix of integers.

    Args:
        checkpoint: where it is.
        name: of the tensor that it stands for.
        parts: names of its tensors.
        shape: rows and columns.
        stored: bits of its codes, inputs that share a scale, and name of the scales.
        codes: reads the codes of some rows.
        zeros: reads all zero points.
    """
    bits, size, scale = stored
    rows, columns = shape

    def scales() -> Tensor:
        return read_scales(checkpoint, scale).reshape(-1, columns // size).expand(rows, -1)

    kind = affine_kind(bits, size, scales(), zeros())

    def load(chosen: Rows | None) -> Packable | Tensor:
        return grid(kind, codes(chosen), bits, some(scales(), chosen).contiguous(), some(zeros(), chosen))

    reason = "" if kind else f"their groups are of {size}"
    return QuantizedMatrix(checkpoint, name, parts, shape, kind, load, reason)
