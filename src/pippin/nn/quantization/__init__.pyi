from .codes import Codes as Codes
from .fake_quantize import FakeQuantizer as FakeQuantizer
from .packed import (
    NativeWeight as NativeWeight,
    PackedEmbedding as PackedEmbedding,
    dequantize as dequantize,
    quantize as quantize,
)
from .palette import Palette as Palette
