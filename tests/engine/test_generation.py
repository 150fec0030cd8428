"""Generation in one call: the engine's own tokens, batches in order, prompts of every kind."""

import dataclasses

import pytest

from pippin.core.errors import InvalidArgument, ModelNotFound, UnsupportedCapability
from pippin.engine import Engine, Request, SamplingOptions
from pippin.engine.generation import generate


def test_the_tokens_are_those_that_the_engine_gives(tiny):
    ids = tiny.tokenizer.encode("Hello")
    with Engine(tiny) as engine:
        *tokens, finished = engine.stream(Request(ids, SamplingOptions(temperature=1.0, seed=3, max_tokens=12)))
    found = generate(tiny, "Hello", temperature=1.0, seed=3, max_tokens=12)
    assert found.token_ids == tuple(token.id for token in tokens)
    assert found.text == "".join(event.text for event in (*tokens, finished))
    assert (found.finish_reason, found.prompt_tokens, found.logprobs) == (finished.finish_reason, len(ids), None)
    assert generate(tiny, "Hello", temperature=1.0, seed=4, max_tokens=12).token_ids != found.token_ids


def test_a_model_generates_by_itself(tiny):
    assert tiny.generate("Hello", max_tokens=3) == generate(tiny, "Hello", max_tokens=3)
    assert tiny.generate(["Hello", "you"], max_tokens=3) == generate(tiny, ["Hello", "you"], max_tokens=3)


def test_a_list_is_answered_in_order_and_may_be_longer_than_the_queue(tiny):
    prompts = [f"prompt {number}" for number in range(100)]  # the queue of a shared engine holds 72
    together = generate(tiny, prompts, max_tokens=2)
    assert len(together) == 100
    assert together[::33] == [generate(tiny, each, max_tokens=2) for each in prompts[::33]]


def test_messages_go_through_the_template_and_ids_as_they_are(model):
    messages = [{"role": "user", "content": "Say yes."}]
    ids = model.template.encode(messages)
    from_messages, from_ids = generate(model, [messages, ids], max_tokens=4, logprobs=0)
    assert from_messages == from_ids
    assert from_messages.prompt_tokens == len(ids)
    assert len(from_messages.logprobs) == len(from_messages.token_ids)
    assert max(from_messages.logprobs) <= 0.0


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, InvalidArgument, "give at least one prompt"),
        ("", {}, InvalidArgument, "empty"),
        ("a", {"tempature": 1.0}, InvalidArgument, "tempature.*the options are temperature"),
        ("a", {"adapter": "none"}, ModelNotFound, "no adapter 'none'"),
        ([[{"role": "user", "content": "a"}]], {}, UnsupportedCapability, "no chat template"),
    ],
)
def test_what_cannot_be_generated_is_named(tiny, prompt, options, error, message):
    bare = dataclasses.replace(tiny, template=None)
    with pytest.raises(error, match=message):
        generate(bare, prompt, **options)
