"""`pippin models`, `pull` and `remove`, on a cache of their own."""

import json

import pytest

from pippin.core.store import catalog


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
    assert len(lines) == len(catalog.entries()) + 2
    assert lines[1].split() == ["smollm2-135m", "*", "chat", "98.4", "MB", "Apache-2.0", "no"]


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
