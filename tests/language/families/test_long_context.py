"""LongRoPE: sequences that outgrow the trained context, against transformers, which is given whole sequences."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers.modeling_rope_utils import _compute_longrope_parameters

from pippin.core import native
from pippin.core.errors import InvalidArgument
from pippin.engine import Engine, Request, SamplingOptions
from pippin.engine.speculation import Speculation
from pippin.language import Decoder, LanguageModel, families
from pippin.nn.kv_cache import MaskedCache, NoCache, PackedDocuments, PastKeyValues

from .checkpoints import SMALL, read, save_random

ORIGINAL = 24
IDS = torch.randint(3, 250, (2, 60), generator=torch.Generator().manual_seed(1))
CLOSE = {"rtol": 1e-5, "atol": 2e-5}
NO_END = dict.fromkeys((2, 256, 257, 258), -100.0)
RUNNERS = ["torch", pytest.param("native", marks=pytest.mark.skipif(native.library() is None, reason="not built"))]


@pytest.fixture(scope="module", params=["phi3", "phimoe"])
def pair(request, tmp_path_factory):
    """The decoder, and the logits of transformers for whole sequences."""
    scaling = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [4.0] * 8, "rope_theta": 10_000.0}
    scaling["original_max_position_embeddings"] = ORIGINAL
    if request.param == "phimoe":
        scaling |= {"short_mscale": 1.2, "long_mscale": 1.3}
    folder = tmp_path_factory.mktemp(request.param)
    reference = save_random(request.param, folder, rope_parameters=scaling, original_max_position_embeddings=ORIGINAL)

    def logits(ids):
        if (
            request.param == "phimoe"
        ):  # transformers takes the short divisors there always, with the multiplier by length
            reference.model.rotary_emb.rope_init_fn = lambda config: _compute_longrope_parameters(
                config, seq_len=ids.shape[1]
            )
        with torch.inference_mode():
            return reference(ids).logits

    return read(folder), logits


@pytest.fixture(params=RUNNERS)
def model(request, pair, tiny):
    decoder = copy.deepcopy(pair[0])
    return LanguageModel("small", decoder.pack() if request.param == "native" else decoder, tiny.tokenizer, None)


def greedy(logits, prompt, count):
    """The likeliest answer that has no end token, and the log-probability of each token."""
    ids, logprobs = torch.tensor([prompt]), []
    for _ in range(count):
        row = logits(ids)[0, -1]
        biased = row.index_fill(0, torch.tensor(list(NO_END)), -torch.inf)
        logprobs.append(float(row.log_softmax(-1)[biased.argmax()]))
        ids = torch.cat([ids, biased.argmax().view(1, 1)], 1)
    return ids[0, len(prompt) :].tolist(), logprobs


def without_long_table(decoder):
    """A decoder of the same weights that rotates every sequence by the short table."""
    layers = []
    for layer in decoder.config.layers:
        rotary = replace(layer.attention.rotary, long_divisors=None, long_attention_factor=None)
        layers.append(replace(layer, attention=replace(layer.attention, rotary=rotary)))
    short = Decoder(replace(decoder.config, layers=tuple(layers)))
    short.load_state_dict(decoder.state_dict())
    return short


def request(prompt, count, **options):
    return Request(prompt, SamplingOptions(max_tokens=count, logit_bias=NO_END, logprobs=0), **options)


def answer(engine, *args, **options):
    *tokens, end = engine.stream(request(*args, **options))
    return [token.id for token in tokens], [token.logprob for token in tokens], end


def test_the_whole_context_is_read_and_written(pair):
    config = pair[0].config
    assert config.max_position_embeddings == SMALL["max_position_embeddings"]
    assert config.original_max_position_embeddings == ORIGINAL
    assert families.from_hf(families.to_hf(config)) == config


@torch.inference_mode()
@pytest.mark.parametrize("count", [ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 60])
def test_whole_sequences(pair, count):
    decoder, logits = pair
    torch.testing.assert_close(decoder(IDS[:, :count]), logits(IDS[:, :count]), **CLOSE)


@torch.inference_mode()
def test_documents_and_rows_of_different_lengths_are_rotated_each_by_its_own(pair):
    decoder, logits = pair
    short, long = IDS[:1, :20], IDS[1:, :40]
    packed = decoder.logits(decoder.hidden(torch.cat([short, long, short], 1), cache=PackedDocuments([20, 40, 20])))
    expected = [logits(short)[0], logits(long)[0]]
    torch.testing.assert_close(packed[0], torch.cat([*expected, expected[0]]), **CLOSE)
    padded = torch.cat([torch.cat([torch.zeros(1, 20, dtype=torch.long), short], 1), long])
    padding = torch.tensor([20, 0])
    rows = decoder(padded, cache=NoCache(padding), padding=padding)
    torch.testing.assert_close(rows[0, 20:], expected[0], **CLOSE)
    torch.testing.assert_close(rows[1], expected[1], **CLOSE)


@torch.inference_mode()
def test_cached_keys_of_the_short_table_are_not_read_with_the_long_one(pair):
    decoder, logits = pair
    window = decoder.config.layers[0].attention.window

    def parts(sizes):
        past, start, found = PastKeyValues(), 0, []
        for size in sizes:
            mask = torch.ones(1, 1, size, start + size, dtype=torch.bool).tril(start)
            mask = mask.triu(start + 1 - (window or 60))
            ids = IDS[:1, start : start + size]
            found.append(decoder(ids, cache=MaskedCache(mask, past, keep=True)))
            start += size
        return torch.cat(found, 1)

    torch.testing.assert_close(parts([10, 10, 4]), logits(IDS[:1, :ORIGINAL]), **CLOSE)
    torch.testing.assert_close(parts([30, 10]), logits(IDS[:1, :40]), **CLOSE)
    with pytest.raises(InvalidArgument, match="the 20 tokens in the cache are rotated for sequences of at most 24"):
        parts([10, 10, 5])


@pytest.mark.parametrize("prompt", [5, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 40])
def test_answers_that_outgrow_the_trained_context(pair, model, prompt):
    expected = greedy(pair[1], IDS[0, :prompt].tolist(), 30)
    with Engine(model) as engine:
        tokens, logprobs, _ = answer(engine, IDS[0, :prompt].tolist(), 30)
    assert tokens == expected[0]
    torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected[1]), rtol=0, atol=1e-4)


def test_requests_of_all_lengths_run_together(pair, model):
    prompts = [IDS[index % 2, :size].tolist() for index, size in enumerate((5, 20, 30, 23, 45))]
    with Engine(model, max_num_seqs=3, max_num_batched_tokens=32) as engine:
        streams = [engine.stream(request(prompt, 20)) for prompt in prompts]
        found = [[event.id for event in list(stream)[:-1]] for stream in streams]
    assert found == [greedy(pair[1], prompt, 20)[0] for prompt in prompts]


@pytest.mark.parametrize("draft", ["ngram", "model", "model of the short table"])
def test_drafts_across_the_trained_context(pair, tiny, draft):
    decoder, logits = pair
    model = LanguageModel("small", decoder, tiny.tokenizer, None)
    prompt = (IDS[0, :6].tolist() * 3)[:16]
    drafter = draft
    if draft == "model":
        drafter = model
    elif draft != "ngram":  # it goes on drafting, and rightly until the trained context ends
        drafter = LanguageModel("short", without_long_table(decoder), tiny.tokenizer, None)
    with Engine(model) as engine:
        tokens, _, end = answer(engine, prompt, 30, speculation=Speculation(drafter))
    assert tokens == greedy(logits, prompt, 30)[0]
    assert draft == "ngram" or end.accepted > 0


def test_prefixes_are_reused_among_long_and_among_short_sequences_but_not_across(pair, model):
    prompt = IDS[0, :50].tolist()
    with Engine(model) as engine:
        assert answer(engine, prompt[:20], 2)[2].cached_tokens == 0
        cold = answer(engine, prompt, 2)
        assert cold[2].cached_tokens == 0  # the first 16 tokens are in the cache, rotated for a short sequence
        assert answer(engine, prompt[:20], 2)[2].cached_tokens == 19
        warm = answer(engine, prompt[:40], 2)
        assert warm[2].cached_tokens == 39
        again = answer(engine, prompt, 2)
        assert again[0] == cold[0]
        assert again[1] == pytest.approx(cold[1], abs=1e-5)
        assert engine.stats().prefix_hits == 3
    assert warm[0] == greedy(pair[1], prompt[:40], 2)[0]


def test_what_was_computed_of_an_answer_is_reused_by_the_next_turn(pair, model):
    prompt = IDS[0, :10].tolist()
    with Engine(model) as engine:
        tokens, _, end = answer(engine, prompt, 40)
        assert engine.stats().preempted == 0
        following = [*prompt, *tokens, *IDS[1, :5].tolist()]
        _, _, again = answer(engine, following, 1)
    assert (end.cached_tokens, again.cached_tokens) == (0, 49)


def test_scores(pair, model):
    prompt, logits = IDS[0, :20].tolist(), pair[1]
    continuations = [IDS[1, :3].tolist(), IDS[1, :30].tolist()]

    def expected(continuation):
        ids = torch.tensor([prompt + continuation])
        rows = logits(ids)[0, len(prompt) - 1 : -1].log_softmax(-1)
        return float(rows.gather(1, torch.tensor(continuation)[:, None]).sum())

    with Engine(model) as engine:
        for continuation in continuations:
            assert engine.score(prompt, [continuation])[0] == pytest.approx(expected(continuation), abs=1e-3)
        tokens = engine.prompt_logprobs(IDS[0].tolist())
    rows = logits(IDS[:1])[0, :-1].log_softmax(-1).gather(1, IDS[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([token.logprob for token in tokens[1:]]), rows, rtol=0, atol=1e-4)
