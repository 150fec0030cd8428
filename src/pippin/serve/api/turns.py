"""From what a request says to the parts of a turn: segments, tools, schema, options.

Notable here:
- a refusal carries the path of the field that it is about, as the client wrote it
- an object whose schema lists its properties gets no others, unless the schema says so: a model does not invent
  arguments that no function takes
- images and files come inside the request; this server opens no address that a client names
"""

from __future__ import annotations

import binascii
import dataclasses
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from pippin.core.errors import InvalidArgument, InvalidRequest, InvalidTool, SchemaError
from pippin.serve.api import fields
from pippin.session.options import GenerationOptions, ReasoningLevel
from pippin.session.schema import Choice, Lark, Regex, Schema
from pippin.session.tools import ToolDefinition
from pippin.session.transcript import Attachment

_DATA_URL: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*;base64,", re.ASCII)
# Where these stand, an object may be described in several places, and closing one would close the others.
_COMPOSING: Final = frozenset(
    ("allOf", "not", "if", "dependentSchemas", "patternProperties", "unevaluatedProperties", "minProperties")
)
_MAPS: Final = frozenset({"properties", "$defs", "definitions"})
_LISTS: Final = frozenset({"anyOf", "oneOf", "prefixItems"})
MOST_CHARACTERS: Final = 256 * 1024
EFFORTS: Final[dict[str, ReasoningLevel]] = {
    "none": "off",
    "minimal": "light",
    "low": "light",
    "medium": "moderate",
    "high": "deep",
    "xhigh": "deep",
}


def check_size(param: str, *given: Any) -> None:
    """Refuse schemas and grammars that would take too long to read.

    Args:
        param: the field that a refusal names.
        given: all of a request, as JSON values.

    Raises:
        InvalidRequest: together they are longer than 256 Ki characters of JSON.
    """
    size = sum(len(json.dumps(one, ensure_ascii=False)) for one in given if one is not None)
    if size > MOST_CHARACTERS:
        raise InvalidRequest(
            f"{param}: {size:,} characters of schemas or grammars are more than the {MOST_CHARACTERS:,} of one request",
            param=param,
            code="unsupported_schema",
        )


@contextmanager
def about(param: str) -> Iterator[None]:
    """Name the field that an error is about, for the ``param`` of the answer."""
    try:
        yield
    except RecursionError:
        raise InvalidRequest(
            f"{param}: nested too deeply, or too many references in a row", param=param, code="unsupported_schema"
        ) from None
    except (SchemaError, InvalidTool, InvalidArgument) as error:
        error.param = param  # type: ignore[union-attr]
        if not str(error).startswith(param):
            error.args = (f"{param}: {error}",)
        raise


def attachment(url: str, param: str, *, label: str = "") -> Attachment:
    """What a data URL holds.

    Raises:
        InvalidRequest: another kind of URL, or base64 that is none.

    >>> attachment("data:text/plain;base64,SGk=", "url").text
    'Hi'
    """
    match = _DATA_URL.match(url)
    if match is None:
        raise InvalidRequest(
            f"{param}: {url[:40]!r} is not a data URL (data:image/png;base64,…); this server fetches nothing",
            param=param,
            code="invalid_url",
        )
    return encoded(url[match.end() :], match[1], param, label=label)


def encoded(data: str, media_type: str, param: str, *, label: str = "") -> Attachment:
    """What base64 text holds.

    Raises:
        InvalidRequest: it is not base64.
    """
    try:
        raw = b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{param}: not base64: {error}", param=param, code="invalid_base64") from error
    return Attachment(media_type=media_type, data=b64encode(raw), label=label)


def definition(name: str, description: str | None, parameters: dict[str, Any] | None, param: str) -> ToolDefinition:
    """A tool that the client runs.

    Raises:
        SchemaError, InvalidTool: parameters that are no object, or that cannot be enforced.
    """
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    with about(param):
        if parameters.get("type", "object") != "object":
            raise SchemaError(f"the parameters of a function are an object, got type {parameters['type']!r:.40}")
        return ToolDefinition(name, description or "", Schema(closed({"type": "object", **parameters})))


def closed(schema: Any) -> Any:
    """The same schema, its objects with properties closed where it does not say whether others may be there.

    What is valid under it is valid under the original. A schema in which parts of one object are described in several
    places stays as it is.

    >>> closed({"properties": {"a": {"type": "integer"}}})["additionalProperties"]
    False
    """
    return schema if _mentions(schema, _COMPOSING) else _closed(schema)


