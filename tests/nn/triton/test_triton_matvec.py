"""Group formats for a GPU against float64; without a GPU, the kernels run in Triton's interpreter and are compiled."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.nn.triton_kernels import DEVICE, GPU, compile_for_a_gpu, kernels

from pippin.core.errors import InvalidArgument, MissingDependency
from pippin.nn.quantization.packed import dequantize, middle_code, quantize
from pippin.nn.triton import triton_matvec
from pippin.nn.triton.triton_matvec import TritonWeight

cases = st.tuples(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([32, 64, 128]),
    st.integers(1, 5),
    st.integers(1, 21),
    st.integers(0, 99),
)


def make(bits, group, groups, rows, seed, dtype=torch.float32):
    """A packed weight and the float64 matrix that it stands for."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, group * groups), dtype=torch.uint8, generator=generator)
    scales = torch.randn(rows, groups, generator=generator).half()
    matrix = (codes.double() - (2**bits - 1) / 2) * scales.double().repeat_interleave(group, 1)
    return TritonWeight.from_codes(codes.to(DEVICE), scales.to(DEVICE), bits, group, dtype=dtype), matrix


@given(cases)
@settings(deadline=None, max_examples=40)
def test_the_matrix_and_its_rows_are_exact(case):
    weight, matrix = make(*case)
    assert torch.equal(weight.dense().cpu().double(), matrix)
    ids = torch.tensor([[0, len(matrix) - 1], [len(matrix) // 2, 0]])
    assert torch.equal(weight.select(ids.to(DEVICE)).cpu().double(), matrix[ids])
    stored = 4 if case[0] == 3 else case[0]
    assert weight.nbytes == matrix.numel() * stored // 8 + matrix.numel() // case[1] * 2


def test_it_holds_what_the_quantizer_gives():
    values = torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
    for bits in (2, 4):
        codes, scales = quantize(values, bits)
        weight = TritonWeight.from_codes(codes.to(DEVICE), scales.to(DEVICE), bits, 64, dtype=torch.float32)
        assert torch.equal(weight.dense().cpu(), dequantize(codes, scales, middle_code(bits)))


@kernels
@given(cases, st.sampled_from([1, 2, 3, 4, 7, 31, 32, 50]), st.booleans())
@settings(deadline=None, max_examples=60 if GPU else 25)
def test_products_equal_those_in_float64(case, tokens, biased):
    """Float32 throughout: a sum of n products is off by less than n roundings of the sum of their magnitudes."""
    weight, matrix = make(*case)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, matrix.shape[1], generator=generator)
    bias = torch.randn(len(matrix), generator=generator) if biased else None
    y = weight.matmul(x.to(DEVICE), None if bias is None else bias.to(DEVICE)).cpu().double()
    wanted = x.double() @ matrix.T + (0 if bias is None else bias.double())
    # the zero point is taken off a sum of codes, which is at most 2^bits - 1 times as large
    extent = x.double().abs() @ (matrix.abs().T + matrix.abs().max()) + 1
    assert ((y - wanted).abs() <= 2.0**-24 * (20 + matrix.shape[1] / 4) * extent).all()


@kernels
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_bfloat16_rounds_only_at_the_ends(tokens):
    weight, matrix = make(2, 64, 9, 37, 0, torch.bfloat16)
    x = torch.randn(3, tokens, matrix.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    y = weight.matmul(x.to(DEVICE), None).cpu()
    assert y.dtype == torch.bfloat16
    assert y.shape == (3, tokens, 37)
    wanted = x.double() @ matrix.T
    # from some tens of tokens on, the weight too is rounded; and the interpreter cuts off where a GPU rounds
    magnitudes = 0.1 * (x.double().abs() @ matrix.abs().T) if 3 * tokens >= 32 else 0
    bound = 2.0 ** (-8 if GPU else -7) * (wanted.abs() + magnitudes) + 1e-4
    assert ((y.double() - wanted).abs() <= bound).all()


@kernels
def test_no_tokens_give_no_answers():
    weight, _ = make(4, 32, 2, 5, 0)
    assert weight.matmul(torch.zeros(0, 64, device=DEVICE), None).shape == (0, 5)


@kernels
def test_the_kernels_compile_for_gpus_that_are_not_here():
    script = """
from pippin.nn.triton import triton_matvec

product, unpack = triton_matvec._kernels()
pointers = {"x": "*bf16", "codes": "*i32", "scales": "*fp16", "bias": "*bf16", "y": "*bf16", "weight": "*bf16"}
numbers = {"tokens": "i32", "rows": "i32", "words": "i32", "zero": "fp32"}
for kernel in (product, unpack):
    for bits, tokens in ((2, 1), (4, 4), (8, 2)):
        together, rows, words = triton_matvec._tile(tokens, 128)
        constants = {"BITS": bits, "GROUP": 2 * bits, "BIAS": True, "TOKENS": together, "ROWS": rows, "WORDS": words}
        found = compiled(kernel, pointers | numbers, constants)
        assert ".local" not in found.asm["ptx"], "registers spill"
"""
    compile_for_a_gpu(script)


def test_bad_weights_are_refused():
    codes, scales = torch.zeros(3, 64, dtype=torch.uint8), torch.ones(3, 2).half()
    with pytest.raises(InvalidArgument, match="not a weight of 5 bits"):
        TritonWeight.from_codes(codes, scales, 5, 32)
    with pytest.raises(InvalidArgument, match="groups of 16"):
        TritonWeight.from_codes(codes, scales, 4, 16)
    with pytest.raises(InvalidArgument, match=r"scales of \(3, 2\)"):
        TritonWeight.from_codes(codes, scales, 4, 64)
    with pytest.raises(InvalidArgument, match="a code is 4, 2 bits hold up to 3"):
        TritonWeight.from_codes(codes + 4, scales, 2, 32)
    with pytest.raises(InvalidArgument, match="64 inputs was given 32"):
        TritonWeight.from_codes(codes, scales, 2, 32).matmul(torch.zeros(1, 32), None)


def test_without_triton_a_product_says_so(monkeypatch):
    monkeypatch.setattr(triton_matvec, "find_spec", lambda name: None)
    triton_matvec._kernels.cache_clear()
    weight = TritonWeight.from_codes(torch.zeros(3, 32, dtype=torch.uint8), torch.ones(3, 1).half(), 2, 32)
    with pytest.raises(MissingDependency, match="triton is not installed"):
        weight.matmul(torch.zeros(1, 32), None)
