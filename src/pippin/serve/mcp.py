"""MCP server: Pippin's text tasks as tools of the Model Context Protocol, `pippin serve --mcp`.

Notable here:
- the tools are the methods of the text kit and the embeddings of a sentence encoder; they return data with a schema
- there are tools and nothing else, so no other capability is advertised; what a client asks that is not there gets the
  code that the protocol has for it
- over HTTP a call uses the same queue, limits and cancellation as any request; over standard input and output there is
  one client
- a client that asks for progress is told the tokens or texts that are done, a few times a second
- a client receives the message of Pippin's own errors; of any other error it learns only that there was one
"""

# Annotations are evaluated here: the MCP library reads them, and it is imported only when it is needed.

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, Field

from pippin.core.errors import InvalidArgument, MissingDependency, PippinError
from pippin.serve import guardrails as guarding
from pippin.serve.mcp_http import Endpoint, RunningCalls
from pippin.serve.task_model import TaskCancellation, TaskModel, TaskProvider
from pippin.session.options import GenerationOptions
from pippin.session.providers.local import LocalModel
from pippin.session.providers.provider import Provider

if TYPE_CHECKING:
    from fastapi import FastAPI
    from mcp.server import Server
    from mcp.server.mcpserver import Context, MCPServer

    from pippin.language.language_model import LanguageModel
    from pippin.serve.service import Service
    from pippin.session.extraction import Extraction
    from pippin.session.guardrails import Guardrails

T = TypeVar("T")
log = logging.getLogger(__name__)

_ENCODER = "all-minilm-l6-v2"
_INSTRUCTIONS = (
    "A small language model on this machine. It is private and costs nothing, but knows little: give it the text that "
    "it is to work on. Prefer classify and extract, whose results are held to what you ask for, to free questions."
)
_MAX_NUM_SEQS = 4
_CANCELLED = -32800  # the code of MCP's libraries, which the protocol leaves open
_PAUSE = 0.2  # seconds between two reports of progress

Advance = Callable[[int], None]
"""Called, from any thread, with the number of tokens or texts that were done since the last call."""


class ExtractedSpan(BaseModel):
    """A part of a text that a value was read from."""

    name: str = Field(description="The value, such as lines[0].price.")
    text: str = Field(description="The part of the text.")
    start: int = Field(description="Offset of its first character.")
    end: int = Field(description="Offset after its last.")
    confidence: float | None = Field(description="The model's probability of this part.")


class Extracted(BaseModel):
    """A value extracted from a text."""

    value: Any = Field(description="A value that fits the schema.")
    spans: list[ExtractedSpan] = Field(description="The part of the text that each value was read from.")


class Classified(BaseModel):
    """The probability of each label."""

    label: str = Field(description="The likeliest label.")
    probabilities: dict[str, float] = Field(description="By label, the likeliest first; they add up to 1.")


class TextVector(BaseModel):
    """Embeddings of texts."""

    model: str = Field(description="The encoder.")
    vectors: list[list[float]] = Field(description="One for each text, of length 1: a dot product is a cosine.")


class Summary(BaseModel):
    """A summary that was checked against its text."""

    text: str
    unverified: list[str] = Field(description="Numbers and names of the summary that the text does not hold.")


class TaskBackend(Protocol):
    """Where the tasks run.

    ``write`` runs work with a model in a thread; ``embed`` returns the encoder's name and embeddings. ``context`` is
    that of the call, from which a server determines the caller.
    """

    guardrails: "Guardrails | None"

    async def write(self, work: Callable[[Provider], T], context: Any, advance: Advance) -> T:
        """Run ``work``; when the call is cancelled, it ends before the model's next token. Tokens are reported."""

    async def embed(self, texts: list[str], context: Any, advance: Advance) -> tuple[str, list[list[float]]]:
        """Embeddings of texts, which are reported."""


def build(
    model: "str | Path | LanguageModel | Provider | TaskBackend" = "smollm2-135m",
    *,
    encoder: Any = _ENCODER,
    guardrails: "Guardrails | None" = None,
) -> "Server":
    """A server with the tools ``ask``, ``extract``, ``classify``, ``embed`` and ``summarize``.

    Args:
        model: a model reference, a loaded model, a provider, or another backend for the tasks.
        encoder: a reference of a sentence encoder, loaded on first use, or a loaded one.
        guardrails: rules for input and output.

    Raises:
        MissingDependency: the extra ``mcp`` is not installed.
        ModelNotFound, DownloadFailed, CheckpointError: the model cannot be loaded.
    """
    return _build(model, encoder, guardrails, RunningCalls())


