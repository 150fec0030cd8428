"""The config of a soup of experts: sizes, domains, and the language model that it was made over."""

from __future__ import annotations

from dataclasses import dataclass

from pippin.core.checks import PositiveInt, checked
from pippin.language.decoder_config import DecoderConfig


@checked
@dataclass(frozen=True)
class SoupConfig:
    """The config of a `SoupOfExperts`.

    Args:
        num_experts: experts for each parameter that is not shared.
        domains: names of the domains, in the order of their weights.
        domain_sizes: fraction of the corpus in each domain; empty if it is not known.
        embedding: name of the document embedding of the centroids.
        rank: rank of the experts of matrices; None for dense ones.
        shared: patterns of the parameters without experts.
        router_hidden_size: width of the router's hidden layer.
        decoder: config of the base; None if the base is not a language model.
        name: name of the language model; empty if the base is not one.
    """

    num_experts: PositiveInt
    domains: tuple[str, ...]
    domain_sizes: tuple[float, ...]
    embedding: str
    rank: PositiveInt | None = None
    shared: tuple[str, ...] = ()
    router_hidden_size: PositiveInt = 256
    decoder: DecoderConfig | None = None
    name: str = ""
