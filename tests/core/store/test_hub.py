"""The hub's protocol against a small server that speaks it: listing, login, errors, resuming."""

import hashlib
import json
import random

import pytest
from hypothesis import given, strategies as st

from pippin.core.errors import (
    CorruptedFile,
    DownloadFailed,
    HashMismatch,
    ModelNotFound,
    OfflineError,
    UnsafeCheckpoint,
)
from pippin.core.store import hub

COMMIT = "c" * 40
WEIGHTS = random.Random(1).randbytes(200_000)
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer.model": b"t",
    "merges.txt": b"m",
    "chat_template.jinja": b"j",
    "1_Pooling/config.json": b"{}",
    "README.md": b"r",
    ".gitattributes": b"g",
    "onnx/config.json": b"{}",
    "onnx/model.onnx": b"o",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": WEIGHTS,
    "pytorch_model.bin": b"\x80\x02",
}
NEEDED = {
    "config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "1_Pooling/config.json",
    "model.safetensors",
}  # fmt: skip
REFERENCE = hub.Reference("owner/name")


@pytest.fixture
def repo(web, cache, monkeypatch):
    """Put repositories on the server, as the hub would show them."""
    monkeypatch.setenv("HF_ENDPOINT", web.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(cache / "no login"))

    def put(content: dict[str, bytes], name: str = "owner/name", revision: str = "main", **options) -> None:
        siblings = []
        for path, body in content.items():
            sibling = {"rfilename": path, "size": len(body)}
            sibling["blobId"] = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
            if path.endswith((".safetensors", ".gguf")):
                sibling["lfs"] = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 1}
            siblings.append(sibling)
            web.put(f"/{name}/resolve/{COMMIT}/{path}", body, **options)
        info = {"id": name, "sha": COMMIT, "siblings": siblings}
        web.put(
            f"/api/models/{name}/revision/{revision}",
            json.dumps(info).encode(),
            headers={"Content-Type": "application/json"},
        )

    web.put_repo = put
    return web


def fetched(folder, reference=REFERENCE) -> dict[str, bytes]:
    parts = hub.fetch_files(reference, hub.list_files(reference), folder)
    assert all(hashlib.sha256(part.file.read_bytes()).hexdigest() == part.sha256 for part in parts)
    return {part.path: part.file.read_bytes() for part in parts}


def test_a_model_is_its_configuration_tokenizer_and_weights(repo, tmp_path):
    repo.put_repo(MODEL)
    assert fetched(tmp_path) == {name: MODEL[name] for name in NEEDED}


def test_shards_come_with_their_index(repo):
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    names = ["config.json", "model.safetensors.index.json", *shards]
    repo.put_repo(dict.fromkeys(names, b"x"))
    assert [item.path for item in hub.list_files(REFERENCE)] == names


def test_a_named_file_and_revision(repo, tmp_path):
    repo.put_repo({"a.gguf": b"a", "deep/b.gguf": b"b"}, revision="v2")
    assert fetched(tmp_path, hub.Reference("owner/name", "v2", "deep/b.gguf")) == {"deep/b.gguf": b"b"}


def test_the_only_gguf_file_needs_no_name(repo, tmp_path):
    repo.put_repo({"a.gguf": b"a", "README.md": b""})
    assert fetched(tmp_path) == {"a.gguf": b"a"}


@pytest.mark.parametrize("named", ["", "deep/a-00001-of-00002.gguf", "deep/a-00002-of-00002.gguf"])
def test_a_gguf_model_comes_with_all_its_parts(repo, tmp_path, named):
    parts = {"deep/a-00001-of-00002.gguf": b"a", "deep/a-00002-of-00002.gguf": b"b"}
    repo.put_repo({**parts, "mmproj-a.gguf": b"c"})
    assert fetched(tmp_path, hub.Reference("owner/name", file=named)) == parts


