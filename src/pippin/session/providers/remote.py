"""Provider for models on a Pippin server: unsealed, or sealed to a server that attested its software first.

Notable here:
- with a policy every request is sealed, and a server that fails one check of the policy gets no request
- availability and remaining quota can be queried without a prompt
- the quota is read from the headers of the answers, so it costs nothing and is as old as the last answer
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import httpx2

from pippin.core.errors import AttestationError, InvalidArgument, NetworkFailure, PippinError
from pippin.core.trust.attestation import AttestationPolicy, Quote
from pippin.session import event_loop
from pippin.session.providers import openai_messages as wire
from pippin.session.providers.openai import OpenAIProvider
from pippin.session.providers.sealed_transport import SealedTransport

__all__ = ["AttestationPolicy", "QuotaUsage", "RemoteAvailability", "RemoteModel"]

_APPROACHING: Final = 0.1  # share of a limit that is left
_DURATION: Final = re.compile(r"([\d.]+)(ms|s|m|h|d)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LIMITS: Final = ("x-ratelimit-{}-requests", "x-ratelimit-{}-tokens", "x-quota-{}-tokens")
_TOO_MANY: Final = 429


@dataclass(frozen=True)
class RemoteAvailability:
    """Whether a server can answer with a model now; ``detail`` has the reason if not."""

    available: bool
    reason: Literal["available", "offline", "refused_key", "not_found", "quota", "unavailable", "not_attested"]
    detail: str = ""


@dataclass(frozen=True)
class QuotaUsage:
    """Remaining quota of the tightest limit of a server.

    Args:
        state: "below_limit", or "limit_reached": the next request would be refused.
        is_approaching_limit: less than a tenth is left.
        resource: "requests" or "tokens"; empty if unknown.
        limit: size of the limit; None if unknown.
        remaining: what is left of it.
        resets_at: seconds since 1970 when the quota is full again; None if unknown.
    """

    state: Literal["below_limit", "limit_reached"]
    is_approaching_limit: bool
    resource: str = ""
    limit: int | None = None
    remaining: int | None = None
    resets_at: float | None = None


class RemoteModel(OpenAIProvider):
    """A model on a Pippin server, as a provider for sessions.

    Args:
        url: base URL of the API: ``https://host/v1``.
        model: the server's name of the model.
        api_key: sent as a bearer token, outside the seal; None for none.
        policy: what the server must prove before it is sent anything; None sends unsealed requests.
        timeout: seconds to connect, and to wait for the next byte.
        options: other options of `OpenAIProvider`.

    Raises:
        InvalidArgument: as `OpenAIProvider`. MissingDependency: a policy needs cryptography.

    >>> RemoteModel("http://127.0.0.1:8080/v1", model="smollm2-135m")
    RemoteModel('http://127.0.0.1:8080/v1', 'smollm2-135m')
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        policy: AttestationPolicy | None = None,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        for name in ("path", "extensions"):
            if name in options:
                raise InvalidArgument(f"{name} is what a Pippin server has; for another one there is OpenAIProvider")
        super().__init__(url, model, api_key=api_key, timeout=timeout, extensions=True, **options)
        self.policy = policy
        self.quota: QuotaUsage | None = None
        """Remaining quota of the server's limits, from its last answer; None if it had none."""
        self._seal: SealedTransport | None = None

    def attest(self) -> Quote:
        """Request a quote of the server now, and check it against the policy.

        Raises:
            AttestationError: the check that failed. InvalidArgument: there is no policy. NetworkFailure: no answer.
        """
        self._open()
        if self._seal is None:
            raise InvalidArgument("there is no policy to check against; RemoteModel(…, policy=AttestationPolicy(…))")
        try:
            return event_loop.run_coroutine(self._seal.verify(self.model)).result(self.timeout)
        except (httpx2.TransportError, TimeoutError) as error:
            raise NetworkFailure(f"cannot reach {self.name}: {error or type(error).__name__}") from error

    def availability(self) -> RemoteAvailability:
        """Query whether the server can answer with this model now; includes the check of the policy."""
        try:
            response = event_loop.run_coroutine(self._ask_for_models()).result(self.timeout)
            if response.status_code != 200:
                raise self._clean(wire.failure(self.name, response.status_code, response.text, response.headers))
            names = [entry["id"] for entry in response.json()["data"]]
            if self.policy is not None:
                self.attest()
        except (httpx2.TransportError, TimeoutError) as error:
            return RemoteAvailability(False, "offline", f"cannot reach {self.name}: {error or type(error).__name__}")
        except (ValueError, TypeError, KeyError, PippinError) as error:
            return RemoteAvailability(False, _reason(error), str(error))
        if self.model not in names:
            known = ", ".join(names) or "none"
            return RemoteAvailability(False, "not_found", f"{self.base_url} serves {known}, not {self.model!r}")
        return RemoteAvailability(True, "available")

    async def _ask_for_models(self) -> httpx2.Response:
        return await self._open().get(f"{self.base_url.rstrip('/')}/models", headers=self._headers)

    def _open(self) -> httpx2.AsyncClient:
        with self._lock:
            if self._client is None:
                self._seal = SealedTransport(self.base_url, self.policy) if self.policy is not None else None
                self._client = httpx2.AsyncClient(
                    transport=self._seal,
                    timeout=self.timeout,
                    follow_redirects=False,
                    event_hooks={"response": [self._note]},
                )
            return self._client

    async def _note(self, response: httpx2.Response) -> None:
        self.quota = read_quota(response.headers, response.status_code) or self.quota


