"""Writes docs/json-schema.md: which keyword of JSON Schema is enforced, measured with the official test suite.

Every group of the suite is one schema with instances. The schema is either refused with a typed error or enforced;
under an enforced one each instance is offered to the grammar in the orders of its properties that the schema has, and
in the spellings of its numbers; a valid instance that is "not generated" has a value that the grammar leaves out.

The last columns are llguidance's own compiler of JSON Schema on the same instances, in its own order and in ours.

    python tools/json_schema_table.py            # write the page
    python tools/json_schema_table.py --check    # say whether it is up to date
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from pippin.core.errors import EmptySchema, SchemaError, UnsupportedGuide
from pippin.core.store import store
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.grammar.json_grammar import MAX_ITEMS
from pippin.engine.grammar.json_recursion import MAX_NESTED_LISTS
from pippin.engine.grammar.membership import generated_text
from pippin.engine.grammar.numbers import DIGITS
from pippin.engine.grammar.regex import byte_tokenizer, consume

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "json-schema.md"
BENCHMARK = ROOT / "results" / "benchmarks" / "json_schemas.json"
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft3": "http://json-schema.org/draft-03/schema#",
}

FIGURES = ("groups", "enforced", "empty", "valid", "peer_enforced", "peer_missed", "peer_wrong")

INTRODUCTION = f"""# JSON Schema

This page lists the JSON Schema keywords that `Schema`, `Grammar.json_schema` and the server's `response_format`
enforce, of drafts 3 to 2020-12 as `$schema` says (without it, 2020-12). A schema is enforced exactly or refused with an
error that names the keyword: `UnsupportedGuide` (it cannot be enforced), `UndefinedReference` (a `$ref` leads out of
the schema), `EmptySchema` (nothing is valid under it), `SchemaError` (it is not a JSON Schema).
`python tools/json_schema_table.py` measures this page with the official test suite.

What is no keyword of JSON Schema, and a `format` that has no definition, is an annotation: it is ignored, and a note in
`Grammar.notes` says so (with the keyword that was probably meant). `strict=True` refuses it instead; schemas of Python
types are always strict. The notes are in `Response.notes`, on the standard error of `pippin ask --schema`, and in the
server's header `x-pippin-notes`; strict are `Schema(..., strict=True)`, `pippin ask --strict` and OpenAI's
`"strict": true`, of the answer's schema and of each tool.

Items of a list with `uniqueItems`, and the names of an object, are compared with what is already written: a token that
would complete a repeat is not allowed, and neither is one after which only repeats could follow. Numbers are equal by
value, objects in any order of their names.

Some valid values are never generated:

- properties are in the order of their declaration, with `, ` and `: ` between them and no other white space;
- each character of a string is written in its shortest form;
- integers have no point (`1`, not `1.0`) and at most {DIGITS} digits, which fits a signed 64-bit integer; other numbers
  have at most {DIGITS} before and after the point; bounds that need more digits get them;
- a list without `maxItems` has at most {MAX_ITEMS} items (or `minItems`, if that is more), and an object without
  `maxProperties` at most {MAX_ITEMS} names that the schema does not list, so that a model which repeats itself comes to
  an end; `maxItems` in the schema, or `max_items` of `Grammar.json_schema`, says otherwise; a string without
  `maxLength` ends with the budget of tokens alone;
- in a recursive schema, a value inside values of its own kind lies at most {MAX_ITEMS} levels deep, as in a linked
  list, and at most {MAX_NESTED_LISTS} where the levels are items or free names, as in a tree; the last level is written
  with the fewest parts that the schema allows. `max_items=None` of `Grammar.json_schema` takes this bound away too;
- in a schema that compares numbers which need not be integers (`uniqueItems`), these are written without exponent,
  zeros at the end or more than 15 digits; a list that may be one with or without `uniqueItems`, of several
  alternatives, repeats nothing as long as it may be the one with;
- `format` is enforced, as its standard has it; under a Python type in the subset that every parser accepts;
- in a `pattern`, `\\d`, `\\w` and `\\s` match what ECMA 262, Python and Rust agree on; look-ahead is
  enforced right after the first `^`; other look-around, back references, flags and word boundaries are refused, and so
  are counts that multiply to more than the engine can write.

## Beside other compilers

{{benchmark}}

