"""Streams: every item once an epoch, the same again from any cursor, rows that hold exactly what went in."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.core.errors import InvalidArgument
from pippin.data.corpus import TokenizedPiece
from pippin.data.packing import Packed, best_fit, token_batches
from pippin.data.records import TrainingRecord
from pippin.data.streams import Buffered, Mapped, Mixture, Shuffled
from pippin.data.token_batches import IGNORE


def piece(start, size):
    ids = np.arange(start, start + size)
    return TokenizedPiece(ids, ids + 1000)


def pieces(sizes):
    starts = np.cumsum([0, *sizes])
    return [piece(int(start), size) for start, size in zip(starts, sizes, strict=False)]


def shuffled(epochs=None, seed=0):
    return Shuffled(range(11), 3, seed=seed, epochs=epochs)


def buffered(epochs=None, seed=0):
    return Buffered(lambda: iter(range(23)), 5, seed=seed, epochs=epochs)


def mapped(epochs=None, seed=0):
    return Mapped(buffered(epochs, seed), lambda item: [item] * (item % 3))


def mixed(epochs=None, seed=0):
    return Mixture({"a": (shuffled(epochs, seed), 1.0), "b": (buffered(epochs, seed), 2.5)}, seed=seed)


def rows(epochs=None, seed=0):
    sizes = [7, 3, 8, 1, 5, 2, 8, 4] * 30
    order = Mapped(Shuffled(pieces(sizes), 1, seed=seed, epochs=epochs), iter)
    return Packed(order, 8, 3, seed=seed)


STREAMS = [shuffled, buffered, mapped, mixed, rows]


def plain(item):
    if hasattr(item, "ids"):
        return item.ids.tolist(), item.targets.tolist(), item.documents
    return item


@pytest.mark.parametrize("make", STREAMS)
@settings(deadline=None, max_examples=15)
@given(taken=st.integers(0, 60), seed=st.integers(0, 3))
def test_a_stream_goes_on_from_its_cursor_to_the_item(make, taken, seed):
    first = make(seed=seed)
    list(itertools.islice(first, taken))
    cursor = json.loads(json.dumps(first.state_dict()))
    again = make(seed=seed)
    again.load_state_dict(cursor)
    whole = map(plain, itertools.islice(make(seed=seed), taken, taken + 20))
    assert list(map(plain, itertools.islice(again, 20))) == list(whole)


@pytest.mark.parametrize("make", STREAMS)
def test_a_finite_stream_ends_and_begins_again(make):
    stream = make(epochs=2)
    once = list(map(plain, stream))
    assert list(map(plain, stream)) == once
    assert once != list(map(plain, make(epochs=2, seed=1)))
    cursor = None
    for _ in stream:
        cursor = stream.state_dict()
    stream.load_state_dict(cursor)  # after the last item, before the end was seen
    assert list(stream) == []


@pytest.mark.parametrize("make", [shuffled, buffered])
def test_each_epoch_has_every_item_once_in_an_order_of_its_own(make):
    items = list(itertools.chain.from_iterable(make(epochs=2))) if make is shuffled else list(make(epochs=2))
    half = len(items) // 2
    assert sorted(items[:half]) == sorted(items[half:]) == list(range(half))
    assert items[:half] != items[half:]


def test_a_mixture_keeps_its_weights_and_outlives_its_shorter_streams():
    streams = {"a": (Shuffled(["a"], 1), 3.0), "b": (Shuffled(["b"], 1), 1.0)}
    drawn = Counter(item for [item] in itertools.islice(Mixture(streams, seed=5), 4000))
    assert abs(drawn["a"] / 4000 - 0.75) < 4 * (0.75 * 0.25 / 4000) ** 0.5
    short = {"a": (Shuffled(range(3), 1, epochs=1), 9.0), "b": (Shuffled(range(10, 40), 1, epochs=1), 1.0)}
    assert sorted(item for [item] in Mixture(short)) == [*range(3), *range(10, 40)]


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 16), min_size=1, max_size=300), count=st.integers(1, 5))
def test_rows_hold_every_piece_once_and_whole(sizes, count):
    given_pieces = pieces(sizes)
    stream = Packed(Mapped(Shuffled(given_pieces, 1, epochs=1), iter), 16, count, padding=7)
    seen = []
    for batch in stream:
        counts = batch.documents or (16,) * len(batch.ids)
        ends = set(np.cumsum(counts).tolist())
        assert all(end in ends for end in range(16, batch.ids.numel() + 1, 16))  # none crosses a row
        for ids, targets in zip(batch.ids.view(-1).split(counts), batch.targets.view(-1).split(counts), strict=True):
            if (targets == IGNORE).all():
                assert (ids == 7).all()
            else:
                assert torch.equal(targets, ids + 1000)
                seen.append((int(ids[0]), len(ids)))
    assert sorted(seen) == [(int(p.ids[0]), len(p)) for p in given_pieces]


def test_little_of_the_rows_is_padding():
    sizes = np.random.default_rng(0).integers(1, 65, 3000).tolist()
    batches = list(Packed(Mapped(Shuffled(pieces(sizes), 1, epochs=1), iter), 64, 4))
    used = sum(sizes) / sum(batch.ids.numel() for batch in batches)
    assert used > 0.97


@given(st.lists(st.integers(1, 12), max_size=40))
def test_best_fit_needs_at_most_eleven_ninths_of_the_rows_there_could_be(sizes):
    packed = best_fit(pieces(sizes), 12)
    assert all(sum(map(len, row)) <= 12 for row in packed)
    # the classical bound of best-fit decreasing, with the total in place of the unknown best
    least = max(-(-sum(sizes) // 12), sum(size > 6 for size in sizes))
    assert sum(map(len, itertools.chain.from_iterable(packed))) == sum(sizes)
    assert len(packed) <= 11 * max(least, 1) / 9 * 1.5 + 1


@pytest.fixture
def files(tmp_path):
    for name in range(4):
        lines = [json.dumps({"text": f"file {name} line {line} " + "x" * (7 * line)}) for line in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("buffer", [None, 1, 7])
def test_all_text_arrives_whatever_the_buffer(files, tiny, buffer):
    batches = token_batches(
        files, tiny.tokenizer, max_length=256, batch_size=2, epochs=1, buffer=buffer, show_progress=False
    )
    found = []
    for batch in batches:
        counts = batch.documents or (256,) * len(batch.ids)
        parts = zip(batch.ids.view(-1).split(counts), batch.targets.view(-1).split(counts), strict=True)
        for ids, targets in parts:
            if targets[0] != IGNORE:
                found.append(tiny.tokenizer.decode([*ids.tolist(), int(targets[-1])]))
                assert torch.equal(targets[:-1], ids[1:])
                assert targets[-1] == 256
    expected = [f"file {name} line {line} " + "x" * (7 * line) for name in range(4) for line in range(9)]
    assert sorted(found) == sorted(expected)


def test_what_was_tokenized_is_not_tokenized_again(files, tiny, monkeypatch):
    batches = token_batches(files, tiny.tokenizer, max_length=64, batch_size=2, seed=3, show_progress=False)
    monkeypatch.setattr(type(tiny.tokenizer), "encode", lambda *_: pytest.fail("tokenized again"))
    assert len(list(itertools.islice(batches, 100))) == 100


def test_records_do_as_well_as_files(tiny):
    records = [TrainingRecord("made", text="hello there")]
    (batch,) = token_batches(records, tiny.tokenizer, max_length=32, batch_size=1, epochs=1, show_progress=False)
    assert tiny.tokenizer.decode(batch.ids[0, :11].tolist()) == "hello there"
    assert batch.documents == (11, 21)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shuffled([], 1), "no items"),
        (lambda: Shuffled([1], 0), "batch_size must be at least 1"),
        (lambda: Buffered(list, 0), "size must be at least 1"),
        (lambda: next(iter(Buffered(list))), "source has no items"),
        (lambda: Mixture({}), "at least one stream"),
        (lambda: Mixture({"a": (shuffled(), 0.0)}), "weight of 'a' is 0.0"),
        (lambda: mixed().load_state_dict({"streams": {"a": {}}}), r"cursor is one of \['a'\]"),
        (lambda: Packed(rows(), 0, 1), "max_length must be at least 1"),
        (lambda: next(iter(Packed(Mapped(Shuffled(pieces([9]), 1), iter), 8, 1))), "piece of 9 tokens"),
    ],
)
def test_numbers_out_of_range_are_named(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
