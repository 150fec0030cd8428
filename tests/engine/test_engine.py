"""The engine against a bare loop and transformers: the same answers, whoever else is being answered."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from pippin.engine import Engine, Request, SamplingOptions
from pippin.engine.grammar.constraint import Grammar
from pippin.language import Decoder, LanguageModel, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec

from .asking import ENDLESS, SAMPLED, ask, at_once, bare_greedy, collect, prompt, together
from .fake import right_answer


@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
def test_greedy_equals_the_bare_loop_for_every_chunk_size(tiny, chunk):
    with Engine(tiny, max_num_batched_tokens=chunk) as engine:
        ids, _, last = ask(engine, prompt(0, 180))
    assert ids == bare_greedy(tiny, prompt(0, 180), 20)
    assert (last.prompt_tokens, last.answer_tokens) == (180, len(ids))
    assert 0 < last.prompt_seconds <= last.first_token_seconds <= last.total_seconds


def test_greedy_answers_in_a_batch_equal_transformers(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    tiny.save(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    requests = [Request(prompt(i, 5 + 37 * i), SamplingOptions(max_tokens=10 + 5 * i)) for i in range(9)]
    with Engine(tiny, max_num_seqs=4, max_num_batched_tokens=20) as engine:
        answers = together(engine, requests, pause=0.05)
        again = together(engine, requests[:4])  # the second time nearly nothing of a prompt is computed
        stats = engine.stats()
        assert stats.prompt_tokens == sum(len(r.prompt) for r in [*requests, *requests[:4]])
        assert stats.cached_tokens >= sum(len(r.prompt) - 1 for r in requests[:4])
    for request, (ids, _, last) in zip([*requests, *requests[:4]], [*answers, *again], strict=True):
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([request.prompt]),
                max_new_tokens=request.options.max_tokens,
                do_sample=False,
                eos_token_id=256,
                pad_token_id=0,
            )[0, len(request.prompt) :].tolist()
        assert ids == [id for id in expected if id != 256]
        assert (last.prompt_tokens, last.answer_tokens) == (len(request.prompt), len(ids))


@pytest.mark.parametrize("how", ["alone", "together", "in pieces", "warm", "preempted"])
def test_the_real_model_writes_what_transformers_generates(model, reference, how):
    questions = ["What is the capital of France?", "Tell me about a river.", "Write a haiku about the sea."]
    prompts = [model.template.encode([{"role": "user", "content": text}]) for text in questions]
    fields = {"in pieces": {"max_num_batched_tokens": 5}, "preempted": {"cache_tokens": 96, "max_num_seqs": 3}}.get(
        how, {}
    )
    requests = [Request(ids, SamplingOptions(max_tokens=24)) for ids in prompts]
    with Engine(model, **{"cache_tokens": 1024, "max_num_seqs": 4} | fields) as engine:
        if how == "alone":
            answers = [collect(engine.stream(request)) for request in requests]
        elif how == "warm":
            together(engine, requests)
            answers = together(engine, requests)
            assert all(last.cached_tokens == len(ids) - 1 for ids, (*_, last) in zip(prompts, answers, strict=True))
        else:
            answers = at_once(engine, requests)
        assert (engine.stats().preempted > 0) == (how == "preempted")
    assert [ids for ids, _, _ in answers] == [reference(tuple(ids), 24) for ids in prompts]


@pytest.fixture(scope="module")
def reference(default_model_path, tmp_path_factory):
    """Greedy answers of transformers, which reads the same GGUF file, in float32."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("gguf")
    (folder / "model.gguf").symlink_to(default_model_path)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
    known = {}

    def greedy(ids, count):
        if ids not in known:
            with torch.no_grad():
                done = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
            answer = done[0, len(ids) :].tolist()
            ends = model.generation_config.eos_token_id
            known[ids] = answer[:-1] if answer[-1] in (ends if isinstance(ends, list) else [ends, 2]) else answer
        return known[ids]

    return greedy


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_a_seed_gives_the_same_text_whatever_else_runs(tiny, fake, chunk):
    extras = [{}, {"repetition_penalty": 1.3}, {"frequency_penalty": 1.0, "presence_penalty": 0.5}, {"top_k": 5}]
    requests = [
        Request(prompt(i, 60), SamplingOptions(max_tokens=25, seed=i, **SAMPLED, **extra))
        for i, extra in enumerate(extras)
    ]
    alone = [[token.id for token in right_answer(tiny, request)[0]] for request in requests]
    with Engine(tiny, max_num_seqs=4, max_num_batched_tokens=chunk, cache_tokens=512) as engine:
        assert [ids for ids, _, _ in together(engine, requests)] == alone
        assert [ids for ids, _, _ in together(engine, requests[::-1])] == alone[::-1]


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_native_answers_are_the_same_to_the_bit_whatever_else_happens(tiny, kv_cache_dtype):
    model = replace(tiny, network=copy.deepcopy(tiny.module).pack())
    options = [
        SamplingOptions(max_tokens=40, logprobs=2, temperature=1.0, seed=at, repetition_penalty=1.1, **ENDLESS)
        for at in range(5)
    ]
    requests = [Request([*prompt(9, 40), *prompt(at, 9 + 17 * at)], each) for at, each in enumerate(options)]
    continuations = [prompt(at, 7 * at + 1) for at in range(5)]

    def answers(together, **fields):
        with Engine(model, **{"cache_tokens": 2048, "kv_cache_dtype": kv_cache_dtype, **fields}) as engine:
            if not engine._runner.invariant:
                pytest.skip("no native kernels here")
            if together:
                with engine._loop._wake:  # so that all are there before the first step
                    streams = [engine.stream(request) for request in requests]
            else:
                streams = map(engine.stream, requests)
            tokens = [list(stream)[:-1] for stream in streams]
            scores = engine.score(requests[0].prompt, continuations)
            return (tokens, scores), engine.stats()

    alone, _ = answers(False, enable_prefix_caching=False)
    for fields in (
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 64, "max_num_seqs": 5},
        {"max_num_seqs": 2, "enable_prefix_caching": False},
    ):
        assert answers(True, **fields)[0] == alone
    warm, stats = answers(False)
    assert warm == alone
    assert stats.cached_tokens >= 4 * 40
    small, stats = answers(True, cache_tokens=160, max_num_seqs=5, max_num_batched_tokens=24)
    assert small == alone
    assert stats.preempted > 0


