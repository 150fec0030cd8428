"""`pippin serve`: models behind OpenAI's HTTP API, with a web page, keys, limits and metrics.

Notable here:
- errors in the settings, the models or the address are raised before anything is loaded
- stdout gets one line, the address; stderr gets the log, one line of JSON for each request
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
    bool, typer.Option("--ray", help="Run replicas of the server on Ray Serve.", rich_help_panel="Capacity")
]
Replicas = Annotated[
    str,
    typer.Option(help="With --ray: number of replicas; 1-4 scales with the load.", rich_help_panel="Capacity"),
]
Stdio = Annotated[
    bool,
    typer.Option(
        "--stdio",
        help="With --mcp: serve one client over standard input and output, without a port.",
        rich_help_panel="Parts",
    ),
]


@with_options
def serve(settings: ServerSettings, ray: UseRay = False, replicas: Replicas = "1", stdio: Stdio = False) -> None:
    """Serve models over HTTP with OpenAI's API.

    Ctrl-C or SIGTERM finishes running requests and refuses new ones; a second one stops at once.
    """
    from pippin.core.device import is_distributed
    from pippin.core.threads import use_threads

    low, high = parse_replicas(replicas)
    if high != 1 and not ray:
        raise InvalidArgument(f"--replicas is {replicas}, which needs --ray")
    if stdio and (ray or not settings.mcp):
        raise InvalidArgument("--stdio serves MCP tools to one client; use it with --mcp and without --ray")
    use_threads(settings.threads)
    _fetch(settings)
    if stdio:
        _run_stdio(settings)
    elif ray:
        from pippin.serve import ray_app

        ray_app.run(settings, low, high, announce=_announce)
    elif is_distributed():
        _run_together(settings)
    else:
        _run(settings)


def _run_together(settings: ServerSettings) -> None:
    """Serve a model that the processes of torchrun compute together."""
    from pippin.serve import model_loading, processes

    processes.check(settings)
    with processes.joined() as rank:
        if rank == 0:
            _run(settings)
        else:
            processes.follow_server(lambda: model_loading.read_model(settings, settings.references[settings.default]))


def _fetch(settings: ServerSettings) -> None:
    """Download models that are not installed: the owner of the server may, its clients may not."""
    from pippin.core.store import reference

    for name, folder in settings.adapters.items():
        if not Path(folder).is_dir():
            raise ModelNotFound(f"--adapter {name}: there is no folder {folder}")
    draft = [] if settings.speculate in (None, "ngram", "self") else [settings.speculate]
    for ref in (*settings.references.values(), *draft):
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
        listener.listen(uvicorn_server.BACKLOG)  # clients may connect as soon as the address is printed
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
    """Parse the smallest and largest number of replicas.

    Raises:
        InvalidArgument: neither a number from 1 to 1,000 nor a range of them.

    >>> parse_replicas("2"), parse_replicas("1-4")
    ((2, 2), (1, 4))
    """
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high <= 1000:
        raise InvalidArgument(f"--replicas must be a number or a range such as 1-4, from 1 to 1,000, got {text!r}")
    return low, high
