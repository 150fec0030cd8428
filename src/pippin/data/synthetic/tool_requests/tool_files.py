"""The library of tools, read from text files.

Notable here:
- `# domain` opens a domain and `[name] description` a tool; then one parameter a line: `name/synonym type! values :
  description`, where `!` marks required ones; `string:date` has a format, `integer:bounded` has the range in its schema
  too, and the items of `array:enum` are among the values
- values are `a|b|c`, `1..90`, `10..90/5` in steps, `1.5..9.5`, or a list `@name` of this file, of `lists.txt` or of a
  file before it; those of booleans and enums may be `value=what the user says`
- `~ de: name values` are the values of a parameter, `@name:de` those of a list, for requests in another language
- `+ phrase` is a request that states the parameters in braces; `? request = question` lacks a required value; `>` is
  the output of the tool, `<` what the user is told; `+ de: phrase`, `? de:` and `< de:` are in another language
- figures of outputs and answers stand for others, and `{=a|b}` in them for one of these texts (`outputs`)
- a user writes dates and numbers as the language does, a call as JSON does
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Final

from pippin.core.errors import InvalidInput
from pippin.data.synthetic.documents.formats import date_text
from pippin.data.synthetic.tool_requests.outputs import ALTERNATIVES

LANGUAGES: Final = ("en", "de", "fr", "es", "it")
SLOT: Final = re.compile(r"\{(\w+)\}")
_FOLDER: Final = Path(__file__).parent / "tools"
_PARAMETER: Final = re.compile(r"(?P<names>[\w/]+) (?P<type>[a-z]+)(:(?P<format>[a-z]+))?(?P<required>!?) (?P<rest>.*)")
_RANGE: Final = re.compile(r"(\d+(?:\.\d+)?)\.\.(\d+(?:\.\d+)?)(?:/(\d+))?")
_AND: Final = {"en": "and", "de": "und", "fr": "et", "es": "y", "it": "e"}
_DATES: Final = {
    "en": ("{month} {d}, {y}", "{d} {month} {y}"),
    "de": ("{d}. {month} {y}", "{dd}.{mm}.{y}"),
    "fr": ("{first} {month} {y}", "{dd}/{mm}/{y}"),
    "es": ("{d} de {month} de {y}", "{dd}/{mm}/{y}"),
    "it": ("{d} {month} {y}", "{dd}/{mm}/{y}"),
}
_ELIDED: Final = (8, 11)  # days before which Italian articles lose their vowel: never written with the month's name


@dataclass(frozen=True)
class Parameter:
    """One parameter of a tool.

    Attributes:
        names: its name, then synonyms.
        type: a JSON type, or ``enum``.
        format: format of a string, ``bounded`` of a number, ``enum`` of an array, or empty.
        required: whether a call must have it.
        values: a range as one text, or the values with what the user says for each.
        description: what it means.
        translated: values by language, where they are others.
    """

    names: tuple[str, ...]
    type: str
    format: str
    required: bool
    values: tuple[str, ...]
    description: str
    translated: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def schema(self) -> dict[str, Any]:
        """Its JSON Schema, without the description."""
        values = [value.partition("=")[0] for value in self.values]
        match self.type, self.format:
            case "enum", _:
                return {"type": "string", "enum": values}
            case "array", "enum":
                return {"type": "array", "items": {"type": "string", "enum": values}}
            case "array", _:
                return {"type": "array", "items": {"type": "string"}}
            case _, "bounded":
                low, high, _ = self._range()
                return {"type": self.type, "minimum": low, "maximum": high}
        return {"type": self.type} | ({"format": self.format} if self.format else {})

    def draw(self, rng: random.Random, language: str = "en") -> tuple[Any, str]:
        """A random value, and how a user says it."""
        values = self.translated.get(language, self.values)
        if self.type == "array":
            pairs = [self._pair(value) for value in rng.sample(values, rng.randint(1, min(3, len(values))))]
            *first, last = [said for _, said in pairs]
            return [item for item, _ in pairs], f"{', '.join(first)} {_AND[language]} {last}" if first else last
        if self.type in ("integer", "number"):
            low, high, step = self._range()
            number = rng.randint(int(low / step), int(high / step)) * step
            number = int(number) if number == int(number) else number
            return number, str(number) if language == "en" else str(number).replace(".", ",")
        value, said = self._pair(rng.choice(values))
        if self.type == "boolean":
            return value == "true", said
        if self.format == "date" and rng.random() < 0.6:
            day = date.fromisoformat(value)
            patterns = _DATES[language][language == "it" and day.day in _ELIDED :]
            return value, date_text(day, rng.choice(patterns), language)
        return value, said

    def codes(self, values: Sequence[str]) -> set[str]:
        """What a call has for some values of this parameter."""
        return {self._pair(value)[0] for value in values}

    def _pair(self, value: str) -> tuple[str, str]:
        """What a call has for a value, and what the user says."""
        if self.type == "string" or (self.type == "array" and self.format != "enum"):
            return value, value  # an equation, say, has an equals sign of its own
        code, _, said = value.partition("=")
        return code, said or code

    def _range(self) -> tuple[float, float, float]:
        """Lowest and highest number and the step between them: halves, where they are not whole."""
        low, high, step = _RANGE.fullmatch(self.values[0]).groups()  # type: ignore[union-attr]  # `read` has checked it
        if "." in low:
            return float(low), float(high), 0.5
        return int(low), int(high), int(step or 1)


@dataclass
class ToolSpec:
    """One tool of the library.

    Attributes:
        name, description: of the tool.
        domain: what it belongs to.
        parameters: by name.
        phrases: requests by language.
        lacking: by language, requests without a required value, each with the question that asks for it.
        output: its JSON output, with the parameters in braces, and `{=a|b}` for one of several texts.
        answers: what it tells the user, by language.
    """

    name: str
    description: str
    domain: str
    parameters: dict[str, Parameter] = field(default_factory=dict)
    phrases: dict[str, list[str]] = field(default_factory=dict)
    lacking: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    output: str = ""
    answers: dict[str, list[str]] = field(default_factory=dict)

    def definition(self, rng: random.Random) -> tuple[dict[str, Any], dict[str, str]]:
        """The tool in OpenAI's format, with random synonyms and descriptions; and the names of its parameters in it."""
        renamed = {name: rng.choice(each.names[1:]) if each.names[1:] and rng.random() < 0.3 else name
                   for name, each in self.parameters.items()}  # fmt: skip
        if len(set(renamed.values())) < len(renamed):
            renamed = {name: name for name in renamed}
        described = rng.random() < 0.75
        properties = {
            renamed[name]: each.schema() | ({"description": each.description} if described else {})
            for name, each in self.parameters.items()
        }
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        schema["required"] = [renamed[name] for name, each in self.parameters.items() if each.required]
        drawn = rng.random()
        description = self.description if drawn < 0.85 else "" if drawn < 0.92 else self.description.split(" of ")[0]
        function = {"name": self.name, "description": description, "parameters": schema}
        return {"type": "function", "function": function}, renamed


