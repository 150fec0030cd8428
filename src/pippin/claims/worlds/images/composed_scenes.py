"""What the claims on composition and length share: drawn scenes that are learned from, and how a model is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from pippin.data.synthetic.scenes import Scenes
    from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
    from pippin.generate.diffusion.diffusion import Diffusion


class Pool:
    """Batches from a fixed pool of scenes, without end, each with a condition.

    Args:
        scenes: the pool.
        condition: of scenes that were drawn from it, by a generator.
        batch: scenes of each.
        seed: of the order.
    """

    def __init__(self, scenes: Scenes, condition: Callable[[Tensor, Any], Conditioning], batch: int, seed: int) -> None:
        self.scenes, self.condition, self.batch, self.seed = scenes, condition, batch, seed

    def __iter__(self) -> Iterator[Samples]:
        """The batches; the condition sees the numbers of the scenes."""
        import torch

        from pippin.generate.conditions import Samples

        generator = torch.Generator().manual_seed(self.seed)
        x = self.scenes.x
        while True:
            rows = torch.randint(len(x), (self.batch,), generator=generator)
            yield Samples(x[rows], self.condition(rows, generator))


def trained(
    network: Any, spec: ConditioningSpec, data: Pool, *, steps: int, rate: float, seed: int, method: Any = "ddim"
) -> Diffusion:
    """A diffusion model of v-prediction after so many steps, in evaluation mode, where the machine computes."""
    import torch

    from pippin.generate.diffusion.diffusion import Denoising, Diffusion, DiffusionConfig
    from pippin.train import AdamW, CosineSchedule, Trainer

    shape = (data.scenes.spec.channels, data.scenes.spec.size, data.scenes.spec.size)
    model = Diffusion(DiffusionConfig(shape, network, spec, method=method)).initialize(seed)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    how: dict[str, Any] = {"optimizer": AdamW(lr=rate), "schedule": CosineSchedule(warmup=0.05), "show_progress": False}
    Trainer(model, Denoising(condition_dropout=0.0), data, steps=steps, seed=seed, **how).fit()
    model.eval().requires_grad_(False)
    return model
