"""Reasoning before the answer: where it ends, its budget to the token, and the grammar that begins behind it.

The model's output is given token by token, so that every turn of an answer is known beforehand.
"""

import pytest
import tiny_model
import torch

from pippin.core.errors import InvalidArgument
from pippin.engine import Engine, Request, SamplingOptions
from pippin.engine.decoding.thinking import Thinking, ThinkingPhase
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.output_processor import OutputProcessor

TAGS = Thinking("<think>", "</think>", "\n\n")
YES = Grammar.choice(["yes", "no"])


@pytest.fixture(scope="module")
def model():
    return tiny_model.build(control=("<|im_end|>", "<|im_start|>", "[THINK]", "[/THINK]"))


def answer(model, wanted, thinking=TAGS, **fields):
    """Reasoning, text, ids and the last event of an answer whose every token is the one that ``wanted`` has there.

    Behind its end the model would end the answer. What the engine writes takes its place in ``wanted``, so that the
    model goes on where it was.
    """
    options = fields.pop("options", SamplingOptions(temperature=0))
    processor = OutputProcessor(model, Request([65], options, thinking=thinking, **fields), 500)
    ids = wanted if isinstance(wanted, list) else model.tokenizer.encode(wanted, control=True)
    waiting, tokens = [*ids, 256, 256, 256], []
    while processor.finish_reason is None:
        logits = torch.zeros(1, model.config.vocab_size)
        logits[0, waiting.pop(0)] = 9.0
        tokens += processor.process(logits)
    last = processor.finished(processor.finish_reason)
    reasoning = "".join(token.reasoning or "" for token in tokens) + last.reasoning
    return reasoning, "".join(token.text for token in tokens) + last.text, tokens, last


def test_the_model_ends_its_reasoning_itself(model):
    reasoning, text, tokens, last = answer(model, "Hm, </th or so.</think>\n\nYes.")
    assert (reasoning, text, last.finish_reason) == ("Hm, </th or so.", "\n\nYes.", "stop")
    assert last.reasoning_tokens == len("Hm, </th or so.</think>")
    assert [token.reasoning is None for token in tokens] == [False] * last.reasoning_tokens + [True] * len("\n\nYes.")


@pytest.mark.parametrize("budget", [1, 5, 20])
def test_the_budget_is_held_to_the_token_and_the_engine_writes_the_tag(model, budget):
    thinking = Thinking("<think>", "</think>", "\n\n", max_tokens=budget)
    reasoning, text, tokens, last = answer(model, "a" * budget + "Yes.", thinking)
    assert (reasoning, text, last.reasoning_tokens) == ("a" * budget, "Yes.", budget)
    assert model.tokenizer.decode(token.id for token in tokens) == "a" * budget + "</think>\n\nYes."


def test_a_budget_leaves_room_for_the_answer(model):
    thinking = Thinking("<think>", "</think>", "\n\n", max_tokens=100)
    options = SamplingOptions(temperature=0, max_tokens=30)
    reasoning, text, tokens, last = answer(model, "a" * 100, thinking, options=options)
    assert (reasoning, text, last.finish_reason, len(tokens)) == ("a" * 19, "a", "length", 30)


def test_a_grammar_begins_behind_the_reasoning(model):
    reasoning, text, *_ = answer(model, "I say no.</think>yes", grammar=YES)
    assert (reasoning, text) == ("I say no.", "yes")
    spent = Thinking("<think>", "</think>", max_tokens=3)
    assert answer(model, "abczzz", spent, grammar=YES)[:2] == ("abc", "no"), "whatever the model would rather write"


def test_an_end_of_the_answer_within_the_reasoning(model):
    reasoning, text, tokens, _ = answer(
        model, [*model.tokenizer.encode("Hm"), 256, *model.tokenizer.encode("no")], grammar=YES
    )
    assert (reasoning, text) == ("Hm", "no")
    assert model.tokenizer.decode(token.id for token in tokens) == "Hm</think>\n\nno"
    assert answer(model, "Hm")[:2] == ("Hm", ""), "a free answer ends there"
    assert answer(model, "Hm </thi")[:2] == ("Hm </thi", "")


def test_stop_strings_and_logprobs_are_those_of_the_answer(model):
    options = SamplingOptions(temperature=0, stop=["END"], logprobs=0)
    reasoning, text, tokens, _ = answer(model, "END of it</think>Yes END no", options=options)
    assert (reasoning, text) == ("END of it", "Yes ")
    assert all((token.logprob is None) == (token.reasoning is not None) for token in tokens)


def test_tags_that_are_control_tokens(model):
    tags = Thinking("[THINK]", "[/THINK]", max_tokens=3)
    assert answer(model, "ab[/THINK]Yes.", tags)[:2] == ("ab", "Yes.")
    _, text, tokens, _ = answer(model, "abcYes.", tags)
    assert text == "Yes."
    assert tokens[3].id == model.tokenizer.control_tokens["[/THINK]"]


@pytest.mark.parametrize("wanted", ["<think>Hm</think>Yes", "\n<think>Hm</think>Yes", "[THINK]Hm[/THINK]Yes"])
def test_reasoning_that_the_model_begins_itself(model, wanted):
    tags = ("[THINK]", "[/THINK]") if "[" in wanted else ("<think>", "</think>")
    assert answer(model, wanted, Thinking(*tags, begun=False))[:2] == ("Hm", "Yes")


def test_an_answer_that_begins_in_another_way_is_an_answer(model):
    thinking = Thinking("<think>", "</think>", begun=False)
    options = SamplingOptions(temperature=0, logprobs=0)
    reasoning, text, tokens, last = answer(model, "Yes", thinking, options=options)
    assert (reasoning, text, last.reasoning_tokens) == ("", "Yes", 0)
    assert all(token.logprob is not None and token.reasoning is None for token in tokens)
    assert answer(model, "<thick> lines", thinking)[:2] == ("", "<thick> lines")
    assert answer(model, "<th", thinking)[:2] == ("", "<th")
    assert answer(model, "yes", thinking, grammar=YES)[:2] == ("", "yes")


