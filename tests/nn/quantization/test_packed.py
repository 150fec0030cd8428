"""Quantizing against Max's table and brute force; packed weights against the values that their format stands for."""

import copy
import errno
import mmap
import subprocess
import sys
import threading
from itertools import pairwise

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.core import native
from pippin.core.errors import CorruptedFile, InvalidArgument, NotEnoughMemory, UnsupportedModel
from pippin.core.formats.ggml_quants import FORMATS
from pippin.nn.quantization import packed as module
from pippin.nn.quantization.packed import BITS, NativeWeight, allocate, dequantize, middle_code, packed_size, quantize

with_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
QUANTIZED = [name for name in native.GGML_FORMATS if name not in ("F32", "BF16")]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def error(weight: torch.Tensor, bits: int, group: int) -> float:
    """Squared error relative to the weights' own square."""
    codes, scales = quantize(weight, bits, group)
    return float((dequantize(codes, scales, middle_code(bits)) - weight).square().sum() / weight.square().sum())


# Source: J. Max, Quantizing for Minimum Distortion, 1960, table II: uniform levels for a normal law.
@pytest.mark.parametrize(("bits", "mse", "step"), [(2, 0.1188, 0.9957), (3, 0.03744, 0.5860), (4, 0.01154, 0.3352)])
def test_a_normal_law_gets_the_best_step_and_error_that_are_known(bits, mse, step):
    weight = normal(1, 400_000)
    _, scales = quantize(weight, bits, 400_000)
    assert float(scales[0, 0]) == pytest.approx(step, abs=0.01)
    assert error(weight, bits, 400_000) == pytest.approx(mse, abs=0.002 if bits == 2 else 0.001)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("law", ["normal", "heavy tails"])
def test_hardly_any_scale_is_better_than_the_one_found(bits, law):
    weight = normal(200, 64)
    if law == "heavy tails":
        weight = weight**3
    found = error(weight, bits, 64)
    zero, top = middle_code(bits), weight.abs().amax(-1, keepdim=True) / middle_code(bits)
    tried = []
    for share in np.linspace(0.2, 1.1, 120):
        scale = top * float(share)
        levels = ((weight / scale + zero).round().clamp(0, 2**bits - 1) - zero) * scale
        tried.append((levels - weight).square().sum(-1))
    assert found <= (1.15 if bits == 8 else 1.04) * float(torch.stack(tried).amin(0).sum() / weight.square().sum())


@given(st.sampled_from(BITS), st.sampled_from([4, 32, 64]), st.integers(0, 2**32), st.floats(-4, 4))
@settings(max_examples=60, deadline=None)
def test_each_code_is_the_nearest_level(bits, group, seed, size):
    weight = normal(3, 2 * group, seed=seed) * 10**size
    codes, scales = quantize(weight, bits, group)
    levels = (torch.arange(2**bits).double() - middle_code(bits)) * scales.double()[..., None]
    values = weight.double().view(3, 2, group)
    nearest = (values[..., None] - levels[:, :, None]).abs().amin(-1)
    got = (values - dequantize(codes, scales, middle_code(bits)).double().view(3, 2, group)).abs()
    assert (got <= nearest + 1e-6 * scales.double()[..., None] * 2**bits).all()


def test_a_weight_of_several_pieces_is_each_of_its_rows_alone():
    weight = normal(40, 16384)  # of which 16 rows are one piece
    codes, scales = quantize(weight, 4, 32)
    for row in (0, 15, 16, 31, 32, 39):
        alone = quantize(weight[row : row + 1], 4, 32)
        assert torch.equal(codes[row : row + 1], alone[0])
        assert torch.equal(scales[row : row + 1], alone[1])


def test_groups_of_zeros_stay_zero():
    weight = torch.cat([torch.zeros(2, 32), normal(2, 32)], 1)
    codes, scales = quantize(weight, 2, 32)
    assert (dequantize(codes, scales, 1.5)[:, :32] == 0).all()
    assert scales.isfinite().all()


@pytest.mark.parametrize(
    ("weight", "bits", "group", "message"),
    [
        (torch.ones(2, 64), 5, 64, "bits must be 2, 3, 4 or 8, got 5"),
        (torch.ones(2, 96), 4, 64, "layers.0.up has rows of 96 weights, which groups of 64 do not divide"),
        (torch.tensor([[1.0, float("nan")]]), 2, 2, "layers.0.up holds values that are not finite"),
        (torch.tensor([[1.0, float("inf")]]), 2, 2, "layers.0.up holds values that are not finite"),
        (torch.tensor([[1.0, 3e5]]), 2, 2, r"layers.0.up holds 3e\+05, too large"),
    ],
)
def test_what_cannot_be_quantized_is_refused_by_name(weight, bits, group, message):
    with pytest.raises(InvalidArgument, match=message):
        quantize(weight, bits, group, name="layers.0.up")


