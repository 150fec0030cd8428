"""Run benchmarks one after another and keep their rows, with the machine and versions, in `results/benchmarks/`.

    python tools/run_benchmarks.py [--quick] [NAME...]

Without names: every file of `benchmarks/` but the soak, two_bits and extraction, which take half an hour and more, and
tarflow_sampling, json_schemas and extraction_larger, which need files (TARFLOW_PEER=FOLDER, JSON_SCHEMAS=FOLDER,
EXTRACTION_MODELS=FILES); these are run by their names. `--quick` shows figures in under a minute each and keeps
nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from pippin.claims import runner
from pippin.core.files import atomic_write

ROOT = Path(__file__).resolve().parents[1]
BY_NAME = {"soak", "two_bits", "extraction", "extraction_larger", "tarflow_sampling", "json_schemas"}


def main() -> int:
    """Run them; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute each, nothing is kept")
    parser.add_argument("names", nargs="*", metavar="NAME", help="files of benchmarks/ without .py")
    options = parser.parse_args()
    files = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_"))
    unknown = set(options.names) - {path.stem for path in files}
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are: {[path.stem for path in files]}")
    failed = False
    for path in files:
        if path.stem not in options.names if options.names else path.stem in BY_NAME:
            continue
        print(f"== {path.stem}", flush=True)
        if options.quick:
            failed |= subprocess.run([sys.executable, str(path), "--quick"], cwd=ROOT, check=False).returncode != 0
        else:
            failed |= not _keep(path)
    return int(failed)


def _keep(path: Path) -> bool:
    """Run one in full and write its rows; whether it ended well."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    done = subprocess.run(
        [sys.executable, str(path), "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        return False
    commit, changed = runner.commit()
    kept = {
        "rows": json.loads(done.stdout),
        "started": started,
        "commit": commit,
        "changed": changed,
        "machine": runner.machine(),
        "versions": runner.versions(),
    }
    target = ROOT / "results" / "benchmarks" / f"{path.stem}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as file:
        file.write(f"{json.dumps(kept, indent=1, ensure_ascii=False)}\n".encode())
    for row in kept["rows"]:
        times = "" if row["ratio"] is None else f"{row['ratio']:.2f} times "
        print(f"  {row['what']}: {row['ours']:.4g} {row['unit']}, {times}{row['peer']}")
    return True


if __name__ == "__main__":
    sys.exit(main())
