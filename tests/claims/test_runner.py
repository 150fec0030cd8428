"""Runs are found, recorded, kept apart by scale, and read back only if they are what was written."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from pippin.claims import report, runner
from pippin.claims.ledger import Scale
from pippin.cli import main
from pippin.core.errors import ClaimError

LARGER = """
from pippin.claims import Evidence, Scale, claim

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2), "gpu": (0, 1, 2, 3)}

@claim(id="larger", source="arXiv:0000.00000", paper="a | b is larger", setting="squares", accept="a > b, every seed")
def run(scale: Scale) -> Evidence:
    evidence = Evidence()
    for seed in SEEDS[scale.name]:
        evidence.add("a", (seed + 1) ** 2, seed=seed, unit="m")
        evidence.add("b", seed + 0.5, seed=seed, unit="m")
    evidence.add("diverged", float("inf"))
    above = [a > b for a, b in zip(evidence.each("a"), evidence.each("b"))]
    return evidence.accept(all(above))
"""
FRAGILE = """
from pippin.claims import Evidence, Scale, claim

@claim(id="fragile-at-scale", source="s", paper="p", setting="x", accept="it ends")
def run(scale: Scale) -> Evidence:
    if scale.name != "smoke":
        raise ZeroDivisionError("too large")
    evidence = Evidence()
    evidence.add("end", 1)
    return evidence.accept(ends=True, early=False)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two claims in the place of Pippin's own."""
    folder = tmp_path / "toy_claims"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "larger.py").write_text(LARGER)
    (folder / "fragile.py").write_text(FRAGILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(runner, "PACKAGE", "toy_claims")
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "toy_claims"]:
        del sys.modules[name]


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


def kept(results: Path, id: str) -> dict:
    return json.loads((results / "claims" / f"{id}.json").read_text())


def test_claims_are_found_by_their_files(package):
    assert list(runner.find()) == ["fragile-at-scale", "larger"]
    assert runner.get("fragile-at-scale").accept == "it ends"
    with pytest.raises(ClaimError, match="no claim is called 'large'; there are: fragile-at-scale, larger"):
        runner.get("large")


def test_a_file_with_an_underscore_is_a_helper_and_not_a_claim(package):
    (package / "_shared.py").write_text("raise SystemExit('imported')")
    assert list(runner.find()) == ["fragile-at-scale", "larger"]


def test_getting_one_claim_imports_no_other(package):
    runner.get("larger")
    assert "toy_claims.fragile" not in sys.modules


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("other.py", LARGER, "'larger' stands in other.py"),
        ("empty.py", "x = 1", "empty.py is among the claims but holds none"),
        (
            "twice.py",
            LARGER.replace('"larger"', '"twice"') + LARGER.replace('"larger"', '"twice"').replace("run", "again"),
            "two",
        ),
    ],
)
def test_a_file_and_its_claims_must_agree(package, name, text, message):
    (package / name).write_text(text)
    with pytest.raises(ClaimError, match=message):
        runner.find()


def test_a_run_is_recorded_with_its_circumstances_and_read_back_whole(package, results):
    claim = runner.get("larger")
    done = runner.run(claim, Scale("laptop"), results=results)
    read = runner.read("larger", results=results)
    assert read == {"laptop": done}
    assert done.verdict == "reproduced"
    assert [(f.name, f.value, f.unit, f.seed) for f in done.figures][:2] == [("a", 1.0, "m", 0), ("b", 0.5, "m", 0)]
    assert done.figures[-1].value == math.inf
    file = kept(results, "larger")
    assert (file["accept"], file["runs"]["laptop"]["verdict"]) == (claim.accept, "reproduced")
    assert file["runs"]["laptop"]["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert file["runs"]["laptop"]["machine"]["threads"] >= 1
    assert str(Path.home()) not in json.dumps(file)


def test_the_commit_is_what_git_says(package, results):
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    expected = asked.stdout.strip() if asked.returncode == 0 else None
    assert runner.run(runner.get("larger"), Scale("smoke"), results=results).commit == expected


def test_each_scale_keeps_its_own_evidence_and_smoke_gives_no_verdict(package, results):
    claim = runner.get("larger")
    runner.run(claim, Scale("smoke"), results=results)
    smoke_only = report.summary(claim, runner.read("larger", results=results))
    assert (smoke_only["verdict"], smoke_only["scale"], smoke_only["metrics"]) == ("not run", None, {})
    laptop = runner.run(claim, Scale("laptop"), results=results)
    runner.run(claim, Scale("smoke"), results=results)
    runs = runner.read("larger", results=results)
    assert set(runs) == {"smoke", "laptop"}
    assert runs["laptop"] == laptop
    assert report.summary(claim, runs)["scale"] == "laptop"
    runner.run(claim, Scale("gpu"), results=results)
    assert report.summary(claim, runner.read("larger", results=results))["scale"] == "gpu"


def test_a_crash_is_recorded_in_place_of_figures_and_the_smaller_scale_stays(package, results):
    claim = runner.get("fragile-at-scale")
    runner.run(claim, Scale("smoke"), results=results)
    crashed = runner.run(claim, Scale("gpu"), results=results)
    assert crashed.error is not None
    assert crashed.error.startswith("ZeroDivisionError: too large (fragile.py, line 7")
    assert (crashed.verdict, crashed.figures) == ("not run", ())
    runs = runner.read(claim.id, results=results)
    assert runs["smoke"].verdict == "partly"
    row = report.summary(claim, runs)
    assert row["verdict"] == "not run"
    assert row["note"] == f"crashed at gpu: {crashed.error}"


def test_a_rule_that_changed_after_the_run_voids_the_run(package, results):
    claim = runner.get("larger")
    runner.run(claim, Scale("laptop"), results=results)
    (package / "larger.py").write_text(LARGER.replace("a > b, every seed", "a > b on average"))
    del sys.modules["toy_claims.larger"]
    row = report.summaries([runner.get("larger")], results=results)[0]
    assert (row["verdict"], row["metrics"]) == ("not run", {})
    assert row["note"] == "the laptop run is void: the acceptance rule was changed after it"


def test_a_verdict_cannot_be_typed_into_the_file(package, results):
    runner.run(runner.get("larger"), Scale("laptop"), results=results)
    path = results / "claims" / "larger.json"
    path.write_text(path.read_text().replace('"verdict": "reproduced"', '"verdict": "partly"'))
    with pytest.raises(ClaimError, match="reads 'partly', but its conditions give 'reproduced'"):
        runner.read("larger", results=results)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not evidence that `pippin claims run` wrote"),
        ("[]", "is not evidence"),
        ('{"id": "larger"}', "is not evidence"),
        ('{"id": "other", "runs": {}}', r"larger\.json holds the evidence of 'other'"),
        ('{"id": "larger", "runs": {"huge": {"verdict": "not run"}}}', "scale 'huge' is not known"),
        ('{"id": "larger", "runs": {"smoke": {"verdict": "not run"}}}', "is not evidence"),
    ],
)
def test_a_broken_file_is_named_and_not_overwritten(package, results, text, message):
    path = results / "claims" / "larger.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ClaimError, match=message):
        runner.run(runner.get("larger"), Scale("smoke"), results=results)
    assert path.read_text() == text


