"""One soup of experts against one model for everything and against a model for each domain, at equal steps.

Notable here:
- in a synthetic world of 32 related domains, what a domain asks for is known; the generic model can guess the domain,
  too, as each shifts its inputs a little
- weights come from domain numbers, then from clusters that k-means found among documents without labels
- with text, every weight is a histogram of some of a target's files, and its other files are read
"""

from __future__ import annotations

import copy
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from pippin.claims import Condition, Evidence, Scale, claim

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from pippin.claims.worlds.related_domains import RelatedDomains
    from pippin.language.methods.soup_of_experts.model import SoupOfExperts


class _Size(NamedTuple):
    """Steps and experts in the synthetic world, then training steps and bytes of text."""

    steps: int
    experts: tuple[int, ...]
    text_steps: int
    text_files: int
    held_out: int


SIZES = Scale.choose(
    smoke=_Size(2, (1, 8), 1, 12, 512),
    laptop=_Size(3000, (1, 8), 300, 400, 16_384),
    gpu=_Size(3000, (1, 4, 8, 16), 6000, 4000, 131_072),
)
RATES = Scale.choose(smoke=(6e-3,), laptop=(2e-3, 6e-3, 2e-2))
TUNING = 75
"""Steps of fine-tuning for each target, taken from those of the generic model."""
TEXT_DOMAINS, TEXT_EXPERTS, TEXT_RATE = 12, 6, 3e-3


@claim(
    id="soup-of-experts",
    source="arXiv:2502.01804",
    headline="one pretraining of shared parameters, experts and a router gives, for any weights of domains, a "
    "specialist of the size and cost of one model, better than a generic model, cheaper than one pretraining for each "
    "target",
    setting="a synthetic world of 32 related domains (16 inputs shifted by 0.35 for each domain, 8 classes, labels by "
    "5 shared factors; base 16-24-24-8; 3,000 steps of 128 for every method in total, mixtures of 3 domains; each "
    "method at the best of three learning rates on validation data) and byte models (4 layers, width 64) on files of "
    "Python's library and of its packages in 12 clusters of k-means, 4 kinds of files as targets",
    method="soup",
    negative_controls=("generic", "models for each", "generic, fine-tuned", "wrong weights"),
    conditions=[
        Condition(
            "better than generic",
            "below the generic model of equal steps on own domains, on 20 unseen mixtures of 3 and on the text of "
            "targets: 95 % interval of the paired difference below 0",
            lambda e, arm: all(
                e.paired(what, arm, "generic").high < 0 for what in ("own domain", "unseen mixtures", "text")
            ),
            headline=True,
        ),
        Condition(
            "cheaper than one each",
            "at equal total steps below a model trained for each target, and below the generic model fine-tuned for "
            "each, on own domains and on text: 95 % interval of the paired difference below 0",
            lambda e, arm: all(
                e.paired(what, arm, other).high < 0
                for what in ("own domain", "text")
                for other in ("models for each", "generic, fine-tuned")
            ),
            headline=True,
        ),
        Condition(
            "without numbers of domains",
            "with clusters found by k-means and histograms of 20 documents in place of domain numbers at least 0.25 "
            "below the generic model, mean over seeds",
            lambda e, arm: e.mean("own domain, clusters", arm) <= e.mean("own domain", "generic") - 0.25,
        ),
        Condition(
            "experts pay",
            "no worse than a soup of one expert on own domains, mean over seeds",
            lambda e, arm: e.mean("own domain", arm) <= e.mean("own domain", "soup of 1"),
        ),
    ],
    version=2,
    superseded={
        1: "the models for each target were trained at a rate that nobody had tuned, and fine-tuning the generic model "
        "was not tried; that a specialist equals the soup is held by a test"
    },
)
def run(scale: Scale) -> Evidence:
    """Measure the synthetic world, then text, on each seed."""
    evidence = Evidence()
    for seed in scale.seeds:
        _synthetic(evidence, seed, scale)
        _text(evidence, seed, SIZES[scale])
    return evidence


def _plain(objective: Any) -> Any:
    """The same objective for a model that ignores the domain weights of its batches."""
    return lambda model, batch, generator: objective(model, batch[1], generator)


def _fit(model: nn.Module, objective: Any, data: Any, steps: int, seed: int, lr: float) -> None:
    from pippin.claims.worlds.training import fit

    fit(model, objective, data, steps=max(1, steps), seed=seed, lr=lr, warmup=0.02, weight_decay=0.01)


