"""How right a model fills in forms: `Session.extract` on generated documents whose facts are known.

Notable here:
- documents and forms are a function of the seed, so that two models are asked the same
- kinds, layouts and languages can be chosen, to evaluate an adapter on those that it was not trained on
- a value that the model is sure of should be right more often than others: values outside of lists are counted by their
  confidence
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from pippin.core import progress
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument, PippinError
from pippin.core.options import Option
from pippin.engine.options import Device, DType
from pippin.recipes import options
from pippin.recipes.evaluate import adapted_model

if TYPE_CHECKING:
    from pippin.core.report import Report
    from pippin.evaluate.extraction import ExtractionScore
    from pippin.recipes.train.task_data import ExampleSplit

_DATA = "Data"
Kinds = Annotated[tuple[str, ...], Option("Kinds of documents; all without any.", _DATA, "NAMES", parse=options.names)]
Layouts = Annotated[tuple[str, ...], Option("Layouts of documents.", _DATA, "NAMES", parse=options.names)]
Languages = Annotated[tuple[str, ...], Option("Their languages.", _DATA, "TAGS", parse=options.names)]
SURE: Final = 0.5
"""Confidence from which a value counts as sure."""


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a measurement."""

    model: options.Model
    adapter: options.EvaluatedAdapter = None
    items: Annotated[PositiveInt, Option("Number of documents, each with a form.", _DATA)] = 200
    kinds: Kinds = ()
    layouts: Layouts = ()
    languages: Languages = ()
    seed: options.Seed = 0
    device: Device = None
    dtype: DType = "auto"


@dataclass(frozen=True)
class ExtractionEvaluation:
    """What was measured.

    Attributes:
        model: name of the model.
        adapter: the adapter, None for the model itself.
        score: counts over all documents.
        confidences: confidence of each value outside of lists, and whether it is right.
        failed: documents for which there was no answer.
        seconds: of all answers.
    """

    model: str
    adapter: str | None
    score: ExtractionScore
    confidences: tuple[tuple[float, bool], ...]
    failed: int
    seconds: float

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        score = self.score
        sure, unsure = ([right for sure, right in self.confidences if (sure >= SURE) == high] for high in (True, False))
        return {
            "model": self.model,
            "adapter": self.adapter,
            "items": score.whole,
            "fields": score.fields,
            "right": score.accuracy,
            "nulls": score.nulls,
            "nulls_right": score.null_accuracy,
            "invented": score.invented,
            "whole_right": score.whole_right / score.whole,
            "sure": len(sure) / max(1, len(self.confidences)),
            "sure_right": sum(sure) / max(1, len(sure)),
            "unsure_right": sum(unsure) / max(1, len(unsure)),
            "failed": self.failed,
            "seconds_per_item": self.seconds / score.whole,
        }

    def report(self) -> Report:
        """Shares of the fields that are right, of empty ones, of whole documents, and the time of one."""
        from pippin.core.report import Report, Row

        found = self.summary()
        rows = [
            Row("fields right", found["right"]),
            Row("fields", self.score.fields),
            Row("empty fields left empty", found["nulls_right"]),
            Row("empty fields", self.score.nulls),
            Row("invented values", self.score.invented),
            Row("documents with everything right", found["whole_right"]),
            Row(f"values with confidence {SURE:.0%} or more", found["sure"]),
            Row("right among these", found["sure_right"]),
            Row("right among the others", found["unsure_right"]),
            Row("no answer", self.failed),
            Row("seconds for a document", found["seconds_per_item"]),
        ]
        name = adapted_model.title(self.model, self.adapter)
        return Report(f"{name} on {self.score.whole} documents", rows)


def run(config: Config, *, show_progress: bool = True) -> ExtractionEvaluation:
    """Measure how many fields a model fills in right.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: a kind, layout or language that there is not.
        ModelNotFound, CheckpointError: the model or the adapter cannot be loaded.
    """
    from pippin.evaluate.extraction import ExtractionScore, by_confidence, choices_of, score
    from pippin.recipes.train.task_data import extraction as forms
    from pippin.session.session import Session

    split = split_of(config.kinds, config.layouts, config.languages)
    model, adapter = adapted_model.load_with_adapter(
        config.model, config.adapter, device=config.device, dtype=config.dtype
    )
    session = Session(model)
    total, confidences, failed, seconds = ExtractionScore(), list[tuple[float, bool]](), 0, 0.0
    with progress.bar(config.items, config.model, unit="documents", show_progress=show_progress) as shown:
        for item in forms.items(config.items, seed=config.seed, split=split):
            begin, found = time.perf_counter(), None
            try:
                extraction = session.extract(item.text, item.schema, language=item.language, adapter=adapter)
                found = extraction.content
                confidences += by_confidence(item.expected, extraction.spans)
            except PippinError:  # counted: every field of the document is wrong
                failed += 1
            seconds += time.perf_counter() - begin
            total += score(item.expected, found, item.text, choices=choices_of(item.schema))
            shown.advance(1)
    return ExtractionEvaluation(model.name, config.adapter, total, tuple(confidences), failed, seconds)


def split_of(kinds: tuple[str, ...], layouts: tuple[str, ...], languages: tuple[str, ...]) -> ExampleSplit:
    """The documents of these kinds, layouts and languages; all without any. Kinds that have none of the layouts are not
    among them.

    Raises:
        InvalidArgument: there is no such kind, layout or language, or none of the kinds has such a layout.
    """
    from pippin.data.synthetic import documents
    from pippin.recipes.train.task_data import ExampleSplit

    known_layouts = {name for kind in documents.KINDS for name in documents.layouts(kind)}
    for what, given, known in (
        ("kind", kinds, documents.KINDS),
        ("layout", layouts, sorted(known_layouts)),
        ("language", languages, documents.LANGUAGES),
    ):
        if unknown := [name for name in given if name not in known]:
            raise InvalidArgument(f"there is no {what} {unknown[0]!r}; there are {', '.join(known)}")
    if layouts:
        chosen = kinds or documents.KINDS
        kinds = tuple(kind for kind in chosen if not set(layouts).isdisjoint(documents.layouts(kind)))
        if not kinds:
            raise InvalidArgument(f"{', '.join(chosen)} have no layout {' or '.join(layouts)}")
    return ExampleSplit(kinds, layouts, languages)
