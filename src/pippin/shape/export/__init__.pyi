from .backend_choice import BackendChoice as BackendChoice, choose_backend as choose_backend
from .compiled_model import CompiledModel as CompiledModel
from .compression import (
    JointCompression as JointCompression,
    LinearQuantization as LinearQuantization,
    Palettization as Palettization,
    Pruning as Pruning,
    compress as compress,
)
from .decoder import capture_decoder as capture_decoder
from .exported_model import ExportedFunction as ExportedFunction, ExportedModel as ExportedModel
from .report import PerformanceReport as PerformanceReport, Variant as Variant, profile as profile
from .signature import Signature as Signature, SizeRange as SizeRange, TensorSpec as TensorSpec
from .typed_interface import generate_interface as generate_interface
