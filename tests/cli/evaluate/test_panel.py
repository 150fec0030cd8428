"""`pippin evaluate panel` as a user runs it: its figures are those of the library, and what is wrong has a line."""

import json

import numpy as np
import pytest

from pippin.cli import main
from pippin.evaluate.judges.panel import JudgePanel

WORDS = ["ja", "naïve", "否"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("votes")
    rng = np.random.default_rng(0)
    gold, cause = rng.integers(0, 3, 300), rng.standard_normal((300, 1))
    wrong = cause + rng.standard_normal((300, 3)) > 0.6
    votes = np.where(wrong, (gold[:, None] + 1) % 3, gold[:, None])
    rows = [
        [str(i), WORDS[g], *(WORDS[v] for v in row), "0.5"] for i, (g, row) in enumerate(zip(gold, votes, strict=True))
    ]

    def write(name, rows, head=("id", "gold", "Ada", "Bö", "Cy", "hard")):
        (place / name).write_text("\n".join(",".join(row) for row in (head, *rows)), encoding="utf-8-sig")

    write("good.csv", rows)
    write("typo.csv", [*rows[:41], [*rows[41][:3], "jaa", *rows[41][4:]], *rows[42:]])
    write("hole.csv", [*rows[:41], [*rows[41][:3], " ", *rows[41][4:]], *rows[42:]])
    write("short.csv", rows[:2])
    write("few.csv", rows[:20])
    write("perfect.csv", [[row[0], row[1], row[1], row[1], row[1], "0"] for row in rows])
    write("one.csv", [row[:3] for row in rows], ("id", "gold", "Ada"))
    write("nan.csv", [*rows[:9], [*rows[9][:5], "nan"], *rows[10:]])
    (place / "empty.csv").write_bytes(b"")
    return place


def test_figures_are_those_of_the_library(pippin, folder):
    picture = folder / "panel.svg"
    run = pippin(
        "evaluate", "panel", folder / "good.csv", "--difficulty", "hard", "--samples", 200, "--json", "--plot", picture
    )
    assert run.returncode == 0, run.stderr
    panel = JudgePanel.from_csv(folder / "good.csv", difficulty="hard")
    assert panel.judges == ("Ada", "Bö", "Cy")
    assert json.loads(run.stdout) == panel.report(num_bootstrap=200, num_permutations=200).to_dict()
    assert b"<svg" in picture.read_bytes()


def test_the_table_names_every_judge_and_says_what_it_means(folder, capsys):
    assert main(["evaluate", "panel", str(folder / "good.csv"), "--judges", "Ada,Bö,Cy", "--samples", "200"]) == 0
    shown = capsys.readouterr().out
    for words in ("effective votes (Kish)", "Dawid-Skene", "Ada", "Bö", "This panel of 3 is worth"):
        assert words in shown


def test_holes_can_be_lived_with(folder, capsys):
    for how in ("pairwise", "fill"):
        words = ["--judges", "Ada,Bö,Cy", "--samples", "200", "--missing", how, "--json"]
        assert main(["evaluate", "panel", str(folder / "hole.csv"), *words]) == 0
        assert json.loads(capsys.readouterr().out)["filled"] == (how == "fill")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["typo.csv"], "judge 'Bö' gives the unknown label 'jaa' on line 43"),
        (["hole.csv"], "judge 'Bö' has no label on line 43"),
        (["short.csv"], "fewer items (2) than judges (3)"),
        (["few.csv"], "20 items are too few"),
        (["perfect.csv"], "0 of 3 judges err sometimes"),
        (["one.csv"], "1 columns of votes"),
        (["nan.csv"], "line 11, column 'hard': 'nan' is not a finite number"),
        (["empty.csv"], "is empty"),
        (["none.csv"], "there is no "),
        (["good.csv", "--gold", "truth"], "no column 'truth'"),
        (["good.csv", "--judges", "Ada,Zoe"], "no column 'Zoe'"),
        (["good.csv", "--judges", "Ada,,Bö"], "--judges is 'Ada,,Bö'"),
        (["good.csv", "--labels", "ja,nein"], "unknown label"),
        (["good.csv", "--labels", "ja"], "single class"),
        (["good.csv", "--samples", "3"], "'--samples': Input should be greater than or equal to 100"),
        (["good.csv", "--bins", "0"], "'--bins': Input should be greater than or equal to 1 "),
        (["good.csv", "--plot", "x.gif"], "x.gif"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(folder, capsys, words, message):
    words = [str(folder / words[0]), *words[1:]]
    if "--judges" not in words:
        words += ["--difficulty", "hard"] if "one" not in words[0] else []
    assert main(["evaluate", "panel", *words]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert err.splitlines()[-1].startswith("error: ")
