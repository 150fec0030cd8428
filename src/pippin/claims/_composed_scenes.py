"""What the claims on composition and on length share: drawn scenes that are learnt from, and how a model is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from pippin.data.scenes import Scenes
    from pippin.generate.condition import Condition, ConditionSpec, Samples
    from pippin.generate.diffusion import Diffusion


class Pool:
    """Batches from a fixed pool of scenes, without end, each with a condition.

    Args:
        scenes: the pool.
        condition: of scenes that were drawn from it, by a generator.
        batch: scenes of each.
        seed: of the order.
    """

    def __init__(self, scenes: Scenes, condition: Callable[[Tensor, Any], Condition], batch: int, seed: int) -> None:
        self.scenes, self.condition, self.batch, self.seed = scenes, condition, batch, seed

    def __iter__(self) -> Iterator[Samples]:
        """The batches; the condition sees the numbers of the scenes."""
        import torch

        from pippin.generate.condition import Samples

        generator = torch.Generator().manual_seed(self.seed)
        x = self.scenes.x
        while True:
            rows = torch.randint(len(x), (self.batch,), generator=generator)
            yield Samples(x[rows], self.condition(rows, generator))


def trained(
    network: Any, spec: ConditionSpec, data: Pool, *, steps: int, rate: float, seed: int, method: Any = "ddim"
) -> Diffusion:
    """A diffusion model of v-prediction after so many steps, in evaluation mode, where the machine computes."""
    import torch

    from pippin.generate.diffusion import Denoising, Diffusion, DiffusionConfig
    from pippin.train import AdamW, Cosine, Trainer

    shape = (data.scenes.spec.channels, data.scenes.spec.size, data.scenes.spec.size)
    model = Diffusion(DiffusionConfig(shape, network, spec, method=method)).initialise(seed)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    how: dict[str, Any] = {"optimiser": AdamW(lr=rate), "schedule": Cosine(warmup=0.05), "show": False}
    Trainer(model, Denoising(drop=0.0), data, steps=steps, seed=seed, **how).fit()
    model.eval().requires_grad_(False)
    return model


def spearman(first: list[float], second: list[float]) -> float:
    """The rank correlation of two lists, ties by their mean rank; 0 where one list does not vary."""
    import torch

    def ranks(values: list[float]) -> Tensor:
        x = torch.tensor(values, dtype=torch.float64)
        return ((x[None] < x[:, None]).sum(1) + (x[None] <= x[:, None]).sum(1)).double() / 2

    a, b = ranks(first), ranks(second)
    a, b = a - a.mean(), b - b.mean()
    size = float((a.square().sum() * b.square().sum()).sqrt())
    return float((a * b).sum()) / size if size else 0.0
