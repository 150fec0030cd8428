"""Sharing caches: who reads whom, what is kept, and what a short distillation mends."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers

import pippin
from pippin.claims.worlds.sequences.byte_text import END, ByteBatches, ByteText, byte_config, byte_model
from pippin.core import native
from pippin.core.errors import InvalidArgument, UntrainedSharing
from pippin.data.text.tokenizer import Tokenizer
from pippin.engine import Engine, Request, SamplingOptions, Token
from pippin.engine.model_runner import ModelInput
from pippin.engine.runners.native_runner import NativeRunner
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.language import Decoder, LanguageModel
from pippin.language.methods.distillation import Distillation
from pippin.language.methods.kv_routing import RoutedModel, fewer_caches, nearest_sources
from pippin.nn.attention.rotary import Rotary
from pippin.shape.export.gguf import export_gguf
from pippin.shape.kv_sharing import share_kv, share_last_layers, sharing_sources
from pippin.train import AdamW, Trainer

CONFIG = byte_config(layers=6, width=32)


def model(seed: int = 0, config=CONFIG) -> Decoder:
    return Decoder(config).initialize(seed=seed).eval()


def alternating(layers: int = 6):
    """Local layers with a rotation of their own; every third one is global."""
    made = byte_config(layers=layers, width=32)
    local = replace(made.layers[0], attention=replace(made.layers[0].attention, window=4, rotary=Rotary(1000.0)))
    return replace(made, layers=tuple(layer if i % 3 == 2 else local for i, layer in enumerate(made.layers)))


@given(st.integers(2, 40), st.data())
def test_the_last_layers_read_the_last_before_them_and_groups_their_first(layers, data):
    config = replace(CONFIG, layers=CONFIG.layers[:1] * layers)
    shared = data.draw(st.integers(1, layers - 1))
    own = layers - shared
    assert sharing_sources(config, shared) == (None,) * own + (own - 1,) * shared
    group = data.draw(st.integers(2, layers))
    assert sharing_sources(config, group_size=group) == tuple(
        None if i % group == 0 else i - i % group for i in range(layers)
    )


def test_layers_read_one_of_their_own_kind():
    assert sharing_sources(alternating(), 3) == (None, None, None, 1, 1, 2)
    assert sharing_sources(alternating(), group_size=6) == (None, 0, None, 0, 0, 2)
    with pytest.raises(InvalidArgument, match="layer 2 has no layer of its kind before layer 2 to read"):
        sharing_sources(alternating(), 4)


@pytest.mark.parametrize("start", ["own", "mean"])
def test_weights_are_kept_but_for_keys_and_values_that_are_dropped_or_averaged(start):
    module = model()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    student = share_last_layers(module, 2, init=start)
    after = student.state_dict()
    dropped = {n for n in before if n.startswith(("layers.4.", "layers.5.")) and ("k_" in n or "v_proj" in n)}
    assert before.keys() - after.keys() == dropped
    for name, tensor in after.items():
        read = name.startswith("layers.3.self_attn.") and ("k_" in name or "v_proj" in name)
        alike = [before[name.replace(".3.", f".{layer}.")] for layer in (3, 4, 5)]
        expected = torch.stack(alike).mean(0) if read and start == "mean" else before[name]
        assert torch.equal(tensor, expected), name
        assert tensor.data_ptr() != module.state_dict()[name].data_ptr()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert student.lm_head.weight is student.embed_tokens.weight


def test_layers_that_were_alike_already_lose_nothing():
    """If the sharing layers made the same keys and values as their source, dropping theirs changes nothing."""
    module = model()
    with torch.no_grad():
        for layer in module.layers[3:]:  # what enters attention is alike, as nothing is added in between
            layer.self_attn.load_state_dict(module.layers[3].self_attn.state_dict())
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        module.layers[5].self_attn.o_proj.weight.copy_(module.layers[2].self_attn.o_proj.weight)
        ids = torch.randint(0, 257, (2, 20), generator=torch.Generator().manual_seed(0))
        for start in ("own", "mean"):
            torch.testing.assert_close(share_last_layers(module, 2, init=start)(ids), module(ids), atol=1e-5, rtol=1e-5)


def test_a_short_distillation_mends_much_of_what_the_cut_broke():
    text = torch.tensor([*(b"the rain in spain falls mainly in the plain; " * 40)])
    text = ByteText(text, text)
    teacher = model(config=byte_config(layers=4, width=32))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(3 if parameter.ndim == 2 else 1)  # laws that are far from uniform
    student, objective = share_last_layers(teacher, 2), Distillation(teacher, weight=1.0)
    held = next(iter(ByteBatches(4, 32, 99, text)))

    def divergence() -> float:
        with torch.no_grad():
            return float(objective(student, held, torch.Generator()).metrics["divergence"])

    cut = divergence()
    batches = ByteBatches(2, 32, 1, text)
    Trainer(
        student, objective, batches, steps=30, optimizer=AdamW(lr=3e-3, weight_decay=0.0), show_progress=False
    ).fit()
    assert divergence() < 0.4 * cut


def test_the_engine_holds_the_smaller_cache_and_gives_the_same_logits():
    student = share_last_layers(model(), 2)
    ids = list(b"import this")
    runners = [TorchRunner(byte_model(module), 2, "float32") for module in (model(), student)]
    assert runners[1].block_bytes * 6 == runners[0].block_bytes * 4
    (last,) = runners[1].forward([ModelInput(ids, 0, [0], [len(ids) - 1])])
    with torch.no_grad():
        torch.testing.assert_close(last, student(torch.tensor([ids]), logits_to_keep=1)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kv_sharing_layers", [[0], [0, 1, 4], [0, 1, 2, 3, 4, 5]])
def test_cached_answers_of_every_ratio_are_those_of_the_routed_whole_and_the_cache_shrinks(kv_sharing_layers, packed):
    if packed and native.library() is None:
        pytest.skip("no native kernels here")
    module = model(config=replace(CONFIG, training_methods={"kv_routing": {"p_cross": 0.5}}))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(4 if parameter.ndim == 2 else 1)  # far from uniform, so that no answer hangs on rounding
    whole, ids, count = (
        RoutedModel(module, nearest_sources(CONFIG, kv_sharing_layers)),
        list(b"import this, and that"),
        14,
    )
    wanted = list(ids)
    with torch.inference_mode():
        for _ in range(count):
            wanted.append(int(whole(torch.tensor([wanted]))[0, -1, :END].argmax()))
    student = byte_model(share_kv(module, kv_sharing_layers=kv_sharing_layers))
    if packed:
        student.module.pack()
    options = SamplingOptions(temperature=0.0, max_tokens=count, logit_bias={END: -100.0})
    with Engine(student, max_num_seqs=1, cache_tokens=256, kv_cache_dtype="float32") as engine:
        assert isinstance(engine._runner, NativeRunner) == packed
        answer = [event.id for event in engine.stream(Request(ids, options)) if isinstance(event, Token)]
        stats = engine.stats()
    assert answer == wanted[len(ids) :]
    values = 2 * len(kv_sharing_layers) * CONFIG.num_key_value_heads * CONFIG.head_dim
    assert stats.cache_bytes_used == stats.cache_tokens_used * values * 4 > 0


def test_followers_of_a_gguf_file_are_not_read(tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: index for index, token in enumerate([*letters, "is"])}, [("i", "s")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    module = model(config=replace(byte_config(layers=6, width=64), vocab_size=258))
    exported = LanguageModel("routed", module, Tokenizer(backend, eos_ids=[257]), None)
    path = export_gguf(exported, tmp_path / "routed.gguf", "F32")
    with pytest.warns(UntrainedSharing):
        loaded = pippin.load(path, device="cpu", dtype="float32", pack=False, transform=fewer_caches(0.5))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = RoutedModel(module, nearest_sources(module.config, [0, 2, 4]))(ids)
        torch.testing.assert_close(loaded.module(ids), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers must be from 1 to 5, .* 6 layers .* got 6"),
        ({"num_kv_shared_layers": 0}, "got 0"),
        ({"num_kv_shared_layers": -1}, "got -1"),
        ({"group_size": 1}, "group_size must be from 2 to 6, .* got 1"),
        ({"group_size": 7}, "got 7"),
        ({}, "give either num_kv_shared_layers or group_size"),
        ({"num_kv_shared_layers": 2, "group_size": 2}, "give either num_kv_shared_layers or group_size"),
    ],
)
def test_impossible_sharing_names_the_value(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        share_last_layers(model(), **arguments)


def test_what_shares_already_or_is_packed_is_refused():
    with pytest.raises(InvalidArgument, match="2 of 6 layers share a cache already"):
        share_last_layers(share_last_layers(model(), 2), 1)
    with pytest.raises(InvalidArgument, match="pack=False"):
        share_last_layers(model().pack(), 2)
    with pytest.raises(InvalidArgument, match="pack=False"):
        share_kv(model(config=replace(CONFIG, training_methods={"kv_routing": {"p_cross": 0.5}})).pack(), 0.5)
