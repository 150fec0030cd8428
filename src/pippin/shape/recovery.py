r"""Recovery adapters: LoRA adapters in full precision that recover the quality lost by quantization.

Notable here:
- initialized with the truncated singular value decomposition of the error $W - \tilde W$, the best approximation of
  that rank (Eckart and Young); the remaining error has norm $\sqrt{\sum_{i>r} \sigma_i^2}$
- alternatively, the largest singular vectors of $W$ are moved into the adapter and only the remainder is quantized
- singular vectors are the eigenvectors of the smaller Gram matrix in float64, which is many times faster than a full
  decomposition, with an error far below the precision of the factors
- they are then trained like any adapter, on the packed weights that are used in inference

Source: arXiv:2507.13575, section on recovery adapters; the initialization is that of LoftQ, arXiv:2310.08659, algorithm
1 with one iteration; top singular vectors first: PiSSA, arXiv:2404.02948, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core import progress
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.language.adapter_files import Factors
from pippin.language.decoder import Decoder
from pippin.shape.lora import ALL, LowRankModel, select_targets


def recovery_adapter(
    original: Decoder | None,
    quantized: Decoder,
    rank: int = 32,
    alpha: float = 16.0,
    targets: str | Sequence[str] = ALL,
    *,
    svd_init: bool = True,
    seed: int = 0,
    show_progress: bool = True,
) -> LowRankModel:
    """A quantized decoder with LoRA factors that are initialized from its quantization error, ready for training.

    Args:
        original: the decoder before quantization; None only without ``svd_init``.
        quantized: the same decoder, packed (or dense with the quantized values).
        rank: rank of every adapter matrix.
        alpha: numerator of the scale.
        targets: as for `LowRankModel`.
        svd_init: initialize with `residual_pairs`; False initializes as `LowRankModel` does.
        seed: seed of A, without ``svd_init``.
        show_progress: whether to show a progress bar.

    Raises:
        InvalidArgument: decoders of different sizes, no original for ``svd_init``, or as for `LowRankModel`.
        InvalidInput: weights that are not finite; the layer is named.
    """
    if svd_init and original is None:
        raise InvalidArgument(
            "initialization from singular vectors needs the model before quantization; give it, or svd_init=False"
        )
    init = (
        None
        if original is None or not svd_init
        else residual_pairs(original, quantized, rank, targets, show_progress=show_progress)
    )
    return LowRankModel(quantized, rank, alpha, targets, seed=seed, init=init)


def residual_pairs(
    original: Decoder, quantized: Decoder, rank: int, targets: str | Sequence[str] = ALL, *, show_progress: bool = True
) -> dict[str, Factors]:
    """The factors A and B of the truncated SVD of each matrix's quantization error, by layer; B includes the scale.

    Arguments and errors as for `recovery_adapter`.
    """
    targets_of, originals = select_targets(quantized, targets, rank), select_targets(original, targets, rank)
    if targets_of.keys() != originals.keys():
        raise InvalidArgument(
            f"the decoders differ: the original has {len(originals)} of the target matrices, the quantized one "
            f"{len(targets_of)}"
        )
    pairs = {}
    count = len(targets_of)
    with torch.no_grad(), progress.bar(count, "decomposing", unit="matrices", show_progress=show_progress) as bar:
        for layer, target in targets_of.items():
            source = originals[layer]
            weight = source.linear.dense_weight()[source.start : source.start + source.outputs]
            rounded = target.linear.dense_weight()[target.start : target.start + target.outputs]
            if weight.shape != rounded.shape:
                raise InvalidArgument(
                    f"{layer} is {tuple(weight.shape)} in one decoder and {tuple(rounded.shape)} in the other"
                )
            pairs[layer] = truncated_svd(weight.float() - rounded.to(weight.device).float(), rank, name=layer)
            bar.advance(1)
    return pairs


def split_singular_vectors(
    weight: Float[Tensor, "outputs inputs"], rank: int, *, name: str = "the weight"
) -> tuple[Factors, Float[Tensor, "outputs inputs"]]:
    r"""Move the largest singular vectors of a weight into an adapter: $W = B A + R$.

    Args:
        weight: a matrix of finite values.
        rank: number of singular vectors moved into the adapter.
        name: name of the weight in error messages.

    Returns:
        A and B, and the remainder R, to be quantized; ``B @ A + R`` equals ``weight`` up to one rounding.

    Raises:
        InvalidArgument: a rank below 1 or above the weight's.
        InvalidInput: weights that are not finite.

    >>> factors, remainder = split_singular_vectors(torch.diag(torch.tensor([3.0, 2.0, 1.0])), 1)
    >>> remainder.round(decimals=4).diagonal().tolist()
    [0.0, 2.0, 1.0]
    """
    down, up = truncated_svd(weight, rank, name=name)
    return (down, up), (weight.float() - up @ down).to(weight.dtype)


@torch.no_grad()
def truncated_svd(weight: Float[Tensor, "outputs inputs"], rank: int, *, name: str = "the weight") -> Factors:
    """The truncated SVD of a weight as A (rank, inputs) and B (outputs, rank), float32.

    Each factor carries the square roots of the singular values.

    Raises:
        InvalidArgument: a rank below 1 or above the weight's.
        InvalidInput: weights that are not finite.
    """
    if not 1 <= rank <= min(weight.shape):
        raise InvalidArgument(f"{name} is {tuple(weight.shape)}, which has fewer than {rank} singular vectors")
    exact = weight.double()
    if not exact.isfinite().all():
        raise InvalidInput(f"{name} holds values that are not finite")
    wide = exact.shape[0] <= exact.shape[1]
    gram = exact @ exact.T if wide else exact.T @ exact
    vectors = torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1)  # eigenvalues come in ascending order
    # (rank, longer side): the projections onto them, whose norms are the singular values
    projected = vectors.T @ exact if wide else (exact @ vectors).T
    roots = projected.norm(dim=1).sqrt()
    balanced, other = vectors * roots, projected / roots.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    down, up = (other, balanced) if wide else (balanced.T, other.T)
    return down.float().contiguous(), up.float().contiguous()
