"""The table of all claims: for a terminal, for a program, and for the docs.

Notable here:
- the same summary feeds all three, and it is computed from the evidence files each time
- a claim that failed stays in, with its figures; one that ran under another rule says so instead of giving a verdict
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pippin.claims import runner
from pippin.claims.ledger import SCALES, VERDICTS, Claim
from pippin.claims.runner import Run
from pippin.core.report import Row

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {"reproduced": "green", "partly": "yellow", "not reproduced": "red", "not run": "dim"}


def summary(claim: Claim, runs: Mapping[str, Run], scale: str | None = None) -> dict[str, Any]:
    """One claim as `pippin claims report --json` prints it.

    Args:
        claim: the claim as it reads now.
        runs: what was recorded, from `runner.read`.
        scale: show this scale, smoke included; by default the largest above smoke that counts.

    Returns:
        id, verdict, scale, paper, accept, metrics (by figure: mean over the seeds, spread, unit, count), seconds,
        commit, conditions, and a note where there is something to know about the runs.
    """
    chosen = runner.decisive(claim, runs)
    if scale is not None:
        run = runs.get(scale)
        chosen = (scale, run) if run is not None and run.accept == claim.accept else None
    head = {"id": claim.id, "verdict": "not run", "scale": None, "paper": claim.paper, "accept": claim.accept}
    rest: dict[str, Any] = {"metrics": {}, "seconds": None, "commit": None, "conditions": {}}
    if chosen is not None:
        head |= {"verdict": chosen[1].verdict, "scale": chosen[0]}
        rest = {
            "metrics": {row.name: _metric(row, chosen[1]) for row in chosen[1].evidence.report(claim.id).rows},
            "seconds": chosen[1].seconds,
            "commit": chosen[1].commit,
            "conditions": chosen[1].conditions,
        }
    return head | rest | {"note": _note(claim, runs)}


def summaries(
    claims: Iterable[Claim], *, results: Path | None = None, scale: str | None = None
) -> list[dict[str, Any]]:
    """`summary` of each claim, from the evidence in `results`.

    Raises:
        ClaimError: an evidence file cannot be read.
    """
    return [summary(claim, runner.read(claim.id, results=results), scale) for claim in claims]


def table(rows: list[dict[str, Any]]) -> Table:
    """The summaries for a terminal."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=counts(rows), title_justify="left")
    for name in ("claim", "verdict", "scale", "seconds", "paper", "note"):
        shown.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    for row in rows:
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
        verdict = Text(row["verdict"], style=_STYLES[row["verdict"]])
        shown.add_row(
            Text(row["id"]), verdict, row["scale"] or "", seconds, Text(row["paper"]), Text(row["note"] or "")
        )
    return shown


def counts(rows: list[dict[str, Any]]) -> str:
    """How many claims have each verdict.

    >>> counts([{"verdict": "reproduced"}, {"verdict": "not run"}, {"verdict": "reproduced"}])
    '3 claims: 2 reproduced, 1 not run'
    """
    found = Counter(row["verdict"] for row in rows)
    parts = ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict])
    return f"{len(rows)} claim{'' if len(rows) == 1 else 's'}{': ' if parts else ''}{parts}"


def page(claims: Iterable[Claim], *, results: Path | None = None) -> str:
    """The table and the evidence of every claim in Markdown, for `docs/claims.md`."""
    known = {claim.id: (claim, runner.read(claim.id, results=results)) for claim in claims}
    rows = [summary(claim, runs) for claim, runs in known.values()]
    lines = [counts(rows) + ".", ""]
    if rows:
        lines += ["| claim | verdict | scale | published |", "|---|---|---|---|"]
        lines += [
            f"| [{row['id']}](#{row['id']}) | {row['verdict']} | {row['scale'] or ''} | {_cell(row['paper'])} |"
            for row in rows
        ]
    for claim, runs in known.values():
        lines += ["", *_section(claim, runs)]
    return "\n".join(lines) + "\n"


def _section(claim: Claim, runs: Mapping[str, Run]) -> list[str]:
    lines = [
        f"## {claim.id}",
        "",
        f"- **Published** ({claim.source}): {claim.paper}",
        f"- **Setting**: {claim.setting}",
        f"- **Accepted if**: {claim.accept}",
    ]
    note = _note(claim, runs)
    if note:
        lines.append(f"- **Note**: {note}")
    for scale in reversed(SCALES):
        run = runs.get(scale)
        if run is None or run.error is not None or run.accept != claim.accept:
            continue
        lines += ["", f"**{scale}: {run.verdict}**, {_circumstances(run)}", ""]
        if set(run.conditions) != {"accept"}:
            held = {name: "holds" if holds else "fails" for name, holds in run.conditions.items()}
            lines += [f"- {name.replace('_', ' ')}: {word}" for name, word in held.items()] + [""]
        lines += ["| figure | mean | spread | unit | n |", "|---|---:|---:|---|---:|"]
        for row in run.evidence.report(claim.id).rows:
            spread = "" if row.spread is None else f"{row.spread:.4g}"
            count = len(run.evidence.each(row.name))
            lines.append(f"| {_cell(row.name)} | {row.value:.6g} | {spread} | {_cell(row.unit)} | {count} |")
    return lines


def _circumstances(run: Run) -> str:
    accelerators = ", ".join(a["name"] for a in run.machine["accelerators"])
    machine = f"{run.machine['cpu']}, {run.machine['threads']} threads"
    commit = "no commit" if run.commit is None else run.commit[:10] + (" with changes" if run.changed else "")
    torch = f"torch {run.versions['torch']}" if "torch" in run.versions else "no torch"
    where = f"{machine}, {accelerators}" if accelerators else machine
    return f"{run.seconds:.1f} s on {where}; {torch}; {commit}; {run.started[:10]}"


def _metric(row: Row, run: Run) -> dict[str, Any]:
    values = {"value": row.value, "spread": row.spread}
    plain = {key: v if v is None or math.isfinite(v) else str(v) for key, v in values.items()}
    return plain | {"unit": row.unit, "n": len(run.evidence.each(row.name))}


def _note(claim: Claim, runs: Mapping[str, Run]) -> str | None:
    notes = []
    for scale in SCALES:
        run = runs.get(scale)
        if run is not None and run.error is not None:
            notes.append(f"crashed at {scale}: {run.error}")
        elif run is not None and run.accept != claim.accept:
            notes.append(f"the {scale} run is void: the acceptance rule was changed after it")
    return "; ".join(notes) or None


def _cell(text: str) -> str:
    """Text that a cell of a Markdown table can hold."""
    return " ".join(text.replace("|", "\\|").split())
