"""Models of a server from the disk, with what the settings say of their engine, and the memory that they will take."""

import importlib
from dataclasses import replace

import pytest

from pippin.claims._byte_text import byte_config, byte_model
from pippin.core.errors import NotEnoughMemory
from pippin.engine.runner import BLOCK
from pippin.language import Decoder
from pippin.language.availability import memory_needed as needed_by
from pippin.serve import loading
from pippin.serve.service import Service
from pippin.serve.settings import Settings
from pippin.session.options import GenerationOptions
from pippin.session.provider import Turn
from pippin.session.transcript import Prompt, Transcript


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """The small model on disk."""
    path = tmp_path_factory.mktemp("models") / "small"
    tiny.save(path)
    return path


def test_the_settings_reach_model_and_engine(folder):
    settings = Settings(
        models=(str(folder),), device="cpu", dtype="float32", cache_type="int8", slots=3, speculate="ngram"
    )
    with loading.alone(settings) as local:
        assert (local.engine.cache_type, local.speculation.draft) == ("int8", "ngram")
        assert local.engine.stats().slots == 3
        turn = Turn(Transcript(entries=(Prompt("Hello"),)), options=GenerationOptions(max_tokens=2))
        assert list(local.stream(turn))
    assert local.engine.stats().cache_tokens_used == 0, "closed"


def test_the_models_of_a_server_keep_as_many_caches_as_it_says_and_what_guesses_for_them_all(tmp_path):
    routed = byte_model(Decoder(replace(byte_config(layers=4, width=32), kv_routing=0.5)).initialise(seed=0))
    routed.save(tmp_path / "routed")
    settings = Settings(
        models=(str(tmp_path / "routed"),), device="cpu", retention=0.25, speculate=str(tmp_path / "routed")
    )
    with loading.alone(settings) as local:
        assert local.model.config.cached_layers == (0,)
        assert local.speculation.draft.config.cached_layers == (0, 1, 2, 3)
    whole = replace(settings, retention=None, speculate=None)
    more, less = (
        loading.memory_needed(each)(str(tmp_path / "routed"), 2**40) for each in (whole, replace(whole, retention=0.25))
    )
    followers = 3 * 2 * routed.config.kv_heads * routed.config.head_dim
    cache, weights = settings.slots * routed.context_size * followers, followers * routed.config.width
    assert less < more - 2 * (cache + weights)


def test_a_small_share_of_memory_is_a_small_cache_but_never_less_than_a_block_for_each_slot(tiny):
    settings = Settings(models=("tiny",), slots=3)
    for share, tokens in ((0, 3 * BLOCK), (256 * 100, 96), (2**40, 3 * tiny.context_size)):
        local = loading.language_loader(settings, lambda _: tiny, lambda share=share: share)("tiny")
        assert local.engine.stats().cache_tokens_capacity == tokens
        local.engine.close()


def test_prompts_are_kept_in_a_folder_when_a_server_for_one_ends(folder, tmp_path):
    settings = Settings(models=(str(folder),), device="cpu", dtype="float32", prompt_cache=tmp_path / "kept")
    turn = Turn(Transcript(entries=(Prompt("Hello, and hello again."),)), options=GenerationOptions(max_tokens=2))
    cached = []
    for _ in range(2):
        with loading.alone(settings) as local:
            *_, done = local.stream(replace(turn))
            cached.append(done.usage.cached_tokens)
    assert cached[0] == 0 < cached[1]
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["small.prompts"]


def test_memory_is_counted_with_what_guesses_ahead_and_the_bits(folder):
    ref = str(folder)
    weights = needed_by(ref, "float32", device="cpu", context=0)
    whole = needed_by(ref, "float32", device="cpu")
    plain = loading.memory_needed(Settings(models=(ref,), device="cpu", dtype="float32", slots=2))
    assert plain(ref, 0) == weights
    assert plain(ref, 2**60) == weights + 2 * (whole - weights)
    twice = loading.memory_needed(Settings(models=(ref,), device="cpu", dtype="float32", speculate=ref))
    assert twice(ref, 0) == 2 * weights


async def test_a_budget_smaller_than_the_weights_is_told_before_anything_is_loaded(folder, monkeypatch):
    module = importlib.import_module("pippin.language.load")  # the name itself is the function
    monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("loaded"))
    service = Service(Settings(models=(str(folder),), device="cpu", memory_budget=10_000))
    with pytest.raises(NotEnoughMemory, match="raise the memory budget"):
        await service.pool.acquire("small")
    service.close()
