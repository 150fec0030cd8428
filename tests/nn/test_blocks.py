"""Blocks against brute force and closed forms."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.nn.attention.attention import Attention, AttentionSpec
from pippin.nn.attention.rotary import Rotary, apply_rotary
from pippin.nn.context import LayerContext
from pippin.nn.feedforward.feedforward import XIELU, FeedForward, FeedForwardSpec, MixtureOfExperts
from pippin.nn.kv_cache import NoCache, causal_mask
from pippin.nn.linear import Linear
from pippin.nn.norm import RMSNorm
from pippin.nn.packed_layers import fuse, pack


def filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
    return module


@given(
    st.integers(0, 9),
    st.integers(1, 9),
    st.none() | st.integers(1, 12),
    st.none() | st.lists(st.integers(0, 12), min_size=1, max_size=3),
)
def test_mask_equals_its_definition(start, new, window, padding):
    seen = start + new
    pads = None if padding is None else torch.tensor([min(p, seen - 1) for p in padding])
    mask = causal_mask(start, new, window, pads, torch.device("cpu"))
    for row in range(1 if pads is None else len(pads)):
        for q in range(start, seen):
            for k in range(seen):
                visible = k <= q and (window is None or q - k < window)
                if pads is not None:
                    visible = visible and (k >= int(pads[row]) or k == q)
                got = k <= q if mask is None else bool(mask[min(row, mask.shape[0] - 1), 0, q - start, k])
                assert got == visible


@given(st.floats(-50, 50), st.integers(0, 3000), st.integers(0, 3000))
def test_scores_depend_only_on_the_distance(angle_seed, first, second):
    generator = torch.Generator().manual_seed(int(angle_seed * 100) % 2**31)
    q, k = torch.randn(2, 1, 16, generator=generator, dtype=torch.float64)
    rotary = Rotary(theta=100.0)

    def score(i: int, j: int) -> float:
        cos, sin = (table.double() for table in rotary.tables(torch.tensor([i, j]), 16))
        return float(apply_rotary(q, cos[:1], sin[:1])[0] @ apply_rotary(k, cos[1:], sin[1:])[0])

    assert score(first, second) == pytest.approx(score(first + 500, second + 500), abs=2e-3)
    assert score(first, first) == pytest.approx(float(q[0] @ k[0]), abs=1e-3)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("qk_norm", [None, "head"])
def test_attention_equals_a_loop_over_heads_and_positions(window, qk_norm):
    layer = filled(
        Attention(
            AttentionSpec(window=window, rotary=None),
            hidden_size=24,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            bias=True,
            qk_norm=qk_norm,
        )
    )
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y, _ = layer(x, LayerContext(NoCache()))
        q, k, v = (p(x).view(2, 7, -1, 6) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        if qk_norm:
            q, k = layer.q_norm(q), layer.k_norm(k)
        out = torch.zeros(2, 7, 4, 6)
        for b in range(2):
            for h in range(4):
                for i in range(7):
                    seen = [j for j in range(i + 1) if window is None or i - j < window]
                    scores = torch.stack([q[b, i, h] @ k[b, j, h // 2] for j in seen]) / math.sqrt(6)
                    out[b, i, h] = sum(w * v[b, j, h // 2] for w, j in zip(scores.softmax(0), seen, strict=True))
        torch.testing.assert_close(y, layer.o_proj(out.reshape(2, 7, 24)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 128, 600])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_equals_the_plain_one(dtype, rows, bias):
    layer = filled(Linear(96, 130, bias=bias)).to(dtype)
    x = torch.randn(1, rows, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.no_grad():
        exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
        weight = layer.weight.clone()
        packed = pack(layer)
        assert torch.equal(packed.dense_weight(), weight)
        bound = 1e-5 if dtype == torch.float32 else float(exact.abs().max()) * 2**-8
        torch.testing.assert_close(packed(x).double(), exact, atol=bound, rtol=0)


def test_fused_layers_give_the_concatenated_outputs():
    layers = [filled(Linear(16, n, bias=True), seed=n) for n in (8, 24, 8)]
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = torch.cat([layer(x) for layer in layers], -1)
        torch.testing.assert_close(fuse(layers)(x), expected)
        torch.testing.assert_close(pack(fuse(layers))(x), expected, atol=1e-6, rtol=0)


@given(st.floats(1e-3, 1e3))
@settings(max_examples=25)
def test_rms_norm_ignores_the_scale_of_its_input(scale):
    norm = filled(RMSNorm(32, eps=1e-12))
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(norm(x * scale), norm(x), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close((norm(x) / norm.weight).square().mean(-1), torch.ones(4))


@pytest.mark.parametrize("renormalize", [False, True])
def test_mixture_equals_a_loop_over_tokens_even_if_all_choose_one_expert(renormalize):
    spec = FeedForwardSpec(20, num_experts=5, num_experts_per_tok=2, norm_topk_prob=renormalize)
    mixture = filled(MixtureOfExperts(spec, 12))
    x = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(5))
    for force in (False, True):
        if force:
            mixture.gate.weight.data[3] = 0
            mixture.gate.weight.data[:3] = -100 * torch.sign(x.sum((0, 1)))
        with torch.no_grad():
            expected = torch.zeros_like(x)
            for b in range(2):
                for s in range(9):
                    weights, chosen = mixture.gate(x[b, s]).softmax(-1).topk(2)
                    weights = weights / weights.sum() if renormalize else weights
                    expected[b, s] = sum(
                        w * mixture.experts[e](x[b, s]) for w, e in zip(weights, chosen.tolist(), strict=True)
                    )
            torch.testing.assert_close(mixture(x), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("gated", [False, True])
def test_feed_forward_equals_its_formula_packed_or_not(activation, gated):
    layer = filled(FeedForward(FeedForwardSpec(20, activation, gated), 12))
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(6), dtype=torch.float32)
    act = {
        "silu": lambda z: z / (1 + (-z).exp()),
        "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
        "gelu_tanh": lambda z: z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
        "relu": lambda z: z * (z > 0),
    }[activation]
    with torch.no_grad():
        up = x @ layer.up_proj.weight.T
        inner = act(x @ layer.gate_proj.weight.T) * up if gated else act(up)
        expected = inner @ layer.down_proj.weight.T
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=0)
        pack(layer)
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=0)


def test_xielu_is_smooth_at_zero_and_its_gradient_is_finite_everywhere():
    function, x = XIELU(), torch.tensor([-1e4, -1.0, -1e-5, 1e-5, 1.0, 1e4], requires_grad=True)
    y = function(x)
    y.sum().backward()
    # 0.8 x^2 + x / 2, and 0.8 (e^x - 1 - x) + x / 2
    torch.testing.assert_close(y[[1, 4]], torch.tensor([0.8 * math.exp(-1.0) - 0.5, 1.3]))
    assert x.grad.isfinite().all()
    torch.testing.assert_close(x.grad[2:4], torch.full((2,), 0.5), rtol=0, atol=1e-4)
    assert all(parameter.grad.isfinite().all() for parameter in function.parameters())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_a_packed_norm_of_one_token_equals_the_definition(dtype, bound):
    norm = filled(RMSNorm(96, eps=1e-5)).to(dtype)
    x = 3 * torch.randn(1, 1, 96, generator=torch.Generator().manual_seed(7)).to(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    norm.pack()
    with torch.no_grad():
        torch.testing.assert_close(norm(x).double(), exact, atol=bound, rtol=0)
