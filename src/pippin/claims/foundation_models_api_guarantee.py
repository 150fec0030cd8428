"""Guided generation keeps its promise against the worst model there is, random logits, and on real requests."""

from __future__ import annotations

import json
from typing import Any

from pippin.claims import Evidence, Scale, claim
from pippin.claims._random_schemas import draw_answer, faults, random_schema

SCHEMAS = {"smoke": 8, "laptop": 500, "gpu": 500}
REQUESTS = {"smoke": 2, "laptop": 50, "gpu": 50}


@claim(
    id="foundation-models-api-guarantee",
    source="arXiv:2507.13575, guided generation and constrained tool calling",
    paper="constrained decoding guarantees that an answer parses as the declared type and that tool arguments fit",
    setting="500 random JSON Schemas (nesting up to 4, every constraint, escapes, recursion) under random logits, both "
    "greedy and sampled, over the default model's tokenizer; and the first 50 requests of BFCL v4 simple_python, each "
    "answered by the default model under the request's own function signature",
    accept="random logits: every answer that ends is valid for the independent library jsonschema, at least half of "
    "them end, and what is not accepted is refused with a typed error; real requests: no answer fails to parse or "
    "validate, and none is cut at 400 tokens without a typed error",
)
def run(scale: Scale) -> Evidence:
    """Both halves."""
    evidence = Evidence()
    invalid, ended, drawn = _random_logits(SCHEMAS[scale.name], evidence)
    failures = _real_requests(REQUESTS[scale.name], evidence)
    return evidence.accept(random_logits=invalid == 0 and ended >= drawn / 2, real_requests=failures == 0)


def _random_logits(count: int, evidence: Evidence) -> tuple[int, int, int]:
    """Answers under random logits: invalid ones, ended ones, all."""
    from pippin.core import store
    from pippin.core.errors import SchemaError
    from pippin.core.gguf import open_gguf
    from pippin.data.tokenizer import Tokenizer
    from pippin.engine.constraint import Grammar

    tokenizer = Tokenizer.from_gguf(open_gguf(store.pull("smollm2-135m")))
    token_bytes = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
    refused = invalid = ended = drawn = 0
    for seed in range(count):
        schema = random_schema(seed)
        try:
            grammar = Grammar.json_schema(schema)
            constraint = grammar.start(tokenizer)
        except SchemaError:
            refused += 1
            continue
        for greedy in (True, False):
            text, _ = draw_answer(constraint.fork(), token_bytes, seed=seed, greedy=greedy)
            drawn += 1
            if text is not None:
                ended += 1
                invalid += bool(faults(schema, text))
    evidence.add("random schemas", count)
    evidence.add("schemas refused with a typed error", refused)
    evidence.add("answers under random logits", drawn)
    evidence.add("answers that ended within 200 tokens", ended)
    evidence.add("invalid answers", invalid)
    return invalid, ended, drawn


def _real_requests(count: int, evidence: Evidence) -> int:
    """Requests of real users, typed by the signature of the function that they are about: the failures."""
    from pippin.core import store
    from pippin.core.errors import AnswerTruncated, InvalidInput
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
    evidence.add("real requests that failed to parse or validate", failures)
    evidence.add("real requests cut at 400 tokens with a typed error", cut)
    evidence.add("tokens per typed answer", tokens / max(1, count - cut))
    return failures


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
