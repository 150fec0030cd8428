"""One soup of experts against one model for everything and against a model for each domain, at equal steps.

Notable here:
- in a made world of 32 related domains, what a domain asks for is known; the generic model can guess the domain, too,
  as each shifts its inputs a little
- weights come from domain numbers, then from clusters that k-means found among documents without labels
- with text, every weight is a histogram of some of a target's files, and its other files are read
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor, nn

    from pippin.language.soup import SoupOfExperts


@dataclass(frozen=True)
class Size:
    """How much is trained and looked at: seeds, steps and experts in the made world, then steps and bytes of text."""

    seeds: tuple[int, ...]
    steps: int
    experts: tuple[int, ...]
    text_steps: int
    text_files: int
    held_out: int


SIZES = {
    "smoke": Size((0,), 8, (1, 8), 2, 16, 512),
    "laptop": Size((0, 1, 2), 3000, (1, 8), 300, 400, 16_384),
    "gpu": Size((0, 1, 2, 3, 4), 3000, (1, 4, 8, 16), 6000, 4000, 131_072),
}
DOMAINS, INPUTS, HIDDEN, CLASSES, FACTORS = 32, 16, 24, 8, 5
SHIFT, LOADS = 0.35, 0.67
BATCH = 128
RATE = 2e-3
DOCUMENT = 64
"""Inputs of one document of the made world."""
TEXT_DOMAINS, TEXT_EXPERTS, TEXT_RATE = 12, 6, 3e-3


@claim(
    id="soup-of-experts",
    source="arXiv:2502.01804",
    paper="one pretraining of shared parameters, experts and a router gives, for any weights of domains, a specialist "
    "of the size and cost of one model, better than a generic model, cheaper than one pretraining for each target",
    setting="a made world of 32 related domains (16 inputs shifted by 0.35 for each domain, 8 classes, labels by 5 "
    "shared factors; base 16-24-24-8; 3,000 steps of 128 for every method in total, mixtures of 3 domains) and byte "
    "models (4 layers, width 64) on files of Python's library and of its packages in 12 clusters of k-means, 4 kinds "
    "of files as targets",
    accept="made world, cross-entropy, means over 3 seeds: on own domains the soup of 8 is at least 0.3 below the "
    "generic model and 0.2 below 32 models of 3,000 / 32 steps; on 20 unseen mixtures of 3 at least 0.15 below "
    "generic; with another domain's weights it is worse than generic; 8 experts are no worse than 1; with clusters "
    "found by k-means and histograms of 20 documents in place of domain numbers at least 0.25 below generic; a "
    "specialist equals the soup within 1e-6 and its state loads into the plain class. Text, means over targets: with "
    "weights from histograms of other files of the target the soup is below the generic model of equal steps on "
    "every seed, and by more than the standard deviation of that difference over the seeds; below models of a "
    "quarter of the steps for each target; and with the weights of another target it is worse than with the target's "
    "own",
)
def run(scale: Scale) -> Evidence:
    """The made world, then text, for each seed."""
    evidence, size = Evidence(), SIZES[scale.name]
    exact = all([_made_world(evidence, seed, size) for seed in size.seeds])
    for seed in size.seeds:
        _text(evidence, seed, size)
    mean = evidence.mean
    generic = mean("own domain, generic")
    soup = mean("own domain, soup of 8")
    gains = [a - b for a, b in zip(evidence.each("text, generic"), evidence.each("text, soup"), strict=True)]
    spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
    evidence.add("text, generic - soup", statistics.mean(gains), unit="nats/byte")
    return evidence.accept(
        own=soup <= generic - 0.3 and soup <= mean("own domain, 32 models") - 0.2,
        unseen=mean("unseen mixtures, soup of 8") <= mean("unseen mixtures, generic") - 0.15,
        wrong=mean("wrong domain, soup of 8") > generic,
        experts=soup <= mean("own domain, soup of 1"),
        clusters=mean("own domain, soup of 8, clusters") <= generic - 0.25,
        exact=exact,
        text=min(gains) > 0 and statistics.mean(gains) > spread,
        budget=mean("text, soup") < mean("text, 4 models"),
        text_weights=mean("text, soup, another target's weights") > mean("text, soup"),
    )


# --- the made world ---------------------------------------------------------------------------------------------------


class World:
    """Domains that differ in where their inputs lie and in how much of each shared factor decides the label."""

    def __init__(self, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(7_000 + seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.shift = SHIFT * normal(DOMAINS, INPUTS)
        self.hidden = normal(INPUTS, INPUTS) / INPUTS**0.5
        base, factors = normal(INPUTS, CLASSES), normal(FACTORS, INPUTS, CLASSES)
        loads = LOADS * normal(DOMAINS, FACTORS)
        self.out = base + torch.einsum("df,fic->dic", loads, factors)

    def draw(self, domains: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and labels of one example in each of these domains."""
        import torch

        x = self.shift[domains] + torch.randn(len(domains), INPUTS, generator=generator)
        logits = torch.einsum("bi,bic->bc", torch.tanh(2 * x @ self.hidden), self.out[domains])
        return x, torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    def documents(self, domains: Tensor, generator: torch.Generator) -> Tensor:
        """The mean input of a document in each of these domains: what is known of it without labels."""
        x, _ = self.draw(domains.repeat_interleave(DOCUMENT), generator)
        return x.view(len(domains), DOCUMENT, INPUTS).mean(1)