def test_a_token_that_goes_beyond_the_tag_is_replaced_where_a_grammar_begins():
    vocabulary = {1: b"Hm</think", 2: b'>{"', 3: b">\n\n"}
    spelled = {}

    def encode(text):
        return [spelled.setdefault(text, 100 + len(spelled))]

    for token, exact, given in ((2, True, [101]), (2, False, [2]), (3, True, [101]), (3, False, [3])):
        spelled.clear()
        phase = ThinkingPhase(TAGS, encode, 100, exact=exact)
        assert phase.push(1, vocabulary[1]) == [1]
        assert phase.push(token, vocabulary[token]) == given
        assert phase.over
        assert spelled.get(">\n\n") == (101 if exact else None)
        assert phase.answer == ("" if exact else vocabulary[token][1:].decode())


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_speculation_changes_nothing(model, draft):
    from pippin.engine.speculation import Speculation

    thinking = Thinking("<think>", "</think>", "\n\n", max_tokens=12)
    options = SamplingOptions(temperature=0, max_tokens=60)
    with_, without = (
        [
            (event.text, event.reasoning)
            for event in Engine(model, cache_tokens=1024).stream(
                Request([*b"abcabcabcabc"], options, YES, thinking=thinking, speculation=each)
            )
        ]
        for each in (Speculation(model if draft == "model" else draft), None)
    )
    assert "".join(text for text, _ in with_) in ("yes", "no")
    assert with_ == without


GRANITE = Thinking("<think>", "</think>", "<response>", ("<response>", "</response>"))
COHERE = Thinking(
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"), ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
)
AROUND = pytest.mark.parametrize("tags", [GRANITE, COHERE], ids=["granite", "cohere"])


@pytest.fixture(scope="module", params=["text", "control tokens"])
def tagged(request, model):
    """A model whose tags are text, byte by byte, or tokens of their own."""
    if request.param == "text":
        return model
    tags = [tag for thinking in (GRANITE, COHERE) for tag in (thinking.begin, thinking.end, *thinking.around)]
    return tiny_model.build(control=("<|im_end|>", "<|im_start|>", *tags))


@AROUND
@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("space", ["", "\n"])
def test_tags_around_the_answer_are_no_part_of_it(tagged, tags, spelled, space):
    begin, end = tags.around
    fields = {"skip_special_tokens": not spelled}
    whole = f"Hm.{tags.end}{space}{begin}Yes </b>, <resp.{end}{space}"
    reasoning, text, _, last = answer(tagged, whole, tags, **fields)
    assert (reasoning, text.strip(), last.finish_reason) == ("Hm.", "Yes </b>, <resp.", "stop")
    begun = Thinking(tags.begin, tags.end, tags.after, tags.around, begun=False)
    assert answer(tagged, tags.begin + whole, begun, **fields)[:2] == (reasoning, text)
    assert answer(tagged, f"{begin}Yes.{end}", begun, **fields)[:2] == ("", "Yes."), "an answer without reasoning"
    assert answer(tagged, "Yes.", begun, **fields)[:2] == ("", "Yes.")
    assert answer(tagged, f"Hm{tags.end}Yes.", tags, **fields)[:2] == ("Hm", "Yes."), "the model forgot the tags"


@AROUND
def test_an_answer_may_contain_the_tags_of_answers(model, tags):
    begin, end = tags.around
    for text in (f"Write {begin}4{end} there.", f"{end}{end}x", f"a{begin}"):
        assert answer(model, f"Hm{tags.end}{begin}{text}{end}", tags)[:2] == ("Hm", text)
        assert answer(model, f"Hm{tags.end}x{text}{end}", tags)[:2] == ("Hm", f"x{text}{end}"), "no tag before it"
    cut = SamplingOptions(temperature=0, max_tokens=len(f"Hm{tags.end}{begin}Yes{end}") - 2)
    assert answer(model, f"Hm{tags.end}{begin}Yes{end}", tags, options=cut)[:2] == ("Hm", f"Yes{end[:-2]}")
    stop = SamplingOptions(temperature=0, stop=["es"])
    assert answer(model, f"Hm{tags.end}{begin}Yes{end}", tags, options=stop)[:2] == ("Hm", "Y")


@AROUND
def test_what_the_engine_writes_opens_the_answer_too(tagged, tags):
    begin, end = tags.around
    spent = Thinking(tags.begin, tags.end, tags.after, tags.around, max_tokens=3)
    reasoning, text, tokens, _ = answer(tagged, f"abcYes.{end}", spent)
    assert (reasoning, text) == ("abc", "Yes.")
    spelled = b"".join(tagged.tokenizer.spelled_bytes(token.id) for token in tokens).decode()
    assert spelled.startswith(f"abc{tags.end}{begin}Yes.")
    for fields in ({}, {"skip_special_tokens": False}):
        assert answer(tagged, f"Hm{tags.end}yes", tags, grammar=YES, **fields)[:2] == ("Hm", "yes")
        quoted = Grammar.choice([f'"{end}"', "no"])
        if len(tagged.tokenizer.encode(end, control=True)) > 1:  # a grammar is of text, never of control tokens
            assert answer(tagged, f'abc"{end}"', spent, grammar=quoted, **fields)[1] == f'"{end}"'


def test_budgets_are_positive():
    with pytest.raises(InvalidArgument, match="max_tokens must be"):
        Thinking("<think>", "</think>", max_tokens=0)
