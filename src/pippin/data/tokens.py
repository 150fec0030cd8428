"""From records to pieces: token ids, and which of them are learnt.

Notable here:
- in a conversation only the assistant's turns are learnt, from the first token after the prompt that the model would
  be given, up to the token that ends its turn; nothing is looked up in the template, it is asked: rendered up to before
  the turn and up to after it, and what lies between is the turn
- a template whose rendering of a turn changes with what follows is told as an error, never guessed at
- what was tokenised once is kept in a temporary file of 2 or 4 bytes a token, mapped into memory, so that an epoch
  costs no tokenising and hardly any memory
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

import numpy as np
from jaxtyping import Bool, Int

from pippin.core import progress
from pippin.core.errors import CheckpointError, InvalidArgument, InvalidInput, InvalidRecord
from pippin.core.files import disk_errors
from pippin.data.batches import IGNORE
from pippin.data.chat import ChatTemplate, Message
from pippin.data.records import Record
from pippin.data.tokenizer import Tokenizer

Learn = Literal["assistant", "all"]


@dataclass(frozen=True, eq=False)
class Tokens:
    """A document, or a block of one, as token ids.

    Args:
        ids: the tokens.
        learnt: which of them the model learns to give.
        ends: False where the next one goes on with it.
    """

    ids: Int[np.ndarray, tokens]
    learnt: Bool[np.ndarray, tokens]
    ends: bool = True


@dataclass(frozen=True, eq=False)
class Piece:
    """Part of a document that fits into a row: ids, and the token that should follow each (or `IGNORE`)."""

    ids: Int[np.ndarray, tokens]
    targets: Int[np.ndarray, tokens]

    def __len__(self) -> int:
        return len(self.ids)


class Tokenisation:
    """How records become tokens.

    A text gets the tokenizer's begin token, where it uses one, and an end token; a completion an end token. With a
    template, a prompt and its completion are a conversation of two turns.

    Args:
        tokenizer: of the model.
        template: its chat template; None for a base model.
        learn: "assistant" learns texts, completions and the assistant's turns; "all" prompts and all turns too.

    Raises:
        InvalidArgument: another word for ``learn``.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None, learn: Learn = "assistant") -> None:
        if learn not in ("assistant", "all"):
            raise InvalidArgument(f"learn is {learn!r}; choose 'assistant' or 'all'")
        self.tokenizer, self.template, self.learn = tokenizer, template, learn

    def __call__(self, record: Record) -> Tokens:
        """The tokens of one record.

        Raises:
            InvalidRecord: a conversation without a template, or one that the template refuses or rewrites.
        """
        try:
            if record.messages or (record.prompt is not None and self.template is not None):
                return self._conversation(record)
            prompt = self._begin(record) + ([] if record.prompt is None else self.tokenizer.encode(record.prompt))
            text = self.tokenizer.encode(record.text) + (list(self.tokenizer.eos_ids[:1]) if record.ends else [])
        except InvalidRecord:
            raise
        except (InvalidInput, CheckpointError) as error:
            raise record.error(str(error)) from error
        ids = np.array(prompt + text, dtype=np.int64)
        learnt = np.ones(len(ids), dtype=bool)
        if self.learn == "assistant":
            learnt[: len(prompt)] = False
        return Tokens(ids, learnt, record.ends)

    def _begin(self, record: Record) -> list[int]:
        bos = self.tokenizer.bos_id
        return [bos] if self.tokenizer.add_bos and record.begins and bos is not None else []

    def _conversation(self, record: Record) -> Tokens:
        if self.template is None:
            raise record.error("a conversation, but the model has no chat template; give texts or another model")
        messages = record.messages or (
            {"role": "user", "content": record.prompt},
            {"role": "assistant", "content": record.text},
        )
        ids, spans = conversation(self.template, messages, record)
        if not spans and self.learn == "assistant":
            raise record.error("a conversation without a turn of the assistant: there is nothing to learn")
        learnt = np.full(len(ids), self.learn == "all")
        for span in spans:
            learnt[span] = True
        return Tokens(np.array(ids, dtype=np.int64), learnt)


def conversation(template: ChatTemplate, messages: Sequence[Message], record: Record) -> tuple[list[int], list[slice]]:
    """The ids of a whole conversation, and where in it the assistant speaks.

    A turn begins where the prompt ends that the model would be asked with, and ends with the last end token that it
    holds (what the template writes after that is no answer).

    Raises:
        InvalidRecord: the rendering of a turn changes with what follows it, so there is no telling it apart.
        CheckpointError, InvalidInput: the template refuses the messages.
    """
    text = template.render(messages, add_generation_prompt=False)
    ids = template.encode(messages, add_generation_prompt=False)
    ends = frozenset(template.tokenizer.eos_ids)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = messages[:index], messages[: index + 1]
        final = len(after) == len(messages)
        prompt = template.render(before, add_generation_prompt=True)
        whole = text if final else template.render(after, add_generation_prompt=False)
        if not (whole.startswith(prompt) and text.startswith(whole)):
            raise record.error(
                f"the chat template renders turn {index + 1} differently with what follows it (or without the prompt "
                "that comes before), so the assistant's tokens cannot be told from the others; make each answer a "
                "conversation of its own, or learn all tokens (learn='all')"
            )
        start = _common(ids, template.encode(before, add_generation_prompt=True))
        stop = len(ids) if final else _common(ids, template.encode(after, add_generation_prompt=False))
        last = next((at for at in range(stop - 1, start - 1, -1) if ids[at] in ends), stop - 1)
        spans.append(slice(start, last + 1))
    return ids, spans


