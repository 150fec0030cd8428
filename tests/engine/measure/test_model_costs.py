"""What models cost: estimates against recorded benchmarks, and the choice of a model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pippin.core import native
from pippin.core.store import catalog
from pippin.engine.measure import measure_speed
from pippin.engine.measure.machine_speed import MachineSpeed
from pippin.engine.measure.model_costs import cache_bytes, model_cost, recommend, tokens_per_second

BENCHMARKS = Path(__file__).parents[3] / "results" / "benchmarks"
ENTRIES = catalog.entries()
GB = 10**9
MACHINE = MachineSpeed({}, quantized=40e9, dense=40e9, bytes_per_weight=2, memory=16 * GB)


def recorded(name: str) -> list[dict]:
    return json.loads((BENCHMARKS / f"{name}.json").read_text())["rows"]


def bandwidths(weights: int, cache: float, what: str) -> dict[str, tuple[float, float]]:
    """Recorded memory bandwidth and decoding speed by number of threads: the limit is bandwidth divided by reads."""
    rows = [row for row in recorded("cpu_decode") if row["peer"] == "memory bandwidth limit" and what in row["what"]]
    return {row["what"].rsplit(", ", 1)[1]: (row["peer_value"] * (weights + cache), row["ours"]) for row in rows}


def test_the_estimate_is_within_30_percent_of_the_recorded_speed():
    entry = ENTRIES["smollm2-135m"]
    cache = cache_bytes(entry.network)
    found = bandwidths(96_577_380, cache, "135M, Q4_1 file")  # the bytes that the benchmark counted
    assert found.keys() == {"1 thread", "2 threads"}
    for bandwidth, measured in found.values():
        cost = model_cost(entry, replace(MACHINE, quantized=bandwidth))
        assert cost.tokens_per_second == pytest.approx(measured, rel=0.3)
        coder = model_cost(ENTRIES["qwen2.5-coder-0.5b"], replace(MACHINE, quantized=bandwidth))
        (row,) = (row for row in recorded("speculation") if row["what"].startswith("n-gram, qwen2.5-coder-0.5b"))
        assert coder.tokens_per_second == pytest.approx(row["peer_value"], rel=0.3)
    for threads, (limit, measured) in bandwidths(1, 0, "1B of random weights").items():  # 22 layers
        assert tokens_per_second(1, 0, 22, limit) == pytest.approx(measured, rel=0.3), threads


def test_memory_is_that_of_the_recorded_process():
    (row, *_) = (row for row in recorded("cpu_memory") if row["what"] == "resident memory, Q4_1 file")
    assert model_cost(ENTRIES["smollm2-135m"], MACHINE).memory == pytest.approx(1e6 * row["ours"], rel=0.1)


def test_the_cache_is_that_of_the_loaded_model(model):
    assert cache_bytes(ENTRIES["smollm2-135m"].network) == measure_speed.cache_bytes(model.config, "bfloat16", 512)


@pytest.mark.skipif(native.library() is None, reason="without the kernels, weights are widened")
def test_the_file_is_about_what_a_token_reads(default_model_path):
    import pippin

    loaded = pippin.load(default_model_path, device="cpu")
    assert measure_speed.weight_bytes(loaded.module) == pytest.approx(ENTRIES["smollm2-135m"].size, rel=0.03)


def test_weights_are_counted_as_they_are_in_memory():
    dense = ENTRIES["qwen3-0.6b"]
    two, four = (model_cost(dense, replace(MACHINE, bytes_per_weight=each)) for each in (2, 4))
    assert four.memory - two.memory == 2 * dense.network.parameters
    assert 1.8 < two.tokens_per_second / four.tokens_per_second < 2
    coder = ENTRIES["qwen2.5-coder-0.5b"]
    packed, widened = model_cost(coder, MACHINE), model_cost(coder, replace(MACHINE, quantized=0.0))
    assert widened.memory - packed.memory == 2 * coder.network.parameters - coder.size
    without_embedding = (coder.size - coder.network.embedding_bytes + cache_bytes(coder.network)) / 40e9
    assert packed.tokens_per_second == pytest.approx(1 / (without_embedding + 24 * 20e-6))
    assert model_cost(ENTRIES["all-minilm-l6-v2"], MACHINE) is None
    assert model_cost(ENTRIES["mnist"], MACHINE) is None


def test_a_measured_speed_replaces_the_estimate():
    entry = ENTRIES["qwen3-1.7b"]
    known = model_cost(entry, replace(MACHINE, measured={"qwen3-1.7b": 12.5}))
    assert (known.tokens_per_second, known.estimated) == (12.5, False)
    assert model_cost(entry, MACHINE).estimated


@pytest.mark.parametrize(
    ("machine", "disk", "name"),
    [
        (MACHINE, 100 * GB, "qwen3-1.7b"),
        (replace(MACHINE, dense=300e9), 100 * GB, "qwen3-4b"),
        (replace(MACHINE, dense=300e9, memory=13 * GB), 100 * GB, "smollm3-3b"),  # 8.3 GB are more than 60 %
        (replace(MACHINE, memory=3 * GB), 100 * GB, "qwen3-0.6b"),
        (MACHINE, GB, "smollm2-360m"),
        (replace(MACHINE, dense=1e9), 100 * GB, "smollm2-135m"),
        (replace(MACHINE, dense=1e9, quantized=0.5e9), 100 * GB, None),
        (replace(MACHINE, measured={"qwen3-1.7b": 7.9}), 100 * GB, "smollm2-1.7b"),
    ],
)
def test_the_largest_model_with_room_and_speed_is_recommended(machine, disk, name):
    found = recommend(list(ENTRIES.values()), machine, disk)
    assert (found and found.cost.name) == name
    if found:
        assert found.command == f"pippin pull {name}"


def test_a_model_that_is_here_needs_no_more_disk():
    assert recommend(list(ENTRIES.values()), MACHINE, 0, ["qwen3-1.7b"]).cost.name == "qwen3-1.7b"


def test_gated_and_other_licenses_are_not_recommended():
    entries = [replace(ENTRIES["qwen3-0.6b"], gated=True), replace(ENTRIES["qwen3-1.7b"], tier="B")]
    entries.append(replace(ENTRIES["smollm2-1.7b"], role="base"))
    assert recommend(entries, MACHINE, 100 * GB) is None


def test_the_reason_has_its_numbers():
    found = recommend(list(ENTRIES.values()), MACHINE, 100 * GB)
    assert "60 % of the 16.0 GB free memory (3.7 GB)" in found.reason
    assert "at least 8 tokens/s (~11)" in found.reason
