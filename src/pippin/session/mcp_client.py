"""MCP client: the tools of any MCP server, as tools of a session.

Notable here:
- the connection runs in a background loop; every wait for the server has a timeout, at startup, in a list, in a call; a
  program that is not ready in time is killed, not asked to end
- a result with structured content is that value, a list a list; any other result is text
- a server may ask its user something only where there is a callback that answers
- a tool's schema is closed (no additional properties) and enforced during decoding; a keyword that only restricts
  values and cannot be enforced is removed and reported, since the server checks its arguments itself
- the error stream of a server is recorded, and quoted when it does not start
"""

from __future__ import annotations

import asyncio
import logging
import re
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeout
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import httpx2
import psutil
from annotated_types import Gt, Lt

from pippin.core.checks import checked
from pippin.core.errors import (
    InvalidArgument,
    MissingDependency,
    SchemaError,
    ToolError,
    ToolServerError,
    UnsupportedGuide,
)
from pippin.session import event_loop
from pippin.session.tools import Tool

if TYPE_CHECKING:
    from mcp.client import Client

log = logging.getLogger(__name__)

# Keywords that only restrict values: without them every valid value stays valid.
# fmt: off
_NARROWING: Final = frozenset({
    "format", "pattern", "uniqueItems", "multipleOf", "minProperties", "maxProperties", "contains", "minContains",
    "maxContains", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "not", "if", "dependentSchemas",
    "dependentRequired",
})
# fmt: on
_MAPS: Final = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_VALUES: Final = ("enum", "const", "default", "examples")
_OPEN: Final = frozenset(["additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref"])
_MOST_PAGES: Final = 100
_SECONDS_TO_END: Final = 10.0  # a server that does not exit is killed after less
_MARK: Final = "PIPPIN_MCP_SERVER"  # a variable of its programs, by which they are found again


@dataclass(frozen=True)
class Elicitation:
    """What a server asks its user while one of its tools runs.

    ``message`` is the question. ``schema`` is the JSON Schema of the answer, an object of plain fields; None where the
    user is asked to open ``url`` instead, after which the server goes on.
    """

    message: str
    schema: dict[str, Any] | None = None
    url: str | None = None


OnElicit = Callable[[Elicitation], Mapping[str, Any] | bool | None]
"""Answers a server's question, in a thread of its own: with the fields (those with a default may be left out), or True
for a URL that was opened; False or None declines."""


