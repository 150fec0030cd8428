"""Terminal output: answers to stdout; errors, notes and figures to stderr.

Notable here:
- control characters of an answer never reach a terminal, since escape sequences could rewrite its content
- color and live output are for terminals only; a pipe gets plain text, complete values, and no figures
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO

import typer

from pippin.core.errors import Cancelled, PippinError

if TYPE_CHECKING:
    from pippin.session.response import Response, ResponseStream

# C0 without tab and newline, DEL and C1: terminals act on these.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def error(message: str) -> None:
    """Print `error: MESSAGE` as one line on stderr."""
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {one_line(message)}", err=True)


def note(message: str) -> None:
    """Print a dim line on stderr."""
    typer.echo(typer.style(one_line(message), dim=True), err=True)


def one_line(text: str) -> str:
    """Replace line breaks and control characters by spaces.

    >>> one_line("two\\nlines \\x1b[31m")
    'two lines [31m'
    """
    return " ".join(_CONTROL.sub(" ", text).split())


def plain(text: str) -> str:
    r"""Remove control characters except line ends and tabs.

    >>> plain("a\x1b[31mb\n")
    'a[31mb\n'
    """
    return _CONTROL.sub("", text)


def watched(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal."""
    return stream is not None and stream.isatty()


def write(text: str) -> None:
    """Write text to stdout and flush."""
    sys.stdout.write(_CONTROL.sub("", text) if watched(sys.stdout) else text)
    sys.stdout.flush()


def show_text(stream: ResponseStream[Any]) -> Response[Any]:
    """Print a streamed answer with a final newline, also where an error ends it; `Cancelled` is left to the caller."""
    written = False
    try:
        for snapshot in stream:
            write(snapshot.delta)
            written = written or bool(snapshot.delta)
    except PippinError as error:
        if written and not isinstance(error, Cancelled):  # the error gets a line of its own
            write("\n")
        raise
    write("\n")
    return stream.response


def show_value(stream: ResponseStream[Any]) -> Response[Any]:
    """Show partial values of a typed answer on the terminal, then print the complete value."""
    from rich.console import Console
    from rich.json import JSON
    from rich.live import Live

    def render(value: Any) -> JSON:
        return JSON(_CONTROL.sub("", to_json(value)))

    console = Console()
    with Live(console=console, transient=True, refresh_per_second=12) as live:
        for snapshot in stream:
            live.update(render(snapshot.content))
    console.print(render(stream.response.content), soft_wrap=True)
    return stream.response


def to_json(value: Any) -> str:
    """A value as indented JSON, without escaping non-ASCII letters.

    >>> print(to_json({"café": [1, None]}))
    {
      "café": [
        1,
        null
      ]
    }
    """
    from pydantic_core import to_jsonable_python

    return json.dumps(to_jsonable_python(value), indent=2, ensure_ascii=False)


def figures(response: Response[Any]) -> str:
    """Tokens per second of an answer and the time to its first token, in one line."""
    usage, timing = response.usage, response.timing
    rate = usage.output_tokens / timing.answer_seconds if timing.answer_seconds > 0 else float("nan")
    return f"{usage.output_tokens} tokens, {rate:.1f} tokens/s, the first after {timing.first_token_seconds:.2f} s"
