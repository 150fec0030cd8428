"""Oracles: the unfolded decoder (a fold changes nothing), and the error with and without it."""

import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.language import Decoder, DecoderConfig, LayerSpec
from pippin.nn.attention.attention import AttentionSpec, LatentSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.shape.quantize import awq, rtn
from pippin.shape.quantize.config import QuantizationConfig

FEED = FeedForwardSpec(64)
PLAIN = LayerSpec(AttentionSpec(), FEED)
DECODERS = {
    "llama": {},
    "one head each": {"num_key_value_heads": 4},
    "biases": {"qkv_bias": True},
    "norms around": {"residual": "pre and post", "qk_norm": "head", "embedding_scale": 2.0},
    "shared keys": {"layers": (PLAIN, LayerSpec(AttentionSpec(kv_source=0), FEED))},
    "experts": {"layers": (LayerSpec(AttentionSpec(), FeedForwardSpec(32, num_experts=3, num_experts_per_tok=2)),) * 2},
    "a shared expert": {
        "layers": (
            LayerSpec(
                AttentionSpec(), FeedForwardSpec(32, num_experts=3, num_experts_per_tok=2, shared_intermediate_size=64)
            ),
        )
        * 2
    },
    "bounded gates": {
        "layers": (
            LayerSpec(
                AttentionSpec(),
                FeedForwardSpec(32, "gelu_sigmoid", num_experts=3, num_experts_per_tok=2, bias=True, limit=0.5),
            ),
        )
        * 2
    },
    "parallel": {"residual": "parallel"},
    "streams": {"residual": "pre and post", "num_streams": 3, "laurel_rank": 32},
    "latent attention": {
        "layers": (LayerSpec(AttentionSpec(latent=LatentSpec(24, 8, 16, 16, q_rank=32)), FEED),) * 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "no gate": {"layers": (LayerSpec(AttentionSpec(), FeedForwardSpec(64, gated=False)),) * 2},
}


def decoder(**fields):
    layers = fields.pop("layers", (PLAIN, PLAIN))
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64} | fields
    module = Decoder(DecoderConfig("llama", 50, 64, layers, **sizes)).initialize(seed=2).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
            elif name.endswith("bias"):
                parameter.normal_(generator=generator)
            elif len(parameter) == 64:  # a few channels carry much, as in trained models
                parameter[::23] = 15.0
    return module


def text(seed=0, rows=8):
    return torch.randint(0, 50, (rows, 24), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", DECODERS)
def test_folding_leaves_the_function_as_it_was(kind):
    module = decoder(**DECODERS[kind])
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    with torch.no_grad():
        wanted = module(text(1))
        exponents = awq.fold(module, QuantizationConfig(bits=4, group=32), text(), grid=4)
        found = module(text(1))
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert max(exponents.values()) > 0  # something was folded
    changed = {name for name, parameter in module.named_parameters() if not torch.equal(parameter, before[name])}
    # where the normalized input is also added to the hidden states, it stays
    assert ("layers.0.input_layernorm.weight" in changed) == (kind != "streams")


def test_values_that_another_layer_reads_are_left_alone():
    module = decoder(**DECODERS["shared keys"])
    assert [fold.source for fold in awq.folds_of(module, 0)] == [
        "input_layernorm",
        "post_attention_layernorm",
        "mlp.up_proj",
    ]
    assert awq.folds_of(module, 1)[0].readers == ("self_attn.q_proj",)


def test_what_a_matrix_gives_is_nearer_on_text_that_was_not_seen():
    module, settings = decoder(), QuantizationConfig(bits=4, group=64)
    names = [f"layers.0.self_attn.{part}_proj" for part in "qkv"]
    seen = []
    hook = module.get_submodule(names[0]).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        module(text(1))
    hook.remove()
    x = seen[0].flatten(0, 1)
    before = {name: module.get_submodule(name).weight.detach().clone() for name in names}
    assert awq.fold(module, settings, text(0))[names[0]] > 0
    rounded = folded = 0.0
    for name in names:
        weight = module.get_submodule(name).weight.detach()
        scale = (weight / before[name]).median(0).values
        plain = rtn.round_weight(before[name], 4, settings).dense() - before[name]
        wrong = (rtn.round_weight(weight, 4, settings).dense() - weight) / scale
        rounded += (x @ plain.T).square().sum()
        folded += (x @ wrong.T).square().sum()
    assert folded < 0.8 * rounded


def test_an_empty_grid_is_refused():
    with pytest.raises(InvalidArgument, match="grid must be at least 1"):
        awq.fold(decoder(), QuantizationConfig(), text(), grid=0)
