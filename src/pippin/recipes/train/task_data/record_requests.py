"""Requests whose answer is a fact of a generated document, which only a tool can read.

Notable here:
- the user asks for one fact and names the document by a reference, such as a number or a file, which the call takes
- the tool returns the text of the document, or its values by name
- where the document does not say it, the answer says so
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Final

from pippin.data.synthetic.documents import Document, Fact
from pippin.data.synthetic.tool_requests import ToolRequest, is_held_out
from pippin.recipes.train.task_data.examples import ExampleSplit
from pippin.recipes.train.task_data.fact_sentences import kind_title, on_one_line
from pippin.recipes.train.task_data.questions import draw_question
from pippin.recipes.train.task_data.summaries import sample_document

_MOST: Final = 900  # characters of an output
# name, description, parameter and what it is; {kind} stands for the kind of document
_TOOLS: Final = (
    ("get_{kind}", "Get the {kind} with a given number.", "number", "Number of the {kind}"),
    ("find-{kind}", "Find the {kind} with a given reference.", "reference", "Reference of the {kind}"),
    ("lookup{Kind}", "Look up one {kind}.", "id", "Which {kind}"),
    ("load_{kind}_record", "Load a record of the {kind} database.", "record", "Its number"),
    ("read_attachment", "Read an attachment of a message.", "attachment", "The attachment"),
    ("openDocument", "Open a document of the archive.", "document_id", "The document"),
    ("fetch_entry", "Fetch an entry by its key.", "key", "The key"),
)
_REFERENCES: Final = ("{a}-{n}", "{n}", "{a}{n}", "{n}/{y}", "{a}/{y}/{n}", "{a}-{y}-{n}", "{kind}_{n}.txt", "{n}.pdf")
_TOGETHER: Final = {
    "en": ("{title} {id}: {question}", "{question} ({title} {id})", "It is about {title} {id}. {question}",
           "{question} I mean {title} {id}.", "Please look into {title} {id}. {question}"),
    "de": ("{title} {id}: {question}", "{question} ({title} {id})", "Es geht um {title} {id}. {question}",
           "{question} Gemeint ist {title} {id}.", "Sieh bitte nach: {title} {id}. {question}"),
    "fr": ("{title} {id} : {question}", "{question} ({title} {id})", "Il s'agit de : {title} {id}. {question}",
           "Regarde s'il te plaît : {title} {id}. {question}"),
    "es": ("{title} {id}: {question}", "{question} ({title} {id})", "Se trata de {title} {id}. {question}",
           "Mira por favor: {title} {id}. {question}"),
    "it": ("{title} {id}: {question}", "{question} ({title} {id})", "Si tratta di {title} {id}. {question}",
           "Guarda per favore: {title} {id}. {question}"),
}  # fmt: skip


def sample_record_request(rng: random.Random, split: ExampleSplit) -> ToolRequest | None:
    """A random request for a fact of a document; None where the drawn one cannot be asked for, or is too long.

    Args:
        rng: source of randomness.
        split: the documents that may occur.
    """
    document = sample_document(rng, split)
    asked = draw_question(document, rng, manners=("sentence", "sentence", ""))
    output = document.text if rng.random() < 0.5 else values_text(document, rng)
    if asked is None or len(output) > _MOST:
        return None
    kind = document.kind.replace("_", " ")
    named = [entry for entry in _TOOLS if is_held_out(_name(entry[0], document.kind)) == split.held_out]
    if not named:
        return None
    pattern, description, parameter, meaning = rng.choice(named)
    name = _name(pattern, document.kind)
    reference = _reference(document.kind, rng)
    prompt = rng.choice(_TOGETHER[asked.language]).format(
        title=kind_title(document.kind, asked.language, rng), id=reference, question=asked.text
    )
    schema = {
        "type": "object",
        "properties": {parameter: {"type": "string", "description": meaning.format(kind=kind)}},
        "required": [parameter],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description.format(kind=kind), "parameters": schema}
    offered = ({"type": "function", "function": function},)
    return ToolRequest(offered, prompt, (name, {parameter: reference}), output=output, answer=asked.answer)


def values_text(document: Document, rng: random.Random) -> str:
    """The values of a document by name, spelled as in its text: JSON, or lines."""
    values = {name: _spelled(value) for name, value in document.values.items() if value is not None}
    if rng.random() < 0.7:
        return json.dumps(values, ensure_ascii=False, indent=rng.choice((None, None, 2)))
    return "\n".join(f"{name}: {_line(value)}" for name, value in values.items())


def _name(pattern: str, kind: str) -> str:
    return pattern.format(kind=kind, Kind=kind.title().replace("_", ""))


def _reference(kind: str, rng: random.Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHKLMNPRSTWXZ") for _ in range(rng.randint(1, 3)))
    number = rng.randint(10, 10 ** rng.randint(2, 6))
    return rng.choice(_REFERENCES).format(a=letters, n=number, y=rng.randint(2019, 2027), kind=kind)


def _spelled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _spelled(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_spelled(inner) for inner in value]
    if isinstance(value, Fact):
        return value.value if isinstance(value.value, bool) else on_one_line(value.text)
    return value


def _line(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_line(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return "; ".join(map(_line, value))
    return "yes" if value is True else "no" if value is False else str(value)
