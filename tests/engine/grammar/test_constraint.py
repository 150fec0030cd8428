"""The mask against brute force, the ends of an answer, every error, and nothing let through after one."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from llguidance import LLParserLimits
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers, trainers

from pippin.core.errors import DecodingFailure, EmptySchema, InvalidArgument, SchemaError, UnsupportedGuide
from pippin.data.text.tokenizer import Tokenizer
from pippin.engine.grammar import constraint as engine, regex
from pippin.engine.grammar.constraint import Constraint, Grammar
from pippin.engine.grammar.stack import MAX_SOURCE

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE of 600 tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    corpus = ['{"name": "Ann", "age": 31, "city": "Oslo"}', "yes no maybe", "the answer is forty two"] * 30
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<pad>", "<end>"])
    return Tokenizer(backend, eos_ids=[backend.token_to_id("<end>")])


def write(constraint: Constraint, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text):
        constraint.accept(token)


@pytest.mark.parametrize("prefix", ["", "y", "ye"])
def test_the_mask_is_the_set_of_tokens_that_keep_a_choice_possible(tokenizer, prefix):
    choices = ["yes", "yesterday", "no", "maybé"]
    constraint = Grammar.choice(choices).start(tokenizer)
    write(constraint, tokenizer, prefix)
    for token in range(tokenizer.vocab_size):
        text = prefix.encode() + tokenizer.token_bytes(token)
        possible = any(choice.encode().startswith(text) for choice in choices) and len(text) > len(prefix)
        # a token that the grammar forces may stand for all that spell the same beginning
        if constraint.allows(token):
            assert possible
        elif possible:
            assert constraint.forced()


def test_apply_bans_exactly_what_the_mask_bans(tokenizer):
    constraint = Grammar.json_schema(SCHEMA).start(tokenizer)
    write(constraint, tokenizer, '{"name": "')
    logits = torch.randn(tokenizer.vocab_size + 7, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    constraint.apply(logits)
    bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
    allowed = torch.from_numpy(bits).bool()
    assert 0 < int(allowed.sum()) < tokenizer.vocab_size
    assert torch.equal(logits[: tokenizer.vocab_size][allowed], before[: tokenizer.vocab_size][allowed])
    assert logits[: tokenizer.vocab_size][~allowed].eq(-torch.inf).all()
    assert logits[tokenizer.vocab_size :].eq(-torch.inf).all()  # a padded output layer
    assert not constraint.allows(tokenizer.vocab_size)


@pytest.mark.parametrize("view", [torch.Tensor.double, torch.Tensor.bfloat16, lambda x: x.repeat(2, 1).T[:, 0]])
def test_other_precisions_and_layouts_are_masked_alike(tokenizer, view):
    constraint = Grammar.json_schema(SCHEMA).start(tokenizer)
    write(constraint, tokenizer, '{"name": "')
    plain = torch.randn(tokenizer.vocab_size + 7, generator=torch.Generator().manual_seed(0))
    logits = view(plain)
    before = logits.clone()
    constraint.apply(plain)
    constraint.apply(logits)
    assert torch.equal(logits.isinf(), plain.isinf())
    assert torch.equal(logits[~plain.isinf()], before[~plain.isinf()])


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 65])
def test_ids_outside_the_vocabulary_are_allowed_nowhere(tokenizer, size):
    constraint = Grammar.text().start(tokenizer)
    assert not constraint.allows(-1)
    assert not constraint.allows(tokenizer.vocab_size)
    assert not constraint.allows(32 * len(constraint.mask()))
    logits = torch.zeros(size)  # an output layer that is too narrow
    constraint.apply(logits)
    assert logits.isfinite().tolist() == [constraint.allows(token) for token in range(size)]


def test_the_mask_agrees_with_what_is_allowed_token_by_token(tokenizer):
    constraint = Grammar.regex("[a-f]+").start(tokenizer)
    bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
    allowed = [token for token in range(tokenizer.vocab_size) if constraint.allows(token)]
    assert allowed == np.flatnonzero(bits).tolist()
    assert {letter for token in allowed for letter in tokenizer.token_bytes(token)} <= set(b"abcdef")
    assert len(constraint.mask()) == -(-tokenizer.vocab_size // 32)


def test_the_mask_is_computed_once_a_step(tokenizer):
    constraint = Grammar.choice(["yes", "no"]).start(tokenizer)
    first = constraint.mask()
    first[:] = 0  # a mark, which a second computation would write over
    assert not constraint.mask().any()
    constraint.accept(tokenizer.encode("y")[0])
    assert constraint.mask().any()
    assert constraint.mask() is first
    first[:] = 0
    constraint.rollback(0)
    assert constraint.mask().any()
    first[:] = 0
    assert constraint.follow([])
    assert constraint.mask().any()


@pytest.mark.parametrize(
    ("texts", "follows", "may_end"),
    [("yes", True, True), ("ye", True, False), ("yex", False, False), ("yesyes", False, True), ("", True, False)],
)
def test_following_a_text_goes_as_far_as_it_is_allowed(tokenizer, texts, follows, may_end):
    constraint = Grammar.regex("yes|no").start(tokenizer)
    tokens = [token for letter in texts for token in tokenizer.encode(letter)]
    assert constraint.follow(tokens) == follows
    assert constraint.may_end == may_end
    constraint.rollback(len(tokens) if follows else {"yex": 2, "yesyes": 3}[texts])
    assert constraint.follow(tokenizer.encode("no"))
    assert constraint.finished


def test_an_answer_from_its_beginning_to_its_end(tokenizer):
    constraint = Grammar.json_schema(SCHEMA).start(tokenizer)
    assert (constraint.may_end, constraint.finished, constraint.ended) == (False, False, False)
    write(constraint, tokenizer, '{"name": "Ann", "age": 31')
    assert not constraint.may_end
    assert not constraint.allows(tokenizer.eos_ids[0])
    write(constraint, tokenizer, "}")
    assert constraint.may_end
    assert constraint.finished
    constraint.accept(tokenizer.eos_ids[0])
    assert constraint.ended
    with pytest.raises(DecodingFailure, match="after the end"):
        constraint.accept(0)


def test_a_number_may_end_and_may_go_on(tokenizer):
    constraint = Grammar.json_schema({"type": "integer"}).start(tokenizer)
    write(constraint, tokenizer, "12")
    assert constraint.may_end
    assert not constraint.finished


def test_what_must_come_is_forced(tokenizer):
    constraint = Grammar.json_schema(SCHEMA).start(tokenizer)
    forced = constraint.forced()
    assert '{"name": "'.startswith(tokenizer.decode(forced))
    assert len(forced) > 0
    for token in forced:
        constraint.accept(token)
    write(constraint, tokenizer, '{"name": "Ann", "age": 3}'[len(tokenizer.decode(forced)) :])
    assert constraint.forced() == []


@given(st.lists(st.integers(0, 10**6), max_size=30), st.integers(0, 30))
@settings(max_examples=30)
def test_taking_back_and_going_again_is_the_same(tokenizer, choices, back):
    grammar = Grammar.json_schema({"type": "array", "items": {"enum": ["yes", "no", 31, None]}})
    constraint = grammar.start(tokenizer)
    masks, tokens = [], []
    for choice in choices:
        masks.append(constraint.mask().copy())
        allowed = np.flatnonzero(np.unpackbits(masks[-1].view(np.uint8), bitorder="little"))
        if tokenizer.eos_ids[0] in allowed:
            break
        tokens.append(int(allowed[choice % len(allowed)]))
        constraint.accept(tokens[-1])
    back = min(back, len(tokens))
    fork = constraint.fork()
    constraint.rollback(back)
    for i in range(len(tokens) - back, len(tokens)):
        np.testing.assert_array_equal(constraint.mask(), masks[i])
        constraint.accept(tokens[i])
    np.testing.assert_array_equal(constraint.mask(), fork.mask())


@pytest.mark.parametrize(("text", "reached"), [("yes", "yes"), ("yexs", "ye"), ("no", "no"), ("ya", "y"), ("x", "")])
def test_how_far_tokens_would_be_accepted(tokenizer, text, reached):
    constraint = Grammar.regex("yes|no").start(tokenizer)
    before = constraint.mask().copy()
    tokens = [token for letter in text for token in tokenizer.encode(letter)]
    assert tokenizer.decode(tokens[: constraint.reach(tokens)]) == reached
    assert constraint.reach([*tokens, tokenizer.vocab_size]) == constraint.reach(tokens)  # of a padded model
    np.testing.assert_array_equal(constraint.mask(), before)
    write(constraint, tokenizer, "yes")
    constraint.accept(tokenizer.eos_ids[0])
    assert constraint.reach(tokens) == 0


@pytest.mark.parametrize("pattern", ["yes", "(yes)+"])
def test_nothing_is_reached_behind_the_end(tokenizer, pattern):
    constraint = Grammar.regex(pattern).start(tokenizer)
    write(constraint, tokenizer, "yes")
    end = tokenizer.eos_ids[0]
    assert constraint.reach([end]) == 1 or pattern == "yes"
    constraint.accept(end)
    assert constraint.reach([end]) == constraint.reach([tokenizer.encode("y")[0]]) == 0


def test_an_answer_that_could_go_on_but_with_nothing_is_finished(tokenizer):
    constraint = Grammar('start: "a" B?\nB: /x/ & /y/').start(tokenizer)
    assert not constraint.finished
    write(constraint, tokenizer, "a")
    assert not constraint._matcher.is_stopped()
    assert constraint.finished
    assert constraint.forced() == []
    assert not constraint.ended


def test_a_lark_grammar_is_taken_as_it_is_within_the_limits(monkeypatch):
    source = 'start: "a" B\nB: /[b-d]+/'
    grammar = Grammar.lark(source)
    assert grammar.source == source
    assert (grammar.allows("ad"), grammar.allows("a"), grammar.allows("ae")) == (True, False, False)
    monkeypatch.setattr(engine, "LIMITS", LLParserLimits(max_grammar_size=1, verbose_errors=False))
    with pytest.raises(SchemaError, match="too big"):
        Grammar.lark(source)


def test_taking_back_the_end(tokenizer):
    constraint = Grammar.choice(["yes"]).start(tokenizer)
    write(constraint, tokenizer, "yes")
    constraint.accept(tokenizer.eos_ids[0])
    constraint.rollback(1)
    assert constraint.finished
    assert not constraint.ended
    with pytest.raises(InvalidArgument, match="cannot take back 99"):
        constraint.rollback(99)


@pytest.mark.parametrize("count", [-1, 4])
def test_only_what_was_accepted_is_taken_back(tokenizer, count):
    constraint = Grammar.choice(["yes"]).start(tokenizer)
    for letter in "yes":
        constraint.accept(tokenizer.encode(letter)[0])
    with pytest.raises(InvalidArgument, match=f"cannot take back {count} of 3 tokens"):
        constraint.rollback(count)
    constraint.rollback(0)
    assert constraint.finished
    constraint.rollback(3)
    assert constraint.reach([token for letter in "yes" for token in tokenizer.encode(letter)]) == 3


@pytest.mark.parametrize("pattern", ["yes", "(yes)+"])
@pytest.mark.parametrize("back", [0, 1, 2, 3, 4])
def test_the_end_and_what_is_before_it_are_taken_back_together(tokenizer, pattern, back):
    constraint = Grammar.regex(pattern).start(tokenizer)
    letters = [tokenizer.encode(letter)[0] for letter in "yes"]
    for token in [*letters, tokenizer.eos_ids[0]]:
        constraint.accept(token)
    constraint.rollback(back)
    assert constraint.ended == (back == 0)
    assert constraint.may_end == (back <= 1)
    assert constraint.finished == (back == 0 or (back == 1 and pattern == "yes"))
    if back > 1:
        assert constraint.follow(letters[4 - back :])
        constraint.accept(tokenizer.eos_ids[0])
        assert constraint.ended


def test_a_text_without_end_may_go_on_after_it_could_end(tokenizer):
    constraint = Grammar.text().start(tokenizer)
    assert (constraint.may_end, constraint.finished, constraint.forced()) == (True, False, [])
    write(constraint, tokenizer, "any")
    assert (constraint.may_end, constraint.finished) == (True, False)
    constraint.accept(tokenizer.eos_ids[0])
    assert (constraint.may_end, constraint.finished, constraint.forced()) == (True, True, [])


def test_a_fork_takes_back_the_end_as_its_original_does(tokenizer):
    constraint = Grammar.choice(["yes"]).start(tokenizer)
    write(constraint, tokenizer, "yes")
    constraint.accept(tokenizer.eos_ids[0])
    fork = constraint.fork()
    fork.rollback(1)
    assert fork.finished
    assert not fork.ended
    assert constraint.ended


def test_a_fork_goes_its_own_way(tokenizer):
    constraint = Grammar.choice(["yes", "no"]).start(tokenizer)
    fork = constraint.fork()
    write(fork, tokenizer, "no")
    assert fork.finished
    write(constraint, tokenizer, "yes")
    assert constraint.finished


def test_an_error_is_raised_again_and_lets_nothing_through(tokenizer):
    constraint = Grammar.json_schema(SCHEMA).start(tokenizer)
    with pytest.raises(DecodingFailure, match="does not allow token"):
        constraint.accept(tokenizer.encode("yes")[0])
    for _ in range(2):  # llguidance itself would now offer the end token
        with pytest.raises(DecodingFailure):
            constraint.mask()
    with pytest.raises(DecodingFailure):
        constraint.apply(torch.zeros(tokenizer.vocab_size))
    with pytest.raises(DecodingFailure):
        constraint.accept(tokenizer.eos_ids[0])
    assert not constraint.may_end
    assert not constraint.finished


def test_the_end_is_not_accepted_early(tokenizer):
    constraint = Grammar.choice(["yes"]).start(tokenizer)
    with pytest.raises(DecodingFailure, match="does not allow"):
        constraint.accept(tokenizer.eos_ids[0])


def test_a_limit_of_the_engine_is_an_error_not_an_end(tokenizer, monkeypatch):
    monkeypatch.setattr(engine, "LIMITS", LLParserLimits(step_max_items=1, verbose_errors=False))
    grammar = Grammar('start: "[" item ("," item)* "]"\nitem: "a" | "b" | start')
    constraint = grammar.start(tokenizer)
    with pytest.raises(DecodingFailure):
        _go_deep(constraint, tokenizer)


def _go_deep(constraint, tokenizer):
    for _ in range(5):
        constraint.mask()
        write(constraint, tokenizer, "[")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_leave_nothing_to_choose(tokenizer, bad):
    with pytest.raises(DecodingFailure, match="no token is left"):
        Grammar.choice(["yes"]).start(tokenizer).apply(torch.full((tokenizer.vocab_size,), bad))


def test_nan_among_banned_tokens_does_no_harm(tokenizer):
    constraint = Grammar.choice(["yes", "no"]).start(tokenizer)
    logits = torch.full((tokenizer.vocab_size,), torch.nan)
    allowed = [i for i in range(tokenizer.vocab_size) if constraint.allows(i)]
    logits[allowed] = 1.0
    constraint.apply(logits)
    assert logits.isfinite().sum() == len(allowed)


def test_each_tokenizer_has_its_own_mask(tokenizer):
    grammar = Grammar.choice(["yes", "no", "the answer"])
    bytes_alone = Constraint(engine._compile(grammar.source, regex.byte_tokenizer()), regex.byte_tokenizer())
    assert len(bytes_alone.mask()) < len(grammar.start(tokenizer).mask())
    bits = np.unpackbits(bytes_alone.mask().view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == sorted(b"ynt")


WORDS = {"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "maxLength": 500}


def test_a_pattern_with_counts_and_a_length_is_written_to_its_end(tokenizer):
    text = json.dumps(" ".join(["word"] * 50))
    for _ in range(2):
        constraint = Grammar.json_schema(WORDS).start(tokenizer)
        for token in tokenizer.encode(text):
            constraint.mask()
            constraint.accept(token)
        assert constraint.may_end
    constraint.rollback(1)
    assert not constraint.follow(tokenizer.encode(" more"))


def test_a_request_that_reaches_a_limit_ends_no_other(tokenizer, monkeypatch):
    grammar = Grammar.json_schema(WORDS)
    healthy = grammar.start(tokenizer)
    tight = LLParserLimits(verbose_errors=False, step_lexer_fuel=1_000)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "LIMITS", tight)
        failing = grammar.start(tokenizer)
    failing.accept(tokenizer.encode('"')[0])
    with pytest.raises(UnsupportedGuide, match="too many expressions"):
        failing.mask()
    for constraint in (healthy, grammar.start(tokenizer), Grammar.json_schema(SCHEMA).start(tokenizer)):
        assert constraint.mask().any()
        constraint.accept(constraint.forced()[0] if constraint.forced() else tokenizer.encode('"')[0])
        assert constraint.mask().any()


class Failed:
    """A matcher that could not be compiled."""

    def __init__(self, *_, **__):
        pass

    def is_error(self):
        return True


@pytest.mark.parametrize(
    ("message", "error", "told"),
    [
        *(
            (
                f"it took {word} of it",
                UnsupportedGuide,
                f"^the grammar is too large for the engine: it took {word} of it$",
            )
            for word in ("fuel", "limit", "too many", "too large", "too big", "complex", "symbols.len")
        ),
        ("no rule", SchemaError, "^the grammar is malformed: no rule$"),
    ],
)
def test_a_grammar_that_is_too_large_is_told_from_one_that_is_wrong(tokenizer, monkeypatch, message, error, told):
    monkeypatch.setattr(engine, "LLMatcher", Failed)
    monkeypatch.setattr(engine.regular, "first_line", lambda matcher: message)
    with pytest.raises(error, match=told):
        Grammar(f"start: {message}").start(tokenizer)


def test_a_grammar_beyond_the_limits_of_the_engine_is_unsupported(tokenizer, monkeypatch):
    monkeypatch.setattr(engine, "LIMITS", LLParserLimits(max_grammar_size=10, verbose_errors=False))
    with pytest.raises(UnsupportedGuide, match="the grammar is too large for the engine: "):
        Grammar.json_schema(SCHEMA | {"title": "for this test alone", "maxProperties": 2}).start(tokenizer)


def test_compiling_takes_the_time_that_it_says(tokenizer, monkeypatch):
    times = iter([100.0, 107.5])
    monkeypatch.setattr(engine.time, "perf_counter", lambda: next(times))
    constraint = Grammar.choice(["quick", "slow"]).start(tokenizer)
    assert constraint.compile_seconds == 7.5
    assert constraint.fork().compile_seconds == 0


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":"), (" ,  ", " : ")])
def test_white_space_is_what_the_separators_say(separators):
    grammar = Grammar.json_schema({"type": "array", "items": SCHEMA}, separators=separators)
    value = [{"name": "a", "age": 1}, {"name": "b", "age": 2}]
    assert grammar.allows(json.dumps(value, separators=separators))
    assert not grammar.allows(json.dumps(value, separators=(", ", ":")))
    assert not grammar.allows(" " + json.dumps(value, separators=separators))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Grammar.choice([]), EmptySchema, "at least one text"),
        (lambda: Grammar.choice("yes"), InvalidArgument, "list of texts"),
        (lambda: Grammar.regex("[^\\s\\S]"), EmptySchema, "matches no text"),
        (lambda: Grammar.regex("("), SchemaError, "not a regular expression"),
        (lambda: Grammar.regex(r"(a)\1"), UnsupportedGuide, "groupref"),
        (lambda: Grammar.lark("start: nothing"), SchemaError, "malformed"),
        (lambda: Grammar.json_schema({}, separators=(";", ":")), InvalidArgument, "a separator is ','"),
        (lambda: Grammar.json_schema({}, separators=(",\n", ":")), InvalidArgument, "blanks beside it"),
        (lambda: Grammar.json_schema(False), EmptySchema, "no value is valid"),
    ],
)
def test_bad_grammars(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_malformed_or_empty_grammar_is_found_when_it_is_compiled(tokenizer):
    with pytest.raises(SchemaError, match="malformed"):
        Grammar("start: nothing").start(tokenizer)
    with pytest.raises(EmptySchema, match="no text satisfies"):
        Grammar("start: A\nA: /a/ & /b/").start(tokenizer).mask()


@given(st.text(max_size=20).filter(lambda t: t.isprintable()))
def test_any_text_is_any_text(text):
    assert Grammar.text().allows(text)


def test_the_length_of_a_lark_grammar_is_bounded():
    rule = 'start: "a"'
    longest = rule + " " * (MAX_SOURCE - len(rule))
    assert Grammar.lark(longest).source == longest
    with pytest.raises(UnsupportedGuide, match=r"has 262,145 characters and may have 262,144"):
        Grammar.lark(longest + " ")


@pytest.mark.parametrize(("most", "allowed"), [(2, [0, 1, 2]), (None, [0, 1, 2, 3])])
def test_lists_and_objects_without_a_bound_get_the_one_that_is_asked_for(most, allowed):
    lists = Grammar.json_schema({"type": "array", "items": {"enum": [1]}}, max_items=most)
    objects = Grammar.json_schema({"type": "object", "additionalProperties": {"enum": [1]}}, max_items=most)
    assert [n for n in range(4) if lists.allows(json.dumps([1] * n))] == allowed
    assert [n for n in range(4) if objects.allows(json.dumps({"abc"[i]: 1 for i in range(n)}))] == allowed
    assert bool(lists.notes) == bool(objects.notes) == (most is not None)


def test_following_into_a_limit_of_the_engine_is_an_error(tokenizer, monkeypatch):
    monkeypatch.setattr(engine, "LIMITS", LLParserLimits(step_max_items=1, verbose_errors=False))
    constraint = Grammar('start: "[" item ("," item)* "]"\nitem: "a" | "b" | start').start(tokenizer)
    with pytest.raises(UnsupportedGuide, match="limits are reached: "):
        _follow_deep(constraint, tokenizer)
    with pytest.raises(UnsupportedGuide):
        constraint.mask()


def _follow_deep(constraint, tokenizer):
    for _ in range(100):
        assert constraint.follow(tokenizer.encode("["))