def test_log_probabilities_in_a_batch_are_those_of_the_model(engine, tiny):
    options = SamplingOptions(max_tokens=6, logprobs=3, temperature=2.0, seed=0)
    requests = [Request(prompt(i, 20 + i), options) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda request: list(engine.stream(request))[:-1], requests))
    for request, tokens in zip(requests, answers, strict=True):
        ids = [*request.prompt, *(token.id for token in tokens)]
        with torch.no_grad():
            logprobs = tiny.module(torch.tensor([ids]))[0].log_softmax(-1)
        for index, token in enumerate(tokens):
            row = logprobs[len(request.prompt) + index - 1]
            assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
            assert [id for id, _ in token.top_logprobs] == row.topk(3).indices.tolist()


def test_grammars_in_a_batch_always_parse_beside_free_text(tiny):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "rows": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        },
        "required": ["name", "rows"],
        "additionalProperties": False,
    }
    grammars = [Grammar.json_schema(schema), None, Grammar.regex(r"a{3}b+c?[0-9]{4}"), Grammar.choice(["yes", "no"])]
    requests = [
        Request(prompt(i, 30 + i), SamplingOptions(max_tokens=300, seed=i, temperature=1.0), grammars[i % 4])
        for i in range(8)
    ]
    with Engine(tiny, max_num_seqs=5, max_num_batched_tokens=16) as engine:
        answers = together(engine, requests, pause=0.02)
    for index, (_, text, last) in enumerate(answers):
        if index % 4 == 0:
            assert set(json.loads(text)) == {"name", "rows"}
            assert last.finish_reason == "stop"
        elif index % 4 != 1:
            assert requests[index].grammar.allows(text)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["windows and no positions", "shared keys", "experts", "norms everywhere"])
