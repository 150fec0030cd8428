"""Tokenized training data: pieces of token ids, with targets where the loss counts.

Notable here:
- in a conversation only the assistant's turns count in the loss, from the first token after the prompt that the model
  would be given, up to the token that ends its turn; the turn is found by rendering the template up to before it and up
  to after it, not by parsing the template
- a template whose rendering of a turn depends on what follows raises an error
- tokens are stored in a temporary, memory-mapped file of 2 or 4 bytes a token, so that an epoch needs no tokenization
  and hardly any memory
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
from pippin.core.checks import OpenFraction, checked
from pippin.core.errors import CheckpointError, InvalidArgument, InvalidInput, InvalidRecord
from pippin.core.files import disk_errors
from pippin.data.records import TrainingRecord
from pippin.data.text.chat_template import ChatTemplate, Message
from pippin.data.text.tokenizer import Tokenizer
from pippin.data.token_batches import IGNORE

LossOn = Literal["assistant", "all"]


@dataclass(frozen=True, eq=False)
class Tokens:
    """A document, or a block of one, as token ids.

    Args:
        ids: the tokens.
        learned: which of them count in the loss.
        ends: False if the next one continues it.
    """

    ids: Int[np.ndarray, tokens]
    learned: Bool[np.ndarray, tokens]
    ends: bool = True


@dataclass(frozen=True, eq=False)
class TokenizedPiece:
    """Part of a document that fits into a row: ids, and the token that should follow each (or `IGNORE`)."""

    ids: Int[np.ndarray, tokens]
    targets: Int[np.ndarray, tokens]

    def __len__(self) -> int:
        return len(self.ids)


class Tokenization:
    """Rules for tokenizing records.

    A text gets the tokenizer's begin token, if it uses one, and an end token; a completion gets an end token. With a
    template, a prompt and its completion are a conversation of two turns.

    Args:
        tokenizer: the model's tokenizer.
        template: the model's chat template; None for a base model.
        loss_on: "assistant" takes the loss on texts, completions and the assistant's turns; "all" also on
            prompts and all turns.
    """

    @checked
    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None = None, loss_on: LossOn = "assistant"
    ) -> None:
        self.tokenizer, self.template, self.loss_on = tokenizer, template, loss_on

    def __call__(self, record: TrainingRecord) -> Tokens:
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
        learned = np.ones(len(ids), dtype=bool)
        if self.loss_on == "assistant":
            learned[: len(prompt)] = False
        return Tokens(ids, learned, record.ends)

    def _begin(self, record: TrainingRecord) -> list[int]:
        bos = self.tokenizer.bos_id
        return [bos] if self.tokenizer.add_bos and record.begins and bos is not None else []

    def _conversation(self, record: TrainingRecord) -> Tokens:
        if self.template is None:
            raise record.error("a conversation, but the model has no chat template; give texts or another model")
        messages = record.messages or (
            {"role": "user", "content": record.prompt},
            {"role": "assistant", "content": record.text},
        )
        ids, spans = conversation(self.template, messages, record)
        if not spans and self.loss_on == "assistant":
            raise record.error("a conversation without a turn of the assistant: there is nothing to learn")
        learned = np.full(len(ids), self.loss_on == "all")
        for span in spans:
            learned[span] = True
        return Tokens(np.array(ids, dtype=np.int64), learned)


def conversation(
    template: ChatTemplate, messages: Sequence[Message], record: TrainingRecord
) -> tuple[list[int], list[slice]]:
    """The ids of a whole conversation, and a mask of the assistant's turns in it.

    A turn begins at the end of the prompt that the model would be given, and ends with its last end token (what the
    template writes after that is not part of the answer).

    Raises:
        InvalidRecord: the rendering of a turn depends on what follows it, so it cannot be separated.
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
                "conversation of its own, or take the loss of all tokens (loss_on='all')"
            )
        start = _common(ids, template.encode(before, add_generation_prompt=True))
        stop = len(ids) if final else _common(ids, template.encode(after, add_generation_prompt=False))
        last = next((at for at in range(stop - 1, start - 1, -1) if ids[at] in ends), stop - 1)
        spans.append(slice(start, last + 1))
    return ids, spans


def _common(ids: Sequence[int], start: Sequence[int]) -> int:
    """The length of the common prefix of two lists, without a token that crosses its end."""
    return next((i for i, (a, b) in enumerate(zip(ids, start, strict=False)) if a != b), min(len(ids), len(start)))


def tokenize(
    records: Iterable[TrainingRecord],
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    *,
    loss_on: LossOn = "assistant",
) -> Iterator[Tokens]:
    """The tokens of each record; see `Tokenization` for the rules and errors."""
    rules = Tokenization(tokenizer, template, loss_on)
    return map(rules, records)


