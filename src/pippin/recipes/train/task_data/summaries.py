"""Training data of the adapter for summaries and short answers: generated documents, whose facts are known.

Notable here:
- the prompts are those of `TextTasks.summarize` and `TextTasks.key_points`, and questions as users ask them
- a summary states facts of the document only, those first that every document of its kind has
- nothing restricts these answers at inference, so every token counts among all tokens, and the end of the turn
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from pippin.data.synthetic import documents
from pippin.data.synthetic.documents import Document
from pippin.data.text.language import language_of
from pippin.language.constrained_objective import ConstrainedExample
from pippin.recipes.train.task_data.examples import ExampleSampler, ExampleSplit
from pippin.recipes.train.task_data.fact_sentences import FactWriter, StatedFacts, phrase_file
from pippin.recipes.train.task_data.questions import sample_question
from pippin.session import chat_format, text_prompts
from pippin.session.text_prompts import Preset, end_of_turn
from pippin.session.transcript import Instructions, Prompt, Transcript

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel

_COUNTS: Final = (1, 1, 1, 3, 3, 3, 6, 6, 2, 4, 5, 8)
# what could be taken for the end of a sentence within one, so that the rest would be cut off
_BREAK: Final = re.compile(r"[.!?…][\"'”’»)]*\s+[^a-zà-ÿ]")
_POINTS: Final = (5, 5, 5, 3, 3, 1, 2, 4, 6, 7)


@dataclass(frozen=True)
class SummaryTask:
    """A document to summarize.

    Attributes:
        document: the document.
        count: the number of sentences or key points that are asked for.
        language: of the summary.
        requested: the language that is named in the call, None where none is.
        points: whether key points are asked for.
        answer: the summary.
        paths: of the facts that it states.
    """

    document: Document
    count: int
    language: str
    requested: str | None
    points: bool
    answer: str
    paths: frozenset[str]

    @property
    def transcript(self) -> Transcript:
        """The conversation that the task has with a model."""
        preset: Preset = text_prompts.POINTS if self.points else text_prompts.SUMMARY
        text = self.document.text
        request = (
            text_prompts.points_request(text, self.count)
            if self.points
            else text_prompts.summary_request(text, self.count, self.requested)
        )
        return preset.transcript.add(Prompt(text.strip() + request))


def sample_document(rng: random.Random, split: ExampleSplit) -> Document:
    """A random document of a split.

    Args:
        rng: source of randomness.
        split: the documents that may occur.
    """
    kind = rng.choice(split.kinds or documents.KINDS)
    language = rng.choice(split.languages or documents.LANGUAGES)
    layout, noise = rng.choice(split.layouts_of(kind)), rng.choice((0.0, 0.0, 0.1, 0.3))
    return documents.sample(kind, language=language, layout=layout, seed=rng, noise=noise)


def sample_summary(document: Document, rng: random.Random, *, points: bool = False) -> SummaryTask | None:
    """A random summary of a document; None where its facts do not make one.

    Args:
        document: the document.
        rng: source of randomness.
        points: whether it is a list of key points.
    """
    detected = language_of(document.text)
    if detected not in (None, document.language):
        return None  # the request would name a wrong language
    others = [each for each in documents.LANGUAGES if each != document.language]
    requested = rng.choice(others) if not points and detected and rng.random() < 0.2 else None
    if requested is None and not points and rng.random() < 0.1:
        requested = document.language
    language = requested or document.language
    count = rng.choice(_POINTS if points else _COUNTS)
    chosen = _chosen(FactWriter(document, language, rng), count, rng)
    texts = [sentence.text for sentence in chosen]
    if not texts:
        return None
    if points and len(texts) < min(3, count):
        return None
    answer = "\n".join(f"- {text}" for text in texts) if points else " ".join(texts)
    paths = frozenset().union(*(sentence.paths for sentence in chosen))
    return SummaryTask(document, count, language, requested, points, answer, paths)


def _chosen(writer: FactWriter, count: int, rng: random.Random) -> list[StatedFacts]:
    """An opening, then sentences with the most important facts that are left."""
    kind, language = writer.kind, writer.language
    plain = writer.shuffled(map(writer.filled, phrase_file("summaries").get(kind.name, {}).get(language, ())))
    own = [] if writer.further else writer.shuffled(writer.copied(each.phrase) for each in kind.openings[language])
    openings = plain if plain and (rng.random() < 0.7 or not own) else own or plain
    required = {path for path in writer.order if writer.forms[path].required}
    chosen, stated = list[StatedFacts](), set[str]()
    openings = [each for each in openings if not _BREAK.search(each.text)]
    if not openings and language != writer.document.language:
        return []  # what the text is about cannot be said in that language
    if openings:
        chosen = [max(openings, key=lambda each: (len(each.paths & required), len(each.paths)))]
        if rng.random() < 0.4:
            chosen = openings[:1]
        stated = set(chosen[0].paths)
    labeled = (writer.labeled(path) for path in writer.order)
    left = [*writer.statements(), *(each for each in labeled if each is not None)]
    rank = {path: index for index, path in enumerate(writer.order)}
    left.sort(key=lambda each: min(rank[path] for path in each.paths))
    for sentence in left:
        if len(chosen) < count and not sentence.paths & stated and not _BREAK.search(sentence.text):
            chosen.append(sentence)
            stated |= sentence.paths
    return chosen[:count]


def free_example(prompt: Sequence[int], answer: Sequence[int], vocab_size: int) -> ConstrainedExample:
    """An answer that nothing restricts as an example: each of its tokens counts, among all tokens.

    Args:
        prompt: the tokens before the answer.
        answer: its tokens, with those that end the turn.
        vocab_size: number of tokens of the model.
    """
    places = np.arange(len(answer)) + len(prompt) - 1
    allowed = np.full((len(answer), -(-vocab_size // 8)), 255, np.uint8)
    return ConstrainedExample((*prompt, *answer), places, np.array(answer), allowed)


def examples(model: LanguageModel, split: ExampleSplit, max_length: int) -> ExampleSampler:
    """A sampler of summaries, key points and short answers.

    Args:
        model: provides tokenizer and chat template.
        split: the documents that may occur.
        max_length: most tokens of an example.
    """
    end = end_of_turn(model)

    def sample(rng: random.Random) -> ConstrainedExample | None:
        document, chance = sample_document(rng, split), rng.random()
        if chance < 0.55:
            summary = sample_summary(document, rng, points=chance < 0.2)
            if summary is None:
                return None
            transcript, answer = summary.transcript, summary.answer
        else:
            question = sample_question(document, rng)
            if question is None:
                return None
            begin = (Instructions(question.instructions),) if question.instructions else ()
            transcript, answer = Transcript(entries=(*begin, Prompt(question.prompt))), question.answer
        prompt, ids = chat_format.encode(model, transcript), [*model.tokenizer.encode(answer), *end]
        if len(prompt) + len(ids) > max_length:
            return None
        return free_example(prompt, ids, model.config.vocab_size)

    return sample
