"""Sealed messages: end-to-end encrypted requests to one node, and streamed replies that only the sender can read.

Notable here:
- the request is encrypted with HPKE (RFC 9180, base mode) to the node's key; the attested state of the node is bound to
  it (``info``), so a node whose model, code or settings have changed cannot open it
- the reply key is sent inside the request; every part of the reply is authenticated with its number and whether it is
  the last, so that a missing, repeated, reordered or truncated part is an error
- lengths are padded, since the lengths of the parts of a streamed answer reveal words

Suite: DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, ChaCha20-Poly1305. Not hidden are the sender, the times and number of
requests, the padded lengths, and the time between parts.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pippin.core.errors import MissingDependency, SealBroken

MAGIC = b"PIPPIN-SEALED-1\n"
MEDIA_TYPE = "application/vnd.pippin.sealed"  # of requests and replies over HTTP
REQUEST_BLOCK = 1024  # bytes to whose multiple a request is padded
REPLY_BLOCK = 512  # the same for each part of a reply; a token's event in OpenAI's format fits in one
MAX_PART = 1 << 16  # bytes of content in one part of a reply
_SALT = 32
_ENC = 32
_KEY_ID = 16
_TAG = 16
_MAX_SEALED_PART = (MAX_PART + 4 + REPLY_BLOCK) // REPLY_BLOCK * REPLY_BLOCK + _TAG


def key_id(public_key: bytes) -> bytes:
    """The identifier of a public key in requests, 16 bytes."""
    return hashlib.sha256(public_key).digest()[:_KEY_ID]


def wipe(buffer: bytearray) -> None:
    """Overwrite a buffer with zeros. Copies that Python or a library made of it are not overwritten.

    >>> secret = bytearray(b"word"); wipe(secret); bytes(secret)
    b'\\x00\\x00\\x00\\x00'
    """
    buffer[:] = bytes(len(buffer))


def seal_request(public_key: bytes, binding: bytes, payload: bytes) -> tuple[bytes, ReplyOpener]:
    """Seal a request to a node's key.

    Args:
        public_key: the node's X25519 key, 32 bytes, from a verified quote.
        binding: the verified state of the node, `Quote.binding`; the node needs the same to open the request.
        payload: the request.

    Returns:
        The envelope, and the opener of its reply.

    Raises:
        MissingDependency: cryptography is not installed.
    """
    from_bytes = _crypto().x25519.X25519PublicKey.from_public_bytes
    reply_key = os.urandom(32)
    sealed = _suite().encrypt(reply_key + _pad(payload, REQUEST_BLOCK), from_bytes(public_key), info=_info(binding))
    return MAGIC + key_id(public_key) + sealed, ReplyOpener(reply_key, sealed[:_ENC])


@dataclass(frozen=True)
class OpenedRequest:
    """An opened request: its payload, and the sealer of its reply."""

    payload: bytearray
    reply: ReplySealer


class NodeKey:
    """A node's X25519 key pair, in memory only.

    Raises:
        MissingDependency: cryptography is not installed.
    """

    def __init__(self) -> None:
        self._private = _crypto().x25519.X25519PrivateKey.generate()
        self.public: bytes = self._private.public_key().public_bytes_raw()
        self.id = key_id(self.public)

    def open(self, envelope: bytes, binding: bytes) -> OpenedRequest:
        """Open a request that was sealed to this key with this binding.

        Raises:
            SealBroken: it was sealed to another key or state, or modified.
        """
        sealed = envelope[len(MAGIC) + _KEY_ID :]
        if addressed_to(envelope) != self.id:
            raise SealBroken("the request is sealed to another key")
        try:
            plain = _suite().decrypt(sealed, self._private, info=_info(binding))
        except (_crypto().InvalidTag, ValueError) as error:
            raise SealBroken("the request does not open: it was changed, or sealed for another state") from error
        reply_key, payload = plain[:32], _unpad(plain[32:])
        return OpenedRequest(bytearray(payload), ReplySealer(reply_key, sealed[:_ENC]))


def addressed_to(envelope: bytes) -> bytes:
    """The id of the key that an envelope is sealed to.

    Raises:
        SealBroken: the bytes are not an envelope.
    """
    if not envelope.startswith(MAGIC) or len(envelope) < len(MAGIC) + _KEY_ID + _ENC + 32 + 4 + _TAG:
        raise SealBroken("this is not a sealed request")
    return envelope[len(MAGIC) : len(MAGIC) + _KEY_ID]


def identity(envelope: bytes) -> bytes:
    """A unique identifier of an envelope, to detect replays: the sender's ephemeral key, 32 bytes."""
    start = len(MAGIC) + _KEY_ID
    return envelope[start : start + _ENC]


