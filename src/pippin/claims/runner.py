"""Find claims, run them, and keep their evidence in `results/claims/ID.json`.

Notable here:
- one file per claim holds the latest run of each scale; a run replaces that of its own scale and no other
- a crash is recorded too, in place of the figures, so that the table cannot show what no longer runs
- on reading, the verdict is computed again and must be the one in the file
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pippin.claims.ledger import Claim, Evidence, Figure, Scale, Verdict, verdict
from pippin.core import device
from pippin.core.errors import ClaimError
from pippin.core.files import atomic_write

PACKAGE = "pippin.claims"
_NOT_CLAIMS = frozenset({"ledger", "runner", "report"})
_MEASURED_WITH = ("pippin", "torch", "numpy", "llguidance", "tokenizers", "pydantic", "transformers")


@dataclass(frozen=True)
class Run:
    """One run of one claim: what its file keeps per scale.

    Attributes:
        accept: the rule as it stood at the run.
        conditions: the parts of the rule and whether they held; empty after a crash.
        figures: everything measured.
        error: what crashed and where; None after a whole run.
        seconds: wall time.
        started: UTC, to the second.
        commit: of the code that was measured; None outside a clone.
        changed: whether `src/` or `pyproject.toml` differed from that commit.
        machine: what `pippin.core.device.facts` says.
        versions: of Python and of the libraries that the figures depend on.
    """

    accept: str
    conditions: dict[str, bool]
    figures: tuple[Figure, ...]
    error: str | None
    seconds: float
    started: str
    commit: str | None
    changed: bool
    machine: dict[str, Any]
    versions: dict[str, str]

    @property
    def verdict(self) -> Verdict:
        """Computed from the conditions."""
        return verdict(self.conditions)

    @property
    def evidence(self) -> Evidence:
        """The figures and conditions as they were measured."""
        evidence = Evidence()
        evidence.figures = list(self.figures)
        evidence.conditions = dict(self.conditions)
        return evidence


def clone() -> Path | None:
    """The root of the clone that this package runs from; None where it was installed as a wheel."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "src" / "pippin").is_dir() and (root / "pyproject.toml").is_file() else None


def results_folder() -> Path:
    """`results/` of the clone, or of the current folder where there is no clone."""
    return (clone() or Path.cwd()) / "results"


def find(package: str | None = None) -> dict[str, Claim]:
    """Every claim by its id, sorted.

    Args:
        package: where to look for the files; by default beside this one.

    Raises:
        ClaimError: a file without a claim, a claim in a file of another name, or an id used twice.
    """
    package = package or PACKAGE
    claims: dict[str, Claim] = {}
    for module in _modules(package):
        for found in _claims_in(package, module):
            if found.id in claims:
                raise ClaimError(f"two claims are called {found.id!r}")
            claims[found.id] = found
    return dict(sorted(claims.items()))


def get(id: str, package: str | None = None) -> Claim:
    """One claim by its id; only its own file is imported.

    Raises:
        ClaimError: no claim has this id; the message lists those there are.
    """
    package = package or PACKAGE
    for module in _modules(package):
        if _belongs(id, module):
            for found in _claims_in(package, module):
                if found.id == id:
                    return found
    known = ", ".join(find(package)) or "none yet"
    raise ClaimError(f"no claim is called {id!r}; there are: {known}")


def run(claim: Claim, scale: Scale, *, results: Path | None = None) -> Run:
    """Measure one claim and record the run; a crash is recorded and returned, not raised.

    Args:
        claim: the claim, from `find` or `get`.
        scale: how large.
        results: folder that holds `claims/ID.json`; by default `results_folder()`.

    Raises:
        ClaimError: the file of earlier evidence cannot be read.
    """
    folder = results or results_folder()
    earlier = read(claim.id, results=folder)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    clock = time.perf_counter()
    evidence, error = Evidence(), None
    try:
        evidence = claim(scale)
    except Exception as crash:
        error = _describe(crash)
    at, changed = commit()
    done = Run(
        accept=claim.accept,
        conditions=evidence.conditions,
        figures=tuple(evidence.figures),
        error=error,
        seconds=round(time.perf_counter() - clock, 3),
        started=started,
        commit=at,
        changed=changed,
        machine=machine(),
        versions=versions(),
    )
    _write(claim, {**earlier, scale.name: done}, folder)
    return done


