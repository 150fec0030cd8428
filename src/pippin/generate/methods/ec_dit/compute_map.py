"""Compute maps: the number of experts that process each patch of an image, for each layer with experts.

Notable here:
- experts are counted during a forward pass, from the router's assignments
- an untrained router also gives a map with structure: compare with it before drawing conclusions
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
from pippin.nn.feedforward.expert_choice import ExpertChoiceFFN, TokenChoiceFFN


@torch.no_grad()
def compute_map(
    model: nn.Module,
    x: Float[Tensor, "n channels height width"],
    t: float | Float[Tensor, n],
    condition: Conditioning | None = None,
) -> Int[Tensor, "n layers rows columns"]:
    """Number of experts that process each patch of noised images, in every layer with experts.

    Args:
        model: a `DiT` with experts, or a diffusion model with one.
        x: images noised to time t.
        t: time of all images, or of each.
        condition: condition of each image; None for the null condition.

    Raises:
        InvalidArgument: a network without experts.

    Source: Sun et al. 2024, arXiv:2410.02098, section 4.4.
    """
    network = dit_of(model)
    layers = [m for m in network.modules() if isinstance(m, (ExpertChoiceFFN, TokenChoiceFFN))]
    if not layers:
        raise InvalidArgument("the network has no experts; see feed_forward of DiTConfig")
    captures, training = [layer.capture for layer in layers], network.training
    times = torch.as_tensor(t, dtype=torch.float32, device=x.device).expand(len(x))
    try:
        network.eval()
        for layer in layers:
            layer.capture = True
        network(x, times, condition)
        counts = [layer.last_routing.per_token for layer in layers if layer.last_routing is not None]
    finally:
        network.train(training)
        for layer, capture in zip(layers, captures, strict=True):
            layer.capture = capture
            layer.last_routing = None
    return torch.stack(counts, 1).view(len(x), len(layers), network.rows, network.columns)


def dit_of(model: nn.Module) -> DiT:
    """The first `DiT` among a model's modules.

    Raises:
        InvalidArgument: the model has none.
    """
    for module in model.modules():
        if isinstance(module, DiT):
            return module
    raise InvalidArgument(f"{type(model).__name__} holds no DiT, the only network with experts")


def plot_compute_map(
    maps: Int[Tensor, "n layers rows columns"], images: Float[Tensor, "images channels height width"], path: Path
) -> None:
    """Plot each image next to the maps of its layers.

    Args:
        maps: results of `compute_map`.
        images: the images without noise, from -1 to 1.
        path: file to write; its suffix chooses the format (.png, .svg, .pdf).

    Raises:
        InvalidArgument: maps and images of different numbers.
        MissingDependency: matplotlib is not installed.
    """
    if len(maps) != len(images) or not len(maps):
        raise InvalidArgument(f"{len(maps)} maps for {len(images)} images; give one for each, and at least one")
    layers = maps.shape[1]
    figure = plotting.new(1.6 * (layers + 1), 1.6 * len(maps))
    axes = figure.subplots(len(maps), layers + 1, squeeze=False)
    mappable = None
    for row, (image, layer_maps) in enumerate(zip(images, maps, strict=True)):
        pixels = ((image.detach().float().cpu() + 1) / 2).clamp(0, 1).permute(1, 2, 0).numpy()  # (h, w, channels)
        axes[row, 0].imshow(pixels if pixels.shape[-1] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)
        for layer in range(layers):
            counts = layer_maps[layer].cpu().numpy()
            mappable = axes[row, layer + 1].imshow(counts, cmap="magma", vmin=0, vmax=int(maps.max()))
            if row == 0:
                axes[row, layer + 1].set_title(f"layer with experts {layer + 1}", fontsize=7)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    figure.colorbar(mappable, ax=axes, label="experts per patch")  # type: ignore[arg-type]
    plotting.save(figure, path, dpi=120)
