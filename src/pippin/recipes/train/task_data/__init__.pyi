from . import extraction as extraction
from .examples import (
    ExampleSampler as ExampleSampler,
    ExampleSplit as ExampleSplit,
    constrained_example as constrained_example,
)
