"""Linear recurrences against a plain loop in float64; the GPU's kernels in Triton's interpreter where there is none."""

import jaxtyping
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.nn.triton_kernels import DEVICE, GPU, compile_for_a_gpu, kernels

from pippin.core.errors import InvalidArgument
from pippin.nn.recurrent.scan import adjoint_scan, linear_scan
from pippin.nn.triton import triton_scan

KINDS = ["diagonal", "blocks of 2", "blocks of 3", "dense"]

cases = st.tuples(
    st.sampled_from(KINDS), st.sampled_from([1, 2, 3, 37, 130]), st.booleans(), st.booleans(), st.integers(0, 99)
)


def loop(a, b, initial, reverse):
    if reverse:
        return loop(a.flip(1), b.flip(1), initial, False).flip(1)
    h, states = torch.zeros_like(b[:, 0]) if initial is None else initial, []
    for t in range(b.shape[1]):
        product = a[:, t] * h if a.ndim == b.ndim else torch.einsum("bijn,bjn->bin", a[:, t], h)
        h = product + b[:, t]
        states.append(h)
    return torch.stack(states, 1)


def make(kind, time, with_initial, seed):
    """Matrices whose products neither vanish nor explode within the steps."""
    generator = torch.Generator().manual_seed(seed)
    rows, channels = {"diagonal": (None, 5), "blocks of 2": (2, 5), "blocks of 3": (3, 2), "dense": (6, 1)}[kind]
    state = (channels,) if rows is None else (rows, channels)
    matrix = state if rows is None else (rows, rows, channels)
    a = torch.randn(2, time, *matrix, generator=generator, dtype=torch.float64) * (0.6 if rows is None else 0.35)
    b = torch.randn(2, time, *state, generator=generator, dtype=torch.float64)
    initial = torch.randn(2, *state, generator=generator, dtype=torch.float64) if with_initial else None
    return a, b, initial


@given(cases, st.sampled_from([None, 1, 4, 64]))
@settings(deadline=None, max_examples=40)
def test_states_are_those_of_the_loop(case, chunk):
    kind, time, with_initial, reverse, seed = case
    a, b, initial = make(kind, time, with_initial, seed)
    torch.testing.assert_close(
        linear_scan(a, b, initial=initial, reverse=reverse, chunk=chunk),
        loop(a, b, initial, reverse),
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_both_orders_are_right(kind, reverse):
    given = [one.requires_grad_() for one in make(kind, 5, True, 1)]

    def states(a, b, initial):
        return linear_scan(a, b, initial=initial, reverse=reverse, chunk=2)

    assert torch.autograd.gradcheck(states, given, fast_mode=True)
    if kind in ("diagonal", "blocks of 2"):
        assert torch.autograd.gradgradcheck(states, given, fast_mode=True)


def test_half_precision_is_scanned_in_float32_even_under_autocast():
    a, b, initial = make("dense", 200, True, 2)
    a = a * 0.8
    exact = loop(a.bfloat16().double(), b.bfloat16().double(), initial.bfloat16().double(), False)
    with torch.autocast("cpu", torch.bfloat16):
        h = linear_scan(a.bfloat16(), b.bfloat16(), initial=initial.bfloat16())
    assert h.dtype == torch.bfloat16
    # one rounding to 8 bits at the end, and nothing on the way
    assert ((h.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()


def test_the_adjoint_is_the_transposed_system():
    a, b, _ = make("blocks of 2", 6, False, 3)
    after = torch.randn(2, 2, 5, dtype=torch.float64)
    worth = adjoint_scan(a, b, after)
    expected = b[:, -1] + after
    for t in reversed(range(6)):
        torch.testing.assert_close(worth[:, t], expected)
        if t:
            expected = b[:, t - 1] + torch.einsum("bijn,bin->bjn", a[:, t], expected)


def test_what_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    a = torch.zeros(2, 3, 4)
    with pytest.raises(InvalidArgument, match=r"\(2, 0, 4\) has no steps"):
        linear_scan(a[:, :0], a[:, :0])
    with pytest.raises(InvalidArgument, match=r"a of shape \(2, 3, 4\) does not fit b of shape \(2, 3, 5\)"):
        linear_scan(a, torch.zeros(2, 3, 5))
    with pytest.raises(InvalidArgument, match=r"does not fit b of shape \(2, 3, 4, 1\)"):
        linear_scan(torch.zeros(2, 3, 4, 5, 1), torch.zeros(2, 3, 4, 1))
    with pytest.raises(InvalidArgument, match=r"initial state has shape \(2, 3\), not \(2, 4\)"):
        linear_scan(a, a, initial=torch.zeros(2, 3))
    with pytest.raises(InvalidArgument, match="chunk must be at least 1"):
        linear_scan(a, a, chunk=0)


@kernels
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("time", [1, 10])
def test_kernels_give_the_states_of_the_loop(kind, reverse, time, monkeypatch):
    monkeypatch.setattr(triton_scan, "_CHUNK", 4)
    a, b, initial = make(kind, time, True, 4)
    found = triton_scan.scan(a.to(DEVICE), b.to(DEVICE), initial.to(DEVICE), reverse=reverse).cpu()
    torch.testing.assert_close(found, loop(a, b, initial, reverse), rtol=1e-10, atol=1e-10)
    if kind == "blocks of 2":  # as the backward pass reads them: transposed, without the first
        turned = a.to(DEVICE).transpose(2, 3)
        found = triton_scan.scan(turned, b.to(DEVICE), None, reverse=reverse).cpu()
        torch.testing.assert_close(found, loop(a.transpose(2, 3), b, None, reverse), rtol=1e-10, atol=1e-10)


@kernels
def test_the_kernels_compile_for_gpus_that_are_not_here():
    script = """
from pippin.nn.triton import triton_scan

pointers = dict.fromkeys(["matrices", "added", "through", "sums", "initial", "before", "states"], "*fp32")
for size in (1, 2):
    fixed = {"SIZE": size, "CHUNK": 64, "WIDTH": 64, "REVERSE": True, "CHUNKS": 32}
    for kernel in triton_scan._kernels():
        found = compiled(kernel, dict.fromkeys(kernel.arg_names, "i32") | pointers, fixed)
        assert ".local" not in found.asm["ptx"], "registers spill"
"""
    compile_for_a_gpu(script)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS[:2])
def test_on_a_gpu_the_kernels_are_taken_and_differentiable(kind):
    given = [one.float().to("cuda").requires_grad_() for one in make(kind, 500, True, 5)]
    wanted = [one.detach().cpu().double().requires_grad_() for one in given]
    assert triton_scan.available(given[0], given[1])
    states, exact = linear_scan(*given[:2], initial=given[2]), loop(*wanted, False)
    torch.testing.assert_close(states.cpu().double(), exact, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(
        torch.autograd.grad(states.square().sum(), given),
        torch.autograd.grad(exact.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-3, atol=1e-3)
