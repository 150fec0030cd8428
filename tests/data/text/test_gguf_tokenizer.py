"""Oracles: the sentencepiece library, and the splitting rules that transformers knows for the same names."""

import io
import json
import random

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings, strategies as st
from tokenizers import Regex, Tokenizer as Backend, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from pippin.core.errors import CorruptedFile, PippinError, UnsupportedModel
from pippin.core.formats.gguf import open_gguf
from pippin.data.text.gguf_splits import SPLITS
from pippin.data.text.gguf_tokenizer import describe_backend
from pippin.data.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def write(path, architecture="llama", **fields):
    """A GGUF file with these `tokenizer.ggml` fields and one small tensor."""
    writer = GGUFWriter(path, architecture)
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}" if name != "chat_template" else "tokenizer.chat_template"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_tensor("a", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
GPT2 = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["<|endoftext|>", "<|im_end|>", *ALPHABET, "he", "ll", "llo", "hello", "<tool>", "[PAD0]"],
    "token_type": [CONTROL, CONTROL] + [NORMAL] * (len(ALPHABET) + 4) + [USER_DEFINED, UNUSED],
    "merges": ["h e", "l l", "ll o", "he llo"],
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def test_byte_level_fields_are_all_heard(tmp_path):
    file = write(tmp_path / "a.gguf", **GPT2, add_bos_token=True, eot_token_id=5, chat_template="T")
    tokenizer = Tokenizer.from_gguf(file)
    index = {text: place for place, text in enumerate(GPT2["tokens"])}
    assert tokenizer.encode("hello") == [index["hello"]]
    assert tokenizer.encode("a<tool><|im_end|>", control=True) == [index["a"], index["<tool>"], 1]
    assert tokenizer.decode([index["<tool>"], 1, index["[PAD0]"]]) == "<tool>"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (0, (1, 5, 0), True)
    assert (tokenizer.chat_template, tokenizer.vocab_size) == ("T", len(GPT2["tokens"]))


@pytest.mark.parametrize(
    ("pre", "expected"), [("gpt-2", "he|llo"), ("llama-bpe", "hello"), ("granite-embed-multi-97m", "hello")]
)
def test_some_vocabularies_take_whole_words_before_merging(tmp_path, pre, expected):
    fields = {**GPT2, "pre": pre, "merges": GPT2["merges"][:3]}
    tokenizer = Tokenizer.from_gguf(write(tmp_path / "a.gguf", **fields))
    assert "|".join(tokenizer.token_bytes(index).decode() for index in tokenizer.encode("hello")) == expected
    assert tokenizer.add_bos == (pre == "llama-bpe")


@pytest.mark.parametrize("name", sorted(SPLITS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_splitting_rules_are_those_of_transformers(name, texts):
    (ours,), theirs = SPLITS[name], GGUF_PRE_TOKENIZER_SPLITS[name]
    for text in (*texts, "".join(texts)):
        pieces = [pre_tokenizers.Split(Regex(rule), "isolated").pre_tokenize_str(text) for rule in (ours, theirs)]
        assert pieces[0] == pieces[1]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "it's 123 ok", "it|'s| 123| ok"),
        ("smollm", "it's 123 ok", "it|'s| |1|2|3| ok"),
        ("falcon", "a,b 12345!", "a|,|b| |123|45|!"),
        ("default", "a,b 12345!", "a|,|b| |123|45|!"),
        ("deepseek-v3", "ab12345 漢字x_y", "ab|123|45| |漢字|x|_y"),
        ("afmoe", "ab12345 7 漢字", "ab|12|345| |7| |漢字"),
        ("tiny_aya", "1234567 a", "1|234|567| a"),
        ("kimi-k2", "Hello漢字World's 1234", "Hello|漢字|World's| |123|4"),
        ("deepseek-coder", "a b1\nc, d", "a| b|1|\n|c|,| d"),
        ("bloom", "a b, c", "a| b|,| c"),
        ("viking", "a 12,", "a| |1|2|,"),
        ("minicpm5", "it's 12345", "it|'s| |123|45"),
        ("jais-2", "a     b", "a|    | b"),
        ("bailingmoe", "a\n\nb", "a|\n\n|b"),
        ("seed-coder", "a!!\n1", "a|!!|\n|1"),
        ("exaone-moe", "two words 12", "two words| |1|2"),
        ("laguna", "a \n\nb", "a| |\n\n|b"),
        ("chameleon", "IMGIMGAZ 12!", "IMGIMGAZ| |1|2|!"),
        ("youtu", "abc、漢字12", "abc|、|漢字|1|2"),
        ("ufakzeka", "Ali'nin", "Ali|'nin"),
        ("spark2_5", "ab123\n", "ab|1|2|3|\n"),
        ("superbpe", "by the 12345 of 678x", "by the |12|345| of |678|x"),
        ("granite-embed-multi-97m", "it's किताब 1234", "it's| किताब| |123|4"),
    ],
)
def test_splitting_rules_by_example(name, text, expected):
    splits = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in SPLITS[name]]
    pieces = pre_tokenizers.Sequence(splits).pre_tokenize_str(text)
    assert "|".join(piece for piece, _ in pieces) == expected


