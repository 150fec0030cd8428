"""A value that was found in a text, with its place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A part of a text that can be read as a value.

    Attributes:
        start: offset of its first character.
        end: offset after its last.
        value: an ISO 8601 date, time, date-time or duration, or a number in plain decimal notation.
        ambiguous: whether another reading is possible, as of 03/04/2024 or 1.234.
    """

    start: int
    end: int
    value: str
    ambiguous: bool = False
