"""Resolve a model reference: a catalog name, a GGUF file, a folder, or a hub repository.

Notable here:
- an installed model is found without using the network
- pickles are detected by their content and rejected without being loaded
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pippin.core.errors import CheckpointError, ModelNotFound, UnsafeCheckpoint, UnsupportedModel
from pippin.core.formats.gguf_parts import models_among
from pippin.core.store import catalog, hub, store

_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}


@dataclass(frozen=True)
class Resolved:
    """A model on this machine's disk."""

    name: str
    """The name for messages: catalog name, hub reference, or file name."""
    kind: Literal["gguf", "folder"]
    path: Path
    """A GGUF file (of several parts the first), or a folder in Hugging Face layout with safetensors weights."""


def resolve(ref: str | Path, *, download: bool = True) -> Resolved:
    """Find a model on disk, downloading it first if necessary.

    A string is tried as a catalog name, then as an existing path, then as a hub repository (`owner/name`,
    `owner/name@revision`, `owner/name:FILE.gguf`). A `Path` is always a path.

    Args:
        ref: the reference.
        download: False never downloads.

    Raises:
        ModelNotFound: the reference matches nothing, or needs a download and ``download`` is False.
        UnsafeCheckpoint: the weights are a pickle.
        CheckpointError: a folder with weights but no ``config.json``, or vice versa.
        UnsupportedModel: a file in another format.
        OfflineError, DownloadFailed, HashMismatch, DiskFull: as `pippin.core.store.store.pull`.
    """
    if isinstance(ref, str) and (entry := catalog.find(ref)):
        if entry.kind == "data":
            raise ModelNotFound(f"{ref} is a data set, not a model; `pippin models` lists the models")
        return _installed(ref, entry.name, download)
    path = Path(ref).expanduser()
    if path.exists():
        return _local(path)
    looks_like_file = path.suffix in _PICKLES | {".gguf", ".safetensors"} and ":" not in str(ref)
    if isinstance(ref, str) and not looks_like_file and (path.parent == Path() or hub.parse(ref)):
        return _installed(ref, str(hub.parse(ref)), download)
    raise ModelNotFound(f"there is no file or folder {path}")


def _installed(ref: str, name: str, download: bool) -> Resolved:
    path = store.find(ref)
    if path is None:
        if not download:
            raise ModelNotFound(f"{name} is not in the cache; `pippin pull {name}` downloads it")
        path = store.pull(ref)
    found = _local(path)
    return Resolved(name, found.kind, found.path)


def _local(path: Path) -> Resolved:
    """Determine the format of a file or folder, and check it."""
    if path.is_dir():
        if (gguf := _gguf_inside(path)) is not None:
            return Resolved(path.resolve().name, "gguf", gguf)
        _check_folder(path)
        return Resolved(path.resolve().name, "folder", path)
    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix == ".gguf" or magic == b"GGUF":
        return Resolved(path.stem, "gguf", path)
    if path.suffix in _PICKLES or _is_pickle(path, magic):
        raise UnsafeCheckpoint(_pickle_message(path))
    if path.suffix == ".safetensors":
        raise UnsupportedModel(
            f"{path} holds weights without a config; give the folder that also contains its config.json"
        )
    raise UnsupportedModel(f"{path} is neither a GGUF file nor a folder in Hugging Face layout")


def _gguf_inside(folder: Path) -> Path | None:
    """The GGUF model of a folder with one, and with no other; of several parts the first."""
    if (folder / "config.json").exists():
        return None
    found = models_among(path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.gguf")))
    return folder / found[0] if len(found) == 1 else None


def _is_pickle(path: Path, magic: bytes) -> bool:
    """Whether a file starts like a pickle, or is a zip archive with a pickle as `torch.save` writes it."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    return magic[:1] == b"\x80" and magic[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")


def _check_folder(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        raise ModelNotFound(f"the folder {folder} is empty")
    config = "config.json" in names
    weights = [name for name in names if name.endswith(".safetensors")]
    if config and weights:
        return
    pickles = [name for name in names if Path(name).suffix in _PICKLES]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if pickles and not weights:
        raise UnsafeCheckpoint(_pickle_message(folder / pickles[0]))
    if ggufs:
        raise ModelNotFound(f"{folder} holds several GGUF models; name the file of one, such as {folder / ggufs[0]}")
    if weights:
        raise CheckpointError(f"{folder} holds {weights[0]} but no config.json, which says what the weights are")
    if config:
        raise CheckpointError(f"{folder} holds config.json but no safetensors weights")
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    raise ModelNotFound(f"{folder} has no config.json, so it is not a model in Hugging Face layout; it holds {shown}")


def _pickle_message(path: Path) -> str:
    return (
        f"{path} is a pickle, which can run any code when it is loaded. Use the model's safetensors or GGUF files, or "
        "if you trust it convert it: torch.load(..., weights_only=True), then safetensors.torch.save_file"
    )
