"""The license of a model, as far as its files or the catalog tell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Protocol, runtime_checkable

from pippin.core.formats.gguf import open_gguf
from pippin.core.store import catalog

_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"^license:\s*[\"']?([^\s\"'#\[]+)", re.MULTILINE)


@runtime_checkable
class Licensed(Protocol):
    """What `find_license` needs to know of a model."""

    @property
    def name(self) -> str:
        """Its name; that of the catalog, if it is from there."""

    @property
    def source(self) -> Path | None:
        """Its file or folder."""


def find_license(model: Licensed) -> str | None:
    """The license of a model by its identifier, such as "apache-2.0"; None where nothing names one.

    It is read from a GGUF file's metadata, from `license` in `config.json`, from the front matter of `README.md` in the
    folder, or from the catalog.
    """
    source = model.source
    if source is None:
        return None
    found = _of_folder(source) if source.is_dir() else None
    if source.suffix == ".gguf":
        found = open_gguf(source).metadata.get("general.license")
    if not isinstance(found, str) or not found:
        entry = catalog.find(model.name)
        found = None if entry is None else entry.license.lower()
    return found


def _of_folder(folder: Path) -> str | None:
    config, readme = folder / "config.json", folder / "README.md"
    if config.is_file():
        named = json.loads(config.read_text(encoding="utf-8")).get("license")
        if isinstance(named, str):
            return named
    if readme.is_file():
        head = _FRONT_MATTER.match(readme.read_text(encoding="utf-8", errors="replace"))
        field = head and _FIELD.search(head[1])
        return field[1].lower() if field else None
    return None
