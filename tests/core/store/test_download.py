"""The downloader against a real server on this machine that breaks connections, ignores ranges and refuses."""

import hashlib
import http.client
import random
import shutil
import ssl
import subprocess
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from pippin.core.errors import DiskFull, DownloadFailed, HashMismatch
from pippin.core.store import download as fetch
from pippin.core.store.download import Address, Digest, download, partial_path

CONTENT = random.Random(0).randbytes(300_000)
RIGHT = Digest("sha256", hashlib.sha256(CONTENT).hexdigest())

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def target(tmp_path):
    return tmp_path / "file"


def test_a_file_arrives_whole_and_progress_adds_up(web, target):
    seen = []
    download(Address(web.put("/f", CONTENT), RIGHT), target, advance=seen.append)
    assert target.read_bytes() == CONTENT
    assert sum(seen) == len(CONTENT)
    assert not partial_path(target).exists()


def test_a_partial_file_is_continued_and_only_the_rest_is_sent(web, target):
    partial_path(target).write_bytes(CONTENT[:200_000])
    download(Address(web.put("/f", CONTENT), RIGHT), target)
    assert target.read_bytes() == CONTENT
    assert web.requests[0].headers["range"] == "bytes=200000-"
    assert web.bytes_sent == 100_000


def test_a_server_without_ranges_sends_all_again(web, target):
    partial_path(target).write_bytes(CONTENT[:200_000])
    seen = []
    download(Address(web.put("/f", CONTENT, ranges=False), RIGHT), target, advance=seen.append)
    assert target.read_bytes() == CONTENT
    assert sum(seen) == len(CONTENT) - 200_000  # what was there is taken back, and counted again
    assert len(web.requests) == 1


def test_a_server_without_ranges_is_noticed_without_a_hash_too(web, target):
    partial_path(target).write_bytes(CONTENT[:200_000])
    download(Address(web.put("/f", CONTENT, ranges=False)), target)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("stale", [b"x" * 1000, b"x" * 300_000, b"x" * 400_000], ids=["shorter", "same", "longer"])
def test_a_stale_partial_file_is_noticed(web, target, stale):
    partial_path(target).write_bytes(stale)
    download(Address(web.put("/f", CONTENT), RIGHT), target)
    assert target.read_bytes() == CONTENT


def test_a_complete_partial_file_needs_no_bytes(web, target):
    partial_path(target).write_bytes(CONTENT)
    download(Address(web.put("/f", CONTENT), RIGHT), target)
    assert target.read_bytes() == CONTENT
    assert web.bytes_sent == 0


def test_a_longer_partial_file_is_noticed_without_a_hash_too(web, target):
    partial_path(target).write_bytes(b"x" * 400_000)
    download(Address(web.put("/f", CONTENT)), target)
    assert target.read_bytes() == CONTENT


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40, deadline=None
)
@given(
    begun=st.integers(0, len(CONTENT)),
    cuts=st.lists(st.integers(0, 150_000), max_size=2),
    ranges=st.booleans(),
    failures=st.lists(st.sampled_from([500, 503, 429]), max_size=1),
)
def test_breaks_anywhere_change_nothing(web, tmp_path_factory, begun, cuts, ranges, failures):
    target = tmp_path_factory.mktemp("breaks") / "file"
    partial_path(target).write_bytes(CONTENT[:begun])
    url = web.put("/f", CONTENT, cuts=cuts, ranges=ranges, failures=failures)
    seen = []
    # without ranges a cut may throw more away than it brings, so each break may be a fruitless try: three are allowed
    download(Address(url, RIGHT), target, advance=seen.append)
    assert target.read_bytes() == CONTENT
    assert sum(seen) == len(CONTENT) - begun


def test_a_connection_that_always_breaks_fails_and_keeps_what_arrived(web, target):
    url = web.put("/f", CONTENT, cuts=[1000] + [0] * 20)
    with pytest.raises(DownloadFailed, match=r"1\.0 kB are kept, and the next attempt resumes"):
        download(Address(url, RIGHT), target)
    assert partial_path(target).read_bytes() == CONTENT[:1000]
    assert not target.exists()


def test_a_port_where_nobody_listens(target):
    with pytest.raises(DownloadFailed, match="Connection refused"):
        download(Address("http://127.0.0.1:9/f", RIGHT), target)


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_refusal_is_not_tried_again(web, target, status):
    with pytest.raises(fetch.DownloadRefused, match=f"answers {status}"):
        download(Address(web.put("/f", status=status), RIGHT), target)
    assert len(web.requests) == 1