def test_outside_a_clone_results_go_to_the_current_folder(tmp_path, monkeypatch):
    assert runner.results_folder() == Path(__file__).parents[2] / "results"
    monkeypatch.setattr(runner, "clone", lambda: None)
    monkeypatch.chdir(tmp_path)
    assert runner.results_folder() == tmp_path / "results"


def test_the_page_has_every_scale_with_figures_and_keeps_tables_whole(package, results):
    claims = runner.find().values()
    for claim in claims:
        runner.run(claim, Scale("laptop"), results=results)
    runner.run(runner.get("larger"), Scale("smoke"), results=results)
    page = report.page(claims, results=results)
    assert page.startswith("2 claims: 1 reproduced, 1 not run.\n")
    assert "| [larger](#larger) | reproduced | laptop | a \\| b is larger |" in page
    assert "| a | 4.66667 | 4.041 | m | 3 |" in page
    assert "| diverged | inf |  |  | 1 |" in page
    assert "**smoke: reproduced**" in page
    assert "- **Note**: crashed at laptop: ZeroDivisionError" in page


def test_cli_runs_and_reports(package, results, capsys):
    assert main(["claims", "run", "larger", "--results", str(results)]) == 0
    assert "larger (laptop): reproduced" in capsys.readouterr().out
    assert main(["claims", "report", "--json", "--results", str(results)]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["fragile-at-scale", "larger"]
    larger = rows["larger"]
    assert list(larger)[:5] == ["id", "verdict", "scale", "paper", "accept"]
    assert {"metrics", "seconds", "commit"} < set(larger)
    assert larger["metrics"]["a"] == {
        "value": pytest.approx(14 / 3),
        "spread": pytest.approx(math.sqrt(49 / 3)),
        "unit": "m",
        "n": 3,
    }
    assert larger["metrics"]["diverged"]["value"] == "inf"
    assert rows["fragile-at-scale"]["verdict"] == "not run"
    assert main(["claims", "report", "--results", str(results)]) == 0
    assert "2 claims: 1 reproduced, 1 not run" in capsys.readouterr().out


def test_cli_fails_when_a_claim_crashes_but_runs_the_others(package, results, capsys):
    assert main(["claims", "run", "--all", "--scale", "gpu", "--results", str(results)]) == 1
    shown = capsys.readouterr()
    assert "1 of 2 crashed: fragile-at-scale" in shown.err
    assert "larger (gpu): reproduced" in shown.out
    assert kept(results, "fragile-at-scale")["runs"]["gpu"]["error"]


def test_cli_shows_a_smoke_run_only_when_asked(package, results, capsys):
    assert main(["claims", "run", "--all", "--scale", "smoke", "--results", str(results)]) == 0
    capsys.readouterr()
    for words, verdicts in (([], ["not run", "not run"]), (["--scale", "smoke"], ["partly", "reproduced"])):
        assert main(["claims", "report", "--json", *words, "--results", str(results)]) == 0
        assert [row["verdict"] for row in json.loads(capsys.readouterr().out)] == verdicts


def test_cli_lists_rules(package, capsys):
    assert main(["claims", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[1] == {
        "id": "larger",
        "source": "arXiv:0000.00000",
        "paper": "a | b is larger",
        "setting": "squares",
        "accept": "a > b, every seed",
    }
    assert main(["claims", "list"]) == 0
    assert "it ends" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run"], 2, "name the claims to run, or use --all"),
        (["run", "larger", "--all"], 2, "name the claims to run, or use --all"),
        (["run", "unknown"], 1, "no claim is called 'unknown'"),
        (["run", "larger", "--scale", "huge"], 2, "huge"),
    ],
)
def test_cli_refuses(package, results, capsys, words, code, message):
    assert main(["claims", *words, *(["--results", str(results)])]) == code
    assert message in capsys.readouterr().err
    assert not results.exists()


def test_importing_the_ledger_loads_no_torch():
    code = "import sys, pippin.claims; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
