"""The flow of moving shapes that the claims on clips share: its data, its sizes, its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pippin.data.clips import ClipSpec
    from pippin.generate.starflow import StarFlow


@dataclass(frozen=True)
class Size:
    """How much is trained and looked at.

    Attributes:
        seeds: of data, weights and noise.
        size: height and width of a frame.
        frames: of a clip.
        width: of the hidden states.
        heads: of the attention.
        layers: of each block.
        steps: of training.
        batch: clips of a step.
        rate: of learning.
        n: clips that are looked at.
        picture_steps: of training for flows of single pictures.
    """

    seeds: tuple[int, ...]
    size: int
    frames: int
    width: int
    heads: int
    layers: tuple[int, ...]
    steps: int
    batch: int
    rate: float
    n: int
    picture_steps: int = 0


NOISE = 0.3


def clip_spec(size: Size, frames: int | None = None) -> ClipSpec:
    """One shape that moves straight on and bounces off the walls."""
    from pippin.data.clips import ClipSpec
    from pippin.data.scenes import SceneSpec

    scene = SceneSpec(size=size.size, objects=(1, 1), radius=(2.2 * size.size / 16, 2.8 * size.size / 16))
    return ClipSpec(scene, frames=frames or size.frames, speed=(0.6 * size.size / 16, 1.6 * size.size / 16))


def device(scale: str) -> str:
    """The GPU where the scale is written for one and there is one."""
    import torch

    return "cuda" if scale == "gpu" and torch.cuda.is_available() else "cpu"


def trained(size: Size, seed: int, scale: str, **changes: Any) -> StarFlow:
    """A flow of clips with its score network, both trained at once; in evaluation mode."""
    from pippin.generate.condition import Samples
    from pippin.generate.flow_score import LikelihoodAndScore, ScoreConfig
    from pippin.generate.starflow import StarFlow, StarFlowConfig
    from pippin.train import AdamW, Cosine, Trainer

    steps = changes.pop("steps", size.steps)
    config: dict[str, Any] = {
        "width": size.width,
        "heads": size.heads,
        "layers": size.layers,
        "noise": NOISE,
        "score": ScoreConfig(2, size.width, size.heads, 4),
    }
    model = StarFlow(StarFlowConfig((size.frames, 1, size.size, size.size), **{**config, **changes})).initialise(seed)
    where = device(scale)
    precision: Any = "bfloat16" if where == "cuda" else "float32"

    def batches() -> Iterator[Samples]:
        yield from (Samples(drawn.x) for drawn in supply(size, seed))

    Trainer(
        model,
        LikelihoodAndScore(),
        batches(),
        steps=steps,
        optimiser=AdamW(lr=size.rate, weight_decay=1e-4),
        schedule=Cosine(warmup=0.05),
        precision=precision,
        seed=seed,
        device=where,
        show=False,
    ).fit()
    return model.requires_grad_(False).eval()


def supply(size: Size, seed: int) -> Any:
    """Clips to learn from, without end."""
    from pippin.data.clips import ClipStream

    return ClipStream(clip_spec(size), size.batch, seed=1_000 + seed)


def held_out(size: Size, seed: int, frames: int | None = None) -> Tensor:
    """Clips that no flow learnt from."""
    from pippin.data.clips import clips

    return clips(clip_spec(size, frames), size.n, seed=9_000 + seed).x
