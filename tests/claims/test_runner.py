"""Runs are appended, bound to rule, modules and commit, and read back only if they are what was written."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from pippin.claims import catalog, ledger, records, report, runner
from pippin.claims.ledger import Scale
from pippin.cli import main
from pippin.cli.claims import VerdictChoice
from pippin.core.errors import ClaimError

LARGER = """
from pippin.claims import Condition, Evidence, Scale, claim

@claim(
    id="larger",
    source="arXiv:0000.00000",
    headline="a | b is larger",
    setting="squares",
    method="squares",
    negative_controls=("halves",),
    conditions=[Condition("larger", "a > 0.9, every seed", lambda e, arm: e.min("a", arm) > 0.9, headline=True)],
)
def run(scale: Scale) -> Evidence:
    evidence = Evidence()
    for seed in scale.seeds:
        evidence.add("a", (seed + 1) ** 2, arm="squares", seed=seed, unit="m")
        evidence.add("a", 0.5, arm="halves", seed=seed, unit="m")
    evidence.add("diverged", float("inf"))
    return evidence
"""
FRAGILE = """
from pippin.claims import Condition, Evidence, Scale, claim

@claim(
    id="fragile-at-scale",
    source="s",
    headline="p",
    setting="x",
    method="m",
    conditions=[Condition("ends", "it ends", lambda e, arm: e.min("end") == 1)],
)
def run(scale: Scale) -> Evidence:
    (scale.checkpoints("part") / "weights").write_text(scale.name)
    if not scale.is_smoke:
        raise ZeroDivisionError("too large")
    evidence = Evidence()
    evidence.add("end", 1)
    return evidence
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two claims in the place of Pippin's own."""
    folder = tmp_path / "toy_claims"
    (folder / "bayes").mkdir(parents=True)
    (folder / "larger.py").write_text(LARGER)
    (folder / "bayes" / "fragile.py").write_text(FRAGILE)
    monkeypatch.setattr(catalog, "CLAIMS", folder)
    monkeypatch.setattr(runner, "clone", lambda: None)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def results(tmp_path):
    return tmp_path / "elsewhere"


def run(id: str, scale: str, results: Path):
    return runner.run(catalog.get(id), Scale(scale), results=results)


def row(id: str, results: Path, **settings):
    stated = catalog.get(id)
    return report.summary(stated, records.read(id, results), **settings)


def test_claims_are_found_by_their_files(folder):
    assert [(stated.id, stated.area) for stated in catalog.find().values()] == [
        ("fragile-at-scale", "bayes"),
        ("larger", ""),
    ]
    assert catalog.get("fragile-at-scale") == catalog.find()["fragile-at-scale"]
    with pytest.raises(ClaimError, match=r"no claim is called 'large'; did you mean larger\?"):
        catalog.get("large")
    with pytest.raises(ClaimError, match="no claim is called 'other'; there are: fragile-at-scale, larger"):
        catalog.get("other")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("other.py", LARGER, "'larger' stands in other.py"),
        ("empty.py", "x = 1", "empty.py is among the claims but holds none"),
        (
            "larger_still.py",
            LARGER.replace('"larger",\n    source', '"larger-still",\n    source') + LARGER,
            "stands in",
        ),
    ],
)
def test_a_file_and_its_claims_must_agree(folder, name, text, message):
    (folder / name).write_text(text)
    with pytest.raises(ClaimError, match=message):
        catalog.find()


def test_a_run_is_recorded_with_its_circumstances_and_read_back_whole(folder, results):
    stated = catalog.get("larger")
    done, evidence = run("larger", "laptop", results)
    record = records.read("larger", results)
    assert record.runs == (done,)
    assert record.rules == {stated.rule.hash: stated.rule}
    assert (evidence.verdict, record.judge(done, stated.rule.hash)) == ("reproduced", ("reproduced", ()))
    assert [(f.name, f.value, f.unit, f.seed, f.arm) for f in done.figures][:2] == [
        ("a", 1.0, "m", 0, "squares"),
        ("a", 0.5, "m", 0, "halves"),
    ]
    assert done.figures[-1].value == math.inf
    assert (done.modules, done.versions["python"]) == (
        {"larger": catalog.content_hash(folder / "larger.py")},
        ".".join(map(str, sys.version_info[:3])),
    )
    assert str(Path.home()) not in (results / "claims" / "larger.json").read_text()


def test_the_commit_is_what_git_says():
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert runner.commit()[0] == (asked.stdout.strip() if asked.returncode == 0 else None)


