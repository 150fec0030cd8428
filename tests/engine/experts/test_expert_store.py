"""Experts from a file: logits bit-identical to those with all in memory, the simulator's counts, errors, bounds."""

import gc
import sys
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engine.experts.mixture import EXPERTS, LAYERS, SIZE, VOCAB, model_of

from pippin.core import native
from pippin.core.errors import CorruptedFile, InvalidArgument, NotEnoughMemory
from pippin.engine.expert_recording import ExpertRecorder
from pippin.engine.experts import simulate
from pippin.engine.experts.eviction import POLICIES, policy
from pippin.engine.experts.expert_reader import ExpertReader
from pippin.engine.experts.expert_store import ExpertStore
from pippin.engine.experts.simulator import Prefetch
from pippin.engine.model_runner import BLOCK_SIZE, ModelInput
from pippin.engine.runners.native_runner import NativeRunner
from pippin.language.stored_experts import FileExpert, FileMatrix
from pippin.nn.expert_mask import ExpertMask

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")

ONLINE = [name for name in POLICIES if name != "belady"]


IDS = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(1)).tolist()
PASSES = [(IDS[:40], 0), *(([each], at) for at, each in enumerate(IDS[40:], 40))]


def work(ids, held):
    return ModelInput(ids, held, list(range(-(-(held + len(ids)) // BLOCK_SIZE))), range(len(ids)))


def runner_with(model, stored, room, name="lru", **options):
    runner = NativeRunner(model, 8)
    place = runner.place_expert
    store = ExpertStore(stored, room * SIZE, policy(name), place, **options)
    runner.fetch_experts(store)
    return runner, store


@pytest.fixture
def expected(module, tiny):
    """Logits of all passes with every expert in memory, and the trace."""
    runner = NativeRunner(model_of(module, tiny, absent=False), 8)
    recorder = ExpertRecorder("mixture", np.full((LAYERS, EXPERTS), SIZE), depth=2)
    runner.fetch_experts(recorder)
    return [runner.forward([work(*each)])[0] for each in PASSES], recorder.trace()


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize(
    ("room", "prefetch"), [(1, Prefetch()), (2, Prefetch()), (7, Prefetch(2, count=3, most_bytes=2 * SIZE))]
)
def test_logits_are_bit_identical_and_counts_are_the_simulators(module, tiny, stored, expected, name, room, prefetch):
    runner, store = runner_with(model_of(module, tiny, absent=True), stored, room, name, prefetch=prefetch)
    for each, logits in zip(PASSES, expected[0], strict=True):
        assert torch.equal(runner.forward([work(*each)])[0], logits)
    store.close()
    simulated = simulate(expected[1], capacity=room * SIZE, eviction=name, prefetch=prefetch).stats
    assert store.stats.totals() == simulated.totals()
    for counted in ("hits", "first", "unpredicted", "collisions", "prefetches", "wasted", "bytes_read"):
        np.testing.assert_array_equal(getattr(store.stats, counted), getattr(simulated, counted))
    assert store.stats.peak <= room * SIZE


def test_bytes_read_are_those_of_the_misses(module, tiny, stored):
    runner, store = runner_with(model_of(module, tiny, absent=True), stored, 3)
    runner.forward([work(IDS[:1], 0)])
    store.close()
    assert store.stats.misses.sum() == 2 * LAYERS
    blocks = 0
    for layer, expert in [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]:
        if (layer, expert) in store.cache.cached() or store.cache._seen[layer, expert]:
            for part in stored[layer][expert].parts.values():
                blocks += -(-(part.offset + part.nbytes) // 4096) - part.offset // 4096
    assert store.bytes_read == 4096 * blocks


def test_the_neighbors_of_a_sequence_change_nothing(module, tiny, stored):
    """Alone and beside another sequence, whose experts come and go in the same passes."""
    ids = [IDS[:20], IDS[20:45]]
    tables = [[0, 1], [2, 3]]

    def inputs(index):
        return ModelInput(ids[index], 0, tables[index], range(len(ids[index])))

    alone, _ = runner_with(model_of(module, tiny, absent=True), stored, 2)
    both, _ = runner_with(model_of(module, tiny, absent=True), stored, 2)
    (expected,) = alone.forward([inputs(0)])
    assert torch.equal(both.forward([inputs(1), inputs(0)])[1], expected)


def test_a_file_that_shrinks_ends_the_pass_with_an_error_and_the_next_one_works(module, tiny, stored, tmp_path):
    path = tmp_path / "copy.bin"
    content = stored[0][0].parts["gate"].path.read_bytes()
    path.write_bytes(content)
    moved = [
        [FileExpert({name: replace(part, path=path) for name, part in each.parts.items()}) for each in layer]
        for layer in stored
    ]
    runner, store = runner_with(model_of(module, tiny, absent=True), moved, 4)
    path.write_bytes(content[:100])
    with pytest.raises(CorruptedFile, match=r"copy.bin ends at byte"):
        runner.forward([work(IDS[:5], 0)])
    path.write_bytes(content)
    whole = NativeRunner(model_of(module, tiny, absent=False), 8)
    assert torch.equal(runner.forward([work(IDS[:5], 0)])[0], whole.forward([work(IDS[:5], 0)])[0])
    store.close()


def test_an_expert_that_left_before_its_turn_and_is_wanted_again_is_read_once(stored, monkeypatch):
    go = threading.Event()
    read, seen = ExpertReader._read, []

    def slow(reader, job):
        go.wait()
        seen.append((job.layer, job.expert))
        read(reader, job)

    monkeypatch.setattr(ExpertReader, "_read", slow)
    placed = []
    store = ExpertStore(stored, 2 * SIZE, policy("lru"), lambda *place: placed.append(place[:2]))
    store.fetch(0, 0, 0, ahead=True)  # the reader is busy with it
    store.fetch(1, 5, 1, ahead=True)
    store.drop(1, 5, 1)
    store.fetch(2, 2, 2, ahead=True)  # which takes the memory of the one that left
    store.fetch(1, 5, 1, ahead=True)
    store.cache._row[1, 5] = 1
    threading.Timer(0.2, go.set).start()
    store.wait(1, [5])
    store.close()
    assert placed == [(1, 5)]
    assert seen.count((1, 5)) == 1


def test_the_reader_ends_with_the_store(module, tiny, stored):
    before = threading.active_count()
    runner, store = runner_with(model_of(module, tiny, absent=True), stored, 4)
    assert threading.active_count() == before + 1
    store.close()
    assert threading.active_count() == before
    with pytest.raises(InvalidArgument, match="closed"):
        runner.forward([work(IDS[:5], 0)])


def test_an_expert_that_nobody_brought_is_not_computed_with(module, tiny):
    runner = NativeRunner(model_of(module, tiny, absent=True), 8)
    with pytest.raises(InvalidArgument, match="experts that are in a file, and nothing fetches them"):
        runner.forward([work(IDS[:5], 0)])


def test_only_the_engine_computes_with_absent_weights(module, tiny):
    model = model_of(module, tiny, absent=True)
    with pytest.raises(InvalidArgument, match="only the engine brings them"), torch.no_grad():
        model.module(torch.tensor([IDS[:5]]))


def test_too_little_memory_names_the_least(module, tiny, stored):
    with pytest.raises(NotEnoughMemory, match=f"{SIZE:,} bytes, the largest"):
        ExpertStore(stored, SIZE - 1, policy("lru"), lambda *_: None)


def test_prefetching_needs_a_bound(stored):
    with pytest.raises(InvalidArgument, match="most_bytes"):
        ExpertStore(stored, 4 * SIZE, policy("lru"), lambda *_: None, prefetch=Prefetch(1))


@pytest.mark.parametrize("forget", [False, True])
def test_the_reader_ends_with_a_store_that_is_forgotten(stored, forget):
    def readers():
        return sum(thread.name == "pippin-experts" for thread in threading.enumerate())

    gc.collect()  # the stores of other tests
    assert not readers()
    store = ExpertStore(stored, 4 * SIZE, policy("lru"), lambda *_: None)
    if forget:
        del store
        gc.collect()
    assert readers() == (not forget)


def test_a_store_that_its_own_reader_finds_forgotten_ends_as_well(stored, monkeypatch):
    failed, forgotten, collected = [], threading.Event(), threading.Event()

    def pack(*_):
        forgotten.wait(10)
        gc.collect()
        collected.set()

    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    monkeypatch.setattr(FileMatrix, "pack", pack)
    store = ExpertStore(stored, 4 * SIZE, policy("lru"), lambda *_: None)
    reader, ended = store._reader, weakref.ref(store)
    store.fetch(0, 0, 0, ahead=False)
    del store
    forgotten.set()
    assert collected.wait(10)
    reader._thread.join(10)
    assert ended() is None
    assert not failed
    assert not reader._thread.is_alive()
    assert [file.closed for file in reader.files.values()] == [True]


def test_what_experts_may_take_changes_between_passes_and_within(module, tiny, stored, expected):
    most = 0

    def share(tokens, held):
        nonlocal most
        most = next(rooms) if tokens else most - 1 if most > 3 else most
        return most * SIZE

    rooms = iter([7, 7, 2, 2, 24, *[5] * len(PASSES)])
    runner, store = runner_with(model_of(module, tiny, absent=True), stored, 24, share=share)
    for each, logits in zip(PASSES, expected[0], strict=True):
        assert torch.equal(runner.forward([work(*each)])[0], logits)
        assert store.cache.capacity == most * SIZE
    with pytest.raises(NotEnoughMemory):
        store.cache.resize(SIZE - 1)


def test_the_first_pass_begins_with_what_was_used_most(module, tiny, stored):
    runner, store = runner_with(model_of(module, tiny, absent=True), stored, 4)
    for each in PASSES:
        runner.forward([work(*each)])
    most = store.cache.most_used()
    assert sorted(most) == [tuple(each) for each in np.argwhere(store.cache._seen)]
    store.close()
    again, warmed = runner_with(model_of(module, tiny, absent=True), stored, 24)
    warmed.warm(most[:6])
    again.forward([work(*PASSES[0])])
    assert warmed.stats.prefetches.sum() == 6
    assert warmed.stats.hits.sum() == 6


def test_a_damaged_expert_is_refused(module, tiny, stored):
    wrong = [[replace(each, checksum=1) for each in layer] for layer in stored]
    runner, _ = runner_with(model_of(module, tiny, absent=True), wrong, 4)
    with pytest.raises(CorruptedFile, match="its checksum is"):
        runner.forward([work(IDS[:5], 0)])


def test_experts_that_a_mask_forbids_are_not_predicted(module, tiny):
    allowed = torch.ones(LAYERS, EXPERTS, dtype=torch.bool)
    allowed[:, :3] = False
    masked = ModelInput(IDS[:10], 0, [0], (9,), experts=ExpertMask(allowed))
    free = ModelInput(IDS[10:20], 0, [1], (9,))
    for inputs, forbidden in [([masked], True), ([masked, free], False)]:
        runner = NativeRunner(model_of(module, tiny, absent=False), 8)
        recorder = ExpertRecorder("mixture", np.full((LAYERS, EXPERTS), SIZE), depth=1)
        runner.fetch_experts(recorder)
        runner.forward(inputs)
        predicted = recorder.trace().predicted[0, 0, 1:]
        assert (predicted[:, 3:] > 0).all()
        assert (predicted[:, :3] == 0).all() == forbidden
