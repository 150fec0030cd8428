"""`pippin models`, `pull` and `remove`, on a cache of their own."""

import json
import sys

import pytest

from pippin.cli import models
from pippin.core.files import format_bytes
from pippin.core.store import catalog
from pippin.engine.measure.machine_speed import MachineSpeed
from pippin.language.task_adapters import task_adapters


def listed(pippin, home) -> dict[str, dict]:
    done = pippin("models", "--json", env={"PIPPIN_HOME": str(home)})
    assert done.returncode == 0
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_the_list_is_the_catalog(pippin, tmp_path):
    rows = listed(pippin, tmp_path)
    assert rows.keys() == catalog.entries().keys()
    assert [name for name, row in rows.items() if row["default"]] == ["smollm2-135m"]
    assert not any(row["installed"] for row in rows.values())
    for entry in catalog.entries().values():
        assert (rows[entry.name]["size"], rows[entry.name]["license"]) == (entry.size, entry.license)


def test_the_table_has_a_line_for_each(pippin, tmp_path):
    shown = pippin("models", env={"PIPPIN_HOME": str(tmp_path), "COLUMNS": "120"}).stdout.decode()
    lines = shown.splitlines()
    # two headings, a line between, two notes
    assert len(lines) == len(catalog.entries()) + len(task_adapters()) + 5
    first = lines[1].split()
    assert first[:7] == ["smollm2-135m", "*", "chat", "98.4", "MB", "335.2", "MB"]
    assert first[7].startswith("~")
    assert first[8:] == ["no", "Apache-2.0"]


def test_json_has_the_costs_of_language_models(pippin, tmp_path):
    rows = listed(pippin, tmp_path)
    for entry in catalog.entries().values():
        row = rows[entry.name]
        assert row["task_adapters"] == [
            {"name": each.name, "task": each.task, "size": each.size}
            for each in task_adapters()
            if each.model == entry.name
        ]
        if entry.network is None:
            assert (row["parameters"], row["memory"], row["tokens_per_second"], row["estimated"]) == (None,) * 4
            continue
        assert row["parameters"] == entry.network.parameters
        assert row["memory"] > 225_000_000
        assert row["tokens_per_second"] > 0
        assert row["estimated"] is True
    speeds = [rows[name]["tokens_per_second"] for name in ("smollm2-135m", "smollm2-360m", "smollm2-1.7b")]
    assert speeds == sorted(speeds, reverse=True)


def row(name: str, **known: object) -> dict:
    empty = {"kind": "chat", "size": 10**9, "license": "Apache-2.0", "installed": True, "default": False}
    costs = {"memory": 12 * 10**8, "tokens_per_second": 25.47, "estimated": False, "task_adapters": []}
    return {"name": name} | empty | costs | known


def test_the_table_is_readable_at_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    speed = MachineSpeed({}, quantized=40e9, dense=50e9, bytes_per_weight=2, memory=16 * 10**9)
    models._print_tables(models._rows(speed))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for entry in catalog.entries().values():  # each on a line of its own, with its numbers whole
        (line,) = (line for line in lines if line.split()[:1] == [entry.name])
        assert format_bytes(entry.size) in line
        assert ("~" in line) == (entry.network is not None)


def test_adapters_stand_under_their_model_and_measured_speeds_have_no_tilde(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    adapter = {"name": "small-extraction", "task": "extraction", "size": 2_300_000}
    hub = row("a-long-owner-name/and-a-very-long-name-of-a-model-on-the-hub", tokens_per_second=None, memory=None)
    models._print_tables([row("small", task_adapters=[adapter]), row("large", estimated=True), hub])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[6:9] == ["25", "yes", "Apache-2.0"]
    assert lines[2].split() == ["+", "adapter", "extraction", "2.3", "MB", "yes"]
    assert "~25" in lines[3]
    assert max(map(len, lines)) <= 80


def test_the_list_needs_no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # import torch raises ImportError
    assert models._speed() is None
    rows = {row["name"]: row for row in models._rows(None)}
    assert rows["smollm2-135m"]["tokens_per_second"] is None
    assert rows["smollm2-135m"]["parameters"] == 134_515_008


@pytest.mark.parametrize("name", ["smollm2", "no-such-model", ""])
def test_an_unknown_name_is_said(refused, name):
    assert "there is no model or data set" in refused("pull", name, code=3)


def test_offline_is_said(refused, tmp_path):
    env = {"PIPPIN_HOME": str(tmp_path), "PIPPIN_OFFLINE": "1"}
    assert "PIPPIN_OFFLINE=1" in refused("pull", "smollm2-135m", code=3, env=env)
    assert "is not in the cache" in refused("remove", "smollm2-135m", code=3, env=env)


def test_a_wrong_file_is_refused(refused, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF but not the one")
    line = refused("pull", "smollm2-135m", "--from", path, code=3, env={"PIPPIN_HOME": str(tmp_path / "home")})
    assert catalog.entries()["smollm2-135m"].files[0].sha256 in line
    assert refused("pull", "smollm2-135m", "--from", tmp_path / "none", code=2)


def test_pull_from_a_file_then_list_then_remove(pippin, tmp_path, default_model_path):
    home = tmp_path / "home"
    env = {"PIPPIN_HOME": str(home), "PIPPIN_OFFLINE": "1"}
    done = pippin("pull", "smollm2-135m", "--from", default_model_path, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    path = done.stdout.decode().rstrip("\n")
    assert path.startswith(str(home))
    assert path.endswith(".gguf")
    assert pippin("pull", env=env).stdout == done.stdout  # there already; the default needs no name
    assert listed(pippin, home)["smollm2-135m"]["installed"] is True
    diagnosis = json.loads(pippin("doctor", "--json", env=env).stdout)
    assert diagnosis["default_model"]["installed"] is True
    removed = pippin("remove", "smollm2-135m", env=env)
    assert (removed.returncode, removed.stderr) == (0, b"removed smollm2-135m; 98.4 MB freed\n")
    assert listed(pippin, home)["smollm2-135m"]["installed"] is False
