from . import (
    annotators as annotators,
    classification as classification,
    composition as composition,
    experts as experts,
    extraction as extraction,
    images as images,
    perplexity as perplexity,
    safety as safety,
    summaries as summaries,
    tools as tools,
)
