"""Attestation of a server: its signed quotes, and the keys that requests are sealed to.

Notable here:
- keys are in memory only and are replaced hourly; a request that was sealed to a deleted key cannot be opened
- a request opens once: opened requests are remembered until their key is deleted, and a full memory replaces the key
- models are hashed from their files when the node is created, before the first request
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument, SealBroken, StaleQuote
from pippin.core.store import reference
from pippin.core.trust import attestation, sealing
from pippin.core.trust.attestation import Quote, SoftwareRoot, TransparencyLog
from pippin.serve.settings import ServerSettings


@dataclass
class _Lease:
    """A key, the time since when it is in use, and the requests that it has opened."""

    key: sealing.NodeKey
    since: float
    seen: set[bytes] = field(default_factory=set)


class AttestedNode:
    """Signs quotes and opens sealed requests; thread-safe.

    Args:
        root: the key that signs the quotes.
        models: name to hash of the served models.
        settings: what the node stores and logs, as stated in the quote.
        log: the public log that lists its software; None gives no inclusion proof.
        rotate_after: seconds after which the key is replaced.
        keep_for: seconds for which the previous key still opens requests; above 0 and at most ``rotate_after``.
        max_seen: requests that one key opens before it is replaced early.
        clock: seconds since 1970.

    Raises:
        InvalidArgument: ``keep_for`` above ``rotate_after``. MissingDependency: cryptography is not installed.
    """

    @checked
    def __init__(
        self,
        root: SoftwareRoot,
        models: Mapping[str, str],
        settings: Mapping[str, Any],
        *,
        log: TransparencyLog | None = None,
        rotate_after: PositiveFloat = 3600.0,
        keep_for: PositiveFloat = 900.0,
        max_seen: PositiveInt = 65_536,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if keep_for > rotate_after:
            raise InvalidArgument(f"keep_for must be at most rotate_after ({rotate_after}), got {keep_for}")
        self.root, self.models, self.settings, self.log = root, dict(models), dict(settings), log
        self.rotate_after, self.keep_for, self.max_seen, self._clock = rotate_after, keep_for, max_seen, clock
        self.measurement = attestation.measure()
        self._lock = threading.Lock()
        self._current = _Lease(sealing.NodeKey(), clock())
        self._retired: _Lease | None = None

    @classmethod
    def of(cls, settings: ServerSettings, root: SoftwareRoot, log: TransparencyLog | None = None) -> AttestedNode:
        """The node of a server: its models and adapters are hashed, and its privacy settings included.

        Raises:
            ModelNotFound: a model that is not on this machine's disk. InvalidInput: an adapter that does not exist.
        """
        models = {
            name: attestation.model_hash(reference.resolve(given, download=False).path)
            for name, given in settings.references.items()
        }
        for name, folder in settings.adapters.items():
            full = name if ":" in name else f"{settings.default}:{name}"
            models[full] = attestation.model_hash(Path(folder))
        return cls(root, models, attested_settings(settings), log=log)

    def quote(self, nonce: str, log_root: str | None = None) -> dict[str, Any]:
        """A signed quote about the current state of the node, as a JSON document.

        Args:
            nonce: the client's, 64 hexadecimal digits.
            log_root: the root of the log that the client pinned; None takes the newest.

        Raises:
            InvalidArgument: an invalid nonce.
        """
        if len(nonce) != 64 or not set(nonce) <= set("0123456789abcdef"):
            raise InvalidArgument("nonce must be 64 lower-case hexadecimal digits, new for every quote")
        with self._lock:
            self._rotate()
            key = self._current.key.public.hex()
        quote = Quote(self.measurement, self.models, self.settings, key, nonce, self._clock())
        return self.root.sign(quote, self.log.prove(self.measurement, log_root) if self.log else None)

    def open(self, envelope: bytes) -> sealing.OpenedRequest:
        """Open a sealed request, once.

        Raises:
            StaleQuote: it is sealed to a key or a state that this node does not have (any more), or was changed.
            SealBroken: it is not a sealed request, or was opened before.
        """
        wanted, identity = sealing.addressed_to(envelope), sealing.identity(envelope)
        with self._lock:
            self._rotate()
            leases = [lease for lease in (self._current, self._retired) if lease and lease.key.id == wanted]
            if not leases:
                raise StaleQuote("the request is sealed to a key that this node does not have; ask for a new quote")
            (lease,) = leases
            if identity in lease.seen:
                raise SealBroken("this sealed request was opened before")
        binding = attestation.binding(self.measurement, self.models, self.settings, lease.key.public)
        try:
            opened = lease.key.open(envelope, binding)
        except SealBroken as error:
            raise StaleQuote(f"{error}; ask for a new quote") from error
        with self._lock:
            if identity in lease.seen:  # it was sent twice at the same time
                raise SealBroken("this sealed request was opened before")
            lease.seen.add(identity)
        return opened

    def _rotate(self) -> None:
        """Replace the key when it has expired, or when it has opened ``max_seen`` requests; delete the one before."""
        now, lease = self._clock(), self._current
        is_full = len(lease.seen) >= self.max_seen
        if is_full or now - lease.since >= self.rotate_after:
            self._current = _Lease(sealing.NodeKey(), now)
            # a full key must not be used on: what it opens could not be remembered
            self._retired = None if is_full else lease
        if self._retired and now - self._current.since >= self.keep_for:
            self._retired = None


def attested_settings(settings: ServerSettings) -> dict[str, Any]:
    """The part of a server's settings that a quote states.

    >>> attested_settings(ServerSettings())
    {'stateless': False, 'log_prompts': False, 'prompt_cache': False, 'guardrails': 'off', 'mcp': False}
    """
    return {
        "stateless": settings.stateless,
        "log_prompts": settings.log_prompts,
        "prompt_cache": settings.prompt_cache is not None,
        "guardrails": settings.guardrails,
        "mcp": settings.mcp,
    }
