"""Phrases with alternatives: "(Invoice|Bill) (no.|number) {number} of @date" stands for many texts.

Notable here:
- (a|b) is one of its alternatives, which may hold others and may be empty
- {name} is the place of a fact, @name is where a random value goes that no field asks for
- a backslash takes the meaning of a special character away
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import islice, product
from random import Random
from typing import NamedTuple

from pippin.core.errors import InvalidArgument


class Placeholder(NamedTuple):
    """The place of a fact."""

    name: str


class Draw(NamedTuple):
    """The place of a random value: the name of its generator, with arguments."""

    name: str


class Alternatives(NamedTuple):
    """Alternatives."""

    options: tuple[tuple[Part, ...], ...]


Part = str | Placeholder | Draw | Alternatives
Phrase = tuple[Part, ...]
TOKEN = re.compile(r"\\(.)|([(|)])|\{([\w.]+)\}|@([a-z_]+(?::\d+\.\.\d+)?)|([^\\(|){@]+|.)", re.DOTALL)


@cache
def parse(text: str) -> Phrase:
    """The phrase that `text` describes.

    Raises:
        InvalidArgument: parentheses do not match.
    """
    stack: list[list[list[Part]]] = [[[]]]
    for escaped, bracket, slot, draw, plain in TOKEN.findall(text):
        if bracket == "(":
            stack.append([[]])
        elif bracket == "|":
            stack[-1].append([])
        elif bracket == ")":
            options = stack.pop()
            if not stack:
                raise InvalidArgument(f"unmatched ) in {text!r}")
            stack[-1][-1].append(Alternatives(tuple(tuple(each) for each in options)))
        else:
            part: Part = Placeholder(slot) if slot else Draw(draw) if draw else escaped or plain
            stack[-1][-1].append(part)
    if len(stack) != 1 or len(stack[0]) != 1:
        raise InvalidArgument(f"unmatched ( or | outside of parentheses in {text!r}")
    return tuple(stack[0][0])


def expand(phrase: Phrase, rng: Random) -> list[str | Placeholder | Draw]:
    """One of the texts of a phrase, in parts."""
    out: list[str | Placeholder | Draw] = []
    for part in phrase:
        if isinstance(part, Alternatives):
            out += expand(rng.choice(part.options), rng)
        else:
            out.append(part)
    return out


def slots(phrase: Phrase) -> set[str]:
    """Names of the facts that a phrase may state."""
    found = set()
    for part in phrase:
        if isinstance(part, Placeholder):
            found.add(part.name)
        elif isinstance(part, Alternatives):
            found |= set().union(*(slots(each) for each in part.options))
    return found


def draws(phrase: Phrase) -> set[str]:
    """Names of the generators that a phrase may use."""
    found = set()
    for part in phrase:
        if isinstance(part, Draw):
            found.add(part.name)
        elif isinstance(part, Alternatives):
            found |= set().union(*(draws(each) for each in part.options))
    return found


def variants(phrase: Phrase, limit: int = 24) -> Iterator[str]:
    """The texts of a phrase without slots, at most `limit`."""
    choices = [
        [text for option in part.options for text in variants(option, limit)]
        if isinstance(part, Alternatives)
        else [part]
        for part in phrase
    ]
    return islice(("".join(str(each) for each in parts) for parts in product(*choices)), limit)