class Examples:
    """Weights and a batch drawn by them, without end.

    Args:
        world: where from.
        sampler: draws weights; weights by themselves stay.
        seed: of the batches.
        within: the share of each domain in what a weight stands for; None where that is the domain itself.
    """

    def __init__(self, world: World, sampler: Any, seed: int, within: Tensor | None = None) -> None:
        self.world, self.sampler, self.seed, self.within = world, sampler, seed, within

    def __iter__(self) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
        """The batches from the first one on."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        while True:
            weights = self.sampler if isinstance(self.sampler, torch.Tensor) else self.sampler.sample(generator)
            shares = weights if self.within is None else weights @ self.within
            yield weights, self.world.draw(torch.multinomial(shares, BATCH, True, generator=generator), generator)


def _classes(model: nn.Module, batch: Any, generator: torch.Generator) -> Any:
    import torch.nn.functional as F

    from pippin.train import Loss

    x, y = batch
    return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def _plain(objective: Any) -> Any:
    """The same objective for a model that does not see the weights of its batches."""
    return lambda model, batch, generator: objective(model, batch[1], generator)


def _network(seed: int) -> nn.Module:
    import torch
    from torch import nn

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )


def _fit(model: nn.Module, objective: Any, data: Any, steps: int, seed: int, lr: float = RATE) -> None:
    from pippin.train import AdamW, Cosine, Trainer

    how: dict[str, Any] = {"optimiser": AdamW(lr=lr, weight_decay=0.01), "schedule": Cosine(warmup=0.02), "show": False}
    Trainer(model, objective, data, steps=steps, seed=seed, **how).fit()
    model.eval()


def _soup(world: World, experts: int, seed: int, steps: int, within: Tensor | None = None) -> SoupOfExperts:
    from pippin.language.soup import SoupOfExperts
    from pippin.language.soup_training import MetaSampler, OverMixtures

    soup = SoupOfExperts(_network(seed), experts, DOMAINS, hidden=64, seed=seed)
    sampler = MetaSampler(DOMAINS, support=(3,), p_generic=0.0)
    _fit(soup, OverMixtures(_classes), Examples(world, sampler, seed, within), steps, seed)
    return soup


def _made_world(evidence: Evidence, seed: int, size: Size) -> bool:
    """All arms of one seed; whether a specialist equals the soup."""
    import torch
    import torch.nn.functional as F

    from pippin.language.domains import domain_weights, kmeans
    from pippin.language.soup_training import MetaSampler

    world = World(seed)
    fresh = torch.Generator().manual_seed(8_000 + seed)
    own = torch.eye(DOMAINS)
    uniform = torch.full((DOMAINS,), 1 / DOMAINS)
    alone = [world.draw(torch.full((512,), domain), fresh) for domain in range(DOMAINS)]
    sampler = MetaSampler(DOMAINS, support=(3,), p_generic=0.0)
    mixtures = [sampler.sample(fresh) for _ in range(20)]
    mixed = [world.draw(torch.multinomial(h, 2048, True, generator=fresh), fresh) for h in mixtures]

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> float:
        with torch.no_grad():
            return float(F.cross_entropy(model(batch[0]), batch[1]))

    def note(name: str, values: Sequence[float]) -> None:
        evidence.add(name, statistics.mean(values), seed=seed, unit="nats")

    def soup_losses(soup: SoupOfExperts, weights: Sequence[Tensor], batches: Sequence[Any]) -> list[float]:
        return [
            soup.applied(h, lambda model, batch=batch: loss(model, batch))  # type: ignore[misc]
            for h, batch in zip(weights, batches, strict=True)
        ]

    generic = _network(seed)
    _fit(generic, _plain(_classes), Examples(world, uniform, seed), size.steps, seed)
    note("own domain, generic", [loss(generic, batch) for batch in alone])
    note("unseen mixtures, generic", [loss(generic, batch) for batch in mixed])
    experts = []
    for domain, batch in enumerate(alone):
        model = _network(seed)
        _fit(model, _plain(_classes), Examples(world, own[domain], seed), max(1, size.steps // DOMAINS), seed)
        experts.append(loss(model, batch))
    note(f"own domain, {DOMAINS} models", experts)
    exact = True
    for count in size.experts:
        soup = _soup(world, count, seed, size.steps)
        note(f"own domain, soup of {count}", soup_losses(soup, list(own), alone))
        note(f"unseen mixtures, soup of {count}", soup_losses(soup, mixtures, mixed))
        if count == 8:
            note("wrong domain, soup of 8", soup_losses(soup, list(own.roll(1, 0)), alone))
            note("uniform weights, soup of 8", soup_losses(soup, [uniform] * DOMAINS, alone))
            exact = _equal(soup, mixtures[0], mixed[0][0], evidence, seed)
    # the same without numbers of domains: clusters of documents, and histograms of some more documents of each domain
    numbers = torch.arange(DOMAINS)
    corpus = numbers.repeat_interleave(20)
    vectors = world.documents(corpus, fresh)
    centroids = kmeans(vectors, DOMAINS, seed=seed, tries=10)
    nearest = torch.cdist(vectors, centroids).argmin(1)
    within = torch.zeros(DOMAINS, DOMAINS).index_put_((nearest, corpus), torch.ones(len(corpus)), accumulate=True)
    soup = _soup(world, 8, seed, size.steps, within / within.sum(1, keepdim=True))
    found = [domain_weights(world.documents(numbers[d].expand(20), fresh), centroids) for d in range(DOMAINS)]
    note("own domain, soup of 8, clusters", soup_losses(soup, found, alone))
    return exact


def _equal(soup: SoupOfExperts, weights: Tensor, x: Tensor, evidence: Evidence, seed: int) -> bool:
    """Whether a specialist, and the plain class with its state, say what the soup says."""
    import warnings

    import torch

    from pippin.core.errors import Extrapolation

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", Extrapolation)  # after a few steps, few mixtures were seen
        wanted = soup(weights, x)
        specialist = soup.instantiate(weights)
        plain = _network(seed + 1)
        plain.load_state_dict(specialist.state_dict())
        apart = max(float((model(x) - wanted).abs().max()) for model in (specialist, plain))
    evidence.add("largest difference of specialist and soup", apart, seed=seed)
    return apart < 1e-6 and type(specialist) is type(soup.base)


# --- text -------------------------------------------------------------------------------------------------------------


def _files(limit: int) -> dict[str, list[str]]:
    """Some files of Python's library and of the installed packages, by kind, in an order fixed by their names."""
    import hashlib
    import sysconfig
    from pathlib import Path

    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    kinds = {
        "library": (library, "*.py"),
        "headers": (packages / "torch", "**/*.h"),
        "stubs": (packages, "**/*.pyi"),
        "metadata": (packages, "*.dist-info/METADATA"),
        "licences": (packages, "*.dist-info/**/LICENSE*"),
        "packages": (packages, "*/*.py"),
    }
    found: dict[str, list[str]] = {}
    for kind, (folder, pattern) in kinds.items():
        paths = sorted(folder.glob(pattern), key=lambda path: hashlib.sha256(path.name.encode()).digest())
        texts = [path.read_text("utf-8", "ignore")[:20_000] for path in paths[:limit] if path.is_file()]
        found[kind] = [text for text in texts if len(text) >= 600]
    return found


