from . import (
    annotators as annotators,
    composition as composition,
    extraction as extraction,
    images as images,
    perplexity as perplexity,
    safety as safety,
    tools as tools,
)
