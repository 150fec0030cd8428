"""Cost of a grammar: the time of a token mask against the time of a decode step."""

from __future__ import annotations

import statistics
import time
from typing import Any

from pippin.claims import Condition, Evidence, Scale, claim
from pippin.claims.worlds.sequences.random_schemas import random_schema

MOST_TOKENS = 64
SCHEMAS = Scale.choose(smoke=3, laptop=100)
NAIVE = Scale.choose(smoke=1, laptop=3)
"""Masks made by asking for every token alone."""


@claim(
    id="foundation-models-api-mask",
    source="arXiv:2507.13575, guided generation; methods of the open back ends (llguidance, xgrammar)",
    headline="constrained decoding adds little to the time of a token",
    setting="random schemas, the default model's 49,152 tokens, answers sampled at temperature 1 from the default "
    "model",
    method="mask",
    negative_controls=("every token asked alone",),
    conditions=[
        Condition(
            "little time",
            "median mask time per token, computing and applying, is under 10 % of the median decode step of the "
            "default model (135M) on this machine; the paper names no number",
            lambda e, arm: e.mean("share of a decode step", arm) < 0.1,
            headline=True,
        ),
    ],
    reported="compile time",
    version=2,
    superseded={1: "the same bound in prose, without a mask that is slow"},
)
def run(scale: Scale) -> Evidence:
    """Decode answers under random schemas, and time mask and model separately."""
    import torch

    from pippin.core.errors import SchemaError
    from pippin.engine.grammar.constraint import Grammar
    from pippin.engine.model_runner import BLOCK_SIZE
    from pippin.engine.runners.select import make_runner
    from pippin.language.language_model import load

    model = load("smollm2-135m")
    masks: list[float] = []
    naive: list[float] = []
    steps: list[float] = []
    compiles: list[float] = []
    refused = 0
    prompt = model.tokenizer.encode("Here is the JSON:\n")
    runner = make_runner(model, -(-(len(prompt) + MOST_TOKENS) // BLOCK_SIZE))
    for seed in range(SCHEMAS[scale]):
        try:
            constraint = Grammar.json_schema(random_schema(seed)).start(model.tokenizer)
        except SchemaError:
            refused += 1
            continue
        compiles.append(constraint.compile_seconds)
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            naive += [_asked_alone(constraint, model.tokenizer.vocab_size)] if len(naive) < NAIVE[scale] else []
            _walk(model, constraint, runner, prompt, generator, masks, steps)
    evidence = Evidence()
    mask, step = statistics.median(masks), statistics.median(steps)
    evidence.add("mask per token, median", 1e6 * mask, unit="µs")
    evidence.add("mask per token, 99th percentile", 1e6 * statistics.quantiles(masks, n=100)[98], unit="µs")
    evidence.add("decode step, median", 1e6 * step, unit="µs")
    evidence.add("share of a decode step", mask / step, arm="mask")
    evidence.add("share of a decode step", statistics.median(naive) / step, arm="every token asked alone")
    evidence.add("compile, median", 1000 * statistics.median(compiles), unit="ms")
    evidence.add("compile, slowest", 1000 * max(compiles), unit="ms")
    evidence.add("tokens timed", len(masks))
    evidence.add("schemas refused with a typed error", refused)
    return evidence


def _asked_alone(constraint: Any, vocab_size: int) -> float:
    """Seconds of a mask that is computed token by token."""
    began = time.perf_counter()
    for token in range(vocab_size):
        constraint.allows(token)
    return time.perf_counter() - began


def _walk(
    model: Any, constraint: Any, runner: Any, prompt: list[int], generator: Any, masks: list[float], steps: list[float]
) -> None:
    """Decode one answer of at most `MOST_TOKENS`; times are appended to the lists."""
    from pippin.engine.model_runner import ModelInput

    ids, held = prompt, 0
    for _ in range(MOST_TOKENS):
        began = time.perf_counter()
        logits = runner.forward([ModelInput(ids, held, range(runner.blocks), [len(ids) - 1])])[0][0]
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
