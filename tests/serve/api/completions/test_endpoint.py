"""Text completions through OpenAI's client; log-probabilities against the model itself."""

import openai
import pytest
import torch
from openai.types import Completion

PROMPT = "Once upon a time there was a ca"


def ask(client, prompt=PROMPT, **options):
    return client.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": 6, "seed": 3} | options)


def reference(tiny, text):
    """The log-probabilities after each token of a text, in one pass without a cache."""
    with torch.inference_mode():
        return tiny.module(torch.tensor([tiny.tokenizer.encode(text)]))[0].float().log_softmax(-1)


def test_a_text_is_continued_as_it_is(client, post, tiny):
    sent = post("completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "seed": 3}).json()
    Completion.model_validate(sent)
    made = ask(client)
    assert (made.object, made.choices[0].finish_reason) == ("text_completion", "length")
    assert made.choices[0].text == sent["choices"][0]["text"]
    assert made.usage.prompt_tokens == len(tiny.tokenizer.encode(PROMPT))
    greedy = ask(client, temperature=0, max_tokens=1, logprobs=1).choices[0].logprobs
    best = int(reference(tiny, PROMPT)[-1].argmax())
    assert greedy.tokens[0] == tiny.tokenizer.token_bytes(best).decode("utf-8", "backslashreplace")


def test_sixteen_tokens_are_the_default(client):
    made = client.completions.create(model="tiny", prompt=PROMPT, logit_bias={"256": -100})
    assert made.usage.completion_tokens == 16


def test_text_and_its_tokens_are_the_same_prompt(client, tiny):
    ids = tiny.tokenizer.encode(PROMPT)
    assert ask(client, ids).choices[0].text == ask(client).choices[0].text
    assert ask(client, ids, echo=True).choices[0].text.startswith(PROMPT)


def test_control_tokens_in_a_prompt_count_as_such(client):
    assert ask(client, "<|im_start|>").usage.prompt_tokens == 1


def test_several_prompts_with_several_answers_in_order(client, tiny):
    ids = [tiny.tokenizer.encode(text) for text in ("ab", "cd", "ef")]
    for prompts in (["ab", "cd", "ef"], ids):
        made = ask(client, prompts, n=2, echo=True)
        assert [choice.text[:2] for choice in made.choices] == ["ab", "ab", "cd", "cd", "ef", "ef"]
        assert [choice.index for choice in made.choices] == list(range(6))
        assert made.usage.prompt_tokens == 6
        assert made.usage.completion_tokens == 36


def test_an_empty_prompt_begins_a_document(client):
    assert ask(client, "").usage.prompt_tokens == 1


def test_an_echoed_prompt_has_the_model_s_log_probabilities(client, tiny):
    text = PROMPT * 4  # longer than one chunk of the scoring
    made = ask(client, text, echo=True, logprobs=2, max_tokens=0)
    (choice,) = made.choices
    assert (choice.text, choice.finish_reason, made.usage.completion_tokens) == (text, "length", 0)
    expected, ids = reference(tiny, text), tiny.tokenizer.encode(text)
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(
        [float(expected[at, id]) for at, id in enumerate(ids[1:])], abs=1e-4
    )
    assert list(choice.logprobs.top_logprobs[5].values()) == pytest.approx(
        expected[4].topk(2).values.tolist(), abs=1e-4
    )
    assert choice.logprobs.text_offset == list(range(len(text)))


def test_echo_with_tokens_after_it_goes_on(client, tiny):
    made = ask(client, echo=True, logprobs=0).choices[0]
    assert made.text.startswith(PROMPT)
    assert len(made.logprobs.tokens) == len(PROMPT) + 6
    assert made.logprobs.text_offset[len(PROMPT)] == len(PROMPT)


def test_the_best_are_the_likeliest(client):
    every = ask(client, n=5, logprobs=0)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    best = ask(client, best_of=5, n=2, logprobs=0)
    assert [choice.text for choice in best.choices] == [
        choice.text for choice in sorted(every.choices, key=mean, reverse=True)[:2]
    ]
    assert best.usage.completion_tokens == 30


def test_a_stream_holds_the_same_text(client):
    whole = ask(client, ["ab", "cd"], echo=True, logprobs=1)
    texts, tokens, last = ["", ""], [[], []], None
    for chunk in ask(client, ["ab", "cd"], echo=True, logprobs=1, stream=True, stream_options={"include_usage": True}):
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert (last.choices, last.usage.total_tokens) == ([], whole.usage.total_tokens)


def test_a_grammar_holds_a_completion(client):
    made = ask(client, extra_body={"response_format": {"type": "regex", "pattern": "[xy]{4}"}})
    assert set(made.choices[0].text) <= set("xy")
    assert len(made.choices[0].text) == 4


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 21}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [260]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": 5}, "prompt"),
        ({"stream_options": {}}, "stream_options"),
        ({"logit_bias": {"260": 1}}, "logit_bias"),
        ({"response_format": {"type": "regex", "pattern": "("}}, "response_format.pattern"),
    ],
)
def test_a_bad_value_is_refused_by_name(client, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=options)
    assert caught.value.param == param
