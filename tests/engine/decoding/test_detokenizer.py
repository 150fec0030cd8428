"""Text as it comes equals text as it would come at once, cut before the first stop string."""

from itertools import pairwise

from hypothesis import given, strategies as st

from pippin.engine.decoding.detokenizer import Detokenizer


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(bounds)]


@given(st.text(), st.lists(st.integers(0, 1000)))
def test_text_cut_anywhere_comes_out_whole(text, cuts):
    stream = Detokenizer()
    parts = [stream.push(part) for part in pieces(text.encode(), cuts)]
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text
    assert "".join(parts) + stream.finish() == text == stream.text


@given(st.text("abAB€"), st.lists(st.text("abAB€", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 1000)))
def test_nothing_of_a_stop_string_is_shown(text, stops, cuts):
    stream = Detokenizer(stops)
    shown = "".join(stream.push(part) for part in pieces(text.encode(), cuts)) + stream.finish()
    # by brute force: the first moment at which a stop string is complete decides, the earliest beginning wins
    ends = [n for n in range(len(text) + 1) if any(stop in text[:n] for stop in stops)]
    if not ends:
        assert shown == text
        assert not stream.stopped
    else:
        assert stream.stopped
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)
        assert any(text.startswith(stop, len(shown)) for stop in stops)


@given(st.text("abc"), st.text("abc", min_size=1, max_size=3))
def test_one_stop_string_cuts_where_str_find_says(text, stop):
    stream = Detokenizer([stop])
    shown = "".join(stream.push(char.encode()) for char in text) + stream.finish()
    assert shown == (text[: text.find(stop)] if stop in text else text)


@given(st.binary(max_size=40), st.lists(st.integers(0, 1000)))
def test_bytes_that_are_no_text_never_raise(data, cuts):
    stream = Detokenizer()
    shown = "".join(stream.push(part) for part in pieces(data, cuts)) + stream.finish()
    assert shown == data.decode("utf-8", "replace")
