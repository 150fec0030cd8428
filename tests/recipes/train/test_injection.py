"""Pretraining data in the batches by its share of tokens, and forgetting measured."""

import json

import pytest

from pippin.core.errors import InvalidArgument
from pippin.recipes.train import full, lora
from pippin.recipes.train.text_training import Injection, TextTrainingConfig, _at_most, read_batches

OLD = ["red", "green", "blue", "white", "black", "gray", "pink", "brown"]
NEW = ["one", "two", "three", "four", "five", "six", "seven"]
SMALL = {"max_length": 32, "batch_size": 4, "lr": 0.01, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A model that was trained on the old words, and texts of old and new ones."""
    place = tmp_path_factory.mktemp("injection")
    tiny.save(place / "fresh")
    for name, words in (("old", OLD), ("new", NEW)):
        (place / f"{name}.txt").write_text(" ".join(words[i * i % len(words)] for i in range(900)))
    config = full.Config(
        model=str(place / "fresh"), data=(place / "old.txt",), out=place / "model", steps=30, held_out=0, **SMALL
    )
    full.run(config, show_progress=False)
    return place


def settings(folder, out, **given):
    data = {"data": (folder / "new.txt",), "pretrain_data": (folder / "old.txt",)}
    return {"model": str(folder / "model"), "out": out, "steps": 24, "eval_every": 8} | data | SMALL | given


def test_injection_keeps_the_pretraining_loss_at_hardly_any_cost(folder, tmp_path):
    forgotten = []
    for share in (0.0, 0.3):
        config = full.Config(**settings(folder, tmp_path / str(share), inject=share))
        result = full.run(config, show_progress=False)
        before, after = result.held_out_before, result.held_out_after
        assert result.forgetting == pytest.approx(after["pretraining loss"] - before["pretraining loss"])
        assert after["loss"] < before["loss"] - 1
        forgotten.append(result.forgetting)
    assert forgotten[0] > 0.5
    assert forgotten[1] < 0.5 * forgotten[0]
    # the log has both curves
    lines = [json.loads(line) for line in (tmp_path / "0.3" / "run" / "log.jsonl").read_text().splitlines()]
    assert sum("pretraining loss" in json.dumps(line) for line in lines) == 3


def test_the_forgetting_of_an_adapter_is_in_its_report(folder, tmp_path):
    result = lora.run(lora.Config(**settings(folder, tmp_path / "a", inject=0.2)), show_progress=False)
    names = {row.name for row in result.report().rows}
    assert {"held-out pretraining loss after", "forgetting"} <= names


def test_batches_hold_old_tokens_by_their_share_and_a_run_takes_more_steps_for_it(folder, tiny, tmp_path):
    config = TextTrainingConfig(model="m", data=(folder / "new.txt",), out=tmp_path, max_length=32, batch_size=4)
    injected, measured = (Injection((folder / "old.txt",), share) for share in (0.25, 0.0))
    batches = read_batches(config, tiny, injected, show_progress=False)
    # bytes of letters that only one of the two texts has
    only_old, only_new = (set(" ".join(a)) - set(" ".join(b)) for a, b in ((OLD, NEW), (NEW, OLD)))
    rows = [row for _, batch in zip(range(100), batches.training, strict=False) for row in batch.ids.tolist()]
    text = "".join(tiny.tokenizer.decode(row) for row in rows)
    found = {}
    for name, only in (("old", only_old), ("new", only_new)):
        whole = (folder / f"{name}.txt").read_text()
        found[name] = sum(letter in only for letter in text) / sum(letter in only for letter in whole) * len(whole)
    assert found["old"] / sum(found.values()) == pytest.approx(0.25, abs=0.02)
    without = read_batches(config, tiny, measured, show_progress=False)
    assert batches.steps == pytest.approx(without.steps / 0.75, abs=1)
    assert without.pretraining is not None


def test_the_part_that_is_evaluated_is_no_larger_than_asked(tiny, folder):
    from pippin.data import packing
    from pippin.data.corpus import hold_out

    corpus = packing.tokenized([folder / "old.txt"], tiny.tokenizer, max_length=32, show_progress=False)
    training, measured = hold_out(corpus, 0.5)
    few = _at_most(measured, 100)
    assert few.tokens == pytest.approx(100, abs=32)
    assert _at_most(measured, 10**9).tokens == measured.tokens
    assert not {piece.ids.tobytes() for piece in few} - {piece.ids.tobytes() for piece in measured}
    assert len(training) + len(measured) == len(corpus)


def test_an_injection_needs_data_and_a_use_for_it():
    with pytest.raises(InvalidArgument, match="--pretrain-data FILE"):
        Injection.of((), 0.1, 0.05)
    with pytest.raises(InvalidArgument, match="neither trained on"):
        Injection.of(("old.txt",), 0.0, 0)
    assert Injection.of((), 0.0, 0) is None
