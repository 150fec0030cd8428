"""Codes on disk against a bit-by-bit reading, and packed weights against the values that are meant."""

import pytest
import torch
from hypothesis import given, strategies as st

from pippin.core import native
from pippin.core.errors import InvalidArgument
from pippin.nn.quantization.codes import Codes, native_group, words_of
from pippin.nn.quantization.packed import BITS
from pippin.nn.quantization.palette import Palette

with_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")


def random_codes(bits: int, rows: int, columns: int, groups: int = 1, seed: int = 0) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(rows, groups, generator=generator) + 0.1).half()
    return Codes(codes, scales, bits, (2**bits - 1) / 2)


def bit_by_bit(words: torch.Tensor, bits: int, columns: int) -> list[list[int]]:
    """Code j is bits [j * bits, (j + 1) * bits) of a row that is one whole number, little end first."""
    rows = []
    for row in words.tolist():
        whole = sum((word & 0xFFFFFFFF) << 32 * place for place, word in enumerate(row))
        rows.append([whole >> j * bits & (1 << bits) - 1 for j in range(columns)])
    return rows


@given(st.sampled_from(BITS), st.integers(1, 4), st.integers(1, 70), st.integers(0, 99))
def test_words_hold_the_codes_bit_by_bit_and_give_them_back(bits, rows, columns, seed):
    weight = random_codes(bits, rows, columns, seed=seed)
    words = weight.words()
    assert words.dtype == torch.int32
    assert bit_by_bit(words, bits, columns) == weight.codes.tolist()
    again = Codes.from_words(words, weight.scales, bits, columns, weight.zero_point)
    assert torch.equal(again.codes, weight.codes)


def test_sixteen_two_bit_codes_are_one_word():
    codes = torch.tensor([[3] + [0] * 14 + [2]], dtype=torch.uint8)
    assert Codes(codes, torch.ones(1, 1).half(), 2, 1.5).words().tolist() == [[3 - (1 << 31)]]


@pytest.mark.parametrize("bits", BITS)
def test_bytes_on_disk_are_those_that_are_counted(bits):
    weight = random_codes(bits, 6, 100, groups=4)
    assert weight.nbytes == weight.words().nbytes + weight.scales.nbytes
    assert weight.nbytes == 6 * words_of(100, bits) * 4 + 6 * 4 * 2


def test_dense_is_scale_times_code_less_zero_for_every_way_of_sharing_scales():
    codes = torch.randint(0, 4, (4, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for scales in (torch.rand(1, 1), torch.rand(4, 1), torch.rand(4, 2), torch.rand(1, 4)):
        found = Codes(codes, scales.half(), 2, 2.0).dense()
        for r in range(4):
            for c in range(8):
                scale = scales.half().float()[r if len(scales) > 1 else 0, c // (8 // scales.shape[1])]
                assert found[r, c] == scale * (int(codes[r, c]) - 2.0)


@with_kernels
@pytest.mark.parametrize(("columns", "groups", "kernel"), [(128, 1, 128), (128, 2, 64), (96, 1, 32), (256, 8, 32)])
def test_the_packed_weight_is_the_same_to_the_bit(columns, groups, kernel):
    for bits in BITS:
        weight = random_codes(bits, 40, columns, groups)
        assert weight.native_group == kernel
        assert torch.equal(weight.pack().dense(), weight.dense())
    whole = Codes(weight.codes, weight.scales[:1], 8, 100.0)
    assert torch.equal(whole.pack().dense(), whole.dense())


def test_what_the_kernels_have_no_group_for_is_refused():
    assert native_group(48) is None
    with pytest.raises(InvalidArgument, match="groups of 48 inputs have no kernels"):
        random_codes(2, 2, 48).pack()


@pytest.mark.parametrize(
    ("codes", "scales", "bits", "message"),
    [
        (torch.zeros(2, 4), torch.ones(2, 1), 5, "bits must be 2, 3, 4 or 8, got 5"),
        (torch.full((2, 4), 4), torch.ones(2, 1), 2, "a code is 4; 2 bits hold up to 3"),
        (torch.zeros(2, 4), torch.ones(2, 3), 2, "scales of 2 x 3 do not fit codes of 2 x 4"),
        (torch.zeros(3, 4), torch.ones(2, 1), 2, "scales of 2 x 1"),
        (torch.zeros(2, 4), torch.full((2, 1), torch.inf), 2, "a scale is not finite"),
    ],
)
def test_codes_that_mean_nothing_are_refused(codes, scales, bits, message):
    with pytest.raises(InvalidArgument, match=message):
        Codes(codes.to(torch.uint8), scales.half(), bits, 1.5)


def test_words_of_another_length_are_refused():
    with pytest.raises(InvalidArgument, match="40 codes of 2 bits take 3 words a row, not 2"):
        Codes.from_words(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 1).half(), 2, 40, 1.5)


@given(st.sampled_from(["rows", "columns"]), st.integers(1, 7), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_a_palette_means_the_entry_of_its_groups_table(axis, group, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, 8, (rows, columns), dtype=torch.uint8, generator=generator)
    groups = -(-(rows if axis == "rows" else columns) // group)
    tables = torch.randn(groups, 8, generator=generator).half()
    dense = Palette(indices, tables, 3, axis, group).dense()
    for r in range(rows):
        for c in range(columns):
            assert dense[r, c] == tables[(r if axis == "rows" else c) // group, int(indices[r, c])].float()


@pytest.mark.parametrize(
    ("tables", "axis", "group", "message"),
    [
        (torch.zeros(2, 4), "rows", 2, "2, 4.* do not fit 2 rows in groups of 2"),
        (torch.zeros(2, 3), "rows", 1, "do not fit"),
        (torch.zeros(2, 4), "rows", 0, "group_size must be at least 1"),
        (torch.full((2, 4), torch.nan), "rows", 1, "not finite"),
    ],
)
def test_a_palette_whose_tables_do_not_fit_is_refused(tables, axis, group, message):
    with pytest.raises(InvalidArgument, match=message):
        Palette(torch.zeros(2, 5, dtype=torch.uint8), tables.half(), 2, axis, group)