class ReplySealer:
    """Seals one reply, part by part."""

    def __init__(self, reply_key: bytes, enc: bytes) -> None:
        self._salt: bytes = os.urandom(_SALT)
        self._cipher = _reply_cipher(reply_key, enc, self._salt)
        self._count = 0

    def seal(self, content: bytes, *, last: bool = False) -> bytes:
        """Seal content as the next part or parts of the reply; nothing may follow the last one."""
        pieces = [content[at : at + MAX_PART] for at in range(0, len(content), MAX_PART)] or [b""]
        sealed = b"" if self._count else self._salt
        for number, piece in enumerate(pieces):
            is_last = last and number == len(pieces) - 1
            box = self._cipher.encrypt(_nonce(self._count), _pad(piece, REPLY_BLOCK), _mark(is_last))
            sealed += struct.pack(">I", len(box)) + box
            self._count += 1
        return sealed


class ReplyOpener:
    """Opens one reply while its bytes arrive."""

    def __init__(self, reply_key: bytes, enc: bytes) -> None:
        self._reply_key, self._enc = reply_key, enc
        self._cipher: Any = None
        self._buffer = bytearray()
        self._count = 0
        self._done = False

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Add received bytes, and iterate over the contents of the parts that are now complete.

        Raises:
            SealBroken: a part was modified, omitted, repeated or reordered, or follows the last one.
        """
        self._buffer += received
        if self._cipher is None and len(self._buffer) >= _SALT:
            self._cipher = _reply_cipher(self._reply_key, self._enc, bytes(self._take(_SALT)))
        while self._cipher is not None and len(self._buffer) >= 4:
            (length,) = struct.unpack(">I", self._buffer[:4])
            if self._done or length > _MAX_SEALED_PART:
                raise SealBroken("the sealed reply goes on after its end" if self._done else "no part is that long")
            if len(self._buffer) < 4 + length:
                return
            yield self._open(bytes(self._take(4 + length)[4:]))

    def finish(self) -> None:
        """Check at the end of the stream that the reply is complete.

        Raises:
            SealBroken: the last part is missing.
        """
        if not self._done or self._buffer:
            raise SealBroken(f"the sealed reply was cut off after {self._count} parts")

    def _open(self, box: bytes) -> bytes:
        for last in (False, True):
            try:
                plain = self._cipher.decrypt(_nonce(self._count), box, _mark(last))
            except _crypto().InvalidTag:
                continue
            self._count, self._done = self._count + 1, last
            return _unpad(plain)
        raise SealBroken(f"part {self._count + 1} of the sealed reply was changed or is not the next one")

    def _take(self, size: int) -> bytearray:
        taken = self._buffer[:size]
        del self._buffer[:size]
        return taken


def _pad(content: bytes, block: int) -> bytes:
    """The length, the content, and zeros up to a multiple of ``block`` bytes."""
    return struct.pack(">I", len(content)) + content + bytes(-(len(content) + 4) % block)


def _unpad(padded: bytes) -> bytes:
    length = int.from_bytes(padded[:4], "big")
    if length > len(padded) - 4:
        raise SealBroken("a sealed message says that it is longer than it is")
    return padded[4 : 4 + length]


def _info(binding: bytes) -> bytes:
    return b"pippin sealed request 1\x00" + binding


def _mark(last: bool) -> bytes:
    return b"last" if last else b"more"


def _nonce(count: int) -> bytes:
    return count.to_bytes(12, "big")


def _suite() -> Any:
    hpke = _crypto().hpke
    return hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.CHACHA20_POLY1305)


def _reply_cipher(reply_key: bytes, enc: bytes, salt: bytes) -> Any:
    """The cipher of one reply; its key is derived from the request, the client's secret and the node's salt."""
    crypto = _crypto()
    derived = crypto.HKDF(crypto.SHA256(), 32, salt=salt, info=b"pippin sealed reply 1\x00" + enc).derive(reply_key)
    return crypto.ChaCha20Poly1305(derived)


class _Crypto:
    """The parts of the cryptography library that are used here."""

    def __init__(self) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives import hpke
        from cryptography.hazmat.primitives.asymmetric import x25519
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        self.InvalidTag, self.hpke, self.x25519 = InvalidTag, hpke, x25519
        self.ChaCha20Poly1305, self.SHA256, self.HKDF = ChaCha20Poly1305, SHA256, HKDF


@cache
def _crypto() -> _Crypto:
    try:
        return _Crypto()
    except ImportError as error:
        raise MissingDependency("sealed requests need cryptography: pip install 'pippin[serve]'") from error
