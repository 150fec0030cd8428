"""What the user gives to work on: prompts, files, standard input, schemas, types. All of it is checked here first.

Notable here:
- text is UTF-8 without NUL bytes and within 64 MB; anything else is refused by name before a model is loaded
- documents stand before the question, because small models answer what they read last
- `--type FILE.py:NAME` runs that Python file: it is the user's own, as with `python FILE.py`
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
    """All of standard input if something is piped in; None if it is a terminal, closed or empty.

    Raises:
        InvalidInput: it is too large, or not text.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    return decode(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input") or None


def stdin_lines() -> Iterator[str]:
    """The lines of standard input as they come, without their ends.

    Raises:
        InvalidInput: a line is too large, or not text.
    """
    number = 0
    while sys.stdin is not None and (data := sys.stdin.buffer.readline(MAX_BYTES + 1)):
        number += 1
        yield decode(data, f"line {number} of standard input").rstrip("\n")


def compose_prompt(question: str | None, files: Sequence[Path], piped: str | None, *, typed: bool = False) -> str:
    """The prompt: the documents, then the question. Piped text is a document if there is a question, else it is one.

    Args:
        question: the words on the command line.
        files: documents to read.
        piped: what came through standard input.
        typed: the answer has a form of its own, so that a document needs no question.

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
    *, schema: Path | None = None, type_name: str | None = None, choices: Sequence[str] = (), regex: str | None = None
) -> Any:
    """What the answer must be, for `generating=`; None for free text.

    Raises:
        InvalidArgument: more than one of these is given.
        InvalidInput: a file cannot be used.
        SchemaError: the schema, the type, the choices or the expression cannot describe an answer.
    """
    given = {"--schema": schema, "--type": type_name, "--choice": choices or None, "--regex": regex}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidArgument(f"{' and '.join(names)} exclude each other: an answer has one form")
    if not names:
        return None
    form = load_json_schema(schema) if schema is not None else load_type(type_name) if type_name is not None else None
    from pippin.session.types.schema import Choice, Regex, Schema

    if form is None:
        form = Choice(list(choices)) if choices else Regex(regex or "")
    return Schema(form)


def load_json_schema(path: Path) -> dict[str, Any]:
    """The JSON Schema in a file.

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
    """The class, or other type, that `FILE.py:NAME` means. Runs the file.

    Raises:
        InvalidArgument: the reference has not this form, or the file has no such name.
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
    """The names that a Python file defines, after running it as a module of its own."""
    import types

    module = types.ModuleType(_MODULE)
    module.__file__ = str(path)
    sys.modules[_MODULE] = module  # pydantic and dataclasses look a class's module up to resolve its annotations
    folder = str(path.resolve().parent)
    sys.path.append(folder)  # the file may import its neighbors; last, so that none of them hides a library
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
