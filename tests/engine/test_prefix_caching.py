"""What an engine has computed before is used again, by whom it may be, and kept on disk."""

import copy
import gc
import threading
from dataclasses import replace

import pytest
import torch

from pippin.core.errors import (
    ContextOverflow,
    CorruptedFile,
    InvalidArgument,
)
from pippin.engine import Engine, Request, SamplingOptions, shared_engine
from pippin.engine.cache.prefix_tree import CacheKey
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRankUpdate

from .asking import ENDLESS, ask, at_once, bare_greedy, is_idle, prompt, together, wait_until
from .fake import right_answer

# --- what was computed before -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 15, 16, 31, 100, 179, 180])
def test_a_prompt_is_found_up_to_where_it_parts_from_earlier_ones(engine, tiny, keep):
    first = prompt(0, 180)
    ask(engine, first)
    other = [*first[:keep], 1, 2, 3]
    ids, _, last = ask(engine, other)
    assert last.cached_tokens == keep
    assert ids == bare_greedy(tiny, other, 20)
    assert engine.stats().prefix_hits == (keep > 0)


def test_the_second_turn_of_a_chat_computes_only_what_is_new(engine, tiny):
    opening = prompt(0, 200)
    ids, _, first = ask(engine, opening, options=SamplingOptions(max_tokens=10, **ENDLESS))
    together(engine, [Request(prompt(i, 150), SamplingOptions(max_tokens=5)) for i in (1, 2)])
    second = [*opening, *ids, *prompt(3, 20)]
    answer, _, last = ask(engine, second, options=SamplingOptions(max_tokens=5))
    # the last token of an answer is never computed
    assert (first.cached_tokens, last.cached_tokens) == (0, 209)
    assert answer == bare_greedy(tiny, second, 5)


def test_what_conversations_share_is_there_once_and_all_are_kept(tiny, fake):
    system = prompt(0, 96)
    short = SamplingOptions(max_tokens=2)
    with Engine(tiny, max_num_seqs=2, cache_tokens=2048) as engine:
        texts = [[*system, i, *prompt(i, 149)] for i in range(1, 6)]
        cached = [ask(engine, each, options=short)[2].cached_tokens for each in [*texts, *texts]]
        assert cached == [0, *4 * [96], *5 * [245]]
        stats = engine.stats()
        assert stats.cache_tokens_used <= 96 + 5 * (150 + 16)
        assert stats.blocks_cached == stats.blocks_total - stats.blocks_free


def test_requests_that_come_together_with_one_beginning_compute_it_once(tiny, fake):
    system = prompt(0, 320)
    requests = [Request([*system, *prompt(i, 20)], SamplingOptions(max_tokens=3)) for i in range(1, 5)]
    with Engine(tiny, max_num_seqs=4, max_num_batched_tokens=64, cache_tokens=2048) as engine:
        answers = at_once(engine, requests)
        computed = sum(count for each in engine._runner.passes for count, _ in each)
    assert [ids for ids, _, _ in answers] == [[t.id for t in right_answer(tiny, r)[0]] for r in requests]
    assert computed <= 320 + 4 * (20 + 3)
    assert sorted(last.cached_tokens for *_, last in answers) == [0, 320, 320, 320]


def test_the_least_recently_used_is_given_up_first(tiny, fake):
    short = SamplingOptions(max_tokens=1)
    prompts = [prompt(i, 50) for i in range(4)]
    with Engine(tiny, max_num_seqs=1, cache_tokens=14 * 16) as engine:  # room for three of them
        for each in [*prompts[:3], prompts[0], prompts[3]]:  # the fourth takes the place of the second
            ask(engine, each, options=short)
        found = [engine._scheduler.tree.match(engine._with_version(CacheKey("", None)), each, 49) for each in prompts]
        held = [16 * len(match.rows) + match.num_partial_tokens for match in found]
        assert held[0] == held[2] == held[3] == 49
        assert held[1] < 49


