"""The tables and sentences of docs/tutorials/extraction.md that `make bench` measured, for tools/generate_docs.py.

Shares are rows of results/benchmarks/extraction.json and extraction_larger.json; counts stand in the rows' notes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).resolve().parents[1] / "results" / "benchmarks"
Row = dict[str, Any]

# Sets of documents and sides, in the order of the page.
SETS = {
    "unseen kinds": "kinds that it was not trained on",
    "unseen layouts": "a layout that it was not trained on",
    "unseen languages": "a language that it was not trained on",
    "letters": "letters",
}
ADAPTER = "adapter"
SIDES = {
    ADAPTER: "with its adapter",
    "without adapter": "the model alone",
    "label patterns": "the words after a field's name",
    "llama.cpp (": "llama.cpp, same model and schema",
    "langextract": "LangExtract over llama.cpp",
}
MODELS = {"qwen2.5-coder-0.5b": "Qwen2.5 Coder 0.5B", "qwen2.5-coder-1.5b": "Qwen2.5 Coder 1.5B"}


def default_model() -> str:
    """How right the default model is beside all other sides, and what the adapter leaves empty."""
    rows = _recorded("extraction")
    lines = [f"| fields right | {' | '.join(SIDES.values())} |", "|---" * (1 + len(SIDES)) + "|"]
    for name, title in SETS.items():
        shares = [_share(_one(rows, name, "fields right", side)) for side in SIDES]
        lines.append(f"| {title} | {' | '.join(shares)} |")
    invented = [_invented(rows, side) for side in SIDES]
    lines.append(f"| written values that the text does not say | {' | '.join(invented)} |")
    cores = _machine("extraction")
    seconds = [_range(_seconds(rows, side), decimals) for side, decimals in zip(SIDES, (1, 1, 0, 0, 0), strict=True)]
    lines.append(f"| seconds for a document, {cores} | {' | '.join(seconds)} |")
    empty, whole = _empty(rows, [name for name in SETS if name != "letters"])
    letters = _one(rows, "letters", "empty fields left empty", ADAPTER)
    lines += [
        "",
        f"Of the fields that a text does not fill in, the adapter leaves {_share(100 * empty / whole)} empty, of those "
        f"in letters {_share(letters)}.",
    ]
    return "\n".join(lines)


def larger_models() -> str:
    """How right larger models are with their adapter and without, and how long llama.cpp takes."""
    rows = _recorded("extraction_larger")
    peer = _range(_seconds(rows, "llama.cpp ("), 0)
    lines = [
        f"Larger models, on 30 documents of the unseen kinds and the letters (on {_machine('extraction_larger')}; "
        f"llama.cpp,\nwith the same model and schema, took {peer} s for one):",
        "",
        "| fields right, with its adapter and alone | unseen kinds | letters | seconds for a document |",
        "|---|---|---|---|",
    ]
    kept: list[list[str]] = [[], []]  # shares of the empty fields of letters, with the adapter and alone
    for model, title in MODELS.items():
        own = [row for row in rows if f", {model} with" in row["what"]]
        cells = [
            ", ".join(_share(_one(own, name, "fields right", side)) for side in (ADAPTER, "without adapter"))
            for name in ("unseen kinds", "letters")
        ]
        lines.append(f"| {title} | {' | '.join(cells)} | {_range(_seconds(own, ADAPTER), 1)} |")
        for shares, side in zip(kept, (ADAPTER, "without adapter"), strict=True):
            shares.append(_share(_one(own, "letters", "empty fields left empty", side)))
    with_it, alone = (" and ".join(shares) for shares in kept)
    lines += ["", f"Of the empty fields of letters, an adapter leaves {with_it} empty, in place of {alone}."]
    return "\n".join(lines)


def _recorded(name: str) -> list[Row]:
    rows: list[Row] = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def _machine(name: str) -> str:
    """Cores and the widest instructions of the machine that a benchmark ran on."""
    machine = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))["machine"]
    wide = "AVX-512" if "avx512f" in machine["instruction_sets"] else "AVX2"
    return f"{machine['threads']} cores with {wide}"


def _one(rows: Sequence[Row], name: str, what: str, side: str) -> float:
    """A figure of one side on one set. The adapter's is that on all documents: beside the model without it.

    Raises:
        SystemExit: the benchmark has no such row, measured several models, or ran without the peer.
    """
    peer = "without adapter" if side == ADAPTER else side
    found = [row for row in rows if row["what"].startswith(f"{name},") and row["what"].endswith(f": {what}")]
    values: list[float] = [row["ours" if side == ADAPTER else "peer_value"] for row in found if peer in row["peer"]]
    if len(values) != 1 or values[0] is None:
        raise SystemExit(f"docs/tutorials/extraction.md needs one figure: {name}, {what}, {side}; there are {values}")
    return values[0]


def _seconds(rows: Sequence[Row], side: str) -> list[float]:
    """Seconds for a document of one side, on every set and of every model; none of sides without a model."""
    peer = "without adapter" if side == ADAPTER else side
    value = "ours" if side == ADAPTER else "peer_value"
    return [row[value] for row in rows if row["what"].endswith(": a document") and peer in row["peer"]]


def _invented(rows: Sequence[Row], side: str) -> str:
    """How many values a side invented; of how many, where there are any; nothing where it wrote none."""
    peer = "without adapter" if side == ADAPTER else side
    place = 0 if side == ADAPTER else 1
    invented, written = _counted([row for row in rows if peer in row["peer"]], place, "written values invented")
    return "" if not written else f"{invented} of {written}" if invented else "0"


def _empty(rows: Sequence[Row], names: Sequence[str]) -> tuple[int, int]:
    """How many empty fields the adapter left empty on some sets, and of how many."""
    return _counted([row for row in rows if row["what"].split(",")[0] in names], 0, "empty ones")


def _counted(rows: Iterable[Row], place: int, what: str) -> tuple[int, int]:
    """A count of the notes, "3 of 4 empty ones", summed over sets: a note has the adapter's, then the peer's."""
    parts = {(row["what"].split(",")[0], row["note"].split("; ")[place]) for row in rows}
    counts = [re.search(rf"(\d+) of (\d+) {what}", part) for _, part in parts]
    some, whole = (sum(int(found[at]) for found in counts if found) for at in (1, 2))
    return some, whole


def _share(value: float) -> str:
    return f"{value:.0f} %"


def _range(values: Sequence[float], decimals: int) -> str:
    return f"{min(values):.{decimals}f} to {max(values):.{decimals}f}" if values else ""
