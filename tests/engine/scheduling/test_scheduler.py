"""Random schedules on a runner that notices every wrong block: all answers right, nothing lost, nobody starved."""

import random
import threading
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from pippin.core.errors import Overloaded
from pippin.engine.cache.prefix_tree import CacheKey
from pippin.engine.cache.prompt_cache import LoadedSequence
from pippin.engine.engine import Engine
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.model_runner import BLOCK_SIZE, GIVEN_BACK
from pippin.engine.options import SamplingOptions
from pippin.engine.request import Finished, Request
from pippin.engine.scheduling.continuation_scores import MAX_ROWS, Scores
from pippin.engine.scheduling.request_state import END, EventStream, RequestState, blocks_for
from pippin.engine.scheduling.scheduler import Scheduler
from pippin.engine.speculation import Speculation
from pippin.engine.speculation.drafts import Draft
from pippin.language import DecoderConfig

from .. import fake as runners
from ..fake import FakeRunner, drive, events_so_far, logits_after, right_answer, right_score


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr("pippin.engine.engine.make_runner", FakeRunner)
    monkeypatch.setattr("pippin.engine.cache_size.runner_class", lambda model: FakeRunner)


@pytest.fixture(autouse=True)
def guesses(monkeypatch):
    """Drafts that often hold, and often do not; looking up what was said before never helps against a hash."""

    def propose(self, token_ids, max_tokens, position=None):
        room = min(max_tokens, self.max_tokens - self.num_tokens - 1)
        if self._speculation is None or room < 1:
            return None
        rng, ids = random.Random(len(token_ids)), list(token_ids)
        start = len(ids)
        for _ in range(rng.randint(0, room)):
            best = int(logits_after(ids).argmax())
            ids.append(best if rng.random() < 0.7 else rng.randrange(97, 123))
        tokens = ids[start:]
        if self.constraint is not None and tokens:
            tokens = tokens[: self.constraint.reach(tokens)]
        return Draft(tokens) if tokens else None

    monkeypatch.setattr("pippin.engine.output_processor.OutputProcessor.propose", propose)


def check_books(engine):
    """Free and held blocks are all blocks, and every hold is somebody's."""
    scheduler = engine._scheduler
    pool, tree = scheduler.pool, scheduler.tree
    holds = [0] * pool.num_blocks
    for state in scheduler.running:
        for line in (state, *state.branches):
            assert line.num_computed_tokens <= len(line.token_ids)
            for table, window in zip(line.tables, scheduler.windows, strict=True):
                assert len(table) >= blocks_for(line.num_computed_tokens)
                held = [block for block in table if block != GIVEN_BACK]
                assert len(set(held)) == len(held)
                first = 0 if window is None else max(0, line.num_computed_tokens - window + 1) // BLOCK_SIZE
                if window is None:
                    assert len(held) == len(table)
                else:  # what is seen is there, and no more than that and a chunk
                    assert GIVEN_BACK not in table[first : blocks_for(line.num_computed_tokens)]
                    assert table[:first] == [GIVEN_BACK] * first
                for block in held:
                    holds[block] += 1
    for block in tree._nodes:
        holds[block] += 1
    assert pool.ref_counts == holds
    assert sorted(pool._free) == [block for block, count in enumerate(holds) if not count]
    assert pool.num_free + sum(count > 0 for count in holds) == pool.num_blocks
    assert sorted(pool.idle) == sorted(block for block in tree._nodes if holds[block] == 1)
    for block, node in tree._nodes.items():
        assert block in node.blocks
        up = node.parent
        assert (up.children if len(node.tokens) == BLOCK_SIZE else up.tails)[node.tokens] is node
        # whoever holds a block holds what comes before it, so that ends are given up before beginnings
        if scheduler.windows == (None,) and up.parent is not None:
            assert pool.ref_counts[up.blocks[0]] >= (2 if pool.ref_counts[block] > 1 else 1)
    assert all(not state.num_blocks and not state.num_computed_tokens for state in scheduler.waiting)


@dataclass
class Caller:
    request: Request
    stream: EventStream
    leave: int | None
    how: str
    cancel: threading.Event
    ids: list = field(default_factory=list)
    last: object = None

    def listen(self):
        for event in events_so_far(self.stream):
            if event is END:
                continue
            if isinstance(event, Finished | Exception):
                self.last = event
            else:
                self.ids.append(event.id)
        if self.last is None and self.leave is not None and len(self.ids) >= self.leave:
            if self.how == "close":
                self.stream.close()
                self.last = "closed"
            else:
                self.cancel.set()


GRAMMAR = Grammar.regex("[a-z]{3}(one|two|three)+")


def random_request(rng, stems, drafts):
    stem = rng.choice(stems)
    ids = stem[: rng.randint(1, len(stem))] + rng.choices(range(97, 100), k=rng.randint(0, 20))
    options = SamplingOptions(max_tokens=rng.randint(1, 16), seed=rng.randint(0, 3), temperature=rng.choice([0.0, 1.0]))
    cancel = threading.Event()
    return Request(
        ids,
        options,
        GRAMMAR if rng.random() < 0.1 else None,
        cancel,
        owner=rng.choice(["", "", "ann"]),
        adapter=rng.choice([None, None, None, "a"]),
        priority=rng.choice([0, 0, 0, 0, -1, 5]),
        speculation=rng.choice([None, None, Speculation(num_speculative_tokens=rng.randint(1, 6))]) if drafts else None,
    )


