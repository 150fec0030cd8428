"""Every constraint against random logits: what is written always fits, by an independent validator and by Pydantic."""

import datetime
import json
from decimal import Decimal
from typing import Annotated, Literal

import pytest
import torch
from pydantic import Field
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers, trainers

from pippin.claims.worlds.sequences.random_schemas import WORDS, draw_answer, faults, random_schema, random_type
from pippin.core.errors import SchemaError
from pippin.data.text.tokenizer import Tokenizer
from pippin.engine.grammar.constraint import Grammar
from pippin.session.types.schema import Choice, Regex, Schema

SEEDS = range(60)


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE of the words that random schemas use."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = [json.dumps(random_schema(seed), ensure_ascii=False) for seed in range(100)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(corpus, trainer)
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_ids=[backend.token_to_id("<end>")])


@pytest.fixture(scope="module")
def write(tokenizer):
    """Writes an answer with random logits; None where it met 200 tokens first."""
    spelled = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]

    def run(grammar: Grammar, seed: int, greedy: bool, bias: torch.Tensor | None = None) -> str | None:
        return draw_answer(grammar.start(tokenizer), spelled, seed=seed, greedy=greedy, bias=bias)[0]

    run.spelled = spelled
    return run


@pytest.mark.parametrize("greedy", [True, False])
def test_random_schemas(write, greedy):
    ended = refused = 0
    for seed in SEEDS:
        schema = random_schema(seed)
        try:
            grammar = Grammar.json_schema(schema)
        except SchemaError:
            refused += 1
            continue
        text = write(grammar, seed, greedy)
        if text is not None:
            ended += 1
            assert faults(schema, text) == [], (seed, text)
    assert refused <= len(SEEDS) // 6
    assert ended >= len(SEEDS) * 3 // 4


@pytest.mark.parametrize("greedy", [True, False])
def test_random_types(write, greedy):
    ended = 0
    for seed in SEEDS:
        schema = Schema(random_type(seed))
        text = write(schema.grammar, seed, greedy)
        if text is not None:
            ended += 1
            assert faults(schema.json_schema, text) == [], (seed, text)
            assert schema.snapshot(text) == schema.parse(text)
    assert ended >= len(SEEDS) * 3 // 4


GUIDES = [
    Annotated[int, Field(ge=3, le=5)],
    Annotated[int, Field(gt=-2, lt=0)],
    Annotated[int, Field(ge=-(10**30), le=-(10**29))],
    Annotated[int, Field(multiple_of=7, ge=100)],
    Annotated[int, Field(multiple_of=12, gt=0, lt=100)],
    Annotated[float, Field(gt=0, lt=0.1)],
    Annotated[float, Field(ge=-1.5, le=-1.25)],
    Annotated[float, Field(gt=1, lt=1.0000000000000004)],
    Annotated[float, Field(multiple_of=0.05, gt=0, le=1)],
    Annotated[float, Field(ge=1e16, lt=1e17)],
    Annotated[Decimal, Field(max_digits=4, decimal_places=2, gt=0)],
    Annotated[str, Field(min_length=2, max_length=3)],
    Annotated[str, Field(pattern=r"^[A-Z]{2}\d+$", max_length=6)],
    Annotated[str, Field(pattern=r'["\\]', max_length=4)],
    Annotated[list[int], Field(min_length=2, max_length=3)],
    Annotated[list[Annotated[str, Field(max_length=1)]], Field(max_length=2)],
    Annotated[dict[str, bool], Field(min_length=1, max_length=2)],
    Annotated[dict[Literal["a", "b", "c"], bool], Field(min_length=2)],
    Annotated[set[Literal["a", "b", "c"]], Field(min_length=2)],
    tuple[Literal[1], Annotated[str, Field(max_length=2)]],
    Annotated[datetime.date | None, Field(description="a day")],
    datetime.datetime,
    Literal["a", "b", 3],
]


@pytest.mark.parametrize("target", GUIDES, ids=str)
def test_each_guide(write, target):
    schema = Schema(target)
    texts = [text for seed in range(8) if (text := write(schema.grammar, seed, seed % 2 == 0)) is not None]
    assert len(texts) >= 6
    for text in texts:
        assert faults(schema.json_schema, text) == [], text
        schema.parse(text)


def test_a_model_that_wants_none_of_the_choices_still_takes_one(write):
    wanted = ["Paris", "Rom", "Beijing", "Oslo2", "null", '"', "Rome\\n"]
    bias = torch.tensor(
        [60.0 if text and any(text in word.encode() for word in wanted) else 0.0 for text in write.spelled]
    )
    cities = ["Rome", "Oslo", "Größe", 'quo"te']
    for target in (Choice(cities), Literal[tuple(cities)], list[Literal[tuple(cities)]], {"enum": cities}):
        schema = Schema(target)
        for seed in range(20):
            text = write(schema.grammar, seed, seed % 2 == 0, bias)
            if text is not None:
                answer = schema.parse(text)
                assert all(city in cities for city in (answer if isinstance(answer, list) else [answer]))


def test_a_regular_expression_holds_against_any_wish(write):
    schema = Schema(Regex(r"(ab|cd){2}-\d{1,3}"))
    for seed in range(20):
        text = write(schema.grammar, seed, seed % 2 == 0)
        assert text is not None
        assert schema.parse(text) == text


def test_names_that_break_hand_written_json(write):
    schema = {
        "type": "object",
        "properties": {word: {"enum": list(WORDS)} for word in WORDS},
        "required": list(WORDS[:12]),
        "additionalProperties": False,
    }
    text = write(Grammar.json_schema(schema), 0, False)
    assert text is not None
    assert faults(schema, text) == []
    assert next(iter(json.loads(text))) == WORDS[0]
