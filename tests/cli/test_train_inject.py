"""`pippin train … --inject`: old data in the rows by its share of tokens, forgetting measured, and what is refused."""

import json

import pytest

from pippin.cli import injection, main, training

OLD = ["red", "green", "blue", "white", "black", "grey", "pink", "brown"]
NEW = ["one", "two", "three", "four", "five", "six", "seven"]
SMALL = ["--length", "32", "--rows", "4", "--lr", "0.01", "--json"]


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A model that knows the old words, and texts of old and new ones."""
    place = tmp_path_factory.mktemp("injection")
    tiny.save(place / "fresh")
    for name, words in (("old", OLD), ("new", NEW)):
        (place / f"{name}.txt").write_text(" ".join(words[i * i % len(words)] for i in range(900)))
    words = ["--data", place / "old.txt", "--out", place / "model", "--steps", 30, "--held-out", 0, *SMALL]
    assert main(list(map(str, ["train", "full", place / "fresh", *words]))) == 0
    return place


def run(capsys, *words):
    capsys.readouterr()
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def train(folder, out, *words, verb="full"):
    data = ["--data", folder / "new.txt", "--out", out, "--steps", 24, "--every", 8]
    return ["train", verb, folder / "model", *data, *SMALL, *words]


def test_injection_keeps_what_was_learnt_at_hardly_any_cost(folder, tmp_path, capsys):
    old = ["--pretrain-data", folder / "old.txt"]
    made = {}
    for share in ("0", "0.3"):
        code, out, err = run(capsys, *train(folder, tmp_path / share, *old, "--inject", share))
        assert code == 0, err
        made[share] = json.loads(out)
        before, after = (made[share][f"held_out_{when}"] for when in ("before", "after"))
        assert made[share]["forgetting"] == pytest.approx(after["pretraining loss"] - before["pretraining loss"])
        assert after["loss"] < before["loss"] - 1
    forgotten = [made[share]["forgetting"] for share in made]
    assert forgotten[0] > 0.5
    assert forgotten[1] < 0.5 * forgotten[0]
    # the log has both curves
    lines = [json.loads(line) for line in (tmp_path / "0.3" / "run" / "log.jsonl").read_text().splitlines()]
    assert sum("pretraining loss" in json.dumps(line) for line in lines) == 3


def test_an_adapter_forgets_too_and_the_table_says_so(folder, tmp_path, capsys):
    words = train(folder, tmp_path / "a", "--pretrain-data", folder / "old.txt", "--inject", "0.2", verb="lora")
    code, out, err = run(capsys, *[word for word in words if word != "--json"])
    assert code == 0, err
    assert "held-out pretraining loss after" in out
    assert "forgetting" in out


def test_rows_hold_old_tokens_by_their_share_and_a_run_takes_more_steps_for_it(folder, tiny, tmp_path):
    def plan(inject, **how):
        given = {"data": [folder / "new.txt"], "length": 32, "rows": 4, "lr": 0.1, "pretrain": [folder / "old.txt"]}
        return training.Plan(out=tmp_path / "x", inject=inject, **(given | how))

    batches = training.read(plan(0.25), tiny, show=False)
    # bytes of letters that only one of the two texts has
    only_old, only_new = (set(" ".join(a)) - set(" ".join(b)) for a, b in ((OLD, NEW), (NEW, OLD)))
    rows = [row for _, batch in zip(range(100), batches.learnt, strict=False) for row in batch.ids.tolist()]
    text = "".join(tiny.tokenizer.decode(row) for row in rows)
    found = {}
    for name, only in (("old", only_old), ("new", only_new)):
        whole = (folder / f"{name}.txt").read_text()
        found[name] = sum(letter in only for letter in text) / sum(letter in only for letter in whole) * len(whole)
    assert found["old"] / sum(found.values()) == pytest.approx(0.25, abs=0.02)
    without = training.read(plan(0.0), tiny, show=False)
    assert batches.steps == pytest.approx(without.steps / 0.75, abs=1)
    assert without.remembered is not None
    again = training.Plan.from_json(json.loads(json.dumps(plan(0.25).to_json())))
    assert (again.pretrain, again.inject) == (plan(0.25).pretrain, 0.25)


def test_the_part_that_is_measured_is_no_larger_than_asked(tiny, folder):
    from pippin.data import streams
    from pippin.data.tokens import hold_out

    corpus = streams.tokenised([folder / "old.txt"], tiny.tokenizer, length=32, show=False)
    learnt, measured = hold_out(corpus, 0.5)
    few = injection.at_most(measured, 100)
    assert few.tokens == pytest.approx(100, abs=32)
    assert injection.at_most(measured, 10**9).tokens == measured.tokens
    assert not {piece.ids.tobytes() for piece in few} - {piece.ids.tobytes() for piece in measured}
    assert len(learnt) + len(measured) == len(corpus)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--inject", "0.1"], "--pretrain-data FILE"),
        (["--inject", "1", "--pretrain-data", "old.txt"], "from 0 to below 1"),
        (["--inject", "-0.1", "--pretrain-data", "old.txt"], "from 0 to below 1"),
        (["--pretrain-data", "old.txt", "--held-out", "0"], "neither learnt"),
        (["--inject", "0.1", "--pretrain-data", "missing.txt"], "missing.txt"),
    ],
)
def test_what_cannot_be_is_refused(words, message, folder, tmp_path, capsys):
    words = [folder / word if word == "old.txt" else word for word in words]
    code, _, err = run(capsys, *train(folder, tmp_path / "no", *words))
    assert code == 2
    assert message in err
