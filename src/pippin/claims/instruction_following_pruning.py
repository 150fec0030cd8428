"""Channels chosen by the prompt against channels chosen once: eight skills of one layer, and four kinds of text.

Notable here:
- the control learns its channels as long as the predictor does, from the same start, with the same data: what is
  compared is whether the prompt may change them
- the mask of a text comes from its first half and is judged on its second, whose kind nobody tells the predictor
- the texts are those that every installation holds: Python's modules, its language reference in reStructuredText, the
  bills of material (JSON) and licences of installed packages; every tenth file of each kind is held out
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pippin.claims._byte_text import ByteText
    from pippin.data.batches import TokenBatch
    from pippin.language.instruction_pruning import InstructionFollowing, MaskPredictor, StaticMask

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2), "gpu": tuple(range(6))}


class Size(NamedTuple):
    """Steps and rows of the skills; dense and pruning steps of the text, width, held-out stretches a kind."""

    skill_steps: int
    rows: int
    dense_steps: int
    text_steps: int
    width: int
    stretches: int


SIZES = {
    "smoke": Size(skill_steps=3, rows=64, dense_steps=2, text_steps=2, width=32, stretches=2),
    "laptop": Size(skill_steps=500, rows=512, dense_steps=200, text_steps=240, width=64, stretches=40),
    "gpu": Size(skill_steps=3000, rows=512, dense_steps=2000, text_steps=3000, width=256, stretches=200),
}
SKILLS, SYMBOLS, CHANNELS, KEPT = 8, 32, 512, 48
SKILL_LR, TEXT_LR = 5e-3, 3e-3
EPS = 0.3
TEXT_CHANNELS, TEXT_KEPT, STRETCH = 512, 128, 192
KINDS = ("modules", "reference", "JSON", "licences")
SMALLEST, LARGEST, ENOUGH = 1000, 100_000, 1_000_000
"""Bytes that a file must have, that are read of it at most, and that are learnt of a kind in all."""


@claim(
    id="instruction-following-pruning",
    source="arXiv:2501.02086",
    paper="3B of 9B parameters chosen by the prompt beat a dense 3B model and a 3B model pruned once (and distilled) "
    "on every set (HumanEval 42.4 against 35.2 and 37.1); masks of related sets overlap more than those of far ones",
    setting="skills: 8 random tables (a, b) -> c over 32 symbols in one gated layer of 512 channels, 48 kept, the mask "
    "from the token that names the skill, 500 steps of 512; text: models of bytes (4 layers, width 64, 512 channels, "
    "128 kept) on four kinds of text, 200 dense steps of 4 x 192 bytes, then 240 that prune, the mask from the first "
    "half of a stretch by a reader of 2 layers (200 steps as a model of bytes), the loss on its second half, held-out "
    "files; AdamW at equal steps, start, rates and data; eps from 1 to 0.3, all channels at first, the target after a "
    "tenth of the steps (skills) or half of them (text)",
    accept="skills, each seed: chosen by the prompt at least twice as accurate as chosen once; over the seeds, a dense "
    "layer of 48 within 0.05 of chosen once; the union of the masks at least 2 x 48 channels on each seed. Text: the "
    "mean held-out loss over the seeds is lower with masks from the prompt than with one learnt mask by more than the "
    "standard deviation of the paired differences; masks within a kind overlap by at least 0.1 of the kept "
    "channels more than across kinds, on each seed. The specialised model's logits are those of the masked one within "
    "1e-4 on each seed. The whole layer's accuracy and each kind's loss are reported and not judged",
)
def run(scale: Scale) -> Evidence:
    """Both tasks for each seed."""
    evidence, size = Evidence(), SIZES[scale.name]
    for seed in SEEDS[scale.name]:
        _skills(evidence, seed, size)
        _text(evidence, seed, size)
    accuracy = {arm: evidence.each(f"skills, accuracy, {arm}") for arm in ("by the prompt", "once", "dense 48")}
    pairs = zip(accuracy["by the prompt"], accuracy["once"], strict=True)
    near = statistics.fmean(accuracy["dense 48"]) - statistics.fmean(accuracy["once"])
    losses = (evidence.each(f"text, held-out loss, {arm}") for arm in ("once", "by the prompt"))
    gains = [once - prompt for once, prompt in zip(*losses, strict=True)]
    spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
    evidence.add("text, gain of masks from the prompt, mean", statistics.fmean(gains), unit="nats/byte")
    evidence.add("text, gain of masks from the prompt, deviation", spread, unit="nats/byte")
    return evidence.accept(
        skills_by_prompt=all(prompt >= 2 * once for prompt, once in pairs),
        dense_like_static=abs(near) <= 0.05,
        union=all(count >= 2 * KEPT for count in evidence.each("skills, channels of all masks together")),
        text_by_prompt=statistics.fmean(gains) > spread,
        clusters=all(x >= 0.1 for x in evidence.each("text, overlap within a kind less that across kinds")),
        same_model=all(x <= 1e-4 for x in evidence.each("text, largest difference of logits, specialised / masked")),
    )


def _skills(evidence: Evidence, seed: int, size: Size) -> None:
    """The four arms on one set of tables."""
    import torch

    from pippin.nn.soft_top_k import top_k_mask

    tables = torch.randint(0, SYMBOLS, (SKILLS, SYMBOLS, SYMBOLS), generator=torch.Generator().manual_seed(seed))
    everything = torch.cartesian_prod(torch.arange(SKILLS), torch.arange(SYMBOLS), torch.arange(SYMBOLS))
    for arm in ("whole", "dense 48", "once", "by the prompt"):
        module = _skill_layer(arm, seed)
        _train_skills(module, tables, seed, size)
        module.eval()
        with torch.no_grad():
            right = module.logits(everything, KEPT, EPS).argmax(-1) == tables[tuple(everything.T)]
            evidence.add(f"skills, accuracy, {arm}", right.float().mean(), seed=seed)
            if arm == "by the prompt":
                masks = top_k_mask(module.scores(), KEPT, EPS) > 0
                overlap = (masks.float() @ masks.float().T / KEPT).fill_diagonal_(0).sum() / (SKILLS * (SKILLS - 1))
                evidence.add("skills, channels of all masks together", masks.any(0).sum(), seed=seed)
                evidence.add("skills, overlap of two masks", overlap, seed=seed)


def _skill_layer(arm: str, seed: int) -> Any:
    """A feed-forward layer over three summed embeddings, its channels all there or chosen."""
    import math

    import torch
    from torch import nn

    from pippin.language import Decoder
    from pippin.language.instruction_pruning import MaskPredictor, StaticMask
    from pippin.language.presets import preset
    from pippin.nn.feedforward import FeedForward, FeedForwardSpec, activate
    from pippin.nn.soft_top_k import top_k_mask

    width = 64

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.ModuleList(nn.Embedding(count, width) for count in (SKILLS, SYMBOLS, SYMBOLS))
            self.mlp = FeedForward(FeedForwardSpec(KEPT if arm == "dense 48" else CHANNELS), width)
            self.head = nn.Linear(width, SYMBOLS)
            self.predictor: MaskPredictor | StaticMask | None = None

        def scores(self) -> Tensor:
            """Of each skill, from the token that names it."""
            assert self.predictor is not None
            scores: Tensor = self.predictor(torch.arange(SKILLS)[:, None])
            return scores[:, 0]

        def logits(self, batch: Tensor, keep: int, eps: float) -> Tensor:
            """Of the symbol that a skill makes of two."""
            x = sum((embed(batch[:, i]) for i, embed in enumerate(self.embed)), torch.zeros(()))
            if self.predictor is None:
                y = self.mlp(x)
            else:
                assert self.mlp.gate_proj is not None
                assert self.mlp.up_proj is not None
                inner = activate(self.mlp.gate_proj(x), self.mlp.spec.activation) * self.mlp.up_proj(x)
                y = self.mlp.down_proj(inner * top_k_mask(self.scores(), keep, eps)[batch[:, 0]])
            logits: Tensor = self.head(y)
            return logits

    module, generator = Layer(), torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        scale = 1.0 if parameter.shape[0] in (SKILLS, SYMBOLS) else 1 / math.sqrt(parameter.shape[-1])
        nn.init.normal_(parameter, 0.0, scale if parameter.ndim > 1 else 0.0, generator)
    if arm == "once":
        module.predictor = StaticMask(1, CHANNELS).initialise(seed=seed)
    elif arm == "by the prompt":
        module.predictor = MaskPredictor(Decoder(preset("nano", SKILLS)), 1, CHANNELS).initialise(seed=seed)
    return module


def _train_skills(module: Any, tables: Tensor, seed: int, size: Size) -> None:
    import torch

    from pippin.language.pruning_objectives import Annealing
    from pippin.train import AdamW, Cosine, Loss, Trainer

    annealing = Annealing(narrow=size.skill_steps // 10, cool=size.skill_steps * 7 // 10)
    done = 0

    def lesson(model: nn.Module, batch: Tensor, generator: torch.Generator) -> Loss:
        nonlocal done
        keep, eps = annealing.at(done, width=CHANNELS, keep=KEPT, eps=EPS)
        done += 1
        logits = module.logits(batch, keep, eps)
        total = torch.nn.functional.cross_entropy(logits, tables[tuple(batch.T)], reduction="sum")
        return Loss(total, float(len(batch)))

    def batches() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed + 1)
        while True:
            columns = [torch.randint(0, n, (size.rows,), generator=generator) for n in (SKILLS, SYMBOLS, SYMBOLS)]
            yield torch.stack(columns, 1)

    Trainer(
        module,
        lesson,
        batches(),
        steps=size.skill_steps,
        optimiser=AdamW(lr=SKILL_LR, weight_decay=0.0),
        schedule=Cosine(warmup=0.08),
        clip=None,
        seed=seed,
        show=False,
    ).fit()


@cache
def corpora() -> dict[str, ByteText]:
    """Four kinds of text of this installation, by name; every tenth file is held out."""
    import sysconfig
    from pathlib import Path
    from pydoc_data import topics

    import numpy as np
    import torch

    from pippin.claims._byte_text import END, EVERY, ByteText

    files: dict[str, list[bytes]] = {kind: [] for kind in KINDS}
    files["reference"] = [text.encode() for _, text in sorted(topics.topics.items())]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        files["modules"].append(path.read_bytes()[:LARGEST])
    for path in sorted(Path(sysconfig.get_path("purelib")).glob("*.dist-info/**/*")):
        licence = path.parent.name == "licenses" or path.name.upper().startswith(("LICENSE", "LICENCE", "COPYING"))
        if (licence or path.suffix == ".json") and path.is_file() and path.stat().st_size >= SMALLEST:
            files["licences" if licence else "JSON"].append(path.read_bytes()[:LARGEST])
    made = {}
    for kind, texts in files.items():
        told = [
            torch.from_numpy(np.append(np.frombuffer(text, np.uint8).astype(np.int64), END))
            for text in dict.fromkeys(texts)  # the same licence comes many times
        ]
        learnt = torch.cat([text for index, text in enumerate(told) if index % EVERY])
        made[kind] = ByteText(learnt[:ENOUGH], torch.cat(told[::EVERY]))
    return made


class _Mixed:
    """Stretches of all kinds, as many of each, without end; a batch depends on seed and number alone."""

    def __init__(self, rows: int, seed: int) -> None:
        from pippin.claims._byte_text import ByteBatches

        streams = enumerate(corpora().values())
        self.streams = [ByteBatches(rows, STRETCH, 4 * seed + index, text) for index, text in streams]

    def __iter__(self) -> Iterator[TokenBatch]:
        import torch

        from pippin.data.batches import TokenBatch

        for parts in zip(*self.streams, strict=True):
            yield TokenBatch(torch.cat([part.ids for part in parts]), torch.cat([part.targets for part in parts]))


def _held_out(count: int) -> dict[str, TokenBatch]:
    """Stretches of each kind, spread evenly over its held-out files."""
    import torch

    from pippin.data.batches import TokenBatch

    found = {}
    for kind, text in corpora().items():
        starts = torch.linspace(0, len(text.held_out) - STRETCH - 1, count).long()[:, None]
        rows = text.held_out[starts + torch.arange(STRETCH + 1)]
        found[kind] = TokenBatch(rows[:, :-1], rows[:, 1:])
    return found


def _text(evidence: Evidence, seed: int, size: Size) -> None:
    """One learnt mask, and masks from the first half of a stretch, both from the same dense model."""
    import copy
    from dataclasses import replace

    import torch

    from pippin.claims._byte_text import byte_config, byte_decoder
    from pippin.language.instruction_pruning import InstructionFollowing, MaskPredictor, StaticMask
    from pippin.language.objectives import NextToken
    from pippin.language.pruning_objectives import Annealing, ChunkedPretraining
    from pippin.nn.feedforward import FeedForwardSpec

    config = byte_config(layers=4, width=size.width)
    layers = tuple(replace(layer, feedforward=FeedForwardSpec(TEXT_CHANNELS)) for layer in config.layers)
    dense = byte_decoder(replace(config, layers=layers), seed=seed)
    reader = byte_decoder(byte_config(layers=2, width=64), seed=seed + 1)
    for module in (dense, reader):
        _train_text(module, NextToken(), size.dense_steps, seed)
    held = _held_out(size.stretches)
    predictors: dict[str, MaskPredictor | StaticMask] = {
        "once": StaticMask(4, TEXT_CHANNELS).initialise(seed=seed),
        "by the prompt": MaskPredictor(reader, 4, TEXT_CHANNELS).initialise(seed=seed, reader=False),
    }
    for arm, predictor in predictors.items():
        model = InstructionFollowing(copy.deepcopy(dense), predictor, TEXT_KEPT, EPS)
        annealing = Annealing(narrow=size.text_steps // 2, cool=size.text_steps * 4 // 5)
        _train_text(model, ChunkedPretraining(2, annealing), size.text_steps, seed + 100)
        model.eval()
        with torch.no_grad():
            losses = {kind: ChunkedPretraining(2)(model, batch) for kind, batch in held.items()}
            for kind, loss in losses.items():
                value = float(loss.total) / loss.count
                evidence.add(f"text, held-out loss, {kind}, {arm}", value, seed=seed, unit="nats/byte")
            mean = sum(float(loss.total) for loss in losses.values()) / sum(loss.count for loss in losses.values())
            evidence.add(f"text, held-out loss, {arm}", mean, seed=seed, unit="nats/byte")
            if arm == "by the prompt":
                _overlaps(evidence, model, list(held.values()), seed)
                _same(evidence, model, held["modules"], seed)


def _train_text(module: nn.Module, objective: Any, steps: int, seed: int) -> None:
    """On one stretch of each kind a step."""
    from pippin.train import AdamW, Cosine, Trainer

    Trainer(
        module,
        objective,
        _Mixed(1, seed),
        steps=steps,
        optimiser=AdamW(lr=TEXT_LR, weight_decay=0.1),
        schedule=Cosine(warmup=0.1),
        seed=seed,
        show=False,
    ).fit()


def _overlaps(evidence: Evidence, model: InstructionFollowing, held: Sequence[TokenBatch], seed: int) -> None:
    """How many channels masks have in common within kinds and across them, and all of them together."""
    import torch

    chosen = torch.stack([model.masks(batch.ids[:, : STRETCH // 2]) > 0 for batch in held]).float()
    kinds, rows = chosen.shape[:2]
    flat = chosen.flatten(2).flatten(0, 1)
    common = (flat @ flat.T / (TEXT_KEPT * chosen.shape[2])).view(kinds, rows, kinds, rows)
    within = torch.stack([common[k, :, k] for k in range(kinds)])
    others = ~torch.eye(rows, dtype=torch.bool)
    inside = within[:, others].mean()
    outside = (common.sum() - within.sum()) / (kinds * (kinds - 1) * rows * rows)
    evidence.add("text, overlap within a kind", inside, seed=seed)
    evidence.add("text, overlap within a kind less that across kinds", inside - outside, seed=seed)
    evidence.add("text, channels in use, share of all", chosen.flatten(0, 1).any(0).float().mean(), seed=seed)


def _same(evidence: Evidence, model: InstructionFollowing, batch: TokenBatch, seed: int) -> None:
    """The small model that a prompt asks for, against the whole one under its mask."""
    prompt, ids = batch.ids[0, : STRETCH // 2], batch.ids[:1]
    apart = (model.specialize(prompt)(ids) - model(ids, model.masks(prompt[None]))).abs().max()
    evidence.add("text, largest difference of logits, specialised / masked", apart, seed=seed)
