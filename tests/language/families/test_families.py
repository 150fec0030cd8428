"""Every family against transformers, on tiny random checkpoints: in one pass, in chunks and batches, and saved."""

import copy
import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import pippin
from pippin.core import native
from pippin.core.errors import CorruptedFile, InvalidArgument, UnsupportedModel
from pippin.core.store.reference import resolve
from pippin.engine import Engine, Request, SamplingOptions
from pippin.engine.model_runner import Capture, ModelInput
from pippin.engine.runners.native_runner import NativeRunner
from pippin.engine.runners.select import make_runner
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.engine.speculation import Speculation
from pippin.language import Decoder, LanguageModel, families
from pippin.language.adapter_files import target_modules
from pippin.language.checkpoint_headers import read_headers
from pippin.language.families.family import pair_order
from pippin.nn.attention.attention_capture import AttentionCapture
from pippin.nn.attention.rotary import apply_rotary
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.expert_mask import ExpertMask
from pippin.nn.kv_cache import PackedDocuments
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRankUpdate
from pippin.nn.steering import Steering, SteeringChange, steering_sites

from .checkpoints import CHECKPOINTS, SMALL, read, save_random

EXPERTS = (
    *("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe"),
    *("granitemoeshared", "hunyuan_v1_moe", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
)
_LATENT = {"v_head_dim": 16, "q_lora_rank": 64}
# sizes of matrices that quantized rows divide
DIVISIBLE = {
    "deepseek_v2": {"v_head_dim": 16},
    "deepseek_v2 without groups": {"v_head_dim": 16},
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "gemma3n_text": {"hidden_size_per_layer_input": 32, "laurel_rank": 32},
    "gemma4_text": {"hidden_size_per_layer_input": 32},
    "granitemoeshared": {"shared_intermediate_size": 64},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
}
IDS = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(1))
CLOSE = {"rtol": 1e-5, "atol": 2e-5}
NEEDS_KERNELS = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
IN_KERNELS = [name for name in CHECKPOINTS if name != "gemma3n_text"]
"""Families that the native kernels compute; Gemma 3n has four streams of hidden states."""
NO_END = {256: -100.0, 257: -100.0, 258: -100.0}  # the tokenizer has 258 tokens


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder, the reference and the decoder of a family; each is made once."""
    made = {}

    def get(model_type):
        if model_type not in made:
            folder = tmp_path_factory.mktemp(model_type)
            made[model_type] = folder, save_random(model_type, folder), read(folder)
        return made[model_type]

    return get


def test_every_family_has_a_checkpoint_here():
    assert {name.partition(" ")[0] for name in CHECKPOINTS} == set(families.SHARED_FAMILIES)


@torch.inference_mode()
@pytest.mark.parametrize("model_type", CHECKPOINTS)
def test_logits_equal_transformers(checkpoints, support, model_type):
    _, reference, decoder = checkpoints(model_type)
    torch.testing.assert_close(decoder(IDS), reference(IDS).logits, **CLOSE)
    support(model_type, "opens")


@torch.inference_mode()
@pytest.mark.parametrize("kind", [TorchRunner, pytest.param(NativeRunner, marks=NEEDS_KERNELS)])
@pytest.mark.parametrize("model_type", CHECKPOINTS)
def test_chunks_batches_and_single_tokens_equal_one_pass(checkpoints, tiny, support, model_type, kind):
    if kind is NativeRunner and model_type not in IN_KERNELS:
        pytest.skip("not in the kernels")
    _, reference, decoder = checkpoints(model_type)
    expected = reference(IDS).logits
    if kind is NativeRunner:
        decoder = copy.deepcopy(decoder).pack()
    model = LanguageModel("small", decoder, tiny.tokenizer, None)
    runner = kind(model, 8, "float32")
    tables, (first, second) = ([3, 1, 5], [0, 2, 4]), IDS.tolist()
    one, two = {}, {}  # states of recurrent layers
    # the second sequence is 7 tokens behind, and only its last logits are wanted at first
    parts = runner.forward(
        [
            ModelInput(first[:19], 0, tables[0], range(19), states=one),
            ModelInput(second[:12], 0, tables[1], (11,), states=two),
        ]
    )
    torch.testing.assert_close(parts[0], expected[0, :19], **CLOSE)
    torch.testing.assert_close(parts[1], expected[1, 11:12], **CLOSE)
    parts = runner.forward(
        [
            ModelInput(first[19:39], 19, tables[0], (5, 19), states=one),
            ModelInput(second[12:39], 12, tables[1], (), states=two),
        ]
    )
    torch.testing.assert_close(parts[0], expected[0, [24, 38]], **CLOSE)
    last = [
        ModelInput(ids[39:], 39, table, (0,), states=states)
        for ids, table, states in zip((first, second), tables, (one, two), strict=True)
    ]
    for row, logits in zip(expected, runner.forward(last), strict=True):
        torch.testing.assert_close(logits, row[39:], **CLOSE)
    runner.close()
    support(model_type, "batches")
    if kind is NativeRunner:
        support(model_type, "kernels")


@NEEDS_KERNELS
@torch.inference_mode()
@pytest.mark.parametrize("model_type", IN_KERNELS)
def test_the_kernels_give_the_same_bits_however_a_prompt_is_cut(checkpoints, tiny, model_type):
    _, _, decoder = checkpoints(model_type)
    runner = NativeRunner(LanguageModel("small", copy.deepcopy(decoder).pack(), tiny.tokenizer, None), 64, "int8")
    ids = torch.randint(0, 97, (120,), generator=torch.Generator().manual_seed(2)).tolist()
    states = {}
    (whole,) = runner.forward([ModelInput(ids, 0, range(8), range(120), states=states)])
    other, parts = {}, []
    for start, end in pairwise([0, 1, 2, 40, 91, 119, 120]):
        company = ModelInput(ids[: end - start], 0, range(20, 28), ())
        own = ModelInput(ids[start:end], start, range(10, 18), range(end - start), states=other)
        before = dict(other)
        parts += runner.forward([company, own])[1:]
        assert all(before[layer] is not other[layer] for layer in before)  # a copy of the mapping is one of the states
    assert torch.equal(torch.cat(parts), whole)
    assert all(torch.equal(state, other[layer]) for layer, state in states.items())
    if states:
        with pytest.raises(InvalidArgument, match="brought the states of layers"):
            runner.forward([ModelInput([1], 120, range(8), (0,))])
        wrong = {layer: state[1:] for layer, state in states.items()}
        with pytest.raises(InvalidArgument, match="elements, the model needs"):
            runner.forward([ModelInput([1], 120, range(8), (0,), states=wrong)])
    runner.close()


@NEEDS_KERNELS
@torch.inference_mode()
@pytest.mark.parametrize("model_type", IN_KERNELS)
def test_adapters_in_the_kernels_equal_those_in_torch(checkpoints, tiny, support, model_type):
    _, _, decoder = checkpoints(model_type)
    packed = copy.deepcopy(decoder).pack()
    answers = []
    for kind, module in ((TorchRunner, decoder), (NativeRunner, packed)):
        generator = torch.Generator().manual_seed(3)
        changes = {
            target.linear: (
                LowRankUpdate(
                    torch.randn(3, target.linear.inputs, generator=generator) / 8,
                    torch.randn(target.outputs, 3, generator=generator) / 8,
                ),
            )
            for _, target in sorted(target_modules(module), key=itemgetter(0))
        }
        model = LanguageModel("small", module, tiny.tokenizer, None)
        runner = kind(model, 8, "float32")
        inputs = [
            ModelInput(IDS[0].tolist(), 0, [0, 1, 2], range(40)),
            ModelInput(IDS[1].tolist(), 0, [3, 4, 5], range(40), adapter=Adapter("all", changes)),
        ]
        answers.append(runner.forward(inputs))
        runner.close()
    for ours, theirs in zip(*answers, strict=True):
        # each is up to 1e-5 of that from float64
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
    assert float((answers[0][0] - answers[0][1]).abs().max()) > 0.1
    support(model_type, "LoRA")


@NEEDS_KERNELS
@torch.inference_mode()
@pytest.mark.parametrize("model_type", IN_KERNELS)
def test_what_a_request_changes_and_captures_is_the_same_in_the_kernels(checkpoints, tiny, model_type):
    """Steering at every site, masks of experts, and the attention that tokens receive."""
    _, _, decoder = checkpoints(model_type)
    sites, generator = steering_sites(decoder), torch.Generator().manual_seed(4)
    draw = [torch.randn(2, decoder.config.hidden_size, generator=generator) / 4 for _ in sites]
    steering = Steering({site: SteeringChange(*pair) for site, pair in zip(sites, draw, strict=True)}, strength=1.0)
    counts = [max(layer.feedforward.num_experts, layer.experts.num_experts if layer.experts else 0)
              for layer in decoder.config.layers]  # fmt: skip
    mask = None
    if any(counts):
        allowed = torch.ones(len(counts), max(counts), dtype=torch.bool)
        allowed[:, 0] = False
        mask = ExpertMask(allowed, 0.5 + torch.rand(allowed.shape, generator=generator))
    answers, captures = [], []
    for kind, module in ((TorchRunner, decoder), (NativeRunner, copy.deepcopy(decoder).pack())):
        runner = kind(LanguageModel("small", module, tiny.tokenizer, None), 8, "float32")
        capture = Capture(hidden=True, normalized=True, attention=AttentionCapture("max"))
        same = {"steering": steering, "experts": mask, "capture": capture}
        ids = IDS[0].tolist()
        answers.append(runner.forward([ModelInput(ids, 0, [0, 1, 2], range(40), **same)])[0])
        plain = runner.forward([ModelInput(ids, 0, [3, 4, 5], range(40))])[0]
        assert float((plain - answers[-1]).abs().max()) > 0.01
        captures.append(capture)
        runner.close()
    size = float(answers[0].abs().max())
    torch.testing.assert_close(answers[1], answers[0], rtol=0, atol=3e-5 * size)
    for name in ("hidden_states", "normalized_states"):
        theirs = getattr(captures[0], name)
        torch.testing.assert_close(getattr(captures[1], name), theirs, rtol=0, atol=3e-5 * float(theirs.abs().max()))
    received = [capture.attention.received for capture in captures]
    assert received[0].keys() == received[1].keys() == set(decoder.config.cached_layers)
    for layer, theirs in received[0].items():
        torch.testing.assert_close(received[1][layer], theirs, rtol=0, atol=3e-5)


@torch.inference_mode()
@pytest.mark.parametrize("model_type", CHECKPOINTS)
def test_packed_documents_equal_each_alone(checkpoints, model_type):
    _, reference, decoder = checkpoints(model_type)
    hidden = decoder.hidden(IDS.reshape(1, -1)[:, 28:52], cache=PackedDocuments([12, 12]))
    expected = torch.cat([reference(IDS[:1, 28:]).logits[0], reference(IDS[1:, :12]).logits[0]])
    torch.testing.assert_close(decoder.logits(hidden)[0], expected, **CLOSE)


@torch.inference_mode()
@pytest.mark.parametrize("model_type", CHECKPOINTS)
def test_what_is_saved_is_read_by_transformers_and_again(checkpoints, tiny, tmp_path, model_type):
    _, reference, decoder = checkpoints(model_type)
    LanguageModel("small", decoder, tiny.tokenizer, None).save(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype="float32", pad_token_id=0
    )
    torch.testing.assert_close(theirs(IDS).logits, reference(IDS).logits, **CLOSE)
    ours = read(tmp_path)
    assert ours.config == decoder.config
    for (name, a), b in zip(ours.state_dict().items(), decoder.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)  # norms that are stored minus one are rounded


@torch.inference_mode()
@pytest.mark.parametrize("model_type", CHECKPOINTS)
def test_an_opened_model_answers_as_transformers_does_with_a_known_prefix_too(
    checkpoints, tiny, support, tmp_path, model_type
):
    _, reference, decoder = checkpoints(model_type)
    LanguageModel("small", decoder, tiny.tokenizer, None).save(tmp_path)
    model = pippin.load(tmp_path, device="cpu", dtype="float32")
    request = Request(IDS[0].tolist(), options=SamplingOptions(max_tokens=6, logit_bias=NO_END))
    with Engine(model, max_num_seqs=2, cache_tokens=256 * len(model.config.cache_groups)) as engine:
        *tokens, _ = engine.stream(request)
        *again, _ = engine.stream(request)
        assert engine.stats().cached_tokens >= 32
    ids = IDS[:1]
    for _ in range(6):
        logits = reference(ids).logits[:, -1]
        logits[:, list(NO_END)] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    assert [token.id for token in tokens] == ids[0, IDS.shape[1] :].tolist()
    assert again == tokens
    support(model_type, "prefixes")


@torch.no_grad()
@pytest.mark.parametrize("model_type", CHECKPOINTS)
def test_quantized_weights_run_in_the_kernels(checkpoints, tiny, support, tmp_path, model_type):
    """As a decoder whose matrices are those that were quantized; and its states have the size that its config says."""
    _, _, decoder = checkpoints(model_type)
    if model_type in DIVISIBLE:
        save_random(model_type, tmp_path / "other", **DIVISIBLE[model_type])
        decoder = read(tmp_path / "other")
    LanguageModel("small", decoder, tiny.tokenizer, None).save(tmp_path)
    model = pippin.load(tmp_path, device="cpu", bits=4)
    runner = make_runner(model, 8, "float32")
    assert isinstance(runner, NativeRunner) == (native.library() is not None and model_type in IN_KERNELS)
    dense = Decoder(model.config)
    state = dict(model.module.state_dict())
    for name, part in model.module.named_modules():
        if isinstance(part, Linear | TokenEmbedding):
            state[f"{name}.weight"] = part.dense_weight().float()
    dense.load_state_dict(state)
    spread = float(dense(IDS).std())
    assert float((dense(IDS) - decoder(IDS)).abs().max()) > 0.1 * spread  # four bits are few
    # the kernels of four bits round their inputs, which sends a token now and then to another expert
    errors = (model.module(IDS) - dense(IDS)).square().mean(-1).sqrt()
    assert float(errors.median()) < 2e-3 * spread
    (logits,) = runner.forward([ModelInput(IDS[0].tolist(), 0, [0, 1, 2], range(IDS.shape[1]))])
    errors = (logits - dense(IDS[:1])[0]).square().mean(-1).sqrt()
    assert float(errors.median()) < 2e-3 * spread
    runner.close()
    sizes = [layer.recurrent.state_size for layer in model.module.layers if layer.recurrent is not None]
    assert model.config.state_bytes == 4 * sum(sizes)
    support(model_type, "2 to 8 bits")


@pytest.mark.parametrize("model_type", EXPERTS)
def test_experts_in_one_tensor_are_those_of_one_by_one(checkpoints, model_type):
    """The layouts of today's models in memory and of older files."""
    _, reference, decoder = checkpoints(model_type)
    family, config = families.FAMILIES[model_type], decoder.config
    memory = {families.without_prefix(name, family): value for name, value in reference.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in memory)
    sources, left = families.locate(family, config, decoder.state_dict(), memory)
    assert not left
    for name, value in decoder.state_dict().items():
        torch.testing.assert_close(sources[name].take(memory[sources[name].stored], config), value)


