from . import parallel as parallel, quantization as quantization, recurrent as recurrent, triton as triton
from .attention.attention import Attention as Attention, AttentionSpec as AttentionSpec
from .attention.rotary import Rotary as Rotary, apply_rotary as apply_rotary
from .context import LayerContext as LayerContext
from .embedding import TokenEmbedding as TokenEmbedding
from .expert_mask import ExpertMask as ExpertMask
from .feedforward.expert_choice import ExpertChoiceFFN as ExpertChoiceFFN, TokenChoiceFFN as TokenChoiceFFN
from .feedforward.feedforward import (
    FeedForward as FeedForward,
    FeedForwardSpec as FeedForwardSpec,
    MixtureOfExperts as MixtureOfExperts,
)
from .images.adaptive_norm import AdaptiveBlock as AdaptiveBlock, CrossAttention as CrossAttention
from .images.patches import patchify as patchify, unpatchify as unpatchify
from .images.time_embedding import TimeEmbedding as TimeEmbedding, sinusoidal as sinusoidal
from .kv_cache import KVCache as KVCache, MaskedCache as MaskedCache, NoCache as NoCache
from .linear import Linear as Linear
from .lora import Adapter as Adapter, LowRankUpdate as LowRankUpdate
from .norm import RMSNorm as RMSNorm
from .packed_layers import PackedLinear as PackedLinear, pack as pack
from .parallel import Collectives as Collectives, Tracks as Tracks
from .soft_top_k import top_k_indices as top_k_indices, top_k_mask as top_k_mask
from .steering import Steering as Steering, SteeringChange as SteeringChange
