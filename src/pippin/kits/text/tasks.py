"""Text tasks: summarise, rewrite, proofread, extract, classify, tag, reply; presets on one model.

Notable here:
- what comes back can be checked: edits with their places, probabilities that add up, the numbers and names that a
  summary has from nowhere
- where a small model writes badly it is asked to choose instead: corrections, labels, tags and `how="select"` summaries
  are picked by its probabilities, not written by it
- protected ranges (code, quotes, links, e-mail addresses) come back byte for byte
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field

from pippin.core.errors import AnswerTruncated, InvalidArgument, UnsupportedCapability, UnsupportedLanguage
from pippin.kits.text import presets, rewrite as rewriting, summarise, tags
from pippin.kits.text.calibration import Calibration
from pippin.kits.text.classify import Calibrate, Classification, Classifier
from pippin.kits.text.desk import Desk, Preset
from pippin.kits.text.edits import Edit, Revision, compare, distance
from pippin.kits.text.facts import language_of
from pippin.kits.text.proofread import MARGINS, Margins, Proofreader
from pippin.kits.text.rewrite import Rewriting
from pippin.kits.text.spans import DEFAULT_PROTECTION, Protection, Range, check_text, protected_ranges
from pippin.kits.text.summarise import Draft, Passage
from pippin.session.options import GenerationOptions
from pippin.session.schema import Schema

if TYPE_CHECKING:
    from pippin.language.load import LanguageModel
    from pippin.session.guardrails import Guardrails
    from pippin.session.provider import Provider
    from pippin.session.session import Session

T = TypeVar("T")

MOST_CHANGED = 0.35  # edit distance over length, beyond which "proofreading" is a rewrite


@dataclass(frozen=True)
class Table:
    """Facts of a text in rows and columns; ``unverified`` lists numbers and names that the text does not hold."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    unverified: tuple[str, ...] = ()

    def to_markdown(self) -> str:
        r"""The table in Markdown.

        >>> print(Table(("a", "b"), (("1", "x|y"),)).to_markdown())
        | a | b |
        | --- | --- |
        | 1 | x\|y |
        """
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        cells = ([re.sub(r"\s+", " ", cell).replace("|", r"\|") for cell in line] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)


@dataclass(frozen=True)
class Reply:
    """A suggested reply; ``kind`` says what it does: "accept", "decline", "ask" or "thank"."""

    text: str
    kind: str


