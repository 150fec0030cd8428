"""Benchmarks are run in processes of their own, kept with their circumstances, and shown on the page."""

import json
import sys

import generate_docs
import pytest
import run_benchmarks

TOY = """
import json, sys
rows = [{"what": "adding | carrying", "unit": "ops/s", "ours": 20.0, "peer": "abacus", "peer_value": 8.0,
         "ratio": 2.5, "goal": 2.0, "met": True}]
print(json.dumps(rows) if "--json" in sys.argv else "quick: " + str("--quick" in sys.argv))
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "adding.py").write_text(TOY)
    (tmp_path / "benchmarks" / "_helper.py").write_text("raise SystemExit(9)")
    for tool in (run_benchmarks, generate_docs):
        monkeypatch.setattr(tool, "ROOT", tmp_path)
    return tmp_path


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["run_benchmarks.py", *words])
    return run_benchmarks.main()


def test_rows_are_kept_and_shown(root, monkeypatch, capfd):
    assert run(monkeypatch) == 0
    assert "adding | carrying: 20 ops/s, 2.50 times abacus" in capfd.readouterr().out
    kept = json.loads((root / "results" / "benchmarks" / "adding.json").read_text())
    assert kept["rows"][0]["ratio"] == 2.5
    assert kept["machine"]["threads"] >= 1
    page = generate_docs.benchmarks_page()
    assert "| adding \\| carrying | 20 | abacus | 8 | ops/s | 2.5 | 2 | yes |" in page
    assert kept["machine"]["cpu"] in page


def test_a_quick_run_keeps_nothing(root, monkeypatch, capfd):
    assert run(monkeypatch, "--quick", "adding") == 0
    assert "quick: True" in capfd.readouterr().out
    assert not (root / "results").exists()
    assert "Nothing has been recorded yet." in generate_docs.benchmarks_page()


def test_a_benchmark_that_fails_fails_and_keeps_nothing(root, monkeypatch):
    (root / "benchmarks" / "adding.py").write_text("raise SystemExit(3)")
    assert run(monkeypatch) == 1
    assert not (root / "results").exists()


def test_an_unknown_name_is_refused(root, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "subtracting")
    assert "no benchmark is called subtracting" in capsys.readouterr().err
