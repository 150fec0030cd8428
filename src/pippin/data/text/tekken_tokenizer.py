"""Tekken vocabularies (`tekken.json`) of Mistral as tokenizers of the `tokenizers` library.

Notable here:
- tokens have ranks but no merges: the pair whose token has the lowest rank is merged first, so every pair of two tokens
  that makes a token is a merge, in the order of ranks; a word that is a token itself is not split
- control tokens come first, and the ids of all others are behind them

Source: the format is that of mistral-common; the merging that of tiktoken.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, pre_tokenizers

from pippin.core.errors import CorruptedFile
from pippin.core.formats.checkpoint import read_json

_BOS, _EOS = "<s>", "</s>"


def tekken_backend(path: str | Path) -> tuple[Backend, str, str]:
    """The tokenizer of a `tekken.json`, and the texts of its begin and end tokens.

    Raises:
        CorruptedFile: it is no Tekken vocabulary, or contradicts itself.
    """
    file = read_json(Path(path))
    try:
        config = file["config"]
        reserved, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        listed = file.get("special_tokens") or [
            {"rank": at, "token_str": text} for at, text in enumerate(("<unk>", _BOS, _EOS))
        ]
        names = {int(token["rank"]): str(token["token_str"]) for token in listed}
        words = [base64.b64decode(token["token_bytes"], validate=True) for token in file["vocab"][: size - reserved]]
        pattern = str(config["pattern"])
        if not 0 < reserved < size <= 1 << 21 or not all(0 <= rank < reserved for rank in names):
            raise ValueError(f"{len(names)} control tokens, {reserved} of {size} ids")
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise CorruptedFile(f"{path}: not a Tekken vocabulary: {error!r}") from error
    try:
        backend = Backend(_bpe(words, reserved, names))
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        backend.decoder = decoders.ByteLevel()
        texts = [_name(names, at) for at in range(reserved)]
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    except Exception as error:  # the library raises nothing more specific
        raise CorruptedFile(f"{path}: the vocabulary contradicts itself: {error}") from error
    return backend, _BOS, _EOS


def _name(names: dict[int, str], rank: int) -> str:
    return names.get(rank, f"<SPECIAL_{rank}>")


def _bpe(words: list[bytes], reserved: int, names: dict[int, str]) -> Any:
    ranks = {word: rank for rank, word in reversed(list(enumerate(words)))}
    found = []
    for word, rank in ranks.items():
        for cut in range(1, len(word)):
            left, right = ranks.get(word[:cut]), ranks.get(word[cut:])
            if left is not None and right is not None:
                found.append((rank, left, right))
    found.sort()
    alphabet = _alphabet()
    spelled = ["".join(alphabet[byte] for byte in word) for word in words]
    vocabulary = {text: reserved + rank for rank, text in reversed(list(enumerate(spelled)))}
    vocabulary |= {_name(names, rank): rank for rank in range(reserved)}
    return models.BPE(vocabulary, [(spelled[left], spelled[right]) for _, left, right in found], ignore_merges=True)


def _alphabet() -> list[str]:
    """The character of each byte in the byte-level alphabet."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
