"""Chat templates: conversion of messages to token ids, safe against control tokens in messages.

Notable here:
- the text of a control token inside a message stays text: it is replaced by a private-use character while the template
  runs, and encoded as plain text afterwards; everything else gets the same ids as in transformers
- parts of a control token that meet only in the rendered prompt ("<|im_" in one field, "end|>" in the next) are found
  by rendering once more with the seams closed
- what a template supports (system message, tools, lists of parts) is determined by probing, not by parsing its source
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from pippin.core.errors import CheckpointError, InvalidInput
from pippin.data.text.template_process import TemplateProcess
from pippin.data.text.tokenizer import TextOnlyEncoder, Tokenizer

Message = Mapping[str, Any]

_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
# Pattern of added tokens with a meaning, as opposed to runs of spaces and frequent words.
_MARKUP = re.compile(r"[<\[{].*[>\]}]")
_PROBE = "probe7f3a"


@dataclass(frozen=True)
class CallForm:
    """How a template takes the calls of tools.

    Args:
        empty_content: the content of a message of calls without text; templates ask for "" or for None.
        arguments_as_text: whether arguments are given as JSON text instead of as an object.
        named_ids: whether the template shows the id of a call instead of its name, so that the id must hold the name.
    """

    empty_content: str | None = ""
    arguments_as_text: bool = False
    named_ids: bool = False

    def id(self, number: int, name: str) -> str:
        """The id of a call, from its number in the conversation and the name of the tool."""
        return f"functions.{name}:{number}" if self.named_ids else f"{number:09d}"  # templates of Mistral want nine

    def message(self, text: str, calls: Sequence[tuple[str, str, Mapping[str, Any]]]) -> dict[str, Any]:
        """The message of an assistant that calls tools.

        Args:
            text: text before the calls.
            calls: id, name and arguments of each.
        """
        functions = [
            {"name": name, "arguments": json.dumps(values, ensure_ascii=False) if self.arguments_as_text else values}
            for _, name, values in calls
        ]
        return {
            "role": "assistant",
            "content": text or self.empty_content,
            "tool_calls": [
                {"id": id, "type": "function", "function": function}
                for (id, _, _), function in zip(calls, functions, strict=True)
            ],
        }


# Templates that take an object write text in quotation marks, so that text is tried last.
_CALL_FORMS = tuple(
    CallForm(empty, as_text, named) for named in (False, True) for as_text in (False, True) for empty in ("", None)
)


class ChatTemplate:
    """Converts a conversation to the prompt format that a model was trained on."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Compile the template, in a process of its own, which renders it too.

        Args:
            source: the Jinja template of the checkpoint.
            tokenizer: encodes the rendered prompt; its control tokens are the guarded ones.

        Raises:
            CheckpointError: the template is not valid Jinja; the message names the location.
        """
        self.source = source
        self.tokenizer = tokenizer
        self._template = TemplateProcess(source)
        # Added tokens that are not control tokens, such as <tool_call>, act as such where the template writes them.
        mentioned = (text for text in tokenizer.markup_strings if text in source)
        self._markup = frozenset(text for text in mentioned if _MARKUP.fullmatch(text))
        self._control = _Guarded(tokenizer.control_strings)
        self._guarded = _Guarded(tokenizer.control_strings | self._markup)

    @cached_property
    def accepts_system(self) -> bool:
        """Whether the text of a system message reaches the prompt."""
        return self._shows({"role": "system", "content": _PROBE}, {"role": "user", "content": "a"})

    @cached_property
    def accepts_tools(self) -> bool:
        """Whether the definitions of tools reach the prompt."""
        function = {"name": _PROBE, "description": "a", "parameters": {"type": "object", "properties": {}}}
        return self._shows({"role": "user", "content": "a"}, tools=[{"type": "function", "function": function}])

    @cached_property
    def call_form(self) -> CallForm | None:
        """The form in which the template takes the calls of tools, and their results in messages of the role "tool".

        None for a template that does not show both.
        """
        return next((form for form in _CALL_FORMS if self._shows_calls(form, 1)), None)

    @cached_property
    def accepts_parallel_calls(self) -> bool:
        """Whether one message may have several calls."""
        return self.call_form is not None and self._shows_calls(self.call_form, 2)

    def begins_answers_with(self, tag: str) -> bool:
        """Whether the text of an assistant's message stands behind this tag."""
        messages = {"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}
        shown = self._probe(*map(self._shaped, messages), add_generation_prompt=False)
        return shown.rpartition(_PROBE)[0].rstrip().endswith(tag)

    def _shows_calls(self, form: CallForm, count: int) -> bool:
        """Whether names, arguments and results of this many calls reach the prompt."""
        numbers = range(count)
        names = [f"name{at}{_PROBE}" for at in numbers]
        calls = [(form.id(at, name), name, {"x": f"value{at}{_PROBE}"}) for at, name in enumerate(names)]
        shown = self._probe(
            *map(
                self._shaped,
                [
                    {"role": "user", "content": "a"},
                    form.message("", calls),
                    *(
                        {"role": "tool", "tool_call_id": id, "name": name, "content": f"result{at}{_PROBE}"}
                        for at, (id, name, _) in enumerate(calls)
                    ),
                ],
            )
        )
        return all(f"{part}{at}{_PROBE}" in shown for at in numbers for part in ("name", "value", "result"))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt as text.

        Args:
            messages: dictionaries with "role" and "content" (a text, or a list of ``{"type": "text", "text": ...}``),
                and where they apply "tool_calls", "tool_call_id" and "name".
            tools: JSON descriptions of functions, in the format that the model was trained on.
            add_generation_prompt: end with the start of the assistant's turn.
            variables: other variables of the template, e.g. ``enable_thinking=False``.

        Raises:
            InvalidInput: a message that is not as above, or that the template refuses, with its own message.
            CheckpointError: the template fails, or takes more time or memory than it may.
        """
        prompt = self._prompt(messages, tools, add_generation_prompt, variables)
        return prompt.reveal(prompt.text)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The prompt as token ids; arguments and errors as in `render`.

        The only control tokens in it are those that the template itself wrote.
        """
        prompt = self._prompt(messages, tools, add_generation_prompt, variables)
        return list(chain.from_iterable(self._encoded(prompt)))

    def _encoded(self, prompt: _Prompt) -> Iterator[list[int]]:
        """Segments with hidden strings are encoded as plain text, the rest as the template's own text."""
        if not prompt.hidden:
            yield self.tokenizer.encode(prompt.text, control=True)
            return
        trusted = ""
        for index, piece in enumerate(self._guarded.split(prompt.text)):
            if prompt.hidden.keys().isdisjoint(piece):
                trusted += piece
                continue
            yield self.tokenizer.encode(trusted, control=True)
            yield self._plain.encode(prompt.reveal(piece), start=index == 0)
            trusted = ""
        yield self.tokenizer.encode(trusted, control=True)

    @cached_property
    def _plain(self) -> TextOnlyEncoder:
        return self.tokenizer.without(self._markup)

    def _prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, generate: bool, variables: Any
    ) -> _Prompt:
        given = {
            "messages": [self._shaped(message) for message in _checked(messages)],
            "tools": None if tools is None else list(tools),
            "documents": None,
            **variables,
        }
        fixed = {**self.tokenizer.special_tokens, "add_generation_prompt": generate}
        prompt = self._attempt(given, fixed, seams=False)
        if prompt.seams:
            closed = self._attempt(given, fixed, seams=True)
            if self._guarded.count(closed.text) < self._guarded.count(prompt.text):
                return closed
        return prompt

    def _attempt(self, given: dict[str, Any], fixed: dict[str, Any], *, seams: bool) -> _Prompt:
        prompt = _Prompt(_private_characters(given, self.source), seams)
        conversation = [self._hide_message(message, prompt) for message in given["messages"]]
        others = {name: self._hide(given[name], prompt, self._guarded) for name in given.keys() - {"messages"}}
        prompt.text = self._template.render({**others, "messages": conversation, **fixed}, prompt.size)
        return prompt

    def _hide_message(self, message: Message, prompt: _Prompt) -> dict[str, Any]:
        # Templates look for <think> in the model's own output and cut it out; its own markup is not an attack.
        own = {"content", "reasoning_content"} if message["role"] == "assistant" else set()
        return {
            key: self._hide(value, prompt, self._control if key in own else self._guarded)
            for key, value in message.items()
        }

    def _hide(self, value: Any, prompt: _Prompt, guarded: _Guarded) -> Any:
        """A copy of plain JSON data whose texts contain no guarded string."""
        if isinstance(value, str):
            return prompt.hide(str.__str__(value), guarded)  # the text itself, also of an enum member
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, Mapping):
            return {self._hide(key, prompt, guarded): self._hide(item, prompt, guarded) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._hide(item, prompt, guarded) for item in value]
        raise InvalidInput(f"{value!r:.80} in a message or tool is a {type(value).__name__}; give JSON values only")

    def _shaped(self, message: Message) -> Message:
        """The message with its content in the form that the template takes: a text or a list of parts."""
        content = message.get("content")
        if isinstance(content, str) and not self._takes_text:
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, (list, tuple)) and not self._takes_parts:
            return {**message, "content": "".join(part["text"] for part in content)}
        return message

    @cached_property
    def _takes_text(self) -> bool:
        return _PROBE in self._probe({"role": "user", "content": _PROBE}) or not self._takes_parts

    @cached_property
    def _takes_parts(self) -> bool:
        shown = self._probe({"role": "user", "content": [{"type": "text", "text": _PROBE}]})
        # A template that supports only text may print the list as Python or JSON would.
        return _PROBE in shown and f"'{_PROBE}'" not in shown and f'"{_PROBE}"' not in shown

    def _shows(self, *messages: Message, **variables: Any) -> bool:
        """Whether the probe in these messages or variables reaches the prompt."""
        return _PROBE in self._probe(*map(self._shaped, messages), **variables)

    def _probe(self, *messages: Message, **variables: Any) -> str:
        """The rendering of these messages; empty if the template refuses them."""
        fixed = {"tools": None, "documents": None, "add_generation_prompt": True, **self.tokenizer.special_tokens}
        try:
            return self._template.render({**fixed, "messages": list(messages), **variables}, 0)
        except (CheckpointError, InvalidInput):
            return ""


