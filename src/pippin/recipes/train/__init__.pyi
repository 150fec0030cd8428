from . import (
    diffusion as diffusion,
    extraction as extraction,
    form_data as form_data,
    full as full,
    images as images,
    lora as lora,
    prune as prune,
    reasoner as reasoner,
    refiner as refiner,
    soup as soup,
)
