"""Tools: functions that the model may call, declared by their signature.

Notable here:
- the arguments are decoded under the grammar of the signature, so a call is always valid
- a tool that raises, hangs or returns an unserializable value is a `ToolCallError` that carries the cause
- a tool from elsewhere (an MCP server) has a JSON Schema and is called in the same way
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from pippin.core.errors import (
    Cancelled,
    InvalidAnswer,
    InvalidInput,
    InvalidTool,
    SchemaError,
    ToolCallError,
    UnsupportedGuide,
)
from pippin.session.types.schema import Schema

P = ParamSpec("P")
R = TypeVar("R")

_LOOK = 0.02  # seconds between two checks for cancellation
_NAME = re.compile(r"[\w-]{1,64}")


class ToolDefinition:
    """What a model needs to call a tool: a name, a description and a schema of the arguments.

    Args:
        name: letters, digits, ``_`` and ``-``, at most 64.
        description: what the tool does and when to use it.
        schema: schema of the arguments, an object.

    Raises:
        InvalidTool: an invalid name.
    """

    def __init__(self, name: str, description: str, schema: Schema[Any]) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidTool(f"{name!r} is not a name that a model can call; use at most 64 letters, digits, _ and -")
        self.name, self.description, self.schema = name, description, schema

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def definition(self) -> dict[str, Any]:
        """The tool in the format of chat templates and OpenAI's API."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.schema.json_schema},
        }


class Tool(ToolDefinition, Generic[P, R]):
    """A function with a name, a description and a schema of its arguments; still callable as the function.

    Args:
        function: plain or ``async``; every argument has a type, and may have a description in
            ``Annotated[str, Field(description=…)]``.
        name: by default the function's.
        description: by default the first paragraph of its docstring.

    Raises:
        InvalidTool: an argument without a type, a positional-only argument, or an invalid name.
        UnsupportedGuide: a constraint of an argument that the grammar cannot enforce.
    """

    def __init__(self, function: Callable[P, R], *, name: str | None = None, description: str | None = None) -> None:
        name = name or str(getattr(function, "__name__", ""))
        document = inspect.getdoc(function) or ""
        self.function = function
        self.arguments: type[BaseModel] | None = _arguments(function, name)
        super().__init__(
            name,
            description if description is not None else " ".join(document.split("\n\n")[0].split()),
            _schema(self.arguments, name),
        )
        self.__doc__ = document

    @classmethod
    def from_schema(
        cls, name: str, description: str, schema: dict[str, Any], function: Callable[..., R], *, strict: bool = False
    ) -> Tool[..., R]:
        """A tool whose arguments a JSON Schema describes; ``function`` gets them by name, as JSON values.

        Args:
            name, description, schema, function: of the tool.
            strict: refuse what of the schema would be ignored with a note; see `Schema`.

        Raises:
            InvalidTool, SchemaError: an invalid name or schema.
        """
        made: Tool[..., R] = cls.__new__(cls)
        made.function, made.arguments = function, None
        ToolDefinition.__init__(made, name, description, _schema(schema, name, strict=strict))
        return made

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself."""
        return self.function(*args, **kwargs)

    def call(
        self, arguments: dict[str, Any], *, timeout: float | None = None, cancel: threading.Event | None = None
    ) -> str:
        """Validate the arguments, run the function, and return its result as text.

        Args:
            arguments: by name, as JSON values.
            timeout: seconds to wait; None waits forever. A function that exceeds it continues in its own thread, since
                Python cannot stop it.
            cancel: once set, the call does not wait any more; the function continues as above.

        Raises:
            Cancelled: ``cancel`` was set.
            ToolCallError: invalid arguments, an exception of the function, a timeout, or a result without JSON form.
        """
        result = self._run(self._values(arguments), timeout, arguments, cancel)
        if isinstance(result, str):
            return result
        try:
            return TypeAdapter(Any).dump_json(result).decode()
        except Exception as error:
            kind = type(result).__name__
            raise self._error(
                f"returned a {kind}, which has no JSON form; return text or plain data", arguments, error
            ) from error

    def _values(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as Python values."""
        try:
            if self.arguments is None:
                self.schema.parse(json.dumps(arguments, ensure_ascii=False))
                return arguments
            given = self.arguments.model_validate(arguments)
        except ValidationError as error:
            raise self._error(f"got arguments that do not fit: {_first(error)}", arguments, error) from error
        except (InvalidInput, InvalidAnswer) as error:
            raise self._error(f"got arguments that do not fit: {error}", arguments, error) from error
        return {name: getattr(given, name) for name in type(given).model_fields}

    def _run(
        self,
        values: dict[str, Any],
        timeout: float | None,
        arguments: dict[str, Any],
        cancel: threading.Event | None,
    ) -> Any:
        outcome: list[Any] = []
        failure: list[BaseException] = []

        def work() -> None:
            try:
                result: Any = self.function(**values)  # type: ignore[call-arg]
                outcome.append(asyncio.run(_wait(result)) if inspect.isawaitable(result) else result)
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=work, name=f"tool {self.name}", daemon=True)
        thread.start()
        end = None if timeout is None else time.monotonic() + timeout
        while thread.is_alive() and cancel is not None and (end is None or time.monotonic() < end):
            if cancel.is_set():
                raise Cancelled(f"nobody waits any more for tool {self.name!r}")
            thread.join(_LOOK if end is None else min(_LOOK, max(0.0, end - time.monotonic())))
        thread.join(None if end is None else max(0.0, end - time.monotonic()))
        if thread.is_alive():
            late = TimeoutError(f"no result within {timeout:g} seconds")
            raise self._error(
                f"gave no result within {timeout:g} seconds; make it quicker or raise tool_timeout", arguments, late
            )
        if failure:
            error = failure[0]
            raise self._error(f"raised {type(error).__name__}: {error}", arguments, error) from error
        return outcome[0]

    def _error(self, what: str, arguments: dict[str, Any], cause: BaseException) -> ToolCallError:
        return ToolCallError(f"tool {self.name!r} {what}", tool=self.name, cause=cause, arguments=arguments)


