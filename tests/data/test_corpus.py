"""Which tokens of a conversation are learned: transformers' own mask, awkward templates, cuts that lose none."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedTokenizerFast

from pippin.core.errors import InvalidArgument, InvalidInput, InvalidRecord
from pippin.data.corpus import Corpus, Tokenization, Tokens, cut, hold_out, tokenize
from pippin.data.records import TrainingRecord
from pippin.data.text.chat_template import ChatTemplate
from pippin.data.token_batches import IGNORE

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The prompt ends with the user's turn: nothing opens the assistant's.
BARE = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{% generation %} {{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
)
# Earlier answers are shown without their end: what a turn looks like depends on what follows.
REWRITES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello\n"},
    {"role": "assistant", "content": "\n\nHi there"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye  "},
]


def record(messages=(), **fields):
    return TrainingRecord("chat.jsonl", 7, messages=tuple(messages), **fields)


def learned_text(tokenizer, tokens):
    return [tokenizer._text(int(i)) for i in tokens.ids[tokens.learned]]


@pytest.mark.parametrize("source", [CHATML, BARE])
@pytest.mark.parametrize("kind", ["bytes", "default"])
def test_the_mask_is_the_one_of_transformers(tiny, source, kind, request):
    ours = tiny.tokenizer if kind == "bytes" else request.getfixturevalue("default_tokenizer")
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours._backend, eos_token="<|im_end|>", chat_template=source)
    talk = TALK if source is CHATML else TALK[1:]
    expected = theirs.apply_chat_template(talk, return_assistant_tokens_mask=True, return_dict=True)
    tokens = Tokenization(ours, ChatTemplate(source, ours))(record(talk))
    assert tokens.ids.tolist() == expected["input_ids"]
    assert tokens.learned.tolist() == [bool(m) for m in expected["assistant_masks"]]


def test_the_default_model_learns_answers_and_their_ends_alone(default_tokenizer):
    template = ChatTemplate(default_tokenizer.chat_template, default_tokenizer)
    talk = [TALK[3], {"role": "assistant", "content": "Yes, you"}]
    tokens = Tokenization(default_tokenizer, template)(record(talk))
    assert learned_text(default_tokenizer, tokens) == ["Yes", ",", "Ġyou", "<|im_end|>"]
    every = Tokenization(default_tokenizer, template, "all")(record(talk))
    assert every.learned.all()
    assert every.ids.tolist() == tokens.ids.tolist()


def test_a_prompt_is_a_conversation_with_a_template_and_a_text_without(tiny):
    pair = record(prompt="1+1=", text="2")
    chat = Tokenization(tiny.tokenizer, tiny.template)(pair)
    assert chat.ids.tolist() == tiny.template.encode(
        [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}], add_generation_prompt=False
    )
    assert learned_text(tiny.tokenizer, chat) == ["2", "<|im_end|>"]
    plain = Tokenization(tiny.tokenizer)(pair)
    assert bytes(plain.ids[:-1].astype(np.uint8).tolist()) != b""
    assert tiny.tokenizer.decode(plain.ids.tolist()) == "1+1=2"
    assert learned_text(tiny.tokenizer, plain) == ["2", "<|im_end|>"]


def test_a_text_ends_with_the_end_token_and_its_blocks_do_not(tiny):
    whole, block = (Tokenization(tiny.tokenizer)(record(text="ab<|im_end|>", ends=ends)) for ends in (True, False))
    assert whole.ids[-1] == 256
    assert list(whole.ids[:-1]) == list(block.ids) == tiny.tokenizer.encode("ab<|im_end|>")
    assert 256 not in block.ids  # what a text spells is no control token
    assert whole.learned.all()


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (REWRITES, TALK[1:], "renders turn 2 differently"),
        (CHATML, TALK[:2], "without a turn of the assistant"),
        (None, TALK, "no chat template"),
        ("{{ raise_exception('no system') }}", TALK, "no system"),
        (CHATML, [{"role": "user", "content": 3}], "content of message 0"),
    ],
)
def test_a_conversation_that_cannot_be_learned_names_its_line(tiny, source, messages, message):
    template = None if source is None else ChatTemplate(source, tiny.tokenizer)
    with pytest.raises(InvalidRecord, match=f"chat.jsonl, line 7: .*{message}"):
        list(tokenize([record(messages)], tiny.tokenizer, template))


def test_a_template_that_rewrites_earlier_turns_can_still_teach_the_last(tiny):
    template = ChatTemplate(REWRITES, tiny.tokenizer)
    tokens = Tokenization(tiny.tokenizer, template)(record(TALK[3:]))
    assert learned_text(tiny.tokenizer, tokens) == [*"Bye", "Ġ", "Ġ", "<|im_end|>"]


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.integers(0, 3)), min_size=1, max_size=6),
    length=st.integers(1, 9),
)
def test_a_cut_loses_no_prediction_and_makes_none_across_documents(documents, length):
    tokens, expected, count, open_ = [], [], 0, []
    for size, ends, every in documents:
        ids = np.arange(count, count + size)
        learned = ids % (every + 1) == 0
        count += size
        tokens.append(Tokens(ids, learned, ends))
        open_ += list(zip(ids.tolist(), learned.tolist(), strict=True))
        if ends:
            expected += [(a, b) for (a, _), (b, wanted) in pairwise(open_) if wanted]
            open_ = []
    tokens.append(Tokens(np.empty(0, dtype=np.int64), np.empty(0, dtype=bool), True))
    expected += [(a, b) for (a, _), (b, wanted) in pairwise(open_) if wanted]
    pieces = list(cut(tokens, length))
    made = [(int(a), int(b)) for p in pieces for a, b in zip(p.ids, p.targets, strict=True) if b != IGNORE]
    assert made == expected
    assert all(len(piece) <= length for piece in pieces)


@pytest.mark.parametrize("vocab_size", [65_535, 65_536, 70_000])
def test_a_corpus_gives_back_what_was_put_in(vocab_size):
    generator = np.random.default_rng(0)
    documents = [Tokens(generator.integers(0, vocab_size, n), generator.random(n) < 0.5) for n in (30, 2, 17)]
    documents.append(Tokens(np.array([0, vocab_size - 1]), np.array([False, True])))
    pieces = list(cut(documents, 8))
    corpus = Corpus(pieces, vocab_size, show_progress=False)
    assert len(corpus) == len(pieces)
    assert corpus.tokens == sum(map(len, pieces))
    for stored, piece in zip(corpus, pieces, strict=True):
        assert stored.ids.tolist() == piece.ids.tolist()
        assert stored.targets.tolist() == piece.targets.tolist()
    assert corpus[-1].ids.tolist() == pieces[-1].ids.tolist()
    with pytest.raises(IndexError):
        corpus[len(pieces)]


def test_data_in_which_nothing_is_learned_is_refused():
    with pytest.raises(InvalidInput, match="nothing in the data is learned"):
        Corpus(cut([Tokens(np.array([1]), np.array([True]))], 4), 10, show_progress=False)


def test_what_is_held_out_is_not_learned():
    pieces = list(cut([Tokens(np.arange(101), np.ones(101, dtype=bool))], 2))
    learned, measured = hold_out(pieces, 0.2, seed=1)
    assert len(measured) == 10
    assert sorted(int(p.ids[0]) for part in (learned, measured) for p in part) == list(range(0, 100, 2))
    assert learned.tokens == 80
    for share, data, message in (
        (0.0, pieces, "share must be above 0 and below 1"),
        (0.5, pieces[:1], "a single piece"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            hold_out(data, share)
