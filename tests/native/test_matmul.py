"""Matrix products on packed weights, against float64 products of the values that the `gguf` package reads.

Notable here:
- bounds are derived, not tuned: exact activations leave rounding errors of float32 sums alone (`rounding_bound`), any
  others add half a step of their own quantization (`quantization_bound`)
- results are bit-identical across tiles, threads and companions, on every instruction set of this machine
"""

from itertools import pairwise

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
    exact_activations,
    library,
    pack_affine,
    pack_codes,
    pack_dense,
    pack_ggml,
    quantization_bound,
    random_matrix,
    rounding_bound,
)

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"native kernels: {native.unavailable_reason()}")
INTEGER = [name for name in FORMATS if name not in DENSE]


@pytest.fixture(scope="module", params=native.instruction_sets() or ["none"])
def kernels(request):
    """Each instruction set in turn; then the best again."""
    native.use_instruction_set(request.param)
    yield request.param
    native.use_instruction_set(native.instruction_sets()[0])


def exact(packed, x, bias=None):
    y = x.astype(np.float64) @ packed.values.astype(np.float64).T
    return y if bias is None else y + bias


def bits(y):
    return np.ascontiguousarray(y).view(np.uint32)


# --- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FORMATS)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 19), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_exact_activations_give_the_product_but_for_rounding(kernels, name, rows, blocks, tokens, biased, seed):
    rng = np.random.default_rng(seed)
    packed = random_matrix(rng, name, rows, blocks * block_of(name))
    x = exact_activations(rng, name, tokens, packed.matrix.columns)
    bias = rng.standard_normal(rows).astype(np.float32) if biased else None
    bound = rounding_bound(packed, x) + (0 if bias is None else np.abs(bias) * 2.0**-23)
    assert (np.abs(packed.matmul(x, bias) - exact(packed, x, bias)) <= bound).all()


@pytest.mark.parametrize("name", FORMATS)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(-30, 30), st.integers(0, 2**32))
@settings(max_examples=6, deadline=None)
def test_any_activations_are_off_by_half_a_step_at_most(kernels, name, blocks, tokens, power, seed):
    rng = np.random.default_rng(seed)
    packed = random_matrix(rng, name, 21, blocks * block_of(name))
    heavy = rng.standard_t(2, (tokens, packed.matrix.columns)) * 2.0**power  # a few are much larger than the others
    x = heavy.astype(np.float32)
    bound = quantization_bound(packed, x) + rounding_bound(
        packed, np.abs(x) + np.abs(x).max(axis=1, keepdims=True) / 127
    )
    assert (np.abs(packed.matmul(x) - exact(packed, x)) <= bound).all()


@pytest.mark.parametrize("name", INTEGER)
def test_extreme_scales(kernels, name):
    # subnormal, zero and the largest scales
    rng = np.random.default_rng(7)
    packed = random_matrix(rng, name, 33, 2 * block_of(name), "extreme")
    x = exact_activations(rng, name, 9, packed.matrix.columns)
    assert (np.abs(packed.matmul(x) - exact(packed, x)) <= rounding_bound(packed, x)).all()


