"""JSON Schemas of the real world beside llguidance's own compiler and xgrammar: what compiles, what is held, how fast.

    python benchmarks/json_schemas.py FOLDER [--count 1500] [--quick] [--json]

FOLDER (or the variable JSON_SCHEMAS) has one JSON file for each schema, {"schema": ..., "tests": [{"data": ...,
"valid": true}, ...]}, as `maskbench/data` of guidance-ai/jsonschemabench has them; `--count 0` takes all of them, any
other number that many, chosen by a fixed seed.

Every engine gets the tokenizer of the default model and has its own process; a schema that takes it more than 10
seconds counts as refused. A schema compiles if it gives a grammar and a first mask; the time is that of both, for a
schema that was not seen before. An instance is offered to all engines in its own order of properties and in the order
in which Pippin would write it, and counts as generated if one of the two is. Only schemas that an engine compiles count
for its instances. xgrammar (where it is installed: `pip install xgrammar`) runs without its strict mode, which would
forbid properties that the schema allows.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _rows import Row, Watch, parser, say, show
from _sides import peer_version

SECONDS = 10.0
SEED = 20250721
QUICK = 60


class Pippin:
    """Our grammars."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def compile(self, schema: Any) -> Callable[[list[str]], bool]:
        """Compile, compute the first mask, and return what says whether one of some texts is generated."""
        from pippin.engine.grammar import Grammar

        grammar = Grammar.json_schema(schema)
        grammar.start(self.tokenizer).mask()
        return lambda texts: any(map(grammar.allows, texts))


class Llguidance:
    """llguidance's own compiler of JSON Schema."""

    def __init__(self, tokenizer: Any) -> None:
        self.vocabulary = tokenizer.grammar_tokenizer

    def compile(self, schema: Any) -> Callable[[list[str]], bool]:
        """As `Pippin.compile`."""
        from llguidance import LLMatcher

        from pippin.engine.grammar.regex import byte_tokenizer

        source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        matcher = LLMatcher(self.vocabulary, source, log_level=0)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error())

        def generates(text: str) -> bool:
            found, data = LLMatcher(byte_tokenizer(), source, log_level=0), list(text.encode())
            return bool(found.try_consume_tokens(data) == len(data) and found.is_accepting())

        return lambda texts: any(map(generates, texts))


class Xgrammar:
    """xgrammar."""

    def __init__(self, tokenizer: Any) -> None:
        import xgrammar

        self.engine = xgrammar
        words = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        info = xgrammar.TokenizerInfo(words, vocab_size=len(words), stop_token_ids=sorted(tokenizer.eos_ids))
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.mask = xgrammar.allocate_token_bitmask(1, len(words))

    def compile(self, schema: Any) -> Callable[[list[str]], bool]:
        """As `Pippin.compile`."""
        compiled = self.compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, strict_mode=False)
        self.engine.GrammarMatcher(compiled).fill_next_token_bitmask(self.mask)

        def generates(text: str) -> bool:
            matcher = self.engine.GrammarMatcher(compiled)
            return bool(matcher.accept_string(text) and matcher.is_completed())

        return lambda texts: any(map(generates, texts))


ENGINES: dict[str, type] = {"pippin": Pippin, "llguidance": Llguidance, "xgrammar": Xgrammar}


def serve(pipe: Any, name: str) -> None:
    """A process: compile each schema that comes, and answer with its seconds and with what it says of each instance."""
    import pippin

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # xgrammar warns of each keyword that it drops
    engine = ENGINES[name](pippin.load("smollm2-135m", device="cpu").tokenizer)
    engine.compile({"type": "object", "properties": {"a": {"type": "string"}}})
    pipe.send("ready")
    while True:
        schema, instances = pipe.recv()
        try:
            began = time.perf_counter()
            generates = engine.compile(schema)
            seconds = time.perf_counter() - began
            pipe.send((seconds, [generates(texts) for texts in instances]))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}"[:300])