def _bytes(texts: Sequence[str]) -> Tensor:
    import torch

    from pippin.claims._byte_text import END

    return torch.tensor([token for text in texts for token in (*text.encode(), END)])


def _text(evidence: Evidence, seed: int, size: Size) -> None:
    """Generic model, soup, and a model for each target at a quarter of the steps, on the same clusters of files."""
    import torch

    from pippin.claims._byte_text import ByteBatches, ByteText, byte_config, byte_decoder, held_out_nats
    from pippin.language.domains import Domains
    from pippin.language.objectives import NextToken
    from pippin.language.soup import SoupOfExperts
    from pippin.language.soup_training import DomainBatches, MetaSampler, OverMixtures, joined

    files = _files(size.text_files)
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
    held = {kind: ByteText(torch.empty(0), _bytes(texts)) for kind, texts in read.items()}

    def streams() -> list[Any]:
        return [ByteBatches(1, 128, 100 * seed + i, ByteText(part, part)) for i, part in enumerate(parts)]

    def decoder() -> Any:
        return byte_decoder(byte_config(layers=4, width=64), seed=seed)

    def loss(model: Any, kind: str) -> float:
        return held_out_nats(model, limit=size.held_out, text=held[kind])

    def note(name: str, values: Sequence[float]) -> None:
        evidence.add(f"text, {name}", statistics.mean(values), seed=seed, unit="nats/byte")

    def trained(model: Any, how: Any, objective: Any, steps: int) -> Any:
        _fit(model, objective, DomainBatches(streams(), how, 8, collate=joined, seed=seed), steps, seed, TEXT_RATE)
        return model

    generic = trained(decoder(), whole, _plain(NextToken()), size.text_steps)
    note("generic", [loss(generic, kind) for kind in targets])
    soup = SoupOfExperts(decoder(), TEXT_EXPERTS, domains, hidden=64, seed=seed)
    sampler = MetaSampler(TEXT_DOMAINS, (1, 2, 4), generic=whole)
    trained(soup, sampler, OverMixtures(NextToken()), size.text_steps)
    note("soup", [soup.applied(weights[kind], lambda m, kind=kind: loss(m, kind)) for kind in targets])  # type: ignore[misc]
    turned = dict(zip(targets, (*targets[1:], targets[0]), strict=True))
    note(
        "soup, another target's weights",
        [soup.applied(weights[turned[kind]], lambda m, kind=kind: loss(m, kind)) for kind in targets],  # type: ignore[misc]
    )
    note("soup, the corpus's weights", [soup.applied(whole, lambda m, kind=kind: loss(m, kind)) for kind in targets])  # type: ignore[misc]
    quarter = max(1, size.text_steps // len(targets))
    note(
        f"{len(targets)} models",
        [loss(trained(decoder(), weights[kind], _plain(NextToken()), quarter), kind) for kind in targets],
    )