def _common(ids: Sequence[int], start: Sequence[int]) -> int:
    """How many tokens two lists begin with together; a token that reaches over the seam is not among them."""
    return next((i for i, (a, b) in enumerate(zip(ids, start, strict=False)) if a != b), min(len(ids), len(start)))


def tokenise(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    *,
    learn: Learn = "assistant",
) -> Iterator[Tokens]:
    """The tokens of each record; see `Tokenisation` for the rules and errors."""
    rules = Tokenisation(tokenizer, template, learn)
    return map(rules, records)


def cut(documents: Iterable[Tokens], length: int) -> Iterator[Piece]:
    """Cut documents into pieces of at most ``length`` tokens; every token but a document's first is a target once.

    The last token of a piece is followed by the first of the next, so a cut loses no prediction. Documents in which
    nothing is learnt are left out, and pieces of them too.
    """
    ids, learnt = np.empty(0, dtype=np.int64), np.empty(0, dtype=bool)
    for document in documents:
        ids, learnt = np.concatenate([ids, document.ids]), np.concatenate([learnt, document.learnt])
        whole = len(ids) - 1 if document.ends else (len(ids) - 1) // length * length
        for start in range(0, whole, length):
            stop = min(start + length, whole)
            targets = np.where(learnt[start + 1 : stop + 1], ids[start + 1 : stop + 1], IGNORE)
            if (targets != IGNORE).any():
                yield Piece(ids[start:stop], targets)
        kept = len(ids) if document.ends else max(whole, 0)
        ids, learnt = ids[kept:], learnt[kept:]


class Corpus(Sequence[Piece]):
    """Pieces in a temporary file, in the order in which they came; any of them at once.

    Args:
        pieces: gone through once.
        vocab_size: decides how many bytes a token takes.
        show: draw a progress bar.

    Raises:
        InvalidInput: there is no piece: nothing in the data is learnt.
        DiskFull: the temporary folder is full.
    """

    def __init__(self, pieces: Iterable[Piece], vocab_size: int, *, show: bool = True) -> None:
        # one number is kept for IGNORE
        self._type = np.uint16 if vocab_size < 1 << 16 else np.uint32
        self._ignore = int(np.iinfo(self._type).max)
        lengths = []
        with tempfile.TemporaryFile() as file:
            with (
                disk_errors(Path(tempfile.gettempdir())),
                progress.bar(None, "tokenising", unit="tokens", show=show) as bar,
            ):
                for piece in pieces:
                    targets = np.where(piece.targets == IGNORE, self._ignore, piece.targets)
                    file.write(np.stack([piece.ids, targets]).astype(self._type).tobytes())
                    lengths.append(len(piece))
                    bar.advance(len(piece))
                file.flush()
            if not lengths:
                raise InvalidInput("nothing in the data is learnt: no record has two tokens, or none of them counts")
            self._stored = np.memmap(file, self._type, "r")
        self._starts = np.concatenate([[0], np.cumsum(lengths)])

    @property
    def tokens(self) -> int:
        """Tokens of all pieces together."""
        return int(self._starts[-1])

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> list[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | list[Piece]:
        """One piece, or several."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        start, stop = (int(self._starts[index % len(self) + i]) for i in (0, 1))
        ids, targets = self._stored[2 * start : 2 * stop].reshape(2, -1).astype(np.int64)
        return Piece(ids, np.where(targets == self._ignore, IGNORE, targets))


class Subset(Sequence[Piece]):
    """Some of the pieces of a corpus.

    Args:
        corpus: all of them.
        chosen: which.
    """

    def __init__(self, corpus: Sequence[Piece], chosen: Sequence[int]) -> None:
        self.corpus, self.chosen = corpus, chosen

    @property
    def tokens(self) -> int:
        """Tokens of these pieces together."""
        return sum(map(len, self))

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> list[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | list[Piece]:
        """One piece, or several."""
        if isinstance(index, slice):
            return [self.corpus[i] for i in self.chosen[index]]
        return self.corpus[self.chosen[index]]


def hold_out(corpus: Sequence[Piece], share: float, *, seed: int = 0) -> tuple[Subset, Subset]:
    """Divide a corpus at random: what to learn from, and what to measure on.

    Args:
        corpus: at least two pieces.
        share: of the pieces, that are held out; at least one is, and at least one is not.
        seed: of the choice.

    Raises:
        InvalidArgument: a share that is not between 0 and 1, or a corpus of one piece.

    >>> learnt, measured = hold_out([Piece(np.zeros(1, int), np.zeros(1, int))] * 10, 0.2)
    >>> len(learnt), len(measured)
    (8, 2)
    """
    if not 0 < share < 1:
        raise InvalidArgument(f"the share that is held out is {share}; it must be between 0 and 1")
    if len(corpus) < 2:
        raise InvalidArgument("nothing can be held out of a single piece of text; give more data, or shorter rows")
    order = np.random.default_rng(seed).permutation(len(corpus)).tolist()
    count = min(max(1, round(share * len(corpus))), len(corpus) - 1)
    return Subset(corpus, sorted(order[count:])), Subset(corpus, sorted(order[:count]))
