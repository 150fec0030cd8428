"""Mutate the core modules with mutmut, run their tests against every mutant, and keep what lived.

    python tools/mutation.py [MODULE...]    such as engine/decoding/sampling; without names: all of `CORE`, hours

Notable here:
- each module is tried against its own tests, not against whatever happens to call it: a rule that only a far test
  notices is a rule that nobody finds when it breaks
- messages of errors are not mutated, nor are decorated functions (mutmut's rule, which spares properties)
- a mutant that no test can tell apart stands in `tests/equivalent_mutants.json` with the reason, under its module,
  function and changed line; it counts for nothing, and one that is listed there and killed is an error
- the result of each module goes to `results/mutation/`, with the commit; the table of docs/mutation.md is made of them
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pippin.claims import runner
from pippin.core.files import atomic_write

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutation"
RESULTS = ROOT / "results" / "mutation"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.json"
GOAL = 0.85

CORE = {
    "core/formats/checkpoint": ("tests/core/formats/test_checkpoint.py", "tests/core/formats/test_model_folders.py"),
    "core/formats/ggml_quants": ("tests/core/formats/test_ggml_quants.py",),
    "core/formats/gguf": ("tests/core/formats/test_gguf.py",),
    "engine/cache/block_pool": ("tests/engine/cache/test_block_pool.py",),
    "engine/cache/prefix_tree": ("tests/engine/cache/test_prefix_tree.py",),
    "engine/grammar/constraint": ("tests/engine/grammar/test_constraint.py",),
    "engine/decoding/sampling": ("tests/engine/decoding/test_sampling.py",),
    "engine/scheduling/scheduler": (
        "tests/engine/scheduling/test_scheduler.py",
        "-k",
        "not random_schedules or 0]",
    ),
    "nn/attention/attention": (
        "tests/nn/attention/test_attention.py",
        "tests/nn/test_visible.py",
        "tests/language/test_decoder.py",
    ),
    "session/transcript": ("tests/session/test_transcript.py",),
    "train/schedules": ("tests/train/test_schedules.py",),
}
"""The modules and the tests that must notice a change in them, as arguments of pytest.

Of the scheduler's random schedules, 100 of the 1000: a mutant that lives runs them all.
"""

CONFIG = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = ["src/pippin/{module}.py"]
also_copy = ["tools"]
do_not_mutate_patterns = ['raise \\w+']
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "mutant_tests", "--hypothesis-profile=mutation"]
pytest_add_cli_args_test_selection = {tests}
process_isolation = "forkserver"
timeout_constant = 4.0
timeout_multiplier = 5.0
"""


def main() -> int:
    """Try the modules; 1 if one of them has less than the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="mutants tried at a time")
    parser.add_argument("modules", nargs="*", metavar="MODULE")
    options = parser.parse_args()
    if unknown := set(options.modules) - set(CORE):
        parser.error(f"no core module is called {', '.join(sorted(unknown))}; there are: {', '.join(CORE)}")
    low = []
    for module in options.modules or CORE:
        found = mutate(module, options.processes)
        print(
            f"{module}: {found['killed']} killed, {len(found['survived'])} survived, {found['equivalent']} equivalent"
        )
        low += [module] if share(found) < GOAL else []
    if low:
        print(f"less than {GOAL:.0%} killed: {', '.join(low)}")
    return int(bool(low))


def mutate(module: str, processes: int) -> dict[str, Any]:
    """Run mutmut over one module, and keep and return what it found."""
    commit, dirty = runner.commit()  # of what is copied now; the working tree may go on
    place = WORK / module.replace("/", ".")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in ("src", "tests", "tools"):
        (place / name).symlink_to(ROOT / name)
    config = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    config += CONFIG.format(module=module, tests=json.dumps(CORE[module]))
    (place / "pyproject.toml").write_text(config, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": "tools", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(processes)]
    with (place / "log").open("w") as log:
        done = subprocess.run(command, cwd=place, env=environment, check=False, stdout=log, stderr=log)
    if done.returncode:
        raise SystemExit(f"{module}: mutmut failed:\n{(place / 'log').read_text()[-3000:]}")
    meta = json.loads((place / "mutants" / "src" / "pippin" / f"{module}.py.meta").read_text(encoding="utf-8"))
    codes: dict[str, int | None] = meta["exit_code_by_key"]
    if None in codes.values():
        raise SystemExit(f"{module}: mutmut stopped before its last mutant")
    lived = [name for name, code in codes.items() if code in (0, 5, 33)]  # 5 and 33: no test runs the function
    known = set(json.loads(EQUIVALENT.read_text(encoding="utf-8")).get(module, {}))
    changes = dict(zip(lived, shown(place, lived), strict=True))
    equivalent = known & set(changes.values())
    if wrong := known - equivalent:
        print(f"{module}: listed as equivalent, but killed or gone: {', '.join(sorted(wrong))}")
    found: dict[str, Any] = {
        "module": module,
        "tests": list(CORE[module]),
        "killed": len(codes) - len(lived),
        "equivalent": sum(change in known for change in changes.values()),
        "survived": sorted(change for change in changes.values() if change not in known),
        "functions_without_a_test": sorted(Counter(function(name) for name in lived if codes[name] != 0)),
        "commit": commit,
        "changed": dirty,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    with atomic_write(RESULTS / f"{module.replace('/', '.')}.json") as file:
        file.write(f"{json.dumps(found, indent=1, ensure_ascii=False)}\n".encode())
    shutil.rmtree(place)
    return found


def share(found: dict[str, Any]) -> float:
    """Killed mutants among those that are not equivalent."""
    tried = found["killed"] + len(found["survived"])
    return found["killed"] / tried if tried else 1.0


def function(mutant: str) -> str:
    """The function that a mutant changes, such as ``Sampler.observe``.

    >>> function("pippin.engine.decoding.sampling.xǁSamplerǁobserve__mutmut_3"), function("pippin.a.x_draw__mutmut_1")
    ('Sampler.observe', 'draw')
    """
    name = mutant.rpartition(".")[2].rpartition("__mutmut_")[0]
    return name[2:].replace("ǁ", ".") if name.startswith("xǁ") else name[2:]


def shown(place: Path, mutants: list[str]) -> Iterator[str]:
    """Each mutant as its function and the lines that it changes: a name that stays when other code moves."""
    for mutant in mutants:
        command = [sys.executable, "-m", "mutmut", "show", mutant]
        text = subprocess.run(command, cwd=place, check=True, capture_output=True, text=True).stdout
        lines = [line for line in text.splitlines() if line[:1] in "+-" and line[:3] not in ("---", "+++")]
        old = " ".join(line[1:].strip() for line in lines if line[0] == "-")
        new = " ".join(line[1:].strip() for line in lines if line[0] == "+")
        yield f"{function(mutant)}: {old} → {new}"


def page() -> str:
    """`docs/mutation.md`: the committed results as a table."""
    rows = [
        "| module | mutants | killed | equivalent | survived | killed of the rest |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        lived = len(found["survived"])
        total = found["killed"] + found["equivalent"] + lived
        cells = (found["module"], total, found["killed"], found["equivalent"], lived, f"{100 * share(found):.1f} %")
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return f"""# Mutation testing

`make nightly` changes each core module in every way that mutmut knows, one change at a time, and asks the module's own
tests to notice. The goal is {GOAL:.0%} of the changes that are not equivalent. The survivors stand in
`results/mutation/`, the equivalent ones with their reasons in `tests/equivalent_mutants.json`.

{chr(10).join(rows)}
"""


if __name__ == "__main__":
    raise SystemExit(main())
