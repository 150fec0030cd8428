"""Reasoning in vectors: one pass against cached passes, flows with known ends, answers that depend on no company."""

import json
import warnings
from dataclasses import replace

import pytest
import torch

import pippin
from pippin.claims.worlds.sequences import countdown
from pippin.core.errors import (
    ContextOverflow,
    CorruptedFile,
    InvalidArgument,
    ModelNotFound,
    NotPrepared,
    Truncation,
    UnsupportedLayer,
    UnsupportedModel,
    VocabularyMismatch,
)
from pippin.data.text.tokenizer import Tokenizer
from pippin.language import Decoder, LayerSpec
from pippin.language.methods.ladir.autoencoder import ThoughtVAE
from pippin.language.methods.ladir.data import Problem
from pippin.language.methods.ladir.model import LatentReasoner
from pippin.language.methods.ladir.sample import decode_text, denoise, repulsion
from pippin.language.methods.ladir.train import training_batches, training_examples
from pippin.nn.kv_cache import PastKeyValues
from pippin.nn.recurrent.layer import RecurrentSpec

QUESTIONS = ["3,8,5=6", "1,2=3", "7=7"]
PROBLEMS = [
    Problem("3,8,5=6", ("8-5=3", "3+3=6", "6"), "8-5+3"),
    Problem("1,2=3", ("1+2=3",), "1+2"),
    Problem("7=7", ("7", "7=7"), "7"),
]


@pytest.fixture(scope="module")
def base():
    return countdown.model(layers=2, width=32, seed=0)


@pytest.fixture(scope="module")
def reasoner(base):
    """Untrained, but for random numbers where training would begin at zero."""
    vae = ThoughtVAE.from_language_model(base, block_size=2, latent_size=4, max_sentence_length=8, seed=1)
    vae.fit_normalization(["8-5=3", "1+2=3", "7"])
    made = LatentReasoner.from_language_model(base, vae, max_blocks=3, max_answer_length=6, seed=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in (made.velocity_head.adapt, made.velocity_head.out, made.continue_head):
            layer.weight.normal_(0.0, 0.3, generator=generator)
    return made.eval()


def batch_of(reasoner):
    return next(iter(training_batches(reasoner, training_examples(reasoner, PROBLEMS), 3, seed=0)))


def one_by_one(reasoner, batch, row):
    """The states of one problem after each of its clean blocks, from passes of its own."""
    asked = batch.questions[row : row + 1, int(batch.padding[row]) :]
    nothing = torch.zeros(1, dtype=torch.long)
    state = reasoner.start(asked, nothing, nothing.bool())
    more = []
    for block in range(int(batch.num_blocks[row])):
        yield state, block, more
        more.append(reasoner.append(state, batch.latents[row : row + 1, block], torch.ones(1, dtype=torch.bool)))
    yield state, None, more


@torch.no_grad()
def test_one_pass_over_a_batch_is_what_cached_passes_over_each_problem_are(reasoner):
    batch, generator = batch_of(reasoner), torch.Generator().manual_seed(4)
    noisy = torch.randn(3, 3, 2, 2, 4, generator=generator)
    t = torch.rand(3, 3, 2, generator=generator)
    output = reasoner(batch, noisy, t, torch.zeros(3, dtype=torch.bool))
    for row in range(3):
        for state, block, more in one_by_one(reasoner, batch, row):
            if block is not None:
                for copy in range(2):
                    alone = reasoner.velocity(state, noisy[row : row + 1, block, copy], float(t[row, block, copy]))
                    torch.testing.assert_close(output.velocity[row, block, copy], alone[0], rtol=1e-4, atol=1e-4)
            else:
                wanted = reasoner.answer_states(state, batch.answers[row : row + 1])
                torch.testing.assert_close(output.answer[row], wanted[0], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(output.continues[row, : len(more)], torch.cat(more), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_hidden_question_shows_its_first_token_only(reasoner):
    batch = batch_of(reasoner)
    other = replace(batch, questions=batch.questions.clone())
    for row, padding in enumerate(batch.padding.tolist()):
        other.questions[row, padding + 1 :] = 3
    noisy, t, hidden = torch.randn(3, 3, 1, 2, 4), torch.rand(3, 3, 1), torch.ones(3, dtype=torch.bool)
    first, second = (reasoner(each, noisy, t, hidden).velocity for each in (batch, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, reasoner(batch, noisy, t, ~hidden).velocity)


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_euler_with_the_exact_velocity_of_a_gaussian_ends_where_it_should(spread):
    middle = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(9))

    def exact(z, t):
        variance = ((1 - t) * spread) ** 2 + t**2
        return (t - (1 - t) * spread**2) / variance * (z - (1 - t) * middle) - middle

    noise = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0))
    wanted = middle + spread * noise
    errors = [float((denoise(exact, noise, steps=steps) - wanted).abs().max()) for steps in (50, 100, 200)]
    assert errors[0] < (1e-3 if spread == 0 else 0.06)
    if spread:  # of the first order: half the step, half the error
        assert errors[1] == pytest.approx(errors[0] / 2, rel=0.1)
        assert errors[2] == pytest.approx(errors[0] / 4, rel=0.15)


def test_the_push_drives_samples_apart_and_its_strength_does_not_depend_on_the_steps():
    def still(z, t):
        return torch.zeros_like(z)

    z = 0.1 * torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0))
    z[3:] += 3.0  # two clusters: the median lies between them

    def push(z, t):
        return 0.4 * t * repulsion(z.view(1, 6, -1)).view_as(z)

    def within(z):
        return float(torch.cdist(z[:3].flatten(1), z[:3].flatten(1)).sum())

    coarse, fine = (denoise(still, z, steps=steps, force=push) for steps in (20, 200))
    assert within(coarse) > 1.5 * within(z)
    torch.testing.assert_close(coarse, fine, rtol=0.1, atol=0.05)
    assert torch.equal(denoise(still, z, steps=20), z)


