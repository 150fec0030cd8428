"""What of a long conversation the model reads: policies that shorten the view, never the transcript itself.

Notable here:
- a policy is a function of transcript and model; the session's transcript keeps everything
- a conversation is cut between turns only, so a tool's output never stands without its call, and ids stay as they were
- a summary is written once, kept, and extended when the conversation has grown beyond the threshold again
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from pippin.core.errors import InvalidArgument
from pippin.session.transcript import Answer, Instructions, Prompt, Reasoning, ToolCalls, ToolOutput, Transcript

ASK = "What have we said and done so far?"
SUMMARIZE = (
    "You summarise conversations. Keep names, numbers, decisions and open questions; leave out greetings. "
    "Write at most {words} words."
)
WORDS = 120


class HistoryModel(Protocol):
    """What a policy may use of the model that will read the result."""

    context_size: int | None

    def token_count(self, transcript: Transcript) -> int:
        """Tokens of a transcript as the model reads it."""

    def ask(self, instructions: str, prompt: str) -> str:
        """Text that the model writes, apart from the conversation."""


class HistoryPolicy(Protocol):
    """Returns what the model is to read of a conversation; its last entries must stay as they are."""

    def __call__(self, transcript: Transcript, model: HistoryModel) -> Transcript:
        """The shortened transcript."""


def turns(entries: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The entries cut before every prompt; what stands before the first one is a turn of its own."""
    cut: list[list[Any]] = []
    for entry in entries:
        if isinstance(entry, Prompt) or not cut:
            cut.append([])
        cut[-1].append(entry)
    return [tuple(turn) for turn in cut]


def rolling_window(entries: int) -> HistoryPolicy:
    """The newest whole turns of at most so many entries, instructions not counted; the last turn always stays.

    Raises:
        InvalidArgument: fewer than one entry.
    """
    if entries < 1:
        raise InvalidArgument(f"a rolling window holds at least 1 entry, got {entries}")

    def policy(transcript: Transcript, model: HistoryModel) -> Transcript:
        kept: list[tuple[Any, ...]] = []
        size = 0
        for turn in reversed(turns(transcript.history)):
            size += len(turn)
            if kept and size > entries:
                break
            kept.append(turn)
        return _with_instructions(transcript, reversed(kept))

    return policy


def drop_tool_calls() -> HistoryPolicy:
    """Without the calls and outputs of turns that were answered; those of the turn that is going on stay."""

    def policy(transcript: Transcript, model: HistoryModel) -> Transcript:
        dropped = (ToolCalls, ToolOutput, Reasoning)
        shorter = (
            tuple(entry for entry in turn if not isinstance(entry, dropped)) if isinstance(turn[-1], Answer) else turn
            for turn in turns(transcript.history)
        )
        return _with_instructions(transcript, shorter)

    return policy


def summarize(threshold: float = 0.7, *, keep: int = 2) -> HistoryPolicy:
    """Older turns as a summary, once the conversation takes more than a share of the context.

    Prompts and answers become one summary; tool calls and their outputs stay, with their ids, since later turns may
    refer to them.

    Args:
        threshold: share of the context, in (0, 1).
        keep: newest turns that stay word for word, at least 1.

    Raises:
        InvalidArgument: a value outside its range.
    """
    return _Summaries(threshold, keep)


def chain(*policies: HistoryPolicy) -> HistoryPolicy:
    """One policy after the other."""

    def policy(transcript: Transcript, model: HistoryModel) -> Transcript:
        for each in policies:
            transcript = each(transcript, model)
        return transcript

    return policy


class _Summaries:
    """The policy of `summarize`, with the summaries written so far, by what they stand for."""

    def __init__(self, threshold: float, keep: int) -> None:
        if not 0 < threshold < 1:
            raise InvalidArgument(f"threshold is a share of the context between 0 and 1, got {threshold}")
        if keep < 1:
            raise InvalidArgument(f"keep must be at least 1 turn, got {keep}")
        self.threshold, self.keep = threshold, keep
        self.written: dict[bytes, str] = {}

    def __call__(self, transcript: Transcript, model: HistoryModel) -> Transcript:
        """The transcript, its older turns summarised if it is too long."""
        if model.context_size is None:
            return transcript
        limit = int(self.threshold * model.context_size)
        all_turns = turns(transcript.history)
        keys = _keys(all_turns)
        done = max((n for n in range(len(all_turns)) if keys[n] in self.written), default=0)
        shorter = self._view(transcript, all_turns, done, self.written.get(keys[done], ""))
        if model.token_count(shorter) <= limit or len(all_turns) - self.keep <= done:
            return shorter
        upto = len(all_turns) - self.keep
        summary = self._write(all_turns[done:upto], self.written.get(keys[done], ""), limit, model)
        self.written[keys[upto]] = summary
        return self._view(transcript, all_turns, upto, summary)

    def _view(self, transcript: Transcript, all_turns: list[tuple[Any, ...]], done: int, summary: str) -> Transcript:
        if not done:
            return transcript
        tools = [entry for turn in all_turns[:done] for entry in turn if isinstance(entry, ToolCalls | ToolOutput)]
        return _with_instructions(transcript, [(Prompt(ASK), *tools, Answer(summary)), *all_turns[done:]])

    def _write(self, some: Sequence[tuple[Any, ...]], summary: str, limit: int, model: HistoryModel) -> str:
        """Fold the turns, as many at a time as fit, into the summary that stands for the earlier ones."""
        waiting = [_spoken(turn) for turn in some]
        while waiting:
            batch = [waiting.pop(0)]
            while waiting and self._tokens([summary, *batch, waiting[0]], model) <= limit:
                batch.append(waiting.pop(0))
            while len(batch[0]) > 200 and self._tokens([summary, *batch], model) > limit:
                batch[0] = batch[0][: len(batch[0]) // 2]  # a single turn that is longer than the context
            said = "\n\n".join(part for part in ([f"Before: {summary}"] if summary else []) + batch)
            summary = model.ask(SUMMARIZE.format(words=WORDS), f"{said}\n\nSummarise this conversation.").strip()
        return summary

    def _tokens(self, parts: list[str], model: HistoryModel) -> int:
        return model.token_count(Transcript(entries=(Prompt("\n\n".join(parts)),)))


def _keys(all_turns: Sequence[tuple[Any, ...]]) -> list[bytes]:
    """What tells the beginnings of a conversation apart: of none of its turns, of the first, of the first two …"""
    digest = hashlib.sha256()
    found = [digest.digest()]
    for turn in all_turns:
        for entry in turn:
            written = entry.model_dump_json().encode()
            digest.update(len(written).to_bytes(8, "big") + written)
        found.append(digest.digest())
    return found


def _spoken(turn: tuple[Any, ...]) -> str:
    names = {"prompt": "User", "response": "Assistant"}
    return "\n".join(f"{names[entry.kind]}: {entry.text}" for entry in turn if entry.kind in names)


def _with_instructions(transcript: Transcript, kept: Iterable[tuple[Any, ...]]) -> Transcript:
    first = (entry for entry in transcript if isinstance(entry, Instructions))
    return Transcript(entries=(*first, *(entry for turn in kept for entry in turn)))
