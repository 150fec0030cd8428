"""What mypy says of snapshots: run on a program that uses them."""

import re
import sys

import pytest
from mypy import api

PROGRAM = """
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from pippin.session.generation_id import GenerationID
from pippin.session.response import ResponseStream, Snapshot
from pippin.session.types.schema import Schema

T = TypeVar("T")

class Stop(BaseModel):
    id: GenerationID
    city: str
    nights: int | None

@dataclass
class Point:
    x: float

class Trip(BaseModel):
    title: str
    first: Stop
    stops: list[Stop]
    named: dict[str, Point]
    pair: tuple[int, Point]
    tags: set[str]
    either: Point | Literal["none"]

class Box(BaseModel, Generic[T]):
    inside: T

def typed(trip: Snapshot[Trip], stream: ResponseStream[Trip], box: Snapshot[Box[Point]]) -> None:
    content = trip.content
    if content is None:
        return
    reveal_type(content.title)
    reveal_type(content.first)
    reveal_type(content.stops)
    reveal_type(content.named)
    reveal_type(content.pair)
    reveal_type(content.tags)
    reveal_type(content.either)
    if content.stops:
        reveal_type(content.stops[0].city)
        reveal_type(content.stops[0].id)
    if box.content:
        reveal_type(box.content.inside)
    for snapshot in stream:
        reveal_type(snapshot.content)
    reveal_type(stream.response.content)
    content.tittle
    len(content.title)

def others(
    text: Snapshot[str], number: Snapshot[int], texts: Snapshot[list[str]], items: Snapshot[list[Point]]
) -> None:
    reveal_type(text.content)
    reveal_type(number.content)
    reveal_type(texts.content)
    reveal_type(items.content)
    reveal_type(Schema.object("A", {"a": int}).parse("{}"))
"""

# What the program does not touch is not read: that would take a minute.
SKIPPED = ("torch", "numpy", "jaxtyping", "pippin.engine", "pippin.language")
OF_THE_CONTENT = [
    "PartialOf[Trip] | None",  # the stream's
    "Trip",
    "str",
    "int | None",
    "list[str] | None",
    "list[PartialOf[Point]] | None",
    "dict[str, Any]",
]
OF_FIELDS = [
    "str | None",
    "PartialOf[Stop] | None",
    "list[PartialOf[Stop]] | None",
    "dict[str, PartialOf[Point]] | None",
    "Sequence[int | PartialOf[Point]] | None",
    "Collection[str] | None",
    "PartialOf[Point] | Literal['none'] | None",
    "str | None",
    "GenerationID",
    "PartialOf[Point] | None",
]


def check(tmp_path) -> tuple[list[str], list[str]]:
    """Types that mypy reveals, without their modules, and its errors."""
    program, settings = tmp_path / "program.py", tmp_path / "mypy.ini"
    program.write_text(PROGRAM)
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in SKIPPED)
    settings.write_text(
        f"[mypy]\nplugins = pydantic.mypy, pippin.mypy_plugin\nfollow_imports = silent\nstrict = True\n{skipped}"
    )
    cache = ["--cache-dir", str(tmp_path / "cache"), "--python-executable", sys.executable]
    said, trouble, _ = api.run(["--config-file", str(settings), *cache, str(program)])
    assert trouble == ""
    revealed = re.findall(r'Revealed type is "(.*)"', said)
    plain = [re.sub(r"\b(?:\w+\.)+(?=\w)", "", text) for text in revealed]
    return plain, re.findall(r"error: (.*)", said)


@pytest.mark.slow
def test_mypy_knows_the_fields_of_a_snapshot(tmp_path):
    revealed, errors = check(tmp_path)
    assert revealed == OF_FIELDS + OF_THE_CONTENT
    assert [error.rpartition("  [")[0] for error in errors] == [
        '"Trip" has no field "tittle"',
        'Argument 1 to "len" has incompatible type "str | None"; expected "Sized"',
    ]
