"""Forms to fill in from texts, without a model: by rules, and with answers that belong to other fields.

Notable here:
- `by_rules` is what one writes in an afternoon: the label of a field and what follows it, else the first value of its
  type
- `shuffled` gives the places of a task to other fields of the same type: an adapter that is trained on it sees the same
  documents, forms and tokens, and nothing to learn
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pippin.language.constrained_objective import ConstrainedExample
from pippin.recipes.train.task_data import ExampleSampler, ExampleSplit
from pippin.recipes.train.task_data.extraction import FormItem, FormTask, sample_task, tokenize_task
from pippin.session.extraction.answers import KnownValue
from pippin.session.extraction.source import SourceText
from pippin.session.extraction.values import Candidate

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel

_VALUE = re.compile(r"[ \t]*[:=|][ \t]*([^\n|]{1,80})")
_LIST_PARTS = re.compile(r"\s*[,;•]\s+|\s+(?:and|und|et|y|e)\s+")


def by_rules(item: FormItem) -> Any:
    """The value of a form by labels and types alone, as JSON; fields that no rule finds are left out."""
    return _Rules(SourceText(item.text, language=item.language)).value(item.schema, "")


class _Rules:
    def __init__(self, source: SourceText) -> None:
        self.source = source
        self.used: set[int] = set()

    def value(self, schema: dict[str, Any], name: str) -> Any:
        """The value of a schema for a field of this name; None for nothing."""
        for each in schema.get("anyOf", ()):
            if each != {"type": "null"}:
                return self.value(each, name)
        if "properties" in schema:
            found = {key: self.value(inner, key) for key, inner in schema["properties"].items()}
            return {key: value for key, value in found.items() if value is not None}
        if "enum" in schema:
            text = self.source.text.casefold()
            return next((each for each in schema["enum"] if str(each).casefold() in text), None)
        labeled = self.labeled(name)
        match schema.get("type"):
            case "boolean":
                return None
            case "array":
                return self.items(schema.get("items", {}), labeled)
            case "number" | "integer":
                return self.typed("number", labeled, json.loads)
            case "string" if schema.get("format") in ("date", "time"):
                return self.typed(schema["format"], labeled, str)
        return None if labeled is None else self.source.text[slice(*labeled)].strip(" \t*.;,|>\"'")

    def items(self, schema: dict[str, Any], labeled: tuple[int, int] | None) -> list[Any]:
        """The parts of what follows the label, for a list of texts."""
        if labeled is None or schema.get("type") != "string":
            return []
        return [part for part in _LIST_PARTS.split(self.source.text[slice(*labeled)].strip()) if part]

    def typed(self, kind: str, labeled: tuple[int, int] | None, read: Callable[[str], Any]) -> Any:
        """The first value of a type behind the label, else the first that no other field has."""
        values: list[Candidate] = self.source.candidates(kind)
        if labeled is not None:
            values = [each for each in values if labeled[0] <= each.start < labeled[1]]
        free = [each for each in values if each.start not in self.used]
        if not free:
            return None
        self.used.add(free[0].start)
        return read(free[0].value)

    def labeled(self, name: str) -> tuple[int, int] | None:
        """What stands behind the words of a name on a line."""
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|[_\-.]+", " ", name).split()
        if not words:
            return None
        label = re.compile(r"[ _\-.]?".join(map(re.escape, words)) + r"[^\n:=|]{0,12}", re.IGNORECASE)
        for found in label.finditer(self.source.text):
            if value := _VALUE.match(self.source.text, found.end()):
                return value.span(1)
        return None


def shuffled(task: FormTask, rng: random.Random) -> FormTask:
    """A task whose places belong to other fields of the same type."""
    leaves: dict[str, list[KnownValue | None]] = {}
    _collect(task.schema, task.answers, leaves)
    for values in leaves.values():
        rng.shuffle(values)
    return replace(task, answers=_rebuilt(task.schema, task.answers, {kind: iter(v) for kind, v in leaves.items()}))


def shuffled_examples(model: LanguageModel, split: ExampleSplit, max_length: int) -> ExampleSampler:
    """As `pippin.recipes.train.task_data.extraction.examples`, of shuffled tasks."""
    from pippin.session.extraction.prompt import encode_prompt

    def sample(rng: random.Random) -> ConstrainedExample | None:
        task = shuffled(sample_task(rng, split.kinds, split.languages, split.layouts_of), rng)
        return tokenize_task(task, lambda text: encode_prompt(model, text), model.tokenizer, max_length=max_length)

    return sample


def _kind(schema: dict[str, Any]) -> str | None:
    """What may stand for what: the type, and whether it may be null; None for what is no part of the text."""
    inner = next(each for each in schema.get("anyOf", (schema,)) if each != {"type": "null"})
    if "enum" in inner or inner.get("type") not in ("string", "number", "integer"):
        return None
    return f"{inner['type']} {inner.get('format')} {'anyOf' in schema}"


def _collect(schema: dict[str, Any], answer: Any, leaves: dict[str, list[Any]]) -> None:
    if isinstance(answer, dict):
        for name, inner in answer.items():
            _collect(schema["properties"][name], inner, leaves)
    elif isinstance(answer, list):
        for inner in answer:
            _collect(schema["items"], inner, leaves)
    elif (kind := _kind(schema)) is not None and answer is not None:
        leaves.setdefault(kind, []).append(answer)


def _rebuilt(schema: dict[str, Any], answer: Any, leaves: dict[str, Any]) -> Any:
    if isinstance(answer, dict):
        return {name: _rebuilt(schema["properties"][name], inner, leaves) for name, inner in answer.items()}
    if isinstance(answer, list):
        return [_rebuilt(schema["items"], inner, leaves) for inner in answer]
    kind = _kind(schema)
    return answer if kind is None or answer is None else next(leaves[kind])
