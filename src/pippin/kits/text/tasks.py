"""Text tasks: summarize, rewrite, proofread, extract, classify, tag, reply.

Notable here:
- results can be checked: edits with their positions, probabilities that add up to 1, the numbers and names of a summary
  that are not in the text
- where a small model writes badly it chooses instead: corrections, labels, tags and `method="select"` summaries are
  selected by its probabilities
- protected ranges (code, quotes, links, e-mail addresses) are preserved byte for byte
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Le
from pydantic import Field

from pippin.core.checks import checked
from pippin.core.errors import AnswerTruncated, InvalidArgument, UnsupportedCapability, UnsupportedLanguage
from pippin.data.text.language import language_of
from pippin.kits.text import prompts, rewrite as rewriting, summarize, tags
from pippin.kits.text.calibration import LabelCalibration
from pippin.kits.text.classify import Calibrate, TextClassification, TextClassifier
from pippin.kits.text.edits import Edit, Revision, compare, edit_distance
from pippin.kits.text.proofread import MARGINS, Margins, Proofreader
from pippin.kits.text.rewrite import Rewriting
from pippin.kits.text.session_pool import SessionPool
from pippin.kits.text.spans import DEFAULT_PROTECTION, Protection, TextSpan, check_text, protected_spans
from pippin.kits.text.summarize import OnProgress, Passage, SummaryDraft, ignore
from pippin.session import text_prompts
from pippin.session.options import GenerationOptions
from pippin.session.session import Session
from pippin.session.text_prompts import Preset
from pippin.session.types.schema import Schema

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel
    from pippin.session.extraction.extract import Extraction
    from pippin.session.guardrails import Guardrails
    from pippin.session.providers.provider import Provider

T = TypeVar("T")
Tone = Literal["friendly", "professional", "concise", "formal", "casual", "simple", "persuasive", "neutral"]
UpTo50 = Annotated[int, Ge(1), Le(50)]

MAX_CHANGED = 0.35  # edit distance over length, beyond which "proofreading" is a rewrite


@dataclass(frozen=True)
class ExtractedTable:
    """Facts of a text in rows and columns; ``unverified`` lists numbers and names that are not in the text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    unverified: tuple[str, ...] = ()

    def to_markdown(self) -> str:
        r"""The table in Markdown.

        >>> print(ExtractedTable(("a", "b"), (("1", "x|y"),)).to_markdown())
        | a | b |
        | --- | --- |
        | 1 | x\|y |
        """
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        cells = ([re.sub(r"\s+", " ", cell).replace("|", r"\|") for cell in line] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)


@dataclass(frozen=True)
class Reply:
    """A suggested reply; ``kind`` is its purpose: "accept", "decline", "ask" or "thank"."""

    text: str
    kind: str


