"""Folders of bitsandbytes: NF4 and FP4 (a table of 16 values, a scale for each block) and int8 (a scale for each row).

Notable here:
- blocks run over the values of a matrix in their order, not along its rows
- with double quantization the scales are codes of another table, plus an offset
- levels are not evenly spaced, and int8 rounds twice (times the scale, divided by 127), so the kernels have no form for
  either, and both are widened

Source: arXiv:2305.14314; `bitsandbytes.functional.QuantState` and `dequantize_4bit`, `int8_vectorwise_dequant`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any, Final, cast

import torch
from torch import Tensor

from pippin.core.errors import CorruptedFile
from pippin.core.formats.checkpoint import Checkpoint
from pippin.language.quantized.matrix import (
    BYTES,
    FLOATS,
    QuantizedMatrix,
    Rows,
    read_scales,
    require_choice,
    require_parts,
    require_shape,
    some,
)

_STATES: Final = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_INVERSE: Final = 7.874015718698502e-3  # 1 / 127 as bitsandbytes rounds it


def read(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> list[QuantizedMatrix]:
    """The quantized matrices of a folder.

    Raises:
        CorruptedFile: parts are missing or contradict each other.
    """
    found = []
    for name in checkpoint.names():
        for state in _STATES:
            if name.endswith(state):
                found.append(_four_bits(checkpoint, name.removesuffix(state), name))
        if name.endswith(".weight") and checkpoint.dtype(name) == "I8":
            found.append(_eight_bits(checkpoint, name))
    held = {part for matrix in found for part in matrix.parts}
    for name in checkpoint.names():
        if name.endswith((".absmax", ".quant_map", ".SCB")) and name not in held:
            raise CorruptedFile(f"{checkpoint.folder} holds {name!r} without the rest of its matrix; download it again")
    return found


def _four_bits(checkpoint: Checkpoint, name: str, state_name: str) -> QuantizedMatrix:
    state = _state(checkpoint, state_name)
    nested = "nested_offset" in state
    own = ("absmax", "quant_map", *(("nested_absmax", "nested_quant_map") if nested else ()))
    parts = (name, *(f"{name}.{part}" for part in own), state_name)
    outer = dict.fromkeys(parts[2:-1], FLOATS)
    require_parts(checkpoint, {name: BYTES, parts[1]: BYTES if nested else FLOATS, **outer, state_name: BYTES})
    shape, size = state.get("shape"), state.get("blocksize")
    good = isinstance(shape, list) and len(shape) == 2 and all(isinstance(side, int) and side > 0 for side in shape)
    if not good or not isinstance(size, int) or size < 1:
        raise CorruptedFile(f"{checkpoint.folder}: {state_name} has shape {shape!r:.40} and blocks of {size!r:.40}")
    rows, columns = cast("list[int]", shape)
    count = rows * columns
    if prod(checkpoint.shape(name)) != -(-count // 2):
        raise CorruptedFile(f"{checkpoint.folder}: {name} has {prod(checkpoint.shape(name))} bytes for {count} codes")
    require_shape(checkpoint, f"{name}.absmax", (-(-count // size),))
    require_shape(checkpoint, f"{name}.quant_map", (16,))
    scales = _scales(checkpoint, name, state)
    if not scales.isfinite().all():
        raise CorruptedFile(f"{checkpoint.folder}: {name}.absmax has a scale that is not finite; download it again")

    def load(chosen: Rows | None) -> Tensor:
        packed, table = checkpoint.tensor(name).reshape(-1), checkpoint.tensor(f"{name}.quant_map").float()
        codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[:count]
        factors = _scales(checkpoint, name, state).repeat_interleave(size)[:count]
        return some(table[codes.int()].mul_(factors).view(rows, columns), chosen)

    reason = "its levels are not evenly spaced"
    return QuantizedMatrix(checkpoint, name, parts, (rows, columns), "", load, reason)


def _state(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """The settings of a matrix, which are JSON in a tensor of bytes."""
    try:
        state = json.loads(bytes(checkpoint.tensor(name).tolist()))
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptedFile(f"{checkpoint.folder}: {name} is not JSON: {error}; download it again") from error
    if not isinstance(state, dict):
        raise CorruptedFile(f"{checkpoint.folder}: {name} is no JSON object; download it again")
    require_choice(checkpoint, "quant_type", state.get("quant_type"), ("nf4", "fp4"))
    return state


def _scales(checkpoint: Checkpoint, name: str, state: Mapping[str, Any]) -> Tensor:
    """The scale of each block, float32."""
    stored = checkpoint.tensor(f"{name}.absmax")
    if "nested_offset" not in state:
        return stored.float()
    table, outer = (checkpoint.tensor(f"{name}.nested_{part}").float() for part in ("quant_map", "absmax"))
    size = state.get("nested_blocksize")
    if not isinstance(size, int) or size < 1 or table.shape != (256,) or outer.numel() != -(-stored.numel() // size):
        raise CorruptedFile(f"{checkpoint.folder}: the nested scales of {name} do not fit its {stored.numel()} blocks")
    scales = table[stored.int()] * outer.flatten().repeat_interleave(size)[: stored.numel()]
    return scales + torch.tensor(float(state["nested_offset"]))


def _eight_bits(checkpoint: Checkpoint, name: str) -> QuantizedMatrix:
    parts = (name, scale := name.removesuffix("weight") + "SCB")
    require_parts(checkpoint, {scale: FLOATS})
    shape = checkpoint.shape(name)
    if len(shape) != 2:
        raise CorruptedFile(f"{checkpoint.folder}: {name} has shape {shape}, which is no matrix")
    require_shape(checkpoint, scale, shape[:1])
    read_scales(checkpoint, scale, zeros=True)

    def load(chosen: Rows | None) -> Tensor:
        scales = some(checkpoint.tensor(scale).float(), chosen)
        return some(checkpoint.tensor(name), chosen).float().mul_(scales[:, None]).mul_(_INVERSE)

    return QuantizedMatrix(checkpoint, name, parts, shape, "", load, "their scales are divided by 127")
