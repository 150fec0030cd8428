"""Masked diffusion against what can be enumerated: bound, sampler, noise; the shift; files; what it refuses."""

import itertools
import json
import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pippin
from pippin.core.errors import (
    Cancelled,
    ContextOverflow,
    CorruptedFile,
    DecodingFailure,
    InvalidArgument,
    UnsupportedLayer,
    UnsupportedModel,
)
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec, UnmaskingOptions, to_diffusion
from pippin.language.methods.masked_diffusion.loss import MaskedDiffusion, _sequences, masked_states
from pippin.language.methods.masked_diffusion.model import MASK, MaskedDiffusionLM
from pippin.language.methods.masked_diffusion.sample import unmask
from pippin.language.objectives import held_out
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.kv_cache import MaskedCache
from pippin.train import AdamW, Trainer

SYMBOLS, PLACES = 4, 3
HIDDEN = SYMBOLS  # the id that is masked


class Rows(nn.Module):
    """An output matrix whose states are numbers of its rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, states):
        return self.rows[states[..., 0].long()]


class Table(Decoder):
    """A model of three tokens over four symbols that is a table: a law for each place in each of the 125 states."""

    def __init__(self, seed=0):
        nn.Module.__init__(self)
        generator = torch.Generator().manual_seed(seed)
        logits = 1.5 * torch.randn((SYMBOLS + 1) ** PLACES * PLACES, SYMBOLS, generator=generator)
        self.lm_head = Rows(torch.cat([logits, torch.full((len(logits), 1), -1e9)], 1))
        layer = LayerSpec(AttentionSpec(), FeedForwardSpec(2))
        sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "max_position_embeddings": PLACES}
        self.config = DecoderConfig("llama", SYMBOLS + 1, 2, (layer,), **sizes)
        self.embed_tokens = SimpleNamespace(device=torch.device("cpu"))
        self.law = logits.view(*(SYMBOLS + 1,) * PLACES, PLACES, SYMBOLS).log_softmax(-1)

    def hidden(self, ids, cache=None):
        state = (ids * torch.tensor([25, 5, 1])).sum(1, keepdim=True)
        return (state * PLACES + torch.arange(PLACES))[..., None].float()

    def chain(self, text, order):
        """The logarithms of the law of a text, filled one by one in an order."""
        state, total = [HIDDEN] * PLACES, 0.0
        for place in order:
            total += float(self.law[(*state, place, text[place])])
            state[place] = text[place]
        return total


ORDERS = list(itertools.permutations(range(PLACES)))
TEXTS = list(itertools.product(range(SYMBOLS), repeat=PLACES))


@pytest.fixture(scope="module")
def table():
    return Table()


@pytest.fixture(scope="module")
def lm(tiny):
    return to_diffusion(tiny)


def ids_of(length, rows=1, seed=0):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def hide(length, *places):
    masked = torch.zeros(1, length, dtype=torch.bool)
    masked[0, list(places)] = True
    return masked


# --- the bound and the loss -------------------------------------------------------------------------------------------


def any_order(table, text):
    """The bound of the likelihood is the mean over all orders of filling."""
    return sum(table.chain(text, order) for order in ORDERS) / len(ORDERS)


def test_the_bound_is_the_mean_over_all_orders(table, tiny):
    lm = MaskedDiffusionLM(LanguageModel("table", table, tiny.tokenizer, None), HIDDEN, shift=False)
    texts = torch.tensor([[0, 1, 2], [3, 3, 0]])
    bound = lm.log_likelihood_bound(texts, samples=9000)
    for text, value, error in zip(texts.tolist(), bound.log_likelihood, bound.standard_error, strict=True):
        assert abs(float(value) - any_order(table, text)) < 3 * float(error) < 0.15
        exact = math.log(sum(math.exp(table.chain(text, order)) for order in ORDERS) / len(ORDERS))
        assert any_order(table, text) < exact  # what is bounded
    assert bound.num_tokens.tolist() == [PLACES, PLACES]


@pytest.mark.parametrize("stratified", [True, False])
def test_the_mean_loss_is_the_bound(table, stratified):
    text, eps, rows = (2, 0, 1), 1e-3, 25_000
    batch = TokenBatch(torch.tensor([text[:2]]).expand(rows, 2), torch.tensor([text[1:]]).expand(rows, 2))
    objective = MaskedDiffusion(HIDDEN, shift=False, eps=eps, stratified=stratified)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        losses = [float(objective(table, batch, generator).total) / rows for _ in range(8)]
    found = torch.tensor(losses)
    # between eps and 1 the integral of (1/t) t^m (1 - t)^(n - m) is known, and so is the mean over masks of each size
    expected = 0.0
    t = torch.linspace(eps, 1, 200_001, dtype=torch.float64)
    for size in range(1, PLACES + 1):
        inner = 0.0
        for masked in itertools.combinations(range(PLACES), size):
            state = tuple(HIDDEN if place in masked else text[place] for place in range(PLACES))
            inner -= sum(float(table.law[(*state, place, text[place])]) for place in masked)
        density = t ** (size - 1) * (1 - t) ** (PLACES - size)
        expected += inner * float(torch.trapezoid(density, t)) / (1 - eps)
    error = float(found.std()) / len(losses) ** 0.5
    assert abs(float(found.mean()) - expected) < 3 * error < 0.07
    assert expected == pytest.approx(-any_order(table, text), abs=0.02)


def test_the_loss_is_weighted_cross_entropy_and_its_gradient_too(lm):
    """Against torch's own cross-entropy of the whole logits, in a batch of two rows with prompts."""
    ids = ids_of(12, rows=2)
    targets = ids.roll(-1, 1)
    targets[:, -1] = torch.tensor([256, IGNORE])
    targets[1, :5] = IGNORE
    seen = []

    class Watching(MaskedDiffusion):
        rho = 1.0

    module = Decoder(lm.module.config).initialize(seed=3)
    hidden = module.hidden

    def watched(ids, cache):
        seen.append((ids, cache.mask))
        return hidden(ids, cache=cache)

    module.hidden = watched
    loss = Watching(lm.mask_id)(module, TokenBatch(ids, targets), torch.Generator().manual_seed(5))
    ((noisy, visible),) = seen
    whole = torch.cat([ids, torch.tensor([[256], [0]])], 1)
    masked = noisy == lm.mask_id
    assert 3 < int(masked.sum()) < 18
    assert torch.equal(torch.where(masked, whole, noisy), whole), "what is not masked is as it was"
    assert not masked[:, 0].any()
    assert not masked[1, :6].any(), "a prompt is never masked, nor what stands behind a text without an end"
    assert not masked[1, 12]
    assert loss.count == 12 + 6
    assert visible[0].all()
    assert visible[1, 0, :12, :12].all()
    assert not visible[1, 0, :12, 12].any()
    # the rates are those of the generator's first number, spread evenly
    first = torch.rand(1, generator=torch.Generator().manual_seed(5))
    rates = 1e-3 + (1 - 1e-3) * ((first + torch.arange(3) / 2) % 1)[:2]
    logits = module.lm_head(hidden(noisy, cache=MaskedCache(visible)))[:, :-1]
    each = nn.functional.cross_entropy(logits.transpose(1, 2), whole[:, 1:], reduction="none")
    expected = (each * masked[:, 1:] / rates[:, None]).sum()
    torch.testing.assert_close(loss.total, expected)
    ours = torch.autograd.grad(loss.total, list(module.parameters()))
    for mine, theirs in zip(ours, torch.autograd.grad(expected, list(module.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_packed_documents_learn_as_if_each_were_alone(lm):
    """Two documents in a row, one of them without its end, and a third: the loss is the sum of their losses."""
    lengths = (7, 5, 12)
    texts = [ids_of(n + 1, seed=n)[0] for n in lengths]
    ids = torch.stack([torch.cat([texts[0][:-1], texts[1][:-1]]), texts[2][:-1]])
    targets = torch.stack([torch.cat([texts[0][1:], texts[1][1:]]), texts[2][1:]])
    targets[0, 11] = IGNORE
    batch = TokenBatch(ids, targets, lengths)
    whole, document, maskable = _sequences(batch, True)
    assert whole.shape == (2, 14)
    assert document.tolist() == [[0] * 8 + [1] * 5 + [3], [2] * 13 + [3]]
    assert torch.equal(whole[0, :8], texts[0])
    assert torch.equal(whole[0, 8:13], texts[1][:-1])
    assert torch.equal(whole[1, :13], texts[2])
    assert maskable.tolist() == [[False] + [True] * 7 + [False] + [True] * 4 + [False], [False] + [True] * 12 + [False]]
    everything = torch.where(maskable, True, maskable)
    visible = (document[:, :, None] == document[:, None, :])[:, None]
    with torch.no_grad():
        states = masked_states(lm.module, whole, everything, lm.mask_id, True, visible)
        alone = []
        for text in (texts[0], texts[1][:-1], texts[2]):
            masked = torch.ones(1, len(text), dtype=torch.bool)
            masked[0, 0] = False
            alone.append(masked_states(lm.module, text[None], masked, lm.mask_id, True))
    torch.testing.assert_close(states, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_noise_masks_at_the_rate_that_was_drawn(lm):
    rows = 4000
    batch = TokenBatch(ids_of(8).expand(rows, 8), ids_of(8, seed=1).expand(rows, 8))
    for weighting in ("elbo", "uniform"):
        loss = MaskedDiffusion(lm.mask_id, weighting=weighting)
        with torch.no_grad():
            found = loss(lm.module, batch, torch.Generator().manual_seed(0))
        share = found.count / (8 * rows)
        assert share == 1 if weighting == "elbo" else abs(share - 0.5) < 0.02


def test_attention_grows_from_causal_to_full(lm):
    shares = []

    class Eyes(nn.Module):
        lm_head, config = Rows(torch.zeros(1, 260)), lm.module.config

        def hidden(self, ids, cache):
            shares.append(float(cache.mask.float().mean()))
            return torch.zeros(*ids.shape, 1)

    objective = lm.objective(anneal_steps=4)
    batch = TokenBatch(ids_of(63, rows=2), ids_of(63, rows=2, seed=1))
    for step in range(6):
        objective(Eyes(), batch, torch.Generator().manual_seed(step))
        objective.after_step(Eyes(), step + 1)
    hidden = (1 - 1 / 64) / 2  # the share of pairs that causal order hides
    for share, rho in zip(shares, (0.25, 0.5, 0.75, 1, 1, 1), strict=True):
        assert share == pytest.approx(1 - hidden * (1 - rho), abs=0.02)
    again = lm.objective(anneal_steps=4)
    again.load_state_dict(objective.state_dict())
    assert again.rho == 1.0


def test_a_causal_model_with_little_noise_predicts_as_before(tiny, lm):
    """With attention causal and one token masked, the shifted state is the one that predicted it."""
    ids = ids_of(20)
    causal = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        state = masked_states(lm.module, ids, hide(20, 13), lm.mask_id, True, causal)
        before = tiny.module.hidden(ids)[0, 12]
    torch.testing.assert_close(state[0], before)


def test_training_learns_what_only_both_sides_tell(tiny):
    """The byte in the middle is told by the one behind it, which a causal model cannot see."""
    module = Decoder(replace(tiny.config, layers=tiny.config.layers[:1])).initialize(seed=1)
    for parameter in module.parameters():
        parameter.data *= 4 if parameter.ndim == 2 else 1  # the scale is made for wider models
    lm = to_diffusion(LanguageModel("new", module, tiny.tokenizer, None))
    texts = torch.tensor([[0, a, 40 + a] for a in range(1, 9)]).repeat(4, 1)
    batch = TokenBatch(texts[:, :-1], texts[:, 1:])
    Trainer(
        lm.module,
        lm.objective(anneal_steps=20),
        [batch] * 120,
        steps=120,
        optimizer=AdamW(lr=1e-2),
        show_progress=False,
    ).fit()
    masked = torch.zeros_like(texts, dtype=torch.bool)
    masked[:, 1] = True
    assert torch.equal(lm.infill(texts, masked, UnmaskingOptions(1, temperature=0)), texts)
    bound = lm.log_likelihood_bound(texts[:8], samples=64)
    found = -float(bound.log_likelihood.mean()) / 2
    assert math.log(8) / 2 < found < math.log(8) / 2 + 0.3, "no bound lies below the entropy of eight equal chances"
    measured = held_out([batch] * 8, lm.objective(stratified=False))(lm.module)
    assert measured["loss"] == pytest.approx(found, rel=0.3)
    assert lm.masked_loss(texts, 1.0) > lm.masked_loss(texts, 0.3), "what is seen helps"


# --- sampling ---------------------------------------------------------------------------------------------------------


def draw(table, rows, how, seed=0):
    everything = torch.ones(rows, PLACES, dtype=torch.bool)
    steps = unmask(
        table,
        torch.zeros(rows, PLACES, dtype=torch.long),
        everything,
        how,
        mask_id=HIDDEN,
        shift=False,
        generator=torch.Generator().manual_seed(seed),
    )
    return list(steps)


def test_random_order_with_many_steps_draws_from_the_enumerated_law(table):
    law = torch.tensor([sum(math.exp(table.chain(x, order)) for order in ORDERS) / len(ORDERS) for x in TEXTS])
    rows = 40_000
    last = draw(table, rows, UnmaskingOptions(200))[-1]
    counts = torch.bincount((last.ids * torch.tensor([16, 4, 1])).sum(1), minlength=len(TEXTS))
    assert float((counts / rows - law).abs().sum()) / 2 < 0.02
    # in one step the tokens are drawn apart from each other, which is another law
    at_once = draw(table, rows, UnmaskingOptions(1))[-1]
    counts = torch.bincount((at_once.ids * torch.tensor([16, 4, 1])).sum(1), minlength=len(TEXTS))
    assert float((counts / rows - law).abs().sum()) / 2 > 0.1


def test_temperature_and_nucleus_draw_from_what_is_left(table):
    for how, expected in (
        (UnmaskingOptions(1, temperature=0.5), lambda p: p**2 / (p**2).sum()),
        (UnmaskingOptions(1, top_p=0.6), lambda p: torch.where(p.cumsum(0) - p < 0.6, p, 0.0)),
    ):
        ids = draw(table, 30_000, how)[-1].ids
        for place in range(PLACES):
            p, order = table.law[(HIDDEN,) * PLACES][place].exp().sort(descending=True)
            wanted = torch.zeros(SYMBOLS).scatter(0, order, expected(p) / expected(p).sum())
            found = torch.bincount(ids[:, place], minlength=SYMBOLS) / len(ids)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0.012)


@pytest.mark.parametrize("order", ["random", "confidence"])
@pytest.mark.parametrize("steps", [1, 2, 5, 16, 40])
def test_all_that_is_masked_is_filled_once_and_nothing_else_changes(lm, order, steps):
    ids = ids_of(24, rows=3)
    masked = torch.rand(3, 24, generator=torch.Generator().manual_seed(steps)) < 0.5
    masked[:, 0] = False
    masked[2, 1:] = False  # a row without gaps
    seen = []
    filled = lm.infill(ids, masked, UnmaskingOptions(steps, order), on_step=seen.append)
    assert torch.equal(filled[~masked], ids[~masked])
    assert not (filled == lm.mask_id).any()
    assert torch.equal(sum(step.fixed.long() for step in seen), masked.long()), "each once"
    assert [step.step for step in seen] == sorted({step.step for step in seen})
    assert len(seen) <= min(steps, int(masked.sum()))
    for step in seen:
        assert torch.equal(step.ids == lm.mask_id, step.masked)
    if order == "confidence":
        total = masked.sum(1)
        for step in seen:
            assert torch.equal(step.masked.sum(1), total * (steps - step.step) // steps)


def test_confidence_fixes_the_likeliest_first(table):
    first = draw(table, 1, UnmaskingOptions(PLACES, "confidence", temperature=0))[0]
    best = table.law[(HIDDEN,) * PLACES].amax(-1)
    assert first.fixed[0].tolist() == (best == best.max()).tolist()


def test_the_same_seed_gives_the_same_text_and_another_one_another(lm):
    one, same, other = (lm.infill(ids_of(30), hide(30, *range(5, 25)), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("shift", [True, False])
def test_blocks_with_kept_keys_are_what_a_mask_of_blocks_says(tiny, shift):
    """Against passes over the whole text in which no block sees a later one, and nothing is kept."""
    lm = to_diffusion(tiny, shift=shift)
    prompt, size, n = ids_of(9), 4, 10
    seen = []
    how = UnmaskingOptions(3, "confidence", temperature=0, block_size=size)
    new = lm.generate(prompt, max_new_tokens=n, options=how, stop=False, on_step=seen.append)
    ids = torch.cat([prompt, torch.full((1, n), lm.mask_id)], 1)
    block = torch.cat([torch.zeros(9), 1 + torch.arange(n) // size])
    visible = (block[None, :] <= block[:, None])[None, None]
    for begin in range(9, 9 + n, size):
        end = min(begin + size, 9 + n)
        masked = hide(19, *range(begin, end))
        now = visible.clone()
        if shift:  # the last token before a block is computed with it, and sees it
            now[..., begin - 1, begin:end] = True
        for left in (3, 2, 1):
            with torch.no_grad():
                hidden = lm.module.hidden(ids, cache=MaskedCache(now))
                logits = lm.module.lm_head(hidden[:, begin - shift : end - shift]).float()
            logits[..., lm.mask_id] = -torch.inf
            sure, token = logits.log_softmax(-1).max(-1)
            sure = sure.masked_fill(~masked[:, begin:end], -torch.inf)
            keep = (end - begin) * (left - 1) // 3
            fix = sure[0].argsort(descending=True)[: int(masked.sum()) - keep]
            ids[0, begin + fix] = token[0, fix]
            masked[0, begin + fix] = False
    assert torch.equal(new, ids[:, 9:])
    assert len(seen) == 3 + 3 + 2


def test_an_end_token_stops_the_filling(lm, monkeypatch):
    """With the first end token in place and nothing masked before it, no step follows."""
    head = lm.module.lm_head
    monkeypatch.setattr(head, "forward", lambda x: torch.eye(260)[torch.full(x.shape[:-1], 256)] + 0 * x[..., :1])
    seen = []
    how = UnmaskingOptions(12, "confidence", temperature=0)
    new = lm.generate([1, 2, 3], max_new_tokens=12, options=how, on_step=seen.append)
    assert new.tolist() == [[256] * 12]
    assert len(seen) == 1, "the first place was as sure as the others"
    assert lm.generate([1, 2, 3], max_new_tokens=12, options=how, stop=False, on_step=seen.append).shape == (1, 12)
    assert len(seen) == 13


def test_cancelling_ends_before_the_next_step(lm):
    cancel, seen = threading.Event(), []

    def first(step):
        seen.append(step)
        cancel.set()

    with pytest.raises(Cancelled, match="tiny was cancelled"):
        lm.infill(ids_of(30), hide(30, *range(5, 25)), UnmaskingOptions(20), on_step=first, cancel=cancel)
    assert len(seen) == 1


def test_gaps_in_a_text(lm):
    ids, masked = lm.parse_gaps("He said [[3]]!")
    assert masked[0].tolist() == [False] * 8 + [True] * 3 + [False]
    assert lm.tokenizer.decode(ids[0, :8].tolist()) == "He said "
    filled = lm.infill_text("He said [[3]]!", UnmaskingOptions(2))
    assert filled.startswith("He said ")
    assert filled.endswith("!")


# --- the model, its vocabulary and its files --------------------------------------------------------------------------


def test_a_mask_token_is_added_reused_or_found(tiny):
    added = to_diffusion(tiny)
    assert added.mask_id == tiny.tokenizer.vocab_size == 258
    assert added.tokenizer.encode(MASK, control=True) == [258]
    assert 258 not in added.tokenizer.encode(MASK), "plain text never means it"
    assert to_diffusion(added.model).mask_id == 258, "it is there already"
    assert to_diffusion(tiny, 200).mask_id == 200
    assert to_diffusion(tiny, "<|im_start|>").mask_id == 257
    # the embedding has rows to spare for one, and grows for more; the other weights are the same memory
    more = added
    for number in range(3):
        more = to_diffusion(more.model, f"<|more {number}|>")
    assert (more.mask_id, more.module.config.vocab_size) == (261, 262)
    weight = more.module.embed_tokens.weight
    assert weight is more.module.lm_head.weight
    torch.testing.assert_close(weight[261], weight[:261].mean(0))
    torch.testing.assert_close(weight[:258], tiny.module.embed_tokens.weight[:258])
    assert more.module.norm.weight.data_ptr() == tiny.module.norm.weight.data_ptr()
    ids = ids_of(5)
    torch.testing.assert_close(more.module(ids)[..., :258], tiny.module(ids)[..., :258])
    assert more.model.template.source == tiny.template.source


def test_a_saved_model_comes_back(lm, tmp_path):
    lm.save(tmp_path / "d")
    back = MaskedDiffusionLM.load(tmp_path / "d", device="cpu", dtype="float32", pack=False)
    assert (back.mask_id, back.shift, back.name) == (lm.mask_id, True, "d")
    ids, masked = ids_of(30), hide(30, *range(5, 25))
    assert torch.equal(back.infill(ids, masked, UnmaskingOptions(5)), lm.infill(ids, masked, UnmaskingOptions(5)))
    packed = MaskedDiffusionLM.load(tmp_path / "d", device="cpu", dtype="float32")
    bounds = [one.log_likelihood_bound(ids, samples=4).log_likelihood for one in (back, packed)]
    torch.testing.assert_close(*bounds, rtol=1e-3, atol=1e-3)
    assert isinstance(pippin.load(tmp_path / "d", device="cpu"), MaskedDiffusionLM)
    with pytest.raises(InvalidArgument, match="packed for inference; load it with pack=False"):
        to_diffusion(packed.model, "<|new|>")
    with pytest.raises(InvalidArgument, match="packed for inference; load it with pack=False"):
        packed.save(tmp_path / "packed")

    lm.model.save(tmp_path / "causal")
    with pytest.raises(UnsupportedModel, match="not 'pippin_masked_diffusion'"):
        MaskedDiffusionLM.load(tmp_path / "causal")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    for change, message in (({"mask_id": 999}, "mask_id 999 is outside"), ({"shift": 1}, "shift: ")):
        (tmp_path / "d" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CorruptedFile, match=message):
            MaskedDiffusionLM.load(tmp_path / "d", device="cpu")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: UnmaskingOptions(steps=0), "steps must be at least 1, got 0"),
        (lambda: MaskedDiffusion(5, anneal_steps=-1), "anneal_steps must be at least 0, got -1"),
    ],
)
def test_settings_out_of_range_are_refused(made, message):
    with pytest.raises(InvalidArgument, match=message):
        made()


def test_what_cannot_be_filled_or_judged_is_told_before_anything_is_computed(lm, tiny, monkeypatch):
    monkeypatch.setattr(lm.module, "hidden", lambda *_, **__: pytest.fail("computed"))
    ids = ids_of(10)
    refused = [
        (lambda: lm.infill(ids, hide(10)), "no token is masked"),
        (lambda: lm.infill(ids, hide(10, 0, 4)), "the first token is masked, and with a shift nothing predicts it"),
        (lambda: lm.infill(ids + 300, hide(10, 4)), "ids must be from 0 to 259"),
        (lambda: lm.infill(ids, hide(10, 4), UnmaskingOptions(block_size=2)), "masked tokens must stand at the end"),
        (lambda: lm.generate([], max_new_tokens=4), "the first token is masked"),
        (lambda: lm.generate([1], max_new_tokens=0), "max_new_tokens must be at least 1"),
        (lambda: lm.infill_text("no gap"), "the text has no gap"),
        (lambda: lm.infill_text("a [[0]] b"), "a gap of"),
        (lambda: lm.infill_text("[[4]] b"), "the first token is masked"),
        (lambda: lm.log_likelihood_bound(ids, maskable=hide(10)), "no token is masked"),
        (lambda: lm.log_likelihood_bound(ids, samples=1), "samples must be at least 2"),
        (lambda: lm.masked_loss(ids, 0.0), "mask_rate must be above 0"),
        (lambda: to_diffusion(tiny, 260), "mask_id 260 is outside the vocabulary of 260"),
        (lambda: to_diffusion(tiny, 256), "is an end token"),
    ]
    for call, message in refused:
        with pytest.raises(InvalidArgument, match=message):
            call()
    with pytest.raises(InvalidArgument, match="must have the same shape"):
        lm._check(ids, hide(9, 4), None)  # where shapes are checked, as in these tests, no other method is reached
    two = torch.cat([hide(10, 4), hide(10)])
    with pytest.raises(InvalidArgument, match="a row has no maskable token"):
        lm.log_likelihood_bound(ids_of(10, rows=2), maskable=two)
    with pytest.raises(ContextOverflow, match="2049 tokens, masked ones included") as caught:
        lm.generate([1], max_new_tokens=2048)
    assert (caught.value.context_size, caught.value.token_count) == (2048, 2049)


def test_weights_that_are_not_finite_draw_nothing(lm):
    class Broken(Table):
        def hidden(self, ids, cache=None):
            self.lm_head.rows = torch.full_like(self.lm_head.rows, torch.nan)
            return super().hidden(ids)

    with pytest.raises(DecodingFailure, match="not finite"):
        draw(Broken(), 1, UnmaskingOptions(1))


def test_layers_that_read_from_left_to_right_are_refused(tiny):
    from pippin.nn.recurrent.layer import RecurrentSpec

    spec = LayerSpec.recurring(RecurrentSpec("gru"), tiny.config.layers[0].feedforward)
    with torch.device("meta"):
        module = Decoder(replace(tiny.config, layers=(spec, *tiny.config.layers[1:])))
    with pytest.raises(UnsupportedLayer, match="recurrent layers cannot see what comes later, and these are: 0"):
        to_diffusion(LanguageModel("mixed", module, tiny.tokenizer, None), 200)
