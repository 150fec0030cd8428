"""Oracles: the optimal brain surgeon's own loop, least squares, exhaustive search, a plain pass through the decoder."""

import itertools

import pytest
import torch
from hypothesis import given, settings as limits, strategies as st

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.nn.attention.attention import AttentionSpec, LatentSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.parallel.tracks import Tracks
from pippin.nn.quantization.codes import Codes
from pippin.shape.quantize import gptq, rtn
from pippin.shape.quantize.calibration import LayerwiseCalibration, calibration_ids, matrices
from pippin.shape.quantize.config import QuantizationConfig


def problem(seed, rows=6, columns=16, tokens=64):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    mixing = torch.randn(columns, columns, generator=generator) + torch.eye(columns)
    x = torch.randn(tokens, columns, generator=generator) @ mixing
    return weight, x.T @ x / tokens


def surgeon(weight, moments, scales, bits, zero, order):
    """Round one input after the other; solve least squares anew for all inputs that are left. Brute force, float64."""
    left, moments = weight.double().clone(), moments.double()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    group = weight.shape[1] // scales.shape[1]
    for place, column in enumerate(order):
        step = scales[:, column // group].double()
        codes[:, column] = (left[:, column] / step + zero).round().clamp(0, 2**bits - 1)
        wrong = (codes[:, column] - zero) * step - left[:, column]
        free = order[place + 1 :]
        left[:, column] += wrong
        if free:
            move = torch.linalg.solve(moments[free][:, free], moments[free, column])
            left[:, free] -= wrong[:, None] * move
    return codes


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("bits", "levels"), [(2, "balanced"), (3, "unbalanced"), (4, "balanced")])
def test_codes_are_those_of_the_surgeon_who_solves_least_squares_anew(bits, levels, act_order):
    weight, moments = problem(seed=bits, columns=32)
    settings = QuantizationConfig(bits=bits, levels=levels, granularity="channel")
    found = gptq.solve(weight, moments, bits, settings, damping=0.01, act_order=act_order, refit=False)
    damped = moments + 0.01 * moments.diagonal().mean() * torch.eye(32)
    order = moments.diagonal().argsort(descending=True).tolist() if act_order else list(range(32))
    wanted = surgeon(weight, damped, found.scales, bits, rtn.zero_of(bits, settings), order)
    assert (found.codes == wanted).float().mean() > 0.99  # a tie may fall to either side


def test_groups_are_searched_among_weights_that_have_moved():
    weight, moments = problem(seed=3, rows=4, columns=64)
    settings = QuantizationConfig(bits=3, group=32)
    found = gptq.solve(weight, moments, 3, settings, act_order=False, refit=False)
    first = rtn.find_scales(weight[:, :32], 3, settings)
    assert torch.equal(found.scales[:, :1], first)
    assert not torch.equal(found.scales[:, 1:], rtn.find_scales(weight[:, 32:], 3, settings))


@limits(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([2, 3, 4, 8]), st.booleans(), st.booleans())
def test_never_worse_than_rounding(seed, bits, act_order, balanced):
    weight, moments = problem(seed, columns=32)
    settings = QuantizationConfig(bits=bits, group=32, levels="balanced" if balanced else "unbalanced")
    found = gptq.solve(weight, moments, bits, settings, act_order=act_order)
    plain = rtn.round_weight(weight, bits, settings)
    damped = moments.double() + 0.01 * moments.double().diagonal().mean() * torch.eye(32, dtype=torch.float64)
    assert gptq.output_error(weight, found, damped) <= gptq.output_error(weight, plain, damped)


def test_where_rounding_is_better_rounding_is_returned():
    weight, moments = problem(seed=401, rows=1, columns=4, tokens=8)
    settings = QuantizationConfig(bits=2, granularity="channel")
    plain = rtn.round_weight(weight, 2, settings)
    alone = gptq._round_in_order(weight, damped(moments), 2, settings, None, plain.scales, "weight")
    assert gptq.output_error(weight, alone, moments) > 10 * gptq.output_error(weight, plain, moments)
    found = gptq.solve(weight, moments, 2, settings, act_order=False, refit=False)
    assert torch.equal(found.codes, plain.codes)


def test_scales_are_refitted_by_default():
    weight, moments = problem(seed=4, rows=2, columns=32)
    settings = QuantizationConfig(bits=2, granularity="channel")
    refitted, plain = gptq.solve(weight, moments, 2, settings), gptq.solve(weight, moments, 2, settings, refit=False)
    assert torch.equal(refitted.codes, plain.codes)
    assert torch.equal(refitted.scales, gptq.refitted(weight, damped(moments), plain).scales)
    assert gptq.output_error(weight, refitted, moments) < 0.99 * gptq.output_error(weight, plain, moments)


def damped(moments):
    return moments.double() + 0.01 * moments.double().diagonal().mean() * torch.eye(len(moments), dtype=torch.float64)