def test_a_fused_matrix_of_a_wrong_size_is_reported_with_its_own_shape(tmp_path, checkpoints):
    folder, _, _ = checkpoints("phi3")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.qkv_proj.weight"] = torch.zeros(100, 64)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CorruptedFile, match=r"q_proj.weight' has shape \(100, 64\) instead of \(64, 64\)"):
        read_headers(resolve(tmp_path))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [4, 8])
def test_reordered_rows_have_the_same_scores(interleaved, dims):
    """Rotating the stored pairs one by one, against rotating halves of reordered heads."""
    from pippin.nn.attention.rotary import Rotary

    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 5, 8, generator=generator).double()
    positions = torch.arange(5)

    def rotated(x):
        x = x.clone()
        angles = positions[:, None] / 10_000 ** (torch.arange(0, dims, 2).double() / dims)
        pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + dims // 2) for i in range(dims // 2)]
        for index, (a, b) in enumerate(pairs):
            cos, sin = angles[:, index].cos(), angles[:, index].sin()
            x[:, a], x[:, b] = x[:, a] * cos - x[:, b] * sin, x[:, b] * cos + x[:, a] * sin
        return x

    order = pair_order(interleaved=interleaved, dims=dims, head_dim=8)
    cos, sin = (table.double() for table in Rotary(dims=dims).tables(positions, 8))
    ours = [apply_rotary(x[:, order], cos, sin) for x in (q, k)]
    torch.testing.assert_close(ours[0] @ ours[1].T, rotated(q) @ rotated(k).T, rtol=0, atol=1e-5)


