from .config_json import (
    FAMILIES as FAMILIES,
    KV_SHARED as KV_SHARED,
    RECURRENT as RECURRENT,
    from_hf as from_hf,
    to_hf as to_hf,
)
from .family import ACTIVATIONS as ACTIVATIONS, Family as Family, TensorRule as TensorRule
from .gguf import (
    GEMMA_GGUF_NAMES as GEMMA_GGUF_NAMES,
    GGUF_FAMILIES as GGUF_FAMILIES,
    GGUF_NAMES as GGUF_NAMES,
    PERMUTED as PERMUTED,
    from_gguf as from_gguf,
    gguf_name as gguf_name,
    gguf_tensor as gguf_tensor,
)
from .phi import long_context as long_context
from .tensor_names import (
    TensorSource as TensorSource,
    locate as locate,
    parts_of as parts_of,
    stored_name as stored_name,
    stored_parts as stored_parts,
    to_stored as to_stored,
    without_prefix as without_prefix,
)