def score_job(engine, rng, request):
    continuations = [rng.choices(range(97, 100), k=rng.randint(1, 20)) for _ in range(rng.randint(1, 4))]
    state = RequestState(
        request.prompt,
        engine.model.adapter(request.adapter),
        scores=Scores(continuations),
        owner=request.owner,
        priority=request.priority,
    )
    engine._loop.submit(state)
    return state, continuations


@pytest.mark.parametrize("part", [0, 1, 2, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(3, 10))])
def test_a_thousand_random_schedules(with_adapter, part):
    for seed in range(100 * part, 100 * part + 100):
        one_schedule(with_adapter, seed)


@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("windows", [(None, 20, 20), (20,), (16, None), (33, 5)])
def test_random_schedules_of_layers_with_windows(with_adapter, windows, part, monkeypatch):
    """Blocks behind a window are given back, prefixes are found where their windows are, and answers are the same."""
    of_groups(monkeypatch, windows)
    for seed in range(10 * part, 10 * part + 10):
        one_schedule(with_adapter, seed)


def of_groups(monkeypatch, windows):
    """Every model has groups of layers with these windows."""
    groups = property(lambda config: tuple((index,) for index in range(len(windows))))
    if None not in windows:
        monkeypatch.setattr(runners, "HORIZON", max(windows))
    monkeypatch.setattr(DecoderConfig, "cache_groups", groups)
    monkeypatch.setattr(DecoderConfig, "group_window", lambda config, layers: windows[layers[0]])


@pytest.mark.parametrize("part", range(6))
def test_random_schedules_of_recurrent_layers(with_adapter, part, monkeypatch):
    """Requests go on from snapshots of states, each of which is checked against the tokens that it stands for."""
    monkeypatch.setattr(DecoderConfig, "recurrent_layers", (0,))
    monkeypatch.setattr("pippin.engine.cache_size.max_snapshots", lambda *_: 5)
    hits = sum(one_schedule(with_adapter, seed) for seed in range(20 * part, 20 * part + 20))
    assert hits


def one_schedule(tiny, seed):
    """Random requests; returns how many began with a cached prefix."""
    rng = random.Random(seed)
    blocks, groups = rng.randint(7, 14), len(tiny.config.cache_groups)
    engine = Engine(
        tiny,
        max_num_seqs=rng.randint(1, 4),
        max_waiting=3,
        max_num_batched_tokens=rng.choice([1, 5, 16, 40]),
        cache_tokens=blocks * BLOCK_SIZE,
        enable_prefix_caching=rng.random() < 0.8,
    )
    runner, pool = engine._runner, engine._scheduler.pool
    runner.may_write = lambda block: pool.ref_counts[block] == 1 and not pool._cached[block]
    step = drive(engine)
    stems = [rng.choices(range(97, 123), k=40) for _ in range(2)]
    callers, scored, left = [], [], rng.randint(1, 7)
    while left or engine._loop.requests:
        if left and (rng.random() < 0.3 or not engine._loop.requests):
            left -= 1
            request = random_request(rng, stems, not tiny.config.recurrent_layers)
            try:
                if rng.random() < 0.2:
                    scored.append((request, *score_job(engine, rng, request)))
                else:
                    leave = rng.choice([None, None, 0, 1, 5, 20])
                    stream = engine.stream(request)
                    callers.append(Caller(request, stream, leave, rng.choice(["close", "event"]), request.cancel))
            except Overloaded:
                assert len(engine._loop.requests) == engine._scheduler.max_num_seqs + 3
        step()
        for caller in callers:
            caller.listen()
        if rng.random() < 0.05 and engine._scheduler.running:
            engine._scheduler._preempt(rng.choice(engine._scheduler.running))
        check_books(engine)
    for caller in callers:
        expected = [token.id for token in right_answer(tiny, caller.request, engine.context_size)[0]]
        assert not isinstance(caller.last, Exception), (seed, caller.last)
        if caller.last == "closed" or caller.last.finish_reason == "cancelled":
            assert caller.leave is not None
            assert caller.ids == expected[: len(caller.ids)]
        else:
            assert caller.ids == expected
    for request, state, continuations in scored:
        adapter = tiny.adapter(request.adapter)
        assert state.events.get() == len(request.prompt)
        expected = [right_score(request.prompt, each, adapter) for each in continuations]
        assert state.scores.sums == pytest.approx(expected)
    stats = engine.stats()
    assert stats.finished + stats.cancelled == stats.requests == len(callers) + len(scored)
    assert stats.failed == 0
    assert stats.blocks_free + stats.blocks_cached == blocks * groups
    assert engine._scheduler.enable_prefix_caching or stats.blocks_free == blocks * groups
    engine.close()
    return stats.prefix_hits


# --- who comes first --------------------------------------------------------------------------------------------------


def ids_of(seed, length):
    return random.Random(seed).choices(range(97, 123), k=length)


ENDLESS = {"logit_bias": {256: -100}}


def start(engine, length, answer=1, **fields):
    options = SamplingOptions(max_tokens=answer, **ENDLESS)
    return engine.stream(Request(ids_of(length, length), options, **fields))


def run(engine, streams, steps=10_000):
    """Step until all is done; in which order the streams ended."""
    step, order = drive(engine), []
    for _ in range(steps):
        step()
        order += [
            at for at, each in enumerate(streams) if each._request not in engine._loop.requests and at not in order
        ]
        if len(order) == len(streams):
            return order
    raise AssertionError("some never ended")


