"""Quantization-aware training: what is trained is exported, what is not quantized stays, what cannot be is named."""

import copy

import pytest
import torch
from torch import nn

import pippin
from pippin.core import native
from pippin.core.errors import InvalidArgument, NotPrepared, UnsupportedLayer
from pippin.data.token_batches import TokenBatch
from pippin.engine import Engine, Request, SamplingOptions
from pippin.language import Decoder, DecoderConfig, LayerSpec
from pippin.language.objectives import NextToken
from pippin.language.quantized_checkpoint import save_quantized
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.kv_cache import PackedDocuments
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.fake_quantize import MAX_OFFSET
from pippin.nn.quantization.packed import middle_code, quantize
from pippin.shape.quantize import kv_cache_qat, qat
from pippin.shape.quantize.config import QuantizationConfig
from pippin.train import AdamW, Trainer

with_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
SETTINGS = QuantizationConfig(granularity="channel")
TEXT = torch.tensor([list(b"for step in range(steps): loss.backward(); step()")])


def fresh(seed=0, **options):
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(64, **options))
    config = DecoderConfig(
        "llama",
        260,
        32,
        (layer, layer),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
    )
    return Decoder(config).initialize(seed=seed)


def trained(module, steps=6, **options):
    batch = TokenBatch(TEXT[:, :-1], TEXT[:, 1:])
    trainer = Trainer(
        module, NextToken(), [batch] * steps, steps=steps, optimizer=AdamW(lr=3e-3), show_progress=False, **options
    )
    trainer.fit()
    module.eval()
    return trainer


@with_kernels
def test_what_was_trained_is_what_runs(tiny, tmp_path):
    module = qat.prepare(fresh(), SETTINGS)
    before = qat.factors(module)
    trainer = trained(module, ema=0.5)
    with trainer.ema.applied(module), torch.no_grad():
        codes = qat.convert(module)
        for name, one in codes.items():
            assert torch.equal(one.dense(), module.get_submodule(name).weight)
        expected = module(TEXT)
        model = pippin.language.LanguageModel("small", module, tiny.tokenizer, None)
        save_quantized(tmp_path, model, codes, metadata=qat.metadata(module))
    loaded = pippin.load(tmp_path, device="cpu")
    for name, one in codes.items():
        assert torch.equal(loaded.module.get_submodule(name).packed.dense(), one.dense())
    torch.testing.assert_close(loaded.module(TEXT), expected, atol=1e-3, rtol=0)
    *tokens, _ = Engine(loaded).stream(Request(TEXT[0].tolist(), SamplingOptions(max_tokens=1)))
    assert tokens[0].id == int(expected[0, -1].argmax())
    after = qat.factors(module)
    assert all((after[name] != before[name]).all() for name in before)


def test_training_lowers_the_loss_that_rounding_added():
    module = fresh()
    trained(module, steps=30)

    def loss(of):
        with torch.no_grad():
            return float(nn.functional.cross_entropy(of.eval()(TEXT[:, :-1])[0], TEXT[0, 1:]))

    rounded = qat.prepare(copy.deepcopy(module), SETTINGS)
    at_first = loss(rounded)
    trained(rounded, steps=20)
    assert loss(module) < at_first
    assert loss(rounded) < 0.9 * at_first


def test_the_latent_weights_are_what_the_optimizer_moves_and_norms_stay_exact():
    plain = fresh()
    module = qat.prepare(copy.deepcopy(plain), SETTINGS)
    names = {name for name, _ in module.named_parameters()}
    assert {f"{name}.weight" for name in qat.convert(module)}.isdisjoint(names)
    assert "layers.0.input_layernorm.weight" in names
    latent = module.layers[0].mlp.up_proj.parametrizations.weight.original
    assert torch.equal(latent, plain.layers[0].mlp.up_proj.weight)
    assert len(module.layers[0].mlp.up_proj.weight.unique()) <= 4 * 64
    assert all(p.no_decay for name, p in module.named_parameters() if name.endswith("log_factor"))


def test_a_tied_matrix_has_one_rounding_that_reaches_both_readers():
    module = qat.prepare(fresh(), SETTINGS)
    codes = qat.convert(module)
    assert "lm_head" not in codes
    assert codes["embed_tokens"].bits == 4
    assert module.lm_head.weight is module.embed_tokens.weight
    assert len(module.lm_head.weight[0].unique()) <= 16
    with torch.no_grad():
        module.embed_tokens.parametrizations.weight.original.mul_(2)
    assert torch.equal(module.lm_head.weight, module.embed_tokens.weight)