def _soup(
    world: RelatedDomains, experts: int, seed: int, steps: int, lr: float, within: Tensor | None = None
) -> SoupOfExperts:
    from pippin.claims.worlds.related_domains import DOMAINS, WeightedBatches, classifier, cross_entropy
    from pippin.language.methods.soup_of_experts.loss import SoupObjective
    from pippin.language.methods.soup_of_experts.mixtures import MetaSampler
    from pippin.language.methods.soup_of_experts.model import SoupOfExperts

    soup = SoupOfExperts(classifier(seed), experts, DOMAINS, router_hidden_size=64, seed=seed)
    sampler = MetaSampler(DOMAINS, support=(3,), p_generic=0.0)
    _fit(soup, SoupObjective(cross_entropy), WeightedBatches(world, sampler, seed, within), steps, seed, lr)
    return soup


def _synthetic(evidence: Evidence, seed: int, scale: Scale) -> None:
    """Record all arms on one seed, each at the learning rate that is best on validation data."""
    import torch

    from pippin.claims.worlds.related_domains import (
        DOMAINS,
        RelatedDomains,
        WeightedBatches,
        classifier,
        cross_entropy,
        loss,
    )  # fmt: skip
    from pippin.language.methods.soup_of_experts.domains import domain_weights, kmeans
    from pippin.language.methods.soup_of_experts.mixtures import MetaSampler

    world, size = RelatedDomains(seed), SIZES[scale]
    fresh = torch.Generator().manual_seed(8_000 + seed)
    own, uniform = torch.eye(DOMAINS), torch.full((DOMAINS,), 1 / DOMAINS)
    known, alone = ([world.draw(torch.full((512,), d), fresh) for d in range(DOMAINS)] for _ in range(2))
    sampler = MetaSampler(DOMAINS, support=(3,), p_generic=0.0)
    mixtures = [sampler.sample(fresh) for _ in range(20)]
    mixed = [world.draw(torch.multinomial(h, 2048, True, generator=fresh), fresh) for h in mixtures]

    def tuned(train: Callable[[float], Any], losses: Callable[[Any, Sequence[Any]], list[float]]) -> Any:
        return min(map(train, RATES[scale]), key=lambda model: statistics.mean(losses(model, known)))

    def note(name: str, arm: str, values: Sequence[float]) -> None:
        evidence.add(name, statistics.mean(values), arm=arm, seed=seed, unit="nats")

    def of_one(model: Any, batches: Sequence[Any]) -> list[float]:
        return [loss(model, batch) for batch in batches]

    def of_each(models: Sequence[Any], batches: Sequence[Any]) -> list[float]:
        return [loss(model, batch) for model, batch in zip(models, batches, strict=True)]

    def of_soup(soup: SoupOfExperts, batches: Sequence[Any], weights: Sequence[Tensor] | None = None) -> list[float]:
        return [
            soup.call_mixture(h, lambda model, batch=batch: loss(model, batch))  # type: ignore[misc]
            for h, batch in zip(list(own) if weights is None else weights, batches, strict=True)
        ]

    def trained(model: nn.Module, weights: Tensor, steps: int, lr: float) -> nn.Module:
        _fit(model, _plain(cross_entropy), WeightedBatches(world, weights, seed), steps, seed, lr)
        return model

    def generic(lr: float, steps: int = size.steps) -> nn.Module:
        return trained(classifier(seed), uniform, steps, lr)

    def specialists(lr: float, start: nn.Module | None = None, steps: int = size.steps // DOMAINS) -> list[nn.Module]:
        return [trained(copy.deepcopy(start) if start else classifier(seed), own[d], steps, lr) for d in range(DOMAINS)]

    whole = tuned(generic, of_one)
    note("own domain", "generic", of_one(whole, alone))
    note("unseen mixtures", "generic", of_one(whole, mixed))
    note("own domain", "models for each", of_each(tuned(specialists, of_each), alone))
    tuning = min(TUNING, size.steps // (2 * DOMAINS))  # of the same total, at most half is fine-tuning
    half = tuned(lambda lr: generic(lr, size.steps - DOMAINS * tuning), of_one)
    note("own domain", "generic, fine-tuned", of_each(tuned(lambda lr: specialists(lr, half, tuning), of_each), alone))
    for count in size.experts:
        arm = "soup" if count == 8 else f"soup of {count}"
        soup = tuned(lambda lr, n=count: _soup(world, n, seed, size.steps, lr), of_soup)  # type: ignore[misc]
        note("own domain", arm, of_soup(soup, alone))
        note("unseen mixtures", arm, of_soup(soup, mixed, mixtures))
        if count == 8:
            note("own domain", "wrong weights", of_soup(soup, alone, list(own.roll(1, 0))))
            note("own domain", "uniform weights", of_soup(soup, alone, [uniform] * DOMAINS))
    # the same without numbers of domains: clusters of documents, and histograms of some more documents of each domain
    corpus = torch.arange(DOMAINS).repeat_interleave(20)
    vectors = world.documents(corpus, fresh)
    centroids = kmeans(vectors, DOMAINS, seed=seed, num_init=10)
    nearest = torch.cdist(vectors, centroids).argmin(1)
    within = torch.zeros(DOMAINS, DOMAINS).index_put_((nearest, corpus), torch.ones(len(corpus)), accumulate=True)
    shares = within / within.sum(1, keepdim=True)
    found = [domain_weights(world.documents(torch.full((20,), d), fresh), centroids) for d in range(DOMAINS)]
    soup = tuned(lambda lr: _soup(world, 8, seed, size.steps, lr, shares), lambda one, data: of_soup(one, data, found))
    note("own domain, clusters", "soup", of_soup(soup, alone, found))


def _bytes(texts: Sequence[str]) -> Tensor:
    import torch

    from pippin.claims.worlds.sequences.byte_text import END

    return torch.tensor([token for text in texts for token in (*text.encode(), END)])


def _text(evidence: Evidence, seed: int, size: _Size) -> None:
    """Record a generic model, a soup, and a model for each target, at equal total steps on the same clusters."""
    import torch

    from pippin.claims.worlds.sequences.byte_text import ByteBatches, ByteText, byte_config, byte_decoder, held_out_nats
    from pippin.claims.worlds.sequences.text_kinds import files_by_kind
    from pippin.language.methods.soup_of_experts.domains import Domains
    from pippin.language.methods.soup_of_experts.loss import SoupObjective
    from pippin.language.methods.soup_of_experts.mixtures import DomainBatches, MetaSampler, concatenate
    from pippin.language.methods.soup_of_experts.model import SoupOfExperts
    from pippin.language.objectives import NextToken

    files = files_by_kind(size.text_files)
    targets = ("headers", "stubs", "metadata", "library")
    # of each target, every tenth file is read at the end, every fifth other one tells its weights
    read = {kind: files[kind][::10] for kind in targets}
    known = {kind: [text for index, text in enumerate(files[kind]) if index % 10 == 5] for kind in targets}
    corpus = [t for kind, texts in files.items() for i, t in enumerate(texts) if kind not in targets or i % 5]
    domains, nearest = Domains.cluster(corpus, TEXT_DOMAINS, seed=seed)
    parts = [
        _bytes([text for text, at in zip(corpus, nearest.tolist(), strict=True) if at == i])
        for i in range(TEXT_DOMAINS)
    ]
    whole = [len(part) / sum(map(len, parts)) for part in parts]
    weights = {kind: domains.weights(known[kind]) for kind in targets}
    held_out = {kind: ByteText(torch.empty(0), _bytes(texts)) for kind, texts in read.items()}

    def streams() -> list[Any]:
        return [ByteBatches(1, 128, 100 * seed + i, ByteText(part, part)) for i, part in enumerate(parts)]

    def decoder() -> Any:
        return byte_decoder(byte_config(layers=4, width=64), seed=seed)

    def loss(model: Any, kind: str) -> float:
        return held_out_nats(model, limit=size.held_out, text=held_out[kind])

    def note(arm: str, values: Sequence[float]) -> None:
        evidence.add("text", statistics.mean(values), arm=arm, seed=seed, unit="nats/byte")

    def trained(model: Any, how: Any, objective: Any, steps: int) -> Any:
        _fit(model, objective, DomainBatches(streams(), how, 8, collate=concatenate, seed=seed), steps, seed, TEXT_RATE)
        return model

    def of_soup(weights: dict[str, Any]) -> list[float]:
        return [soup.call_mixture(weights[kind], lambda m, kind=kind: loss(m, kind)) for kind in targets]  # type: ignore[misc]

    generic = trained(decoder(), whole, _plain(NextToken()), size.text_steps)
    note("generic", [loss(generic, kind) for kind in targets])
    soup = SoupOfExperts(decoder(), TEXT_EXPERTS, domains, router_hidden_size=64, seed=seed)
    sampler = MetaSampler(TEXT_DOMAINS, (1, 2, 4), generic=whole)
    trained(soup, sampler, SoupObjective(NextToken()), size.text_steps)
    others = dict(zip(targets, (weights[kind] for kind in (*targets[1:], targets[0])), strict=True))
    note("soup", of_soup(weights))
    note("wrong weights", of_soup(others))
    note("weights of the corpus", of_soup(dict.fromkeys(targets, whole)))
    tuning = size.text_steps // (2 * len(targets))
    half = trained(decoder(), whole, _plain(NextToken()), size.text_steps - len(targets) * tuning)
    for arm, start, steps in (("models for each", None, size.text_steps // 4), ("generic, fine-tuned", half, tuning)):
        models = {kind: copy.deepcopy(start) if start else decoder() for kind in targets}
        note(arm, [loss(trained(models[k], weights[k], _plain(NextToken()), steps), k) for k in targets])