def test_between_rounding_and_the_best_of_all_codes():
    weight, moments = problem(seed=0, rows=40, columns=6, tokens=400)
    settings = QuantizationConfig(bits=2, granularity="channel")
    scales = rtn.find_scales(weight, 2, settings)
    every = torch.tensor(list(itertools.product(range(4), repeat=6)), dtype=torch.uint8)
    wrong = weight[:, None] - (every.float() - 1.5) * scales.float()[..., None]
    best = ((wrong @ moments) * wrong).sum(-1).amin(1).sum().item()
    found = gptq.solve(weight, moments, 2, settings, damping=1e-6, act_order=True, refit=False)
    plain = rtn.round_weight(weight, 2, settings)
    ours, rounded = (gptq.output_error(weight, codes, moments) for codes in (found, plain))
    assert best <= ours * (1 + 1e-5)
    assert ours - best < 0.6 * (rounded - best)


def test_refitted_scales_are_the_least_squares_of_each_row():
    weight, moments = problem(seed=5, rows=3, columns=64, tokens=256)
    plain = rtn.round_weight(weight, 2, QuantizationConfig(bits=2, group=32))
    found = gptq.refitted(weight, moments, plain)
    root = torch.linalg.cholesky(moments.double(), upper=True)
    for row in range(3):
        levels = torch.zeros(64, 2, dtype=torch.float64)
        for group in range(2):
            inside = slice(group * 32, group * 32 + 32)
            levels[inside, group] = plain.codes[row, inside].double() - plain.zero_point
        wanted = torch.linalg.lstsq(root @ levels, (root @ weight[row].double())[:, None]).solution[:, 0]
        torch.testing.assert_close(found.scales[row].double(), wanted, rtol=2e-3, atol=1e-4)


def test_a_diagonal_hessian_leaves_nothing_to_make_up_for():
    weight, _ = problem(seed=7, columns=32)
    settings = QuantizationConfig(bits=4, group=32)
    found = gptq.solve(weight, torch.eye(32), 4, settings, refit=False)
    assert torch.equal(found.codes, rtn.round_weight(weight, 4, settings).codes)


def test_without_inputs_it_is_rounding():
    weight, moments = problem(seed=8, columns=32)
    settings = QuantizationConfig(bits=4, group=32)
    found = gptq.solve(weight, torch.zeros_like(moments), 4, settings)
    assert torch.equal(found.codes, rtn.round_weight(weight, 4, settings).codes)


def decoder(**fields):
    layers = fields.pop("layers", (LayerSpec(AttentionSpec(), FeedForwardSpec(64)),) * 2)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64} | fields
    return Decoder(DecoderConfig("llama", 50, 64, layers, **sizes)).initialize(seed=1).eval()