async def _wait(result: Any) -> Any:
    return await result


def tool(function: Callable[P, R]) -> Tool[P, R]:
    """Make a typed function a tool: ``@pippin.tool``.

    >>> @tool
    ... def add(a: int, b: int = 1) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> add(2), add.call({"a": 2, "b": 3}), add.description
    (3, '5', 'Add two numbers.')
    """
    return Tool(function)


def as_tools(tools: Sequence[Tool[..., Any] | Callable[..., Any]]) -> dict[str, Tool[..., Any]]:
    """Tools by name; plain functions are converted to tools.

    Raises:
        InvalidTool: two tools with one name, or a function that cannot become one.
    """
    named: dict[str, Tool[..., Any]] = {}
    for item in tools:
        made = item if isinstance(item, Tool) else Tool(item)
        if made.name in named:
            raise InvalidTool(f"two tools are named {made.name!r}; give one another name: Tool(function, name=…)")
        named[made.name] = made
    return named


def _schema(arguments: Any, name: str, *, strict: bool = False) -> Schema[Any]:
    try:
        return Schema(arguments, strict=strict)
    except UnsupportedGuide as error:
        raise UnsupportedGuide(f"tool {name!r}: {error}", field=error.field, guide=error.guide) from error
    except SchemaError as error:
        raise type(error)(f"tool {name!r}: {error}") from error


def _arguments(function: Callable[..., Any], name: str) -> type[BaseModel]:
    """A Pydantic model of a function's arguments."""
    try:
        hints = get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
    except (NameError, TypeError, ValueError) as error:
        raise InvalidTool(f"tool {name!r}: its signature cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidTool(
                f"tool {name!r}: argument {parameter} cannot be given by name; models name every argument"
            )
        if parameter.name not in hints:
            raise InvalidTool(
                f"tool {name!r}: argument {parameter.name!r} has no type; write {parameter.name}: str, say"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        if isinstance(default, FieldInfo):
            raise InvalidTool(
                f"tool {name!r}: put the Field of {parameter.name!r} into Annotated[…], not into its default"
            )
        fields[parameter.name] = (hints[parameter.name], default)
    return create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)


def _first(error: ValidationError) -> str:
    details = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, details['loc'])) or 'the arguments'}: {details['msg']}"
