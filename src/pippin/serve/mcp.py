"""Pippin's own tasks as tools for other programs, over the Model Context Protocol: `pippin serve --mcp`.

Notable here:
- the tools are the text kit's methods and a sentence encoder's vectors; what they return is data with a schema
- over HTTP a call waits in the same queue, counts against the same limits and ends with the same client as any request;
  over standard input and output there is one client and the machine is its own
- an error of Pippin's is told in its own words; of any other the client learns only that there was one
"""

# Annotations are evaluated here: the protocol's library reads them, and it is imported only when it is needed.

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, Field

from pippin.core.errors import InvalidArgument, MissingDependency, PippinError
from pippin.serve import guarding
from pippin.serve.task_model import Leash, TaskModel, TaskProvider
from pippin.session.local import LocalModel
from pippin.session.options import GenerationOptions
from pippin.session.provider import Provider

if TYPE_CHECKING:
    from fastapi import FastAPI
    from mcp.server.mcpserver import MCPServer

    from pippin.language.load import LanguageModel
    from pippin.serve.service import Service
    from pippin.session.guardrails import Guardrails

T = TypeVar("T")

_ENCODER = "all-minilm-l6-v2"
_INSTRUCTIONS = (
    "A small language model on this machine. It is private and costs nothing, but knows little: give it the text that "
    "it is to work on. Prefer classify and extract, whose results are held to what you ask for, to free questions."
)
_AT_ONCE = 4


class Extracted(BaseModel):
    """What was found in a text."""

    value: Any = Field(description="A value that fits the schema.")


class Classified(BaseModel):
    """How probable each label is."""

    label: str = Field(description="The likeliest label.")
    probabilities: dict[str, float] = Field(description="By label, the likeliest first; they add up to 1.")


class Embedded(BaseModel):
    """Vectors of texts."""

    model: str = Field(description="The encoder.")
    vectors: list[list[float]] = Field(description="One for each text, of length 1: a dot product is a cosine.")


class Summary(BaseModel):
    """A summary that was compared with its text."""

    text: str
    unverified: list[str] = Field(description="Numbers and names of the summary that the text does not hold.")


class Backend(Protocol):
    """Where the tasks run.

    ``write`` runs work with a model in a thread; ``embed`` gives the encoder's name and vectors. ``context`` is the
    call's, from which a server knows its caller.
    """

    guardrails: "Guardrails | None"

    async def write(self, work: Callable[[Provider], T], context: Any) -> T:
        """Run it; when the call is cancelled, it ends before the model's next token."""

    async def embed(self, texts: list[str], context: Any) -> tuple[str, list[list[float]]]:
        """Vectors of texts."""


def build(
    model: "str | Path | LanguageModel | Provider | Backend" = "smollm2-135m",
    *,
    encoder: Any = _ENCODER,
    guardrails: "Guardrails | None" = None,
) -> "MCPServer":
    """A server with the tools ``ask``, ``extract``, ``classify``, ``embed`` and ``summarize``.

    Args:
        model: a model reference, a loaded model, a provider, or where else the tasks are to run.
        encoder: a reference of a sentence encoder, loaded when it is first asked for, or a loaded one.
        guardrails: rules for what goes in and comes out.

    Raises:
        MissingDependency: the extra ``mcp`` is not installed.
        ModelNotFound, DownloadFailed, CheckpointError: the model cannot be had.
    """
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError as error:
        raise MissingDependency("tools over MCP need the mcp package: pip install 'pippin[mcp]'") from error
    backend: Any = model if hasattr(model, "write") and hasattr(model, "embed") else _Here(model, encoder, guardrails)
    with _logging_left_alone():
        server = MCPServer("pippin", title="Pippin", instructions=_INSTRUCTIONS, version=version("pippin"))
    _add_writing(server, backend)
    _add_reading(server, backend)
    return server


def _add_writing(server: "MCPServer", backend: Backend) -> None:
    """The tools whose model writes."""
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

        with _told():
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

        with _told():
            return await backend.write(work, context)

    @server.tool(title="Summarise a text")
    async def summarize(
        context: Context,
        text: Annotated[str, Field(description="The text, of any length.", min_length=1)],
        sentences: Annotated[int, Field(description="How many sentences to write.", ge=1, le=50)] = 3,
    ) -> Summary:
        """Summarise a text in a few sentences, and list what in them the text does not bear out."""

        def work(provider: Provider) -> Summary:
            found = TextTasks(provider, guardrails=backend.guardrails).summarize(text, length=sentences)
            return Summary(text=found.text, unverified=list(found.unverified))

        with _told():
            return await backend.write(work, context)