# --- SentencePiece ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def spm(request, tmp_path_factory, texts):
    """A BPE vocabulary learned by sentencepiece, as itself and in a GGUF file."""
    import sentencepiece

    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "wizards", "brew", "moonlight"]
    chooser = random.Random(0)
    lines = [" ".join(chooser.choices(words, k=8)) for _ in range(400)] + [text for text in texts if text.strip()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=600, byte_fallback=True,
        character_coverage=0.98, add_dummy_prefix=request.param, normalization_rule_name="identity",
        remove_extra_whitespaces=False, user_defined_symbols=["<tool>"], minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(theirs.vocab_size())
    tests = [("is_unknown", UNKNOWN), ("is_control", CONTROL), ("is_byte", BYTE)]
    kinds = [next((kind for name, kind in tests if getattr(theirs, name)(index)), NORMAL) for index in ids]
    kinds[theirs.piece_to_id("<tool>")] = USER_DEFINED
    file = write(
        tmp_path_factory.mktemp("spm") / "a.gguf",
        model="llama",
        tokens=[theirs.id_to_piece(index) for index in ids],
        scores=[theirs.get_score(index) for index in ids],
        token_type=kinds,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        add_space_prefix=request.param,
    )
    return theirs, Tokenizer.from_gguf(file)


def test_sentencepiece_vocabularies_encode_as_sentencepiece_does(spm, texts):
    theirs, ours = spm
    for text in (*texts, "the quick brown wizards<s> brew"):
        if "<0x" in text or "\u0000" in text:  # sentencepiece spells the first and ends at the second
            continue
        assert ours.encode(text) == theirs.encode(text), text


@given(st.text(st.sampled_from("theqickbrown wz\n▁é漢🤗"), max_size=30))
@settings(max_examples=300)
def test_sentencepiece_words_encode_as_sentencepiece_does(spm, text):
    theirs, ours = spm
    assert ours.encode(text) == theirs.encode(text)


def test_sentencepiece_control_tokens(spm):
    theirs, ours = spm
    assert ours.encode("fox</s>", control=True)[-1] == 2
    assert 2 not in ours.encode("fox</s>")
    assert ours.encode("<tool>")[-1] == theirs.piece_to_id("<tool>")
    assert (ours.add_bos, ours.bos_id, ours.eos_ids) == (True, 1, (2,))
    assert ours.control_strings == {"<unk>", "<s>", "</s>"}


def test_gemma_runs_of_spaces_and_merge_order(tmp_path):
    tokens = ["<unk>", "▁", "a", "b", "  ", "   ", "ab", "▁a", "▁ab"]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * len(tokens),
        "token_type": [UNKNOWN, NORMAL, NORMAL, NORMAL, USER_DEFINED, USER_DEFINED, NORMAL, NORMAL, NORMAL],
        "add_space_prefix": False,
    }
    tokenizer = Tokenizer.from_gguf(write(tmp_path / "a.gguf", "gemma3", **fields))
    assert tokenizer.encode("a   b") == [2, 5, 3]
    assert tokenizer.encode("a  b ab") == [2, 4, 3, 8]
    assert tokenizer.decode([2, 5, 3]) == "a   b"
    assert tokenizer.vocab_size == len(tokens)


@pytest.mark.parametrize(
    ("model", "pre", "bos"),
    [
        ("gemma4", None, True),
        ("gpt2", "gemma4", False),
        ("gpt2", "granite-embed-multi-311m", False),
        ("gpt2", "sarvam-moe", False),
    ],
)
def test_vocabularies_that_are_merged_without_words_encode_as_gemma_does(model, pre, bos, texts, tmp_path):
    from tokenizers import Tokenizer as Backend, models, normalizers, trainers
    from transformers import GemmaTokenizer

    learner = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    learner.normalizer = normalizers.Replace(" ", "▁")
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=[], max_token_length=12, show_progress=False
    )
    learner.train_from_iterator([f"{text} of the quick brown fox\n\n\n  and  two" for text in texts], trainer)
    state = json.loads(learner.to_str())["model"]
    merges = [pair for pair in state["merges"] if not any(" " in part for part in pair)]
    tokens = [*sorted(state["vocab"], key=state["vocab"].get), *(f"<0x{byte:02X}>" for byte in range(256))]
    theirs = GemmaTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(pair) for pair in merges])
    kinds = [CONTROL, CONTROL, CONTROL, UNKNOWN] + [NORMAL] * (len(tokens) - 260) + [BYTE] * 256
    fields = {
        "model": model,
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in merges],
        "token_type": kinds,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_bos_token": False,
    } | ({"pre": pre} if pre else {})
    ours = Tokenizer.from_gguf(write(tmp_path / "a.gguf", **fields))
    assert ours.add_bos == bos
    plane = ["".join(map(chr, range(start, start + 64))) for start in range(1, 0xD7C0, 64)]
    for text in (*texts, *plane, "the quick  brown\n\n\n\nfox  ", "a 漢🤗"):
        if "<0x" in text or any(token in text for token in special):
            continue
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == expected, text
        assert b"".join(map(ours.token_bytes, expected)).decode() == text.replace("▁", " ")
    assert ours.encode("<eos>a", control=True)[0] == 1


