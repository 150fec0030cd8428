r"""Recovery adapters: a small full-precision change that makes good what quantisation lost.

Notable here:
- it begins from the singular value decomposition of the error $W - \tilde W$: no other change of that rank leaves less
  of it (Eckart and Young), and what is left is known beforehand, $\sqrt{\sum_{i>r} \sigma_i^2}$
- the other way round, the largest singular vectors of $W$ move into the adapter first and only the rest is quantised
- singular vectors come from the eigenvectors of the smaller Gram matrix in float64, many times quicker than the whole
  decomposition, and exact far below the precision of the factors
- it is then trained like any adapter, over the packed weights that will run

Source: arXiv:2507.13575, section on recovery adapters; the start is that of LoftQ, arXiv:2310.08659, algorithm 1 with
one round; top singular vectors first: PiSSA, arXiv:2404.02948, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core import progress
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.language.adapters import Pair
from pippin.language.transformer import Decoder
from pippin.shape.lora import ALL, LowRankModel, choose


def recovery_adapter(
    original: Decoder | None,
    quantised: Decoder,
    rank: int = 32,
    alpha: float = 16.0,
    targets: str | Sequence[str] = ALL,
    *,
    svd: bool = True,
    seed: int = 0,
    show: bool = True,
) -> LowRankModel:
    """A quantised decoder with pairs that begin where they undo most of the error, to be trained on.

    Args:
        original: with the weights before quantisation; None only without ``svd``.
        quantised: the same decoder, packed (or dense with the quantised values).
        rank: of every pair.
        alpha: numerator of the scale.
        targets: as for `LowRankModel`.
        svd: begin from the decomposition; False begins from no change at all.
        seed: of A, where it begins at random.
        show: whether a bar is drawn.

    Raises:
        InvalidArgument: decoders of different sizes, no original for ``svd``, or what `LowRankModel` refuses.
        InvalidInput: weights that are not finite; the layer is named.
    """
    if svd and original is None:
        raise InvalidArgument(
            "the start from singular vectors needs the model before quantisation; give it, or svd=False"
        )
    init = None if original is None or not svd else residual_pairs(original, quantised, rank, targets, show=show)
    return LowRankModel(quantised, rank, alpha, targets, seed=seed, init=init)


def residual_pairs(
    original: Decoder, quantised: Decoder, rank: int, targets: str | Sequence[str] = ALL, *, show: bool = True
) -> dict[str, Pair]:
    """The best pairs of a rank for the error of each matrix, by layer; the scale is in B.

    Args, errors: as for `recovery_adapter`.
    """
    places, befores = choose(quantised, targets, rank), choose(original, targets, rank)
    if places.keys() != befores.keys():
        raise InvalidArgument(
            f"the decoders differ: one has {len(befores)} of the matrices that are asked for, the other {len(places)}"
        )
    pairs = {}
    with torch.no_grad(), progress.bar(len(places), "decomposing", unit="matrices", show=show) as bar:
        for layer, place in places.items():
            before = befores[layer]
            whole = before.linear.dense_weight()[before.start : before.start + before.outputs]
            rest = place.linear.dense_weight()[place.start : place.start + place.outputs]
            if whole.shape != rest.shape:
                raise InvalidArgument(
                    f"{layer} is {tuple(whole.shape)} in one decoder and {tuple(rest.shape)} in the other"
                )
            pairs[layer] = top(whole.float() - rest.to(whole.device).float(), rank, name=layer)
            bar.advance(1)
    return pairs


def split_top(
    weight: Float[Tensor, "outputs inputs"], rank: int, *, name: str = "the weight"
) -> tuple[Pair, Float[Tensor, "outputs inputs"]]:
    r"""Move the largest singular vectors of a weight into an adapter: $W = B A + R$.

    Args:
        weight: finite.
        rank: singular vectors that move.
        name: what to call the weight in an error.

    Returns:
        A and B, and R, which is what remains to be quantised; ``B @ A + R`` is ``weight`` up to one rounding.

    Raises:
        InvalidArgument: a rank below 1 or above the weight's.
        InvalidInput: weights that are not finite.

    >>> pair, rest = split_top(torch.diag(torch.tensor([3.0, 2.0, 1.0])), 1)
    >>> rest.round(decimals=4).diagonal().tolist()
    [0.0, 2.0, 1.0]
    """
    down, up = top(weight, rank, name=name)
    return (down, up), (weight.float() - up @ down).to(weight.dtype)


@torch.no_grad()
def top(weight: Float[Tensor, "outputs inputs"], rank: int, *, name: str = "the weight") -> Pair:
    """The nearest matrix of a rank, as A and B that each carry the roots of the singular values; see `split_top`."""
    if not 1 <= rank <= min(weight.shape):
        raise InvalidArgument(f"{name} is {tuple(weight.shape)}; its singular vectors are no {rank}")
    exact = weight.double()
    if not exact.isfinite().all():
        raise InvalidInput(f"{name} holds values that are not finite")
    wide = exact.shape[0] <= exact.shape[1]
    gram = exact @ exact.T if wide else exact.T @ exact
    vectors = torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1)  # eigenvalues come in ascending order
    # the projection onto them: the other side carries the singular values
    other = vectors.T @ exact if wide else (exact @ vectors).T
    roots = other.norm(dim=1).sqrt()
    balanced, rest = vectors * roots, other / roots.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    down, up = (rest, balanced) if wide else (balanced.T, rest.T)
    return down.float().contiguous(), up.float().contiguous()