def test_an_unknown_family_is_refused_with_the_nearest():
    with pytest.raises(UnsupportedModel, match=r"'olmo4' is not supported; the nearest that are: olmo, olmoe, olmo3"):
        families.from_hf(SMALL | {"model_type": "olmo4"})


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm=True is not supported"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        ("deepseek_v2", {"topk_method": "noaux"}, "topk_method 'noaux' is not supported"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False is not supported"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True is not supported"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported"),
        ("gemma3n_text", {"altup_active_idx": 1}, "altup_active_idx=1 is not supported"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ],
)
def test_settings_that_the_decoder_lacks_are_refused_by_name(checkpoints, family, change, message):
    folder, _, _ = checkpoints(family)
    with pytest.raises(UnsupportedModel, match=message):
        families.from_hf(json.loads((folder / "config.json").read_text()) | change)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("deepseek_v3", {"n_group": 3}, "8 experts cannot form 3 groups"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group must be an integer from 1 to 4"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 3}, "1 groups of 2 experts are fewer than 3"),
        ("deepseek_v3", {"kv_lora_rank": 10**9}, "kv_lora_rank must be an integer"),
        ("gemma4_text", {"num_key_value_heads": 3}, "3 key heads of 16 dimensions, which do not fit 4 query heads"),
    ],
)
def test_configurations_that_contradict_themselves_are_told_apart(checkpoints, family, change, message):
    folder, _, _ = checkpoints(family)
    with pytest.raises((CorruptedFile, InvalidArgument), match=message):
        families.from_hf(json.loads((folder / "config.json").read_text()) | change)


