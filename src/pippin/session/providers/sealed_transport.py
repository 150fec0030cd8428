"""HTTP transport that seals every request to a server after checking its attestation.

Notable here:
- attestation comes first: nothing of a request is sent before quote, log and model have been checked
- the client above it (`RemoteModel`) is unaware of it; it posts JSON and reads events as usual
- an unsealed answer is never accepted; only an error may be unsealed, such as a rate limit
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2

from pippin.core.errors import AttestationError, BadSignature, InvalidProviderAnswer, SealBroken, UnsupportedCapability
from pippin.core.trust.attestation import AttestationPolicy, Quote
from pippin.core.trust.sealing import MEDIA_TYPE, ReplyOpener, seal_request

_KEPT = ("authorization", "user-agent")  # the only headers that the outer request copies from the inner one
_LIMITS = ("x-ratelimit-", "x-quota-", "retry-after")  # sent unsealed too, since they are about the caller
_LONGEST_QUOTE = 1 << 20  # bytes


class SealedTransport(httpx2.AsyncBaseTransport):
    """Seals requests to one server.

    Args:
        base_url: the server's base URL, `https://host/v1`.
        policy: what the server must prove.
        transport: carries the sealed requests; None for httpx2's own.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        base_url: str,
        policy: AttestationPolicy,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.base_url, self.policy = base_url.rstrip("/"), policy
        self._transport = transport or httpx2.AsyncHTTPTransport()
        self._clock = clock
        self._quote: Quote | None = None
        self._lock = asyncio.Lock()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Seal a request and open its answer; the list of models is requested unsealed.

        Raises:
            AttestationError: one of its subclasses, before anything of the request was sent.
            SealBroken: the answer was changed or cut off, or was not sealed.
            UnsupportedCapability: a request that cannot be sealed, such as one to another server.
        """
        path = self._path(request)
        if request.method == "GET" and path.partition("/")[0] == "models":
            return await self._transport.handle_async_request(request)
        if request.method != "POST":
            raise UnsupportedCapability(f"{request.method} {path} cannot be sealed, and would go in the open")
        body = await request.aread()
        for is_second in (False, True):
            quote = await self._verified(request, _model(body))
            if isinstance(quote, httpx2.Response):
                return quote
            payload = json.dumps({"path": f"/v1/{path}"}).encode() + b"\n" + body
            envelope, opener = seal_request(bytes.fromhex(quote.key), quote.binding, payload)
            headers = {**_outer(request), "content-type": MEDIA_TYPE, "accept-encoding": "identity"}
            response = await self._send("POST", "sealed", request, headers=headers, content=envelope)
            if response.status_code == 409 and not is_second:  # the server has other keys now, or another state
                await response.aclose()
                self._quote = None
                continue
            return await _opened(response, opener)
        raise AssertionError  # the second round returns

    async def verify(self, model: str) -> Quote:
        """Request a quote now and check it, without sending anything else.

        Raises:
            AttestationError: one of its subclasses, or because the server offers no quote.
        """
        request = httpx2.Request("POST", f"{self.base_url}/sealed")
        self._quote = None
        quote = await self._verified(request, model)
        if isinstance(quote, httpx2.Response):
            await quote.aclose()
            raise AttestationError(f"the server offers no quote: it answered {quote.status_code}")
        return quote

    async def _verified(self, request: httpx2.Request, model: str) -> Quote | httpx2.Response:
        """A valid quote for that model; or the server's error, if it does not return one."""
        async with self._lock:
            quote = self._quote
            if quote is not None and self._clock() - quote.time > self.policy.max_age:
                quote = None
            if quote is None:
                nonce = os.urandom(32).hex()
                query = f"nonce={nonce}" + (f"&log_root={self.policy.log_root}" if self.policy.log_root else "")
                response = await self._send("GET", f"attestation?{query}", request, headers=_outer(request))
                if response.status_code == 404:
                    await response.aclose()
                    raise AttestationError(f"the server at {self.base_url} offers no quote (404)")
                if response.status_code >= 400:
                    return response
                quote = self.policy.check(await _json(response), nonce=nonce, model=model, now=self._clock())
                self._quote = quote
        self.policy.check_model(quote, model)
        return quote

    async def _send(self, method: str, path: str, inner: httpx2.Request, **parts: Any) -> httpx2.Response:
        extensions = {"timeout": inner.extensions["timeout"]} if "timeout" in inner.extensions else {}
        outer = httpx2.Request(method, f"{self.base_url}/{path}", extensions=extensions, **parts)
        return await self._transport.handle_async_request(outer)

    def _path(self, request: httpx2.Request) -> str:
        """The path after the base URL."""
        url = str(request.url).partition("?")[0]
        if not url.startswith(self.base_url + "/"):
            raise UnsupportedCapability(f"requests are sealed to {self.base_url}, this one goes to {request.url.host}")
        return url.removeprefix(self.base_url + "/")


class _Opening(httpx2.AsyncByteStream):
    """The body of an answer, opened part by part."""

    def __init__(self, parts: AsyncIterator[bytes], outer: httpx2.Response) -> None:
        self._parts, self._outer = parts, outer

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts

    async def aclose(self) -> None:
        await self._outer.aclose()


async def _opened(response: httpx2.Response, opener: ReplyOpener) -> httpx2.Response:
    """The inner answer of a sealed one."""
    kind = response.headers.get("content-type", "")
    if response.status_code >= 400 and kind != MEDIA_TYPE:
        return response
    if response.status_code != 200 or kind != MEDIA_TYPE:
        await response.aclose()
        raise SealBroken(f"the server answered in the open ({response.status_code}, {kind or 'no media type'})")
    parts = _parts(response, opener)
    try:
        head = json.loads(await anext(parts))
        limits = [pair for pair in response.headers.items() if pair[0].startswith(_LIMITS)]
        headers = [*limits, *map(tuple, head["headers"])]
        found = httpx2.Response(head["status"], headers=headers, stream=_Opening(parts, response))
    except StopAsyncIteration as error:
        raise SealBroken("the sealed answer has no beginning") from error
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidProviderAnswer("the sealed answer does not begin with a status") from error
    return found


async def _parts(response: httpx2.Response, opener: ReplyOpener) -> AsyncIterator[bytes]:
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    try:
        async for received in response.stream:
            for part in opener.feed(received):
                yield part
        opener.finish()
    finally:
        await response.aclose()


async def _json(response: httpx2.Response) -> Any:
    """The JSON of a short answer; anything longer or invalid is not a quote."""
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    body = bytearray()
    try:
        async for received in response.stream:
            body += received
            if len(body) > _LONGEST_QUOTE:
                raise BadSignature(f"what the node sent as its quote is longer than {_LONGEST_QUOTE:,} bytes")
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadSignature("what the node sent as its quote is not JSON") from error
    finally:
        await response.aclose()


def _outer(request: httpx2.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _KEPT if name in request.headers}


def _model(body: bytes) -> str:
    """The model that a request names."""
    try:
        found = json.loads(body)["model"]
    except (ValueError, TypeError, KeyError) as error:
        raise UnsupportedCapability("a request that names no model cannot be sealed") from error
    return str(found)