class Worker:
    """An engine in a process, which is ended and begun again when it takes too long or dies."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: Any = None

    def ask(self, schema: Any, instances: list[list[str]]) -> tuple[float, list[bool]] | str:
        """Seconds and verdicts, or why there are none."""
        if self.process is None:
            self._begin()
        self.pipe.send((schema, instances))
        try:
            if self.pipe.poll(SECONDS):
                return self.pipe.recv()  # type: ignore[no-any-return]
            reason = f"more than {SECONDS:.0f} seconds"
        except EOFError:
            reason = "the process died"
        self.end()
        return reason

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.name), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.recv()

    def end(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


class Tally:
    """What came out for one engine."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.refused: dict[str, str] = {}
        self.valid: list[bool] = []
        self.invalid: list[bool] = []
        self.wrong: list[str] = []

    def add(self, name: str, answer: tuple[float, list[bool]] | str, tests: list[dict[str, Any]]) -> None:
        """Count one schema."""
        if isinstance(answer, str):
            self.refused[name] = answer
            return
        self.seconds.append(answer[0])
        for index, (test, generated) in enumerate(zip(tests, answer[1], strict=True)):
            (self.valid if test["valid"] else self.invalid).append(generated)
            if generated != test["valid"]:
                self.wrong.append(f"{name} {index} {'valid' if test['valid'] else 'invalid'}")

    @property
    def figures(self) -> dict[str, float]:
        """By the names of the rows."""
        schemas = len(self.seconds) + len(self.refused)
        times = [1000 * seconds for seconds in self.seconds]
        return {
            "schemas that compile": 100 * len(self.seconds) / schemas,
            "invalid instances refused": 100 - 100 * statistics.fmean(self.invalid),
            "valid instances generated": 100 * statistics.fmean(self.valid),
            "compile and first mask, median": statistics.median(times),
            "compile and first mask, 90 % of schemas": statistics.quantiles(times, n=10)[8],
        }


GOALS = {
    "schemas that compile": 97.0,
    "invalid instances refused": 100.0,
    "valid instances generated": 99.5,
    "compile and first mask, median": 50.0,
}


def files(folder: Path, count: int) -> list[Path]:
    """The schemas that are measured."""
    found = sorted(folder.glob("*.json"))
    if not found:
        raise SystemExit(f"{folder} has no JSON files")
    return sorted(random.Random(SEED).sample(found, count)) if 0 < count < len(found) else found


def texts(schema: Any, value: Any) -> list[str]:
    """An instance as it stands, and in the order and the spelling in which Pippin would write it."""
    from pippin.core.errors import InvalidInput, SchemaError
    from pippin.engine.grammar.membership import generated_text

    plain = json.dumps(value, ensure_ascii=False)
    try:
        own = generated_text(schema, value)
    except (SchemaError, InvalidInput):
        own = None
    return list(dict.fromkeys([plain, own or plain]))


def cases(folder: Path, count: int) -> Iterator[tuple[str, Any, list[dict[str, Any]], list[list[str]]]]:
    """Name, schema, tests and the texts of their instances."""
    for path in files(folder, count):
        case = json.loads(path.read_text(encoding="utf-8"))
        tests = case.get("tests", [])
        yield path.stem, case["schema"], tests, [texts(case["schema"], test["data"]) for test in tests]


def measure(folder: Path, count: int) -> list[Row]:
    """Measure all rows."""
    names = [name for name in ENGINES if importlib.util.find_spec(name) is not None]
    workers, tallies = {name: Worker(name) for name in names}, {name: Tally() for name in names}
    with Watch() as watch:
        for number, (stem, schema, tests, instances) in enumerate(cases(folder, count), 1):
            for name in names:
                tallies[name].add(stem, workers[name].ask(schema, instances), tests)
            if number % 100 == 0:
                say(f"{number} schemas; " + ", ".join(f"{n} refused {len(t.refused)}" for n, t in tallies.items()))
    for worker in workers.values():
        worker.end()
    for kind, names_of in (("refused", tallies["pippin"].refused.items()), ("not as marked", tallies["pippin"].wrong)):
        for each in names_of:
            say(f"pippin, {kind}: {each}")
    return rows(tallies, str(watch))


def rows(tallies: dict[str, Tally], load: str) -> list[Row]:
    """A row for each figure beside its goal and beside each peer."""
    ours = tallies["pippin"]
    counted = f"{len(ours.seconds) + len(ours.refused):,} schemas"
    note = f"{counted}, {len(ours.valid):,} valid and {len(ours.invalid):,} invalid instances of ours; {load}"
    found = []
    for what, value in ours.figures.items():
        slower, unit = what not in list(GOALS)[:3], "ms" if what.startswith("compile") else "%"
        if what in GOALS:
            found.append(Row(what, unit, value, "goal", GOALS[what], 1, not slower, note))
        for name in [name for name in ENGINES if name != "pippin"]:
            theirs = tallies[name].figures[what] if name in tallies else None
            found.append(Row(what, unit, value, peer_version(name), theirs, 1, not slower, note))
    return found


def main() -> None:
    """Run from the command line."""
    words = parser(__doc__)
    folder = os.environ.get("JSON_SCHEMAS")
    words.add_argument("folder", type=Path, nargs="?", default=folder, help="of schemas, or JSON_SCHEMAS")
    words.add_argument("--count", type=int, default=1500, help="schemas, chosen by a fixed seed; 0: all")
    options = words.parse_args()
    if options.folder is None:
        words.error("name a folder of schemas, or set JSON_SCHEMAS")
    show(measure(Path(options.folder), QUICK if options.quick else options.count), as_json=options.json)


if __name__ == "__main__":
    main()
