"""`RemoteModel` over a real server: typed answers, streams and tools through the seal, and what a policy refuses."""

import dataclasses
import time

import httpx2
import pytest
from pydantic import BaseModel

import pippin
from pippin.claims.worlds.recording_proxy import RecordingProxy, serving
from pippin.core.errors import (
    InvalidArgument,
    ModelMismatch,
    ModelNotFound,
    NetworkFailure,
    NotInLog,
    Overloaded,
    QuotaExceeded,
    RateLimited,
    SealBroken,
    ServiceUnavailable,
)
from pippin.core.trust.attestation import AttestationPolicy, SoftwareRoot, TransparencyLog, measure
from pippin.session import GenerationOptions, Session
from pippin.session.providers.remote import QuotaUsage, RemoteModel, read_quota

HASH = "22" * 32
ROOT = SoftwareRoot.create()
LOG = TransparencyLog().add(measure())
POLICY = AttestationPolicy([measure()], [ROOT.public], log_root=LOG.root, models={"tiny": HASH})
SECRET = "where does the quince tree stand"
SHORT = GenerationOptions(max_tokens=12, seed=1)


def server(tiny, **settings):
    """The real server, stateless and with sealed routes, over the tiny model; gives app and service."""
    from pippin.serve import sealing
    from pippin.serve.app import create_app
    from pippin.serve.attestation import AttestedNode, attested_settings
    from pippin.serve.service import Service
    from pippin.serve.settings import ServerSettings

    chosen = ServerSettings(models=("tiny",), stateless=True, page=False, **settings)
    service = Service(chosen, load=lambda reference: tiny)
    app = create_app(chosen, service=service)
    app.include_router(sealing.router(AttestedNode(ROOT, {"tiny": HASH}, attested_settings(chosen), log=LOG)))
    return app, service


@pytest.fixture(scope="module")
def port(tiny):
    with serving(server(tiny, requests_per_minute=600)[0]) as port:
        yield port


@pytest.fixture
def wire(port):
    with RecordingProxy(port) as wire:
        yield wire


@pytest.fixture
def remote(wire):
    with RemoteModel(wire.url, model="tiny", policy=POLICY) as remote:
        yield remote


class Mood(BaseModel):
    happy: bool


def test_a_session_is_answered_and_the_wire_shows_nothing(remote, wire, tiny):
    answer = Session(remote).respond(SECRET, options=SHORT)
    assert answer.content == Session(tiny).respond(SECRET, options=SHORT).content
    assert answer.usage.output_tokens > 0
    assert b"POST /v1/sealed" in wire.sent
    assert not wire.saw(SECRET)
    assert not wire.saw(answer.raw_content)


def test_in_the_open_the_wire_shows_all(wire):
    with RemoteModel(wire.url, model="tiny") as remote:
        Session(remote).respond(SECRET, options=SHORT)
    assert wire.saw(SECRET)


def test_typed_answers_streams_and_tools_go_through_the_seal(remote, wire):
    assert isinstance(Session(remote).respond(SECRET, generating=Mood).content, Mood)
    stream = Session(remote).stream(SECRET, options=SHORT)
    assert [snapshot.raw_content for snapshot in stream][-1] == stream.response.content

    @pippin.tool
    def look(up: bool) -> str:
        """Look somewhere."""
        raise AssertionError("must not be called in this test")

    options = GenerationOptions(tool_calling="disallowed", max_tokens=4)
    Session(remote, tools=[look]).respond(SECRET, options=options)
    assert not wire.saw(SECRET)


@pytest.mark.parametrize(
    ("change", "error"),
    [({"models": {"tiny": "99" * 32}}, ModelMismatch), ({"log_root": TransparencyLog().add("aa" * 32).root}, NotInLog)],
)
def test_what_the_policy_refuses_is_told_by_session_and_availability(wire, change, error):
    with RemoteModel(wire.url, model="tiny", policy=dataclasses.replace(POLICY, **change)) as remote:
        session = Session(remote)
        with pytest.raises(error):
            session.respond(SECRET)
        assert len(session.transcript) == 0
        found = remote.availability()
    assert (found.available, found.reason) == (False, "not_attested")
    assert b"POST" not in wire.sent
    assert not wire.saw(SECRET)


def test_an_unknown_model_is_the_error_of_the_server(wire):
    policy = dataclasses.replace(POLICY, models={"other": HASH})
    with RemoteModel(wire.url, model="other") as remote:
        with pytest.raises(ModelNotFound):
            Session(remote).respond(SECRET)
        assert remote.availability().reason == "not_found"
    with RemoteModel(wire.url, model="other", policy=policy) as remote, pytest.raises(ModelMismatch):
        Session(remote).respond(SECRET)


def test_availability_and_quota_of_a_good_server(remote):
    assert remote.quota is None
    assert remote.attest().models == {"tiny": HASH}
    assert remote.availability().available
    Session(remote).respond(SECRET, options=SHORT)
    assert remote.quota.state == "below_limit"
    assert (remote.quota.resource, remote.quota.limit) == ("requests", 600)
    assert remote.quota.remaining < 600


