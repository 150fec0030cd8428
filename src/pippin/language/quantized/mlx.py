r"""Folders of MLX: codes with a scale and a bias for each group, of 2, 3, 4, 5, 6 or 8 bits, and MXFP4.

Notable here:
- codes of a row are a little-endian bit stream in 32-bit words, $w = s\,c + b$
- a layer may have bits and a group size of its own, or none; the shapes say which it is, for a bit stream of b bits and
  one scale for each g inputs fix the product of both, and the configuration the rest
- experts lie in one tensor (experts, outputs, words)

Source: `mlx.core.quantize` and `mlx_lm.utils.load_model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile
from pippin.core.formats.checkpoint import Checkpoint
from pippin.language.quantized.float4 import mxfp4
from pippin.language.quantized.matrix import (
    FLOATS,
    WORDS,
    Packable,
    QuantizedMatrix,
    Rows,
    group_size_of,
    read_scales,
    require_choice,
    require_parts,
    require_shape,
    some,
)
from pippin.nn.quantization.affine import AffineCodes, affine_kind
from pippin.nn.quantization.codes import unpack_words, words_of

BITS = (2, 3, 4, 5, 6, 8)


def read(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> list[QuantizedMatrix]:
    """The quantized matrices of a folder.

    Raises:
        UnsupportedModel: bits or a mode that is not known, a group size that does not divide the inputs.
        CorruptedFile: parts are missing or contradict each other or the configuration.
    """
    names = set(checkpoint.names())
    stems = [name.removesuffix(".scales") for name in checkpoint.names() if name.endswith(".scales")]
    stems += [name.removesuffix(".biases") for name in checkpoint.names() if name.endswith(".biases")]
    return [_matrix(checkpoint, stem, settings, f"{stem}.biases" in names) for stem in dict.fromkeys(stems)]


def _matrix(checkpoint: Checkpoint, stem: str, settings: Mapping[str, Any], has_biases: bool) -> QuantizedMatrix:
    own = settings.get(stem)
    stated = {**settings, **own} if isinstance(own, Mapping) else settings
    mode = stated.get("mode", "affine")
    require_choice(checkpoint, "mode", mode, ("affine", "mxfp4"))
    words, scale_name, bias_name = (f"{stem}.{part}" for part in ("weight", "scales", "biases"))
    if mode == "mxfp4" and not has_biases:
        return mxfp4(checkpoint, f"{stem}.weight", words, scale_name)
    parts = (words, scale_name, bias_name)
    require_parts(checkpoint, {words: WORDS, scale_name: FLOATS, bias_name: FLOATS})
    bits, shape = stated.get("bits"), checkpoint.shape(scale_name)
    require_choice(checkpoint, "bits", bits, BITS)
    assert isinstance(bits, int)
    if len(shape) < 2 or checkpoint.shape(words)[:-1] != shape[:-1]:
        raise CorruptedFile(f"{checkpoint.folder}: {words} and {scale_name} differ in their rows")
    size = stated.get("group_size")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise CorruptedFile(f"{checkpoint.folder}: quantization of {stem} has group_size {size!r:.40}")
    columns = shape[-1] * size
    require_shape(checkpoint, words, (*shape[:-1], words_of(columns, bits)))
    require_shape(checkpoint, bias_name, shape)
    group_size_of(checkpoint, scale_name, columns, shape[-1], size)
    scales = read_scales(checkpoint, scale_name)
    read_scales(checkpoint, bias_name, zeros=True)
    kind = affine_kind(bits, size, scales.flatten(0, -2), None)

    def load(chosen: Rows | None) -> Packable | Tensor:
        tensors = (
            checkpoint.tensor(words).view(torch.int32),
            checkpoint.tensor(scale_name),
            checkpoint.tensor(bias_name),
        )
        flat = [some(tensor.reshape(prod(shape[:-1]), -1), chosen) for tensor in tensors]
        codes, own_scales, biases = flat
        found = unpack_words(codes, bits, columns)
        return AffineCodes(found, own_scales.float().contiguous(), biases.float().contiguous(), bits)

    reason = "" if kind else f"their groups are of {size}"
    return QuantizedMatrix(checkpoint, words, parts, (*shape[:-1], columns), kind, load, reason)
