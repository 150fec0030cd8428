"""Server-sent events: frames, and a response that always closes its source."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Send

from pippin.serve.api.common.errors import ErrorResponse, failure

log = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"

# Valid in JSON, but a line break for some readers of events.
_LINE_ENDS = str.maketrans({"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"})


def frame(data: dict[str, Any], event: str | None = None) -> str:
    r"""One event.

    >>> frame({"a": "é"}), frame({}, "response.created")
    ('data: {"a":"é"}\n\n', 'event: response.created\ndata: {}\n\n')
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)
    return f"data: {text}\n\n" if event is None else f"event: {event}\ndata: {text}\n\n"


def failed(error: Exception) -> ErrorResponse:
    """The error of a failed stream, which is logged if it is the server's."""
    response = failure(error)
    response.log()
    if response.status >= 500:
        log.error("a stream broke: %s", type(error).__name__)
    return response


def broken(error: Exception) -> str:
    """The last event of a failed stream; OpenAI's clients raise on it."""
    return frame(failed(error).body)


class EventStreamResponse(StreamingResponse):
    """Streams frames; when the client disconnects or the server stops, the source is closed before the response
    ends."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[str], source: Any, more: dict[str, str] | None = None) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **(more or {})}
        super().__init__(frames, headers=headers)
        self._frames, self._source = frames, source

    async def stream_response(self, send: Send) -> None:
        """Send all frames."""
        # closing frames that were never iterated closes nothing, so their source is closed as well
        async with aclosing(self._source), aclosing(self._frames):
            await super().stream_response(send)
