from . import export as export, quantize as quantize
from .export.gguf import export_gguf as export_gguf
from .kv_sharing import share_kv as share_kv, share_last_layers as share_last_layers
from .lora import LowRankModel as LowRankModel, merge as merge, unmerge as unmerge
from .recovery import recovery_adapter as recovery_adapter
