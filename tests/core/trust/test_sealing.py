"""Sealed messages against RFC 9180, written out a second time here, and against every way of meddling with them."""

import builtins
import hashlib
import hmac
import struct

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given, settings, strategies as st

from pippin.core.errors import MissingDependency, SealBroken
from pippin.core.trust import sealing

BINDING = hashlib.sha256(b"what was verified").digest()


# --- HPKE, base mode, from the text of RFC 9180 -----------------------------------------------------------------------


def extract(salt: bytes, key: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), key, "sha256")


def expand(key: bytes, info: bytes, length: int) -> bytes:
    found, block = b"", b""
    for count in range(1, -(-length // 32) + 1):
        block = hmac.digest(key, block + info + bytes([count]), "sha256")
        found += block
    return found[:length]


def open_by_the_rfc(private: X25519PrivateKey, enc: bytes, box: bytes, info: bytes, aad: bytes = b"") -> bytes:
    kem, suite = b"KEM" + struct.pack(">H", 0x0020), b"HPKE" + struct.pack(">HHH", 0x0020, 0x0001, 0x0003)

    def labeled_extract(suite_id: bytes, salt: bytes, label: bytes, key: bytes) -> bytes:
        return extract(salt, b"HPKE-v1" + suite_id + label + key)

    def labeled_expand(suite_id: bytes, key: bytes, label: bytes, info: bytes, length: int) -> bytes:
        return expand(key, struct.pack(">H", length) + b"HPKE-v1" + suite_id + label + info, length)

    shared = private.exchange(X25519PublicKey.from_public_bytes(enc))
    context = enc + private.public_key().public_bytes_raw()
    secret = labeled_expand(kem, labeled_extract(kem, b"", b"eae_prk", shared), b"shared_secret", context, 32)
    context = (
        b"\x00" + labeled_extract(suite, b"", b"psk_id_hash", b"") + labeled_extract(suite, b"", b"info_hash", info)
    )
    schedule = labeled_extract(suite, secret, b"secret", b"")
    key = labeled_expand(suite, schedule, b"key", context, 32)
    nonce = labeled_expand(suite, schedule, b"base_nonce", context, 12)
    return ChaCha20Poly1305(key).decrypt(nonce, box, aad)


def test_the_reading_of_the_rfc_is_right():
    """Vector A.2.1, sequence number 0."""
    found = open_by_the_rfc(
        X25519PrivateKey.from_private_bytes(
            bytes.fromhex("8057991eef8f1f1af18f4a9491d16a1ce333f695d4db8e38da75975c4478e0fb")
        ),
        bytes.fromhex("1afa08d3dec047a643885163f1180476fa7ddb54c6a8029ea33f95796bf2ac4a"),
        bytes.fromhex("1c5250d8034ec2b784ba2cfd69dbdb8af406cfe3ff938e131f0def8c8b60b4db21993c62ce81883d2dd1b51a28"),
        bytes.fromhex("4f6465206f6e2061204772656369616e2055726e"),
        bytes.fromhex("436f756e742d30"),
    )
    assert found == b"Beauty is truth, truth beauty"


def test_a_request_is_hpke_as_the_rfc_has_it():
    private = X25519PrivateKey.generate()
    public = private.public_key().public_bytes_raw()
    envelope, _ = sealing.seal_request(public, BINDING, b"the question")
    rest = envelope.removeprefix(b"PIPPIN-SEALED-1\n" + hashlib.sha256(public).digest()[:16])
    plain = open_by_the_rfc(private, rest[:32], rest[32:], b"pippin sealed request 1\x00" + BINDING)
    assert len(plain) == 32 + 1024
    assert plain[32:].rstrip(b"\x00") == struct.pack(">I", 12) + b"the question"


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def key():
    return sealing.NodeKey()


@settings(max_examples=30, deadline=None)
@given(payload=st.binary(max_size=5000), answer=st.lists(st.binary(max_size=2000), max_size=5))
def test_there_and_back(key, payload, answer):
    envelope, opener = sealing.seal_request(key.public, BINDING, payload)
    opened = key.open(envelope, BINDING)
    assert opened.payload == payload
    wire = b"".join([*(opened.reply.seal(part) for part in answer), opened.reply.seal(b"", last=True)])
    received = [part for byte in wire for part in opener.feed(bytes([byte]))]  # one byte at a time
    opener.finish()
    assert received == [*answer, b""]


def test_nothing_but_the_right_key_and_state_opens_a_request(key):
    envelope, _ = sealing.seal_request(key.public, BINDING, b"secret")
    with pytest.raises(SealBroken, match="another state"):
        key.open(envelope, hashlib.sha256(b"other settings").digest())
    with pytest.raises(SealBroken, match="another key"):
        sealing.NodeKey().open(envelope, BINDING)
    for at in range(len(sealing.MAGIC) + 16, len(envelope), 97):
        spoilt = bytearray(envelope)
        spoilt[at] ^= 1
        with pytest.raises(SealBroken):
            key.open(bytes(spoilt), BINDING)
    with pytest.raises(SealBroken, match="not a sealed request"):
        key.open(b"GET / HTTP/1.1", BINDING)
    with pytest.raises(SealBroken):
        key.open(envelope[:80], BINDING)
    low_order = envelope[: len(sealing.MAGIC) + 16] + bytes(32) + envelope[len(sealing.MAGIC) + 48 :]
    with pytest.raises(SealBroken):
        key.open(low_order, BINDING)


def test_lengths_are_rounded():
    key = sealing.NodeKey()
    sizes = {len(sealing.seal_request(key.public, BINDING, b"x" * n)[0]) for n in range(0, 1021, 60)}
    assert len(sizes) == 1
    envelope, _ = sealing.seal_request(key.public, BINDING, b"")
    reply = key.open(envelope, BINDING).reply
    reply.seal(b"")
    assert len({len(reply.seal(b"x" * n)) for n in range(0, 509)}) == 1


def test_every_request_is_another():
    key = sealing.NodeKey()
    envelopes = [sealing.seal_request(key.public, BINDING, b"same")[0] for _ in range(3)]
    assert len({sealing.identity(envelope) for envelope in envelopes}) == 3
    assert len({envelope[-16:] for envelope in envelopes}) == 3


# --- replies ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def reply(key):
    """An opener, and four parts of the reply to it, the salt apart."""
    envelope, opener = sealing.seal_request(key.public, BINDING, b"")
    sealer = key.open(envelope, BINDING).reply
    first = sealer.seal(b"part 0")
    parts = [first[32:], sealer.seal(b"part 1"), sealer.seal(b"part 2"), sealer.seal(b"part 3", last=True)]
    return opener, first[:32], parts


@pytest.mark.parametrize(
    "order",
    [[1, 0, 2, 3], [0, 0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3, 3], [3]],
    ids=["swapped", "doubled", "missing", "more", "only"],
)
def test_meddling_with_the_order_is_noticed(reply, order):
    opener, salt, parts = reply
    with pytest.raises(SealBroken):
        list(opener.feed(salt + b"".join(parts[at] for at in order)))


@pytest.mark.parametrize("kept", range(4))
def test_a_reply_that_is_cut_off_is_noticed(reply, kept):
    opener, salt, parts = reply
    assert list(opener.feed(salt + b"".join(parts[:kept]))) == [b"part %d" % n for n in range(kept)]
    with pytest.raises(SealBroken, match=f"after {kept} parts"):
        opener.finish()


def test_a_reply_that_is_cut_within_its_last_part_is_noticed(reply):
    opener, salt, parts = reply
    list(opener.feed(salt + b"".join(parts)[:-1]))
    with pytest.raises(SealBroken, match="after 3 parts"):
        opener.finish()


def test_a_changed_part_is_noticed(reply):
    opener, salt, parts = reply
    spoilt = bytearray(parts[0])
    spoilt[100] ^= 1
    with pytest.raises(SealBroken, match="part 1"):
        list(opener.feed(salt + bytes(spoilt)))


def test_the_reply_to_another_request_does_not_open(key, reply):
    _, salt, parts = reply
    _, other = sealing.seal_request(key.public, BINDING, b"")
    with pytest.raises(SealBroken):
        list(other.feed(salt + b"".join(parts)))


@pytest.mark.parametrize("plain", [b"", b"\0\0\0", b"\0\0\0\1"])
def test_a_part_that_is_shorter_than_it_says_is_refused(key, monkeypatch, plain):
    envelope, opener = sealing.seal_request(key.public, BINDING, b"")
    monkeypatch.setattr(sealing, "_pad", lambda content, block: plain)
    with pytest.raises(SealBroken, match="longer than it is"):
        list(opener.feed(key.open(envelope, BINDING).reply.seal(b"", last=True)))


def test_a_length_without_bound_is_refused(reply):
    opener, salt, _ = reply
    with pytest.raises(SealBroken, match="that long"):
        list(opener.feed(salt + struct.pack(">I", 1 << 30)))


def test_long_content_becomes_several_parts(key):
    envelope, opener = sealing.seal_request(key.public, BINDING, b"")
    content = bytes(range(256)) * 1000
    received = list(opener.feed(key.open(envelope, BINDING).reply.seal(content, last=True)))
    opener.finish()
    assert b"".join(received) == content
    assert len(received) == 4


def test_the_missing_library_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    sealing._crypto.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match=r"pip install 'pippin\[serve\]'"):
        sealing.NodeKey()
