"""`pippin serve`: models behind OpenAI's HTTP interface, with a page, keys, limits and figures.

Notable here:
- what is wrong with the settings, the models or the address is told before anything is loaded
- the one line on stdout is the address; the log goes to stderr, one line of JSON for each request
"""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli import options, terminal
from pippin.core.catalogue import DEFAULT_MODEL
from pippin.core.errors import InvalidArgument, InvalidInput, MissingDependency, ModelNotFound

if TYPE_CHECKING:
    from pippin.serve.settings import Settings

_ADDRESS, _ACCESS, _LIMITS = "Address", "Who may ask", "Limits of one caller"
_CAPACITY, _PRIVACY, _PARTS = "Capacity", "Privacy and safety", "Parts"
_MACHINE = "Model and machine"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Level(StrEnum):
    """How strict the guardrails are."""

    off = "off"
    permissive = "permissive"
    default = "default"
    strict = "strict"


def _option(panel: str, *flags: str, help: str) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=panel)


Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="What to serve, the default first: catalogue names, folders, .gguf files, hub repositories, each as it is "
        f"or as NAME=REFERENCE. Without any, {DEFAULT_MODEL}.",
        show_default=False,
    ),
]
Host = Annotated[str, _option(_ADDRESS, help="Address to listen on.")]
Port = Annotated[int, _option(_ADDRESS, help="Port; 0 takes a free one.")]
Origins = Annotated[
    list[str] | None, _option(_ADDRESS, "--cors-origin", help="A web origin whose pages may call; repeatable.")
]
KeyFile = Annotated[
    Path | None,
    _option(
        _ACCESS,
        help="File with one NAME:SECRET a line; without it the variable PIPPIN_API_KEYS, else no key is needed.",
    ),
]
OpenToAll = Annotated[bool, _option(_ACCESS, "--open", help="Serve others than this machine without keys.")]
PerCaller = Annotated[int | None, _option(_LIMITS, help="Requests running and waiting at once.")]
RequestsPerMinute = Annotated[int | None, _option(_LIMITS, help="Requests in a minute.")]
TokensPerMinute = Annotated[int | None, _option(_LIMITS, help="Tokens in a minute, read and written.")]
TokensPerDay = Annotated[int | None, _option(_LIMITS, help="Tokens in a day, from midnight UTC.")]
Memory = Annotated[
    str | None,
    _option(_CAPACITY, "--memory", help="Most that all models take, such as 8GB. Default: 70 % of what is free."),
]
Slots = Annotated[int, _option(_CAPACITY, help="Requests that one model answers at once.")]
Queue = Annotated[int, _option(_CAPACITY, help="Requests that may wait; one more is refused.")]
Priorities = Annotated[
    bool, _option(_CAPACITY, "--priorities", help="Let requests ask to go before others (service_tier, priority).")
]
Timeout = Annotated[float, _option(_CAPACITY, "--timeout", help="Seconds for one request.")]
MaxBody = Annotated[str, _option(_CAPACITY, "--max-body", help="Largest request.")]
Drain = Annotated[float, _option(_CAPACITY, "--drain", help="Seconds that running answers get at the end.")]
UseRay = Annotated[bool, _option(_CAPACITY, "--ray", help="Run copies of the server on Ray Serve.")]
Replicas = Annotated[str, _option(_CAPACITY, help="With --ray: how many; 1-4 grows and shrinks with the load.")]
Adapters = Annotated[
    list[str] | None,
    _option(_MACHINE, "--adapter", help="NAME=FOLDER or MODEL:NAME=FOLDER; requests name MODEL:NAME; repeatable."),
]
PromptCache = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Keep what was computed of prompts here when the server stops, one file for each model.",
        rich_help_panel="Speed and memory",
    ),
]
AnyInstalled = Annotated[bool, _option(_MACHINE, "--any-installed", help="Serve every installed model too.")]
Guardrails = Annotated[Level, _option(_PRIVACY, help="Check prompts and answers.")]
Stateless = Annotated[bool, _option(_PRIVACY, "--stateless", help="Keep nothing of a request once it is answered.")]
SealKey = Annotated[
    Path | None, _option(_PRIVACY, help="Key file of `pippin attest`; requests may be sealed to this server.")
]
SealLog = Annotated[Path | None, _option(_PRIVACY, help="Public log that this software stands in.")]
LogPrompts = Annotated[bool, _option(_PRIVACY, "--log-prompts", help="Write prompts and answers into the log.")]
Page = Annotated[bool, _option(_PARTS, help="Serve the web page at /.")]
MCP = Annotated[bool, _option(_PARTS, "--mcp", help="Offer ask, extract, classify and embed as MCP tools at /mcp.")]
Stdio = Annotated[
    bool,
    _option(_PARTS, "--stdio", help="With --mcp: speak to one client over standard input and output, open no port."),
]