class TextTasks:
    """Tasks on texts, all by one model.

    Methods may be called from several threads. Every method raises `InvalidInput` for a text that is empty, not a str,
    or holds half a character, and passes on what `Session.respond` raises.

    Args:
        model: a model reference (see `pippin.load`), a loaded model, a provider, or a session, whose model and
            guardrails are used and whose conversation is left alone.
        options: how to choose tokens; the tasks set ``max_tokens`` themselves where it is None.
        guardrails: rules for what goes in and comes out; None for those of the session, if one was given.

    Raises:
        ModelNotFound, DownloadFailed, CheckpointError: the model cannot be had.

    >>> tasks = TextTasks("smollm2-135m")                                                    # doctest: +SKIP
    >>> [(edit.original, edit.replacement) for edit in tasks.proofread("I recieved it.").edits]  # doctest: +SKIP
    [('recieved', 'received')]
    """

    def __init__(
        self,
        model: str | Path | LanguageModel | Provider | Session = "smollm2-135m",
        *,
        options: GenerationOptions = GenerationOptions(),
        guardrails: Guardrails | None = None,
    ) -> None:
        self.desk = Desk.at(model, options, guardrails)

    # --- shorter ------------------------------------------------------------------------------------------------------

    def summarize(
        self,
        text: str,
        *,
        length: Literal["short", "medium", "long"] | int = "medium",
        how: Literal["write", "select"] = "write",
        language: str | None = None,
    ) -> Passage:
        """A summary, checked: its numbers and names that the text does not hold are in ``unverified``.

        Args:
            text: of any length; a long one is summarised in parts, then the parts together.
            length: "short" (one sentence), "medium" (three), "long" (six) or a number of sentences, at most 50.
            how: "write" it with the model's words, or "select" sentences of the text, which cannot be wrong but may
                hang in the air; a model below a billion parameters selects better than it writes.
            language: tag of the language to write in; None for that of the text.

        Raises:
            InvalidArgument: another length or way. UnsupportedCapability: "select" without log-probabilities.
        """
        if how == "select":
            count = presets.sentences_wanted(length)
            self.desk.local  # noqa: B018  (raises where no log-probabilities can be had)
            return summarise.select(self.desk, self.desk.admit(text), count)
        *_, last = self.summarize_drafts(text, length=length, how=how, language=language)
        assert last.done is not None
        return last.done

    def summarize_drafts(
        self,
        text: str,
        *,
        length: Literal["short", "medium", "long"] | int = "medium",
        how: Literal["write"] = "write",
        language: str | None = None,
    ) -> Iterator[Draft]:
        """`summarize` as it is written: drafts of each part and of the whole; the last one is ``done``."""
        if how != "write":
            raise InvalidArgument(f"how must be write or select, got {how!r}")
        count = presets.sentences_wanted(length)
        return summarise.write(self.desk, self.desk.admit(text), count, _checked_tag(language))

    def key_points(self, text: str, *, most: int = 5) -> list[Passage]:
        """The key points of a text, the most important first; of a long text, those of each part.

        Raises:
            InvalidArgument: ``most`` is not between 1 and 50.
        """
        _in_range("most", most)
        language = presets.in_language(language_of(self.desk.admit(text)))
        request = f"\n\nList the {most} key points of this text.{language}"
        return summarise.listed(self.desk, presets.POINTS, text, request, most, first=True)

    def to_list(self, text: str, *, most: int = 30) -> list[Passage]:
        """The text as a list of items.

        Raises:
            InvalidArgument: ``most`` is not between 1 and 50.
        """
        _in_range("most", most)
        request = "\n\nTurn this text into a list."
        return summarise.listed(self.desk, presets.LIST, self.desk.admit(text), request, most)

    def to_table(self, text: str, *, columns: Sequence[str] | None = None, most: int = 20) -> Table:
        """The facts of a text as a table.

        Args:
            text: short enough to be read whole.
            columns: names of the columns; None lets the model choose two to five.
            most: rows, at most 50.

        Raises:
            InvalidArgument: no columns, one twice, or ``most`` out of range. ContextOverflow: the text is too long.
        """
        _in_range("most", most)
        hidden = {"include_schema_in_prompt": False}  # a small model copies the words of a schema into the cells
        if columns is None:
            names = Annotated[
                list[Annotated[str, Field(min_length=1, max_length=30)]], Field(min_length=2, max_length=5)
            ]
            chosen = self._typed(presets.COLUMNS, text, "\n\nThe columns of a table of this text:", names, 80, **hidden)
            columns = list(dict.fromkeys(chosen))
        if isinstance(columns, str) or not columns or len(set(columns)) < len(columns):
            raise InvalidArgument(f"columns are different names, at least one; got {columns!r}")
        row = {"type": "array", "prefixItems": [{"type": "string", "maxLength": 120}] * len(columns), "items": False}
        row |= {"minItems": len(columns)}
        form = {"type": "array", "items": row, "minItems": 1, "maxItems": most}
        request = f"\n\nThe rows of a table of this text with the columns {', '.join(columns)}:"
        rows = self._typed(presets.ROWS, text, request, form, min(40 * most, 800), **hidden)
        found = [
            tuple(line)
            for line in dict.fromkeys(map(tuple, rows))
            if line != tuple(columns) and any(cell.strip() for cell in line)
        ]
        written = "\n".join(f"a {cell}." for line in found for cell in line)
        return Table(tuple(columns), tuple(found), summarise.check(self.desk, written, text))

    # --- otherwise ----------------------------------------------------------------------------------------------------

    def rewrite(
        self,
        text: str,
        *,
        tone: str | None = None,
        length: Literal["shorter", "same", "longer"] = "same",
        protect: Iterable[Protection] = DEFAULT_PROTECTION,
        language: str | None = None,
    ) -> Rewriting:
        """The text in another tone or length, paragraph by paragraph.

        Args:
            text: of any length.
            tone: "friendly", "professional", "concise", "formal", "casual", "simple", "persuasive" or "neutral"; None
                leaves it as it is.
            length: "shorter", "same" or "longer".
            protect: what comes back byte for byte: see `protected_ranges`.
            language: tag of the language to write in; None for that of the text.

        Raises:
            InvalidArgument: another tone or length, or neither of them asks for a change.
        """
        preset = presets.tone(tone, length)
        if tone is None and length == "same":
            raise InvalidArgument(f"rewrite needs a tone ({', '.join(presets.TONES)}) or a length (shorter, longer)")
        ranges = protected_ranges(self.desk.admit(text), protect)
        return rewriting.rewrite(self.desk, text, preset, length, ranges, _checked_tag(language))

    def proofread(
        self,
        text: str,
        *,
        how: Literal["auto", "choose", "write"] = "auto",
        protect: Iterable[Protection] = DEFAULT_PROTECTION,
        margins: Margins = MARGINS,
    ) -> Revision:
        """The corrections of a text, as edits with their places, kinds and explanations.

        Args:
            text: of any length.
            how: "choose" among corrections that rules propose, by the model's probabilities (English only); "write" the
                corrected text with the model and compare; "auto" chooses where it can and writes elsewhere.
            protect: what no edit may touch: see `protected_ranges`.
            margins: how sure the model must be in order to choose a correction.

        Raises:
            InvalidArgument: another way. UnsupportedCapability: "choose" without log-probabilities.
            UnsupportedLanguage: "choose" for a text that is not English.
        """
        if how not in ("auto", "choose", "write"):
            raise InvalidArgument(f"how must be auto, choose or write, got {how!r}")
        ranges = protected_ranges(self.desk.admit(text), protect)
        language = language_of(text) or "en"
        if how == "auto":
            how = "choose" if self.desk.can_score and language == "en" else "write"
        if how == "write":
            return Revision(text, tuple(self._written_edits(text, ranges)))
        self.desk.local  # noqa: B018  (raises where no log-probabilities can be had)
        if language != "en":
            raise UnsupportedLanguage(
                f"corrections are proposed for English only, and this text looks like {language!r}; use how='write'",
                language=language,
            )
        return Revision(text, tuple(self.proofreader(margins).edits(text, ranges)))

    def proofreader(self, margins: Margins = MARGINS) -> Proofreader:
        """What chooses corrections, for texts that are read in pieces: its ``edits`` come one by one."""
        return Proofreader(self.desk.lexicon, self.desk.score_text, margins)

    def _written_edits(self, text: str, protected: Sequence[Range]) -> Iterator[Edit]:
        """Corrections that the model wrote; a part that it rewrote instead is left alone."""
        for part in summarise.split(self.desk, presets.PROOFREAD, text, 400):
            for paragraph in re.finditer(r"[^\n]+", part.of(text)):
                old = paragraph[0].strip()
                start = part.start + paragraph.start() + len(paragraph[0]) - len(paragraph[0].lstrip())
                if not re.search(r"\w", old) or any(o.start <= start and start + len(old) <= o.end for o in protected):
                    continue
                most = int(1.5 * self.desk.tokens(old)) + 16
                new = self.desk.ask(presets.PROOFREAD, f"Correct: {old}", most=most).strip().removeprefix("Correct: ")
                limit = int(MOST_CHANGED * len(old))
                if new and "\n" not in new and distance(old, new, most=limit) <= limit:
                    yield from compare(old, new, offset=start, protected=protected)

    # --- typed --------------------------------------------------------------------------------------------------------

    def extract(self, text: str, into: type[T] | Schema[T] | Any, *, question: str = "") -> T:
        """A value of a type, filled in from the text.

        Args:
            text: short enough to be read whole.
            into: anything that `Schema` takes.
            question: what to look for, if the type does not say it.

        Raises:
            SchemaError: the type cannot be enforced. ContextOverflow: the text is too long; the message says how
                long it may be. AnswerTruncated: the value grew beyond a quarter of the context.
        """
        request = f"\n\n{question or 'Fill in the answer from this text.'}"
        value: T = self._typed(presets.EXTRACT, text, request, into, (self.desk.provider.context_size or 8192) // 4)
        return value

    def classifier(
        self,
        labels: Sequence[str] | Mapping[str, str],
        *,
        about: str = "",
        examples: Iterable[tuple[str, str]] = (),
        calibrate: Calibrate | Calibration = "content-free",
    ) -> Classifier:
        """What classifies many texts by the same labels; arguments and errors as for `classify`."""
        return Classifier(self.desk, labels, about=about, examples=examples, calibrate=calibrate)

    def classify(
        self,
        text: str,
        labels: Sequence[str] | Mapping[str, str],
        *,
        about: str = "",
        examples: Iterable[tuple[str, str]] = (),
        calibrate: Calibrate | Calibration = "content-free",
    ) -> Classification:
        """How probable each label is for a text, exactly: nothing is sampled.

        Args:
            text: short enough to be read whole.
            labels: at least two; a mapping gives each a description.
            about: what the labels say about a text, such as "the mood of the writer".
            examples: pairs of a text and its label that the model is shown.
            calibrate: "content-free" takes out what the model says of texts without content; "off" leaves its own
                probabilities; a `Calibration` that was fitted with `Classifier.fit`.

        Raises:
            InvalidArgument: labels or examples that cannot be used. ContextOverflow: the text is too long.
            UnsupportedCapability: the provider does not report log-probabilities.
        """
        return self.classifier(labels, about=about, examples=examples, calibrate=calibrate).classify(text)

    def tag(self, text: str, *, most: int = 5) -> tags.Tags:
        """Topics, entities, emotions and requests of an English text; ``most`` is the number of topics.

        Raises:
            InvalidArgument: ``most`` is not between 1 and 50. UnsupportedCapability: the provider does not report
            log-probabilities. UnsupportedLanguage: the text is not English. ContextOverflow: it is too long.
        """
        _in_range("most", most)
        self.desk.local  # noqa: B018  (raises where no log-probabilities can be had)
        language = language_of(self.desk.admit(text)) or "en"
        if language != "en":
            raise UnsupportedLanguage(
                f"tags are found by rules for English, and this text looks like {language!r}", language=language
            )
        return tags.tag(self.desk, text, most=most)

    def topics(
        self, texts: Sequence[str], *, count: int | None = None, embed: tags.Embed | None = None
    ) -> list[tags.Topic]:
        """The topics of several texts, each with its members; every text belongs to one.

        Args:
            texts: at least one.
            count: how many topics; None lets likeness decide.
            embed: from texts to vectors, such as ``load_encoder().embed``; None compares the words that texts share.

        Raises:
            InvalidArgument: ``count`` is not between 1 and the number of texts, or ``embed`` returns something else.
        """
        if isinstance(texts, str) or not texts:
            raise InvalidArgument("topics needs a list of texts, at least one")
        for text in texts:
            self.desk.admit(text)
        if count is not None and not 1 <= count <= len(texts):
            raise InvalidArgument(f"count must be between 1 and the {len(texts)} texts, got {count}")
        return tags.group(self.desk, texts, count=count, embed=embed)

    def replies(self, message: str, *, kinds: Sequence[str] = ("accept", "decline", "ask")) -> list[Reply]:
        """Suggested replies to a message, one of each kind; a kind that gives nothing new is left out.

        Args:
            message: what somebody wrote.
            kinds: of "accept", "decline", "ask" and "thank".

        Raises:
            InvalidArgument: another kind. ContextOverflow: the message is too long.
        """
        unknown = [kind for kind in kinds if kind not in presets.REPLIES]
        if isinstance(kinds, str) or unknown or not kinds:
            raise InvalidArgument(f"kinds of replies are {', '.join(presets.REPLIES)}; got {unknown or kinds!r}")
        check_text(message)
        found: dict[str, Reply] = {}
        for kind in kinds:
            preset = presets.REPLIES[kind]
            self.desk.check_fits(message, self.desk.room(preset, 60))
            for again in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}):
                answer = self.desk.ask(preset, message.strip(), most=60, **again)
                text = summarise.first_sentences(answer, 1)
                key = re.sub(r"\W+", " ", text).casefold().strip()
                if key and key not in found:
                    found[key] = Reply(text, kind)
                    break
        return list(found.values())

    def _typed(self, preset: Preset, text: str, request: str, into: Any, most: int, **more: Any) -> Any:
        """A typed answer about a text that is read whole."""
        schema = Schema.of(into)
        if not self.desk.provider.capabilities.guided_generation:
            raise UnsupportedCapability(f"{self.desk.provider.name} has no guided generation, which this task needs")
        self.desk.check_fits(self.desk.admit(text), self.desk.room(preset, most, request, schema))
        try:
            return self.desk.ask(preset, text.strip() + request, generating=schema, most=most, **more)
        except AnswerTruncated:
            # the likeliest token every time may go round in circles; a penalty on what was said breaks the circle
            again = {"frequency_penalty": 0.5, "presence_penalty": 0.0}
            return self.desk.ask(preset, text.strip() + request, generating=schema, most=most, **again, **more)


def _in_range(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 50:
        raise InvalidArgument(f"{name} must be a number from 1 to 50, got {value!r}")


def _checked_tag(language: str | None) -> str | None:
    if language is not None and (
        not isinstance(language, str) or not re.fullmatch(r"[A-Za-z]{2,3}(?:-\w+)*", language)
    ):
        raise InvalidArgument(f"language must be a tag such as 'en' or 'de', got {language!r}")
    return language