def test_a_short_prompt_overtakes_a_long_one(tiny):
    engine = Engine(tiny, max_num_seqs=2, max_num_batched_tokens=32)
    drive(engine)
    assert run(engine, [start(engine, 500), start(engine, 40)]) == [1, 0]


def test_a_long_prompt_is_not_starved_by_short_ones_that_keep_coming(tiny):
    engine = Engine(tiny, max_num_seqs=3, max_num_batched_tokens=32, max_waiting=10_000)
    step = drive(engine)
    long, seen = start(engine, 800), 0
    for _ in range(200):
        if long._request not in engine._loop.requests:
            break
        while len(engine._loop.requests) < 4:  # always a short one in each other place, and one that waits
            seen += 1
            engine.stream(Request(ids_of(10_000 + seen, 64), SamplingOptions(max_tokens=1)))._request.closed = False
        step()
    else:
        raise AssertionError("the long prompt was never read")
    # a quarter of the budget is the oldest prompt's
    assert 90 <= engine.stats().steps <= 108
    assert seen > 30
    for state in list(engine._loop.requests):
        state.closed = True
    step()


def test_a_beginning_that_two_prompts_share_is_computed_by_one_of_them(tiny):
    engine = Engine(tiny, max_num_seqs=3, max_num_batched_tokens=256)
    step = drive(engine)
    stem, options = ids_of(1, 64), SamplingOptions(max_tokens=1)
    streams = [engine.stream(Request([*stem, *ids_of(at, 10)], options)) for at in (2, 3, 4)]
    step()
    assert engine._runner.passes == [[(74, 0)]], "the others wait for the blocks of the first"
    assert sorted(run(engine, streams)) == [0, 1, 2]
    assert sum(count for tokens in engine._runner.passes for count, _ in tokens) == 64 + 3 * 10


def test_a_request_waits_rather_than_to_be_preempted_at_once(tiny):
    engine = Engine(tiny, max_num_seqs=2, max_num_batched_tokens=64, cache_tokens=4 * BLOCK_SIZE)
    step = drive(engine)
    first = start(engine, 30, answer=20)
    step()
    second = start(engine, 32, answer=1)  # two blocks are free, and the first will soon need one
    assert run(engine, [first, second]) == [0, 1]
    assert engine.stats().preempted == 0


def test_answers_go_on_while_prompts_are_read(tiny):
    engine = Engine(tiny, max_num_seqs=4, max_num_batched_tokens=64)
    step = drive(engine)
    writing = [start(engine, 5 + at, answer=300) for at in range(2)]
    for _ in range(2):
        step()
    reading = [start(engine, 600), start(engine, 601)]
    before = engine.stats().tokens_generated
    for _ in range(20):
        step()
    assert engine.stats().tokens_generated == before + 40
    for tokens in engine._runner.passes[-20:]:
        assert sum(count for count, _ in tokens) <= 64 // 4
    for stream in writing + reading:
        stream.close()
    step()


def test_a_higher_priority_gets_a_place_first_and_keeps_it(tiny):
    engine = Engine(tiny, max_num_seqs=1, max_num_batched_tokens=32)
    drive(engine)
    streams = [start(engine, 40 + at, priority=priority) for at, priority in enumerate([0, -5, 3, 0, 10])]
    assert run(engine, streams) == [4, 2, 0, 3, 1]
    assert engine.stats().preempted == 0


def test_a_higher_priority_displaces_a_lower_one_that_loses_nothing(tiny):
    engine = Engine(tiny, max_num_seqs=1, max_num_batched_tokens=64)
    step = drive(engine)
    low = start(engine, 60, answer=20)
    for _ in range(8):
        step()
    high = start(engine, 33, answer=5, priority=1)
    same = start(engine, 34, answer=1)
    assert run(engine, [low, high, same]) == [1, 0, 2]
    stats = engine.stats()
    assert stats.preempted == 1
    assert [event.id for event in events_so_far(low)[:-2]] == [token.id for token in right(tiny, 60, 20)]
    # all of its tokens but the last were found again
    computed = sum(count for tokens in engine._runner.passes for count, _ in tokens)
    assert computed == (60 + 19) + (33 + 4) + 34
    assert engine.stats().cached_tokens == 0


def right(tiny, length, answer):
    return right_answer(tiny, Request(ids_of(length, length), SamplingOptions(max_tokens=answer, **ENDLESS)))[0]


def test_when_blocks_run_out_the_lowest_priority_makes_room_then_the_youngest(tiny):
    engine = Engine(tiny, max_num_seqs=3, max_num_batched_tokens=64, cache_tokens=9 * BLOCK_SIZE)
    step = drive(engine)
    streams = [start(engine, 20 + at, answer=60, priority=priority) for at, priority in enumerate([0, 1, 0])]
    preempted = []
    preempt = engine._scheduler._preempt
    engine._scheduler._preempt = lambda state: (preempted.append(state), preempt(state))[1]
    assert run(engine, streams) == [1, 0, 2]
    assert preempted[0] is streams[2]._request
    assert streams[1]._request not in preempted
    assert len(preempted) <= 3
    for at, stream in enumerate(streams):
        assert [event.id for event in events_so_far(stream)[:-2]] == [t.id for t in right(tiny, 20 + at, 60)]
    step()


