"""Low-rank adaptation against autograd of the merged weights, PEFT, and closed forms."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

import pippin
from pippin.core import native
from pippin.core.errors import AdapterMismatch, InvalidArgument, InvalidInput
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.engine import Engine, Request, SamplingOptions
from pippin.language import Decoder, LanguageModel
from pippin.language.adapter_files import attach, read_factors, target_modules
from pippin.language.methods.afm import AFMConfig
from pippin.language.objectives import NextToken
from pippin.language.quantized_checkpoint import save_quantized
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRankUpdate, combine
from pippin.nn.packed_layers import PackedLinear, replace_submodule
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.packed import NativeWeight, middle_code, quantize
from pippin.shape.lora import ALL, LowRankModel, merge, select_targets, unmerge
from pippin.train import AdamW, ConstantSchedule, Trainer

# peft asks transformers by a name that is to go
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
with_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
BATCH = TokenBatch(IDS[:, :-1], IDS[:, 1:])


@pytest.fixture
def base(tiny):
    """A model of one's own."""
    return LanguageModel("base", copy.deepcopy(tiny.module), tiny.tokenizer, tiny.template)


def stirred(module: Decoder, seed: int = 0, **settings) -> LowRankModel:
    """An adapted model whose B is not zero."""
    adapted = LowRankModel(module, **{"rank": 3, "alpha": 6.0, "seed": seed} | settings)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for up in adapted.up.values():
            up.normal_(0.0, 0.1, generator=generator)
    return adapted


def quantized(module: Decoder, bits: int = 4) -> tuple[Decoder, Decoder]:
    """A decoder over codes, and a dense one of the very same values."""
    packed, dense = copy.deepcopy(module), copy.deepcopy(module)
    for name, layer in dense.named_modules():
        if isinstance(layer, Linear):
            group = 32 if layer.inputs % 32 == 0 else 16
            if group == 32:
                weight = NativeWeight.from_codes(*quantize(layer.weight.data, bits, 32), bits, 32)
            else:
                weight = NativeWeight.from_dense(layer.weight.data)
            replace_submodule(packed, name, PackedLinear(weight, layer.inputs, layer.outputs, layer.bias))
            layer.weight = torch.nn.Parameter(weight.dense(), requires_grad=False)
    return packed, dense


def gradients(adapted: LowRankModel, batch: TokenBatch = BATCH) -> dict[str, torch.Tensor]:
    adapted.zero_grad()
    NextToken()(adapted, batch).total.backward()
    return {name: parameter.grad.clone() for name, parameter in adapted.named_parameters()}


