"""The node behind a server: what it says about itself, and the keys that requests to it are sealed to.

Notable here:
- keys live in memory only and are replaced on the hour; what was sealed to a key that is gone cannot be opened again
- a request opens once: what was seen under a key is remembered until the key goes, and a full memory retires the key
- models are measured from the files when the node is made, before the first request
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pippin.core import attestation, reference, sealing
from pippin.core.attestation import Log, Quote, SoftwareRoot
from pippin.core.errors import InvalidArgument, SealBroken, StaleQuote
from pippin.serve.settings import Settings


@dataclass
class _Lease:
    """A key, since when it is in use, and which requests it has opened."""

    key: sealing.NodeKey
    since: float
    seen: set[bytes] = field(default_factory=set)


class Node:
    """Signs quotes and opens sealed requests; safe from several threads.

    Args:
        root: signs the quotes.
        models: name to hash of what is served.
        settings: what the node keeps and logs, as the quote says it.
        log: the public log in which its software stands; None proves nothing.
        rotate_after: seconds after which a new key is used.
        keep_for: seconds that the key before it still opens requests; above 0 and at most ``rotate_after``.
        max_seen: requests that one key opens before it is replaced early.
        clock: seconds since 1970.

    Raises:
        InvalidArgument: a time or number out of range. MissingDependency: cryptography is not installed.
    """

    def __init__(
        self,
        root: SoftwareRoot,
        models: Mapping[str, str],
        settings: Mapping[str, Any],
        *,
        log: Log | None = None,
        rotate_after: float = 3600.0,
        keep_for: float = 900.0,
        max_seen: int = 65_536,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not 0 < keep_for <= rotate_after:
            raise InvalidArgument(f"keep_for must be above 0 and at most rotate_after ({rotate_after}), got {keep_for}")
        if max_seen < 1:
            raise InvalidArgument(f"max_seen must be at least 1, got {max_seen}")
        self.root, self.models, self.settings, self.log = root, dict(models), dict(settings), log
        self.rotate_after, self.keep_for, self.max_seen, self._clock = rotate_after, keep_for, max_seen, clock
        self.measurement = attestation.measure()
        self._lock = threading.Lock()
        self._current = _Lease(sealing.NodeKey(), clock())
        self._retired: _Lease | None = None

    @classmethod
    def of(cls, settings: Settings, root: SoftwareRoot, log: Log | None = None) -> Node:
        """The node of a server: its models and adapters measured, its settings as far as they are about privacy.

        Raises:
            ModelNotFound: a model that is not on this machine's disk. InvalidInput: an adapter that is not there.
        """
        models = {
            name: attestation.model_hash(reference.resolve(given, download=False).path)
            for name, given in settings.references.items()
        }
        for name, folder in settings.adapters.items():
            full = name if ":" in name else f"{settings.default}:{name}"
            models[full] = attestation.model_hash(Path(folder))
        return cls(root, models, facts(settings), log=log)

    def quote(self, nonce: str, log_root: str | None = None) -> dict[str, Any]:
        """What the node says about itself now, signed, as a document for JSON.

        Args:
            nonce: the client's, 64 hexadecimal digits.
            log_root: the root of the log that the client knows; None takes the newest.

        Raises:
            InvalidArgument: a nonce that is none.
        """
        if len(nonce) != 64 or not set(nonce) <= set("0123456789abcdef"):
            raise InvalidArgument("nonce must be 64 lower-case hexadecimal digits, new for every quote")
        with self._lock:
            self._rotate()
            key = self._current.key.public.hex()
        quote = Quote(self.measurement, self.models, self.settings, key, nonce, self._clock())
        return self.root.sign(quote, self.log.prove(self.measurement, log_root) if self.log else None)

    def open(self, envelope: bytes) -> sealing.Opened:
        """Open a sealed request, once.

        Raises:
            StaleQuote: it is sealed to a key or a state that this node does not have (any more), or was changed.
            SealBroken: it is no sealed request, or was opened before.
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
            if identity in lease.seen:  # somebody sent it twice at the same time
                raise SealBroken("this sealed request was opened before")
            lease.seen.add(identity)
        return opened

    def _rotate(self) -> None:
        """A new key when it is time, or when this one has opened as much as is remembered; forget the one before."""
        now, lease = self._clock(), self._current
        is_full = len(lease.seen) >= self.max_seen
        if is_full or now - lease.since >= self.rotate_after:
            self._current = _Lease(sealing.NodeKey(), now)
            # a full key must not go on: what it opens could not be remembered
            self._retired = None if is_full else lease
        if self._retired and now - self._current.since >= self.keep_for:
            self._retired = None


def facts(settings: Settings) -> dict[str, Any]:
    """What a quote says about the settings of a server.

    >>> facts(Settings())
    {'stateless': False, 'log_prompts': False, 'prompt_cache': False, 'guardrails': 'off', 'mcp': False}
    """
    return {
        "stateless": settings.stateless,
        "log_prompts": settings.log_prompts,
        "prompt_cache": settings.prompt_cache is not None,
        "guardrails": settings.guardrails,
        "mcp": settings.mcp,
    }
