"""Tokenizers: text to token ids and back, with the same interface for Hugging Face folders and GGUF files.

Notable here:
- the `tokenizers` library does the encoding; this module adds the bytes of each token, the tokens that end an answer,
  and an encoder for untrusted text that cannot produce control tokens
- `decode` is by definition the concatenation of the tokens' bytes, so a streamed answer and a whole one agree
- the encoder for untrusted text shares the vocabulary: it needs no second copy
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer as Backend, normalizers, pre_tokenizers

from pippin.core.errors import (
    CheckpointError,
    CorruptedFile,
    InvalidArgument,
    InvalidInput,
    ModelNotFound,
    UnsupportedModel,
)
from pippin.core.files import atomic_write
from pippin.core.formats.checkpoint import read_json
from pippin.core.formats.gguf import GGUFFile
from pippin.data.text.gguf_tokenizer import CONTROL, adds_bos, build_backend, describe_backend
from pippin.data.text.sentencepiece_tokenizer import sentencepiece_backend
from pippin.data.text.tekken_tokenizer import tekken_backend

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Tokens that end an answer or a turn, in the vocabularies of the supported model families.
_ENDS = re.compile(
    r"<\|(im_end|endoftext|end_of_text|eot_id|eom_id|eot|end|end_of_turn|END_OF_TURN_TOKEN|return|call)\|>"
    r"|<end_of_turn>|<turn\|>|<eos>|</s>|<EOT>|\[EOS\]|<｜end▁of▁sentence｜>"
)
# Control tokens of the Harmony format, whose answers consist of messages on several channels.
_CHANNELS = frozenset({"<|channel|>", "<|message|>"})
# Files often do not mark such a token as special; its form identifies it.
_LOOKS_SPECIAL = re.compile(r"<[|｜][^\s<>]+[|｜]>")
_UNASSIGNED = "\U0010fffe"  # a character that no vocabulary has
_MAX_GAP = 1 << 16  # ids without a token, beside as many as there are tokens
_MAX_GROWTH = 64.0  # of a text in a normalizer
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A vocabulary and the rules for splitting text into tokens."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        """Wrap a `tokenizers.Tokenizer`; `from_folder` and `from_gguf` are the usual constructors.

        Args:
            backend: byte-level or SentencePiece; truncation and padding are switched off.
            bos_id: the begin token, if there is one.
            eos_ids: the declared end tokens, the most common first; known end-of-turn tokens are added to them.
            add_bos: whether a plain prompt begins with the begin token (chat templates write it themselves).
            chat_template: the checkpoint's Jinja template.

        Raises:
            UnsupportedModel: the backend decodes in another way than byte-level or SentencePiece.
            CorruptedFile: a token id is outside the vocabulary.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._byte_level = _is_byte_level(backend)
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.control_ids: frozenset[int] = frozenset(
            index for index, token in self._added.items() if token.special or _LOOKS_SPECIAL.fullmatch(token.content)
        )
        ends = [index for text, index in self.control_tokens.items() if _ENDS.fullmatch(text)]
        if self.control_strings >= _CHANNELS:  # an answer is several messages, and <|end|> ends one of them
            ends = [index for index in ends if index != self.control_tokens.get("<|end|>")]
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_id = bos_id
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_ids, *ends]))
        for index in (*self.eos_ids, *([] if bos_id is None else [bos_id])):
            if not 0 <= index < self.vocab_size:
                raise CorruptedFile(f"begin or end token {index} is outside the vocabulary of {self.vocab_size} tokens")
        self.add_bos = add_bos
        self.chat_template = chat_template

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """The tokenizer inside a GGUF file.

        Raises:
            UnsupportedModel: a tokenizer or pre-tokenizer of another kind; the message names it.
            CorruptedFile: the vocabulary is missing or inconsistent.
        """
        backend = build_backend(file)
        bos, *ends = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom"))
        bos_id = bos if isinstance(bos, int) else None
        eos_ids = [index for index in ends if isinstance(index, int)]
        _mark_special(backend, [bos_id, *eos_ids])
        return cls(
            backend,
            bos_id=bos_id,
            eos_ids=eos_ids,
            add_bos=adds_bos(file),
            chat_template=file.get("tokenizer.chat_template", str, "") or None,
        )

    def to_gguf(self, rows: int, *, with_merges: bool = False) -> dict[str, Any]:
        """The metadata of a GGUF file from which `from_gguf` and llama.cpp create this tokenizer.

        Args:
            rows: rows of the embedding; the file must have as many tokens.
            with_merges: whether a SentencePiece vocabulary has its merges, as that of Gemma 4.

        Raises:
            UnsupportedModel: a tokenizer, or a splitting rule, that GGUF cannot express.
        """
        fields = describe_backend(self._backend, rows, with_merges=with_merges)
        for index in self.control_ids - {fields.get("tokenizer.ggml.unknown_token_id")}:
            fields["tokenizer.ggml.token_type"][index] = CONTROL
        ids = zip(("eos", "eot", "eom"), self.eos_ids, strict=False)
        for name, index in (*ids, *([] if self.bos_id is None else [("bos", self.bos_id)])):
            fields[f"tokenizer.ggml.{name}_token_id"] = index
        fields["tokenizer.ggml.add_bos_token"] = self.add_bos
        return fields if self.chat_template is None else fields | {"tokenizer.chat_template": self.chat_template}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a folder in Hugging Face layout: `tokenizer.json` and, if present, its companions.

        A folder without it may have a `tokenizer.model` (SentencePiece) or a `tekken.json` (Mistral) instead.

        Raises:
            ModelNotFound: the folder holds no tokenizer.
            UnsupportedModel: the folder holds only a tokenizer of another layout.
            CorruptedFile: a file cannot be read.
        """
        folder = Path(folder)
        path, backend, named = _folder_backend(folder)
        try:
            begun = backend.encode("a").ids[:1]
        except Exception as error:  # the library raises nothing more specific
            raise CorruptedFile(f"{path}: the tokenizer cannot encode text: {error}") from error
        config = {**named, **_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
        _add_missing_tokens(backend, _declared(folder, config), path)
        bos_id, eos_id = (_token_id(backend, config.get(name)) for name in ("bos_token", "eos_token"))
        _mark_special(backend, [bos_id, eos_id])
        # The tokenizer's own end token comes first: it is the one that templates know as `eos_token`.
        declared = _json(folder / "generation_config.json").get("eos_token_id")
        ends = [eos_id, *(declared if isinstance(declared, list) else [declared])]
        add_bos = config.get("add_bos_token")
        return cls(
            backend,
            bos_id=bos_id,
            eos_ids=[index for index in ends if isinstance(index, int)],
            add_bos=bos_id in begun if add_bos is None else bool(add_bos),
            chat_template=_folder_template(folder, config),
        )

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens)"

    @property
    def special_tokens(self) -> dict[str, str]:
        """Variables of a chat template: the text of `bos_token` and `eos_token`, if they exist."""
        named = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0] if self.eos_ids else None}
        return {name: self._text(index) for name, index in named.items() if index is not None}

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """The control tokens: ids by text."""
        return {self._added[index].content: index for index in sorted(self.control_ids)}

    @cached_property
    def control_strings(self) -> frozenset[str]:
        """The texts of the control tokens."""
        return frozenset(self.control_tokens)

    @cached_property
    def markup_strings(self) -> frozenset[str]:
        """The texts of the added tokens that are not control tokens, such as `<tool_call>`."""
        return frozenset(token.content for token in self._added.values()) - self.control_strings

    def first_difference(self, other: Tokenizer) -> int | None:
        """The lowest id with different tokens in both vocabularies; None if they are the same.

        Only vocabularies are compared, not the splitting rules, nor which tokens end an answer.
        """
        ours, theirs = (
            {i: t for t, i in one._backend.get_vocab(with_added_tokens=True).items()} for one in (self, other)
        )
        return min((i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)), default=None)

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """The ids of a text, without any begin or end token.

        Args:
            text: any text; lone surrogates are refused, since they are not text.
            control: True parses the text of control tokens as those tokens, as templates need it; False encodes it as
                ordinary text: no id of the result is in ``control_ids``, but that of the unknown token where
                the vocabulary lacks a character.

        Raises:
            InvalidInput: the text holds a lone surrogate.
        """
        if not control:
            return self._plain.encode(text)
        return _encode(self._backend, text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; control tokens are dropped, bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token adds to the text; none for a control token or a padding row of the output layer.

        Raises:
            InvalidArgument: the id is negative.
        """
        if index < 0:
            raise InvalidArgument(f"token id {index} is negative")
        return self._bytes[index] if index < self.vocab_size else b""

    def spelled_bytes(self, index: int) -> bytes:
        """As `token_bytes`, but a control token is spelled as in the vocabulary."""
        return self._text(index).encode() if index in self.control_ids else self.token_bytes(index)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token; a text of n bytes has at least n divided by this many tokens."""
        return max(map(len, self._bytes), default=1) or 1

    @cached_property
    def grammar_tokenizer(self) -> LLTokenizer:
        """The same vocabulary for llguidance, as wide as ``vocab_size``."""
        return self.grammar_tokenizer_of_width(self.vocab_size)

    def grammar_tokenizer_of_width(self, width: int) -> LLTokenizer:
        """The same vocabulary for llguidance, for masks over ``width`` logits; takes about 0.1 s per 50,000 tokens.

        Args:
            width: the width of the output layer, which may be padded beyond ``vocab_size``.

        Raises:
            InvalidArgument: ``width`` is smaller than the vocabulary.
            UnsupportedModel: the vocabulary has no end token, so no grammar could ever end.
        """
        if width < self.vocab_size:
            raise InvalidArgument(f"width {width} is smaller than the vocabulary of {self.vocab_size} tokens")
        if not self.eos_ids:
            raise UnsupportedModel("the tokenizer has no end token, so an answer under a grammar could never end")
        from llguidance import LLTokenizer, TokenizerWrapper

        wrapper = TokenizerWrapper(_GrammarVocabulary(self, width))
        return LLTokenizer(wrapper, n_vocab=width, eos_token=list(self.eos_ids))

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` in the format of other libraries."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.add_bos,
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        for name, text in {
            "tokenizer.json": self._backend.to_str(pretty=False),
            "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2) + "\n",
        }.items():
            with atomic_write(path / name) as file:
                file.write(text.encode())

    def without(self, texts: Iterable[str]) -> TextOnlyEncoder:
        """An encoder that treats control tokens, and these added tokens too, as ordinary text."""
        return TextOnlyEncoder(self._backend, self.control_strings | set(texts))

    def _text(self, index: int) -> str:
        """The token in the spelling of the vocabulary."""
        return self._backend.id_to_token(index) or ""

    @cached_property
    def _plain(self) -> TextOnlyEncoder:
        return self.without(())

    @cached_property
    def _bytes(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        spell = _byte_level_bytes if self._byte_level else _sentencepiece_bytes
        for token, index in self._backend.get_vocab(with_added_tokens=False).items():
            table[index] = spell(token)
        for index, added in self._added.items():
            spelled = added.content.encode() if self._byte_level else spell(added.content)
            table[index] = b"" if index in self.control_ids else spelled
        return table


class TextOnlyEncoder:
    """Encodes text in which some added tokens have no meaning; shares the vocabulary of its origin."""

    def __init__(self, origin: Backend, excluded: Iterable[str]) -> None:
        """See `Tokenizer.without`."""
        excluded = frozenset(excluded)
        self._whole = _reduced(origin, excluded)
        # Metaspace marks the first word of a text; a continuation must not be marked.
        rules = json.loads(origin.pre_tokenizer.__getstate__()) if origin.pre_tokenizer else {}
        self._inner = self._whole
        if rules.get("type") == "Metaspace" and rules.get("prepend_scheme") == "first":
            self._inner = _reduced(origin, excluded)
            self._inner.pre_tokenizer = pre_tokenizers.Metaspace(rules["replacement"], "never", rules["split"])
        self._letters = self._inner
        before = json.loads(origin.normalizer.__getstate__()) if origin.normalizer else {}
        steps = before.get("normalizers", [before])
        if any(step.get("type") == "Prepend" for step in steps):  # a letter within a word has no space before it
            self._letters = _reduced(origin, excluded)
            spaces = [normalizers.Replace(" ", "▁")] if any(step.get("content") == "▁" for step in steps) else []
            self._letters.normalizer = normalizers.Sequence(spaces)
        # Added tokens outside the vocabulary get new ids in the copy.
        self._renumbered = {
            index: original
            for index, token in self._whole.get_added_tokens_decoder().items()
            if (original := origin.token_to_id(token.content)) is not None and original != index
        }
        self._forbidden = {origin.token_to_id(text): text for text in excluded}
        # What stands for characters that the vocabulary does not have is no word of a text.
        for index in _encode(self._whole, _UNASSIGNED):
            self._forbidden.pop(self._renumbered.get(index, index), None)

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """The ids of a text that begins a prompt, or with ``start=False`` continues one.

        Raises:
            InvalidInput: the text holds a lone surrogate.
        """
        ids = _encode(self._whole if start else self._inner, text)
        if self._renumbered:
            ids = [self._renumbered.get(index, index) for index in ids]
        if self._forbidden.keys().isdisjoint(ids):
            return ids
        # The merges themselves can produce an excluded token; it is then encoded letter by letter.
        spelled = ([*map(self._letter, self._forbidden[i])] if i in self._forbidden else [[i]] for i in ids)
        return [*chain.from_iterable(chain.from_iterable(spelled))]

    def _letter(self, letter: str) -> list[int]:
        return [index for index in _encode(self._letters, letter) if index not in self._forbidden]


class _GrammarVocabulary:
    """The tokenizer interface that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer, width: int) -> None:
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.control_ids | set(tokenizer.eos_ids))
        self.tokens = [tokenizer.token_bytes(index) for index in range(width)]
        for index in self.special_token_ids:
            self.tokens[index] = tokenizer._text(index).encode()
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # llguidance's probe for support of bytes
            raise TypeError("text must be a str")
        return self._encode(text)


