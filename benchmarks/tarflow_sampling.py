"""Drawing pictures from a transformer flow beside the published implementation, apple/ml-tarflow, with equal weights.

    python benchmarks/tarflow_sampling.py --peer FOLDER [--quick] [--json] [--device cuda]

FOLDER is a copy of that repository. A flow of grey pictures of 16 by 16 pixels (patches of 2 by 2, 64 tokens, 4 blocks
of 2 layers, 128 wide, 3 classes) is trained here for a minute, since an untrained flow is the identity and settles at
once, and its weights are copied to the other side. Both draw from the same noise; token by token the pictures must
agree within 1e-3 and in windows (64 tokens, tolerance 1e-3) within 2e-2, or nothing is printed. The other side has the
token-by-token inverse alone, with its own cache of keys; with guidance it makes two passes for each token. One thread
on both sides.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _rows import Row, Watch, compared, in_turn, parser, say, show
from torch import Tensor

from pippin.core import native
from pippin.data.scenes import KINDS, SceneSpec, SceneStream
from pippin.generate.condition import Condition, ConditionSpec, Samples
from pippin.generate.flow_block import Guide
from pippin.generate.jacobi import Jacobi
from pippin.generate.noise import Noise
from pippin.generate.tarflow import Likelihood, TarFlow, TarFlowConfig
from pippin.train import AdamW, Cosine, Trainer

SCENES = SceneSpec(objects=(1, 1), radius=(2.2, 4.5))
CONFIG = TarFlowConfig(
    (1, 16, 16), layers=(2,) * 4, width=128, condition=ConditionSpec(classes=3, null=True), noise=0.1
)
SOLVER = Jacobi(64, tolerance=1e-3)
WEIGHT = 1.0
"""w of the guidance, which grows over the tokens."""
CASES = ((1, True), (4, True), (16, True), (1, False), (4, False), (16, False))
"""Pictures drawn at once, and whether they are guided."""
GOAL = 3.0


class Data:
    """Pictures of one object, its kind as the label."""

    def __iter__(self) -> Iterator[Samples]:
        """Batches without end."""
        for drawn in SceneStream(SCENES, 16, seed=99):
            labels = torch.tensor([KINDS.index(things[0].kind) for things in drawn.things])
            yield Samples(drawn.x, Condition(labels=labels))


def trained(steps: int) -> TarFlow:
    """The flow. No label is left out, so that the null class is the mean of all, as it is on the other side."""
    say(f"training for {steps} steps")
    flow = TarFlow(CONFIG).initialise(99)
    schedule = Cosine(warmup=0.05)
    Trainer(
        flow,
        Likelihood(drop=0.0),
        Data(),
        steps=steps,
        optimiser=AdamW(lr=2e-3, weight_decay=1e-4),
        schedule=schedule,
        seed=99,
        show=False,
    ).fit()
    return flow.requires_grad_(False).eval()


def peer_of(flow: TarFlow, folder: Path) -> Any:
    """The other side's model with our weights."""
    spec = importlib.util.spec_from_file_location("transformer_flow", folder / "transformer_flow.py")
    if spec is None or spec.loader is None or not (folder / "transformer_flow.py").is_file():
        raise SystemExit(f"{folder} holds no transformer_flow.py; give a copy of apple/ml-tarflow as --peer")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.Model(
        in_channels=CONFIG.shape[0],
        img_size=CONFIG.shape[1],
        patch_size=CONFIG.patch,
        channels=CONFIG.width,
        num_blocks=len(CONFIG.layers),
        layers_per_block=CONFIG.layers[0],
        num_classes=CONFIG.condition.classes,
    ).eval()
    for theirs, block, embedding in zip(model.blocks, flow.blocks, flow.embeddings, strict=True):
        classes: Any = embedding.classes
        _copy(theirs, block, classes)
    return model.requires_grad_(False)


@torch.no_grad()
def _copy(theirs: Any, block: Any, classes: Tensor) -> None:
    """The weights of one block; their places lie in natural order, and the last in the block's order is not read."""
    places = torch.cat([block.places, torch.zeros_like(block.places[:1])])
    theirs.pos_embed.copy_(places.flip(0) if block.spec.reverse else places)
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


def sides(flow: TarFlow, peer: Any, n: int, guided: bool, device: str) -> dict[str, Callable[[], Tensor]]:
    """Ours token by token and in windows, and theirs; each draws the same pictures."""
    labels = (torch.arange(n) % 3).to(device)
    condition = Condition(labels=labels)
    z = Noise(n, seed=7, device=device).normal((CONFIG.tokens, CONFIG.inner))
    guides = None
    if guided:
        guides = tuple(Guide(embedding(condition.null(), n), WEIGHT, anneal=True) for embedding in flow.embeddings)

    def ours(solver: Jacobi | None) -> Tensor:
        return flow.inverse(z, condition, solver=solver, guides=guides)[0]

    def theirs() -> Tensor:
        drawn: Tensor = peer.reverse(z.clone(), labels, guidance=WEIGHT if guided else 0.0, annealed_guidance=guided)
        return drawn

    return {"token by token": lambda: ours(None), "in windows": lambda: ours(SOLVER), "peer": theirs}


def timed(draw: Callable[[], Tensor], device: str) -> Callable[[], float]:
    """Seconds of one drawing."""

    def once() -> float:
        began = time.perf_counter()
        draw()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return once


def measure(peer_folder: Path, quick: bool, device: str) -> list[Row]:
    """All cases."""
    torch.set_num_threads(1)
    native.set_threads(1)
    flow = trained(60 if quick else 400)
    peer = peer_of(flow, peer_folder).to(device)
    flow = flow.to(device)
    rows = []
    for n, guided in CASES[:2] if quick else CASES:
        draws = sides(flow, peer, n, guided, device)
        right = draws["peer"]()
        apart = {name: float((draw() - right).abs().max()) for name, draw in draws.items()}
        if not (apart["token by token"] < 1e-3 and apart["in windows"] < 2e-2):
            raise SystemExit(f"the sides draw different pictures: {apart}; nothing is compared")
        what = f"{n} picture{'s' * (n > 1)}, {'guided' if guided else 'not guided'}"
        with Watch() as watch:
            found = in_turn({name: timed(draw, device) for name, draw in draws.items()}, 2 if quick else 5, what)
        for name in ("token by token", "in windows"):
            rows.append(
                compared(
                    f"{what}, {name}",
                    "s",
                    found[name],
                    "ml-tarflow",
                    found["peer"],
                    GOAL,
                    higher_is_better=False,
                    note=f"{device}; pictures apart by up to {apart[name]:.1g}; {watch}",
                )
            )
    return rows


if __name__ == "__main__":
    words = parser(__doc__)
    words.add_argument("--peer", type=Path, required=True, help="a copy of apple/ml-tarflow")
    words.add_argument("--device", default="cpu", help="cpu or cuda")
    options = words.parse_args()
    show(measure(options.peer, options.quick, options.device), as_json=options.json)