def blocks_of(kind: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows of random blocks; their half-precision scales are made ordinary numbers by the gguf library's own layout."""
    form = FORMATS[native.GGML_FORMATS[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows * columns // form.size, form.nbytes), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
    halves |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    for at in halves[kind]:
        blocks[:, at : at + 2] = random.normal(0, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return torch.from_numpy(blocks.reshape(rows, -1))


@with_kernels
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_blocks_of_a_file_keep_their_values_to_the_bit(kind, rows):
    blocks = blocks_of(kind, rows, 512)
    weight = NativeWeight.from_ggml(blocks, kind)
    theirs = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    assert (weight.rows, weight.columns, weight.kind) == (rows, 512, kind)
    assert np.array_equal(weight.dense().numpy(), theirs)
    assert weight.nbytes == packed_size(native.GGML_FORMATS[kind], rows, 512)
    if rows == 16:
        assert weight.nbytes < 1.15 * blocks.nbytes


@with_kernels
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_our_own_formats_equal_their_reference_to_the_bit(bits, group):
    codes, scales = quantize(normal(21, 384), bits, group)
    weight = NativeWeight.from_codes(codes, scales, bits, group)
    assert torch.equal(weight.dense(), dequantize(codes, scales, middle_code(bits)))
    assert (weight.kind, weight.group) == (f"INT{bits}", group)
    shifted = NativeWeight.from_codes(codes, scales, bits, group, zero_point=1.0)
    assert torch.equal(shifted.dense(), dequantize(codes, scales, 1.0))


@with_kernels
@pytest.mark.parametrize("bits", BITS)
def test_our_own_formats_take_the_bits_that_they_name(bits):
    weight = NativeWeight.from_codes(*quantize(normal(64, 1024), bits), bits, 64)
    assert weight.nbytes <= 64 * 1024 * (bits + 16 / 64) / 8 * 1.01


@with_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (37, 90)])
def test_dense_weights_keep_their_values(dtype, shape):
    weight = normal(*shape).to(dtype)
    assert torch.equal(NativeWeight.from_dense(weight).dense(), weight.float())
    assert torch.equal(NativeWeight.from_dense(weight.T).dense(), weight.T.float())


@with_kernels
@given(
    st.sampled_from([*QUANTIZED, *BITS, "F32", "BF16"]),
    st.integers(1, 40),
    st.sampled_from([(), (1,), (3,), (2, 5), (0,)]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=80, deadline=None)
def test_a_product_is_near_the_exact_one(kind, rows, batch, bias, dtype):
    columns = 256
    if kind in BITS:
        weight = NativeWeight.from_codes(*quantize(normal(rows, columns), kind), kind, 64)
    elif kind in QUANTIZED:
        weight = NativeWeight.from_ggml(blocks_of(kind, rows, columns), kind)
    else:
        weight = NativeWeight.from_dense(normal(rows, columns).to({"F32": torch.float32}.get(kind, torch.bfloat16)))
    x = normal(*batch, 2 * columns, seed=1)[..., :columns].to(dtype)  # rows that lie apart
    added = normal(rows, seed=2) if bias else None
    exact = x.double() @ weight.dense().double().T + (added.double() if bias else 0)
    got = weight.matmul(x, added)
    assert (got.dtype, got.shape) == (dtype, exact.shape)
    # activations of quantized formats are rounded to 8 bits in blocks of 32, those of bfloat16 to 8 bits each
    lost = x.double().abs().amax(-1, keepdim=True) / 127 if len(x) and kind != "F32" else torch.zeros(())
    bound = (
        lost * weight.dense().double().square().sum(1).sqrt() + exact.abs() * 2**-7 * (dtype == torch.bfloat16) + 1e-3
    )
    assert ((got.double() - exact).abs() <= bound).all()


@with_kernels
def test_vectors_may_share_memory():
    weight, one = NativeWeight.from_dense(normal(8, 32)), normal(1, 32, seed=1)
    assert torch.equal(weight.matmul(one.expand(3, 32), None), weight.matmul(one.repeat(3, 1), None))
    windows = normal(1, 34, seed=2)[0].unfold(0, 32, 1)
    assert torch.equal(weight.matmul(windows, None), weight.matmul(windows.clone(), None))


@with_kernels
def test_rows_are_selected_in_the_shape_of_their_numbers():
    weight = NativeWeight.from_dense(normal(20, 8))
    ids = torch.tensor([[3, 19, 0], [3, 3, 7]])
    assert torch.equal(weight.select(ids), weight.dense()[ids])
    assert weight.select(ids[:0]).shape == (0, 3, 8)
    for wrong in (20, -1):
        with pytest.raises(InvalidArgument):
            weight.select(torch.tensor([0, wrong]))


@with_kernels
def test_what_cannot_be_packed_is_refused():
    with pytest.raises(InvalidArgument, match="float16 have no kernels"):
        NativeWeight.from_dense(torch.ones(2, 2, dtype=torch.float16))
    with pytest.raises(UnsupportedModel, match="type IQ4_NL have no kernels"):
        NativeWeight.from_ggml(torch.zeros(2, 18, dtype=torch.uint8), "IQ4_NL")
    with pytest.raises(CorruptedFile, match="rows of 19 bytes are not whole Q4_0 blocks of 18"):
        NativeWeight.from_ggml(torch.zeros(2, 19, dtype=torch.uint8), "Q4_0")
    codes, scales = quantize(normal(2, 64), 2, 64)
    for changed in ({"bits": 5}, {"group_size": 16}, {"group_size": 32}, {"scales": scales.repeat(1, 2)}):
        with pytest.raises(InvalidArgument, match="are not a weight of"):
            NativeWeight.from_codes(**{"codes": codes, "scales": scales, "bits": 2, "group_size": 64} | changed)
    with pytest.raises(InvalidArgument, match="a code is 4, 2 bits hold up to 3"):
        NativeWeight.from_codes(codes + 1, scales, 2, 64)
    with pytest.raises(InvalidArgument):
        packed_size(native.GROUP_FORMATS[4], 2, 65, 64)


def test_without_the_library_nothing_is_packed_and_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "unavailable_reason", lambda: "the reason")
    assert not NativeWeight.supports(torch.ones(2, 2))
    with pytest.raises(InvalidArgument, match="the reason"):
        NativeWeight.from_dense(torch.ones(2, 2))


@with_kernels
def test_what_is_supported():
    assert NativeWeight.supports(torch.ones(2, 2))
    assert NativeWeight.supports(torch.ones(2, 2, dtype=torch.bfloat16))
    assert not NativeWeight.supports(torch.ones(2, 2, dtype=torch.float16))
    assert not NativeWeight.supports(torch.ones(2, 2, device="meta"))
    assert not NativeWeight.supports(None)


@with_kernels
def test_a_copy_of_a_model_shares_its_packed_weights():
    weight = NativeWeight.from_dense(normal(4, 4))
    assert copy.deepcopy({"weight": weight})["weight"] is weight
    assert repr(weight) == "NativeWeight(F32, 4 x 4)"


def test_memory_is_aligned_separate_and_given_back():
    sizes = [1, 63, 64, 65, 1000, 3 << 20, 5 << 20, 1 << 10, 15 << 20, 17 << 20]
    with torch.inference_mode():  # which later weights in the same mapping do not inherit
        held = [allocate(size) for size in sizes]
    assert not any(piece.is_inference() for piece in held)
    spans = sorted((piece.data_ptr(), piece.data_ptr() + len(piece)) for piece in held)
    assert [len(piece) for piece in held] == sizes
    assert all(begin % 64 == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    for piece in held:
        piece.fill_(7)
    assert held[5].data_ptr() != held[6].data_ptr()


def test_memory_of_weights_that_are_gone_is_given_back():
    # in a process of its own: this one has memory from earlier tests that could be used again
    code = """
import psutil
from pippin.nn.quantization.packed import allocate
resident = lambda: psutil.Process().memory_info().rss
before = resident()
held = [allocate(1 << 20).fill_(1) for _ in range(256)]
print(resident() - before)
del held
print(resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    taken, kept = map(int, done.stdout.split())
    assert taken > 250 << 20
    assert kept < 32 << 20


def test_threads_never_get_the_same_memory():
    held: list[torch.Tensor] = []

    def take() -> None:
        for _ in range(200):
            held.append(allocate(1000))

    workers = [threading.Thread(target=take) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len({piece.data_ptr() for piece in held}) == 800


def test_too_little_memory_is_a_typed_error(monkeypatch):
    def refuse(*_args, **_options):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(module.mmap, "mmap", refuse)
    with pytest.raises(NotEnoughMemory, match="bytes for weights could not be allocated"):
        allocate(1 << 30)


def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch):
    class Mapping(mmap.mmap):
        def madvise(self, *_options):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(module.mmap, "mmap", Mapping)
    assert len(allocate(8 << 20).fill_(1)) == 8 << 20
