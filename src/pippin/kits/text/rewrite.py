"""Rewriting in a tone or a length, with protected ranges unchanged, byte for byte.

Notable here:
- code blocks and quoted paragraphs are never shown to the model
- a grammar keeps links, inline code and quotes inside a paragraph: the answer cannot omit, change or reorder them; a
  paragraph that the model cannot write under it stays unchanged and is reported
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pippin.core.errors import AnswerTruncated, DecodingFailure
from pippin.data.text.language import language_of
from pippin.kits.text import prompts
from pippin.kits.text.session_pool import SessionPool
from pippin.kits.text.spans import TextSpan
from pippin.kits.text.summarize import Passage, check, is_whole, split
from pippin.session import text_prompts
from pippin.session.text_prompts import Preset
from pippin.session.types.schema import Lark

_BREAK = re.compile(r"\n[^\S\n]*(?:\n\s*)+")


@dataclass(frozen=True)
class Rewriting(Passage):
    """A rewritten text; ``unchanged`` are the paragraphs of the original that were not rewritten."""

    unchanged: tuple[TextSpan, ...] = ()


def rewrite(
    pool: SessionPool, text: str, preset: Preset, length: str, protected: Sequence[TextSpan], language: str | None
) -> Rewriting:
    """Rewrite a text paragraph by paragraph."""
    ending = text_prompts.in_language(language or language_of(text))
    parts: list[str] = []
    unchanged: list[TextSpan] = []
    end = 0
    for paragraph in _paragraphs(text, protected):
        parts.append(text[end : paragraph.start])
        for part in split(pool, preset, paragraph.of(text), 256):
            where = TextSpan(paragraph.start + part.start, paragraph.start + part.end, "paragraph")
            inside = [one for one in protected if where.start <= one.start and one.end <= where.end]
            new = _part(pool, preset, text, where, inside, length, ending)
            if new is None:
                unchanged.append(where)
            parts.append(where.of(text) if new is None else new)
        end = paragraph.end
    parts.append(text[end:])
    done = "".join(parts)
    return Rewriting(done, check(pool, done, text), tuple(unchanged))


def _paragraphs(text: str, protected: Sequence[TextSpan]) -> list[TextSpan]:
    """Ranges between empty lines and protected blocks, without surrounding space."""
    borders = [(m.start(), m.end()) for m in _BREAK.finditer(text)]
    borders += [(one.start, one.end) for one in protected if "\n" in one.of(text) or _is_block(text, one)]
    found, begin = [], 0
    for start, end in [*sorted(borders), (len(text), len(text))]:
        body = text[begin:start]
        if re.search(r"\w", body):
            lead = len(body) - len(body.lstrip())
            found.append(TextSpan(begin + lead, begin + len(body.rstrip()), "paragraph"))
        begin = max(begin, end)
    return found


def _is_block(text: str, one: TextSpan) -> bool:
    """Whether a protected range has lines of its own."""
    line = text[text.rfind("\n", 0, one.start) + 1 : (text.find("\n", one.end) + len(text) + 1) % (len(text) + 1)]
    return line.strip() == one.of(text).strip()


def _part(
    pool: SessionPool, preset: Preset, text: str, where: TextSpan, inside: list[TextSpan], length: str, ending: str
) -> str | None:
    """One rewritten paragraph; None if its protected ranges would not be preserved."""
    old = where.of(text)
    body = old.strip()
    if not re.search(r"\w\W+\w", body):
        return None
    factor = {"shorter": 1.0, "same": 1.5, "longer": 3.0}[length]
    max_tokens = int(factor * pool.token_count(body)) + 24
    literals = [one.of(text) for one in inside]
    guided = bool(literals) and pool.provider.capabilities.grammars
    form = Lark(grammar(literals)) if guided else None

    def ask(preset: Preset) -> str:
        prompt = f"Rewrite: {body}{ending}"
        return str(pool.ask(preset, prompt, generating=form, max_tokens=max_tokens, include_schema_in_prompt=False))

    try:
        answer = ask(preset)
        if prompts.leaks(preset, answer, body):
            answer = ask(Preset(preset.instructions))
    except (AnswerTruncated, DecodingFailure):
        return None
    answer = re.sub(r"^(?:Rewrite|Rewritten)[^:\n]*:\s*", "", answer.strip())
    if not answer or not _holds(answer, literals) or (is_whole(body) and not is_whole(answer)):
        return None
    lead, tail = len(old) - len(old.lstrip()), len(old.rstrip())
    return f"{old[:lead]}{answer}{old[tail:]}"


def _holds(answer: str, literals: list[str]) -> bool:
    """Whether the literals occur in the answer, in their order and apart from one another."""
    at = 0
    for literal in literals:
        found = answer.find(literal, at)
        if found < 0:
            return False
        at = found + len(literal)
    return True


def grammar(literals: Sequence[str]) -> str:
    """A Lark grammar of texts that contain these literals in this order.

    >>> print(grammar(["a/b"]))
    start: gap0 TEXT
    gap0[lazy]: /(.|\\n)*a\\/b/
    TEXT: /(.|\\n)*/
    """
    gaps = [rf"gap{i}[lazy]: /(.|\n)*{_escaped(literal)}/" for i, literal in enumerate(literals)]
    names = " ".join(f"gap{i}" for i in range(len(literals)))
    return "\n".join([f"start: {names} TEXT", *gaps, r"TEXT: /(.|\n)*/"])


def _escaped(literal: str) -> str:
    return "".join(rf"\{char}" if char in r"\/.^$*+?()[]{}|-" else char for char in literal).replace("\n", r"\n")
