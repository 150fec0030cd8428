"""Random schedules on a runner that notices every wrong block: all answers right, nothing lost, nobody starved."""

import random
import threading
from dataclasses import dataclass, field

import pytest

from pippin.core.errors import Overloaded
from pippin.engine.constraint import Grammar
from pippin.engine.engine import Engine
from pippin.engine.request import Finished, Request
from pippin.engine.runner import BLOCK
from pippin.engine.sampling import SamplingOptions
from pippin.engine.scores import Scores
from pippin.engine.sequences import END, Events, Job, blocks_for
from pippin.engine.speculation import Speculation
from pippin.engine.speculation.drafts import Draft

from .fake import FakeRunner, drive, events_so_far, logits_after, right_answer, right_score


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr("pippin.engine.engine.make_runner", FakeRunner)
    monkeypatch.setattr("pippin.engine.engine.runner_class", lambda model: FakeRunner)


@pytest.fixture(autouse=True)
def guesses(monkeypatch):
    """Drafts that often hold, and often do not; looking up what was said before never helps against a hash."""

    def propose(self, ids, room, place=None):
        room = min(room, self.limit - self.count - 1)
        if self._guess is None or room < 1:
            return None
        rng, ids = random.Random(len(ids)), list(ids)
        start = len(ids)
        for _ in range(rng.randint(0, room)):
            best = int(logits_after(ids).argmax())
            ids.append(best if rng.random() < 0.7 else rng.randrange(97, 123))
        tokens = ids[start:]
        if self.constraint is not None and tokens:
            tokens = tokens[: self.constraint.reach(tokens)]
        return Draft(tokens) if tokens else None

    monkeypatch.setattr("pippin.engine.writer.Writer.propose", propose)


def check_books(engine):
    """Free and held blocks are all blocks, and every hold is somebody's."""
    scheduler = engine._scheduler
    pool, tree = scheduler.pool, scheduler.tree
    holds = [0] * pool.count
    for job in scheduler.active:
        for line in (job, *job.branches):
            assert len(set(line.table)) == len(line.table) >= blocks_for(line.held)
            assert line.held <= len(line.ids)
            for block in line.table:
                holds[block] += 1
    for block in tree._nodes:
        holds[block] += 1
    assert pool.counts == holds
    assert sorted(pool._free) == [block for block, count in enumerate(holds) if not count]
    assert pool.free + sum(count > 0 for count in holds) == pool.count
    assert sorted(pool.idle) == sorted(block for block in tree._nodes if holds[block] == 1)
    for block, node in tree._nodes.items():
        assert node.block == block
        up = node.parent
        assert (up.children if len(node.tokens) == BLOCK else up.tails)[node.tokens] is node
        # whoever holds a block holds what comes before it, so that ends are given up before beginnings
        assert up.parent is None or pool.counts[up.block] >= (2 if pool.counts[block] > 1 else 1)
    assert all(not job.table and not job.held for job in scheduler.waiting)


@dataclass
class Caller:
    request: Request
    stream: Events
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


def random_request(rng, stems):
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
        speculation=rng.choice([None, None, Speculation(tokens=rng.randint(1, 6))]),
    )


def score_job(engine, rng, request):
    continuations = [rng.choices(range(97, 100), k=rng.randint(1, 20)) for _ in range(rng.randint(1, 4))]
    job = Job(
        request.prompt,
        engine.model.adapter(request.adapter),
        scores=Scores(continuations),
        owner=request.owner,
        priority=request.priority,
    )
    engine._loop.submit(job)
    return job, continuations


@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_schedules(with_adapter, part):
    for seed in range(100 * part, 100 * part + 100):
        one_schedule(with_adapter, seed)


def one_schedule(tiny, seed):
    rng = random.Random(seed)
    blocks = rng.randint(7, 14)
    engine = Engine(
        tiny,
        slots=rng.randint(1, 4),
        queue=3,
        chunk=rng.choice([1, 5, 16, 40]),
        cache_tokens=blocks * BLOCK,
        reuse=rng.random() < 0.8,
    )
    runner, pool = engine._runner, engine._scheduler.pool
    runner.may_write = lambda block: pool.counts[block] == 1 and not pool._kept[block]
    step = drive(engine)
    stems = [rng.choices(range(97, 123), k=40) for _ in range(2)]
    callers, scored, left = [], [], rng.randint(1, 7)
    while left or engine._loop.jobs:
        if left and (rng.random() < 0.3 or not engine._loop.jobs):
            left -= 1
            request = random_request(rng, stems)
            try:
                if rng.random() < 0.2:
                    scored.append((request, *score_job(engine, rng, request)))
                else:
                    leave = rng.choice([None, None, 0, 1, 5, 20])
                    stream = engine.stream(request)
                    callers.append(Caller(request, stream, leave, rng.choice(["close", "event"]), request.cancel))
            except Overloaded:
                assert len(engine._loop.jobs) == engine._scheduler.slots + 3
        step()
        for caller in callers:
            caller.listen()
        if rng.random() < 0.05 and engine._scheduler.active:
            engine._scheduler._preempt(rng.choice(engine._scheduler.active))
        check_books(engine)
    for caller in callers:
        expected = [token.id for token in right_answer(tiny, caller.request, engine.context_size)[0]]
        assert not isinstance(caller.last, Exception), (seed, caller.last)
        if caller.last == "closed" or caller.last.reason == "cancelled":
            assert caller.leave is not None
            assert caller.ids == expected[: len(caller.ids)]
        else:
            assert caller.ids == expected
    for request, job, continuations in scored:
        adapter = tiny.adapter(request.adapter)
        assert job.events.get() == len(request.prompt)
        expected = [right_score(request.prompt, each, adapter) for each in continuations]
        assert job.scores.sums == pytest.approx(expected)
    stats = engine.stats()
    assert stats.finished + stats.cancelled == stats.requests == len(callers) + len(scored)
    assert stats.failed == 0
    assert stats.blocks_free + stats.blocks_cached == blocks
    assert engine._scheduler.reuse or stats.blocks_free == blocks
    engine.close()


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
        order += [at for at, each in enumerate(streams) if each._job not in engine._loop.jobs and at not in order]
        if len(order) == len(streams):
            return order
    raise AssertionError("some never ended")


