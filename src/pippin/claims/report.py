"""The table of all claims: for a terminal, for a program, and for the docs.

Notable here:
- the same summary feeds all three, and it is computed from the files of claims and evidence each time; no claim is
  imported
- a verdict is marked stale where the rule or a module changed since the run, or where that cannot be known
- a claim that failed stays in, with its figures; so do rules that were superseded, with what was wrong with them
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pippin.claims import catalog, records, runner
from pippin.claims.catalog import Stated, StatedRule
from pippin.claims.ledger import VERDICTS, Figure, turned_away
from pippin.claims.records import Record, Run
from pippin.core.report import Row

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_STYLES = {"reproduced": "green", "partly": "yellow", "not reproduced": "red", "not run": "dim"}
_COUNTING = ("gpu", "long", "laptop")  # the largest scale decides; a smoke run gives no verdict


def summary(stated: Stated, record: Record, scale: str | None = None) -> dict[str, Any]:
    """One claim as `pippin claims report --json` prints it.

    Args:
        stated: the claim as its file reads now.
        record: what was recorded, from `records.read`.
        scale: show this scale, smoke included; by default the largest above smoke that has a run under this rule.

    Returns:
        id, verdict, scale, paper, accept, metrics (by figure and arm: mean over the seeds, spread, unit, count),
        seconds, commit; area, source, version, conditions with their outcome, controls with what turned them away,
        `reasons` that keep the claim from `reproduced`, `stale` with what changed, and a note on other runs.
    """
    run = _decisive(stated, record, scale)
    verdict, reasons = ("not run", ()) if run is None else record.judge(run, stated.rule.hash)
    rows = [] if run is None else run.evidence.report(stated.id).rows
    return {
        "id": stated.id,
        "verdict": verdict,
        "scale": None if run is None else run.scale,
        "paper": stated.headline,
        "accept": accept(stated.rule),
        "metrics": {row.name: _metric(row, run) for row in rows if run is not None},
        "seconds": None if run is None else run.seconds,
        "commit": None if run is None else run.commit,
        "area": stated.area,
        "source": stated.source,
        "version": stated.rule.version,
        "conditions": _conditions(stated.rule, run),
        "controls": _controls(stated.rule, run),
        "reasons": list(reasons),
        "stale": [] if run is None else stale(stated, run),
        "note": _note(stated, record),
    }


def summaries(
    claims: Iterable[Stated],
    *,
    results: Path | None = None,
    scale: str | None = None,
    verdicts: Collection[str] = VERDICTS,
    area: str | None = None,
) -> list[dict[str, Any]]:
    """`summary` of each claim, from the evidence in `results`; of these verdicts and this area only, if given.

    Raises:
        ClaimError: an evidence file cannot be read.
    """
    rows = [summary(stated, _record(stated, results), scale) for stated in claims]
    return [row for row in rows if row["verdict"] in verdicts and area in (None, row["area"])]


def _record(stated: Stated, results: Path | None) -> Record:
    return records.read(stated.id, results or runner.results_folder(stated.file))


def accept(rule: StatedRule) -> str:
    """The rule in words."""
    return rule.accept or "; ".join(f"{one.name}: {one.text}" for one in rule.conditions)


def stale(stated: Stated, run: Run) -> list[str]:
    """What has changed since a run, or is not known of it; empty if the run still stands for the code as it is."""
    found = []
    if run.rule != stated.rule.hash:
        found.append("the rule was asked of these figures after the run")
    if run.modules is None:
        found.append("which code was measured was not recorded")
        return found
    now = catalog.modules(stated)
    changed = sorted(name for name in now.keys() | run.modules.keys() if now.get(name) != run.modules.get(name))
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        found.append(f"changed since the run: {', '.join(changed[:3])}{more}")
    return found


def label(row: dict[str, Any]) -> str:
    """The verdict with its mark: "reproduced, stale"."""
    return f"{row['verdict']}, stale" if row["stale"] else str(row["verdict"])


def table(rows: list[dict[str, Any]], width: int = 80) -> Table:
    """The summaries for a terminal of that many columns; ids and verdicts are never wrapped."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=counts(rows), title_justify="left", box=None, padding=(0, 1, 0, 0))
    names = ("claim", "verdict", "scale")
    cells = [(row["id"], label(row), row["scale"] or "") for row in rows]
    for name, column in zip(names, zip(*cells, strict=True) if cells else ((), (), ()), strict=True):
        shown.add_column(name, no_wrap=True, min_width=max(map(len, (name, *column))))
    wide = width >= 120
    if wide:
        shown.add_column("what keeps it from reproduced", overflow="fold")
    for row, texts in zip(rows, cells, strict=True):
        why = [Text("; ".join(row["reasons"]) or row["note"] or "")] if wide else []
        shown.add_row(Text(texts[0]), Text(texts[1], style=_STYLES[row["verdict"]]), texts[2], *why)
    return shown


