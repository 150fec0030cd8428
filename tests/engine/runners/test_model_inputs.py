"""What a pass may be given beside tokens, and may return beside logits, against transformers and explicit masks."""

import copy
from dataclasses import replace

import pytest
import torch
from tests.language.families.checkpoints import read, save_random
from transformers import AutoConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

from pippin.core import native
from pippin.core.errors import InvalidArgument
from pippin.engine.model_runner import BLOCK_SIZE, GIVEN_BACK, Capture, ModelInput
from pippin.engine.runners.native_runner import NativeRunner
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.language import Decoder, LanguageModel
from pippin.nn.attention.attention_capture import AttentionCapture
from pippin.nn.expert_mask import ExpertMask
from pippin.nn.steering import Steering, SteeringChange, steering_sites

RUNNERS = ["torch", pytest.param("native", marks=pytest.mark.skipif(native.library() is None, reason="not built"))]


@pytest.fixture(params=RUNNERS)
def opened(request, tmp_path, tiny):
    """Opens a random checkpoint of a family: transformers' model, and a runner with blocks for 80 tokens a group."""

    def make(family, groups=False, **changes):
        theirs = save_random(family, tmp_path, **changes)
        return theirs, runner_of(read(tmp_path), request.param, tiny, groups)

    return make


def runner_of(decoder, kind, tiny, groups=False):
    module = copy.deepcopy(decoder).requires_grad_(False)
    model = LanguageModel("random", module.pack() if kind == "native" else module, tiny.tokenizer, None)
    found = model.config.cache_groups if groups else None
    runner = (NativeRunner if kind == "native" else TorchRunner)(model, 40, "float32", found)
    assert (kind == "native") == NativeRunner.supports(model)
    return runner


