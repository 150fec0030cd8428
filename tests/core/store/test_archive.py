"""Archives made here, good and hostile: what is wanted lands, and nothing lands anywhere else."""

import hashlib
import io
import shutil
import subprocess
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from pippin.core.errors import CorruptedFile, DownloadFailed
from pippin.core.store.archive import unpack

FILES = {"data/a.txt": b"a" * 1000, "data/deep/b.bin": bytes(range(256)), "code.py": b"raise SystemExit", "one": b"1"}
MEMBERS = {"data/": "", "one": "lonely/one"}
EXPECTED = {"a.txt": FILES["data/a.txt"], "deep/b.bin": FILES["data/deep/b.bin"], "lonely/one": b"1"}


def make_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def make_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


def make_deb(path: Path, members: dict[str, bytes]) -> Path:
    root = path.with_suffix(".root")
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text(
        "Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: no one <a@b>\nDescription: x\n"
    )
    for name, content in members.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", root, path], check=True, capture_output=True)
    return path


needs_dpkg = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="dpkg-deb makes and reads Debian packages")
KINDS = [("wheel", make_zip), ("sdist", make_tar), ("npm", make_tar), pytest.param("deb", make_deb, marks=needs_dpkg)]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "out"
    path.mkdir()
    return path


@pytest.mark.parametrize(("kind", "make"), KINDS)
def test_wanted_members_land_with_their_hashes_and_nothing_else(tmp_path, folder, kind, make):
    seen = []
    parts = unpack(make(tmp_path / "archive", FILES), kind, MEMBERS, folder, advance=seen.append)
    landed = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert landed == EXPECTED
    assert {part.path: part.file.read_bytes() for part in parts} == EXPECTED
    assert {part.path: part.sha256 for part in parts} == {
        name: hashlib.sha256(content).hexdigest() for name, content in EXPECTED.items()
    }
    assert sum(seen) == sum(map(len, EXPECTED.values()))


@pytest.mark.parametrize(("kind", "make"), KINDS)
def test_a_missing_member_is_named(tmp_path, folder, kind, make):
    with pytest.raises(CorruptedFile, match="holds no elsewhere/"):
        unpack(make(tmp_path / "archive", FILES), kind, {"elsewhere/": ""}, folder)


@pytest.mark.parametrize(
    "name", ["data/../../evil", "data//evil", "data/..\\evil", "data/C:evil", "data/a/../../../evil"]
)
@pytest.mark.parametrize(("kind", "make"), KINDS[:2])
def test_members_that_would_escape_are_refused(tmp_path, folder, kind, make, name):
    with pytest.raises(CorruptedFile, match="outside its folder"):
        unpack(make(tmp_path / "archive", {name: b"x"}), kind, {"data/": ""}, folder)
    assert not list(tmp_path.rglob("evil"))


@given(st.text(st.sampled_from("ab./\\:\0é"), min_size=1, max_size=12))
@settings(max_examples=80, deadline=None)
def test_whatever_the_names_nothing_lands_outside(tmp_path_factory, name):
    base = tmp_path_factory.mktemp("names")
    folder = base / "x" / "y" / "out"
    folder.mkdir(parents=True)
    make_tar(base / "archive", {"data/" + name: b"x"})
    before = {path for path in base.rglob("*") if folder not in path.parents}
    with suppress(CorruptedFile):
        unpack(base / "archive", "sdist", {"data/": ""}, folder)
    assert {path for path in base.rglob("*") if folder not in path.parents} == before


def test_links_and_devices_in_a_tar_are_left_out(tmp_path, folder):
    with tarfile.open(tmp_path / "archive", "w") as file:
        for name, kind in [("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("pipe", tarfile.FIFOTYPE)]:
            info = tarfile.TarInfo(f"data/{name}")
            info.type, info.linkname = kind, "/etc/passwd"
            file.addfile(info)
        info = tarfile.TarInfo("./data/real")
        file.addfile(info, io.BytesIO())
    assert [part.path for part in unpack(tmp_path / "archive", "npm", {"data/": ""}, folder)] == ["real"]
    assert [path.name for path in folder.iterdir()] == ["real"]


def test_a_link_in_a_zip_is_left_out(tmp_path, folder):
    with zipfile.ZipFile(tmp_path / "archive", "w") as file:
        info = zipfile.ZipInfo("data/link")
        info.external_attr = 0o120777 << 16
        file.writestr(info, "/etc/passwd")
        file.writestr("data/real", "")
    assert [part.path for part in unpack(tmp_path / "archive", "wheel", {"data/": ""}, folder)] == ["real"]


def test_a_member_that_stands_there_twice_is_refused(tmp_path, folder):
    with tarfile.open(tmp_path / "archive", "w") as file:
        for _ in range(2):
            file.addfile(tarfile.TarInfo("data/a"), io.BytesIO())
    with pytest.raises(CorruptedFile, match="holds a twice"):
        unpack(tmp_path / "archive", "npm", {"data/": ""}, folder)


@pytest.mark.parametrize("names", [("data/a", "data/a/b"), ("data/a/b", "data/a")])
def test_a_file_that_is_also_a_folder_is_refused(tmp_path, folder, names):
    archive = make_tar(tmp_path / "archive", dict.fromkeys(names, b"x"))
    with pytest.raises(CorruptedFile, match="both as a file and as a folder"):
        unpack(archive, "npm", {"data/": ""}, folder)


@pytest.mark.parametrize(("kind", "make"), KINDS)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.98])
def test_a_truncated_archive_is_corrupted(tmp_path, folder, kind, make, keep):
    archive = make(tmp_path / "archive", {"data/a": hashlib.sha512(b"x").digest() * 5000})
    content = archive.read_bytes()
    archive.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(CorruptedFile):
        unpack(archive, kind, {"data/": ""}, folder)


def test_a_zip_with_a_flipped_bit_is_corrupted(tmp_path, folder):
    archive = make_zip(tmp_path / "archive", {"data/a": b"a" * 10_000})
    content = bytearray(archive.read_bytes())
    content[45] ^= 1
    archive.write_bytes(content)
    with pytest.raises(CorruptedFile, match="cannot be read as a wheel archive"):
        unpack(archive, "wheel", {"data/": ""}, folder)


def test_a_debian_package_without_dpkg_says_what_is_missing(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DownloadFailed, match="needs dpkg-deb"):
        unpack(tmp_path / "archive", "deb", MEMBERS, folder)
