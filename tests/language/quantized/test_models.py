"""Whole models in other libraries' folders: beside transformers, with adapters, quantized further, and their notes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.language.families.checkpoints import NEMOTRON_EXPERTS, read, save_random
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

import pippin
from pippin.core import native
from pippin.core.errors import AdapterMismatch, CorruptedFile, UnsupportedModel
from pippin.language import LanguageModel
from pippin.language.availability import availability, memory_needed
from pippin.language.quantized_checkpoint import matrix_shapes, read_quantized
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.packed import quantize
from pippin.recipes.shape.stored_bits import stored_bits
from pippin.shape import LowRankModel
from pippin.shape.export.gguf import stored_codes
from pippin.shape.export.quantized_folder import save_quantized_as

with_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
IDS = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny):
    """A random model, and the folder that it is saved in."""
    folder = tmp_path_factory.mktemp("plain")
    save_random("llama", folder / "theirs", vocab_size=288, num_hidden_layers=2, attention_bias=False, mlp_bias=False)
    model = LanguageModel("small", read(folder / "theirs"), tiny.tokenizer, None)
    model.save(folder / "ours")
    return model, folder / "ours"


def changed(source, target, method, change):
    """A copy of a folder whose matrices are replaced by what ``change`` makes of each."""
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors |= change(name, tensor) if "_proj" in name else {name: tensor}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": method}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def float8(plain, tmp_path_factory):
    def block(name, tensor):
        tall, wide = tensor.shape[0] // 32, tensor.shape[1] // 32
        blocks = tensor.view(tall, 32, wide, 32)
        scales = blocks.abs().amax((1, 3)) / 448
        values = (blocks / scales[:, None, :, None]).view(tensor.shape).to(torch.float8_e4m3fn)
        return {name: values, f"{name}_scale_inv": scales}

    settings = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    return changed(plain[1], tmp_path_factory.mktemp("fp8"), settings, block)


@pytest.fixture(scope="module")
def gptq(plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gptq")
    codes = {}
    for name in matrix_shapes(plain[0]):
        if name.startswith("layers."):
            values, scales = quantize(plain[0].module.get_submodule(name).weight.detach(), 4, 32, zero_point=8.0)
            codes[name] = Codes(values, scales, 4, 8.0)
    save_quantized_as("gptq", folder, plain[0], codes)
    return folder


@torch.inference_mode()
def test_block_float8_gives_the_logits_of_transformers(float8):
    """transformers dequantizes it on a CPU."""
    theirs = AutoModelForCausalLM.from_pretrained(
        float8, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    ours = pippin.load(float8, device="cpu", dtype="float32", pack=False)
    torch.testing.assert_close(ours.module(IDS), theirs(IDS).logits.float(), rtol=1e-4, atol=1e-4)


@with_kernels
def test_what_is_widened_is_said_with_its_memory(float8, gptq):
    (note,) = pippin.load(float8, device="cpu").notes
    assert note == "fp8: 14 matrices are widened to BF16 and take 122.9 kB: the kernels have no 8-bit floats"
    (note,) = pippin.load(gptq, device="cpu").notes
    assert note == "gptq: 14 matrices stay as they are (INT4/32) and take 34.6 kB"
    assert pippin.load(gptq, device="cpu", bits=4).notes == ()


@with_kernels
def test_memory_is_known_before_loading(gptq, float8):
    for folder in (gptq, float8):
        loaded = pippin.load(folder, device="cpu")
        packed = {id(part.packed): part.packed for part in loaded.module.modules() if hasattr(part, "packed")}
        plain = sum(parameter.nbytes for parameter in loaded.module.parameters())
        assert memory_needed(folder, context=0) == sum(weight.nbytes for weight in packed.values()) + plain
        assert availability(folder)


@with_kernels
def test_adapters_train_over_codes_and_belong_to_them(gptq, float8, tmp_path):
    model = pippin.load(gptq, device="cpu")
    adapted = LowRankModel(model.module, rank=2, seed=0)
    before = adapted(IDS).square().mean()
    before.backward()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
        assert adapted(IDS).square().mean() < before
    adapted.save(tmp_path, model)
    again = pippin.load(gptq, device="cpu")
    adapter = again.load_adapter("a", tmp_path)
    with torch.no_grad():
        mine = again.module(IDS, adapters=[(adapter, slice(None))])
        torch.testing.assert_close(mine, adapted(IDS), atol=1e-5, rtol=0)
    with pytest.raises(AdapterMismatch, match="made for"):
        pippin.load(float8, device="cpu").load_adapter("a", tmp_path)


@with_kernels
def test_it_can_be_quantized_further(gptq):
    again = pippin.load(gptq, device="cpu", bits=2)
    assert again.module.layers[0].mlp.up_proj.packed.kind == "INT2"
    exact = pippin.load(gptq, device="cpu", dtype="float32", pack=False)
    assert (
        again.module.layers[0].mlp.up_proj.packed.dense() - exact.module.layers[0].mlp.up_proj.weight
    ).abs().max() < 1


def rewritten(folder, tokenizer, tensors, rename=lambda name, tensor: (name, tensor), **settings):
    """A folder of transformers with other tensors in place of its experts (not the router) and latent attention's."""
    stored = load_file(folder / "model.safetensors").items()
    gone = (".experts.", ".kv_b_proj.") if any(".embed_q." in name for name in tensors) else (".experts.",)
    kept = dict(rename(name, tensor) for name, tensor in stored if not any(part in name for part in gone))
    kept = {name: tensor.contiguous() for name, tensor in kept.items()}
    save_file(kept | {n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(folder)


def of_mlx(weight, bits=8, group=32):
    """A matrix, or one for each expert, as MLX quantizes it: the tensors and their values."""
    groups = weight.unflatten(-1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (high - low) / (2**bits - 1)
    codes = ((groups - low) / scales).round().clamp(0, 2**bits - 1)
    words = codes.flatten(-2).to(torch.uint8).view(torch.int32)
    parts = {"weight": words, "scales": scales.squeeze(-1), "biases": low.squeeze(-1)}
    return parts, (codes * scales + low).flatten(-2)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v2"])
@torch.inference_mode()
def test_experts_as_mlx_lm_stores_them_give_the_logits_of_transformers(family, tmp_path, tiny):
    sizes = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "vocab_size": 288}
    theirs = save_random(family, tmp_path, **sizes)
    room = {"mixtral": "block_sparse_moe.switch_mlp", "gpt_oss": "mlp.experts"}.get(family, "mlp.switch_mlp")
    tensors = {}
    for name, parameter in theirs.named_parameters():
        layer, is_experts, what = name.partition(".mlp.experts.")
        if not is_experts:
            continue
        names = [what] if what.startswith("down") else [what.replace("gate_up", part) for part in ("gate", "up")]
        if family == "gpt_oss":  # inputs as rows, gates and up outputs in turn
            rows = parameter if what.endswith("bias") else parameter.transpose(1, 2)
            parts = [rows] if len(names) == 1 else [rows[:, 0::2], rows[:, 1::2]]
        else:
            rows = parameter
            parts = rows.chunk(len(names), 1)
        for own, part in zip(names, [part.contiguous() for part in parts], strict=True):
            stem = f"{layer}.{room}.{own.removesuffix('_bias')}"
            if own.endswith("bias"):
                tensors[f"{stem}.bias"] = part.clone()
                continue
            stored, values = of_mlx(part)
            tensors |= {f"{stem}.{leaf}": tensor for leaf, tensor in stored.items()}
            place = rows[:, names.index(own) :: len(names)] if family == "gpt_oss" else None
            (parts[names.index(own)] if place is None else place).copy_(values)
    rewritten(tmp_path, tiny.tokenizer, tensors, quantization={"group_size": 32, "bits": 8, "mode": "affine"})
    ours = pippin.load(tmp_path, device="cpu", dtype="float32", pack=False)
    torch.testing.assert_close(ours.module(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)
    if native.library() is not None:
        experts = pippin.load(tmp_path, device="cpu").module.layers[-1].mlp.experts
        assert experts[1].up_proj.packed.kind == "AFFINE8"


def _of_mlx_lm(name, tensor):
    """A tensor of transformers under the name that mlx-lm has for it, and a convolution with its taps in the middle."""
    name = name.replace("block_sparse_moe.gate.e_score", "mlp.e_score").replace("block_sparse_moe.", "mlp.")
    if name.endswith("_conv1d.weight"):
        name = name.replace("conv1d.weight", "conv.conv.weight")
    return name, tensor.mT if tensor.ndim == 3 and "conv" in name else tensor


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite", "kimi_linear", "nemotron_h"])
@torch.inference_mode()
def test_latent_attention_and_experts_without_gates_of_mlx_lm_give_the_logits_of_transformers(family, tmp_path, tiny):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 288}
    if family == "nemotron_h":
        sizes |= NEMOTRON_EXPERTS
    else:
        sizes |= {"qk_nope_head_dim": 32, "kv_lora_rank": 32, "v_head_dim": 20}
    theirs = save_random(family, tmp_path, **sizes)
    tensors = {}

    def quantized(stem, weights):
        stored, values = of_mlx(weights.contiguous())
        tensors.update({f"{stem}.{leaf}": tensor for leaf, tensor in stored.items()})
        weights.copy_(values)

    for name, parameter in theirs.named_parameters():
        stem, _, part = name.partition(".experts.")
        if name.endswith("kv_b_proj.weight"):
            stem = name.removesuffix(".kv_b_proj.weight")
            heads = parameter.unflatten(0, (theirs.config.num_attention_heads, -1))
            quantized(f"{stem}.embed_q", heads[:, :32].mT)
            quantized(f"{stem}.unembed_out", heads[:, 32:])
        elif part == "gate_up_proj":
            for own, rows in zip(("gate_proj", "up_proj"), parameter.chunk(2, 1), strict=True):
                quantized(f"{stem}.switch_mlp.{own}", rows)
        elif part:
            own = {"up_proj": "fc1", "down_proj": "fc2"}[part] if family == "nemotron_h" else part
            quantized(f"{stem}.switch_mlp.{own}", parameter)
    settings = {"group_size": 32, "bits": 8, "mode": "affine"}
    rewritten(tmp_path, tiny.tokenizer, tensors, _of_mlx_lm, quantization=settings)
    ours = pippin.load(tmp_path, device="cpu", dtype="float32", pack=False)
    torch.testing.assert_close(ours.module(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)
    if native.library() is not None:
        packed = pippin.load(tmp_path, device="cpu").module
        assert packed.layers[3].mlp.experts[1].up_proj.packed.kind == "AFFINE8"


@torch.inference_mode()
def test_gpt_oss_as_it_is_published_gives_the_logits_of_transformers(tmp_path, tiny):
    save_random("gpt_oss", tmp_path, hidden_size=64, intermediate_size=96, vocab_size=288)
    draw = torch.Generator().manual_seed(0)
    shapes = {"gate_up_proj": (6, 192, 64), "down_proj": (6, 64, 96)}
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if name.endswith("_bias"):
            tensors[name] = tensor
        elif (part := name.rpartition(".")[2]) in shapes and ".experts." in name:
            experts, rows, columns = shapes[part]
            blocks, scales = (experts, rows, columns // 32, 16), (experts, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=draw)
            tensors[f"{name}_scales"] = torch.randint(121, 125, scales, dtype=torch.uint8, generator=draw)
    apart = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": apart}
    rewritten(tmp_path, tiny.tokenizer, tensors, quantization_config=settings)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    ours = pippin.load(tmp_path, device="cpu", dtype="float32", pack=False)
    torch.testing.assert_close(ours.module(IDS), theirs(IDS).logits.float(), rtol=1e-4, atol=1e-4)
    packed = pippin.load(tmp_path, device="cpu")
    if native.library() is not None:
        assert packed.module.layers[0].mlp.experts[0].down_proj.packed.kind == "Q5_0"
        torch.testing.assert_close(packed.module(IDS).float(), theirs(IDS).logits.float(), rtol=0.05, atol=0.3)


def test_bits_and_codes_of_the_folder_are_known(gptq, float8, tmp_path):
    model = pippin.load(gptq, device="cpu", dtype="float32", pack=False)
    assert 4.5 < stored_bits(gptq) < 5.5  # with scales and zero points for each 32, and group numbers
    assert 8 <= stored_bits(float8) < 8.1
    codes = stored_codes(model)
    assert codes.keys() == {name for name in matrix_shapes(model) if name.startswith("layers.")}
    assert torch.equal(codes["layers.0.mlp.up_proj"].dense(), model.module.layers[0].mlp.up_proj.weight)
    with pytest.raises(UnsupportedModel, match="quantized by gptq, not by Pippin"):
        read_quantized(gptq)
    model.save(tmp_path)  # as an ordinary folder
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(
        pippin.load(tmp_path, device="cpu", pack=False).module.layers[0].mlp.up_proj.weight,
        model.module.layers[0].mlp.up_proj.weight,
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c, t: c["quantization_config"].update(quant_method="exl3"), UnsupportedModel, "quantized by exl3"),
        (lambda c, t: c["quantization_config"].update(bits=6), UnsupportedModel, "bits=6"),
        (
            lambda c, t: t.pop("model.layers.1.mlp.up_proj.qzeros"),
            CorruptedFile,
            "lacks 'model.layers.1.mlp.up_proj.qz",
        ),
        (lambda c, t: t["model.layers.1.mlp.up_proj.scales"][0].fill_(0), CorruptedFile, "a scale of zero"),
        (lambda c, t: c.update(intermediate_size=64), CorruptedFile, r"instead of \(64, 64\)"),
    ],
)
def test_folders_that_contradict_themselves_are_refused_before_memory_is_taken(gptq, tmp_path, change, error, message):
    config, tensors = json.loads((gptq / "config.json").read_text()), load_file(gptq / "model.safetensors")
    change(config, tensors)
    for path in gptq.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(error, match=message):
        memory_needed(tmp_path)
    assert not availability(tmp_path)
