"""How many bits the weights of a checkpoint have before anything is done to it."""

from __future__ import annotations

from math import prod
from pathlib import Path

FULL = 32.0


def stored_bits(source: Path | None) -> float:
    """Bits per weight of most matrices in a GGUF file or a folder, with their scales; 32 where there is no file.

    The median over weights, as an embedding often has more bits than the layers: 5 for a file in Q4_1.
    """
    from pippin.core.formats.checkpoint import open_folder
    from pippin.core.formats.gguf import open_gguf
    from pippin.language.quantized_checkpoint import quantized_matrices

    if source is None:
        return FULL
    sizes: list[tuple[float, int]] = []  # bits per weight and weights of each matrix
    if source.is_file():
        for stored in open_gguf(source).tensors.values():
            if len(stored.shape) > 1:
                sizes.append((8 * stored.nbytes / prod(stored.shape), prod(stored.shape)))
    else:
        folder = open_folder(source)
        _, matrices = quantized_matrices(folder)
        for matrix in matrices.values():
            nbytes = sum(folder.tensor(part).nbytes for part in matrix.parts)
            sizes.append((8 * nbytes / prod(matrix.shape), prod(matrix.shape)))
        parts = {part for matrix in matrices.values() for part in matrix.parts}
        for name in folder.names():
            if name not in parts and len(folder.shape(name)) > 1:
                tensor = folder.tensor(name)
                sizes.append((8 * tensor.element_size(), tensor.numel()))
    seen, half = 0, sum(count for _, count in sizes) / 2
    for bits, count in sorted(sizes):
        seen += count
        if seen >= half:
            return bits
    return FULL
