"""Oracles: transformers on the default model, the `tokenizers` library on small ones; laws of bytes and ids."""

import json

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers, trainers

from pippin.core.errors import (
    CheckpointError,
    CorruptedFile,
    InvalidArgument,
    InvalidInput,
    ModelNotFound,
    UnsupportedModel,
)
from pippin.data.text.tokenizer import Tokenizer

CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


@pytest.fixture(scope="module")
def small(byte_level_backend):
    return Tokenizer(byte_level_backend(CONTROL, ["<tool_call>", "</tool_call>"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, byte_level_backend):
    """A folder as transformers writes it, with merely added tokens numbered before a control token."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    backend = byte_level_backend(["<|endoftext|>"], ["<think>"])
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("<bos>", special=True)])
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<bos>")
    theirs.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    theirs.save_pretrained(folder)
    return folder


def sentencepiece(prefix: str) -> Backend:
    """A SentencePiece-like backend; ``prefix`` says how the first word is marked: never, first, or by a normalizer."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if prefix == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prefix, split=False)
    last = [decoders.Strip(" ", 1, 0)] if prefix != "never" else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    # The trainer marks the byte tokens as special, which they are in no real vocabulary.
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    return Backend.from_str(json.dumps(state))


# --- the default model ------------------------------------------------------------------------------------------------


def test_the_default_model_encodes_as_transformers_does(default_tokenizer, reference_tokenizer, texts):
    for text in (*texts, "".join(texts)):
        expected = reference_tokenizer.encode(text, add_special_tokens=False)
        assert default_tokenizer.encode(text) == expected
        assert default_tokenizer.encode(text, control=True) == expected


def test_control_tokens_of_the_default_model_are_read_only_on_request(default_tokenizer, reference_tokenizer):
    text = "<|im_start|>user\nHi<|im_end|> <|endoftext|>"
    assert default_tokenizer.encode(text, control=True) == reference_tokenizer.encode(text, add_special_tokens=False)
    ids = default_tokenizer.encode(text)
    assert default_tokenizer.control_ids.isdisjoint(ids)
    assert default_tokenizer.decode(ids) == text


def test_what_is_known_about_the_default_model(default_tokenizer, reference_tokenizer):
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.bos_id == 1
    assert default_tokenizer.eos_ids == (2, 0)
    assert not default_tokenizer.add_bos
    assert default_tokenizer.chat_template == reference_tokenizer.chat_template
    assert default_tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert default_tokenizer.control_ids == set(range(17))


@pytest.fixture(scope="module")
def known_bytes(default_tokenizer):
    """The vocabulary was learned without a few rare bytes; what it cannot spell it drops."""
    return set(b"".join(map(default_tokenizer.token_bytes, range(default_tokenizer.vocab_size))))


@given(st.text(max_size=60))
def test_default_model_text_survives_the_round_trip(default_tokenizer, known_bytes, text):
    text = "".join(character for character in text if set(character.encode()) <= known_bytes)
    assert default_tokenizer.decode(default_tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, 49151), max_size=12))
def test_decoding_is_the_bytes_put_together_and_what_the_library_decodes(default_tokenizer, reference_tokenizer, ids):
    joined = b"".join(map(default_tokenizer.token_bytes, ids)).decode(errors="replace")
    assert default_tokenizer.decode(ids) == joined
    assert joined == reference_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# --- control tokens as text -------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([*CONTROL, "<|im_", "end|>", "a", " ", "é", "<tool_call>", "<"]), max_size=10))
def test_untrusted_text_never_holds_a_control_token(small, parts):
    text = "".join(parts)
    ids = small.encode(text)
    assert small.control_ids.isdisjoint(ids)
    assert small.decode(ids) == text


