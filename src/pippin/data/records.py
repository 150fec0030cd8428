"""Reading training data one record at a time: text, JSON lines, Parquet, and folders of Hugging Face `datasets`.

Notable here:
- files are read as streams, gzipped or not, so a file of any size takes a few megabytes of memory
- a record stores its file and line, so later errors name its location
- every file is checked before the first record is read: a missing, empty or unknown file is reported at once, not after
  an hour of training
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pippin.core.errors import InvalidArgument, InvalidInput, InvalidRecord, MissingDependency
from pippin.core.files import Readable
from pippin.core.formats.checkpoint import read_json
from pippin.core.text_files import detect_blocks, warn_if_guessed

TEXT: Final = (".txt", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".rs", ".js", ".raw")
_LINES: Final = (".jsonl", ".ndjson")
_TABLES: Final = (".parquet", ".arrow")
_BLOCK: Final = 1 << 18  # bytes read at once; about as much of a text file becomes one record
_COLUMNS: Final = ("messages", "text", "prompt", "completion")


@dataclass(frozen=True)
class TrainingRecord:
    """One text, one conversation, or one prompt with its completion.

    Args:
        path: its file.
        line: its line, or the number of its row in a table, from 1; None for a file that is one text.
        text: a text; the completion if there is a prompt; empty for a conversation.
        prompt: text before it, which does not count in the loss; None for a text by itself.
        messages: the turns of a conversation.
        begins: False if it continues the record before (a text file is read in blocks).
        ends: False if the next record continues it.
    """

    path: str
    line: int | None = None
    text: str = ""
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    begins: bool = True
    ends: bool = True

    def error(self, message: str) -> InvalidRecord:
        """An error about this record; it names its location."""
        return _error(message, self.path, self.line)


def read_records(
    paths: str | Path | Iterable[str | Path], *, fields: Mapping[str, str] | None = None
) -> Iterator[TrainingRecord]:
    """The records of some files and folders, in order.

    A folder that was saved by Hugging Face's `datasets` gives its rows; any other folder all files of a known type
    below it, by name. A text file is one document. A line of JSON, or a row of a table, holds ``text``, or ``messages``
    (dictionaries with "role" and "content"), or ``prompt`` and ``completion``.

    Args:
        paths: files and folders; ``.gz`` may follow the suffix of a text or JSONL file.
        fields: other names of these fields: ``{"prompt": "question", "completion": "answer"}``.

    Warns:
        GuessedEncoding: the first text file of a folder that is not UTF-8, but in another encoding.

    Raises:
        InvalidRecord: a file that is empty, damaged or not text, or a record that cannot be read; with file and line.
        InvalidArgument: a path that does not exist, an unknown file type, no paths, an unknown field.
        MissingDependency: a table, without pyarrow installed.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    names = dict(fields or {})
    for ours in names:
        if ours not in _COLUMNS:
            raise InvalidArgument(f"there is no field {ours!r} to be named; fields are {', '.join(_COLUMNS)}")
    files, said = data_files(given), set[tuple[Path, str]]()
    return (record for file in files for record in _read(file, names, said))


def data_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files that `read_records` reads for these paths, checked for existence, kind and size.

    Raises:
        InvalidRecord, InvalidArgument, MissingDependency: as `read_records`.
    """
    if not paths:
        raise InvalidArgument("no data was given; name at least one file or folder")
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += _inside(path)
        elif not path.exists():
            raise InvalidArgument(f"there is no file or folder {path}")
        elif not _kind(path):
            raise InvalidArgument(f"{path}: files named {path.suffix or 'without a suffix'} are not known; {_kinds()}")
        else:
            files.append(path)
    for file in files:
        if file.stat().st_size == 0:
            raise InvalidRecord(f"{file} is empty", path=str(file))
        if _kind(file) in _TABLES:
            _pyarrow()
    return files


def _inside(folder: Path) -> list[Path]:
    """The files of a folder."""
    if (splits := folder / "dataset_dict.json").is_file():
        names = ", ".join(str(folder / name) for name in read_json(splits).get("splits", ()))
        raise InvalidArgument(f"{folder} holds several splits of a data set; name one of {names}")
    if (state := folder / "state.json").is_file():
        return [folder / entry["filename"] for entry in read_json(state).get("_data_files", ())]
    inside = [p for p in sorted(folder.rglob("*")) if p.is_file() and _kind(p) and not p.name.startswith(".")]
    if not inside:
        raise InvalidArgument(f"the folder {folder} holds no file of a known kind; {_kinds()}")
    return inside


def _kinds() -> str:
    return f"known are {', '.join((*TEXT, *_LINES))} (also .gz), {', '.join(_TABLES)}"


def _kind(path: Path) -> str:
    """The suffix that determines how to read a file; empty if it is unknown."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
        return suffixes[-1] if suffixes and suffixes[-1] in (*TEXT, *_LINES) else ""
    return suffixes[-1] if suffixes and suffixes[-1] in (*TEXT, *_LINES, *_TABLES) else ""


def _read(path: Path, names: Mapping[str, str], said: set[tuple[Path, str]]) -> Iterator[TrainingRecord]:
    """The records of a file; ``said`` are the folders and encodings that were warned of."""
    kind = _kind(path)
    if kind in _TABLES:
        yield from _read_table(path, names)
        return
    encoding = _encoding(path)
    if encoding != "utf-8" and (path.parent, encoding) not in said:
        said.add((path.parent, encoding))
        warn_if_guessed(encoding, str(path))
    yield from _read_lines(path, encoding, names) if kind in _LINES else _read_text(path, encoding)