def counts(rows: list[dict[str, Any]]) -> str:
    """How many claims have each verdict.

    >>> row = {"verdict": "reproduced", "stale": []}
    >>> counts([row, {"verdict": "not run", "stale": []}, row | {"stale": ["changed"]}])
    '3 claims: 2 reproduced (1 stale), 1 not run'
    """
    found = Counter(row["verdict"] for row in rows)
    marked = Counter(row["verdict"] for row in rows if row["stale"])
    parts = ", ".join(
        f"{found[verdict]} {verdict}" + (f" ({marked[verdict]} stale)" if marked[verdict] else "")
        for verdict in VERDICTS
        if found[verdict]
    )
    return f"{len(rows)} claim{'' if len(rows) == 1 else 's'}{': ' if parts else ''}{parts}"


def page(claims: Iterable[Stated], *, results: Path | None = None) -> str:
    """The table and the evidence of every claim in Markdown, for `docs/claims.md`."""
    known = [(stated, _record(stated, results)) for stated in claims]
    rows = [summary(stated, record) for stated, record in known]
    lines = [counts(rows) + ".", ""]
    if rows:
        lines += ["| claim | verdict | scale | published |", "|---|---|---|---|"]
        lines += [
            f"| [{row['id']}](#{row['id']}) | {label(row)} | {row['scale'] or ''} | {_cell(row['paper'])} |"
            for row in rows
        ]
    for stated, record in known:
        lines += ["", *section(stated, record)]
    return "\n".join(lines) + "\n"


def section(stated: Stated, record: Record) -> list[str]:
    """One claim in Markdown: what was published, the rule with its outcomes, the figures, and what went before."""
    lines = [*_introduction(stated, record), "", *_rule_lines(stated.rule, _decisive(stated, record))]
    for run in _latest(stated, record):
        lines += ["", _run_heading(stated, record, run), "", *_figures(run)]
    lines += _superseded(stated, record)
    return lines


def view(stated: Stated, record: Record) -> Group:
    """What `section` holds, for a terminal of any width: one line for each outcome, and one for each figure of an arm.

    The tables of `section` have a column for each arm, which 80 columns do not hold.
    """
    from rich.console import Group
    from rich.markdown import Markdown

    parts: list[Any] = [Markdown("\n".join(_introduction(stated, record)))]
    parts += _rule_view(stated.rule, _decisive(stated, record))
    for run in _latest(stated, record):
        parts += ["", Markdown(_run_heading(stated, record, run)), "", _figures_view(run)]
    if before := _superseded(stated, record):
        parts += ["", Markdown("\n".join(before))]
    return Group(*parts)


def _introduction(stated: Stated, record: Record) -> list[str]:
    """What was published, the setting and the verdict, in Markdown."""
    row = summary(stated, record)
    lines = [
        f"## {stated.id}",
        "",
        f"- **Published** ({stated.source}): {stated.headline}",
        f"- **Setting**: {stated.setting}",
        f"- **Verdict**: {label(row)}",
    ]
    lines += [f"- **What keeps it from reproduced**: {'; '.join(row['reasons'])}"] if row["reasons"] else []
    lines += [f"- **Stale**: {'; '.join(row['stale'])}"] if row["stale"] else []
    lines += [f"- **Reported, not judged**: {stated.reported}"] if stated.reported else []
    lines += [f"- **Note**: {row['note']}"] if row["note"] else []
    return lines


