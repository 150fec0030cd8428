"""Requests with more than tokens: what they answer, and which cached blocks they may use."""

import pytest
import torch
from tests.language.families.checkpoints import read, save_random

from pippin.core.errors import InvalidArgument
from pippin.engine import Engine, Finished, Request, SamplingOptions
from pippin.engine.prompt_extras import PromptEmbeddings, PromptExtras
from pippin.engine.speculation import Speculation
from pippin.language import LanguageModel
from pippin.nn.expert_mask import ExpertMask
from pippin.nn.steering import Steering, SteeringChange


@pytest.fixture
def opened(tmp_path, tiny):
    def make(family, **changes):
        theirs = save_random(family, tmp_path, **changes)
        return theirs, LanguageModel(family, read(tmp_path).requires_grad_(False), tiny.tokenizer, None)

    return make


def ids_of(count, seed=0):
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


GREEDY = SamplingOptions(temperature=0.0, max_tokens=8, logprobs=0)


def ask(engine, prompt, options=GREEDY, **fields):
    *tokens, last = engine.stream(Request(prompt, options, **fields))
    assert isinstance(last, Finished)
    return tokens, last


def greedy(logits_of, ids, count=8):
    """What a model writes, by whole passes; each token with its log-probability."""
    answer, found = [], []
    for _ in range(count):
        law = logits_of([*ids, *answer])[-1].log_softmax(-1)
        answer.append(int(law.argmax()))
        found.append(float(law.max()))
    return answer, found


def image(rows, content, start=5, **fields):
    return PromptEmbeddings(start, rows, content, **fields)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [7, 256])
def test_an_image_is_read_and_reused_for_the_same_image_only(opened, chunk):
    theirs, model = opened("gemma3_text")
    prompt, generator = ids_of(60), torch.Generator().manual_seed(1)
    cat, dog = (torch.randn(20, 64, generator=generator) for _ in range(2))
    table = theirs.get_input_embeddings()

    def law(rows):
        def logits(ids):
            embeds = table(torch.tensor([ids])).clone()
            embeds[0, 5:25] = rows
            query, key = torch.arange(len(ids))[:, None], torch.arange(len(ids))
            span = torch.zeros(len(ids), dtype=torch.bool)
            span[5:25] = True
            both = span[:, None] & span[None]
            masks = {"full_attention": (key <= query) | both, "sliding_attention": (key <= query) & (query - key < 6)}
            masks["sliding_attention"] |= both & (key > query)
            lowest = torch.finfo(torch.float32).min
            additive = {
                name: torch.zeros(mask.shape).masked_fill(~mask, lowest)[None, None] for name, mask in masks.items()
            }
            return theirs(inputs_embeds=embeds, attention_mask=additive).logits[0]

        return logits

    with Engine(model, max_num_batched_tokens=chunk) as engine:
        for rows, content, cached in [(cat, b"cat", 0), (dog, b"dog", 5), (cat, b"cat", 59), (dog, b"dog", 59)]:
            tokens, last = ask(engine, prompt, embeddings=[image(rows, content, bidirectional=True)])
            answer, logprobs = greedy(law(rows), prompt)
            assert [token.id for token in tokens] == answer
            assert [token.logprob for token in tokens] == pytest.approx(logprobs, abs=1e-3)
            assert last.cached_tokens == cached
        assert ask(engine, prompt)[1].cached_tokens == 5  # the placeholders are not the image


@torch.no_grad()
def test_text_after_an_image_goes_on_behind_its_largest_position(opened):
    theirs, model = opened("qwen2")
    prompt, rows = ids_of(40), torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(5), torch.full((12,), 5), torch.arange(6, 29)])[None]
    table = theirs.get_input_embeddings()

    def logits(ids):
        embeds = table(torch.tensor([ids])).clone()
        embeds[0, 5:17] = rows
        places = torch.cat([positions, torch.arange(29, 29 + len(ids) - 40)[None]], 1)
        return theirs(inputs_embeds=embeds, position_ids=places).logits[0]

    answer, logprobs = greedy(logits, prompt)
    with Engine(model) as engine:
        for cached in (0, 39):
            tokens, last = ask(engine, prompt, embeddings=[image(rows, b"x")], positions=positions)
            assert [token.id for token in tokens] == answer
            assert [token.logprob for token in tokens] == pytest.approx(logprobs, abs=1e-3)
            assert last.cached_tokens == cached
        # a longer conversation begins with the same blocks, answer included
        longer = [*prompt, *answer, *ids_of(3, 9)]
        places = torch.cat([positions, torch.arange(29, 40)[None]], 1)
        assert ask(engine, longer, embeddings=[image(rows, b"x")], positions=places)[1].cached_tokens == 47
        # other positions of the same tokens are other keys and values
        plain = ask(engine, prompt, embeddings=[image(rows, b"x")])
        assert plain[1].cached_tokens == 6  # the first of the image lies where it lay
        moved = positions + (torch.arange(40) >= 30)
        assert ask(engine, prompt, embeddings=[image(rows, b"x")], positions=moved)[1].cached_tokens == 30


