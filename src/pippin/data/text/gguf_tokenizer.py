"""GGUF tokenizers: conversion to the `tokenizers` library, and back.

Notable here:
- a GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) instead of describing it; the splitting rule of each name
  is in `pippin.data.text.gguf_splits`, and an unknown name is refused, since a wrong rule degrades a model silently
- a SentencePiece vocabulary has scores but no merges: they are derived from the vocabulary
- control tokens are registered as special, so that text can be encoded with or without them
- in the other direction, a splitting rule gets the name of the rule that splits a probe text at the same places,
  however differently it is written

Source: llama.cpp's llama-vocab.cpp for the names; the splitting rules are those of the models' own tokenizer.json.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers

from pippin.core.errors import CorruptedFile, PippinError, UnsupportedModel
from pippin.core.formats.gguf import GGUFFile
from pippin.data.text.gguf_splits import BEGUN, COMPOSED, SPLITS, UNSPLIT, WHOLE_WORDS
from pippin.data.text.sentencepiece_tokenizer import merges

# Token types of GGUF.
_NORMAL, _UNKNOWN, CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NOT_TEXT = frozenset({_UNKNOWN, CONTROL, _UNUSED})

# Where splitting rules differ: contractions in both cases, digits, punctuation, runs of spaces and line ends, spaces
# before digits, line ends after punctuation, letters of other scripts, marks.
_PROBE = (
    "I'm HE'LL they'Ve camelCase XMLHttp 1 22 333 4444 55555 3.14 $5 a+b=c!! ... (x)[y]{z} `q` #tag @me \t\ttab  two   "
    "three \n line\r\n\n\n  end_of_line/path//x 100% naïve Ünï čšž ЖЁ абв 東京都 ひらがな カタカナ 한국어 १२३ e\u0301 "
    "🙂🙃 …— «quoted» \u00a0nbsp don't DON'T l'été <tag> ^~| \\ \"s\"  "
    "end.\n\n  4 of:\n        6 and\n    more   7\n"
)


def build_backend(file: GGUFFile) -> Backend:
    """The tokenizer that the file's metadata describe.

    Raises:
        UnsupportedModel: an unknown tokenizer or pre-tokenizer; the message names it.
        CorruptedFile: the vocabulary is missing or inconsistent.
    """
    kind = file.get("tokenizer.ggml.model", str)
    tokens = strings(file, "tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type", list, [])
    if types and len(types) != len(tokens):
        raise CorruptedFile(f"{file.path}: {len(tokens)} tokens but {len(types)} token types; download the file again")
    if kind == "llama" and file.architecture.startswith("gemma"):
        # Gemma's runs of spaces are stored as such; its merges need them as SentencePiece writes them.
        tokens = [token.replace(" ", "▁") if token.isspace() else token for token in tokens]
    try:
        if kind == "gemma4" or (kind == "gpt2" and file.metadata.get("tokenizer.ggml.pre") in UNSPLIT):
            backend = _unsplit(file, tokens)
        elif kind == "gpt2":
            backend = _byte_level(file, tokens)
        elif kind == "llama":
            backend = _sentencepiece(file, tokens, types)
        else:
            raise UnsupportedModel(
                f"{file.path}: tokenizer {kind!r}; supported: 'gpt2' (byte-level), 'llama' (SentencePiece), 'gemma4'"
            )
        _add_tokens(backend, tokens, types)
    except PippinError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise CorruptedFile(f"{file.path}: the tokenizer contradicts itself: {error}; download it again") from error
    return backend


def describe_backend(backend: Backend, rows: int, *, with_merges: bool = False) -> dict[str, Any]:
    """The metadata from which `build_backend` and llama.cpp create this tokenizer: ``tokenizer.ggml.*``, by key.

    Args:
        backend: byte-level or SentencePiece, as BPE.
        rows: rows of the embedding; ids beyond the vocabulary become unused tokens.
        with_merges: whether a SentencePiece vocabulary has its merges, as that of Gemma 4.

    Raises:
        UnsupportedModel: another kind of tokenizer, or a splitting rule without a name in GGUF.
    """
    state = json.loads(backend.to_str())
    if state["model"]["type"] != "BPE":
        raise UnsupportedModel(f"a tokenizer of type {state['model']['type']} has no form in GGUF; BPE has")
    added = backend.get_added_tokens_decoder()
    names = {index: token for token, index in backend.get_vocab(with_added_tokens=True).items()}
    rows = max(rows, 1 + max(names))
    tokens = [names.get(index, f"[PAD{index}]") for index in range(rows)]
    types = [_NORMAL if index in names else _UNUSED for index in range(rows)]
    for index, token in added.items():
        types[index] = CONTROL if token.special else _USER_DEFINED
    fields: dict[str, Any] = {"model": "gpt2", "tokens": tokens, "token_type": types}
    lines = [pair if isinstance(pair, str) else " ".join(pair) for pair in state["model"]["merges"]]
    if state["model"].get("byte_fallback"):
        fields |= _describe_sentencepiece(state, tokens, types)
        if with_merges and fields["add_space_prefix"]:
            raise UnsupportedModel("llama.cpp puts no space before texts of gemma4 models, this tokenizer does")
        if with_merges:
            fields |= {"model": "gemma4", "pre": "gemma4", "tokens": tokens, "merges": lines}
    else:
        if not lines:
            raise UnsupportedModel("a vocabulary of single bytes, without merges, has no form in GGUF")
        fields |= {"pre": _rule_name(backend, state), "merges": lines}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def _describe_sentencepiece(state: dict[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """The fields of a SentencePiece vocabulary, whose merges follow the order of tokens; ``types`` are completed."""
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and types[index] == _NORMAL:
            types[index] = _BYTE
    unknown = tokens.index(state["model"]["unk_token"]) if state["model"].get("unk_token") else 0
    types[unknown] = _UNKNOWN
    spelled = [token.replace("▁", " ") if types[i] == _USER_DEFINED else token for i, token in enumerate(tokens)]
    rules = state["normalizer"] or {}
    prefix = any(rule["type"] == "Prepend" for rule in rules.get("normalizers", [rules]) if rule)
    before = state["pre_tokenizer"] or {}
    prefix = prefix or (before.get("type") == "Metaspace" and before.get("prepend_scheme") != "never")
    scores = [float(-index) for index in range(len(tokens))]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": spelled,
        "scores": scores,
        "unknown_token_id": unknown,
        "add_space_prefix": prefix,
    }


def _rule_name(backend: Backend, state: dict[str, Any]) -> str:
    """GGUF's name of a byte-level tokenizer's splitting rule: the first that splits the probe at the same places."""
    whole, composed = bool(state["model"].get("ignore_merges")), (state["normalizer"] or {}).get("type") == "NFC"
    ours = backend.pre_tokenizer.pre_tokenize_str(_PROBE) if backend.pre_tokenizer else None
    for name in SPLITS:
        same = (name in WHOLE_WORDS) == whole and (name in COMPOSED) == composed
        if same and _splitter(name).pre_tokenize_str(_PROBE) == ours:
            return name
    raise UnsupportedModel(f"this tokenizer's splitting rule has no name in GGUF; there are: {', '.join(SPLITS)}")


def adds_bos(file: GGUFFile) -> bool:
    """Whether a prompt begins with the begin token; llama.cpp's default where the file does not say."""
    kind = file.get("tokenizer.ggml.model", str)
    if kind == "gemma4":  # files of the first converters say that it does not
        return True
    default = kind == "llama" or file.metadata.get("tokenizer.ggml.pre") in BEGUN
    return file.get("tokenizer.ggml.add_bos_token", bool, default)


