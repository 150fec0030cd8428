"""Dequantization of ggml's formats with codebooks: the IQ formats of one to three bits.

Notable here:
- eight (or four) weights are one point of a grid that the format fixes, times their signs and the scale of a few points
- the grids are data of the formats and lie beside this file; they are unpacked once, when the first such tensor is read
- seven sign bits stand for eight: the number of minus signs is even

Source: the layouts of ggml-common.h and the reference `gguf.quants` (both from ggml-org/llama.cpp).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_GRIDS = Path(__file__).with_name("ggml_grids.json")
_DELTA = 0.125  # by which the points of IQ1 are shifted


@cache
def _grid(name: str) -> Tensor:
    """The points of a format's grid, float32 of shape `points length`."""
    entry = json.loads(_GRIDS.read_text())[name]
    stored = np.frombuffer(base64.b64decode(entry["points"]), dtype=np.uint8)
    bits = np.unpackbits(stored, bitorder="little").reshape(-1, entry["bits"])
    indices = bits @ (1 << np.arange(entry["bits"]))
    return torch.tensor(entry["levels"], dtype=torch.float32)[torch.from_numpy(indices)].view(-1, entry["length"])


def _points(name: str, indices: Tensor) -> Tensor:
    """The points with these indices: `blocks indices*length`."""
    grid = _grid(name)
    return grid.index_select(0, indices.flatten().int()).view(len(indices), -1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 number at a byte of each block, as float32 of shape `blocks 1`."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _words(blocks: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Little-endian unsigned integers of 16 or 32 bits, as int64."""
    words = blocks[:, start:end].contiguous().view(dtype).long()
    return words & (0xFFFF if dtype == torch.int16 else 0xFFFFFFFF)


def _fields(words: Tensor, shifts: list[int], mask: int) -> Tensor:
    """Bit fields of each word, one after the other: `blocks words*shifts`."""
    return ((words[..., None] >> torch.tensor(shifts)) & mask).flatten(1)


def _signs(bits: Tensor) -> Tensor:
    """Plus and minus one for the eight bits of each number, float32 of shape `blocks numbers*8`."""
    return 1.0 - 2.0 * _fields(bits.long(), list(range(8)), 1).float()


def _even_signs(sevens: Tensor) -> Tensor:
    """Signs of seven bits each; the eighth makes the number of minus signs even."""
    parity = sum((sevens >> shift) & 1 for shift in range(7)) & 1
    return _signs(sevens | (parity << 7))


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Values times scales, each of a run of equal length."""
    return (values.view(*scale.shape, -1) * scale[..., None]).flatten(1)


def _signed(scale: Tensor, points: Tensor, signs: Tensor) -> Tensor:
    return _scaled(points, scale) * signs


def _nibble_scales(blocks: Tensor, start: int) -> Tensor:
    return _fields(blocks[:, start:].long(), [0, 4], 15).float()


def iq2_xxs(blocks: Tensor) -> Tensor:
    """Dequantize: 2.06 bits per weight."""
    words = _words(blocks, 2, 66, torch.int32).view(len(blocks), -1, 2)
    scale = _half(blocks, 0) * (0.5 + (words[..., 1] >> 28).float()) * 0.25
    points = _points("IQ2_XXS", _fields(words[..., 0], [0, 8, 16, 24], 255))
    return _signed(scale, points, _even_signs(_fields(words[..., 1], [0, 7, 14, 21], 127)))


def iq2_xs(blocks: Tensor) -> Tensor:
    """Dequantize: 2.31 bits per weight."""
    words = _words(blocks, 2, 66, torch.int16)
    scale = _half(blocks, 0) * (0.5 + _nibble_scales(blocks, 66)) * 0.25
    return _signed(scale, _points("IQ2_XS", words & 511), _even_signs(words >> 9))


def iq2_s(blocks: Tensor) -> Tensor:
    """Dequantize: 2.56 bits per weight."""
    scale = _half(blocks, 0) * (0.5 + _nibble_scales(blocks, 74)) * 0.25
    indices = blocks[:, 2:34].long() | (_fields(blocks[:, 66:74].long(), [0, 2, 4, 6], 3) << 8)
    return _signed(scale, _points("IQ2_S", indices), _signs(blocks[:, 34:66]))


def iq3_xxs(blocks: Tensor) -> Tensor:
    """Dequantize: 3.06 bits per weight."""
    words = _words(blocks, 66, 98, torch.int32)
    scale = _half(blocks, 0) * (0.5 + (words >> 28).float()) * 0.5
    return _signed(scale, _points("IQ3_XXS", blocks[:, 2:66]), _even_signs(_fields(words, [0, 7, 14, 21], 127)))


def iq3_s(blocks: Tensor) -> Tensor:
    """Dequantize: 3.44 bits per weight."""
    scale = _half(blocks, 0) * (1 + 2 * _nibble_scales(blocks, 106))
    indices = blocks[:, 2:66].long() | (_fields(blocks[:, 66:74].long(), list(range(8)), 1) << 8)
    return _signed(scale, _points("IQ3_S", indices), _signs(blocks[:, 74:106]))


def iq1_s(blocks: Tensor) -> Tensor:
    """Dequantize: 1.56 bits per weight."""
    words = _words(blocks, 34, 50, torch.int16)
    scale = _half(blocks, 0) * (2 * ((words >> 12) & 7) + 1).float()
    indices = blocks[:, 2:34].long() | (_fields(words, [0, 3, 6, 9], 7) << 8)
    shift = _DELTA - 2 * _DELTA * (words >> 15).float()
    points = _points("IQ1_S", indices).view(*shift.shape, -1) + shift[..., None]
    return _scaled(points.flatten(1), scale)


def iq1_m(blocks: Tensor) -> Tensor:
    """Dequantize: 1.75 bits per weight; the factor of a block lies in four parts."""
    words = _words(blocks, 48, 56, torch.int16)
    parts = (words & 0xF000) >> torch.tensor([12, 8, 4, 0])
    factor = parts.sum(1, keepdim=True).to(torch.int16).view(torch.float16).float()
    scale = factor * (2 * _fields(words, [0, 3, 6, 9], 7) + 1).float()
    high = _fields(blocks[:, 32:48].long(), [0, 4], 15)
    shift = _DELTA - 2 * _DELTA * (high >> 3).float()
    points = _points("IQ1_S", blocks[:, :32].long() | ((high & 7) << 8)).view(*shift.shape, -1) + shift[..., None]
    return _scaled(points.flatten(1), scale)


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
}
"""The functions of this module by ggml's names of the formats: blocks as in the file to float32."""
