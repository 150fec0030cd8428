"""What every copy of a model keeps of its origin: recommended sampling, license, tool dialect.

Notable here:
- all fields of a folder's `generation_config.json` are kept, also those that only other libraries read
- a GGUF file has some of them under names of its own
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from pippin.core.formats.checkpoint import read_json
from pippin.core.formats.gguf import open_gguf
from pippin.data.text.tokenizer import Tokenizer
from pippin.data.text.tool_dialect_name import ToolDialectName
from pippin.language.model_license import Licensed, find_license

SAMPLING: Final = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Recommended sampling options: key in `generation_config.json`, and of GGUF metadata."""
_WRITER = "transformers_version"  # of the origin; the copy is not its


@runtime_checkable
class Original(Licensed, Protocol):
    """What a copy needs to know of a model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    @property
    def tool_dialect(self) -> ToolDialectName | None:
        """How it writes calls of tools, where that was named."""


def generation_config(model: Original) -> dict[str, Any]:
    """The fields of `generation_config.json` of a copy: those of the origin, with the tokens of its tokenizer."""
    kept = {name: value for name, value in _recommended(model.source).items() if name != _WRITER}
    return kept | token_ids(model.tokenizer)


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """The begin and end tokens, as `config.json` and `generation_config.json` have them."""
    return {"eos_token_id": list(tokenizer.eos_ids), "bos_token_id": tokenizer.bos_id}


def sampling_metadata(model: Original) -> dict[str, Any]:
    """The recommended sampling as GGUF metadata, by key."""
    found = _recommended(model.source)
    kept = {key: found[name] for name, key in SAMPLING.items() if found.get(name) is not None}
    return {key: value if key == SAMPLING["top_k"] else float(value) for key, value in kept.items()}


def config_fields(model: Original) -> dict[str, str]:
    """Fields of `config.json` beside the architecture: the license, and the tool dialect if one was named."""
    fields = {"license": find_license(model), "tool_dialect": model.tool_dialect}
    return {name: value for name, value in fields.items() if value is not None}


def _recommended(source: Path | None) -> dict[str, Any]:
    if source is None:
        return {}
    if source.suffix == ".gguf":
        metadata = open_gguf(source).metadata
        return {name: metadata[key] for name, key in SAMPLING.items() if metadata.get(key) is not None}
    path = source / "generation_config.json"
    return read_json(path) if path.is_file() else {}
