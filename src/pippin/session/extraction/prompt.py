"""What a model reads before it fills in a form."""

from __future__ import annotations

from typing import Final

from pippin.language.language_model import LanguageModel
from pippin.session import chat_format
from pippin.session.transcript import Instructions, Prompt, Transcript

INSTRUCTIONS: Final = "Fill in the form with parts of the text."


def transcript(text: str, question: str = "") -> Transcript:
    """The conversation before the form; ``question`` is what to look for, where the names do not say it."""
    prompt = f"{text.strip()}\n\n{question.strip()}" if question.strip() else text.strip()
    return Transcript(entries=(Instructions(INSTRUCTIONS), Prompt(prompt)))


def encode_prompt(model: LanguageModel, text: str, question: str = "") -> list[int]:
    """The tokens before the form."""
    return chat_format.encode(model, transcript(text, question))
