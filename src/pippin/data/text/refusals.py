"""Refusal detection: finds the usual sentences of refusals in each language.

Notable here:
- rules, not a model: they find common sentences and miss unusual ones; the packaged examples are tested
- only the first sentences count: an answer that helps and then adds what it cannot do is not a refusal
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

from pippin.core.errors import UnsupportedLanguage

REACH: Final = 240  # characters from the beginning within which a refusal must begin
_SENTENCE_END: Final = re.compile(r"[.!?…](?=\s|$)|[。！？\n]")
_PLAIN: Final = str.maketrans("’‘`´，", "'''',")


def locales() -> tuple[str, ...]:
    """The languages that there are rules for.

    >>> locales()
    ('en', 'de', 'fr', 'es', 'ja')
    """
    return tuple(data())


def find(text: str, locale: str = "en") -> str | None:
    """The sentence in which an answer declines; None if it does not.

    Args:
        text: a whole answer.
        locale: its language, such as "en" or "en-GB".

    Raises:
        UnsupportedLanguage: there are no rules for the language.

    >>> find("Lo siento, pero no puedo ayudarte con eso.", "es")
    'Lo siento, pero no puedo ayudarte con eso.'
    >>> find("I'm sorry to hear that. Rest well.") is None
    True
    """
    language = locale.split("-")[0].lower()
    if language not in data():
        raise UnsupportedLanguage(
            f"there are no rules for refusals in {locale!r}; there are for {', '.join(data())}", language=locale
        )
    plain = text.translate(_PLAIN)
    match = min(
        (found for pattern in _patterns(language) if (found := pattern.search(plain, 0, REACH + 200))),
        key=lambda found: found.start(),
        default=None,
    )
    if match is None or match.start() > REACH:
        return None
    ends = [end.end() for end in _SENTENCE_END.finditer(plain)]
    begin = max((end for end in ends if end <= match.start()), default=0)
    finish = min((end for end in ends if end >= match.end()), default=len(text))
    return text[begin:finish].strip()


@cache
def data() -> Mapping[str, Any]:
    """Per language: patterns, examples and counterexamples."""
    raw = json.loads(files("pippin.data.text").joinpath("refusals.json").read_text(encoding="utf-8"))
    found: Mapping[str, Any] = raw["locales"]
    return found


@cache
def _patterns(language: str) -> tuple[re.Pattern[str], ...]:
    spaced = r"(?<!\w)" if language != "ja" else ""
    compose = (unicodedata.normalize("NFC", pattern) for pattern in data()[language]["patterns"])
    return tuple(re.compile(f"{spaced}(?:{pattern})", re.IGNORECASE) for pattern in compose)
