"""Kinds of text that every installation has, as bytes.

Notable here:
- Python's modules, its language reference in reStructuredText, the bills of material (JSON) and licenses of installed
  packages; of ten files of a kind one is held out and one is for validation
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch

from pippin.claims.worlds.sequences.byte_text import END, EVERY, ByteBatches, ByteText
from pippin.data.token_batches import TokenBatch

KINDS = ("modules", "reference", "JSON", "licenses")
SMALLEST, LARGEST, ENOUGH = 1000, 100_000, 1_000_000
"""Bytes that a file must have, that are read of it at most, and that are trained on of a kind in all."""


@cache
def text_kinds(*, validation: bool = False) -> dict[str, ByteText]:
    """The kinds by name; with `validation`, the validation files in place of the held-out ones."""
    files: dict[str, list[bytes]] = {kind: [] for kind in KINDS}
    files["reference"] = [text.encode() for _, text in sorted(topics.topics.items())]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        files["modules"].append(path.read_bytes()[:LARGEST])
    for path in sorted(Path(sysconfig.get_path("purelib")).glob("*.dist-info/**/*")):
        license = path.parent.name == "licenses" or path.name.upper().startswith(("LICEN", "COPYING"))
        if (license or path.suffix == ".json") and path.is_file() and path.stat().st_size >= SMALLEST:
            files["licenses" if license else "JSON"].append(path.read_bytes()[:LARGEST])
    found = {}
    for kind, texts in files.items():
        parts = [
            torch.from_numpy(np.append(np.frombuffer(text, np.uint8).astype(np.int64), END))
            for text in dict.fromkeys(texts)  # the same license comes many times
        ]
        train = torch.cat([part for index, part in enumerate(parts) if index % EVERY not in (0, EVERY // 2)])
        found[kind] = ByteText(train[:ENOUGH], torch.cat(parts[EVERY // 2 if validation else 0 :: EVERY]))
    return found


class MixedBatches:
    """Endless batches of one window of each kind; a batch depends on its seed and index alone."""

    def __init__(self, length: int, seed: int) -> None:
        streams = enumerate(text_kinds().values())
        self.streams = [ByteBatches(1, length, len(KINDS) * seed + index, text) for index, text in streams]

    def __iter__(self) -> Iterator[TokenBatch]:
        """Yield batches from the current one on."""
        for parts in zip(*self.streams, strict=True):
            yield TokenBatch(torch.cat([part.ids for part in parts]), torch.cat([part.targets for part in parts]))


def windows(count: int, length: int, *, validation: bool = False) -> dict[str, TokenBatch]:
    """So many windows of each kind, spread evenly over its held-out files."""
    found = {}
    for kind, text in text_kinds(validation=validation).items():
        starts = torch.linspace(0, len(text.held_out) - length - 1, count).long()[:, None]
        rows = text.held_out[starts + torch.arange(length + 1)]
        found[kind] = TokenBatch(rows[:, :-1], rows[:, 1:])
    return found


def files_by_kind(limit: int) -> dict[str, list[str]]:
    """Texts of Python's library and of the installed packages, in an order determined by their names."""
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    kinds = {
        "library": (library, "*.py"),
        "headers": (packages / "torch", "**/*.h"),
        "stubs": (packages, "**/*.pyi"),
        "metadata": (packages, "*.dist-info/METADATA"),
        "licenses": (packages, "*.dist-info/**/LICENSE*"),
        "packages": (packages, "*/*.py"),
    }
    found: dict[str, list[str]] = {}
    for kind, (folder, pattern) in kinds.items():
        paths = sorted(folder.glob(pattern), key=lambda path: hashlib.sha256(path.name.encode()).digest())
        texts = [path.read_text("utf-8", "ignore")[:20_000] for path in paths[:limit] if path.is_file()]
        found[kind] = [text for text in texts if len(text) >= 600]
    return found