def read(id: str, *, results: Path | None = None) -> dict[str, Run]:
    """The recorded runs of a claim by scale; empty where it never ran.

    Raises:
        ClaimError: the file is not what `run` writes, or its verdict is not the computed one.
    """
    path = _path(id, results or results_folder())
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["id"] != id:
            raise ClaimError(f"{path.name} holds the evidence of {kept['id']!r}")
        return {Scale(name).name: _run_from_json(id, name, run) for name, run in kept["runs"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClaimError(
            f"{path} is not evidence that `pippin claims run` wrote: {error!r}; restore or delete it"
        ) from error


def decisive(claim: Claim, runs: Mapping[str, Run]) -> tuple[str, Run] | None:
    """The run that the verdict rests on: the largest scale above smoke that ended, under the rule as it reads now."""
    for scale in ("gpu", "laptop"):
        run = runs.get(scale)
        if run is not None and run.error is None and run.accept == claim.accept:
            return scale, run
    return None


def _modules(package: str) -> list[str]:
    folder = importlib.import_module(package).__path__
    names = {module.name for module in pkgutil.iter_modules(folder)} - _NOT_CLAIMS
    return sorted(name for name in names if not name.startswith("_"))


def _belongs(id: str, module: str) -> bool:
    stem = module.replace("_", "-")
    return id == stem or id.startswith(f"{stem}-")


def _claims_in(package: str, module: str) -> list[Claim]:
    contents = vars(importlib.import_module(f"{package}.{module}"))
    found = [value for value in contents.values() if isinstance(value, Claim)]
    if not found:
        raise ClaimError(f"{module}.py is among the claims but holds none")
    for claim in found:
        if not _belongs(claim.id, module):
            raise ClaimError(f"claim {claim.id!r} stands in {module}.py; its file must be named after it")
    return found


def _path(id: str, results: Path) -> Path:
    return results / "claims" / f"{id}.json"


def _write(claim: Claim, runs: Mapping[str, Run], results: Path) -> None:
    kept = {
        "id": claim.id,
        "source": claim.source,
        "paper": claim.paper,
        "setting": claim.setting,
        "accept": claim.accept,
        "runs": {name: _run_to_json(run) for name, run in runs.items()},
    }
    path = _path(claim.id, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(f"{json.dumps(kept, indent=1, ensure_ascii=False, allow_nan=False)}\n".encode())


def _run_to_json(run: Run) -> dict[str, Any]:
    """JSON knows no infinities and no NaN: those are written as text that `float` reads."""
    figures = [
        asdict(figure) | {"value": figure.value if math.isfinite(figure.value) else str(figure.value)}
        for figure in run.figures
    ]
    return {"verdict": run.verdict} | asdict(run) | {"figures": figures}


def _run_from_json(id: str, scale: str, kept: dict[str, Any]) -> Run:
    figures = tuple(Figure(**figure | {"value": float(figure["value"])}) for figure in kept["figures"])
    written = kept.pop("verdict")
    run = Run(**kept | {"figures": figures})
    if run.verdict != written:
        raise ClaimError(f"the {scale} verdict of {id!r} reads {written!r}, but its conditions give {run.verdict!r}")
    return run


def _describe(crash: Exception) -> str:
    """The error and where it was raised, without folders: the text is committed."""
    last = traceback.extract_tb(crash.__traceback__)[-1]
    return f"{type(crash).__name__}: {crash} ({Path(last.filename).name}, line {last.lineno}, in {last.name})"


def commit() -> tuple[str | None, bool]:
    """The commit this package runs from (None without a clone), and whether the code differs from it."""
    root = clone()
    if root is None:
        return None, False

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        except FileNotFoundError:  # git is not installed
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", "src", "pyproject.toml"))


def machine() -> dict[str, Any]:
    """What stays the same about this machine, ready for JSON."""
    facts = asdict(device.facts())
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
