"""How right calls of tools are: whether one is made, of which tool, and with which arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""


@dataclass(frozen=True)
class ToolCallScore:
    """Counts over requests; they add up.

    Attributes:
        wanted: requests for which a call is right.
        called: of these, those with one call of the right tool.
        right: of these, those whose arguments are right too.
        unwanted: requests for which no call is right.
        answered: of these, those without a call.
    """

    wanted: int = 0
    called: int = 0
    right: int = 0
    unwanted: int = 0
    answered: int = 0

    def __add__(self, other: ToolCallScore) -> ToolCallScore:
        return ToolCallScore(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def accuracy(self) -> float:
        """Share of all requests that are dealt with rightly; NaN without any."""
        count = self.wanted + self.unwanted
        return (self.right + self.answered) / count if count else float("nan")


def score(expected: Call | None, calls: list[Call]) -> ToolCallScore:
    """Compare the calls for one request with the right one.

    Texts are equal if they differ in case and blanks only; arguments that are not expected are wrong.

    Args:
        expected: the right call; None where no tool fits.
        calls: what the model called.

    >>> score(("mail", {"to": "Ann", "copies": 2}), [("mail", {"to": "ann ", "copies": 2.0})])
    ToolCallScore(wanted=1, called=1, right=1, unwanted=0, answered=0)
    >>> score(None, [("mail", {})])
    ToolCallScore(wanted=0, called=0, right=0, unwanted=1, answered=0)
    """
    if expected is None:
        return ToolCallScore(unwanted=1, answered=int(not calls))
    name, arguments = expected
    called = len(calls) == 1 and calls[0][0] == name
    return ToolCallScore(wanted=1, called=int(called), right=int(called and _plain(calls[0][1]) == _plain(arguments)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return " ".join(value.split()).casefold() if isinstance(value, str) else value
