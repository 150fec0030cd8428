"""Remote attestation: quotes of a node, the key that signs them, the transparency log, and the client's policy.

Notable here:
- the signature covers the text of the quote as sent, so no canonical form is needed and nothing is parsed before it
- the root of trust is a key in a file (`SoftwareRoot`), not hardware: whoever has the key can sign any quote, so it
  protects against everyone but the operator of the server
- the log is a text file with one measurement per line; a Merkle tree proves that a line is in it
- each check has an error of its own, and all checks are done before anything is sent
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
_CLOCK_SKEW = 30.0  # seconds that a node's clock may be ahead
STATELESS = {"stateless": True, "log_prompts": False}


@dataclass(frozen=True)
class Quote:
    """A node's statement about itself.

    Args:
        measurement: hash of the software, from `measure`.
        models: hash of each served model by name, from `model_hash`.
        settings: what the node stores and logs.
        key: the X25519 public key to seal requests to, in hexadecimal.
        nonce: the client's nonce, in hexadecimal.
        time: seconds since 1970 by the node's clock.
        root: kind of the root of trust; "software" is a key in a file.
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
        """The state that a sealed request is bound to, everything but nonce and time; 32 bytes."""
        return binding(self.measurement, self.models, self.settings, bytes.fromhex(self.key))


def binding(measurement: str, models: Mapping[str, str], settings: Mapping[str, Any], key: bytes) -> bytes:
    """A hash of the state of a node; a request sealed under another state cannot be opened.

    >>> binding("0", {"a": "1"}, {}, b"k") == binding("0", {"a": "2"}, {}, b"k")
    False
    """
    state = [measurement, dict(models), dict(settings), key.hex()]
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).digest()


# --- measuring --------------------------------------------------------------------------------------------------------


@cache
def measure() -> str:
    """A hash of Pippin's installed files and the versions of Python and Pippin's dependencies.

    The program measures itself: the hash distinguishes versions, but a modified program can report any hash.
    """
    folder = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256(_listing((path for path in folder.rglob("*") if path.suffix != ".pyc"), folder))
    for name, version in versions().items():
        digest.update(f"{name}=={version}\n".encode())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python, Pippin and those of the server's dependencies that are installed."""
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
    """The SHA-256 of a model file, or of the output of ``sha256sum`` for all files of a folder, sorted by name.

    Hidden files are ignored.

    Raises:
        InvalidInput: the folder has no files.
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
    """An Ed25519 key in a file that signs quotes; it does not protect against its owner.

    Raises:
        MissingDependency: cryptography is not installed.
    """

    def __init__(self, private: Any) -> None:
        self._private = private
        self.public: str = private.public_key().public_bytes_raw().hex()

    @classmethod
    def create(cls, path: Path | None = None) -> SoftwareRoot:
        """Generate a key and write it to ``path``, readable by its owner only; None keeps it in memory.

        Raises:
            InvalidInput: the file exists already.
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
            InvalidInput: the file cannot be read, or other users can read it too.
            CorruptedFile: it does not contain an Ed25519 key.
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
    """Published measurements, oldest first; each entry is a line of JSON, stored as it was written.

    >>> log = TransparencyLog().add("0" * 64, version="0.1.0")
    >>> log.entries
    (b'{"measurement": "0000000000000000000000000000000000000000000000000000000000000000", "version": "0.1.0"}',)
    """

    entries: tuple[bytes, ...] = ()

    @classmethod
    def read(cls, path: Path) -> TransparencyLog:
        """Read a log file.

        Raises:
            InvalidInput: the file cannot be read.
            CorruptedFile: a line is not an entry.
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
        """Write the log file atomically."""
        with files.atomic_write(path) as file:
            file.write(b"".join(entry + b"\n" for entry in self.entries))

    def add(self, measurement: str, **notes: str) -> TransparencyLog:
        """A new log with one more entry.

        Raises:
            InvalidArgument: ``measurement`` is not 64 hexadecimal digits.
        """
        _require_hash("measurement", measurement)
        return TransparencyLog((*self.entries, json.dumps({"measurement": measurement, **notes}).encode()))

    @property
    def root(self) -> str:
        """The root of the tree over all entries, 64 hexadecimal digits."""
        return merkle.root_hash(self.entries).hex()

    def prove(self, measurement: str, root: str | None = None) -> dict[str, Any] | None:
        """An inclusion proof of a measurement for a root (None: the newest); None if it is not in the log.

        ``root`` may be an earlier root of the log, for clients that pinned it.
        """
        size = len(self.entries) if root is None else _roots(self.entries).get(root, 0)
        for index, entry in enumerate(self.entries[:size]):
            if _measurement_of(entry) == measurement:
                path = [part.hex() for part in merkle.prove_inclusion(self.entries[:size], index)]
                return {"entry": entry.decode(), "index": index, "size": size, "path": path}
        return None

    def extends(self, root: str) -> bool:
        """Whether ``root`` is an earlier root of this log, so that no entry was removed or changed since."""
        return root in _roots(self.entries)


@cache
def _roots(entries: tuple[bytes, ...]) -> dict[str, int]:
    """All roots that a log had, each with its size at the time."""
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
    """A client's requirements on a node, checked before anything is sent.

    Args:
        measurements: hashes of trusted software.
        roots: accepted public keys of signers, in hexadecimal.
        max_age: maximum age of a quote in seconds.
        require_log: whether the measurement must also be in the public log.
        log_root: the root of that log, from another source than the node.
        models: hash of each model by name; a model that is not listed must be a single file of the catalog.
        settings: required settings of the node on what it stores and logs.

    Raises:
        InvalidArgument: a malformed hash or key, no measurements or roots, or ``require_log`` without ``log_root``.
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
        """Verify a node's quote.

        Args:
            document: the node's response, parsed from JSON.
            nonce: the nonce of the request, in hexadecimal.
            model: the model that will be requested.
            now: the current time in seconds since 1970.

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
        """Raise `StaleQuote` unless the quote was created within the last ``max_age`` seconds."""
        age = now - quote.time
        if not -_CLOCK_SKEW <= age <= self.max_age:
            raise StaleQuote(f"the quote is {age:.0f} seconds old, the policy allows 0 to {self.max_age:g}")

    def check_model(self, quote: Quote, model: str) -> None:
        """Raise `ModelMismatch` unless the node serves the model with the hash in the policy or the catalog."""
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
    """Parse the quote of a statement; raises TypeError or ValueError if it is malformed."""
    quote = Quote(**fields)
    texts = (quote.measurement, quote.key, quote.nonce, *quote.models.values())
    if not all(isinstance(text, str) and _HEX64.fullmatch(text) for text in texts):
        raise ValueError("a hash, a key or a nonce is not 64 hexadecimal digits")
    if not isinstance(quote.settings, dict) or not isinstance(quote.time, int | float):
        raise TypeError("settings or time have the wrong type")
    return quote


def _catalog_hash(model: str) -> str | None:
    """The hash of a model that is a single file in the catalog; None for other models."""
    entry = catalog.find(model)
    entry_files: Sequence[catalog.File] = entry.files if entry else ()
    return entry_files[0].sha256 if len(entry_files) == 1 and entry and entry_files[0].size == entry.size else None


def _require_hash(name: str, text: Any) -> None:
    if not isinstance(text, str) or not _HEX64.fullmatch(text):
        raise InvalidArgument(f"{name} must be 64 lower-case hexadecimal digits, got {text!r:.80}")


@cache
def _crypto() -> tuple[Any, Any, Any]:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingDependency("attestation needs cryptography: pip install 'pippin[serve]'") from error
    return InvalidSignature, ed25519, serialization