@pytest.fixture(scope="module")
def merged(texts):
    """A tokenizer as that of Gemma 4: pieces of SentencePiece, bytes for the rest, and merges of their own order."""
    named = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|turn>"]
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer, backend.pre_tokenizer = normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "isolated")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=named, limit_alphabet=80, show_progress=False)
    backend.train_from_iterator(["the quick brown fox\n\n  jumps over", *texts] * 3, trainer)
    state = json.loads(backend.to_str())
    state["model"]["byte_fallback"] = True
    words = sorted(state["model"]["vocab"].items(), key=lambda word: word[1])
    # the order of merges is not that of tokens
    shuffled = [word for word, _ in words[len(named) :]]
    random.Random(0).shuffle(shuffled)
    state["model"]["vocab"] = {word: index for index, word in enumerate([*named, *shuffled])}
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    sequence = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    state["decoder"] = {"type": "Sequence", "decoders": [*sequence, {"type": "Fuse"}]}
    return Backend.from_str(json.dumps(state))


def test_gemma_4_has_merges_of_its_own_order(merged, texts, tmp_path):
    fields = describe_backend(merged, merged.get_vocab_size(), with_merges=True)
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.add_space_prefix"]) == ("gemma4", False)
    fields = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    ours = Tokenizer.from_gguf(write(tmp_path / "a.gguf", "gemma4", **fields, bos_token_id=2, eos_token_id=1))
    for text in (*texts, "the  quick\n\n brown 漢 fox"):
        wanted = merged.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == wanted, text
        assert "▁" in text or ours.decode(wanted) == text
    assert (ours.add_bos, ours.bos_id, ours.eos_ids) == (True, 2, (1,))
    derived = {name: value for name, value in fields.items() if name != "merges"} | {"model": "llama"}
    other = Tokenizer.from_gguf(write(tmp_path / "b.gguf", "gemma3", **derived))
    assert any(other.encode(text) != ours.encode(text) for text in texts)  # by their order tokens would join otherwise


@pytest.mark.nightly
def test_llama_cpp_reads_gemma_4s_merges_as_we_do(merged, texts, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    fields = describe_backend(merged, merged.get_vocab_size(), with_merges=True)
    fields = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    file = write(tmp_path / "a.gguf", "gemma4", **fields, bos_token_id=2, eos_token_id=1, add_bos_token=True)
    theirs = llama_cpp.Llama(str(file.path), vocab_only=True, verbose=False)
    found = 0
    try:
        for text in texts:
            if text.isprintable() and "▁" not in text:
                ids = theirs.tokenize(text.encode(), add_bos=False, special=False)
                assert ids == merged.encode(text, add_special_tokens=False).ids, text
                found += 1
    finally:
        theirs.close()
    assert found > 5


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "rwkv"}, UnsupportedModel, "tokenizer 'rwkv'"),
        ({"pre": "klingon"}, UnsupportedModel, "pre-tokenizer 'klingon'; supported: default, gpt-2"),
        ({"tokens": [1, 2, 3]}, CorruptedFile, "'tokenizer.ggml.tokens' is not a list of strings"),
        ({"tokens": "a"}, CorruptedFile, "'tokenizer.ggml.tokens' is 'a', expected list"),
        ({"token_type": [1]}, CorruptedFile, "tokens but 1 token types"),
        ({"merges": ["ab"]}, CorruptedFile, "merge 'ab' is not two tokens and a space"),
        ({"merges": ["h unheard"]}, CorruptedFile, "the tokenizer contradicts itself"),
        ({"bos_token_id": 999_999}, CorruptedFile, "token 999999 is outside the vocabulary"),
        ({"model": "llama"}, CorruptedFile, "lacks 'tokenizer.ggml.scores'"),
        ({"model": "llama", "scores": [0.5]}, CorruptedFile, "tokens but 1 scores"),
    ],
)
def test_what_contradicts_itself_is_named(tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf(write(tmp_path / "a.gguf", **{**GPT2, **changes}))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_damage_does_more_than_a_typed_error(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    whole = tmp_path_factory.getbasetemp() / "undamaged.gguf"
    if not whole.exists():
        write(whole, **GPT2)
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(30, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        tokenizer = Tokenizer.from_gguf(open_gguf(path))
        assert isinstance(tokenizer.decode(tokenizer.encode("hello <|im_end|>")), str)
    except PippinError:
        pass
