"""The local model as a provider: nothing is computed twice, in a session or between sessions; guesses, and stops."""

import copy
from dataclasses import replace

import pytest
from tokenizers import Tokenizer as Backend, decoders, models

import pippin
from pippin.core.errors import ContextOverflow, InvalidArgument, VocabularyMismatch
from pippin.data.text.tokenizer import Tokenizer
from pippin.engine import Engine, shared_engine
from pippin.engine.speculation import CoarseAcceptance, Speculation, TokenGroups
from pippin.language import LanguageModel
from pippin.session import GenerationOptions, LocalModel, Prompt, Regex, Session, Transcript
from pippin.session.providers.local import speculation
from pippin.session.providers.provider import Done, ProviderRequest, TextDelta

WORD = Regex("[a-z]{8} [a-z]{8}")
OPTIONS = GenerationOptions(max_tokens=60, include_schema_in_prompt=False)


@pytest.fixture
def places(engine, monkeypatch):
    """The positions that the model computed, of one conversation, in the order in which it did."""
    seen, forward = [], engine._runner.forward

    def watched(works):
        for work in works:
            seen.extend(range(work.num_computed_tokens, work.num_computed_tokens + len(work.token_ids)))
        return forward(works)

    monkeypatch.setattr(engine._runner, "forward", watched)
    return seen


# --- nothing twice ----------------------------------------------------------------------------------------------------


def test_the_turns_of_a_conversation_compute_only_what_is_new(provider, places):
    session = Session(provider, instructions="Be brief, but not too brief, and say what you have seen.")
    first = session.respond("What is there?", generating=WORD, options=OPTIONS)
    assert first.usage.cached_tokens == 0
    second = session.respond("And there?", generating=WORD, options=OPTIONS)
    # of the answer the last token was written, and not read yet
    assert second.usage.cached_tokens == first.usage.input_tokens + first.usage.output_tokens - 1
    third = session.respond("And then?", generating=WORD, options=OPTIONS)
    assert third.usage.cached_tokens == second.usage.input_tokens + second.usage.output_tokens - 1
    assert places == list(range(third.usage.input_tokens + third.usage.output_tokens - 1)), "each once, in order"


def test_the_rounds_of_a_tool_loop_compute_only_what_is_new(provider, places, look):
    session = Session(provider, tools=[look], max_tool_rounds=2)
    options = GenerationOptions(tool_calling="required", parallel_tool_calls=False, max_tokens=90)
    response = session.respond("What is there?", options=options)
    entries = response.transcript_entries
    assert [type(entry).__name__ for entry in entries[:3]] == ["Prompt", "ToolCalls", "ToolOutput"]
    longest = provider.token_count(ProviderRequest(Transcript(entries=entries[:3]), tuple(session.tools.values())))
    assert len(places) >= longest
    assert places == list(range(len(places))), "each once, in order"


def test_what_was_prewarmed_is_not_computed_again(provider, places):
    session = Session(provider, instructions="Remember: " + "apples and pears. " * 9)
    ready = session.prewarm("Tell me")
    assert places == list(range(ready))
    response = session.respond("Tell me more.", options=OPTIONS)
    assert response.usage.cached_tokens == ready
    assert places == list(range(response.usage.input_tokens + response.usage.output_tokens - 1))


def test_sessions_over_one_model_share_what_they_begin_with(tiny):
    model = LanguageModel("own", copy.deepcopy(tiny.module), tiny.tokenizer, tiny.template)
    one, other = (Session(model, instructions="Remember: " + "apples and pears. " * 9) for _ in range(2))
    assert one.provider is not other.provider
    assert one.provider.engine is other.provider.engine is shared_engine(model)
    assert one.respond("Hello", options=OPTIONS).usage.cached_tokens == 0
    second = other.respond("What?", options=OPTIONS)
    assert second.usage.cached_tokens == second.usage.input_tokens - len("What?<\n<assistant\n")
    shared_engine(model).close()


def test_owners_share_nothing(provider):
    def cached(owner):
        turn = ProviderRequest(Transcript(entries=(Prompt("apples and pears. " * 9),)), options=OPTIONS, owner=owner)
        *_, done = provider.stream(turn)
        assert isinstance(done, Done)
        return done.usage.cached_tokens

    assert [cached(owner) for owner in ("a", "b", "")] == [0, 0, 0]
    assert all(cached(owner) > 150 for owner in ("a", "b", ""))


