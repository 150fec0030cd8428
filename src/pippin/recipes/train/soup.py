"""Soup of experts: one training run over many domains, from which a model for any mixture of them is computed.

Notable here:
- domains are clusters of the documents (k-means), or each file of ``data`` is one domain
- long documents are split into passages, so that one large file does not become one domain
- `pippin.recipes.shape.specialize` computes the small model for a mixture
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pippin.core import progress
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.core.options import Option
from pippin.recipes import options
from pippin.recipes.options import paths
from pippin.recipes.train.full import load_for_training
from pippin.recipes.train.text_training import (
    TextTrainingConfig,
    TextTrainingResult,
    TrainingBatches,
    check_max_length,
    train,
)

if TYPE_CHECKING:
    from pippin.data.corpus import Corpus, CorpusSubset
    from pippin.data.records import TrainingRecord
    from pippin.language.language_model import LanguageModel
    from pippin.language.methods.soup_of_experts.domains import Domains

PASSAGE = 4000
"""Approximate number of characters of a passage; it ends at a line break where there is one."""
_SOUP = "Soup"


@checked
@dataclass(frozen=True, kw_only=True)
class Config(TextTrainingConfig):
    """Settings of a run."""

    max_length: options.MaxLength = 256
    lr: options.LearningRate = 1e-3
    domains: Annotated[
        PositiveInt | None, Option("Domains to find in the data; without it, each file of the data is one.", _SOUP)
    ] = None
    experts: Annotated[PositiveInt, Option("Number of experts, each as large as the model.", _SOUP)] = 8
    rank: Annotated[PositiveInt | None, Option("Rank of the experts' matrices; full without it.", _SOUP)] = None
    shared: Annotated[
        tuple[str, ...],
        Option("Parameters without experts: embed_tokens, 'layers.*.mlp', ...; may be repeated.", _SOUP, "NAME"),
    ] = ()
    encoder: Annotated[
        str,
        Option("What tells documents apart: n-grams, or a sentence encoder such as all-minilm-l6-v2.", _SOUP, "NAME"),
    ] = "n-grams"
    fresh: options.Fresh = False
    preset: options.Preset = None


@dataclass(frozen=True, kw_only=True)
class SoupResult(TextTrainingResult):
    """The result of a run.

    Attributes:
        experts: number of experts.
        rank: rank of their matrices; None for full rank.
        domains: fraction of the tokens by domain name.
    """

    experts: int
    rank: int | None
    domains: Mapping[str, float]


def run(config: Config, *, show_progress: bool = True) -> SoupResult:
    """Train shared weights and experts on mixtures of domains, and save the soup.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: settings that are incompatible with each other, the model or the data.
        ModelNotFound, InvalidRecord, InvalidInput: the model or the data cannot be read.
        TrainingError: the loss is not finite, or the checkpoints in the folder are of another run.
    """
    from pippin.language.methods.soup_of_experts.loss import SoupObjective, specialist_loss
    from pippin.language.methods.soup_of_experts.mixtures import DomainBatches, MetaSampler, concatenate
    from pippin.language.methods.soup_of_experts.model import SoupOfExperts
    from pippin.language.objectives import NextToken

    options.refuse_existing_run(config.out, config.resume)
    base = load_for_training(config.model, config.device, fresh=config.fresh, preset=config.preset, seed=config.seed)
    check_max_length(config, base)
    domains, parts = _find_domains(config, show_progress=show_progress)
    training, held_out = _divide(config, base, domains, parts)
    tokens = [0 if part is None else part.tokens for part in training]
    shares = [count / sum(tokens) for count in tokens]
    sampler = MetaSampler(len(domains), tuple(n for n in (1, 2, 4, 8) if n <= sum(n > 0 for n in tokens)), shares)
    # experts of a trained model are initialized to zero, so that every mixture starts as the model itself
    scale = 0.3 if config.fresh or config.preset is not None else 0.0
    soup = SoupOfExperts(
        base, config.experts, domains, rank=config.rank, shared=config.shared, init_scale=scale, seed=config.seed
    )
    soup.to(base.device)
    parameters = sum(p.numel() for p in soup.parameters())
    tokens_per_step = config.max_length * config.batch_size * config.gradient_accumulation_steps
    steps = config.steps or max(1, round(config.epochs * sum(tokens) / tokens_per_step))
    by_name = dict(zip(domains.names, shares, strict=True))
    for name, share in by_name.items():
        progress.note(f"  domain {name}: {share:.1%} of the tokens", show_progress=show_progress)
    progress.note(
        f"{base.name}: {parameters / 1e6:.1f} million parameters with all experts, about "
        f"{16 * parameters / 1e9:.2g} GB in training; {steps} steps",
        show_progress=show_progress,
    )
    batches = DomainBatches(
        [None if part is None else _packed(part, base, config, 1, config.seed + i) for i, part in enumerate(training)],
        sampler,
        config.batch_size,
        collate=concatenate,
        seed=config.seed,
    )
    measure = None
    if any(held_out):
        one = [[] if part is None else list(_packed(part, base, config, config.batch_size, 0, 1)) for part in held_out]
        measure = specialist_loss(one, shares)
    outcome = train(
        config,
        soup,
        TrainingBatches(batches, steps, None),  # type: ignore[arg-type]  # batches of mixtures
        title=f"{base.name}, a soup of {config.experts} experts",
        objective=SoupObjective(NextToken()),
        measure=measure,
        show_progress=show_progress,
    )
    soup.save(config.out_path)
    return SoupResult(
        model=base.name,
        out=config.out_path,
        parameters=parameters,
        experts=config.experts,
        rank=config.rank,
        domains=by_name,
        **vars(outcome),
    )


def _find_domains(config: Config, *, show_progress: bool) -> tuple[Domains, list[list[TrainingRecord]]]:
    """Determine the domains of the data, and the passages of each.

    Raises:
        InvalidArgument: fewer different passages than domains, two files of one name, or a path that does not exist.
        InvalidRecord: a file that cannot be read.
    """
    from pippin.data.records import read_records
    from pippin.language.methods.soup_of_experts.domains import Domains, texts_of

    if config.domains is None:
        named: dict[str, list[TrainingRecord]] = {}
        for path in paths(config.data):
            if path.stem in named:
                raise InvalidArgument(
                    f"two files of the data are called {path.stem!r}, and each is a domain; rename one"
                )
            named[path.stem] = passages(read_records([path], fields=config.fields))
        texts = {name: [text for _, text in texts_of(records)] for name, records in named.items()}
        return Domains.given(texts, embedding=config.encoder), list(named.values())
    records = passages(read_records(paths(config.data), fields=config.fields))
    written = texts_of(records)
    progress.note(f"sorting {len(written):,} passages into {config.domains} domains", show_progress=show_progress)
    domains, nearest = Domains.cluster(
        [text for _, text in written],
        config.domains,
        embedding=config.encoder,
        seed=config.seed,
        labels=[Path(record.path).name for record, _ in written],
    )
    parts: list[list[TrainingRecord]] = [[] for _ in range(config.domains)]
    for (record, _), index in zip(written, nearest.tolist(), strict=True):
        parts[index].append(record)
    return domains, parts


def passages(records: Iterable[TrainingRecord]) -> list[TrainingRecord]:
    """ExampleSplit long texts into passages at line breaks.

    >>> from pippin.data.records import TrainingRecord
    >>> [len(part.text) for part in passages([TrainingRecord("a.txt", text="0123456789\\n" * 500)])]
    [4004, 1496]
    """
    cut: list[TrainingRecord] = []
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


def _divide(
    config: Config, model: LanguageModel, domains: Domains, parts: Sequence[Sequence[TrainingRecord]]
) -> tuple[list[Corpus | CorpusSubset | None], list[Corpus | CorpusSubset | None]]:
    """Tokenize each domain and split it into training and held-out data; None where a domain has no tokens.

    Raises:
        InvalidInput: no token of the data counts in the loss.
    """
    import torch

    from pippin.data.corpus import hold_out
    from pippin.data.records import read_records
    from pippin.language.methods.soup_of_experts.domains import texts_of

    training: list[Any] = [_tokens(config, model, part) for part in parts]
    if not any(part is not None for part in training):
        raise InvalidInput("no token of the data counts in the loss: give records with at least two tokens")
    held_out: list[Any] = [None] * len(parts)
    if isinstance(config.held_out, float | int):
        for index, part in enumerate(training):
            if config.held_out > 0 and part is not None and len(part) > 1:
                training[index], held_out[index] = hold_out(part, config.held_out, seed=config.seed)
        return training, held_out
    written = texts_of(passages(read_records([config.held_out], fields=config.fields)))
    nearest = [int(torch.argmax(domains.weights([text]))) for _, text in written]
    for index in range(len(parts)):
        held_out[index] = _tokens(
            config, model, [r for (r, _), at in zip(written, nearest, strict=True) if at == index]
        )
    return training, held_out


def _tokens(config: Config, model: LanguageModel, records: Sequence[TrainingRecord]) -> Corpus | None:
    """Tokenize passages, each as a separate document, since its neighbors may belong to other domains."""
    from pippin.data.corpus import Corpus, Tokenization, cut

    tokenization = Tokenization(model.tokenizer, model.template, config.loss_on)
    pieces = list(cut([replace(tokenization(record), ends=True) for record in records], config.max_length))
    return Corpus(pieces, model.tokenizer.vocab_size, show_progress=False) if pieces else None


def _packed(
    pieces: Any, model: LanguageModel, config: Config, batch_size: int, seed: int, epochs: int | None = None
) -> Any:
    from pippin.data import packing

    return packing.packed(
        pieces, model.tokenizer, max_length=config.max_length, batch_size=batch_size, seed=seed, epochs=epochs
    )
