"""Models of a server from the disk, with what the settings say of their engine, and the memory that they will take."""

import importlib
from dataclasses import replace

import pytest

from pippin.claims.worlds.sequences.byte_text import byte_config, byte_model
from pippin.core import native
from pippin.core.errors import NotEnoughMemory
from pippin.engine.kv_eviction import StreamingLLM, cache_settings
from pippin.engine.model_runner import BLOCK_SIZE
from pippin.engine.options import CacheOptions
from pippin.language import Decoder, memory_placement
from pippin.language.availability import memory_needed as needed_by
from pippin.serve import model_loading
from pippin.serve.model_pool import token_bytes
from pippin.serve.service import Service
from pippin.serve.settings import ServerSettings
from pippin.session.options import GenerationOptions
from pippin.session.providers.provider import ProviderRequest
from pippin.session.transcript import Answer, Prompt, Transcript


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """The small model on disk."""
    path = tmp_path_factory.mktemp("models") / "small"
    tiny.save(path)
    return path


def test_the_settings_reach_model_and_engine(folder):
    settings = ServerSettings(
        models=(str(folder),), device="cpu", dtype="float32", kv_cache_dtype="int8", max_num_seqs=3, speculate="ngram"
    )
    with model_loading.alone(settings) as local:
        assert (local.engine.kv_cache_dtype, local.speculation.draft) == ("int8", "ngram")
        assert local.engine.stats().max_num_seqs == 3
        turn = ProviderRequest(Transcript(entries=(Prompt("Hello"),)), options=GenerationOptions(max_tokens=2))
        assert list(local.stream(turn))
    assert local.engine.stats().cache_tokens_used == 0, "closed"


def test_conversations_of_a_server_are_kept_within_its_budget(folder):
    """Requests bring the whole conversation, of which only the last turn is computed."""
    settings = ServerSettings(models=(str(folder),), device="cpu", cache="streaming-llm", cache_budget=120)
    options, entries = GenerationOptions(max_tokens=5), ()
    with model_loading.alone(settings) as local:
        assert local.cache == StreamingLLM(budget=120)
        for turn in range(8):
            entries += (Prompt(f"What do you see in the long room number {turn} at the end of the hall?"),)
            *deltas, done = local.stream(ProviderRequest(Transcript(entries=entries), options=options))
            entries += (Answer("".join(delta.text for delta in deltas)),)
        assert done.usage.input_tokens > 120 + 256
        assert done.usage.input_tokens - done.usage.cached_tokens < 120


def test_conversations_are_as_many_as_half_of_the_cache_holds(tiny):
    settings = ServerSettings(models=("tiny",), cache="epicache", cache_budget=512, max_conversations=9)
    cache = cache_settings(CacheOptions(cache="epicache", cache_budget=512))
    one = cache.most_tokens * token_bytes(tiny)
    assert cache.most_tokens == 5 * (512 + 256 + 512)
    for most_bytes, wanted in ((0, 1), (one, 1), (4 * one, 4), (100 * one, 9)):
        assert model_loading.most_conversations(settings, tiny, cache, most_bytes) == wanted


def test_the_models_of_a_server_keep_as_many_caches_as_it_says_and_what_guesses_for_them_all(tmp_path):
    routed = byte_model(
        Decoder(replace(byte_config(layers=4, width=32), training_methods={"kv_routing": {"p_cross": 0.5}})).initialize(
            seed=0
        )
    )
    routed.save(tmp_path / "routed")
    settings = ServerSettings(
        models=(str(tmp_path / "routed"),), device="cpu", kv_sharing_ratio=0.25, speculate=str(tmp_path / "routed")
    )
    with model_loading.alone(settings) as local:
        assert local.model.config.cached_layers == (0,)
        assert local.speculation.draft.config.cached_layers == (0, 1, 2, 3)
    whole = replace(settings, kv_sharing_ratio=None, speculate=None)
    more, less = (
        model_loading.memory_needed(each)(str(tmp_path / "routed"), 2**40)
        for each in (whole, replace(whole, kv_sharing_ratio=0.25))
    )
    followers = 3 * 2 * routed.config.num_key_value_heads * routed.config.head_dim
    cache, weights = settings.max_num_seqs * routed.context_size * followers, followers * routed.config.hidden_size
    assert less < more - 2 * (cache + weights)


