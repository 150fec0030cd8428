"""Folders without tokenizer.json: SentencePiece models and Tekken vocabularies give the ids of the reference.

Oracles: the library sentencepiece, over models that it trains here; for Tekken, the merging of pairs as
tiktoken defines it, in ten lines, over a vocabulary that is learned here.
"""

import base64
import contextlib
import io
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import sentencepiece
from tokenizers import Tokenizer as Backend, models, pre_tokenizers, trainers

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.data.text.tokenizer import Tokenizer

PAGE = [
    *(Path(__file__).parents[3] / "LICENSE").read_text().splitlines(),
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "She said: 'I'm here, they're there; it's 12:30 already!'",
    "def add(x, y=1):\n    return x + y  # the sum of both",
    "Größe, naïve, façade, Ærøskøbing; 東京都 and ひらがな; 3.14159 and 2,718.",
    "A word that is written again and again is a word that becomes a piece.",
]
LETTERS = "abcdeT  \t\n.,!?0123éßñ東ひ🙂한'\"<>/\\-_ﬁ½"


def texts(seed, count=60):
    rng = random.Random(seed)
    made = ["".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 50))) for _ in range(count)]
    cut = ["".join(rng.sample(PAGE, 1))[rng.randint(0, 30) :][: rng.randint(1, 60)] for _ in range(count)]
    return [*made, *cut, "", " ", "  a", "a  ", "a   b", "\n\n", "<s> x </s>", "e\u0301 \u00a0 \u200b"]


def train(folder, **options):
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PAGE),
        model_writer=written,
        minloglevel=2,
        num_threads=1,
        **({"vocab_size": 500} | options),
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


MODELS = {
    "unigram": {"model_type": "unigram"},
    "unigram with bytes": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 700},
    "unigram without a leading space": {"model_type": "unigram", "add_dummy_prefix": False},
    "unigram that keeps spaces": {"model_type": "unigram", "remove_extra_whitespaces": False},
    "BPE as of Llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "vocab_size": 800,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "split_digits": True,
    },
    "BPE": {"model_type": "bpe"},
    "BPE without a leading space": {
        "model_type": "bpe",
        "byte_fallback": True,
        "vocab_size": 800,
        "add_dummy_prefix": False,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_a_sentencepiece_model_gives_the_ids_of_the_library(tmp_path, name):
    theirs, ours = train(tmp_path, **MODELS[name]), Tokenizer.from_folder(tmp_path)
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (theirs.vocab_size(), theirs.bos_id(), (theirs.eos_id(),))
    assert ours.add_bos
    for text in texts(name):
        assert ours.encode(text) == theirs.encode(text), repr(text)


def test_what_a_folder_says_beside_its_model_is_read(tmp_path):
    train(tmp_path, **MODELS["BPE"])
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "chat_template": "{{ bos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|user|>": 500}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.add_bos, tokenizer.chat_template) == (False, "{{ bos_token }}")
    assert tokenizer.encode("<|user|>", control=True) == [500]
    assert 500 not in tokenizer.encode("<|user|>")


def test_a_saved_copy_is_the_same_tokenizer(tmp_path):
    train(tmp_path, **MODELS["unigram"])
    one = Tokenizer.from_folder(tmp_path)
    one.save(tmp_path / "copy")
    other = Tokenizer.from_folder(tmp_path / "copy")
    assert all(one.encode(text) == other.encode(text) for text in texts("copy"))


@pytest.mark.parametrize("kind", ["word", "char"])
def test_models_of_words_and_characters_are_refused_by_name(tmp_path, kind):
    train(tmp_path, model_type=kind, **({"vocab_size": 60} if kind == "char" else {"vocab_size": 40}))
    with pytest.raises(UnsupportedModel, match=f"of type '{kind}'"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", b"{}", bytes(100)])
def test_damaged_models_are_refused(tmp_path, data):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CorruptedFile, match="not a SentencePiece model"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_model_that_is_cut_is_refused_or_read(tmp_path, share):
    train(tmp_path, **MODELS["BPE"])
    path = tmp_path / "tokenizer.model"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with contextlib.suppress(CorruptedFile, UnsupportedModel):
        Tokenizer.from_folder(tmp_path)


# --- Tekken -----------------------------------------------------------------------------------------------------------

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTROL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]


def learned():
    """Words in the order of their ranks: the bytes, then what a trainer merges on the page."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        PAGE, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    letters = Tokenizer(_with_decoder(backend))
    found = sorted(backend.get_vocab().values())
    words = [letters.token_bytes(index) for index in found]
    return [bytes([byte]) for byte in range(256)] + [word for word in words if len(word) > 1]


def _with_decoder(backend):
    from tokenizers import decoders

    backend.decoder = decoders.ByteLevel()
    return backend


def tekken(folder, words, **changes):
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(words)
    ]
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(CONTROL)]
    config = {"pattern": PATTERN, "default_vocab_size": 20 + len(words), "default_num_special_tokens": 20}
    file = {"config": config, "vocab": vocabulary, "special_tokens": special, "version": "v7"} | changes
    (folder / "tekken.json").write_text(json.dumps(file))


def merged(word, ranks):
    """The tokens of a word: always the pair of the lowest rank is merged, the leftmost of equal ones."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_a_tekken_vocabulary_gives_the_ids_of_its_ranks(tmp_path):
    words = learned()
    tekken(tmp_path, words)
    tokenizer, ranks = Tokenizer.from_folder(tmp_path), {word: rank for rank, word in enumerate(words)}
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2,), True)
    assert tokenizer.vocab_size == 20 + len(words)
    for text in texts("tekken"):
        pieces = (piece for part in regex.findall(PATTERN, text) for piece in merged(part.encode(), ranks))
        ids = tokenizer.encode(text)
        assert ids == [20 + rank for rank in pieces], repr(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("[INST]a[/INST]", control=True) == [3, 20 + ranks[b"a"], 4]
    assert not tokenizer.control_ids & set(tokenizer.encode("[INST]a[/INST]"))


@pytest.mark.parametrize(
    "changes",
    [{"vocab": [{"rank": 0}]}, {"config": {}}, {"vocab": [{"token_bytes": "!"}]}, {"special_tokens": [{"rank": 99}]}],
    ids=str,
)
def test_damaged_tekken_vocabularies_are_refused(tmp_path, changes):
    tekken(tmp_path, [bytes([byte]) for byte in range(256)], **changes)
    with pytest.raises(CorruptedFile, match="not a Tekken vocabulary"):
        Tokenizer.from_folder(tmp_path)
