from . import parallel as parallel, quantization as quantization, recurrent as recurrent, triton as triton
from .adaptive_norm import AdaptiveBlock as AdaptiveBlock, CrossAttention as CrossAttention
from .attention import Attention as Attention, AttentionSpec as AttentionSpec
from .context import LayerContext as LayerContext
from .embedding import TokenEmbedding as TokenEmbedding
from .expert_choice import ExpertChoiceFFN as ExpertChoiceFFN, TokenChoiceFFN as TokenChoiceFFN
from .expert_mask import ExpertMask as ExpertMask
from .feedforward import (
    FeedForward as FeedForward,
    FeedForwardSpec as FeedForwardSpec,
    MixtureOfExperts as MixtureOfExperts,
)
from .kv_cache import KVCache as KVCache, MaskedCache as MaskedCache, NoCache as NoCache
from .linear import Linear as Linear
from .lora import Adapter as Adapter, LowRankUpdate as LowRankUpdate
from .norm import RMSNorm as RMSNorm
from .packed_layers import PackedLinear as PackedLinear, pack as pack
from .parallel import Collectives as Collectives, Tracks as Tracks
from .patches import patchify as patchify, unpatchify as unpatchify
from .rotary import Rotary as Rotary, apply_rotary as apply_rotary
from .soft_top_k import top_k_indices as top_k_indices, top_k_mask as top_k_mask
from .steering import Steering as Steering, SteeringChange as SteeringChange
from .time_embedding import TimeEmbedding as TimeEmbedding, sinusoidal as sinusoidal
