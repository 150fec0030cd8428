"""Experts that come in waves: bit-identical logits, the experts that torch chooses, its predictions, errors."""

import copy
import random

import numpy as np
import pytest
import torch

from pippin.core import native
from pippin.core.errors import InvalidArgument, PippinError, UnsupportedModel
from pippin.engine import record_expert_trace
from pippin.engine.engine import Engine
from pippin.engine.model_runner import BLOCK_SIZE, ModelInput
from pippin.engine.runners.native_runner import NativeRunner
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec, Router
from pippin.nn.feedforward.routing import RouterSpec

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")

VOCAB, WIDTH, EXPERTS, ACTIVE = 70, 64, 6, 2
MIXTURE = FeedForwardSpec(32, num_experts=EXPERTS, num_experts_per_tok=ACTIVE)
SHARED = FeedForwardSpec(
    32, num_experts=EXPERTS, num_experts_per_tok=ACTIVE, shared_intermediate_size=32,
    router=RouterSpec("sigmoid", bias=True, choice_bias=True),
)  # fmt: skip


def decoder_of(*specs: FeedForwardSpec) -> Decoder:
    layers = tuple(LayerSpec(AttentionSpec(), spec) for spec in specs)
    module = Decoder(DecoderConfig("qwen3_moe", VOCAB, WIDTH, layers, 4, 2, 16, 4096, tie_word_embeddings=False))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + noise / 4 if name.endswith("norm.weight") else noise / parameter.shape[-1] ** 0.5
    return module.eval()


