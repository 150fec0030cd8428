"""Oracle: the numpy reference of the `gguf` package, on blocks of random bytes, for every supported type."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from pippin.core.errors import UnsupportedModel
from pippin.core.formats.ggml_quants import _READERS, FORMATS, _formats, dequantize_blocks


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
    with pytest.raises(UnsupportedModel, match="type IQ1_S cannot be read; supported types: F32"):
        dequantize_blocks(torch.zeros(1, 50, dtype=torch.uint8), "IQ1_S", torch.float32)
