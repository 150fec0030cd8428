"""Conversion of request fields to the parts of a provider request: segments, tools, schema, options.

Notable here:
- an error carries the path of the field that it refers to, as the client wrote it
- an object whose schema lists its properties gets no others, unless the schema allows them: a model does not invent
  arguments that no function takes
- images and files are sent inside the request; this server opens no URL that a client names
"""

from __future__ import annotations

import binascii
import dataclasses
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from pippin.core.errors import InvalidArgument, InvalidRequest, InvalidTool, SchemaError
from pippin.serve.api.common import fields
from pippin.session.options import MOST_CALLS, GenerationOptions, ReasoningLevel
from pippin.session.tools import ToolDefinition
from pippin.session.transcript import Attachment
from pippin.session.types.schema import Choice, Lark, Regex, Schema

if TYPE_CHECKING:
    from pippin.session.providers.local import LocalModel

_DATA_URL: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*;base64,", re.ASCII)
# With these keywords an object may be described in several places, and closing one would close the others.
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
    """Refuse schemas and grammars that would take too long to parse.

    Args:
        param: the field that an error names.
        given: all schemas and grammars of a request, as JSON values.

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
    """Attach the field name to errors, for the ``param`` of the response."""
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
    """The content of a data URL.

    Raises:
        InvalidRequest: another kind of URL, or invalid base64.

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
    """The content of base64 text.

    Raises:
        InvalidRequest: it is not base64.
    """
    try:
        raw = b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{param}: not base64: {error}", param=param, code="invalid_base64") from error
    return Attachment(media_type=media_type, data=b64encode(raw), label=label)


def definition(
    name: str, description: str | None, parameters: dict[str, Any] | None, param: str, *, strict: bool | None
) -> ToolDefinition:
    """A tool that the client runs; a strict one has parameters of which nothing is ignored.

    Raises:
        SchemaError, InvalidTool: parameters that are not an object schema, or that cannot be enforced.
    """
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    with about(param):
        if parameters.get("type", "object") != "object":
            raise SchemaError(f"the parameters of a function are an object, got type {parameters['type']!r:.40}")
        return ToolDefinition(
            name, description or "", Schema(closed({"type": "object", **parameters}), strict=bool(strict))
        )


def closed(schema: Any) -> Any:
    """The schema with ``additionalProperties: false`` on objects that list properties and do not set it.

    Every value that is valid under it is valid under the original. A schema that describes parts of one object in
    several
    places is returned unchanged.

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
    found = dict(schema)
    for name in _MAPS & found.keys():
        if isinstance(found[name], dict):
            found[name] = {key: _closed(value) for key, value in found[name].items()}
    for name in _LISTS & found.keys():
        if isinstance(found[name], list):
            found[name] = [_closed(value) for value in found[name]]
    if "items" in found:
        found["items"] = _closed(found["items"])
    if isinstance(found.get("properties"), dict) and found["properties"]:
        found.setdefault("additionalProperties", False)
    return found


def chosen(
    tools: Sequence[ToolDefinition], choice: fields.ToolChoice | None
) -> tuple[tuple[ToolDefinition, ...], bool]:
    """The tools that the model may call, and whether it must.

    Raises:
        InvalidTool: two tools with one name. InvalidRequest: a choice among tools that do not exist.
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
    """Whether the model may make parallel tool calls; a call of one tool by name is one call.

    >>> several(None, "auto"), several(False, None)
    (True, False)
    """
    return asked is not False and not isinstance(choice, fields.NamedTool)


def max_tool_calls(asked: int | None) -> int:
    """How many calls one answer may have.

    >>> max_tool_calls(None), max_tool_calls(2), max_tool_calls(1000)
    (8, 2, 64)
    """
    return GenerationOptions().max_tool_calls if asked is None else min(asked, MOST_CALLS)


