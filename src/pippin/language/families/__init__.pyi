from .config_json import (
    FAMILIES as FAMILIES,
    KV_SHARED as KV_SHARED,
    RECURRENT as RECURRENT,
    SHARED_FAMILIES as SHARED_FAMILIES,
    WRAPPERS as WRAPPERS,
    from_hf as from_hf,
    to_hf as to_hf,
)
from .family import ACTIVATIONS as ACTIVATIONS, Family as Family, TensorRule as TensorRule
from .gguf import (
    check_gguf as check_gguf,
    from_gguf as from_gguf,
    in_gguf as in_gguf,
    is_beside as is_beside,
    layout_of as layout_of,
    learned_numbers as learned_numbers,
    to_gguf as to_gguf,
)
from .gguf_layout import GGUFHeader as GGUFHeader, GGUFLayout as GGUFLayout
from .mlx_lm import MLXLayout as MLXLayout
from .tensor_names import (
    TensorSource as TensorSource,
    TensorSources as TensorSources,
    locate as locate,
    parts_of as parts_of,
    stored_name as stored_name,
    stored_parts as stored_parts,
    to_stored as to_stored,
    without_prefix as without_prefix,
)
