"""Prompts of the text tasks: instructions, worked examples, and the request.

Notable here:
- a small model copies the format of an example better than it follows a description of it
- the request follows the text, because small models answer what they read last
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from annotated_types import Ge, Le

from pippin.core.checks import checked
from pippin.session.text_prompts import Preset

LENGTHS = {"short": 1, "medium": 3, "long": 6}

LIST = Preset(
    "You turn texts into lists. Write one item per line behind a dash, in the words of the text, and nothing else."
)

COLUMNS = Preset("You plan tables: you name the two to five columns of a table that holds the facts of a text.")

ROWS = Preset(
    "You fill in tables with the facts of a text, in the words of the text. A cell that is not told is empty."
)

_LATE = "The report is late. Send it today."
_BROKEN = "hey, the thing you sold us is broken again, fix it"
_LONG = (
    "I just wanted to let you know that, as far as I can tell at the moment, we are probably going to need about two "
    "more weeks."
)
_BASE = (
    "You rewrite texts so that they sound {0}. Say the same thing with other words; do not answer the text. Keep "
    "names, numbers and times."
)

TONES: dict[str, tuple[tuple[str, str], ...]] = {
    "friendly": (
        (_LATE, "Hi! The report hasn't arrived yet. Could you please send it today? Thank you!"),
        (
            "I do not have time to read your book.",
            "Thanks for your book! I'm sorry, I don't have time to read it just now.",
        ),
    ),
    "professional": (
        (_BROKEN, "The product that you sold us has failed again. We would be grateful if you could repair it."),
        ("can't make it on monday, my kid is sick", "I am unable to attend on Monday because my child is ill."),
    ),
    "concise": (
        (_LONG, "We probably need two more weeks."),
        (
            "There is one more thing that I would like to mention: the door of the garage does not close.",
            "The garage door does not close.",
        ),
    ),
    "formal": (
        (_BROKEN, "The product which you sold to us has failed once more. We request that you repair it."),
        ("can't make it on monday, my kid is sick", "I regret that I cannot attend on Monday, as my child is ill."),
    ),
    "casual": (
        (
            "I regret that I cannot attend on Monday, as my child is ill.",
            "Sorry, can't make it on Monday, my kid is sick.",
        ),
        ("We request that you repair the heating.", "Could you have a look at the heating?"),
    ),
    "simple": (
        (
            "The installation necessitates the removal of the protective covering.",
            "To install it, first take off the cover.",
        ),
        ("Remuneration is effected on a monthly basis.", "You are paid every month."),
    ),
    "persuasive": (
        (
            "The course starts in May and has ten places.",
            "Only ten places: sign up now for the course that starts in May!",
        ),
        ("Our soap has no perfume.", "Kind to your skin: our soap has no perfume at all."),
    ),
    "neutral": (
        (
            "Their terrible new timetable is a slap in the face of every single commuter!",
            "Commuters criticise the timetable.",
        ),
        ("You simply must see this gorgeous film!!!", "The film is worth seeing."),
    ),
}

SIZES = {
    "shorter": "Make it shorter: leave out what is not needed.",
    "same": "",
    "longer": "Make it longer: say the same in more words, without adding facts.",
}


def tone(name: str | None, length: str) -> Preset:
    """The preset of a tone and a length; None for the tone keeps it."""
    instructions = _BASE.format(name) if name else _BASE.split(" so that")[0] + "." + _BASE.split("{0}.")[1]
    pairs = TONES[name] if name else ((_LONG, "We probably need two more weeks."),) if length == "shorter" else ()
    return Preset(" ".join(filter(None, (instructions, SIZES[length]))), tuple((f"Rewrite: {a}", b) for a, b in pairs))


PROOFREAD = Preset(
    "You correct spelling, grammar and punctuation. Change nothing else. Write only the corrected text.",
    (
        ("Correct: She dont know were the station is .", "She doesn't know where the station is."),
        ("Correct: The meeting starts at nine o'clock.", "The meeting starts at nine o'clock."),
        ("Correct: I recieved you're letter on monday,thanks.", "I received your letter on Monday, thanks."),
    ),
)

_MESSAGES = (
    "Can you send me the slides before noon?",
    "Would you like to come to the cinema with us tonight?",
    "We could move the meeting to Tuesday at 9.",
)
REPLIES: dict[str, Preset] = {
    kind: Preset(f"You write replies of one sentence that {what}.", tuple(zip(_MESSAGES, answers, strict=True)))
    for kind, what, answers in (
        (
            "accept",
            "agree",
            (
                "Of course, I will send you the slides before noon.",
                "Yes, I would love to come to the cinema with you tonight!",
                "Yes, Tuesday at 9 works for me.",
            ),
        ),
        (
            "decline",
            "decline politely",
            (
                "I am sorry, but I cannot send the slides before noon.",
                "Thank you, but I can't come to the cinema tonight.",
                "I'm afraid Tuesday at 9 does not work for me.",
            ),
        ),
        (
            "ask",
            "ask a question about the message",
            ("Which slides do you need?", "Which film are you going to see?", "Could we make it 10 instead of 9?"),
        ),
        (
            "thank",
            "thank the writer",
            (
                "Thanks for the reminder about the slides!",
                "Thank you for the invitation to the cinema!",
                "Thanks for suggesting another time.",
            ),
        ),
    )
}

TOPIC_NAME = Preset(
    "You name the topic that texts have in common, in one to three words.",
    (
        (
            "- The match ended 2:1.\n- Our goalkeeper is injured.\n- Tickets for the cup final\n\nTheir topic:",
            "football",
        ),
        ("- My parcel is late.\n- The box arrived damaged.\n- Where is my order?\n\nTheir topic:", "deliveries"),
    ),
)


def leaks(preset: Preset, written: str, source: str) -> bool:
    """Whether the output repeats an answer of the preset's examples that is not in the source.

    >>> leaks(TOPIC_NAME, "Deliveries", "Close the door.")
    True
    """
    there, new = _plain(source), _plain(written)
    parts = (part for _, answer in preset.examples for part in re.split(r"(?<=[.!?])\s+|\n-?", answer))
    return any(len(plain) > 8 and plain in new and plain not in there for plain in map(_plain, parts))


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


@checked
def sentences_wanted(length: Literal["short", "medium", "long"] | Annotated[int, Ge(1), Le(50)]) -> int:
    """The number of sentences of a length."""
    return LENGTHS[length] if isinstance(length, str) else length
