"""Forms whose answers belong to other fields: an adapter that is trained on them sees the same documents, forms and
tokens, and nothing to learn."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pippin.language.constrained_objective import ConstrainedExample
from pippin.recipes.train.task_data import ExampleSampler, ExampleSplit
from pippin.recipes.train.task_data.extraction import FormTask, sample_task, tokenize_task
from pippin.session.extraction.answers import KnownValue

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel


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
