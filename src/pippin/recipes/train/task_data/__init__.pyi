from . import classification as classification, extraction as extraction, summaries as summaries
from .examples import (
    ExampleSampler as ExampleSampler,
    ExampleSplit as ExampleSplit,
    constrained_example as constrained_example,
)