# --- text -------------------------------------------------------------------------------------------------------------


def _open(path: Path) -> AbstractContextManager[Readable]:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")


def _blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, decompressed."""
    try:
        with _open(path) as file:
            while block := file.read(_BLOCK):
                yield block
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _error(f"the gzip file is damaged: {error}", str(path), None) from error


def _encoding(path: Path) -> str:
    """The encoding of a file, which is read once for this: a file that is no text fails before its first record."""
    try:
        return detect_blocks(_blocks(path), str(path))
    except InvalidRecord:
        raise
    except InvalidInput as error:
        raise _error(str(error).removeprefix(f"{path} "), str(path), None) from error


def _decoded(path: Path, encoding: str) -> Iterator[tuple[int, str]]:
    """The blocks of a file as text, each with the number of its first line."""
    decoder = codecs.getincrementaldecoder(encoding)()
    line = 1
    for block in _blocks(path):
        text = decoder.decode(block)
        yield line, text.removeprefix("\ufeff") if line == 1 else text
        line += text.count("\n")


def _read_text(path: Path, encoding: str) -> Iterator[TrainingRecord]:
    """One document, in blocks that end at a line break if there are any."""
    rest, begun, blank = "", False, True
    for line, text in _decoded(path, encoding):
        if (nul := text.find("\0")) >= 0:
            place = line + text[:nul].count("\n")
            raise _error("a NUL byte: this is no text file", str(path), place)
        blank = blank and not text.strip()
        if rest:
            end = rest.rfind("\n") + 1 or len(rest)
            yield TrainingRecord(str(path), text=rest[:end], begins=not begun, ends=False)
            rest, begun = rest[end:], True
        rest += text
    if blank:
        raise InvalidRecord(f"{path} holds no text", path=str(path))
    yield TrainingRecord(str(path), text=rest, begins=not begun)


def _lines(path: Path, encoding: str) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers."""
    rest, number = "", 0
    for _, text in _decoded(path, encoding):
        *whole, rest = (rest + text).split("\n")
        for line in whole:
            number += 1
            yield number, line
    yield number + 1, rest


def _read_lines(path: Path, encoding: str, names: Mapping[str, str]) -> Iterator[TrainingRecord]:
    found = False
    for number, line in _lines(path, encoding):
        if not line.strip():
            continue
        found = True
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise _error(f"not JSON: {error}", str(path), number) from error
        yield _record(value, names, str(path), number)
    if not found:
        raise InvalidRecord(f"{path} holds no records", path=str(path))


# --- tables -----------------------------------------------------------------------------------------------------------


def _pyarrow() -> Any:
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency("Parquet and Arrow files need pyarrow: pip install 'pippin[train]'") from error
    return pyarrow


def _read_table(path: Path, names: Mapping[str, str]) -> Iterator[TrainingRecord]:
    pyarrow = _pyarrow()
    row = 0
    try:
        for batch in _batches(path):
            wanted = [name for name in (names.get(ours, ours) for ours in _COLUMNS) if name in batch.schema.names]
            for value in batch.select(wanted).to_pylist():
                row += 1
                yield _record({k: v for k, v in value.items() if v is not None}, names, str(path), row)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise _error(f"not a table that can be read: {error}", str(path), row + 1) from error
    if row == 0:
        raise InvalidRecord(f"{path} holds no records", path=str(path))


def _batches(path: Path) -> Iterator[Any]:
    """Some hundred rows at a time."""
    pyarrow = _pyarrow()
    if path.suffix.lower() == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=256)
        return
    with pyarrow.memory_map(str(path)) as source:
        try:  # `datasets` writes streams; other programs write files
            yield from pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            file = pyarrow.ipc.open_file(source)
            yield from (file.get_batch(index) for index in range(file.num_record_batches))


# --- records ----------------------------------------------------------------------------------------------------------


def _record(value: Any, names: Mapping[str, str], path: str, line: int) -> TrainingRecord:
    """The record of a JSON object or a row."""
    if not isinstance(value, dict):
        raise _error(f"{value!r:.60} is no object with fields", path, line)
    messages, text, prompt, completion = (value.get(names.get(name, name)) for name in _COLUMNS)
    if messages is not None:
        if not (isinstance(messages, list) and messages and all(_is_message(message) for message in messages)):
            raise _error(
                f"messages is {messages!r:.60}; expected a list of objects with 'role' and 'content'", path, line
            )
        return TrainingRecord(path, line, messages=tuple(messages))
    if isinstance(prompt, str) and isinstance(completion, str):
        return TrainingRecord(path, line, text=completion, prompt=prompt)
    if isinstance(text, str):
        return TrainingRecord(path, line, text=text)
    here = ", ".join(map(repr, value)) or "none"
    wanted = [names.get(name, name) for name in _COLUMNS]
    raise _error(
        f"expected the field {wanted[1]!r}, or {wanted[0]!r}, or {wanted[2]!r} with {wanted[3]!r}, as text; "
        f"there are {here:.120} (other names: fields={{'prompt': 'question', …}}, --field prompt=question)",
        path,
        line,
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _error(message: str, path: str, line: int | None) -> InvalidRecord:
    place = path if line is None else f"{path}, line {line}"
    return InvalidRecord(f"{place}: {message}", path=path, line=line)