def _build(model: Any, encoder: Any, guardrails: "Guardrails | None", calls: RunningCalls) -> "Server":
    """`build`, with the calls that clients may cancel."""
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError as error:
        raise MissingDependency("tools over MCP need the mcp package: pip install 'pippin[mcp]'") from error
    backend: Any = (
        model if hasattr(model, "write") and hasattr(model, "embed") else _LocalBackend(model, encoder, guardrails)
    )
    with _unchanged_logging():
        tools = MCPServer("pippin")
    _add_generation_tools(tools, backend)
    _add_scoring_tools(tools, backend)
    return _only_tools(tools, calls)


def _only_tools(tools: "MCPServer", calls: RunningCalls) -> "Server":
    """A server with the tools of another, and without the empty prompts and resources that it would advertise."""
    from mcp.server import Server, ServerRequestContext
    from mcp.server.mcpserver import Context
    from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
    from mcp.shared.exceptions import MCPError
    from mcp_types import (
        INVALID_PARAMS,
        CallToolRequestParams,
        CallToolResult,
        GetPromptRequestParams,
        GetPromptResult,
        InputRequiredResult,
        ListToolsResult,
        PaginatedRequestParams,
        TextContent,
    )

    async def list_tools(context: ServerRequestContext, params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=await tools.list_tools())

    async def call_tool(
        context: ServerRequestContext, params: CallToolRequestParams
    ) -> CallToolResult | InputRequiredResult:
        names = [tool.name for tool in await tools.list_tools()]
        if params.name not in names:
            raise MCPError(INVALID_PARAMS, f"there is no tool {params.name[:100]!r}; there are {', '.join(names)}")
        whole = Context(request_context=context, mcp_server=tools, input_params=params)
        with calls.entered(context.request, context.request_id):
            try:
                return await tools.call_tool(params.name, params.arguments or {}, whole)
            except ToolError as error:
                if isinstance(error, UnexpectedToolError):
                    known = error.__cause__ or error
                    log.error("tool %s failed: %s", params.name, type(known).__name__, exc_info=known)
                return CallToolResult(content=[TextContent(type="text", text=str(error))], is_error=True)
        raise MCPError(_CANCELLED, "the call was cancelled by its client")

    async def get_prompt(context: ServerRequestContext, params: GetPromptRequestParams) -> GetPromptResult:
        raise MCPError(INVALID_PARAMS, f"there is no prompt {params.name[:100]!r}: this server has tools only")

    return Server(
        "pippin",
        title="Pippin",
        instructions=_INSTRUCTIONS,
        version=version("pippin"),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_get_prompt=get_prompt,
    )


def _add_generation_tools(server: "MCPServer", backend: TaskBackend) -> None:
    """Add the tools that generate text."""
    from mcp.server.mcpserver import Context

    from pippin.kits.text import TextTasks
    from pippin.session.session import Session

    @server.tool(title="Ask the model", structured_output=False)
    async def ask(
        context: Context,
        prompt: Annotated[str, Field(description="The question, with all that it is about.", min_length=1)],
        instructions: Annotated[str | None, Field(description="What the model is to be or do.")] = None,
        max_tokens: Annotated[int, Field(description="The longest answer.", ge=1, le=8192)] = 512,
    ) -> str:
        """Ask a small local language model a question and read its answer."""

        def work(provider: Provider) -> str:
            session = Session(provider, instructions=instructions, guardrails=backend.guardrails)
            return session.respond(prompt, options=GenerationOptions(max_tokens=max_tokens)).content

        async with _progress(context, "tokens written") as advance:
            return await backend.write(work, context, advance)

    @server.tool(title="Extract data from a text")
    async def extract(
        context: Context,
        text: Annotated[str, Field(description="The text to read.", min_length=1)],
        schema: Annotated[dict[str, Any], Field(description="JSON Schema of what to find. It is held exactly.")],
        question: Annotated[str, Field(description="What to look for, where the schema does not say it.")] = "",
    ) -> Extracted:
        """Fill in a JSON Schema with parts of a text; the result fits the schema and has nothing else in it."""

        def work(provider: Provider) -> Extracted:
            tasks = TextTasks(provider, guardrails=backend.guardrails)
            found: Extraction[Any] = tasks.extract(text, schema, question=question)
            spans = [
                ExtractedSpan(
                    name=each.name, text=each.text, start=each.start, end=each.end, confidence=each.confidence
                )
                for each in found.spans
            ]
            return Extracted(value=found.content, spans=spans)

        async with _progress(context, "tokens written") as advance:
            return await backend.write(work, context, advance)

    @server.tool(title="Summarize a text")
    async def summarize(
        context: Context,
        text: Annotated[str, Field(description="The text, of any length.", min_length=1)],
        sentences: Annotated[int, Field(description="How many sentences to write.", ge=1, le=50)] = 3,
    ) -> Summary:
        """Summarize a text in a few sentences, and list the statements that the text does not support."""

        def work(provider: Provider) -> Summary:
            found = TextTasks(provider, guardrails=backend.guardrails).summarize(text, length=sentences)
            return Summary(text=found.text, unverified=list(found.unverified))

        async with _progress(context, "tokens written") as advance:
            return await backend.write(work, context, advance)


