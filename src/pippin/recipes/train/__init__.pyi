from . import (
    diffusion as diffusion,
    full as full,
    images as images,
    lora as lora,
    neuron_predictor as neuron_predictor,
    prune as prune,
    reasoner as reasoner,
    refiner as refiner,
    route as route,
    soup as soup,
    task_adapter as task_adapter,
    task_data as task_data,
)
