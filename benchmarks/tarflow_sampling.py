"""Sampling from a transformer flow, against the published implementation, apple/ml-tarflow, with equal weights.

    python benchmarks/tarflow_sampling.py --peer FOLDER [--quick] [--json] [--device cuda]

FOLDER is a copy of that repository. Two flows of grayscale images with 3 classes are trained here for a minute, since
an untrained flow is the identity and settles at once: a small one (16 by 16 pixels in patches of 2 by 2, 64 tokens, 4
blocks of 2 layers, 128 wide) and one of the size of the published demo on digits (28 by 28 pixels in patches of 4 by 4,
49 tokens, 4 blocks of 4 layers, 128 wide). Their weights are copied to the other side.

Both sides encode the same images and decode the same noise; encodings must agree within 1e-4, images sampled
token by token within 1e-3 and in windows (tolerance 1e-3) within 2e-2, or nothing is printed. The other side has the
token-by-token inverse alone, with its own cache of keys; with guidance it makes two passes for each token. Windows are
as wide as `Jacobi.fitting` says, which is one token where many images are sampled on a CPU. One thread on both sides;
on a CPU its own time is taken, which does not count what else the machine does.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _rows import Row, Watch, compared, in_turn, parser, say, show
from torch import Tensor

from pippin.core import native
from pippin.data.synthetic.scenes import KINDS, SceneSpec, SceneStream
from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
from pippin.generate.flows.block import LinearGuidance
from pippin.generate.flows.jacobi import Jacobi
from pippin.generate.flows.tarflow import FlowLikelihood, TarFlow, TarFlowConfig
from pippin.generate.noise import Noise
from pippin.train import AdamW, CosineSchedule, Trainer

SIZES = {"small": (16, 2, 2), "digits": (28, 4, 4)}
"""Of the flows: pixels of a side, pixels of a patch, layers of a block."""
WEIGHT = 1.0
"""w of the guidance, which grows over the tokens."""
PICTURES = (1, 4, 16)
GOAL = 3.0


class Data:
    """Images of one object, its kind as the label.

    Args:
        size: pixels of a side.
    """

    def __init__(self, size: int) -> None:
        self._spec = SceneSpec(size=size, objects=(1, 1), radius=(0.14 * size, 0.28 * size))

    def __iter__(self) -> Iterator[Samples]:
        """Batches without end."""
        for drawn in SceneStream(self._spec, 16, seed=99):
            labels = torch.tensor([KINDS.index(things[0].kind) for things in drawn.things])
            yield Samples(drawn.x, Conditioning(labels=labels))


def trained(name: str, steps: int) -> TarFlow:
    """A flow. No label is left out, so that the null class is the mean of all, as it is on the other side."""
    say(f"training {name} for {steps} steps")
    size, patch, layers = SIZES[name]
    condition = ConditioningSpec(num_classes=3, null=True)
    config = TarFlowConfig((1, size, size), patch, (layers,) * 4, 128, condition=condition, noise_std=0.1)
    flow = TarFlow(config).initialize(99)
    schedule = CosineSchedule(warmup_steps=0.05)
    Trainer(
        flow,
        FlowLikelihood(condition_dropout=0.0),
        Data(size),
        steps=steps,
        optimizer=AdamW(lr=2e-3, weight_decay=1e-4),
        schedule=schedule,
        seed=99,
        show_progress=False,
    ).fit()
    return flow.requires_grad_(False).eval()


def peer_of(flow: TarFlow, folder: Path) -> Any:
    """The other side's model with our weights."""
    spec = importlib.util.spec_from_file_location("transformer_flow", folder / "transformer_flow.py")
    if spec is None or spec.loader is None or not (folder / "transformer_flow.py").is_file():
        raise SystemExit(f"{folder} holds no transformer_flow.py; give a copy of apple/ml-tarflow as --peer")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = flow.config
    model = module.Model(
        in_channels=config.shape[0],
        img_size=config.shape[1],
        patch_size=config.patch_size,
        channels=config.hidden_size,
        num_blocks=len(config.layers_per_block),
        layers_per_block=config.layers_per_block[0],
        num_classes=config.condition.num_classes,
    ).eval()
    for theirs, block, embedding in zip(model.blocks, flow.blocks, flow.embeddings, strict=True):
        classes: Any = embedding.classes
        _copy(theirs, block, classes)
    return model.requires_grad_(False)


@torch.no_grad()
def _copy(theirs: Any, block: Any, classes: Tensor) -> None:
    """The weights of one block; its positions lie in natural order, and the last in the block's order is not read."""
    positions = torch.cat([block.position_embedding, torch.zeros_like(block.position_embedding[:1])])
    theirs.pos_embed.copy_(positions.flip(0) if block.spec.reverse else positions)
    theirs.class_embed.copy_(classes[:, None])
    pairs: list[tuple[Any, Any]] = [(theirs.proj_in, block.proj_in), (theirs.proj_out, block.proj_out)]
    for other, layer in zip(theirs.attn_blocks, block.layers, strict=True):
        own = layer.attention
        for part in ("weight", "bias"):
            three = [getattr(own, name + "_proj") for name in "qkv"]
            getattr(other.attention.qkv, part).copy_(torch.cat([getattr(one, part) for one in three]))
        pairs += [
            (other.attention.proj, own.o_proj),
            (other.attention.norm, layer.attention_norm),
            (other.mlp.norm, layer.feed_norm),
            (other.mlp.main[0], layer.feed_forward.up_proj),
            (other.mlp.main[2], layer.feed_forward.down_proj),
        ]
    for to, source in pairs:
        to.weight.copy_(source.weight)
        to.bias.copy_(source.bias)