def _add_scoring_tools(server: "MCPServer", backend: TaskBackend) -> None:
    """Add the tools that score or embed text and generate none."""
    from mcp.server.mcpserver import Context

    from pippin.kits.text import TextTasks

    @server.tool(title="Classify a text")
    async def classify(
        context: Context,
        text: Annotated[str, Field(description="The text to read.", min_length=1)],
        labels: Annotated[list[str], Field(description="The labels to choose from.", min_length=2, max_length=100)],
        about: Annotated[str, Field(description='What the labels say, such as "the mood of the writer".')] = "",
    ) -> Classified:
        """The probability of each label for a text, computed and not sampled."""

        def work(provider: Provider) -> Classified:
            found = TextTasks(provider, guardrails=backend.guardrails).classify(text, labels, about=about)
            return Classified(label=found.label, probabilities=found.probabilities)

        async with _progress(context, "labels scored", len(labels)) as advance:
            result = await backend.write(work, context, lambda tokens: None)
            advance(len(labels))
            return result

    @server.tool(title="Embed texts")
    async def embed(
        context: Context,
        texts: Annotated[list[str], Field(description="The texts, each read by itself.", min_length=1, max_length=256)],
    ) -> TextVector:
        """Embeddings of texts; similar meanings have similar embeddings."""
        async with _progress(context, "texts read", len(texts)) as advance:
            name, vectors = await backend.embed(texts, context, advance)
            return TextVector(model=name, vectors=vectors)


@contextmanager
def _unchanged_logging() -> Iterator[None]:
    """Undo the MCP library's changes to the root logger, which belongs to the program."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextmanager
def _tool_errors() -> Iterator[None]:
    """Pass the messages of Pippin's errors to the client."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        yield
    except PippinError as error:
        raise ToolError(f"{type(error).__name__}: {error}") from error


@asynccontextmanager
async def _progress(context: "Context[Any, Any]", what: str, total: int | None = None) -> AsyncIterator[Advance]:
    """Report to a client that asked for it how much of a call is done, and pass on Pippin's errors.

    Args:
        context: that of the call.
        what: what is counted.
        total: how many there will be; None where nobody knows.
    """
    loop, changed, done, told = asyncio.get_running_loop(), asyncio.Event(), 0, -1

    def add(more: int) -> None:
        nonlocal done
        done += more
        changed.set()

    async def report() -> None:
        nonlocal told
        if done > told:
            told = done
            await context.report_progress(done, total, f"{done} {what}")

    async def watch() -> None:
        while True:
            await report()
            await asyncio.sleep(_PAUSE)
            await changed.wait()
            changed.clear()

    watching = asyncio.create_task(watch())
    try:
        with _tool_errors():
            yield lambda more: _soon(loop, add, more)
        await asyncio.sleep(0)  # what the thread added last is counted
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    await report()


def _soon(loop: asyncio.AbstractEventLoop, add: Advance, more: int) -> None:
    with suppress(RuntimeError):  # of a loop that has ended: nobody is left to be told
        loop.call_soon_threadsafe(add, more)


# --- where the tasks run ----------------------------------------------------------------------------------------------


