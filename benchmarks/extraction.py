"""Values from a text: `Session.extract` beside controls, llama.cpp with the schema as response format, and LangExtract.

    python benchmarks/extraction.py [--model smollm2-135m FILE.gguf ...] [--adapter auto|none|FOLDER ...] [--items 70]
        [--seed 101] [--peer-items 4] [--arms NAMES] [--sets kinds,layouts,languages,letters]

Every side gets the same generated documents and forms, peers the first `--peer-items` of them: of kinds, of a layout,
and of a language that no adapter which comes with Pippin was trained on. Then it gets `data/letters.json`: letters,
e-mails and notices written by hand, which no generator had a part in. `extraction_larger.py` does so for larger models.
Properties that are missing are counted as null. The controls have no model: `patterns` takes what follows a field's
name, `majority` the likeliest answer to any document. The adapter is measured beside the model without it. Peers that
are not installed leave their column empty: llama-cpp-python (with diskcache), langextract.

Rows: shares of the fields with a value that are right, of the empty ones that were left empty, of the written values
that the text says (the rest is invented), of the documents with everything right, and seconds for a document.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from _extraction_arms import LangExtract, LlamaCppSchema, Pippin, model_file
from _rows import Row, Watch, parser, say, show
from _sides import Side, has_llama_cpp, llama_cpp_name, peer_version

from pippin.claims.worlds.form_baselines import LabelPatterns, Majority, inner, type_of
from pippin.data.synthetic import documents
from pippin.evaluate.extraction import ExtractionScore, choices_of, score
from pippin.recipes.train.task_data import ExampleSplit, extraction
from pippin.recipes.train.task_data.extraction import FormItem

HELD_OUT = (("recipe", "event_invitation", "lab_report"), "thread", "it")
"""Kinds, layout and language of documents on which no adapter that comes with Pippin was trained."""
ARMS = ("plain", "adapter", "patterns", "majority", "llama.cpp", "langextract")
SETS = ("kinds", "layouts", "languages", "letters")
LETTERS = Path(__file__).parent / "data" / "letters.json"
QUICK = 2
Fill = Callable[[str, dict[str, Any]], tuple[Any, float]]


@dataclass
class Tally:
    """What came out on one side, document by document.

    Attributes:
        name: for rows.
        timed: whether its seconds are those of a model.
        installed: False for a peer that is not there.
    """

    name: str
    timed: bool = True
    installed: bool = True
    scores: list[ExtractionScore] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failed: int = 0

    def add(self, item: FormItem, found: Any, seconds: float) -> None:
        """Count one document; without an answer nothing is right, also what is empty."""
        expected, got = (completed(item.schema, value) for value in (item.expected, found))
        result = score(expected, got, item.text, choices=choices_of(item.schema))
        self.scores.append(replace(result, nulls_right=0, whole_right=0) if found is None else result)
        self.seconds.append(seconds)
        self.failed += found is None

    def figures(self, count: int) -> dict[str, float]:
        """Of the first documents, by the names of the rows; without what there is none of."""
        total = sum(self.scores[:count], ExtractionScore())
        shares = {
            "fields right": (total.right, total.fields),
            "empty fields left empty": (total.nulls_right, total.nulls),
            "written values that the text says": (total.written - total.invented, total.written),
            "documents with everything right": (total.whole_right, total.whole),
        }
        found = {what: 100 * part / whole for what, (part, whole) in shares.items() if whole}
        if self.timed:
            found["a document"] = sum(self.seconds[:count]) / count
        return found

    def __str__(self) -> str:
        total = sum(self.scores, ExtractionScore())
        return (
            f"{self.name}: {total.right} of {total.fields} fields, {total.nulls_right} of {total.nulls} empty ones, "
            f"{total.invented} of {total.written} written values invented, {total.whole_right} of {total.whole} "
            f"documents, no answer to {self.failed}, {sum(self.seconds) / len(self.seconds):.3g} s for a document"
        )


def completed(schema: dict[str, Any], value: Any) -> Any:
    """A value with null for every property that is missing, and times without fractions and offsets.

    >>> schema = {"properties": {"a": {"type": "string"}, "b": {"type": "string", "format": "time"}}, "type": "object"}
    >>> completed(schema, {"b": "14:30Z"}), completed(schema, {})
    ({'a': None, 'b': '14:30:00'}, {'a': None, 'b': None})
    """
    schema, _ = inner(schema)
    kind = type_of(schema)
    if kind == "object":
        given = value if isinstance(value, dict) else {}
        return {name: completed(each, given.get(name)) for name, each in schema["properties"].items()}
    if kind == "array":
        return [completed(schema["items"], each) for each in value] if isinstance(value, list) else []
    if kind == "time" and isinstance(value, str) and value[2:3] == ":":
        return value[:8] if value[5:6] == ":" else f"{value[:5]}:00"
    return None if value == "" else value


def baseline(fill: Callable[[str, dict[str, Any]], Any]) -> Fill:
    """A control as a side: its seconds are not measured."""
    return lambda text, schema: (fill(text, schema), 0.0)


def remote(side: Side) -> Fill:
    """A process as a side."""
    return lambda text, schema: side.call("fill", text, schema)


def measured(tally: Tally, fill: Fill, items: list[FormItem], warm: FormItem) -> Tally:
    """Fill in all forms, after one that does not count."""
    if tally.timed:
        fill(warm.text, warm.schema)
    for number, item in enumerate(items, 1):
        tally.add(item, *fill(item.text, item.schema))
        if tally.timed and number % 10 == 0:
            say(f"{tally.name}: {number} of {len(items)}")
    say(str(tally))
    return tally


def adapter_of(model: str, wanted: str) -> tuple[str | None, str, dict[str, Any]]:
    """An adapter as `Pippin` takes it, its name for rows, and how it was trained; None where there is none."""
    from pippin.language.task_adapters.catalog import find

    if wanted == "none":
        return None, "", {}
    if wanted != "auto":
        made = json.loads((Path(wanted) / "base_model.json").read_text(encoding="utf-8")).get("made", {})
        return wanted, f"the adapter {Path(wanted).name}", made
    import pippin

    entry = find(pippin.load(model, device="cpu"), "extraction")
    return ("auto", "the built-in adapter", entry.provenance) if entry else (None, "", {})


def split_of(name: str) -> ExampleSplit:
    """The documents of a set: something about them was held out, the rest was not."""
    held_kinds, held_layout, held_language = HELD_OUT
    kinds = [kind for kind in documents.KINDS if kind not in held_kinds]
    layouts = tuple(dict.fromkeys(each for kind in kinds for each in documents.layouts(kind) if each != held_layout))
    languages = tuple(each for each in documents.LANGUAGES if each != held_language)
    match name:
        case "kinds":
            return ExampleSplit(held_kinds)
        case "layouts":
            with_it = tuple(kind for kind in kinds if held_layout in documents.layouts(kind))
            return ExampleSplit(with_it, (held_layout,), languages)
    return ExampleSplit(tuple(kinds), layouts, (held_language,))


def letters() -> list[FormItem]:
    """The letters written by hand, with their forms."""
    entries = json.loads(LETTERS.read_text(encoding="utf-8"))
    return [
        FormItem(each["text"], each["language"], each["schema"], each["expected"], "letter", "by hand")
        for each in entries
    ]


def measure(options: argparse.Namespace) -> list[Row]:
    """All rows, of all sets of documents and all models."""
    count = QUICK if options.quick else options.items
    found: list[Row] = []
    for name in options.sets:
        # the letters have no generator to draw others from, which the controls learn from
        split = split_of("kinds" if name == "letters" else name)
        others = extraction.items(1 if options.quick else 300, seed=options.seed + 1_000_003, split=split)
        items = letters() if name == "letters" else extraction.items(count, seed=options.seed, split=split)
        items = items[: QUICK if options.quick else None]
        say(f"{name}: {documents_of(items)}")
        title = "letters" if name == "letters" else f"unseen {name}"
        found += [replace(row, what=f"{title}, {row.what}") for row in measured_on(items, others, options)]
    return found


def measured_on(items: list[FormItem], others: list[FormItem], options: argparse.Namespace) -> list[Row]:
    """The rows of all models on some documents; the controls learn from the others."""
    controls = []
    if "patterns" in options.arms:
        controls.append(measured(Tally("label patterns", False), baseline(LabelPatterns().fill), items, others[0]))
    if "majority" in options.arms:
        majority = Majority([(each.schema, each.expected) for each in others])
        controls.append(measured(Tally("majority", False), baseline(majority.fill), items, others[0]))
    found: list[Row] = []
    for model, wanted in zip(options.model, options.adapter, strict=True):
        name, path = model_file(model)
        adapter = adapter_of(model, wanted)
        found += rows_of(name, model, path, adapter, controls, items, others[0], options)
    return found


def rows_of(
    name: str,
    model: str,
    path: Path | None,
    adapter: tuple[str | None, str, dict[str, Any]],
    controls: list[Tally],
    items: list[FormItem],
    warm: FormItem,
    options: argparse.Namespace,
) -> list[Row]:
    """The rows of a model: with its adapter, if there is one, beside everything else."""
    wanted, threads = options.arms, options.threads
    tallies: list[Tally] = []
    with Watch() as watch:
        for arm, each in (("adapter", adapter[0]), ("plain", None)):
            if arm not in wanted or (arm == "adapter" and each is None):
                continue
            label = f"{name} with {adapter[1]}" if each else f"{name} without adapter"
            with Side(Pippin, model=model, adapter=each, threads=threads) as side:
                tallies.append(measured(Tally(label), remote(side), items, warm))
        tallies += list(peers(path, items, warm, options))
    if not tallies or tallies[0].name.split()[0] != name:
        raise SystemExit("nothing of Pippin was measured: --arms has neither plain nor adapter with an adapter")
    ours, *beside = tallies
    note = "; ".join([f"{documents_of(items)}, seed {options.seed}", *trained_on(adapter[2], items), str(watch)])
    return [row for peer in [*beside, *controls] for row in compared_with(ours, peer, note)]


def peers(path: Path | None, items: list[FormItem], warm: FormItem, options: argparse.Namespace) -> Iterator[Tally]:
    """llama.cpp and LangExtract, measured where they are installed."""
    llama, few = has_llama_cpp(), items[: options.peer_items]
    others = [kind for kind in documents.KINDS if kind not in {item.kind for item in items}]
    sides = {
        "llama.cpp": (llama_cpp_name(), llama, LlamaCppSchema, {}),
        "langextract": (
            f"{peer_version('langextract')} over llama.cpp",
            llama and importlib.util.find_spec("langextract") is not None,
            LangExtract,
            {"example_kind": (others or documents.KINDS)[-1]},
        ),
    }
    for arm, (label, installed, kind, settings) in sides.items():
        if arm not in options.arms or path is None:
            continue
        if not installed:
            say(f"{arm}: skipped, not installed")
            yield Tally(label, installed=False)
            continue
        with ExitStack() as stack:
            side = stack.enter_context(Side(kind, path=str(path), threads=options.threads, **settings))
            yield measured(Tally(label), remote(side), few, warm)


def documents_of(items: list[FormItem]) -> str:
    """How many documents of which kinds and languages."""
    kinds, languages = sorted({item.kind for item in items}), sorted({item.language for item in items})
    return f"{len(items)} documents ({', '.join(kinds)}; {', '.join(languages)})"


def trained_on(made: dict[str, Any], items: list[FormItem]) -> list[str]:
    """What the training of an adapter had of these documents; empty without an adapter."""
    if not made:
        return []
    seen = sorted(
        ({item.kind for item in items} & set(documents.KINDS)) - set(made.get("held_out", {}).get("kinds", ()))
    )
    return [f"the adapter was trained on {', '.join(seen) if seen else 'none of these kinds'}"]


def compared_with(ours: Tally, peer: Tally, note: str) -> list[Row]:
    """Rows for one peer, on the documents that both had."""
    count = len(peer.scores) or len(ours.scores)
    mine, theirs = ours.figures(count), peer.figures(count) if peer.scores else {}
    said = f"{ours}; {peer}; {note}" if peer.scores else f"{ours}; {note}"
    return [
        Row(
            f"{ours.name}: {what}",
            "s" if what == "a document" else "%",
            value,
            peer.name,
            theirs.get(what),
            1.0,
            what != "a document",
            said,
        )
        for what, value in mine.items()
        if what in theirs or not peer.installed
    ]


def main(
    models: Sequence[str] = ("smollm2-135m",),
    adapters: Sequence[str] = ("auto",),
    sets: Sequence[str] = SETS,
    items: int = 70,
    peer_items: int = 4,
) -> None:
    """Run from the command line, by default for these models, adapters, sets and numbers of documents."""
    words = parser(__doc__)
    words.add_argument("--model", nargs="+", default=list(models), help="references")
    words.add_argument(
        "--adapter",
        nargs="+",
        default=list(adapters),
        help="of each model, or of all: auto (built-in), none, a folder",
    )
    words.add_argument("--items", type=int, default=items, help="documents of a set")
    words.add_argument("--peer-items", type=int, default=peer_items, help="documents for the peers, the first ones")
    words.add_argument("--seed", type=int, default=101, help="of the documents; no adapter was chosen by those of 101")
    words.add_argument("--sets", type=lambda text: text.split(","), default=list(sets), help=", ".join(SETS))
    words.add_argument("--threads", type=int, default=None, help="of every side; each library's own default without it")
    words.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS), help=", ".join(ARMS))
    options = words.parse_args()
    if unknown := set(options.arms) - set(ARMS):
        words.error(f"no arm is called {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    if unknown := set(options.sets) - set(SETS):
        words.error(f"no set is called {', '.join(sorted(unknown))}; there are {', '.join(SETS)}")
    if len(options.adapter) == 1:
        options.adapter *= len(options.model)
    if len(options.adapter) != len(options.model):
        words.error(f"there are {len(options.model)} models and {len(options.adapter)} adapters")
    if options.items < 1 or options.peer_items < 1:
        words.error("at least one document is needed")
    show(measure(options), as_json=options.json)


if __name__ == "__main__":
    main()