@pytest.mark.parametrize("bits", [2, 4])
def test_it_may_begin_at_codes_that_another_method_found(bits):
    module = fresh()
    up = module.layers[0].mlp.up_proj
    codes, scales = quantize(up.weight.detach(), bits, 32)
    moved = torch.randint(-1, 2, codes.shape, generator=torch.Generator().manual_seed(0))
    start = Codes((codes.int() + moved).clamp(0, 2**bits - 1).to(torch.uint8), scales, bits, middle_code(bits))
    before = up.weight.detach().clone()
    qat.prepare(module, QuantizationConfig(bits=bits, granularity="channel"), start={"layers.0.mlp.up_proj": start})
    found = qat.convert(module)["layers.0.mlp.up_proj"]
    assert torch.equal(found.codes, start.codes)
    assert torch.equal(found.scales, start.scales)
    latent = up.parametrizations.weight.original
    at_home = (codes == start.codes) & (codes > 0) & (codes < 2**bits - 1)
    near = (before - latent).abs() <= (0.5 - MAX_OFFSET + 2e-3) * scales.float()
    assert near[at_home].all()  # a weight that has its code already moves no further than it must
    inner = (start.codes > 0) & (start.codes < 2**bits - 1)
    off = (latent / scales.float() - (start.codes - start.zero_point)).abs()
    assert off[inner].max() <= MAX_OFFSET + 1e-3  # and none lies near an edge


def test_eight_bits_change_next_to_nothing():
    module = fresh()
    with torch.no_grad():
        exact = module(TEXT)
        rounded = qat.prepare(copy.deepcopy(module), QuantizationConfig(bits=8, embedding_bits=8, group=32))(TEXT)
    assert (rounded - exact).abs().max() < 0.06 * exact.std()


def test_baking_leaves_an_ordinary_model_of_the_rounded_weights():
    module = qat.prepare(fresh(), SETTINGS)
    codes = qat.convert(module)
    with torch.no_grad():
        expected = module(TEXT)
        assert torch.equal(qat.bake(module)(TEXT), expected)
    assert module.lm_head.weight is module.embed_tokens.weight
    assert torch.equal(module.layers[1].mlp.down_proj.weight, codes["layers.1.mlp.down_proj"].dense())
    with pytest.raises(NotPrepared, match="was not prepared"):
        qat.bake(module)


def test_routers_biases_and_what_is_skipped_stay_exact():
    module = fresh(num_experts=2, num_experts_per_tok=1)
    exact = module.layers[0].mlp.gate.weight
    qat.prepare(
        module, QuantizationConfig(granularity="tensor", embedding_bits=None, skip=("layers.1.self_attn.o_proj",))
    )
    codes = qat.convert(module)
    assert module.layers[0].mlp.gate.weight is exact
    assert "layers.0.mlp.experts.1.up_proj" in codes
    assert {"layers.0.mlp.gate", "layers.1.self_attn.o_proj", "embed_tokens"}.isdisjoint(codes)
    assert codes["layers.0.self_attn.q_proj"].scales.shape == (1, 1)


# --- the cache --------------------------------------------------------------------------------------------------------


def test_ranges_follow_what_was_seen_and_freeze_outside_training():
    module = qat.prepare(fresh(), QuantizationConfig(granularity="channel", cache_bits=8))
    seen = []
    hook = module.layers[0].self_attn.k_proj.register_forward_hook(lambda m, i, o: seen.append(o.detach()))
    module.train()(TEXT)
    hook.remove()
    first = kv_cache_qat.ranges(module)
    # a rotation changes no pair's length, so the largest key lies between the largest number and the longest pair
    largest = float(seen[0].abs().max())
    assert 0.5 * largest <= first.keys[0] <= 1.5 * largest
    module(torch.flip(TEXT, [1]))
    second = kv_cache_qat.ranges(module)
    assert second != first
    module.eval()(TEXT)
    assert kv_cache_qat.ranges(module) == second
    assert qat.metadata(module)["cache"]["values"] == list(second.values)


def test_the_rounded_cache_is_symmetric_clamps_and_passes_gradients_inside():
    found = kv_cache_qat.CacheRanges(1)
    found.layers, found.largest[:] = [0], 1.27
    found.eval()
    x = torch.tensor([[[[0.014, -0.5, 3.0, -3.0]]]], requires_grad=True)
    y = found.round(0, 0, x)
    torch.testing.assert_close(y, torch.tensor([[[[0.01, -0.5, 1.27, -1.27]]]]))
    y.sum().backward()
    assert x.grad.tolist() == [[[[1, 1, 0, 0]]]]


def test_documents_see_the_same_rounded_keys_as_rows_do():
    module = qat.prepare(fresh(), QuantizationConfig(granularity="channel", cache_bits=8))
    module.train()(TEXT)
    module.eval()
    with torch.no_grad():
        rows = module(TEXT[:, :40].view(2, 20)).view(1, 40, -1)
        together = module(TEXT[:, :40], cache=PackedDocuments((20, 20)))
    torch.testing.assert_close(together, rows, atol=1e-4, rtol=1e-4)