@pytest.mark.parametrize("name", INTEGER)
def test_the_largest_codes_times_the_largest_activations(kernels, name):
    for fill in (0, 255):
        if name in GGML:
            _, size, nbytes, scale, minimum = GGML[name]
            blocks = np.full((16, nbytes), fill, np.uint8)
            for start, value in ((scale, 1.0), (minimum, 2.0)):
                if start is not None:
                    blocks[:, start : start + 2] = np.array([value], np.float16).view(np.uint8)
            packed = pack_ggml(name, blocks, size)
        elif name in AFFINE:
            bits, group = AFFINE[name]
            codes = np.full((16, 128), fill & (2**bits - 1), np.uint8)
            packed = pack_affine(
                name, codes, *(np.full((16, 128 // group), value, np.float32) for value in (3.0, -5.0))
            )
        else:
            codes = np.full((16, 128), fill & (2 ** OURS[name][0] - 1), np.uint8)
            packed = pack_codes(name, codes, np.full((16, 128 // OURS[name][1]), 3.0, np.float16))
        for sign in (-127, 127):
            x = np.full((9, packed.matrix.columns), sign, np.float32)
            bound = 4 * 2.0**-24 * np.abs(exact(packed, x)).max()  # whole numbers: only sums beyond 2^24 are rounded
            assert (np.abs(packed.matmul(x) - exact(packed, x)) <= bound).all()


@pytest.mark.parametrize("zero", [0.0, 1.5, 2.0, 3.0, -1.0])
def test_the_code_that_means_zero_is_the_matrix_own(kernels, zero):
    rng = np.random.default_rng(8)
    codes, scales = rng.integers(0, 4, (20, 64), dtype=np.uint8), np.full((20, 1), 0.5, np.float16)
    packed = pack_codes("INT2/64", codes, scales, zero)
    x = exact_activations(rng, "INT2/64", 5, 64)
    assert np.array_equal(packed.rows(), packed.values)
    assert (np.abs(packed.matmul(x) - exact(packed, x)) <= rounding_bound(packed, x)).all()


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 30, 33, 577])
@pytest.mark.parametrize("name", DENSE)
def test_dense_weights_of_any_width(kernels, name, columns):
    rng = np.random.default_rng(columns)
    packed = random_matrix(rng, name, 18, columns)
    x = exact_activations(rng, name, 10, columns)
    assert (np.abs(packed.matmul(x) - exact(packed, x)) <= rounding_bound(packed, x)).all()


def test_bfloat16_activations_are_rounded_to_the_nearest_even(kernels):
    # 1 + 2^-8 lies between two bfloat16 numbers, and the even one is 1; 1 + 3 * 2^-8 goes up to 1 + 2^-6
    packed = pack_dense("BF16", np.ones((16, 1), np.float32))
    x = np.array([[1 + 2.0**-8], [1 + 3 * 2.0**-8], [1 + 2.0**-8 + 2.0**-20], [-1 - 2.0**-8]], np.float32)
    assert packed.matmul(x)[:, 0].tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-7, -1.0]


def test_activations_are_rounded_half_to_even_in_steps_of_the_largest_over_32512(kernels):
    codes, scales = np.ones((16, 32), np.uint8), np.ones((16, 1), np.float16)
    packed = pack_codes("INT8/32", codes, scales, zero=0.0)
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 127  # a step is 1 / 256
    x[0, 1:7] = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5]) / 256  # 0, 2, 2, 0, -2, -2
    assert packed.matmul(x)[0, 0] == 127
    x[0, 1:7] = np.array([0.5, 1.5, 2.5, 0.5, 1.5, 3.5]) / 256  # 0, 2, 2, 0, 2, 4
    assert packed.matmul(x)[0, 0] == 127 + 10 / 256
    x[0, 1:7] = 0
    x[0, 1:3] = [0.5, -0.5]  # the one tie between two coarse digits: a step short
    assert packed.matmul(x)[0, 0] == 127
    x[0, 2] = 0
    assert packed.matmul(x)[0, 0] == 127 + 127 / 256


# --- what is not an ordinary number ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FORMATS)
def test_zeros_give_the_bias_to_the_bit(kernels, name):
    packed = random_matrix(np.random.default_rng(9), name, 19, 256)
    bias = np.linspace(-1, 1, 19, dtype=np.float32)
    for zeros in (np.zeros((3, 256), np.float32), -np.zeros((3, 256), np.float32)):
        assert (packed.matmul(zeros) == 0).all()
        assert np.array_equal(packed.matmul(zeros, bias), np.tile(bias, (3, 1)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_a_token_that_is_not_finite_spoils_itself_only(kernels, name, bad):
    rng = np.random.default_rng(10)
    packed = random_matrix(rng, name, 35, 256)
    x = rng.standard_normal((7, 256)).astype(np.float32)
    good = packed.matmul(x)
    for place in (0, 31, 77, 255):
        spoilt = x.copy()
        spoilt[3, place] = bad
        y = packed.matmul(spoilt)
        assert not np.isfinite(y[3]).any()
        assert name in DENSE or np.isnan(y[3]).all()
        assert np.array_equal(bits(np.delete(y, 3, 0)), bits(np.delete(good, 3, 0)))


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_and_the_smallest_activations(kernels, name):
    rng = np.random.default_rng(11)
    packed = random_matrix(rng, name, 16, 256)
    x = exact_activations(rng, name, 4, 256)
    x /= np.abs(x).max()
    for power in (100, -90):
        scaled = (x * 2.0**power).astype(np.float32)
        error = np.abs(packed.matmul(scaled) - exact(packed, scaled))
        assert (error <= quantization_bound(packed, scaled) + rounding_bound(packed, scaled)).all()
    # below 1e-33 integer formats take a block of 32 as zeros; what is lost is below any float32 sum of use
    for size in (1e-40, 1e-36, 2e-35, 9e-35, 9e-34, 2e-33):
        tiny = np.full((1, 256), size, np.float32)
        error = np.abs(packed.matmul(tiny) - exact(packed, tiny))
        assert (error <= 1.1e-33 * np.abs(packed.values).sum(axis=1)).all(), size


def test_a_scale_that_is_not_finite_spoils_its_row_only(kernels):
    rng = np.random.default_rng(12)
    codes, scales = rng.integers(0, 16, (20, 64), dtype=np.uint8), np.ones((20, 2), np.float16)
    x = exact_activations(rng, "INT4/32", 5, 64)
    good = pack_codes("INT4/32", codes, scales).matmul(x)
    scales[4, 1], scales[17, 0] = np.nan, np.inf
    y = pack_codes("INT4/32", codes, scales).matmul(x)
    assert not np.isfinite(y[:, [4, 17]]).any()
    assert np.array_equal(bits(np.delete(y, [4, 17], 1)), bits(np.delete(good, [4, 17], 1)))


# --- bit-identical ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FORMATS)
def test_a_token_does_not_depend_on_its_company(kernels, name):
    rng = np.random.default_rng(13)
    packed = random_matrix(rng, name, 35, 256)
    x = rng.standard_normal((70, 256)).astype(np.float32)
    together = bits(packed.matmul(x))
    alone = np.concatenate([bits(packed.matmul(x[i : i + 1])) for i in range(70)])
    assert np.array_equal(together, alone)
    cuts = np.concatenate([[0], np.sort(rng.choice(np.arange(1, 70), 9, replace=False)), [70]])
    pieces = np.concatenate([bits(packed.matmul(x[a:b])) for a, b in pairwise(cuts)])
    assert np.array_equal(together, pieces)


@pytest.mark.parametrize("tokens", range(1, 18))
def test_every_width_of_a_tile(kernels, tokens):
    rng = np.random.default_rng(14)
    for name in ("Q4_1", "Q6_K", "INT2/64", "BF16", "F32"):
        packed = random_matrix(rng, name, 16, 256)
        x = rng.standard_normal((18, 256)).astype(np.float32)
        assert np.array_equal(bits(packed.matmul(x[:tokens])), bits(packed.matmul(x))[:tokens])


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "INT3/64", "F32", "BF16"])
def test_threads_change_nothing(kernels, name):
    if native.device.threads() < 2:
        pytest.skip("one core")
    rng = np.random.default_rng(15)
    packed = random_matrix(rng, name, 555, 512)
    x = rng.standard_normal((37, 512)).astype(np.float32)
    before = native.threads()
    try:
        native.set_threads(1)
        alone = [bits(packed.matmul(x)), bits(packed.matmul(x[:1]))]
        native.set_threads(2)
        for _ in range(20):
            assert np.array_equal(bits(packed.matmul(x)), alone[0])
            assert np.array_equal(bits(packed.matmul(x[:1])), alone[1])
    finally:
        native.set_threads(before)


@given(st.integers(1, 50), st.integers(1, 70), st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_strides_and_what_lies_between(kernels, rows, tokens, after_x, after_y, seed):
    rng = np.random.default_rng(seed)
    for name in ("Q8_0", "INT2/32", "F32", "BF16"):
        packed = random_matrix(rng, name, rows, 64)
        wide = np.full((tokens, 64 + after_x), np.nan, np.float32)  # NaN would spread if it were read
        wide[:, :64] = rng.standard_normal((tokens, 64))
        y = np.full((tokens, rows + after_y), 7, np.float32)
        packed.matmul_into(y[:, :rows], wide[:, :64])
        assert np.array_equal(bits(y[:, :rows]), bits(packed.matmul(np.ascontiguousarray(wide[:, :64]))))
        assert (y[:, rows:] == 7).all()


# --- what is refused -------------------------------------------------------------------------------------------------
def test_arguments_that_make_no_product():
    packed = random_matrix(np.random.default_rng(16), "Q8_0", 20, 64)
    x, y = np.zeros((3, 64), np.float32), np.zeros((3, 20), np.float32)

    def call(**changes):
        usual = {"x": address(x), "x_stride": 64, "tokens": 3, "bias": None, "y": address(y), "stride": 20}
        library().matmul(packed.matrix, **(usual | changes))

    call()
    call(tokens=0, x=0, y=0)  # nothing to do
    call(tokens=1, x_stride=0, stride=0)  # of one token, the strides say nothing
    for wrong in ({"x_stride": 63}, {"stride": 19}):
        with pytest.raises(InvalidArgument, match="are below the 64 inputs and 20 outputs"):
            call(**wrong)
    with pytest.raises(InvalidArgument, match="tokens is -1"):
        call(tokens=-1)
    for wrong in ({"x": 0}, {"y": 0}):
        with pytest.raises(InvalidArgument, match="x or y is NULL"):
            call(**wrong)


def test_matrices_that_make_no_product():
    buffer, x, y = aligned(1 << 14), np.zeros((1, 64), np.float32), np.zeros((1, 16), np.float32)
    matrix = native.NativeMatrix
    for wrong, says in [
        (matrix(8, 0, 16, 64, 0.0, 0, None), "the matrix has no data"),
        (matrix(8, 0, 16, 64, 0.0, 0, address(buffer) + 32), "multiple of 64 bytes"),
        (matrix(9, 0, 16, 64, 0.0, 0, address(buffer)), "9 is not a weight format"),
        (matrix(8, 0, 16, 63, 0.0, 0, address(buffer)), "63 columns"),
        (matrix(104, 96, 16, 96, 0.0, 0, address(buffer)), "a group of 96"),
    ]:
        with pytest.raises(InvalidArgument, match=says):
            library().matmul(wrong, address(x), 64, 1, None, address(y), 16)