def test_nobody_makes_room_for_a_guess(tiny):
    engine = Engine(tiny, max_num_seqs=2, max_num_batched_tokens=64, cache_tokens=5 * BLOCK_SIZE)
    step = drive(engine)
    guessing = Request(
        ids_of(0, 4), SamplingOptions(max_tokens=60, **ENDLESS), speculation=Speculation(num_speculative_tokens=64)
    )
    streams = [engine.stream(guessing), start(engine, 17, answer=10)]
    while step():
        check_books(engine)
    one, other = ([event.id for event in events_so_far(stream)[:-2]] for stream in streams)
    assert one == [token.id for token in right_answer(tiny, guessing)[0]]
    assert other == [token.id for token in right(tiny, 17, 10)]
    stats = engine.stats()
    assert stats.preempted == 0, "four blocks of guesses would have taken the other's"
    assert stats.drafted > 0


def test_branches_of_a_score_share_the_blocks_of_the_prompt(tiny):
    engine = Engine(tiny, max_num_seqs=1, max_num_batched_tokens=64, cache_tokens=20 * BLOCK_SIZE)
    step = drive(engine)
    prompt = ids_of(0, 100)
    state = RequestState(prompt, None, scores=Scores([ids_of(at, 10) for at in range(1, 6)]))
    engine._loop.submit(state)
    pool, used = engine._scheduler.pool, []
    forward = engine._runner.forward
    engine._runner.forward = lambda inputs: (used.append(pool.num_blocks - pool.num_free), forward(inputs))[1]
    while step():
        pass
    assert used == [7, 7, 7 + 5]  # the prompt, and one block for each continuation
    assert engine._runner.copies == 5
    assert len(engine._runner.passes) == 3
    assert engine.stats().cache_tokens_used == 7 * BLOCK_SIZE


def test_what_does_not_hold_of_a_draft_is_computed_over(tiny):
    engine = Engine(tiny, max_num_seqs=1)
    step = drive(engine)
    request = Request(
        ids_of(0, 30), SamplingOptions(max_tokens=60, **ENDLESS), speculation=Speculation(num_speculative_tokens=5)
    )
    stream = engine.stream(request)
    while step():
        check_books(engine)
    *tokens, last, _ = events_so_far(stream)
    assert [token.id for token in tokens] == [token.id for token in right_answer(tiny, request)[0]]
    stats = engine.stats()
    assert (stats.drafted, stats.accepted) == (last.drafted, last.accepted)
    assert stats.drafted > stats.accepted > 0
    assert stats.steps < 60


@pytest.mark.parametrize("room", [7, 14])
def test_what_is_restored_is_found_and_never_takes_more_than_there_is(tiny, room):
    old = Engine(tiny, max_num_seqs=1)
    step = drive(old)
    texts = [[*ids_of(0, 40), *ids_of(at, 40)] for at in range(1, 4)]
    for text in texts:
        old.stream(Request(text, SamplingOptions(max_tokens=1)))._request.closed = False
        while step():
            pass
    kept = []
    for key, ids, rows, states in old._scheduler.tree.sequences():
        blocks = [block for (block,) in rows]
        data = dict(zip(blocks, old._runner.read(blocks), strict=True))
        kept.append(LoadedSequence(key, ids, rows, data, states))
    assert sorted(each.token_keys for each in kept) == sorted(texts)
    engine = Engine(tiny, max_num_seqs=1, cache_tokens=room * BLOCK_SIZE)
    drive(engine)
    for each in kept:
        engine._restore(each)
        check_books(engine)
    found = [engine._scheduler.tree.match(engine._with_version(CacheKey("", None)), text, 79) for text in texts]
    cached = [len(match.rows) * BLOCK_SIZE + match.num_partial_tokens for match in found]
    assert cached == [79, 79, 79] if room == 14 else max(cached) == 79


# --- the scheduler alone ----------------------------------------------------------------------------------------------

KEY = CacheKey("", None)
ROWS = [(index,) for index in range(13)]


class Bare(Scheduler):
    """A scheduler whose copies are noted, and whose passes are as good as computed."""

    def __init__(self, blocks, seqs=8, batched=64, **options):
        self.copies = []
        super().__init__(seqs, batched, blocks, lambda *pair: self.copies.append(pair), **options)
        self.arrivals = 0

    def submit(self, ids, **fields):
        state = RequestState(ids, None, **fields)
        self.arrivals += 1
        state.set_arrival(self.arrivals)
        self.add(state)
        return state

    def step(self):
        """What one pass computes."""
        self.prepare()
        chunks = list(self.plan({}))
        for chunk in chunks:
            self.mark_computed(chunk.sequence, chunk.num_tokens)
        return [(chunk.sequence, chunk.num_tokens) for chunk in chunks]

    def write(self, state, tokens):
        """The prompt is computed, and this many tokens of the answer are chosen and computed, too."""
        state.decoding = True
        for _ in range(tokens):
            state.append(7)
            self._grow_block_table(state)
            self.mark_computed(state, 1)