def test_prefill_ahead_of_time_is_found_by_the_request(engine):
    assert engine.prefill([]) == 0
    assert engine.prefill(prompt(0, 100)) == 100
    assert ask(engine, [*prompt(0, 100), 65], options=SamplingOptions(max_tokens=1))[2].cached_tokens == 100
    with pytest.raises(ContextOverflow):
        engine.prefill([65] * 5000)


def test_nothing_is_kept_without_reuse(tiny, fake):
    with Engine(tiny, max_num_seqs=2, enable_prefix_caching=False) as engine:
        for _ in range(2):
            assert ask(engine, prompt(0, 100))[2].cached_tokens == 0
        wait_until(lambda: is_idle(engine))
        assert engine.stats().cache_tokens_used == 0


def test_cancelling_during_the_prompt_keeps_what_was_computed(tiny, fake):
    cancel = threading.Event()
    with Engine(tiny, max_num_batched_tokens=32) as engine:
        forward = engine._runner.forward
        engine._runner.forward = lambda inputs: (cancel.set(), forward(inputs))[1]
        *_, last = engine.stream(Request(prompt(0, 180), cancel=cancel))
        assert last.finish_reason == "cancelled"
        assert ask(engine, prompt(0, 180))[2].cached_tokens == 32


def test_nothing_computed_for_one_owner_is_used_for_another(tiny, fake):
    ids, short = prompt(0, 100), SamplingOptions(max_tokens=1)
    with Engine(tiny) as engine:

        def cached(owner):
            return ask(engine, ids, options=short, owner=owner)[2].cached_tokens

        assert engine.prefill(ids, owner="ann") == 100
        assert cached("bob") == 0
        assert (cached("ann"), cached("bob")) == (99, 99)
        before = engine.stats().cached_tokens
        engine.score(ids, [[65]], owner="eve")
        assert engine.stats().cached_tokens == before
        engine.score(ids, [[65]], owner="eve")
        assert engine.stats().cached_tokens == before + 99


def test_what_was_computed_before_the_weights_changed_is_not_used(tiny):
    model = replace(tiny, network=copy.deepcopy(tiny.module))
    ids = prompt(0, 50)
    with Engine(model) as engine:
        before = ask(engine, ids)[0]
        assert ask(engine, ids)[2].cached_tokens == 49
        with torch.no_grad():
            for weight in model.module.parameters():
                weight.mul_(-2.0)
        after, _, last = ask(engine, ids)
        assert last.cached_tokens == 0
        assert after == bare_greedy(model, ids, 20) != before


def test_blocks_of_a_request_that_runs_while_the_weights_change_are_not_reused(tiny):
    model = replace(tiny, network=copy.deepcopy(tiny.module))
    ids = prompt(0, 50)
    with Engine(model) as engine:
        running = engine.stream(Request(ids, options=SamplingOptions(max_tokens=400, **ENDLESS)))
        next(running)  # its prompt is in the cache, and its blocks are held
        with torch.no_grad():
            for weight in model.module.parameters():
                weight.mul_(-2.0)
        for _ in range(2):
            next(running)
        scores = engine.prompt_logprobs(ids, 0)
        answer, _, last = ask(engine, ids)
        running.close()
        ask(engine, prompt(1, 20))  # what the closed request held is idle by now
        assert ask(engine, ids)[0] == answer == bare_greedy(model, ids, 20)
        assert last.cached_tokens == 1, "the first token, which was computed for the log-probabilities"
    with Engine(model) as cold:
        expected = cold.prompt_logprobs(ids, 0)
    assert [one.logprob for one in scores[1:]] == pytest.approx([one.logprob for one in expected[1:]], abs=1e-5)


def test_blocks_of_an_adapter_that_was_trained_meanwhile_are_not_reused(tiny):
    model = replace(tiny, network=copy.deepcopy(tiny.module), adapters={})
    layer = next(part for part in model.module.modules() if isinstance(part, Linear))
    outputs, inputs = layer.weight.shape
    update = LowRankUpdate(torch.randn(2, inputs), torch.randn(outputs, 2))
    model.adapters["task"] = Adapter("task", {layer: (update,)})
    ids = prompt(0, 50)
    with Engine(model) as engine:
        before = ask(engine, ids, adapter="task")[2]
        update.up.mul_(-3.0)
        first, second = (ask(engine, ids, adapter="task") for _ in range(2))
    with Engine(model) as cold:
        expected = ask(cold, ids, adapter="task")
    assert (before.cached_tokens, first[2].cached_tokens, second[2].cached_tokens) == (0, 0, 49)
    assert first[:2] == second[:2] == expected[:2]


