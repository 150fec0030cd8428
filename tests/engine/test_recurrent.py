"""The engine over recurrent layers: every answer as without an engine, and memory that does not grow."""

import copy
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from pippin.core.errors import GenerationError, InvalidArgument
from pippin.engine import Engine, Request, SamplingOptions
from pippin.engine.model_runner import BLOCK_SIZE, ModelInput
from pippin.engine.runners.native_runner import NativeRunner
from pippin.engine.runners.select import make_runner
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.engine.speculation import Speculation
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.lora import Adapter, LowRankUpdate
from pippin.nn.recurrent.layer import RecurrentSpec

FEED = FeedForwardSpec(48)
GRU, LSTM = (LayerSpec.recurring(RecurrentSpec(cell), FEED) for cell in ("gru", "lstm"))
WINDOW, PLAIN = (LayerSpec(AttentionSpec(window=window), FEED) for window in (9, None))

# all layers recurrent; attention between them; and attention around one, with a layer that reads another's keys
LAYERS = {
    "gru": (GRU,),
    "lstm": (LSTM, LSTM),
    "mixed": (GRU, WINDOW, LSTM),
    "shared": (PLAIN, GRU, replace(PLAIN, attention=AttentionSpec(kv_source=0))),
}


@pytest.fixture
def build(tiny):
    """Makes a random model of given layers; weights large enough for the layers to matter."""

    def make(name, **fields):
        sizes = {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 2048,
        } | fields
        config = DecoderConfig("llama", 260, layers=LAYERS[name], embedding_scale=3.0, **sizes)
        module = Decoder(config).initialize(seed=1).requires_grad_(False).eval()
        for part, parameter in module.named_parameters():
            if "_proj" in part:
                parameter *= 8
        return LanguageModel(name, module, tiny.tokenizer, None)

    return make


@pytest.fixture(params=["lstm", "mixed", "shared"])
def model(request, build):
    return build(request.param)


def tokens(count, seed=0):
    return random.Random(seed).choices(range(32, 127), k=count)


@torch.inference_mode()
def oracle(model, ids, adapter=None):
    return model.module(torch.tensor([ids]), adapters=None if adapter is None else [(adapter, slice(0, len(ids)))])[0]


def is_greedy(model, ids, answered, count):
    """Whether these are the likeliest tokens, by a pass over all of them without an engine, up to rounding."""
    logits = oracle(model, ids + answered[:-1])[len(ids) - 1 :]
    chosen = logits.gather(-1, torch.tensor(answered)[:, None])[:, 0]
    return len(answered) == count and float((logits.amax(-1) - chosen).max()) < 1e-4


def request(ids, count=12):
    options = SamplingOptions(max_tokens=count, temperature=0.0, logit_bias={256: -100})
    return Request(ids, options)


def answer(engine, ids, count=12):
    return [token.id for token in list(engine.stream(request(ids, count)))[:-1]]


def wait_until(condition, seconds=10.0):
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end, "it did not happen"
        time.sleep(0.001)


def lora(model, seed):
    generator, changes = torch.Generator().manual_seed(seed), {}
    for name, linear in model.module.named_modules():
        if name.endswith("_proj"):
            down = torch.randn(1, linear.inputs, generator=generator) / 8
            changes[linear] = (LowRankUpdate(down, torch.randn(linear.outputs, 1, generator=generator)),)
    return Adapter(f"random {seed}", changes)


