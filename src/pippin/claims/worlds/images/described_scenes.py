"""Scenes of few objects with their captions, and the families of models that are trained on them.

Notable here:
- captions go through the real text encoder
- a composition takes each kind of object as a part of its own, over "nothing"
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pippin.data.synthetic.scenes import SceneSpec
    from pippin.generate.conditions import Samples
    from pippin.kits.image import ImageCreator
    from pippin.recipes.prompt_encoder import PromptEncoder

DROP = 0.1
"""Of the captions, in training."""
RATE = 3e-3


@cache
def encoder() -> PromptEncoder:
    """The text encoder, downloaded if it is not in the store."""
    from pippin.core.store import store
    from pippin.recipes.prompt_encoder import PromptEncoder

    store.pull("all-minilm-l6-v2", show_progress=False)
    return PromptEncoder.load(device="cpu")


def scene_spec(pixels: int) -> SceneSpec:
    """No, one or two white squares or diamonds in four cells."""
    from pippin.data.synthetic.scenes import SceneSpec

    scaled = pixels / 16
    radius = (2.6 * scaled, 3.0 * scaled)
    return SceneSpec(pixels, objects=(0, 2), cells=2, kinds=("square", "diamond"), radius=radius)


class Described:
    """Batches of scenes with their captions; each caption is encoded once."""

    def __init__(self, pixels: int, batch: int, seed: int) -> None:
        self.pixels, self.batch, self.seed = pixels, batch, seed

    def __iter__(self) -> Iterator[Samples]:
        """Yield the batches."""
        from pippin.data.synthetic.scenes import SceneStream
        from pippin.generate.conditions import Samples

        for scenes in SceneStream(scene_spec(self.pixels), self.batch, seed=self.seed):
            yield Samples(scenes.x, encoder().condition(scenes.captions))


def untrained(name: str, pixels: int, factor: int = 1) -> tuple[Any, Any]:
    """A model of a family, and its objective."""
    from pippin.generate.conditions import ConditioningSpec

    spec, shape = ConditioningSpec(text_dim=encoder().width, null=True), (1, pixels, pixels)
    if name == "diffusion":
        from pippin.generate.diffusion.diffusion import Denoising, Diffusion, DiffusionConfig
        from pippin.generate.diffusion.unet import UNetConfig

        network = UNetConfig(base_channels=32 * factor, patch_size=2, num_levels=2)
        return Diffusion(DiffusionConfig(shape, network, spec, steps=10)), Denoising(DROP)
    if name == "flow":
        from pippin.generate.flows.tarflow import FlowLikelihood, TarFlow, TarFlowConfig

        patch, layers = pixels // 4, (2, 2, 2, 2)
        flow = TarFlowConfig(
            shape,
            patch_size=patch,
            layers_per_block=layers,
            hidden_size=64 * factor,
            condition=spec,
            noise_std=0.1,
            soft_clip=4.0,
        )
        return TarFlow(flow), FlowLikelihood(condition_dropout=DROP)
    from pippin.generate.methods.dart.loss import NoisyViews
    from pippin.generate.methods.dart.model import DART, DartConfig

    dart = DartConfig(
        shape,
        patch_size=pixels // 4,
        num_hidden_layers=3,
        hidden_size=72 * factor,
        num_attention_heads=4,
        condition=spec,
    )
    return DART(dart), NoisyViews(condition_dropout=DROP)


def trained(family: str, pixels: int, factor: int, steps: int, batch: int, seed: int, device: str) -> Any:
    """Train a model of a family; it is returned in evaluation mode. `factor` multiplies its width."""
    from pippin.claims.worlds.training import fit

    model, objective = untrained(family, pixels, factor)
    fit(
        model.initialize(seed),
        objective,
        Described(pixels, batch, seed),
        steps=steps,
        seed=seed,
        lr=RATE,
        warmup=min(20, steps - 1),
        weight_decay=0.0,
        device=device,
        precision="float32",
    )
    return model.requires_grad_(False)


def creator_of(model: Any, family: str) -> ImageCreator:
    """A creator over a trained model."""
    from pippin.kits.image import ImageCreator

    return ImageCreator(model, encoder=encoder(), compose="nothing" if family == "composition" else None)


def concepts(caption: str, family: str) -> list[str]:
    """Parts of a caption: one for each kind of object where the family is a composition."""
    return caption.split(" and ") if family == "composition" else [caption]