def spread(module):
    """Make the weights as large as trained ones, so that layers matter."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return module


def recorded(module, ids, name):
    """What a matrix reads in a plain pass."""
    seen = []
    hook = module.get_submodule(name).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        module(ids)
    hook.remove()
    return torch.cat([x.flatten(0, -2) for x in seen])


@pytest.mark.parametrize("shared", [False, True])
def test_moments_are_those_of_a_plain_pass(shared):
    feed = FeedForwardSpec(64)
    read = AttentionSpec(kv_source=0) if shared else AttentionSpec(window=4)
    module = spread(decoder(layers=(LayerSpec(AttentionSpec(), feed), LayerSpec(read, feed))))
    ids = torch.randint(0, 50, (5, 12), generator=torch.Generator().manual_seed(0))
    walk = LayerwiseCalibration(module, ids, batch_size=2)
    for index in range(2):
        for short in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            x = recorded(module, ids, f"layers.{index}.{short}")
            torch.testing.assert_close(walk.moments(index, [short])[short], x.T @ x / len(x), rtol=1e-4, atol=1e-5)
        walk.advance(index)
    x = recorded(module, ids, "lm_head")
    torch.testing.assert_close(walk.outer_moments(), x.T @ x / len(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("join", ["mean", "delta"])
def test_moments_within_tracks_are_those_of_a_plain_pass(join):
    tracks = Tracks(2, 2, join)
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(64))
    module = spread(decoder(layers=(layer,) * 8, tracks=tracks))
    ids = torch.randint(0, 50, (5, 12), generator=torch.Generator().manual_seed(0))
    walk = LayerwiseCalibration(module, ids, batch_size=2)
    for index in range(8):
        for short in ("self_attn.q_proj", "mlp.down_proj"):
            x = recorded(module, ids, f"layers.{index}.{short}")
            torch.testing.assert_close(walk.moments(index, [short])[short], x.T @ x / len(x), rtol=1e-4, atol=1e-5)
        walk.advance(index)
    x = recorded(module, ids, "lm_head")
    torch.testing.assert_close(walk.outer_moments(), x.T @ x / len(x), rtol=1e-4, atol=1e-5)


def test_later_layers_see_what_the_quantized_ones_before_them_give(tiny):
    module = spread(decoder(tie_word_embeddings=False))
    ids = torch.randint(0, 50, (4, 32), generator=torch.Generator().manual_seed(0))
    settings = QuantizationConfig(bits=2, group=32, embedding_bits=8)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    found = gptq.quantize(model_of(module, tiny), settings, ids)
    assert all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())
    assert found.keys() == matrices(module).keys()
    with torch.no_grad():
        for name, codes in found.items():
            if name.startswith("layers.") and not name.startswith("layers.1.mlp.down"):
                module.get_submodule(name).weight.copy_(codes.dense())
    x = recorded(module, ids, "layers.1.mlp.down_proj")
    wanted = gptq.solve(before["layers.1.mlp.down_proj.weight"], x.T @ x / len(x), 2, settings)
    name = "layers.1.mlp.down_proj"
    assert (wanted.codes == found[name].codes).float().mean() > 0.99
    assert found["lm_head"].bits == found["embed_tokens"].bits == 8


def model_of(module, tiny):
    return LanguageModel("made", module, tiny.tokenizer, None)


def test_outputs_are_nearer_than_after_rounding_on_text_that_was_not_seen(tiny):
    model = model_of(spread(decoder()), tiny)
    generator = torch.Generator().manual_seed(0)
    ids, other = (torch.randint(0, 50, (16, 32), generator=generator) for _ in range(2))
    settings = QuantizationConfig(bits=3, group=32, embedding_bits=None)
    with torch.no_grad():
        exact = model.module(other)
    errors = {}
    for method in (rtn, gptq):
        codes = method.quantize(model, settings, ids)
        assert "embed_tokens" not in codes
        errors[method] = (outputs(model.module, codes, other) - exact).square().mean().item()
    assert errors[gptq] < 0.8 * errors[rtn]


def test_experts_that_no_token_chose_are_rounded(tiny):
    feed = FeedForwardSpec(32, num_experts=8, num_experts_per_tok=1)
    model = model_of(spread(decoder(layers=(LayerSpec(AttentionSpec(), feed),))), tiny)
    settings, told = QuantizationConfig(bits=4, group=32), []
    codes = gptq.quantize(model, settings, torch.tensor([[7, 7]]), on_matrix=told.append)
    assert sorted(told) == sorted(codes) == sorted(matrices(model.module))
    assert "layers.0.mlp.gate" not in codes
    plain = rtn.quantize(model, settings)
    same = {name for name in codes if torch.equal(codes[name].codes, plain[name].codes)}
    idle = [number for number in range(8) if f"layers.0.mlp.experts.{number}.up_proj" in same]
    assert len(idle) >= 6


def outputs(module: Decoder, codes: dict[str, Codes], ids):
    import copy

    module = copy.deepcopy(module)
    with torch.no_grad():
        for name, matrix in codes.items():
            module.get_submodule(name).weight.copy_(matrix.dense())
        return module(ids)


def test_calibration_text_becomes_rows(tiny):
    ids = calibration_ids(tiny, ["abc", "defg"], tokens=8, length=4)
    assert ids.tolist() == [[*tiny.tokenizer.encode("abc"), 256], tiny.tokenizer.encode("defg")]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: calibration_ids(m, [""]), InvalidInput, "holds 0 tokens"),
        (lambda m: calibration_ids(m, ["abc"], length=1), InvalidArgument, "length must be at least 2, got 1"),
        (
            lambda m: LayerwiseCalibration(m.module, torch.tensor([[1, 260]])),
            InvalidArgument,
            "id 260 is outside the vocabulary of 260",
        ),
        (
            lambda m: LayerwiseCalibration(m.module, torch.zeros(0, 4, dtype=torch.long)),
            InvalidArgument,
            r"shape \(0, 4\)",
        ),
        (
            lambda m: gptq.quantize(m, QuantizationConfig(), torch.zeros(1, 4, dtype=torch.long), damping=0.0),
            InvalidArgument,
            "damping must be above 0",
        ),
    ],
)
def test_bad_input_names_the_value(tiny, call, error, message):
    with pytest.raises(error, match=message):
        call(tiny)


def test_every_matrix_is_quantized_with_latent_attention_and_inputs_of_layers(tiny):
    latent = AttentionSpec(latent=LatentSpec(24, 8, 16, 16, q_rank=32))
    config = DecoderConfig(
        "llama",
        50,
        64,
        (LayerSpec(latent, FeedForwardSpec(64)),) * 2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        per_layer_size=32,
    )
    module = Decoder(config).initialize(seed=2).eval()
    model = LanguageModel("latent", module, tiny.tokenizer, None)
    ids = torch.randint(0, 50, (4, 24), generator=torch.Generator().manual_seed(0))
    codes = gptq.quantize(model, QuantizationConfig(bits=4, group=32), ids)
    assert set(codes) == set(matrices(module))
    assert "layers.1.layer_input.proj" in codes
    assert "per_layer.embed" in codes
