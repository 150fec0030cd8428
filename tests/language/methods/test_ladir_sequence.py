"""Masks and positions against brute force, the force between samples against its formula, and the normal flow."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.language.methods.ladir.model import normal_velocity
from pippin.language.methods.ladir.sample import repulsion, sample_noise
from pippin.language.methods.ladir.sequence import SequenceLayout, block_bidirectional_mask


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 3), st.booleans()), min_size=1, max_size=10))
def test_a_block_mask_is_what_its_definition_says(tokens):
    blocks, real = ([token[i] for token in tokens] for i in (0, 1))
    mask = block_bidirectional_mask(torch.tensor([blocks]), torch.tensor([real]))[0]
    for i, j in itertools.product(range(len(tokens)), repeat=2):
        wanted = i == j or (real[j] and (j <= i or (blocks[i] == blocks[j] and blocks[i] >= 0)))
        assert bool(mask[i, j]) == wanted


def tokens_of(question, padding, blocks, count, answer, copies, latents):
    """Each token of one row as (kind, block, copy, place within, position, real), written out by hand."""
    asked = question - padding
    size = latents + 3
    row = [("question", -1, -1, i, max(i - padding, 0), i >= padding) for i in range(question)]
    for b in range(blocks):
        row += [("clean", b, -1, w, asked + b * size + w, b < count) for w in range(size)]
    row += [("answer", -1, -1, i, asked + count * size + i, True) for i in range(answer)]
    for b in range(blocks):
        for c in range(copies):
            row += [("noisy", b, c, w, asked + b * size + w, b < count) for w in range(size - 1)]
    return row


def sees(here, there, latents, i, j):
    (kind, block, copy, within, *_), (kind_, block_, copy_, within_, _, real_) = here, there
    if i == j:
        return True
    if not real_:
        return False
    both = {within, within_} <= set(range(2, 2 + latents)) and block == block_
    if kind == "noisy":
        if kind_ == "noisy":
            return (block, copy) == (block_, copy_) and (j <= i or both)
        return kind_ == "question" or (kind_ == "clean" and block_ < block)
    if kind_ == "noisy":
        return False
    return j <= i or (kind == kind_ == "clean" and both)


@pytest.mark.parametrize(("copies", "latents", "answer"), [(2, 2, 3), (1, 1, 1), (3, 3, 2)])
def test_the_row_of_a_pass_is_what_brute_force_says(copies, latents, answer):
    layout = SequenceLayout(4, 3, answer, copies, latents)
    paddings, counts = [0, 3, 1], [3, 1, 2]
    cache = layout.cache(torch.tensor(paddings), torch.tensor(counts))
    for row, (padding, count) in enumerate(zip(paddings, counts, strict=True)):
        tokens = tokens_of(4, padding, 3, count, answer, copies, latents)
        assert cache.mask.shape[-1] == len(tokens)
        assert cache.positions[row].tolist() == [token[4] for token in tokens]
        for i, j in itertools.product(range(len(tokens)), repeat=2):
            assert bool(cache.mask[row, 0, i, j]) == sees(tokens[i], tokens[j], latents, i, j), (i, j)


def force(points):
    """The formula, one pair after another, in Python's own numbers."""
    apart = [[math.dist(a, b) for b in points] for a in points]
    between = sorted(apart[i][j] for i in range(len(points)) for j in range(len(points)) if i != j)
    middle = between[(len(between) - 1) // 2]
    total = [[0.0] * len(points[0]) for _ in points]
    for i, j in itertools.permutations(range(len(points)), 2):
        ratio = (apart[i][j] / middle) ** 2
        for k in range(len(points[0])):
            total[i][k] += 2 * (1 - ratio) * math.exp(-ratio) * (points[i][k] - points[j][k])
    return total


def test_the_force_is_that_of_the_formula_and_moves_with_its_points():
    z = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    found = repulsion(z)
    torch.testing.assert_close(found, torch.tensor([force(group) for group in z.tolist()]), rtol=1e-4, atol=1e-5)
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(repulsion(z[:, order]), found[:, order])
    torch.testing.assert_close(repulsion(z + 7.0), found, rtol=1e-3, atol=1e-4)


def test_the_force_pushes_near_points_apart_pulls_far_ones_and_leaves_equal_ones():
    assert torch.equal(repulsion(torch.ones(1, 4, 3)), torch.zeros(1, 4, 3))
    line = torch.tensor([[[0.0], [3.0], [10.0]]])  # the median distance is 7
    pushed = repulsion(line)[0, :, 0]
    assert pushed[0] < 0  # away from its neighbor at 3
    assert pushed[2] < 0  # towards the one at 0, which is farther than the median
    alone = torch.tensor([[True, True, False]])
    torch.testing.assert_close(repulsion(line, alone)[:, :2], repulsion(line[:, :2]))
    assert repulsion(line, alone)[0, 2, 0] == 0


def test_the_normal_velocity_keeps_a_normal_law_normal():
    z = torch.randn(4000, 1, 1, generator=torch.Generator().manual_seed(0))
    start = z.clone()
    for step in range(200):
        z = z - normal_velocity(z, torch.full((4000,), 1 - step / 200)) / 200
    # straight paths have no mean to go to: each number ends where it began, to the order of the step
    torch.testing.assert_close(z, start, rtol=0.01, atol=1e-3)


def test_noise_depends_on_seed_question_and_sample_alone():
    shape = (2, 3, 4)
    several = sample_noise(["a", "b"], 3, shape, 5)
    assert torch.equal(several[3:5], sample_noise(["b"], 2, shape, 5))
    assert not torch.equal(several[0], several[1])
    assert not torch.equal(several[0], sample_noise(["a"], 1, shape, 6)[0])