def _add_reading(server: "MCPServer", backend: Backend) -> None:
    """The tools whose model only reads."""
    from mcp.server.mcpserver import Context

    from pippin.kits.text import TextTasks

    @server.tool(title="Classify a text")
    async def classify(
        context: Context,
        text: Annotated[str, Field(description="The text to read.", min_length=1)],
        labels: Annotated[list[str], Field(description="The labels to choose from.", min_length=2, max_length=100)],
        about: Annotated[str, Field(description='What the labels say, such as "the mood of the writer".')] = "",
    ) -> Classified:
        """How probable each of some labels is for a text, computed and not sampled."""

        def work(provider: Provider) -> Classified:
            found = TextTasks(provider, guardrails=backend.guardrails).classify(text, labels, about=about)
            return Classified(label=found.label, probabilities=found.probabilities)

        with _told():
            return await backend.write(work, context)

    @server.tool(title="Embed texts")
    async def embed(
        context: Context,
        texts: Annotated[list[str], Field(description="The texts, each read by itself.", min_length=1, max_length=256)],
    ) -> Embedded:
        """Vectors of texts, near each other where the texts mean alike."""
        with _told():
            name, vectors = await backend.embed(texts, context)
            return Embedded(model=name, vectors=vectors)


@contextmanager
def _logging_left_alone() -> Iterator[None]:
    """Undo what the protocol's library does to the root logger: how a program logs is its own affair."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextmanager
def _told() -> Iterator[None]:
    """Tell a client of Pippin's errors in their own words."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        yield
    except PippinError as error:
        raise ToolError(f"{type(error).__name__}: {error}") from error


# --- where the tasks run ----------------------------------------------------------------------------------------------


class _Here:
    """In this process, for one client."""

    def __init__(self, model: Any, encoder: Any, guardrails: "Guardrails | None") -> None:
        self.guardrails = guardrails
        self._model = model if isinstance(model, Provider) else _batched(model)
        self._encoder = encoder

    async def write(self, work: Callable[[Provider], T], context: Any) -> T:
        leash, inner = Leash(), self._model
        made = TaskModel(inner, leash) if isinstance(inner, LocalModel) else TaskProvider(inner, leash)
        return await _in_thread(lambda: work(made), leash.pull)

    async def embed(self, texts: list[str], context: Any) -> tuple[str, list[list[float]]]:
        def work() -> tuple[str, list[list[float]]]:
            if isinstance(self._encoder, str | Path):
                from pippin.language.encoder import load_encoder

                self._encoder = load_encoder(self._encoder)
            return self._encoder.name, self._encoder.embed(texts).tolist()

        return await _in_thread(work, lambda: None)


def _batched(model: "str | Path | LanguageModel") -> LocalModel:
    from pippin.engine.engine import Engine
    from pippin.language.load import LanguageModel, load

    loaded = model if isinstance(model, LanguageModel) else load(model)
    return LocalModel(loaded, engine=Engine(loaded, slots=_AT_ONCE))


async def _in_thread(work: Callable[[], T], give_up: Callable[[], None]) -> T:
    """Run it in a thread; if the call is cancelled meanwhile, say so to the work and do not wait for it."""
    try:
        return await asyncio.to_thread(work)
    finally:
        give_up()  # no harm once the work is done


class _Served:
    """In a server's queue, for the caller of the request."""

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
    """Who sent the request, as the door of the server knows."""
    caller = getattr(getattr(context.request_context.request, "state", None), "caller", None)
    if caller is None:
        raise InvalidArgument("this call came past the door of the server, which tells who asks")
    return caller


# --- ways to serve ----------------------------------------------------------------------------------------------------


def run_stdio(
    model: "str | Path | LanguageModel | Provider" = "smollm2-135m",
    *,
    encoder: Any = _ENCODER,
    guardrails: "Guardrails | None" = None,
) -> None:
    """Serve over standard input and output until the input ends; for a client that starts this program itself.

    Raises:
        As `build`.
    """
    build(model, encoder=encoder, guardrails=guardrails).run("stdio")


def install(app: "FastAPI", service: "Service") -> None:
    """Offer the tools of a server at ``/mcp``, over streamable HTTP, without sessions: any replica answers any call.

    Args:
        app: as `create_app` makes it, behind the door that knows callers; its ``state.lifespans`` run what is needed.
        service: runs the tasks.

    Raises:
        MissingDependency: the extra ``mcp`` is not installed.
    """
    server = build(_Served(service))
    from mcp.server.transport_security import TransportSecuritySettings

    made = server.streamable_http_app(
        streamable_http_path="/mcp",
        stateless_http=True,
        max_request_body_size=service.settings.max_body_bytes,
        # hosts and origins are checked at the door
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    app.router.routes.extend(made.routes)
    app.state.lifespans.append(server.session_manager.run)
