"""Provider for any OpenAI-compatible chat-completions server: a cloud service, a local server, or `pippin serve`.

Notable here:
- the connection runs in a background loop, so that cancelling closes it at once, even before the first byte
- a request is retried only while nothing of its answer has been read, only after temporary failures of the server or
  the network, and only a limited number of times
- the key is sent in one header and appears nowhere else: not in `repr`, messages or logs; nor do other headers' values
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import httpx2
from annotated_types import Ge, Le

from pippin.core.checks import PositiveFloat, checked
from pippin.core.errors import (
    InvalidArgument,
    InvalidProviderAnswer,
    NetworkFailure,
    PippinError,
    QuotaExceeded,
    RateLimited,
    ServiceUnavailable,
)
from pippin.session import event_loop
from pippin.session.providers import openai_messages as wire
from pippin.session.providers.provider import Capabilities, Done, Provider, ProviderEvent, ProviderRequest, require

_CHAT: Final = Capabilities(guided_generation=True, tool_calling=True, required_tool_calls=True, logprobs=True)
_AT_ONCE: Final = 256  # events that wait to be read; then the server has to wait
_LOOK: Final = 0.02  # seconds between two checks for cancellation
_MOST_ERROR_BYTES: Final = 65_536
_MOST_ANSWER_BYTES: Final = 64 * 1024 * 1024
_SECRET: Final = 8  # characters; anything shorter could be any word of a message
_END: Final = "[DONE]"


class OpenAIProvider(Provider):
    """A model behind an endpoint for chat completions.

    Args:
        base_url: base URL of the API, used as given: ``https://api.example.com/v1``, for example.
        model: the server's name of the model.
        api_key: sent as a bearer token; None for none.
        timeout: seconds to connect, and to wait for the next byte. (`GenerationOptions.timeout` limits a whole answer.)
        capabilities: what server and model support. Declare vision and reasoning; a server that does not enforce
            schemas may still be asked for types, since the session validates them.
        path: appended to ``base_url``.
        headers: sent with each request; their values are kept out of messages like the key.
        context_size: in tokens, if it is known.
        max_retries: maximum number of retries: after 429, 503 or a failed connection, never once an answer has started.
            The server's ``Retry-After`` is respected, up to ``max_retry_wait``; else 0.5 seconds, doubled each time.
        max_retry_wait: in seconds; if a server asks for more, the error is raised at once and has the time.
        extensions: the server also supports top_k, min_p and repetition_penalty, which are not OpenAI's.

    Raises:
        InvalidArgument: an address that is not http(s), or holds a user and password; a key or header that HTTP cannot
            carry.

    >>> OpenAIProvider("http://localhost:8000/v1", "smollm2-135m", api_key="secret")
    OpenAIProvider('http://localhost:8000/v1', 'smollm2-135m')
    """

    @checked
    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout: PositiveFloat = 60.0,
        capabilities: Capabilities = _CHAT,
        path: str = "/chat/completions",
        headers: Mapping[str, str] | None = None,
        context_size: int | None = None,
        max_retries: Annotated[int, Ge(0), Le(10)] = 2,
        max_retry_wait: PositiveFloat = 20.0,
        extensions: bool = False,
    ) -> None:
        self.base_url, self.model = _checked_url(base_url), model
        self.url = self.base_url.rstrip("/") + "/" + path.lstrip("/") if path else self.base_url
        self.name = f"{model} at {self.base_url}"
        self.capabilities, self.context_size = capabilities, context_size
        self.timeout, self.extensions = timeout, extensions
        self.max_retries, self.max_retry_wait = max_retries, max_retry_wait
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
        """Close the connections of the pool."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            event_loop.run_coroutine(client.aclose()).result()

    def __enter__(self) -> OpenAIProvider:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(self, request: ProviderRequest) -> Iterator[ProviderEvent]:
        """Answer one request; see `Provider.stream`.

        Raises:
            UnsupportedCapability, UnsupportedContent: not supported by the server or the API; nothing is sent.
            NetworkFailure, AuthenticationFailed, ServiceUnavailable, InvalidProviderAnswer, ProviderError, RateLimited,
            QuotaExceeded, ContextOverflow, ModelNotFound, Refusal: (while iterating) errors of the server or the
                network.
        """
        require(self, request)
        return self._events(request, wire.request_body(request, self.model, extensions=self.extensions))

    def _events(self, request: ProviderRequest, body: dict[str, Any]) -> Iterator[ProviderEvent]:
        reader = wire.EventReader(self.name)
        if request.cancel.is_set():
            yield Done("cancelled")
            return
        arrived: queue.Queue[str | PippinError] = queue.Queue(_AT_ONCE)
        sending = event_loop.run_coroutine(self._send(body, arrived))
        try:
            while True:
                try:
                    item = arrived.get(timeout=_LOOK)
                except queue.Empty:
                    item = None
                if request.cancel.is_set():
                    yield Done("cancelled", reader.usage, reader.timing())
                    return
                if isinstance(item, PippinError):
                    raise item
                if item == _END:
                    break
                if item:
                    yield from self._read(reader, item)
            yield from reader.finish(request.transcript)
        finally:
            sending.cancel()

    def _read(self, reader: wire.EventReader, item: str) -> list[ProviderEvent]:
        try:
            return reader.read(item)
        except PippinError as error:
            raise self._clean(error) from None

    # --- in the background loop ---------------------------------------------------------------------------------------

    async def _send(self, body: dict[str, Any], arrived: queue.Queue[str | PippinError]) -> None:
        """Send the request, with retries, and pass on the answer message by message."""
        wait = 0.5
        for tries_left in range(self.max_retries, -1, -1):
            try:
                await self._ask(body, arrived)
                return
            except _Again as again:
                pause = wait if again.wait is None else again.wait
                if not tries_left or pause > self.max_retry_wait:
                    await _put(arrived, self._clean(again.error))
                    return
                await asyncio.sleep(pause)
                wait *= 2
            except PippinError as error:
                await _put(arrived, self._clean(error))
                return
            except Exception as error:  # the reader of the answer must receive it
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
        """The error without the key, which servers may repeat."""
        for secret in self._secrets:
            error.args = tuple(arg.replace(secret, "***") if isinstance(arg, str) else arg for arg in error.args)
            if isinstance(explanation := getattr(error, "explanation", None), str):
                error.explanation = explanation.replace(secret, "***")  # type: ignore[attr-defined]
        return error


class _Again(Exception):
    """A temporary failure: the request may be retried after so many seconds (None: unknown)."""

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
    """The body, at most ``most`` bytes of it."""
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
