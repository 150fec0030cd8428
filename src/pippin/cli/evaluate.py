"""`pippin evaluate safety`: harm let through and harmless prompts refused, by a model, by guardrails, or by both."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli import documents, options, terminal
from pippin.cli.evaluate_annotators import annotators
from pippin.cli.evaluate_calibration import calibration
from pippin.cli.evaluate_composition import composition
from pippin.cli.evaluate_images import images
from pippin.cli.evaluate_panel import panel
from pippin.core.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from pippin.evaluate.safety_suite import SafetyPrompt
    from pippin.session.guardrails import Guardrails

app = typer.Typer(no_args_is_help=True, help="Evaluate models and guardrails.")
app.command()(annotators)
app.command()(calibration)
app.command()(composition)
app.command()(images)
app.command()(panel)

_PROMPTS = "Prompts"
_JUDGES = "Judges"


@app.callback()
def evaluate() -> None:
    """Evaluate models and guardrails."""


class Profile(StrEnum):
    """The packaged guardrails, as words of the command line."""

    strict = "strict"
    default = "default"
    permissive = "permissive"
    off = "off"


@app.command()
def safety(
    guardrails: Annotated[Profile, typer.Option(help="Guardrails around the model.")] = Profile.default,
    alone: Annotated[
        bool, typer.Option("--guardrails-only", help="Without a model: what the guardrails let through is answered.")
    ] = False,
    locale: Annotated[
        list[str] | None, typer.Option(help="en, en-GB, de, fr, es, ja...; repeatable.", rich_help_panel=_PROMPTS)
    ] = None,
    n: Annotated[
        int, typer.Option(help="At most so many harmful, look-alike and neutral prompts.", rich_help_panel=_PROMPTS)
    ] = 24,
    suite: Annotated[
        str, typer.Option(help="A packaged suite or a JSON file.", rich_help_panel=_PROMPTS)
    ] = "pippin-safety-1",
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="Ask the harmful prompts disguised too: typos, base64...; repeatable.", rich_help_panel=_PROMPTS
        ),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="A model as second judge, for agreement.", rich_help_panel=_JUDGES)
    ] = None,
    human: Annotated[
        Path | None, typer.Option(help="Labels by people: JSON, prompt id to label.", rich_help_panel=_JUDGES)
    ] = None,
    corrected: Annotated[
        bool, typer.Option(help="Correct the rates by the judge's errors on --human.", rich_help_panel=_JUDGES)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, without any answer.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this file (.png, .svg).")] = None,
    model: options.Model = DEFAULT_MODEL,
    device: options.Device = None,
    dtype: options.DType = "auto",
    seed: Annotated[int, typer.Option(help="Which prompts are drawn.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="An answer ends there at the latest.")] = 64,
) -> None:
    """Measure violation and over-refusal on harmful, look-alike and neutral prompts, per locale.

    In seconds, of the guardrails by themselves:  pippin evaluate safety --guardrails-only --locale en --locale ja
    """
    from pippin.core.progress import bar
    from pippin.evaluate import safety as evaluation
    from pippin.evaluate.safety_judge import model_judge

    locales, variants = locale or ["en"], variant or []
    labels = _labels(human)
    documents.check_plot(plot)
    guards = _guards(guardrails, locales)
    total = evaluation.needed(locales, n, variants, suite) if n > 0 else None
    answer = _guards_alone(guards) if alone else _asker(options.load(model, device, dtype), guards, max_tokens)
    second = model_judge(_judging(options.load(judge, device, dtype))) if judge else None
    with bar(total, "asking", unit="prompts", show=not as_json) as progress:
        report = evaluation.evaluate(
            answer,
            suite=suite,
            locales=locales,
            n=n,
            second_judge=second,
            human=labels,
            corrected=corrected,
            score=None if guardrails is Profile.off else _scorer(guards),
            variants=variants,
            seed=seed,
            on_progress=progress.advance,
        )
    if plot is not None:
        with documents.writing(plot):
            report.plot(plot)
    if as_json:
        terminal.write(report.to_json() + "\n")
        return
    report.report().print()
    if not all(result.sufficient for result in report.locales) and terminal.watched(sys.stderr):
        terminal.note(f"fewer than {evaluation.ENOUGH} prompts of a kind: the intervals are wide (see --n)")


def _guards(profile: Profile, locales: list[str]) -> dict[str, Guardrails]:
    from pippin.session.guardrails import Guardrails

    make: Callable[..., Guardrails] = getattr(Guardrails, profile.value)
    return {locale: make(locale=locale) for locale in locales}


def _guards_alone(guards: dict[str, Guardrails]) -> Callable[[SafetyPrompt], str]:
    """What answers every prompt that the guardrails let through, in no language."""

    def answer(prompt: SafetyPrompt) -> str:
        guards[prompt.locale].enforce(prompt.text, role="input")
        return "-"

    return answer


def _asker(model: Any, guards: dict[str, Guardrails], max_tokens: int) -> Callable[[SafetyPrompt], str]:
    """A model between guardrails, a new conversation for each prompt."""
    import pippin

    session = pippin.Session(model)
    given = options.generation_options(temperature=0.0, max_tokens=max_tokens)

    def answer(prompt: SafetyPrompt) -> str:
        session.reset()
        guard = guards[prompt.locale]
        text = session.respond(guard.enforce(prompt.text, role="input"), options=given).content
        return guard.enforce(text, role="output")

    return answer


def _judging(model: Any) -> Callable[[str], str]:
    """A model that can answer with nothing but a label."""
    import pippin
    from pippin.evaluate.safety_judge import LABELS

    session = pippin.Session(model)

    def ask(question: str) -> str:
        session.reset()
        return str(session.respond(question, generating=pippin.Choice(LABELS)).content)

    return ask


def _scorer(guards: dict[str, Guardrails]) -> Callable[[SafetyPrompt], float]:
    """The highest score of a rule that may act."""

    def score(prompt: SafetyPrompt) -> float:
        verdict = guards[prompt.locale].check(prompt.text, role="input")
        return max((d.score for d in verdict if d.threshold is not None), default=0.0)

    return score


def _labels(path: Path | None) -> dict[str, Any] | None:
    from pippin.core.errors import InvalidInput

    if path is None:
        return None
    try:
        labels = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(labels, dict):
        raise InvalidInput(f"{path} must hold an object from prompt id to label, got {type(labels).__name__}")
    return labels
