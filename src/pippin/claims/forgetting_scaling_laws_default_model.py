"""A real model fine-tuned on a novel: what it forgets of its own language, with and without old data among the new.

Notable here:
- the old data is what the model itself writes at temperature 1: its pretraining data, as far as anybody has it. On such
  text the loss before is least, so what is measured is forgetting, and nothing that is learnt can hide it
- every arm sees the same target tokens in the same order, so an arm with old data takes more steps
- a run's figures are those of the evaluation with the least target loss
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pippin.data.tokens import Piece
    from pippin.language import LanguageModel
    from pippin.train.forgetting import Measure

SEEDS = {"smoke": (0,), "laptop": (0,), "gpu": (0, 1, 2)}


@dataclass(frozen=True)
class Size:
    """A model of None is a small one of bytes, trained for a moment."""

    model: str | None
    target: int
    held_out: int
    written: int
    length: int
    rows: int
    evaluations: int
    shares: tuple[float, ...]


SIZES = {
    "smoke": Size(None, 512, 256, 256, 64, 2, 1, (0.0, 0.01, 0.05, 0.2)),
    "laptop": Size("smollm2-135m", 12_288, 1536, 3328, 64, 8, 2, (0.0, 0.01, 0.05, 0.2)),
    "gpu": Size("smollm2-135m", 262_144, 16_384, 131_072, 512, 8, 6, (0.0, 0.01, 0.05, 0.2)),
}
RANK, RATE = 16, 2e-3
PROMPT = 8
"""Tokens of other text that each piece of the model's own begins with."""


@claim(
    id="forgetting-scaling-laws-default-model",
    source="arXiv:2502.06042",
    paper="fine-tuning forgets pretraining data; a small share of it, injected, keeps most of what would be lost, at "
    "no cost in target loss",
    setting="SmolLM2-135M, an adapter of rank 16 on 12,288 tokens of Moby Dick, once, in rows of 64; old data: what "
    "the model writes at temperature 1; shares of 0, 1, 5 and 20 % (1 % is two rows); losses on 1,536 held-out tokens "
    "each, at the evaluation of least target loss; one seed",
    accept="without old data the loss on the model's own text rises by at least 0.01 nats per token, and the target "
    "loss falls; forgetting falls from 0 to 5 to 20 %; 5 % removes at least 10 % of it and 20 % at least 30 %; the "
    "target loss moves by at most 0.03 nats over the shares; what 1 % does is reported",
)
def run(scale: Scale) -> Evidence:
    """Four shares of old data, one model."""
    evidence, size = Evidence(), SIZES[scale.name]
    for seed in SEEDS[scale.name]:
        with tempfile.TemporaryDirectory() as folder:
            _compare(evidence, size, Path(folder), seed)
    forgotten = [evidence.mean(f"forgetting, {100 * share:g} %") for share in size.shares]
    targets = [evidence.mean(f"target loss, {100 * share:g} %") for share in size.shares]
    removed = {share: 1 - left / forgotten[0] for share, left in zip(size.shares, forgotten, strict=True)}
    for share in size.shares[1:]:
        evidence.add(f"forgetting removed by {100 * share:g} %", 100 * removed[share], unit="%")
    judged = [left for share, left in zip(size.shares, forgotten, strict=True) if share != 0.01]
    return evidence.accept(
        forgets=forgotten[0] >= 0.01,
        learns=max(targets) < evidence.mean("target loss, before"),
        falls=all(more > less for more, less in pairwise(judged)),
        removed=removed[0.05] >= 0.10 and removed[0.2] >= 0.30,
        target_kept=max(targets) - min(targets) <= 0.03,
    )


def _compare(evidence: Evidence, size: Size, folder: Path, seed: int) -> None:
    """Write the old data, then fine-tune an adapter for each share."""
    from pippin.train.forgetting import watch

    model, writer, book, prompts = _subjects(size, folder)
    pieces = [_pieces(model, [book[part]], size.length) for part in _parts(model, book, size)]
    own = _written(writer, prompts, size.held_out + size.written + size.length, size.length, seed)
    texts = [_pieces(model, some, size.length) for some in _divided(model, own, size.held_out)]
    losses = Losses(*(_measure(model, some, size) for some in (pieces[1], texts[1])))
    before = dict(watch(losses.target, losses.own, 1).measure(model.module))
    evidence.add("target loss, before", before["loss"], seed=seed, unit="nats/token")
    evidence.add("loss on its own text, before", before["pretraining loss"], seed=seed, unit="nats/token")
    for share in size.shares:
        after, seconds = _tune(model, pieces[0], texts[0], losses, share, size, seed)
        name = f"{100 * share:g} %"
        evidence.add(f"target loss, {name}", after["loss"], seed=seed, unit="nats/token")
        gone = after["pretraining loss"] - before["pretraining loss"]
        evidence.add(f"forgetting, {name}", gone, seed=seed, unit="nats/token")
        evidence.add(f"seconds of training, {name}", seconds, seed=seed, unit="s")


class Losses(NamedTuple):
    """What measures a model on held-out target text, and on held-out text of its own."""

    target: Measure
    own: Measure


def _measure(model: LanguageModel, pieces: list[Piece], size: Size) -> Measure:
    from pippin.data.streams import packed
    from pippin.language.objectives import held_out

    return held_out(list(packed(pieces, model.tokenizer, epochs=1, length=size.length, rows=8)))


