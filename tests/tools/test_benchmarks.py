"""Benchmarks are run in processes of their own, kept with their circumstances, and shown on the pages."""

import json
import subprocess
import sys
import time

import generate_docs
import pytest
import run_benchmarks

sys.path.append(str(run_benchmarks.ROOT / "benchmarks"))
import _rows

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


# --- the engine's page ------------------------------------------------------------------------------------------------


def row(**changes):
    return {
        **{"what": "decode", "unit": "tokens/s", "ours": 150.0, "peer": "abacus", "peer_value": 100.0, "goal": 2.0},
        **{"ratio": 1.5, "met": False, "note": "load 0.1"},
        **changes,
    }


def keep(root, name, *rows):
    folder = root / "results" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"rows": rows, "started": "2026-01-02T03:04:05", "commit": None, "changed": False}
    kept |= {"machine": {"cpu": "an abacus", "threads": 2}, "versions": {"python": "3.11"}}
    (folder / f"{name}.json").write_text(json.dumps(kept))


def test_figures_of_the_engine_say_what_was_met_and_by_how_much_not(root):
    absent = row(peer="llama.cpp (not installed)", peer_value=None, ratio=None, met=None, note="")
    keep(root, "cpu_decode", row(), row(what="prompt", ratio=4.0, met=True), absent)
    shown = generate_docs.figures()
    assert "**1 of 2** goals were met" in shown
    assert "| decode | 150 | abacus | 100 | tokens/s | 1.5 | 2 | no |" in shown
    assert "| decode | 150 | llama.cpp (not installed) |  | tokens/s |  | 2 |  |" in shown
    assert shown.count("- load 0.1") == 1
    assert "- decode, beside abacus: 1.5 of 2, 25 % short" in shown
    assert "Nothing has been recorded yet: `python tools/run_benchmarks.py soak`." in shown
    assert "cpu_decode" not in generate_docs.benchmarks_page()  # it has its own page


def test_the_engines_page_is_valid_before_anything_was_recorded(root, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_docs, "DOCS", tmp_path)
    page = tmp_path / "performance.md"
    page.write_text("# Speed\n<!-- figures -->\nold\n<!-- /figures -->\nWhy.\n")
    shown = generate_docs.performance_page()
    assert shown.startswith("# Speed\n<!-- figures -->\n**0 of 0** goals")
    assert shown.endswith("<!-- /figures -->\nWhy.\n")
    page.write_text("# Speed\n")
    with pytest.raises(SystemExit, match="needs one pair"):
        generate_docs.performance_page()


def test_the_soak_is_run_by_its_name_only(root, monkeypatch, capfd):
    (root / "benchmarks" / "soak.py").write_text(TOY)
    assert run(monkeypatch, "--quick") == 0
    assert "soak" not in capfd.readouterr().out
    assert run(monkeypatch, "--quick", "soak") == 0
    assert "== soak" in capfd.readouterr().out


def test_a_row_without_its_peer_is_kept(root, monkeypatch, capfd):
    rows = json.dumps([row(peer_value=None, ratio=None, met=None)])
    (root / "benchmarks" / "adding.py").write_text(f"print({rows!r})")
    assert run(monkeypatch) == 0
    assert "decode: 150 tokens/s, abacus" in capfd.readouterr().out


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_medians_with_the_range_in_their_note():
    slow = _rows.compared("load", "s", [1.0, 4.0, 2.0], "abacus", [8.0], 3, higher_is_better=False, note="quiet")
    assert slow.to_dict() == {
        **{"what": "load", "unit": "s", "ours": 2.0, "peer": "abacus", "peer_value": 8.0, "goal": 3, "ratio": 4.0},
        **{"met": True, "note": "ours 1 to 4, theirs 8; quiet"},
    }
    alone = _rows.compared("load", "s", [2.0], "abacus", None, 3).to_dict()
    assert (alone["ratio"], alone["met"], alone["note"]) == (None, None, "ours 2")


@pytest.mark.parametrize(("ours", "theirs", "higher", "ratio", "met"), [
    (3.0, 0.0, True, None, True),  # more than none at all
    (0.0, 0.0, True, None, None),
    (0.0, 3.0, True, 0.0, False),
    (0.0, 3.0, False, None, True),
    (3.0, 0.0, False, 0.0, False),
])  # fmt: skip
def test_a_row_beside_zero_has_no_ratio(ours, theirs, higher, ratio, met):
    kept = _rows.Row("whole documents", "%", ours, "abacus", theirs, 1.0, higher).to_dict()
    assert (kept["ratio"], kept["met"]) == (ratio, met)


def test_measurements_are_taken_in_turn_after_one_that_does_not_count(monkeypatch, capsys):
    monkeypatch.setattr(_rows, "SETTLE", 0.0)
    calls = []
    measures = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    found = _rows.in_turn(measures, 3, "letters")
    assert calls == list("abbaabba")
    assert found == {"a": [4, 5, 8], "b": [3, 6, 7]}
    assert "letters: 3 of 3" in capsys.readouterr().err


def test_the_watch_leaves_out_what_this_process_and_its_children_use(monkeypatch):
    """Other processes: all that the machine used, less ours."""
    spin = "import time\nend = time.monotonic() + 0.5\nwhile time.monotonic() < end: pass"
    used = _rows.psutil.cpu_times()
    monkeypatch.setattr(_rows.psutil, "cpu_times", lambda: used)  # a machine on which nobody uses anything
    with _rows.Watch() as watch:
        subprocess.run([sys.executable, "-c", spin], check=True)
    assert watch.others == 0.0
    assert str(watch).startswith("load ")
    clock = iter([used, used._replace(user=used.user + 1000.0)])
    monkeypatch.setattr(_rows.psutil, "cpu_times", lambda: next(clock))
    with _rows.Watch() as watch:
        time.sleep(0.01)
    assert watch.others > 100