def test_an_answer_does_not_depend_on_what_else_is_asked(reasoner):
    short = {"max_blocks": 2}
    together = reasoner.generate(QUESTIONS[:2], steps=2, samples=2, seed=5, return_thoughts=True, **short)
    assert [answer.question for answer in together] == [question for question in QUESTIONS[:2] for _ in range(2)]
    for index, question in enumerate(QUESTIONS[:2]):
        (alone,) = reasoner.generate([question], steps=2, seed=5, return_thoughts=True, **short)
        same = together[2 * index]
        assert (alone.text, alone.blocks, alone.thoughts, alone.sample) == (same.text, same.blocks, same.thoughts, 0)
        torch.testing.assert_close(alone.latents, same.latents, rtol=1e-4, atol=1e-4)
    parts = reasoner.generate(QUESTIONS[:2], steps=2, samples=2, seed=5, batch_size=2, **short)
    assert [answer.text for answer in parts] == [answer.text for answer in together]
    (other,) = reasoner.generate(QUESTIONS[:1], steps=1, seed=6, max_blocks=1, return_thoughts=True)
    assert not torch.allclose(other.latents[0], together[0].latents[0], atol=0.1)


def test_guidance_goes_from_the_hidden_question_through_the_shown_one(reasoner):
    def latents(guidance):
        found = reasoner.generate(["3,8,5=6"], steps=1, guidance=guidance, seed=0, max_blocks=1, return_thoughts=True)
        return found[0].latents

    one, half, zero = latents(1.0), latents(0.5), latents(0.0)
    torch.testing.assert_close(half, (one + zero) / 2, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(one, zero, atol=1e-2)


def test_thoughts_can_be_taken_out_edited_and_answered(reasoner):
    answers = reasoner.generate(QUESTIONS, steps=1, seed=1, max_blocks=2, return_thoughts=True)
    latents = [answer.latents for answer in answers]
    assert reasoner.answer_from_thoughts(QUESTIONS, latents) == [answer.text for answer in answers]
    assert [reasoner.vae.decode(z) for z in latents] == [list(answer.thoughts) for answer in answers]
    for wrong in ([], latents[:2], [latents[0][:, :1], *latents[1:]], [latents[0][:0], *latents[1:]]):
        with pytest.raises(InvalidArgument):
            reasoner.answer_from_thoughts(QUESTIONS, wrong)


def test_each_step_is_told_and_the_last_estimate_is_the_thought(reasoner):
    told = []
    (answer,) = reasoner.generate(["7=7"], steps=3, seed=0, max_blocks=2, on_step=told.append, return_thoughts=True)
    assert [(now.block, now.step) for now in told] == [(b, s) for b in range(answer.blocks) for s in (1, 2, 3)]
    torch.testing.assert_close(told[-1].estimate[0], answer.latents[-1], rtol=1e-4, atol=1e-5)


def test_the_continue_head_decides_how_long_a_thought_is(reasoner):
    with torch.no_grad():
        before = reasoner.continue_head.bias.clone()
        reasoner.continue_head.bias.fill_(100.0)
        endless = reasoner.generate(QUESTIONS, steps=1, seed=0)
        reasoner.continue_head.bias.fill_(-100.0)
        short = reasoner.generate(QUESTIONS, steps=1, seed=0)
        reasoner.continue_head.bias.copy_(before)
    assert {(answer.blocks, answer.complete) for answer in endless} == {(3, False)}
    assert {(answer.blocks, answer.complete) for answer in short} == {(1, True)}


# --- the autoencoder --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_padding_changes_no_latent_and_writing_is_the_likeliest_token_of_whole_passes(reasoner):
    vae, texts = reasoner.vae, ["8-5=3", "7", "12+3=15"]
    together = vae.encode(texts)
    for row, text in enumerate(texts):
        torch.testing.assert_close(vae.encode([text])[0], together[row], rtol=1e-4, atol=1e-4)
    z = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))
    for row, text in enumerate(vae.decode(z)):
        ids = []
        while len(ids) < vae.config.max_sentence_length:
            prompt = vae.soft_prompt(z[row : row + 1] * vae.latent_scale + vae.latent_shift)
            x = torch.cat([prompt, vae.decoder.embed(torch.tensor([ids], dtype=torch.long))], 1)
            from pippin.nn.kv_cache import NoCache

            token = int(vae.decoder.lm_head(vae.decoder.norm(vae.decoder.forward_layers(x, NoCache())[0, -1])).argmax())
            if token == vae.end_id:
                break
            ids.append(token)
        assert text == vae.tokenizer.decode(ids)


