"""What was measured, as it stands in `results/claims/ID.json`: rules by their hash, and runs that are only appended.

Notable here:
- a run is never replaced: one that failed or crashed stays beside the one that passed
- every rule that a run was asked is kept in full, so that old rules and their evidence stay readable
- on reading, each verdict is computed again from the outcomes and must be the one in the file
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pippin.claims.catalog import Stated, StatedCondition, StatedRule
from pippin.claims.ledger import SCALES, Evidence, Figure, Outcomes, Prose, Rule, Scale, Verdict, verdict
from pippin.core.errors import ClaimError
from pippin.core.files import atomic_write


@dataclass(frozen=True)
class Run:
    """One run of one claim.

    Attributes:
        scale: how large it was.
        rule: hash of the rule as it stood at the run.
        figures: everything measured; empty after a crash.
        outcomes: by hash of a rule, arm and condition. Besides the run's own rule, there may be a later one that was
            asked of the same figures.
        error: what crashed and where; None after a whole run.
        seconds: wall time.
        started: UTC, to the second.
        commit: of the code that was measured; None outside a clone.
        changed: whether the code differed from that commit.
        modules: hashes of the modules that the run depended on; None where they are not known.
        machine: what `pippin.core.device.facts` says.
        versions: of Python and of the libraries that the figures depend on.
    """

    scale: str
    rule: str
    figures: tuple[Figure, ...]
    outcomes: dict[str, Outcomes]
    error: str | None
    seconds: float
    started: str
    commit: str | None
    changed: bool
    modules: dict[str, str] | None
    machine: dict[str, Any]
    versions: dict[str, str]

    @property
    def evidence(self) -> Evidence:
        """The figures, to ask a rule of."""
        return Evidence(self.figures)


@dataclass(frozen=True)
class Record:
    """All that is known of a claim: its rules by hash, and its runs in the order they were made."""

    rules: dict[str, StatedRule]
    runs: tuple[Run, ...] = ()

    def judge(self, run: Run, rule: str) -> tuple[Verdict, tuple[str, ...]]:
        """What a run says under one of the rules, and why; `not run` if it was not asked."""
        outcomes = run.outcomes.get(rule)
        if run.error is not None or not outcomes:
            return "not run", ()
        return verdict(_askable(self.rules[rule], outcomes), outcomes)


def read(id: str, results: Path) -> Record:
    """What was recorded of a claim; nothing where it never ran.

    Raises:
        ClaimError: the file is not what `append` writes, or a verdict is not the computed one.
    """
    path = _path(id, results)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["id"] != id:
            raise ClaimError(f"{path.name} holds the evidence of {data['id']!r}")
        record = Record({key: _rule_from_json(rule) for key, rule in data["rules"].items()})
        runs = tuple(_run_from_json(run) for run in data["runs"])
        for written, run in zip(data["runs"], runs, strict=True):
            for rule, asked in written["asked"].items():
                found = record.judge(run, rule)[0]
                if asked["verdict"] != found:
                    raise ClaimError(
                        f"the {run.scale} verdict of {id!r} reads {asked['verdict']!r}, "
                        f"but its conditions give {found!r}"
                    )
        return replace(record, runs=runs)
    except FileNotFoundError:
        return Record({})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ClaimError(
            f"{path} is not evidence that `pippin claims run` wrote: {error!r}; restore or delete it"
        ) from error


def append(stated: Stated, run: Run, results: Path) -> Record:
    """Add one run to a claim's file, and its rule where that is new.

    Raises:
        ClaimError: the file of earlier evidence cannot be read.
    """
    earlier = read(stated.id, results)
    record = Record({**earlier.rules, stated.rule.hash: stated.rule}, (*earlier.runs, run))
    write(stated, record, results)
    return record


def write(stated: Stated, record: Record, results: Path) -> None:
    """Write the whole file of a claim."""
    data = {
        "id": stated.id,
        "source": stated.source,
        "headline": stated.headline,
        "setting": stated.setting,
        "rules": {key: _rule_to_json(rule) for key, rule in record.rules.items()},
        "runs": [_run_to_json(record, run) for run in record.runs],
    }
    path = _path(stated.id, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(f"{json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)}\n".encode())


def _path(id: str, results: Path) -> Path:
    return results / "claims" / f"{id}.json"


def _askable(rule: StatedRule, outcomes: Outcomes) -> Rule:
    return rule if rule.conditions else Prose(tuple(outcomes.get("", {})))


def _rule_to_json(rule: StatedRule) -> dict[str, Any]:
    if rule.accept:
        return {"version": rule.version, "accept": rule.accept}
    return {key: value for key, value in asdict(rule).items() if key != "accept"}


def _rule_from_json(data: dict[str, Any]) -> StatedRule:
    if "accept" in data:
        return StatedRule(data["version"], "", (), None, (), data["accept"])
    conditions = tuple(StatedCondition(**each) for each in data["conditions"])
    return StatedRule(**data | {"negative_controls": tuple(data["negative_controls"]), "conditions": conditions})


def _run_to_json(record: Record, run: Run) -> dict[str, Any]:
    """JSON knows no infinities and no NaN: those are written as text that `float` reads."""
    figures = []
    for figure in run.figures:
        one = asdict(figure) | {"value": figure.value if math.isfinite(figure.value) else str(figure.value)}
        figures.append({key: value for key, value in one.items() if value not in (None, "") or key == "seed"})
    asked = {rule: {"verdict": record.judge(run, rule)[0], "outcomes": found} for rule, found in run.outcomes.items()}
    fields = {key: value for key, value in asdict(run).items() if key not in ("figures", "outcomes")}
    return {"asked": asked} | fields | {"figures": figures}


def _run_from_json(data: dict[str, Any]) -> Run:
    asked = {rule: found["outcomes"] for rule, found in data["asked"].items()}
    figures = tuple(Figure(**figure | {"value": float(figure["value"])}) for figure in data["figures"])
    fields = {key: value for key, value in data.items() if key not in ("asked", "figures")}
    if Scale(fields["scale"]).name not in SCALES:
        raise ValueError(fields["scale"])
    return Run(**fields, figures=figures, outcomes=asked)
