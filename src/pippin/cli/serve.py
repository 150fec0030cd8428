"""`pippin serve`: models behind OpenAI's HTTP interface, with a page, keys, limits and figures.

Notable here:
- what is wrong with the settings, the models or the address is told before anything is loaded
- the one line on stdout is the address; the log goes to stderr, one line of JSON for each request
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from pippin.cli.common import terminal
from pippin.cli.common.declared_options import with_options
from pippin.core.errors import InvalidArgument, MissingDependency, ModelNotFound
from pippin.serve.settings import ServerSettings

UseRay = Annotated[
    bool, typer.Option("--ray", help="Run copies of the server on Ray Serve.", rich_help_panel="Capacity")
]
Replicas = Annotated[
    str,
    typer.Option(help="With --ray: how many; 1-4 grows and shrinks with the load.", rich_help_panel="Capacity"),
]
Stdio = Annotated[
    bool,
    typer.Option(
        "--stdio",
        help="With --mcp: speak to one client over standard input and output, open no port.",
        rich_help_panel="Parts",
    ),
]


@with_options
def serve(settings: ServerSettings, ray: UseRay = False, replicas: Replicas = "1", stdio: Stdio = False) -> None:
    """Serve models over HTTP, as OpenAI's interface has it.

    Ctrl-C or SIGTERM lets it finish what it answers and sends new requests away; a second one ends it at once.
    """
    from pippin.core.threads import use_threads

    low, high = parse_replicas(replicas)
    if high != 1 and not ray:
        raise InvalidArgument(f"--replicas is {replicas}, and only Ray runs more than one; add --ray")
    if stdio and (ray or not settings.mcp):
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


def _fetch(settings: ServerSettings) -> None:
    """Make sure that every model is here, fetching what is not: the owner of the server may, its clients may not."""
    from pippin.core.store import reference

    for name, folder in settings.adapters.items():
        if not Path(folder).is_dir():
            raise ModelNotFound(f"--adapter {name}: there is no folder {folder}")
    guesser = [] if settings.speculate in (None, "ngram", "self") else [settings.speculate]
    for ref in (*settings.references.values(), *guesser):
        reference.resolve(ref)


def _run(settings: ServerSettings) -> None:
    try:
        from pippin.serve import uvicorn_server
        from pippin.serve.app import create_app
    except ImportError as error:
        raise _missing(error) from error
    listener = uvicorn_server.listen(settings)
    try:
        app = create_app(settings)
        listener.listen(uvicorn_server.BACKLOG)  # whoever reads the line may connect at once
        _announce(uvicorn_server.url_of(listener))
        uvicorn_server.run(app, listener, app.state.service)
    finally:
        listener.close()


def _run_stdio(settings: ServerSettings) -> None:
    try:
        from pippin.serve import guardrails as guarding, mcp, model_loading
    except ImportError as error:
        raise _missing(error) from error
    with model_loading.alone(settings) as model:
        mcp.run_stdio(model, guardrails=guarding.guardrails(settings.guardrails))


def _announce(url: str) -> None:
    terminal.write(f"Pippin serves at {url}\n")


def _missing(error: ImportError) -> Exception:
    if isinstance(error, MissingDependency) or (error.name or "").startswith("pippin"):
        return error
    return MissingDependency(f"the server needs {error.name}: pip install 'pippin[serve]'")


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