@pytest.mark.parametrize(
    ("content", "file", "error", "message"),
    [
        (["a.gguf", "b.gguf"], "", ModelNotFound, "2 GGUF models; name one: owner/name:FILE with a.gguf, b.gguf"),
        (["config.json", "pytorch_model.bin"], "", UnsafeCheckpoint, "pickles only"),
        (["README.md"], "", ModelNotFound, "neither safetensors with a config.json nor a GGUF file"),
        (["a.gguf"], "c.gguf", ModelNotFound, "holds no c.gguf; it holds a.gguf"),
        (["a-00001-of-00002.gguf"], "", ModelNotFound, "holds no a-00002-of-00002.gguf"),
        (["../evil.gguf"], "", CorruptedFile, "outside its folder"),
    ],
)
def test_repositories_that_are_no_model(repo, content, file, error, message):
    repo.put_repo(dict.fromkeys(content, b"x"))
    with pytest.raises(error, match=message):
        hub.list_files(hub.Reference("owner/name", file=file))


@pytest.mark.parametrize(
    ("status", "code", "error", "message"),
    [
        (401, "RepoNotFound", ModelNotFound, "shows no repository 'owner/name': misspelled, or private"),
        (404, "RepoNotFound", ModelNotFound, "shows no repository 'owner/name'"),
        (404, "RevisionNotFound", ModelNotFound, "has no revision 'main'"),
        (403, "GatedRepo", DownloadFailed, "is gated.*accept its license.*HF_TOKEN"),
        (418, "", DownloadFailed, "cannot be asked for owner/name"),
    ],
)
def test_refusals_of_the_hub_are_told_apart(repo, status, code, error, message):
    repo.put("/api/models/owner/name/revision/main", status=status, headers={"X-Error-Code": code})
    with pytest.raises(error, match=message):
        hub.list_files(REFERENCE)


def test_a_hub_that_is_out_of_reach(cache, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadFailed, match=r"the hub at http://127\.0\.0\.1:9 cannot be asked for owner/name"):
        hub.list_files(REFERENCE)


def test_the_librarys_own_offline_switch(cache, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineError, match="HF_HUB_OFFLINE=1"):
        hub.list_files(REFERENCE)


def test_a_name_that_the_hub_cannot_have(repo):
    with pytest.raises(ModelNotFound, match="is not a repository name"):
        hub.list_files(hub.Reference("owner/na--me"))


def test_the_token_is_sent_and_its_absence_explained(repo, tmp_path, monkeypatch):
    repo.put_repo({"a.gguf": b"a"}, needs=lambda headers: headers.get("authorization") == "Bearer secret")
    with pytest.raises(DownloadFailed, match=r"answers 401.*accept its license.*pull owner/name again"):
        fetched(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert fetched(tmp_path) == {"a.gguf": b"a"}


def test_an_interrupted_download_goes_on(repo, tmp_path):
    repo.put_repo({"config.json": b"{}", "model.safetensors": WEIGHTS})
    (tmp_path / "model.safetensors.partial").write_bytes(WEIGHTS[:150_000])
    assert fetched(tmp_path)["model.safetensors"] == WEIGHTS
    sent = [request.sent for request in repo.requests if request.path.endswith("model.safetensors")]
    assert sent == [50_000]


def test_what_is_there_is_fetched_again_only_if_the_repository_changed(repo, tmp_path):
    repo.put_repo({"config.json": b"{}", "model.safetensors": b"old"})
    fetched(tmp_path)
    count = len(repo.requests)
    repo.put_repo({"config.json": b"{}", "model.safetensors": b"new"})
    assert fetched(tmp_path)["model.safetensors"] == b"new"
    asked = [request.path.partition("?")[0].rpartition("/")[2] for request in repo.requests[count:]]
    assert asked == ["main", "model.safetensors"]


@pytest.mark.parametrize("path", ["config.json", "model.safetensors"])
def test_small_and_large_files_are_both_checked(repo, tmp_path, path):
    repo.put_repo({"config.json": b"{}", "model.safetensors": WEIGHTS})
    repo.put(f"/owner/name/resolve/{COMMIT}/{path}", b"altered on the way")
    with pytest.raises(HashMismatch):
        fetched(tmp_path)


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,9}", fullmatch=True)


@given(names, names, st.just("main") | names, st.just("") | names)
def test_references_survive_printing(owner, name, revision, file):
    reference = hub.Reference(f"{owner}/{name}", revision, file)
    assert hub.parse(str(reference)) == reference


@pytest.mark.parametrize("text", ["name", "/a/b", "./a/b", "../a", "a/b/c", "a/b@", "a/b:", "C:/a", "a b/c", "~/a", ""])
def test_other_texts_are_no_hub_references(text):
    assert hub.parse(text) is None
