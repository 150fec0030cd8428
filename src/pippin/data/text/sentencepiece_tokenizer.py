"""SentencePiece models (`tokenizer.model`) as tokenizers of the `tokenizers` library.

Notable here:
- the file is a protocol buffer, of which the few fields that matter are read here; no other library is needed
- a BPE model has scores but no merges: they are derived from the vocabulary, as for a GGUF file
- normalization is the model's own: its table of characters, white space that is joined or kept, the leading space

Source: sentencepiece_model.proto of SentencePiece.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, normalizers

from pippin.core.errors import CorruptedFile, UnsupportedModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_NOT_TEXT: Final = frozenset({UNKNOWN, CONTROL, UNUSED})
_KINDS: Final = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}
_MAX_PIECES: Final = 1 << 21


@dataclass
class SentencePieceModel:
    """What a file says.

    Attributes:
        pieces: text, score and type of each.
        kind: "unigram" or "BPE".
        byte_fallback: whether characters that are not in the vocabulary are written as bytes.
        unknown, bos, eos: ids; negative for none.
        table: the compiled table of the normalizer; empty for none.
        prefix: whether a text begins with a space.
        join_spaces: whether spaces at the ends are removed, and several in a row are one.
    """

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    kind: str = "unigram"
    byte_fallback: bool = False
    unknown: int = 0
    bos: int = 1
    eos: int = 2
    table: bytes = b""
    prefix: bool = True
    join_spaces: bool = True


def read_model(path: str | Path) -> SentencePieceModel:
    """Read a `tokenizer.model`.

    Raises:
        CorruptedFile: it is no SentencePiece model. UnsupportedModel: it splits words or characters.
    """
    model = SentencePieceModel()
    try:
        for number, value in _fields(Path(path).read_bytes()):
            if number == 1:
                model.pieces.append(_piece(value))
            elif number == 2:
                _read_trainer(model, value)
            elif number == 3:
                _read_normalizer(model, value)
            if len(model.pieces) > _MAX_PIECES:
                raise CorruptedFile(f"{path}: more than {_MAX_PIECES:,} pieces")
    except (ValueError, struct.error, TypeError, IndexError) as error:
        raise CorruptedFile(f"{path}: not a SentencePiece model: {error}") from error
    if not model.pieces or not 0 <= model.unknown < len(model.pieces):
        raise CorruptedFile(f"{path}: not a SentencePiece model: no pieces, or no unknown token among them")
    if model.kind not in ("unigram", "BPE"):
        raise UnsupportedModel(f"{path}: a SentencePiece model of type {model.kind!r}; unigram and BPE are supported")
    return model


def sentencepiece_backend(path: str | Path) -> tuple[Backend, SentencePieceModel]:
    """The tokenizer of a `tokenizer.model`, and what the file says.

    Raises:
        CorruptedFile, UnsupportedModel: as `read_model`.
    """
    model = read_model(path)
    try:
        backend = Backend(_unigram(model) if model.kind == "unigram" else _bpe(model))
        backend.normalizer = _normalizer(model)
        strip = [decoders.Strip(" ", 1, 0)] if model.prefix else []
        backend.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip
        ])  # fmt: skip
        kinds = [(text, kind) for text, _, kind in model.pieces if text]
        special = [AddedToken(text, special=True, normalized=False) for text, kind in kinds if kind in _NOT_TEXT]
        backend.add_special_tokens(special)
        backend.add_tokens([AddedToken(text, normalized=False) for text, kind in kinds if kind == USER_DEFINED])
    except Exception as error:  # the library raises nothing more specific
        raise CorruptedFile(f"{path}: the tokenizer contradicts itself: {error}") from error
    return backend, model


def merges(scores: dict[str, float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """All merges of two tokens to a token, the best token first.

    A token's score is the priority of the merges that produce it; among those of one token the earlier parts go first.
    """
    ranked = []
    for token, score in scores.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _unigram(model: SentencePieceModel) -> Any:
    vocabulary = [(text, score) for text, score, _ in model.pieces]
    return models.Unigram(vocabulary, model.unknown, model.byte_fallback)


def _bpe(model: SentencePieceModel) -> Any:
    # Read backwards, so that the first of two equal pieces keeps its id.
    vocabulary = {text: index for index, (text, *_) in reversed(list(enumerate(model.pieces)))}
    scores = {text: score for text, score, kind in model.pieces if kind not in _NOT_TEXT}
    unknown = model.pieces[model.unknown][0]
    return models.BPE(
        vocabulary, merges(scores, vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback
    )


def _normalizer(model: SentencePieceModel) -> Any:
    steps: list[Any] = [normalizers.Precompiled(model.table)] if model.table else []
    if model.join_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend("▁")] if model.prefix else []
    return normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])


def _piece(data: Any) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = value.decode()
        elif number == 2:
            score = struct.unpack("<f", value)[0]
        elif number == 3:
            kind = value
    return text, score, kind


def _read_trainer(model: SentencePieceModel, data: Any) -> None:
    for number, value in _fields(data):
        if number == 3:
            model.kind = _KINDS.get(value, str(value))
        elif number == 35:
            model.byte_fallback = bool(value)
        elif number in (40, 41, 42):
            value = value - (1 << 64) if value >= 1 << 63 else value
            setattr(model, {40: "unknown", 41: "bos", 42: "eos"}[number], value)


def _read_normalizer(model: SentencePieceModel, data: Any) -> None:
    for number, value in _fields(data):
        if number == 2:
            model.table = bytes(value)
        elif number == 3:
            model.prefix = bool(value)
        elif number == 4:
            model.join_spaces = bool(value)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: number, and a number or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            length, at = _varint(data, at)
        if length is None or at + length > len(data):
            raise ValueError(f"a field of type {kind} at byte {at}")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError(f"a number of more than 64 bits at byte {at}")
