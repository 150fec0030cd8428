"""Gradients through packed weights, against torch's own for the dense weights that they stand for."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.core import native
from pippin.nn import packed_layers as module
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRankUpdate
from pippin.nn.packed_layers import OneDNNWeight, PackedLinear
from pippin.nn.quantization import packed as packing
from pippin.nn.quantization.packed import NativeWeight, quantize
from pippin.nn.triton.triton_matvec import TritonWeight

with_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
KINDS = ["F32", "BF16", "Q4_1", "Q8_0", "INT2", "INT4"]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def packed_as(weight: torch.Tensor, kind: str) -> NativeWeight:
    if kind.startswith("INT"):
        return NativeWeight.from_codes(*quantize(weight, int(kind[3:]), 32), int(kind[3:]), 32)
    if kind in ("F32", "BF16"):
        return NativeWeight.from_dense(weight.to(torch.float32 if kind == "F32" else torch.bfloat16))
    blocks = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    return NativeWeight.from_ggml(torch.from_numpy(np.ascontiguousarray(blocks)), kind)


def over(packed, bias: torch.Tensor | None = None) -> Linear:
    """A layer whose weight is packed."""
    dense = packed.dense()
    return PackedLinear(packed, dense.shape[1], dense.shape[0], None if bias is None else torch.nn.Parameter(bias))


def compare(layer: Linear, x: torch.Tensor, change: torch.Tensor, atol: float) -> None:
    """Value and gradients of a packed layer beside those of a dense one in float64."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(change)
    dense, exact = layer.dense_weight().double(), x.detach().double().requires_grad_()
    bias = None if layer.bias is None else layer.bias.detach().double().requires_grad_()
    expected = torch.nn.functional.linear(exact, dense, bias)
    expected.backward(change.double())
    error = float((y.detach().double() - expected.detach()).norm() / expected.detach().norm())
    assert error < (2**-8 if getattr(layer.packed, "kind", "") == "BF16" else 1e-4)  # which rounds its inputs
    torch.testing.assert_close(x.grad.double(), exact.grad, atol=atol, rtol=0)
    if bias is not None:
        torch.testing.assert_close(layer.bias.grad.double(), bias.grad, atol=1e-4, rtol=0)


@with_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("piece", [1 << 20, 96])  # the second: a single row at a time
def test_gradients_through_packed_weights_are_those_of_the_dense_ones(kind, bias, piece, monkeypatch):
    monkeypatch.setattr(packing, "_ROWS", piece)
    layer = over(packed_as(normal(37, 96), kind), normal(37, seed=1) if bias else None)
    compare(layer, normal(2, 5, 96, seed=2), normal(2, 5, 37, seed=3), atol=1e-4)


@with_kernels
@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 9), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_the_transposed_product_equals_the_dense_one(rows, groups, tokens, seed):
    weight = packed_as(normal(rows, 32 * groups, seed=seed), "INT4")
    y = normal(tokens, rows, seed=seed + 1)
    expected = y.double() @ weight.dense().double()
    torch.testing.assert_close(weight.matmul_transposed(y).double(), expected, atol=1e-4, rtol=1e-5)


@with_kernels
def test_bfloat16_gradients_are_within_the_rounding_of_bfloat16():
    weight, y = packed_as(normal(200, 64), "INT4"), normal(30, 200, seed=1).bfloat16()
    got, expected = weight.matmul_transposed(y), y.double() @ weight.dense().double()
    assert got.dtype == torch.bfloat16
    assert float((got.double() - expected).norm() / expected.norm()) < 2**-8


def test_gradients_pass_through_the_other_formats_too():
    if OneDNNWeight.supports(normal(1, 1)):
        compare(over(OneDNNWeight(normal(37, 96))), normal(2, 5, 96, seed=2), normal(2, 5, 37, seed=3), atol=1e-4)
    weight = TritonWeight.from_codes(*quantize(normal(37, 96), 4, 32), 4, 32, dtype=torch.float32)
    y = normal(3, 37, seed=1)
    expected = y.double() @ weight.dense().double()
    torch.testing.assert_close(weight.matmul_transposed(y).double(), expected, atol=1e-4, rtol=0)


@with_kernels
def test_an_adapter_over_a_packed_layer_gets_the_gradients_of_one_over_the_dense_layer():
    packed = over(packed_as(normal(40, 64), "Q4_1"))
    dense = Linear(64, 40)
    dense.weight = torch.nn.Parameter(packed.dense_weight(), requires_grad=False)
    x, change = normal(1, 6, 64, seed=1), normal(1, 6, 40, seed=2)
    found = []
    for layer in (packed, dense):
        down, up = normal(3, 64, seed=3).requires_grad_(), normal(40, 3, seed=4).requires_grad_()
        start = x.clone().requires_grad_()
        layer(start, [(Adapter("a", {layer: (LowRankUpdate(down, up),)}), slice(None))]).backward(change)
        found.append((start.grad, down.grad, up.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


@with_kernels
def test_without_need_of_gradients_none_are_prepared(monkeypatch):
    layer = over(packed_as(normal(32, 32), "INT4"), normal(32, seed=1)).requires_grad_(False)
    monkeypatch.setattr(module._Product, "apply", lambda *_: pytest.fail("gradients were prepared"))
    x = normal(2, 32, seed=2)
    assert not layer(x).requires_grad