class McpServer:
    """A connection to an MCP server, open inside its ``with`` block.

    Created by `stdio` or `http`. Inside the block ``tools`` are its tools; ``instructions`` is its own description;
    ``skipped`` maps the names of tools whose schema cannot be used to the reason; ``loosened`` maps names of tools to
    the keywords that were removed from their schemas.

    >>> with McpServer.stdio("python", ["-m", "a_server"]) as server:                            # doctest: +SKIP
    ...     Session(tools=server.tools).respond("What is in this folder?")
    """

    @checked
    def __init__(
        self,
        name: str,
        transport: Any,
        *,
        timeout: Annotated[float, Gt(0), Lt(1e9)],
        prefix: str,
        on_elicit: OnElicit | None = None,
    ) -> None:
        if not re.fullmatch(r"[\w-]{0,32}", prefix):
            raise InvalidArgument(f"prefix must be at most 32 letters, digits, _ and -, got {prefix!r}")
        self.name, self.timeout, self.prefix = name, timeout, prefix
        self.tools: list[Tool[..., Any]] = []
        self.skipped: dict[str, str] = {}
        self.loosened: dict[str, tuple[str, ...]] = {}
        self.instructions = ""
        self._transport = transport
        self._errors: IO[str] | None = None
        self._client: Client | None = None
        self._life: Future[None] | None = None
        self._stop: asyncio.Event | None = None
        self._over = threading.Event()
        self._on_elicit = on_elicit
        self._asking = 0  # questions that the user has not answered yet
        self._answered = 0.0  # when the last one was answered
        self._mark = uuid.uuid4().hex

    @classmethod
    def stdio(
        cls,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float = 30.0,
        prefix: str = "",
        on_elicit: OnElicit | None = None,
    ) -> McpServer:
        """A server that is a program, started here and connected over its standard input and output.

        Args:
            command: the program.
            args: its arguments.
            env: variables for it, in addition to a few harmless ones (PATH, HOME …); it does not inherit the others.
            cwd: the folder that it runs in.
            timeout: seconds to start and list its tools, and for each call.
            prefix: prefix of its tools' names, to avoid conflicts between two servers.
            on_elicit: answers what the server asks its user while a tool runs; the time that it takes does not count
                against ``timeout``. Without it the server is told that nobody can be asked.

        Raises:
            InvalidArgument: a value outside its range. MissingDependency: (on entering) the extra ``mcp`` is missing.
            ToolServerError: (on entering) it does not start, does not answer in time, or breaks the protocol.
        """
        made = cls(command, None, timeout=timeout, prefix=prefix, on_elicit=on_elicit)

        def transport() -> AbstractAsyncContextManager[Any]:
            from mcp.client.stdio import StdioServerParameters, stdio_client

            found = StdioServerParameters(
                command=command, args=list(args), env={**(env or {}), _MARK: made._mark}, cwd=cwd,
                encoding_error_handler="replace",
            )  # fmt: skip
            made._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed with the server
            return stdio_client(found, errlog=made._errors)

        made._transport = transport
        return made

    @classmethod
    def http(
        cls,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        prefix: str = "",
        on_elicit: OnElicit | None = None,
    ) -> McpServer:
        """A remote server, connected over streamable HTTP.

        Args:
            url: its URL, used as given.
            headers: sent with each request (``Authorization``, for example).
            timeout: seconds to connect and list its tools, and for each call.
            prefix: prefix of its tools' names.
            on_elicit: as for `stdio`.

        Raises:
            As `stdio`.
        """
        try:
            address = httpx2.URL(url)
        except (httpx2.InvalidURL, TypeError) as error:
            raise InvalidArgument(f"url is no address: {error}") from error
        if address.scheme not in ("http", "https") or not address.host or address.userinfo:
            raise InvalidArgument("url must begin with http:// or https:// and a host; a password belongs into headers")

        @asynccontextmanager
        async def transport() -> AsyncIterator[Any]:
            from mcp.client.streamable_http import streamable_http_client

            limits = httpx2.Timeout(timeout, read=None)  # an answer may take long; each call has its own limit
            async with (
                httpx2.AsyncClient(headers=dict(headers or {}), timeout=limits) as client,
                streamable_http_client(url, http_client=client) as streams,
            ):
                yield streams

        return cls(url, transport, timeout=timeout, prefix=prefix, on_elicit=on_elicit)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self.tools)} tools)"

    # --- life cycle ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> McpServer:
        try:
            import mcp.client  # noqa: F401
        except ImportError as error:
            raise MissingDependency("tools of MCP servers need the mcp package: pip install 'pippin[mcp]'") from error
        if self._life is not None:
            raise InvalidArgument(f"{self!r} is in use already")
        ready: Future[None] = Future()
        self._over.clear()
        self._life = event_loop.run_coroutine(self._live(ready))
        try:
            ready.result(self.timeout)
        except FutureTimeout:
            self._kill()
            said = self._end()
            raise ToolServerError(f"{self.name} was not ready within {self.timeout:g} seconds{said}") from None
        except ToolServerError as error:
            raise ToolServerError(f"{error}{self._end()}") from error.__cause__
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, and end the program if one was started. Its tools raise `ToolServerError` from now
        on."""
        self._end()

    def _kill(self) -> None:
        """Kill the program and what it started, where one was started here."""
        if self._errors is None:
            return
        with suppress(psutil.Error):
            for process in psutil.Process().children():
                with suppress(psutil.Error):
                    if process.environ().get(_MARK) == self._mark:
                        for one in (*process.children(recursive=True), process):
                            one.kill()

    def _end(self) -> str:
        """Close; return the end of the program's error stream."""
        life, self._life, self._client = self._life, None, None
        if life is not None:
            stop = self._stop
            if stop is not None:
                event_loop.event_loop().call_soon_threadsafe(stop.set)
            else:
                life.cancel()
            if not self._over.wait(_SECONDS_TO_END):
                life.cancel()
        self._stop = None
        if self._errors is None:
            return ""
        errors, self._errors = self._errors, None
        with errors:
            errors.seek(0)
            said = " ".join(errors.read()[-600:].split())
        return f"; it said: {said}" if said else ""

    async def _live(self, ready: Future[None]) -> None:
        """Connect, list, and wait for the end; entered and left in one task, as the MCP library requires."""
        from mcp.client import Client

        try:
            elicit = None if self._on_elicit is None else self._elicit
            async with Client(self._transport(), cache=None, elicitation_callback=elicit) as client:
                self._client = client
                self.instructions = client.instructions or ""
                self._take(await self._list(client))
                self._stop = asyncio.Event()
                ready.set_result(None)
                await self._stop.wait()
        except Exception as error:
            failure = error if isinstance(error, ToolServerError) else ToolServerError(f"{self.name}: {_reason(error)}")
            failure.__cause__ = None if failure is error else error
            if ready.done():
                log.debug("%s ended with an error: %s", self.name, _reason(error))
            else:
                ready.set_exception(failure)
        finally:
            self._over.set()

    async def _list(self, client: Client) -> list[Any]:
        found: list[Any] = []
        cursor = None
        for _ in range(_MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found
        raise ToolServerError(f"{self.name} lists its tools in more than {_MOST_PAGES} pages")

    def refresh(self) -> list[Tool[..., Any]]:
        """List the tools again; a session takes the new list with ``Session(tools=…)`` or through its profile.

        Raises:
            ToolServerError: the server does not answer.
        """
        client = self._connected()
        self._take(self._wait(event_loop.run_coroutine(self._list(client)), "list its tools"))
        return self.tools

    async def _elicit(self, context: Any, params: Any) -> Any:
        """Ask the user; whatever goes wrong with it declines, since the server waits."""
        from mcp_types import ElicitResult

        assert self._on_elicit is not None
        schema = getattr(params, "requested_schema", None)
        asked = Elicitation(params.message, schema, getattr(params, "url", None))
        self._asking += 1
        try:
            answer = await asyncio.to_thread(self._on_elicit, asked)
        except Exception as error:
            log.warning("%s: on_elicit raised %s; declined", self.name, _reason(error))
            answer = None
        finally:
            self._asking -= 1
            self._answered = time.monotonic()
        if answer is None or answer is False:
            return ElicitResult(action="decline")
        if answer is True:
            return ElicitResult(action="accept", content=None if schema is None else _defaults(schema))
        return ElicitResult(action="accept", content=_defaults(schema or {}) | dict(answer))

    def _connected(self) -> Client:
        if self._client is None:
            raise ToolServerError(f"{self.name} is closed; use its tools inside its with block")
        return self._client

    # --- tools --------------------------------------------------------------------------------------------------------

    def _take(self, listed: list[Any]) -> None:
        """Create tools from the server's list."""
        tools: dict[str, Tool[..., Any]] = {}
        skipped: dict[str, str] = {}
        loosened: dict[str, tuple[str, ...]] = {}
        for each in listed:
            name = self._name(each.name, tools)
            try:
                tools[name], taken_out = self._tool(name, each)
            except SchemaError as error:
                skipped[each.name] = str(error)
                log.warning("%s: tool %r is left out: %s", self.name, each.name, error)
            else:
                loosened.update({name: taken_out} if taken_out else {})
        self.tools, self.skipped, self.loosened = list(tools.values()), skipped, loosened

    def _name(self, name: str, taken: Mapping[str, object]) -> str:
        """A name that a model can call and that no other tool has."""
        legal = (self.prefix + re.sub(r"[^\w-]+", "_", name, flags=re.ASCII))[:64] or "tool"
        number = 2
        found = legal
        while found in taken:
            found = f"{legal[:60]}_{number}"
            number += 1
        return found

    def _tool(self, name: str, listed: Any) -> tuple[Tool[..., Any], tuple[str, ...]]:
        def call(**arguments: Any) -> Any:
            return self._call(listed, arguments)

        schema = closed(listed.input_schema)
        taken_out: list[str] = []
        while True:
            try:
                description = " ".join((listed.description or listed.title or "").split())
                return Tool.from_schema(name, description, schema, call), tuple(taken_out)
            except UnsupportedGuide as error:
                less = without(schema, error.guide) if error.guide in _NARROWING else schema
                if less == schema:
                    raise
                schema = less
                taken_out.append(error.guide)

    def _call(self, listed: Any, arguments: dict[str, Any]) -> Any:
        client, name = self._connected(), listed.name
        result = self._wait(event_loop.run_coroutine(client.call_tool(name, arguments)), f"answer the call of {name!r}")
        if result.is_error:
            raise ToolError(_text(result) or "the server says that it failed, not why")
        return _text(result) if result.structured_content is None else _value(listed, result.structured_content)

    def _wait(self, future: Future[Any], what: str) -> Any:
        """The result of a request; the timeout begins anew when the user has answered a question of the server."""
        began = time.monotonic()
        try:
            while True:
                left = max(began, self._answered) + self.timeout - time.monotonic()
                try:
                    return future.result(self.timeout if self._asking else max(0.0, left))
                except FutureTimeout:
                    late = max(began, self._answered) + self.timeout <= time.monotonic()
                    if future.done() or (late and not self._asking):
                        raise
        except FutureTimeout:
            future.cancel()
            raise ToolServerError(f"{self.name} did not {what} within {self.timeout:g} seconds") from None
        except Exception as error:
            raise ToolServerError(f"{self.name} did not {what}: {_reason(error)}") from error


def closed(schema: Any) -> Any:
    """The schema with ``additionalProperties: false`` on its objects.

    >>> closed({"type": "object", "properties": {"a": {"type": "string"}}})
    {'type': 'object', 'properties': {'a': {'type': 'string'}}, 'additionalProperties': False}
    """
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: {name: closed(item) for name, item in value.items()}
        if key in _MAPS and isinstance(value, dict)
        else value
        if key in _VALUES
        else closed(value)
        for key, value in schema.items()
    }
    named = set(schema.get("required", [])) <= set(schema.get("properties", {}))
    if schema.get("type") == "object" and named and not _OPEN & set(schema):
        found["additionalProperties"] = False
    return found


