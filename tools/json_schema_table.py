"""Writes docs/json-schema.md: which keyword of JSON Schema is enforced, measured with the official test suite.

Every group of the suite is one schema with instances. The schema is either refused with a typed error or enforced;
under an enforced one each instance is offered to the grammar in the orders of its properties that the schema has, and
in the spellings of its numbers; a valid instance that is "not generated" has a value that the grammar leaves out.

    python tools/json_schema_table.py            # write the page
    python tools/json_schema_table.py --check    # say whether it is up to date
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pippin.core.errors import EmptySchema, SchemaError, UnsupportedGuide
from pippin.core.store import store
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.grammar.membership import can_generate

PAGE = Path(__file__).parents[1] / "docs" / "json-schema.md"
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft3": "http://json-schema.org/draft-03/schema#",
}

INTRODUCTION = """# JSON Schema

This page lists the JSON Schema keywords that `Schema`, `Grammar.json_schema` and the server's `response_format`
enforce, of drafts 3 to 2020-12 as `$schema` says (without it, 2020-12). A schema is enforced exactly or refused with an
error that names the keyword: `UnsupportedGuide` (it cannot be enforced), `UndefinedReference` (a `$ref` leads out of
the schema), `EmptySchema` (nothing is valid under it), `SchemaError` (it is not a JSON Schema).
`python tools/json_schema_table.py` measures this page with the official test suite.

What is no keyword of JSON Schema, and a `format` that has no definition, is an annotation: it is ignored, and a note in
`Grammar.notes` says so (with the keyword that was probably meant). `strict=True` refuses it instead; schemas of Python
types are always strict.

Some valid values are never generated:

- properties are in the order of their declaration, with `, ` and `: ` between them and no other white space;
- each character of a string is written in its shortest form;
- integers have at most 25 digits and no point (`1`, not `1.0`), other numbers at most 25 before and after the point;
- `format` is enforced, as its standard has it; under a Python type in the subset that every parser accepts;
- in a `pattern`, `\\d`, `\\w` and `\\s` match what ECMA 262, Python and Rust agree on; look-around, back references,
  flags and word boundaries are refused.
"""


@dataclass
class Row:
    """The figures of one file of the suite."""

    name: str
    groups: int = 0
    enforced: int = 0
    empty: int = 0
    refused: list[str] = field(default_factory=list)
    valid: int = 0
    missed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    falsely_empty: list[str] = field(default_factory=list)


def measure(folder: Path, draft: str) -> list[Row]:
    """One row for each file of a draft's tests.

    Args:
        folder: the suite, one folder for each draft.
        draft: a name of `DRAFTS`.
    """
    rows = []
    for path in sorted((folder / draft).rglob("*.json")):
        row = Row(str(path.relative_to(folder / draft).with_suffix("")).replace("\\", "/"))
        for group in json.loads(path.read_text(encoding="utf-8")):
            _measure_group(group, DRAFTS[draft], row)
        rows.append(row)
    return rows


def _measure_group(group: dict[str, Any], dialect: str, row: Row) -> None:
    schema = group["schema"]
    schema = {"$schema": dialect, **schema} if isinstance(schema, dict) else schema
    row.groups += 1
    try:
        grammar = Grammar.json_schema(schema)
    except EmptySchema:
        row.empty += 1
        row.falsely_empty += [
            f"{group['description']}: {test['description']}" for test in group["tests"] if test["valid"]
        ]
        return
    except SchemaError as error:
        row.refused.append(error.guide if isinstance(error, UnsupportedGuide) else type(error).__name__)
        return
    row.enforced += 1
    for test in group["tests"]:
        name = f"{group['description']}: {test['description']}"
        accepted = can_generate(schema, test["data"], grammar=grammar)
        if test["valid"]:
            row.valid += 1
            row.missed += [] if accepted else [name]
        elif accepted:
            row.wrong.append(name)


def page(folder: Path) -> str:
    """The whole page, from the suite in ``folder``."""
    parts = [INTRODUCTION]
    for draft in DRAFTS:
        rows = measure(folder, draft)
        parts.append(f"## {draft.replace('draft', 'Draft ')}\n")
        parts.append(
            "| tests | schemas | enforced | without values | refused | valid instances | of these not generated "
            "| wrongly accepted | refused because of |\n|---|---:|---:|---:|---:|---:|---:|---:|---|"
        )
        total = Row("**all**")
        for row in rows:
            parts.append(_line(row))
            for name in ("groups", "enforced", "empty", "valid", "refused", "missed", "wrong"):
                setattr(total, name, getattr(total, name) + getattr(row, name))
        parts.append(_line(total, reasons=False) + "\n")
        parts.append("### Valid, but not generated\n")
        parts += [f"- {row.name}: {name}" for row in rows for name in row.missed]
        parts.append("")
    return "\n".join(parts)


def _line(row: Row, *, reasons: bool = True) -> str:
    because = ", ".join(f"`{guide}`" for guide in sorted(set(row.refused))) if reasons else ""
    figures = (row.groups, row.enforced, row.empty, len(row.refused), row.valid, len(row.missed), len(row.wrong))
    return f"| {row.name} | " + " | ".join(map(str, figures)) + f" | {because} |"


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare it."""
    text = page(store.pull("json-schema-test-suite"))
    if "--check" in arguments:
        fresh = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is up to date" if fresh else f"{PAGE.name} is out of date; run tools/json_schema_table.py")
        return 0 if fresh else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