def _encode(backend: Backend, text: str) -> list[int]:
    try:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    except (UnicodeEncodeError, TypeError) as error:
        raise InvalidInput(f"not text that can be encoded: {text!r:.80}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which the library cannot be asked for, and is no `Exception`
            raise
        raise CheckpointError(f"the tokenizer failed: {error}; use a model with another tokenizer") from error
    return ids


def check_file(path: Path) -> None:
    """Refuse a `tokenizer.json` with which the library would end the process, for want of memory.

    Raises:
        CorruptedFile: it is no JSON object, a token's id is far beyond the number of tokens, or the normalizer makes a
            text more than 64 times as long.
    """
    file = read_json(path)
    model, added = file.get("model"), file.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    highest = max((index for index in ids if isinstance(index, int)), default=0)
    if highest > 2 * len(ids) + _MAX_GAP:
        raise CorruptedFile(f"{path}: token id {highest} is far beyond the {len(ids)} tokens of the vocabulary")
    growth = _growth(file.get("normalizer"))
    if growth > _MAX_GROWTH:
        raise CorruptedFile(f"{path}: the normalizer makes a text up to {growth:.3g} times as long")


def _growth(normalizer: Any) -> float:
    """How many times longer a normalizer can make a text of one character."""
    if not isinstance(normalizer, dict):
        return 1.0
    steps = normalizer.get("normalizers")
    if isinstance(steps, list):
        growth = 1.0
        for step in steps:
            growth = min(growth * _growth(step), 1e300)
        return growth
    content, pattern = normalizer.get("content"), normalizer.get("pattern")
    if isinstance(content, str):
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        return max(1.0, len(content) / max(1, len(literal) if isinstance(literal, str) else 1))
    prefix = normalizer.get("prepend")
    return 1.0 + len(prefix) if isinstance(prefix, str) else 1.0


def _reduced(origin: Backend, excluded: frozenset[str]) -> Backend:
    """A tokenizer over the same model without some of the added tokens."""
    backend = Backend(origin.model)
    if origin.normalizer is not None:
        backend.normalizer = origin.normalizer
    if origin.pre_tokenizer is not None:
        backend.pre_tokenizer = origin.pre_tokenizer
    added = origin.get_added_tokens_decoder()
    backend.add_tokens([added[index] for index in sorted(added) if added[index].content not in excluded])
    return backend


def _is_byte_level(backend: Backend) -> bool:
    state = backend.decoder.__getstate__().decode() if backend.decoder is not None else "none"
    if '"ByteLevel"' in state:
        return True
    if '"ByteFallback"' in state or '"Metaspace"' in state:
        return False
    raise UnsupportedModel(f"a tokenizer with decoder {state:.80}; byte-level BPE and SentencePiece are supported")


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's alphabet, from character to byte: printable bytes stand for themselves, the rest begin at U+0100."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: byte for byte in printable} | {256 + offset: byte for offset, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, or nothing where the file does not exist."""
    return read_json(path) if path.is_file() else {}


def _folder_backend(folder: Path) -> tuple[Path, Backend, dict[str, Any]]:
    """The file, the tokenizer in it, and what the file says that `tokenizer_config.json` usually does."""
    path = folder / "tokenizer.json"
    if path.is_file():
        check_file(path)
        try:
            return path, Backend.from_file(str(path)), {}
        except Exception as error:  # the library raises nothing more specific
            raise CorruptedFile(f"{path}: not a tokenizer: {error}") from error
    if (path := folder / "tekken.json").is_file():
        backend, bos, eos = tekken_backend(path)
        return path, backend, {"bos_token": bos, "eos_token": eos, "add_bos_token": True}
    if (path := folder / "tokenizer.model").is_file():
        backend, model = sentencepiece_backend(path)
        names = {"bos_token": model.bos, "eos_token": model.eos}
        named = {name: model.pieces[index][0] for name, index in names.items() if 0 <= index < len(model.pieces)}
        return path, backend, named | {"add_bos_token": "bos_token" in named}
    other = next((name for name in ("vocab.json", "vocab.txt") if (folder / name).is_file()), None)
    if other is not None:
        raise UnsupportedModel(
            f"{folder}: {other!r} but no tokenizer.json; make one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    raise ModelNotFound(f"{folder}: no tokenizer.json")


def _declared(folder: Path, config: dict[str, Any]) -> Any:
    """The added tokens by id, of `tokenizer_config.json` or of the older `added_tokens.json`."""
    declared = config.get("added_tokens_decoder") or {}
    older = {str(index): {"content": text} for text, index in _json(folder / "added_tokens.json").items()}
    return older | declared if isinstance(declared, dict) else declared


def _token_id(backend: Backend, token: Any) -> int | None:
    """The id of a token in the format of tokenizer_config.json: its text, or an object that contains the text."""
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def _mark_special(backend: Backend, ids: Iterable[int | None]) -> None:
    """Mark begin and end tokens as special if the file did not; otherwise a text could contain them."""
    texts = [backend.id_to_token(index) for index in ids if index is not None and 0 <= index < 1 << 31]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts if text])


def _add_missing_tokens(backend: Backend, declared: Any, path: Path) -> None:
    """Add the tokens of tokenizer_config.json that tokenizer.json does not have."""
    try:
        entries = sorted(
            (int(key), str(entry["content"]), bool(entry.get("special"))) for key, entry in declared.items()
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptedFile(
            f"{path.parent}: malformed added_tokens_decoder in tokenizer_config.json: {error!r}"
        ) from error
    for index, text, special in entries:
        if backend.token_to_id(text) is None:
            backend.add_tokens([AddedToken(text, special=special, normalized=False)])
            if backend.token_to_id(text) != index:
                raise CheckpointError(f"{path}: token {text!r} should have id {index} but cannot")


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template: from its own file, or from the configuration, which may have several by name."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CorruptedFile(f"{path}: not UTF-8: {error}; download it again") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