def read_quota(headers: Mapping[str, str], status: int, *, clock: Callable[[], float] = time.time) -> QuotaUsage | None:
    """The quota in the headers of an answer, for the tightest limit; None if there is none.

    Args:
        headers: headers of the answer, names in lower case or a case-insensitive mapping.
        status: status of the answer; 429 means that a limit was reached, whatever the headers are.
        clock: seconds since 1970.

    >>> quota = read_quota({"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "3"}, 200)
    >>> quota.state, quota.is_approaching_limit, quota.resource, quota.remaining
    ('below_limit', True, 'requests', 3)
    """
    refused = status == _TOO_MANY
    wait = wire.retry_after(headers) if refused else None
    limits = [found for pattern in _LIMITS if (found := _read_limit(headers, pattern)) is not None]
    if not limits:
        return QuotaUsage("limit_reached", True, resets_at=_after(wait, clock)) if refused else None
    tightest = min(limits, key=lambda each: each.remaining / each.limit)
    reached = refused or tightest.remaining == 0
    return QuotaUsage(
        state="limit_reached" if reached else "below_limit",
        is_approaching_limit=reached or tightest.remaining / tightest.limit < _APPROACHING,
        resource=tightest.resource,
        limit=tightest.limit,
        remaining=tightest.remaining,
        resets_at=_after(tightest.resets_in if wait is None else wait, clock),
    )


class _Limit(NamedTuple):
    """One limit, from three headers."""

    resource: str
    limit: int
    remaining: int
    resets_in: float | None  # seconds


def _read_limit(headers: Mapping[str, str], pattern: str) -> _Limit | None:
    """The limit in the headers of a pattern; None if its size or its remaining amount is missing."""
    limit = _whole_number(headers.get(pattern.format("limit")))
    remaining = _whole_number(headers.get(pattern.format("remaining")))
    if not limit or remaining is None:
        return None
    resource = pattern.rpartition("-")[2]
    return _Limit(resource, limit, remaining, parse_duration(headers.get(pattern.format("reset"), "")))


def _after(seconds: float | None, clock: Callable[[], float]) -> float | None:
    return None if seconds is None else clock() + seconds


def parse_duration(text: str) -> float | None:
    """A duration in the format of headers; None if it is invalid.

    >>> parse_duration("6m0.5s"), parse_duration("120ms"), parse_duration("soon")
    (360.5, 0.12, None)
    """
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text.strip():
        return None
    try:
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)
    except ValueError:
        return None


def _whole_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _reason(
    error: Exception,
) -> Literal["refused_key", "not_found", "quota", "unavailable", "not_attested", "offline"]:
    from pippin.core import errors

    for kind, reason in (
        (AttestationError, "not_attested"),
        (errors.AuthenticationFailed, "refused_key"),
        (errors.ModelNotFound, "not_found"),
        (errors.RateLimited, "quota"),
        (NetworkFailure, "offline"),
    ):
        if isinstance(error, kind):
            return reason  # type: ignore[return-value]
    return "unavailable"
