"""The flow of moving shapes that the claims on videos share: data, sizes and training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pippin.data.synthetic.video_clips import VideoClipSpec
    from pippin.generate.flows.starflow.model import StarFlow


@dataclass(frozen=True)
class ClipSize:
    """Sizes of data, flow, training and evaluation.

    Attributes:
        seeds: seeds of data, weights and noise.
        size: height and width of a frame.
        frames: frames of a video.
        width: hidden size.
        heads: attention heads.
        layers: layers of each block.
        steps: training steps.
        batch: batch size.
        rate: learning rate.
        n: videos of the evaluation.
        picture_steps: training steps of flows of single frames.
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


def clip_spec(size: ClipSize, frames: int | None = None) -> VideoClipSpec:
    """Videos of one shape that moves in a straight line and bounces off the walls."""
    from pippin.data.synthetic.scenes import SceneSpec
    from pippin.data.synthetic.video_clips import VideoClipSpec

    scene = SceneSpec(size=size.size, objects=(1, 1), radius=(2.2 * size.size / 16, 2.8 * size.size / 16))
    return VideoClipSpec(scene, frames=frames or size.frames, speed=(0.6 * size.size / 16, 1.6 * size.size / 16))


def trained(size: ClipSize, seed: int, scale: str, **changes: Any) -> StarFlow:
    """Train a video flow and its score network together; returned in evaluation mode."""
    from pippin.claims.worlds.training import device_for
    from pippin.generate.conditions import Samples
    from pippin.generate.flows.starflow.config import StarFlowConfig
    from pippin.generate.flows.starflow.loss import LikelihoodAndScore
    from pippin.generate.flows.starflow.model import StarFlow
    from pippin.generate.flows.starflow.score_network import ScoreConfig
    from pippin.train import AdamW, CosineSchedule, Trainer

    steps = changes.pop("steps", size.steps)
    config: dict[str, Any] = {
        "hidden_size": size.width,
        "num_attention_heads": size.heads,
        "layers_per_block": size.layers,
        "noise_std": NOISE,
        "score": ScoreConfig(2, size.width, size.heads, 4),
    }
    model = StarFlow(StarFlowConfig((size.frames, 1, size.size, size.size), **{**config, **changes})).initialize(seed)
    device = device_for(scale)
    precision: Any = "bfloat16" if device == "cuda" else "float32"

    def batches() -> Iterator[Samples]:
        yield from (Samples(videos.x) for videos in supply(size, seed))

    Trainer(
        model,
        LikelihoodAndScore(),
        batches(),
        steps=steps,
        optimizer=AdamW(lr=size.rate, weight_decay=1e-4),
        schedule=CosineSchedule(warmup_steps=0.05),
        precision=precision,
        seed=seed,
        device=device,
        show_progress=False,
    ).fit()
    return model.requires_grad_(False).eval()


def supply(size: ClipSize, seed: int) -> Any:
    """Endless training videos."""
    from pippin.data.synthetic.video_clips import VideoClipStream

    return VideoClipStream(clip_spec(size), size.batch, seed=1_000 + seed)


def held_out(size: ClipSize, seed: int, frames: int | None = None) -> Tensor:
    """Held-out videos."""
    from pippin.data.synthetic.video_clips import sample_video_clips

    return sample_video_clips(clip_spec(size, frames), size.n, seed=9_000 + seed).x
