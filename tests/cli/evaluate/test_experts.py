"""`pippin evaluate experts` as a user runs it: the simulator's figures, a plot, and errors in a line."""

import json
from dataclasses import replace

import pytest

from pippin.claims.worlds.expert_traces import zipf_trace
from pippin.cli import main
from pippin.engine.experts import ExpertTrace, Prefetch, simulate


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "trace.npz"
    made = zipf_trace(0, passes=6, layers=3, experts=8, active=2, depth=2)
    replace(made, sizes=made.sizes * 1000).save(path)
    return path


def test_figures_are_those_of_the_simulator(pippin, trace):
    done = pippin("evaluate", "experts", trace, "--capacities", "25%,0.5", "--depths", "0,2", "--json")
    found = json.loads(done.stdout)
    assert (found["passes"], found["bytes_of_all_experts"]) == (6, 24_000)
    assert len(found["runs"]) == 2 * 2 * 6
    (row,) = [
        each for each in found["runs"] if (each["policy"], each["depth"], each["capacity"]) == ("least-stale", 2, 0.25)
    ]
    expected = simulate(ExpertTrace.load(trace), capacity=6000, eviction="least-stale", prefetch=Prefetch(2, count=2))
    assert row["hit_rate"] == expected.stats.hit_rate
    assert row["collisions"] == expected.stats.collisions.sum()
    assert len(row["hit_rate_of_layers"]) == 3


def test_a_table_and_a_plot(pippin, trace, tmp_path):
    done = pippin(
        "evaluate", "experts", trace, "--policies", "lru,belady", "--bandwidth", "1", "--plot", tmp_path / "a.png"
    )
    lines = done.stdout.decode().splitlines()
    assert "ms a pass" in lines[1]
    assert sum("lru" in line for line in lines) == 2 * 4  # depths and capacities
    assert (tmp_path / "a.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "mru"], "'mru' is none of lru"),
        (["--capacities", "0"], "capacities"),
        (["--capacities", "150%"], "1.5"),
        (["--depths", "3"], "0 to 2 for this trace, got 3"),
        (["--capacities", "1%"], "the largest"),
        (["--plot", "a.txt"], "a.txt"),
        (["--capacities", "few"], "few"),
    ],
)
def test_errors_have_a_line(trace, capsys, arguments, message):
    assert main(["evaluate", "experts", str(trace), *arguments]) != 0
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("name", "message"), [("missing.npz", "no file"), ("text.npz", "no trace")])
def test_files_that_are_no_traces(tmp_path, capsys, name, message):
    (tmp_path / "text.npz").write_text("text")
    assert main(["evaluate", "experts", str(tmp_path / name)]) != 0
    assert message in capsys.readouterr().err