def test_a_penalty_takes_an_image_for_no_token_and_a_draft_never_proposes_it(opened):
    _, model = opened("qwen2")
    rows = torch.randn(30, 64)
    prompt = [*[7] * 40, *ids_of(4), *[7] * 3]
    extras = PromptExtras(len(prompt), [image(rows, b"x")])
    keys = extras.keys(prompt)
    assert min(keys[5:35]) >= -(2**63)
    assert max(keys[5:35]) < 0
    assert len(set(keys[5:35])) == 30
    assert keys[:5] + keys[35:] == prompt[:5] + prompt[35:]
    options = SamplingOptions(temperature=0.0, max_tokens=12, repetition_penalty=1.3)
    with Engine(model) as engine:
        alone = ask(engine, prompt, options, embeddings=[image(rows, b"x")])[0]
        drafted = ask(engine, prompt, options, embeddings=[image(rows, b"x")], speculation=Speculation())[0]
        assert [token.id for token in alone] == [token.id for token in drafted]


@torch.no_grad()
def test_a_steered_request_shares_blocks_with_equal_ones_only(opened):
    theirs, model = opened("qwen2")
    prompt = ids_of(50)
    up = Steering({"layers.1": SteeringChange(shift=torch.ones(64))})
    hooked = theirs.model.layers[1]

    def steered(strength):
        def hook(module, inputs, output):
            return (output[0] + strength, *output[1:]) if isinstance(output, tuple) else output + strength

        handle = hooked.register_forward_hook(hook)
        answer = greedy(lambda ids: theirs(torch.tensor([ids])).logits[0], prompt)
        handle.remove()
        return answer

    with Engine(model) as engine:
        for strength, cached in [(0.0, 0), (2.0, 0), (-2.0, 0), (2.0, 49), (0.0, 49), (-2.0, 49)]:
            tokens, last = ask(engine, prompt, steering=up.with_strength(strength))
            answer, logprobs = steered(strength)
            assert [token.id for token in tokens] == answer
            assert [token.logprob for token in tokens] == pytest.approx(logprobs, abs=1e-3)
            assert last.cached_tokens == cached
        same = Steering({"layers.1": SteeringChange(shift=torch.ones(64))}, 2.0)
        assert ask(engine, prompt, steering=same)[1].cached_tokens == 49
        assert ask(engine, prompt)[1].cached_tokens == 49  # strength 0 is the model itself


def test_masked_experts_have_blocks_of_their_own(opened):
    _, model = opened("qwen3_moe")
    prompt, allowed = ids_of(50), torch.ones(4, 6, dtype=torch.bool)
    allowed[:, 3:] = False
    with Engine(model) as engine:
        plain, _ = ask(engine, prompt)
        masked, last = ask(engine, prompt, experts=ExpertMask(allowed))
        assert last.cached_tokens == 0
        assert [token.logprob for token in plain] != [token.logprob for token in masked]
        assert ask(engine, prompt, experts=ExpertMask(allowed.clone()))[1].cached_tokens == 49
        ones = torch.ones(4, 6)
        assert ask(engine, prompt, experts=ExpertMask(allowed, ones))[1].cached_tokens == 49
        assert ask(engine, prompt, experts=ExpertMask(allowed, ones / 2))[1].cached_tokens == 0


@torch.no_grad()
def test_hidden_states_come_with_their_tokens(opened):
    theirs, model = opened("qwen2")
    prompt, seen = ids_of(30), []
    hook = theirs.model.norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0][0, -1]))
    greedy(lambda ids: theirs(torch.tensor([ids])).logits[0], prompt)
    hook.remove()
    with Engine(model) as engine:
        tokens, _ = ask(engine, prompt, return_hidden_states=True)
        torch.testing.assert_close(
            torch.stack([token.hidden for token in tokens]), torch.stack(seen), atol=1e-3, rtol=0
        )
        drafted, _ = ask(engine, prompt, return_hidden_states=True, speculation=Speculation())
        torch.testing.assert_close(
            torch.stack([token.hidden for token in drafted]), torch.stack(seen), atol=1e-3, rtol=0
        )
        assert ask(engine, prompt)[0][0].hidden is None


def test_the_end_token_and_its_probability_are_told(opened):
    _, model = opened("qwen2")
    end = next(iter(model.tokenizer.eos_ids))
    with Engine(model) as engine:
        options = SamplingOptions(temperature=0.0, logprobs=0, logit_bias={end: 100})
        tokens, last = ask(engine, ids_of(20), options)
        assert (tokens, last.finish_reason, last.end_token) == ([], "stop", end)
        score = engine.score(ids_of(20), [[end]])[0]
        assert last.end_logprob == pytest.approx(score, abs=1e-4)
        assert ask(engine, ids_of(20))[1].end_token is None