def test_a_decoder_that_is_no_longer_of_its_family_is_not_saved_as_one(checkpoints):
    _, _, decoder = checkpoints("qwen3")
    with pytest.raises(UnsupportedModel, match="differs from qwen3 models"):
        families.to_hf(replace(decoder.config, logit_softcap=3.0))


def test_layers_that_share_keys_may_have_unused_ones_in_the_file(checkpoints, tmp_path):
    """The files of Gemma 4 hold them, as those of the wrapper with encoders, whose text part is opened."""
    folder, reference, _ = checkpoints("gemma4_text")
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    unused = {f"model.language_model.layers.3.self_attn.{name}.weight": torch.ones(1) for name in ("k_proj", "v_norm")}
    save_file(named | unused | {"model.embed_vision.proj.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": text}))
    headers = read_headers(resolve(tmp_path))
    assert headers.module.config == families.from_hf(text)
    torch.testing.assert_close(headers.tensor("norm.weight", torch.float32), reference.model.norm.weight.data)


def test_the_text_part_of_gemma_3n_has_rows_of_the_layers_inputs_for_its_own_ids_only(checkpoints, tmp_path):
    folder, reference, _ = checkpoints("gemma3n_text")
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    unused = {f"model.language_model.layers.{index}.self_attn.k_proj.weight": torch.ones(1) for index in (3, 4, 5)}
    save_file(named | unused | {"model.audio_tower.conv.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": text}))
    decoder = read_headers(resolve(tmp_path)).module
    assert decoder.config == families.from_hf(text)
    ids = torch.tensor([[3, 249, 250, 258, 4]])  # the table has 250 rows
    with torch.inference_mode():
        torch.testing.assert_close(read(folder)(ids), reference(ids).logits, **CLOSE)


