"""The node's keys: new ones in time, old ones gone, no request opened twice, and memory bounded."""

import contextlib
import threading

import pytest

from pippin.core.errors import InvalidArgument, ModelNotFound, SealBroken, StaleQuote
from pippin.core.trust import attestation, sealing
from pippin.core.trust.attestation import SoftwareRoot
from pippin.serve.attestation import AttestedNode, attested_settings
from pippin.serve.settings import ServerSettings

ROOT = SoftwareRoot.create()
STATE = (ROOT, {"m": "22" * 32}, {"stateless": True})


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def keeper(clock):
    return AttestedNode(*STATE, clock=clock, rotate_after=100, keep_for=30)


def envelope(keeper, payload: bytes = b"hello") -> bytes:
    lease = keeper._current
    binding = attestation.binding(keeper.measurement, keeper.models, keeper.settings, lease.key.public)
    return sealing.seal_request(lease.key.public, binding, payload)[0]


def test_a_request_opens_once(keeper):
    sealed = envelope(keeper)
    assert keeper.open(sealed).payload == b"hello"
    with pytest.raises(SealBroken, match="opened before"):
        keeper.open(sealed)


def test_of_many_threads_with_one_request_one_opens_it(keeper):
    sealed, opened, start = envelope(keeper), [], threading.Barrier(8)

    def work() -> None:
        start.wait()
        with contextlib.suppress(SealBroken):
            opened.append(keeper.open(sealed))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1


def test_a_key_is_replaced_in_time_and_opens_a_little_longer(keeper, clock):
    first = keeper._current.key.public.hex()
    one, other = envelope(keeper), envelope(keeper)
    clock.now += 99
    assert first in keeper.quote("00" * 32)["statement"]
    clock.now += 1
    assert first not in keeper.quote("00" * 32)["statement"]
    clock.now += 29
    assert keeper.open(one).payload == b"hello"
    with pytest.raises(SealBroken, match="opened before"):
        keeper.open(one)
    clock.now += 1
    with pytest.raises(StaleQuote, match="new quote"):
        keeper.open(other)


def test_what_was_opened_is_remembered_within_bounds(clock):
    keeper = AttestedNode(*STATE, clock=clock, max_seen=3)
    sealed = [envelope(keeper) for _ in range(4)]
    for each in sealed[:3]:
        keeper.open(each)
    for each in sealed:  # the full key is gone, with it all that was sealed to it
        with pytest.raises(StaleQuote):
            keeper.open(each)
    assert keeper.open(envelope(keeper)).payload == b"hello"
    assert len(keeper._current.seen) == 1


def test_rubbish_fills_no_memory(keeper):
    good = envelope(keeper)
    for at in range(60, 100):
        spoilt = bytearray(good)
        spoilt[at] ^= 1
        with pytest.raises(StaleQuote, match="does not open"):
            keeper.open(bytes(spoilt))
    assert not keeper._current.seen


@pytest.mark.parametrize("nonce", ["", "00", "zz" * 32, "AA" * 32])
def test_a_nonce_is_64_digits(keeper, nonce):
    with pytest.raises(InvalidArgument):
        keeper.quote(nonce)


@pytest.mark.parametrize("times", [{"keep_for": 0}, {"keep_for": 20, "rotate_after": 10}, {"max_seen": 0}])
def test_times_must_make_sense(times):
    with pytest.raises(InvalidArgument):
        AttestedNode(*STATE, **times)


def test_the_node_of_a_server_measures_models_and_adapters(tmp_path):
    (tmp_path / "mine.gguf").write_bytes(b"GGUF weights")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"weights")
    settings = ServerSettings(
        models=(str(tmp_path / "mine.gguf"),), adapters={"tone": tmp_path / "adapter"}, stateless=True
    )
    made = AttestedNode.of(settings, ROOT)
    assert made.models == {
        "mine": attestation.model_hash(tmp_path / "mine.gguf"),
        "mine:tone": attestation.model_hash(tmp_path / "adapter"),
    }
    assert made.settings == attested_settings(settings)
    assert made.settings["stateless"] is True
    (tmp_path / "mine.gguf").unlink()
    with pytest.raises(ModelNotFound):
        AttestedNode.of(settings, ROOT)
