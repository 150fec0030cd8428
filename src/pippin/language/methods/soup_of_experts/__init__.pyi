from .config import SoupConfig as SoupConfig
from .domains import (
    DocumentEmbedding as DocumentEmbedding,
    Domains as Domains,
    HashedNGrams as HashedNGrams,
    SentenceEmbedding as SentenceEmbedding,
    domain_weights as domain_weights,
    kmeans as kmeans,
)
from .loss import SoupObjective as SoupObjective
from .mixtures import DomainBatches as DomainBatches, MetaSampler as MetaSampler
from .model import SoupOfExperts as SoupOfExperts