def by_merging(adapted: LowRankModel, batch: TokenBatch = BATCH) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the plain formula W + s B A, in float64."""
    module = copy.deepcopy(adapted.base).double()
    factors = {name: p.detach().double().requires_grad_() for name, p in adapted.named_parameters()}
    weights = {}
    for layer in adapted.pairs():
        key = layer.replace(".", "/")
        change = adapted.scale * factors[f"up.{key}"] @ factors[f"down.{key}"]
        weights[f"{layer}.weight"] = module.get_submodule(layer).weight + change
    logits = functional_call(module, weights, (batch.ids,))
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), reduction="sum", ignore_index=IGNORE
    )
    found = torch.autograd.grad(loss, list(factors.values()))
    return float(loss.detach()), dict(zip(factors, found, strict=True))


def test_the_published_decoder_gets_the_published_number_of_parameters():
    with torch.device("meta"):
        module = AFMConfig.on_device_3b().decoder()
        module = Decoder(module) if not isinstance(module, Decoder) else module
    adapted = LowRankModel(module, rank=32, alpha=16)
    sizes = [0] * 56
    for layer, (down, up) in adapted.pairs().items():
        sizes[int(layer.split(".")[1])] += down.numel() + up.numel()
    assert sizes == [1_245_184] * 35 + [1_097_728] * 21
    assert sum(p.numel() for p in adapted.parameters()) == 66_633_728
    assert adapted.scale == 0.5
    assert all(p.is_meta for p in adapted.parameters())


def test_the_seed_decides_where_training_begins(base):
    one, same, other = (
        [pair.clone() for pair in LowRankModel(base.module, rank=3, seed=seed).down.values()] for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_before_training_the_model_says_what_it_said(base):
    plain = base.module(IDS)
    adapted = LowRankModel(base.module, rank=4)
    assert torch.equal(adapted(IDS), plain)
    torch.testing.assert_close(adapted(IDS, logits_to_keep=1), plain[:, -1:])
    assert not any(p.requires_grad for p in base.module.parameters())
    assert set(adapted.state_dict()) == {name for name, _ in adapted.named_parameters()}


@pytest.mark.parametrize("chosen", [ALL, ["q_proj", "v_proj"], ["layers.1.mlp.up_proj"]], ids=str)
@pytest.mark.parametrize("rslora", [False, True])
def test_loss_and_gradients_are_those_of_the_merged_weights(base, chosen, rslora):
    adapted = stirred(base.module, targets=chosen, rslora=rslora)
    loss, expected = by_merging(adapted)
    assert float(NextToken()(adapted, BATCH).total.detach()) == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients(adapted).items():
        torch.testing.assert_close(gradient.double(), expected[name], atol=1e-3, rtol=1e-4)


@with_kernels
@pytest.mark.parametrize("bits", [2, 4])
def test_over_codes_the_gradients_are_those_over_the_same_values_dense(base, bits):
    packed, dense = quantized(base.module, bits)
    ours, theirs = stirred(packed), stirred(dense)
    expected = gradients(theirs)
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, expected[name], atol=2e-3, rtol=1e-3)


@with_kernels
def test_a_model_packed_for_inference_can_be_adapted(base):
    expected = gradients(stirred(copy.deepcopy(base.module)))
    base.module.pack()
    adapted = stirred(base.module)
    for name, gradient in gradients(adapted).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-3, rtol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gradients(adapted)
    flat = [torch.cat([found[name].flatten() for name in expected]) for found in (expected, rounded)]
    assert float(torch.cosine_similarity(*flat, 0)) > 0.995


def test_fused_projections_have_a_pair_each(base, monkeypatch):
    expected = gradients(stirred(copy.deepcopy(base.module)))
    monkeypatch.setattr(NativeWeight, "supports", staticmethod(lambda weight: False))
    base.module.pack()
    assert base.module.layers[0].self_attn.qkv_proj is not None
    assert len(select_targets(base.module, ALL)) == 14
    for name, gradient in gradients(stirred(base.module)).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-3, rtol=1e-3)


def test_layers_that_share_keys_and_values_have_no_pairs_for_them(base):
    first, second = base.config.layers
    shared = replace(second, attention=AttentionSpec(kv_source=0))
    module = Decoder(replace(base.config, layers=(first, shared))).initialize(seed=1)
    adapted = stirred(module)
    kinds = [layer.rpartition(".")[2] for layer in adapted.pairs() if layer.startswith("layers.1.")]
    assert kinds == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    _, expected = by_merging(adapted)
    for name, gradient in gradients(adapted).items():
        torch.testing.assert_close(gradient.double(), expected[name], atol=1e-3, rtol=1e-4)
    with pytest.raises(InvalidArgument, match=r"'layers\.1\.self_attn\.k_proj'"):
        LowRankModel(module, targets=["q_proj", "layers.1.self_attn.k_proj"])


def test_documents_in_one_row_are_learned_as_if_each_had_its_own(base):
    adapted = stirred(base.module)
    packed = TokenBatch(IDS[:, :-1].reshape(1, -1), IDS[:, 1:].reshape(1, -1), documents=(23, 23))
    apart, together = gradients(adapted), gradients(adapted, packed)
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, apart[name], atol=1e-4, rtol=1e-4)


def test_bfloat16_gradients_point_the_same_way(base):
    adapted = stirred(base.module)
    exact = torch.cat([gradient.flatten() for gradient in gradients(adapted).values()])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gradients(adapted)
    assert all(gradient.dtype == torch.float32 for gradient in rounded.values())
    rounded = torch.cat([gradient.flatten() for gradient in rounded.values()])
    assert float(torch.cosine_similarity(exact, rounded, 0)) > 0.995
    # a base in bfloat16 keeps its precision, the pairs keep theirs
    low = stirred(copy.deepcopy(base.module).bfloat16())
    assert {p.dtype for p in low.parameters()} == {torch.float32}
    found = torch.cat([gradient.flatten() for gradient in gradients(low).values()])
    assert float(torch.cosine_similarity(exact, found, 0)) > 0.99


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_trainer_teaches_the_pairs_and_nothing_else(base, precision):
    before = {name: weight.clone() for name, weight in base.module.state_dict().items()}
    adapted = LowRankModel(base.module, rank=8, alpha=16, seed=1)
    trainer = Trainer(
        adapted,
        NextToken(),
        [BATCH] * 40,
        steps=40,
        optimizer=AdamW(lr=2e-2, weight_decay=0.0),
        schedule=ConstantSchedule(),
        precision=precision,
        show_progress=False,
    )
    losses = trainer.fit().losses
    assert losses[-1] < losses[0] - 0.4
    assert all(torch.equal(weight, before[name]) for name, weight in base.module.state_dict().items())


@with_kernels
def test_training_over_codes_follows_training_over_the_same_values_dense(base):
    runs = []
    for module in quantized(base.module):
        adapted = LowRankModel(module, rank=4)
        optimizer = AdamW(lr=1e-2, weight_decay=0.0)
        runs.append(
            Trainer(adapted, NextToken(), [BATCH] * 8, steps=8, optimizer=optimizer, show_progress=False).fit().losses
        )
    assert runs[0] == pytest.approx(runs[1], abs=2e-3)


def test_b_learns_faster_where_that_is_asked_for(base):
    adapted = LowRankModel(base.module, rank=2, lr_ratio=16.0)
    (optimizer,) = AdamW(lr=1e-3).build(adapted)
    rates = {id(p): group["base_lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {rates[id(p)] for p in adapted.down.values()} == {1e-3}
    assert {rates[id(p)] for p in adapted.up.values()} == {1.6e-2}


def test_dropout_works_in_training_only_and_keeps_the_mean():
    layer = Linear(6, 4)
    layer.weight.data.zero_()
    down, up = torch.randn(2, 6), torch.randn(4, 2)
    adapter = Adapter("a", {layer: (LowRankUpdate(down, up, dropout=0.5),)})
    x = torch.randn(1, 1, 6).expand(1, 20_000, 6)
    mean = layer(x, [(adapter, slice(None))]).mean(1)[0]
    torch.testing.assert_close(mean, up @ down @ x[0, 0], atol=0.15, rtol=0)


def test_dropout_is_off_outside_of_training(base):
    adapted = stirred(base.module, dropout=0.5)
    torch.manual_seed(0)
    noisy = adapted.train()(IDS)
    assert not torch.equal(noisy, adapted.train()(IDS))
    assert torch.equal(adapted.eval()(IDS), adapted.eval()(IDS))
    torch.testing.assert_close(adapted(IDS), stirred(base.module)(IDS))


# --- beginning from others, stacking ----------------------------------------------------------------------------------


def test_a_larger_rank_begins_as_the_same_function(base):
    small = stirred(base.module, rank=3, alpha=6.0)
    large = LowRankModel(base.module, rank=8, alpha=5.0, seed=7, init=small.changes())
    torch.testing.assert_close(large(IDS), small(IDS), atol=1e-5, rtol=0)
    found = gradients(large)
    key = "up.layers/0/mlp/up_proj"
    assert found[key][:, 3:].abs().sum() > 0  # the directions that were filled up learn, too


def test_pairs_that_do_not_fit_are_refused(base):
    pairs = stirred(base.module, rank=4).changes()
    with pytest.raises(
        InvalidArgument, match=r"layers\.0\.self_attn\.q_proj cannot be initialized with factors of \(4, 32\)"
    ):
        LowRankModel(base.module, rank=3, init=pairs)
    with pytest.raises(InvalidArgument, match=r"no targets: layers\.0\.mlp\.down_proj"):
        LowRankModel(
            base.module,
            rank=4,
            targets=["up_proj", "gate_proj"],
            init={"layers.0.mlp.down_proj": pairs["layers.0.mlp.down_proj"]},
        )


def test_a_task_adapter_is_learned_on_top_of_another_and_both_run_as_one(base):
    recovery = stirred(base.module, seed=1)
    below = recovery.to_adapter("recovery", base)
    task = stirred(base.module, seed=2, rank=2, base_adapters=[below])
    base.adapters["both"] = combine("both", [(below, 1.0), (task.to_adapter("task", base), 1.0)])
    with torch.no_grad():
        torch.testing.assert_close(
            base.module(IDS, adapters=[(base.adapters["both"], slice(None))]), task(IDS), atol=1e-5, rtol=0
        )
    expected = LanguageModel("merged", copy.deepcopy(base.module), base.tokenizer, base.template)
    for adapted in (recovery, task):
        merge(expected, attach(expected, "x", adapted.changes()))
    request = Request(list(range(60, 90)), SamplingOptions(max_tokens=12))
    answers = [
        [event.id for event in list(engine.stream(each))[:-1]]
        for engine, each in ((Engine(expected), request), (Engine(base), replace(request, adapter="both")))
    ]
    assert answers[0] == answers[1]


def test_the_nearest_sum_of_a_smaller_rank_loses_the_smallest_singular_values(base):
    one, two = (stirred(base.module, seed=seed).to_adapter("a", base) for seed in (1, 2))
    whole, smaller = combine("w", [(one, 0.7), (two, -1.5)]), combine("s", [(one, 0.7), (two, -1.5)], rank=2)
    assert smaller.nbytes * 3 == whole.nbytes
    for layer, (change,) in whole.changes.items():
        exact = sum(
            w * (c.up.double() @ c.down.double()) for a, w in ((one, 0.7), (two, -1.5)) for c in a.changes[layer]
        )
        torch.testing.assert_close((change.up @ change.down).double(), exact, atol=1e-5, rtol=0)
        (short,) = smaller.changes[layer]
        lost = (exact - short.up.double() @ short.down.double()).norm()
        assert float(lost) == pytest.approx(float(torch.linalg.svdvals(exact)[2:].norm()), rel=1e-4)


@pytest.mark.parametrize(
    ("parts", "rank", "message"),
    [([], None, "got none"), ([1.0, float("nan")], None, "got 1.0, nan"), ([1.0], 0, "at least 1, got 0")],
)
def test_sums_that_make_no_sense_are_refused(base, parts, rank, message):
    adapter = stirred(base.module).to_adapter("a", base)
    with pytest.raises(InvalidArgument, match=message):
        combine("sum", [(adapter, weight) for weight in parts], rank=rank)


# --- merging ----------------------------------------------------------------------------------------------------------


def test_a_merged_model_answers_as_the_adapted_one_and_comes_back_bit_for_bit(base):
    before = copy.deepcopy(base.module.state_dict())
    adapted = stirred(base.module)
    expected, adapter = adapted(IDS), adapted.to_adapter("a", base)
    originals = merge(base, adapter, return_originals=True)
    torch.testing.assert_close(base.module(IDS), expected, atol=1e-4, rtol=0)
    unmerge(base, adapter, originals=originals)
    assert all(torch.equal(weight, before[name]) for name, weight in base.module.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_original_a_merge_is_undone_within_two_roundings(base, dtype):
    base.module.to(dtype)
    before = copy.deepcopy(base.module.state_dict())
    adapter = stirred(base.module).to_adapter("a", base)
    assert merge(base, adapter, weight=0.5) == {}
    merged = copy.deepcopy(base.module.state_dict())
    unmerge(base, adapter, weight=0.5)
    for name, weight in base.module.state_dict().items():
        size = torch.maximum(before[name].abs(), merged[name].abs()).float()
        assert bool(((weight.float() - before[name].float()).abs() <= 1.01 * torch.finfo(dtype).eps * size).all())


def test_several_merged_one_by_one_are_their_weighted_sum(base):
    adapters = [stirred(base.module, seed=seed).to_adapter(f"{seed}", base) for seed in (1, 2)]
    other = copy.deepcopy(base.module.state_dict())
    merge(base, adapters[0], weight=0.7)
    merge(base, adapters[1], weight=-0.2)
    for layer, place in target_modules(base.module):
        change = sum(
            weight * (c.up @ c.down)
            for adapter, weight in zip(adapters, (0.7, -0.2), strict=True)
            for c in adapter.changes[place.linear]
        )
        torch.testing.assert_close(place.linear.weight.data, other[f"{layer}.weight"] + change, atol=1e-5, rtol=0)


def test_what_cannot_be_merged_is_refused_before_anything_changes(base, tiny):
    adapter = stirred(base.module).to_adapter("a", base)
    before = copy.deepcopy(base.module.state_dict())
    with pytest.raises(InvalidArgument, match="weight must be finite, got inf"):
        merge(base, adapter, weight=float("inf"))
    with pytest.raises(AdapterMismatch, match="'a' changes 14 layers that are not of tiny"):
        merge(tiny, adapter)
    last = next(iter(reversed(adapter.changes.values())))[0]
    last.up[0, 0] = float("nan")
    with pytest.raises(InvalidInput, match=r"'a' holds values at layers\.1\.mlp\.down_proj that are not finite"):
        merge(base, adapter)
    with pytest.raises(InvalidInput):
        unmerge(base, adapter)
    last.up[0, 0] = 0.0
    with pytest.raises(InvalidArgument, match="the originals are of 0 layers"):
        unmerge(base, adapter, originals={})
    assert all(torch.equal(weight, before[name]) for name, weight in base.module.state_dict().items())
    base.module.pack()
    adapter = stirred(base.module).to_adapter("a", base)
    with pytest.raises(InvalidArgument, match=r"base is packed \(.* first\).*load it with pack=False"):
        merge(base, adapter)


# --- files, and PEFT --------------------------------------------------------------------------------------------------


def test_what_is_saved_is_read_again(base, tmp_path):
    adapted = stirred(base.module, rslora=True)
    adapted.save(tmp_path, base, metadata={"steps": 3})
    for layer, (down, up) in read_factors(base, tmp_path).items():
        torch.testing.assert_close(down, adapted.changes()[layer][0])
        torch.testing.assert_close(up, adapted.changes()[layer][1])
    assert '"steps": 3' in (tmp_path / "base_model.json").read_text()


@pytest.fixture
def in_transformers(base, tmp_path):
    """The same model in transformers."""
    transformers = pytest.importorskip("transformers")
    base.save(tmp_path / "model")
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_reads_what_we_wrote(base, in_transformers, tmp_path, rslora):
    peft = pytest.importorskip("peft")
    adapted = stirred(base.module, rslora=rslora)
    adapted.save(tmp_path / "adapter", base)
    theirs = peft.PeftModel.from_pretrained(in_transformers, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, adapted.eval()(IDS), atol=1e-4, rtol=0)


def test_we_read_and_merge_what_peft_trained(base, in_transformers, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, lora_alpha=9, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(in_transformers, config)
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        theirs(IDS, labels=IDS).loss.backward()
        optimizer.step()
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = theirs.eval()(IDS).logits
        assert (expected - base.module(IDS)).abs().max() > 0.05
        adapter = base.load_adapter("a", tmp_path / "adapter")
        torch.testing.assert_close(base.module(IDS, adapters=[(adapter, slice(None))]), expected, atol=1e-4, rtol=0)
        # and goes on from there as PEFT would
        begun = LowRankModel(base.module, 3, 9, ["q_proj", "down_proj"], init=read_factors(base, tmp_path / "adapter"))
        torch.testing.assert_close(begun(IDS), expected, atol=1e-4, rtol=0)
        merge(base, adapter)
        torch.testing.assert_close(base.module(IDS), theirs.merge_and_unload()(IDS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"rank": 17}, r"rank 17 is more than layers\.0\.self_attn\.k_proj can have, a matrix of 16 x 32"),
        ({"targets": []}, "none given"),
        (
            {"targets": ["q_proj", "qproj", "layers.9.mlp.up_proj"]},
            r"'qproj', 'layers\.9\.mlp\.up_proj'; there are: down_proj, gate_proj, k_proj, .*, v_proj",
        ),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(base, settings, message):
    with pytest.raises(InvalidArgument, match=message):
        LowRankModel(base.module, **{"rank": 4} | settings)
    assert all(p.requires_grad for p in base.module.parameters())  # and nothing was frozen


@with_kernels
def test_an_adapter_over_a_quantized_folder_belongs_to_its_codes(base, tmp_path):
    for name, bits in (("two", 2), ("four", 4)):
        codes = {}
        for layer, place in target_modules(base.module):
            group = 32 if place.linear.inputs % 32 == 0 else 16
            codes[layer] = Codes(*quantize(place.linear.weight.data, bits, group), bits, middle_code(bits))
        save_quantized(tmp_path / name, base, codes)
    two, four = (pippin.load(tmp_path / name, device="cpu") for name in ("two", "four"))
    adapted = stirred(two.module)
    adapted.save(tmp_path / "adapter", two)
    with pytest.raises(AdapterMismatch, match="made for 'two'"):
        four.load_adapter("a", tmp_path / "adapter")
    again = pippin.load(tmp_path / "two", device="cpu")
    adapter = again.load_adapter("a", tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(
            again.module(IDS, adapters=[(adapter, slice(None))]), adapted(IDS), atol=1e-5, rtol=0
        )