def test_a_scale_for_each_token_and_head_is_at_least_as_exact_as_a_frozen_range():
    """Why the engine's 8-bit cache goes without the ranges: its own scales are finer."""
    keys = torch.randn(1, 4, 200, 16, generator=torch.Generator().manual_seed(0)) * torch.rand(1, 4, 200, 1) * 3
    found = kv_cache_qat.CacheRanges(1)
    found.train().round(0, 0, keys)
    frozen = found.eval().round(0, 0, keys)
    scale = keys.abs().amax(-1, keepdim=True) / 127
    dynamic = (keys / scale).round() * scale
    assert (dynamic - keys).square().mean() < 0.5 * (frozen - keys).square().mean()


def test_a_cache_that_never_saw_a_token_has_no_ranges():
    module = qat.prepare(fresh(), QuantizationConfig(granularity="channel", cache_bits=8))
    with pytest.raises(NotPrepared, match="never observed"):
        qat.convert(module)
    with pytest.raises(NotPrepared, match="layer 0 never saw"):
        module.eval()(TEXT)
    baked = qat.bake(module)
    assert baked(TEXT).isfinite().all()


# --- what is refused --------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Conv1d(2, 2, 1)
        self.third = nn.ModuleList([nn.BatchNorm1d(4)])


def test_layers_without_a_rule_are_all_listed():
    module = Odd()
    with pytest.raises(UnsupportedLayer, match=r"2 layers .*second \(Conv1d\), third.0 \(BatchNorm1d\)"):
        qat.prepare(module, SETTINGS)
    assert not nn.utils.parametrize.is_parametrized(module.first)


def test_ordinary_linear_layers_have_a_rule():
    module = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    qat.prepare(module, SETTINGS)
    assert list(qat.convert(module)) == ["0"]


def test_bad_weights_and_groups_name_the_layer_and_change_nothing():
    module = fresh()
    with pytest.raises(InvalidArgument, match=r"layers.0.self_attn.q_proj has rows of 32 weights, which groups of 64"):
        qat.prepare(module)
    module.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(InvalidArgument, match=r"layers.1.mlp.up_proj holds values that are not finite"):
        qat.prepare(module, SETTINGS)
    module.layers[1].mlp.up_proj.weight.data.zero_()
    with pytest.raises(InvalidArgument, match=r"layers.1.mlp.up_proj is all zeros"):
        qat.prepare(module, SETTINGS)
    with pytest.raises(InvalidArgument, match=r"skip names 'layers.9'"):
        qat.prepare(module, QuantizationConfig(skip=("layers.9",)))
    with pytest.raises(NotPrepared, match="call prepare"):
        qat.convert(module)
    with pytest.raises(NotPrepared, match="call prepare"):
        qat.metadata(module)


def test_codes_to_start_from_must_fit():
    codes = Codes(torch.zeros(64, 32, dtype=torch.uint8), torch.ones(64, 1).half(), 4, 7.5)
    with pytest.raises(InvalidArgument, match=r"initial codes for layers.0.mlp.up_proj"):
        qat.prepare(fresh(), SETTINGS, start={"layers.0.mlp.up_proj": codes})
    with pytest.raises(InvalidArgument, match="'norm', which the config does not quantize"):
        qat.prepare(fresh(), SETTINGS, start={"norm": codes})


def test_a_model_is_prepared_once_and_trained_unpacked(tiny):
    module = qat.prepare(fresh(), SETTINGS)
    with pytest.raises(InvalidArgument, match="prepared already"):
        qat.prepare(module, SETTINGS)
    module.layers[0].mlp.up_proj.parametrizations.weight.original.data[0, 0] = torch.inf
    with pytest.raises(InvalidArgument, match="not finite"):
        qat.convert(module)
    if native.library() is not None:
        with pytest.raises(InvalidArgument, match="packed for inference; load the model with pack=False"):
            qat.prepare(fresh().pack(), SETTINGS)


def test_settings_outside_their_choices_are_named():
    with pytest.raises(InvalidArgument, match="bits must be 2, 3, 4 or 8, got 5"):
        QuantizationConfig(bits=5)


def test_levels_that_fit_badly_are_warned_about():
    module = nn.Sequential(nn.Linear(64, 64))
    with torch.no_grad():
        module[0].weight.normal_(generator=torch.Generator().manual_seed(0))
        module[0].weight[0, 0] = 1000.0
    with pytest.warns(UserWarning, match="0 does not use level -1.5"):
        qat.prepare(module, QuantizationConfig(granularity="tensor", init="absmax"))
    module[0].parametrizations.weight[0].log_factor.data.fill_(-9.0)
    with pytest.warns(UserWarning, match="0 has .* of its weights clipped"):
        qat.convert(module)