class TextTasks:
    """Text tasks with one model.

    Methods may be called from several threads. Every method raises `InvalidInput` for a text that is empty, not a str,
    or holds half a character, and passes on what `Session.respond` raises.

    Args:
        model: a model reference (see `pippin.load`), a loaded model, a provider, or a session, whose model and
            guardrails are used and whose conversation does not change.
        options: sampling options; the tasks set ``max_tokens`` themselves where it is None.
        guardrails: rules for input and output; None for those of the session, if one was given.

    Raises:
        ModelNotFound, DownloadFailed, CheckpointError: the model cannot be loaded.

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
        self.sessions = SessionPool.open(model, options, guardrails)

    # --- summaries
    # --------------------------------------------------------------------------------------------------------

    @checked
    def summarize(
        self,
        text: str,
        *,
        length: Literal["short", "medium", "long"] | UpTo50 = "medium",
        method: Literal["write", "select"] = "write",
        language: str | None = None,
        on_progress: OnProgress = ignore,
    ) -> Passage:
        """A summary; its numbers and names that are not in the text are listed in ``unverified``.

        Args:
            text: of any length; a long one is summarized in parts, then the summaries together.
            length: "short" (one sentence), "medium" (three), "long" (six) or a number of sentences, at most 50.
            method: "write" it with the model, or "select" sentences of the text, which cannot be wrong but may lack
                context; a model below a billion parameters selects better than it writes.
            language: tag of the language to write in; None for that of the text.
            on_progress: "select": called with the number of sentences that were scored, and of those that will be.

        Raises:
            UnsupportedCapability: "select" without log-probabilities.
        """
        if method == "select":
            count = prompts.sentences_wanted(length)
            self.sessions.local_model  # noqa: B018  (raises where no log-probabilities can be had)
            return summarize.select(self.sessions, self.sessions.check_input(text), count, on_progress)
        *_, last = self.summarize_drafts(text, length=length, method=method, language=language)
        assert last.done is not None
        return last.done

    @checked
    def summarize_drafts(
        self,
        text: str,
        *,
        length: Literal["short", "medium", "long"] | UpTo50 = "medium",
        method: Literal["write"] = "write",
        language: str | None = None,
    ) -> Iterator[SummaryDraft]:
        """`summarize` as a stream: drafts of each part and of the whole; the last one is ``done``."""
        count = prompts.sentences_wanted(length)
        return summarize.write(self.sessions, self.sessions.check_input(text), count, _checked_tag(language))

    @checked
    def key_points(self, text: str, *, max_points: UpTo50 = 5) -> list[Passage]:
        """The key points of a text, the most important first; for a long text, those of each part."""
        request = text_prompts.points_request(self.sessions.check_input(text), max_points)
        return summarize.listed(self.sessions, text_prompts.POINTS, text, request, max_points, first=True)

    @checked
    def to_list(self, text: str, *, max_items: UpTo50 = 30) -> list[Passage]:
        """The text as a list of items."""
        request = "\n\nTurn this text into a list."
        return summarize.listed(self.sessions, prompts.LIST, self.sessions.check_input(text), request, max_items)

    @checked
    def to_table(self, text: str, *, columns: Sequence[str] | None = None, max_rows: UpTo50 = 20) -> ExtractedTable:
        """The facts of a text as a table.

        Args:
            text: short enough for the context.
            columns: names of the columns; None lets the model choose two to five.
            max_rows: maximum number of rows.

        Raises:
            InvalidArgument: no columns, or one twice. ContextOverflow: the text is too long.
        """
        hidden = {"include_schema_in_prompt": False}  # a small model copies the words of a schema into the cells
        if columns is None:
            names = Annotated[
                list[Annotated[str, Field(min_length=1, max_length=30)]], Field(min_length=2, max_length=5)
            ]
            chosen = self._typed(prompts.COLUMNS, text, "\n\nThe columns of a table of this text:", names, 80, **hidden)
            columns = list(dict.fromkeys(chosen))
        if isinstance(columns, str) or not columns or len(set(columns)) < len(columns):
            raise InvalidArgument(f"columns are different names, at least one; got {columns!r}")
        row = {"type": "array", "prefixItems": [{"type": "string", "maxLength": 120}] * len(columns), "items": False}
        row |= {"minItems": len(columns)}
        form = {"type": "array", "items": row, "minItems": 1, "maxItems": max_rows}
        request = f"\n\nThe rows of a table of this text with the columns {', '.join(columns)}:"
        rows = self._typed(prompts.ROWS, text, request, form, min(40 * max_rows, 800), **hidden)
        found = [
            tuple(line)
            for line in dict.fromkeys(map(tuple, rows))
            if line != tuple(columns) and any(cell.strip() for cell in line)
        ]
        written = "\n".join(f"a {cell}." for line in found for cell in line)
        return ExtractedTable(tuple(columns), tuple(found), summarize.check(self.sessions, written, text))

    # --- rewriting and proofreading
    # -------------------------------------------------------------------------------------------

    @checked
    def rewrite(
        self,
        text: str,
        *,
        tone: Tone | None = None,
        length: Literal["shorter", "same", "longer"] = "same",
        protect: Iterable[Protection] = DEFAULT_PROTECTION,
        language: str | None = None,
    ) -> Rewriting:
        """The text in another tone or length, paragraph by paragraph.

        Args:
            text: of any length.
            tone: None keeps it.
            length: of the new text.
            protect: ranges to preserve byte for byte: see `protected_spans`.
            language: tag of the language to write in; None for that of the text.

        Raises:
            InvalidArgument: neither a tone nor another length is requested.
        """
        preset = prompts.tone(tone, length)
        if tone is None and length == "same":
            raise InvalidArgument(f"rewrite needs a tone ({', '.join(prompts.TONES)}) or a length (shorter, longer)")
        ranges = protected_spans(self.sessions.check_input(text), protect)
        return rewriting.rewrite(self.sessions, text, preset, length, ranges, _checked_tag(language))

    @checked
    def proofread(
        self,
        text: str,
        *,
        method: Literal["auto", "choose", "write"] = "auto",
        protect: Iterable[Protection] = DEFAULT_PROTECTION,
        margins: Margins = MARGINS,
        on_progress: OnProgress = ignore,
    ) -> Revision:
        """The corrections of a text, as edits with their positions, kinds and explanations.

        Args:
            text: of any length.
            method: "choose" among corrections that rules propose, by the model's probabilities (English only); "write"
                the corrected text with the model and compare; "auto" chooses where it can and writes elsewhere.
            protect: ranges that no edit may change: see `protected_spans`.
            margins: required margins of the model's log-probabilities.
            on_progress: called with the number of characters that were read, and the length of the text.

        Raises:
            UnsupportedCapability: "choose" without log-probabilities.
            UnsupportedLanguage: "choose" for a text that is not English.
        """
        ranges = protected_spans(self.sessions.check_input(text), protect)
        language = language_of(text) or "en"
        if method == "auto":
            method = "choose" if self.sessions.can_score and language == "en" else "write"
        if method == "write":
            return Revision(text, tuple(self._written_edits(text, ranges, on_progress)))
        self.sessions.local_model  # noqa: B018  (raises where no log-probabilities can be had)
        if language != "en":
            raise UnsupportedLanguage(
                f"corrections are proposed for English only, and this text looks like {language!r}; use method='write'",
                language=language,
            )
        return Revision(text, tuple(self.proofreader(margins).edits(text, ranges, on_progress)))

    def proofreader(self, margins: Margins = MARGINS) -> Proofreader:
        """The corrector, for texts that are read in pieces: its ``edits`` are an iterator."""
        return Proofreader(self.sessions.lexicon, self.sessions.score_text, margins)

    def _written_edits(self, text: str, protected: Sequence[TextSpan], on_progress: OnProgress) -> Iterator[Edit]:
        """Corrections that the model wrote; a part that it rewrote instead is ignored."""
        for part in summarize.split(self.sessions, prompts.PROOFREAD, text, 400):
            for paragraph in re.finditer(r"[^\n]+", part.of(text)):
                old = paragraph[0].strip()
                start = part.start + paragraph.start() + len(paragraph[0]) - len(paragraph[0].lstrip())
                on_progress(start, len(text))
                if not re.search(r"\w", old) or any(o.start <= start and start + len(old) <= o.end for o in protected):
                    continue
                max_tokens = int(1.5 * self.sessions.token_count(old)) + 16
                new = (
                    self.sessions.ask(prompts.PROOFREAD, f"Correct: {old}", max_tokens=max_tokens)
                    .strip()
                    .removeprefix("Correct: ")
                )
                limit = int(MAX_CHANGED * len(old))
                if new and "\n" not in new and edit_distance(old, new, max_distance=limit) <= limit:
                    yield from compare(old, new, offset=start, protected=protected)

    # --- typed --------------------------------------------------------------------------------------------------------

    def extract(
        self,
        text: str,
        into: type[T] | Schema[T] | Any,
        *,
        question: str = "",
        language: str | None = None,
        region: str | None = None,
        on_progress: OnProgress = ignore,
    ) -> Extraction[T]:
        """A value of a type, filled in with parts of the text: `Session.extract`, whose arguments and errors it has.

        Args:
            text: of any length.
            into: any type that `Schema` takes.
            question: what to look for, if the type does not say it.
            language: tag of the text's language; None detects it.
            region: a country such as "US", where dates and numbers could be read in two ways.
            on_progress: called with the number of characters that were read, and the length of the text.
        """
        session = Session(self.sessions.provider, guardrails=self.sessions.guardrails, adapter=self.sessions.adapter)
        return session.extract(
            self.sessions.check_input(text),
            into,
            question=question,
            options=self.sessions.options,
            language=language,
            region=region,
            on_progress=on_progress,
        )

    def classifier(
        self,
        labels: Sequence[str] | Mapping[str, str],
        *,
        about: str = "",
        examples: Iterable[tuple[str, str]] = (),
        calibrate: Calibrate | LabelCalibration = "content-free",
    ) -> TextClassifier:
        """A classifier of many texts with the same labels; arguments and errors as for `classify`."""
        return TextClassifier(self.sessions, labels, about=about, examples=examples, calibrate=calibrate)

    def classify(
        self,
        text: str,
        labels: Sequence[str] | Mapping[str, str],
        *,
        about: str = "",
        examples: Iterable[tuple[str, str]] = (),
        calibrate: Calibrate | LabelCalibration = "content-free",
    ) -> TextClassification:
        """The probability of each label for a text, computed exactly: nothing is sampled.

        Args:
            text: short enough for the context.
            labels: at least two; a mapping gives each a description.
            about: what the labels say about a text, such as "the mood of the writer".
            examples: pairs of a text and its label for the prompt.
            calibrate: "content-free" divides out the model's probabilities for texts without content; "off" keeps its
                own probabilities; a `LabelCalibration` that was fitted with `TextClassifier.fit`.

        Raises:
            InvalidArgument: labels or examples that cannot be used. ContextOverflow: the text is too long.
            UnsupportedCapability: the provider does not report log-probabilities.
        """
        return self.classifier(labels, about=about, examples=examples, calibrate=calibrate).classify(text)

    @checked
    def tag(self, text: str, *, max_topics: UpTo50 = 5) -> tags.Tags:
        """Topics, entities, emotions and requests of an English text; ``max_topics`` is the number of topics.

        Raises:
            UnsupportedCapability: the provider does not report log-probabilities. UnsupportedLanguage: the text is not
            English. ContextOverflow: it is too long.
        """
        self.sessions.local_model  # noqa: B018  (raises where no log-probabilities can be had)
        language = language_of(self.sessions.check_input(text)) or "en"
        if language != "en":
            raise UnsupportedLanguage(
                f"tags are found by rules for English, and this text looks like {language!r}", language=language
            )
        return tags.tag(self.sessions, text, max_topics=max_topics)

    def topics(
        self, texts: Sequence[str], *, count: int | None = None, embed: tags.Embed | None = None
    ) -> list[tags.Topic]:
        """The topics of several texts, each with its members; every text belongs to one.

        Args:
            texts: at least one.
            count: number of topics; None determines it by similarity.
            embed: from texts to embeddings, such as ``load_encoder().embed``; None compares the words that texts share.

        Raises:
            InvalidArgument: ``count`` is not between 1 and the number of texts, or ``embed`` returns something else.
        """
        if isinstance(texts, str) or not texts:
            raise InvalidArgument("topics needs a list of texts, at least one")
        for text in texts:
            self.sessions.check_input(text)
        if count is not None and not 1 <= count <= len(texts):
            raise InvalidArgument(f"count must be between 1 and the {len(texts)} texts, got {count}")
        return tags.group(self.sessions, texts, count=count, embed=embed)

    def replies(self, message: str, *, kinds: Sequence[str] = ("accept", "decline", "ask")) -> list[Reply]:
        """Suggested replies to a message, one of each kind; a kind without a new reply is left out.

        Args:
            message: the message to reply to.
            kinds: of "accept", "decline", "ask" and "thank".

        Raises:
            InvalidArgument: another kind. ContextOverflow: the message is too long.
        """
        unknown = [kind for kind in kinds if kind not in prompts.REPLIES]
        if isinstance(kinds, str) or unknown or not kinds:
            raise InvalidArgument(f"kinds of replies are {', '.join(prompts.REPLIES)}; got {unknown or kinds!r}")
        check_text(message)
        found: dict[str, Reply] = {}
        for kind in kinds:
            preset = prompts.REPLIES[kind]
            self.sessions.check_fits(message, self.sessions.max_text_tokens(preset, 60))
            for again in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}):
                answer = self.sessions.ask(preset, message.strip(), max_tokens=60, **again)
                text = summarize.first_sentences(answer, 1)
                key = re.sub(r"\W+", " ", text).casefold().strip()
                if key and key not in found:
                    found[key] = Reply(text, kind)
                    break
        return list(found.values())

    def _typed(self, preset: Preset, text: str, request: str, into: Any, max_tokens: int, **more: Any) -> Any:
        """A typed answer about a text that fits into the context."""
        schema = Schema.of(into)
        if not self.sessions.provider.capabilities.guided_generation:
            raise UnsupportedCapability(
                f"{self.sessions.provider.name} has no guided generation, which this task needs"
            )
        self.sessions.check_fits(
            self.sessions.check_input(text), self.sessions.max_text_tokens(preset, max_tokens, request, schema)
        )
        try:
            return self.sessions.ask(preset, text.strip() + request, generating=schema, max_tokens=max_tokens, **more)
        except AnswerTruncated:
            # greedy decoding may repeat itself; a repetition penalty prevents that
            again = {"frequency_penalty": 0.5, "presence_penalty": 0.0}
            return self.sessions.ask(
                preset, text.strip() + request, generating=schema, max_tokens=max_tokens, **again, **more
            )


def _checked_tag(language: str | None) -> str | None:
    if language is not None and (
        not isinstance(language, str) or not re.fullmatch(r"[A-Za-z]{2,3}(?:-\w+)*", language)
    ):
        raise InvalidArgument(f"language must be a tag such as 'en' or 'de', got {language!r}")
    return language
