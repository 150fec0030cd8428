"""`pippin evaluate annotators` as a user runs it: counts and people's labels give the same, and errors have a line."""

import json

import numpy as np
import pytest

from pippin.cli import main
from pippin.evaluate.annotators.annotation_budget import annotation_curve

WORDS = ["oui", "non", "peut-être"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("labels")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 2)).round(3)
    p = np.exp(2 * np.column_stack([x, np.zeros(90)]))
    votes = np.array([rng.choice(3, 8, p=row / row.sum()) for row in p])
    counts = (votes[..., None] == np.arange(3)).sum(1)

    def write(name, head, rows):
        (place / name).write_text("\n".join(";".join(map(str, row)) for row in (head, *rows)), encoding="utf-8-sig")

    write(
        "counts.csv", ["item", *WORDS, "a", "b"], [[i, *c, *f] for i, (c, f) in enumerate(zip(counts, x, strict=True))]
    )
    people = [[WORDS[v] for v in row] for row in votes]
    write("people.csv", [f"p{j}" for j in range(8)], people)
    write("silent.csv", [f"p{j}" for j in range(8)], [*people[:3], [""] * 8, *people[4:]])
    write("negative.csv", WORDS, [[1, 2, 3], [4, -1, 3]])
    write("three.csv", WORDS, [[1, 1, 1]] * 40)
    write("one.csv", ["p0"], [["oui"], ["non"]])
    (place / "empty.csv").write_bytes(b"\xef\xbb\xbf")
    np.save(place / "counts.npy", counts)
    return place


def test_counts_and_people_give_the_figures_of_the_library(pippin, folder, capsys):
    picture = folder / "alone.svg"
    run = pippin(
        "evaluate", "annotators", folder / "counts.csv", "--counts", ",".join(WORDS), "--json", "--plot", picture
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found == json.loads(annotation_curve(np.load(folder / "counts.npy"), num_subsamples=3).to_json())
    assert b"<svg" in picture.read_bytes()
    assert main(["evaluate", "annotators", str(folder / "people.csv"), "--labels", ",".join(WORDS), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_a_model_learns_where_there_are_features(folder, capsys):
    words = ["--counts", ",".join(WORDS), "--features", "a,b", "--sizes", "1,2,8", "--num-seeds", "1", "--steps", "5"]
    assert main(["evaluate", "annotators", str(folder / "counts.csv"), *words]) == 0
    shown = capsys.readouterr().out
    assert "72 items to train on, 18 for the test" in shown
    for words in ("kl, 8 votes", "entropy_r, smoothing 0.1", "accuracy, hard", "of the gain at"):
        assert words in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["silent.csv"], "line 5 of"),
        (["negative.csv", "--counts", ",".join(WORDS)], "item 1 has -1 votes"),
        (["three.csv", "--counts", ",".join(WORDS)], "an item has 3 votes"),
        (["one.csv"], "1 columns of annotators"),
        (["empty.csv"], "is empty"),
        (["people.csv", "--counts", "p0,p1"], "is not a finite number"),
        (["people.csv", "--labels", "oui,non"], "unknown label 'peut-être'"),
        (["counts.csv"], "different labels in"),
        (["counts.csv", "--counts", "oui,si"], "no column 'si'"),
        (["counts.csv", "--counts", "oui,non", "--annotators", "a,b"], "not both"),
        (["counts.csv", "--counts", "oui,non", "--sizes", "1,two"], "--sizes is '1,two'"),
        (["counts.csv", "--counts", "oui,non", "--sizes", "0"], "at least 1"),
        (["counts.csv", "--counts", "oui,non", "--saturation", "1"], "saturation must be above 0 and below 1"),
        (["counts.csv", "--counts", "oui,non", "--test", "1"], "test must be above 0 and below 1, got 1.0"),
        (
            ["counts.csv", "--counts", ",".join(WORDS), "--features", "a", "--sizes", "9"],
            "fewer than the smallest size",
        ),
        (["counts.csv", "--plot", "x.gif"], "x.gif"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(folder, capsys, words, message):
    assert main(["evaluate", "annotators", str(folder / words[0]), *words[1:]]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert err.splitlines()[-1].startswith("error: ")