def test_a_small_share_of_memory_is_a_small_cache_but_never_less_than_a_block_for_each_slot(tiny):
    settings = ServerSettings(models=("tiny",), max_num_seqs=3)
    for share, tokens in ((0, 3 * BLOCK_SIZE), (256 * 100, 96), (2**40, 3 * tiny.context_size)):
        local = model_loading.language_loader(settings, lambda _: tiny, lambda share=share: share)("tiny")
        assert local.engine.stats().cache_tokens_capacity == tokens
        local.engine.close()


def test_prompts_are_kept_in_a_folder_when_a_server_for_one_ends(folder, tmp_path):
    settings = ServerSettings(models=(str(folder),), device="cpu", dtype="float32", prompt_cache=tmp_path / "kept")
    turn = ProviderRequest(
        Transcript(entries=(Prompt("Hello, and hello again."),)), options=GenerationOptions(max_tokens=2)
    )
    cached = []
    for _ in range(2):
        with model_loading.alone(settings) as local:
            *_, done = local.stream(replace(turn))
            cached.append(done.usage.cached_tokens)
    assert cached[0] == 0 < cached[1]
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["small.prompts"]


def test_memory_is_counted_with_what_guesses_ahead_and_the_bits(folder):
    ref = str(folder)
    weights = needed_by(ref, "float32", device="cpu", context=0)
    whole = needed_by(ref, "float32", device="cpu")
    plain = model_loading.memory_needed(ServerSettings(models=(ref,), device="cpu", dtype="float32", max_num_seqs=2))
    assert plain(ref, 0) == weights
    assert plain(ref, 2**60) == weights + 2 * (whole - weights)
    twice = model_loading.memory_needed(ServerSettings(models=(ref,), device="cpu", dtype="float32", speculate=ref))
    assert twice(ref, 0) == 2 * weights


async def test_a_budget_smaller_than_the_weights_is_told_before_anything_is_loaded(folder, monkeypatch):
    module = importlib.import_module("pippin.language.language_model")  # the name itself is the function
    monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("loaded"))
    service = Service(ServerSettings(models=(str(folder),), device="cpu", memory=10_000))
    with pytest.raises(NotEnoughMemory, match="all models together may take"):
        await service.pool.acquire("small")
    service.close()


@pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
async def test_a_mixture_that_does_not_fit_keeps_its_experts_in_its_file(save_mixture, tmp_path, monkeypatch):
    mixture = str(save_mixture(tmp_path / "mixture", experts=32))
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path / "home"))
    for name in ("_LIBRARIES", "_VOCABULARY"):  # which are much more than this model
        monkeypatch.setattr(memory_placement, name, 0)
    monkeypatch.setattr(memory_placement, "workspace_bytes", lambda config, tokens: 0)
    whole = needed_by(mixture, device="cpu", context=0)
    request = ProviderRequest(Transcript(entries=(Prompt("Hello"),)), options=GenerationOptions(max_tokens=8))
    answers = []
    for memory in (10 * whole, whole - 1):
        service = Service(ServerSettings(models=(mixture,), device="cpu", memory=memory, max_num_seqs=1))
        loaded = await service.pool.acquire("mixture")
        answers.append("".join(getattr(event, "text", "") for event in loaded.model.stream(request)))
        assert (loaded.model.model.placement is not None) == (memory < whole)
        assert loaded.nbytes <= memory
        service.pool.release(loaded)
        service.close()
    assert answers[0] == answers[1]
    service = Service(ServerSettings(models=(mixture,), device="cpu", memory=whole // 8, max_num_seqs=1))
    with pytest.raises(NotEnoughMemory, match="all models together may take"):
        await service.pool.acquire("mixture")
    service.close()


def test_a_predictor_of_neurons_comes_with_a_budget_of_memory(folder, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("pippin.language.language_model.load", lambda path, **options: given.append(options))
    settings = ServerSettings(models=(str(folder),), memory=10**9, neuron_predictor=tmp_path / "predictor")
    for memory in (None, 10**8):
        model_loading.read_model(settings, str(folder), memory=memory)
    assert [options["neuron_predictor"] for options in given] == [None, tmp_path / "predictor"]