def _subjects(size: Size, folder: Path) -> tuple[LanguageModel, LanguageModel, str, list[str]]:
    """The model to be trained, the same as it answers, the target text, and beginnings for what it writes."""
    import pippin
    from pippin.claims import _byte_text as small
    from pippin.core import store

    if size.model is not None:
        book = (store.pull("gutenberg", show_progress=False) / "melville-moby_dick.txt").read_text("utf-8", "replace")
        from pippin.data.records import read_records

        other = store.pull("wikitext-2", show_progress=False) / "test.raw.gz"
        lines = [record.text for record in read_records(other)]
        paragraphs = [line for text in lines for line in text.splitlines() if len(line) > 200]
        dense, packed = (pippin.load(size.model, device="cpu", dtype="float32", pack=pack) for pack in (False, True))
        return dense, packed, book[30_000:], paragraphs
    module = small.train_bytes(small.byte_decoder(small.byte_config(layers=1), seed=0), steps=8, seed=0, rows=2)
    small.byte_model(module).save(folder / "model")
    text = bytes(i for i in small.byte_text().held_out[:20_000].tolist() if i < small.END).decode("utf-8", "replace")
    dense, packed = (pippin.load(folder / "model", device="cpu", pack=pack) for pack in (False, True))
    return dense, packed, text.upper(), text.splitlines()


def _parts(model: LanguageModel, book: str, size: Size) -> list[slice]:
    """Where the tokens to be learnt stand in the target text, and behind them those that are held out."""
    ids = model.tokenizer.encode(book[: 8 * (size.target + size.held_out)])
    first = len(model.tokenizer.decode(ids[: size.target]))
    both = len(model.tokenizer.decode(ids[: size.target + size.held_out]))
    return [slice(0, first), slice(first, both)]


def _written(model: LanguageModel, prompts: Sequence[str], tokens: int, length: int, seed: int) -> list[str]:
    """Texts of the model's own, together of at least so many tokens, several at a time."""
    from concurrent.futures import ThreadPoolExecutor

    from pippin.engine import Engine, Request, SamplingOptions, Token

    count = -(-tokens // (length - PROMPT))
    stops = dict.fromkeys(model.tokenizer.eos_ids, -100.0)
    starts = [model.tokenizer.encode(prompts[place % len(prompts)])[:PROMPT] or [0] for place in range(count)]
    with Engine(model, slots=8, cache_tokens=16 * length) as engine, ThreadPoolExecutor(8) as pool:

        def write(place: int) -> str:
            options = SamplingOptions(
                temperature=1.0, max_tokens=length - PROMPT, seed=1000 * seed + place, logit_bias=stops
            )
            answer = engine.stream(Request(starts[place], options))
            ids = [*starts[place], *(event.id for event in answer if isinstance(event, Token))]
            return model.tokenizer.decode(ids)

        return list(pool.map(write, range(count)))


def _divided(model: LanguageModel, texts: list[str], held_out: int) -> tuple[list[str], list[str]]:
    """The model's texts for training, and those that forgetting is measured on."""
    counts = [len(model.tokenizer.encode(text)) for text in texts]
    place = next(i for i in range(1, len(texts)) if sum(counts[:i]) >= held_out or i == len(texts) - 1)
    return texts[place:], texts[:place]


def _pieces(model: LanguageModel, texts: list[str], length: int) -> list[Piece]:
    """Texts as rows of at most so many tokens."""
    from pippin.data.records import Record
    from pippin.data.tokens import cut, tokenise

    return [*cut(tokenise([Record("claim", text=text) for text in texts], model.tokenizer), length)]


def _tune(
    model: LanguageModel, target: list[Piece], own: list[Piece], losses: Losses, share: float, size: Size, seed: int
) -> tuple[dict[str, float], float]:
    """An adapter, trained once through the target text: losses at its best evaluation, and seconds."""
    from pippin.data.injection import Injected
    from pippin.data.ordering import Mapped, Shuffled
    from pippin.data.streams import Packed
    from pippin.language.objectives import NextToken
    from pippin.shape.lora import LowRankModel
    from pippin.train import AdamW, Cosine, Trainer
    from pippin.train.forgetting import watch

    adapted = LowRankModel(model.module, rank=RANK, alpha=RANK, seed=seed)
    new: Any = Mapped(Shuffled(target, 1, seed=seed), iter)
    past: Any = Mapped(Shuffled(own, 1, seed=seed), iter)
    mixed: Any = Injected(new, past, share, seed=seed, size=len)
    steps = max(size.evaluations, round(sum(map(len, target)) / (1 - share) / (size.length * size.rows)))
    trainer = Trainer(
        adapted,
        NextToken(),
        Packed(mixed, size.length, size.rows, seed=seed),
        steps=steps,
        optimiser=AdamW(lr=RATE, weight_decay=0.0),
        schedule=Cosine(warmup=0.1),
        evaluation=watch(losses.target, losses.own, max(1, steps // size.evaluations)),
        seed=seed,
        show=False,
    )
    training = trainer.fit()
    assert trainer.best is not None
    return dict(training.evaluations)[int(trainer.best["step"])], training.seconds
