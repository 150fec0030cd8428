from .matrix import (
    Blocks as Blocks,
    Packable as Packable,
    QuantizedMatrix as QuantizedMatrix,
    is_setting as is_setting,
    stored_rows as stored_rows,
)
from .methods import METHODS as METHODS, read_matrices as read_matrices, settings_of as settings_of
