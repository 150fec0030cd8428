"""`pippin train soup`: one training run, then a small model for each mixture of domains.

Notable here:
- domains are found in the data, by k-means over its documents; or each --data is one
- long documents are cut into passages, so that one large file is no single domain
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli import options, terminal, training
from pippin.core.errors import InvalidArgument, InvalidInput

if TYPE_CHECKING:
    from pippin.data.records import Record
    from pippin.data.tokens import Corpus, Subset
    from pippin.language.domains import Domains
    from pippin.language.load import LanguageModel

PASSAGE = 4000
"""Characters of a passage, about: it ends with a line where there are lines."""
_SOUP = "Soup"


@training.planned(length=256, lr=1e-3)
def soup(
    model: Annotated[
        str,
        typer.Argument(
            help="Catalogue name, hub repository, folder or .gguf file.", autocompletion=options.complete_model
        ),
    ],
    plan: training.Plan,
    domains: Annotated[
        int | None,
        typer.Option(help="Domains to be found in the data; without it, each --data is one.", rich_help_panel=_SOUP),
    ] = None,
    experts: Annotated[int, typer.Option(help="Each as large as the model.", rich_help_panel=_SOUP)] = 8,
    rank: Annotated[
        int | None, typer.Option(help="Of the experts of matrices; dense without it.", rich_help_panel=_SOUP)
    ] = None,
    shared: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Parameters without experts: embed_tokens, 'layers.*.mlp', …; may be repeated.",
            rich_help_panel=_SOUP,
        ),
    ] = None,
    encoder: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What tells documents apart: n-grams, or a sentence encoder such as all-minilm-l6-v2.",
            rich_help_panel=_SOUP,
        ),
    ] = "n-grams",
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Begin with random weights of another form: nano, small or base."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin with random weights; only tokenizer and form are the model's.")
    ] = False,
    device: options.Device = None,
    as_json: training.AsJson = False,
) -> None:
    """Train shared weights and experts on mixtures of domains; `pippin shape specialize` makes the small models.

    pippin train soup smollm2-135m --preset nano --data notes --domains 16 --experts 8 --out soup
    pippin shape specialize soup --documents mine.txt --out specialist
    """
    from pippin.cli.train_full import model_of
    from pippin.language.objectives import NextToken
    from pippin.language.soup import SoupOfExperts
    from pippin.language.soup_training import DomainBatches, MetaSampler, OverMixtures, joined, specialised

    if domains is not None and domains < 1:
        raise InvalidArgument(f"--domains must be at least 1, got {domains}")
    show = not as_json
    base = model_of(model, device, fresh=fresh, preset=preset, seed=plan.seed)
    if plan.length > base.context_size:
        raise InvalidArgument(f"--length is {plan.length}; {base.name} was made for {base.context_size} tokens")
    found, parts = find(plan, domains, encoder, show=show)
    learnt, held = divide(plan, base, found, parts)
    tokens = [0 if part is None else part.tokens for part in learnt]
    whole = [count / sum(tokens) for count in tokens]
    sampler = MetaSampler(len(found), tuple(n for n in (1, 2, 4, 8) if n <= sum(n > 0 for n in tokens)), whole)
    # a trained model begins as itself
    scale = 0.3 if fresh or preset is not None else 0.0
    mixed = SoupOfExperts(base, experts, found, rank=rank, shared=shared or (), scale=scale, seed=plan.seed)
    mixed.to(base.device)
    parameters = sum(p.numel() for p in mixed.parameters())
    step = plan.length * plan.rows * plan.accumulate
    steps = plan.steps or max(1, round(plan.epochs * sum(tokens) / step))
    if show:
        _say(base, mixed.domains, whole, parameters, steps)
    batches = DomainBatches(
        [None if part is None else _rows(part, base, plan, 1, plan.seed + i) for i, part in enumerate(learnt)],
        sampler,
        plan.rows,
        collate=joined,
        seed=plan.seed,
    )
    measure = None
    if any(held):
        one = [[] if part is None else list(_rows(part, base, plan, plan.rows, 0, epochs=1)) for part in held]
        measure = specialised(one, whole)
    outcome = training.run(
        plan,
        mixed,
        training.Batches(batches, steps, None),  # type: ignore[arg-type]
        title=f"{base.name}, a soup of {experts} experts",
        objective=OverMixtures(NextToken()),
        measure=measure,
        show=show,
    )
    mixed.save(plan.out)
    shares = dict(zip(found.names, whole, strict=True))
    facts = {"model": base.name, "parameters": parameters, "experts": experts, "rank": rank, "domains": shares}
    training.conclude(plan, outcome, as_json=as_json, facts=facts)
    if show:
        terminal.note(f"a small model of it: pippin shape specialize {plan.out} --documents FILE --out FOLDER")


def find(plan: training.Plan, count: int | None, encoder: str, *, show: bool) -> tuple[Domains, list[list[Record]]]:
    """The domains of the data of a plan, and the passages of each.

    Raises:
        InvalidArgument: fewer different passages than domains, two data of one name, or a path that does not exist.
        InvalidRecord: a file that cannot be read.
    """
    from pippin.data.records import read_records
    from pippin.language.domains import Domains, texts_of

    if count is None:
        named: dict[str, list[Record]] = {}
        for path in plan.data:
            if path.stem in named:
                raise InvalidArgument(f"two of --data are called {path.stem!r}, and each is a domain; rename one")
            named[path.stem] = passages(read_records([path], fields=plan.names))
        texts = {name: [text for _, text in texts_of(records)] for name, records in named.items()}
        return Domains.given(texts, embedding=encoder), list(named.values())
    records = passages(read_records(list(plan.data), fields=plan.names))
    written = texts_of(records)
    if show:
        terminal.note(f"sorting {len(written):,} passages into {count} domains")
    labels = [Path(record.path).name for record, _ in written]
    domains, nearest = Domains.cluster(
        [text for _, text in written], count, embedding=encoder, seed=plan.seed, labels=labels
    )
    parts: list[list[Record]] = [[] for _ in range(count)]
    for (record, _), index in zip(written, nearest.tolist(), strict=True):
        parts[index].append(record)
    return domains, parts


def passages(records: Iterable[Record]) -> list[Record]:
    """Records with long texts cut at ends of lines.

    >>> from pippin.data.records import Record
    >>> [len(part.text) for part in passages([Record("a.txt", text="0123456789\\n" * 500)])]
    [4004, 1496]
    """
    cut: list[Record] = []
    for record in records:
        if record.messages or record.prompt is not None or len(record.text) <= PASSAGE:
            cut.append(record)
            continue
        start, text = 0, record.text
        while start < len(text):
            stop = len(text) if len(text) - start <= PASSAGE else text.find("\n", start + PASSAGE - 1) + 1
            stop = stop or min(start + PASSAGE, len(text))
            last = stop == len(text)
            part = replace(record, text=text[start:stop], begins=record.begins and not start, ends=record.ends and last)
            cut.append(part)
            start = stop
    return cut


def divide(
    plan: training.Plan, model: LanguageModel, domains: Domains, parts: Sequence[Sequence[Record]]
) -> tuple[list[Corpus | Subset | None], list[Corpus | Subset | None]]:
    """The tokens of each domain, to learn and to measure; None where a domain has none.

    Raises:
        InvalidInput: nothing in the data is learnt.
    """
    import torch

    from pippin.data.records import read_records
    from pippin.data.tokens import hold_out
    from pippin.language.domains import texts_of

    learnt: list[Any] = [_tokens(plan, model, part) for part in parts]
    if not any(part is not None for part in learnt):
        raise InvalidInput("nothing in the data is learnt: no record has two tokens, or none of them counts")
    held: list[Any] = [None] * len(parts)
    share = training.share_of(plan.held_out)
    if share is None:
        written = texts_of(passages(read_records([Path(plan.held_out)], fields=plan.names)))
        nearest = [int(torch.argmax(domains.weights([text]))) for _, text in written]
        for index in range(len(parts)):
            held[index] = _tokens(plan, model, [r for (r, _), at in zip(written, nearest, strict=True) if at == index])
    elif share > 0:
        for index, part in enumerate(learnt):
            if part is not None and len(part) > 1:
                learnt[index], held[index] = hold_out(part, share, seed=plan.seed)
    return learnt, held


def _tokens(plan: training.Plan, model: LanguageModel, records: Sequence[Record]) -> Corpus | None:
    """The pieces of some passages; each is a document of its own, as those that surround it may be of other domains."""
    from pippin.data.tokens import Corpus, Tokenisation, cut

    rules = Tokenisation(model.tokenizer, model.template, plan.learn)  # type: ignore[arg-type]
    pieces = list(cut([replace(rules(record), ends=True) for record in records], plan.length))
    return Corpus(pieces, model.tokenizer.vocab_size, show=False) if pieces else None


def _rows(
    pieces: Any, model: LanguageModel, plan: training.Plan, rows: int, seed: int, epochs: int | None = None
) -> Any:
    from pippin.data import streams

    return streams.packed(pieces, model.tokenizer, length=plan.length, rows=rows, seed=seed, epochs=epochs)


def _say(model: LanguageModel, domains: Domains, whole: Sequence[float], parameters: int, steps: int) -> None:
    """What is about to be trained."""
    for name, share in zip(domains.names, whole, strict=True):
        terminal.note(f"  domain {name}: {share:.1%} of the tokens")
    terminal.note(
        f"{model.name}: {parameters / 1e6:.1f} million parameters with all experts, about "
        f"{16 * parameters / 1e9:.2g} GB in training; {steps} steps"
    )
