"""Families with recurrent layers: answers in company, states, quantized weights, older layouts, and what is refused."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import pippin
from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.core.store.reference import resolve
from pippin.engine import Engine, Request, SamplingOptions
from pippin.language import LanguageModel, families
from pippin.language.adapter_files import target_modules
from pippin.language.checkpoint_headers import read_headers

from .checkpoints import CHECKPOINTS, GRANITE_EXPERTS, NEMOTRON_EXPERTS, SMALL, read, save_random

HYBRIDS = [
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
]
IDS = torch.randint(0, 97, (4, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder, the reference and the decoder of a family; each is made once."""
    made = {}

    def get(model_type):
        if model_type not in made:
            folder = tmp_path_factory.mktemp(model_type)
            made[model_type] = folder, save_random(model_type, folder), read(folder)
        return made[model_type]

    return get


@torch.no_grad()
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_answers_in_company_are_the_likeliest_by_transformers(checkpoints, tiny, model_type):
    """Four prompts of different lengths, in chunks of 16 tokens, three at a time."""
    _, reference, decoder = checkpoints(model_type)
    model = LanguageModel("small", decoder, tiny.tokenizer, None)
    prompts = [row[:length].tolist() for row, length in zip(IDS, (3, 40, 17, 1), strict=True)]
    options = SamplingOptions(max_tokens=8, temperature=0.0, logit_bias={256: -100.0, 257: -100.0, 258: -100.0})
    with (
        Engine(model, max_num_seqs=3, max_num_batched_tokens=16, cache_tokens=512) as engine,
        ThreadPoolExecutor(4) as pool,
    ):

        def ask(ids):
            return [token.id for token in list(engine.stream(Request(ids, options)))[:-1]]

        answers = list(pool.map(ask, prompts))
        before = engine.stats().cached_tokens
        assert ask(prompts[1]) == answers[1]  # from the states after its first 32 tokens
        assert engine.stats().cached_tokens == before + 32
    for ids, answer in zip(prompts, answers, strict=True):
        assert len(answer) == 8
        logits = reference(torch.tensor([ids + answer[:-1]])).logits[0, len(ids) - 1 :, :256]
        chosen = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        assert float((logits.amax(-1) - chosen).max()) < 1e-4


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_a_prompt_cache_on_disk_has_the_states(checkpoints, tiny, tmp_path, model_type):
    """The kernels go on where another engine stopped, with the same bits."""
    folder, _, _ = checkpoints(model_type)
    tiny.tokenizer.save(folder)
    model, path = pippin.load(folder, device="cpu", dtype="float32"), tmp_path / "prompts"
    request = Request(IDS[0].tolist(), SamplingOptions(max_tokens=6, logit_bias={256: -100.0, 258: -100.0}))
    tokens = 1024 * len(model.config.cache_groups)
    with Engine(model, max_num_seqs=2, cache_tokens=tokens, prompt_cache=path) as engine:
        *first, _ = engine.stream(request)
    with Engine(model, max_num_seqs=2, cache_tokens=tokens, prompt_cache=path) as engine:
        *again, _ = engine.stream(request)
        assert engine.stats().cached_tokens >= 32
    assert again == first


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_adapters_reach_every_matrix_of_a_recurrent_layer(checkpoints, model_type):
    _, _, decoder = checkpoints(model_type)
    found = dict(target_modules(decoder))
    recurrent = decoder.config.recurrent_layers[0]
    names = {name for name in found if name.startswith(f"layers.{recurrent}.recurrent.")}
    stored = {name for name, value in decoder.state_dict().items() if name.startswith(f"layers.{recurrent}.recurrent.")}
    matrices = {name.removesuffix(".weight") for name in stored if name.endswith("_proj.weight")}
    assert names >= matrices
    assert f"layers.{recurrent}.recurrent.out_proj" in names


def test_layers_of_one_part_have_no_others(checkpoints):
    _, _, decoder = checkpoints("nemotron_h")
    names = [{name.split(".")[2] for name in decoder.state_dict() if name.startswith(f"layers.{i}.")} for i in range(6)]
    mlp, mamba, attention = {"mlp", "post_attention_layernorm"}, {"recurrent"}, {"self_attn"}
    norm = {"input_layernorm"}
    assert names == [mlp, mamba | norm, mamba | norm, attention | norm, mlp, attention | norm]
    assert (decoder.config.recurrent_layers, decoder.config.cached_layers) == ((1, 2), (3, 5))
    _, _, decoder = checkpoints("falcon_h1")
    assert decoder.config.recurrent_layers == decoder.config.cached_layers == (0, 1, 2, 3)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("model_type", "experts"), [("nemotron_h", NEMOTRON_EXPERTS), ("granitemoehybrid", GRANITE_EXPERTS)]
)
def test_families_that_may_have_experts_equal_transformers(tiny, tmp_path, model_type, experts):
    """Experts one by one or in one tensor, and what is saved is read by transformers."""
    reference = save_random(model_type, tmp_path / "theirs", **experts)
    decoder = read(tmp_path / "theirs")
    expected = reference(IDS).logits
    torch.testing.assert_close(decoder(IDS), expected, rtol=1e-5, atol=2e-5)
    LanguageModel("small", decoder, tiny.tokenizer, None).save(tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="float32", pad_token_id=0)
    torch.testing.assert_close(theirs(IDS).logits, expected, rtol=1e-5, atol=2e-5)
    assert read(tmp_path / "ours").config == decoder.config
    family = families.FAMILIES[model_type]
    memory = {families.without_prefix(name, family): value for name, value in reference.state_dict().items()}
    sources, left = families.locate(family, decoder.config, decoder.state_dict(), memory)
    assert left <= {"lm_head.weight"}
    for name, value in decoder.state_dict().items():
        torch.testing.assert_close(sources[name].take(memory[sources[name].stored], decoder.config), value)