@torch.no_grad()
def test_log_probabilities_of_the_law_that_sampled(opened):
    """Temperature, then top-p, by hand; the chosen token's, and those of the others."""
    theirs, model = opened("qwen2")
    prompt = ids_of(20)
    options = SamplingOptions(
        temperature=0.6, top_p=0.8, seed=3, max_tokens=6, logprobs=3, logprobs_mode="processed", presence_penalty=1.0
    )
    with Engine(model) as engine:
        tokens, _ = ask(engine, prompt, options)
    answer = []
    for token in tokens:
        logits = theirs(torch.tensor([[*prompt, *answer]])).logits[0, -1].double()
        logits[list(set(answer))] -= 1.0
        law = (logits / 0.6).softmax(-1)
        order = law.argsort(descending=True)
        kept = order[: int((law[order].cumsum(0) < 0.8).sum()) + 1]
        expected = (law[kept] / law[kept].sum()).log()
        at = kept.tolist().index(token.id)
        assert token.logprob == pytest.approx(float(expected[at]), abs=1e-3)
        count = min(3, len(kept))
        assert [id for id, _ in token.top_logprobs[:count]] == kept[:count].tolist()
        assert [value for _, value in token.top_logprobs[:count]] == pytest.approx(expected[:count].tolist(), abs=1e-3)
        answer.append(token.id)


def test_what_a_model_cannot_do_is_refused_before_any_work(opened):
    _, model = opened("qwen2")
    rows, prompt = torch.zeros(4, 64), ids_of(10)
    shift = SteeringChange(shift=torch.ones(64))
    with Engine(model) as engine:
        for fields, message in [
            ({"embeddings": [image(rows[:, :3], b"")]}, r"must be \(tokens, 64\)"),
            ({"embeddings": [image(rows, b"", start=7)]}, "beyond the prompt of 10"),
            ({"embeddings": [image(rows, b"", start=2), image(rows, b"", start=5)]}, "overlap"),
            ({"embeddings": [image(rows / 0, b"")]}, "not finite"),
            ({"positions": torch.zeros(1, 9, dtype=torch.int64)}, r"must be \(axes, 10\)"),
            ({"positions": torch.full((1, 10), -1)}, "not negative"),
            ({"steering": Steering({"layers.9": shift})}, "'layers.9'"),
            ({"steering": Steering({"norm": SteeringChange(torch.ones(3))})}, "3 elements"),
            ({"experts": ExpertMask(torch.ones(4, 6, dtype=torch.bool))}, "no experts"),
            ({"return_hidden_states": True, "speculation": Speculation(model)}, "'ngram'"),
        ]:
            with pytest.raises(InvalidArgument, match=message):
                engine.stream(Request(prompt, **fields))
        assert engine.stats().requests == 0
    _, mixture = opened("mixtral")
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[2, 1:] = False
    with Engine(mixture) as engine, pytest.raises(InvalidArgument, match="leaves 1 of 6 experts in layer 2"):
        engine.stream(Request(prompt, experts=ExpertMask(mask)))
    whole = torch.ones(4, 6, dtype=torch.bool)
    for weights, message in [
        (torch.ones(4, 5), "the shape of the mask"),
        (torch.zeros(4, 6), "above 0"),
        (torch.full((4, 6), torch.nan), "finite"),
    ]:
        with Engine(mixture) as engine, pytest.raises(InvalidArgument, match=message):
            engine.stream(Request(prompt, experts=ExpertMask(whole, weights)))
    for changes, strength in [({}, 1.0), ({"norm": SteeringChange()}, 1.0), ({"norm": shift}, float("nan"))]:
        with pytest.raises(InvalidArgument):
            Steering(changes, strength)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_layers_with_windows_hold_no_more_than_their_windows(opened, family):
    theirs, model = opened(family)
    prompt = ids_of(400)
    groups = len(model.config.cache_groups)
    full = sum(model.config.group_window(layers) is None for layers in model.config.cache_groups)
    with Engine(model, max_num_seqs=1, max_num_batched_tokens=32, enable_prefix_caching=False) as engine:
        used = [
            engine.stats().blocks_total - engine.stats().blocks_free for _ in engine.stream(Request(prompt, GREEDY))
        ]
    assert 0 < max(used) <= 26 * full + 4 * (groups - full)
    with Engine(model, max_num_seqs=2, max_num_batched_tokens=32) as engine:
        answer, logprobs = greedy(lambda ids: theirs(torch.tensor([ids])).logits[0], prompt)
        for cached in (0, 399):
            tokens, last = ask(engine, prompt)
            assert [token.id for token in tokens] == answer
            assert [token.logprob for token in tokens] == pytest.approx(logprobs, abs=2e-3)
            assert last.cached_tokens == cached