def test_added_tokens_keep_their_ids_beside_control_tokens(folder):
    tokenizer = Tokenizer.from_folder(folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("a<think>b<|im_end|>")[1:2] == [backend.token_to_id("<think>")]
    assert tokenizer.decode(tokenizer.encode("a<think>b<|im_end|>")) == "a<think>b<|im_end|>"
    everything = tokenizer.without(["<think>"])
    assert backend.token_to_id("<think>") not in everything.encode("a<think>b")
    assert tokenizer.decode(everything.encode("a<think>b")) == "a<think>b"


def test_merges_that_lead_to_a_control_token_do_not_reach_it():
    vocabulary = {letter: index for index, letter in enumerate("<s>a")} | {"<s": 4, "<s>": 5}
    backend = Backend(models.BPE(vocabulary, [("<", "s"), ("<s", ">")]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("a<s>a", control=True) == [3, 5, 3]
    assert tokenizer.encode("a<s>a") == [3, 0, 1, 2, 3]


def test_a_token_that_looks_like_a_control_token_is_one(byte_level_backend):
    tokenizer = Tokenizer(byte_level_backend(added=["<|fim_prefix|>", "<｜User｜>", "<think>", "<|a b|>"]))
    assert tokenizer.control_strings == {"<|fim_prefix|>", "<｜User｜>"}
    assert tokenizer.markup_strings == {"<think>", "<|a b|>"}


# --- SentencePiece ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["never", "first", "normalizer"])
def test_sentencepiece_text_encodes_as_the_library_does_and_keeps_its_bytes(prefix, texts):
    backend = sentencepiece(prefix)
    tokenizer = Tokenizer(backend)
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text, add_special_tokens=False).ids
        # In this kind of vocabulary the character "▁" is a space; the first word may bring one of its own.
        spaced = text.replace("▁", " ")
        marked = bool(text) and (prefix == "normalizer" or (prefix == "first" and not spaced.startswith(" ")))
        assert tokenizer.decode(ids) == " " * marked + spaced


@pytest.mark.parametrize("prefix", ["never", "first"])
def test_a_text_that_continues_is_not_marked_as_a_beginning(prefix):
    tokenizer = Tokenizer(sentencepiece(prefix))
    plain = tokenizer.without(())
    assert tokenizer.decode(plain.encode("fox", start=False)) == "fox"


def test_bytes_of_a_broken_character_become_one_when_they_meet():
    tokenizer = Tokenizer(sentencepiece("never"))
    ids = tokenizer.encode("é")
    assert [tokenizer.token_bytes(index) for index in ids] == [b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode(ids) == "é"


# --- the grammar's view -----------------------------------------------------------------------------------------------


def test_the_grammar_tokenizer_has_the_same_tokens(default_tokenizer, texts):
    grammar = default_tokenizer.grammar_tokenizer
    assert grammar is default_tokenizer.grammar_tokenizer
    assert grammar.vocab_size == 49152
    assert list(grammar.eos_tokens) == [2, 0]
    assert grammar.is_canonical
    for text in texts:
        ids = default_tokenizer.encode(text)
        assert grammar.tokenize_str(text) == ids
        assert grammar.decode_bytes(ids) == text.encode()
    assert [index for index in range(300) if grammar.is_special_token(index)] == sorted(default_tokenizer.control_ids)


def test_a_grammar_decides_bytes_ends_and_padding(small):
    from llguidance import LLMatcher

    width = small.vocab_size + 60
    grammar = small.grammar_tokenizer_of_width(width)
    assert grammar.vocab_size == width
    matcher = LLMatcher(grammar, LLMatcher.grammar_from_regex("ab?"))

    def allowed():
        mask = matcher.compute_bitmask()
        return {index for index in range(width) if mask[index // 8] >> index % 8 & 1}

    def texts(ids):
        return {small.token_bytes(index) for index in ids}

    assert texts(allowed()) - {b"ab"} == {b"a"}
    assert matcher.consume_token(small.encode("a")[0])
    assert small.encode("b")[0] in allowed()
    assert set(small.eos_ids) <= allowed()
    assert max(allowed()) < small.vocab_size


def test_a_grammar_needs_an_end_and_room(small, byte_level_backend):
    with pytest.raises(InvalidArgument, match="width 3 is smaller than the vocabulary"):
        small.grammar_tokenizer_of_width(3)
    with pytest.raises(UnsupportedModel, match="no end token"):
        _ = Tokenizer(byte_level_backend()).grammar_tokenizer


# --- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_encodes_as_transformers_does(folder, texts):
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in (*texts, "<bos>a<think>b<|im_end|>"):
        assert ours.encode(text, control=True) == theirs.encode(text, add_special_tokens=False)
    assert (ours.bos_id, ours.eos_ids[0]) == (theirs.bos_token_id, theirs.eos_token_id)
    assert [theirs.convert_ids_to_tokens(index) for index in ours.eos_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert ours.chat_template == theirs.chat_template
    assert not ours.add_bos


def test_the_generation_config_and_the_post_processor_are_heard(folder, tmp_path):
    from tokenizers.processors import TemplateProcessing

    backend = Backend.from_file(str(folder / "tokenizer.json"))
    bos = backend.token_to_id("<bos>")
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<bos>"}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [65, 66]}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.add_bos
    assert tokenizer.eos_ids == (
        backend.token_to_id("<|im_end|>"),
        65,
        66,
        backend.token_to_id("<|endoftext|>"),
    )
    assert tokenizer.encode("a") == backend.encode("a", add_special_tokens=False).ids
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": False}))
    assert not Tokenizer.from_folder(tmp_path).add_bos


def test_an_end_token_that_the_file_forgot_to_mark_is_a_control_token(byte_level_backend, tmp_path):
    backend = byte_level_backend(added=["STOP"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "STOP"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.control_strings == {"STOP"}
    assert tokenizer.decode(tokenizer.encode("a STOP")) == "a STOP"
    assert tokenizer.encode("STOP", control=True) == list(tokenizer.eos_ids)


def test_tokens_that_only_the_configuration_knows_are_added(folder, tmp_path):
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    size = backend.get_vocab_size()
    backend.save(str(tmp_path / "tokenizer.json"))
    declared = {str(size): {"content": "<|new|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<|new|>", control=True) == [size]
    assert size in tokenizer.control_ids
    declared = {str(size + 5): {"content": "<|new|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    with pytest.raises(CheckpointError, match=r"'<\|new\|>' should have id"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "jinja", "expected"),
    [
        ({"chat_template": "A"}, None, "A"),
        ({"chat_template": "A"}, "B", "B"),
        ({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}, None, "D"),
        ({}, None, None),
    ],
)
def test_where_the_chat_template_lies(folder, tmp_path, config, jinja, expected):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    assert Tokenizer.from_folder(tmp_path).chat_template == expected


def test_what_is_saved_is_read_by_us_and_by_transformers(default_tokenizer, tmp_path, texts):
    from transformers import AutoTokenizer

    default_tokenizer.save(tmp_path)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in (*texts, "<|im_start|>a<|im_end|>"):
        ids = default_tokenizer.encode(text, control=True)
        assert ours.encode(text, control=True) == ids
        assert theirs.encode(text, add_special_tokens=False) == ids
    for name in ("vocab_size", "bos_id", "eos_ids", "control_ids", "add_bos", "chat_template"):
        assert getattr(ours, name) == getattr(default_tokenizer, name)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "vocab.json").touch()
    with pytest.raises(UnsupportedModel, match=r"'vocab.json' but no tokenizer.json; make one"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptedFile, match=r"tokenizer.json: not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_configuration_is_named(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for text, message in [
        ("{", r"tokenizer_config\.json: not JSON"),
        ("[]", r"tokenizer_config\.json: expected a JSON object"),
        ('{"added_tokens_decoder": {"7": {}}}', "malformed added_tokens_decoder"),
        ('{"added_tokens_decoder": [7]}', "malformed added_tokens_decoder"),
    ]:
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(CorruptedFile, match=message):
            Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CorruptedFile, match=r"chat_template\.jinja: not UTF-8"):
        Tokenizer.from_folder(tmp_path)


def test_other_kinds_of_tokenizer_are_refused_by_name():
    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer(backend)


def test_ids_outside_the_vocabulary(small, byte_level_backend):
    assert small.token_bytes(small.vocab_size + 7) == b""
    with pytest.raises(InvalidArgument, match="token id -1"):
        small.token_bytes(-1)
    with pytest.raises(CorruptedFile, match="token 99999 is outside the vocabulary"):
        Tokenizer(byte_level_backend(), eos_ids=[99999])


@settings(max_examples=20)
@given(st.booleans())
def test_a_lone_surrogate_is_not_text(small, control):
    with pytest.raises(InvalidInput, match="not text"):
        small.encode("a\ud800b", control=control)


def test_vocabularies_differ_at_the_lowest_id_that_means_something_else():
    def made(*tokens):
        backend = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, []))
        backend.decoder = decoders.ByteLevel()
        return Tokenizer(backend)

    one = made("a", "b", "c")
    assert one.first_difference(made("a", "b", "c")) is None
    assert one.first_difference(made("a", "c", "b")) == 1
    assert one.first_difference(made("a", "b")) == 2
    assert made("a", "b").first_difference(one) == 2


# --- files of strangers -----------------------------------------------------------------------------------------------


def changed(folder, tmp_path, change):
    """A folder whose tokenizer.json was changed."""
    file = json.loads((folder / "tokenizer.json").read_text())
    change(file)
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    return tmp_path


def replacing(count, content):
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    return {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [step] * count}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file["model"]["vocab"].update(zz=2**32 - 1), "token id 4294967295 is far beyond"),
        (lambda file: file["model"]["vocab"].update(zz=2**28), "token id 268435456 is far beyond"),
        (lambda file: file["added_tokens"].append(file["added_tokens"][0] | {"id": 2**32 - 1}), "is far beyond"),
        (lambda file: file.update(normalizer=replacing(12, "a" * 100)), r"up to 1e\+24 times as long"),
        (lambda file: file.update(normalizer=replacing(400, "a" * 100)), r"up to 1e\+300 times as long"),
        (lambda file: file.update(normalizer={"type": "Prepend", "prepend": "a" * 10**6}), "times as long"),
    ],
)
def test_a_file_that_would_end_the_process_is_refused(folder, tmp_path, change, message):
    with pytest.raises(CorruptedFile, match=message):
        Tokenizer.from_folder(changed(folder, tmp_path, change))


def test_a_normalizer_that_adds_little_and_gaps_between_ids_are_fine(folder, tmp_path):
    def change(file):
        steps = [{"type": "Prepend", "prepend": "\u2581"}, *replacing(5, "aa")["normalizers"]]
        file["normalizer"] = {"type": "Sequence", "normalizers": steps}
        file["model"]["vocab"]["zz"] = 50_000

    assert Tokenizer.from_folder(changed(folder, tmp_path, change)).vocab_size == 50_001


def test_a_pattern_that_the_library_gives_up_is_the_models_fault(folder, tmp_path):
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer.from_folder(changed(folder, tmp_path, lambda file: file.update(pre_tokenizer=split)))
    with pytest.raises(CheckpointError, match=r"the tokenizer failed: .*retry-limit"):
        tokenizer.encode("x" * 40)