def is_held_out(name: str) -> bool:
    """Whether a function of this name is in the tenth that is evaluated on.

    >>> is_held_out("send_email")
    False
    """
    return zlib.crc32(name.encode()) % 10 == 0


@cache
def library() -> dict[str, ToolSpec]:
    """All tools by name.

    Raises:
        InvalidInput: a file is not as described above, two have one tool, or a tool lacks a language.
    """
    found: dict[str, ToolSpec] = {}
    lists: dict[str, tuple[str, ...]] = {}
    for path in (_FOLDER / "lists.txt", *sorted(_FOLDER.glob("tools*.txt"))):
        for name, tool in read(path.read_text(encoding="utf-8"), lists).items():
            if name in found:
                raise InvalidInput(f"{path.name} has the tool {name!r} again")
            if lacking := set(LANGUAGES) - (tool.phrases.keys() & tool.answers.keys()):
                raise InvalidInput(f"{path.name}: {name} has no request or no answer in {min(lacking)}")
            found[name] = tool
    return found


@cache
def unrelated() -> Mapping[str, Sequence[tuple[str, str]]]:
    """By language, requests that no tool fits, each with the beginning of a reply."""
    found: dict[str, list[tuple[str, str]]] = {language: [] for language in LANGUAGES}
    for line in (_FOLDER / "no_tool.txt").read_text(encoding="utf-8").splitlines():
        if line.strip():
            language, text = _in_language(line)
            request, _, reply = text.partition(" | ")
            found[language].append((request, reply))
    return found


