"""Sessions whose conversation is kept in a bounded cache: nothing is computed twice, nothing said is rendered anew."""

import pytest

from pippin.core.errors import (
    CorruptedFile,
    InvalidArgument,
    InvalidInput,
    PromptCacheMismatch,
    UnsupportedCapability,
)
from pippin.engine import Engine
from pippin.engine.kv_eviction import EpiCache, KeyDiff, SnapKV, StreamingLLM
from pippin.session import (
    Answer,
    GenerationOptions,
    Hooks,
    Instructions,
    LocalModel,
    Prompt,
    Regex,
    Replace,
    Schema,
    Session,
    Transcript,
)
from pippin.session.history import rolling_window
from pippin.session.providers.provider import Done, Provider, ProviderRequest

WORD = Regex("[a-z]{8} [a-z]{8}")
WORD_SCHEMA = Schema.of(WORD)
OPTIONS = GenerationOptions(max_tokens=60, temperature=0.0, include_schema_in_prompt=False)
SMALL = StreamingLLM(budget=120, block_size=48)
TOPICS = {
    "garden": "tomatoes soil watering seeds compost roses",
    "music": "guitar concert melody drummer chords album",
}


@pytest.fixture
def computed(engine, monkeypatch):
    """The numbers of tokens that were computed, pass by pass."""
    seen, forward = [], engine._runner.forward

    def watched(works):
        seen.extend(len(work.token_ids) for work in works)
        return forward(works)

    monkeypatch.setattr(engine._runner, "forward", watched)
    return seen


def ask(session, prompt):
    return session.respond(prompt, generating=WORD, options=OPTIONS)


def conversation_of(session):
    return session._provider_memory(session.provider)["conversation"]


@pytest.mark.parametrize("cache", [StreamingLLM(budget=1500), SnapKV(budget=1500), EpiCache(budget=1500)])
def test_with_enough_room_the_answers_are_the_same(provider, cache):
    plain, kept = Session(provider, instructions="Be brief."), Session(provider, instructions="Be brief.", cache=cache)
    for prompt in ("What is there?", "And there?", "Why?"):
        one, other = ask(plain, prompt), ask(kept, prompt)
        assert one.content == other.content
        assert one.usage.input_tokens == other.usage.input_tokens
    assert kept.transcript == plain.transcript


@pytest.mark.parametrize("cache", [SMALL, KeyDiff(budget=120, block_size=48)])
def test_each_token_of_a_long_conversation_is_computed_once(provider, computed, cache):
    session = Session(provider, instructions="Be brief.", cache=cache)
    for turn in range(12):
        response = ask(session, f"What is in room {turn}?")
        assert (response.usage.cached_tokens > 0) == (turn > 0)
    assert response.usage.input_tokens > 400
    assert sum(computed) == response.usage.input_tokens + response.usage.output_tokens - 1


def test_the_rounds_of_a_tool_loop_compute_only_what_is_new(provider, computed, look):
    session = Session(provider, tools=[look], max_tool_rounds=2, cache=StreamingLLM(budget=800, block_size=48))
    options = GenerationOptions(tool_calling="required", parallel_tool_calls=False, max_tokens=90)
    response = session.respond("What is there?", options=options)
    assert [type(entry).__name__ for entry in response.transcript_entries[:3]] == ["Prompt", "ToolCalls", "ToolOutput"]
    before = sum(computed)
    again = session.respond("And up?", options=options)
    assert again.usage.cached_tokens >= before - 1
    assert len(computed) > 2


def test_the_instructions_are_never_given_up(provider):
    session = Session(provider, instructions="Remember: " + "apples and pears. " * 4, cache=SMALL)
    for turn in range(8):
        ask(session, f"What is in room {turn}?")
    caches = conversation_of(session).caches
    cache, length = caches.caches[0], caches.settings.sink_tokens
    assert length > 72
    assert cache.positions(0, 0)[:length].tolist() == list(range(length))
    with pytest.raises(InvalidArgument, match="that always stay"):
        ask(Session(provider, instructions="Remember: " + "apples and pears. " * 9, cache=SMALL), "What?")


def test_what_was_cancelled_is_forgotten_and_the_rest_is_not(provider, computed):
    session = Session(provider, cache=StreamingLLM(budget=400, block_size=48))
    first = ask(session, "What is there?")
    stream = session.stream("Tell me everything.", options=GenerationOptions(max_tokens=200))
    next(iter(stream))
    stream.close()
    assert len(session.transcript) == 2
    second = ask(session, "And there?")
    assert second.usage.cached_tokens >= first.usage.input_tokens + first.usage.output_tokens - 1
    plain = Session(provider)
    ask(plain, "What is there?")
    assert ask(plain, "And there?").content == second.content