@torch.inference_mode()
def test_gemma_3n_is_computed_by_torch_and_drafts_for_itself(checkpoints, tiny, support):
    """Its last layers share keys, so they can be left out; the streams of the others are kept for verification."""
    _, reference, decoder = checkpoints("gemma3n_text")
    model = LanguageModel("small", copy.deepcopy(decoder).pack(), tiny.tokenizer, None)
    assert not NativeRunner.supports(model)
    support("gemma3n_text", "kernels", "no")
    request = Request(IDS[0].tolist(), SamplingOptions(max_tokens=12, logit_bias=NO_END))
    with Engine(model, max_num_seqs=1, cache_tokens=512) as engine:
        *plain, _ = engine.stream(request)
        *drafted, end = engine.stream(replace(request, speculation=Speculation("self")))
    assert drafted == plain
    assert end.drafted > 0
    ids = IDS[:1]
    for _ in range(12):
        logits = reference(ids).logits[:, -1]
        logits[:, list(NO_END)] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    assert [token.id for token in plain] == ids[0, IDS.shape[1] :].tolist()


@torch.inference_mode()
def test_steering_of_gemma_3n_is_for_the_tokens_of_its_request(checkpoints, tiny):
    """In every stream of them after a layer, and in no other request of the pass."""
    _, _, decoder = checkpoints("gemma3n_text")
    runner = TorchRunner(LanguageModel("small", decoder, tiny.tokenizer, None), 8, "float32")
    change = SteeringChange(shift=torch.ones(decoder.config.hidden_size))
    steering = Steering({"layers.1": change, "layers.4.input_layernorm": change}, strength=0.5)

    def inputs(number, table, steering=None):
        return ModelInput(IDS[number].tolist(), 0, table, range(40), steering=steering)

    plain, other = (runner.forward([inputs(number, [0, 1, 2])])[0] for number in (0, 1))
    steered = runner.forward([inputs(1, [0, 1, 2], steering)])[0]
    together = runner.forward([inputs(0, [0, 1, 2]), inputs(1, [3, 4, 5], steering)])
    torch.testing.assert_close(together[0], plain, **CLOSE)
    torch.testing.assert_close(together[1], steered, **CLOSE)
    assert ((steered - other).abs().amax(-1) > 0.01).all()  # every token, the first too


