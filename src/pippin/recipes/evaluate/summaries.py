"""How true a model's summaries and short answers are: generated documents, whose facts are known.

Notable here:
- documents, questions and prompts are a function of the seed, so that two models are asked the same
- an answer is right if it has the value and little else; where the text does not say it, if it says so and little else
- a summary is measured by its length, by the facts of the document that it states, and by figures that the document
  does not have; the beginning of the document, as long as a good summary, is what no model at all scores
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

from pippin.core import progress
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import PippinError
from pippin.core.options import Option
from pippin.engine.options import Device, DType
from pippin.recipes import options
from pippin.recipes.evaluate import adapted_model
from pippin.recipes.evaluate.extraction import Kinds, Languages, Layouts, split_of

if TYPE_CHECKING:
    from pippin.core.report import Report
    from pippin.data.synthetic.documents import Document
    from pippin.recipes.train.task_data import ExampleSplit
    from pippin.recipes.train.task_data.questions import QuestionTask
    from pippin.recipes.train.task_data.summaries import SummaryTask
    from pippin.session.session import Session

_DATA = "Data"
MAX_TOKENS: Final = 200
_SLACK: Final = 60  # characters that an answer may have beside the value
_LONGEST_DENIAL: Final = 120  # characters; what is longer says something else too
# a word that says that something is not there, by language
_DENIAL: Final = re.compile(
    r"\b(not?|none|n't|unknown|nicht|keine?|unbekannt|ne|n'|pas|aucune?|inconnue?|no|ning[uú]n\w*|desconocid\w|non|"
    r"nessun\w*|sconosciut\w)\b|n't",
    re.IGNORECASE,
)
_FIGURE: Final = re.compile(r"\d+")
_SENTENCE: Final = re.compile(r"(?<=[.!?…])\s+(?=[^a-zà-ÿ])")


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a measurement."""

    model: options.Model
    adapter: options.EvaluatedAdapter = None
    items: Annotated[PositiveInt, Option("Number of documents, each with a question and a summary.", _DATA)] = 100
    kinds: Kinds = ()
    layouts: Layouts = ()
    languages: Languages = ()
    seed: options.Seed = 0
    device: Device = None
    dtype: DType = "auto"


@dataclass
class SummaryCounts:
    """Counts over summaries.

    Attributes:
        summaries: how many.
        stated: facts of the documents that they state.
        figures: numbers in them.
        unsupported: of these, those that the document does not have.
        length_right: summaries with as many sentences as asked for.
    """

    summaries: int = 0
    stated: int = 0
    figures: int = 0
    unsupported: int = 0
    length_right: int = 0

    def add(self, document: Document, text: str, count: int) -> None:
        """Count a summary of so many sentences."""
        numbers, known = _FIGURE.findall(text), set(_FIGURE.findall(document.text))
        known |= {each.lstrip("0") for each in known}
        self.summaries += 1
        self.stated += len(facts_in(document, text))
        self.figures += len(numbers)
        self.unsupported += sum(each not in known for each in numbers)
        self.length_right += len([each for each in _SENTENCE.split(text.strip()) if each]) == count


@dataclass(frozen=True)
class SummaryEvaluation:
    """What was measured.

    Attributes:
        model: name of the model.
        adapter: the adapter, None for the model itself.
        asked: questions whose answer the text has.
        right: of these, those answered rightly.
        absent: questions whose answer the text does not have.
        denied: of these, those of which the answer says so.
        written: counts over the model's summaries.
        lead: counts over the beginnings of the documents, as long as good summaries.
        failed: documents for which there was no answer.
        seconds: of all answers and summaries.
    """

    model: str
    adapter: str | None
    asked: int
    right: int
    absent: int
    denied: int
    written: SummaryCounts = field(default_factory=SummaryCounts)
    lead: SummaryCounts = field(default_factory=SummaryCounts)
    failed: int = 0
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        written, lead = self.written, self.lead
        return {
            "model": self.model,
            "adapter": self.adapter,
            "documents": written.summaries,
            "questions": self.asked,
            "answers_right": self.right / max(1, self.asked),
            "absent": self.absent,
            "absent_right": self.denied / max(1, self.absent),
            "facts_per_summary": written.stated / max(1, written.summaries),
            "facts_per_lead": lead.stated / max(1, lead.summaries),
            "unsupported_figures": written.unsupported / max(1, written.figures),
            "length_right": written.length_right / max(1, written.summaries),
            "failed": self.failed,
            "seconds_per_document": self.seconds / max(1, written.summaries),
        }

    def report(self) -> Report:
        """Shares of right answers, facts and figures of summaries, and the time of a document."""
        from pippin.core.report import Report, Row

        found = self.summary()
        rows = [
            Row("answers right", found["answers_right"]),
            Row("questions with an answer in the text", self.asked),
            Row("rightly said that the text does not say it", found["absent_right"]),
            Row("questions without one", self.absent),
            Row("facts in a summary", found["facts_per_summary"]),
            Row("facts in as much of the text's beginning", found["facts_per_lead"]),
            Row("figures of summaries that the text does not have", found["unsupported_figures"]),
            Row("summaries as long as asked for", found["length_right"]),
            Row("no answer", self.failed),
            Row("seconds for a document", found["seconds_per_document"]),
        ]
        name = adapted_model.title(self.model, self.adapter)
        return Report(f"{name} on {found['documents']} documents", rows)


