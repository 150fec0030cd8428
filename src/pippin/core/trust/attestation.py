"""What a node says about itself (a quote), who signs it, the public log of software, and the policy that judges it.

Notable here:
- a quote is signed as the text that is sent, so there is nothing to be made canonical and nothing to be parsed first
- the root is a key in a file (`SoftwareRoot`): it shows that the one who runs the server says so, and protects from
  everyone but that one. Whoever has the key can sign any quote; no hardware stands behind it
- the log is a text file, one measurement a line, over which a Merkle tree shows that a line is in it
- a check fails with the error that names its cause, and all of them come before anything is sent
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pippin.core import files
from pippin.core.checks import PositiveFloat, checked
from pippin.core.errors import (
    BadSignature,
    CorruptedFile,
    InvalidArgument,
    InvalidInput,
    MissingDependency,
    ModelMismatch,
    NotInLog,
    ReplayedQuote,
    SettingsMismatch,
    StaleQuote,
    UnknownMeasurement,
)
from pippin.core.store import catalog
from pippin.core.trust import merkle

_HEX64 = re.compile(r"[0-9a-f]{64}")
_PREFIX = b"pippin quote 1\n"
_CLOCKS_APART = 30.0  # seconds that a node's clock may be ahead
STATELESS = {"stateless": True, "log_prompts": False}


@dataclass(frozen=True)
class Quote:
    """What a node says about itself.

    Args:
        measurement: of the software, as `measure` gives it.
        models: name to hash of what it serves, as `model_hash` gives it.
        settings: what it keeps and logs.
        key: the X25519 key that requests are to be sealed to, in hexadecimal.
        nonce: the client's, in hexadecimal.
        time: seconds since 1970 by the node's clock.
        root: what stands behind the signature. "software" is a key in a file.
    """

    measurement: str
    models: Mapping[str, str]
    settings: Mapping[str, Any]
    key: str
    nonce: str
    time: float
    root: Literal["software"] = "software"

    @property
    def binding(self) -> bytes:
        """What a sealed request is bound to: all but nonce and time, 32 bytes."""
        return binding(self.measurement, self.models, self.settings, bytes.fromhex(self.key))


def binding(measurement: str, models: Mapping[str, str], settings: Mapping[str, Any], key: bytes) -> bytes:
    """A hash over the state of a node; a request that is sealed under another state does not open.

    >>> binding("0", {"a": "1"}, {}, b"k") == binding("0", {"a": "2"}, {}, b"k")
    False
    """
    state = [measurement, dict(models), dict(settings), key.hex()]
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).digest()


# --- measuring --------------------------------------------------------------------------------------------------------


@cache
def measure() -> str:
    """A hash over the files of the installed Pippin and the versions of Python and of what Pippin requires.

    It is taken by the program that it measures: it tells versions apart, and does not convict a liar.
    """
    folder = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256(_listing((path for path in folder.rglob("*") if path.suffix != ".pyc"), folder))
    for name, version in versions().items():
        digest.update(f"{name}=={version}\n".encode())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python, Pippin and the libraries that a server requires, as far as they are here."""
    import platform

    from packaging.requirements import Requirement

    found = {"python": platform.python_version(), "pippin": metadata.version("pippin")}
    needs = [Requirement(text) for text in metadata.requires("pippin") or []]
    for name in sorted(
        {need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": "serve"})}
    ):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def model_hash(path: Path) -> str:
    """The SHA-256 of a model file, or of the list that ``sha256sum`` would print of a folder's files, by name.

    Hidden files do not count.

    Raises:
        InvalidInput: there is nothing.
    """
    if path.is_file():
        return files.sha256_of(path)
    shown = (each for each in path.rglob("*") if not any(part[0] == "." for part in each.relative_to(path).parts))
    listing = _listing(shown, path)
    if not listing:
        raise InvalidInput(f"{path} holds no model to measure")
    return hashlib.sha256(listing).hexdigest()


def _listing(paths: Iterable[Path], folder: Path) -> bytes:
    named = sorted((path.relative_to(folder).as_posix(), path) for path in paths if path.is_file())
    return b"".join(f"{files.sha256_of(path)}  {name}\n".encode() for name, path in named)


# --- signing ----------------------------------------------------------------------------------------------------------


class SoftwareRoot:
    """An Ed25519 key in a file, which signs quotes. It proves nothing against the one who holds it.

    Raises:
        MissingDependency: cryptography is not installed.
    """

    def __init__(self, private: Any) -> None:
        self._private = private
        self.public: str = private.public_key().public_bytes_raw().hex()

    @classmethod
    def create(cls, path: Path | None = None) -> SoftwareRoot:
        """A new key, written to ``path`` where only its owner can read it; None keeps it in memory.

        Raises:
            InvalidInput: there is a file already.
        """
        _, ed25519, serialization = _crypto()
        private = ed25519.Ed25519PrivateKey.generate()
        if path is not None:
            text = private.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError as error:
                raise InvalidInput(f"{path} exists; a root key is never replaced") from error
            with os.fdopen(handle, "wb") as file:
                file.write(text)
        return cls(private)

    @classmethod
    def load(cls, path: Path) -> SoftwareRoot:
        """Read a key that `create` wrote.

        Raises:
            InvalidInput: it cannot be read, or others can read it too. CorruptedFile: it holds no Ed25519 key.
        """
        _, ed25519, serialization = _crypto()
        try:
            mode, text = path.stat().st_mode, path.read_bytes()
        except OSError as error:
            raise InvalidInput(f"cannot read the root key {path}: {error.strerror}") from error
        if os.name == "posix" and mode & 0o077:
            raise InvalidInput(f"others can read the root key {path}; chmod 600 it, or better make a new one")
        try:
            private = serialization.load_pem_private_key(text, None)
        except (ValueError, TypeError) as error:
            raise CorruptedFile(f"{path} is not a private key in PEM form") from error
        if not isinstance(private, ed25519.Ed25519PrivateKey):
            raise CorruptedFile(f"{path} is not an Ed25519 key")
        return cls(private)

    def sign(self, quote: Quote, inclusion: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The document that a node sends: the quote, its signature, and its proof of being in the log."""
        statement = json.dumps(asdict(quote), sort_keys=True)
        signature = self._private.sign(_PREFIX + statement.encode()).hex()
        return {"statement": statement, "signer": self.public, "signature": signature, "inclusion": inclusion}


# --- the log ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TransparencyLog:
    """Measurements that were published, oldest first; each entry is one line of JSON, kept as it was written.

    >>> log = TransparencyLog().add("0" * 64, version="0.1.0")
    >>> log.entries
    (b'{"measurement": "0000000000000000000000000000000000000000000000000000000000000000", "version": "0.1.0"}',)
    """

    entries: tuple[bytes, ...] = ()

    @classmethod
    def read(cls, path: Path) -> TransparencyLog:
        """Read a log file.

        Raises:
            InvalidInput: it cannot be read. CorruptedFile: a line is no entry.
        """
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise InvalidInput(f"cannot read the log {path}: {error.strerror}") from error
        if lines[-1]:
            raise CorruptedFile(f"{path}: the last line does not end; an entry was cut off")
        for number, line in enumerate(lines[:-1], 1):
            if _measurement_of(line) is None:
                raise CorruptedFile(f"{path}: line {number} is not an entry with a measurement")
        return cls(tuple(lines[:-1]))

    def write(self, path: Path) -> None:
        """Write the log file, whole or not at all."""
        with files.atomic_write(path) as file:
            file.write(b"".join(entry + b"\n" for entry in self.entries))

    def add(self, measurement: str, **notes: str) -> TransparencyLog:
        """The log with one more entry.

        Raises:
            InvalidArgument: this is no measurement.
        """
        _require_hash("measurement", measurement)
        return TransparencyLog((*self.entries, json.dumps({"measurement": measurement, **notes}).encode()))

    @property
    def root(self) -> str:
        """The root of the tree over all entries, 64 hexadecimal digits."""
        return merkle.root_hash(self.entries).hex()

    def prove(self, measurement: str, root: str | None = None) -> dict[str, Any] | None:
        """A proof that a measurement is in the log with that root (None: the newest); None where it is not.

        ``root`` may be one that the log had when it was shorter, so that a client that pinned it is served.
        """
        size = len(self.entries) if root is None else _roots(self.entries).get(root, 0)
        for index, entry in enumerate(self.entries[:size]):
            if _measurement_of(entry) == measurement:
                path = [part.hex() for part in merkle.prove_inclusion(self.entries[:size], index)]
                return {"entry": entry.decode(), "index": index, "size": size, "path": path}
        return None

    def extends(self, root: str) -> bool:
        """Whether this log began as the one with that root, so that nothing was taken out or changed."""
        return root in _roots(self.entries)


@cache
def _roots(entries: tuple[bytes, ...]) -> dict[str, int]:
    """The roots that a log has had, with its size at the time."""
    return {root.hex(): size for size, root in enumerate(merkle.root_hashes(entries))}


def _measurement_of(entry: bytes) -> str | None:
    try:
        found = json.loads(entry)["measurement"]
    except (ValueError, TypeError, KeyError):
        return None
    return found if isinstance(found, str) and _HEX64.fullmatch(found) else None


# --- judging ----------------------------------------------------------------------------------------------------------


@checked
@dataclass(frozen=True)
class AttestationPolicy:
    """What a client demands of a node before it sends anything.

    Args:
        measurements: software that it trusts.
        roots: public keys of the roots whose signatures it accepts, in hexadecimal.
        max_age: seconds that a quote may be old.
        require_log: whether the measurement must be in the public log too.
        log_root: the root of that log, as the client learned it from elsewhere than the node.
        models: name to hash; a model that is not named here must be one file of the catalog.
        settings: what the node must say that it keeps and logs.

    Raises:
        InvalidArgument: a hash or key that is none, no roots, a log without its root.
    """

    measurements: Collection[str]
    roots: Collection[str]
    max_age: PositiveFloat = 600.0
    require_log: bool = True
    log_root: str | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=lambda: dict(STATELESS))

    def __post_init__(self) -> None:
        for name in ("measurements", "roots"):
            given = getattr(self, name)
            if isinstance(given, str) or not given:
                raise InvalidArgument(f"{name} must be a list of one or more, got {given!r}")
            for text in given:
                _require_hash(name, text)
        for model, text in self.models.items():
            _require_hash(f"models[{model!r}]", text)
        if self.require_log and self.log_root is None:
            raise InvalidArgument("log_root is missing; give the log's root, or say require_log=False")
        if self.log_root is not None:
            _require_hash("log_root", self.log_root)

    def check(self, document: Any, *, nonce: str, model: str, now: float) -> Quote:
        """Judge what a node sent.

        Args:
            document: its answer, out of JSON.
            nonce: what it was asked with, in hexadecimal.
            model: what is to be used.
            now: seconds since 1970.

        Raises:
            BadSignature, ReplayedQuote, StaleQuote, UnknownMeasurement, SettingsMismatch, NotInLog, ModelMismatch: the
                first check that fails, in this order.
        """
        quote = self._signed(document)
        if quote.nonce != nonce:
            raise ReplayedQuote("the quote answers another nonce than the one that was sent; it was recorded earlier")
        self.check_age(quote, now)
        if quote.measurement not in self.measurements:
            raise UnknownMeasurement(f"the node runs software {quote.measurement}, which the policy does not name")
        for name, wanted in self.settings.items():
            if quote.settings.get(name) != wanted:
                raise SettingsMismatch(
                    f"the node says {name} is {quote.settings.get(name)!r}, the policy wants {wanted!r}"
                )
        if self.require_log:
            self._logged(quote, document.get("inclusion"))
        self.check_model(quote, model)
        return quote

    def check_age(self, quote: Quote, now: float) -> None:
        """Raises `StaleQuote` unless the quote was made within the last ``max_age`` seconds."""
        age = now - quote.time
        if not -_CLOCKS_APART <= age <= self.max_age:
            raise StaleQuote(f"the quote is {age:.0f} seconds old, the policy allows 0 to {self.max_age:g}")

    def check_model(self, quote: Quote, model: str) -> None:
        """Raises `ModelMismatch` unless the node serves that model with the hash that the client knows."""
        wanted = self.models.get(model) or _catalog_hash(model)
        if wanted is None:
            raise ModelMismatch(f"there is no hash to know {model!r} by; give one in the policy's models")
        served = quote.models.get(model)
        if served != wanted:
            what = "does not serve it" if served is None else f"serves another of that name, {served}"
            raise ModelMismatch(f"{model!r} must have the hash {wanted}; the node {what}")

    def _signed(self, document: Any) -> Quote:
        invalid, ed25519, _ = _crypto()
        try:
            statement, signer = document["statement"], document["signer"]
            if signer not in self.roots:
                raise BadSignature(f"the quote is signed by {signer!r:.80}, which is none of the policy's roots")
            key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer))
            key.verify(bytes.fromhex(document["signature"]), _PREFIX + statement.encode())
            quote = _read(json.loads(statement))
        except invalid as error:
            raise BadSignature("the signature does not fit the quote; it was changed after it was signed") from error
        except (KeyError, TypeError, ValueError, RecursionError, AttributeError) as error:
            raise BadSignature("what the node sent is not a signed quote") from error
        if quote.root != "software":
            raise BadSignature(f"the quote claims the root {quote.root!r}, which is not one that can be checked here")
        return quote

    def _logged(self, quote: Quote, inclusion: Any) -> None:
        try:
            entry, index, size = inclusion["entry"].encode(), inclusion["index"], inclusion["size"]
            path = [bytes.fromhex(part) for part in inclusion["path"]]
            root = bytes.fromhex(self.log_root or "")
            is_in = merkle.verify_inclusion(entry, int(index), int(size), path, root)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise NotInLog("the node sent no proof that its software is in the public log") from error
        if not is_in or _measurement_of(entry) != quote.measurement:
            raise NotInLog("the proof does not show the node's software in the log that the policy names")


def _read(fields: Any) -> Quote:
    """The quote in a statement; TypeError or ValueError where it is none."""
    quote = Quote(**fields)
    texts = (quote.measurement, quote.key, quote.nonce, *quote.models.values())
    if not all(isinstance(text, str) and _HEX64.fullmatch(text) for text in texts):
        raise ValueError("a hash, a key or a nonce is none")
    if not isinstance(quote.settings, dict) or not isinstance(quote.time, int | float):
        raise TypeError("settings or time are none")
    return quote


def _catalog_hash(model: str) -> str | None:
    """The hash of a model that is one file of the catalog."""
    entry = catalog.find(model)
    known: Sequence[catalog.File] = entry.files if entry else ()
    return known[0].sha256 if len(known) == 1 and entry and known[0].size == entry.size else None


def _require_hash(name: str, text: Any) -> None:
    if not isinstance(text, str) or not _HEX64.fullmatch(text):
        raise InvalidArgument(f"{name}: 64 lower-case hexadecimal digits are wanted, got {text!r:.80}")


@cache
def _crypto() -> tuple[Any, Any, Any]:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingDependency("attestation needs cryptography: pip install 'pippin[serve]'") from error
    return InvalidSignature, ed25519, serialization