In the tables below, the last three columns are llguidance's own compiler of JSON Schema, on the same instances. Where
it is as exact as Pippin, Pippin still writes the rules itself: `allOf`, `oneOf`, `not`, `if`, `dependentSchemas`, and a
`$ref` beside other keywords are intersections and complements of whole values, which are taken before anything is
written, and a part that was handed over could not take part in them. Only multiples whose remainders must be counted go
to llguidance.
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
    peer_enforced: int = 0
    peer_missed: int = 0
    peer_wrong: int = 0
    falsely_empty: list[str] = field(default_factory=list)


@functools.cache
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
    texts = [[json.dumps(test["data"], ensure_ascii=False)] for test in group["tests"]]
    _measure_ours(group, schema, row, texts)
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    if LLMatcher.validate_grammar(source, byte_tokenizer()):
        return
    row.peer_enforced += 1
    for test, spelled in zip(group["tests"], texts, strict=True):
        accepted = any(_reads(source, text) for text in spelled)
        row.peer_missed += test["valid"] and not accepted
        row.peer_wrong += accepted and not test["valid"]


def _reads(source: str, text: str) -> bool:
    matcher, data = LLMatcher(byte_tokenizer(), source, log_level=0), list(text.encode(errors="surrogatepass"))
    return consume(matcher, data)[0] == len(data) and bool(matcher.is_accepting())


def _measure_ours(group: dict[str, Any], schema: Any, row: Row, texts: list[list[str]]) -> None:
    """Count what Pippin does with one schema, and add the texts that it would write to those of the instances."""
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
    for test, spelled in zip(group["tests"], texts, strict=True):
        name = f"{group['description']}: {test['description']}"
        text = generated_text(schema, test["data"], grammar=grammar)
        spelled += [] if text is None else [text]
        if test["valid"]:
            row.valid += 1
            row.missed += [name] if text is None else []
        elif text is not None:
            row.wrong.append(name)


def page(folder: Path) -> str:
    """The whole page, from the suite in ``folder``."""
    parts = [INTRODUCTION.replace("{benchmark}", benchmark_table())]
    for draft in DRAFTS:
        rows = measure(folder, draft)
        parts.append(f"## {draft.replace('draft', 'Draft ')}\n")
        parts.append(
            "| tests | schemas | enforced | without values | refused | valid instances | of these not generated "
            "| wrongly accepted | refused because of | llguidance: enforced | not generated | wrongly accepted |\n"
            "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|---:|"
        )
        total = Row("**all**")
        for row in rows:
            parts.append(_line(row))
            for name in (*FIGURES, "refused", "missed", "wrong"):
                setattr(total, name, getattr(total, name) + getattr(row, name))
        parts.append(_line(total, reasons=False) + "\n")
        parts.append("### Valid, but not generated\n")
        parts += [f"- {row.name}: {name}" for row in rows for name in row.missed]
        parts.append("")
    return "\n".join(parts)


def _line(row: Row, *, reasons: bool = True) -> str:
    because = ", ".join(f"`{guide}`" for guide in sorted(set(row.refused))) if reasons else ""
    figures = (row.groups, row.enforced, row.empty, len(row.refused), row.valid, len(row.missed), len(row.wrong))
    theirs = (row.peer_enforced, row.peer_missed, row.peer_wrong)
    return " | ".join([f"| {row.name}", *map(str, figures), because, *map(str, theirs)]) + " |"


def benchmark_table() -> str:
    """What `benchmarks/json_schemas.py` recorded: schemas of the real world, a column for each compiler."""
    command = "`JSON_SCHEMAS=FOLDER python tools/run_benchmarks.py json_schemas`"
    if not BENCHMARK.is_file():
        return f"Nothing has been recorded yet: {command}."
    kept = json.loads(BENCHMARK.read_text(encoding="utf-8"))
    found: dict[str, dict[str, str]] = {}
    for row in kept["rows"]:
        cells = found.setdefault(f"{row['what']}, {row['unit']}", {"Pippin": f"{row['ours']:.4g}"})
        cells[row["peer"]] = "" if row["peer_value"] is None else f"{row['peer_value']:.4g}"
    heads = list(dict.fromkeys(name for cells in found.values() for name in cells))
    lines = [
        f"Schemas of the real world (JSONSchemaBench, with the instances of MaskBench; {kept['rows'][0]['note']}; "
        f"{kept['machine']['cpu']}), by {command}. Instances count where the compiler takes their schema.",
        "",
        f"| | {' | '.join(heads)} |",
        f"|---|{'---:|' * len(heads)}",
    ]
    lines += [f"| {what} | {' | '.join(cells.get(head, '') for head in heads)} |" for what, cells in found.items()]
    return "\n".join(lines)


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
