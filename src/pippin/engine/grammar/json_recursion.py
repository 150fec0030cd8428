"""Values inside values of their own kind: which keys of a schema they have, and rules that count how deep they lie.

Notable here:
- llguidance's rules may have a parameter, an integer that a rule hands on to those it refers to: it counts the levels,
  those of items and free names apart from those of listed properties, so that the grammar does not grow with the depth
- at the last level a value is written by rules of its own, with the parts of which a least fixed point needs the
  fewest levels: those rules never come back to themselves
- the compiler joins a rule that has one alternative with the rule that uses it, and cannot where the parameter
  changes; a rule that changes it therefore has a second alternative, which never holds, and two parts
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from pippin.engine.grammar.json_satisfiable import Satisfiable, children
from pippin.engine.grammar.json_values import Key

MAX_NESTED_LISTS: Final = 10
"""Maximum levels of a value inside values of its own kind, counted where it is an item or has a free name."""
ITEM, PROPERTY = "[0:16]", "[16:32]"
"""The bits of the parameter that count levels."""
MOST_LEVELS: Final = (1 << 16) - 2
NEVER: Final = f'"x" %if eq({ITEM}, {MOST_LEVELS + 1})'
LEVEL: Final = 'level::_: "" %if ge(_, 0)'


class Recursion:
    """The keys of a schema whose values may lie inside themselves.

    Args:
        satisfiable: the keys that have values; the others are left out.

    Attributes:
        leading: keys in whose values a recursion lies, at any depth.
        inside: keys of a recursion; their levels are counted.
    """

    def __init__(self, satisfiable: Satisfiable) -> None:
        below = {
            key: {
                child
                for shape in shapes
                if satisfiable.has_values(shape)
                for child in children(shape)
                if child in satisfiable.keys
            }
            for key, shapes in satisfiable.reached.items()
            if key in satisfiable.keys
        }
        self.leading = _without_ends(below)
        above: dict[Key, set[Key]] = {key: set() for key in self.leading}
        for key in self.leading:
            for child in below[key] & self.leading:
                above[child].add(key)
        self.inside = _without_ends(above)


def _without_ends(following: dict[Key, set[Key]]) -> set[Key]:
    """The nodes of a graph from which a path can go on forever."""
    left = {key: len(others) for key, others in following.items()}
    before = defaultdict(list)
    for key, others in following.items():
        for other in others:
            before[other].append(key)
    ends = [key for key, count in left.items() if not count]
    while ends:
        end = ends.pop()
        del left[end]
        for key in before[end]:
            left[key] -= 1
            if not left[key]:
                ends.append(key)
    return set(left)
