"""Prompts of the text tasks that adapters are trained for: summaries, key points and labels.

Notable here:
- tasks and training data take them from here, so that an adapter meets the prompts that it was trained with
- a preset is instructions and worked examples; they stay in the prefix cache, only the text is new
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pippin.data.text.language import LANGUAGE_NAMES, language_of
from pippin.language.task_adapters import Task
from pippin.session.transcript import Answer, Instructions, Prompt, Transcript

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel

_COUNTS = {1: "one sentence", 2: "two sentences", 3: "three sentences", 4: "four sentences", 5: "five sentences"}


@dataclass(frozen=True)
class Preset:
    """The prompt before the text: instructions, and pairs of a text and a good answer to it; and the task whose adapter
    answers it."""

    instructions: str
    examples: tuple[tuple[str, str], ...] = ()
    task: Task | None = None

    @property
    def transcript(self) -> Transcript:
        """The beginning of every conversation under this preset."""
        turns = [turn for text, answer in self.examples for turn in (Prompt(text), Answer(answer))]
        return Transcript(entries=(Instructions(self.instructions), *turns))


SUMMARY = Preset(
    "You summarize texts. Write only the summary, in the words of the text. Keep names and numbers. Add nothing.",
    task="summaries",
)

POINTS = Preset(
    "You list the key points of texts: short sentences in the words of the text, the most important one first. Write "
    "each on a line of its own behind a dash.",
    task="summaries",
)


def in_sentences(count: int) -> str:
    """A number of sentences in words.

    >>> in_sentences(1), in_sentences(12)
    ('one sentence', '12 sentences')
    """
    return _COUNTS.get(count, f"{count} sentences")


def in_language(tag: str | None) -> str:
    """A request to write in this language; nothing for English, the default of small models.

    >>> in_language("de"), in_language("en")
    (' Write in German.', '')
    """
    return f" Write in {LANGUAGE_NAMES.get(tag, tag)}." if tag and tag != "en" else ""


def summary_request(text: str, count: int, language: str | None) -> str:
    """What follows a text that is to be summarized in so many sentences; ``language`` is None for that of the text."""
    return f"\n\nSummarize this text in {in_sentences(count)}.{in_language(language or language_of(text))}"


def points_request(text: str, max_points: int) -> str:
    """What follows a text whose key points are to be listed."""
    return f"\n\nList the {max_points} key points of this text.{in_language(language_of(text))}"


def labels_preset(
    labels: tuple[str, ...], descriptions: Mapping[str, str], about: str, examples: tuple[tuple[str, str], ...]
) -> Preset:
    """The prompt before the text to classify."""
    goal = f"You say {about} of a text." if about else "You classify texts."
    lines = [f"- {label}: {descriptions[label]}" if descriptions.get(label) else f"- {label}" for label in labels]
    instructions = "\n".join([f"{goal} Answer with one of these labels and nothing else:", *lines])
    return Preset(instructions, tuple((label_request(text), label) for text, label in examples), task="classification")


def label_request(text: str) -> str:
    """The request for the label of a text."""
    return f"Text: {text.strip()}\nLabel:"


def end_of_turn(model: LanguageModel) -> list[int]:
    """The tokens that end an answer: the token that the chat template writes there, a line break for a base model."""
    if model.template is None:
        return model.tokenizer.encode("\n")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    written = model.template.encode(turns, add_generation_prompt=False)
    ends = [id for id in written if id in model.tokenizer.eos_ids]
    return ends[-1:] or [model.tokenizer.eos_ids[0]]