def test_any_schedule_gives_the_logits_of_whole_sequences(model):
    """Random cuts, companies, tables, adapters, wanted rows, and forks that copy the states."""
    rng = random.Random(0)
    runner = TorchRunner(model, 80)
    free = list(range(80))
    rng.shuffle(free)
    adapters = [None, lora(model, 1)]
    lines = [(tokens(rng.randrange(20, 45), i), rng.choice(adapters), {}) for i in range(3)]
    held, tables = [0] * 3, [[free.pop() for _ in range(-(-len(ids) // BLOCK_SIZE))] for ids, _, _ in lines]
    wanted = [oracle(model, ids, adapter) for ids, adapter, _ in lines]
    for step in range(40):
        going = [i for i, (ids, _, _) in enumerate(lines) if held[i] < len(ids)]
        if not going:
            break
        inputs, places = [], rng.sample(going, rng.randrange(1, len(going) + 1))
        for i in places:
            ids, adapter, states = lines[i]
            new = ids[held[i] : held[i] + rng.choice([1, 1, 1, 2, 17, 40])]
            outputs = rng.choice([[], [len(new) - 1], sorted(rng.sample(range(len(new)), rng.randrange(len(new) + 1)))])
            inputs.append(ModelInput(new, held[i], tables[i], outputs, adapter, states=states))
        for i, model_input, logits in zip(places, inputs, runner.forward(inputs), strict=True):
            expected = wanted[i][[model_input.num_computed_tokens + index for index in model_input.outputs]]
            torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-4)
            held[i] += len(model_input.token_ids)
        if len(lines) < 5 and step % 3 == 2:
            i = rng.randrange(len(lines))
            ids, adapter, states = lines[i]
            other = ids[: held[i]] + tokens(15, 100 + step)
            table = [free.pop() for _ in range(-(-len(other) // BLOCK_SIZE))]
            for source, target in zip(tables[i][: -(-held[i] // BLOCK_SIZE)], table, strict=False):
                runner.copy(source, target)
            lines.append((other, adapter, states.copy()))
            held.append(held[i])
            tables.append(table)
            wanted.append(oracle(model, other, adapter))
    assert len(lines) == 5
    assert held == [len(ids) for ids, _, _ in lines]


def test_answers_in_company_are_those_alone(model):
    prompts = [tokens(length, seed) for seed, length in enumerate((3, 40, 17, 1))]
    with Engine(model, max_num_seqs=3, max_num_batched_tokens=24) as engine, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda ids: answer(engine, ids, 6), prompts))
        again = answer(engine, prompts[1], 6)
        stats = engine.stats()
        answer(engine, prompts[2], 6)
        assert engine.stats().cached_tokens == 32 + 16
    assert all(is_greedy(model, ids, found, 6) for ids, found in zip(prompts, answers, strict=True))
    assert len({token for found in answers for token in found}) > 5
    assert again == answers[1]
    assert (stats.cached_tokens, stats.prefix_hits) == (32, 1)  # the last snapshot within its 40 tokens
    snapshots, rest = divmod(stats.state_bytes_used, model.config.state_bytes)
    assert rest == 0
    assert snapshots >= 2  # after 32 and 16 tokens; the one at 16 of the 40 depends on how the company cuts them


def test_the_second_turn_of_a_chat_goes_on_from_the_states_of_the_first(model):
    prompt = tokens(100)
    with Engine(model, max_num_batched_tokens=48) as engine:
        first = answer(engine, prompt, 40)
        longer = [*prompt, *first, *tokens(30, 5)]
        second = answer(engine, longer, 6)
        stats = engine.stats()
    assert is_greedy(model, longer, second, 6)
    assert stats.cached_tokens == 128  # the last block boundary before the 139 tokens that were computed
    with Engine(model, max_num_batched_tokens=48, enable_prefix_caching=False) as engine:
        assert answer(engine, longer, 6) == second
        assert engine.stats().state_bytes_used == engine.stats().cached_tokens == 0


def test_snapshots_of_states_are_bounded_and_the_oldest_go_first(model, monkeypatch):
    monkeypatch.setattr("pippin.engine.cache_size.max_snapshots", lambda *_: 2)
    prompts = [tokens(40, seed) for seed in range(3)]
    with Engine(model, max_num_seqs=1) as engine:
        for each in prompts:
            answer(engine, each, 2)
        assert engine.stats().state_bytes_used == 2 * model.config.state_bytes
        before = engine.stats().cached_tokens
        answer(engine, prompts[0], 2)
        assert engine.stats().cached_tokens == before
        answer(engine, prompts[2], 2)
        assert engine.stats().cached_tokens == before + 32


def test_who_is_preempted_goes_on_where_it_was(build):
    """A pool too small for all answers: the states of who makes room are given up and computed again."""
    model = build("shared")
    prompts = [tokens(20, seed) for seed in range(2)]
    with (
        Engine(model, max_num_seqs=2, max_num_batched_tokens=32, cache_tokens=5 * BLOCK_SIZE) as engine,
        ThreadPoolExecutor(2) as pool,
    ):
        answers = list(pool.map(lambda ids: answer(engine, ids, 25), prompts))
        assert engine.stats().preempted > 0
    assert all(is_greedy(model, ids, found, 25) for ids, found in zip(prompts, answers, strict=True))


def test_scores_fork_the_states(model):
    prompt, others = tokens(21), [tokens(length, 9) for length in (1, 2, 30, 5)]

    def directly(ids):
        logprobs = oracle(model, prompt + ids).log_softmax(-1)
        return sum(float(logprobs[len(prompt) - 1 + index, token]) for index, token in enumerate(ids))

    with Engine(model, max_num_batched_tokens=16) as engine:
        assert engine.score(prompt, others) == pytest.approx([directly(ids) for ids in others], abs=5e-3)
        found = engine.prompt_logprobs(prompt)
    expected = oracle(model, prompt).log_softmax(-1)
    assert [token.logprob for token in found[1:]] == pytest.approx(
        [float(expected[index, token]) for index, token in enumerate(prompt[1:])], abs=1e-3
    )


def test_states_are_counted_while_they_are_held_and_go_with_the_request(build):
    model = build("lstm")
    with Engine(model, max_num_seqs=2, enable_prefix_caching=False) as engine:
        step = engine._loop._step
        engine._loop._step = lambda: (time.sleep(0.002), step())[1]
        streams = [engine.stream(request(tokens(5, seed), 1000)) for seed in range(2)]
        for stream in streams:
            next(stream)
        assert engine.stats().state_bytes_used == 2 * model.config.state_bytes
        held = [
            sum(state.untyped_storage().nbytes() for state in request.states.values())
            for request in engine._loop.requests
        ]
        assert held == [model.config.state_bytes] * 2  # two layers of 32: three inputs, two halves of a state
        assert model.config.state_bytes == 2 * 32 * (3 + 2) * 4
        streams[0].close()
        wait_until(lambda: engine.stats().state_bytes_used == model.config.state_bytes)
        streams[1].close()
        wait_until(lambda: engine.stats().state_bytes_used == 0)
        wait_until(lambda: engine.stats().cancelled == 2)


def test_twenty_thousand_tokens_take_the_memory_of_a_hundred(build):
    model = build(
        "gru", hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=32_768
    )
    runner = make_runner(model, 2048)
    assert runner.block_bytes == 0
    sizes, ids, states = {}, tokens(20_000), {}
    for first, end in ((0, 100), (100, 9_000), (9_000, 20_000)):
        (logits,) = runner.forward([ModelInput(ids[first:end], first, range(1250), [end - first - 1], states=states)])
        sizes[end] = sum(state.untyped_storage().nbytes() for state in states.values())
    assert sizes[100] == sizes[20_000] == model.config.state_bytes == 8 * 4 * 4
    torch.testing.assert_close(logits[0], oracle(model, ids)[-1], atol=3e-5, rtol=1e-4)
    with Engine(model) as engine:
        assert engine.context_size == 32_768


def test_a_failed_pass_leaves_nobodys_state(build):
    model = build("gru")
    with Engine(model) as engine:
        whole, engine._runner.forward = engine._runner.forward, lambda inputs: 1 / 0
        with pytest.raises(GenerationError, match="division by zero"):
            answer(engine, tokens(20))
        engine._runner.forward = whole
        assert engine.stats().state_bytes_used == 0
        assert is_greedy(model, tokens(20), answer(engine, tokens(20)), 12)


def test_the_native_kernels_leave_such_models_to_torch(build):
    model = build("mixed")
    model = replace(model, network=copy.deepcopy(model.module).pack())
    assert not NativeRunner.supports(model)
    assert isinstance(make_runner(model, 4), TorchRunner)
    with Engine(model) as engine:
        assert is_greedy(build("mixed"), tokens(40), answer(engine, tokens(40)), 12)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_prompt_cache_on_disk_has_the_states(build, tmp_path, kind):
    """Another engine goes on where the first one stopped, or within what it had computed."""
    model, path = build(kind), tmp_path / "prompts"
    asked = [tokens(90), tokens(90)[:70] + tokens(20), tokens(50)[::-1]]
    with Engine(model, max_num_seqs=2, cache_tokens=1024, prompt_cache=path) as engine:
        answers = [answer(engine, ids) for ids in asked]
    with Engine(model, max_num_seqs=2, cache_tokens=1024, prompt_cache=path) as engine:
        tree = engine._scheduler.tree
        assert tree.num_snapshots > 0
        assert [answer(engine, ids) for ids in asked] == answers
        assert engine.stats().cached_tokens >= 80 + 64 + 32
    size = path.stat().st_size
    # a snapshot that two prompts share is written once: what is read and written again does not grow
    with Engine(model, max_num_seqs=2, cache_tokens=1024) as engine:
        assert engine.load_prompt_cache(path) > 0
        assert engine.save_prompt_cache(tmp_path / "again") == size


def test_what_states_cannot_do_is_refused(build, tiny):
    model = build("mixed")
    rolled_back = "mixed has recurrent layers, whose state cannot be rolled back"
    with Engine(model) as engine, pytest.raises(InvalidArgument, match=rolled_back):
        engine.stream(replace(request(tokens(9)), speculation=Speculation()))
    with pytest.raises(InvalidArgument, match="mixed has recurrent layers"):
        Speculation(model).check(tiny)
    runner = TorchRunner(model, 4)
    with pytest.raises(InvalidArgument, match=r"a sequence of 3 tokens brought the states of layers \[\], the model"):
        runner.forward([ModelInput([1], 3, [0], [0])])
    with pytest.raises(InvalidArgument, match="layers 0 to 2 cannot be computed alone: mixed has states"):
        runner.forward([ModelInput([1], 0, [0], [0], depth=2)])
