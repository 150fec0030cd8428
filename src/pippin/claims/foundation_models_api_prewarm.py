"""Prewarming a session: a long beginning is paid for before the user asks, and the answer does not change by a bit."""

from __future__ import annotations

import statistics
from typing import Any

from pippin.claims import Evidence, Scale, claim

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2, 3, 4), "gpu": (0, 1, 2, 3, 4)}
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
    paper="prewarm loads what a session needs ahead of the request, so that the answer begins sooner",
    setting="default model; about 1,000 tokens of instructions, the same prompt with and without prewarm",
    accept="the median time to the first token falls by at least 60 %, and tokens and log-probabilities are identical, "
    "for every seed",
)
def run(scale: Scale) -> Evidence:
    """Measure both ways for one set of instructions per seed."""
    from pippin.language.load import load

    model = load("smollm2-135m")
    evidence = Evidence()
    for seed in SEEDS[scale.name]:
        instructions = _instructions(model, seed)
        pairs = [_pair(model, instructions) for _ in range(1 if scale.name == "smoke" else 3)]
        cold = statistics.median(c.timing.first_token_seconds for c, _ in pairs)
        warm = statistics.median(w.timing.first_token_seconds for _, w in pairs)
        evidence.add("time to first token, cold", 1000 * cold, seed=seed, unit="ms")
        evidence.add("time to first token, prewarmed", 1000 * warm, seed=seed, unit="ms")
        evidence.add("saved", 1 - warm / cold, seed=seed)
        evidence.add("identical", all(c.tokens == w.tokens for c, w in pairs), seed=seed)
        evidence.add("prompt tokens", pairs[0][0].usage.input_tokens, seed=seed)
    return evidence.accept(
        faster=all(saved >= 0.6 for saved in evidence.each("saved")), identical=all(evidence.each("identical"))
    )


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
    """The same request in two new sessions that share nothing, the second one prewarmed."""
    from pippin.engine import Engine
    from pippin.session import GenerationOptions, LocalModel, Session

    options = GenerationOptions(max_tokens=8, logprobs=5)
    with Engine(model) as one, Engine(model) as other:
        cold, warm = (Session(LocalModel(model, engine=engine), instructions=instructions) for engine in (one, other))
        warm.prewarm()
        return cold.respond(PROMPT, options=options), warm.respond(PROMPT, options=options)