def test_runs_are_appended_and_the_latest_of_the_largest_scale_decides(folder, results):
    run("larger", "smoke", results)
    assert (row("larger", results)["verdict"], row("larger", results, scale="smoke")["verdict"]) == (
        "not run",
        "reproduced",
    )
    first, _ = run("larger", "laptop", results)
    run("larger", "laptop", results)
    assert [one.scale for one in records.read("larger", results).runs] == ["smoke", "laptop", "laptop"]
    assert records.read("larger", results).runs[1] == first
    found = row("larger", results)
    assert (found["scale"], found["stale"], found["note"]) == ("laptop", [], "2 laptop runs with this verdict")
    assert found["controls"] == [{"name": "halves", "must": "fail", "fails": ["larger"]}]
    run("larger", "long", results)
    assert row("larger", results)["scale"] == "long"


def test_a_run_that_failed_stays_beside_the_one_that_passed(folder, results):
    path = folder / "larger.py"
    path.write_text(LARGER.replace("(seed + 1) ** 2", "0.1"))
    run("larger", "laptop", results)
    path.write_text(LARGER)
    catalog.content_hash.cache_clear()
    run("larger", "laptop", results)
    note = row("larger", results)["note"]
    assert note.startswith("the 2 laptop runs differ: ")
    assert "1 not reproduced" in note


def test_a_crash_is_recorded_and_leaves_what_the_next_run_goes_on_from(folder, results, tmp_path):
    run("fragile-at-scale", "smoke", results)
    assert not list(tmp_path.glob("build/claims/*"))  # a whole run leaves nothing
    crashed, evidence = run("fragile-at-scale", "gpu", results)
    assert crashed.error is not None
    assert crashed.error.startswith("ZeroDivisionError: too large (fragile.py, line 15")
    assert (evidence.verdict, crashed.figures) == ("not run", ())
    assert [path.name for path in tmp_path.glob("build/claims/*/part/*")] == ["weights"]
    found = row("fragile-at-scale", results)
    assert (found["verdict"], found["note"]) == ("not run", f"crashed at gpu: {crashed.error}")


def test_a_rule_that_changed_leaves_its_old_runs_readable_and_can_be_asked_of_them(folder, results):
    run("larger", "laptop", results)
    new = LARGER.replace("a > 0.9", "a > 2").replace("> 0.9, headline", "> 2, headline")
    (folder / "larger.py").write_text(
        new.replace("conditions=[", 'version=2, superseded={1: "too soft"}, conditions=[')
    )
    catalog.content_hash.cache_clear()
    found = row("larger", results)
    assert (found["verdict"], found["note"]) == ("not run", "no run under version 2 of the rule yet")
    stated = catalog.get("larger")
    page = report.page([stated], results=results)
    assert "**Version 1 of the rule, superseded**: too soft." in page
    assert "- Its runs: reproduced (laptop" in page
    assert runner.ask_again(stated, results=results) == 1
    assert runner.ask_again(stated, results=results) == 0
    found = row("larger", results)
    assert (found["verdict"], found["stale"][0]) == (
        "not reproduced",
        "the rule was asked of these figures after the run",
    )


def test_a_module_that_changed_marks_the_run_as_stale(folder, results):
    run("larger", "laptop", results)
    (folder / "larger.py").write_text(LARGER.replace("0.5, arm", "0.4, arm"))
    catalog.content_hash.cache_clear()
    found = row("larger", results)
    assert (found["verdict"], found["stale"]) == ("reproduced", ["changed since the run: larger"])
    assert report.label(found) == "reproduced, stale"


def test_code_that_belongs_to_no_commit_counts_at_smoke_scale_only(folder, tmp_path):
    runner.run(catalog.get("larger"), Scale("smoke"))
    assert (tmp_path / "results" / "claims" / "larger.json").is_file()
    with pytest.raises(ClaimError, match=r"belongs to no commit.*--results"):
        runner.run(catalog.get("larger"), Scale("laptop"))


