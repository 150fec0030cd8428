"""Models from the Hugging Face hub: list a repository and download its files.

Notable here:
- `huggingface_hub` provides the endpoint, token, listing, URLs and errors
- files are downloaded with `core/store/download.py`, which resumes a killed download; the library starts over
- every file is verified: large ones by the SHA-256 that the hub lists, small ones by their git hash
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pippin.core import files
from pippin.core.errors import DownloadFailed, ModelNotFound, OfflineError, UnsafeCheckpoint
from pippin.core.formats.gguf_parts import models_among, part_names
from pippin.core.store import download
from pippin.core.store.archive import ArchiveMember

_NAME = r"[A-Za-z0-9][\w.-]*"
_REFERENCE = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[^:@]+))?(?::(?P<file>[^:]+))?")
# config and tokenizer are at the top level of a repository, the pooling of an encoder in `1_Pooling/`
_COMPANIONS = re.compile(r"(\d+_[A-Za-z]+/)?[^/]+\.(json|txt|jinja|model)")
_WEIGHTS = re.compile(r"[^/]+\.safetensors")
_STANDARD_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_PICKLES = re.compile(r".*\.(bin|pt|pth|ckpt)")


@dataclass(frozen=True)
class Reference:
    """`owner/name`, with an optional `@revision` and an optional `:file`."""

    repo: str
    revision: str = "main"
    file: str = ""

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision != "main" else "") + (self.file and f":{self.file}")


def parse(text: str) -> Reference | None:
    """Parse a hub reference; None where the text is not one.

    >>> parse("Qwen/Qwen3-0.6B@main:model.safetensors").file
    'model.safetensors'
    >>> parse("./Qwen/model") is None and parse("smollm2-135m") is None
    True
    """
    match = _REFERENCE.fullmatch(text)
    return Reference(match["repo"], match["revision"] or "main", match["file"] or "") if match else None


@dataclass(frozen=True)
class HubFile:
    """One file of a repository at one commit; ``size`` in bytes."""

    path: str
    size: int
    address: download.Address

    @property
    def sha256(self) -> str:
        """The SHA-256 as the hub lists it; empty for small files, which have only a git hash."""
        digest = self.address.digest
        return digest.value if digest and digest.algorithm == "sha256" else ""


def list_files(reference: Reference) -> list[HubFile]:
    """The files of a repository that Pippin needs, from one request to the hub.

    For a model in Hugging Face layout these are config, tokenizer and safetensors weights; otherwise its GGUF file, if
    there is exactly one, with all its parts.

    Raises:
        ModelNotFound: no such repository, revision or file; or several GGUF files and none named.
        UnsafeCheckpoint: the weights exist only as pickles.
        CorruptedFile: a file name would lead out of the folder.
        DownloadFailed: the hub cannot be reached, or requires a login.
        OfflineError: `HF_HUB_OFFLINE=1` is set.
    """
    from huggingface_hub import HfApi, get_token, hf_hub_url

    with _hub_errors(reference):
        api = HfApi(endpoint=endpoint())
        info = api.model_info(
            reference.repo, revision=reference.revision, files_metadata=True, timeout=download.TIMEOUT
        )
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    selected = []
    for path in _select(reference, list(siblings)):
        sibling = siblings[path]
        digest = (
            download.Digest("sha256", sibling.lfs.sha256)
            if sibling.lfs
            else download.Digest("git", sibling.blob_id)
            if sibling.blob_id
            else None
        )
        url = hf_hub_url(reference.repo, path, revision=info.sha or reference.revision, endpoint=endpoint())
        selected.append(
            HubFile(files.inner_path(path, reference.repo), sibling.size or 0, download.Address(url, digest, headers))
        )
    return selected


def fetch_files(
    reference: Reference, items: list[HubFile], path: Path, *, advance: Callable[[int], None] = lambda n: None
) -> list[ArchiveMember]:
    """Download files into a folder, resuming from partial files of an earlier attempt.

    Raises:
        DownloadFailed: the connection broke, or the hub requires a login or an accepted license.
        HashMismatch, DiskFull: as `pippin.core.store.download.download`.
    """
    parts = []
    for item in items:
        target = path.joinpath(*item.path.split("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        # the repository may have changed since an interrupted pull left this file
        if not (item.address.digest and item.address.digest.matches(target)):
            try:
                download.download(item.address, target, advance=advance)
            except download.DownloadRefused as error:
                raise DownloadFailed(f"{error}. {_login_hint(reference)}") from error
        parts.append(ArchiveMember(item.path, target, item.sha256 or files.sha256_of(target)))
    return parts


def endpoint() -> str:
    """The URL of the hub: `HF_ENDPOINT`, or the library's default."""
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT


def _select(reference: Reference, paths: list[str]) -> list[str]:
    """Select the files of a repository that make up the model."""
    if reference.file:
        return _parts(reference, reference.file, paths)
    weights = [path for path in paths if _WEIGHTS.fullmatch(path)]
    if weights and "config.json" in paths:
        # some repositories have a second copy of the weights under another name
        standard = [path for path in weights if _STANDARD_WEIGHTS.fullmatch(path)]
        return [path for path in paths if _COMPANIONS.fullmatch(path)] + (standard or weights)
    ggufs = models_among(paths)
    if len(ggufs) == 1:
        return _parts(reference, ggufs[0], paths)
    if ggufs:
        raise ModelNotFound(
            f"{reference.repo} holds {len(ggufs)} GGUF models; name one: {reference.repo}:FILE with {_some(ggufs)}"
        )
    if any(_PICKLES.fullmatch(path) for path in paths):
        raise UnsafeCheckpoint(
            f"{reference.repo} holds its weights as pickles only, which run code when opened; "
            "look for a repository or a revision with safetensors or GGUF files"
        )
    raise ModelNotFound(f"{reference.repo} holds neither safetensors with a config.json nor a GGUF file")


def _parts(reference: Reference, file: str, paths: list[str]) -> list[str]:
    """All parts of the model that a file belongs to."""
    parts = part_names(file)
    if missing := [part for part in parts if part not in paths]:
        raise ModelNotFound(f"{reference.repo} holds no {missing[0]}; it holds {_some(paths)}")
    return parts


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:8]) + (", …" if len(paths) > 8 else "")


def _login_hint(reference: Reference) -> str:
    return (
        "If the model is gated or private: accept its license on the model's page on the hub, "
        f"then run `hf auth login` or set HF_TOKEN, and pull {reference} again"
    )


@contextmanager
def _hub_errors(reference: Reference) -> Iterator[None]:
    """Convert the library's errors to Pippin's."""
    from huggingface_hub import errors

    repo = reference.repo
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise OfflineError(f"HF_HUB_OFFLINE=1 forbids asking the hub for {repo}; unset it") from error
    except errors.GatedRepoError as error:
        raise DownloadFailed(f"{repo} is gated. {_login_hint(reference)}") from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{repo} has no revision {reference.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub at {endpoint()} shows no repository {repo!r}: misspelled, or private. {_login_hint(reference)}"
        ) from error
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{repo!r} is not a repository name: {error}") from error
    except Exception as error:  # connection errors come from whichever HTTP library the hub's library uses
        raise DownloadFailed(
            f"the hub at {endpoint()} cannot be asked for {repo}: {error}. "
            "Check the connection, or set HF_ENDPOINT to a mirror that you can reach"
        ) from error
