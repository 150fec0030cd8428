"""Summaries: cut, checked, written again, put together from parts; and the sentences that are chosen."""

import pytest

from pippin.core.errors import InvalidArgument, UnsupportedCapability
from pippin.kits.text import TextTasks, sentences

ANN = "Ann Lee paid 300 euros on Monday. She was glad. It rained in Leeds."


def test_a_summary_has_no_more_sentences_than_asked(scripted):
    tasks = TextTasks(scripted(lambda prompt: "Ann Lee paid. She was glad. It rained. It was Monday."))
    assert tasks.summarize(ANN, length="short").text == "Ann Lee paid."
    assert tasks.summarize(ANN, length=2).text == "Ann Lee paid. She was glad."
    assert tasks.summarize(ANN).text == "Ann Lee paid. She was glad. It rained."


def test_what_was_said_already_and_what_is_unfinished_is_left_out(scripted):
    tasks = TextTasks(scripted(lambda prompt: "Ann Lee paid. Ann Lee paid. It rai"))
    assert tasks.summarize(ANN).text == "Ann Lee paid."


def test_a_summary_with_a_strange_number_is_written_once_more(scripted):
    answers = iter(["Ann Lee paid 400 euros.", "Ann Lee paid 300 euros."])
    provider = scripted(lambda prompt: next(answers))
    summary = TextTasks(provider).summarize(ANN)
    assert (summary.text, summary.unverified) == ("Ann Lee paid 300 euros.", ())
    assert [turn.options.temperature for turn in provider.turns][1] > 0


def test_what_stays_strange_is_named(scripted):
    answers = iter(["Then Bob Ray paid 400 euros.", "Then Bob paid 300 euros."])
    summary = TextTasks(scripted(lambda prompt: next(answers))).summarize(ANN)
    assert (summary.text, summary.unverified) == ("Then Bob paid 300 euros.", ("Bob",))
    assert str(summary) == summary.text


def test_a_long_text_is_read_in_parts_of_seventy_per_cent_of_the_context(scripted):
    text = " ".join(f"In line {n} the lamp number {n} was lit by hand again." for n in range(200))
    provider = scripted(lambda prompt: f"{prompt.split(' was lit')[0]}.", context_size=600)
    drafts = list(TextTasks(provider).summarize_drafts(text, length="short"))
    *parts, last = provider.prompts
    assert len(parts) == drafts[-1].parts - 1 > 3
    assert all(0.4 * 600 < len(part.split()) <= 0.7 * 600 + 20 for part in parts[:-1])
    assert "".join(part.rsplit("\n\n", 1)[0] + " " for part in parts) == text + " "  # nothing is lost between parts
    assert last.startswith("In line 0 the lamp number 0. In line")
    assert drafts[-1].done is not None
    assert drafts[-1].done.unverified == ()
    assert [draft.part for draft in drafts] == sorted(draft.part for draft in drafts)


def test_drafts_count_the_tokens_that_were_written(scripted):
    text = " ".join(f"In line {n} the lamp number {n} was lit by hand again." for n in range(100))
    written = "The lamp was lit. It is lit"
    drafts = list(TextTasks(scripted(lambda prompt: written, context_size=600)).summarize_drafts(text, length=2))
    assert [draft.tokens for draft in drafts if draft.part == 0][:4] == [2, 4, 5, 7]  # a piece has seven characters
    assert drafts[-1].text == "The lamp was lit."
    assert {draft.tokens for draft in drafts[-2:]} == {7}  # the sentence that is not whole counts, too


def test_the_language_of_the_text_is_asked_for(scripted):
    provider = scripted(lambda prompt: "Gut.")
    TextTasks(provider).summarize("Die Lampe wird von Hand angezündet und nicht gelöscht.")
    TextTasks(provider).summarize("Die Lampe wird von Hand angezündet und nicht gelöscht.", language="fr")
    TextTasks(provider).summarize("The lamp is lit by hand and is not put out.")
    assert [prompt.rsplit(".", 2)[-2] for prompt in provider.prompts[:2]] == [" Write in German", " Write in French"]
    assert "Write in" not in provider.prompts[-1]


def test_chosen_sentences_are_sentences_of_the_text_in_their_order(tiny):
    text = "A title\n\n" + " ".join(
        f"This is sentence {word} of it." for word in ("one", "two", "three", "four", "five")
    )
    chosen = TextTasks(tiny).summarize(text, length=3, method="select").text
    found = [one.of(chosen).strip() for one in sentences(chosen)]
    places = [text.index(one) for one in found]
    assert len(found) == 3
    assert places == sorted(places)


