"""`pippin laws`: from a table of runs to a law, from the law to a loss, a budget and a share; and what it refuses."""

import json
import math

import numpy as np
import pytest

from pippin.cli import main
from pippin.core.errors import InvalidArgument
from pippin.recipes.laws import number


def run(capsys, *words):
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Runs of known laws, as people keep them."""
    folder = tmp_path_factory.mktemp("laws")
    N, D = (x.ravel() for x in np.meshgrid(np.geomspace(1e7, 1e9, 4), np.geomspace(1e9, 1e11, 4)))
    loss = 1.9 + 245 / N**0.3 + 490 / D**0.33
    rows = "".join(f"{n},{d},{value}\n" for n, d, value in zip(N, D, loss, strict=True))
    (folder / "runs.csv").write_text("parameters, tokens, val\n" + rows)
    N, D, p = (x.ravel() for x in np.meshgrid([1e6, 4e6, 16e6], [1e5, 1e6], [0.0, 0.01, 0.05]))
    after = 2.5 + 2.0 * D**0.2 / ((1 + 100 * p) * N) ** 0.4
    names = ("N", "D", "p", "loss_before", "loss_after")
    runs = zip(N, D, p, np.full(len(N), 2.5), after, strict=True)
    lines = [json.dumps(dict(zip(names, map(float, one), strict=True))) for one in runs]
    (folder / "forgetting.jsonl").write_text("\n".join(lines) + "\n\n")
    target = 1.5 + 30 / (N**0.2 * D**0.1)
    rows = "".join(f"{n},{d},{value}\n" for n, d, value in zip(N, D, target, strict=True))
    (folder / "target.csv").write_text("N,D,loss\n" + rows)
    return folder


def test_a_table_of_runs_becomes_a_law_a_plot_and_a_budget(tables, tmp_path, capsys):
    words = ["--column", "loss=val", "--out", tmp_path / "law.json", "--plot", tmp_path / "law.png", "--hold-out"]
    code, out, err = run(capsys, "laws", "fit", tables / "runs.csv", *words, "--num-resamples", 20, "--json")
    assert code == 0, err
    made = json.loads(out)
    assert made["coefficients"]["alpha"] == pytest.approx(0.3, rel=1e-4)
    assert made["exponents"]["a"] == pytest.approx(0.33 / 0.63, abs=1e-4)
    assert made["held_out"]["mean_absolute_error"] < 1e-4
    assert made["runs"] == 16
    assert (tmp_path / "law.png").stat().st_size > 10_000

    code, out, _ = run(capsys, "laws", "predict", tmp_path / "law.json", "-N", "500M", "-D", "20B", "--json")
    assert json.loads(out)["loss"] == pytest.approx(1.9 + 245 / 5e8**0.3 + 490 / 2e10**0.33, rel=1e-5)
    code, out, _ = run(capsys, "laws", "optimal", tmp_path / "law.json", "--compute", "1e20", "--json")
    best = json.loads(out)
    assert 6 * best["N"] * best["D"] == pytest.approx(1e20)
    code, out, err = run(capsys, "laws", "optimal", tmp_path / "law.json", "-C", "1e20", "--encoder", "100M", "--json")
    assert code == 0, err
    late = json.loads(out)
    assert late["N"] == pytest.approx(1e20 / 6 / late["D"] + 0.456e8, rel=1e-5)
    code, out, err = run(capsys, "laws", "optimal", tmp_path / "law.json", "-C", "1e27")
    assert "tokens_per_parameter" in out
    assert "warning: the optimal N" in err


def test_a_law_of_forgetting_gives_the_required_share(tables, tmp_path, capsys):
    law = tmp_path / "law.json"
    words = ["--form", "forgetting", "--out", law, "--num-resamples", 10]
    code, out, err = run(capsys, "laws", "fit", tables / "forgetting.jsonl", *words)
    assert code == 0, err
    assert "R2 of the forgetting 1.0000" in out
    assert "saved in" in err
    code, out, _ = run(
        capsys, "laws", "required-share", law, "-N", "4M", "-D", "1M", "--max-forgetting", 0.05, "--json"
    )
    assert json.loads(out)["share"] == pytest.approx(0.0153, abs=1e-4)
    code, out, _ = run(capsys, "laws", "predict", law, "-N", "4M", "-D", "1M", "--share", 0.01, "--before", 2, "--json")
    found = json.loads(out)
    assert found["forgetting"] == pytest.approx(2.0 * 1e6**0.2 / (2 * 4e6) ** 0.4, rel=1e-4)
    assert found["loss"] == pytest.approx(2 + found["forgetting"])


def test_the_law_of_the_target_loss_needs_no_share(tables, tmp_path, capsys):
    words = ["--form", "finetuning", "--out", tmp_path / "law.json", "--num-resamples", 0]
    code, out, err = run(capsys, "laws", "fit", tables / "target.csv", *words)
    assert code == 0, err
    assert "alpha" in out
    code, out, _ = run(capsys, "laws", "predict", tmp_path / "law.json", "-N", "4M", "-D", "1M", "--json")
    assert json.loads(out)["loss"] == pytest.approx(1.5 + 30 / (4e6**0.2 * 1e6**0.1), rel=1e-4)
    assert json.loads(out)["interval"] == [None, None]


def test_what_cannot_be_fitted_is_refused(tables, tmp_path, capsys):
    (tmp_path / "few.csv").write_text("N,D,loss\n1,2,3\n")
    (tmp_path / "word.csv").write_text("N,D,loss\n1,2,many\n")
    (tmp_path / "none.csv").write_text("N,D,loss\n")
    (tmp_path / "broken.jsonl").write_text("{\n")
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "runs.txt").write_text("N,D,loss\n")
    for words, message in (
        ([tables / "runs.csv"], "no column for loss"),
        ([tables / "runs.csv", "--column", "nothing"], "write it as OURS=THEIRS"),
        ([tables / "runs.csv", "--column", "loss=val", "--plot", "law.txt"], "must end in"),
        ([tables / "runs.csv", "--column", "loss=val", "--offset"], "(--offset) belongs to"),
        ([tables / "runs.csv", "--column", "loss=val", "--delta", "0"], "delta must be above 0"),
        ([tmp_path / "few.csv"], "at least 8 runs, got 1"),
        ([tmp_path / "word.csv"], "line 2: loss is 'many'"),
        ([tmp_path / "none.csv"], "holds no runs"),
        ([tmp_path / "broken.jsonl"], "line 1"),
        ([tmp_path / "list.jsonl"], "a run must be a JSON object"),
        ([tmp_path / "runs.txt"], "neither .csv nor .jsonl"),
        ([tmp_path / "missing.csv"], "missing.csv"),
    ):
        code, out, err = run(capsys, "laws", "fit", *words)
        assert (code, out) == (2, ""), words
        assert message in err, words


def test_a_law_answers_only_what_it_is_a_law_of(tables, tmp_path, capsys):
    law = tmp_path / "law.json"
    run(capsys, "laws", "fit", tables / "runs.csv", "--column", "loss=val", "--out", law, "--num-resamples", 0)
    for words, message in (
        (
            ["required-share", law, "-N", "1M", "-D", "1M", "--max-forgetting", "0.1"],
            "only forgetting laws have a required share",
        ),
        (["predict", law, "-N", "many", "-D", "1M"], "is not a number above 0"),
        (["optimal", law, "-C", "-1"], "is not a number above 0"),
        (["optimal", law, "-C", "1e20", "--encoder", "1M", "--encoder-share", "2"], "--encoder-share"),
    ):
        code, _, err = run(capsys, "laws", *words)
        assert code == 2, words
        assert message in err, words
    code, _, err = run(capsys, "laws", "predict", tables / "runs.csv", "-N", "1M", "-D", "1M")
    assert code != 0
    assert "holds no law" in err


@pytest.mark.parametrize("text", ["", "M", "1.2.3B", "-5K", "inf", "nan", "0"])
def test_a_number_is_read_or_refused(text):
    assert number("1.5t") == 1.5e12
    assert math.isclose(number("12"), 12)
    with pytest.raises(InvalidArgument, match="not a number above 0"):
        number(text)