def some_ids(count, seed=0):
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def table(count, first=0):
    return list(range(first, first + -(-count // BLOCK_SIZE)))


def one(runner, ids, outputs=None, held=0, first=0, **options):
    rows = range(len(ids)) if outputs is None else outputs
    (logits,) = runner.forward([ModelInput(ids, held, table(held + len(ids), first), rows, **options)])
    return logits


def close(ours, theirs, tolerance=2e-4):
    torch.testing.assert_close(ours.float(), theirs.float(), atol=tolerance, rtol=0)


@torch.no_grad()
def test_positions_are_not_slots(opened):
    theirs, runner = opened("qwen2")
    ids = some_ids(30)
    positions = torch.cat([torch.arange(10), torch.full((8,), 10), torch.arange(400, 412)])[None]
    expected = theirs(torch.tensor([ids]), position_ids=positions).logits[0]
    close(one(runner, ids, positions=positions), expected)
    one(runner, ids[:13], (), positions=positions[:, :13])
    close(one(runner, ids[13:], held=13, positions=positions[:, 13:]), expected[13:])
    plain = one(runner, ids)
    assert (plain - expected).abs().max() > 0.01
    company = runner.forward(
        [
            ModelInput(ids, 0, [0, 1], range(30), positions=positions),
            ModelInput(ids, 0, [4, 5], range(30)),
        ]
    )
    close(company[0], expected)
    close(company[1], plain, 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", RUNNERS)
def test_positions_of_three_axes_rotate_as_in_qwen2_vl(kind, tmp_path, tiny):
    save_random("qwen2", tmp_path)
    decoder = read(tmp_path)
    sections = (2, 3, 3)  # of 8 frequencies: time, height, width
    axes = tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    config = decoder.config
    layers = tuple(
        replace(layer, attention=replace(layer.attention, rotary=replace(layer.attention.rotary, axes=axes)))
        for layer in config.layers
    )
    ours = Decoder(replace(config, layers=layers))
    ours.load_state_dict(decoder.state_dict())
    runner = runner_of(ours, kind, tiny)
    text = AutoConfig.for_model(
        "qwen2_vl_text",
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections)},
    )
    theirs = Qwen2VLTextModel._from_config(text, attn_implementation="eager").eval()
    missing = theirs.load_state_dict(
        {k: v for k, v in decoder.state_dict().items() if k != "lm_head.weight"}, strict=False
    )
    assert not missing.missing_keys
    ids = some_ids(24)
    grid = torch.stack([torch.full((12,), 5), 5 + torch.arange(12) // 4, 5 + torch.arange(12) % 4])
    positions = torch.cat([torch.arange(5).expand(3, -1), grid, torch.arange(9, 16).expand(3, -1)], 1)
    hidden = theirs(torch.tensor([ids]), position_ids=positions[:, None]).last_hidden_state
    expected = hidden[0] @ decoder.state_dict()["lm_head.weight"].T
    close(one(runner, ids, positions=positions), expected)
    one(runner, ids[:9], (), positions=positions[:, :9])
    close(one(runner, ids[9:], (4, 14), held=9, positions=positions[:, 9:]), expected[[13, 23]])
    assert (one(runner, ids, positions=positions[:1]) - expected).abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_spans_attend_to_each_other(opened, family):
    """A span of tokens that see its end, as those of an image in Gemma 3, with and without sliding windows."""
    theirs, runner = opened(family)
    ids, start, end = some_ids(40), 9, 14
    visible = [end - 1 if start <= slot < end else slot for slot in range(40)]
    query, key = torch.arange(40)[:, None], torch.arange(40)
    allowed = key <= torch.tensor(visible)[:, None]
    masks = {"full_attention": allowed, "sliding_attention": allowed & (query - key < 6)}
    additive = {
        name: torch.zeros(1, 1, 40, 40).masked_fill(~mask, torch.finfo(torch.float32).min)
        for name, mask in masks.items()
    }
    mask = additive if family == "gemma3_text" else additive["full_attention"]
    expected = theirs(torch.tensor([ids]), attention_mask=mask).logits[0]
    close(one(runner, ids, visible=visible), expected)
    one(runner, ids[:start], ())
    one(runner, ids[start:22], (), held=start, visible=visible[start:22])
    close(one(runner, ids[22:], (0, 17), held=22), expected[[22, 39]])
    assert (one(runner, ids) - expected).abs().max() > 0.01


@torch.no_grad()
def test_a_span_may_be_longer_than_what_goes_through_a_layer_at_once(opened):
    theirs, runner = opened("qwen2")
    ids, start, end = some_ids(200), 90, 170
    visible = [end - 1 if start <= slot < end else slot for slot in range(200)]
    allowed = torch.arange(200) <= torch.tensor(visible)[:, None]
    mask = torch.zeros(1, 1, 200, 200).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected = theirs(torch.tensor([ids]), attention_mask=mask).logits[0]
    close(one(runner, ids, visible=visible), expected)
    assert (one(runner, ids) - expected).abs().max() > 0.01


@torch.no_grad()
def test_embeddings_replace_those_of_tokens_after_their_scale(opened):
    theirs, runner = opened("gemma3_text")  # whose embeddings are scaled
    ids, rows = some_ids(30), torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
    embeds = theirs.get_input_embeddings()(torch.tensor([ids])).clone()
    embeds[0, 5:12] = rows
    expected = theirs(inputs_embeds=embeds).logits[0]
    close(one(runner, ids, embeddings=[(5, rows)]), expected)
    one(runner, ids[:8], (), embeddings=[(5, rows[:3])])
    close(one(runner, ids[8:], held=8, embeddings=[(0, rows[3:])]), expected[8:])
    assert (one(runner, ids) - expected).abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "olmo2", "cohere", "qwen3_moe"])
def test_steering_equals_hooks_on_the_same_modules(opened, family):
    theirs, runner = opened(family)
    generator = torch.Generator().manual_seed(5)
    names = steering_sites(runner.model.module)
    changes = {
        name: SteeringChange(
            torch.randn(64, generator=generator) / 3 if at % 3 else None, torch.randn(64, generator=generator) / 3
        )
        for at, name in enumerate(names)
        if at % 2 or name == "norm"
    }
    steering = Steering(changes, strength=0.7)
    ids, other = some_ids(30), some_ids(20, 1)
    plain = theirs(torch.tensor([ids])).logits[0]
    hooks = []
    for name, change in changes.items():

        def hook(module, inputs, output, change=change):
            scale = 1.0 if change.scale is None else 1 + 0.7 * change.scale
            if isinstance(output, tuple):
                return (output[0] * scale + 0.7 * change.shift, *output[1:])
            return output * scale + 0.7 * change.shift

        hooks.append(theirs.get_submodule(f"model.{name}").register_forward_hook(hook))
    expected = theirs(torch.tensor([ids])).logits[0]
    for each in hooks:
        each.remove()
    assert (plain - expected).abs().max() > 0.1
    close(one(runner, ids, steering=steering), expected, 1e-3)
    close(one(runner, ids, steering=steering.with_strength(0.0)), plain)
    one(runner, ids[:17], (), steering=steering)
    steered, company = runner.forward(
        [
            ModelInput(ids[17:], 17, [0, 1], (12,), steering=steering),
            ModelInput(other, 0, [3, 4], (19,)),
        ]
    )
    close(steered[0], expected[29], 1e-3)
    close(company[0], theirs(torch.tensor([other])).logits[0, 19])


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_masked_experts_are_never_chosen(opened, family):
    theirs, runner = opened(family)
    allowed = torch.zeros(4, 6, dtype=torch.bool)
    for layer, experts in enumerate([(0, 2, 5), (1, 2), (0, 1, 2, 3), (3, 4, 5)]):
        allowed[layer, list(experts)] = True
    ids, other = some_ids(20), some_ids(20, 1)
    plain = theirs(torch.tensor([other])).logits[0]
    kept = {}
    for index, layer in enumerate(theirs.model.layers):
        gate = (layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe).gate
        kept[gate] = gate.weight.clone()
        # a column that is minus infinity for every token: the router's weights cannot say it, so its logits are changed
        original = torch.nn.functional.linear

        def routed(x, weight, bias=None, *, original=original, kept=kept):
            y = original(x, weight, bias)
            found = next((i for i, w in enumerate(kept) if w.weight is weight), None)
            return y if found is None else y.masked_fill(~allowed[found], -torch.inf)

        if index == 0:
            torch.nn.functional.linear = routed
    try:
        expected = theirs(torch.tensor([ids])).logits[0]
    finally:
        torch.nn.functional.linear = original
    mask = ExpertMask(allowed)
    masked, company = runner.forward(
        [ModelInput(ids, 0, [0, 1], range(20), experts=mask), ModelInput(other, 0, [2, 3], range(20))]
    )
    close(masked, expected)
    close(company, plain)
    assert (one(runner, ids, first=4) - expected).abs().max() > 0.01
    (last,) = runner.forward([ModelInput(ids[19:], 19, [0, 1], (0,), experts=mask)])
    close(last[0], expected[19])


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_weights_of_a_mask_multiply_what_its_experts_say(opened, family):
    theirs, runner = opened(family)
    weights = 0.5 + torch.rand(4, 6, generator=torch.Generator().manual_seed(2))
    ids, other = some_ids(20), some_ids(20, 1)
    plain = theirs(torch.tensor([other])).logits[0]
    for layer, own in zip(theirs.model.layers, weights, strict=True):
        (layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe).experts.down_proj *= own[:, None, None]
    mask = ExpertMask(torch.ones(4, 6, dtype=torch.bool), weights)
    weighted, company = runner.forward(
        [ModelInput(ids, 0, [0, 1], range(20), experts=mask), ModelInput(other, 0, [2, 3], range(20))]
    )
    close(weighted, theirs(torch.tensor([ids])).logits[0])
    close(company, plain)
    assert (one(runner, ids, first=4) - weighted).abs().max() > 0.01


@torch.no_grad()
def test_hidden_states_before_and_after_the_last_norm(opened):
    theirs, runner = opened("qwen2")
    ids, norm = some_ids(30), theirs.model.norm
    seen = {}
    hook = norm.register_forward_hook(lambda module, inputs, output: seen.update(before=inputs[0], after=output))
    theirs(torch.tensor([ids]))
    hook.remove()
    capture, other = Capture(hidden=True, normalized=True), Capture(hidden=True)
    runner.forward(
        [
            ModelInput(ids, 0, [0, 1], (3, 29), capture=capture),
            ModelInput(ids[:5], 0, [3], ()),
            ModelInput(ids[:9], 0, [2], (8,), capture=other),
        ]
    )
    close(capture.hidden_states, seen["before"][0, [3, 29]])
    close(capture.normalized_states, seen["after"][0, [3, 29]])
    close(other.hidden_states, seen["before"][0, [8]])
    assert other.normalized_states is None


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gemma3_text", "mistral", "cohere2"])
@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_attention_received_equals_that_of_transformers(opened, family, reduction):
    theirs, runner = opened(family)
    ids, held = some_ids(45), 20
    attentions = theirs(torch.tensor([ids]), output_attentions=True).attentions
    capture = Capture(attention=AttentionCapture(reduction))
    one(runner, ids[:held], ())
    one(runner, ids[held:], (24,), held=held, capture=capture)
    for layer, weights in enumerate(attentions):
        groups = weights[0, :, held:].unflatten(0, (2, -1))  # (kv_heads, heads, queries, keys)
        expected = groups.sum((1, 2)) if reduction == "sum" else groups.amax((1, 2))
        close(capture.attention.received[layer], expected, 1e-4)


@torch.no_grad()
def test_attention_among_cached_tokens_leaves_out_those_of_the_pass(opened):
    theirs, runner = opened("qwen2")
    ids, held = some_ids(45), 20
    attentions = theirs(torch.tensor([ids]), output_attentions=True).attentions
    capture = Capture(attention=AttentionCapture("max", before=held))
    one(runner, ids[:held], ())
    one(runner, ids[held:], (), held=held, capture=capture)
    for layer, weights in enumerate(attentions):
        among = weights[0, :, held:, :held]
        among = among / among.sum(-1, keepdim=True)
        received = capture.attention.received[layer]
        close(received[:, :held], among.unflatten(0, (2, -1)).amax((1, 2)), 1e-4)
        assert not received[:, held:].any()


@torch.no_grad()
@pytest.mark.parametrize("kind", RUNNERS)
def test_keys_that_several_layers_read_receive_from_all_of_them(kind, tmp_path, tiny):
    save_random("qwen2", tmp_path)
    decoder = read(tmp_path)
    shared = Decoder(decoder.config.with_kv_sources([None, 0, None, 0]))
    shared.load_state_dict(decoder.state_dict(), strict=False)
    runner, ids = runner_of(shared, kind, tiny), some_ids(30)
    capture = Capture(attention=AttentionCapture("sum"))
    for _ in range(2):  # a second pass begins anew
        one(runner, ids, (), capture=capture)
        given = {layer: float(received.sum()) for layer, received in capture.attention.received.items()}
        # each of 4 heads of 30 queries gives 1 in every layer that reads the keys
        assert given == pytest.approx({0: 3 * 4 * 30, 2: 4 * 30}, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3_text", "cohere2", "mistral"])
def test_groups_of_layers_have_tables_of_their_own_and_give_blocks_back(opened, family):
    """Tables are scattered, and blocks behind the window are given back: nothing may read them."""
    theirs, runner = opened(family, groups=True)
    config, ids = runner.model.config, some_ids(70)
    expected = theirs(torch.tensor([ids])).logits[0]
    count = len(config.cache_groups)
    blocks = torch.randperm(5 * count, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [blocks[at::count] for at in range(count)]
    garbage = torch.full((1, runner.block_bytes), 255, dtype=torch.uint8)
    for start, end in [(0, 33), (33, 34), (34, 50), (50, 69), (69, 70)]:
        for layers, own in zip(config.cache_groups, tables, strict=True):
            window = config.window_of(layers[0])
            for index in range(0 if window is None else max(0, start - window + 1) // BLOCK_SIZE):
                if own[index] != GIVEN_BACK:
                    runner.write([own[index]], garbage)  # not a number
                    own[index] = GIVEN_BACK
        new = ids[start:end]
        (logits,) = runner.forward([ModelInput(new, start, tables[0], range(len(new)), other_tables=tuple(tables[1:]))])
        close(logits, expected[start:end])
    assert any(GIVEN_BACK in own for own in tables)


def test_what_does_not_fit_is_refused(opened):
    _, runner = opened("qwen2")
    rows = torch.zeros(2, 64)
    good = {"token_ids": [5, 6], "num_computed_tokens": 3, "block_table": [0], "outputs": (1,)}
    for changes, message in [
        ({"other_tables": ([1],)}, "1 groups of layers, the sequence 2"),
        ({"positions": torch.tensor([[1, 2, 3]])}, r"must be \(axes, 2\)"),
        ({"positions": torch.tensor([[1, -2]])}, "not negative"),
        ({"visible": [3, 5]}, "the last of the pass, 4"),
        ({"visible": [2, 4]}, "visible slots"),
        ({"visible": [4, 3]}, "visible slots"),
        ({"visible": [4]}, "visible slots"),
        ({"embeddings": [(1, rows)]}, "cannot replace tokens from 1 on of 2"),
        ({"embeddings": [(-1, rows)]}, "from -1 on"),
        ({"embeddings": [(0, rows[:, :3])]}, "model of width 64"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            runner.forward([ModelInput(**(good | changes))])