def test_the_sentences_are_those_that_tell_most_about_the_others(monkeypatch, tiny):
    tasks = TextTasks(tiny)
    monkeypatch.setattr(tasks.sessions, "score_text", lambda before, texts: [10.0 * ("two" in before)] * len(texts))
    text = "This is number one here. This is number two here. This is number three here."
    assert tasks.summarize(text, length=1, method="select").text == "This is number two here."


@pytest.mark.parametrize("length", ["tiny", 0, 51])
def test_other_lengths_are_refused(scripted, length):
    with pytest.raises(InvalidArgument, match="length must be"):
        TextTasks(scripted(str)).summarize("x", length=length)


def test_other_ways_are_refused(scripted):
    tasks = TextTasks(scripted(str))
    with pytest.raises(InvalidArgument, match="method must be"):
        tasks.summarize("x", method="guess")
    with pytest.raises(InvalidArgument, match="language must be a tag"):
        tasks.summarize("x", language="in German!")
    with pytest.raises(UnsupportedCapability):
        tasks.summarize("x", method="select")
    with pytest.raises(InvalidArgument, match="leave no room for a text"):
        TextTasks(scripted(str, context_size=60)).summarize("x")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("- One is here.\n- Two is there. And more.\n- One is here!", ["One is here.", "Two is there."]),
        ("Points:\n1. Ann paid.\n2) Bob paid.", ["Ann paid.", "Bob paid."]),
        ("Ann paid.\n\nShe was glad.", ["Ann paid.", "She was glad."]),
    ],
)
def test_key_points_are_read_from_any_list(scripted, answer, expected):
    assert [str(point) for point in TextTasks(scripted(lambda prompt: answer)).key_points(ANN)] == expected


def test_key_points_are_checked_and_counted(scripted):
    tasks = TextTasks(scripted(lambda prompt: "- Then Bob paid.\n- Ann paid.\n- It rained."))
    points = tasks.key_points(ANN, max_points=2)
    assert [(point.text, point.unverified) for point in points] == [("Then Bob paid.", ("Bob",)), ("Ann paid.", ())]
    with pytest.raises(InvalidArgument, match="must be from 1 to 50"):
        tasks.key_points(ANN, max_points=0)


def test_a_list_keeps_whole_items(scripted):
    tasks = TextTasks(scripted(lambda prompt: "- Pay Ann. Now.\n- call Bob", grammars=True))
    assert [str(item) for item in tasks.to_list("We must pay Ann and call Bob.")] == ["Pay Ann. Now.", "call Bob"]


def test_selecting_from_a_long_text_costs_no_more_than_from_a_short_one(tiny, monkeypatch):
    """What the model scores is bounded, and the sentence that says what all others are about is among it."""
    from pippin.kits.text import summarize
    from pippin.kits.text.session_pool import SessionPool

    monkeypatch.setattr(summarize, "_SELECT_TOKENS", 200)
    scored = []
    score = SessionPool.score_text
    monkeypatch.setattr(
        SessionPool,
        "score_text",
        lambda self, before, texts: scored.append(sum(map(len, texts))) or score(self, before, texts),
    )
    topics = ["harbor", "lighthouse", "ferry", "captain"]
    filler = [f"In year {n} someone bought {n} apples and {n + 1} pears." for n in range(10_000, 10_400)]
    about = [f"The {a} near the {b} was painted." for a in topics for b in topics if a != b]
    text = " ".join(filler[:200] + about + filler[200:])
    budget = 2 * 200
    kept = summarize._typical(text, len, budget)
    assert len(kept) <= budget + kept.count(".")
    assert sum(word in kept for word in topics) > 0
    assert summarize._typical(text[:300], len, budget) == text[:300]
    for size in (3, 30):
        scored.clear()
        told = []
        chosen = (
            TextTasks(tiny)
            .summarize(
                " ".join(filler[: 10 * size]),
                length=2,
                method="select",
                on_progress=lambda done, total, told=told: told.append((done, total)),
            )
            .text
        )
        assert chosen
        assert told == sorted(told)  # never back
        assert len({total for _, total in told}) == 1
        assert told[-1][0] <= told[-1][1] <= 2 * len(told)
        assert sum(scored) < 20 * budget