def test_a_short_prompt_overtakes_a_long_one(tiny):
    engine = Engine(tiny, slots=2, chunk=32)
    drive(engine)
    assert run(engine, [start(engine, 500), start(engine, 40)]) == [1, 0]


def test_a_long_prompt_is_not_starved_by_short_ones_that_keep_coming(tiny):
    engine = Engine(tiny, slots=3, chunk=32, queue=10_000)
    step = drive(engine)
    long, seen = start(engine, 800), 0
    while long._job in engine._loop.jobs:
        while len(engine._loop.jobs) < 4:  # always a short one in each other place, and one that waits
            seen += 1
            engine.stream(Request(ids_of(10_000 + seen, 64), SamplingOptions(max_tokens=1)))._job.closed = False
        step()
    # a quarter of the budget is the oldest prompt's
    assert 90 <= engine.stats().steps <= 108
    assert seen > 30
    for job in list(engine._loop.jobs):
        job.closed = True
    step()


def test_answers_go_on_while_prompts_are_read(tiny):
    engine = Engine(tiny, slots=4, chunk=64)
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
    engine = Engine(tiny, slots=1, chunk=32)
    drive(engine)
    streams = [start(engine, 40 + at, priority=priority) for at, priority in enumerate([0, -5, 3, 0, 10])]
    assert run(engine, streams) == [4, 2, 0, 3, 1]
    assert engine.stats().preempted == 0


def test_a_higher_priority_displaces_a_lower_one_that_loses_nothing(tiny):
    engine = Engine(tiny, slots=1, chunk=64)
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
    engine = Engine(tiny, slots=3, chunk=64, cache_tokens=9 * BLOCK)
    step = drive(engine)
    streams = [start(engine, 20 + at, answer=60, priority=priority) for at, priority in enumerate([0, 1, 0])]
    preempted = []
    preempt = engine._scheduler._preempt
    engine._scheduler._preempt = lambda job: (preempted.append(job), preempt(job))[1]
    assert run(engine, streams) == [1, 0, 2]
    assert preempted[0] is streams[2]._job
    assert streams[1]._job not in preempted
    for at, stream in enumerate(streams):
        assert [event.id for event in events_so_far(stream)[:-2]] == [t.id for t in right(tiny, 20 + at, 60)]
    step()


def test_nobody_makes_room_for_a_guess(tiny):
    engine = Engine(tiny, slots=2, chunk=64, cache_tokens=5 * BLOCK)
    step = drive(engine)
    guessing = Request(ids_of(0, 4), SamplingOptions(max_tokens=60, **ENDLESS), speculation=Speculation(tokens=64))
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
    engine = Engine(tiny, slots=1, chunk=64, cache_tokens=20 * BLOCK)
    step = drive(engine)
    prompt = ids_of(0, 100)
    job = Job(prompt, None, scores=Scores([ids_of(at, 10) for at in range(1, 6)]))
    engine._loop.submit(job)
    pool, used = engine._scheduler.pool, []
    forward = engine._runner.forward
    engine._runner.forward = lambda works: (used.append(pool.count - pool.free), forward(works))[1]
    while step():
        pass
    assert used == [7, 7, 7 + 5]  # the prompt, and one block for each continuation
    assert engine._runner.copies == 5
    assert len(engine._runner.passes) == 3
    assert engine.stats().cache_tokens_used == 7 * BLOCK


def test_what_does_not_hold_of_a_draft_is_computed_over(tiny):
    engine = Engine(tiny, slots=1)
    step = drive(engine)
    request = Request(ids_of(0, 30), SamplingOptions(max_tokens=60, **ENDLESS), speculation=Speculation(tokens=5))
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
    old = Engine(tiny, slots=1)
    step = drive(old)
    texts = [[*ids_of(0, 40), *ids_of(at, 40)] for at in range(1, 4)]
    for text in texts:
        old.stream(Request(text, SamplingOptions(max_tokens=1)))._job.closed = False
        while step():
            pass
    kept = [(key, ids, old._runner.read(blocks)) for key, ids, blocks in old._scheduler.tree.sequences()]
    assert sorted(ids for _, ids, _ in kept) == sorted(texts)
    engine = Engine(tiny, slots=1, cache_tokens=room * BLOCK)
    drive(engine)
    for each in kept:
        engine._restore(*each)
        check_books(engine)
    found = [engine._scheduler.tree.match(("", None), text, 79) for text in texts]
    cached = [len(match.blocks) * BLOCK + match.tokens for match in found]
    assert cached == [79, 79, 79] if room == 14 else max(cached) == 79
