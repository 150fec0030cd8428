"""The grammar of an answer with tools: text, or calls of declared tools, in the dialect of the model.

Notable here:
- names and arguments are held to the declared tools, whichever way a call is written
- text is free up to the point where it begins a call, and cannot begin one that it does not finish
- JSON in a code block is a call only if it names a declared tool and goes on to its arguments: other JSON stays text
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from pippin.data.text.tokenizer import Tokenizer
from pippin.engine.grammar.arguments import argument_grammar
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.grammar.lark import compose
from pippin.session.tool_dialects.dialect import ARGUMENTS, INDEX, NAME, PYTHON_TAGS, ToolDialect
from pippin.session.tools import ToolDefinition
from pippin.session.types.schema import Schema

SPACE: Final = r"[ \t\n]{0,64}"
"""White space inside a call, as a regular expression."""
_ANY: Final = r"(.|\n)*"
_BLOCK, _END_OF_BLOCK = "\n```json\n", "\n```"
_MOST_MESSAGES: Final = 8  # of reasoning and comments before the answer, where answers consist of messages


def tool_grammar(
    dialect: ToolDialect,
    tokenizer: Tokenizer,
    schema: Schema[Any] | None,
    tools: Sequence[ToolDefinition],
    *,
    required: bool = False,
    max_calls: int = 1,
    reasoned: bool = False,
    around: tuple[str, str] = ("", ""),
) -> Grammar | None:
    """The grammar of the model's output in one turn; None for no constraint.

    Args:
        dialect: how the model writes calls.
        tokenizer: has the markers of the dialect as control tokens, or not.
        schema: schema of the answer; None for free text.
        tools: tools that it may call instead of answering (free text may precede a call).
        required: whether it must call a tool.
        max_calls: how many calls it may make.
        reasoned: whether its reasoning precedes the output; where answers consist of messages, none of them is
            reasoning then.
        around: tags around the output: the first is always written, the second may be after free text.
    """
    rules = _Rules(dialect, tokenizer, tools, max_calls)
    if dialect.channels:
        return rules.channels(schema, required, reasoned)
    begin, end = around
    if not tools and (schema is None or not begin):
        return None if schema is None else schema.grammar
    if not tools:
        return rules.compose([f"start: {rules.text(begin)} answer"], schema)
    if required:
        return rules.compose([f"start: {rules.text(begin)} {rules.calls()}"])
    if schema is not None:
        return rules.compose([f"start: {rules.text(begin)} (answer | {rules.calls()})"], schema)
    return rules.free(begin, end)


def pythonic_opening(name: str) -> str:
    """The regular expression of a list of calls in Python's notation up to the arguments of the first, as `opening`."""
    return rf"{SPACE}\[{SPACE}{name}\("


def opening(fence: str, name: str) -> str:
    """The regular expression of a call inside ``fence`` up to its arguments, for the engine and for Python's `re`."""
    keys = "|".join(ARGUMENTS)
    return rf'{fence}{SPACE}\{{{SPACE}"name":{SPACE}"{name}",{SPACE}"(?:{keys})":'