def cut(documents: Iterable[Tokens], length: int) -> Iterator[TokenizedPiece]:
    """Cut documents into pieces of at most ``length`` tokens; every token but a document's first is a target once.

    The last token of a piece is followed by the first of the next, so a cut loses no prediction. Documents and pieces
    in which no token counts in the loss are left out.
    """
    ids, learned = np.empty(0, dtype=np.int64), np.empty(0, dtype=bool)
    for document in documents:
        ids, learned = np.concatenate([ids, document.ids]), np.concatenate([learned, document.learned])
        whole = len(ids) - 1 if document.ends else (len(ids) - 1) // length * length
        for start in range(0, whole, length):
            stop = min(start + length, whole)
            targets = np.where(learned[start + 1 : stop + 1], ids[start + 1 : stop + 1], IGNORE)
            if (targets != IGNORE).any():
                yield TokenizedPiece(ids[start:stop], targets)
        kept = len(ids) if document.ends else max(whole, 0)
        ids, learned = ids[kept:], learned[kept:]


class Corpus(Sequence[TokenizedPiece]):
    """Pieces in a temporary file, in their original order, with random access.

    Args:
        pieces: read once.
        vocab_size: determines the bytes per token.
        show_progress: show a progress bar.

    Raises:
        InvalidInput: there is no piece, because no token of the data counts in the loss.
        DiskFull: the temporary folder is full.
    """

    def __init__(self, pieces: Iterable[TokenizedPiece], vocab_size: int, *, show_progress: bool = True) -> None:
        # one number is reserved for IGNORE
        self._type = np.uint16 if vocab_size < 1 << 16 else np.uint32
        self._ignore = int(np.iinfo(self._type).max)
        lengths = []
        with tempfile.TemporaryFile() as file:
            with (
                disk_errors(Path(tempfile.gettempdir())),
                progress.bar(None, "tokenizing", unit="tokens", show_progress=show_progress) as bar,
            ):
                for piece in pieces:
                    targets = np.where(piece.targets == IGNORE, self._ignore, piece.targets)
                    file.write(np.stack([piece.ids, targets]).astype(self._type).tobytes())
                    lengths.append(len(piece))
                    bar.advance(len(piece))
                file.flush()
            if not lengths:
                raise InvalidInput("nothing in the data is learned: no record has two tokens, or none of them counts")
            self._stored = np.memmap(file, self._type, "r")
        self._starts = np.concatenate([[0], np.cumsum(lengths)])

    @property
    def tokens(self) -> int:
        """Tokens of all pieces together."""
        return int(self._starts[-1])

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> TokenizedPiece: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenizedPiece]: ...
    def __getitem__(self, index: int | slice) -> TokenizedPiece | list[TokenizedPiece]:
        """One piece, or several."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        start, stop = (int(self._starts[index % len(self) + i]) for i in (0, 1))
        ids, targets = self._stored[2 * start : 2 * stop].reshape(2, -1).astype(np.int64)
        return TokenizedPiece(ids, np.where(targets == self._ignore, IGNORE, targets))


class CorpusSubset(Sequence[TokenizedPiece]):
    """A subset of the pieces of a corpus.

    Args:
        corpus: the corpus.
        chosen: indices of the pieces.
    """

    def __init__(self, corpus: Sequence[TokenizedPiece], chosen: Sequence[int]) -> None:
        self.corpus, self.chosen = corpus, chosen

    @property
    def tokens(self) -> int:
        """Tokens of these pieces together."""
        return sum(map(len, self))

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> TokenizedPiece: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenizedPiece]: ...
    def __getitem__(self, index: int | slice) -> TokenizedPiece | list[TokenizedPiece]:
        """One piece, or several."""
        if isinstance(index, slice):
            return [self.corpus[i] for i in self.chosen[index]]
        return self.corpus[self.chosen[index]]


@checked
def hold_out(
    corpus: Sequence[TokenizedPiece], share: OpenFraction, *, seed: int = 0
) -> tuple[CorpusSubset, CorpusSubset]:
    """Split a corpus at random into training and held-out pieces.

    Args:
        corpus: at least two pieces.
        share: share of the pieces that is held out; at least one is, and at least one is not.
        seed: seed of the split.

    Raises:
        InvalidArgument: a corpus of one piece.

    >>> learned, measured = hold_out([TokenizedPiece(np.zeros(1, int), np.zeros(1, int))] * 10, 0.2)
    >>> len(learned), len(measured)
    (8, 2)
    """
    if len(corpus) < 2:
        raise InvalidArgument("nothing can be held out of a single piece of text; give more data, or shorter rows")
    order = np.random.default_rng(seed).permutation(len(corpus)).tolist()
    count = min(max(1, round(share * len(corpus))), len(corpus) - 1)
    return CorpusSubset(corpus, sorted(order[count:])), CorpusSubset(corpus, sorted(order[:count]))
