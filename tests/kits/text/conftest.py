"""A provider that answers from a function, so that a test decides what the model says."""

from collections.abc import Callable, Iterator

import pytest

from pippin.session.providers.provider import Capabilities, Done, Provider, ProviderEvent, ProviderRequest, TextDelta


class Scripted(Provider):
    """Answers each prompt with what ``answer`` makes of it; knows nothing but text."""

    name = "scripted"

    def __init__(self, answer: Callable[[str], str], *, context_size: int | None = 2000, **can: bool) -> None:
        self.answer, self.context_size, self.capabilities = answer, context_size, Capabilities(**can)
        self.turns: list[ProviderRequest] = []

    @property
    def prompts(self) -> list[str]:
        """What it was asked."""
        return [turn.transcript.entries[-1].text for turn in self.turns]

    def stream(self, turn: ProviderRequest) -> Iterator[ProviderEvent]:
        """The answer in pieces of seven characters."""
        self.turns.append(turn)
        text = self.answer(turn.transcript.entries[-1].text)

        def events() -> Iterator[ProviderEvent]:
            for at in range(0, len(text), 7):
                yield TextDelta(text[at : at + 7])
            yield Done("stop")

        return events()

    def token_count(self, item: str | ProviderRequest) -> int:
        """One token per word."""
        assert isinstance(item, str)
        return len(item.split())


@pytest.fixture
def scripted():
    """Make a provider that answers with a function of the prompt."""
    return Scripted
