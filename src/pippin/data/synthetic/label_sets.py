"""Sets of labels with short texts for each, in five languages: what a text can be sorted by.

Notable here:
- `texts/label_sets/LANGUAGE.txt`: `[NAME] about; about` opens a set, `= name, name : description` a label, and the
  lines below are its texts, phrases with (alternatives|in parentheses)
- sets and labels stand in the same order in every language, so that a text and its labels may differ in language
- what a set is about and its descriptions are in English, the language of the prompts
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.synthetic.documents.grammar import Phrase, draws, expand, parse, slots

LANGUAGES: Final = ("en", "de", "fr", "es", "it")
_FILES: Final = Path(__file__).parent / "texts" / "label_sets"


@dataclass(frozen=True)
class LabelTexts:
    """One label.

    Attributes:
        names: what it may be called.
        description: what it means.
        phrases: texts that have it.
    """

    names: tuple[str, ...]
    description: str
    phrases: tuple[Phrase, ...]

    def text(self, rng: random.Random) -> str:
        """A random text that has the label."""
        return "".join(str(part) for part in expand(rng.choice(self.phrases), rng)).replace(" ,", ",")


@dataclass(frozen=True)
class LabelSet:
    """Labels of which a text has one; ``about`` lists what they say about it, in several wordings."""

    name: str
    about: tuple[str, ...]
    labels: tuple[LabelTexts, ...]


@cache
def label_sets(language: str) -> dict[str, LabelSet]:
    """All sets in a language, by name.

    Raises:
        InvalidArgument: an unknown language.
    """
    if language not in LANGUAGES:
        raise InvalidArgument(f"language={language!r} is none of {', '.join(LANGUAGES)}")
    return read((_FILES / f"{language}.txt").read_text(encoding="utf-8"))


def read(text: str) -> dict[str, LabelSet]:
    """The sets of a file.

    Raises:
        InvalidInput: the file is not as described above.
    """
    sets: dict[str, tuple[tuple[str, ...], list[LabelTexts]]] = {}
    labels: list[LabelTexts] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("["):
            name, _, about = line[1:].partition("]")
            labels = []
            sets[name] = (_listed(about, ";"), labels)
        elif line.startswith("= ") and labels is not None:
            names, _, description = line[2:].partition(" : ")
            labels.append(LabelTexts(_listed(names, ","), description.strip(), ()))
        elif line.strip() and labels:
            phrase, last = parse(line.strip()), labels.pop()
            if draws(phrase) or slots(phrase):
                raise InvalidInput(f"line {number} has something to fill in: {line!r}")
            labels.append(LabelTexts(last.names, last.description, (*last.phrases, phrase)))
        elif line.strip():
            raise InvalidInput(f"line {number} is in no set: {line!r}")
    return {name: LabelSet(name, about, tuple(listed)) for name, (about, listed) in sets.items()}


def _listed(text: str, separator: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(separator) if part.strip())
