from . import (
    afm as afm,
    distillation as distillation,
    instruction_pruning as instruction_pruning,
    kv_routing as kv_routing,
    ladir as ladir,
    masked_diffusion as masked_diffusion,
    prompt_experts as prompt_experts,
    soup_of_experts as soup_of_experts,
)
