"""The speed of this machine: measured once, kept in the cache folder, and forgotten on another machine."""

import json

import pytest

from pippin.core import native
from pippin.engine.measure import machine_speed as speeds


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """A measurement of milliseconds, and a cache folder of its own."""
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(speeds, "_BYTES", 12_000_000)


@pytest.fixture
def measured(monkeypatch):
    """The devices that were measured, with made-up rates."""
    seen = []
    monkeypatch.setattr(speeds, "_measure", lambda device: seen.append(device) or [20e9, 30e9])
    return seen


def test_a_measurement_has_positive_rates():
    found = speeds.machine_speed()
    assert 1e8 < found.dense < 1e13
    assert (1e8 < found.quantized < 1e13) if native.library() is not None else found.quantized == 0
    assert found.memory > 0
    assert found.measured == {}


def test_without_kernels_the_bandwidth_of_torch_counts(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "instruction_set", lambda: "")
    found = speeds.machine_speed()
    assert found.quantized == 0
    assert found.dense > 1e8


def test_it_is_measured_once_and_again_on_another_machine(measured, monkeypatch, tmp_path):
    (tmp_path / "cache").mkdir()
    first = speeds.machine_speed()
    assert (first.quantized, first.dense) == (20e9, 30e9)
    again = speeds.machine_speed()
    assert (again.machine, again.dense, len(measured)) == (first.machine, first.dense, 1)
    monkeypatch.setattr(native, "instruction_set", lambda: "other kernels")
    assert speeds.machine_speed().machine["kernels"] == "other kernels"
    assert len(measured) == 2


def test_a_folder_that_does_not_exist_is_not_created(measured, tmp_path):
    speeds.machine_speed()
    speeds.machine_speed()
    assert len(measured) == 2
    assert not (tmp_path / "cache").exists()


def test_measured_models_are_remembered_for_this_machine(measured, monkeypatch, tmp_path):
    (tmp_path / "cache").mkdir()
    speeds.remember("smollm2-135m", 300.0)
    speeds.remember("qwen3-0.6b", 40.5)
    assert speeds.machine_speed().measured == {"smollm2-135m": 300.0, "qwen3-0.6b": 40.5}
    monkeypatch.setattr(native, "default_threads", lambda: 999)
    assert speeds.machine_speed().measured == {}


@pytest.mark.parametrize(
    "damage",
    [
        lambda known: "not JSON",
        lambda known: "[]",
        lambda known: json.dumps(known | {"rates": [1.0]}),
        lambda known: json.dumps(known | {"rates": [1.0, 0.0]}),
        lambda known: json.dumps(known | {"rates": None}),
        lambda known: json.dumps(known | {"measured": {"smollm2-135m": "fast"}}),
        lambda known: json.dumps(known | {"measured": []}),
        lambda known: json.dumps({}),
    ],
)
def test_a_damaged_file_is_measured_anew(measured, damage, tmp_path):
    (tmp_path / "cache").mkdir()
    speeds.machine_speed()
    path = tmp_path / "cache" / speeds.FILE
    path.write_text(damage(json.loads(path.read_text())))
    assert speeds.machine_speed().dense == 30e9
    assert len(measured) == 2
    assert json.loads(path.read_text())["rates"] == [20e9, 30e9]
