"""What a grammar costs: the time that its mask takes per token, beside the time of a decode step."""

from __future__ import annotations

import statistics
import time
from typing import Any

from pippin.claims import Evidence, Scale, claim
from pippin.claims._random_schemas import random_schema

MOST_TOKENS = 64
SCHEMAS = {"smoke": 3, "laptop": 100, "gpu": 100}


@claim(
    id="foundation-models-api-mask",
    source="arXiv:2507.13575, guided generation; methods of the open back ends (llguidance, xgrammar)",
    paper="constrained decoding adds little to the time of a token",
    setting="random schemas, the default model's 49,152 tokens, answers drawn at temperature 1 from the default model",
    accept="median mask time per token, computing and applying, is under 10 % of the median decode step of the default "
    "model (135M) on this machine; compile time is reported apart",
)
def run(scale: Scale) -> Evidence:
    """Walk real answers under random schemas and time mask and model apart."""
    import torch

    from pippin.core.errors import SchemaError
    from pippin.engine.constraint import Grammar
    from pippin.engine.runner import BLOCK, make_runner
    from pippin.language.load import load

    model = load("smollm2-135m")
    masks: list[float] = []
    steps: list[float] = []
    compiles: list[float] = []
    refused = 0
    prompt = model.tokenizer.encode("Here is the JSON:\n")
    runner = make_runner(model, -(-(len(prompt) + MOST_TOKENS) // BLOCK))
    for seed in range(SCHEMAS[scale.name]):
        try:
            constraint = Grammar.json_schema(random_schema(seed)).start(model.tokenizer)
        except SchemaError:
            refused += 1
            continue
        compiles.append(constraint.compile_seconds)
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            _walk(model, constraint, runner, prompt, generator, masks, steps)
    evidence = Evidence()
    mask, step = statistics.median(masks), statistics.median(steps)
    evidence.add("mask per token, median", 1e6 * mask, unit="µs")
    evidence.add("mask per token, 99th percentile", 1e6 * statistics.quantiles(masks, n=100)[98], unit="µs")
    evidence.add("decode step, median", 1e6 * step, unit="µs")
    evidence.add("mask share of a decode step", mask / step)
    evidence.add("compile, median", 1000 * statistics.median(compiles), unit="ms")
    evidence.add("compile, slowest", 1000 * max(compiles), unit="ms")
    evidence.add("tokens timed", len(masks))
    evidence.add("schemas refused with a typed error", refused)
    return evidence.accept(mask / step < 0.1)


def _walk(
    model: Any, constraint: Any, runner: Any, prompt: list[int], generator: Any, masks: list[float], steps: list[float]
) -> None:
    """One answer of at most `MOST_TOKENS`; times are added to the lists."""
    from pippin.engine.runner import Work

    ids, held = prompt, 0
    for _ in range(MOST_TOKENS):
        began = time.perf_counter()
        logits = runner.forward([Work(ids, held, range(runner.blocks), [len(ids) - 1])])[0][0]
        if len(ids) == 1:
            steps.append(time.perf_counter() - began)
        began = time.perf_counter()
        constraint.apply(logits)
        masks.append(time.perf_counter() - began)
        token = int(logits.softmax(-1).multinomial(1, generator=generator))
        if token in model.tokenizer.eos_ids:
            return
        constraint.accept(token)
        if constraint.finished:
            return
        ids, held = [token], held + len(ids)
