"""Names of the files that a GGUF model lies in: one, or several numbered parts.

Notable here:
- `llama-gguf-split` names parts `NAME-00001-of-00003.gguf`; a model is named by its first part
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_names(name: str) -> list[str]:
    """The names of all parts of the model that a file belongs to, in order; the name alone for a whole model.

    >>> part_names("folder/big-00002-of-00002.gguf")
    ['folder/big-00001-of-00002.gguf', 'folder/big-00002-of-00002.gguf']
    >>> part_names("small.gguf")
    ['small.gguf']
    """
    found = _PART.fullmatch(name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        return [name]
    return [f"{found['stem']}-{number:05}-of-{found['count']}.gguf" for number in range(1, int(found["count"]) + 1)]


def models_among(names: Iterable[str]) -> list[str]:
    """The models that some files are, each by the name of its first part; projectors of images are not models.

    >>> models_among(["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf", "mmproj-b.gguf", "notes.txt"])
    ['a-00001-of-00002.gguf', 'b.gguf']
    """
    ggufs = [name for name in names if name.endswith(".gguf")]
    return sorted({part_names(name)[0] for name in ggufs if not name.rpartition("/")[2].startswith("mmproj")})
