"""Stochastic KV routing: who reads whom against brute force, the routed pass and its gradients against plain sums."""

import json
import math
import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

import pippin
from pippin.claims.worlds.sequences.byte_text import ByteBatches, ByteText, byte_config, byte_model
from pippin.core.errors import CorruptedFile, InvalidArgument, UntrainedSharing
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language import Decoder
from pippin.language.methods.distillation import Distillation
from pippin.language.methods.kv_routing import (
    KVRouting,
    RoutedCache,
    RoutedModel,
    evenly_spaced_layers,
    fewer_caches,
    greedy_layers,
    nearest_sources,
    sample_sources,
    stride_layers,
    trained_p_cross,
    with_kv_sharing_layers,
)
from pippin.language.objectives import NextToken
from pippin.language.presets import preset
from pippin.nn.attention.rotary import Rotary, apply_rotary
from pippin.nn.kv_cache import NoCache
from pippin.shape.kv_sharing import share_kv, share_last_layers
from pippin.shape.lora import LowRankModel
from pippin.train import AdamW, Trainer

CONFIG = byte_config(layers=6, width=32)
TEXT = torch.tensor([*(b"the rain in spain falls mainly in the plain; " * 20)])


def model(seed: int = 0, config=CONFIG, scale: float = 4.0) -> Decoder:
    """Random weights, large enough for layers to differ."""
    made = Decoder(config).initialize(seed=seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(scale if parameter.ndim == 2 else 1)
    return made.eval()


def alternating(layers: int = 6):
    """Local layers with a rotation of their own; every third one is global."""
    made = byte_config(layers=layers, width=32)
    local = replace(made.layers[0], attention=replace(made.layers[0].attention, window=4, rotary=Rotary(1000.0)))
    return replace(made, layers=tuple(layer if i % 3 == 2 else local for i, layer in enumerate(made.layers)))


def batch(rows: int = 2, length: int = 12, seed: int = 0) -> TokenBatch:
    ids = torch.randint(0, 257, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return TokenBatch(ids[:, :-1], ids[:, 1:])


def plain_forward(decoder: Decoder, ids, sources):
    """The routed pass as the card has it, one head and one query at a time: no cache, no fused attention."""
    config, count = decoder.config, ids.shape[1]
    x = decoder.embed_tokens(ids)
    kept = {}
    for index, layer in enumerate(decoder.layers):
        attention, spec = layer.self_attn, config.layers[index].attention
        h = layer.input_layernorm(x)

        def heads(projection, number, h=h):
            return projection(h).view(len(ids), count, number, config.head_dim).transpose(1, 2)

        q, k, v = (
            heads(attention.q_proj, config.num_attention_heads),
            heads(attention.k_proj, config.num_key_value_heads),
            heads(attention.v_proj, config.num_key_value_heads),
        )
        q, k = (q, k) if attention.q_norm is None else (attention.q_norm(q), attention.k_norm(k))
        if spec.rotary is not None:
            cos, sin = (table.to(x.dtype) for table in spec.rotary.tables(torch.arange(count), config.head_dim))
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        kept[index] = k, v
        keys, values = kept[index if sources[index] is None else sources[index]]
        out = torch.zeros_like(q)
        for head in range(config.num_attention_heads):
            one = head * config.num_key_value_heads // config.num_attention_heads
            for t in range(count):
                first = 0 if spec.window is None else max(0, t - spec.window + 1)
                scores = (keys[:, one, first : t + 1] * q[:, head, t, None]).sum(-1) / math.sqrt(config.head_dim)
                out[:, head, t] = (scores.softmax(-1)[..., None] * values[:, one, first : t + 1]).sum(1)
        x = x + attention.o_proj(out.transpose(1, 2).reshape(len(ids), count, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return decoder.lm_head(decoder.norm(x))


# --- who reads whom ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 12))
def test_one_in_g_leads_from_the_first_on(layers, group):
    config = replace(CONFIG, layers=CONFIG.layers[:1] * layers)
    assert evenly_spaced_layers(config, 1 / group) == tuple(range(0, layers, group))


@given(st.integers(1, 40), st.floats(0.01, 1.0))
def test_a_ratio_is_not_exceeded_but_by_the_first_layer_and_gaps_are_even(layers, kv_sharing_ratio):
    kv_sharing_layers = evenly_spaced_layers(replace(CONFIG, layers=CONFIG.layers[:1] * layers), kv_sharing_ratio)
    assert kv_sharing_layers[0] == 0
    assert layers * kv_sharing_ratio - 1 < len(kv_sharing_layers) < layers * kv_sharing_ratio + 1
    gaps = {after - before for before, after in pairwise(kv_sharing_layers)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(st.integers(1, 12), st.data())
def test_other_layers_read_the_nearest_kv_sharing_layer_of_their_kind(layers, data):
    config = alternating(layers)
    kind = [(layer.attention.window, layer.attention.rotary) for layer in config.layers]
    first = {kind.index(one) for one in kind}
    kv_sharing_layers = sorted(first | data.draw(st.sets(st.integers(0, layers - 1))))
    found = nearest_sources(config, kv_sharing_layers)
    for layer, source in enumerate(found):
        before = [
            kv_sharing_layer
            for kv_sharing_layer in kv_sharing_layers
            if kv_sharing_layer <= layer and kind[kv_sharing_layer] == kind[layer]
        ]
        assert (layer if source is None else source) == max(before)


def test_sources_are_drawn_uniformly_from_earlier_layers_of_the_same_kind():
    config, generator, runs = alternating(7), torch.Generator().manual_seed(0), 3000
    counts = torch.zeros(7, 7)
    for _ in range(runs):
        for layer, source in enumerate(sample_sources(config, 0.4, generator)):
            counts[layer, layer if source is None else source] += 1
    expected = torch.zeros(7, 7)
    for layer, earlier in enumerate([[], [0], [], [0, 1], [0, 1, 3], [2], [0, 1, 3, 4]]):
        expected[layer, layer] = 0.6 if earlier else 1.0
        expected[layer, earlier] = 0.4 / max(1, len(earlier))
    error = 5 * (expected * (1 - expected) / runs).sqrt()  # five standard deviations, in each of 49 places
    assert ((counts / runs - expected).abs() <= error + 1e-9).all()


def test_the_generator_alone_decides_and_is_left_alone_without_crossing():
    first, second = (torch.Generator().manual_seed(7) for _ in range(2))
    assert [sample_sources(CONFIG, 0.5, first) for _ in range(5)] == [
        sample_sources(CONFIG, 0.5, second) for _ in range(5)
    ]
    state = first.get_state()
    assert sample_sources(CONFIG, 0.0, first) == (None,) * 6
    assert torch.equal(first.get_state(), state)
    assert None not in sample_sources(CONFIG, 1.0, first)[1:]


# --- the routed pass --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "sources"),
    [(CONFIG, (None, 0, 1, 2, 0, None)), (CONFIG, (None, None, 0, 1, 1, 4)), (alternating(), (None, 0, None, 1, 3, 2))],
)
def test_routed_logits_and_gradients_are_those_of_plain_sums(config, sources):
    module, ids = model(config=config).double(), batch().ids
    weights = torch.randn(2, 12, 257, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = []
    for logits in (RoutedModel(module, sources)(ids), plain_forward(module, ids, sources)):
        module.zero_grad()
        (logits * weights).sum().backward()
        found.append((logits, {name: p.grad for name, p in module.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-9, rtol=1e-9)
    for name, gradient in found[0][1].items():
        other = found[1][1][name]
        if other is None:  # keys and values that nobody reads
            assert (gradient == 0).all()
        else:
            torch.testing.assert_close(gradient, other, atol=1e-7, rtol=1e-7, msg=name)
    read = {layer if source is None else source for layer, source in enumerate(sources)}
    for layer in range(6):
        assert bool(found[0][1][f"layers.{layer}.self_attn.v_proj.weight"].any()) == (layer in read)


def test_packed_documents_are_routed_as_each_of_them_alone():
    module, whole = model(), batch(1, 20)
    documents = (5, 9, 6)
    packed = TokenBatch(whole.ids, whole.targets, documents)
    routed = RoutedModel(module, (None, 0, 0, 2, 1, None))
    total = NextToken()(routed, packed).total
    parts = zip(whole.ids.split(documents, 1), whole.targets.split(documents, 1), strict=True)
    alone = sum(NextToken()(routed, TokenBatch(ids, targets)).total for ids, targets in parts)
    torch.testing.assert_close(total, alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(total, module.layers[2].self_attn.k_proj.weight)[0].norm(),
        torch.autograd.grad(alone, module.layers[2].self_attn.k_proj.weight)[0].norm(),
    )


def test_padding_is_passed_on():
    module, ids = model(), batch(1, 8).ids
    routed = RoutedModel(module, nearest_sources(CONFIG, [0, 3]))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], 1)
    torch.testing.assert_close(routed(padded, padding=torch.tensor([3]))[:, 3:], routed(ids), atol=1e-4, rtol=1e-4)


@given(st.sets(st.integers(1, 5)))
@settings(max_examples=6, deadline=None)
def test_a_shared_model_computes_what_was_computed_in_training_with_its_sources(others):
    module, ids = model(config=replace(CONFIG, training_methods={"kv_routing": {"p_cross": 0.5}})), batch().ids
    kv_sharing_layers = sorted({0, *others})
    student = share_kv(module, kv_sharing_layers=kv_sharing_layers)
    with torch.no_grad():
        torch.testing.assert_close(
            student(ids), RoutedModel(module, nearest_sources(CONFIG, kv_sharing_layers))(ids), atol=0, rtol=0
        )
    held = {name.split(".")[1] for name in student.state_dict() if ".k_proj." in name}
    assert held == {str(layer) for layer in kv_sharing_layers}


# --- training ---------------------------------------------------------------------------------------------------------


def trained(objective, seed: int = 0, steps: int = 2) -> Decoder:
    made = model()
    data = ByteBatches(2, 16, 3, ByteText(TEXT, TEXT))
    Trainer(made, objective, data, steps=steps, optimizer=AdamW(lr=1e-2), seed=seed, show_progress=False).fit()
    return made


def test_without_crossing_training_is_the_ordinary_one_bit_for_bit():
    ordinary, routed = trained(NextToken()).state_dict(), trained(KVRouting(0.0)).state_dict()
    assert all(torch.equal(tensor, routed[name]) for name, tensor in ordinary.items())


def test_the_seed_of_the_trainer_decides_what_is_drawn():
    runs = [trained(KVRouting(0.5), seed) for seed in (0, 0, 1)]
    assert all(trained_p_cross(run.config) == 0.5 for run in runs)
    first, again, other = (run.state_dict() for run in runs)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_the_share_of_rerouted_layers_is_logged():
    module = model()
    loss = KVRouting(1.0)(module, batch(), torch.Generator().manual_seed(0))
    assert loss.metrics["rerouted"] / loss.count == pytest.approx(5 / 6)
    assert KVRouting(0.5).unit == "tokens"


def test_low_rank_adaptation_and_distillation_are_routed_too():
    teacher, student = model(1), model()
    adapted = LowRankModel(student, rank=2, seed=0)
    with torch.no_grad():
        for up in adapted.up.values():
            up.normal_(generator=torch.Generator().manual_seed(0))
    objective = KVRouting(1.0, Distillation(teacher, weight=0.5))
    loss = objective(adapted, batch(), torch.Generator().manual_seed(0))
    number = int(torch.randint(1 << 62, (1,), generator=torch.Generator().manual_seed(0)))
    sources = sample_sources(CONFIG, 1.0, torch.Generator().manual_seed(number))
    routed = Distillation(teacher, weight=0.5)(RoutedModel(adapted, sources), batch(), torch.Generator())
    assert loss.total == routed.total
    loss.total.backward()
    assert adapted.up["layers/0/self_attn/k_proj"].grad.any()
    assert not adapted.up["layers/5/self_attn/k_proj"].grad.any(), "the last layer's are read by nobody"
    objective.after_step(adapted, 1)
    assert trained_p_cross(student.config) == 1.0


def test_processes_that_train_together_draw_what_the_first_one_says(monkeypatch):
    module, generators = model(), [torch.Generator().manual_seed(seed) for seed in range(4)]
    alone = {KVRouting(0.5)(module, batch(), generator).total.item() for generator in generators}
    assert len(alone) > 1
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: tensor.fill_(5 + src))
    assert len({KVRouting(0.5)(module, batch(), generator).total.item() for generator in generators}) == 1


class Remembering:
    """An objective that uses all that an objective may."""

    unit = "moves"

    def __init__(self):
        self.steps = torch.zeros(())

    def __call__(self, model, batch, generator):
        return NextToken()(model, batch, generator)

    def after_step(self, model, step):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_what_another_objective_remembers_is_kept():
    inner = Remembering()
    outer = KVRouting(0.5, inner)
    trained(outer, steps=3)
    assert outer.unit == "moves"
    assert float(outer.state_dict()["steps"]) == 3
    outer.load_state_dict({"steps": torch.tensor(9.0)})
    assert float(inner.steps) == 9
    assert KVRouting(0.5).state_dict() == {}


# --- choosing KV-sharing layers --------------------------------------------------------------------------------------


def test_greedy_adds_the_layer_that_lowers_the_loss_of_the_shared_model_most():
    module, held = model(3, byte_config(layers=4, width=32)), [batch(2, 12, seed) for seed in range(2)]

    def loss(kv_sharing_layers) -> float:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UntrainedSharing)
            return sum(
                float(NextToken()(share_kv(module, kv_sharing_layers=kv_sharing_layers), one).total) for one in held
            )

    found = [0]
    for count in (2, 3):
        found = min((sorted([*found, layer]) for layer in range(4) if layer not in found), key=loss)
        assert greedy_layers(module, iter(held), count) == tuple(found)
    assert not module.training


def test_stride_spreads_within_each_kind():
    assert stride_layers(CONFIG, 2) == (0, 3)
    assert stride_layers(CONFIG, 4) == (0, 2, 3, 5)
    assert stride_layers(alternating(), 3) == (0, 2, 3)
    assert stride_layers(alternating(), 2) == (0, 2)
    assert stride_layers(CONFIG, 6) == tuple(range(6))


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that was trained so, and one that was not."""
    place = tmp_path_factory.mktemp("routed")
    byte_model(model(config=replace(CONFIG, training_methods={"kv_routing": {"p_cross": 0.5}}))).save(place / "routed")
    byte_model(model()).save(place / "plain")
    return place


@pytest.mark.parametrize("how", [{"kv_sharing_ratio": 0.5}, {"kv_sharing_layers": [0, 1, 4]}])
@pytest.mark.parametrize("pack", [True, False])
def test_a_model_opens_with_fewer_caches_and_saves_so(folder, how, pack, tmp_path):
    loaded = pippin.load(folder / "routed", device="cpu", dtype="float32", pack=pack, transform=fewer_caches(**how))
    expected = share_kv(model(config=replace(CONFIG, training_methods={"kv_routing": {"p_cross": 0.5}})), **how)
    assert loaded.config == expected.config
    ids = batch().ids
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(ids), expected(ids), atol=1e-4, rtol=1e-4)
        if not pack:
            loaded.save(tmp_path / "cut")
            again = pippin.load(tmp_path / "cut", device="cpu", dtype="float32")
            assert again.config == expected.config
            torch.testing.assert_close(again.module(ids), expected(ids), atol=1e-4, rtol=1e-4)
            assert (tmp_path / "cut" / "model.safetensors").stat().st_size < (
                folder / "routed" / "model.safetensors"
            ).stat().st_size


def test_a_ratio_of_one_is_the_plain_model(folder):
    for transform in (None, fewer_caches(1.0), fewer_caches(kv_sharing_layers=range(6))):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = pippin.load(folder / "plain", device="cpu", dtype="float32", pack=False, transform=transform)
        assert loaded.config == CONFIG
        assert torch.equal(loaded.module(batch().ids), model()(batch().ids))


@pytest.mark.parametrize("nonsense", ["often", 3])
def test_the_record_is_one_field_that_others_need_not_know_and_nonsense_in_it_is_refused(folder, nonsense, tmp_path):
    config = json.loads((folder / "routed" / "config.json").read_text())
    plain = json.loads((folder / "plain" / "config.json").read_text())
    assert config == plain | {"training_methods": {"kv_routing": {"p_cross": 0.5}}}
    config["training_methods"] = nonsense
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        if (folder / "routed" / file).exists():
            (tmp_path / file).write_bytes((folder / "routed" / file).read_bytes())
    with pytest.raises(CorruptedFile, match="contradicts itself"):
        pippin.load(tmp_path, device="cpu")


def test_sharing_that_was_not_trained_is_said(folder):
    with pytest.warns(UntrainedSharing, match="4 of 6 layers read another's cache.*--route-caches"):
        pippin.load(folder / "plain", device="cpu", transform=fewer_caches(1 / 3))
    with pytest.warns(UntrainedSharing, match="3 of 6"):
        share_kv(model(), 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        share_kv(model(config=replace(CONFIG, training_methods={"kv_routing": {"p_cross": 0.25}})), 0.5)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "give either kv_sharing_ratio or kv_sharing_layers, got None and None"),
        ({"kv_sharing_ratio": 0.5, "kv_sharing_layers": [0]}, "give either kv_sharing_ratio or kv_sharing_layers"),
        ({"kv_sharing_ratio": 0.0}, "above 0 and at most 1, got 0.0"),
        ({"kv_sharing_ratio": 1.5}, "got 1.5"),
        ({"kv_sharing_ratio": math.nan}, "got nan"),
        ({"kv_sharing_layers": [1, 2]}, r"layer 0 has no layer of its kind before it.* got \[1, 2\]"),
        ({"kv_sharing_layers": []}, "layer 0 has no layer"),
        ({"kv_sharing_layers": [0, 6]}, "from 0 to 5; there is no such layer 6"),
        ({"kv_sharing_layers": [-1, 0]}, "no such layer -1"),
        ({"kv_sharing_layers": [0, 3, 3]}, r"ascending order, each once, got \[0, 3, 3\]"),
        ({"kv_sharing_layers": [0, 3, 2]}, r"ascending order, each once, got \[0, 3, 2\]"),
    ],
)
def test_impossible_kv_sharing_layers_are_refused(how, message, folder):
    with pytest.raises(InvalidArgument, match=message):
        with_kv_sharing_layers(CONFIG, **how)
    if how:
        with pytest.raises(InvalidArgument, match=message):
            pippin.load(folder / "routed", transform=fewer_caches(**how))


def test_each_kind_needs_a_kv_sharing_layer():
    with pytest.raises(InvalidArgument, match="layer 2 has no layer of its kind"):
        nearest_sources(alternating(), [0, 3])
    with pytest.raises(InvalidArgument, match="layer 2 cannot read layer 1, which is of another window or rotation"):
        RoutedModel(model(config=alternating()), (None, None, 1, None, None, None))


def test_what_cannot_be_routed_is_refused():
    sharing = share_last_layers(model(), 2)
    for call in (
        lambda: KVRouting(0.5)(sharing, batch(), torch.Generator()),
        lambda: KVRouting(0.5).record(sharing),
        lambda: with_kv_sharing_layers(sharing.config, 0.5),
        lambda: stride_layers(sharing.config, 2),
    ):
        with pytest.raises(InvalidArgument, match="2 of 6 layers share a cache already; take the model"):
            call()
    with pytest.raises(InvalidArgument, match=r"p_cross must be from 0 to 1, got 1\.1"):
        KVRouting(1.1)
    for record in (2.0, {"p_cross": 2.0}, {"p_cross": "often"}, {}):
        with pytest.raises(CorruptedFile, match=r"training_methods has kv_routing = .*; it must have a p_cross from 0"):
            trained_p_cross(replace(CONFIG, training_methods={"kv_routing": record}))
    with pytest.raises(InvalidArgument, match="5 sources were given for 6 layers"):
        RoutedModel(model(), (None,) * 5)
    with pytest.raises(InvalidArgument, match="layer 1 cannot read layer 2, only earlier ones"):
        RoutedCache(NoCache(), (None, 2, None))
    with pytest.raises(InvalidArgument, match="layers of parallel tracks cannot read each other's caches"):
        KVRouting(0.5).record(Decoder(preset("nano-pt-moe", 100)))


def test_impossible_numbers_of_kv_sharing_layers_are_refused():
    with pytest.raises(InvalidArgument, match="num_kv_sharing_layers must be from 1 to 6 for this model, got 0"):
        stride_layers(CONFIG, 0)
    with pytest.raises(InvalidArgument, match="got 7"):
        greedy_layers(model(), [batch()], 7)


def test_greedy_needs_targets():
    ids = batch().ids
    with pytest.raises(InvalidArgument, match="no token that a loss is taken of"):
        greedy_layers(model(), [TokenBatch(ids, torch.full_like(ids, IGNORE))], 2)
