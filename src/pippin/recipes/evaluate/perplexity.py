"""Perplexity of a language model on text: how well it predicts files that it was not trained on.

Notable here:
- files are independent texts: none is context for another
- perplexities of two models are comparable where they have the same tokenizer; nats per byte always are
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidInput
from pippin.core.options import Option
from pippin.engine.options import Bits, Device, DType
from pippin.recipes import options
from pippin.recipes.options import StrPath

if TYPE_CHECKING:
    from pippin.core.report import Report
    from pippin.language.likelihood import TextLikelihood

SUFFIXES = (".txt", ".text", ".md", ".rst")
"""Files of a folder that are read as text; a file that is named itself may have any name."""

MAX_LENGTH = 512
"""Default context length, that of llama-perplexity."""


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a measurement."""

    model: options.Model
    data: Annotated[
        tuple[StrPath, ...],
        Option("Text files, or folders with some (.txt, .text, .md, .rst).", metavar="PATH", positional=True),
    ]
    max_length: Annotated[
        PositiveInt | None,
        Option("Context length: tokens of a window. By default 512, or the model's context if that is smaller."),
    ] = None
    stride: Annotated[
        PositiveInt | None,
        Option(
            "Tokens between windows: smaller gives each prediction more context, and takes longer. By default half "
            "of the context length."
        ),
    ] = None
    max_tokens: Annotated[PositiveInt | None, Option("Tokens to predict at most, over all files.")] = None
    bits: Bits = None
    device: Device = None
    dtype: DType = "auto"


@dataclass(frozen=True)
class PerplexityResult:
    """What was measured.

    Attributes:
        model: the model's name.
        files: the texts.
        max_length: the context length, in tokens.
        stride: the distance between windows, in tokens.
        likelihood: of all texts together.
    """

    model: str
    files: tuple[Path, ...]
    max_length: int
    stride: int
    likelihood: TextLikelihood

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        found = self.likelihood
        return {
            "model": self.model,
            "files": [str(file) for file in self.files],
            "max_length": self.max_length,
            "stride": self.stride,
            "tokens": found.tokens,
            "bytes": found.bytes,
            "perplexity": found.perplexity,
            "perplexity_error": found.perplexity_error,
            "nats_per_token": found.per_token,
            "nats_per_token_error": found.standard_error,
            "nats_per_byte": found.per_byte,
        }

    def report(self) -> Report:
        """Perplexity and nats per token with their standard errors, nats per byte, and the number of tokens."""
        from pippin.core.report import Report, Row

        found = self.likelihood
        texts = f"{len(self.files)} files" if len(self.files) > 1 else str(self.files[0])
        rows = [
            Row("perplexity", found.perplexity, spread=found.perplexity_error),
            Row("loss", found.per_token, "nats/token", found.standard_error),
            Row("loss per byte", found.per_byte, "nats/byte"),
            Row("tokens", found.tokens),
        ]
        return Report(f"{self.model} on {texts}, context {self.max_length}, stride {self.stride}", rows)


def run(config: Config, *, show_progress: bool = True) -> PerplexityResult:
    """Measure the perplexity of a model on text files.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: a context length above the model's, or a stride above the context length.
        InvalidInput: a file cannot be read, a folder has no text, or all texts are empty.
        ModelNotFound, CheckpointError: the model cannot be loaded.
    """
    from pippin.core.text_files import read_text
    from pippin.language import language_model
    from pippin.language.likelihood import text_likelihood

    files = text_files(config.data)
    texts = [read_text(file) for file in files]
    if not any(text.strip() for text in texts):
        raise InvalidInput(f"{', '.join(map(str, config.data))}: there is no text in it")
    model = language_model.load(config.model, device=config.device, dtype=config.dtype, bits=config.bits)
    max_length = min(MAX_LENGTH, model.context_size) if config.max_length is None else config.max_length
    stride = math.ceil(max_length / 2) if config.stride is None else config.stride
    likelihood = text_likelihood(
        model,
        texts,
        max_length=max_length,
        stride=stride,
        max_tokens=config.max_tokens,
        show_progress=show_progress,
    )
    return PerplexityResult(model.name, tuple(files), max_length, stride, likelihood)


def text_files(paths: Sequence[StrPath]) -> list[Path]:
    """The files that are named, and those of the folders that are named, in the order of their paths.

    Raises:
        InvalidInput: a folder has no file with one of `SUFFIXES`.
    """
    files = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        if not found:
            raise InvalidInput(f"folder {str(path)!r} has no text: no file ends in {', '.join(SUFFIXES)}")
        files += found
    return files
