"""A masked diffusion model behind a session: what is shown only grows, and what it cannot do is refused at once."""

import itertools
import threading

import pytest
import torch

from pippin.core.errors import Cancelled, ContextOverflow, InvalidArgument, UnsupportedCapability
from pippin.language import UnmaskingOptions, to_diffusion
from pippin.session import Choice, GenerationOptions, Prompt, Session, Transcript, tool
from pippin.session.providers.masked_diffusion import DiffusionModel
from pippin.session.providers.provider import Done, ProviderRequest, TextDelta


@pytest.fixture(scope="module")
def lm(tiny):
    return to_diffusion(tiny)


def options(**given):
    return GenerationOptions(**{"max_tokens": 24, "temperature": 1.0, "seed": 3} | given)


def ask(provider, given, text="Hello"):
    return list(provider.stream(ProviderRequest(Transcript(entries=(Prompt(text),)), options=given)))


def test_an_answer_is_what_the_model_fills_in_and_is_shown_from_the_left(lm):
    provider = DiffusionModel(lm, steps=12, order="random")
    ids = lm.model.template.encode([{"role": "user", "content": "Hello"}])
    unmasking = UnmaskingOptions(12, "random", 1.0)
    new = lm.generate(ids, max_new_tokens=24, options=unmasking, seed=3)[0].tolist()
    end = new.index(256) if 256 in new else len(new)
    *parts, done = ask(provider, options())
    assert [token.id for part in parts for token in part.tokens] == new[:end]
    assert "".join(part.text for part in parts) == lm.tokenizer.decode(new[:end])
    assert len([part for part in parts if part.tokens]) < 12, "several tokens at a time"
    assert isinstance(done, Done)
    assert (done.finish_reason, done.usage.input_tokens, done.usage.output_tokens) == (
        "length" if end == 24 else "stop",
        len(ids),
        end,
    )
    session = Session(provider)
    snapshots = [snapshot.content for snapshot in session.stream("Hello", options=options())]
    assert all(after.startswith(before) for before, after in itertools.pairwise(snapshots))
    assert snapshots[-1] == lm.tokenizer.decode(new[:end])
    assert provider.token_count("abc") == 3


def test_end_tokens_and_stop_strings_end_the_answer(lm, monkeypatch):
    encode = lm.tokenizer.encode

    def says(ids):
        text = torch.tensor(ids)

        def forward(states):
            place = torch.arange(states.shape[0]) % len(text)
            return 50 * torch.nn.functional.one_hot(text[place], 260).float()

        monkeypatch.setattr(lm.module.lm_head, "forward", forward)

    says([*encode("one two"), 256, *encode(" more")])
    given = options(max_tokens=13, temperature=0.0)
    *parts, done = ask(DiffusionModel(lm, steps=1), given)
    assert ("".join(part.text for part in parts), done.finish_reason, done.usage.output_tokens) == (
        "one two",
        "stop",
        7,
    )
    *parts, done = ask(DiffusionModel(lm, steps=1), options(max_tokens=13, temperature=0.0, stop=["e tw"]))
    assert ("".join(part.text for part in parts), done.finish_reason) == ("on", "stop")
    says(encode("café caf"))
    *parts, done = ask(DiffusionModel(lm, steps=4, block_size=3), options(max_tokens=9, temperature=0.0))
    assert done.finish_reason == "length"
    assert "\ufffd" not in "".join(part.text for part in parts[:1]), "half a character waits"


def test_cancelling_ends_the_turn_before_the_next_step(lm):
    cancel = threading.Event()
    turn = ProviderRequest(Transcript(entries=(Prompt("Hello"),)), options=options(max_tokens=64), cancel=cancel)
    events = DiffusionModel(lm, steps=64, block_size=4).stream(turn)
    first = next(events)
    assert isinstance(first, TextDelta)
    cancel.set()
    assert next(events).finish_reason == "cancelled"
    with pytest.raises(StopIteration):
        next(events)
    session = Session(DiffusionModel(lm, steps=64, block_size=4))
    stream = session.stream("Hello", options=options(max_tokens=64))
    next(stream)
    stream.cancel()
    with pytest.raises(Cancelled):
        list(stream)


@tool
def look(where: str) -> str:
    """Look somewhere."""
    return where


def test_what_it_cannot_do_is_refused_before_anything_is_computed(lm, monkeypatch):
    monkeypatch.setattr(lm.module, "hidden", lambda *_, **__: pytest.fail("computed"))
    provider = DiffusionModel(lm)
    refused = [
        (lambda: Session(provider).respond("Hi", generating=int), "guided generation"),
        (lambda: Session(provider).respond("Hi", generating=Choice(["a", "b"])), "grammars"),
        (lambda: Session(provider, tools=[look]).respond("Hi"), "tool calling"),
        (lambda: ask(provider, options(logprobs=0)), "logprobs"),
        (lambda: ask(provider, options(reasoning="light")), "reasoning"),
        (lambda: ask(provider, options(top_k=4, repetition_penalty=1.2)), "no top_k, repetition_penalty"),
        (lambda: Session(provider, adapter="mine").respond("Hi"), "no adapter"),
    ]
    for call, message in refused:
        with pytest.raises(UnsupportedCapability, match=message):
            call()
    with pytest.raises(ContextOverflow, match="leaves no room for an answer") as caught:
        ask(provider, options(), text="x" * 2100)
    assert caught.value.context_size == 2048
    with pytest.raises(InvalidArgument, match="max_tokens must be at least 1"):
        DiffusionModel(lm, max_tokens=0)
    with pytest.raises(InvalidArgument, match="steps must be at least 1"):
        DiffusionModel(lm, steps=0)
