"""Prewarming a session: long instructions are prefilled before the request, and the answer is bit-identical."""

from __future__ import annotations

import statistics
from typing import Any

from pippin.claims import Condition, Evidence, Scale, claim

TIME = "time to first token"
SEEDS = Scale.choose(smoke=range(1), laptop=range(5))
PROMPT = "What should I plant next to the old tree?"
WORDS = [
    "apple",
    "orchard",
    "pruning",
    "winter",
    "spring",
    "blossom",
    "graft",
    "rootstock",
    "soil",
    "water",
    "harvest",
    "pear",
    "quince",
    "hedge",
    "bee",
    "frost",
]


@claim(
    id="foundation-models-api-prewarm",
    source="Foundation Models framework, LanguageModelSession.prewarm(promptPrefix:)",
    headline="prewarm loads what a session needs ahead of the request, so that the answer begins sooner",
    setting="default model; about 1,000 tokens of instructions, the same prompt with and without prewarm",
    method="prewarmed",
    negative_controls=("cold",),
    conditions=[
        Condition(
            "sooner",
            "the median time to the first token is at most 0.4 times that of a cold session, every seed",
            lambda e, arm: all(t <= 0.4 * c for t, c in zip(e.each(TIME, arm), e.each(TIME, "cold"), strict=True)),
            headline=True,
        ),
        Condition(
            "identical",
            "tokens and log-probabilities are those of the cold session in every bit, every seed",
            lambda e, arm: e.min("identical", arm) == 1,
        ),
    ],
    version=2,
    superseded={1: "the same bounds in prose, and the cold session was not asked"},
)
def run(scale: Scale) -> Evidence:
    """Measure a cold and a prewarmed session with one set of instructions per seed."""
    from pippin.language.language_model import load

    model = load("smollm2-135m")
    evidence = Evidence()
    for seed in SEEDS[scale]:
        instructions = _instructions(model, seed)
        pairs = [_pair(model, instructions) for _ in range(1 if scale.is_smoke else 3)]
        for arm, answers in (("cold", [c for c, _ in pairs]), ("prewarmed", [w for _, w in pairs])):
            seconds = statistics.median(answer.timing.first_token_seconds for answer in answers)
            evidence.add(TIME, 1000 * seconds, arm=arm, seed=seed, unit="ms")
        evidence.add("identical", all(c.tokens == w.tokens for c, w in pairs), arm="prewarmed", seed=seed)
        evidence.add("prompt tokens", pairs[0][0].usage.input_tokens, seed=seed)
    return evidence


def _instructions(model: Any, seed: int) -> str:
    """Different prose for every seed, about 1,000 tokens long."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    text = "You advise gardeners."
    while len(model.tokenizer.encode(text)) < 1000:
        picked = torch.randint(len(WORDS), (8,), generator=generator).tolist()
        text += f" Remember the {' and the '.join(WORDS[i] for i in picked[:4])} before {WORDS[picked[4]]}."
    return text


def _pair(model: Any, instructions: str) -> tuple[Any, Any]:
    """The same request in two new sessions that share no cache, the second one prewarmed."""
    from pippin.engine import Engine
    from pippin.session import GenerationOptions, LocalModel, Session

    options = GenerationOptions(max_tokens=8, logprobs=5)
    with Engine(model) as one, Engine(model) as other:
        cold, warm = (Session(LocalModel(model, engine=engine), instructions=instructions) for engine in (one, other))
        warm.prewarm()
        return cold.respond(PROMPT, options=options), warm.respond(PROMPT, options=options)
