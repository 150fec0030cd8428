"""Gated delta rule, Mamba-2, RG-LRU and short convolutions: against plain loops over tokens in float64, and against
transformers' functions in torch."""

import pytest
import torch
import torch.nn.functional as F

from pippin.core.errors import InvalidArgument
from pippin.nn.context import LayerContext
from pippin.nn.kv_cache import MaskedCache, NoCache, PackedDocuments, PastKeyValues, QuerySelection
from pippin.nn.recurrent.convolution import ShortConvolutionSpec
from pippin.nn.recurrent.delta import delta_rule, delta_step, normalized
from pippin.nn.recurrent.gated_delta import GatedDeltaSpec
from pippin.nn.recurrent.mamba2 import Mamba2Spec, state_space
from pippin.nn.recurrent.rg_lru import RGLRUSpec
from pippin.nn.recurrent.states import RecurrentState

WIDTH = 12
SPECS = {
    "convolution": ShortConvolutionSpec(3, bias=True),
    "one tap": ShortConvolutionSpec(1),
    "delta": GatedDeltaSpec(2, 4, 3, 5, conv=4),
    "negative": GatedDeltaSpec(2, 2, 4, 3, conv=1, beta=2.0, norm_eps=1e-3),
    "kimi": GatedDeltaSpec(2, 2, 4, 4, channel_rank=3),
    "mamba": Mamba2Spec(4, 3, 5, groups=2, bias=True),
    "bounded": Mamba2Spec(2, 4, 3, conv=2, conv_bias=False, norm="silu after", min_step=0.3, max_step=1.2),
    "no norm": Mamba2Spec(2, 4, 3, norm=None),
    "rg-lru": RGLRUSpec(8, 2),
}