class _Guarded:
    """A set of strings that only the template may write."""

    def __init__(self, texts: frozenset[str]) -> None:
        ordered = sorted(texts, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self.heads = tuple({text[:end] for text in texts for end in range(1, len(text))})
        self.tails = tuple({text[start:] for text in texts for start in range(1, len(text))})

    def substitute(self, replacement: Callable[[str], str], text: str) -> str:
        return self._pattern.sub(lambda match: replacement(match[0]), text)

    def count(self, text: str) -> int:
        return sum(1 for _ in self._pattern.finditer(text))

    def split(self, text: str) -> list[str]:
        """The text split at the guarded strings, which are pieces of their own."""
        return [piece for piece in re.split(f"({self._pattern.pattern})", text) if piece]


@dataclass
class _Prompt:
    """A rendered prompt, and the strings behind its private-use characters."""

    characters: Iterator[str]
    close_seams: bool
    text: str = ""
    size: int = 0
    seams: bool = False
    hidden: dict[str, str] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    def hide(self, text: str, guarded: _Guarded) -> str:
        self.size += len(text)
        text = guarded.substitute(self._name, text)
        if text.endswith(guarded.heads) or text.startswith(guarded.tails):
            self.seams = True
            if self.close_seams:
                head = max((tail for tail in guarded.tails if text.startswith(tail)), key=len, default="")
                text = (self._name(head) if head else "") + text[len(head) :]
                end = max((head for head in guarded.heads if text.endswith(head)), key=len, default="")
                text = text[: len(text) - len(end)] + (self._name(end) if end else "")
        return text

    def reveal(self, text: str) -> str:
        return text.translate({ord(character): original for character, original in self.hidden.items()})

    def _name(self, original: str) -> str:
        if original not in self._names:
            character = next(self.characters)
            self._names[original] = character
            self.hidden[character] = original
        return self._names[original]


def _private_characters(given: Any, source: str) -> Iterator[str]:
    """Private-use characters that occur nowhere in the input."""
    taken = set(source) | set(_all_text(given))
    return (chr(code) for code in chain(*_PRIVATE) if chr(code) not in taken)


def _all_text(value: Any) -> Iterator[str]:
    """The characters of every text in nested data."""
    if isinstance(value, str):
        yield from set(value)
    elif isinstance(value, Mapping):
        yield from _all_text([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _all_text(item)


def _checked(messages: Sequence[Message]) -> Sequence[Message]:
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidInput(f"message {index} is {message!r:.80}; expected a dictionary with a 'role'")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, (list, tuple)):
            raise InvalidInput(f"the content of message {index} is {content!r:.80}; expected a text or a list of parts")
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise InvalidInput(f"message {index} has the part {part!r:.80}; only text parts are known")
    return messages
