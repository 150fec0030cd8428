"""Where in the source the parts of a filled-in form stand, if their texts occur several times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pippin.session.extraction.slots import Mark
from pippin.session.extraction.source import SourceText


def locate(marks: Sequence[Mark], source: SourceText) -> list[tuple[int, int]]:
    """The offsets of each mark.

    Of several places, an item of a list stands after the same part of the item before it, and else near the part that
    was found last in the same object.

    Args:
        marks: in the order of writing.
        source: the text.
    """
    found: list[tuple[int, int]] = []
    last_of_object: dict[tuple[Any, ...], int] = {}
    last_of_column: dict[tuple[Any, ...], int] = {}
    for mark in marks:
        places = list(mark.places) or source.find(mark.text)
        column = tuple("*" if isinstance(part, int) else part for part in mark.path)
        after = last_of_column.get(column, -1)
        later = [place for place in places if place[0] > after]
        near = last_of_object.get(mark.path[:-1])
        choice = later or places
        place = choice[0] if near is None else min(choice, key=lambda each: abs(each[0] - near))
        last_of_object[mark.path[:-1]] = last_of_column[column] = place[0]
        found.append(place)
    return found