def test_changed_code_counts_at_smoke_scale_only(folder, tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e@e", *words], cwd=folder, check=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "claims")
    done, _ = runner.run(catalog.get("larger"), Scale("laptop"))
    assert (len(done.commit or ""), done.changed) == (40, False)
    (folder / "larger.py").write_text(LARGER + "\n")
    with pytest.raises(ClaimError, match="differs from its commit"):
        runner.run(catalog.get("larger"), Scale("laptop"))


def test_a_verdict_cannot_be_typed_into_the_file(folder, results):
    run("larger", "laptop", results)
    path = results / "claims" / "larger.json"
    path.write_text(path.read_text().replace('"verdict": "reproduced"', '"verdict": "partly"'))
    with pytest.raises(ClaimError, match="reads 'partly', but its conditions give 'reproduced'"):
        records.read("larger", results)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not evidence that `pippin claims run` wrote"),
        ("[]", "is not evidence"),
        ('{"id": "larger"}', "is not evidence"),
        ('{"id": "other", "rules": {}, "runs": []}', r"larger\.json holds the evidence of 'other'"),
        (
            '{"id": "larger", "rules": {}, "runs": [{"asked": {}, "figures": [], "scale": "huge"}]}',
            "'huge' is not known",
        ),
        ('{"id": "larger", "rules": {}, "runs": [{"asked": {}, "figures": [], "scale": "smoke"}]}', "is not evidence"),
    ],
)
def test_a_broken_file_is_named_and_not_overwritten(folder, results, text, message):
    path = results / "claims" / "larger.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ClaimError, match=message):
        run("larger", "smoke", results)
    assert path.read_text() == text