def _mentions(schema: Any, words: frozenset[str]) -> bool:
    if isinstance(schema, dict):
        return not words.isdisjoint(schema) or any(_mentions(value, words) for value in schema.values())
    return isinstance(schema, list) and any(_mentions(value, words) for value in schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for name in _MAPS & made.keys():
        if isinstance(made[name], dict):
            made[name] = {key: _closed(value) for key, value in made[name].items()}
    for name in _LISTS & made.keys():
        if isinstance(made[name], list):
            made[name] = [_closed(value) for value in made[name]]
    if "items" in made:
        made["items"] = _closed(made["items"])
    if isinstance(made.get("properties"), dict) and made["properties"]:
        made.setdefault("additionalProperties", False)
    return made


def chosen(
    tools: Sequence[ToolDefinition], choice: fields.ToolChoice | None
) -> tuple[tuple[ToolDefinition, ...], bool]:
    """The tools that the model may call, and whether it must.

    Raises:
        InvalidTool: two tools of one name. InvalidRequest: a choice among tools that are not there.
    """
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) != len(tools):
        twice = next(tool.name for tool in tools if [other.name for other in tools].count(tool.name) > 1)
        with about("tools"):
            raise InvalidTool(f"two tools are named {twice!r}")
    if choice is None or isinstance(choice, str):
        if choice == "required" and not tools:
            raise InvalidRequest("tool_choice: 'required' needs tools", param="tool_choice", code="invalid_value")
        return ((), False) if choice == "none" else (tuple(tools), choice == "required")
    if isinstance(choice, fields.NamedTool):
        names, required = [choice.function.name], True
    else:
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        required = choice.allowed_tools.mode == "required"
    for name in names:
        if name not in by_name:
            raise InvalidRequest(
                f"tool_choice: there is no tool {name!r} in tools", param="tool_choice", code="invalid_value"
            )
    return tuple(by_name[name] for name in dict.fromkeys(names)), required


def several(asked: bool | None, choice: fields.ToolChoice | None) -> bool:
    """Whether the model may make several calls in one turn; a call of one tool by name is one call.

    >>> several(None, "auto"), several(False, None)
    (True, False)
    """
    return asked is not False and not isinstance(choice, fields.NamedTool)


def schema(wanted: fields.Format | None, param: str) -> Schema[Any] | None:
    """The schema of the answer; None for free text.

    Raises:
        SchemaError: it is malformed, has no values, or cannot be enforced.
    """
    target: Any
    match wanted:
        case None | fields.TextFormat():
            return None
        case fields.ObjectFormat():
            target = {"type": "object"}
        case fields.SchemaFormat():
            given = wanted.json_schema.schema_
            target, param = {"type": "object"} if given is None else closed(given), f"{param}.json_schema.schema"
        case fields.RegexFormat():
            target, param = Regex(wanted.pattern), f"{param}.pattern"
        case fields.ChoiceFormat():
            target, param = Choice(wanted.choices), f"{param}.choices"
        case fields.LarkFormat():
            target, param = Lark(wanted.grammar), f"{param}.grammar"
    check_size(param, target if isinstance(target, dict) else dataclasses.astuple(target))
    with about(param):
        return Schema(target)


def sampling(asked: fields.Sampling, **more: Any) -> dict[str, Any]:
    """Options of `GenerationOptions` from a request; ``more`` are options that its fields do not tell.

    OpenAI's own defaults hold: temperature 1, top-p 1. A top-p of 0 leaves the likeliest token.
    """
    options: dict[str, Any] = {"temperature": 1.0 if asked.temperature is None else asked.temperature}
    if asked.top_p == 0:
        options["top_k"] = 1
    else:
        options["top_p"] = None if asked.top_p == 1 else asked.top_p
        options["top_k"] = None if (asked.top_k or 0) < 1 else asked.top_k
    options["min_p"] = asked.min_p or None
    if isinstance(asked, fields.Penalties):
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
            if getattr(asked, name) is not None:
                options[name] = getattr(asked, name)
        if asked.logit_bias:
            options["logit_bias"] = {int(id): bias for id, bias in asked.logit_bias.items()}
        options["stop"] = [asked.stop] if isinstance(asked.stop, str) else asked.stop or ()
    return options | more


def seed(asked: int | None, choice: int) -> int | None:
    """The seed of one of several answers: each draws differently, all follow from the one that was asked for."""
    return None if asked is None else (asked + choice) % 2**63


def reasoning(effort: fields.Effort | None, able: bool, param: str) -> ReasoningLevel:
    """How long to think.

    Raises:
        InvalidRequest: the model was not trained to.
    """
    level = EFFORTS[effort or "none"]
    if level != "off" and not able:
        raise InvalidRequest(
            f"{param}: this model does not reason; leave it out or say 'none'", param=param, code="unsupported_value"
        )
    return level


def options(values: dict[str, Any]) -> GenerationOptions:
    """Options, whose errors name the field.

    Raises:
        InvalidRequest: a value that the request's own ranges let through.
    """
    try:
        return GenerationOptions(**values)
    except InvalidArgument as error:
        raise InvalidRequest(str(error), param=str(error).split()[0], code="invalid_value") from error


def check_vocabulary(bias: dict[int, float] | None, size: int) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        InvalidRequest: an id outside the vocabulary.
    """
    for id in bias or ():
        if id >= size:
            raise InvalidRequest(
                f"logit_bias: token {id} is outside the vocabulary of {size:,}",
                param="logit_bias",
                code="invalid_value",
            )
