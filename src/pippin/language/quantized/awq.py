"""Folders of AutoAWQ: 4-bit codes packed along the outputs, eight in a word in an order of their own.

Notable here:
- nibble i of a word is output 0, 2, 4, 6, 1, 3, 5, 7 of its eight

Source: arXiv:2306.00978; the layout "gemm" of `awq.modules.linear.gemm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile
from pippin.core.formats.checkpoint import Checkpoint
from pippin.language.quantized.matrix import (
    FLOATS,
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
from pippin.nn.quantization.codes import unpack_words

ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each nibble of a word."""
_PLACE: Final = tuple(ORDER.index(output) for output in range(8))


def read(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> list[QuantizedMatrix]:
    """The quantized matrices of a folder.

    Raises:
        UnsupportedModel: bits, a version or a group size that is not known.
        CorruptedFile: parts are missing or contradict each other or the configuration.
    """
    require_choice(checkpoint, "version", str(settings.get("version", "gemm")).lower(), ("gemm",))
    require_choice(checkpoint, "bits", settings.get("bits", settings.get("w_bit", 4)), (4,))
    stated = settings.get("group_size", settings.get("q_group_size", 0))
    stems = [name.removesuffix(".qweight") for name in checkpoint.names() if name.endswith(".qweight")]
    return [_matrix(checkpoint, stem, stated) for stem in stems]


def _matrix(checkpoint: Checkpoint, stem: str, stated: Any) -> QuantizedMatrix:
    parts = words, zero_words, scale_name = f"{stem}.qweight", f"{stem}.qzeros", f"{stem}.scales"
    require_parts(checkpoint, {words: WORDS, zero_words: WORDS, scale_name: FLOATS})
    if len(checkpoint.shape(words)) != 2 or len(checkpoint.shape(scale_name)) != 2:
        raise CorruptedFile(f"{checkpoint.folder}: {words} and {scale_name} are no matrices")
    columns, rows, groups = checkpoint.shape(words)[0], checkpoint.shape(words)[1] * 8, checkpoint.shape(scale_name)[0]
    require_shape(checkpoint, scale_name, (groups, rows))
    require_shape(checkpoint, zero_words, (groups, rows // 8))
    size = group_size_of(checkpoint, scale_name, columns, groups, stated)
    kind = affine_kind(
        4, size, read_scales(checkpoint, scale_name).t(), _outputs(checkpoint.tensor(zero_words)).t().long()
    )

    def load(chosen: Rows | None) -> Packable | Tensor:
        codes = some(_outputs(checkpoint.tensor(words)), chosen, 1).t().contiguous()
        scales = some(checkpoint.tensor(scale_name), chosen, 1).t().float().contiguous()
        own_zeros = some(_outputs(checkpoint.tensor(zero_words)), chosen, 1).t().long()
        return grid(kind, codes, 4, scales, own_zeros)

    reason = "" if kind else f"their groups are of {size}"
    return QuantizedMatrix(checkpoint, f"{stem}.weight", parts, (rows, columns), kind, load, reason)


def _outputs(words: Tensor) -> Tensor:
    """The codes of words along the outputs (rows, outputs)."""
    codes = unpack_words(words, 4, words.shape[1] * 8)
    return codes.view(len(words), -1, 8)[:, :, torch.tensor(_PLACE)].flatten(1)
