"""Composition of grammars, such as an answer or a tool call."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pippin.engine.grammar.constraint import Grammar

# Strings, regular expressions and comments may contain text that looks like a rule's name.
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
    """The rules with ``prefix`` added to their names; terminals stay upper-case, "start" becomes the prefix itself."""
    names = set(_RULE.findall(source))

    def rename(match: re.Match[str]) -> str:
        name = match.group("name")
        if name not in names:
            return match.group()
        if name == "start":
            return prefix
        return f"{prefix.upper()}_{name}" if name.isupper() else f"{prefix}_{name}"

    return re.sub(rf"{_LITERAL}|(?P<name>\b[A-Za-z_]\w*)", rename, source)