def test_a_conversation_goes_on_from_a_file_as_if_it_had_not_ended(tiny, tmp_path):
    path = tmp_path / "cache"
    with Engine(tiny, prompt_cache=path) as engine:
        session = Session(LocalModel(tiny, engine=engine), instructions="Remember: " + "apples and pears. " * 9)
        session.respond("What is there?", generating=WORD, options=OPTIONS)
        saved = session.transcript
        expected = session.respond("And there?", generating=WORD, options=OPTIONS)
        session.transcript = saved
    again = LanguageModel("again", copy.deepcopy(tiny.module), tiny.tokenizer, tiny.template)
    with Engine(again, prompt_cache=path) as engine:
        session = Session(LocalModel(again, engine=engine), transcript=saved)
        response = session.respond("And there?", generating=WORD, options=OPTIONS)
        assert response.usage.cached_tokens >= expected.usage.cached_tokens
        assert (response.content, response.tokens) == (expected.content, expected.tokens)


def test_a_turn_says_for_whom_with_what_and_how_soon(provider, engine, monkeypatch):
    asked, stream = [], engine.stream
    monkeypatch.setattr(engine, "stream", lambda request: (asked.append(request), stream(request))[1])
    how = Speculation("ngram")
    turn = ProviderRequest(Transcript(entries=(Prompt("Hello"),)), options=OPTIONS, owner="alice", priority=-3)
    assert list(LocalModel(provider.model, engine=engine, speculation=how).stream(turn))
    assert (asked[0].owner, asked[0].priority, asked[0].speculation) == ("alice", -3, how)
    assert asked[0].cancel is turn.cancel


def test_a_turn_longer_than_the_cache_is_refused_before_anything_is_computed(tiny):
    with Engine(tiny, max_num_seqs=1, cache_tokens=64) as small:
        local = LocalModel(tiny, engine=small)
        assert local.context_size == 64
        with pytest.raises(ContextOverflow, match=r"the engine's cache .cache_tokens. holds 64") as caught:
            local.stream(
                ProviderRequest(Transcript(entries=(Prompt("a" * 50),)), options=GenerationOptions(max_tokens=20))
            )
        assert (caught.value.context_size, small.stats().requests) == (64, 0)


# --- cancelling -------------------------------------------------------------------------------------------------------


def test_what_was_written_ahead_is_not_shown_once_the_turn_is_cancelled(provider, engine):
    turn = ProviderRequest(Transcript(entries=(Prompt("Hello"),)), schema=pippin.Schema(WORD), options=OPTIONS)
    events = provider.stream(turn)
    assert isinstance(next(events), TextDelta)
    while engine.stats().active:  # it writes on, whether anybody reads or not
        pass
    turn.cancel.set()
    (last,) = events
    assert (last.finish_reason, last.usage.output_tokens) == ("cancelled", 1)


# --- guessing ahead ---------------------------------------------------------------------------------------------------


def test_guesses_change_nothing_but_the_number_of_passes(tiny, engine):
    def ask(how):
        session = Session(LocalModel(tiny, engine=engine, speculation=how))
        return session.respond("abc abc abc abc", options=GenerationOptions(max_tokens=48, seed=1, temperature=0.7))

    plain, passes = ask(None), engine.stats().steps
    guessed = ask(Speculation("ngram"))
    assert [token.id for token in guessed.tokens] == [token.id for token in plain.tokens]
    assert guessed.usage.drafted_tokens >= guessed.usage.accepted_tokens
    twin = LanguageModel("twin", tiny.module, tiny.tokenizer, tiny.template)
    sure = Session(LocalModel(tiny, engine=engine, speculation=Speculation(twin)))
    steps = engine.stats().steps
    answer = sure.respond("abc abc abc abc", options=GenerationOptions(max_tokens=48))
    assert answer.usage.accepted_tokens > 24, "a model that guesses what it would say itself is mostly right"
    assert engine.stats().steps - steps < passes
    assert (plain.exact, answer.exact) == ("token", "token")
    assert (engine.stats().drafted, engine.stats().accepted) == (
        guessed.usage.drafted_tokens + answer.usage.drafted_tokens,
        guessed.usage.accepted_tokens + answer.usage.accepted_tokens,
    )


def test_an_answer_says_that_only_groups_are_exact(tiny, engine):
    groups = TokenGroups.from_embeddings(tiny.module.lm_head.dense_weight(), 0.5)
    how = Speculation("ngram", acceptance=CoarseAcceptance(groups))
    answer = Session(LocalModel(tiny, engine=engine, speculation=how)).respond("abc abc", options=OPTIONS)
    assert answer.exact == "group"


def test_guesses_that_cannot_be_are_refused_at_once(tiny):
    backend = Backend(models.BPE({"b": 0, "a": 1}, []))
    backend.decoder = decoders.ByteLevel()
    other = replace(tiny, tokenizer=Tokenizer(backend, eos_ids=[0]))
    with pytest.raises(VocabularyMismatch):
        LocalModel(tiny, speculation=Speculation(other))
    with pytest.raises(InvalidArgument):
        LocalModel(tiny, speculation=Speculation("self"))


def test_ways_of_guessing_have_names(tiny):
    assert speculation("ngram").draft == "ngram"
    assert speculation("self").draft == "self"
    assert speculation("a-model", load=lambda name: tiny).draft is tiny