def test_a_session_that_begins_anew_forgets_all(provider):
    session = Session(provider, cache=SMALL)
    first = ask(session, "What is there?")
    session.reset()
    again = ask(session, "What is there?")
    assert again.content == first.content
    assert again.usage.input_tokens == first.usage.input_tokens


def test_an_answer_that_a_hook_replaced_is_read_as_it_stands(provider, tiny):
    hooks = Hooks(on_response=lambda response: Replace("nothing here"))
    session = Session(provider, cache=StreamingLLM(budget=600), hooks=hooks)
    session.respond("What is there?", options=GenerationOptions(max_tokens=12))
    session.respond("And there?", options=GenerationOptions(max_tokens=12))
    assert "nothing here" in tiny.tokenizer.decode(conversation_of(session)._last.token_ids)


def converse(session, turns=10):
    for turn in range(turns):
        words = list(TOPICS.values())[turn % 2]
        response = ask(session, f"Let us talk about {words}, part {turn}.")
    return response


EPISODES = EpiCache(budget=260, block_size=64, episodes=2, medoids=1, probe_tokens=96, segment_utterances=2)


def test_questions_go_to_the_episode_of_their_topic(provider):
    session = Session(provider, cache=EPISODES)
    converse(session)
    caches = conversation_of(session).caches
    assert len(caches.episodes.centroids) == 2
    garden, music = (caches.match(f"Tell me about {words}")[0] for words in TOPICS.values())
    assert garden != music
    assert caches.match("Who plays the guitar?")[0] == music
    assert "guitar" in caches.probes[music]
    assert "tomatoes" in caches.probes[garden]
    for cache in caches.caches.values():
        assert cache.num_tokens > 400
        assert max(map(sum, cache.lengths)) <= (260 + 64) * len(cache.lengths[0])
    ask(session, "Which melody and chords did the guitar play at the concert?")
    assert caches.caches[music].num_tokens > caches.caches[garden].num_tokens
    ask(session, "How do tomatoes and roses like the soil and compost?")
    assert caches.caches[garden].num_tokens > caches.caches[music].num_tokens


def test_a_question_like_no_other_begins_an_episode(provider):
    session = Session(provider, cache=EpiCache(**(vars(EPISODES) | {"new_episode_below": 0.05})))
    converse(session)
    caches = conversation_of(session).caches
    ask(session, "zebras hyenas gazelles")
    assert len(caches.episodes.centroids) == 3
    assert caches.match("gazelles and zebras")[0] == 2
    assert caches.probes[2] == "zebras hyenas gazelles"


@pytest.mark.parametrize("cache", [SMALL, EPISODES])
def test_a_restart_loses_nothing(provider, tiny, tmp_path, cache):
    session = Session(provider, instructions="Be brief.", cache=cache)
    converse(session)
    size = session.save_cache(tmp_path / "talk.cache")
    assert size == (tmp_path / "talk.cache").stat().st_size
    assert (tmp_path / "talk.cache").stat().st_mode & 0o777 == 0o600
    text = session.transcript.to_json()
    wanted = ask(session, "Let us talk about guitar and melody.")
    with Engine(tiny) as other:
        later = Session(LocalModel(tiny, engine=other), cache=cache, transcript=Transcript.from_json(text))
        later.load_cache(tmp_path / "talk.cache")
        found = ask(later, "Let us talk about guitar and melody.")
        assert found.content == wanted.content
        assert found.usage.cached_tokens == wanted.usage.cached_tokens > 0
        assert found.usage.input_tokens == wanted.usage.input_tokens