def values(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(spec, seed=0):
    """A layer in float64 whose every part matters."""
    generator = torch.Generator().manual_seed(seed)
    layer = spec.build(WIDTH, eps=1e-6).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            scale = 0.5 if parameter.ndim == 2 else 0.8
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
            if name == "norm.weight":
                parameter.add_(1.0)
    return layer


@pytest.fixture(params=SPECS)
def layer(request):
    return build(SPECS[request.param])


def silu(x):
    return x * torch.sigmoid(x)


def convolved(weight, bias, u):
    """A causal convolution of (time, channels), tap by tap."""
    taps, out = weight.shape[-1], torch.zeros_like(u)
    for t in range(len(u)):
        for tap in range(taps):
            if t - tap >= 0:
                out[t] += weight[:, 0, taps - 1 - tap] * u[t - tap]
        out[t] += 0 if bias is None else bias
    return out


def rms(x, weight, eps):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def linear(layer, x):
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def by_hand_convolution(layer, x):
    b, c, u = linear(layer.in_proj, x).chunk(3, -1)
    return linear(layer.out_proj, c * convolved(layer.conv.weight, layer.conv.bias, b * u))


def by_hand_delta(layer, x):
    """Every head of values from the definition of the paper: S (values, keys) forgets, then writes what is new."""
    spec = layer.spec
    q, k, v = (
        silu(convolved(conv.weight, None, linear(projection, x)))
        for projection, conv in (
            (layer.q_proj, layer.q_conv),
            (layer.k_proj, layer.k_conv),
            (layer.v_proj, layer.v_conv),
        )
    )
    low = spec.channel_rank is not None
    a, gate = (
        linear(part.up, linear(part.down, x)) if low else linear(part, x) for part in (layer.a_proj, layer.gate_proj)
    )
    beta = spec.beta * torch.sigmoid(linear(layer.b_proj, x))
    alpha = (
        -(layer.A_log.exp().repeat_interleave(spec.decays // spec.value_heads)) * F.softplus(a + layer.dt_bias)
    ).exp()
    share, heads = spec.value_heads // spec.key_heads, []
    for head in range(spec.value_heads):
        at = head // share * spec.key_dim
        keys = k[:, at : at + spec.key_dim]
        keys = keys / (keys.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        queries = q[:, at : at + spec.key_dim]
        queries = queries / (queries.square().sum(-1, keepdim=True) + 1e-6).sqrt() / spec.key_dim**0.5
        mine = v[:, head * spec.value_dim : (head + 1) * spec.value_dim]
        size = spec.decays // spec.value_heads
        memory, out = torch.zeros(spec.value_dim, spec.key_dim, dtype=torch.float64), []
        for t in range(len(x)):
            memory = memory * alpha[t, head * size : (head + 1) * size]
            memory = memory + beta[t, head] * torch.outer(mine[t] - memory @ keys[t], keys[t])
            out.append(memory @ queries[t])
        z = gate[:, head * spec.value_dim : (head + 1) * spec.value_dim]
        normed = rms(torch.stack(out), layer.norm.weight, layer.norm.eps)
        heads.append(normed * (torch.sigmoid(z) if low else silu(z)))
    return linear(layer.out_proj, torch.cat(heads, -1))


def by_hand_mamba(layer, x):
    spec, inner, wide = layer.spec, layer.spec.inner, layer.spec.groups * layer.spec.state
    gate, u, step = linear(layer.in_proj, x).split([inner, inner + 2 * wide, spec.heads], -1)
    u = silu(convolved(layer.conv.weight, layer.conv.bias, u))
    step = F.softplus(step + layer.dt_bias).clamp(spec.min_step, spec.max_step)
    out = torch.zeros(len(x), inner, dtype=torch.float64)
    for head in range(spec.heads):
        group = head * spec.groups // spec.heads
        channels = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
        b, c = (u[:, inner + part * wide + group * spec.state :][:, : spec.state] for part in (0, 1))
        memory = torch.zeros(spec.head_dim, spec.state, dtype=torch.float64)
        for t in range(len(x)):
            forget = (-layer.A_log[head].exp() * step[t, head]).exp()
            memory = forget * memory + step[t, head] * torch.outer(u[t, channels], b[t])
            out[t, channels] = memory @ c[t] + layer.D[head] * u[t, channels]
    if spec.norm == "silu after":
        out = rms(out, layer.norm.weight, 1e-6) * silu(gate)
    elif spec.norm is None:
        out = out * silu(gate)
    else:
        parts = zip((out * silu(gate)).chunk(spec.groups, -1), layer.norm.weight.chunk(spec.groups), strict=True)
        out = torch.cat([rms(part, weight, 1e-6) for part, weight in parts], -1)
    return linear(layer.out_proj, out)


def by_hand_rg_lru(layer, x):
    u = convolved(layer.conv.weight, layer.conv.bias, linear(layer.x_proj, x))
    blocks = u.chunk(layer.spec.heads, -1)
    i, r = (
        torch.sigmoid(torch.cat([block @ w + b for block, w, b in zip(blocks, weight, bias, strict=True)], -1))
        for weight, bias in (
            (layer.input_gate_weight, layer.input_gate_bias),
            (layer.recurrent_gate_weight, layer.recurrent_gate_bias),
        )
    )
    a = (-8.0 * F.softplus(layer.recurrent_param) * r).exp()
    h, out = torch.zeros(layer.spec.size, dtype=torch.float64), []
    for t in range(len(x)):
        h = a[t] * h + (1.0 if t == 0 else (1 - a[t] ** 2).sqrt()) * i[t] * u[t]
        out.append(h)
    return linear(layer.out_proj, torch.stack(out) * F.gelu(linear(layer.gate_proj, x), approximate="tanh"))


BY_HAND = {
    "ShortConvolution": by_hand_convolution,
    "GatedDeltaNet": by_hand_delta,
    "Mamba2": by_hand_mamba,
    "RGLRU": by_hand_rg_lru,
}


def by_hand(layer, x):
    return BY_HAND[type(layer).__name__](layer, x)


@torch.no_grad()
def test_a_layer_is_its_definition(layer):
    x = values(2, 150, WIDTH)
    expected = torch.stack([by_hand(layer, row) for row in x])
    torch.testing.assert_close(layer(x, LayerContext(NoCache())), expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_parts_and_single_tokens_go_on_from_the_state(layer):
    x, cache, outputs = values(3, 40, WIDTH), RecurrentState(), []
    for part in x.split([17, 1, 1, 20, 1], 1):
        outputs.append(layer(part, LayerContext(cache)))
        cache.advance(part.shape[1])
        assert cache.states[0].shape == (3, layer.state_size)
    expected = torch.stack([by_hand(layer, row) for row in x])
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_documents_and_padded_rows_are_as_alone(layer):
    counts = [5, 1, 18, 2]
    x = values(1, sum(counts), WIDTH)
    expected = torch.cat([by_hand(layer, part[0]) for part in x.split(counts, 1)])
    together = layer(x, LayerContext(PackedDocuments(counts)))[0]
    torch.testing.assert_close(together, expected, rtol=1e-9, atol=1e-9)
    x, padding = values(3, 20, WIDTH), torch.tensor([0, 4, 19])
    padded = layer(x, LayerContext(NoCache(padding)))
    for row, pads in enumerate(padding.tolist()):
        torch.testing.assert_close(padded[row, pads:], by_hand(layer, x[row, pads:]), rtol=1e-9, atol=1e-9)


class _Sequences(RecurrentState):
    """Several sequences packed in one row, as an engine's cache has them."""

    def __init__(self, counts):
        super().__init__()
        self._counts = counts

    @property
    def counts(self):
        return self._counts


@torch.no_grad()
def test_packed_sequences_of_different_lengths_and_selected_tokens(layer):
    """The first passes leave states; then one sequence has one token, one several, and one begins."""
    lengths, news = [7, 12, 0], [1, 9, 3]
    rows = [values(old + new, WIDTH, seed=index) for index, (old, new) in enumerate(zip(lengths, news, strict=True))]
    cache = _Sequences(news)
    before = []
    for row, old in zip(rows, lengths, strict=True):
        alone = RecurrentState()
        if old:
            layer(row[None, :old], LayerContext(alone))
            alone.advance(old)
        before.append(alone.states.get(0, torch.zeros(1, layer.state_size, dtype=torch.float64)))
    cache.states[0] = torch.cat(before)
    kept = cache.states[0].clone()
    x = torch.cat([row[old:] for row, old in zip(rows, lengths, strict=True)])[None]
    expected = torch.cat([by_hand(layer, row)[old:] for row, old in zip(rows, lengths, strict=True)])
    torch.testing.assert_close(layer(x, LayerContext(cache))[0], expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(cache.states[0], kept)  # a pass replaces states and changes none
    chosen = torch.tensor([0, 5, 12])
    some = layer(x, LayerContext(cache, selection=QuerySelection(0, chosen)))
    torch.testing.assert_close(some[0], expected[chosen], rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_the_definition(layer):
    x = values(1, 21, WIDTH).requires_grad_()
    worth = values(21, WIDTH, seed=3)
    inputs = [x, *layer.parameters()]
    ours = torch.autograd.grad((layer(x, LayerContext(NoCache()))[0] * worth).sum(), inputs)
    theirs = torch.autograd.grad((by_hand(layer, x[0]) * worth).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)


@torch.no_grad()
def test_half_precision_computes_the_recurrence_in_float32(layer):
    half = build(layer.spec).bfloat16()
    x, cache = values(1, 30, WIDTH).bfloat16(), RecurrentState()
    y = half(x, LayerContext(cache))
    cache.advance(30)
    assert (y.dtype, cache.states[0].dtype) == (torch.bfloat16, torch.float32)
    expected = by_hand(build(layer.spec), x[0].double())
    assert float((y[0].double() - expected).square().mean().sqrt()) < 0.05 * float(expected.std())


@torch.no_grad()
def test_autocast_rounds_projections_and_not_the_recurrence(layer, monkeypatch):
    """With projections that return the same under autocast, so does the layer."""
    x, exact = values(1, 30, WIDTH).float(), build(layer.spec).float()
    u, gate = exact.enter(x, None)
    monkeypatch.setattr(exact, "enter", lambda x, adapters: (u, gate))
    left = []
    monkeypatch.setattr(exact, "leave", lambda y, gate, adapters: left.append(y) or x)
    exact(x, LayerContext(NoCache()))
    with torch.autocast("cpu", torch.bfloat16):
        exact(x, LayerContext(NoCache()))
    assert torch.equal(*left)


@torch.no_grad()
def test_random_layers_are_finite_over_long_sequences(layer):
    fresh = layer.spec.build(WIDTH, eps=1e-6)
    for parameter in fresh.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
    fresh.initialize(torch.Generator().manual_seed(0))
    assert fresh(values(1, 700, WIDTH).float(), LayerContext(NoCache())).isfinite().all()


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 16, 200])
def test_any_chunk_gives_the_same_and_strong_forgetting_does_not_overflow(channels, chunk):
    q, k, v = (values(1, 2, 50, 4, seed=seed) for seed in range(3))
    k, beta = normalized(k), values(1, 2, 50, seed=5).sigmoid() * 2
    decay = -80.0 * values(1, 2, 50, 4 if channels else 1, seed=6).square()
    state = values(1, 2, 4, 4, seed=7)
    y, after = delta_rule(q, k, v, decay, beta, state, chunk=chunk)
    expected = []
    for t in range(50):
        out, state = delta_step(q[:, :, t], k[:, :, t], v[:, :, t], decay[:, :, t], beta[:, :, t], state)
        expected.append(out)
    torch.testing.assert_close(y, torch.stack(expected, 2), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(after, state, rtol=1e-9, atol=1e-10)


def test_the_delta_rule_equals_transformers():
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k, v = (values(2, 150, 3, 8, seed=seed).float() for seed in range(3))
    beta, state = values(2, 150, 3, seed=4).float().sigmoid(), values(2, 3, 8, 8, seed=5).float()
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for theirs, shape in ((torch_chunk_gated_delta_rule, (2, 150, 3)), (chunk_kimi_delta_attention, (2, 150, 3, 8))):
        decay = -values(*shape, seed=6).float().square()
        expected, last = theirs(q, k, v, g=decay, beta=beta, **options)
        ours = [part.transpose(1, 2) for part in (normalized(q) * 8**-0.5, normalized(k), v)]
        y, after = delta_rule(*ours, decay.view(2, 150, 3, -1).transpose(1, 2), beta.transpose(1, 2), state)
        torch.testing.assert_close(y.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after, last, rtol=1e-5, atol=1e-5)


def test_the_state_space_equals_transformers():
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    x, step = values(2, 150, 4, 6).float(), values(2, 150, 4, seed=2).float().exp()
    b, c = (values(2, 150, 2, 5, seed=seed).float() for seed in (3, 4))
    rate, state = -values(4, seed=5).float().exp(), values(2, 4, 6, 5, seed=6).float()
    expected, last = mamba2_chunk_scan(x, step, rate, b, c, 32, initial_states=state, return_final_states=True)
    for chunk in (1, 20, 64):
        y, after = state_space(x, b, c, step, rate, state, chunk=chunk)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(after, last, rtol=1e-5, atol=1e-4)


def test_what_does_not_fit_is_refused(layer):
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    with pytest.raises(InvalidArgument, match="a MaskedCache keeps no states"):
        layer(values(1, 2, WIDTH), LayerContext(MaskedCache(mask, PastKeyValues())))
    with pytest.raises(InvalidArgument, match="documents of 7 tokens were given 1 rows of 5"):
        layer(values(1, 5, WIDTH), LayerContext(PackedDocuments([3, 4])))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GatedDeltaSpec(2, 3, 4, 4), "3 heads of values are no multiple of 2 of keys"),
        (lambda: GatedDeltaSpec(2, 2, 0, 4), "key_dim must be at least 1, got 0"),
        (lambda: Mamba2Spec(3, 4, 5, groups=2), "2 groups do not divide 3 heads"),
        (lambda: Mamba2Spec(2, 4, 5, min_step=2.0, max_step=1.0), "time steps of at least 2.0 cannot be at most 1.0"),
        (lambda: RGLRUSpec(8, 3), "3 heads do not divide 8 channels"),
        (lambda: ShortConvolutionSpec(0), "conv must be at least 1, got 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
