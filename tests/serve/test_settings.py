"""Every setting is checked where it is set, and the message names it."""

import pytest

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.serve.settings import Settings, is_local, model_name, read_keys

KEYS = {"alice": "0123456789abcdef"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slots": 0}, "slots must be a whole number from 1 to 256, got 0"),
        ({"slots": True}, "slots must be a whole number"),
        ({"queue": -1}, "queue must be a whole number from 0"),
        ({"port": 65536}, "port must be a whole number from 0 to 65,535, got 65536"),
        ({"requests_per_minute": 0}, "requests_per_minute must"),
        ({"tokens_per_minute": 1.5}, "tokens_per_minute must"),
        ({"tokens_per_day": -5}, "tokens_per_day must"),
        ({"memory_budget": 0}, "memory_budget must"),
        ({"max_body_bytes": 10}, "max_body_bytes must"),
        ({"max_connections": None}, "max_connections must"),
        ({"request_timeout": 0}, "request_timeout must be a number of seconds above 0, got 0"),
        ({"write_timeout": float("inf")}, "write_timeout must"),
        ({"body_timeout": float("nan")}, "body_timeout must"),
        ({"guardrails": "loose"}, "guardrails must be one of off, default, strict, permissive, got 'loose'"),
        ({"models": ()}, "models is empty"),
        ({"models": "smollm2-135m"}, "models must be a list"),
        ({"models": ("a", "a")}, "models names one twice"),
        ({"adapters": {"other:x": "x"}}, "adapters: 'other:x' is of a model that is not served"),
        ({"api_keys": {"": "0123456789abcdef"}}, "api_keys must have a name and a secret"),
        ({"api_keys": {"a": "with space 123456"}}, "printable ASCII"),
        ({"api_keys": {"a": "0123456789abcdef", "b": "0123456789abcdef"}}, "two names have the same secret"),
        ({"host": "0.0.0.0"}, "can be reached by others and there are no api_keys"),
        ({"host": "example.org"}, "can be reached by others"),
        ({"cors_origins": ("example.org",)}, "cors_origins must be like https://"),
        ({"log_prompts": True, "stateless": True}, "log_prompts keeps texts"),
        ({"bits": 5}, "bits must be one of 2, 3, 4, 8, got 5"),
        ({"bits": True}, "bits must be one of"),
        ({"cache_type": "float16"}, "cache_type must be one of auto, float32, bfloat16, int8, got 'float16'"),
        ({"retention": 0.0}, "retention must be a number above 0 and at most 1, got 0.0"),
        ({"retention": 1.5}, "got 1.5"),
        ({"retention": True}, "retention must be a number"),
        ({"threads": 0}, "threads must be a whole number from 1"),
        ({"threads": 4096}, "threads is 4096, and this process may use"),
        ({"speculate": ""}, "speculate must be"),
        ({"prompt_cache": "kept", "stateless": True}, "prompt_cache keeps prompts and stateless promises not to"),
    ],
)
def test_a_value_outside_its_range_is_named(given, message):
    with pytest.raises(InvalidArgument) as caught:
        Settings(**given)
    assert message in str(caught.value)


def test_a_public_address_needs_keys_or_a_word():
    assert Settings(host="0.0.0.0", api_keys=KEYS).host == "0.0.0.0"
    assert Settings(host="0.0.0.0", open_to_all=True).host == "0.0.0.0"
    assert Settings(host="::1").host == "::1"


def test_secrets_are_not_in_the_repr():
    assert KEYS["alice"] not in repr(Settings(api_keys=KEYS))


def test_names_of_models(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    settings = Settings(models=("smollm2-135m", f"mine={folder}", str(folder), "owner/name:file.gguf"))
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
