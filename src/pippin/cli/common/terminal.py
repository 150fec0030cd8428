"""What the verbs print: answers to stdout; errors, notes and figures to stderr.

Notable here:
- control characters of a model's answer never reach a terminal: an escape sequence could rewrite what stands there
- color and live output only where a terminal is watching; a pipe gets plain text, whole values, and no figures
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO

import typer

if TYPE_CHECKING:
    from pippin.session.response import Response, ResponseStream

# C0 without tab and newline, DEL and C1: terminals act on these.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def error(message: str) -> None:
    """`error: MESSAGE` in one line on stderr."""
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {one_line(message)}", err=True)


def note(message: str) -> None:
    """A dim line on stderr."""
    typer.echo(typer.style(one_line(message), dim=True), err=True)


def one_line(text: str) -> str:
    """The text with line breaks and control characters made spaces.

    >>> one_line("two\\nlines \\x1b[31m")
    'two lines [31m'
    """
    return " ".join(_CONTROL.sub(" ", text).split())


def plain(text: str) -> str:
    r"""The text without what a terminal would act on; line ends and tabs stay.

    >>> plain("a\x1b[31mb\n")
    'a[31mb\n'
    """
    return _CONTROL.sub("", text)


def watched(stream: TextIO | None) -> bool:
    """Whether a terminal is at the other end of this stream."""
    return stream is not None and stream.isatty()


def write(text: str) -> None:
    """Part of a streamed answer to stdout, at once."""
    sys.stdout.write(_CONTROL.sub("", text) if watched(sys.stdout) else text)
    sys.stdout.flush()


def show_text(stream: ResponseStream[Any]) -> Response[Any]:
    """Write an answer as it comes, and end its line."""
    for snapshot in stream:
        write(snapshot.delta)
    write("\n")
    return stream.response


def show_value(stream: ResponseStream[Any]) -> Response[Any]:
    """Show a typed answer filling up on the terminal, then write the whole."""
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
    """Any typed answer as indented JSON, with the letters of all scripts as they are.

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
    """What an answer cost, in one line: tokens per second of the answer, and the time to its first token."""
    usage, timing = response.usage, response.timing
    rate = usage.output_tokens / timing.answer_seconds if timing.answer_seconds > 0 else float("nan")
    return f"{usage.output_tokens} tokens, {rate:.1f} tokens/s, the first after {timing.first_token_seconds:.2f} s"
