"""LoRA adapters against models into which the same change was merged by hand, in float64."""

import copy
import gc
import json
import math
import os
import random
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import pippin
from pippin.core.errors import (
    AdapterMismatch,
    CorruptedFile,
    InvalidArgument,
    ModelNotFound,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from pippin.engine import Engine, Request, SamplingOptions
from pippin.language import Decoder, LanguageModel
from pippin.language.adapter_files import base_sha256, save_adapter
from pippin.nn.feedforward.feedforward import FeedForwardSpec

ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
ALL = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
IDS = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def base(tiny):
    """A model of one's own, to load adapters into."""
    return LanguageModel("base", copy.deepcopy(tiny.module), tiny.tokenizer, tiny.template)


def low_rank(model, seed, targets=ALL, rank=3):
    """Random A and B for some layers; large enough to change the text."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.module.named_parameters():
        layer = name.removesuffix(".weight")
        if layer.endswith(targets):
            outputs, inputs = parameter.shape
            weights[layer] = (
                torch.randn(rank, inputs, generator=generator) / inputs**0.5,
                torch.randn(outputs, rank, generator=generator) / 8,
            )
    return weights


def merged(model, weights, scale):
    """The same model with W + scale * B A, computed in float64."""
    module = copy.deepcopy(model.module)
    for layer, (down, up) in weights.items():
        linear = module.get_submodule(layer)
        linear.weight.data = (linear.weight.double() + scale * up.double() @ down.double()).to(linear.weight.dtype)
    return replace(model, network=module, adapters={})


def texts(engine, requests):
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: [event.id for event in list(engine.stream(request))[:-1]], requests))


def write(folder, weights, **config):
    """An adapter as PEFT itself writes it, without our hash."""
    folder.mkdir(exist_ok=True)
    tensors = {}
    for layer, (down, up) in weights.items():
        tensors[f"base_model.model.model.{layer}.lora_A.weight"] = down
        tensors[f"base_model.model.model.{layer}.lora_B.weight"] = up
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    off = {key: False for key in ("fan_in_fan_out", "lora_bias", "use_dora", "use_qalora", "use_rslora")}
    unset = dict.fromkeys(["auto_mapping", "corda_config", "layers_to_transform", "megatron_config", "modules_to_save"])
    fields = {
        **off,
        **unset,
        "alpha_pattern": {},
        "rank_pattern": {},
        "loftq_config": {},
        "base_model_name_or_path": "base",
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": 6,
        "lora_dropout": 0.05,
        "megatron_core": "megatron.core",
        "peft_type": "LORA",
        "qalora_group_size": 16,
        "r": 3,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj"), ("up_proj",), ("o_proj", "k_proj")], ids=str)
def test_logits_equal_those_of_the_merged_model(base, tmp_path, packed, rslora, targets):
    weights = low_rank(base, 0, targets)
    plain, expected = base.module(IDS), merged(base, weights, 6 / (math.sqrt(3) if rslora else 3)).module(IDS)
    if packed:
        base.module.pack()
    adapter = base.load_adapter("a", write(tmp_path, weights, use_rslora=rslora))
    assert adapter.nbytes == 4 * sum(down.numel() + up.numel() for down, up in weights.values())
    with torch.no_grad():
        got = base.module(IDS, adapters=[(adapter, slice(None))])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        assert (got - plain).abs().max() > 0.01
        torch.testing.assert_close(base.module(IDS), plain, atol=1e-5, rtol=0)  # the model itself is as it was


def test_an_adapter_that_was_loaded_before_packing_is_refused(base, tmp_path):
    adapter = base.load_adapter("a", write(tmp_path, low_rank(base, 0)))
    base.module.pack()
    with pytest.raises(AdapterMismatch, match=r"'a' changes .* layers that are not of this model.*after it was packed"):
        base.module(IDS, adapters=[(adapter, slice(None))])


@pytest.mark.parametrize("packed", [False, True])
def test_two_adapters_and_none_in_one_batch_equal_three_models(base, tmp_path, packed):
    weights = {name: low_rank(base, seed, rank=3) for seed, name in enumerate(["one", "two"])}
    models = {None: merged(base, {}, 0)} | {name: merged(base, each, 2.0) for name, each in weights.items()}
    if packed:
        base.module.pack()
    for name, each in weights.items():
        base.load_adapter(name, write(tmp_path / name, each))
    prompt = random.Random(0).choices(range(32, 127), k=70)
    requests = [
        Request(prompt, SamplingOptions(max_tokens=12 + i), adapter=name) for i, name in enumerate([*models, *models])
    ]
    expected = [
        [event.id for event in list(Engine(models[r.adapter]).stream(replace(r, adapter=None)))[:-1]] for r in requests
    ]
    assert len({tuple(ids[:12]) for ids in expected}) == 3
    with Engine(base, max_num_seqs=3, max_num_batched_tokens=16) as engine:
        assert texts(engine, requests[:3]) + texts(engine, requests[3:]) == expected
        # three prompts were computed: what one adapter left in a slot is no use to another
        assert engine.stats().cached_tokens == 3 * (len(prompt) - 1)
    for request, ids in zip(requests, expected, strict=True):
        assert texts(Engine(base), [request]) == [ids]


def test_a_cached_prefix_belongs_to_its_adapter(base, tmp_path):
    base.load_adapter("a", write(tmp_path, low_rank(base, 0)))
    prompt, cached = list(range(60, 110)), []
    with Engine(base, max_num_batched_tokens=16) as engine:
        for adapter in (None, None, "a", "a", None):
            *_, last = engine.stream(Request(prompt, SamplingOptions(max_tokens=1), adapter=adapter))
            cached.append(last.cached_tokens)
        assert cached == [0, 49, 0, 49, 49]
        base.load_adapter("a", tmp_path)  # the same name again is another adapter
        assert engine.prefill(prompt, adapter="a") == 50
        assert engine.stats().cached_tokens == 3 * 49
        assert engine.score(prompt, [[65]], adapter="a") != engine.score(prompt, [[65]])


def test_scores_with_an_adapter_equal_the_merged_model(base, tmp_path):
    weights = low_rank(base, 0)
    base.load_adapter("a", write(tmp_path, weights))
    expected = Engine(merged(base, weights, 2.0)).score([65] * 20, [[66, 67], [68]])
    with Engine(base) as engine:
        assert engine.score([65] * 20, [[66, 67], [68]], adapter="a") == pytest.approx(expected, abs=1e-3)


def test_a_model_without_requests_for_adapters_never_looks_for_them(base, tmp_path, monkeypatch):
    base.load_adapter("a", write(tmp_path, low_rank(base, 0)))
    monkeypatch.setattr("pippin.nn.linear.apply_adapters", lambda *_: pytest.fail("an adapter was looked for"))
    assert texts(Engine(base), [Request([65], SamplingOptions(max_tokens=3))])


def test_an_adapter_that_is_unloaded_finishes_its_requests_and_takes_no_more(base, tmp_path):
    base.load_adapter("a", write(tmp_path, low_rank(base, 0)))
    request = Request([65, 66], SamplingOptions(max_tokens=10), adapter="a")
    expected = texts(Engine(base), [request])[0]
    with Engine(base) as engine:
        stream = engine.stream(request)
        base.unload_adapter("a")
        assert [event.id for event in list(stream)[:-1]] == expected
        for call in (engine.stream, Engine(base).stream):
            with pytest.raises(ModelNotFound, match="no adapter 'a' loaded; loaded: none"):
                call(request)
    with pytest.raises(ModelNotFound):
        base.unload_adapter("a")


def test_what_is_saved_is_loaded_and_belongs_to_its_base_model(base, tmp_path):
    weights = low_rank(base, 0)
    save_adapter(tmp_path, weights, model=base, alpha=6)
    save_adapter(tmp_path, weights, model=base, alpha=9)  # replaces the first
    adapter = base.load_adapter("a", tmp_path)
    got = base.module(IDS, adapters=[(adapter, slice(None))])
    torch.testing.assert_close(got, merged(base, weights, 3.0).module(IDS), atol=1e-4, rtol=0)
    assert set(load_file(tmp_path / "adapter_model.safetensors")) == {
        f"base_model.model.model.{layer}.lora_{which}.weight" for layer in weights for which in "AB"
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "base_model.json",
    ]
    other = merged(base, {"layers.0.mlp.up_proj": low_rank(base, 1)["layers.0.mlp.up_proj"]}, 1.0)
    with pytest.raises(AdapterMismatch, match=f"made for 'base' with SHA-256 {base_sha256(base)}"):
        other.load_adapter("a", tmp_path)
    assert other.adapters == {}


def test_the_hash_of_a_model_from_disk_is_that_of_its_file(base, tmp_path):
    import hashlib

    base.save(tmp_path / "model")
    loaded = pippin.load(tmp_path / "model", device="cpu", dtype="float32")
    content = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert base_sha256(loaded) == hashlib.sha256(content).hexdigest()
    weights = low_rank(base, 0)
    save_adapter(tmp_path / "adapter", weights, model=loaded, alpha=6)
    adapter = loaded.load_adapter("a", tmp_path / "adapter")
    with torch.no_grad():
        got = loaded.module(IDS, adapters=[(adapter, slice(None))])
        torch.testing.assert_close(got, merged(base, weights, 2.0).module(IDS), atol=1e-4, rtol=0)
    (tmp_path / "model" / "second.safetensors").write_bytes(b"")
    assert base_sha256(loaded) not in (hashlib.sha256(content).hexdigest(), base_sha256(base))


def test_memory_models_are_told_apart_packed_or_not(base, tiny):
    assert base_sha256(base) == base_sha256(tiny)
    base.module.pack()
    first = base_sha256(base)
    other = LanguageModel("other", Decoder(tiny.config).initialize(seed=9).pack(), tiny.tokenizer, None)
    assert base_sha256(base) == first != base_sha256(other)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("lora_bias", True),
        ("init_lora_weights", "pissa"),
        ("trainable_token_indices", [1]),
        ("task_type", "SEQ_CLS"),
        ("a_setting_of_the_future", "x"),
    ],
)
def test_settings_that_change_the_formula_are_refused_by_name(base, tmp_path, field, value):
    write(tmp_path, low_rank(base, 0, ("q_proj",)), **{field: value})
    with pytest.raises(UnsupportedModel, match=f"not supported in an adapter: {field}"):
        base.load_adapter("a", tmp_path)


def test_other_kinds_of_adapter_are_refused(base, tmp_path):
    write(tmp_path, low_rank(base, 0, ("q_proj",)), peft_type="IA3")
    with pytest.raises(UnsupportedModel, match="peft_type 'IA3'"):
        base.load_adapter("a", tmp_path)


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        ("layers.0.self_attn.q_proj", AdapterMismatch, "as a matrix of 10 x 7, base has 32 x 32 there"),
        ("layers.7.self_attn.q_proj", AdapterMismatch, "'layers.7.self_attn.q_proj', which base does not have"),
        ("lm_head", UnsupportedModel, "an adapter of 'lm_head' is not supported"),
        ("embed_tokens", UnsupportedModel, "an adapter of 'embed_tokens' is not supported"),
        ("layers.0.mlp.experts.0.up_proj", UnsupportedModel, "experts.0.up_proj' is not supported"),
    ],
)
def test_adapters_of_other_models_are_refused(base, tmp_path, layer, error, message):
    write(tmp_path, {layer: (torch.ones(3, 7), torch.ones(10, 3))})
    with pytest.raises(error, match=message):
        base.load_adapter("a", tmp_path)


def test_layers_of_experts_have_adapters_on_attention_only(tiny, tmp_path):
    layers = (
        replace(tiny.config.layers[0], feedforward=FeedForwardSpec(16, num_experts=3, num_experts_per_tok=2)),
        tiny.config.layers[1],
    )
    module = Decoder(replace(tiny.config, layers=layers)).initialize(seed=0)
    model = LanguageModel("experts", module, tiny.tokenizer, None)
    weights = low_rank(model, 0, ("q_proj",))
    adapter = model.load_adapter("a", write(tmp_path, weights))
    got = model.module(IDS, adapters=[(adapter, slice(None))])
    torch.testing.assert_close(got, merged(model, weights, 2.0).module(IDS), atol=1e-4, rtol=0)


def test_damaged_adapters_are_told_apart(base, tmp_path):
    weights = low_rank(base, 0, ("q_proj",))
    with pytest.raises(InvalidArgument, match="a name"):
        base.load_adapter("", tmp_path)
    with pytest.raises(ModelNotFound, match=r"no adapter_config\.json"):
        base.load_adapter("a", tmp_path)
    write(tmp_path, weights, r="three")
    with pytest.raises(CorruptedFile, match="r = 'three'"):
        base.load_adapter("a", tmp_path)
    write(tmp_path, weights, r=4)
    with pytest.raises(CorruptedFile, match="says rank 4"):
        base.load_adapter("a", tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(write(tmp_path, weights).joinpath("adapter_model.safetensors").read_bytes()[:-100])
    with pytest.raises(CorruptedFile, match="damaged or truncated"):
        base.load_adapter("a", tmp_path)
    name = "base_model.model.model.layers.0.self_attn.q_proj."
    for tensors, error, message in [
        ({f"{name}lora_A.weight": torch.ones(3, 32)}, CorruptedFile, "has no lora_B"),
        ({f"{name}lora_magnitude_vector": torch.ones(3)}, UnsupportedModel, "lora_magnitude_vector"),
        ({}, CorruptedFile, "holds no tensors"),
    ]:
        save_file(tensors, path)
        with pytest.raises(error, match=message):
            base.load_adapter("a", tmp_path)
    path.unlink()
    with pytest.raises(ModelNotFound, match=r"no adapter_model\.safetensors"):
        base.load_adapter("a", tmp_path)
    assert base.adapters == {}


def test_a_pickle_is_never_opened(base, tmp_path):
    write(tmp_path, low_rank(base, 0)).joinpath("adapter_model.safetensors").unlink()

    # protocol 0: call pytest.fail
    (tmp_path / "adapter_model.bin").write_bytes(b"cpytest\nfail\n(S'the pickle was opened'\ntR.")
    with pytest.raises(UnsafeCheckpoint, match="is a pickle"):
        base.load_adapter("a", tmp_path)


def test_what_cannot_be_saved_is_refused(base, tmp_path):
    weights = low_rank(base, 0, ("q_proj",))
    with pytest.raises(InvalidArgument, match="no weights"):
        save_adapter(tmp_path, {}, model=base, alpha=1)
    with pytest.raises(InvalidArgument, match="one rank"):
        save_adapter(tmp_path, weights | low_rank(base, 0, ("v_proj",), rank=4), model=base, alpha=1)
    with pytest.raises(AdapterMismatch):
        save_adapter(tmp_path, {"layers.9.mlp.up_proj": weights["layers.0.self_attn.q_proj"]}, model=base, alpha=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_the_example_teaches_the_real_model(model, tmp_path):
    env = os.environ | {"PIPPIN_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).resolve().parents[2] / "examples" / "adapter.py"
    # a slow machine writes lines of progress to stderr, which is to be empty
    code = (
        "import runpy; from pippin.core import progress; progress.SECONDS_BETWEEN_LINES = float('inf'); "
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", code, tmp_path / "pirate"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    question = model.template.encode([{"role": "user", "content": "What is the capital of Italy?"}])
    request = Request(question, SamplingOptions(max_tokens=30))
    try:
        model.load_adapter("pirate", tmp_path / "pirate")
        with Engine(model, max_num_seqs=2) as engine:
            plain, pirate = (
                model.tokenizer.decode(ids) for ids in texts(engine, [request, replace(request, adapter="pirate")])
            )
    finally:
        model.adapters.pop("pirate", None)
    assert pirate.startswith("Arr, ")
    assert pirate.endswith(" matey!")
    assert "Arr" not in plain


def test_an_adapter_of_the_real_model_changes_its_answer_and_nothing_else(model, tmp_path):
    config = model.config
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"layers.{i}.self_attn.{name}": (
            torch.randn(8, config.hidden_size, generator=generator) / config.hidden_size**0.5,
            torch.randn(heads * config.head_dim, 8, generator=generator) / 4,
        )
        for i in range(len(config.layers))
        for name, heads in (("q_proj", config.num_attention_heads), ("v_proj", config.num_key_value_heads))
    }
    save_adapter(tmp_path, weights, model=model, alpha=8)
    before = list(model.adapters)
    request = Request(model.tokenizer.encode("The capital of France is"), SamplingOptions(max_tokens=6))
    plain = texts(Engine(model), [request])[0]
    try:
        model.load_adapter("noise", tmp_path)
        with Engine(model, max_num_seqs=2) as engine:
            ours, theirs = texts(engine, [request, replace(request, adapter="noise")])
    finally:
        model.unload_adapter("noise")
    assert ours == plain != theirs
    assert list(model.adapters) == before


def test_an_adapter_that_is_unloaded_is_not_kept_in_memory_by_what_it_computed(base, tmp_path):
    gone = weakref.ref(base.load_adapter("a", write(tmp_path, low_rank(base, 0))))
    with Engine(base) as engine:
        engine.prefill([65] * 40, adapter="a")
        base.unload_adapter("a")
        end = time.perf_counter() + 10
        while gone() is not None and time.perf_counter() < end:
            gc.collect()
        assert gone() is None
        assert engine.stats().blocks_cached == 3
        assert list(engine._scheduler.tree.sequences()) == []