def test_latents_are_in_units_of_the_data_and_samples_spread_as_the_posterior_says(reasoner):
    vae = reasoner.vae
    vae_units = vae.encode(["8-5=3", "1+2=3", "7"])
    assert float(vae_units.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(vae_units.std()) == pytest.approx(1.0, abs=1e-4)
    drawn = vae.encode(["7"] * 2000, sample=True, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        spread = (vae.posterior(*vae.tokenize(["7"])).log_variance[0] / 2).exp() / vae.latent_scale
    torch.testing.assert_close(drawn.std(0), spread, rtol=0.1, atol=1e-3)


def test_a_long_sentence_is_cut_with_a_warning(reasoner):
    with pytest.warns(Truncation, match="9 tokens"):
        cut = reasoner.vae.encode(["1+1+1+1+1"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(cut, reasoner.vae.encode(["1+1+1+1+"]))


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_saved_reasoner_answers_the_same(reasoner, base, tmp_path):
    folder = tmp_path / "thinker"
    reasoner.save(folder)
    again = LatentReasoner.load(folder, device="cpu")
    assert again.generate(QUESTIONS, steps=1, seed=0) == reasoner.generate(QUESTIONS, steps=1, seed=0)
    assert again.config == reasoner.config
    assert not any(parameter.requires_grad for parameter in again.vae.parameters())
    assert again.decoder.lm_head.weight is again.decoder.embed_tokens.weight
    assert isinstance(pippin.load(folder, device="cpu"), LatentReasoner)

    base.save(tmp_path / "base")
    with pytest.raises(UnsupportedModel, match="type 'llama', not 'pippin_ladir'"):
        LatentReasoner.load(tmp_path / "base")
    with pytest.raises(ModelNotFound):
        LatentReasoner.load(tmp_path / "nowhere")
    config = json.loads((folder / "config.json").read_text())
    config["vae"]["latent_size"] = 5
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptedFile, match=r"up_proj\.weight"):
        LatentReasoner.load(folder)
    del config["vae"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptedFile, match="vae: Field required"):
        LatentReasoner.load(folder)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"diversity": 0.4}, "2 or more"),
    ],
)
def test_numbers_out_of_range_are_refused(reasoner, how, message):
    with pytest.raises(InvalidArgument, match=message):
        reasoner.generate(["7=7"], **how)


