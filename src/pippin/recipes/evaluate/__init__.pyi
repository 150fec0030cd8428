from . import (
    annotators as annotators,
    composition as composition,
    images as images,
    perplexity as perplexity,
    safety as safety,
)