@cache
def failures() -> tuple[tuple[str, Mapping[str, str]], ...]:
    """Outputs of tools that did not work, each with what the user is told, by language."""
    found: list[tuple[str, dict[str, str]]] = []
    for line in (_FOLDER / "failures.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("> "):
            found.append((line[2:], {}))
        elif line.strip():
            language, text = _in_language(line.removeprefix("< "))
            found[-1][1][language] = text
    return tuple(found)


def read(text: str, lists: dict[str, tuple[str, ...]] | None = None) -> dict[str, ToolSpec]:
    """The tools of a file.

    Args:
        text: its content.
        lists: lists of values by name; those of the file are added to it.

    Raises:
        InvalidInput: a line that is not as described above, or a tool without a request.
    """
    lists = {} if lists is None else lists
    tools: dict[str, ToolSpec] = {}
    domain, tool = "", None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("# "):
            domain = line[2:].strip()
        elif line.startswith("@"):
            name, _, values = line.partition(" = ")
            lists[name] = tuple(values.split("|"))
        elif line.startswith("["):
            name, _, description = line[1:].partition("] ")
            tool = tools[name] = ToolSpec(name, description, domain)
        elif line.strip() and (tool is None or not _add(tool, line.strip(), lists)):
            raise InvalidInput(f"line {number} is not understood: {line!r}")
    for each in tools.values():
        _check(each)
    return tools


def _in_language(text: str) -> tuple[str, str]:
    """The language that a text begins with, English without one, and the rest."""
    language, colon, rest = text.partition(": ")
    return (language, rest) if colon and language in LANGUAGES else ("en", text)


def _add(tool: ToolSpec, line: str, lists: Mapping[str, tuple[str, ...]]) -> bool:
    """Add a line to a tool; whether it is understood."""
    sign, rest = line[:2], line[2:]
    language, text = _in_language(rest)
    match sign:
        case "+ ":
            tool.phrases.setdefault(language, []).append(text)
        case "? ":
            request, equals, question = text.partition(" = ")
            tool.lacking.setdefault(language, []).append((request, question))
            return bool(equals)
        case "> ":
            tool.output = rest
        case "< ":
            tool.answers.setdefault(language, []).append(text)
        case "~ ":
            return _translate(tool, language, text, lists)
        case _:
            return _add_parameter(tool, line, lists)
    return True


def _add_parameter(tool: ToolSpec, line: str, lists: Mapping[str, tuple[str, ...]]) -> bool:
    found = _PARAMETER.fullmatch(line)
    if found is None:
        return False
    values, colon, description = found["rest"].partition(" : ")
    listed = lists.get(values, tuple(values.split("|")))
    numeric = found["type"] in ("integer", "number")
    if not colon or (values.startswith("@") and values not in lists) or (numeric and not _RANGE.fullmatch(values)):
        return False
    names, form, required = tuple(found["names"].split("/")), found["format"] or "", bool(found["required"])
    translated = {each: lists[f"{values}:{each}"] for each in LANGUAGES if f"{values}:{each}" in lists}
    tool.parameters[names[0]] = Parameter(names, found["type"], form, required, listed, description, translated)
    return True


def _translate(tool: ToolSpec, language: str, text: str, lists: Mapping[str, tuple[str, ...]]) -> bool:
    """Add the values of a parameter in another language; a call has the same ones where they are fixed."""
    name, _, values = text.partition(" ")
    parameter, listed = tool.parameters.get(name), lists.get(values, tuple(values.split("|")))
    if parameter is None or not values or (values.startswith("@") and values not in lists):
        return False
    parameter.translated[language] = listed
    fixed = parameter.type in ("enum", "boolean") or parameter.format == "enum"
    return language != "en" and (not fixed or parameter.codes(listed) == parameter.codes(parameter.values))


def _check(tool: ToolSpec) -> None:
    """Raise `InvalidInput` for a tool whose requests do not state what they must."""
    required = {name for name, each in tool.parameters.items() if each.required}
    if not tool.phrases.get("en") or not tool.output or not tool.answers.get("en"):
        raise InvalidInput(f"{tool.name} has no request in English, no output or no answer")
    for language, phrase in ((language, phrase) for language, each in tool.phrases.items() for phrase in each):
        slots = SLOT.findall(phrase)
        if not required <= set(slots) <= set(tool.parameters):
            raise InvalidInput(f"{tool.name}: {phrase!r} lacks a required parameter or has an unknown one")
        for slot in slots:
            if tool.parameters[slot].type == "boolean" and language not in ("en", *tool.parameters[slot].translated):
                raise InvalidInput(f"{tool.name}: {phrase!r} has {slot}, whose values are not in that language")
    texts = (tool.output, *(answer for each in tool.answers.values() for answer in each))
    for text in texts:
        if not set(SLOT.findall(text)) <= required:
            raise InvalidInput(f"{tool.name}: {text!r} has a parameter that not every call has")
    counts = {text.count("|") for each in texts for text in ALTERNATIVES.findall(each)}
    if len(counts) > 1:
        raise InvalidInput(f"{tool.name} has alternatives in one text that others lack")
    json.loads(SLOT.sub("0", ALTERNATIVES.sub("0", tool.output)))