def test_a_server_that_is_not_there():
    for policy in (None, POLICY):
        with RemoteModel("http://127.0.0.1:9/v1", model="tiny", policy=policy, max_retries=0) as remote:
            assert remote.availability().reason == "offline"
            with pytest.raises(NetworkFailure):
                Session(remote).respond(SECRET)
    with RemoteModel("http://127.0.0.1:9/v1", model="tiny", policy=POLICY) as remote, pytest.raises(NetworkFailure):
        remote.attest()


def test_a_closed_one_opens_again(remote):
    for _ in range(2):
        assert Session(remote).respond(SECRET, options=SHORT).usage.output_tokens > 0
        remote.close()


def test_a_wrong_key_and_a_met_limit(tiny):
    keys = {"me": "0123456789abcdef"}
    with serving(server(tiny, requests_per_minute=1, api_keys=keys)[0]) as port:
        url = f"http://127.0.0.1:{port}/v1"
        with RemoteModel(url, model="tiny", api_key="wrong-wrong-wrong", policy=POLICY) as remote:
            assert remote.availability().reason == "refused_key"
        with RemoteModel(url, model="tiny", api_key=keys["me"], policy=POLICY, max_retries=0) as remote:
            Session(remote).respond(SECRET, options=SHORT)
            with pytest.raises(RateLimited) as caught:
                Session(remote).respond(SECRET, options=SHORT)
            assert not isinstance(caught.value, QuotaExceeded)
            assert remote.quota.state == "limit_reached"
            assert remote.quota.resets_at is not None


def test_a_quota_that_is_used_up_and_a_server_that_stops(tiny):
    app, service = server(tiny, tokens_per_day=1)
    with (
        serving(app) as port,
        RemoteModel(f"http://127.0.0.1:{port}/v1", model="tiny", policy=POLICY, max_retries=0) as remote,
    ):
        Session(remote).respond(SECRET, options=SHORT)
        with pytest.raises(QuotaExceeded):
            Session(remote).respond(SECRET, options=SHORT)
        assert (remote.quota.state, remote.quota.resource, remote.quota.limit) == ("limit_reached", "tokens", 1)
        service.draining = True
        with pytest.raises((ServiceUnavailable, Overloaded)):
            Session(remote).respond(SECRET, options=SHORT)
        service.draining = False


def test_cancelling_a_sealed_answer_frees_its_slot(tiny):
    app, service = server(tiny)
    with serving(app) as port, RemoteModel(f"http://127.0.0.1:{port}/v1", model="tiny", policy=POLICY) as remote:
        stream = Session(remote).stream(SECRET, options=GenerationOptions(max_tokens=1900))
        next(stream)
        assert service.active == 1
        stream.close()
        end = time.monotonic() + 10
        while service.active and time.monotonic() < end:
            time.sleep(0.02)
        assert service.active == 0


def test_a_policy_is_needed_to_attest_and_the_path_is_fixed(wire):
    with RemoteModel(wire.url, model="tiny") as remote, pytest.raises(InvalidArgument, match="no policy"):
        remote.attest()
    with pytest.raises(InvalidArgument, match="OpenAIProvider"):
        RemoteModel(wire.url, model="tiny", path="/x")


def test_an_answer_that_is_cut_is_an_error_of_the_session(remote, wire):
    def cut(data: bytes) -> bytes:
        return data.partition(b"\r\n0\r\n\r\n")[0] + b"\r\n0\r\n\r\n" if b"sealed" in data else b"0\r\n\r\n"

    wire.meddle = lambda data: cut(data) if b"statement" not in data else data
    session = Session(remote)
    with pytest.raises((SealBroken, NetworkFailure)):
        session.respond(SECRET, options=SHORT)
    assert len(session.transcript) == 0


# --- what heads say ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status", "expected"),
    [
        ({}, 200, None),
        ({"retry-after": "5"}, 200, None),
        ({"retry-after": "5"}, 429, QuotaUsage("limit_reached", True, resets_at=105.0)),
        ({}, 429, QuotaUsage("limit_reached", True)),
        (
            {
                "x-ratelimit-limit-tokens": "100",
                "x-ratelimit-remaining-tokens": "10",
                "x-ratelimit-reset-tokens": "1m2s",
            },
            200,
            QuotaUsage("below_limit", False, "tokens", 100, 10, 162.0),
        ),
        (
            {"x-ratelimit-limit-requests": "100", "x-ratelimit-remaining-requests": "50"}
            | {"x-quota-limit-tokens": "1000", "x-quota-remaining-tokens": "99"},
            200,
            QuotaUsage("below_limit", True, "tokens", 1000, 99, None),
        ),
        (
            {"x-ratelimit-limit-requests": "100", "x-ratelimit-remaining-requests": "0"},
            200,
            QuotaUsage("limit_reached", True, "requests", 100, 0, None),
        ),
        ({"x-ratelimit-limit-requests": "many", "x-ratelimit-remaining-requests": "-1"}, 200, None),
        ({"x-ratelimit-limit-requests": "0", "x-ratelimit-remaining-requests": "0"}, 200, None),
    ],
)
def test_the_tightest_limit_counts(headers, status, expected):
    assert read_quota(httpx2.Headers(headers), status, clock=lambda: 100.0) == expected