def test_a_cache_of_something_else_is_refused(provider, tiny, tmp_path):
    path = tmp_path / "talk.cache"
    session = Session(provider, cache=SMALL)
    with pytest.raises(InvalidArgument, match="nothing was said yet"):
        session.save_cache(path)
    converse(session, 4)
    session.save_cache(path)
    with pytest.raises(PromptCacheMismatch, match="another conversation"):
        Session(provider, cache=SMALL).load_cache(path)
    with pytest.raises(PromptCacheMismatch, match="kept with budget 120, here it is 130"):
        Session(provider, cache=StreamingLLM(budget=130, block_size=48), transcript=session.transcript).load_cache(path)
    with pytest.raises(PromptCacheMismatch, match="kept with kind StreamingLLM, here it is KeyDiff"):
        Session(provider, cache=KeyDiff(budget=120, block_size=48), transcript=session.transcript).load_cache(path)
    with Engine(tiny, kv_cache_dtype="int8") as other:
        own = Session(LocalModel(tiny, engine=other), cache=SMALL, transcript=session.transcript)
        with pytest.raises(PromptCacheMismatch, match="kv_cache_dtype"):
            own.load_cache(path)
    later = Session(provider, cache=SMALL, transcript=session.transcript)
    data = path.read_bytes()
    for damaged in (
        b"",
        data[:100],
        data[:-5],
        data[:-3] + b"abc",
        b"\xff" * 50,
        data.replace(b"StreamingLLM", b"StreaminGLLM"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(CorruptedFile):
            later.load_cache(path)
    with pytest.raises(InvalidInput, match="No such file"):
        later.load_cache(tmp_path / "none")
    with pytest.raises(InvalidInput, match="no folder"):
        session.save_cache(tmp_path / "no" / "folder")
    assert ask(later, "And now?").usage.cached_tokens == 0


@pytest.mark.parametrize("broken", ["centroids", "probes", "clustered_segments"])
def test_saved_episodes_that_do_not_fit_are_refused(provider, tmp_path, monkeypatch, broken):
    session = Session(provider, cache=EPISODES)
    converse(session)
    caches = conversation_of(session).caches
    tensors, values = caches._saved()
    tensors = {name: each for name, each in tensors.items() if name != broken}
    values = {name: each for name, each in values.items() if name != broken}
    monkeypatch.setattr(type(caches), "_saved", lambda _: (tensors, values))
    session.save_cache(tmp_path / "talk.cache")
    later = Session(provider, cache=EPISODES, transcript=session.transcript)
    with pytest.raises(CorruptedFile, match="contradicts itself; begin the conversation anew"):
        later.load_cache(tmp_path / "talk.cache")


def test_what_cannot_be_is_said_before_anything_is_computed(provider):
    class Elsewhere(Provider):
        name = "elsewhere"

        def stream(self, request):
            yield Done("stop")

    with pytest.raises(UnsupportedCapability, match="elsewhere has no bounded cache"):
        Session(Elsewhere(), cache=SMALL).respond("Hello")
    with pytest.raises(UnsupportedCapability, match="keeps no bounded cache"):
        Session(Elsewhere(), cache=SMALL).save_cache("somewhere")
    with pytest.raises(InvalidArgument, match="leave one of the two out"):
        Session(provider, cache=SMALL, history=rolling_window(4))
    with pytest.raises(InvalidArgument, match="begin it with cache="):
        Session(provider).save_cache("somewhere")


def test_a_conversation_goes_on_beyond_the_context(tiny):
    with Engine(tiny) as engine:
        session = Session(LocalModel(tiny, engine=engine), cache=SMALL)
        tokens, most = 0, 1.5 * tiny.context_size
        while tokens < most:
            usage = session.respond("What is in the room? " * 20, options=GenerationOptions(max_tokens=2)).usage
            assert usage.input_tokens > tokens
            tokens = usage.input_tokens
        cache = conversation_of(session).caches.caches[0]
        assert cache.num_slots < tiny.context_size < cache.num_tokens


# --- requests that do not say which conversation they are part of -----------------------------------------------------


@pytest.fixture
def serving(tiny, engine):
    return LocalModel(tiny, engine=engine, cache=SMALL, max_conversations=2)


def tell(provider, *entries, owner="one"):
    """The answer to the last of some entries, and the tokens that were known."""
    request = ProviderRequest(Transcript(entries=entries), schema=WORD_SCHEMA, options=OPTIONS, owner=owner)
    *deltas, done = provider.stream(request)
    return Answer("".join(delta.text for delta in deltas)), done.usage


def grown(provider, entries, turns, owner="one"):
    for _ in range(turns):
        entries += (Prompt(f"What is in room {len(entries)}?"),)
        answer, usage = tell(provider, *entries, owner=owner)
        entries += (answer,)
    return entries, usage


def test_a_request_goes_on_from_the_one_that_it_continues(serving, computed):
    _, usage = grown(serving, (), 8)
    assert usage.cached_tokens > 200
    assert sum(computed) == usage.input_tokens + usage.output_tokens - 1
    assert max(serving._conversations._known[0][1].caches.caches[0].lengths[0]) <= 120 + 48


def test_conversations_do_not_mix(serving):
    """Neither two of one owner, nor those of two owners who say the same."""
    one, _ = grown(serving, (Instructions("Be brief."),), 3)
    grown(serving, (Instructions("Be long."),), 3)
    _, usage = tell(serving, *one, Prompt("And now?"), owner="two")
    assert usage.cached_tokens == 0  # and of three conversations two are kept: the first is gone
    answer, usage = tell(serving, *one, Prompt("And now?"))
    assert usage.cached_tokens == 0
    assert tell(serving, *one, Prompt("And now?"), answer, Prompt("Why?"))[1].cached_tokens > 0
    assert len(serving._conversations._known) == 2


def test_an_answer_that_nobody_read_leaves_no_conversation(serving):
    stream = serving.stream(ProviderRequest(Transcript(entries=(Prompt("Hello"),)), options=OPTIONS))
    assert not serving._conversations._known
    next(iter(stream))
    stream.close()
    assert len(serving._conversations._known) == 1