def test_prompts_are_queued_by_priority_and_then_by_arrival():
    scheduler = Bare(40, seqs=2)
    states = [scheduler.submit(ids_of(at, 20), priority=priority) for at, priority in enumerate([0, 5, -5, 5])]
    assert scheduler.waiting == [states[1], states[3], states[0], states[2]]
    scheduler.prepare()
    assert scheduler.running == [states[1], states[3]]
    assert scheduler.waiting == [states[0], states[2]]
    assert scheduler.num_preempted == 0


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_what_a_request_leaves_behind_is_its_computed_tokens_or_nothing(keep, caching):
    scheduler = Bare(8, batched=37, enable_prefix_caching=caching)
    state, ids = scheduler.submit(ids_of(1, 70)), ids_of(1, 70)
    assert scheduler.step() == [(state, 37)]
    assert (len(state.block_table), state.num_computed_tokens) == (5, 37)
    scheduler.remove(state, keep=keep)
    assert scheduler.running == scheduler.waiting == state.block_table == []
    left = [ids[:37]] if keep and caching else [ids[:32]] if caching else []
    assert [each.token_keys for each in scheduler.tree.sequences()] == left
    assert scheduler.pool.num_available == 8
    assert scheduler.pool.num_free == 8 - sum(blocks_for(len(found)) for found in left)
    scheduler.remove(state, keep=keep)  # it is there no longer
    assert scheduler.pool.num_available == 8
    scheduler.clear_prefix_cache()
    assert scheduler.pool.num_free == 8


def test_a_request_that_waits_is_removed_from_the_queue():
    scheduler = Bare(8, seqs=1)
    first, second, third = (scheduler.submit(ids_of(at, 20)) for at in range(3))
    scheduler.prepare()
    scheduler.remove(second, keep=True)
    assert (scheduler.running, scheduler.waiting) == ([first], [third])


def test_a_reset_forgets_blocks_and_running_requests_and_keeps_the_queue():
    scheduler = Bare(8, seqs=2)
    first, second, third = (scheduler.submit(ids_of(at, 20)) for at in range(3))
    scheduler.step()
    first.decoding, first.states = True, {0: 1}
    pool = scheduler.pool
    assert scheduler.reset() == [first, second]
    assert (scheduler.running, scheduler.waiting) == ([], [third])
    assert scheduler.pool is not pool
    assert scheduler.pool.num_free == 8
    assert len(scheduler.tree) == 0
    for state in (first, second):
        assert (state.block_table, state.num_computed_tokens, state.num_shared_blocks) == ([], 0, 0)
        assert (state.node, state.states, state.branches) == (None, {}, [])
        assert (state.decoding, state.never_ran) == (False, False)
        scheduler.add(state)
    assert scheduler.step() == [(first, 20), (second, 20)]
    assert len(scheduler.tree) == 2


def test_the_longest_beginning_that_is_cached_is_shared_and_the_rest_of_its_block_copied():
    scheduler = Bare(10)
    ids = ids_of(1, 60)
    first = scheduler.submit(ids[:40])
    scheduler.step()
    table = first.block_table
    scheduler.remove(first, keep=True)
    assert (scheduler.prompt_tokens, scheduler.prefix_hits, scheduler.cached_tokens) == (40, 0, 0)
    second = scheduler.submit(ids)
    second.output = SimpleNamespace(num_cached_tokens=0)
    scheduler.prepare()
    assert second.block_table[:2] == table[:2]
    assert len(second.block_table) == 4
    assert scheduler.copies == [(table[2], second.block_table[2])]
    assert table[2] not in second.block_table
    assert (second.num_computed_tokens, second.num_shared_blocks) == (40, 2)
    assert second.node.blocks == [table[1]]
    assert second.output.num_cached_tokens == 40
    assert (scheduler.prompt_tokens, scheduler.prefix_hits, scheduler.cached_tokens) == (100, 1, 40)
    assert scheduler.pool.ref_counts[table[2]] == 1  # it is idle again
    assert [(chunk.sequence, chunk.num_tokens) for chunk in scheduler.plan({})] == [(second, 20)]


def test_of_a_prompt_that_is_cached_whole_the_last_token_is_computed():
    scheduler = Bare(10)
    scheduler.submit(ids := ids_of(1, 32))
    scheduler.step()
    scheduler.remove(scheduler.running[0], keep=True)
    again = scheduler.submit(ids)
    assert scheduler.step() == [(again, 1)]
    assert scheduler.cached_tokens == 31


def test_where_blocks_are_short_the_block_to_be_copied_from_is_given_up():
    scheduler = Bare(3)
    ids = ids_of(1, 48)
    scheduler.submit(ids[:40])
    scheduler.step()
    scheduler.remove(scheduler.running[0], keep=True)
    state = scheduler.submit(ids)
    scheduler.prepare()
    assert scheduler.running == [state]
    assert (scheduler.copies, state.num_computed_tokens) == ([], 32)
    assert scheduler.pool.ref_counts == [2, 2, 1]


def test_the_last_free_block_takes_the_copy():
    scheduler = Bare(4)
    ids = ids_of(1, 48)
    scheduler.submit(ids[:40])
    scheduler.step()
    scheduler.remove(scheduler.running[0], keep=True)
    state = scheduler.submit(ids)
    scheduler.prepare()
    assert (scheduler.copies, state.num_computed_tokens) == ([(2, 3)], 40)


def test_hits_are_counted_by_request():
    scheduler = Bare(40)
    for _ in range(3):
        scheduler.submit(ids_of(1, 40))
        scheduler.step()
    assert (scheduler.prompt_tokens, scheduler.prefix_hits, scheduler.cached_tokens) == (120, 2, 64)


