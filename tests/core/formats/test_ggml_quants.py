"""Oracle: the numpy reference of the `gguf` package, on blocks of random bytes, for every supported type."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from pippin.core.errors import UnsupportedModel
from pippin.core.formats.ggml_quants import (
    _READERS,
    FORMATS,
    _formats,
    dequantize_blocks,
    kernel_kind,
    ternary_codes,
    to_q8_0,
)


def random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(
        0, 256, (count, GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]), np.uint8
    )


def reference(blocks: np.ndarray, name: str) -> torch.Tensor:
    with np.errstate(all="ignore"):  # random bytes make infinite scales too
        return torch.from_numpy(np.array(dequantize(blocks, GGMLQuantizationType[name])))


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    integer = torch.int32 if ours.dtype == torch.float32 else torch.int16
    finite = ~theirs.isnan()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[finite].view(integer), theirs[finite].view(integer))


@pytest.mark.parametrize("name", _READERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_blocks_give_the_reference_bit_for_bit(name, dtype):
    blocks = random_blocks(name, 500)
    expected = reference(blocks, name).reshape(500, -1)
    assert_same_bits(dequantize_blocks(torch.from_numpy(blocks), name, dtype), expected.to(dtype))


def test_pieces_join_without_a_seam():
    blocks = random_blocks("Q4_K", 3 * 4096 + 5)
    assert_same_bits(dequantize_blocks(torch.from_numpy(blocks), "Q4_K", torch.float32), reference(blocks, "Q4_K"))


def test_the_table_of_formats_is_that_of_the_reference():
    expected = {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    assert {number: (form.name, form.size, form.nbytes) for number, form in _formats().items()} == expected
    assert _formats() == FORMATS


def test_values_do_not_share_memory_with_the_blocks():
    blocks = torch.zeros(4, 4, dtype=torch.uint8)
    values = dequantize_blocks(blocks, "F32", torch.float32)
    blocks.fill_(255)
    assert values.tolist() == [[0.0]] * 4


def test_an_unsupported_type_is_named():
    with pytest.raises(UnsupportedModel, match="type Q8_K cannot be read; supported types: F32"):
        dequantize_blocks(torch.zeros(1, 292, dtype=torch.uint8), "Q8_K", torch.float32)


def test_every_type_that_the_reference_dequantizes_is_read():
    theirs = {kind.name for kind in quants._type_traits}
    assert theirs | {"F32", "F16"} == set(_READERS)


@pytest.mark.parametrize("name", ["IQ4_NL", "MXFP4"])
def test_types_without_kernels_become_q8_0_with_the_same_values(name):
    blocks = random_blocks(name, 60)
    if name == "MXFP4":
        blocks[:, 0] = np.arange(104, 164) % 40 + 104  # every exponent that half precision holds
        blocks[3] = 0  # a block of zeros, whose scale is too small
    rows = torch.from_numpy(blocks).view(6, -1)
    as_q8 = to_q8_0(rows, name)
    assert kernel_kind(name) == "Q8_0"
    theirs = reference(blocks, name)
    ours = reference(as_q8.view(60, -1).numpy(), "Q8_0")
    assert torch.equal(ours.nan_to_num(7.0), theirs.reshape(60, -1).nan_to_num(7.0))
    assert to_q8_0(as_q8, "Q8_0") is as_q8


def test_scales_beyond_half_precision_are_refused():
    blocks = torch.full((1, 17), 1, dtype=torch.uint8)
    with pytest.raises(UnsupportedModel, match="beyond half precision"):
        to_q8_0(blocks, "MXFP4")


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_ternary_types_become_codes_with_the_same_values(name):
    blocks = quantize(np.random.default_rng(0).standard_normal((6, 512), np.float32), GGMLQuantizationType[name])
    codes, scales = ternary_codes(torch.from_numpy(blocks), name)
    assert kernel_kind(name) == "INT2/128"
    dense = (codes.float() - 1) * scales.float().repeat_interleave(256, 1)
    assert torch.equal(dense, reference(blocks, name))
