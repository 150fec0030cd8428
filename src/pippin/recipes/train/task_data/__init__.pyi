from . import extraction as extraction
from .examples import (
    ExampleSampler as ExampleSampler,
    Split as Split,
    constrained_example as constrained_example,
)
