"""User input: prompts, files, standard input, schemas and types, validated before a model is loaded.

Notable here:
- text is UTF-8 without NUL bytes and at most 64 MB; anything else is refused with its name
- documents come before the question, because small models answer what they read last
- `--type FILE.py:NAME` runs that Python file, as `python FILE.py` does
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.core.text_files import MAX_BYTES, check_text, decode, read_text


def read_stdin() -> str | None:
    """Read standard input; None if it is a terminal, closed or empty.

    Raises:
        InvalidInput: it is too large, or not text.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    return decode(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input") or None


def stdin_lines() -> Iterator[str]:
    """Yield the lines of standard input as they arrive, without line ends.

    Raises:
        InvalidInput: a line is too large, or not text.
    """
    number = 0
    while sys.stdin is not None and (data := sys.stdin.buffer.readline(MAX_BYTES + 1)):
        number += 1
        yield decode(data, f"line {number} of standard input").rstrip("\n")


def compose_prompt(question: str | None, files: Sequence[Path], piped: str | None, *, typed: bool = False) -> str:
    """Join documents and question to a prompt. Piped text is a document if there is a question, else the question.

    Args:
        question: the question on the command line.
        files: documents to read.
        piped: text from standard input.
        typed: whether the answer has a type, so that a document needs no question.

    Raises:
        InvalidInput: there is no question, or it is empty; a document is empty or cannot be used.

    >>> compose_prompt("What is this?", [], "A leaf.")
    'A leaf.\\n\\nWhat is this?'
    """
    if question is not None:
        check_text(question, "the prompt")
    documents = [(str(path), read_text(path)) for path in files]
    if piped is not None and question is not None:
        documents.append(("standard input", piped))
    asked = piped if question is None else question
    if asked is None and typed and files:
        asked = "Fill in the answer from this text."
    if asked is None:
        raise InvalidInput('there is no prompt; write it as in: pippin ask "Why is the sky blue?", or pipe text in')
    if not asked.strip():
        raise InvalidInput("the prompt is empty")
    for name, text in documents:
        if not text.strip():
            raise InvalidInput(f"{name} is empty")
    if len(documents) > 1:
        return "\n\n".join([f"{name}:\n{text.strip()}" for name, text in documents] + [asked.strip()])
    return "\n\n".join([text.strip() for _, text in documents] + [asked.strip()])


def target(
    *,
    schema: Path | None = None,
    type_name: str | None = None,
    choices: Sequence[str] = (),
    regex: str | None = None,
    strict: bool = False,
) -> Any:
    """The `generating=` argument of a session for these options; None for free text.

    Raises:
        InvalidArgument: more than one of these is given.
        InvalidInput: a file cannot be used.
        SchemaError: the schema, the type, the choices or the expression cannot describe an answer.
    """
    given = {"--schema": schema, "--type": type_name, "--choice": choices or None, "--regex": regex}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidArgument(f"{' and '.join(names)} exclude each other")
    if not names:
        return None
    form = load_json_schema(schema) if schema is not None else load_type(type_name) if type_name is not None else None
    from pippin.session.types.schema import Choice, Regex, Schema

    if form is None:
        form = Choice(list(choices)) if choices else Regex(regex or "")
    return Schema(form, strict=strict)


def load_json_schema(path: Path) -> dict[str, Any]:
    """Load a JSON Schema from a file.

    Raises:
        InvalidInput: the file cannot be read or is not a JSON object.
    """
    text = read_text(path, "schema file")
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidInput(f"schema file {str(path)!r} is not JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise InvalidInput(f"schema file {str(path)!r} is nested too deeply") from None
    if not isinstance(schema, dict):
        raise InvalidInput(
            f"schema file {str(path)!r} holds a JSON {type(schema).__name__}; a JSON Schema is an object"
        )
    return schema


def load_type(reference: str) -> Any:
    """Run a Python file and return the type that `FILE.py:NAME` names.

    Raises:
        InvalidArgument: the reference is malformed, or the file does not define the name.
        InvalidInput: the file cannot be read, or raises.
    """
    file, _, name = reference.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise InvalidArgument(f"--type {reference!r} does not name a type; write FILE.py:NAME, as in types.py:Invoice")
    path = Path(file)
    module = _run_file(path, read_text(path, "Python file"))
    if name not in module:
        known = [key for key, value in module.items() if isinstance(value, type) and value.__module__ == _MODULE]
        has = f"it has {', '.join(known)}" if known else "it defines no class"
        raise InvalidArgument(f"{file!r} has no {name!r}; {has}")
    return module[name]


_MODULE = "pippin_user_types"


def _run_file(path: Path, source: str) -> dict[str, Any]:
    """Run a Python file as a separate module; returns its global names."""
    import types

    module = types.ModuleType(_MODULE)
    module.__file__ = str(path)
    sys.modules[_MODULE] = module  # pydantic and dataclasses look a class's module up to resolve its annotations
    folder = str(path.resolve().parent)
    sys.path.append(folder)  # the file may import its neighbors; appended, so that none shadows a library
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except SyntaxError as error:
        raise InvalidInput(f"{str(path)!r} is not Python: {error.msg} at line {error.lineno}") from error
    except (Exception, SystemExit) as error:
        raise InvalidInput(f"{str(path)!r} raised {type(error).__name__}: {error}") from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
    return vars(module)
