from . import (
    classification as classification,
    extraction as extraction,
    function_requests as function_requests,
    summaries as summaries,
    tools as tools,
)
from .examples import (
    ExampleSampler as ExampleSampler,
    ExampleSplit as ExampleSplit,
    constrained_example as constrained_example,
)
