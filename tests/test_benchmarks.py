"""Every benchmark still runs: they are not typed, and their peers are optional, so nothing else would notice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
NEED_A_FOLDER = {"json_schemas", "tarflow_sampling"}
NAMES = sorted({path.stem for path in FOLDER.glob("[a-z]*.py")} - NEED_A_FOLDER)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs(name):
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--json"]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    assert rows
    assert all(row["what"] and row["unit"] for row in rows)
