"""`pippin doctor`: what it says is true of this machine, and it notices what is wrong."""

import json
import platform
import sys
from dataclasses import replace
from importlib import metadata

import psutil
import pytest

from pippin.cli import doctor, main
from pippin.core import native
from pippin.engine.measure import machine_speed
from pippin.engine.measure.machine_speed import MachineSpeed


def test_json_agrees_with_the_machine(pippin, tmp_path):
    done = pippin("doctor", "--json", env={"PIPPIN_HOME": str(tmp_path / "cache")})
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["usable"] is True
    assert found["problems"] == []
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["machine"]["memory_total"] <= psutil.virtual_memory().total
    assert found["cache"]["folder"] == str(tmp_path / "cache")
    assert found["cache"]["free"] == pytest.approx(psutil.disk_usage(str(tmp_path)).free, rel=0.05)
    assert found["default_model"] == {"name": "smollm2-135m", "size": 98362432, "installed": False}
    assert not (tmp_path / "cache").exists()  # asking changes nothing


def test_the_table_names_the_way_to_a_missing_model(pippin, tmp_path):
    shown = pippin("doctor", env={"PIPPIN_HOME": str(tmp_path), "COLUMNS": "120"}).stdout.decode()
    assert "smollm2-135m: not installed (98.4 MB): pippin pull" in shown
    assert shown.startswith("Pippin works on this machine.\n")
    lines = [line.strip() for line in shown.splitlines()]
    last_of_users = max(number for number, line in enumerate(lines) if line.startswith("extra "))
    assert [number for number, line in enumerate(lines) if line.startswith("for developers")] == [last_of_users + 1]


def test_a_model_for_this_machine_is_recommended(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    known = MachineSpeed({}, quantized=40e9, dense=40e9, bytes_per_weight=2, memory=16 * 10**9)
    monkeypatch.setattr(machine_speed, "machine_speed", lambda: known)
    usage = psutil.disk_usage(str(tmp_path))._replace(free=10**12)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recommended_model"]
    assert found["command"] == "pippin pull qwen3-1.7b"
    assert found["cost"]["name"] == "qwen3-1.7b"
    assert found["cost"]["estimated"] is True
    assert "60 % of the 16.0 GB free memory" in found["reason"]
    assert main(["doctor"]) == 0
    assert f"qwen3-1.7b: pippin pull qwen3-1.7b; {found['reason']}" in capsys.readouterr().out
    monkeypatch.setattr(machine_speed, "machine_speed", lambda: replace(known, memory=10**8))
    assert main(["doctor"]) == 0
    assert "recommended    no other model: " in capsys.readouterr().out


def test_the_extras_of_developers_are_extras():
    assert set(doctor.FOR_DEVELOPERS) < set(doctor.libraries()[1])


def test_a_cache_folder_that_is_a_file_is_a_problem(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path / "file"))
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["usable"] is False
    assert found["problems"] == [f"the cache folder {tmp_path / 'file'} cannot be written; set PIPPIN_HOME to another"]


def test_too_little_space_for_the_default_model_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path))
    usage = psutil.disk_usage(str(tmp_path))._replace(free=1_000_000)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    (problem,) = doctor.diagnose().problems
    assert "1.0 MB free" in problem
    assert "98.4 MB" in problem


def test_libraries_and_extras_come_from_the_metadata(monkeypatch):
    required, extras = doctor.libraries()
    assert required["torch"] == metadata.version("torch")
    assert "pytest" not in required
    assert extras["test"] == []
    here = metadata.version

    def version(name):
        if name in {"hypothesis", "torch"}:
            raise metadata.PackageNotFoundError(name)
        return "0.0.1" if name == "beartype" else here(name)

    monkeypatch.setattr(metadata, "version", version)
    required, extras = doctor.libraries()
    assert required["torch"] is None
    assert [name.partition(">")[0].partition("<")[0] for name in extras["test"]] == ["hypothesis", "beartype"]
    monkeypatch.setitem(sys.modules, "torch", None)  # import torch raises ImportError
    diagnosis = doctor.diagnose()
    assert diagnosis.problems[0] == "torch is missing; reinstall pippin"
    assert diagnosis.problems[1].startswith("torch cannot be loaded: ")
    assert not diagnosis.usable
    assert diagnosis.recommended_model is None
    lines = dict(doctor._extras(diagnosis))
    assert lines["for developers"].startswith("test lacks 2, ")
    diagnosis.extras = {"plot": ["matplotlib>=3.9"], "image": []}
    assert doctor._extras(diagnosis)[:2] == [
        ("extra plot", "lacks matplotlib>=3.9: pip install 'pippin[plot]'"),
        ("extra image", "complete"),
    ]


def test_it_says_what_computes(monkeypatch):
    kernels = doctor.diagnose().kernels
    assert kernels["instruction_set"] == (native.instruction_set() or None)
    assert (kernels["threads"], kernels["why_not"]) == (native.threads(), native.unavailable_reason() or None)
    known = {"instruction_set": "avx2", "available": ["avx2", "generic"], "threads": 1, "why_not": None}
    assert doctor._kernels_line(known) == "native, for avx2 (also available: generic), 1 thread"
    plain = {"instruction_set": "generic", "available": ["generic"], "threads": 2, "why_not": None}
    assert doctor._kernels_line(plain) == "native, for generic, 2 threads"
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "unavailable_reason", lambda: "the reason")
    assert ("kernels", "none, torch is used: the reason") in doctor._lines(doctor.diagnose())
