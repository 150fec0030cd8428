"""Run claims, and append their evidence to `results/claims/ID.json`.

Notable here:
- a run from a changed or unknown tree is refused, unless it is a smoke run or its results go elsewhere
- a crash is recorded too, beside the runs that ended
- what a killed run left (checkpoints, finished parts) is found by the next one of the same scale, rule and modules
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pippin.claims import catalog, records
from pippin.claims.catalog import Stated
from pippin.claims.ledger import Claim, Evidence, Scale
from pippin.claims.records import Run
from pippin.core import device
from pippin.core.errors import ClaimError

_MEASURED_WITH = ("pippin", "torch", "numpy", "scikit-learn", "llguidance", "tokenizers", "pydantic", "transformers")


def clone() -> Path | None:
    """The root of the clone that this package runs from; None where it was installed as a wheel."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "src" / "pippin").is_dir() and (root / "pyproject.toml").is_file() else None


def results_folder(file: Path | None = None) -> Path:
    """Where the evidence of a claim is by default: `results/` of the clone for Pippin's own claims, else of the current
    folder.

    Args:
        file: the claim's file; None for Pippin's own.
    """
    root = clone()
    own = file is None or file.resolve().is_relative_to(catalog.FOLDER)
    return (root if root is not None and own else Path.cwd()) / "results"


def load(stated: Stated) -> Claim:
    """Import a claim's file, and no other claim.

    Raises:
        ClaimError: the imported file does not hold the claim that was read from it.
    """
    try:
        inside = stated.file.resolve().relative_to(catalog.FOLDER.parent.parent)
    except ValueError:
        spec = importlib.util.spec_from_file_location(f"pippin_claim_{stated.file.stem}", stated.file)
        if spec is None or spec.loader is None:
            raise ClaimError(f"{stated.file} cannot be imported") from None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(".".join(inside.with_suffix("").parts))
    for value in vars(module).values():
        if isinstance(value, Claim) and value.id == stated.id:
            return value
    raise ClaimError(f"{stated.file.name} holds no claim called {stated.id!r} once it is imported")


def run(stated: Stated, scale: Scale, *, results: Path | None = None) -> tuple[Run, Evidence]:
    """Measure one claim, ask its rule, and append the run; a crash is recorded and returned, not raised.

    Args:
        stated: the claim, from `catalog`.
        scale: how large.
        results: folder that holds `claims/ID.json`; by default `results_folder` of its file.

    Returns:
        The run as recorded, and its evidence with the verdict.

    Raises:
        ClaimError: the code differs from every commit and the run would count, or the file of earlier evidence cannot
            be read.
    """
    top = results or results_folder(stated.file)
    at, changed = commit(stated.file)
    if not scale.is_smoke and top.resolve() == results_folder(stated.file).resolve() and (at is None or changed):
        why = "the code differs from its commit" if changed else "the code belongs to no commit"
        raise ClaimError(
            f"{stated.id}: {why}, so the figures could not be traced to it; commit first, or name another folder with "
            "--results"
        )
    records.read(stated.id, top)  # what cannot be read is said before the work, not after it
    modules = catalog.modules(stated)
    folder = _unfinished(stated, scale, modules)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    clock = time.perf_counter()
    evidence, error = Evidence(), None
    try:
        evidence = load(stated)(replace(scale, path=folder))
    except Exception as crash:
        error = _describe(crash)
    done = Run(
        scale=scale.name,
        rule=stated.rule.hash,
        figures=tuple(evidence.figures),
        outcomes={stated.rule.hash: evidence.outcomes} if error is None else {},
        error=error,
        seconds=round(time.perf_counter() - clock, 3),
        started=started,
        commit=at,
        changed=changed,
        modules=modules,
        machine=machine(),
        versions=versions(),
    )
    records.append(stated, done, top)
    if error is None:
        shutil.rmtree(folder, ignore_errors=True)
    return done, evidence


def ask_again(stated: Stated, *, results: Path | None = None) -> int:
    """Ask the claim's present rule of the runs that were recorded under another; how many were asked.

    A rule that is younger than its figures may well turn them down; the report says that it was asked afterwards.
    """
    top = results or results_folder(stated.file)
    record, rule = records.read(stated.id, top), stated.rule.hash
    claim, runs, count = load(stated), [], 0
    for one in record.runs:
        if one.error is None and rule not in one.outcomes:
            asked = claim.ask(one.evidence)
            if any(value is not None for value in asked[claim.method].values()):
                one, count = replace(one, outcomes={**one.outcomes, rule: asked}), count + 1
        runs.append(one)
    if count:
        records.write(stated, records.Record({**record.rules, rule: stated.rule}, tuple(runs)), top)
    return count


def _unfinished(stated: Stated, scale: Scale, modules: dict[str, str]) -> Path:
    """Where a run leaves what the next one goes on from; another rule or other code goes elsewhere."""
    key = hashlib.sha256(json.dumps([stated.rule.hash, modules]).encode()).hexdigest()[:12]
    return results_folder(stated.file).parent / "build" / "claims" / f"{stated.id}-{scale.name}-{key}"


def _describe(crash: Exception) -> str:
    """The error and where it was raised, without folders: the text is committed."""
    last = traceback.extract_tb(crash.__traceback__)[-1]
    return f"{type(crash).__name__}: {crash} ({Path(last.filename).name}, line {last.lineno}, in {last.name})"


def commit(file: Path | None = None) -> tuple[str | None, bool]:
    """The commit this package runs from (None without a clone), and whether the code differs from it.

    Args:
        file: a claim's file; one outside the package must be committed too, in its own repository.
    """
    root = clone()
    found = (None, False) if root is None else _state(root, "src", "pyproject.toml")
    if file is not None and catalog.FOLDER not in file.resolve().parents:
        own, changed = _state(file.resolve().parent, str(file.resolve()))
        return (own if root is None or own is None else found[0]), changed or found[1]
    return found


def _state(folder: Path, *paths: str) -> tuple[str | None, bool]:
    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
        except FileNotFoundError:  # git is not installed
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", *paths))


def machine() -> dict[str, Any]:
    """What stays the same about this machine, ready for JSON."""
    facts = asdict(device.machine_info())
    del facts["memory_available"]  # of the moment, not of the machine
    return {key: list(value) if isinstance(value, tuple) else value for key, value in facts.items()}


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that figures depend on."""
    found = {"python": sys.version.split()[0]}
    for name in _MEASURED_WITH:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a library that only some claims compare with
            continue
    return found