def strings(file: GGUFFile, key: str) -> list[str]:
    """A metadata array of strings.

    Raises:
        CorruptedFile: it is missing, or not an array of strings.
    """
    values: list[str] = file.get(key, list)
    if not values or not isinstance(values[0], str):  # GGUF arrays hold one type, so checking the first is enough
        raise CorruptedFile(f"{file.path}: metadata {key!r} is not a list of strings; download the file again")
    return values


def _byte_level(file: GGUFFile, tokens: list[str]) -> Backend:
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in SPLITS:
        raise UnsupportedModel(f"{file.path}: pre-tokenizer {name!r}; supported: {', '.join((*SPLITS, *UNSPLIT))}")
    pairs = [_pair(file, line) for line in strings(file, "tokenizer.ggml.merges")]
    # Read backwards, so that the first of two equal tokens keeps its id.
    vocabulary = {tokens[index]: index for index in range(len(tokens) - 1, -1, -1)}
    backend = Backend(models.BPE(vocabulary, pairs, ignore_merges=name in WHOLE_WORDS))
    if name in COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _splitter(name)
    backend.decoder = decoders.ByteLevel()
    return backend


def _splitter(name: str) -> pre_tokenizers.PreTokenizer:
    """The splitting rule of this name, followed by the byte-level alphabet."""
    rules = (pre_tokenizers.Split(Regex(rule), "isolated") for rule in SPLITS[name])
    return pre_tokenizers.Sequence([*rules, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pair(file: GGUFFile, line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not (left and right):
        raise CorruptedFile(f"{file.path}: merge {line!r} is not two tokens and a space; download the file again")
    return left, right


def _unsplit(file: GGUFFile, tokens: list[str]) -> Backend:
    """Merges as such, over characters, with single bytes for those that the vocabulary lacks."""
    pairs = [_pair(file, line) for line in strings(file, "tokenizer.ggml.merges")]
    return _of_characters(file, tokens, pairs, prefix=False)


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int]) -> Backend:
    scores: list[float] = file.get("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise CorruptedFile(f"{file.path}: {len(tokens)} tokens but {len(scores)} scores; download the file again")
    if file.architecture.startswith("gemma"):
        # Gemma's merges follow the order of the tokens, not their scores.
        scores = [-index for index in range(len(tokens))]
    vocabulary = {tokens[index]: index for index in range(len(tokens) - 1, -1, -1)}
    hidden = {index for index, kind in enumerate(types) if kind in _NOT_TEXT}
    found = merges({token: scores[index] for token, index in vocabulary.items() if index not in hidden}, vocabulary)
    return _of_characters(file, tokens, found, prefix=file.get("tokenizer.ggml.add_space_prefix", bool, True))


def _of_characters(file: GGUFFile, tokens: list[str], found: list[tuple[str, str]], *, prefix: bool) -> Backend:
    """Characters and their merges, ▁ for a space, bytes for what is missing; ``prefix``: a space before the text."""
    vocabulary = {tokens[index]: index for index in range(len(tokens) - 1, -1, -1)}
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", int, 0)]
    backend = Backend(models.BPE(vocabulary, found, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    ends: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(ends)
    return backend


def _add_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    special = [token for token, kind in zip(tokens, types, strict=False) if kind in _NOT_TEXT and token]
    plain = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED and token]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
