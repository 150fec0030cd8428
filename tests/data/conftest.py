"""Texts that tokenizers stumble over, the default model's tokenizer, and small ones made on the spot."""

import pytest

TEXTS = (
    "", " ", "  ", "   a", "a  b   c    d", "\n", "\n\n", "\n\n\n x", "\t\ttab", "Hello world", " Hello", "Hello  ",
    "naïve café Ünïcödé", "日本語のテキスト、漢字とかな。", "한국어 문장입니다", "Привет, мир! Как дела?",
    "مرحبا بالعالم", "שלום עולם", "हिन्दी में पाठ", "ภาษาไทยไม่มีช่องว่าง", "🤗👩‍👩‍👧‍👦🇫🇷 emoji 👍🏽", "e\u0301 vs é",
    "ﬁ ligature ǅ ΑΒΓ αβγ",
    "def f(x):\n    return x**2  # comment\n\n\nclass A:\n\tpass\r\n", "1234567890 3.14159 1,000,000 ½ ² Ⅷ",
    "I'm you're he'll WE'VE I'D 's 'S ’s", '<html><body class="x">&amp;</body></html>', '{"a": [1, 2, {"b": null}]}',
    "https://example.com/path?q=1&r=%20", "a\u00a0b\u2003c\u200bd", "\u0000\u0001\u007f", "x" * 300, "....!!!???---===",
    "$x_1^2 + \\frac{1}{2}$", "▁▁ underscore ▁", "<0x0A> byte", "CamelCaseWordsAnd_snake_case", "\ufeffBOM",
    "\U0001f1e6\U0010fffd", "word\r\nword\rword", "       indented", "Zażółć gęślą jaźń",
)  # fmt: skip


@pytest.fixture(scope="session")
def texts():
    return TEXTS


@pytest.fixture(scope="session")
def default_tokenizer(default_model_path):
    from pippin.core.formats.gguf import open_gguf
    from pippin.data.text.tokenizer import Tokenizer

    return Tokenizer.from_gguf(open_gguf(default_model_path))


@pytest.fixture(scope="session")
def reference_tokenizer(default_model_path):
    """The same tokenizer as transformers reads it from the file, with the one rule that transformers leaves out."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)
    # SmolLM2's own tokenizer.json cuts between digits before anything else.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return theirs


@pytest.fixture(scope="session")
def byte_level_backend():
    """A function that trains a byte-level BPE tokenizer with these special and these merely added tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    def make(special=(), added=()):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(TEXTS, trainer)
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
        return backend

    return make
