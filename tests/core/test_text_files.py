"""Encodings of text: what is known, what is guessed with a warning, what is refused."""

import codecs
import os
import threading
import warnings

import pytest
from hypothesis import given, strategies as st

from pippin.core.errors import GuessedEncoding, InvalidInput
from pippin.core.text_files import decode, detect_blocks, detect_encoding, open_text, read_text

LETTER = "Sehr geehrte Frau Müller,\r\nl’été à Cabò était « très » beau. Ångström, señor: 20 €.\n"


@pytest.mark.parametrize(
    ("encoding", "mark"),
    [
        ("utf-16-le", codecs.BOM_UTF16_LE),
        ("utf-16-be", codecs.BOM_UTF16_BE),
        ("utf-32-le", codecs.BOM_UTF32_LE),
        ("utf-32-be", codecs.BOM_UTF32_BE),
        ("utf-16-le", b""),
        ("utf-16-be", b""),
        ("windows-1252", b""),
    ],
)
def test_text_of_other_systems_is_read_and_said(tmp_path, encoding, mark):
    path = tmp_path / "letter.txt"
    path.write_bytes(mark + LETTER.encode(encoding))
    with pytest.warns(GuessedEncoding, match=r"letter\.txt is not UTF-8; it was read as (utf|windows)") as said:
        assert read_text(path) == LETTER.replace("\r\n", "\n")
    assert len(said) == 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-16-le", "windows-1252", "utf-8"])
def test_a_file_is_opened_after_its_mark_with_its_line_ends(tmp_path, encoding):
    path = tmp_path / "letter.txt"
    path.write_bytes(LETTER.encode(encoding))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with open_text(path) as file:
            begin = file.tell()
            assert file.readline() == "Sehr geehrte Frau Müller,\r\n"
            file.seek(begin)
            assert file.read() == LETTER
    assert len(said) == (encoding not in ("utf-8", "utf-8-sig"))
    with pytest.raises(InvalidInput, match="there is no table"), open_text(tmp_path / "none.csv", "table"):
        pass


def test_a_pipe_is_read_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"a,b\n1,2\n",))
    writer.start()
    with open_text(tmp_path / "pipe") as file:
        assert file.read() == "a,b\n1,2\n"
    writer.join()


@given(st.binary(max_size=64), st.integers(1, 5))
def test_blocks_are_what_they_are_together(data, size):
    def detected(blocks):
        try:
            return detect_blocks(blocks, "it")
        except InvalidInput as error:
            return str(error)

    size *= 4  # a mark is looked for in the first block
    if b"\0" not in data:  # nor are those of UTF-16 looked for beyond it
        assert detected([data[i : i + size] for i in range(0, len(data), size)]) == detected([data])


def test_damaged_utf8_is_not_taken_for_western_text():
    data = ("Père Noël à Liège " * 20).encode()
    with pytest.raises(InvalidInput, match=r"UTF-8 text with 1 damaged bytes \(byte 0xc3 at 1, line 1\); drop them"):
        detect_encoding(b"P\xc3re " + data, "it")


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",))))
def test_utf8_is_utf8_without_a_word(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoded = decode(text.encode(), "it")
    assert decoded == text.removeprefix("\ufeff").replace("\r\n", "\n")


@given(st.binary(max_size=64))
def test_any_bytes_are_text_or_refused(data):
    try:
        encoding = detect_encoding(data, "it")
    except InvalidInput:
        return
    data.decode(encoding)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("吾輩は猫である。名前はまだ無い。", "shift_jis"),
        ("Все счастливые семьи похожи друг на друга.", "windows-1251"),
        ("我是一只猫，还没有名字。", "gb18030"),
    ],
)
def test_other_alphabets_are_no_western_text(text, encoding):
    data = text.encode(encoding)
    with pytest.raises(InvalidInput, match="convert it first: iconv"):
        detect_encoding(data, "it")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x89PNG\r\n\x1a\n\xff", r"not UTF-8 text \(byte 0x89 at 0, line 1\)$"),
        (codecs.BOM_UTF16_LE + b"\x00\xd8", "begins as utf-16-le text and is none"),
        (codecs.BOM_UTF32_LE + b"\xff\xff\xff\xff", "begins as utf-32-le text and is none"),
    ],
)
def test_what_is_no_text_is_refused(data, message):
    with pytest.raises(InvalidInput, match=message):
        detect_encoding(data, "it")
