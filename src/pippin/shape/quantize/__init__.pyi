from . import (
    awq as awq,
    gptq as gptq,
    kv_cache_qat as kv_cache_qat,
    mixed_precision as mixed_precision,
    palettize as palettize,
    qat as qat,
    rtn as rtn,
)
from .block36 import Block36 as Block36
from .calibration import calibration_ids as calibration_ids
from .config import QuantizationConfig as QuantizationConfig
from .palettize import PalettizationConfig as PalettizationConfig