def test_questions_that_cannot_be_asked_are_refused(reasoner):
    with pytest.raises(InvalidArgument, match="no question"):
        reasoner.generate([])
    with pytest.raises(InvalidArgument, match="empty"):
        reasoner.generate(["7", ""])
    with pytest.raises(ContextOverflow, match="made for 256") as caught:
        reasoner.generate(["1" * 490])
    assert caught.value.context_size == 256


def test_models_that_do_not_fit_are_refused(base, reasoner):
    with pytest.raises(NotPrepared, match="never fitted"):
        LatentReasoner.from_language_model(base, ThoughtVAE.from_language_model(base, block_size=1, latent_size=2))
    with pytest.raises(NotPrepared):
        ThoughtVAE.from_language_model(base, block_size=1, latent_size=2).decode(torch.zeros(1, 1, 2))
    from pippin.claims.worlds.sequences.byte_text import byte_config, byte_decoder, byte_model

    other = byte_model(byte_decoder(byte_config(layers=1, width=32), seed=0))
    with pytest.raises(VocabularyMismatch):
        LatentReasoner.from_language_model(other, reasoner.vae)
    with pytest.raises(InvalidArgument, match="at least 1"):
        ThoughtVAE.from_language_model(base, block_size=0)
    with pytest.raises(InvalidArgument, match="null_prob"):
        LatentReasoner.from_language_model(base, reasoner.vae, null_prob=1.0)
    with pytest.raises(InvalidArgument, match="latents of"):
        reasoner.vae.decode(torch.zeros(1, 2, 5))
    with pytest.raises(InvalidArgument, match="empty"):
        reasoner.vae.encode([""])
    with pytest.raises(InvalidArgument, match="no sentence"):
        reasoner.vae.encode([])
    endless = replace(base, tokenizer=Tokenizer(base.tokenizer._backend))
    endless.tokenizer.eos_ids = ()
    with pytest.raises(InvalidArgument, match="no end token"):
        ThoughtVAE.from_language_model(endless)
    packed = replace(base, network=Decoder(base.config).initialize(seed=0).pack())
    with pytest.raises(InvalidArgument, match="packed"):
        ThoughtVAE.from_language_model(packed)
    layer = base.config.layers[0]
    narrow = replace(base.config, layers=(layer, replace(layer, attention=replace(layer.attention, window=4))))
    with pytest.raises(UnsupportedLayer, match="layer 1: a sliding window"):
        ThoughtVAE.from_language_model(replace(base, network=Decoder(narrow).initialize(seed=0)))
    recurring = LayerSpec.recurring(RecurrentSpec(), layer.feedforward)
    mixed = replace(base.config, layers=(layer, recurring))
    with pytest.raises(UnsupportedLayer, match="layer 1: recurrent"):
        ThoughtVAE.from_language_model(replace(base, network=Decoder(mixed).initialize(seed=0)))


def test_rows_that_end_early_are_left_alone(base):
    ids = torch.tensor([[1, 2], [3, 4]])
    with torch.no_grad():
        args = (torch.ones(2, 0, dtype=torch.bool), torch.zeros(2, dtype=torch.long))
        embedded, longest = base.module.embed(ids), {"max_new_tokens": 4}
        likeliest = decode_text(base.module, embedded, PastKeyValues(), *args, end_ids=(), **longest)
        first = likeliest[0][1]
        ended = decode_text(base.module, embedded, PastKeyValues(), *args, end_ids=(first,), **longest)
    for whole, cut in zip(likeliest, ended, strict=True):
        assert cut == (whole[: whole.index(first)] if first in whole else whole)
