"""Eight-bit floats with a scale for the tensor, for each row, or for each block.

Notable here:
- a value has four significant bits, so that its product with a scale in bfloat16 is exact in float32; the kernels have
  no form for it, so it is widened
- blocks at the edges of a matrix may be partial

Source: arXiv:2412.19437, section 3.3; `transformers.integrations.finegrained_fp8`, `compressed_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final

from torch import Tensor

from pippin.core.errors import CorruptedFile
from pippin.core.formats.checkpoint import Checkpoint
from pippin.language.quantized.matrix import (
    FLOATS,
    QuantizedMatrix,
    Rows,
    read_scales,
    require_choice,
    require_parts,
    some,
)

DTYPES: Final = ("F8_E4M3", "F8_E5M2")
_REASON: Final = "the kernels have no 8-bit floats"


def read(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> list[QuantizedMatrix]:
    """The quantized matrices of a folder of DeepSeek's layout: each scale is that of a block of a weight.

    Raises:
        UnsupportedModel: a format that is not known.
        CorruptedFile: parts are missing or contradict each other or the configuration.
    """
    require_choice(checkpoint, "fmt", settings.get("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    block = settings.get("weight_block_size")
    found = []
    for name in checkpoint.names():
        if checkpoint.dtype(name) in DTYPES and not name.endswith("_scale_inv"):
            require_parts(checkpoint, {f"{name}_scale_inv": FLOATS})
            stated = block if len(checkpoint.shape(f"{name}_scale_inv")) > 1 else None
            found.append(float8(checkpoint, name, f"{name}_scale_inv", stated))
    return found


def float8(checkpoint: Checkpoint, name: str, scale: str, block: Any) -> QuantizedMatrix:
    """A matrix, or those of all experts, of 8-bit floats.

    Args:
        checkpoint: where it is.
        name: of the values.
        scale: name of the scales: one, one for each row, or one for each block.
        block: rows and columns of a block; None for a scale of the tensor or of each row.

    Raises:
        CorruptedFile: parts are missing or contradict each other.
    """
    require_parts(checkpoint, {name: DTYPES, scale: FLOATS})
    shape, count = checkpoint.shape(name), prod(checkpoint.shape(scale))
    if len(shape) < 2:
        raise CorruptedFile(f"{checkpoint.folder}: {name} has shape {shape}, which is no matrix")
    *experts, rows, columns = shape
    if block is None:
        tall, wide = (1 if count == prod(shape[:-1]) else rows), columns
    elif isinstance(block, list) and len(block) == 2 and all(isinstance(side, int) and side > 0 for side in block):
        tall, wide = block
    else:
        raise CorruptedFile(f"{checkpoint.folder}: the blocks of {name} are {block!r:.40}; download config.json again")
    blocks = (*experts, -(-rows // tall), -(-columns // wide))
    whole = block is None and count == 1
    if not whole and (count != prod(blocks) or (block is not None and checkpoint.shape(scale) != blocks)):
        raise CorruptedFile(
            f"{checkpoint.folder}: {scale} has shape {checkpoint.shape(scale)}, {name} of {shape} in blocks of "
            f"{tall} x {wide} needs {blocks}"
        )
    read_scales(checkpoint, scale)

    def load(chosen: Rows | None) -> Tensor:
        values = some(checkpoint.tensor(name).reshape(-1, columns), chosen).float()
        scales = checkpoint.tensor(scale).float()
        scales = scales.reshape(()).expand(blocks) if whole else scales.reshape(blocks)
        by_row = scales.repeat_interleave(tall, -2)[..., :rows, :].reshape(-1, blocks[-1])
        return values.mul_(some(by_row, chosen).repeat_interleave(wide, 1)[:, :columns])

    return QuantizedMatrix(checkpoint, name, (name, scale), shape, "", load, _REASON)