def test_results_go_to_the_clone_and_those_of_a_users_own_claim_to_the_current_folder(tmp_path, monkeypatch):
    clone = Path(__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    assert runner.results_folder() == clone / "results"
    assert runner.results_folder(Path(runner.__file__).parent / "bayes" / "any.py") == clone / "results"
    assert runner.results_folder(tmp_path / "mine.py") == tmp_path / "results"
    monkeypatch.setattr(runner, "clone", lambda: None)
    assert runner.results_folder() == tmp_path / "results"


def test_a_claim_of_a_users_own_writes_into_no_clone(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(LARGER)
    monkeypatch.chdir(tmp_path)
    assert main(["claims", "run", "./mine.py", "--scale", "smoke"]) == 0
    assert "no verdict at this scale" in capsys.readouterr().out
    (written,) = (tmp_path / "results" / "claims").iterdir()
    assert not (runner.results_folder() / "claims" / written.name).exists()
    assert main(["claims", "show", "./mine.py"]) == 0
    assert "no verdict" in capsys.readouterr().out


def test_the_page_has_conditions_controls_and_a_table_of_arms(folder, results):
    for id in ("larger", "fragile-at-scale"):
        run(id, "laptop", results)
    run("larger", "smoke", results)
    page = report.page(catalog.find().values(), results=results)
    assert page.startswith("2 claims: 1 reproduced, 1 not run.\n")
    assert "| [larger](#larger) | reproduced | laptop | a \\| b is larger |" in page
    assert "| condition | squares | halves (must fail) |" in page
    assert "| **larger** (headline): a > 0.9, every seed | holds | fails |" in page
    assert "| figure | unit | squares | halves |" in page
    assert "| a | m | 4.667 ± 4 | 0.5 ± 0 |" in page
    assert "| diverged | inf |  |  | 1 |" in page
    assert "**smoke: no verdict at this scale**" in page
    assert "- **Note**: crashed at laptop: ZeroDivisionError" in page


@pytest.mark.parametrize("stated", catalog.find().values(), ids=lambda stated: stated.id)
def test_committed_evidence_is_what_its_figures_say(stated):
    record = records.read(stated.id, runner.results_folder())
    for one in record.runs:
        if stated.rule.conditions and stated.rule.hash in one.outcomes:
            assert runner.load(stated).ask(one.evidence) == one.outcomes[stated.rule.hash]


def test_cli_runs_and_reports(folder, results, capsys):
    assert main(["claims", "run", "larger", "--results", str(results)]) == 0
    assert "larger (laptop): reproduced" in capsys.readouterr().out
    assert main(["claims", "report", "--json", "--results", str(results)]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["fragile-at-scale", "larger"]
    larger = rows["larger"]
    assert list(larger)[:8] == ["id", "verdict", "scale", "paper", "accept", "metrics", "seconds", "commit"]
    assert larger["accept"] == "larger: a > 0.9, every seed"
    assert larger["metrics"]["a, squares"] == {
        "value": pytest.approx(14 / 3),
        "spread": pytest.approx(math.sqrt(49 / 3)),
        "unit": "m",
        "n": 3,
    }
    assert larger["metrics"]["diverged"]["value"] == "inf"
    assert rows["fragile-at-scale"]["verdict"] == "not run"


def test_cli_filters_by_verdict_area_and_scale(folder, results, capsys):
    assert main(["claims", "run", "--all", "--scale", "smoke", "--results", str(results)]) == 0
    capsys.readouterr()
    for words, ids in (
        ([], ["fragile-at-scale", "larger"]),
        (["--verdict", "reproduced"], []),
        (["--scale", "smoke", "--verdict", "reproduced"], ["larger"]),
        (["--area", "bayes"], ["fragile-at-scale"]),
    ):
        assert main(["claims", "report", "--json", *words, "--results", str(results)]) == 0
        assert [row["id"] for row in json.loads(capsys.readouterr().out)] == ids


def test_cli_lists_claims_of_the_verdicts_asked_for(folder, results, capsys):
    assert main(["claims", "run", "larger", "--results", str(results)]) == 0
    capsys.readouterr()
    for words, ids in (
        (["--verdict", "reproduced"], ["larger"]),
        (["--verdict", "not run"], ["fragile-at-scale"]),
        (["--verdict", "not run", "--verdict", "reproduced"], ["fragile-at-scale", "larger"]),
        (["--verdict", "partly"], []),
    ):
        for verb in ("list", "report"):
            assert main(["claims", verb, "--json", *words, "--results", str(results)]) == 0
            assert [row["id"] for row in json.loads(capsys.readouterr().out)] == ids
    assert main(["claims", "list", "--verdict", "partly", "--results", str(results)]) == 0
    assert capsys.readouterr().out == "no claims\n"


def test_every_verdict_is_a_choice():
    assert [choice.value for choice in VerdictChoice] == list(ledger.VERDICTS)


def test_cli_shows_outcomes_and_figures_of_every_arm(folder, results, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["claims", "run", "larger", "--results", str(results)]) == 0
    capsys.readouterr()
    assert main(["claims", "show", "larger", "--results", str(results)]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in (
        "larger (headline): a > 0.9, every seed",
        "holds: squares",
        "fails: halves (must fail)",
        "a squares 4.667 ± 4 m 3",
        "halves 0.5 ± 0 m 3",
        "diverged inf 1",
    ):
        assert line.split() in shown


def test_cli_shows_every_claim_in_the_width_of_the_terminal(capsys, monkeypatch):
    for width in (60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["claims", "show", *catalog.find()]) == 0
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= width
        assert "…" not in shown  # nothing is cut


def test_cli_runs_a_claim_outside_the_package(tmp_path, results, capsys):
    path = tmp_path / "my_claim.py"
    path.write_text(LARGER.replace('id="larger"', 'id="my-own"'))
    assert main(["claims", "run", str(path), "--results", str(results)]) == 0
    assert main(["claims", "show", str(path), "--results", str(results)]) == 0
    assert "must fail" in capsys.readouterr().out
    assert main(["claims", "run", str(path)]) == 1
    assert "could not be traced" in capsys.readouterr().err


def test_cli_fails_when_a_claim_crashes_but_runs_the_others(folder, results, capsys):
    assert main(["claims", "run", "--all", "--scale", "gpu", "--results", str(results)]) == 1
    shown = capsys.readouterr()
    assert "1 of 2 crashed: fragile-at-scale" in shown.err
    assert "larger (gpu): reproduced" in shown.out


def test_cli_never_wraps_an_id_on_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["list"], ["report"]):
        assert main(["claims", *words]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert max(map(len, shown)) <= 80
        for id in catalog.find():
            assert any(line.startswith(f"{id} ") for line in shown), id


def test_cli_lists_and_shows_rules(folder, capsys):
    assert main(["claims", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1] == {
        "id": "larger",
        "area": "",
        "source": "arXiv:0000.00000",
        "paper": "a | b is larger",
        "setting": "squares",
        "accept": "larger: a > 0.9, every seed",
        "method": "squares",
        "negative_controls": ["halves"],
        "positive_control": None,
    }
    assert main(["claims", "show", "fragile-at-scale"]) == 0
    assert "it ends" in capsys.readouterr().out


def test_a_smoke_run_says_no_verdict(folder, results, capsys):
    assert main(["claims", "run", "larger", "--scale", "smoke", "--results", str(results)]) == 0
    assert "larger (smoke): no verdict at this scale" in capsys.readouterr().out
    assert main(["claims", "show", "larger", "--results", str(results)]) == 0
    shown = capsys.readouterr().out
    assert "smoke: no verdict at this scale" in shown
    assert "reproduced," not in shown


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run"], 2, "name the claims to run, or use --all"),
        (["run", "larger", "--all"], 2, "name the claims to run, or use --all"),
        (["run", "unknown"], 1, "no claim is called 'unknown'"),
        (["run", "larger", "--scale", "huge"], 2, "huge"),
        (["show"], 2, "name the claims to show"),
        (["list", "--verdict", "sure"], 2, "'reproduced', 'partly', 'not reproduced', 'not run'"),
    ],
)
def test_cli_refuses(folder, results, capsys, words, code, message):
    assert main(["claims", *words, *(["--results", str(results)])]) == code
    assert message in capsys.readouterr().err
    assert not results.exists()
