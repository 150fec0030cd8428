"""A model on a Pippin server: in the open, or sealed to a node that proved what it runs before it was sent anything.

Notable here:
- with a policy every question is sealed, and a node that fails one check of the policy gets no question
- whether the server can answer now, and how much of its limits is left, can be asked without a question
- what is left is read from the heads of the answers, so it costs nothing and is as old as the last answer
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import httpx2

from pippin.core.attestation import AttestationPolicy, Quote
from pippin.core.errors import AttestationError, InvalidArgument, NetworkFailure, PippinError
from pippin.session import background, openai_wire as wire
from pippin.session.openai_provider import OpenAIProvider
from pippin.session.sealed import SealedTransport

__all__ = ["AttestationPolicy", "QuotaUsage", "RemoteAvailability", "RemoteModel"]

_APPROACHING: Final = 0.1  # of a limit that is left
_DURATION: Final = re.compile(r"([\d.]+)(ms|s|m|h|d)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LIMITS: Final = ("x-ratelimit-{}-requests", "x-ratelimit-{}-tokens", "x-quota-{}-tokens")
_TOO_MANY: Final = 429


@dataclass(frozen=True)
class RemoteAvailability:
    """Whether a server can answer with a model now; ``detail`` says why not."""

    available: bool
    reason: Literal["available", "offline", "refused_key", "not_found", "quota", "unavailable", "not_attested"]
    detail: str = ""


@dataclass(frozen=True)
class QuotaUsage:
    """What is left of the tightest limit of a server.

    Args:
        state: "below_limit", or "limit_reached": the next request would be refused.
        is_approaching_limit: less than a tenth is left.
        what: "requests" or "tokens"; empty where the server did not say.
        limit: of them; None where it did not say.
        remaining: of them.
        resets_at: seconds since 1970 when all is free again; None where it did not say.
    """

    state: Literal["below_limit", "limit_reached"]
    is_approaching_limit: bool
    what: str = ""
    limit: int | None = None
    remaining: int | None = None
    resets_at: float | None = None


class RemoteModel(OpenAIProvider):
    """A model on a Pippin server, as a provider for sessions.

    Args:
        url: where the interface begins: ``https://host/v1``.
        model: the name by which the server knows the model.
        api_key: sent as a bearer token, outside the seal; None for none.
        policy: what the server must prove before it is sent anything; None sends in the open.
        timeout: seconds to connect, and to wait for the next byte.
        options: the others of `OpenAIProvider`.

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
        """What is left of the server's limits, as its last answer said; None where it said nothing."""
        self._seal: SealedTransport | None = None

    def attest(self) -> Quote:
        """Ask the server now what it is, and check it against the policy.

        Raises:
            AttestationError: the check that failed. InvalidArgument: there is no policy. NetworkFailure: no answer.
        """
        self._open()
        if self._seal is None:
            raise InvalidArgument("there is no policy to check against; RemoteModel(…, policy=AttestationPolicy(…))")
        try:
            return background.start(self._seal.verify(self.model)).result(self.timeout)
        except (httpx2.TransportError, TimeoutError) as error:
            raise NetworkFailure(f"cannot reach {self.name}: {error or type(error).__name__}") from error

    def availability(self) -> RemoteAvailability:
        """Ask the server whether it can answer with this model now; the check of the policy is part of it."""
        try:
            response = background.start(self._ask_for_models()).result(self.timeout)
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
    """What the head of an answer says about limits; None where it says nothing.

    Args:
        headers: of the answer, names in lower case or a case-blind mapping.
        status: 429 is a limit that was met, whatever the figures say.
        clock: seconds since 1970.

    >>> read_quota({"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "3"}, 200)
    QuotaUsage(state='below_limit', is_approaching_limit=True, what='requests', limit=60, remaining=3, resets_at=None)
    """
    found = []
    for pattern in _LIMITS:
        limit, remaining = (_whole(headers.get(pattern.format(word))) for word in ("limit", "remaining"))
        if limit and remaining is not None:
            left = seconds(headers.get(pattern.format("reset"), ""))
            found.append((remaining / limit, pattern.rpartition("-")[2], limit, remaining, left))
    wait = wire.retry_after(headers) if status == _TOO_MANY else None
    if not found:
        if status != _TOO_MANY:
            return None
        return QuotaUsage("limit_reached", True, resets_at=None if wait is None else clock() + wait)
    share, what, limit, remaining, left = min(found, key=lambda each: each[0])
    left = left if wait is None else wait
    reached = status == _TOO_MANY or remaining == 0
    return QuotaUsage(
        "limit_reached" if reached else "below_limit",
        reached or share < _APPROACHING,
        what,
        limit,
        remaining,
        None if left is None else clock() + left,
    )


def seconds(text: str) -> float | None:
    """A duration as headers write it; None for what is none.

    >>> seconds("6m0.5s"), seconds("120ms"), seconds("soon")
    (360.5, 0.12, None)
    """
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text.strip():
        return None
    try:
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)
    except ValueError:
        return None


def _whole(text: str | None) -> int | None:
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