def test_every_kind_of_layer_works_in_a_batch(tiny, kind, packed):
    def layer(window=None, kv_source=None, rotary=Rotary(), **feedforward):
        return LayerSpec(AttentionSpec(window, rotary, kv_source), FeedForwardSpec(48, **feedforward))

    fields = {
        "windows and no positions": {"layers": (layer(window=16), layer(rotary=None), layer(window=16))},
        "shared keys": {"layers": (layer(), layer(window=20), layer(kv_source=1), layer(kv_source=0))},
        "experts": {"layers": (layer(num_experts=4, num_experts_per_tok=2), layer())},
        "norms everywhere": {"qk_norm": "head", "residual": "pre and post", "qkv_bias": True, "embedding_scale": 5.0},
    }[kind]
    module = Decoder(replace(tiny.config, **fields)).initialize(seed=1).eval()
    plain = LanguageModel(kind, module, tiny.tokenizer, None)
    requests = [Request(prompt(i, 10 + 40 * i), SamplingOptions(max_tokens=20, **ENDLESS)) for i in range(4)]
    expected = [bare_greedy(replace(plain, tokenizer=tiny.tokenizer), r.prompt, 20) for r in requests]
    continuations = [prompt(9, 3), prompt(8, 25), prompt(7, 1)]
    sums = [bare_score(plain, requests[3].prompt, each) for each in continuations]
    model = replace(plain, network=module.pack()) if packed else plain
    with Engine(model, max_num_seqs=3, max_num_batched_tokens=24, cache_tokens=1024) as engine:
        assert [ids[: len(right)] for (ids, _, _), right in zip(together(engine, requests), expected, strict=True)] == (
            expected
        )
        assert engine.score(requests[3].prompt, continuations) == pytest.approx(sums, abs=0.05 if packed else 1e-3)


@torch.no_grad()
def bare_score(model, ids, continuation):
    rows = model.module(torch.tensor([[*ids, *continuation]]))[0].double().log_softmax(-1)
    return sum(float(rows[at, id]) for at, id in enumerate(continuation, len(ids) - 1))


def test_what_a_grammar_forces_is_computed_in_one_step(engine):
    _, text, last = ask(engine, prompt(0, 10), grammar=Grammar.regex("the (yes|no), sir"))
    assert text in ("the yes, sir", "the no, sir")
    assert last.finish_reason == "stop"
    assert engine.stats().steps <= 4


def test_stop_strings_and_characters_of_several_bytes_come_whole_in_every_stream(tiny, fake):
    grammar = Grammar.regex("(?:naïve 日本語 🍏 END never){2}")
    requests = [Request(prompt(i, 10), SamplingOptions(stop=["END"]), grammar) for i in range(4)]
    with Engine(tiny, max_num_seqs=2) as engine, ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda request: [event.text for event in engine.stream(request)], requests))
    for texts in parts:
        assert "".join(texts) == "naïve 日本語 🍏 "
        assert not any("\ufffd" in text for text in texts)


def test_the_last_tokens_of_the_context_can_be_used(tiny, fake):
    ids = [65] * (tiny.context_size - 3)
    with Engine(tiny, max_num_seqs=1) as engine:
        answer, _, last = ask(engine, ids, options=SamplingOptions(temperature=1.0, seed=0, **ENDLESS))
    assert (len(answer), last.finish_reason) == (3, "length")


def test_a_decode_step_takes_no_memory_that_grows_with_the_context(tiny):
    from pippin.engine.model_runner import ModelInput
    from pippin.engine.runners.torch_runner import TorchRunner

    def allocated(context: int) -> int:
        runner = TorchRunner(tiny, 126)
        table = range(126)
        runner.forward([ModelInput([7] * context, 0, table, ())])
        runner.forward([ModelInput([7], context, table, (0,))])
        with torch.profiler.profile(profile_memory=True) as profile:
            runner.forward([ModelInput([7], context + 1, table, (0,))])
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())

    # attention inputs in blocks of 512 keys; beyond one block nothing depends on the length
    assert allocated(1800) == allocated(600) > 0
