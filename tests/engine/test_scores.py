"""Log-probabilities of continuations, against transformers' logits."""

from dataclasses import replace

import pytest
import torch

from pippin.core.errors import (
    ContextOverflow,
    GenerationError,
    InvalidArgument,
)
from pippin.engine import Engine, Request, SamplingOptions
from pippin.language import Decoder, LanguageModel

from .asking import ENDLESS, ask, bare_greedy, collect, prompt


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("chunk", [4, 16, 256])
def test_scores_equal_the_log_softmax_of_transformers(tiny, tmp_path, chunk, window):
    from transformers import AutoModelForCausalLM

    family = "llama" if window is None else "mistral"
    layers = tuple(replace(one, attention=replace(one.attention, window=window)) for one in tiny.config.layers)
    module = Decoder(replace(tiny.config, family=family, layers=layers)).initialize(seed=3).eval()
    for parameter in module.parameters():  # far enough from uniform for a wrong view to show
        parameter.data *= 3
    model = LanguageModel("windowed", module, tiny.tokenizer, None)
    model.save(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = prompt(0, 180)
    continuations = [ids[i : i + n] for i, n in enumerate([1, 3, 9, 30, 2, 1, 5])]
    expected = []
    for continuation in continuations:
        with torch.no_grad():
            rows = reference(torch.tensor([[*ids, *continuation]])).logits[0].double().log_softmax(-1)
        expected.append(sum(float(rows[at, id]) for at, id in enumerate(continuation, len(ids) - 1)))
    with Engine(model, max_num_batched_tokens=chunk) as engine:
        for _ in range(2):  # the second time from what the first left
            assert engine.score(ids, continuations) == pytest.approx(expected, abs=2e-4)
        assert engine.stats().cached_tokens == 179
        assert ask(engine, ids)[0] == bare_greedy(model, ids, 20)
        tokens = engine.prompt_logprobs([*ids, *continuations[3]], num_logprobs=4)
    assert sum(token.logprob for token in tokens[180:]) == pytest.approx(expected[3], abs=2e-4)
    assert (tokens[0].logprob, tokens[0].top_logprobs) == (None, ())
    assert [token.id for token in tokens] == [*ids, *continuations[3]]
    likeliest = rows_of(reference, ids)[:-1].topk(4).indices.tolist()
    assert [[id for id, _ in token.top_logprobs] for token in tokens[1:180]] == likeliest


@torch.no_grad()
def rows_of(reference, ids):
    return reference(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_scores_of_all_single_tokens_are_a_distribution(tiny, fake):
    with Engine(tiny) as engine:
        scores = engine.score(prompt(0, 20), [[id] for id in range(tiny.config.vocab_size)])
        assert torch.tensor(scores).exp().sum() == pytest.approx(1, abs=1e-4)
        assert engine.score(prompt(0, 20), []) == []
        assert [token.id for token in engine.prompt_logprobs([65])] == [65]


def test_what_cannot_be_scored_is_refused(tiny, fake):
    engine = Engine(tiny)
    with pytest.raises(InvalidArgument, match="the prompt is empty"):
        engine.score([], [[1]])
    with pytest.raises(InvalidArgument, match="the prompt is empty"):
        engine.prompt_logprobs([])
    with pytest.raises(InvalidArgument, match="continuation 1 is empty"):
        engine.score([1], [[1], []])
    with pytest.raises(InvalidArgument, match="token id 999"):
        engine.score([1], [[1], [999]])
    with pytest.raises(ContextOverflow) as caught:
        engine.score([1] * 2000, [[1], [2] * 49])
    assert caught.value.token_count == 2049


def test_many_scores_do_not_hold_up_the_others(tiny, fake):
    with Engine(tiny, max_num_seqs=2, max_num_batched_tokens=32, cache_tokens=2048) as engine:
        stream = engine.stream(Request(prompt(0, 8), SamplingOptions(max_tokens=1000, **ENDLESS)))
        next(stream)
        before = engine.stats().tokens_generated
        engine.score(prompt(1, 8), [prompt(i, 7) for i in range(60)])
        assert engine.stats().tokens_generated - before >= 40  # one token with each pass over 7 others
        stream.close()


def test_an_error_of_a_score_reaches_its_caller_only(tiny, fake, monkeypatch):
    def failing(*_):
        raise GenerationError("this score failed")

    monkeypatch.setattr("pippin.engine.scheduling.continuation_scores.Scores.add_logits", failing)
    with Engine(tiny) as engine:
        stream = engine.stream(Request(prompt(0, 8), SamplingOptions(max_tokens=30, **ENDLESS)))
        with pytest.raises(GenerationError, match="this score failed"):
            engine.score([65, 66], [[67, 68], [67, 69]])
        assert collect(stream)[2].answer_tokens == 30
        assert engine.stats().blocks_free + engine.stats().blocks_cached == engine.stats().blocks_total