def _run_heading(stated: Stated, record: Record, run: Run) -> str:
    """Scale, verdict and circumstances of a run, in Markdown."""
    verdict = record.judge(run, stated.rule.hash)[0] if run.scale in _COUNTING else "no verdict at this scale"
    return f"**{run.scale}: {verdict}**, {_circumstances(run)}"


def _arms(rule: StatedRule) -> list[tuple[str, str]]:
    """Every arm that the rule is asked of, with its heading: a control says what it must do. An arm may be both."""
    arms = [(rule.method, rule.method), *((each, f"{each} (must fail)") for each in rule.negative_controls)]
    return arms + ([(rule.positive_control, f"{rule.positive_control} (must pass)")] if rule.positive_control else [])


def _rule_lines(rule: StatedRule, run: Run | None) -> list[str]:
    """Every condition with its outcome for the method and for each control."""
    arms = _arms(rule)
    lines = [f"| condition | {' | '.join(_cell(head) for _, head in arms)} |", f"|---|{'---|' * len(arms)}"]
    for one in rule.conditions:
        found = [_outcome(rule, run, arm, one.name) for arm, _ in arms]
        name = f"**{one.name}** (headline)" if one.headline else f"**{one.name}**"
        lines.append(f"| {name}: {_cell(one.text)} | {' | '.join(found)} |")
    return lines


def _rule_view(rule: StatedRule, run: Run | None) -> list[Any]:
    """Every condition, with its outcomes below it."""
    from rich.padding import Padding
    from rich.text import Text

    arms = _arms(rule)
    parts: list[Any] = []
    for one in rule.conditions:
        name = (one.name, "bold"), " (headline)" if one.headline else "", f": {one.text}"
        parts += ["", Text.assemble(*name)]
        by_outcome: dict[str, list[str]] = {}
        for arm, head in arms:
            by_outcome.setdefault(_outcome(rule, run, arm, one.name), []).append(head)
        for outcome, heads in by_outcome.items():
            parts.append(Padding(Text.assemble((outcome, "bold"), f": {', '.join(heads)}"), (0, 0, 0, 2)))
    return parts


def _outcome(rule: StatedRule, run: Run | None, arm: str, condition: str) -> str:
    """What a run said of a condition for an arm: "holds", "fails" or "not measured"."""
    held = None if run is None else run.outcomes[rule.hash].get(arm, {}).get(condition)
    return "not measured" if held is None else "holds" if held else "fails"


def _superseded(stated: Stated, record: Record) -> list[str]:
    """The rules that stood before, with what was wrong and what their runs said."""
    lines: list[str] = []
    for key, rule in record.rules.items():
        runs = [run for run in record.runs if run.rule == key]
        if key == stated.rule.hash or not runs:
            continue
        said = ", ".join(f"{record.judge(run, key)[0]} ({run.scale}, {run.started[:10]})" for run in runs)
        wrong = stated.superseded.get(rule.version, "its wording was changed")
        lines += ["", f"**Version {rule.version} of the rule, superseded**: {wrong}.", ""]
        lines += [f"- It read: {accept(rule)}", f"- Its runs: {said}"]
    return lines


def _decisive(stated: Stated, record: Record, scale: str | None = None) -> Run | None:
    """The run that the verdict rests on: the latest that ended at the largest scale, under the rule as it reads now."""
    for wanted in (scale,) if scale else _COUNTING:
        runs = _asked(stated, record, wanted)
        if runs:
            return max(runs, key=lambda run: run.started)
    return None


def _asked(stated: Stated, record: Record, scale: str) -> list[Run]:
    return [run for run in record.runs if run.scale == scale and run.error is None and stated.rule.hash in run.outcomes]


def _latest(stated: Stated, record: Record) -> list[Run]:
    found = [_decisive(stated, record, scale) for scale in (*_COUNTING, "smoke")]
    return [run for run in found if run is not None]


