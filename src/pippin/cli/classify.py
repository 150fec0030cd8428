"""`pippin classify`: label probabilities of a text, or of each of its lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pippin.cli.common import documents, options, terminal
from pippin.cli.common.declared_options import with_options
from pippin.core import progress
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.core.store.catalog import DEFAULT_MODEL
from pippin.core.text_files import read_text
from pippin.engine.options import Device, DType, ModelOptions

if TYPE_CHECKING:
    from pippin.evaluate.calibration import ClassificationPredictions
    from pippin.kits.text import TextClassification, TextClassifier, TrainedClassifier


@with_options
def classify(
    file: documents.File = None,
    labels: Annotated[str | None, typer.Option(help="Comma-separated labels.")] = None,
    labels_file: Annotated[
        Path | None, typer.Option(help="File with one label per line, or LABEL: DESCRIPTION.")
    ] = None,
    about: Annotated[
        str, typer.Option(help="What the labels say about a text, such as 'the mood of the writer'.")
    ] = "",
    examples: Annotated[
        Path | None, typer.Option(help="Few-shot examples: LABEL, a tab and a text on each line.")
    ] = None,
    fit: Annotated[
        Path | None, typer.Option(help="Labeled texts in the same format, to calibrate the probabilities.")
    ] = None,
    learn: Annotated[
        Path | None,
        typer.Option(help="Labeled texts in the same format, to train an encoder-based classifier instead."),
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(help="Labeled texts in the same format, to evaluate the probabilities.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="With --measure: plot reliability and selective risk.")] = None,
    calibrate: Annotated[
        Literal["content-free", "off"],
        typer.Option(help="content-free removes the bias of the model; off keeps it."),
    ] = "content-free",
    lines: Annotated[bool, typer.Option("--lines", help="Classify each line separately.")] = False,
    as_json: documents.Json = False,
    model: options.Model = DEFAULT_MODEL,
    device: Device = None,
    dtype: DType = "auto",
) -> None:
    """Classify a text, with a probability for each label.

    pippin classify mail.txt --labels complaint,question,praise
    """
    if learn is not None and (labels, labels_file, examples, fit) != (None, None, None, None):
        raise InvalidArgument("with --learn, labels and examples come from its file; leave the others out")
    if plot is not None:
        if measure is None:
            raise InvalidArgument("--plot needs --measure")
        documents.check_plot(plot)
    described = {} if learn is not None else _labels(labels, labels_file)
    few_shot = _pairs(examples) if examples is not None else []
    fitted = _pairs(fit) if fit is not None else []
    training = _pairs(learn) if learn is not None else []
    test = _pairs(measure) if measure is not None else []
    text = "" if test else documents.read(file)[1]
    texts = [line.strip() for line in text.splitlines() if line.strip()] if lines else [text]
    if training:
        from pippin.kits.text import TrainedClassifier
        from pippin.language.encoder import load_encoder

        encoder = load_encoder(device=device)
        classifier: TextClassifier | TrainedClassifier = TrainedClassifier(training, encoder)
        name = encoder.name
    else:
        from pippin.kits.text import TextTasks

        loaded = options.load(model, ModelOptions(device=device, dtype=dtype))
        classifier = TextTasks(loaded).classifier(described, about=about, examples=few_shot, calibrate=calibrate)
        name = loaded.name
        if fitted:
            classifier.fit(fitted)
    if test:
        _print_evaluation(classifier.evaluate(test), as_json, plot)
        return
    _write(name, texts, classifier, lines, as_json)


def _print_evaluation(measured: ClassificationPredictions, as_json: bool, plot: Path | None) -> None:
    """Print the evaluation of the probabilities, and plot it."""
    report = measured.report()
    if plot is not None:
        measured.plot(plot)
    if as_json:
        terminal.write(report.to_json() + "\n")
    else:
        report.print()


def _write(
    name: str, texts: list[str], classifier: TextClassifier | TrainedClassifier, lines: bool, as_json: bool
) -> None:
    """Classify the texts and print their labels."""
    found = []
    with progress.bar(len(texts), "classifying", unit="texts", show_progress=len(texts) > 1) as bar:
        for one in texts:
            found.append(classifier.classify(one))
            bar.advance(1)
    if as_json:
        records = [_record(one, result) for one, result in zip(texts, found, strict=True)]
        terminal.write(terminal.to_json({"model": name, "results": records}) + "\n")
    elif lines:
        for one, result in zip(texts, found, strict=True):
            terminal.write(f"{result.label}\t{result.probability:.3f}\t{one}\n")
    else:
        width = max(map(len, found[0].probabilities))
        for label, probability in found[0].probabilities.items():
            bar_ = "█" * round(probability * 30) if terminal.watched(sys.stdout) else ""
            terminal.write(f"{label:{width}}  {probability:.3f}  {bar_}".rstrip() + "\n")


def _record(text: str, result: TextClassification) -> dict[str, Any]:
    return {"text": text, "label": result.label, "probabilities": result.probabilities, "scores": result.scores}


def _labels(given: str | None, file: Path | None) -> dict[str, str]:
    if (given is None) == (file is None):
        raise InvalidArgument("give the labels, either as --labels a,b,c or as --labels-file FILE")
    if given is not None:
        pairs = [(label.strip(), "") for label in given.split(",")]
    else:
        assert file is not None
        rows = (line.partition(":") for line in read_text(file, "labels file").splitlines() if line.strip())
        pairs = [(label.strip(), description.strip()) for label, _, description in rows]
    names = [label for label, _ in pairs]
    if len(set(names)) < 2 or len(set(names)) < len(names) or not all(names):
        raise InvalidArgument(f"a classification needs at least two distinct labels, got {', '.join(map(repr, names))}")
    return dict(pairs)


def _pairs(file: Path) -> list[tuple[str, str]]:
    """Parse lines ``LABEL<tab>TEXT`` to pairs of text and label."""
    found = []
    for number, line in enumerate(read_text(file, "file of examples").splitlines(), 1):
        if line.strip():
            label, tab, text = line.partition("\t")
            if not tab or not text.strip():
                raise InvalidInput(f"line {number} of {str(file)!r} is not LABEL, a tab and a text")
            found.append((text.strip(), label.strip()))
    if not found:
        raise InvalidInput(f"{str(file)!r} has no examples")
    return found
