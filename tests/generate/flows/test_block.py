"""One block against autograd's Jacobian, against itself read in pieces, and against guidance done by hand."""

import dataclasses

import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import EmbeddedConditioning
from pippin.generate.flows.block import FlowBlock, FlowBlockSpec, LinearGuidance, sequential_invert
from pippin.generate.flows.jacobi import Jacobi, jacobi_invert
from pippin.nn.attention.axial_rotary import axial_tables, grid_positions

SPECS = {
    "plain": FlowBlockSpec(hidden_size=16, num_attention_heads=2),
    "reversed": FlowBlockSpec(hidden_size=16, num_attention_heads=2, reverse=True),
    "starflow": FlowBlockSpec(
        hidden_size=16,
        num_attention_heads=2,
        reverse=True,
        start="token",
        position_embedding="rotary",
        scale="softplus",
        soft_clip=4.0,
        text=True,
    ),
    "noise": FlowBlockSpec(hidden_size=16, num_attention_heads=1, noise=True, soft_clip=2.0, start="token"),
}


def made(name, *, tokens=6, inner=3, n=2, size=0.15):
    """A block with weights that are far from the identity, and what it reads."""
    spec = SPECS[name]
    generator = torch.Generator().manual_seed(3)
    block = FlowBlock(inner, tokens, spec).initialize(generator)
    with torch.no_grad():
        for parameter in (block.proj_out.weight, block.proj_out.bias):
            parameter.normal_(0, size, generator=generator)
    text = torch.randn(n, 3, 16, generator=generator) if spec.text else None
    mask = torch.tensor([[True, True, False], [True, True, True]])[:n] if spec.text else None
    embedded = EmbeddedConditioning(torch.randn(n, 16, generator=generator), text, mask)
    arguments = {
        "t": torch.tensor([0.1, 0.4])[:n] if spec.noise else None,
        "cos_sin": axial_tables(grid_positions(tokens // 2, 2), 8) if spec.position_embedding == "rotary" else None,
    }
    return block, embedded, arguments, torch.randn(n, tokens, inner, generator=generator)


@pytest.mark.parametrize("name", SPECS)
def test_log_determinant_is_that_of_autograds_jacobian_and_the_inverse_undoes_it(name):
    block, embedded, arguments, x = made(name)
    with torch.no_grad():
        z, log_det = block(x, embedded, **arguments)
    assert (z - x).abs().max() > 0.05

    def flat(v):
        return block(v.view_as(x), embedded, **arguments)[0].flatten(1)

    jacobian = torch.autograd.functional.jacobian(flat, x.flatten(1))
    for sample in range(2):
        own = jacobian[sample, :, sample]
        torch.testing.assert_close(log_det[sample], torch.linalg.slogdet(own)[1], rtol=0, atol=1e-4)
        assert torch.equal(jacobian[sample, :, 1 - sample], torch.zeros_like(own))  # samples don't see each other
    for solver in (None, Jacobi(4, tolerance=0), Jacobi(64, tolerance=1e-6)):
        back, _ = block.inverse(z, embedded, **arguments, solver=solver)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", SPECS)
def test_a_token_depends_on_those_before_it_in_the_blocks_order_alone(name):
    block, embedded, arguments, x = made(name)
    with torch.no_grad():
        before = block.stats(x, embedded, **arguments)
        x[:, 3] += 1
        after = block.stats(x, embedded, **arguments)
    same = [torch.equal(before[0][:, i], after[0][:, i]) for i in range(6)]
    later = range(3) if SPECS[name].reverse else range(4, 6)
    assert [not equal for equal in same] == [i in later for i in range(6)]


def test_the_first_token_is_unchanged_without_a_start_and_changed_with_one():
    for name, equal in (("plain", True), ("noise", False)):
        block, embedded, arguments, x = made(name)
        with torch.no_grad():
            z, _ = block(x, embedded, **arguments)
        assert torch.equal(z[:, 0], x[:, 0]) == equal


def test_padding_of_a_text_is_not_seen():
    block, embedded, arguments, x = made("starflow", n=1)
    short = EmbeddedConditioning(embedded.vector, embedded.tokens[:, :2], embedded.mask[:, :2])
    for one, other in zip(block.stats(x, embedded, **arguments), block.stats(x, short, **arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_text_and_noise_level_are_read():
    block, embedded, arguments, x = made("starflow")
    other = dataclasses.replace(embedded, tokens=-embedded.tokens)
    assert not torch.allclose(block(x, embedded, **arguments)[0], block(x, other, **arguments)[0])
    block, embedded, arguments, x = made("noise")
    assert not torch.allclose(block(x, embedded, arguments["t"])[0], block(x, embedded, 2 * arguments["t"])[0])


@pytest.mark.parametrize("name", ["reversed", "starflow"])
def test_a_reading_goes_on_behind_known_tokens_and_can_go_back(name):
    block, embedded, arguments, x = made(name)
    with torch.no_grad():
        z, _ = block(x, embedded, **arguments)
    z, right = block.ordered(z), block.ordered(x)
    for invert in (sequential_invert, jacobi_invert):
        reading = block.packed().decoding(embedded, **arguments)
        known = torch.cat([right[:, :3], torch.zeros_like(right[:, 3:])], 1)
        reading.stats(known, 0, 3)
        found, info = invert(reading, z, x=known, first=3)
        torch.testing.assert_close(found, right, rtol=0, atol=1e-4)
        mean, log = reading.stats(found, 2, 6)
        torch.testing.assert_close((right[:, 2:] - mean) * (-log).exp(), z[:, 2:], rtol=0, atol=1e-4)
        assert info.total <= 3
    with pytest.raises(InvalidArgument, match="tokens 4 to 5 of 6 after 0 were computed"):
        block.decoding(embedded, **arguments).stats(right, 4, 5)


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_guidance_is_two_passes_combined_for_each_token(temperature):
    block, embedded, _, z = made("plain", size=0.05)
    null = EmbeddedConditioning(-embedded.vector)
    guide = LinearGuidance(null, 1.7, anneal=True, temperature=temperature)
    got, _ = block.inverse(z, embedded, guide=guide)
    again, _ = block.inverse(z, embedded, guide=guide, solver=Jacobi(4, tolerance=0))
    torch.testing.assert_close(again, got, rtol=0, atol=1e-4)

    cooled = FlowBlock(3, 6, block.spec)
    cooled.load_state_dict(block.state_dict())
    with torch.no_grad():
        for layer in cooled.layers:  # queries over the temperature are scores over the temperature
            layer.attention.q_proj.weight /= temperature
            layer.attention.q_proj.bias /= temperature
        x = z.clone()
        for i in range(1, 6):
            (mean, log), (mean_u, log_u) = block.stats(x, embedded), cooled.stats(x, null)
            w = 1.7 * i / 5
            mean, log = ((1 + w) * a - w * b for a, b in ((mean, mean_u), (log, log_u)))
            x[:, i] = mean[:, i] + log[:, i].exp() * z[:, i]
    torch.testing.assert_close(got, x, rtol=0, atol=1e-4)


def test_guided_scales_stay_within_the_soft_clip():
    block, embedded, arguments, x = made("noise", size=3.0)
    guide = LinearGuidance(EmbeddedConditioning(-embedded.vector), 50.0)
    _, log = block.decoding(embedded, arguments["t"], guide=guide).stats(x, 0, 6)
    assert log.abs().max() <= 2.0


def test_a_packed_copy_keeps_the_weights_it_was_made_with():
    block, embedded, _, z = made("plain")
    packed = block.packed()
    before, _ = packed.inverse(z, embedded)
    with torch.no_grad():
        block.layers[0].feed_forward.up_proj.weight.mul_(2)
    assert torch.equal(packed.inverse(z, embedded)[0], before)
    assert not torch.equal(block.inverse(z, embedded)[0], before)
    assert all(parameter.requires_grad for parameter in block.parameters())


def test_a_new_block_is_the_identity():
    block = FlowBlock(3, 6, SPECS["starflow"]).initialize(torch.Generator().manual_seed(0))
    _, embedded, arguments, x = made("starflow")
    z, log_det = block(x, embedded, **arguments)
    torch.testing.assert_close(z, x, rtol=0, atol=1e-6)
    torch.testing.assert_close(log_det, torch.zeros(2), rtol=0, atol=1e-5)


def test_softplus_scales_are_finite_far_out():
    block, _, _, _ = made("starflow")
    block.spec = dataclasses.replace(block.spec, soft_clip=None)
    with torch.no_grad():
        block.proj_out.weight.zero_()
        block.proj_out.bias.copy_(torch.tensor([-200.0, -20.0, 90.0, 0, 0, 0]))
    log = block.split_output(torch.zeros(1, 1, 16))[1].detach()
    expected = torch.log(torch.nn.functional.softplus(torch.tensor([-20.0, 90.0]).double() + 0.541324854612918))
    torch.testing.assert_close(log[0, 0, 1:].double(), expected, rtol=1e-5, atol=1e-5)
    assert log[0, 0, 0] == pytest.approx(-200 + 0.5413, abs=1e-3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"soft_clip": 0.0}, "soft_clip must be"),
    ],
)
def test_a_form_out_of_range_is_named(values, message):
    with pytest.raises(InvalidArgument, match=message):
        FlowBlockSpec(**values)


def test_what_a_block_does_not_read_is_refused():
    block, embedded, _, x = made("plain")
    cos_sin = axial_tables(grid_positions(3, 2), 8)
    with pytest.raises(InvalidArgument, match="reads no noise level"):
        block(x, embedded, torch.ones(2))
    with pytest.raises(InvalidArgument, match="rotary positions"):
        block(x, embedded, cos_sin=cos_sin)
    with pytest.raises(InvalidArgument, match="5 tokens for a block with learned positions of 6"):
        block(x[:, :5], embedded)
    noisy, embedded, _, x = made("noise")
    with pytest.raises(InvalidArgument, match="give t"):
        noisy(x, embedded)
    with pytest.raises(InvalidArgument, match="temperature must be"):
        LinearGuidance(None, 1.0, temperature=0.0)
