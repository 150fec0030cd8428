"""Where in an image a network with experts spends its work: experts per token, layer by layer.

Notable here:
- a map is counted in the pass itself, from the tokens that experts took; nothing is estimated
- a map of a router that was never trained looks like a map, too: compare with one before drawing conclusions
"""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core import plotting
from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import Conditioning
from pippin.generate.diffusion.dit import DiT
from pippin.nn.expert_choice import ExpertChoiceFFN, TokenChoiceFFN


@torch.no_grad()
def compute_map(
    model: nn.Module,
    x: Float[Tensor, "n channels height width"],
    t: float | Float[Tensor, n],
    condition: Conditioning | None = None,
) -> Int[Tensor, "n layers rows columns"]:
    """Experts that work on each patch of noisy images, in every layer that has experts.

    Args:
        model: a `DiT` with experts, or a diffusion model around one.
        x: noisy images, as the model meets them at these times.
        t: their times.
        condition: of each sample.

    Raises:
        InvalidArgument: a network without experts.

    Source: Sun et al. 2024, arXiv:2410.02098, section 4.4.
    """
    network = dit_of(model)
    layers = [m for m in network.modules() if isinstance(m, (ExpertChoiceFFN, TokenChoiceFFN))]
    if not layers:
        raise InvalidArgument("the network has no experts, so every patch gets the same; see DiTConfig(feed_forward=)")
    before, training = [layer.capture for layer in layers], network.training
    times = torch.as_tensor(t, dtype=torch.float32, device=x.device).expand(len(x))
    try:
        network.eval()
        for layer in layers:
            layer.capture = True
        network(x, times, condition)
        taken = [layer.last_routing.per_token for layer in layers if layer.last_routing is not None]
    finally:
        network.train(training)
        for layer, capture in zip(layers, before, strict=True):
            layer.capture = capture
            layer.last_routing = None
    return torch.stack(taken, 1).view(len(x), len(layers), network.rows, network.columns)


def dit_of(model: nn.Module) -> DiT:
    """The diffusion transformer in a model.

    Raises:
        InvalidArgument: there is none.
    """
    for module in model.modules():
        if isinstance(module, DiT):
            return module
    raise InvalidArgument(f"{type(model).__name__} holds no DiT; experts are a part of that network alone")


def plot_compute_map(
    maps: Int[Tensor, "n layers rows columns"], images: Float[Tensor, "images channels height width"], path: Path
) -> None:
    """Draw each image beside the maps of its layers.

    Args:
        maps: as `compute_map` counts them.
        images: from -1 to 1, as clean as they are there.
        path: of the image; its suffix chooses the format (.png, .svg, .pdf).

    Raises:
        InvalidArgument: maps and images of different numbers.
        MissingDependency: matplotlib is not installed.
    """
    if len(maps) != len(images) or not len(maps):
        raise InvalidArgument(f"{len(maps)} maps for {len(images)} images; give one for each, and at least one")
    layers = maps.shape[1]
    figure = plotting.new(1.6 * (layers + 1), 1.6 * len(maps))
    axes = figure.subplots(len(maps), layers + 1, squeeze=False)
    shown = None
    for row, (picture, layered) in enumerate(zip(images, maps, strict=True)):
        image = ((picture.detach().float().cpu() + 1) / 2).clamp(0, 1).permute(1, 2, 0).numpy()
        axes[row, 0].imshow(image if image.shape[-1] == 3 else image[..., 0], cmap="gray", vmin=0, vmax=1)
        for layer in range(layers):
            counts = layered[layer].cpu().numpy()
            shown = axes[row, layer + 1].imshow(counts, cmap="magma", vmin=0, vmax=int(maps.max()))
            if row == 0:
                axes[row, layer + 1].set_title(f"layer with experts {layer + 1}", fontsize=7)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    figure.colorbar(shown, ax=axes, label="experts per patch")  # type: ignore[arg-type]
    plotting.save(figure, path, dpi=120)