class _LocalBackend:
    """Runs tasks in this process, for one client."""

    def __init__(self, model: Any, encoder: Any, guardrails: "Guardrails | None") -> None:
        self.guardrails = guardrails
        self._model = model if isinstance(model, Provider) else _batched(model)
        self._encoder = encoder

    async def write(self, work: Callable[[Provider], T], context: Any, advance: Advance) -> T:
        cancellation, inner = TaskCancellation(), self._model
        if isinstance(inner, LocalModel):
            provider: Provider = TaskModel(inner, cancellation, advance)
        else:
            provider = TaskProvider(inner, cancellation, advance)
        return await _in_thread(lambda: work(provider), cancellation.cancel)

    async def embed(self, texts: list[str], context: Any, advance: Advance) -> tuple[str, list[list[float]]]:
        def work() -> tuple[str, list[list[float]]]:
            if isinstance(self._encoder, str | Path):
                from pippin.language.encoder import load_encoder

                self._encoder = load_encoder(self._encoder)
            vectors = self._encoder.embed(texts).tolist()
            advance(len(texts))
            return self._encoder.name, vectors

        return await _in_thread(work, lambda: None)


def _batched(model: "str | Path | LanguageModel") -> LocalModel:
    from pippin.engine.engine import Engine
    from pippin.language.language_model import LanguageModel, load

    loaded = model if isinstance(model, LanguageModel) else load(model)
    return LocalModel(loaded, engine=Engine(loaded, max_num_seqs=_MAX_NUM_SEQS))


async def _in_thread(work: Callable[[], T], cancel: Callable[[], None]) -> T:
    """Run ``work`` in a thread; if the call is cancelled meanwhile, call ``cancel`` and do not wait."""
    try:
        return await asyncio.to_thread(work)
    finally:
        cancel()  # no effect once the work is done


class _ServiceBackend:
    """Runs tasks in a server's queue, for the caller of the request."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        self.guardrails = guarding.guardrails(service.settings.guardrails)

    async def write(self, work: Callable[[Provider], T], context: Any, advance: Advance) -> T:
        return await self._service.task("", work, _caller(context), on_tokens=advance)

    async def embed(self, texts: list[str], context: Any, advance: Advance) -> tuple[str, list[list[float]]]:
        encoders = [model.id for model in self._service.models() if model.kind == "encoder"]
        name = encoders[0] if encoders else _ENCODER
        vectors, _ = await self._service.embed(name, texts, _caller(context), on_texts=advance)
        return name, vectors


def _caller(context: Any) -> Any:
    """The caller of the request, as the server's middleware determined it."""
    caller = getattr(getattr(context.request_context.request, "state", None), "caller", None)
    if caller is None:
        raise InvalidArgument("this call has no caller: it did not pass the server's middleware")
    return caller


# --- ways to serve ----------------------------------------------------------------------------------------------------


def run_stdio(
    model: "str | Path | LanguageModel | Provider" = "smollm2-135m",
    *,
    encoder: Any = _ENCODER,
    guardrails: "Guardrails | None" = None,
) -> None:
    """Serve over standard input and output until the input ends, for a client that starts this program itself.

    Raises:
        As `build`.
    """
    server = build(model, encoder=encoder, guardrails=guardrails)

    async def serve() -> None:
        from mcp.server.stdio import stdio_server

        async with stdio_server() as (read_stream, write_stream):
            await server.run(read_stream, write_stream, server.create_initialization_options())

    asyncio.run(serve())


def install(app: "FastAPI", service: "Service") -> None:
    """Serve the tools at ``/mcp``, over streamable HTTP; see `pippin.serve.mcp_http`.

    Args:
        app: an app of `create_app`, behind the middleware that sets callers; its ``state.lifespans`` run the MCP
            server.
        service: runs the tasks.

    Raises:
        MissingDependency: the extra ``mcp`` is not installed.
    """
    calls = RunningCalls()
    server = _build(_ServiceBackend(service), _ENCODER, None, calls)
    from mcp.server.transport_security import TransportSecuritySettings
    from starlette.routing import Route

    server.streamable_http_app(  # makes the session manager; its one route is the endpoint here
        stateless_http=True,
        max_request_body_size=service.settings.max_body_bytes,
        # hosts and origins are checked by the middleware
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    app.router.routes.append(Route("/mcp", endpoint=Endpoint(server.session_manager.handle_request, calls)))
    app.state.lifespans.append(server.session_manager.run)