def test_wrong_content_is_refused_with_both_hashes_and_thrown_away(web, target):
    wrong = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(HashMismatch, match=f"{wrong}, expected {RIGHT.value}"):
        download(Address(web.put("/f", b"other"), RIGHT), target)
    assert not target.exists()
    assert not partial_path(target).exists()


def test_wrong_content_after_a_resume_is_fetched_once_more_and_then_refused(web, target):
    partial_path(target).write_bytes(b"oth")
    with pytest.raises(HashMismatch):
        download(Address(web.put("/f", b"other"), RIGHT), target)
    assert len(web.requests) == 2


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/f", "file:///etc/hostname", "http://127.0.0.1:port/f", "http://a b/"])
def test_odd_addresses_are_refused(target, url):
    with pytest.raises(fetch.DownloadRefused):
        download(Address(url), target)


def test_credentials_reach_the_first_host_only(web, target):
    elsewhere = web.put("/cdn", CONTENT).replace("127.0.0.1", "localhost")
    url = web.put("/f", status=302, headers={"Location": elsewhere})
    download(Address(url, RIGHT, {"Authorization": "Bearer secret"}), target)
    assert [request.headers.get("authorization") for request in web.requests] == ["Bearer secret", None]


def test_a_login_in_an_address_is_sent_and_never_shown(web, target):
    def needs(headers):
        return headers.get("authorization") == "Basic bWU6d29yZA=="  # me:word

    url = web.put("/f", CONTENT, needs=needs)
    download(Address.at(url.replace("//", "//me:word@"), RIGHT), target)
    assert target.read_bytes() == CONTENT
    with pytest.raises(fetch.DownloadRefused) as refusal:
        download(Address.at(url.replace("//", "//me:wrong@"), RIGHT), target)
    assert "wrong" not in str(refusal.value)


def test_a_full_disk_is_told_and_the_beginning_stays(web, target, monkeypatch):
    def full(response, file, advance):
        file.write(response.read1(1000))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch, "_copy", full)
    with pytest.raises(DiskFull):
        download(Address(web.put("/f", CONTENT), RIGHT), target)
    assert 0 < partial_path(target).stat().st_size <= 1000


@pytest.fixture
def tls(tmp_path):
    """A server with a certificate that nobody signed, which redirects to plain http."""
    if not shutil.which("openssl"):
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)

    class Redirect(SimpleHTTPRequestHandler):
        def do_GET(self):
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:9/plain")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    class Server(HTTPServer):
        def handle_error(self, request, client_address):
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Server(("127.0.0.1", 0), Redirect)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}/f", certificate
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_certificate_that_nobody_signed_is_refused(tls, target):
    with pytest.raises(fetch.DownloadRefused, match=r"certificate .* is not trusted"):
        download(Address(tls[0]), target)


def test_a_redirect_out_of_https_is_refused(tls, target, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(tls[1]))
    with pytest.raises(
        fetch.DownloadRefused, match=r"redirects to http://127\.0\.0\.1:9/plain, which is not encrypted"
    ):
        download(Address(tls[0]), target)


@pytest.mark.skipif(not shutil.which("git"), reason="git is the oracle")
@given(st.binary(max_size=200))
@settings(max_examples=8, deadline=None)
def test_git_hashes_are_gits(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("git") / "f"
    path.write_bytes(content)
    told = subprocess.run(["git", "hash-object", "--no-filters", path], capture_output=True, text=True, check=True)
    assert Digest("git", "").of(path) == told.stdout.strip()


def test_npm_integrity_is_sha512_in_base64(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    # the SHA-512 of nothing, as npm writes it
    nothing = "sha512-z4PhNX7vuL3xVChQ1m2AB9Yg5AULVxXcg/SpIdNs6c5H0NE8XYXysP+DGNKHfuwvY7kxvUdBeoGlODJ6+SfaPg=="
    digest = Digest.from_integrity(nothing)
    assert digest.of(tmp_path / "f") == digest.value


def test_the_size_of_what_is_not_there_is_nothing(tmp_path):
    assert fetch.size_of(tmp_path / "no") == 0


def test_transport_errors_that_are_tried_again_are_http_clients(web, target, monkeypatch):
    copy, broken = fetch._copy, [http.client.IncompleteRead(b""), ssl.SSLEOFError("cut")]

    def break_first(response, file, advance):
        if broken:
            raise broken.pop()
        copy(response, file, advance)

    monkeypatch.setattr(fetch, "_copy", break_first)
    download(Address(web.put("/f", CONTENT), RIGHT), target)
    assert target.read_bytes() == CONTENT