def without(schema: Any, keyword: str) -> Any:
    """The schema without a keyword; properties of that name stay, and negations and conditions do not change.

    >>> without({"properties": {"format": {"type": "string", "format": "iri"}}}, "format")
    {'properties': {'format': {'type': 'string'}}}
    """
    if isinstance(schema, list):
        return [without(item, keyword) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            found[key] = {name: without(item, keyword) for name, item in value.items()}
        elif key != keyword:
            found[key] = value if key in (*_VALUES, "not", "if") else without(value, keyword)
    return found


def _value(listed: Any, content: Any) -> Any:
    """The structured content of a result; what had to be put into an object to be sent is taken out of it.

    MCP's library for Python sends a result that is no object as its only field "result", under a schema with the title
    "NAMEOutput".
    """
    schema = listed.output_schema or {}
    wrapped = schema.get("title") == f"{listed.name}Output" and set(schema.get("properties", ())) == {"result"}
    return content["result"] if wrapped and isinstance(content, dict) and set(content) == {"result"} else content


def _defaults(schema: Mapping[str, Any]) -> dict[str, Any]:
    """
    >>> _defaults({"properties": {"name": {"default": "Ann"}, "age": {"type": "integer"}}})
    {'name': 'Ann'}
    """
    fields = schema.get("properties", {})
    return {name: field["default"] for name, field in fields.items() if "default" in field}


def _text(result: Any) -> str:
    """The text of a tool's result; other content is only named."""
    return "\n\n".join(part for part in map(_block, result.content) if part)


def _block(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type in ("image", "audio"):
        return f"[{block.type} of type {block.mime_type}, which cannot be shown here]"
    if block.type == "resource_link":
        return f"[{block.name}: {block.uri}]"
    resource = getattr(block, "resource", None)
    text = getattr(resource, "text", None)
    return str(text) if text is not None else f"[{getattr(resource, 'uri', block.type)}, which cannot be shown here]"


def _reason(error: BaseException) -> str:
    """The message of the first cause in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
