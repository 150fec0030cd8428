"""Guesses checked by groups of like tokens: more of them stay, and little of it is heard, if the groups are right.

Notable here:
- the groups come from the target's own embeddings, and their threshold from the table alone (24 codes in a group on
  average, as theta 0.45 gives for a speech codec of 6,561 codes): no output is looked at
- the control has groups of the same sizes and overlaps among codes drawn by chance: it accepts more too, and is heard
- nothing is said about speed: on a CPU, models of this size are all overhead
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from pippin.claims._made_codec import Size

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2), "gpu": tuple(range(6))}
ARMS = ("plain", "exact", "coarse", "random groups")
THETA, GROUP = 0.45, 24.0


@claim(
    id="coarse-grained-speculation",
    source="arXiv:2511.13732",
    paper="acceptance by groups of acoustically similar tokens keeps the law of the groups exactly; about 1.4 times "
    "the speed of plain decoding of speech tokens; 91.4 % of tokens exchanged within their groups cost 0.007 of word "
    "error rate",
    setting="decisions: 512 tokens in 64 families, random laws; end to end: sums of gliding sinusoids coded by a "
    "k-means codebook of 1,024 spectra, a target (4 layers, width 128) and a draft (1 layer, width 64) trained on the "
    "codes, answers through the engine at temperature 1, drafts of at most 4",
    accept="on every seed: the law of the groups that were decided on is as near to the target's as sampling allows "
    "(total variation at most 1.3 times that of as many independent draws, chi-square p above 0.001); with theta at 1 "
    "every decision is the token-level rule's; coarse acceptance lies above exact acceptance by 0.10 or more, and "
    "acceptance with random groups of the same sizes above it by any amount. Over all seeds: the log-spectral distance "
    "of decoded answers from the nearest stretch of the source is at most 5 % above plain sampling's with the "
    "embedding's groups, and at least 15 % above it with the random ones",
)
def run(scale: Scale) -> Evidence:
    """Decisions alone first, then whole answers."""
    from pippin.claims._made_codec import SIZES

    evidence = Evidence()
    for seed in SEEDS[scale.name]:
        _decisions(evidence, seed, SIZES[scale.name].draws)
        _answers(evidence, seed, SIZES[scale.name])
    ratios = evidence.each("distance of the group law / of independent draws")
    rates = {arm: evidence.each(f"acceptance, {arm}") for arm in ARMS[1:]}
    heard = {arm: evidence.mean(f"distance from the source, {arm}") for arm in ARMS}
    return evidence.accept(
        groups_exact=max(ratios) <= 1.3 and min(evidence.each("group law, chi-square p")) > 0.001,
        singletons_agree=all(evidence.each("theta 1 agrees draw for draw")),
        accepts_more=all(c - e >= 0.10 for c, e in zip(rates["coarse"], rates["exact"], strict=True)),
        random_accepts_more=all(r > e for r, e in zip(rates["random groups"], rates["exact"], strict=True)),
        sounds_alike=heard["coarse"] <= 1.05 * heard["plain"],
        random_is_heard=heard["random groups"] >= 1.15 * heard["plain"],
    )


def _decisions(evidence: Evidence, seed: int, draws: int) -> None:
    """Many decisions about one position, with laws and embeddings drawn at random."""
    import torch

    from pippin.claims._made_codec import chi_square, variation
    from pippin.engine.sampling import pick
    from pippin.engine.speculation import TokenGroups
    from pippin.engine.speculation.acceptance import decide

    generator = torch.Generator().manual_seed(seed)
    family = torch.arange(512) // 8
    weight = torch.randn(64, 32, generator=generator)[family] + 0.3 * torch.randn(512, 32, generator=generator)
    shared = torch.randn(64, generator=generator)
    q, p = (
        ((shared + 0.4 * torch.randn(64, generator=generator))[family] + torch.randn(512, generator=generator))
        .double()
        .softmax(-1)
        for _ in range(2)
    )
    groups = TokenGroups.from_embeddings(weight, THETA)
    decided = [decide(pick(q, generator), q, p, generator, groups, 64) for _ in range(draws)]
    law = groups.coarse(p)
    seen, tokens = (torch.bincount(torch.tensor([one[field] for one in decided]), minlength=512) for field in (1, 0))
    independent = [torch.multinomial(law, draws, replacement=True, generator=generator) for _ in range(5)]
    floor = statistics.fmean(variation(torch.bincount(one, minlength=512), law) for one in independent)
    families = [torch.zeros(64, dtype=torch.float64).index_add_(0, family, one.double()) for one in (tokens, p)]
    evidence.add("distance of the group law", variation(seen, law), seed=seed)
    evidence.add("distance of the group law / of independent draws", variation(seen, law) / floor, seed=seed, unit="x")
    evidence.add("group law, chi-square p", chi_square(seen, law), seed=seed)
    evidence.add("distance of the family law", variation(*families), seed=seed)
    evidence.add("distance of the token law", variation(tokens, p), seed=seed)
    evidence.add("decisions accepted, exact (computed)", torch.minimum(p, q).sum(), seed=seed)
    evidence.add("decisions accepted, coarse (computed)", torch.minimum(law, groups.coarse(q)).sum(), seed=seed)
    evidence.add("decisions accepted, coarse", statistics.fmean(one.accepted for one in decided), seed=seed)
    alone = TokenGroups.from_embeddings(weight, 1.0)
    one, other = (torch.Generator().manual_seed(seed) for _ in range(2))
    agree = all(
        decide(pick(q, one), q, p, one, alone, 64) == decide(pick(q, other), q, p, other, None, 64)
        for _ in range(min(draws, 2000))
    )
    evidence.add("theta 1 agrees draw for draw", agree, seed=seed)


def _answers(evidence: Evidence, seed: int, size: Size) -> None:
    """A codec, a target and a draft for one seed; four ways to write answers; how each is heard."""
    import torch

    from pippin.claims import _made_codec as made
    from pippin.engine.speculation import CoarseAcceptance, ExactAcceptance, Speculation

    source = made.Source(seed, size)
    target, target_loss = made.train(source, layers=4, width=128, steps=size.steps, seed=seed)
    draft, draft_loss = made.train(source, layers=1, width=64, steps=size.steps, seed=seed + 1000)
    evidence.add("loss of the target", target_loss, seed=seed, unit="nats")
    evidence.add("loss of the draft", draft_loss, seed=seed, unit="nats")
    theta, groups = made.groups_of_size(target, GROUP)
    shuffled = groups.shuffled(torch.Generator().manual_seed(seed))
    evidence.add("theta", theta, seed=seed)
    for name, value in groups.stats().items():
        evidence.add(f"groups, {name.replace('_', ' ')}", value, seed=seed)
    evidence.add("distance within groups", source.spread(groups), seed=seed, unit="dB")
    evidence.add("distance within random groups", source.spread(shuffled), seed=seed, unit="dB")
    rules: dict[str, Any] = {
        "exact": ExactAcceptance(),
        "coarse": CoarseAcceptance(groups),
        "random groups": CoarseAcceptance(shuffled),
    }
    for arm in ARMS:
        speculation = Speculation(draft, tokens=4, acceptance=rules[arm]) if arm in rules else None
        codes, ends = made.write(target, source, speculation, seed=seed, size=size)
        evidence.add(f"distance from the source, {arm}", source.distance(codes), seed=seed, unit="dB")
        if speculation is not None:
            written, accepted = (sum(getattr(end, name) for end in ends) for name in ("answer_tokens", "accepted"))
            evidence.add(f"acceptance, {arm}", accepted / sum(end.drafted for end in ends), seed=seed)
            evidence.add(f"tokens per pass, {arm}", written / (written - accepted), seed=seed)
    evidence.add("distance from the source, the source itself", source.distance(source.held_out), seed=seed, unit="dB")
