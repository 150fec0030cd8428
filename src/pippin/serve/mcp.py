"""MCP server: Pippin's text tasks as tools of the Model Context Protocol, `pippin serve --mcp`.

Notable here:
- the tools are the methods of the text kit and the embeddings of a sentence encoder; they return data with a schema
- over HTTP a call uses the same queue, limits and cancellation as any request; over standard input and output there is
  one client
- a client receives the message of Pippin's own errors; of any other error it learns only that there was one
"""

# Annotations are evaluated here: the MCP library reads them, and it is imported only when it is needed.

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, Field

from pippin.core.errors import InvalidArgument, MissingDependency, PippinError
from pippin.serve import guardrails as guarding
from pippin.serve.task_model import TaskCancellation, TaskModel, TaskProvider
from pippin.session.options import GenerationOptions
from pippin.session.providers.local import LocalModel
from pippin.session.providers.provider import Provider

if TYPE_CHECKING:
    from fastapi import FastAPI
    from mcp.server.mcpserver import MCPServer

    from pippin.language.language_model import LanguageModel
    from pippin.serve.service import Service
    from pippin.session.guardrails import Guardrails

T = TypeVar("T")

_ENCODER = "all-minilm-l6-v2"
_INSTRUCTIONS = (
    "A small language model on this machine. It is private and costs nothing, but knows little: give it the text that "
    "it is to work on. Prefer classify and extract, whose results are held to what you ask for, to free questions."
)
_MAX_NUM_SEQS = 4


class Extracted(BaseModel):
    """A value extracted from a text."""

    value: Any = Field(description="A value that fits the schema.")


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

    async def write(self, work: Callable[[Provider], T], context: Any) -> T:
        """Run ``work``; when the call is cancelled, it ends before the model's next token."""

    async def embed(self, texts: list[str], context: Any) -> tuple[str, list[list[float]]]:
        """Embeddings of texts."""


def build(
    model: "str | Path | LanguageModel | Provider | TaskBackend" = "smollm2-135m",
    *,
    encoder: Any = _ENCODER,
    guardrails: "Guardrails | None" = None,
) -> "MCPServer":
    """A server with the tools ``ask``, ``extract``, ``classify``, ``embed`` and ``summarize``.

    Args:
        model: a model reference, a loaded model, a provider, or another backend for the tasks.
        encoder: a reference of a sentence encoder, loaded on first use, or a loaded one.
        guardrails: rules for input and output.

    Raises:
        MissingDependency: the extra ``mcp`` is not installed.
        ModelNotFound, DownloadFailed, CheckpointError: the model cannot be loaded.
    """
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError as error:
        raise MissingDependency("tools over MCP need the mcp package: pip install 'pippin[mcp]'") from error
    backend: Any = (
        model if hasattr(model, "write") and hasattr(model, "embed") else _LocalBackend(model, encoder, guardrails)
    )
    with _unchanged_logging():
        server = MCPServer("pippin", title="Pippin", instructions=_INSTRUCTIONS, version=version("pippin"))
    _add_generation_tools(server, backend)
    _add_scoring_tools(server, backend)
    return server


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

        with _tool_errors():
            return await backend.write(work, context)

    @server.tool(title="Extract data from a text")
    async def extract(
        context: Context,
        text: Annotated[str, Field(description="The text to read.", min_length=1)],
        schema: Annotated[dict[str, Any], Field(description="JSON Schema of what to find. It is held exactly.")],
        question: Annotated[str, Field(description="What to look for, where the schema does not say it.")] = "",
    ) -> Extracted:
        """Fill in a JSON Schema from a text; the result always fits the schema."""

        def work(provider: Provider) -> Extracted:
            tasks = TextTasks(provider, guardrails=backend.guardrails)
            return Extracted(value=tasks.extract(text, schema, question=question))

        with _tool_errors():
            return await backend.write(work, context)

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

        with _tool_errors():
            return await backend.write(work, context)


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

        with _tool_errors():
            return await backend.write(work, context)

    @server.tool(title="Embed texts")
    async def embed(
        context: Context,
        texts: Annotated[list[str], Field(description="The texts, each read by itself.", min_length=1, max_length=256)],
    ) -> TextVector:
        """Embeddings of texts; similar meanings have similar embeddings."""
        with _tool_errors():
            name, vectors = await backend.embed(texts, context)
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


# --- where the tasks run ----------------------------------------------------------------------------------------------


class _LocalBackend:
    """Runs tasks in this process, for one client."""

    def __init__(self, model: Any, encoder: Any, guardrails: "Guardrails | None") -> None:
        self.guardrails = guardrails
        self._model = model if isinstance(model, Provider) else _batched(model)
        self._encoder = encoder

    async def write(self, work: Callable[[Provider], T], context: Any) -> T:
        cancellation, inner = TaskCancellation(), self._model
        if isinstance(inner, LocalModel):
            provider: Provider = TaskModel(inner, cancellation)
        else:
            provider = TaskProvider(inner, cancellation)
        return await _in_thread(lambda: work(provider), cancellation.cancel)

    async def embed(self, texts: list[str], context: Any) -> tuple[str, list[list[float]]]:
        def work() -> tuple[str, list[list[float]]]:
            if isinstance(self._encoder, str | Path):
                from pippin.language.encoder import load_encoder

                self._encoder = load_encoder(self._encoder)
            return self._encoder.name, self._encoder.embed(texts).tolist()

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

    async def write(self, work: Callable[[Provider], T], context: Any) -> T:
        return await self._service.task("", work, _caller(context))

    async def embed(self, texts: list[str], context: Any) -> tuple[str, list[list[float]]]:
        encoders = [model.id for model in self._service.models() if model.kind == "encoder"]
        name = encoders[0] if encoders else _ENCODER
        vectors, _ = await self._service.embed(name, texts, _caller(context))
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
    build(model, encoder=encoder, guardrails=guardrails).run("stdio")


def install(app: "FastAPI", service: "Service") -> None:
    """Serve the tools at ``/mcp``, over streamable HTTP, without sessions: any replica answers any call.

    Args:
        app: an app of `create_app`, behind the middleware that sets callers; its ``state.lifespans`` run the MCP
            server.
        service: runs the tasks.

    Raises:
        MissingDependency: the extra ``mcp`` is not installed.
    """
    server = build(_ServiceBackend(service))
    from mcp.server.transport_security import TransportSecuritySettings

    routes = server.streamable_http_app(
        streamable_http_path="/mcp",
        stateless_http=True,
        max_request_body_size=service.settings.max_body_bytes,
        # hosts and origins are checked by the middleware
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    app.router.routes.extend(routes.routes)
    app.state.lifespans.append(server.session_manager.run)
