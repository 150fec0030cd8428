"""Training data of the adapter for classification: texts, labels, and which of them is right.

Notable here:
- texts are written for a set of labels, or are generated documents, sorted by kind, language or what they say
- labels vary as users' do: synonyms, languages, spelling, with descriptions or without, two to twelve of them
- sets are held out by a hash of their names
- where the labels leave a choice, the loss is among the tokens that continue one of them, as inference normalizes over
  the labels; where they leave none, it is among all tokens, since inference counts the probability of every token
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from pippin.data.synthetic import documents, label_sets as sets
from pippin.data.synthetic.documents import kind_files
from pippin.data.synthetic.documents.grammar import draws
from pippin.data.synthetic.documents.kind_files import FieldForm
from pippin.data.text.language import LANGUAGE_NAMES
from pippin.language.constrained_objective import ConstrainedExample
from pippin.recipes.train.task_data.examples import ExampleSampler, ExampleSplit
from pippin.recipes.train.task_data.fact_sentences import FactWriter, field_label, kind_title, plain_text
from pippin.recipes.train.task_data.summaries import sample_document
from pippin.session import chat_format
from pippin.session.text_prompts import Preset, end_of_turn, label_request, labels_preset
from pippin.session.transcript import Prompt, Transcript

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel

MOST: Final = 12
_HELD_OUT: Final = 5  # one set out of so many
_CHOICE_WEIGHT: Final = 4.0  # of a choice among labels; the other tokens of a label only spell it
_OWN_NAMES: Final = {"en": "English", "de": "Deutsch", "fr": "français", "es": "español", "it": "italiano"}


@dataclass(frozen=True)
class LabeledText:
    """A text, labels, and the right one.

    Attributes:
        name: of the set that the labels come from.
        text: the text.
        labels: in the order of the prompt.
        label: the right one.
        about: what the labels say about a text; may be empty.
        descriptions: of the labels; may be empty.
        examples: other texts with their labels, for the prompt.
    """

    name: str
    text: str
    labels: tuple[str, ...]
    label: str
    about: str = ""
    descriptions: Mapping[str, str] = field(default_factory=dict)
    examples: tuple[tuple[str, str], ...] = ()

    @property
    def preset(self) -> Preset:
        """The prompt before the text."""
        return labels_preset(self.labels, self.descriptions, self.about, self.examples)

    @property
    def transcript(self) -> Transcript:
        """The conversation in which the model is to answer with a label."""
        return self.preset.transcript.add(Prompt(label_request(self.text)))


def is_held_out(name: str) -> bool:
    """Whether a set of labels is for evaluation only."""
    return zlib.crc32(name.encode()) % _HELD_OUT == _HELD_OUT - 1


def sample_text(rng: random.Random, split: ExampleSplit) -> LabeledText | None:
    """A random text with labels; None where the drawn set is not in the split, or a document does not have a label.

    Args:
        rng: source of randomness.
        split: the documents that may occur, and whether sets are those that are held out.
    """
    chance = rng.random()
    source = next(function for function, share in _SOURCES if chance < share)
    found = source(rng, split)
    if found is None or is_held_out(found.name) != split.held_out:
        return None
    names = tuple(dict.fromkeys(_one_style(found.labels, rng)))
    if len(names) < len(found.labels) or len(names) < 2 or any("\n" in name or not name.strip() for name in names):
        return None
    renamed = dict(zip(found.labels, names, strict=True))
    order = rng.sample(names, len(names))
    return LabeledText(
        found.name,
        found.text,
        tuple(order),
        renamed[found.label],
        found.about if rng.random() < 0.6 else "",
        {renamed[label]: text for label, text in found.descriptions.items()} if rng.random() < 0.5 else {},
        tuple((text, renamed[label]) for text, label in found.examples),
    )


def _one_style(labels: Sequence[str], rng: random.Random) -> list[str]:
    """All labels in one of the spellings that users choose."""
    change: Callable[[str], str] = rng.choice(
        (str, str, str, str.lower, str.upper, lambda text: text[:1].upper() + text[1:], kind_files.slug)
    )
    return [change(label).strip() for label in labels]


# --- where texts and labels come from ---------------------------------------------------------------------------------


def _written(rng: random.Random, split: ExampleSplit) -> LabeledText | None:
    """A text of a label set, whose labels may be in another language."""
    language = rng.choice(split.languages or sets.LANGUAGES)
    other = language if rng.random() < 0.65 else rng.choice(("en", *sets.LANGUAGES))
    english = sets.label_sets("en")
    name = rng.choice([name for name in english if is_held_out(name) == split.held_out])
    texts, named = sets.label_sets(language)[name], sets.label_sets(other)[name]
    count = len(texts.labels)
    chosen = rng.sample(range(count), count if rng.random() < 0.5 else rng.randint(2, count))
    names = {index: rng.choice(named.labels[index].names) for index in chosen}
    right = rng.choice(chosen)
    sentences = dict.fromkeys(texts.labels[right].text(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    descriptions = {names[index]: english[name].labels[index].description for index in chosen}
    examples = [(texts.labels[index].text(rng), names[index]) for index in chosen] if rng.random() < 0.1 else []
    rng.shuffle(examples)
    about = rng.choice(english[name].about)
    return LabeledText(
        name, " ".join(sentences), tuple(names.values()), names[right], about, descriptions, tuple(examples)
    )


def _by_kind(rng: random.Random, split: ExampleSplit) -> LabeledText | None:
    """A document, sorted by its kind."""
    document = sample_document(rng, split)
    language = document.language if rng.random() < 0.6 else rng.choice(documents.LANGUAGES)
    others = [kind for kind in documents.KINDS if kind != document.kind]
    kinds = [document.kind, *rng.sample(others, rng.randint(1, min(MOST - 1, len(others))))]
    plain = rng.random() < 0.5
    names = {kind: kind.replace("_", " ") if plain else kind_title(kind, language, rng) for kind in kinds}
    about = rng.choice(("the kind of document", "which kind of document it is", "the type"))
    return LabeledText("kind", document.text, tuple(names.values()), names[document.kind], about)


def _by_language(rng: random.Random, split: ExampleSplit) -> LabeledText | None:
    """A document or a sentence, sorted by its language."""
    if rng.random() < 0.5:
        document = sample_document(rng, split)
        language, text = document.language, document.text
    else:
        language = rng.choice(split.languages or sets.LANGUAGES)
        labels = rng.choice(list(sets.label_sets(language).values())).labels
        text = rng.choice(labels).text(rng)
    names = rng.choice((LANGUAGE_NAMES, LANGUAGE_NAMES, _OWN_NAMES, {tag: tag for tag in _OWN_NAMES}))
    others = [tag for tag in names if tag != language]
    tags = [language, *rng.sample(others, rng.randint(1, min(MOST - 1, len(others))))]
    about = rng.choice(("the language", "which language it is written in"))
    return LabeledText("language", text, tuple(names[tag] for tag in tags), names[language], about)


def _by_value(rng: random.Random, split: ExampleSplit) -> LabeledText | None:
    """A document, sorted by the value of a choice, or by whether something is so."""
    document = sample_document(rng, split)
    forms = [form for form in kind_files.load(document.kind).fields if form.kind in ("choice", "flag")]
    forms = [form for form in forms if document.values.get(form.name) is not None]
    if not forms:
        return None
    form = rng.choice(forms)
    value = str(document.values[form.name].value)  # type: ignore[union-attr]
    keys = {"True": "yes", "False": "no"}
    language = document.language if rng.random() < 0.6 else "en"
    names = {key: _value_name(form, key, language, rng) for key in form.values}
    about = form.description or form.name.replace("_", " ")
    return LabeledText(
        f"value {document.kind}.{form.name}", document.text, tuple(names.values()), names[keys.get(value, value)], about
    )


def _value_name(form: FieldForm, key: str, language: str, rng: random.Random) -> str:
    phrases = [phrase for phrase in form.values[key][language] if not draws(phrase)]
    if form.kind == "flag" or not phrases or rng.random() < 0.5:
        return key.replace("_", " ")
    return re.sub(r"[\[\]]", "", plain_text(phrases[0], rng))


def _by_fact(rng: random.Random, split: ExampleSplit) -> LabeledText | None:
    """A sentence, sorted by the fact that it states."""
    document = sample_document(rng, split)
    writer = FactWriter(document, document.language, rng)
    listed = writer.kind.sentences[document.language]
    told = writer.shuffled(writer.filled(each.phrase) for each in listed if len(each.slots) == 1)
    if not told:
        return None
    (right,) = told[0].paths
    others = [path for path in writer.forms if path != right]
    if not others:
        return None
    paths = [right, *rng.sample(others, rng.randint(1, min(7, len(others))))]
    language = document.language if rng.random() < 0.7 else "en"
    plain = rng.random() < 0.4
    names = {path: _field_name(document.kind, path, writer.forms[path], language, rng, plain=plain) for path in paths}
    about = rng.choice(("what it states", "which fact it states", "the subject"))
    return LabeledText(f"fact {document.kind}", told[0].text, tuple(names.values()), names[right], about)


def _field_name(kind: str, path: str, form: FieldForm, language: str, rng: random.Random, *, plain: bool) -> str:
    label = None if plain else field_label(kind, form, language, rng)
    return label or path.replace("_", " ").replace(".", " ")


_SOURCES: Final[tuple[tuple[Callable[[random.Random, ExampleSplit], LabeledText | None], float], ...]] = (
    (_written, 0.55),
    (_by_kind, 0.68),
    (_by_language, 0.76),
    (_by_value, 0.9),
    (_by_fact, 1.0),
)


# --- tokens -----------------------------------------------------------------------------------------------------------


def label_example(
    prompt: Sequence[int], answers: Sequence[Sequence[int]], right: int, vocab_size: int
) -> ConstrainedExample:
    """One of several answers as an example.

    Args:
        prompt: the tokens before the answer.
        answers: the tokens of every label, with those that end the turn; none is the beginning of another.
        right: index of the right one.
        vocab_size: number of tokens of the model.
    """
    answer = list(answers[right])
    allowed, weights = np.zeros((len(answer), vocab_size), bool), np.ones(len(answer))
    for index in range(len(answer)):
        following = {other[index] for other in answers if list(other[:index]) == answer[:index]}
        if len(following) > 1:
            weights[index] = _CHOICE_WEIGHT
        allowed[index, list(following) if len(following) > 1 else slice(None)] = True
    places = np.arange(len(answer)) + len(prompt) - 1
    bits = np.packbits(allowed, axis=1, bitorder="little")
    return ConstrainedExample((*prompt, *answer), places, np.array(answer), bits, weights)


def examples(model: LanguageModel, split: ExampleSplit, max_length: int) -> ExampleSampler:
    """A sampler of texts with labels.

    Args:
        model: provides tokenizer and chat template.
        split: the documents that may occur, and whether sets of labels are those that are held out.
        max_length: most tokens of an example.
    """
    end = end_of_turn(model)

    def sample(rng: random.Random) -> ConstrainedExample | None:
        task = sample_text(rng, split)
        if task is None:
            return None
        prompt = chat_format.encode(model, task.transcript)
        answers = [[*model.tokenizer.encode(label), *end] for label in task.labels]
        right = task.labels.index(task.label)
        if len(prompt) + len(answers[right]) > max_length:
            return None
        return label_example(prompt, answers, right, model.config.vocab_size)

    return sample