Sides = dict[str, Callable[[], Tensor]]


def drawing(flow: TarFlow, peer: Any, n: int, guided: bool, device: str) -> tuple[Sides, int]:
    """Ours token by token and in windows, and theirs; from the same noise; and the width of the windows."""
    labels = (torch.arange(n) % 3).to(device)
    condition = Conditioning(labels=labels)
    z = Noise(n, seed=7, device=device).normal((flow.config.num_tokens, flow.config.token_dim))
    solver = Jacobi.fitting(n, device)
    guides = None
    if guided:
        guides = tuple(
            LinearGuidance(embedding(condition.null(), n), WEIGHT, anneal=True) for embedding in flow.embeddings
        )

    def ours(solver: Jacobi | None) -> Tensor:
        return flow.inverse(z, condition, solver=solver, guides=guides)[0]

    def theirs() -> Tensor:
        drawn: Tensor = peer.reverse(z.clone(), labels, guidance=WEIGHT if guided else 0.0, annealed_guidance=guided)
        return drawn

    return {"token by token": lambda: ours(None), "in windows": lambda: ours(solver), "peer": theirs}, solver.window


def reading(flow: TarFlow, peer: Any, n: int, device: str) -> Sides:
    """Both sides' encoding of the same images."""
    labels = (torch.arange(n) % 3).to(device)
    condition = Conditioning(labels=labels)
    x = (2 * Noise(n, seed=7, device=device).uniform(flow.config.shape) - 1).to(device)

    def theirs() -> Tensor:
        z: Tensor = peer(x, labels)[0]
        return z

    return {"forward": lambda: flow(x, condition)[0], "peer": theirs}


def timed(work: Callable[[], Tensor], device: str) -> Callable[[], float]:
    """Seconds that it takes: of this process on a CPU, by the clock elsewhere."""
    clock = time.process_time if device == "cpu" else time.perf_counter

    def once() -> float:
        began = clock()
        with torch.no_grad():
            work()
        if device != "cpu":
            torch.cuda.synchronize()
        return clock() - began

    return once


def rows_of(what: str, sides: Sides, most: dict[str, float], repeats: int, device: str) -> list[Row]:
    """Each of our sides beside the peer, if they agree within ``most``."""
    with torch.no_grad():
        right = sides["peer"]()
        apart = {name: float((work() - right).abs().max()) for name, work in sides.items()}
    if not all(apart[name] < limit for name, limit in most.items()):
        raise SystemExit(f"{what}: the sides make different results: {apart}; nothing is compared")
    with Watch() as watch:
        found = in_turn({name: timed(work, device) for name, work in sides.items()}, repeats, what)
    return [
        compared(
            f"{what}, {name}",
            "s",
            found[name],
            "ml-tarflow",
            found["peer"],
            GOAL,
            higher_is_better=False,
            note=f"{device}; results differ by at most {apart[name]:.1g}; {watch}",
        )
        for name in sides
        if name != "peer"
    ]


def measure(peer_folder: Path, quick: bool, device: str) -> list[Row]:
    """All cases."""
    torch.set_num_threads(1)
    if native.library() is not None:
        native.set_threads(1)
    rows = []
    repeats = 2 if quick else 5
    for size in ("small",) if quick else SIZES:
        flow = trained(size, 60 if quick else 250)
        peer = peer_of(flow, peer_folder).to(device)
        flow = flow.to(device)
        for n in PICTURES:
            what = f"{size}, {n} image{'s' * (n > 1)}"
            rows += rows_of(what, reading(flow, peer, n, device), {"forward": 1e-4}, repeats, device)
            for guided in (False, True):
                sides, window = drawing(flow, peer, n, guided, device)
                name = f"in windows of {window}"
                sides[name] = sides.pop("in windows")
                said = f"{what}, {'guidance' if guided else 'no guidance'}"
                rows += rows_of(said, sides, {"token by token": 1e-3, name: 2e-2}, repeats, device)
    return rows


if __name__ == "__main__":
    words = parser(__doc__)
    peer = os.environ.get("TARFLOW_PEER")
    words.add_argument(
        "--peer", type=Path, default=peer, required=peer is None, help="a copy of apple/ml-tarflow, or TARFLOW_PEER"
    )
    words.add_argument("--device", default="cpu", help="cpu or cuda")
    options = words.parse_args()
    show(measure(options.peer, options.quick, options.device), as_json=options.json)
