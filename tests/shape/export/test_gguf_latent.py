"""Oracles: the folder of the checkpoint, the layout of older files, and the format's own library."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

import pippin
from pippin.core.errors import UnsupportedModel
from pippin.language import Decoder, LanguageModel
from pippin.nn.attention.rotary import Rotary
from pippin.shape.export import gguf as export
from pippin.shape.export.gguf import export_gguf

from ...language.families.checkpoints import read
from .gguf_checkpoints import rewritten, save

IDS = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def latent(exported):
    """A model with latent attention, and its file."""
    return exported("deepseek_v3")


@torch.inference_mode()
def test_older_files_have_keys_and_values_in_one_matrix(latent, tmp_path):
    model, path = latent
    spec, heads = model.config.layers[0].attention.latent, model.config.num_attention_heads
    names = ("key_length", "value_length", "key_length_mla", "value_length_mla", "head_count_kv")
    sizes = (spec.plain_dim + spec.rotated_dim, spec.value_dim, None, None, heads)

    def older(tensors):
        for name in [name for name in tensors if name.endswith("attn_k_b.weight")]:
            keys = tensors.pop(name).transpose(0, 2, 1)
            values = tensors.pop(name.replace("attn_k_b", "attn_v_b"))
            both = np.concatenate([keys, values], 1).reshape(-1, spec.kv_rank)
            tensors[name.replace("attn_k_b", "attn_kv_b")] = both
        return tensors

    metadata = {f"deepseek2.attention.{name}": size for name, size in zip(names, sizes, strict=True)}
    again = pippin.load(
        rewritten(path, tmp_path / "older.gguf", metadata=metadata, tensors=older),
        device="cpu",
        dtype="float32",
        pack=False,
    )
    assert again.config.layers == pippin.load(path, device="cpu", pack=False).config.layers
    torch.testing.assert_close(again.module(IDS), model.module(IDS), rtol=0, atol=1e-6)


@torch.inference_mode()
def test_blocks_of_keys_are_those_of_the_transposed_matrix(latent, tmp_path):
    model, _ = latent
    path = export_gguf(model, tmp_path / "model.gguf", "Q8_0", show_progress=False)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.2.attn_k_b.weight"]
    heads, weight = model.config.num_attention_heads, model.module.layers[2].self_attn.k_b_proj.weight
    kind = gguf.GGMLQuantizationType.Q8_0
    assert stored.tensor_type == kind
    wanted = gguf.quants.quantize(weight.unflatten(0, (heads, -1)).mT.contiguous().numpy(), kind)
    np.testing.assert_array_equal(stored.data, wanted)
    again = pippin.load(path, device="cpu", dtype="float32", pack=False).module.layers[2].self_attn.k_b_proj.weight
    rounded = torch.from_numpy(gguf.quants.dequantize(wanted, kind)).mT.flatten(0, 1)
    torch.testing.assert_close(again, rounded, rtol=0, atol=0)


_YARN = Rotary(500.0, "yarn", 4.0, 16, low=1.0, high=32.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_score": "max"}, "scores a group of experts by the best two, DeepSeek 2 by the best one"),
        ({"q_rank": None}, "not 4 layers without them"),
        ({"bias": True}, r"attention\.latent\.bias is True, GGUF would say False"),
        ({"rotary": replace(_YARN, mscale=1.0, mscale_all_dim=0.5)}, "layer 0 has positions"),
        ({"rotary": replace(_YARN, mscale=1.0)}, r"yarn without rope\.scaling\.yarn_log_multiplier"),
        ({"choice_bias": False}, r"choice_bias is False, GGUF would say True"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(latent, changes, message):
    config = latent[0].config
    sizes, layers = config.layers[0].attention.latent, []
    for layer in config.layers:
        inner, attention = layer.feedforward, layer.attention
        router = {name: value for name, value in changes.items() if hasattr(inner.router, name)}
        latent_changes = {name: value for name, value in changes.items() if name in ("q_rank", "bias")}
        attention = replace(attention, latent=replace(sizes, **latent_changes))
        if "rotary" in changes:
            attention = replace(attention, rotary=changes["rotary"])
        if inner.num_experts:
            inner = replace(inner, router=replace(inner.router, **{k: v for k, v in router.items() if k != "bias"}))
        layers.append(replace(layer, attention=attention, feedforward=inner))
    config = replace(config, layers=tuple(layers))
    with torch.device("meta"):
        module = Decoder(config)
    with pytest.raises(UnsupportedModel, match=message):
        export._describe(config, export._entries(module, "F32", {}))


def test_what_a_file_says_and_the_decoder_lacks_is_refused(latent, tmp_path):
    for key, value, message in (
        ("deepseek2.attention.temperature_scale", 0.1, r"attention\.temperature_scale 0\.1"),
        ("deepseek2.rope.scaling.attn_factor", 1.5, r"rope\.scaling\.attn_factor 1\.5"),
        ("deepseek2.expert_gating_func", 4, "expert_gating_func 4 is not supported, only 1 and 2 are"),
        ("deepseek2.attention.key_length_mla", 8, "8 of 8 dimensions of a head are rotated"),
    ):
        path = rewritten(latent[1], tmp_path / "changed.gguf", metadata={key: value})
        with pytest.raises(pippin.core.errors.PippinError, match=message):
            pippin.load(path, device="cpu")


def test_groups_of_deepseek_2_are_read_as_it_scores_them(merging, tmp_path):
    save("deepseek_v2, latent queries", tmp_path)
    model = LanguageModel("small", read(tmp_path), merging.tokenizer, None)
    path = export_gguf(model, tmp_path / "model.gguf", "F32", show_progress=False)
    groups = {"deepseek2.expert_group_count": 3, "deepseek2.expert_group_used_count": 2}
    again = pippin.load(rewritten(path, tmp_path / "groups.gguf", metadata=groups), device="cpu", pack=False)
    router = again.config.layers[1].feedforward.router
    assert (router.num_groups, router.num_chosen_groups, router.group_score) == (3, 2, "max")
    with pytest.raises(UnsupportedModel, match="scores a group of experts by the best two"):
        export_gguf(again, tmp_path / "again.gguf", "F32", show_progress=False)
