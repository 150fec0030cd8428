"""oneDNN's products and the attention built of them, beside torch's own: values, gradients, where they step aside."""

import pytest
import torch
import torch.nn.functional as F

from pippin.nn import matmul as products
from pippin.nn.attention import blocked_attention
from pippin.nn.matmul import product


def gradients(f, *tensors):
    y = f(*tensors)
    slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, tensors, slope)]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.fixture
def quick(monkeypatch):
    """As on a processor for which the BLAS is slow, at any size."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(products, "slow_blas", lambda: True)
    monkeypatch.setattr(blocked_attention, "slow_blas", lambda: True)
    monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(blocked_attention, "MIN_ELEMENTS", 0)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("shape", [(7,), (1, 7), (3, 5, 7)])
def test_product_and_its_gradients_are_those_of_torch(shape):
    x, weight, bias = random(*shape), random(4, 7, seed=1), random(4, seed=2)
    for ours, theirs in zip(gradients(product, x, weight, bias), gradients(F.linear, x, weight, bias), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("quick")
def test_gradients_that_are_broadcast_or_strided_are_understood():
    x, weight = random(6, 8), random(5, 8, seed=1)
    for reduce in (lambda y: y.sum(), lambda y: (y[::2, 1:] ** 2).sum()):
        ours, theirs = (torch.autograd.grad(reduce(f(x, weight)), (x, weight)) for f in (product, F.linear))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("quick")
def test_product_has_second_derivatives():
    x, weight = random(3, 4), random(2, 4, seed=1)

    def second(f):
        (first,) = torch.autograd.grad(f(x, weight).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, weight))

    for ours, theirs in zip(second(product), second(F.linear), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("quick")
def test_transforms_and_traces_see_torch():
    x, weight = random(3, 4), random(2, 4, seed=1)
    torch.testing.assert_close(
        torch.func.grad(lambda w: product(x, w).square().sum())(weight),
        torch.func.grad(lambda w: F.linear(x, w).square().sum())(weight),
    )
    torch.testing.assert_close(torch.vmap(product, (0, None))(x, weight), F.linear(x, weight))
    program = torch.export.export(Product(weight.detach()), (x.detach(),))
    assert "mkldnn" not in str(program.graph)


class Product(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return product(x, self.weight)


def test_without_gradients_the_product_is_torchs_bit_for_bit(quick):
    x, weight = random(64, 64), random(64, 64, seed=1)
    with torch.no_grad():
        assert torch.equal(product(x, weight), F.linear(x, weight))


def attention(q, k, v, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("heads", "kv_heads", "new"), [(6, 2, 300), (3, 3, 128), (4, 1, 65)])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_attention_and_its_gradients_are_those_of_torch(heads, kv_heads, new, scale):
    q, k, v = (random(2, n, new, 16, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    assert blocked_attention.supports(q, k, v) == (heads > kv_heads)
    ours = gradients(lambda *x: blocked_attention.attend(*x, scale), q, k, v)
    for one, other in zip(ours, gradients(lambda *x: attention(*x, scale), q, k, v), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_attention_in_bfloat16_is_as_exact_as_torchs():
    q, k, v = (random(1, n, 256, 32, dtype=torch.bfloat16, seed=i) for i, n in enumerate((6, 2, 2)))
    exact = gradients(attention, *(x.detach().float().requires_grad_() for x in (q, k, v)))
    ours = gradients(lambda *x: blocked_attention.attend(*x, None), q, k, v)
    theirs = gradients(attention, q, k, v)
    for one, other, true in zip(ours, theirs, exact, strict=True):
        error, usual = ((x.float() - true).norm() / true.norm() for x in (one, other))
        assert error < max(2.5 * usual, 5e-3)


@pytest.mark.usefixtures("quick")
def test_attention_steps_aside_where_it_is_not_meant():
    q, k, v = (random(1, n, 128, 16, seed=i) for i, n in enumerate((4, 2, 2)))
    assert blocked_attention.supports(q, k, v)
    assert not blocked_attention.supports(q[:, :, :8], k, v)
    short = blocked_attention.MIN_TOKENS - 1
    assert not blocked_attention.supports(q[:, :, :short], k[:, :, :short], v[:, :, :short])
    assert not blocked_attention.supports(q.detach(), k.detach(), v.detach())
    with torch.no_grad():
        assert not blocked_attention.supports(q, k, v)
    with torch.autocast("cpu", torch.float16):
        assert not blocked_attention.supports(q, k, v)