def test_a_request_that_finds_no_room_holds_nothing():
    scheduler = Bare(4)
    first = scheduler.submit(ids_of(1, 40))
    scheduler.step()
    scheduler.remove(first, keep=True)
    blocker = scheduler.submit(ids_of(2, 20))  # of the four blocks one is free, so it takes one of the idle
    scheduler.step()
    before = scheduler.pool.ref_counts.copy()
    waiting = scheduler.submit([*ids_of(1, 40)[:16], *ids_of(3, 40)])
    scheduler.prepare()
    assert (scheduler.running, scheduler.waiting) == ([blocker], [waiting])
    assert scheduler.pool.ref_counts == before
    assert (waiting.block_table, scheduler.prompt_tokens) == ([], 60)


@pytest.mark.parametrize(("decoding", "admitted"), [(False, True), (True, False)])
def test_each_request_that_decodes_has_a_block_in_reserve(decoding, admitted):
    scheduler = Bare(4)
    first = scheduler.submit(ids_of(1, 32))
    scheduler.step()
    first.decoding = decoding
    second = scheduler.submit(ids_of(2, 32))
    scheduler.prepare()
    assert (second in scheduler.running) == admitted


@pytest.mark.parametrize(("length", "makes_room"), [(64, True), (65, False)])
def test_lower_priorities_make_room_where_that_is_enough_and_the_youngest_first(length, makes_room):
    scheduler = Bare(6)
    high, old, young = (scheduler.submit(ids_of(at, 32), priority=priority) for at, priority in enumerate([3, 1, 1]))
    scheduler.step()
    urgent = scheduler.submit(ids_of(9, length), priority=2)
    scheduler.prepare()
    assert high in scheduler.running
    assert (urgent in scheduler.running) == makes_room
    assert scheduler.num_preempted == (2 if makes_room else 0)
    if makes_room:
        assert scheduler.waiting == [old, young]
    else:
        assert scheduler.waiting == [urgent]


def test_of_lower_priorities_no_more_than_needed_are_preempted():
    scheduler = Bare(6)
    first, second, third = (scheduler.submit(ids_of(at, 32)) for at in range(3))
    scheduler.step()
    urgent = scheduler.submit(ids_of(9, 20), priority=1)
    scheduler.prepare()
    assert (scheduler.running, scheduler.waiting) == ([first, second, urgent], [third])
    assert (third.block_table, third.num_computed_tokens, third.never_ran) == ([], 0, False)
    also = scheduler.submit(ids_of(8, 30), priority=1)
    scheduler.prepare()
    assert (scheduler.running, scheduler.waiting) == ([first, urgent, also], [second, third])
    assert scheduler.num_preempted == 2


def test_a_preempted_request_counts_once():
    scheduler = Bare(6)
    low = scheduler.submit(ids_of(1, 40))
    scheduler.step()
    scheduler._preempt(low)
    assert scheduler.step() == [(low, 1)]
    assert (scheduler.prompt_tokens, scheduler.cached_tokens, scheduler.prefix_hits) == (40, 0, 0)
    assert scheduler.num_preempted == 1


def test_an_answer_grows_by_a_block_when_it_is_full_and_evicts_what_is_idle():
    scheduler = Bare(4)
    old = scheduler.submit(ids_of(1, 20))
    scheduler.step()
    scheduler.remove(old, keep=True)
    state = scheduler.submit(ids_of(2, 30))
    scheduler.step()
    scheduler.write(state, 2)
    assert len(state.block_table) == 2
    assert len(scheduler.tree) == 2 + 2
    scheduler.write(state, 1)
    assert len(state.block_table) == 3
    assert [each.token_keys for each in scheduler.tree.sequences()] == [ids_of(1, 20)[:16], state.token_ids[:32]]


def test_a_draft_gets_blocks_as_far_as_the_answer_may_go():
    for draft, left, blocks in ((40, 100, 5), (40, 18, 3), (2, 100, 2), (3, 100, 3), (40, 4, 3), (40, 3, 2)):
        scheduler = Bare(5)
        state = scheduler.submit(ids_of(1, 30), max_draft_tokens=draft)
        state.output = SimpleNamespace(max_tokens=left + 9, num_tokens=9, num_cached_tokens=0)
        scheduler.step()
        assert len(state.block_table) == 2  # a prompt has no draft
        state.decoding = True
        scheduler.prepare()
        assert len(state.block_table) == blocks, (draft, left)


@pytest.mark.parametrize(("room", "grown"), [(5, 5), (4, 2)])
def test_a_draft_gets_all_of_its_blocks_or_none(room, grown):
    scheduler = Bare(room)
    state = scheduler.submit(ids_of(1, 30), max_draft_tokens=50)
    state.output = SimpleNamespace(max_tokens=1000, num_tokens=0, num_cached_tokens=0)
    scheduler.step()
    state.decoding = True
    scheduler.prepare()
    assert len(state.block_table) == grown


def reading(*lengths, batched, priorities=(0, 0, 0, 0)):
    scheduler = Bare(200, batched=batched)
    states = [
        scheduler.submit(ids_of(at, length), priority=priority)
        for at, (length, priority) in enumerate(zip(lengths, priorities, strict=False))
    ]
    return [(states.index(sequence), count) for sequence, count in scheduler.step()]


