"""Every setting is checked where it is set, and the message names it."""

import os
from dataclasses import fields
from typing import get_type_hints

import pytest

from pippin.core.errors import ExposedKeys, InvalidArgument, InvalidInput
from pippin.core.options import Option
from pippin.core.store.catalog import DEFAULT_MODEL
from pippin.engine.options import ModelOptions
from pippin.serve.settings import ServerSettings, is_local, model_name, read_key_file, read_keys

KEYS = {"alice": "0123456789abcdef"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be from 1 to 256, got 0"),
        ({"write_timeout": float("inf")}, "write_timeout must be above 0 and finite, got inf"),
        ({"guardrails": "loose"}, "guardrails must be 'off', 'default', 'strict' or 'permissive', got 'loose'"),
        ({"models": "smollm2-135m"}, "models must be a list"),
        ({"models": ("a", "")}, "models must be a list of names that are not empty"),
        ({"models": ("a", "a")}, "models names one twice"),
        ({"adapters": {"other:x": "x"}}, "adapters: 'other:x' is of a model that is not served"),
        ({"api_keys": {"": "0123456789abcdef"}}, "api_keys must have a name and a secret"),
        ({"api_keys": {"a": "with space 123456"}}, "printable ASCII"),
        ({"api_keys": {"a": "0123456789abcdef", "b": "0123456789abcdef"}}, "two names have the same secret"),
        ({"host": "0.0.0.0"}, "can be reached by others, who would need no key; set api_keys"),
        ({"host": "example.org"}, "can be reached by others"),
        ({"cors_origins": ("example.org",)}, "cors_origins must be like https://"),
        ({"threads": 4096}, "threads is 4096, and this process may use"),
        ({"speculate": ""}, "speculate must be"),
        ({"log_prompts": True, "stateless": True}, "log_prompts keeps prompts and stateless promises not to"),
        ({"cache_budget": 512}, "cache_budget is that of a bounded cache; name one with cache"),
        ({"cache": "all"}, "cache must be 'streaming-llm', 'h2o', 'snapkv', 'keydiff' or 'epicache'"),
        ({"cache": "snapkv", "stateless": True}, "cache keeps conversations, which does not go with stateless"),
        ({"cache": "snapkv", "speculate": "ngram"}, "cache keeps conversations, which does not go with speculate"),
        ({"cache": "snapkv", "prompt_router": "router"}, "which does not go with prompt_router"),
        ({"prompt_cache": "kept", "stateless": True}, "prompt_cache keeps prompts and stateless promises not to"),
    ],
)
def test_a_value_outside_its_range_is_named(given, message):
    with pytest.raises(InvalidArgument) as caught:
        ServerSettings(**given)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", [ServerSettings, ModelOptions])
def test_every_setting_has_a_help_text_and_a_group(kind):
    hints = get_type_hints(kind, include_extras=True)
    for setting in fields(kind):
        (option,) = (each for each in hints[setting.name].__metadata__ if isinstance(each, Option))
        assert option.help.endswith("."), setting.name
        assert option.group or option.positional, setting.name


def test_without_models_the_default_one_is_served():
    assert ServerSettings().references == {DEFAULT_MODEL: DEFAULT_MODEL}
    assert ServerSettings(any_installed=True).references == {}
    assert ServerSettings(any_installed=True, models=("a",)).references == {"a": "a"}


def test_what_servers_and_commands_share_is_checked_in_both():
    for kind in (ServerSettings, ModelOptions):
        with pytest.raises(InvalidArgument, match="bits must be"):
            kind(bits=5)
        with pytest.raises(InvalidArgument, match="kv_sharing_ratio must be"):
            kind(kv_sharing_ratio=1.5)


def test_a_public_address_needs_keys_or_a_word():
    assert ServerSettings(host="0.0.0.0", api_keys=KEYS).host == "0.0.0.0"
    assert ServerSettings(host="0.0.0.0", open_to_all=True).host == "0.0.0.0"
    assert ServerSettings(host="::1").host == "::1"


def test_secrets_are_not_in_the_repr():
    assert KEYS["alice"] not in repr(ServerSettings(api_keys=KEYS))


def test_names_of_models(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    settings = ServerSettings(models=("smollm2-135m", f"mine={folder}", str(folder), "owner/name:file.gguf"))
    assert list(settings.references) == ["smollm2-135m", "mine", "my-model", "owner/name:file.gguf"]
    assert settings.default == "smollm2-135m"
    assert model_name("./x/small.gguf") == "small"


@pytest.mark.parametrize(("host", "local"), [("127.0.0.5", True), ("[::1]", True), ("10.0.0.1", False), ("::", False)])
def test_local_addresses(host, local):
    assert is_local(host) is local


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no API key"),
        ("# only a comment\n", "holds no API key"),
        ("short", "shorter than 16 characters"),
        ("a:0123456789abcdef\na:fedcba9876543210", "names the key 'a' twice"),
    ],
)
def test_keys_that_cannot_be_used(text, message):
    with pytest.raises(InvalidInput) as caught:
        read_keys(text, "keys.txt")
    assert message in str(caught.value)
    assert "0123456789abcdef" not in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="files have no such modes here")
def test_a_key_file_that_others_may_read_is_mentioned(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice:0123456789abcdef")
    path.chmod(0o600)
    assert read_key_file(path) == {"alice": "0123456789abcdef"}
    for mode in (0o640, 0o604, 0o644):
        path.chmod(mode)
        with pytest.warns(ExposedKeys, match=rf"mode {mode:o}\); chmod 600 .*keys") as said:
            assert read_key_file(path) == {"alice": "0123456789abcdef"}
        assert "0123456789abcdef" not in str(said[0].message)