class _Rules:
    """The rules of one grammar, in Lark; ``parts`` are the grammars that they refer to."""

    def __init__(
        self, dialect: ToolDialect, tokenizer: Tokenizer, tools: Sequence[ToolDefinition], max_calls: int
    ) -> None:
        self.dialect, self.tools, self.max_calls = dialect, tools, max_calls
        self.tokens = tokenizer.control_tokens
        self.parts: dict[str, Grammar] = {}
        self.shared: dict[str, str] = {}  # rules that are used more than once

    def compose(self, rules: Sequence[str], answer: Schema[Any] | None = None) -> Grammar:
        """All rules as one grammar."""
        rules = [*rules, *(f"{name}: {body}" for name, body in self.shared.items())]
        return compose("\n".join(rules), self.parts if answer is None else {"answer": answer.grammar, **self.parts})

    def free(self, begin: str, end: str) -> Grammar:
        """Text, and calls after it or instead of it, between tags."""
        dialect, marker = self.dialect, self.dialect.marker
        starts, rules, calls = ["FREE"], [], []
        if any(marker.startswith(token) for token in self.tokens):
            starts += [self.calls(), f"FREE {self.calls()}"]  # no text can spell a control token
        elif marker:
            starts.append(f"open {self.calls(without=marker)}")
            calls.append(_ANY + re.escape(marker).replace("/", r"\/"))
            rules.append(f"open[lazy]: /{calls[-1]}/")
        else:
            starts += [f"<[{self.tokens[tag]}]> {self.calls()}" for tag in PYTHON_TAGS if tag in self.tokens]
        more = ""
        if dialect.fenced and self.max_calls > 1:
            named = " | ".join(self.named(index) for index in range(len(self.tools)))
            self.shared["block"] = f"{_text(_BLOCK)} ({named}) {_text(_END_OF_BLOCK)}"
            more = f"block{{0,{self.max_calls - 1}}}"
        for index, tool in enumerate(self.tools):
            rest = f'" "? {self.arguments(index)} /{SPACE}/ "}}"'
            if dialect.fenced:
                starts.append(f'fence_{index} {rest} /{SPACE}/ "```" {more}')
                calls.append(_ANY + opening("```(?:json)?", tool.name))
                rules.append(f"fence_{index}[lazy]: /{calls[-1]}/")
            if dialect.bare:
                starts.append(f"bare_{index} {rest if dialect.notation is None else self.rest(index)}")
                calls.append(opening(SPACE, tool.name) if dialect.notation is None else pythonic_opening(tool.name))
                rules.append(f"bare_{index}[lazy]: /{calls[-1]}/")
        rules.append(f"FREE: /{_ANY}/" + (f" & ~/(?:{'|'.join(calls)}){_ANY}/" if calls else ""))
        closing = f"{self.token(end)}?" if end in self.tokens else ""  # a tag that is text is part of the text
        return self.compose([f"start: {self.text(begin)} ({' | '.join(starts)}) {closing}", *rules])

    def calls(self, without: str = "") -> str:
        """One call or more; ``without`` is the marker that they begin with, where it is written already."""
        return f"{self.call(self.dialect.begin, without)} {self.more()} {self.text(self.dialect.end)}"

    def more(self) -> str:
        """The calls after the first."""
        if self.max_calls == 1 or (self.dialect.bare and self.dialect.notation is None):
            return ""
        if "more" not in self.shared:
            self.shared["more"] = ""  # the rule that is being written
            self.shared["more"] = f"{self.text(self.dialect.between)} {self.call()}"
        return f"more{{0,{self.max_calls - 1}}}"

    def rest(self, index: int) -> str:
        """The arguments of the first call, and all that follows them."""
        after, end = self.text(self.dialect.after), self.text(self.dialect.end)
        return f"{self.arguments(index)} {after} {self.more()} {end}"

    def call(self, begin: str = "", without: str = "") -> str:
        """One call, after ``begin`` and without the text that is written already."""
        dialect = self.dialect
        calls = (
            f"{self.text((begin + dialect.before).replace(NAME, tool.name).removeprefix(without))} "
            f"{self.written(index)} {self.text(dialect.after)}"
            for index, tool in enumerate(self.tools)
        )
        return f"({' | '.join(calls)})"

    def written(self, index: int) -> str:
        """What a call has between the fixed texts."""
        named = self.dialect.key is not None and self.dialect.notation is None
        return self.named(index) if named else self.arguments(index)

    def named(self, index: int) -> str:
        """The JSON of a call with its name, in the lexemes of the grammars of JSON: a longer one would hide theirs."""
        name, key = f'"{self.tools[index].name}"', f'"{self.dialect.key or ARGUMENTS[0]}"'
        pieces = ("{", '"name"', ": ", name, ", ", key, ": ")
        return f'{" ".join(map(_text, pieces))} {self.arguments(index)} "}}"'

    def arguments(self, index: int) -> str:
        """The arguments of a tool."""
        name, tool, notation = f"arguments_{index}", self.tools[index], self.dialect.notation
        if name not in self.parts:
            self.parts[name] = (
                tool.schema.grammar
                if notation is None
                else argument_grammar(tool.schema.json_schema, notation, self.text)
            )
        return name

    def text(self, text: str) -> str:
        """A fixed text, with control tokens as tokens, and any number for `INDEX`."""
        pattern = "|".join(map(re.escape, [*sorted(self.tokens, key=len, reverse=True), INDEX]))
        return " ".join(self.piece(piece) for piece in re.split(f"({pattern})", text) if piece)

    def piece(self, text: str) -> str:
        """A control token, a number, or text."""
        if text == INDEX:
            return "/[0-9]{1,4}/"
        return self.token(text) if text in self.tokens else _text(text)

    def token(self, text: str) -> str:
        """A control token; SentencePiece may write a space at the beginning of the text after Mistral's marker."""
        return f"<[{self.tokens[text]}]>" + (' " "?' if text == "[TOOL_CALLS]" else "")

    def channels(self, schema: Schema[Any] | None, required: bool, reasoned: bool) -> Grammar:
        """Messages of reasoning and comments, then the answer or one call."""
        ends = (
            []
            if required
            else [f"{self.text('<|channel|>final<|message|>')} {'FREE?' if schema is None else 'answer'}"]
        )
        for index, tool in enumerate(self.tools):
            header = self.dialect.before.replace(NAME, tool.name)
            addressed = f" to=functions.{tool.name}<|channel|>commentary json<|message|>"
            ends.append(f"({self.text(header)} | {self.text(addressed)}) {self.arguments(index)}")
        side = (
            f"{self.text('<|channel|>')} SIDE {self.text('<|message|>')} FREE? {self.text('<|end|><|start|>assistant')}"
        )
        rules = [
            f"start: message{{0,{_MOST_MESSAGES}}} ({' | '.join(ends)})",
            f"message: {side}",
            "SIDE: /commentary/" if reasoned else "SIDE: /analysis|commentary/",
            f"FREE: /{_ANY}/",
        ]
        return self.compose(rules, None if required else schema)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