def test_the_budget_goes_to_the_shortest_but_a_quarter_to_the_oldest():
    assert reading(100, 30, 20, batched=40) == [(2, 20), (1, 10), (0, 10)]
    assert reading(100, 30, 20, batched=400) == [(2, 20), (1, 30), (0, 100)]
    assert reading(20, 100, 30, batched=40) == [(0, 20), (2, 20)]  # the oldest has had its turn
    assert reading(100, batched=40) == [(0, 40)]
    assert reading(100, 2, 2, batched=3) == [(1, 2), (0, 1)]
    assert reading(30, 30, batched=40) == [(0, 30), (1, 10)]
    assert reading(100, 35, batched=40) == [(1, 30), (0, 10)]


def test_a_higher_priority_is_read_first_however_long():
    assert reading(100, 30, 200, batched=80, priorities=(0, 0, 1)) == [(2, 60), (0, 20)]
    assert reading(20, 30, 50, batched=80, priorities=(0, 0, 1)) == [(2, 50), (0, 20), (1, 10)]


@pytest.mark.parametrize(
    ("batched", "drafted", "read"), [(64, 0, 15), (64, 3, 12), (64, 12, 4), (64, 60, 4), (8, 0, 1), (1, 0, 1)]
)
def test_while_answers_are_written_a_quarter_is_for_prompts(batched, drafted, read):
    scheduler = Bare(40, batched=batched)
    writing = scheduler.submit(ids_of(1, 1))
    scheduler.step()
    scheduler.write(writing, 0)
    writing.token_ids.append(7)
    prompt = scheduler.submit(ids_of(2, 100))
    scheduler.prepare()
    draft = Draft([7] * drafted) if drafted else None
    chunks = list(scheduler.plan({writing: draft} if draft else {}))
    assert [(chunk.sequence, chunk.num_tokens, chunk.draft) for chunk in chunks] == [
        (writing, 1, draft),
        (prompt, read, None),
    ]


def test_who_needs_the_same_block_waits_for_it_and_takes_it_over():
    scheduler = Bare(40, batched=40)
    stem = ids_of(1, 32)
    first, second = (scheduler.submit([*stem, *ids_of(at, 30)]) for at in (2, 3))
    assert scheduler.step() == [(first, 40)]
    assert scheduler.step() == [(first, 22), (second, 18)]
    assert second.block_table[:2] == first.block_table[:2]
    assert second.num_shared_blocks == 3
    assert scheduler.cached_tokens == 32


def test_who_waits_for_a_block_does_not_hold_up_the_others():
    scheduler = Bare(40, batched=100)
    stem = ids_of(1, 32)
    first = scheduler.submit([*stem, *ids_of(2, 30)])
    scheduler.submit([*stem, *ids_of(3, 30)])
    other = scheduler.submit(ids_of(4, 70))
    assert scheduler.step() == [(first, 62), (other, 38)]


def test_of_equal_prompts_the_last_block_is_computed_by_each():
    scheduler = Bare(40)
    first, second = (scheduler.submit(ids_of(1, 32)) for _ in range(2))
    assert scheduler.step() == [(first, 32)]
    assert scheduler.step() == [(second, 16)]  # the logits after its last token are wanted
    scheduler = Bare(40)
    first, second, third = (scheduler.submit(ids_of(1, 40)) for _ in range(3))
    assert scheduler.step() == [(first, 40)]
    assert scheduler.step() == [(second, 8), (third, 8)]  # an end is nothing to wait for


def test_a_block_that_two_computed_is_held_once():
    scheduler = Bare(40, batched=24)
    first, second = (scheduler.submit(ids_of(1, 40)) for _ in range(2))
    assert scheduler.step() == [(first, 24)]
    assert scheduler.step() == [(first, 16), (second, 8)]  # the first is within its second block, so no claim is left
    assert first.block_table[1] != second.block_table[1]
    assert scheduler.step() == [(second, 16)]
    assert first.block_table[:2] == second.block_table[:2]
    assert scheduler.pool.num_free == 40 - 2 - 2


def test_without_prefix_caching_nobody_waits_and_nothing_is_kept():
    scheduler = Bare(40, batched=100, enable_prefix_caching=False)
    first, second = (scheduler.submit(ids_of(1, 40)) for _ in range(2))
    assert scheduler.step() == [(first, 40), (second, 40)]
    assert set(first.block_table).isdisjoint(second.block_table)
    assert (len(scheduler.tree), scheduler.cached_tokens) == (0, 0)


def scoring(scheduler, prompt, *lengths, **fields):
    """A request whose prompt is computed, with continuations of these lengths."""
    scores = Scores([ids_of(at, length) for at, length in enumerate(lengths)])
    state = scheduler.submit(prompt, scores=scores, **fields)
    while state.num_pending_tokens:
        scheduler.step()
    scores.has_prompt_logits, scores.waiting = True, deque(range(len(lengths)))
    return state


