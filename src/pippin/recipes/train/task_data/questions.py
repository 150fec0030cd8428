"""Questions about a generated document with short answers: the value of a field, or that the text does not say it.

Notable here:
- a question names a field by its label or by a description, or asks in plain words; in five languages
- plain words of one kind go before those for all kinds: the host of a party invites, that of an incident is a server
- the prompt is what a user would give to `Session.respond`: the text before or after the question, quoted or under a
  heading, with or without instructions
- where the field is absent, or one of another kind of document, the answer says so in the language of the question
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pippin.data.synthetic import documents
from pippin.data.synthetic.documents import Document, kind_files
from pippin.data.synthetic.documents.grammar import slots
from pippin.data.synthetic.documents.kind_files import FieldForm
from pippin.recipes.train.task_data.fact_sentences import (
    FactWriter,
    field_label,
    has_label,
    on_one_line,
    phrase_file,
    plain_text,
)

ABSENT: Final = 0.3
_ASKING: Final = ("who", "what", "why", "how", "when", "where", "which", "whether")
_ASKED: Final = {"integer": "number"}  # kinds of fields that are asked for as others are
# what every document could be said to have in some way
_COMMON: Final = re.compile(r"name|date|time|phone|mail|address|city|id|number|note|subject|sender|contact|comment")


@dataclass(frozen=True)
class QuestionTask:
    """A question about a document.

    Attributes:
        document: the document.
        language: of the question.
        instructions: before the conversation; empty without any.
        prompt: the text and the question.
        answer: what is to be answered.
        path: of the fact that is asked for; None where the document does not say it.
    """

    document: Document
    language: str
    instructions: str
    prompt: str
    answer: str
    path: str | None


@dataclass(frozen=True)
class Question:
    """A question about what a document says, and its answer.

    Attributes:
        language: of both.
        text: the question.
        answer: what is to be answered.
        manner: how: ``"brief"``, in a ``"sentence"``, or as it comes.
        path: of the fact that is asked for; None where the document does not say it.
    """

    language: str
    text: str
    answer: str
    manner: str
    path: str | None


def sample_question(
    document: Document, rng: random.Random, *, manners: Sequence[str] = ("", "", "", "brief", "sentence")
) -> QuestionTask | None:
    """A random question about a document with its prompt; None where no question can be asked.

    Args:
        document: the document.
        rng: source of randomness.
        manners: as for `draw_question`.
    """
    asked = draw_question(document, rng, manners=manners)
    if asked is None:
        return None
    instructions, prompt = _prompt(document.text, asked.text, asked.manner, asked.language, rng)
    return QuestionTask(document, asked.language, instructions, prompt, asked.answer, asked.path)


def draw_question(document: Document, rng: random.Random, *, manners: Sequence[str]) -> Question | None:
    """A random question about a document; None where the chosen field has no words in the chosen language.

    Args:
        document: the document.
        rng: source of randomness.
        manners: how it may be answered: ``"brief"``, in a ``"sentence"``, or, where empty, as it comes.
    """
    language = document.language if rng.random() < 0.75 else rng.choice(documents.LANGUAGES)
    writer = FactWriter(document, language, rng)
    manner = rng.choice(manners)
    path: str | None = None
    if rng.random() < ABSENT:
        form = _absent_field(document, writer, language, rng)
        if form is None:
            return None
        counted, answer = False, _words("absent", language, rng)
    else:
        path = rng.choice(list(writer.forms))
        form = writer.forms[path]
        counted = form.kind == "list" and rng.random() < 0.3
        answer = str(len(writer.facts[path])) if counted else _answer(writer, path, manner, rng)
    question = _question(document.kind, form, language, rng, counted=counted)
    if question is None or not answer:
        return None
    return Question(language, question, answer, "" if counted else manner, path)


def _words(name: str, language: str, rng: random.Random, values: Mapping[str, str] = {}) -> str:
    return plain_text(rng.choice(phrase_file("questions")[name][language]), rng, **values)


def _absent_field(document: Document, writer: FactWriter, language: str, rng: random.Random) -> FieldForm | None:
    """A field of the kind without a value, or one of another kind that nothing in this document could be."""
    own = [form for form in writer.kind.fields if form.kind != "record" and document.values.get(form.name) is None]
    if own and rng.random() < 0.7:
        return rng.choice(own)
    kind = rng.choice(documents.KINDS)
    fields = [form for form in kind_files.load(kind).fields if form.kind == "text" and not _COMMON.search(form.name)]
    form = rng.choice(fields) if fields else None
    if kind == document.kind or form is None or form.name in document.values:
        return None
    labels = [text for text in (field_label(kind, form, language, rng),) if text]
    return None if any(has_label(document.kind, text) for text in labels) else form


def _question(kind: str, form: FieldForm, language: str, rng: random.Random, *, counted: bool) -> str | None:
    """A question for a field."""
    path = _path(kind, form)
    own = path is not None
    plain = [name for name in (f"about {kind}.{path}", f"about {path}") if name in phrase_file("questions")]
    if plain and not counted and rng.random() < 0.5:
        return _words(plain[0], language, rng)
    if language == "en" and own and not counted and form.description and rng.random() < 0.3:
        return _described(form.description, rng)
    label = field_label(kind if own else _kind_of(form), form, language, rng)
    if label is None:
        return None
    if language != "de" and label.split()[0][1:].islower():  # no abbreviation
        label = label[:1].lower() + label[1:]
    specific = "count" if counted else _ASKED.get(form.kind, form.kind)
    name = specific if specific in phrase_file("questions") and (counted or rng.random() < 0.5) else "label"
    question = re.sub(r"\.\.$", ".", _words(name, language, rng, {"label": label}))
    start = 1 if question.startswith("¿") else 0
    return question[:start] + question[start : start + 1].upper() + question[start + 1 :]


def _path(kind: str, form: FieldForm) -> str | None:
    """The path of a field in documents of a kind: "total", "vendor.name"; None for a field of another kind."""
    for top in kind_files.load(kind).fields:
        if form is top:
            return form.name
        if any(form is each for each in top.fields):
            return f"{top.name}.{form.name}"
    return None


def _kind_of(form: FieldForm) -> str:
    return next(kind for kind in documents.KINDS if any(form is each for each in kind_files.load(kind).fields))


def _described(description: str, rng: random.Random) -> str:
    """A question from the description of a field: "who served the customer", "day of the purchase"."""
    first, second, *_ = [*description.split(), ""]
    if first in _ASKING or (second in _ASKING and first in ("by", "for", "from", "in", "on")):
        return f"{rng.choice(('Tell me', 'Say', 'Find out'))} {description}."
    article = "" if first in ("the", "a", "an") else "the "
    return f"{rng.choice(('What is given as', 'What does the text give as'))} {article}{description}?"


def _answer(writer: FactWriter, path: str, manner: str, rng: random.Random) -> str:
    """The value of a field: alone, or in a sentence where that is asked for, and now and then where nothing is."""
    form, fact, language = writer.forms[path], writer.facts[path], writer.language
    if manner == "sentence" or (not manner and rng.random() < 0.3):
        kind = writer.kind
        own = [each.phrase for each in (*kind.openings[language], *kind.sentences[language])]
        phrases = [each for each in writer.further or own if slots(each) == {path}]
        sentences = writer.shuffled(map(writer.filled if writer.further else writer.copied, phrases))
        told = sentences[0] if sentences else writer.labeled(path)
        if told is not None:
            return told.text
    if form.kind == "list":
        return ", ".join(writer.items(path))
    if form.kind == "flag":
        return _words("yes" if fact.value else "no", language, rng)
    if form.kind == "choice":
        return writer.value(path) or on_one_line(fact.text)
    return on_one_line(fact.text)


def _prompt(text: str, question: str, manner: str, language: str, rng: random.Random) -> tuple[str, str]:
    """Instructions and a prompt in one of the forms that users write."""
    said = [_words("ground", language, rng)] if rng.random() < 0.5 else []
    said += [_words(manner, language, rng)] if manner else []
    instructions = ""
    if said and rng.random() < 0.2:
        instructions, said = " ".join(said), []
    colon = " :" if language == "fr" else ":"
    head, between = _words("text_head", language, rng), rng.choice(("\n\n", "\n\n", "\n"))
    headed = f"{head}{colon}\n{text}"
    shown = rng.choice((text, text, f'"{text}"', headed, headed, f"# {head}\n{text}"))
    if shown == headed and rng.random() < 0.5:
        question = f"{_words('question_head', language, rng)}{colon} {question}"
    asked = " ".join([*said, question] if rng.random() < 0.5 else [question, *said])
    return instructions, between.join((shown, asked) if rng.random() < 0.6 else (asked, shown))
