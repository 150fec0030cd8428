from . import (
    annotators as annotators,
    composition as composition,
    images as images,
    safety as safety,
)