def test_as_many_continuations_are_begun_as_a_pass_takes_rows():
    scheduler = Bare(80)
    half = MAX_ROWS // 2 + 1  # the last token of a continuation is not computed
    state = scoring(scheduler, ids_of(9, 40), half, half, half, 3)
    scheduler.prepare()
    assert [branch.index for branch in state.branches] == [0, 1]
    assert state.scores.waiting == deque([2, 3])
    scheduler.prepare()
    assert len(state.branches) == 2
    for branch in state.branches:
        assert branch.token_ids == [*ids_of(9, 40), *ids_of(branch.index, half)[:-1]]
        assert branch.block_table[:2] == state.block_table[:2]
        assert len(branch.block_table) == blocks_for(40 + half - 1)
        assert (state.block_table[2], branch.block_table[2]) in scheduler.copies
        assert branch.num_computed_tokens == 40
    assert len(scheduler.copies) == 2
    assert scheduler.step() == [(branch, half - 1) for branch in state.branches]
    scheduler.drop_branch(state.branches[0])
    scheduler.prepare()
    assert [branch.index for branch in state.branches] == [1, 2, 3]  # the second is computed and takes no rows
    scheduler.drop_branch(state.branches[0])
    assert scheduler.step() == [(state.branches[1], 2), (state.branches[0], half - 1)]
    scheduler.remove(state, keep=True)
    assert scheduler.pool.num_available == 80


def test_rows_of_continuations_in_one_pass_are_bounded_over_all_requests():
    scheduler = Bare(80, batched=1000)
    states = [scoring(scheduler, ids_of(at, 32), MAX_ROWS - 10) for at in (8, 9)]
    scheduler.drop_branch(states[0].branches[0])  # it was begun while the other prompt was computed
    states[0].scores.waiting.append(0)
    prompt = scheduler.submit(ids_of(7, 100))
    assert scheduler.step() == [
        (states[0].branches[0], MAX_ROWS - 11),
        (states[1].branches[0], 11),
        (prompt, 100),
    ]
    assert scheduler.copies == []  # the prompts end with their blocks


@pytest.mark.parametrize(("room", "begun"), [(3, 0), (4, 1), (5, 2), (6, 2)])
def test_continuations_are_begun_as_far_as_there_are_blocks(room, begun):
    scheduler = Bare(room)
    state = scoring(scheduler, ids_of(9, 40), 5, 5)
    scheduler.prepare()
    assert len(state.branches) == begun
    assert scheduler.running == [state]


def test_a_continuation_makes_room_for_an_older_request_and_begins_again_later():
    scheduler = Bare(6)
    writer = scheduler.submit(ids_of(1, 16))
    scheduler.step()
    state = scoring(scheduler, ids_of(9, 32), 9, 9, 9)
    scheduler.prepare()
    assert [branch.index for branch in state.branches] == [0, 1, 2]
    scheduler.write(writer, 1)
    assert [branch.index for branch in state.branches] == [0, 1]
    assert state.scores.waiting == deque([2])
    assert len(writer.block_table) == 2
    assert (scheduler.running, scheduler.num_preempted) == ([writer, state], 0)
    scheduler.write(writer, 16)
    scheduler.write(writer, 16)
    assert ([branch.index for branch in state.branches], state.scores.waiting) == ([], deque([0, 1, 2]))
    scheduler.write(writer, 16)
    assert scheduler.running == [writer]
    assert scheduler.num_preempted == 1
    assert state.scores.waiting == deque([0, 1, 2])


def test_a_preempted_score_begins_all_of_its_continuations_again():
    scheduler = Bare(20)
    state = scoring(scheduler, ids_of(9, 40), 9, 9, 9)
    scheduler.prepare()
    scheduler._preempt(state)
    assert sorted(state.scores.waiting) == [0, 1, 2]
    assert state.branches == []
    assert scheduler.pool.num_available == 20
    assert scheduler.step() == [(state, 1)]


def test_the_first_continuation_preempts_the_younger_and_the_others_do_not():
    scheduler = Bare(6)
    state = scoring(scheduler, ids_of(9, 32), 9, 9, 9)
    younger = scheduler.submit(ids_of(1, 60))
    scheduler.step()
    assert scheduler.running == [state]  # it needed all four, and had them
    assert younger in scheduler.waiting
    assert len(state.branches) == 3


def test_of_a_sequence_that_is_restored_only_what_is_missing_is_filled():
    scheduler, filled = Bare(6), []
    ids = ids_of(1, 40)
    scheduler.restore(KEY, ids, ROWS[:3], {}, lambda index, block: filled.append((index, block)))
    assert filled == [(0, 0), (1, 1), (2, 2)]
    assert list(scheduler.tree.sequences()) == [(KEY, ids, [(0,), (1,), (2,)], {})]
    assert list(scheduler.pool.idle) == [2, 1, 0]
    other = [*ids[:16], *ids_of(2, 30)]
    scheduler.restore(KEY, other, ROWS[:3], {}, lambda index, block: filled.append((index, block)))
    assert filled[3:] == [(1, 3), (2, 4)]
    assert [each.token_keys for each in scheduler.tree.sequences()] == [ids, other]
    assert scheduler.pool.num_available == 6
    scheduler.restore(KEY, ids_of(3, 200), ROWS, {}, lambda index, block: filled.append((index, block)))
    assert [index for index, _ in filled[5:]] == [0, 1, 2, 3, 4, 5]  # as far as there are blocks
    assert [each.token_keys for each in scheduler.tree.sequences()] == [ids_of(3, 200)[:96]]
    assert scheduler.pool.num_available == 6


def test_a_restore_that_fails_holds_nothing():
    scheduler = Bare(6)

    def fill(index, block):
        if index == 1:
            raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        scheduler.restore(KEY, ids_of(1, 40), ROWS[:3], {}, fill)
    assert [each.token_keys for each in scheduler.tree.sequences()] == [ids_of(1, 40)[:16]]
    assert scheduler.pool.num_available == 6
