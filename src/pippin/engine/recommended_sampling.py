"""The sampling options that a model recommends, for requests that name none.

Notable here:
- they stand in the model's `generation_config.json`, or in a GGUF file's `general.sampling` metadata
- what a request names takes precedence, each option by itself; where neither says anything, decoding is greedy
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pippin.core.errors import CorruptedFile, InvalidArgument
from pippin.core.formats.checkpoint import read_json
from pippin.core.formats.gguf import open_gguf
from pippin.engine.options import SamplingOptions
from pippin.language.kept_metadata import SAMPLING


def recommended(source: Path | None) -> dict[str, Any]:
    """The options that a model's file or folder recommends, by their names in `SamplingOptions`.

    Args:
        source: the file or folder; None for a model made in memory, which recommends nothing.

    Raises:
        CorruptedFile: an option is out of its range.
    """
    kind = 0 if source is not None and source.is_dir() else 1
    path = source / "generation_config.json" if source is not None and kind == 0 else source
    if path is None or not path.is_file():
        return {}
    config = read_json(path) if kind == 0 else _metadata(path, path.stat().st_mtime_ns)
    keys = {name: (name, key)[kind] for name, key in SAMPLING.items()}
    found = {name: config[key] for name, key in keys.items() if config.get(key) is not None}
    if kind == 0 and config.get("do_sample") is False:
        found["temperature"] = 0
    if found.get("top_k", 1) in (0, -1):
        del found["top_k"]
    try:
        SamplingOptions(**found)
    except (InvalidArgument, TypeError) as error:
        raise CorruptedFile(f"{source}: the recommended sampling cannot be used: {error}") from error
    return found


@lru_cache(maxsize=16)
def _metadata(path: Path, changed: int) -> dict[str, Any]:
    """The metadata of a file that are about sampling; a header has the whole vocabulary, and every engine asks."""
    metadata = open_gguf(path).metadata
    return {key: metadata[key] for key in SAMPLING.values() if key in metadata}


def resolved(options: SamplingOptions, recommendation: Mapping[str, Any], vocab_size: int) -> SamplingOptions:
    """The options with the model's recommendation where they name nothing, and None where a filter keeps all tokens.

    >>> resolved(SamplingOptions(top_p=1.0), {"temperature": 0.6, "top_p": 0.9}, 100).temperature
    0.6
    >>> resolved(SamplingOptions(top_p=1.0), {"temperature": 0.6, "top_p": 0.9}, 100).top_p is None
    True
    """
    named: dict[str, Any] = {name: getattr(options, name) for name in SAMPLING}
    found: dict[str, Any] = {
        name: recommendation.get(name) if value is None else value for name, value in named.items()
    }
    if found["top_k"] is not None and found["top_k"] >= vocab_size:
        found["top_k"] = None
    if found["top_p"] == 1:
        found["top_p"] = None
    if not found["min_p"]:
        found["min_p"] = None
    return replace(options, **found) if found != named else options
