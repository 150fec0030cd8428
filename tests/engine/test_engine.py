"""The engine against a bare loop and against transformers: same tokens, whatever is cached, chunked or forced."""

import threading

import pytest
import torch

from pippin.core.errors import ContextOverflow, InvalidArgument
from pippin.engine import DenseCache, Engine, Finished, Request, SamplingOptions
from pippin.engine.constraint import Grammar
from pippin.engine.engine import Prefix

PROMPT = list(range(60, 120)) * 3


def answer(engine, prompt, **fields):
    request = {"options": SamplingOptions(max_tokens=20), **fields}
    *tokens, last = engine.stream(Request(prompt, **request))
    assert isinstance(last, Finished)
    return tokens, last


@torch.no_grad()
def bare_greedy(model, prompt, count):
    """The loop that needs no engine: whole sequences, no cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.module(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] in model.tokenizer.eos_ids:
            return ids[len(prompt) : -1]
    return ids[len(prompt) :]


@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
def test_greedy_equals_the_bare_loop_for_every_chunk_size(tiny, chunk):
    tokens, last = answer(Engine(tiny, chunk=chunk), PROMPT)
    assert [token.id for token in tokens] == bare_greedy(tiny, PROMPT, 20)
    assert last.prompt_tokens == len(PROMPT)
    assert last.answer_tokens == len(tokens)


def test_a_warm_prefix_changes_no_bit_of_the_answer(tiny):
    engine, prefix = Engine(tiny, chunk=32), Prefix()
    options = SamplingOptions(max_tokens=20, temperature=1.0, seed=3, logprobs=5)
    cold, first = answer(engine, PROMPT, options=options, prefix=prefix)
    warm, second = answer(engine, PROMPT, options=options, prefix=prefix)
    assert (first.cached_tokens, second.cached_tokens) == (0, 160)
    assert warm == cold  # tokens and log-probabilities, exactly


@pytest.mark.parametrize("keep", [0, 31, 32, 100, 159, 160, 180])
def test_a_prefix_is_used_up_to_where_the_prompts_part(tiny, keep):
    engine, prefix = Engine(tiny, chunk=32), Prefix()
    answer(engine, PROMPT, prefix=prefix)
    other = [*PROMPT[:keep], 1, 2, 3]
    tokens, last = answer(engine, other, prefix=prefix)
    assert last.cached_tokens == keep // 32 * 32
    assert tokens == answer(engine, other)[0]


def test_prefill_ahead_of_time_is_found_by_the_request(tiny):
    engine, prefix = Engine(tiny, chunk=32), Prefix()
    engine.prefill(PROMPT[:100], prefix)
    tokens, last = answer(engine, PROMPT, prefix=prefix)
    assert last.cached_tokens == 96
    assert tokens == answer(engine, PROMPT)[0]


def test_log_probabilities_are_those_of_the_model(tiny):
    tokens, _ = answer(Engine(tiny), PROMPT, options=SamplingOptions(max_tokens=5, logprobs=3, temperature=2.0, seed=0))
    ids = PROMPT + [token.id for token in tokens]
    with torch.no_grad():
        logprobs = tiny.module(torch.tensor([ids]))[0].log_softmax(-1)
    for index, token in enumerate(tokens):
        row = logprobs[len(PROMPT) + index - 1]
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        assert [id for id, _ in token.top_logprobs] == row.topk(3).indices.tolist()


def test_a_grammar_holds_and_what_it_forces_is_not_asked_of_the_model(tiny):
    passes = []
    engine = Engine(tiny)
    forward = engine._forward
    engine._forward = lambda ids, *rest: (passes.append(len(ids)), forward(ids, *rest))[1]
    tokens, last = answer(engine, PROMPT, grammar=Grammar.regex("the (yes|no), sir"))
    text = "".join(token.text for token in tokens) + last.text
    assert text in ("the yes, sir", "the no, sir")
    assert last.reason == "stop"
    # the prompt, then one pass for each real choice: the first letter (free to forced) and y/n
    assert len(passes) <= 2 + 2
    assert sum(passes) <= len(PROMPT) + len(text)


def test_stop_strings_split_over_tokens_are_not_shown(tiny):
    free, _ = answer(Engine(tiny), PROMPT, options=SamplingOptions(max_tokens=20, temperature=1.0, seed=1))
    text = "".join(token.text for token in free)
    stop = text[5:8]
    tokens, last = answer(
        Engine(tiny), PROMPT, options=SamplingOptions(max_tokens=20, temperature=1.0, seed=1, stop=[stop])
    )
    assert "".join(token.text for token in tokens) + last.text == text[: text.find(stop)]
    assert last.reason == "stop"


def test_cancelling_ends_before_the_next_token(tiny):
    cancel = threading.Event()
    events = Engine(tiny).stream(Request(PROMPT, SamplingOptions(max_tokens=50), cancel=cancel))
    seen = [next(events) for _ in range(3)]
    cancel.set()
    (last,) = events
    assert len(seen) == 3
    assert last.reason == "cancelled"
    assert last.answer_tokens == 3


def test_cancelling_during_the_prompt_keeps_the_chunks_that_were_computed(tiny):
    cancel, prefix, engine = threading.Event(), Prefix(), Engine(tiny, chunk=32)
    forward = engine._forward
    engine._forward = lambda ids, *rest: (cancel.set(), forward(ids, *rest))[1]
    (last,) = engine.stream(Request(PROMPT, prefix=prefix, cancel=cancel))
    assert last.reason == "cancelled"
    engine._forward = forward
    tokens, last = answer(engine, PROMPT, prefix=prefix)
    assert last.cached_tokens == 32
    assert tokens == answer(engine, PROMPT)[0]


def test_a_decode_step_takes_no_memory_that_grows_with_the_context(model):
    def allocated(context: int) -> int:
        cache = DenseCache(model.config, 2000)
        with torch.inference_mode():
            for part in torch.full((1, context), 7).split(512, dim=1):
                model.module(part, cache=cache, last=1)
            model.module(torch.tensor([[7]]), cache=cache, last=1)
            with torch.profiler.profile(profile_memory=True) as profile:
                model.module(torch.tensor([[7]]), cache=cache, last=1)
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())

    # attention works in blocks of 512 keys; beyond one block nothing depends on the length
    assert allocated(1800) == allocated(600) > 0


def test_the_last_tokens_of_the_context_can_be_used(tiny):
    prompt = [65] * (tiny.context_size - 3)
    tokens, last = answer(Engine(tiny), prompt, options=SamplingOptions(temperature=1.0, seed=0))
    assert len(tokens) == 3
    assert last.reason == "length"


@pytest.mark.parametrize(("prompt", "maximum"), [(2048, None), (2040, 9), (1, 2048), (5000, None)])
def test_what_does_not_fit_is_refused_with_both_numbers(tiny, prompt, maximum):
    with pytest.raises(ContextOverflow, match=f"{tiny.context_size:,}") as caught:
        Engine(tiny).stream(Request([65] * prompt, SamplingOptions(max_tokens=maximum)))
    assert caught.value.context_size == 2048
    assert caught.value.token_count == prompt + (maximum or 1)


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "the prompt is empty"), ([3, 260], "token id 260"), ([-1], "token id -1")]
)
def test_impossible_prompts_are_refused(tiny, prompt, message):
    with pytest.raises(InvalidArgument, match=message):
        Engine(tiny).stream(Request(prompt))


@pytest.mark.parametrize("id", [260, 10**12])
def test_a_bias_outside_the_vocabulary_is_refused(tiny, id):
    with pytest.raises(InvalidArgument, match=f"token id {id} is outside the vocabulary of 260"):
        Engine(tiny).stream(Request([65], SamplingOptions(logit_bias={id: 1})))


def sums(model, prompt, continuations):
    """Log-probabilities from transformers' way: whole sequences, one at a time, log-softmax."""
    result = []
    for continuation in continuations:
        with torch.no_grad():
            rows = model(torch.tensor([[*prompt, *continuation]])).logits[0].double().log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(continuation) - 1)
        result.append(sum(float(rows[at, id]) for at, id in zip(places, continuation, strict=True)))
    return result


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("chunk", [4, 16, 256])
def test_scores_equal_the_log_softmax_of_transformers(tiny, tmp_path, chunk, window):
    from dataclasses import replace

    from transformers import AutoModelForCausalLM

    from pippin.language import Decoder, LanguageModel

    family = "llama" if window is None else "mistral"
    layers = tuple(replace(one, attention=replace(one.attention, window=window)) for one in tiny.config.layers)
    module = Decoder(replace(tiny.config, family=family, layers=layers)).initialise(seed=3).eval()
    for parameter in module.parameters():  # far enough from uniform for a wrong view to show
        parameter.data *= 3
    model = LanguageModel("windowed", module, tiny.tokenizer, None)
    model.save(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    continuations = [PROMPT[i : i + n] for i, n in enumerate([1, 3, 9, 30, 2, 1, 5])]
    engine, prefix = Engine(model, chunk=chunk), Prefix()
    expected = pytest.approx(sums(reference, PROMPT, continuations), abs=2e-4)
    assert engine.score(PROMPT, continuations) == expected
    for _ in range(2):  # the second time from what the first left
        assert engine.score(PROMPT, continuations, prefix=prefix) == expected
    assert prefix.ids == PROMPT[: len(PROMPT) // chunk * chunk]
    assert answer(engine, PROMPT, prefix=prefix)[0] == answer(engine, PROMPT)[0]


def test_scores_of_all_single_tokens_are_a_distribution(tiny):
    scores = Engine(tiny).score(PROMPT, [[id] for id in range(tiny.config.vocab_size)])
    assert torch.tensor(scores).exp().sum() == pytest.approx(1, abs=1e-4)
    assert Engine(tiny).score(PROMPT, []) == []


def test_what_cannot_be_scored_is_refused(tiny):
    engine = Engine(tiny)
    with pytest.raises(InvalidArgument, match="the prompt is empty"):
        engine.score([], [[1]])
    with pytest.raises(InvalidArgument, match="continuation 1 is empty"):
        engine.score([1], [[1], []])
    with pytest.raises(InvalidArgument, match="token id 999"):
        engine.score([1], [[1], [999]])
    with pytest.raises(ContextOverflow) as caught:
        engine.score([1] * 2000, [[1], [2] * 49])
    assert caught.value.token_count == 2049


def test_a_cache_is_never_overrun(tiny):
    cache = DenseCache(tiny.config, 4)
    with pytest.raises(InvalidArgument, match="room for 4 tokens, 5 were given"):
        tiny.module(torch.zeros(1, 5, dtype=torch.long), cache=cache)
    assert cache.length == 0