@torch.inference_mode()
@pytest.mark.parametrize("model_type", ["olmo_hybrid", "nemotron_h", "mamba2", "kimi_linear", "lfm2_moe"])
def test_names_in_memory_and_in_files_are_both_read(checkpoints, model_type):
    """transformers renames some tensors when it reads a file; both names occur in what people have."""
    _, reference, decoder = checkpoints(model_type)
    family = families.FAMILIES[model_type]
    memory = {families.without_prefix(name, family): value for name, value in reference.state_dict().items()}
    sources, left = families.locate(family, decoder.config, decoder.state_dict(), memory)
    assert left <= {"lm_head.weight"}
    for name, value in decoder.state_dict().items():
        torch.testing.assert_close(sources[name].take(memory[sources[name].stored], decoder.config), value)


def test_a_multimodal_folder_opens_as_its_text_part(checkpoints, tmp_path):
    """Qwen 3.5 as it is published: the decoder beside an image encoder and layers that predict several tokens."""
    folder, _, decoder = checkpoints("qwen3_5_text")
    config = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    whole = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": config["tie_word_embeddings"]}
    assert families.from_hf(whole) == decoder.config
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    beside = {"model.visual.blocks.0.norm1.weight": torch.zeros(4), "mtp.fc.weight": torch.zeros(4, 4)}
    save_file(tensors | beside, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(whole))
    headers = read_headers(resolve(tmp_path))
    name = "layers.0.recurrent.q_proj.weight"
    assert torch.equal(headers.tensor(name, torch.float32), decoder.state_dict()[name])


@pytest.mark.parametrize(
    ("family", "change", "error", "message"),
    [
        ("lfm2", {"layer_types": ["conv"]}, CorruptedFile, "layer_types names 1 layers of 4"),
        (
            "lfm2",
            {"layer_types": ["conv", "rwkv"] * 2},
            UnsupportedModel,
            "layers of the kind 'rwkv' are not supported",
        ),
        ("lfm2", {"conv_L_cache": 1 << 40}, CorruptedFile, "elements of a recurrent state must be an integer from 1"),
        ("qwen3_next", {"linear_num_value_heads": 3}, CorruptedFile, "3 heads of values are no multiple of 2 of keys"),
        ("mamba2", {"head_dim": 8}, CorruptedFile, "8 heads of 8 channels are not 2 times the hidden size"),
        ("mamba2", {"hidden_act": "relu"}, UnsupportedModel, "hidden_act='relu' is not supported for the mamba2"),
        ("mamba2", {"time_step_limit": [2.0, 1.0]}, CorruptedFile, "time steps of at least 2.0 cannot be at most 1.0"),
        ("granitemoehybrid", {"mamba_d_head": 8}, CorruptedFile, "8 heads of 8 channels are not 128 channels"),
        ("falcon_h1", {"projectors_bias": False}, UnsupportedModel, "projectors_bias and mamba_proj_bias differ"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, CorruptedFile, "ssm_multipliers must be 5 finite numbers other than"),
        (
            "falcon_h1",
            {"key_multiplier": 0.0},
            CorruptedFile,
            "key_multiplier must be 1 finite numbers other than zero",
        ),
        ("nemotron_h", {"layers_block_type": ["kda"]}, UnsupportedModel, "layers of the kind 'kda' are not supported"),
        ("nemotron_h", NEMOTRON_EXPERTS | {"moe_latent_size": 16}, UnsupportedModel, "moe_latent_size=16 is not"),
        (
            "nemotron_h",
            NEMOTRON_EXPERTS | {"mlp_bias": True},
            UnsupportedModel,
            "experts with biases are not supported",
        ),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, UnsupportedModel, "are scored by sigmoids only"),
        ("recurrent_gemma", {"lru_width": 30}, CorruptedFile, "4 heads do not divide 30 channels"),
    ],
)
def test_configurations_that_contradict_themselves_are_refused(checkpoints, family, change, error, message):
    folder, _, _ = checkpoints(family)
    with pytest.raises(error, match=message):
        families.from_hf(json.loads((folder / "config.json").read_text()) | change)


def test_older_files_say_the_layers_in_other_words(checkpoints):
    def of(family, drop, **fields):
        config = json.loads((checkpoints(family)[0] / "config.json").read_text())
        return families.from_hf({key: value for key, value in config.items() if key not in drop} | fields)

    layers = checkpoints("nemotron_h")[2].config.layers
    assert of("nemotron_h", ["layers_block_type"], hybrid_override_pattern="-MM*-*").layers == layers
    layers = checkpoints("lfm2")[2].config.layers
    assert of("lfm2", ["layer_types"], full_attn_idxs=[1]).layers == layers
    kinds = ["mamba", "attention", "mamba", "mamba"]
    assert of("granitemoehybrid", [], layer_types=kinds).layers == checkpoints("granitemoehybrid")[2].config.layers
    old = {
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4],
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    }
    kimi = of("kimi_linear", ["layer_types", "linear_num_heads", "mlp_layer_types"], linear_attn_config=old)
    assert kimi.layers == checkpoints("kimi_linear")[2].config.layers
    every = of("qwen3_next", ["layer_types"], full_attention_interval=2)
    assert every.recurrent_layers == (0, 2)
    assert SMALL["num_hidden_layers"] == len(CHECKPOINTS["lfm2"]["layer_types"])
