"""The `pippin` command: its entry point and its error handling.

Notable here:
- an error that Pippin raises on purpose is one line on stderr and an exit code by its class
- an unexpected error is one line too; `--debug` shows the traceback
- nothing heavy is imported until a verb runs, so `pippin --help` is fast

`pippin.cli.common.exit_codes` lists the exit codes.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from pippin.cli.common.exit_codes import BROKEN_PIPE, INTERRUPTED, exit_code
from pippin.core import errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: the words after `pippin`; None takes those of the process.
    """
    # Read when torch is first imported: OpenMP threads spin only briefly before they sleep. The long default wastes
    # most of their time on a busy machine (on two busy cores: 1.1 instead of 43 tokens a second); without any
    # spinning they are slower on an idle one.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    for name in ("stdout", "stderr"):  # None where a service was started with them closed
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the process ends
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = _take_debug(words) or os.environ.get("PIPPIN_DEBUG", "") not in {"", "0"}
    try:
        code = _run(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, errors.PippinError):
            _discard_output()  # if stdout failed, the flush at exit must not fail again
        return _report(error, debug)
    return code


def _run(words: list[str]) -> int:
    """Run typer on the arguments; usage errors are raised, Ctrl-C returns 130."""
    from pippin.cli.app import app

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _note(warnings.showwarning)
            done = app(words, prog_name="pippin", standalone_mode=False)
    except SystemExit as leaving:
        # Typer turns a broken pipe into exit(1).
        if isinstance(leaving.__context__, BrokenPipeError):
            return BROKEN_PIPE
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return done if isinstance(done, int) else 0


def _note(otherwise: Callable[..., None]) -> Callable[..., None]:
    """A `warnings.showwarning` that prints Pippin's own warnings as one line, without the source location."""

    def show(message: Warning | str, category: type[Warning], *location: Any, **options: Any) -> None:
        if not issubclass(category, errors.PippinWarning):
            return otherwise(message, category, *location, **options)
        from pippin.cli.common import terminal

        terminal.note(str(message))

    return show


def _report(error: Exception, debug: bool) -> int:
    """Print the error on stderr and return the exit code.

    The error is one line, after the traceback in debug mode; an answer that was not completed follows in another line.
    """
    import typer

    from pippin.cli.common import terminal

    if debug:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        verb = context.command_path if context else "pippin"
        said = error.format_message().replace("Value error, ", "")  # typer passes on how pydantic names an error's type
        terminal.error(f"{said} (see `{verb} --help`)")
        return error.exit_code
    if isinstance(error, errors.PippinError):
        terminal.error(str(error) or type(error).__name__)
        if isinstance(error, errors.AnswerTruncated | errors.TimedOut) and error.partial:
            terminal.note(f"written until then: {error.partial}")
    elif isinstance(error, typer.Abort):
        return INTERRUPTED
    else:
        hint = "" if debug else "; run again with --debug for the traceback"
        terminal.error(f"unexpected {type(error).__name__}: {error}{hint}")
    return exit_code(error)


def _take_debug(words: list[str]) -> bool:
    """Remove `--debug` from the arguments before `--`; return whether it was there."""
    end = words.index("--") if "--" in words else len(words)
    if "--debug" not in words[:end]:
        return False
    words.remove("--debug")
    return True


def _discard_output() -> None:
    """Redirect stdout to the null device, so that the flush at exit cannot fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
