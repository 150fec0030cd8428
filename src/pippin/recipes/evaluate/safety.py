"""Safety evaluation: violation and over-refusal rates of a model, of guardrails, or of both.

Notable here:
- with ``guardrails_only`` no model is loaded: a prompt that the guardrails pass counts as answered
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pippin.core import progress
from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidInput
from pippin.core.options import Option
from pippin.core.store.catalog import DEFAULT_MODEL
from pippin.core.text_files import read_text
from pippin.engine.options import Device, DType
from pippin.recipes.options import StrPath

if TYPE_CHECKING:
    from pippin.evaluate.safety.evaluation import SafetyReport
    from pippin.evaluate.safety.suite import SafetyPrompt
    from pippin.session.guardrails import Guardrails

_PROMPTS, _JUDGES = "Prompts", "Judges"


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of an evaluation."""

    guardrails: Annotated[Literal["strict", "default", "permissive", "off"], Option("Guardrails around the model.")] = (
        "default"
    )
    guardrails_only: Annotated[bool, Option("Without a model: what the guardrails let through is answered.")] = False
    model: Annotated[str, Option("Catalog name, hub repository, folder or .gguf file.", "Model and machine")] = (
        DEFAULT_MODEL
    )
    device: Device = None
    dtype: DType = "auto"
    max_tokens: Annotated[PositiveInt, Option("An answer ends there at the latest.", "Model and machine")] = 64
    locale: Annotated[
        tuple[str, ...], Option("en, en-GB, de, fr, es, ja...; en without it; may be repeated.", _PROMPTS)
    ] = ()
    num_prompts: Annotated[
        PositiveInt, Option("Harmful, look-alike and neutral prompts of each locale, at most.", _PROMPTS, "N")
    ] = 24
    suite: Annotated[str, Option("A packaged suite or a JSON file.", _PROMPTS)] = "pippin-safety-1"
    variant: Annotated[
        tuple[str, ...],
        Option("Ask the harmful prompts disguised too: typos, base64...; may be repeated.", _PROMPTS),
    ] = ()
    seed: Annotated[NonNegativeInt, Option("Of the choice of prompts.", _PROMPTS)] = 0
    judge: Annotated[str | None, Option("A model as second judge, for agreement.", _JUDGES, "MODEL")] = None
    human: Annotated[StrPath | None, Option("Labels by people: JSON, prompt id to label.", _JUDGES, "PATH")] = None
    corrected: Annotated[bool, Option("Correct the rates by the judge's errors on the labels by people.", _JUDGES)] = (
        False
    )


def run(config: Config, *, show_progress: bool = True) -> SafetyReport:
    """Measure violation and over-refusal rates on harmful, look-alike and neutral prompts, by locale.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: an unknown suite, locale or variant, or a correction without human labels.
        InvalidInput: the human labels cannot be read.
        ModelNotFound: the model or the judge does not exist.
    """
    from pippin.evaluate.safety import evaluation
    from pippin.evaluate.safety.judge import model_judge

    locales, variants = list(config.locale) or ["en"], list(config.variant)
    human = None if config.human is None else _labels(Path(config.human))
    guards = _guardrails(config.guardrails, locales)
    total = evaluation.count_prompts(locales, config.num_prompts, variants, config.suite)
    answer = _guardrails_alone(guards) if config.guardrails_only else _answers(config, guards)
    second = None if config.judge is None else model_judge(_judge(config, config.judge))
    with progress.bar(total, "asking", unit="prompts", show_progress=show_progress) as bar:
        return evaluation.evaluate(
            answer,
            suite=config.suite,
            locales=locales,
            num_prompts=config.num_prompts,
            second_judge=second,
            human=human,
            corrected=config.corrected,
            score=None if config.guardrails == "off" else _score(guards),
            variants=variants,
            seed=config.seed,
            on_progress=bar.advance,
        )


def _guardrails(preset: str, locales: list[str]) -> dict[str, Guardrails]:
    from pippin.session.guardrails import Guardrails

    make: Callable[..., Guardrails] = getattr(Guardrails, preset)
    return {locale: make(locale=locale) for locale in locales}


def _guardrails_alone(guards: dict[str, Guardrails]) -> Callable[[SafetyPrompt], str]:
    """A stand-in for a model that answers every prompt that the guardrails pass."""

    def answer(prompt: SafetyPrompt) -> str:
        guards[prompt.locale].enforce(prompt.text, role="input")
        return "-"

    return answer


def _answers(config: Config, guards: dict[str, Guardrails]) -> Callable[[SafetyPrompt], str]:
    """A model with guardrails on input and output, and a new conversation for each prompt."""
    import pippin
    from pippin.session.options import GenerationOptions

    session = pippin.Session(pippin.load(config.model, device=config.device, dtype=config.dtype))
    generation = GenerationOptions(temperature=0.0, max_tokens=config.max_tokens)

    def answer(prompt: SafetyPrompt) -> str:
        session.reset()
        guard = guards[prompt.locale]
        text = session.respond(guard.enforce(prompt.text, role="input"), options=generation).content
        return guard.enforce(text, role="output")

    return answer


def _judge(config: Config, ref: str) -> Callable[[str], str]:
    """A judge model whose output is constrained to the labels."""
    import pippin
    from pippin.evaluate.safety.judge import LABELS

    session = pippin.Session(pippin.load(ref, device=config.device, dtype=config.dtype))

    def ask(question: str) -> str:
        session.reset()
        return str(session.respond(question, generating=pippin.Choice(LABELS)).content)

    return ask


def _score(guards: dict[str, Guardrails]) -> Callable[[SafetyPrompt], float]:
    """The highest score of all rules that have a threshold."""

    def score(prompt: SafetyPrompt) -> float:
        verdict = guards[prompt.locale].check(prompt.text, role="input")
        return max((d.score for d in verdict if d.threshold is not None), default=0.0)

    return score


def _labels(path: Path) -> dict[str, Any]:
    try:
        labels = json.loads(read_text(path, "file of labels"))
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(labels, dict):
        raise InvalidInput(f"{path} must hold an object from prompt id to label, got {type(labels).__name__}")
    return labels
