"""Passes of the native kernels against the same block read by torch, for every instruction set of this machine."""

import pytest
import torch

from pippin.core import device, native
from pippin.generate.conditions import EmbeddedConditioning
from pippin.generate.flows import decoding, native as flow_native
from pippin.generate.flows.block import FlowBlock, FlowBlockSpec, LinearGuidance, sequential_invert
from pippin.generate.flows.jacobi import Jacobi

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels")
TOKENS, INNER = 21, 3


def made(n, *, hidden_size=64, num_attention_heads=2, seed=5, **spec):
    """A block far from the identity, what it reads, and tokens."""
    generator = torch.Generator().manual_seed(seed)
    block = FlowBlock(
        INNER, TOKENS, FlowBlockSpec(hidden_size=hidden_size, num_attention_heads=num_attention_heads, **spec)
    ).initialize(generator)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.startswith("proj_out"):
                parameter.normal_(0, 0.02, generator=generator)
            elif name.endswith(("bias", "norm.weight")):  # none of them is 0 or 1
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    vector, x = torch.randn(n, hidden_size, generator=generator), torch.randn(n, TOKENS, INNER, generator=generator)
    return block, EmbeddedConditioning(vector), x


@pytest.fixture
def by_torch(monkeypatch):
    """Calls something with torch in place of the kernels."""

    def call(what):
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "supports", lambda block: False)
            return what()

    return call


@pytest.fixture(params=native.instruction_sets())
def instructions(request):
    """Each instruction set in turn."""
    before = native.instruction_set()
    native.use_instruction_set(request.param)
    yield request.param
    native.use_instruction_set(before)


def close(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"num_attention_heads": 1, "num_hidden_layers": 3, "reverse": True},
        {"hidden_size": 96, "num_attention_heads": 6, "scale": "softplus", "soft_clip": 2.0},
        {"hidden_size": 112, "num_attention_heads": 7, "soft_clip": 3.0},
    ],
)
@pytest.mark.parametrize("n", [1, 3, 9])
def test_windows_and_rewinds_tell_what_torch_tells(instructions, by_torch, n, spec):
    block, embedded, x = made(n, **spec)
    reading, right = block.decoding(embedded), by_torch(lambda: block.decoding(embedded))
    assert reading._native is not None
    assert right._native is None
    for first, stop in ((0, 1), (0, 2), (1, 6), (6, 7), (7, 20), (3, 9), (9, 21), (20, 21), (0, 21)):
        close(reading.stats(x, first, stop), right.stats(x, first, stop))


def test_tokens_that_are_not_there_yet_are_not_asked_for(by_torch):
    block, embedded, x = made(2)
    right = by_torch(lambda: block.decoding(embedded)).stats(x, 0, 8)
    close(block.decoding(embedded).stats(x[:, :7], 0, 8), right)
    close(block.decoding(embedded).stats(x.double().flip(1).contiguous().flip(1), 0, 8), right)


@pytest.mark.parametrize("temperature", [1.0, 1.5])
@pytest.mark.parametrize("n", [1, 5])
def test_guided_windows_tell_what_torch_tells(by_torch, n, temperature):
    block, embedded, x = made(n)
    guide = LinearGuidance(EmbeddedConditioning(-embedded.vector), 0.7, anneal=True, temperature=temperature)
    reading, right = block.decoding(embedded, guide=guide), by_torch(lambda: block.decoding(embedded, guide=guide))
    for first, stop in ((0, 9), (4, 21)):
        close(reading.stats(x, first, stop), right.stats(x, first, stop))


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [1, 4, 16])
def test_an_inverse_in_one_call_is_torchs_token_by_token(by_torch, n, reverse, guided):
    block, embedded, z = made(n, reverse=reverse)
    guide = LinearGuidance(EmbeddedConditioning(-embedded.vector), 0.3, anneal=True) if guided else None
    right, info = by_torch(lambda: block.inverse(z, embedded, guide=guide))
    found, own = block.inverse(z, embedded, guide=guide)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert own.iterations == info.iterations
    settled, _ = block.inverse(z, embedded, guide=guide, solver=Jacobi(7, tolerance=1e-5))
    torch.testing.assert_close(settled, right, rtol=1e-4, atol=1e-4)
    if not guided:
        torch.testing.assert_close(block(found, embedded)[0], z, rtol=1e-4, atol=1e-4)