def schema(wanted: fields.Format | None, param: str) -> Schema[Any] | None:
    """The schema of the answer; None for free text.

    Raises:
        SchemaError: it is malformed, has no values, or cannot be enforced.
    """
    target: Any
    strict = False
    match wanted:
        case None | fields.TextFormat():
            return None
        case fields.ObjectFormat():
            target = {"type": "object"}
        case fields.SchemaFormat():
            given, strict = wanted.json_schema.schema_, bool(wanted.json_schema.strict)
            target, param = {"type": "object"} if given is None else closed(given), f"{param}.json_schema.schema"
        case fields.RegexFormat():
            target, param = Regex(wanted.pattern), f"{param}.pattern"
        case fields.ChoiceFormat():
            target, param = Choice(wanted.choices), f"{param}.choices"
        case fields.LarkFormat():
            target, param = Lark(wanted.grammar), f"{param}.grammar"
    check_size(param, target if isinstance(target, dict) else dataclasses.astuple(target))
    with about(param):
        return Schema(target, strict=strict)


def sampling(asked: fields.SamplingFields, local: LocalModel, *, answers: int = 1, **more: Any) -> dict[str, Any]:
    """Sampling options of `GenerationOptions` from a request.

    What it names none of is None, for which the model's recommendation applies; see `pippin.engine.SamplingOptions`.
    A top-p of 0 leaves the most likely token.

    Args:
        asked: the request.
        local: the model.
        answers: how many answers to one prompt are wanted. Several are sampled, at OpenAI's default of 1, where neither
            the request nor the model names a temperature: greedy ones would all be the same.
        more: options that its fields do not have.
    """
    options: dict[str, Any] = {"temperature": asked.temperature}
    if answers > 1 and asked.temperature is None and "temperature" not in local.engine.recommended_sampling:
        options["temperature"] = 1.0
    if asked.top_p == 0:
        options["top_k"] = 1
    else:
        options["top_p"] = asked.top_p
        every = asked.top_k is not None and asked.top_k < 1
        options["top_k"] = local.model.vocab_size if every else asked.top_k
    options["min_p"] = asked.min_p
    if isinstance(asked, fields.Penalties):
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
            if getattr(asked, name) is not None:
                options[name] = getattr(asked, name)
        if asked.logit_bias:
            options["logit_bias"] = {int(id): bias for id, bias in asked.logit_bias.items()}
        options["stop"] = [asked.stop] if isinstance(asked.stop, str) else asked.stop or ()
    return options | more


def seed(asked: int | None, choice: int) -> int | None:
    """The seed of one of several answers: each has its own, derived from the one of the request."""
    return None if asked is None else (asked + choice) % 2**63


def reasoning(effort: fields.Effort | None, able: bool, param: str, budget: int | None) -> ReasoningLevel | int:
    """The reasoning level of an effort, or the thinking budget of a request.

    Raises:
        InvalidRequest: the model does not reason, or an effort of "none" has a budget.
    """
    level = EFFORTS[effort or "none"]
    if effort == "none" and budget is not None:
        raise InvalidRequest(
            f"max_thinking_tokens is {budget}, and {param} is 'none'; leave one of them out",
            param="max_thinking_tokens",
            code="invalid_value",
        )
    if (level != "off" or budget is not None) and not able:
        param = "max_thinking_tokens" if level == "off" else param
        raise InvalidRequest(
            f"{param}: this model does not reason; leave it out" + (" or say 'none'" if level != "off" else ""),
            param=param,
            code="unsupported_value",
        )
    return level if budget is None else budget


def options(values: dict[str, Any]) -> GenerationOptions:
    """Generation options, with errors that name the field.

    Raises:
        InvalidRequest: a value that passed the request's own ranges but is not allowed.
    """
    try:
        return GenerationOptions(**values)
    except InvalidArgument as error:
        raise InvalidRequest(str(error), param=str(error).split()[0], code="invalid_value") from error


def check_vocabulary(bias: dict[int, float] | None, size: int) -> None:
    """Refuse token ids outside the vocabulary.

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
