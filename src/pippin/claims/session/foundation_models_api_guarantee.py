"""Constrained decoding against the worst possible model, random logits, and on real requests."""

from __future__ import annotations

import json
from typing import Any

from pippin.claims import Condition, Evidence, Scale, claim
from pippin.claims.worlds.sequences.random_schemas import draw_answer, faults, random_schema

SCHEMAS = Scale.choose(smoke=4, laptop=500)
WITHOUT = 50
"""Schemas for which answers without a grammar are sampled: nearly all are invalid, and they are slow."""
REQUESTS = Scale.choose(smoke=2, laptop=50)


@claim(
    id="foundation-models-api-guarantee",
    source="arXiv:2507.13575, guided generation and constrained tool calling",
    headline="constrained decoding guarantees that an answer parses as the declared type and that tool arguments fit",
    setting="500 random JSON Schemas (nesting up to 4, every constraint, escapes, recursion) under random logits, both "
    "greedy and sampled, over the default model's tokenizer; and the first 50 requests of BFCL v4 simple_python, each "
    "answered by the default model under the request's own function signature",
    method="guided",
    negative_controls=("every schema refused", "every answer cut", "no grammar"),
    conditions=[
        Condition(
            "valid",
            "random logits: every answer that ends is valid for the independent library jsonschema; the paper "
            "guarantees it",
            lambda e, arm: e.mean("invalid answers", arm) == 0,
            headline=True,
        ),
        Condition(
            "few refused",
            "at most 10 % of the schemas are refused",
            lambda e, arm: e.mean("schemas refused", arm) <= 0.1 * e.mean("random schemas"),
        ),
        Condition(
            "few cut",
            "random logits: at least half of the answers end within 200 tokens, though every token is as likely",
            lambda e, arm: e.mean("answers that ended", arm) >= 0.5 * 2 * 0.9 * e.mean("random schemas"),
        ),
        Condition(
            "valid instances accepted",
            "at least 99 % of answers that are valid, written by the default model or under other logits, are accepted "
            "whole by a new grammar of the same schema",
            lambda e, arm: e.mean("valid instances accepted", arm) >= 0.99,
        ),
        Condition(
            "real requests",
            "no answer of the default model fails to parse or validate, and at most 10 % are cut at 400 tokens",
            lambda e, arm: (
                e.mean("real requests that failed", arm) == 0
                and e.mean("real requests cut", arm) <= 0.1 * e.mean("real requests")
            ),
        ),
    ],
    version=2,
    superseded={1: "refusing every schema passed it, and so did answers that are all cut"},
)
def run(scale: Scale) -> Evidence:
    """Measure both parts, with the grammar and with the controls."""
    evidence = Evidence()
    count = SCHEMAS[scale]
    evidence.add("random schemas", count)
    _random_logits(count, evidence)
    _real_requests(REQUESTS[scale], evidence)
    evidence.add("schemas refused", count, arm="every schema refused")
    evidence.add("answers that ended", 0, arm="every schema refused")
    evidence.add("invalid answers", 0, arm="every schema refused")
    evidence.add("schemas refused", 0, arm="every answer cut")
    evidence.add("answers that ended", 0, arm="every answer cut")
    evidence.add("invalid answers", 0, arm="every answer cut")
    return evidence


def _random_logits(count: int, evidence: Evidence) -> None:
    """Record answers under random logits with and without the grammar, and whether valid texts are accepted."""
    from pippin.core.errors import SchemaError
    from pippin.core.formats.gguf import open_gguf
    from pippin.core.store import store
    from pippin.data.text.tokenizer import Tokenizer
    from pippin.engine.grammar.constraint import Grammar

    tokenizer = Tokenizer.from_gguf(open_gguf(store.pull("smollm2-135m")))
    token_bytes = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
    free = Grammar.text()
    refused = 0
    found = {arm: {"ended": 0, "invalid": 0} for arm in ("guided", "no grammar")}
    accepted: list[bool] = []
    for seed in range(count):
        schema = random_schema(seed)
        try:
            grammar = Grammar.json_schema(schema)
        except SchemaError:
            refused += 1
            continue
        for arm, constraint in (("guided", grammar.start(tokenizer)), ("no grammar", free.start(tokenizer))):
            for greedy in (True, False):
                if arm == "no grammar" and (greedy or seed >= WITHOUT):
                    continue
                text, _ = draw_answer(constraint.fork(), token_bytes, seed=seed, greedy=greedy)
                if text is None:
                    continue
                found[arm]["ended"] += 1
                wrong = _invalid(schema, text)
                found[arm]["invalid"] += wrong
                if arm == "guided" and not wrong:  # split into other tokens than it was sampled in
                    accepted.append(grammar.start(tokenizer).follow(tokenizer.encode(text)))
    evidence.add("schemas refused", refused, arm="guided")
    evidence.add("schemas refused", 0, arm="no grammar")
    for arm, counts in found.items():
        evidence.add("answers that ended", counts["ended"], arm=arm)
        evidence.add("invalid answers", counts["invalid"], arm=arm)
    evidence.add("valid instances accepted", sum(accepted) / max(1, len(accepted)), arm="guided")


def _invalid(schema: Any, text: str) -> bool:
    try:
        return bool(faults(schema, text))
    except ValueError:  # no JSON at all
        return True


def _real_requests(count: int, evidence: Evidence) -> None:
    """Record requests of real users, typed by the signature of the function that they call."""
    from pippin.core.errors import AnswerTruncated, InvalidInput
    from pippin.core.store import store
    from pippin.session import GenerationOptions, Session

    lines = (store.pull("bfcl") / "BFCL_v4_simple_python.json").read_text(encoding="utf-8").splitlines()
    session = Session("smollm2-135m", instructions="Extract the arguments of the function from the request.")
    failures = cut = tokens = 0
    for line in lines[:count]:
        item = json.loads(line)
        schema = _standard(item["function"][0]["parameters"])
        session.reset()
        try:
            answer = session.respond(
                item["question"][0][0]["content"], generating=schema, options=GenerationOptions(max_tokens=400)
            )
        except AnswerTruncated:
            cut += 1
        except InvalidInput:
            failures += 1
        else:
            failures += bool(faults(schema, answer.raw_content))
            tokens += answer.usage.output_tokens
    evidence.add("real requests", count)
    evidence.add("real requests that failed", failures, arm="guided")
    evidence.add("real requests cut", cut, arm="guided")
    evidence.add("tokens per typed answer", tokens / max(1, count - cut))


def _standard(schema: Any) -> Any:
    """BFCL's own dialect ("dict", "float", "tuple", "any") as JSON Schema."""
    names = {"dict": "object", "float": "number", "tuple": "array", "any": None}
    if isinstance(schema, list):
        return [_standard(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            kind = names.get(value, value)
            result |= {"type": kind} if kind else {}
        elif key == "properties":
            result[key] = {name: _standard(inner) for name, inner in value.items()}
        elif key in ("items", "required", "enum", "description", "minimum", "maximum"):
            result[key] = _standard(value) if key == "items" else value
    return result | ({"additionalProperties": False} if result.get("type") == "object" else {})
