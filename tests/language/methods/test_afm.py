"""AFM's decoder: published sizes, the exact skip, files that no other reader fills in by chance."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import pippin
from pippin.claims.worlds.sequences.byte_text import byte_config, byte_model
from pippin.core.errors import CorruptedFile, InvalidArgument, UnsupportedModel
from pippin.engine import Engine, Request, SamplingOptions, Token
from pippin.engine.model_runner import BLOCK_SIZE, ModelInput
from pippin.engine.runners.native_runner import NativeRunner
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.engine.speculation import Speculation
from pippin.language import Decoder, families
from pippin.language.methods.afm import AFMConfig
from pippin.nn.linear import Linear

SMALL = AFMConfig(
    vocab_size=257,
    hidden_size=32,
    num_hidden_layers=8,
    num_kv_shared_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_position_embeddings=512,
)


def random(config, seed=0) -> Decoder:
    """Weights large enough that every layer shows in the logits."""
    module = Decoder(config.decoder() if isinstance(config, AFMConfig) else config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + noise / 4 if name.endswith("norm.weight") else noise / parameter.shape[-1] ** 0.5
    return module.eval().requires_grad_(False)


def count(config) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config.decoder()).parameters())


def test_the_published_models_have_the_published_sizes():
    assert count(AFMConfig.on_device_3b()) == AFMConfig.on_device_3b().num_parameters == 3_111_368_064
    assert count(AFMConfig.draft()) == AFMConfig.draft().num_parameters == 48_765_952
    assert AFMConfig.on_device_3b().cache_size_per_token == 17_920
    assert [AFMConfig.on_device_3b().num_own_kv_layers, AFMConfig.draft().num_own_kv_layers] == [35, 12]


@pytest.mark.parametrize("config", [AFMConfig.on_device_3b(), SMALL, replace(SMALL, qk_norm=False)])
def test_formulas_equal_a_count_over_the_modules(config):
    assert config.num_parameters == count(config)
    with torch.device("meta"):
        layers = [part for part in Decoder(config.decoder()).layers.modules() if isinstance(part, Linear)]
    assert config.num_adapter_parameters(4) == sum(4 * (part.inputs + part.outputs) for part in layers)
    assert AFMConfig.on_device_3b().num_adapter_parameters() == 66_633_728


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers must be at most 7.* got 8"),
        ({"num_kv_shared_layers": -1}, "got -1"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 7}, "head_dim must be even to be rotated, got 7"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
    ],
)
def test_impossible_sizes_name_the_value(change, message):
    with pytest.raises(InvalidArgument, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize("native", [False, True])
def test_logits_after_a_skipped_prefill_are_those_of_a_decoder_that_skips_nothing(native):
    module = random(SMALL)
    ids = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = copy.deepcopy(module).double()(torch.tensor([ids]))[0]
    model = byte_model(copy.deepcopy(module).pack() if native else module)
    if native and not NativeRunner.supports(model):
        pytest.skip("no native kernels here")
    runner = (NativeRunner if native else TorchRunner)(model, 8, "float32")
    table = list(range(-(-len(ids) // BLOCK_SIZE)))
    (last,) = runner.forward([ModelInput(ids, 0, table, [69])])
    torch.testing.assert_close(last[0].double(), expected[-1], atol=1e-5, rtol=1e-5)
    (some,) = runner.forward([ModelInput(ids[60:], 60, table, [3, 9])])  # logits of some tokens, after a cache
    torch.testing.assert_close(some.double(), expected[[63, 69]], atol=1e-5, rtol=1e-5)
    assert runner.block_bytes == BLOCK_SIZE * 5 * 2 * 2 * 8 * 4


def test_prompts_are_scored_and_answered_as_without_a_cache():
    module, prompt = random(SMALL), list(b"def total(values):")
    wanted = list(prompt)
    for _ in range(24):
        wanted.append(int(module(torch.tensor([wanted]))[0, -1, :256].argmax()))
    ids = torch.tensor([wanted])
    logprobs = module(ids)[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    options = SamplingOptions(max_tokens=24, logit_bias={256: -100.0})
    draft = byte_model(random(replace(SMALL, num_hidden_layers=2, num_kv_shared_layers=0), seed=5))
    with Engine(byte_model(copy.deepcopy(module)), max_num_seqs=1, cache_tokens=128) as engine:
        for speculation in (
            None,
            Speculation(draft, num_speculative_tokens=3),
            Speculation("self", num_speculative_tokens=3),
        ):
            events = list(engine.stream(Request(prompt, options, speculation=speculation)))
            assert [event.id for event in events if isinstance(event, Token)] == wanted[len(prompt) :]
        (score,) = engine.score(prompt, [wanted[len(prompt) :]])
    assert score == pytest.approx(float(logprobs[len(prompt) - 1 :].sum()), abs=1e-3)


@pytest.mark.parametrize("shared", [0, 3])
def test_a_saved_model_comes_back(shared, tmp_path):
    module = random(byte_config(layers=5, width=32, shared=shared))
    byte_model(module).save(tmp_path)
    again = pippin.load(tmp_path, device="cpu", dtype="float32", pack=False)
    assert again.config == module.config
    ids = torch.arange(40)[None]
    assert torch.equal(again.module(ids), module(ids))
    kind = json.loads((tmp_path / "config.json").read_text())["model_type"]
    assert kind == ("pippin_kv_shared" if shared else "qwen3")


def test_transformers_computes_the_same_where_no_cache_is_shared(tmp_path):
    from transformers import AutoModelForCausalLM

    module = random(byte_config(layers=2, width=32))
    byte_model(module).save(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(0, 257, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(module(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.fixture
def shared_folder(tmp_path):
    byte_model(random(byte_config(layers=5, width=32, shared=2))).save(tmp_path)
    return tmp_path


def test_keys_for_a_layer_that_has_none_are_an_error(shared_folder):
    path = shared_folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.4.self_attn.k_proj.weight"] = tensors["model.layers.2.self_attn.k_proj.weight"].clone()
    tensors["model.layers.4.self_attn.v_proj.weight"] = tensors["model.layers.2.self_attn.v_proj.weight"].clone()
    tensors["model.norm.weight"] = torch.ones(3)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(CorruptedFile) as error:
        pippin.load(shared_folder, device="cpu")
    for part in (
        "in 4 tensors: ",
        "'layers.0.mlp.up_proj.weight' is missing",
        "'layers.4.self_attn.k_proj.weight' is not expected, as layer 4 reads the keys and values of layer 2",
        "'layers.4.self_attn.v_proj.weight' is not expected, as layer 4 reads",
        "'norm.weight' has shape (3,) instead of (32,)",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_sources": [None, None, 3, None, None]}, CorruptedFile, "layer 2 reads layer 3"),
        ({"kv_sources": [None]}, CorruptedFile, "contradicts itself"),
        ({"kv_sources": 7}, CorruptedFile, "contradicts itself"),
        ({"base_model_type": "pippin_kv_shared"}, UnsupportedModel, "pippin_kv_shared"),
        ({"base_model_type": "mamba9"}, UnsupportedModel, "mamba9"),
    ],
)
def test_damaged_descriptions_of_sharing_are_refused(shared_folder, changes, error, message):
    path = shared_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(error, match=message):
        families.from_hf(json.loads(path.read_text()))
