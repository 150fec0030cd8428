"""Training for the claims on composition and length: batches from a fixed pool of scenes, and one recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from pippin.data.synthetic.scenes import Scenes
    from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
    from pippin.generate.diffusion.diffusion import Diffusion


class Pool:
    """Endless random batches from a fixed pool of scenes, with their conditions.

    Args:
        scenes: the pool.
        condition: makes the condition of scenes, given their indices and a generator.
        batch: batch size.
        seed: seed of the order.
    """

    def __init__(self, scenes: Scenes, condition: Callable[[Tensor, Any], Conditioning], batch: int, seed: int) -> None:
        self.scenes, self.condition, self.batch, self.seed = scenes, condition, batch, seed

    def __iter__(self) -> Iterator[Samples]:
        """Yield the batches."""
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
    """Train a diffusion model by v-prediction; it is returned in evaluation mode, on the GPU if there is one."""
    import torch

    from pippin.generate.diffusion.diffusion import Denoising, Diffusion, DiffusionConfig
    from pippin.train import AdamW, CosineSchedule, Trainer

    shape = (data.scenes.spec.channels, data.scenes.spec.size, data.scenes.spec.size)
    model = Diffusion(DiffusionConfig(shape, network, spec, method=method)).initialize(seed)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {
        "optimizer": AdamW(lr=rate),
        "schedule": CosineSchedule(warmup_steps=0.05),
        "show_progress": False,
    }
    Trainer(model, Denoising(condition_dropout=0.0), data, steps=steps, seed=seed, **options).fit()
    model.eval().requires_grad_(False)
    return model
