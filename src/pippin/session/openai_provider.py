"""Any server that speaks OpenAI's chat completions as a provider: the cloud's, a neighbour's, or `pippin serve`.

Notable here:
- the connection lives in a background loop, so that cancelling cuts it off at once, even before the first byte
- a request is repeated only while nothing of its answer has been read, only where the server or the network failed for
  the moment, and only so often
- the key goes into one header and nowhere else: not into `repr`, messages or logs, nor does what other headers hold
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx2

from pippin.core.errors import (
    InvalidArgument,
    InvalidProviderAnswer,
    NetworkFailure,
    PippinError,
    QuotaExceeded,
    RateLimited,
    ServiceUnavailable,
)
from pippin.session import background, openai_wire as wire
from pippin.session.provider import Capabilities, Done, Provider, Turn, TurnEvent, require

_CHAT: Final = Capabilities(guided_generation=True, tool_calling=True, required_tool_calls=True, logprobs=True)
_AT_ONCE: Final = 256  # events that wait to be read; then the server has to wait
_LOOK: Final = 0.02  # seconds between two looks at whether the turn was cancelled
_MOST_ERROR_BYTES: Final = 65_536
_MOST_ANSWER_BYTES: Final = 64 * 1024 * 1024
_SECRET: Final = 8  # characters; what is shorter could be any word of a message
_END: Final = "[DONE]"


class OpenAIProvider(Provider):
    """A model behind an endpoint for chat completions.

    Args:
        base_url: where the interface begins, used as it is: ``https://api.example.com/v1``, say.
        model: the name by which the server knows the model.
        api_key: sent as a bearer token; None for none.
        timeout: seconds to connect, and to wait for the next byte. (`GenerationOptions.timeout` limits a whole answer.)
        capabilities: what server and model can do. Vision and reasoning are to be declared; a server that does not
            hold answers to a schema may still be asked for types, since the session validates them.
        path: after ``base_url``.
        headers: sent with each request; their values are kept out of messages like the key.
        context_size: in tokens, if it is known.
        retries: how often a request is repeated, at most: after 429, 503 or no connection, never once an answer has
            begun. The server's ``Retry-After`` counts, up to ``longest_wait``; else 0.5 seconds, doubled each time.
        longest_wait: seconds; a server that asks for more is not waited for, and the error tells how long.
        extensions: the server also knows top_k, min_p and repetition_penalty, which are not OpenAI's.

    Raises:
        InvalidArgument: an address that is not http(s), or holds a user and password; a key or header that HTTP cannot
            carry.

    >>> OpenAIProvider("http://localhost:8000/v1", "smollm2-135m", api_key="secret")
    OpenAIProvider('http://localhost:8000/v1', 'smollm2-135m')
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        capabilities: Capabilities = _CHAT,
        path: str = "/chat/completions",
        headers: Mapping[str, str] | None = None,
        context_size: int | None = None,
        retries: int = 2,
        longest_wait: float = 20.0,
        extensions: bool = False,
    ) -> None:
        for name, value in (("timeout", timeout), ("longest_wait", longest_wait)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
                raise InvalidArgument(f"{name} must be a number of seconds above 0, got {value!r}")
        if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= 10:
            raise InvalidArgument(f"retries must be a whole number from 0 to 10, got {retries!r}")
        self.base_url, self.model = _checked_url(base_url), model
        self.url = self.base_url.rstrip("/") + "/" + path.lstrip("/") if path else self.base_url
        self.name = f"{model} at {self.base_url}"
        self.capabilities, self.context_size = capabilities, context_size
        self.timeout, self.retries, self.longest_wait, self.extensions = timeout, retries, longest_wait, extensions
        self._secrets = [text for text in (api_key, *(headers or {}).values()) if text and len(text) >= _SECRET]
        self._headers = {"Accept": "text/event-stream", **(headers or {})}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        for header, text in self._headers.items():
            if not isinstance(text, str) or not text.isascii() or not text.isprintable():
                what = "api_key" if header == "Authorization" and api_key is not None else f"header {header!r}"
                raise InvalidArgument(f"{what} holds characters that HTTP cannot carry (a line break, say)")
        self._client: httpx2.AsyncClient | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r}, {self.model!r})"

    def close(self) -> None:
        """Close the connections that are kept for further requests."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            background.start(client.aclose()).result()

    def __enter__(self) -> OpenAIProvider:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(self, turn: Turn) -> Iterator[TurnEvent]:
        """Answer one turn; see `Provider.stream`.

        Raises:
            UnsupportedCapability, UnsupportedContent: what neither server nor interface can do; nothing is sent.
            NetworkFailure, AuthenticationFailed, ServiceUnavailable, InvalidProviderAnswer, ProviderError, RateLimited,
            QuotaExceeded, ContextOverflow, ModelNotFound, Refusal: (while iterating) what the server or the way to it
            did.
        """
        require(self, turn)
        return self._events(turn, wire.request(turn, self.model, extensions=self.extensions))

    def _events(self, turn: Turn, body: dict[str, Any]) -> Iterator[TurnEvent]:
        reader = wire.Reader(self.name)
        if turn.cancel.is_set():
            yield Done("cancelled")
            return
        arrived: queue.Queue[str | PippinError] = queue.Queue(_AT_ONCE)
        sending = background.start(self._send(body, arrived))
        try:
            while True:
                try:
                    item = arrived.get(timeout=_LOOK)
                except queue.Empty:
                    item = None
                if turn.cancel.is_set():
                    yield Done("cancelled", reader.usage, reader.timing())
                    return
                if isinstance(item, PippinError):
                    raise item
                if item == _END:
                    break
                if item:
                    yield from self._read(reader, item)
            yield from reader.finish(turn.transcript)
        finally:
            sending.cancel()

    def _read(self, reader: wire.Reader, item: str) -> list[TurnEvent]:
        try:
            return reader.read(item)
        except PippinError as error:
            raise self._clean(error) from None

    # --- in the background loop ---------------------------------------------------------------------------------------

    async def _send(self, body: dict[str, Any], arrived: queue.Queue[str | PippinError]) -> None:
        """Ask until there is an answer, and pass it on message by message."""
        wait = 0.5
        for tries_left in range(self.retries, -1, -1):
            try:
                await self._ask(body, arrived)
                return
            except _Again as again:
                pause = wait if again.wait is None else again.wait
                if not tries_left or pause > self.longest_wait:
                    await _put(arrived, self._clean(again.error))
                    return
                await asyncio.sleep(pause)
                wait *= 2
            except PippinError as error:
                await _put(arrived, self._clean(error))
                return
            except Exception as error:  # whoever waits for the answer must hear of it
                await _put(arrived, InvalidProviderAnswer(f"{self.name}: {type(error).__name__}"))
                raise

    async def _ask(self, body: dict[str, Any], arrived: queue.Queue[str | PippinError]) -> None:
        begun = False
        try:
            async with self._open().stream("POST", self.url, json=body, headers=self._headers) as response:
                if response.status_code != 200:
                    raise _refused(self.name, response, await _text(response, _MOST_ERROR_BYTES))
                kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind == "application/json":  # a server that does not stream
                    await _put(arrived, await _text(response, _MOST_ANSWER_BYTES))
                elif kind == "text/event-stream":
                    begun = True
                    async for event in httpx2.EventSource(response):
                        if event.data.strip() == _END:
                            break
                        await _put(arrived, event.data)
                else:
                    text = await _text(response, _MOST_ERROR_BYTES)
                    raise wire.failure(self.name, 200, f"{kind or 'no type'}: {text[:200]}", {})
                await _put(arrived, _END)
        except httpx2.SSEError as error:
            raise InvalidProviderAnswer(f"{self.name} sent an event that cannot be read: {error}") from error
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise _Again(NetworkFailure(f"cannot reach {self.name}: {_why(error)}"), None) from error
        except httpx2.TimeoutException as error:
            raise NetworkFailure(f"{self.name} sent nothing for {self.timeout:g} seconds") from error
        except (httpx2.TransportError, httpx2.DecodingError, httpx2.StreamError) as error:
            when = "before its answer was complete" if begun else "before it answered"
            raise NetworkFailure(f"the connection to {self.name} broke {when}: {_why(error)}") from error

    def _open(self) -> httpx2.AsyncClient:
        with self._lock:
            if self._client is None:
                self._client = httpx2.AsyncClient(timeout=self.timeout, follow_redirects=False)
            return self._client

    def _clean(self, error: PippinError) -> PippinError:
        """The error without the key, which servers like to repeat."""
        for secret in self._secrets:
            error.args = tuple(arg.replace(secret, "***") if isinstance(arg, str) else arg for arg in error.args)
            if isinstance(explanation := getattr(error, "explanation", None), str):
                error.explanation = explanation.replace(secret, "***")  # type: ignore[attr-defined]
        return error


class _Again(Exception):
    """A failure of the moment: the request may be repeated after so many seconds (None: nobody said)."""

    def __init__(self, error: PippinError, wait: float | None) -> None:
        super().__init__(str(error))
        self.error, self.wait = error, wait


def _checked_url(base_url: str) -> str:
    try:
        url = httpx2.URL(base_url)
    except (httpx2.InvalidURL, TypeError) as error:
        raise InvalidArgument(f"base_url is no address: {error}") from error
    if url.userinfo:
        raise InvalidArgument("base_url holds a user or a password; give the key as api_key, or a header")
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidArgument(f"base_url must begin with http:// or https:// and a host, got {base_url!r}")
    return base_url


def _refused(name: str, response: httpx2.Response, text: str) -> Exception:
    error = wire.failure(name, response.status_code, text, response.headers)
    brief = isinstance(error, RateLimited) and not isinstance(error, QuotaExceeded)
    brief |= isinstance(error, ServiceUnavailable) and response.status_code == 503
    return _Again(error, wire.retry_after(response.headers)) if brief else error


async def _text(response: httpx2.Response, most: int) -> str:
    """The body, at most so many bytes of it."""
    found = b""
    async for chunk in response.aiter_bytes():
        found += chunk
        if len(found) > most:
            break
    return found[:most].decode("utf-8", "replace")


async def _put(arrived: queue.Queue[str | PippinError], item: str | PippinError) -> None:
    while True:
        try:
            arrived.put_nowait(item)
        except queue.Full:
            await asyncio.sleep(_LOOK)
        else:
            return


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
