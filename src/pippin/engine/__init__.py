"""The token engine: requests in, token events out."""

from pippin.engine.batch import BatchEngine, BatchStats
from pippin.engine.cache import DenseCache
from pippin.engine.engine import Engine, Finished, Request, Token
from pippin.engine.sampling import SamplingOptions

__all__ = ["BatchEngine", "BatchStats", "DenseCache", "Engine", "Finished", "Request", "SamplingOptions", "Token"]