def test_an_inverse_goes_on_behind_known_tokens_in_place_wherever_they_lie():
    block, embedded, z = made(3)
    right, _ = block.inverse(z, embedded)
    for x in (torch.zeros(3, TOKENS, INNER), torch.zeros(3, TOKENS, 2 * INNER)[..., ::2]):
        x[:, :8] = right[:, :8]
        reading = block.decoding(embedded)
        reading.stats(x, 0, 8)
        found, _ = sequential_invert(reading, z, x=x, first=8)
        assert found is x
        torch.testing.assert_close(x, right, rtol=1e-5, atol=1e-5)
        later = [told[:, 5:] for told in block.decoding(embedded).stats(x, 0, TOKENS)]
        close(reading.stats(x, 5, TOKENS), later)  # it can go back


def test_tokens_of_another_batch_are_no_concern_of_the_kernels(by_torch):
    block, embedded, _ = made(1)
    x = made(3)[2]
    right = by_torch(lambda: block.decoding(embedded)).stats(x, 0, TOKENS)
    close(block.decoding(embedded).stats(x, 0, TOKENS), right)
    assert block.inverse(x[:0], EmbeddedConditioning(embedded.vector[:0]))[0].shape == (0, TOKENS, INNER)


def test_rules_and_scales_of_other_kinds_are_combined_by_torch(by_torch):
    for spec, guided in (({"soft_clip": 2.0}, False), ({"scale": "softplus"}, False), ({}, True)):
        block, embedded, z = made(2, **spec)
        rule = LinearGuidance(
            EmbeddedConditioning(-embedded.vector), 1.0, rule=lambda a, b, c, d, w: (a + w * 0.1 * c, b - w * 0.1 * d)
        )
        guide = rule if guided else None
        right, _ = by_torch(lambda: block.inverse(z, embedded, guide=guide))  # noqa: B023
        torch.testing.assert_close(block.inverse(z, embedded, guide=guide)[0], right, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(device.threads() < 2, reason="one core")
def test_threads_change_nothing():
    block, embedded, z = made(16, hidden_size=128)
    before = native.threads()
    try:
        native.set_threads(1)
        alone = block.inverse(z, embedded)[0]
        native.set_threads(2)
        assert torch.equal(block.inverse(z, embedded)[0], alone)
    finally:
        native.set_threads(before)


def test_what_the_kernels_cannot_is_left_to_torch(monkeypatch):
    plain = made(1)[0]
    assert flow_native.supports(plain)
    others = (
        {"start": "token"},
        {"position_embedding": "rotary"},
        {"text": True},
        {"hidden_size": 48, "num_attention_heads": 2},
    )
    assert not any(flow_native.supports(made(1, **spec)[0]) for spec in others)
    assert not flow_native.supports(made(1)[0].double())
    monkeypatch.setattr(native, "library", lambda: None)
    assert not flow_native.supports(plain)
    _, embedded, z = made(1)
    found, _ = plain.inverse(z, embedded)
    with torch.no_grad():
        torch.testing.assert_close(plain(found, embedded)[0], z, rtol=1e-4, atol=1e-4)


def test_the_weights_are_those_of_the_moment_and_of_packed_copies():
    block, embedded, z = made(2)
    packed = block.packed()
    before, _ = packed.inverse(z, embedded)
    with torch.no_grad():
        block.layers[0].attention_norm.bias.add_(1)
    assert torch.equal(packed.inverse(z, embedded)[0], before)
    assert not torch.equal(block.inverse(z, embedded)[0], before)
