"""The library of tools, read from text files.

Notable here:
- `# domain` opens a domain and `[name] description` a tool; then one parameter a line: `name/synonym type! values :
  description`, where `!` marks required ones and a string may have a format, such as `string:date`
- values are `a|b|c`, `1..90`, `1.5..9.5`, a list `@name` of this file or one before it, or for booleans
  `true=what the user says|false=...`
- `+ phrase` is a request that states the parameters in braces, `+ de: phrase` one in another language; `? request =
  question` lacks a required value; `>` is the output of the tool, `<` what it tells the user
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from pippin.core.errors import InvalidInput

LANGUAGES: Final = ("en", "de", "fr", "es", "it")
SLOT: Final = re.compile(r"\{(\w+)\}")
_FOLDER: Final = Path(__file__).parent / "tools"
_PARAMETER: Final = re.compile(r"(?P<names>[\w/]+) (?P<type>[a-z]+)(:(?P<format>[a-z]+))?(?P<required>!?) (?P<rest>.*)")
_RANGE: Final = re.compile(r"(\d+(?:\.\d+)?)\.\.(\d+(?:\.\d+)?)")
_AND: Final = {"en": "and", "de": "und", "fr": "et", "es": "y", "it": "e"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a tool.

    Attributes:
        names: its name, then synonyms.
        type: a JSON type, or ``enum``.
        format: format of a string, or empty.
        required: whether a call must have it.
        values: a range as one text, or the values with what the user says for each.
        description: what it means.
    """

    names: tuple[str, ...]
    type: str
    format: str
    required: bool
    values: tuple[str, ...]
    description: str

    def schema(self) -> dict[str, Any]:
        """Its JSON Schema, without the description."""
        match self.type:
            case "enum":
                return {"type": "string", "enum": list(self.values)}
            case "array":
                return {"type": "array", "items": {"type": "string"}}
        return {"type": self.type} | ({"format": self.format} if self.format else {})

    def draw(self, rng: random.Random, language: str = "en") -> tuple[Any, str]:
        """A random value, and how a user says it."""
        if self.type == "array":
            items = rng.sample(self.values, rng.randint(1, 3))
            *first, last = items
            return items, f"{', '.join(first)} {_AND[language]} {last}" if first else last
        if self.type in ("integer", "number"):
            low, high = _RANGE.fullmatch(self.values[0]).groups()  # type: ignore[union-attr]  # `read` has checked it
            if "." in low:
                number: float = rng.randint(int(float(low) * 2), int(float(high) * 2)) / 2
            else:
                number = rng.randint(int(low), int(high))
            return number, str(number)
        value = rng.choice(self.values)
        if self.type == "boolean":
            truth, _, said = value.partition("=")
            return truth == "true", said
        return value, value


@dataclass
class ToolSpec:
    """One tool of the library.

    Attributes:
        name, description: of the tool.
        domain: what it belongs to.
        parameters: by name.
        phrases: requests by language.
        lacking: requests without a required value, each with the question that asks for it.
        output: its JSON output, with the parameters in braces.
        answers: what it tells the user.
    """

    name: str
    description: str
    domain: str
    parameters: dict[str, Parameter] = field(default_factory=dict)
    phrases: dict[str, list[str]] = field(default_factory=dict)
    lacking: list[tuple[str, str]] = field(default_factory=list)
    output: str = ""
    answers: list[str] = field(default_factory=list)

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
        InvalidInput: a file is not as described above.
    """
    found: dict[str, ToolSpec] = {}
    lists: dict[str, tuple[str, ...]] = {}
    for path in sorted(_FOLDER.glob("tools*.txt")):
        for name, tool in read(path.read_text(encoding="utf-8"), lists).items():
            if name in found:
                raise InvalidInput(f"{path.name} has the tool {name!r} again")
            found[name] = tool
    return found


@cache
def unrelated() -> tuple[tuple[str, str], ...]:
    """Requests that no tool fits, each with the beginning of a reply."""
    lines = (_FOLDER / "no_tool.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(" | ") for line in lines if line.strip())
    return tuple((request, reply) for request, _, reply in pairs)


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


def _add(tool: ToolSpec, line: str, lists: Mapping[str, tuple[str, ...]]) -> bool:
    """Add a line to a tool; whether it is understood."""
    match line[:2]:
        case "+ ":
            language, _, phrase = line[2:].partition(": ")
            known = language in LANGUAGES
            tool.phrases.setdefault(language if known else "en", []).append(phrase if known else line[2:])
        case "? ":
            request, _, question = line[2:].partition(" = ")
            tool.lacking.append((request, question))
        case "> ":
            tool.output = line[2:]
        case "< ":
            tool.answers.append(line[2:])
        case _:
            found = _PARAMETER.fullmatch(line)
            if found is None:
                return False
            values, colon, description = found["rest"].partition(" : ")
            listed = lists.get(values, tuple(values.split("|")))
            numeric = found["type"] in ("integer", "number")
            if (
                not colon
                or (values.startswith("@") and values not in lists)
                or (numeric and not _RANGE.fullmatch(values))
            ):
                return False
            names = tuple(found["names"].split("/"))
            tool.parameters[names[0]] = Parameter(
                names, found["type"], found["format"] or "", bool(found["required"]), listed, description
            )
    return True


def _check(tool: ToolSpec) -> None:
    """Raise `InvalidInput` for a tool whose requests do not state what they must."""
    required = {name for name, each in tool.parameters.items() if each.required}
    if not tool.phrases.get("en") or not tool.output or not tool.answers:
        raise InvalidInput(f"{tool.name} has no request in English, no output or no answer")
    for phrase in (phrase for each in tool.phrases.values() for phrase in each):
        slots = SLOT.findall(phrase)
        if not required <= set(slots) <= set(tool.parameters):
            raise InvalidInput(f"{tool.name}: {phrase!r} lacks a required parameter or has an unknown one")
    for text in (tool.output, *tool.answers):
        if not set(SLOT.findall(text)) <= required:
            raise InvalidInput(f"{tool.name}: {text!r} has a parameter that not every call has")
    json.loads(SLOT.sub("0", tool.output))
