"""Mixtures of bytes whose experts are chosen by the prompt, once for all texts, or by each token.

Notable here:
- streams join pieces of different kinds of text, of files that no training saw
- what is read of a file is counted while the model writes, with room for one set
"""

from __future__ import annotations

import copy
import itertools
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pippin.claims.worlds.sequences.byte_text import byte_config, byte_decoder, byte_model
from pippin.claims.worlds.sequences.text_kinds import KINDS, MixedBatches, text_kinds
from pippin.claims.worlds.training import fit
from pippin.language.methods.instruction_pruning.loss import PruningSchedule
from pippin.language.methods.prompt_experts import PromptRoutedDecoder, PromptRouter, PromptRouterConfig, PromptRouting
from pippin.language.objectives import NextToken
from pippin.language.router_losses import RouterLosses
from pippin.nn.expert_mask import ExpertMask
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.kv_cache import NoCache

if TYPE_CHECKING:
    from pippin.engine.experts import ExpertStore, PromptExperts
    from pippin.engine.runners.native_runner import NativeRunner
    from pippin.language import Decoder, LanguageModel
    from pippin.language.stored_experts import FileExperts

EXPERTS, KEEP, STRETCH, SWAPS, LENGTH = 16, 4, 64, 2, 320
PIECE, PIECES = 256, 3
INNER = 48


class StaticRouter(PromptRouter):
    """Scores that are learned and the same for every text."""

    def forward(self, states: Float[Tensor, "texts width"]) -> Float[Tensor, "texts layers experts"]:
        """The scores, repeated for each text."""
        return super().forward(torch.zeros_like(states))

    def initialize(self, *, seed: int) -> StaticRouter:
        """Scores of standard deviation 0.1, as those of a router that reads begin."""
        super().initialize(seed=seed)
        assert self.outer.bias is not None
        torch.nn.init.normal_(self.outer.bias, 0.0, 0.1, torch.Generator().manual_seed(seed))
        return self


@dataclass(frozen=True)
class Trained:
    """A trained mixture.

    Attributes:
        base: the mixture.
        router: chooses sets of experts; None where each token takes its own.
        reselect: whether a set is chosen again.
        max_swaps: most experts that a later choice replaces.
    """

    base: Decoder
    router: PromptRouter | None
    reselect: bool = True
    max_swaps: int | None = SWAPS

    @property
    def policy(self) -> PromptExperts | None:
        """How the engine would choose."""
        from pippin.engine.experts import PromptExperts

        if self.router is None:
            return None
        return PromptExperts(self.router, reselect_every=STRETCH if self.reselect else 0, max_swaps=self.max_swaps)