MODULE = decoder_of(MIXTURE, FeedForwardSpec(48), MIXTURE, SHARED)
IDS = torch.randint(VOCAB, (300,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def model(tiny):
    return LanguageModel("mixture", copy.deepcopy(MODULE).pack(), tiny.tokenizer, None)


def work(ids, held=0):
    return ModelInput(ids, held, list(range(-(-(held + len(ids)) // BLOCK_SIZE))), range(len(ids)))


class Source:
    """Brings experts in random waves, and keeps what was asked for."""

    def __init__(self, depth=0, seed=0):
        self.depth, self.rng, self.asked, self.passes = depth, random.Random(seed), [], []

    def begin_pass(self, tokens):
        self.passes.append(tokens)

    def waves(self, layer, needed, predicted):
        self.asked.append((layer, needed, predicted))
        left = self.rng.sample(needed, len(needed))
        while left:
            count = self.rng.randint(1, len(left))
            yield left[:count]
            left = left[count:]


def chosen_by_torch(ids):
    """The router of each mixture and its outputs, in the torch decoder."""
    found = []

    def keep(router: Router, inputs, scores):
        found.append((router, scores.detach()))

    hooks = [part.register_forward_hook(keep) for part in MODULE.modules() if isinstance(part, Router)]
    with torch.no_grad():
        MODULE(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("seed", range(3))
def test_logits_are_bit_identical_in_whatever_waves_experts_come(model, seed):
    parts = [(IDS[:257], 0), (IDS[257:258], 257), (IDS[258:300], 258)]  # more than the kernels take through a layer
    plain, fed = NativeRunner(model, 32), NativeRunner(model, 32)
    source = Source(depth=2, seed=seed)
    fed.fetch_experts(source)
    for ids, held in parts:
        (expected,), (logits,) = (runner.forward([work(ids, held)]) for runner in (plain, fed))
        assert torch.equal(logits, expected)
    assert source.passes == [257, 1, 42]
    assert [layer for layer, _, _ in source.asked] == [0, 1, 2] * 3  # mixtures alone are counted, each once for a pass


def test_what_is_asked_for_is_what_torch_chooses(model):
    runner = NativeRunner(model, 32)
    source = Source()
    runner.fetch_experts(source)
    runner.forward([work(IDS[:40])])
    hooked = chosen_by_torch(IDS[:40])
    for (_, needed, predicted), (router, scores) in zip(source.asked, hooked, strict=True):
        values = scores.softmax(-1) if router.spec.router.scores == "softmax" else scores.sigmoid()
        if router.e_score_correction_bias is not None:
            values = values + router.e_score_correction_bias
        assert needed == values.topk(ACTIVE, -1).indices.unique().tolist()
        assert predicted is None


def test_predictions_are_the_next_routers_of_the_hidden_states_before(model):
    runner = NativeRunner(model, 32)
    source = Source(depth=3)
    runner.fetch_experts(source)
    runner.forward([work(IDS[:20])])
    states = {}

    def keep(index):
        return lambda layer, inputs: states.__setitem__(index, inputs[0].detach())

    hooks = [
        layer.post_attention_layernorm.register_forward_pre_hook(keep(index))
        for index, layer in enumerate(MODULE.layers)
    ]
    with torch.no_grad():
        MODULE(torch.tensor([IDS[:20]]))
    for hook in hooks:
        hook.remove()
    layers = [0, 2, 3]  # the mixtures
    for number, (_, _, predicted) in enumerate(source.asked):
        assert predicted.shape == (3, EXPERTS)
        for ahead, row in enumerate(predicted, 1):
            if number + ahead >= len(layers):
                assert (row == -1).all()
                continue
            layer = MODULE.layers[layers[number + ahead]]
            with torch.no_grad():
                scores = layer.mlp.gate(layer.post_attention_layernorm(states[layers[number]]))
            expected = scores.softmax(-1).flatten(0, 1).amax(0)
            torch.testing.assert_close(torch.from_numpy(row), expected, atol=1e-4, rtol=0)


def test_an_error_of_the_source_ends_the_pass_and_the_next_one_works(model):
    class Broken(Source):
        broken = True

        def waves(self, layer, needed, predicted):
            if self.broken and layer == 1:
                raise OSError("the disk is gone")
            yield from super().waves(layer, needed, predicted)

    runner = NativeRunner(model, 32)
    source = Broken()
    runner.fetch_experts(source)
    with pytest.raises(OSError, match="the disk is gone"):
        runner.forward([work(IDS[:5])])
    source.broken = False
    (logits,) = runner.forward([work(IDS[:5])])
    (expected,) = NativeRunner(model, 32).forward([work(IDS[:5])])
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("waves", [[[0]], [], [[0, 99]], [list(range(EXPERTS)) * 2], [[0, 0, 1, 2, 3, 4]]])
def test_waves_that_are_not_what_was_asked_for_are_refused(model, waves):
    class Wrong(Source):
        def waves(self, layer, needed, predicted):
            yield from waves

    runner = NativeRunner(model, 32)
    runner.fetch_experts(Wrong())
    with pytest.raises(PippinError, match="experts that were needed did not come"):
        runner.forward([work(IDS[:20])])


def test_a_trace_has_what_passes_needed(model):
    trace = record_expert_trace(model, [IDS[:30], IDS[30:45]], max_tokens=4, depth=1)
    assert trace.tokens.tolist() == [30, 1, 1, 1, 15, 1, 1, 1]
    assert trace.sizes.shape == (3, EXPERTS)
    mixture = model.module.layers[0].mlp
    assert trace.sizes[0, 0] == sum(part.packed.nbytes for part in mixture.experts[0].children())
    assert all(len(trace.needed(1, layer)) == ACTIVE for layer in range(3))
    assert np.isnan(trace.predicted[:, 0, 0]).all()  # nothing comes before the first mixture
    assert (trace.predicted[:, 0, 1:] > 0).all()
    hooked = chosen_by_torch(IDS[:30])
    assert trace.needed(0, 0).tolist() == hooked[0][1].topk(ACTIVE, -1).indices.unique().tolist()


def test_a_model_without_experts_has_no_trace(tiny):
    with pytest.raises(UnsupportedModel, match="has no experts"):
        record_expert_trace(tiny, ["a"])


def test_a_model_that_torch_computes_is_told(tiny):
    unpacked = LanguageModel("mixture", copy.deepcopy(MODULE), tiny.tokenizer, None)
    with Engine(unpacked, cache_tokens=256) as engine, pytest.raises(UnsupportedModel, match="not packed"):
        engine.fetch_experts(Source())


def test_places_of_experts_are_checked(model):
    runner = NativeRunner(model, 4)
    found, handle = runner._native, runner._decoder.handle
    with pytest.raises(InvalidArgument, match="layer 0 has its experts"):
        found.model_expert(handle, 0, 0, None)
    with pytest.raises(InvalidArgument, match="no expert 6 in layer 0"):
        found.model_expert(handle, 0, EXPERTS, None)
    with pytest.raises(InvalidArgument, match="depth"):
        found.model_fetch(handle, None, 2)
