from . import (
    diffusion as diffusion,
    full as full,
    images as images,
    lora as lora,
    prune as prune,
    reasoner as reasoner,
    refiner as refiner,
    soup as soup,
    task_adapter as task_adapter,
    task_data as task_data,
)