def train(arm: str, seed: int, rate: float, steps: int) -> Trained:
    """Train the mixture of an arm from scratch on batches with two sequences of each kind of text.

    Args:
        arm: "by the prompt", "static set" or "each token".
        seed: of weights and batches.
        rate: highest learning rate.
        steps: optimizer steps.
    """
    config = byte_config(layers=4, width=64)
    mixture = FeedForwardSpec(
        INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=KEEP,
        shared_intermediate_size=KEEP * INNER,
        shared_gate=False,
    )
    first, *rest = config.layers
    config = replace(config, layers=(first, *(replace(layer, feedforward=mixture) for layer in rest)))
    base, batches = byte_decoder(config, seed=seed), MixedBatches(LENGTH, seed)
    if arm == "each token":
        fit(base, NextToken(router_losses=RouterLosses()), batches, steps=steps, seed=seed, lr=rate, warmup=0.1)
        return Trained(base, None)
    sizes = PromptRouterConfig.for_decoder(config, KEEP, stretch=STRETCH, eps=0.3)
    static = arm == "static set"
    router = (StaticRouter if static else PromptRouter)(sizes).initialize(seed=seed)
    schedule = PruningSchedule(steps // 2, steps * 4 // 5)
    objective = PromptRouting(balance=0.0 if static else 0.01, schedule=schedule)
    module = PromptRoutedDecoder(base, router, router_lr_scale=1.0 if static else 0.1)
    fit(module, objective, batches, steps=steps, seed=seed, lr=rate, warmup=0.1)
    return Trained(base, router)


def streams(count: int, seed: int, *, validation: bool = False) -> list[list[int]]:
    """Texts of `PIECES` pieces of different kinds, from files that were held out.

    Args:
        count: how many.
        seed: of the places and the order of the kinds.
        validation: take validation files instead.
    """
    generator, texts = torch.Generator().manual_seed(seed), text_kinds(validation=validation)
    found = []
    for _ in range(count):
        ids: list[int] = []
        for kind in torch.randperm(len(KINDS), generator=generator)[:PIECES].tolist():
            text = texts[KINDS[kind]].held_out
            start = int(torch.randint(len(text) - PIECE, (), generator=generator))
            ids += text[start : start + PIECE].tolist()
        found.append(ids)
    return found


@torch.no_grad()
def stream_loss(trained: Trained, texts: list[list[int]], *, another: bool = False) -> float:
    """Mean loss behind the first stretch, which is the prompt, in nats per byte.

    Args:
        trained: a mixture, with its way to choose.
        texts: streams of one length.
        another: take the sets of the stream before.
    """
    sets = [_sets(trained, ids) for ids in texts]
    total = 0.0
    for number, ids in enumerate(texts):
        masks = sets[number - 1 if another else number]
        rows = torch.tensor([ids])
        x = trained.base.forward_layers(trained.base.embed(rows), NoCache(), experts=_slices(masks, len(ids)))
        logits = trained.base.lm_head(trained.base.norm(x))[0, STRETCH - 1 : -1]
        total += float(F.cross_entropy(logits, rows[0, STRETCH:]))
    return total / len(texts)


@torch.no_grad()
def replaced(trained: Trained, texts: list[list[int]]) -> float:
    """Mean share of a set that the next one replaces."""
    shares = []
    for ids in texts:
        masks = _sets(trained, ids)
        for one, other in itertools.pairwise(masks):
            shares.append(float((one.allowed[1:] & ~other.allowed[1:]).float().sum(-1).mean()) / KEEP)
    return sum(shares) / max(1, len(shares))


def _sets(trained: Trained, ids: list[int]) -> list[ExpertMask]:
    """The sets that an engine chooses while a text goes on behind its prompt; empty where tokens choose."""
    from pippin.engine.experts.prompt_experts import ExpertChoice

    if trained.policy is None:
        return []
    choice = ExpertChoice(trained.policy, byte_model(trained.base), ids[:STRETCH])
    found = [choice.mask_at(0)]
    for length in range(STRETCH + 1, len(ids) + 1):
        if (mask := choice.extend(ids[:length])) is not None:
            found.append(mask)
    return found


def _slices(masks: list[ExpertMask], count: int) -> list[tuple[ExpertMask, slice]]:
    """Each set with the tokens that it serves: the first one the prompt too, the last one all that follow."""
    bounds = [0, *(STRETCH * (number + 1) for number in range(1, len(masks))), count]
    return [(mask, slice(*pair)) for mask, pair in zip(masks, itertools.pairwise(bounds), strict=False)]


def generate_from_file(trained: Trained, count: int, seed: int) -> dict[str, float]:
    """Continue a prompt of each kind of text with experts in storage, and room for one set.

    Args:
        trained: a mixture, with its way to choose.
        count: bytes of each answer, sampled from the model's law.
        seed: of the samples.

    Returns:
        Bytes read of the file for a byte behind the first one of an answer, seconds for it, the most bytes of experts
        in memory, the room for them, and whether all reads were direct.
    """
    from pippin.engine.experts.eviction import LeastStale
    from pippin.engine.experts.expert_store import ExpertStore
    from pippin.engine.runners.native_runner import NativeRunner

    with tempfile.TemporaryDirectory() as folder:
        model, experts = _in_storage(trained.base, Path(folder))
        runner = NativeRunner(model, -(-(STRETCH + count) // 16))
        room = KEEP * sum(max(expert.packed_bytes for expert in layer) for layer in experts)
        store = ExpertStore(experts, room, LeastStale(), runner.place_expert)
        runner.fetch_experts(store)
        read = seconds = 0.0
        for kind in KINDS:
            prompt = text_kinds()[kind].held_out[:STRETCH].tolist()
            some, spent = _answer(trained, runner, store, prompt, count, seed)
            read, seconds = read + some, seconds + spent
        store.close()
        runner.close()
        tokens = len(KINDS) * (count - 1)
        return {
            "bytes read for a token": read / tokens,
            "seconds for a token": seconds / tokens,
            "most bytes of experts in memory": float(store.stats.peak),
            "room": float(room),
            "direct reads": float(store.direct),
        }


def _answer(
    trained: Trained, runner: NativeRunner, store: ExpertStore, prompt: list[int], count: int, seed: int
) -> tuple[float, float]:
    """Bytes read and seconds behind the first byte of an answer."""
    from pippin.engine.experts.prompt_experts import ExpertChoice
    from pippin.engine.model_runner import ModelInput

    generator, ids = torch.Generator().manual_seed(seed), list(prompt)
    choice = None if trained.policy is None else ExpertChoice(trained.policy, byte_model(trained.base), prompt)
    computed = read = 0
    begun = time.perf_counter()
    for number in range(count):
        work = ModelInput(ids[computed:], computed, range(runner.blocks), (len(ids) - computed - 1,))
        work.experts = None if choice is None else choice.mask_at(computed)
        (logits,) = runner.forward([work])
        computed = len(ids)
        ids.append(int(logits[0].softmax(-1).multinomial(1, generator=generator)))
        if choice is not None:
            choice.extend(ids)
        if number == 0:
            read, begun = store.bytes_read, time.perf_counter()
    return float(store.bytes_read - read), time.perf_counter() - begun


def _in_storage(base: Decoder, folder: Path) -> tuple[LanguageModel, FileExperts]:
    """The model without its experts, which are written to a folder."""
    from pippin.language import stored_experts
    from pippin.nn.quantization.packed import AbsentWeight, NativeWeight

    module, names = copy.deepcopy(base).pack(), stored_experts.expert_names(base)

    def part(name: str) -> Any:
        return module.get_submodule(name.removesuffix(".weight"))

    def weight(name: str) -> NativeWeight:
        found: NativeWeight = part(name).packed
        return found

    every = [name for layer in names for expert in layer for name in expert.values()]
    experts = stored_experts.write(folder, names, weight, sum(weight(name).nbytes for name in every))
    for name in every:
        there = weight(name)
        part(name).packed = AbsentWeight(there.format, there.rows, there.columns)
    return byte_model(module), experts