def run(config: Config, *, show_progress: bool = True) -> SummaryEvaluation:
    """Measure answers to questions about documents, and summaries of them.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: a kind, layout or language that there is not.
        ModelNotFound, CheckpointError: the model or the adapter cannot be loaded.
    """
    from pippin.session.session import Session

    split = split_of(config.kinds, config.layouts, config.languages)
    model, adapter = adapted_model.load_with_adapter(
        config.model, config.adapter, device=config.device, dtype=config.dtype
    )
    session = Session(model, adapter=adapter)
    counts = dict.fromkeys(("asked", "right", "absent", "denied", "failed"), 0)
    written, lead, seconds = SummaryCounts(), SummaryCounts(), 0.0
    with progress.bar(config.items, config.model, unit="documents", show_progress=show_progress) as shown:
        for question, wanted in tasks(config.items, seed=config.seed, split=split):
            begin = time.perf_counter()
            reply, text = _answered(session, question), _summarized(session, wanted)
            seconds += time.perf_counter() - begin
            counts["failed"] += (reply is None) + (text is None)
            known, found = ("asked", "right") if question.path is not None else ("absent", "denied")
            counts[known] += 1
            counts[found] += is_right(question, reply or "")
            written.add(wanted.document, text or "", wanted.count)
            lead.add(wanted.document, wanted.document.text[: len(wanted.answer)], wanted.count)
            shown.advance(1)
    return SummaryEvaluation(model.name, config.adapter, **counts, written=written, lead=lead, seconds=seconds)


def tasks(count: int, *, seed: int, split: ExampleSplit) -> list[tuple[QuestionTask, SummaryTask]]:
    """Documents, each with a question that asks for a brief answer, and a summary.

    Args:
        count: how many.
        seed: of the documents.
        split: the documents that may occur.
    """
    from pippin.recipes.train.task_data import summaries
    from pippin.recipes.train.task_data.questions import sample_question

    rng, found = random.Random(f"summaries/{seed}"), list[Any]()
    while len(found) < count:
        document = summaries.sample_document(rng, split)
        question = sample_question(document, rng, manners=("brief",))
        summary = summaries.sample_summary(document, rng)
        if question is not None and summary is not None and summary.requested is None:
            found.append((question, summary))
    return found


def is_right(question: QuestionTask, reply: str) -> bool:
    """Whether a reply has the value that is asked for and little else, or says that the text does not have it.

    Args:
        question: the question and its answer.
        reply: of a model.
    """
    if question.path is None:
        short = len(reply.strip()) <= _LONGEST_DENIAL
        return short and bool(_DENIAL.search(reply)) and not _FIGURE.search(reply)
    answer, given = _plain(question.answer), _plain(reply)
    has = re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", given)
    return bool(has) and len(given) <= len(answer) + _SLACK


def facts_in(document: Document, text: str) -> set[str]:
    """The paths of the facts of a document whose value a text has; flags and choices are not looked for.

    Args:
        document: the document.
        text: a summary of it, in its language.
    """
    from pippin.recipes.train.task_data.fact_sentences import FactWriter

    writer = FactWriter(document, document.language, random.Random(0))
    given, found = _plain(text), set[str]()
    for path, form in writer.forms.items():
        if form.kind in ("flag", "choice"):
            continue
        values = writer.items(path) if form.kind == "list" else [writer.facts[path].text]
        if values and all(re.search(rf"(?<!\w){re.escape(_plain(each))}(?!\w)", given) for each in values):
            found.add(path)
    return found


def _answered(session: Session, question: QuestionTask) -> str | None:
    from pippin.session.transcript import Instructions, Prompt

    said = [Instructions(question.instructions)] if question.instructions else []
    return _respond(session, said, Prompt(question.prompt))


def _summarized(session: Session, task: SummaryTask) -> str | None:
    *before, last = task.transcript.entries
    return _respond(session, before, last)


def _respond(session: Session, before: Sequence[Any], last: Any) -> str | None:
    """What a model answers to the last prompt of a conversation; None where it gives no answer."""
    from pippin.session.options import GenerationOptions
    from pippin.session.transcript import Transcript

    session.transcript = Transcript(entries=tuple(before))
    try:
        return session.respond(last.text, options=GenerationOptions(temperature=0.0, max_tokens=MAX_TOKENS)).content
    except PippinError:  # the text is too long, say
        return None


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\s*\n\s*", ", ", text.strip())).strip(" .,;:!?\"'").casefold()
