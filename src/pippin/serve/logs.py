"""JSON log: one line for each request, and errors with their location but without their data.

Notable here:
- prompts and answers are not logged, unless the settings allow it; the message of an unexpected error is left out too,
  because it may quote them
- a context variable holds the record of a request, in whichever task or thread it is processed
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TextIO

from pippin.session.response import Usage

log = logging.getLogger("pippin.serve")
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass
class RequestRecord:
    """The log record of one HTTP request."""

    id: str
    method: str = ""
    path: str = ""
    key: str = ""
    status: int = 0
    model: str = ""
    usage: Usage = Usage()
    first_token: float | None = None
    error: str = ""
    code: str = ""
    began: float = field(default_factory=time.perf_counter)
    texts: dict[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """The fields of the log line, without unknown ones."""
        usage, first = self.usage, self.first_token
        found = {
            "id": self.id,
            "key": self.key,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "ms": round(1000 * (time.perf_counter() - self.began), 1),
            "model": self.model,
            "first_token_ms": None if first is None else round(1000 * first, 1),
            "error": self.error,
            "code": self.code,
        }
        if self.model:
            tokens = {"input": usage.input_tokens, "cached": usage.cached_tokens, "output": usage.output_tokens}
            found |= {f"{name}_tokens": count for name, count in tokens.items()}
        return {name: value for name, value in found.items() if value not in ("", None)} | self.texts


current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)


def request_id(given: str) -> str:
    """The id that a client sent, if it can be used in a log and a header; else a new one.

    >>> request_id("abc-1"), len(request_id("two words"))
    ('abc-1', 32)
    """
    return given if _ID.fullmatch(given) else uuid.uuid4().hex


def where(error: BaseException) -> list[str]:
    """The stack frames of an error, innermost last, without its message."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]


class JSONLines(logging.Formatter):
    """Formats log records as lines of JSON; of an exception the class and the frames, never the message."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line |= {"error": type(error).__name__, "where": where(error)}
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(stream: TextIO | None = None) -> logging.Handler:
    """Send the server's log, and uvicorn's warnings, to a stream (None: stderr) as lines of JSON."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JSONLines())
    for name, level in (("pippin", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    return handler
