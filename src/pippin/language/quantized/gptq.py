"""Folders of AutoGPTQ and GPTQModel: `qweight`, `qzeros`, `scales` and, for each input, the number of its group.

Notable here:
- codes are packed along the inputs, (words, outputs), and zero points along the outputs, (groups, words); both are
  little-endian bit streams
- version 1 ("gptq") stores each zero point minus one, version 2 ("gptq_v2") as it is
- with act-order the inputs of a group do not lie together: the kernels have no form for that, and the matrix is
  widened; `g_idx` of a folder without act-order counts upward and costs nothing

Source: arXiv:2210.17323; the layout is that of `auto_gptq.nn_modules.qlinear` and `gptqmodel.nn_modules.qlinear`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile
from pippin.core.formats.checkpoint import Checkpoint
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

BITS = (2, 3, 4, 8)
_VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero point


def read(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> list[QuantizedMatrix]:
    """The quantized matrices of a folder.

    Raises:
        UnsupportedModel: bits, a version or a group size that is not known.
        CorruptedFile: parts are missing or contradict each other or the configuration.
    """
    version = settings.get("checkpoint_format") or "gptq"
    require_choice(checkpoint, "checkpoint_format", version, tuple(_VERSIONS))
    require_choice(checkpoint, "pack_dtype", settings.get("pack_dtype", "int32"), ("int32",))
    require_choice(checkpoint, "is_marlin_format", bool(settings.get("is_marlin_format")), (False,))
    stems = [name.removesuffix(".qweight") for name in checkpoint.names() if name.endswith(".qweight")]
    return [_matrix(checkpoint, stem, _layer_settings(settings, stem), _VERSIONS[version]) for stem in stems]


def _layer_settings(settings: Mapping[str, Any], stem: str) -> Mapping[str, Any]:
    """The settings of one layer: rules of GPTQModel ("+:pattern") override those of the model."""
    for pattern, changes in (settings.get("dynamic") or {}).items():
        if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), stem):
            return {**settings, **changes}
    return settings


def _matrix(checkpoint: Checkpoint, stem: str, settings: Mapping[str, Any], added: int) -> QuantizedMatrix:
    words, zero_words, scale_name, order = (f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    held = order in checkpoint.names()
    parts = (words, zero_words, scale_name, *((order,) if held else ()))
    types = (WORDS, WORDS, FLOATS, WHOLE)
    require_parts(checkpoint, dict(zip(parts, types, strict=False)))
    bits = settings.get("bits")
    require_choice(checkpoint, "bits", bits, BITS)
    assert isinstance(bits, int)
    stored = checkpoint.shape(words)
    if len(stored) != 2 or len(checkpoint.shape(scale_name)) != 2:
        raise CorruptedFile(f"{checkpoint.folder}: {words} and {scale_name} are no matrices")
    rows, columns = stored[1], checkpoint.shape(order)[0] if held else stored[0] * 32 // bits
    require_shape(checkpoint, words, (words_of(columns, bits), rows))
    groups = checkpoint.shape(scale_name)[0]
    require_shape(checkpoint, scale_name, (groups, rows))
    require_shape(checkpoint, zero_words, (groups, words_of(rows, bits)))
    size = group_size_of(checkpoint, scale_name, columns, groups, settings.get("group_size", 0))
    scales = read_scales(checkpoint, scale_name).t()
    zeros = unpack_words(checkpoint.tensor(zero_words), bits, rows).t().long() + added
    groups_of = _groups(checkpoint, order, groups) if held else None
    ordered = groups_of is None or torch.equal(groups_of, torch.arange(columns) // size)
    kind = affine_kind(bits, size, scales, zeros) if ordered else ""

    def load(chosen: Rows | None) -> Packable | Tensor:
        codes = unpack_words(some(checkpoint.tensor(words), chosen, 1).t().contiguous(), bits, columns)
        own_scales, own_zeros = some(checkpoint.tensor(scale_name).t().float(), chosen), some(_zeros(), chosen)
        if groups_of is None or ordered:
            return grid(kind, codes, bits, own_scales.contiguous(), own_zeros)
        return own_scales[:, groups_of] * (codes - own_zeros[:, groups_of]).float()

    def _zeros() -> Tensor:
        return unpack_words(checkpoint.tensor(zero_words), bits, rows).t().long() + added

    reason = "" if kind else "their inputs are grouped by act-order" if not ordered else f"their groups are of {size}"
    return QuantizedMatrix(checkpoint, f"{stem}.weight", parts, (rows, columns), kind, load, reason)


def _groups(checkpoint: Checkpoint, name: str, count: int) -> Tensor:
    """The group of each input."""
    groups = checkpoint.tensor(name).long()
    if groups.ndim != 1 or not len(groups) or int(groups.min()) < 0 or int(groups.max()) >= count:
        raise CorruptedFile(f"{checkpoint.folder}: {name} names groups that have no scales: there are {count}")
    return groups
