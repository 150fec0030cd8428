"""Packing: the library's rows against the `gguf` package's own reading of the same bytes, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pippin.core import native
from pippin.core.errors import InvalidArgument

from .matrices import (
    AFFINE,
    DENSE,
    FORMATS,
    GGML,
    OURS,
    address,
    aligned,
    block_of,
    library,
    pack_affine,
    pack_codes,
    pack_dense,
    pack_ggml,
    random_blocks,
    random_matrix,
)

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"native kernels: {native.unavailable_reason()}")


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype == np.float32 and np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
@given(st.integers(1, 40), st.integers(1, 3), st.sampled_from(["usual", "extreme"]), st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_rows_are_the_reference_values_to_the_bit(name, rows, blocks, kind, seed):
    packed = random_matrix(np.random.default_rng(seed), name, rows, blocks * block_of(name), kind)
    assert same_bits(packed.rows(), packed.values)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "INT3/64", "BF16"])
def test_rows_come_in_the_order_asked_for(name):
    packed = random_matrix(np.random.default_rng(0), name, 37, 256)
    ids = np.array([36, 0, 17, 17, 15, 16])
    assert same_bits(packed.rows(ids), packed.values[ids])
    assert packed.rows(np.array([], np.int64)).shape == (0, 256)


def test_every_half_precision_scale_is_read_exactly():
    # all 65,536 bit patterns as scales of blocks whose codes are 1: the value is the scale itself
    scales = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(np.float16).reshape(-1, 1)
    codes = np.ones((65536, 32), np.uint8)
    found = pack_codes("INT2/32", codes, scales, zero=0.0).rows()[:, 0]
    expected = scales[:, 0].astype(np.float32)
    finite = np.isfinite(expected)
    assert same_bits(found[finite], expected[finite])
    assert np.array_equal(found, expected, equal_nan=True)


def test_infinite_and_missing_scales_stay_what_they_are():
    blocks = random_blocks(np.random.default_rng(1), "Q4_1", 3, 64)
    for row, scale in enumerate((np.inf, -np.inf, np.nan)):
        blocks[row, :2] = np.array([scale], np.float16).view(np.uint8)
    packed = pack_ggml("Q4_1", blocks, 64)
    assert not np.isfinite(packed.values[:, :32]).any()
    assert np.array_equal(packed.rows(), packed.values, equal_nan=True)


@pytest.mark.parametrize("columns", [1, 2, 3, 31, 577])
@pytest.mark.parametrize("name", DENSE)
def test_dense_rows_may_lie_apart_and_have_any_length(name, columns):
    wide = np.random.default_rng(2).standard_normal((21, columns + 5)).astype(np.float32)
    values = (wide.view(np.uint32) & 0xFFFF0000).view(np.float32)[:, :columns]
    assert same_bits(pack_dense(name, values).rows(), np.ascontiguousarray(values))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *[("Q4_0", 4.5), ("Q4_1", 5), ("Q5_0", 5.5), ("Q5_1", 6), ("Q8_0", 8.5), ("Q6_K", 6.5625), ("F32", 32)],
        *[("Q4_K", 4.625), ("Q5_K", 5.625), ("INT2/64", 2.25), ("INT3/128", 3.125), ("INT4/32", 4.5)],
        *[("INT8/64", 8.25), ("BF16", 16), ("AFFINE4/64", 5), ("AFFINE4/128", 4.5), ("AFFINE5/32", 7)],
    ],
)
def test_size_is_that_of_the_file_but_for_wider_inner_scales(name, bits):
    packed = random_matrix(np.random.default_rng(3), name, 32, 512)
    assert 8 * len(packed.data) == bits * 32 * 512
    more = random_matrix(np.random.default_rng(3), name, 33, 512)  # one row more takes a whole panel
    assert len(more.data) == len(packed.data) * 3 // 2


def test_packing_is_the_same_whatever_the_threads():
    if len(native.instruction_sets()) == 0 or native.device.threads() < 2:
        pytest.skip("one core")
    blocks = random_blocks(np.random.default_rng(4), "Q5_K", 555, 512)
    before = native.threads()
    try:
        native.set_threads(1)
        alone = pack_ggml("Q5_K", blocks, 512)
        native.set_threads(2)
        together = pack_ggml("Q5_K", blocks, 512)
    finally:
        native.set_threads(before)
    assert np.array_equal(alone.data, together.data)


# --- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("form", "group", "rows", "columns", "says"),
    [
        (99, 0, 16, 32, "99 is not a weight format"),
        (1, 0, 16, 32, "1 is not a weight format"),  # F16
        (native.GROUP_FORMATS[2], 48, 16, 96, "a group of 48 for INT2: it must be 32, 64 or 128"),
        (native.GROUP_FORMATS[4], 0, 16, 32, "a group of 0 for INT4"),
        (native.GROUP_FORMATS[4], 64, 16, 96, "96 columns are no multiple of the 64 inputs"),
        (GGML["Q4_1"][0], 0, 16, 33, "33 columns are no multiple of the 32 inputs"),
        (GGML["Q6_K"][0], 0, 16, 128, "128 columns are no multiple of the 256 inputs"),
        (0, 0, 0, 32, "0 rows and 32 columns"),
        (0, 0, 16, 0, "16 rows and 0 columns"),
        (0, 0, -1, 32, "-1 rows"),
        (0, 0, 1 << 40, 32, "both must be 1 to 2^30"),
        (0, 0, 1 << 31, 1 << 31, "both must be"),  # 2^64 bytes
    ],
)
def test_shapes_that_no_format_holds(form, group, rows, columns, says):
    with pytest.raises(InvalidArgument, match=says.replace("^", r"\^")):
        library().packed_bytes(form, group, rows, columns)


def test_formats_that_do_not_fit_the_source():
    buffer, codes = aligned(1 << 16), np.zeros((16, 64), np.uint8)
    with pytest.raises(InvalidArgument, match="INT4 is not a block format of ggml's"):
        library().pack_ggml(native.GROUP_FORMATS[4], address(codes), 16, 64, address(buffer))
    with pytest.raises(InvalidArgument, match="F32 is not a block format of ggml's"):
        library().pack_ggml(0, address(codes), 16, 64, address(buffer))
    with pytest.raises(InvalidArgument, match="Q4_0 is not a dense format"):
        library().pack_dense(2, address(codes), 64, 16, 64, address(buffer))
    with pytest.raises(InvalidArgument, match="Q8_0 is not a format of codes and scales"):
        library().pack_codes(8, 64, address(codes), address(codes), 16, 64, address(buffer))
    affine, ours = native.AFFINE_FORMATS[4], native.GROUP_FORMATS[4]
    with pytest.raises(InvalidArgument, match="AFFINE4 is not a format of codes and scales"):
        library().pack_codes(affine, 64, address(codes), address(codes), 16, 64, address(buffer))
    with pytest.raises(InvalidArgument, match="INT4 is not a format of codes, scales and minima"):
        library().pack_affine(ours, 64, address(codes), address(codes), address(codes), 16, 64, address(buffer))
    with pytest.raises(InvalidArgument, match="the scales are NULL"):
        library().pack_affine(affine, 64, address(codes), address(codes), 0, 16, 64, address(buffer))
    for call in (library().pack_ggml, library().pack_dense, library().pack_codes):
        shape = (64, address(codes)) if call == library().pack_codes else (address(codes),)
        extra = (address(codes),) if call == library().pack_codes else (64,) if call == library().pack_dense else ()
        with pytest.raises(InvalidArgument, match="77 is not a weight format"):
            call(77, *shape, *extra, 16, 64, address(buffer))


def test_buffers_that_are_not_there_or_not_aligned():
    form, source, target = native.GROUP_FORMATS[8], np.zeros((16, 64), np.uint8), aligned(1 << 16)
    scales = np.ones((16, 1), np.float16)
    for wrong in (address(target) + 16, address(target) + 1):
        with pytest.raises(InvalidArgument, match="multiple of 64 bytes"):
            library().pack_codes(form, 64, address(source), address(scales), 16, 64, wrong)
        with pytest.raises(InvalidArgument, match="multiple of 64 bytes"):
            library().pack_ggml(8, address(source), 1, 32, wrong)
        with pytest.raises(InvalidArgument, match="multiple of 64 bytes"):
            library().pack_dense(0, address(source), 4, 4, 4, wrong)
    with pytest.raises(InvalidArgument, match="source or the target is NULL"):
        library().pack_ggml(8, 0, 1, 32, address(target))
    with pytest.raises(InvalidArgument, match="source or the target is NULL"):
        library().pack_dense(0, address(source), 4, 4, 4, 0)
    with pytest.raises(InvalidArgument, match="the scales are NULL"):
        library().pack_codes(form, 64, address(source), 0, 16, 64, address(target))
    with pytest.raises(InvalidArgument, match="a stride of 3 between rows of 4"):
        library().pack_dense(0, address(source), 3, 4, 4, address(target))


@pytest.mark.parametrize("name", [name for name in OURS if OURS[name][0] < 8])
def test_a_code_that_is_too_large_is_named_by_its_row(name):
    bits, group = OURS[name]
    codes = np.full((40, 2 * group), 2**bits - 1, np.uint8)
    scales = np.ones((40, 2), np.float16)
    assert pack_codes(name, codes, scales).rows().max() == (2**bits - 1) / 2
    codes[33, group + 7] = 2**bits
    with pytest.raises(InvalidArgument, match=f"row 33 has a code above {2**bits - 1}, the largest of INT{bits}"):
        pack_codes(name, codes, scales)


@pytest.mark.parametrize("name", [name for name in AFFINE if AFFINE[name][0] < 8])
def test_an_affine_code_that_is_too_large_is_named_by_its_row(name):
    bits, group = AFFINE[name]
    codes, values = np.full((40, 2 * group), 2**bits - 1, np.uint8), np.ones((40, 2), np.float32)
    assert pack_affine(name, codes, values, values).rows().max() == 2**bits
    codes[33, group + 7] = 2**bits
    with pytest.raises(InvalidArgument, match=f"row 33 has a code above {2**bits - 1}, the largest of AFFINE{bits}"):
        pack_affine(name, codes, values, values)


@pytest.mark.parametrize("wrong", [-1, 21, 2**40])
def test_rows_outside_the_matrix(wrong):
    packed = random_matrix(np.random.default_rng(5), "Q8_0", 21, 32)
    with pytest.raises(InvalidArgument, match=f"row {wrong} of a matrix with 21"):
        packed.rows(np.array([0, wrong]))


def test_a_matrix_that_describes_nothing():
    packed = random_matrix(np.random.default_rng(6), "Q8_0", 16, 32)
    ids, out = np.zeros(1, np.int64), np.zeros((1, 32), np.float32)
    empty = replace(packed, matrix=native.NativeMatrix(8, 0, 16, 32, 0.0, 0, None))
    with pytest.raises(InvalidArgument, match="the matrix has no data"):
        empty.rows()
    with pytest.raises(InvalidArgument, match="-1 rows, or ids or target NULL"):
        library().rows(packed.matrix, address(ids), -1, address(out))
    with pytest.raises(InvalidArgument, match="ids or target NULL"):
        library().rows(packed.matrix, 0, 1, address(out))
    packed.matrix.format = 5
    with pytest.raises(InvalidArgument, match="5 is not a weight format"):
        packed.rows()
