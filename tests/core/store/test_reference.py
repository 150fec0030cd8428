"""Every way to name a model, and every way to get it wrong."""

import zipfile

import pytest
import torch

from pippin.core.errors import (
    CheckpointError,
    ModelNotFound,
    OfflineError,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from pippin.core.store import catalog, reference, store

pytestmark = pytest.mark.usefixtures("cache")


def make(folder, names: dict[str, bytes] | list[str]):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(names[name] if isinstance(names, dict) else b"{}")
    return folder


@pytest.mark.parametrize("as_text", [True, False])
def test_a_gguf_file(tmp_path, as_text):
    path = tmp_path / "tiny.Q4_1.gguf"
    path.write_bytes(b"GGUF")
    found = reference.resolve(str(path) if as_text else path)
    assert found == reference.Resolved("tiny.Q4_1", "gguf", path)


def test_a_gguf_file_is_known_by_its_content(tmp_path):
    path = tmp_path / "0123abcd"
    path.write_bytes(b"GGUF and more")
    assert reference.resolve(path).kind == "gguf"


def test_a_folder_in_hugging_face_layout(tmp_path, monkeypatch):
    make(tmp_path / "my-model", ["config.json", "model.safetensors"])
    monkeypatch.chdir(tmp_path / "my-model")
    assert (reference.resolve(".").name, reference.resolve(".").kind) == ("my-model", "folder")


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make(tmp_path / "my-model", ["config.json", "model.safetensors"])
    assert reference.resolve("~/my-model").path == tmp_path / "my-model"


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ([], ModelNotFound, "is empty"),
        (["notes.txt"], ModelNotFound, "has no config.json.*it holds notes.txt"),
        (["tiny.gguf", "other.gguf", "readme"], ModelNotFound, "several GGUF models; name the file .*other.gguf"),
        (["model.safetensors"], CheckpointError, "model.safetensors but no config.json"),
        (["config.json"], CheckpointError, "config.json but no safetensors weights"),
        (["config.json", "pytorch_model.bin"], UnsafeCheckpoint, "pytorch_model.bin is a pickle"),
    ],
)
def test_folders_that_are_no_model(tmp_path, names, error, message):
    folder = make(tmp_path / "folder", names)
    with pytest.raises(error, match=message):
        reference.resolve(folder)


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (["a.gguf"], "a.gguf"),
        (["a.gguf", "mmproj-a.gguf", "README.md"], "a.gguf"),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "a-00001-of-00002.gguf"),
        (["Q4/a-00002-of-00002.gguf"], "Q4/a-00001-of-00002.gguf"),  # which is missing; opening it says so
    ],
)
def test_a_folder_with_one_gguf_model_is_that_model(tmp_path, names, first):
    (tmp_path / "folder" / "Q4").mkdir(parents=True)
    found = reference.resolve(make(tmp_path / "folder", names))
    assert (found.name, found.kind, found.path) == ("folder", "gguf", tmp_path / "folder" / first)


@pytest.mark.parametrize("name", ["a.bin", "a.pt", "a.pth", "a.ckpt", "a.pkl"])
def test_pickles_are_refused_by_their_names(tmp_path, name):
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(UnsafeCheckpoint, match=r"can run any code.*weights_only=True"):
        reference.resolve(tmp_path / name)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_are_refused_by_their_content(tmp_path, protocol):
    # a pickle of None: protocol, then "N.", with the frame that protocol 4 puts around it
    frame = b"\x95\x02\x00\x00\x00\x00\x00\x00\x00" if protocol >= 4 else b""
    (tmp_path / "weights").write_bytes(b"\x80" + bytes([protocol]) + frame + b"N.")
    with pytest.raises(UnsafeCheckpoint):
        reference.resolve(tmp_path / "weights")


def test_what_torch_saves_is_refused_under_any_name(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "weights")
    with pytest.raises(UnsafeCheckpoint):
        reference.resolve(tmp_path / "weights")
    with zipfile.ZipFile(tmp_path / "other", "w") as archive:
        archive.writestr("notes.txt", "")
    with pytest.raises(UnsupportedModel):
        reference.resolve(tmp_path / "other")


@pytest.mark.parametrize(("name", "message"), [("a.safetensors", "give the folder"), ("a.onnx", "neither a GGUF file")])
def test_other_files_are_not_supported(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"\x08\x00\x00\x00")
    with pytest.raises(UnsupportedModel, match=message):
        reference.resolve(tmp_path / name)


@pytest.mark.parametrize("ref", ["./no/such", "/no/such/model", "models/tiny.gguf", "tiny.gguf", "weights.pt", "a/b/c"])
def test_paths_that_do_not_exist(ref, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFound, match="there is no file or folder"):
        reference.resolve(ref)


def test_an_unknown_name_has_near_ones():
    with pytest.raises(ModelNotFound, match="did you mean smollm2-135m"):
        reference.resolve("smolm2-135m")


def test_a_path_object_is_never_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="there is no file or folder smollm2-135m"):
        reference.resolve(tmp_path.__class__("smollm2-135m"))


def test_a_data_set_is_no_model():
    with pytest.raises(ModelNotFound, match="human-eval is a data set, not a model"):
        reference.resolve("human-eval")


@pytest.mark.parametrize("ref", ["smollm2-135m", "owner/name", "owner/name@v2", "owner/name:tiny.gguf"])
def test_what_is_not_installed(ref, monkeypatch):
    with pytest.raises(ModelNotFound, match=f"{ref} is not in the cache; `pippin pull {ref}` downloads it"):
        reference.resolve(ref, download=False)
    monkeypatch.setenv("PIPPIN_OFFLINE", "1")
    with pytest.raises(OfflineError):
        reference.resolve(ref)


@pytest.mark.parametrize(
    ("ref", "folder", "names", "kind"),
    [
        ("SmolLM2-135M", "smollm2-135m@0.1.2", {"tiny.gguf": b"GGUF"}, "gguf"),
        ("owner/name", "owner%2Fname@main", ["config.json", "model.safetensors"], "folder"),
        ("owner/name@v2:a.gguf", "owner%2Fname%3Aa.gguf@v2", {"a.gguf": b"GGUF"}, "gguf"),
        ("owner/parts", "owner%2Fparts@main", ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "gguf"),
    ],
)
def test_what_is_installed_is_found_without_the_network(ref, folder, names, kind, cache, monkeypatch):
    monkeypatch.setenv("PIPPIN_OFFLINE", "1")
    (cache / "installed").mkdir(parents=True)
    make(cache / "installed" / folder, names)
    found = reference.resolve(ref)
    assert found.kind == kind
    assert store.find(ref) in (found.path, found.path.parent)
    assert found.name == (ref.lower() if catalog.find(ref) else ref)


def test_what_is_not_installed_is_pulled(tmp_path, monkeypatch):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(store, "pull", {"smollm2-135m": path, "owner/name": path}.__getitem__)
    assert reference.resolve("smollm2-135m") == reference.Resolved("smollm2-135m", "gguf", path)
    assert reference.resolve("owner/name") == reference.Resolved("owner/name", "gguf", path)
