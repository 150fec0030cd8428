"""The `pippin` command: its entry point, and what becomes of an error.

Notable here:
- an error that Pippin raises on purpose is one line on stderr and an exit code by its class
- an unexpected one is a line too; nobody meets a traceback without asking for it with `--debug`
- nothing heavy is imported until a verb runs, so `pippin --help` comes at once

Exit codes: 0 done; 1 any other error; 2 something given cannot be used (an option, a file, a schema, an empty prompt);
3 a model or file could not be found, fetched or stored; 4 a model file cannot be loaded; 5 the answer could not be
completed; 6 an optional library is missing; 7 a model behind a network could not be asked; 8 a training run or an
export could not go on; 130 stopped with Ctrl-C;
141 the reader of the output went away.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from pippin.core import errors

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE

_EXIT_CODES: tuple[tuple[type[errors.PippinError], int], ...] = (
    (errors.InvalidArgument, 2),
    (errors.InvalidInput, 2),
    (errors.SchemaError, 2),
    (errors.UnsupportedInputImage, 2),
    (errors.AssetError, 3),
    (errors.CreationUnavailable, 3),
    (errors.CheckpointError, 4),
    (errors.GenerationError, 5),
    (errors.ToolError, 5),
    (errors.MissingDependency, 6),
    (errors.ProviderError, 7),
    (errors.BackendUnavailable, 6),
    (errors.TrainingError, 8),
    (errors.InferenceError, 8),
    (errors.ExportError, 8),
)


def exit_code(error: BaseException) -> int:
    """The exit code of a class of errors, as the module's first lines list them.

    >>> exit_code(errors.ModelNotFound("no such model")), exit_code(RuntimeError())
    (3, 1)
    """
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: the words after `pippin`; None takes those of the process.
    """
    # Read when torch is first imported: its threads spin only briefly before they sleep. By default they spin for
    # long, which on a busy machine costs all of them most of their time (on two busy cores: 1.1 instead of 43
    # tokens a second); without any spinning they are slower on an idle one.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
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
            _discard_output()  # if it was the output that failed, leaving must not fail a second time
        return _report(error, debug)
    return code


def _run(words: list[str]) -> int:
    """Hand the words to typer; usage errors come back as exceptions, Ctrl-C as 130."""
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
    """How warnings are shown: one of Pippin's own as a line, without the place in the source that gave it."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, errors.PippinWarning):
            return otherwise(message, category, *place, **more)
        from pippin.cli import terminal

        terminal.note(str(message))

    return show


def _report(error: Exception, debug: bool) -> int:
    """One line on stderr; the traceback above it when asked for."""
    import typer

    from pippin.cli import terminal

    if debug:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, typer.TyperException):
        terminal.error(f"{error.format_message()} (see `pippin --help`)")
        return error.exit_code
    if isinstance(error, errors.PippinError):
        terminal.error(str(error) or type(error).__name__)
    elif isinstance(error, typer.Abort):
        return INTERRUPTED
    else:
        hint = "" if debug else "; run again with --debug for the traceback"
        terminal.error(f"unexpected {type(error).__name__}: {error}{hint}")
    return exit_code(error)


def _take_debug(words: list[str]) -> bool:
    """Remove `--debug` from the words, wherever it stands before a `--`, and say whether it was there."""
    end = words.index("--") if "--" in words else len(words)
    if "--debug" not in words[:end]:
        return False
    words.remove("--debug")
    return True


def _discard_output() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