def test_layers_that_predict_further_tokens_are_not_read(checkpoints, tmp_path):
    folder, _, _ = checkpoints("deepseek_v3")
    tensors = load_file(folder / "model.safetensors") | {"model.layers.4.eh_proj.weight": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert len(read_headers(resolve(tmp_path)).module.layers) == 4
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptedFile, match=r"'layers.3.eh_proj.weight' is not expected"):
        read_headers(resolve(tmp_path))


def test_random_weights_of_every_family_are_finite(checkpoints):
    for model_type in CHECKPOINTS:
        decoder = Decoder(checkpoints(model_type)[2].config).initialize(seed=0)
        assert decoder(IDS[:, :8]).isfinite().all(), model_type


def test_reading_headers_imports_no_compiler(tmp_path):
    """It takes 90 MB and seconds, and torch imports it for arithmetic on its meta device."""
    folders = [tmp_path / name.replace(" ", "-") for name in CHECKPOINTS]
    for name, folder in zip(CHECKPOINTS, folders, strict=True):
        save_random(name, folder)
    read_all = """
import sys
from pippin.core.store.reference import resolve
from pippin.language.checkpoint_headers import read_headers
for path in sys.argv[1:]:
    read_headers(resolve(path, download=False))
    assert "torch._dynamo" not in sys.modules, path
"""
    done = subprocess.run([sys.executable, "-c", read_all, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-300:]
