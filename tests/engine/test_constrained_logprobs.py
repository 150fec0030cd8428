"""Log-probabilities among the tokens that a grammar allows."""

import pytest
import torch

from pippin.engine import Engine, Request, SamplingOptions
from pippin.engine.grammar import Grammar

WORDS = ["abc", "abd", "xyz"]


def ask(model, grammar, mode, prompt=(72, 105)):
    options = SamplingOptions(temperature=0.0, max_tokens=8, logprobs=2, logprobs_mode=mode)
    with Engine(model) as engine:
        return list(engine.stream(Request(list(prompt), options, grammar)))


def test_they_are_those_of_the_model_among_the_allowed_tokens(tiny):
    *tokens, finished = ask(tiny, Grammar.choice(WORDS), "constrained")
    assert "".join(token.text for token in tokens) + finished.text in WORDS
    words, written = [tiny.tokenizer.encode(word) for word in WORDS], list[int]()
    for token in tokens:
        among = sorted({word[len(written)] for word in words if word[: len(written)] == written})
        logits = tiny.module(torch.tensor([[72, 105, *written]]))[0, -1].detach()
        expected = logits[among].log_softmax(-1)[among.index(token.id)]
        assert token.logprob == pytest.approx(float(expected), abs=1e-4)
        if len(among) == 1:
            assert token.logprob == 0.0
        written.append(token.id)


def test_forced_tokens_are_reported_without_being_computed(tiny, monkeypatch):
    grammar = Grammar.choice(["always the same answer"])
    *tokens, _ = ask(tiny, grammar, "constrained")
    assert len(tokens) == 8
    assert all(token.logprob == 0.0 for token in tokens)
    *raw, _ = ask(tiny, grammar, "raw")
    assert all(token.logprob < 0 for token in raw)


def test_without_a_grammar_they_are_the_models_own(tiny):
    *tokens, _ = ask(tiny, None, "constrained")
    *raw, _ = ask(tiny, None, "raw")
    assert [token.logprob for token in tokens] == [token.logprob for token in raw]