def _note(stated: Stated, record: Record) -> str | None:
    notes = []
    for scale in (*_COUNTING, "smoke"):
        runs = _asked(stated, record, scale)
        verdicts = Counter(record.judge(run, stated.rule.hash)[0] for run in runs)
        if len(verdicts) > 1:
            notes.append(f"the {len(runs)} {scale} runs differ: " + ", ".join(f"{n} {v}" for v, n in verdicts.items()))
        elif len(runs) > 1:
            notes.append(f"{len(runs)} {scale} runs with this verdict")
        notes += [f"crashed at {scale}: {run.error}" for run in record.runs if run.scale == scale and run.error]
    if record.runs and not any(_asked(stated, record, scale) for scale in (*_COUNTING, "smoke")):
        notes.append(f"no run under version {stated.rule.version} of the rule yet")
    return "; ".join(notes) or None


def _conditions(rule: StatedRule, run: Run | None) -> list[dict[str, Any]]:
    outcomes = {} if run is None else run.outcomes[rule.hash].get(rule.method, {})
    return [
        {"name": one.name, "text": one.text, "headline": one.headline, "holds": outcomes.get(one.name)}
        for one in rule.conditions
    ]


def _controls(rule: StatedRule, run: Run | None) -> list[dict[str, Any]]:
    outcomes = {} if run is None else run.outcomes[rule.hash]
    found: list[dict[str, Any]] = [
        {"name": name, "must": "fail", "fails": turned_away(rule, outcomes, name)} for name in rule.negative_controls
    ]
    if rule.positive_control:
        fails = turned_away(rule, outcomes, rule.positive_control)
        found.append({"name": rule.positive_control, "must": "pass", "fails": fails})
    return found


def _figures(run: Run) -> list[str]:
    """The figures of arms as a table of arms, and the others one to a row."""
    evidence = run.evidence
    of_arms = [figure for figure in run.figures if figure.arm is not None]
    lines: list[str] = []
    if of_arms:
        arms = list(dict.fromkeys(figure.arm or "" for figure in of_arms))
        lines += [f"| figure | unit | {' | '.join(map(_cell, arms))} |", f"|---|---|{'--:|' * len(arms)}"]
        for name in dict.fromkeys(figure.name for figure in of_arms):
            unit = next(figure.unit for figure in of_arms if figure.name == name)
            cells = [_mean([f.value for f in of_arms if f.name == name and f.arm == arm]) for arm in arms]
            lines.append(f"| {_cell(name)} | {_cell(unit)} | {' | '.join(cells)} |")
        lines.append("")
    names = dict.fromkeys(figure.label for figure in run.figures if figure.arm is None)
    if names:
        lines += ["| figure | mean | spread | unit | n |", "|---|---:|---:|---|---:|"]
        for row in evidence.report("").rows:
            if row.name in names:
                spread = "" if row.spread is None else f"{row.spread:.4g}"
                count = len(evidence.each(row.name))
                lines.append(f"| {_cell(row.name)} | {row.value:.6g} | {spread} | {_cell(row.unit)} | {count} |")
    return lines


def _figures_view(run: Run) -> Table:
    """A row for each figure of each arm; the name of a figure stands in the first row only."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, padding=(0, 1, 0, 0))
    shown.add_column("figure", overflow="fold")
    shown.add_column("arm", overflow="fold")
    shown.add_column("mean ± spread", justify="right", no_wrap=True)
    shown.add_column("unit", overflow="fold")
    shown.add_column("n", justify="right", no_wrap=True)
    by_name: dict[str, dict[str, list[Figure]]] = {}
    for figure in run.figures:
        by_name.setdefault(figure.name, {}).setdefault(figure.arm or "", []).append(figure)
    for name, by_arm in by_name.items():
        for index, (arm, figures) in enumerate(by_arm.items()):
            mean = _mean([figure.value for figure in figures])
            first = "" if index else name
            shown.add_row(Text(first), Text(arm), Text(mean), Text(figures[0].unit), str(len(figures)))
    return shown


def _mean(values: list[float]) -> str:
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.4g}"
    spread = statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
    return f"{statistics.fmean(values):.4g} ± {spread:.2g}"


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


def _cell(text: str) -> str:
    """Text that a cell of a Markdown table can hold."""
    return " ".join(text.replace("|", "\\|").split())