def serve(
    context: typer.Context,
    models: Models = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    cors_origins: Origins = None,
    api_key_file: KeyFile = None,
    open_to_all: OpenToAll = False,
    per_caller: PerCaller = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    memory_budget: Memory = None,
    slots: Slots = 8,
    queue: Queue = 64,
    priorities: Priorities = False,
    request_timeout: Timeout = 600.0,
    max_body_bytes: MaxBody = "8MiB",
    drain_timeout: Drain = 30.0,
    ray: UseRay = False,
    replicas: Replicas = "1",
    adapters: Adapters = None,
    any_installed: AnyInstalled = False,
    device: options.Device = None,
    dtype: options.DType = "auto",
    bits: options.Bits = None,
    cache_type: options.CacheType = "auto",
    retention: options.Retention = None,
    threads: options.Threads = None,
    speculate: options.Speculate = None,
    prompt_cache: PromptCache = None,
    guardrails: Guardrails = Level.off,
    stateless: Stateless = False,
    seal_key: SealKey = None,
    seal_log: SealLog = None,
    log_prompts: LogPrompts = False,
    page: Page = True,
    mcp: MCP = False,
    stdio: Stdio = False,
) -> None:
    """Serve models over HTTP, as OpenAI's interface has it.

    Ctrl-C or SIGTERM lets it finish what it answers and sends new requests away; a second one ends it at once.
    """
    from pippin.core.device import use_threads

    settings = _settings(dict(context.params))
    low, high = parse_replicas(replicas)
    if high != 1 and not ray:
        raise InvalidArgument(f"--replicas is {replicas}, and only Ray runs more than one; add --ray")
    if stdio and (ray or not mcp):
        raise InvalidArgument("--stdio is a way to offer MCP tools to one client; add --mcp, leave out --ray")
    use_threads(settings.threads)
    _fetch(settings)
    if stdio:
        _run_stdio(settings)
    elif ray:
        from pippin.serve import ray_app

        ray_app.run(settings, low, high, announce=_announce)
    else:
        _run(settings)


def _settings(given: dict[str, Any]) -> Settings:
    """The settings from the options, which bear their names."""
    try:
        from pippin.serve.settings import Settings
    except ImportError as error:
        raise _missing(error) from error
    for name in ("ray", "replicas", "stdio"):
        del given[name]
    memory, models = given["memory_budget"], given["models"] or (() if given["any_installed"] else (DEFAULT_MODEL,))
    changed = {
        "models": tuple(models),
        "adapters": dict(_pair(text) for text in given["adapters"] or ()),
        "api_keys": _keys(given.pop("api_key_file")),
        "memory_budget": None if memory is None else parse_bytes(memory, "--memory"),
        "max_body_bytes": parse_bytes(given["max_body_bytes"], "--max-body"),
        "guardrails": Level(given["guardrails"]).value,
        "cors_origins": tuple(given["cors_origins"] or ()),
    }
    return Settings(**(given | changed))


def _fetch(settings: Settings) -> None:
    """Make sure that every model is here, fetching what is not: the owner of the server may, its clients may not."""
    from pippin.core import reference

    for name, folder in settings.adapters.items():
        if not Path(folder).is_dir():
            raise ModelNotFound(f"--adapter {name}: there is no folder {folder}")
    guesser = [] if settings.speculate in (None, "ngram", "self") else [settings.speculate]
    for ref in (*settings.references.values(), *guesser):
        reference.resolve(ref)


def _run(settings: Settings) -> None:
    try:
        from pippin.serve import process
        from pippin.serve.app import create_app
    except ImportError as error:
        raise _missing(error) from error
    listener = process.listen(settings)
    try:
        app = create_app(settings)
        listener.listen(process.BACKLOG)  # whoever reads the line may connect at once
        _announce(process.url_of(listener))
        process.run(app, listener, app.state.service)
    finally:
        listener.close()


def _run_stdio(settings: Settings) -> None:
    try:
        from pippin.serve import guarding, loading, mcp
    except ImportError as error:
        raise _missing(error) from error
    with loading.alone(settings) as model:
        mcp.run_stdio(model, guardrails=guarding.guardrails(settings.guardrails))


def _announce(url: str) -> None:
    terminal.write(f"Pippin serves at {url}\n")


def _missing(error: ImportError) -> Exception:
    if isinstance(error, MissingDependency) or (error.name or "").startswith("pippin"):
        return error
    return MissingDependency(f"the server needs {error.name}: pip install 'pippin[serve]'")


def _keys(file: Path | None) -> dict[str, str]:
    from pippin.serve.settings import read_keys

    if file is None:
        given = os.environ.get("PIPPIN_API_KEYS", "")
        return read_keys(given, "PIPPIN_API_KEYS") if given else {}
    try:
        return read_keys(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InvalidInput(f"cannot read the keys in {file}: {reason}") from error


def _pair(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise InvalidArgument(f"--adapter must be NAME=FOLDER, got {text!r}")
    return name, Path(folder).expanduser()


def parse_bytes(text: str, name: str) -> int:
    """A size with a unit.

    Raises:
        InvalidArgument: it is none; ``name`` is that of the option.

    >>> parse_bytes("8GB", "--memory"), parse_bytes("1.5 MiB", "--memory"), parse_bytes("100", "--memory")
    (8000000000, 1572864, 100)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise InvalidArgument(f"{name} must be a size such as 500MB or 8GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_replicas(text: str) -> tuple[int, int]:
    """Fewest and most copies.

    Raises:
        InvalidArgument: not a number from 1 to 1,000, or two with the smaller first.

    >>> parse_replicas("2"), parse_replicas("1-4")
    ((2, 2), (1, 4))
    """
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high <= 1000:
        raise InvalidArgument(f"--replicas must be a number, or two as in 1-4, from 1 to 1,000, got {text!r}")
    return low, high
