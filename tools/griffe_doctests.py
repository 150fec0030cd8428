"""A griffe extension: doctests in docstrings become code blocks on the site, wherever in the text they stand."""

from __future__ import annotations

import re
from typing import Any

import griffe

# A prompt and all that follows it up to an empty line, at any indentation.
_DOCTEST = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*|\n(?P=indent) .*)*", re.MULTILINE)


def fence(docstring: str) -> str:
    r"""The docstring with each doctest between fences.

    >>> fence("Add.\n\n>>> 1 + 1\n2\n\nMore.").splitlines()
    ['Add.', '', '```pycon', '>>> 1 + 1', '2', '```', '', 'More.']
    """
    return _DOCTEST.sub(lambda match: f"{match['indent']}```pycon\n{match[0]}\n{match['indent']}```", docstring)


class Doctests(griffe.Extension):
    """Fences the doctests of every object as it is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fence(obj.docstring.value)
