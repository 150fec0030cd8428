"""Labels and agreement without right labels: a world in which they are known to the test alone."""

import csv
import json

import numpy as np
import pytest

from pippin.cli import main
from pippin.core.errors import InvalidInput
from pippin.evaluate.judges import consensus
from pippin.metrics import krippendorff_alpha


@pytest.fixture(scope="module")
def world():
    """Three classes, five judges of known accuracy with independent errors; some votes are missing."""
    rng = np.random.default_rng(0)
    truth, accuracy = rng.integers(0, 3, 3000), np.array([0.95, 0.9, 0.6, 0.5, 0.45])
    wrong = (truth[:, None] + rng.integers(1, 3, (3000, 5))) % 3
    votes = np.where(rng.random((3000, 5)) < accuracy, truth[:, None], wrong)
    table = np.array(["red", "green", "blue"], dtype=object)[votes]
    table[rng.random((3000, 5)) < 0.1] = None
    table[np.equal(table, None).all(1), 0] = "red"
    return np.array(["red", "green", "blue"], dtype=object)[truth], accuracy, table


def test_labels_beat_the_majority_and_judges_get_their_accuracy(world):
    truth, accuracy, table = world
    found = consensus(table)
    np.testing.assert_allclose(found.judge_accuracy, accuracy, atol=0.04)
    right = np.array(found.labels) == truth
    assert right.mean() > (np.array(found.majority) == truth).mean() + 0.03
    assert np.mean(found.confidence) == pytest.approx(right.mean(), abs=0.02)  # the model is true here
    assert found.alpha == krippendorff_alpha([list(row) for row in table])


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "The judges agree (alpha 1.00)"), (0.15, "tentative"), (0.6, "do not agree enough")]
)
def test_advice_is_krippendorffs(share, words):
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 2, (2000, 1))
    votes = np.where(rng.random((2000, 4)) < share, rng.integers(0, 2, (2000, 4)), truth)
    assert words in consensus(votes).advice


def test_the_command_gives_labels_per_item(world, tmp_path, capsys):
    _, _, table = world
    votes, out = tmp_path / "votes.csv", tmp_path / "labels.csv"
    with votes.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "Ada", "Bo", "Cy", "Di", "Ed"])
        writer.writerows(
            [f"q{index}", *("" if vote is None else vote for vote in row)] for index, row in enumerate(table)
        )
    assert main(["evaluate", "panel", str(votes), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    found = consensus(table, judges=["Ada", "Bo", "Cy", "Di", "Ed"])
    assert found.advice in shown.out
    assert "accuracy of Ada, estimated" in shown.out
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["item"] for row in rows[:2]] == ["q0", "q1"]
    assert tuple(row["label"] for row in rows) == found.labels
    assert main(["evaluate", "panel", str(votes), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["alpha"] == found.alpha
    assert tuple(item["confidence"] for item in printed["items"]) == pytest.approx(found.confidence)
    assert main(["evaluate", "panel", str(votes), "--plot", "a.png"]) == 2
    assert "name their column with --gold" in capsys.readouterr().err


def test_one_judge_agrees_with_nobody():
    with pytest.raises(InvalidInput, match="two judges or more"):
        consensus([["a"], ["b"]])
