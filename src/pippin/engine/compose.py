"""Grammars made of grammars: an answer or a tool call, one of several types."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pippin.engine.constraint import Grammar

# What may look like a rule's name but is not: strings, regular expressions, comments.
_LITERAL = r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*'
_RULE = re.compile(r"^[?!]?(\w+)(?:\[[^\]\n]*\])?(?:::\w+)?\s*:", re.MULTILINE)


def compose(source: str, parts: Mapping[str, Grammar]) -> Grammar:
    r"""A Lark grammar that uses other grammars as rules.

    Args:
        source: its first rules, in llguidance's dialect.
        parts: by the (lower-case) name under which ``source`` refers to each.

    >>> print(compose('start: "<" answer ">"', {"answer": Grammar.choice(["a", "b"])}).source)
    start: "<" answer ">"
    answer: ANSWER_TEXT
    ANSWER_TEXT: /(?:a|b)/
    """
    renamed = [_prefixed(name, grammar.source) for name, grammar in parts.items()]
    return Grammar("\n".join([source, *renamed]))


def _prefixed(prefix: str, source: str) -> str:
    """The same rules under names that begin with ``prefix``; terminals stay upper-case, "start" becomes the prefix."""
    names = set(_RULE.findall(source))

    def rename(match: re.Match[str]) -> str:
        name = match.group("name")
        if name not in names:
            return match.group()
        if name == "start":
            return prefix
        return f"{prefix.upper()}_{name}" if name.isupper() else f"{prefix}_{name}"

    return re.sub(rf"{_LITERAL}|(?P<name>\b[A-Za-z_]\w*)", rename, source)