def test_a_prompt_cache_holds_nothing_of_older_weights(tiny, tmp_path):
    model = replace(tiny, network=copy.deepcopy(tiny.module))
    with Engine(model) as engine:
        running = engine.stream(Request(prompt(0, 50), options=SamplingOptions(max_tokens=400, **ENDLESS)))
        next(running)
        with torch.no_grad():
            next(model.module.parameters()).mul_(2.0)
        ask(engine, prompt(1, 40))
        engine.save_prompt_cache(tmp_path / "cache")
        running.close()
    with Engine(model) as engine:
        assert engine.load_prompt_cache(tmp_path / "cache") == 1
        assert ask(engine, prompt(0, 50))[2].cached_tokens == 0


def test_what_other_weights_computed_is_forgotten_before_anybody_else_is_let_in(tiny, fake, monkeypatch):
    model = replace(tiny, network=copy.deepcopy(tiny.module))
    with Engine(model) as engine:
        between, order = engine._loop.call_between_steps, []
        monkeypatch.setattr(
            engine._loop, "call_between_steps", lambda call: (order.append(engine._version), between(call))
        )
        before = engine._version
        with torch.no_grad():
            next(model.module.parameters()).mul_(2.0)
        ask(engine, prompt(0, 20))
        assert order == [before], "the new version counts from when the old one's work is gone"
        assert engine._version != before
        ask(engine, prompt(0, 20))
        assert len(order) == 1


def test_sessions_over_one_model_share_an_engine_that_goes_with_the_model(tiny, fake):
    import weakref

    model = replace(tiny)
    engine = shared_engine(model)
    assert shared_engine(model) is engine
    assert shared_engine(replace(model)) is not engine
    assert "_engine" in vars(copy.copy(model))
    assert copy.deepcopy(vars(model)["_engine"]).engine is None
    engine.close()
    assert shared_engine(model) is not engine
    gone = weakref.ref(shared_engine(model))
    del model, engine
    gc.collect()
    assert gone() is None


# --- prompts on disk --------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_used_is_never_written_over(tiny, tmp_path):
    from pippin.engine.engine import _engines

    path = tmp_path / "prompts"
    path.write_bytes(b"something else")
    with pytest.raises(CorruptedFile) as caught:
        Engine(tiny, cache_tokens=1024, prompt_cache=path)
    # the error holds the engine, and with it what would be written when the process ends
    assert [engine for engine in _engines if engine.prompt_cache == path] == []
    assert path.read_bytes() == b"something else"
    del caught


def test_what_was_computed_survives_the_engine(tiny, tmp_path):
    path = tmp_path / "prompts"
    texts = [[*prompt(0, 60), *prompt(i, 30 + i)] for i in range(1, 4)]
    with Engine(tiny, cache_tokens=1024, prompt_cache=path) as engine:
        answers = [ask(engine, each)[0] for each in texts]
        assert not path.exists()
    with Engine(tiny, cache_tokens=1024, prompt_cache=path) as engine:
        for each, answer in zip(texts, answers, strict=True):
            ids, _, last = ask(engine, each)
            assert (ids, last.cached_tokens) == (answer, len(each) - 1)
    with Engine(tiny, max_num_seqs=1, cache_tokens=96) as engine:  # as much as there is room for
        assert engine.load_prompt_cache(path) == 3
        assert engine.stats().blocks_free == 0
        assert ask(engine, texts[2][:70])[0] == bare_greedy(tiny, texts[2][:70], 20)
        with pytest.raises(InvalidArgument, match="no prompt cache of its own"):
            engine.save_prompt_cache()
